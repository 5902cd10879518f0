-- The tables of plait's database. Times are UTC, ISO 8601 with milliseconds. JSON is text.
-- Statuses are checked with OR: an IN list becomes a table of its own, built and searched for every statement.
--
-- Every event is added at the end of narrow tables, with integers for keys, and hardly a row is changed: a start is a
-- row of `starts`, an end a row of `ends`. A person asks by the views.
--
-- Ids: a run has a number. A task's id is that number * 2^32 + its position in the run, which counts from 0. A start's
-- id, and a message's, is that number * 2^32 + the number of the change that it came with. So the rows of a run lie
-- together, in the order in which they came. A number is never given twice.

-- Every text of more than 64 KiB, once, however many results and messages say it.
CREATE TABLE blobs (
    sha256 BLOB NOT NULL PRIMARY KEY,    -- of the text in UTF-8
    size INTEGER NOT NULL,               -- bytes in UTF-8
    content TEXT NOT NULL
) STRICT;

CREATE TABLE runs (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL UNIQUE,
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
    policy_state TEXT,                   -- JSON: what the run's policy wants to know next time
    policy_seq INTEGER NOT NULL DEFAULT 0,  -- the number of the change that says so
    settings_sha256 BLOB REFERENCES blobs (sha256),
    settings TEXT NOT NULL               -- '' when they are in blobs
) STRICT;

CREATE INDEX runs_settings_sha256 ON runs (settings_sha256) WHERE settings_sha256 IS NOT NULL;

-- One row for each task, as it was given.
CREATE TABLE given_tasks (
    id INTEGER NOT NULL PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES runs (number),
    task_id TEXT NOT NULL,
    -- Its status where its last attempt does not say it, as when it was reopened.
    set_to TEXT CHECK (set_to = 'pending' OR set_to = 'waiting_input' OR set_to = 'cancelled'),
    crashes INTEGER NOT NULL DEFAULT 0,  -- how often an owner died while the task ran
    answers TEXT,                        -- JSON: what persons have answered so far
    backend TEXT,                        -- the one that the plan names, if it does
    added_by TEXT,                       -- the task that added it to the run, NULL when it was there from the beginning
    depends_on TEXT NOT NULL,            -- JSON: the ids of the tasks that it waits for
    spec TEXT NOT NULL,
    prompt TEXT NOT NULL,
    UNIQUE (run, task_id)
) STRICT;

-- One row for each attempt, from its start on.
CREATE TABLE starts (
    id INTEGER NOT NULL PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES given_tasks (id),
    attempt INTEGER NOT NULL,
    backend TEXT NOT NULL,
    session_id TEXT,
    session_confirmed INTEGER NOT NULL DEFAULT 0 CHECK (session_confirmed = 0 OR session_confirmed = 1),
    started_at TEXT NOT NULL,
    UNIQUE (task, attempt)
) STRICT;

-- One row for each attempt that has ended, with the id of its start, and its result.
CREATE TABLE ends (
    id INTEGER NOT NULL PRIMARY KEY REFERENCES starts (id),
    end_id INTEGER NOT NULL,             -- the run's number * 2^32 + the number of the change that ended it
    status TEXT NOT NULL CHECK (
        status = 'completed' OR status = 'retried' OR status = 'interrupted' OR status = 'failed' OR
        status = 'skipped' OR status = 'asked' OR status = 'cancelled'),
    ended_at TEXT,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cost_usd REAL,
    duration_s REAL,
    model TEXT,                          -- the one that answered, as the backend names it; NULL where that is not known
    error_kind TEXT,
    error TEXT,
    question TEXT,                       -- what a person is asked, while the task is waiting_input
    asked TEXT,                          -- the rest of that question as JSON, where the task itself asks
    checksum BLOB,                       -- SHA-256 over run, task and result
    prompt_checksum BLOB,                -- SHA-256 over run, task, 'user' and prompt
    text_checksum BLOB,                  -- the same of 'assistant' and text, where the result has data beside the text
    text_sha256 BLOB REFERENCES blobs (sha256),
    data_sha256 BLOB REFERENCES blobs (sha256),
    prompt_sha256 BLOB REFERENCES blobs (sha256),
    text TEXT,                           -- the result; NULL when it is in blobs
    data TEXT,                           -- the structured result as JSON; NULL when it is in blobs
    prompt TEXT                          -- what was asked, where that and text are all that was said
) STRICT;

CREATE INDEX completions ON ends (end_id) WHERE status = 'completed';
CREATE INDEX ends_text_sha256 ON ends (text_sha256) WHERE text_sha256 IS NOT NULL;
CREATE INDEX ends_data_sha256 ON ends (data_sha256) WHERE data_sha256 IS NOT NULL;
CREATE INDEX ends_prompt_sha256 ON ends (prompt_sha256) WHERE prompt_sha256 IS NOT NULL;

-- Messages that are more than an end's prompt and text.
CREATE TABLE other_messages (
    id INTEGER NOT NULL PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES given_tasks (id),
    attempt INTEGER NOT NULL,            -- 0 for a message of a person who went on with the conversation
    role TEXT NOT NULL,
    at TEXT NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    checksum BLOB NOT NULL,              -- SHA-256 over run, task, role and content
    content_sha256 BLOB REFERENCES blobs (sha256),
    content TEXT                         -- NULL when it is in blobs
) STRICT;

