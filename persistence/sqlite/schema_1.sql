-- Version 1 of plait's database. Times are UTC, ISO 8601 with milliseconds. JSON is text.
-- Versions only go up: a later one is a file of its own beside this one, applied after it.

CREATE TABLE runs (
    run_id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN
        ('queued', 'running', 'waiting_input', 'completed', 'failed', 'cancelling', 'cancelled')),
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

CREATE TABLE tasks (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    task_id TEXT NOT NULL,
    position INTEGER NOT NULL,           -- the order in which the tasks were given, from 0
    status TEXT NOT NULL DEFAULT 'pending' CHECK (status IN
        ('pending', 'running', 'waiting_input', 'completed', 'failed', 'skipped', 'cancelled')),
    attempt INTEGER NOT NULL DEFAULT 0,  -- the last attempt, 0 before the first one
    backend TEXT,
    prompt TEXT NOT NULL,
    spec TEXT NOT NULL,
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

CREATE TABLE attempts (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN
        ('running', 'completed', 'failed', 'skipped', 'retried', 'interrupted', 'cancelled')),
    backend TEXT NOT NULL,
    session_id TEXT,
    started_at TEXT NOT NULL,
    ended_at TEXT,
    error_kind TEXT,
    error TEXT,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cost_usd REAL,
    duration_s REAL,
    seq INTEGER NOT NULL,                -- the number of the change that started it
    PRIMARY KEY (run_id, task_id, attempt),
    FOREIGN KEY (run_id, task_id) REFERENCES tasks (run_id, task_id)
) STRICT, WITHOUT ROWID;

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

CREATE TABLE events (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    seq INTEGER NOT NULL,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT,
    attempt INTEGER,
    detail TEXT NOT NULL,
    PRIMARY KEY (run_id, seq)
) STRICT, WITHOUT ROWID;

PRAGMA application_id = 1886151028;  -- "plat"
PRAGMA user_version = 1;
