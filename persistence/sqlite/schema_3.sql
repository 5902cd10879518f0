-- Version 3. Tasks ask persons and add tasks, a policy remembers. An attempt may end as asked: a CHECK cannot be changed,
-- so `tasks` and `earlier_attempts` are made anew. Foreign keys are off while this runs, and checked at its end.

ALTER TABLE runs ADD COLUMN policy_state TEXT;  -- JSON: what the run's policy wants to know next time
ALTER TABLE runs ADD COLUMN policy_seq INTEGER NOT NULL DEFAULT 0;  -- the number of the change that says so

DROP VIEW events;
DROP VIEW attempts;
DROP VIEW dependencies;
DROP TRIGGER keep_earlier_attempt;

-- One row for each task, with its last attempt and its result.
CREATE TABLE new_tasks (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    task_id TEXT NOT NULL,
    position INTEGER NOT NULL,           -- the order in which the tasks were given, from 0
    status TEXT NOT NULL DEFAULT 'pending' CHECK (
        status = 'pending' OR status = 'running' OR status = 'completed' OR status = 'failed' OR
        status = 'skipped' OR status = 'cancelled' OR status = 'waiting_input'),
    backend TEXT,                        -- the one that the plan names, if it does
    added_by TEXT,                       -- the task that added it to the run, NULL when it was there from the beginning
    attempt INTEGER NOT NULL DEFAULT 0,  -- the last attempt, 0 before the first one; what follows is told of it
    attempt_status TEXT CHECK (
        attempt_status = 'running' OR attempt_status = 'completed' OR attempt_status = 'failed' OR
        attempt_status = 'skipped' OR attempt_status = 'retried' OR attempt_status = 'interrupted' OR
        attempt_status = 'cancelled' OR attempt_status = 'asked'),
    attempt_backend TEXT,
    session_id TEXT,
    session_confirmed INTEGER NOT NULL DEFAULT 0 CHECK (session_confirmed = 0 OR session_confirmed = 1),
    crashes INTEGER NOT NULL DEFAULT 0,  -- how often an owner died while the task ran
    started_at TEXT,
    started_seq INTEGER,                 -- the number of the change that started it
    ended_at TEXT,
    ended_seq INTEGER,
    error_kind TEXT,
    error TEXT,
    question TEXT,                       -- what a person is asked while it is waiting_input
    asked TEXT,                          -- the rest of that question as JSON, where the task itself asks
    answers TEXT,                        -- JSON: what persons have answered so far
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cost_usd REAL,
    duration_s REAL,
    checksum BLOB,                       -- SHA-256 over run, task and result
    text_sha256 BLOB REFERENCES blobs (sha256),
    data_sha256 BLOB REFERENCES blobs (sha256),
    depends_on TEXT NOT NULL,            -- JSON: the ids of the tasks that it waits for
    spec TEXT NOT NULL,
    prompt TEXT NOT NULL,
    text TEXT,                           -- the result; NULL when it is in blobs
    data TEXT,                           -- the structured result as JSON; NULL when it is in blobs
    PRIMARY KEY (run_id, task_id)
) STRICT;

INSERT INTO new_tasks (
    run_id, task_id, position, status, backend, attempt, attempt_status, attempt_backend, session_id, session_confirmed,
    crashes, started_at, started_seq, ended_at, ended_seq, error_kind, error, question, input_tokens, output_tokens,
    cost_usd, duration_s, checksum, text_sha256, data_sha256, depends_on, spec, prompt, text, data)
SELECT run_id, task_id, position, status, backend, attempt, attempt_status, attempt_backend, session_id, session_confirmed,
    crashes, started_at, started_seq, ended_at, ended_seq, error_kind, error, question, input_tokens, output_tokens,
    cost_usd, duration_s, checksum, text_sha256, data_sha256, depends_on, spec, prompt, text, data
FROM tasks ORDER BY rowid;

DROP TABLE tasks;
ALTER TABLE new_tasks RENAME TO tasks;

CREATE INDEX tasks_text_sha256 ON tasks (text_sha256) WHERE text_sha256 IS NOT NULL;
CREATE INDEX tasks_data_sha256 ON tasks (data_sha256) WHERE data_sha256 IS NOT NULL;

