-- How a file of version 2 reads as one of this version, for those who may only read. Temporary views hide the tables.

CREATE TEMP VIEW runs AS SELECT rowid AS number, *, NULL AS policy_state, 0 AS policy_seq, NULL AS settings_sha256
FROM main.runs;
CREATE TEMP VIEW IF NOT EXISTS tasks AS SELECT *, NULL AS asked, NULL AS answers, NULL AS added_by, NULL AS model FROM main.tasks;

-- "run_running" is called as in version 3.
CREATE TEMP VIEW other_events AS
SELECT run_id, seq, at, task_id, attempt, detail, CASE
    WHEN kind <> 'run_running' THEN kind
    WHEN EXISTS (SELECT 1 FROM main.other_events AS earlier
        WHERE earlier.run_id = e.run_id AND earlier.seq < e.seq AND earlier.kind = 'run_running') THEN 'run_resumed'
    ELSE 'run_started' END AS kind
FROM main.other_events AS e;