CREATE INDEX other_messages_task ON other_messages (task);
CREATE INDEX other_messages_content_sha256 ON other_messages (content_sha256) WHERE content_sha256 IS NOT NULL;

CREATE TABLE sessions (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    task_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,            -- the last attempt that used it; 0 when a person went on with it
    opened_at TEXT NOT NULL,
    PRIMARY KEY (run_id, task_id, session_id)
) STRICT, WITHOUT ROWID;

-- Events beside starts and completions, which are in `starts` and `ends` already.
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

-- Requests of others to the owner of a run. No part of the run's changes: anybody may add a note.
CREATE TABLE notes (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    number INTEGER NOT NULL,             -- counts the run's notes from 1, in the order of their arrival
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT,                        -- of which task, if of one
    body TEXT NOT NULL,                  -- JSON
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;

-- Every task with its last attempt and its result, for reading.
CREATE VIEW tasks AS
SELECT r.run_id, t.task_id, t.id & 4294967295 AS position,
    coalesce(t.set_to, CASE
        WHEN s.id IS NULL OR e.status IN ('retried', 'interrupted') THEN 'pending'
        WHEN e.id IS NULL THEN 'running'
        WHEN e.status = 'asked' THEN 'waiting_input' ELSE e.status END) AS status,
    t.backend, t.added_by, coalesce(s.attempt, 0) AS attempt,
    iif(s.id IS NULL, NULL, coalesce(e.status, 'running')) AS attempt_status, s.backend AS attempt_backend,
    s.session_id, coalesce(s.session_confirmed, 0) AS session_confirmed, t.crashes, s.started_at,
    s.id & 4294967295 AS started_seq, e.ended_at, e.end_id & 4294967295 AS ended_seq, e.error_kind, e.error,
    iif(coalesce(t.set_to, e.status) IN ('waiting_input', 'asked'), e.question, NULL) AS question,
    iif(coalesce(t.set_to, e.status) IN ('waiting_input', 'asked'), e.asked, NULL) AS asked, t.answers,
    coalesce(e.input_tokens, 0) AS input_tokens, coalesce(e.output_tokens, 0) AS output_tokens, e.cost_usd,
    e.duration_s, e.model, t.depends_on, t.spec, t.prompt,
    e.checksum, e.text_sha256, e.data_sha256, e.text, e.data
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run
    LEFT JOIN starts AS s ON s.id = (SELECT id FROM starts WHERE task = t.id ORDER BY attempt DESC LIMIT 1)
    LEFT JOIN ends AS e ON e.id = s.id;

-- Every edge, for reading: `task_id` waits for `depends_on`.
CREATE VIEW dependencies AS
SELECT r.run_id, t.task_id, edge.key AS position, edge.value AS depends_on
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run, json_each(t.depends_on) AS edge;

-- Every attempt of every task, for reading.
CREATE VIEW attempts AS
SELECT r.run_id, t.task_id, s.attempt, coalesce(e.status, 'running') AS status, s.backend, e.model, s.session_id,
    s.started_at, e.ended_at, e.error_kind, e.error, coalesce(e.input_tokens, 0) AS input_tokens,
    coalesce(e.output_tokens, 0) AS output_tokens, e.cost_usd, e.duration_s, s.id & 4294967295 AS started_seq,
    e.end_id & 4294967295 AS ended_seq
FROM starts AS s JOIN given_tasks AS t ON t.id = s.task JOIN runs AS r ON r.number = t.run
    LEFT JOIN ends AS e ON e.id = s.id;

-- Every message, for reading, in order of seq and part within a task. Part 0 is one of other_messages, 1 an end's
-- prompt, which counts as one change before it, 2 and 3 its text: 2 is checked as the result that it is, 3 like others.
CREATE VIEW messages AS
SELECT r.run_id, t.task_id, m.id & 4294967295 AS seq, 0 AS part, m.attempt, m.role, m.at, m.input_tokens,
    m.output_tokens, m.checksum, m.content_sha256, m.content
FROM other_messages AS m JOIN given_tasks AS t ON t.id = m.task JOIN runs AS r ON r.number = t.run
UNION ALL
SELECT r.run_id, t.task_id, (e.end_id & 4294967295) - 1, 1, s.attempt, 'user', e.ended_at, 0, 0, e.prompt_checksum,
    e.prompt_sha256, e.prompt
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run JOIN starts AS s ON s.task = t.id JOIN ends AS e ON e.id = s.id
WHERE e.prompt_checksum IS NOT NULL
UNION ALL
SELECT r.run_id, t.task_id, e.end_id & 4294967295, iif(e.text_checksum IS NULL, 2, 3), s.attempt, 'assistant',
    e.ended_at, e.input_tokens, e.output_tokens, coalesce(e.text_checksum, e.checksum), e.text_sha256, e.text
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run JOIN starts AS s ON s.task = t.id JOIN ends AS e ON e.id = s.id
WHERE e.prompt_checksum IS NOT NULL AND (e.checksum IS NOT NULL OR e.text IS NOT NULL OR e.text_sha256 IS NOT NULL);

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

PRAGMA application_id = 1886151028;  -- "plat"
PRAGMA user_version = 100;           -- the format; 1 to 5 were used in development
