-- Version 2. Crashes are counted, sessions confirmed, a person can be asked; large texts are stored once. A task's edges
-- stand in its own row: a row for each would cost as much as all else that is written of the task when the run begins.
-- `tasks` and `messages` get row ids: their rows are wide, and a table without row ids gives each row of more than a
-- quarter page an overflow page of its own. Foreign keys are off while this runs, and checked at its end.
-- Others than its owner can send a run notes.

-- Every text of more than 64 KiB, once, however many results and messages say it.
CREATE TABLE blobs (
    sha256 BLOB NOT NULL PRIMARY KEY,    -- of the text in UTF-8
    size INTEGER NOT NULL,               -- bytes in UTF-8
    content TEXT NOT NULL
) STRICT;

DROP VIEW events;
DROP VIEW attempts;

-- One row for each task, with its last attempt and its result.
CREATE TABLE new_tasks (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    task_id TEXT NOT NULL,
    position INTEGER NOT NULL,           -- the order in which the tasks were given, from 0
    status TEXT NOT NULL DEFAULT 'pending' CHECK (
        status = 'pending' OR status = 'running' OR status = 'completed' OR status = 'failed' OR
        status = 'skipped' OR status = 'cancelled' OR status = 'waiting_input'),
    backend TEXT,                        -- the one that the plan names, if it does
    attempt INTEGER NOT NULL DEFAULT 0,  -- the last attempt, 0 before the first one; what follows is told of it
    attempt_status TEXT CHECK (
        attempt_status = 'running' OR attempt_status = 'completed' OR attempt_status = 'failed' OR
        attempt_status = 'skipped' OR attempt_status = 'retried' OR attempt_status = 'interrupted' OR
        attempt_status = 'cancelled'),
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
    run_id, task_id, position, status, backend, attempt, attempt_status, attempt_backend, session_id, started_at,
    started_seq, ended_at, ended_seq, error_kind, error, input_tokens, output_tokens, cost_usd, duration_s, checksum,
    depends_on, spec, prompt, text, data)
SELECT run_id, task_id, position, status, backend, attempt, attempt_status, attempt_backend, session_id, started_at,
    started_seq, ended_at, ended_seq, error_kind, error, input_tokens, output_tokens, cost_usd, duration_s, checksum,
    (SELECT json_group_array(depends_on) FROM (
        SELECT depends_on FROM dependencies AS d
        WHERE d.run_id = tasks.run_id AND d.task_id = tasks.task_id ORDER BY d.position)),
    spec, prompt, text, data
FROM tasks ORDER BY run_id, position;

DROP TABLE dependencies;

DROP TABLE tasks;
ALTER TABLE new_tasks RENAME TO tasks;

-- Every edge, for reading: `task_id` waits for `depends_on`.
CREATE VIEW dependencies AS
SELECT tasks.run_id, tasks.task_id, edge.key AS position, edge.value AS depends_on
FROM tasks, json_each(tasks.depends_on) AS edge;

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

CREATE TABLE new_messages (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    seq INTEGER NOT NULL,                -- the number of the change that appended it: the order within a task
    attempt INTEGER NOT NULL,            -- 0 for a message of a person who went on with the conversation
    role TEXT NOT NULL,
    at TEXT NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    checksum BLOB NOT NULL,              -- SHA-256 over run, task, role and content
    content_sha256 BLOB REFERENCES blobs (sha256),
    content TEXT,                        -- NULL when it is in blobs
    PRIMARY KEY (run_id, task_id, seq),
    FOREIGN KEY (run_id, task_id) REFERENCES tasks (run_id, task_id)
) STRICT;

INSERT INTO new_messages (
    run_id, task_id, seq, attempt, role, at, input_tokens, output_tokens, checksum, content)
SELECT run_id, task_id, seq, attempt, role, at, input_tokens, output_tokens, checksum, content
FROM messages ORDER BY run_id, seq;

DROP TABLE messages;
ALTER TABLE new_messages RENAME TO messages;

-- Who refers to a text, for taking away those that nobody does.
CREATE INDEX tasks_text_sha256 ON tasks (text_sha256) WHERE text_sha256 IS NOT NULL;
CREATE INDEX tasks_data_sha256 ON tasks (data_sha256) WHERE data_sha256 IS NOT NULL;
CREATE INDEX messages_content_sha256 ON messages (content_sha256) WHERE content_sha256 IS NOT NULL;

-- What others have to say to the owner of a run. No part of its changes: anybody may add one.
CREATE TABLE notes (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    number INTEGER NOT NULL,             -- counts the run's notes from 1, in the order of their arrival
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT,                        -- of which task, if of one
    body TEXT NOT NULL,                  -- JSON
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;

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

PRAGMA user_version = 2;
