-- How a file of version 4 reads as one of this version, for those who may only read. Temporary views hide the tables.
-- They are made of what has the same name and columns in this version: the file may be brought up to date meanwhile.

CREATE TEMP VIEW IF NOT EXISTS runs AS SELECT rowid AS number, * FROM main.runs;
CREATE TEMP VIEW IF NOT EXISTS messages AS SELECT *, 0 AS part FROM main.messages;

CREATE TEMP VIEW events AS
SELECT run_id, seq, at, kind, task_id, attempt, NULL AS backend, detail FROM other_events
UNION ALL
SELECT run_id, started_seq, started_at, 'task_started', task_id, attempt, backend, '{}' FROM attempts
UNION ALL
SELECT run_id, ended_seq, ended_at, 'task_completed', task_id, attempt, NULL,
    '{"input_tokens":' || input_tokens || ',"output_tokens":' || output_tokens || '}'
FROM attempts WHERE status = 'completed';

-- For the sizes of runs alone.
CREATE TEMP VIEW given_tasks AS
SELECT r.number << 32 | t.position AS id, t.answers, t.spec, t.prompt FROM tasks AS t JOIN runs AS r USING (run_id);
CREATE TEMP VIEW ends AS
SELECT r.number << 32 | a.started_seq AS id, a.error, t.question, t.asked, t.text_sha256, t.data_sha256, t.text, t.data,
    NULL AS prompt_sha256, NULL AS prompt
FROM attempts AS a JOIN runs AS r USING (run_id)
    LEFT JOIN tasks AS t ON t.run_id = a.run_id AND t.task_id = a.task_id AND t.attempt = a.attempt
WHERE a.status <> 'running';
CREATE TEMP VIEW other_messages AS
SELECT r.number << 32 | m.seq AS id, m.content_sha256, m.content FROM messages AS m JOIN runs AS r USING (run_id);
