-- Version 1 of plait's database. Times are UTC, ISO 8601 with milliseconds. JSON is text.
-- Versions only go up: a later one is a file of its own beside this one, applied after it.
-- Statuses are checked with OR: an IN list becomes a table of its own, built and searched for every statement.

CREATE TABLE runs (
    run_id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (
        status = 'running' OR status = 'queued' OR status = 'waiting_input' OR status = 'completed' OR
        status = 'failed' OR status = 'cancelling' OR status = 'cancelled'),
    created_at TEXT NOT NULL,
    started_at TEXT,
    ended_at TEXT,
    error TEXT,
    last_seq INTEGER NOT NULL,           -- the number of the last change applied to this run
    epoch INTEGER NOT NULL,              -- how many owners the run has had
    owner_id TEXT,                       -- the owner, NULL when nobody runs it
    owner_host TEXT,
    owner_boot_id TEXT,
    owner_pid INTEGER,
    owner_process_started TEXT,
    owner_claimed_at TEXT,
    lease_expires_at REAL,               -- Unix time in seconds
    claims TEXT NOT NULL,                -- JSON: [number of the claiming change, owner_id] for every epoch
    settings TEXT NOT NULL
) STRICT;

-- One row for each task, with its last attempt and its result.
CREATE TABLE tasks (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    task_id TEXT NOT NULL,
    position INTEGER NOT NULL,           -- the order in which the tasks were given, from 0
    status TEXT NOT NULL DEFAULT 'pending' CHECK (
        status = 'pending' OR status = 'running' OR status = 'completed' OR status = 'failed' OR
        status = 'skipped' OR status = 'cancelled' OR status = 'waiting_input'),
    backend TEXT,                        -- the one that the plan names, if it does
    prompt TEXT NOT NULL,
    spec TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,  -- the last attempt, 0 before the first one; what follows is told of it
    attempt_status TEXT CHECK (
        attempt_status = 'running' OR attempt_status = 'completed' OR attempt_status = 'failed' OR
        attempt_status = 'skipped' OR attempt_status = 'retried' OR attempt_status = 'interrupted' OR
        attempt_status = 'cancelled'),
    attempt_backend TEXT,
    session_id TEXT,
    started_at TEXT,
    started_seq INTEGER,                 -- the number of the change that started it
    ended_at TEXT,
    ended_seq INTEGER,
    error_kind TEXT,
    error TEXT,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cost_usd REAL,
    duration_s REAL,
    text TEXT,                           -- the result
    data TEXT,                           -- the structured result as JSON
    checksum BLOB,                       -- SHA-256 over run, task and result
    PRIMARY KEY (run_id, task_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE dependencies (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    depends_on TEXT NOT NULL,
    PRIMARY KEY (run_id, task_id, position),
    FOREIGN KEY (run_id, task_id) REFERENCES tasks (run_id, task_id),
    FOREIGN KEY (run_id, depends_on) REFERENCES tasks (run_id, task_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE earlier_attempts (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (
        status = 'retried' OR status = 'interrupted' OR status = 'failed' OR status = 'skipped' OR
        status = 'completed' OR status = 'cancelled'),
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

-- Every attempt of every task, for reading.
CREATE VIEW attempts AS
SELECT run_id, task_id, attempt, status, backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s, started_seq, ended_seq
FROM earlier_attempts
UNION ALL
SELECT run_id, task_id, attempt, attempt_status, attempt_backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s, started_seq, ended_seq
FROM tasks WHERE attempt > 0;

CREATE TABLE sessions (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,            -- the last attempt that used it; 0 when a person went on with it
    opened_at TEXT NOT NULL,
    PRIMARY KEY (run_id, task_id, session_id),
    FOREIGN KEY (run_id, task_id) REFERENCES tasks (run_id, task_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE messages (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    seq INTEGER NOT NULL,                -- the number of the change that appended it: the order within a task
    attempt INTEGER NOT NULL,            -- 0 for a message of a person who went on with the conversation
    role TEXT NOT NULL,
    at TEXT NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    content TEXT NOT NULL,
    checksum BLOB NOT NULL,              -- SHA-256 over run, task, role and content
    PRIMARY KEY (run_id, task_id, seq),
    FOREIGN KEY (run_id, task_id) REFERENCES tasks (run_id, task_id)
) STRICT, WITHOUT ROWID;

-- What happened besides starts and completions, which are in the attempts already.
CREATE TABLE other_events (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    seq INTEGER NOT NULL,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT,
    attempt INTEGER,
    detail TEXT NOT NULL,
    PRIMARY KEY (run_id, seq)
) STRICT, WITHOUT ROWID;

-- The history of every run, for reading; seq is the number of the change.
CREATE VIEW events AS
SELECT run_id, seq, at, kind, task_id, attempt, NULL AS backend, detail FROM other_events
UNION ALL
SELECT run_id, started_seq, started_at, 'task_started', task_id, attempt, backend, '{}' FROM attempts
UNION ALL
SELECT run_id, ended_seq, ended_at, 'task_completed', task_id, attempt, NULL,
    '{"input_tokens":' || input_tokens || ',"output_tokens":' || output_tokens || '}'
FROM tasks WHERE attempt_status = 'completed';

PRAGMA application_id = 1886151028;  -- "plat"
PRAGMA user_version = 1;