CREATE TABLE new_earlier_attempts (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (
        status = 'retried' OR status = 'interrupted' OR status = 'failed' OR status = 'skipped' OR
        status = 'completed' OR status = 'cancelled' OR status = 'asked'),
    backend TEXT NOT NULL,
    session_id TEXT,
    started_at TEXT NOT NULL,
    started_seq INTEGER NOT NULL,
    ended_at TEXT,
    ended_seq INTEGER,
    error_kind TEXT,
    error TEXT,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    cost_usd REAL,
    duration_s REAL,
    PRIMARY KEY (run_id, task_id, attempt),
    FOREIGN KEY (run_id, task_id) REFERENCES tasks (run_id, task_id)
) STRICT, WITHOUT ROWID;

INSERT INTO new_earlier_attempts (
    run_id, task_id, attempt, status, backend, session_id, started_at, started_seq, ended_at, ended_seq, error_kind,
    error, input_tokens, output_tokens, cost_usd, duration_s)
SELECT run_id, task_id, attempt, status, backend, session_id, started_at, started_seq, ended_at, ended_seq, error_kind,
    error, input_tokens, output_tokens, cost_usd, duration_s
FROM earlier_attempts ORDER BY run_id, task_id, attempt;

DROP TABLE earlier_attempts;
ALTER TABLE new_earlier_attempts RENAME TO earlier_attempts;

-- When a task starts again, its row turns to the new attempt; the one before is kept here.
CREATE TRIGGER keep_earlier_attempt AFTER UPDATE OF attempt ON tasks
WHEN old.attempt > 0 AND new.attempt <> old.attempt
BEGIN
    INSERT INTO earlier_attempts (
        run_id, task_id, attempt, status, backend, session_id, started_at, started_seq, ended_at, ended_seq,
        error_kind, error, input_tokens, output_tokens, cost_usd, duration_s)
    VALUES (
        old.run_id, old.task_id, old.attempt, old.attempt_status, old.attempt_backend, old.session_id,
        old.started_at, old.started_seq, old.ended_at, old.ended_seq, old.error_kind, old.error,
        old.input_tokens, old.output_tokens, old.cost_usd, old.duration_s);
END;

-- Every edge, for reading: `task_id` waits for `depends_on`.
CREATE VIEW dependencies AS
SELECT tasks.run_id, tasks.task_id, edge.key AS position, edge.value AS depends_on
FROM tasks, json_each(tasks.depends_on) AS edge;

-- Every attempt of every task, for reading.
CREATE VIEW attempts AS
SELECT run_id, task_id, attempt, status, backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s, started_seq, ended_seq
FROM earlier_attempts
UNION ALL
SELECT run_id, task_id, attempt, attempt_status, attempt_backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s, started_seq, ended_seq
FROM tasks WHERE attempt > 0;

-- The history of every run, for reading; seq is the number of the change. A completed attempt need not be the last one:
-- a result that was found damaged is asked for again.
CREATE VIEW events AS
SELECT run_id, seq, at, kind, task_id, attempt, NULL AS backend, detail FROM other_events
UNION ALL
SELECT run_id, started_seq, started_at, 'task_started', task_id, attempt, backend, '{}' FROM attempts
UNION ALL
SELECT run_id, ended_seq, ended_at, 'task_completed', task_id, attempt, NULL,
    '{"input_tokens":' || input_tokens || ',"output_tokens":' || output_tokens || '}'
FROM attempts WHERE status = 'completed';

-- For tasks in their order, and for the place of those that are added: without it, each addition would count them all.
CREATE INDEX tasks_position ON tasks (run_id, position);

-- For events page by page. They cost about 2 % of what it takes to run and store a task.
CREATE INDEX tasks_started_seq ON tasks (run_id, started_seq) WHERE started_seq IS NOT NULL;
CREATE INDEX tasks_completed_seq ON tasks (run_id, ended_seq) WHERE attempt_status = 'completed';
CREATE INDEX earlier_attempts_started_seq ON earlier_attempts (run_id, started_seq);
CREATE INDEX earlier_attempts_completed_seq ON earlier_attempts (run_id, ended_seq) WHERE status = 'completed';

-- "run_running" told neither that a run began nor that it went on.
UPDATE other_events SET kind = 'run_resumed' WHERE kind = 'run_running' AND EXISTS (
    SELECT 1 FROM other_events AS earlier WHERE earlier.run_id = other_events.run_id
        AND earlier.seq < other_events.seq AND (earlier.kind = 'run_running' OR earlier.kind = 'run_resumed'));
UPDATE other_events SET kind = 'run_started' WHERE kind = 'run_running';

PRAGMA user_version = 3;
