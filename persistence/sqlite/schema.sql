-- The tables of plait's database. Times are UTC, ISO 8601 with milliseconds. JSON is text.
-- Statuses are checked with OR, because SQLite builds and searches a table for an IN list in every statement.
--
-- Changes append rows to narrow tables with integer keys, and rarely update rows: a start is a row of `starts`, an end
-- a row of `ends`. The views are for queries by people.
--
-- Every row has CRC-32 checksums (see checksum.py), but a text in `blobs` has its key, and the settings in pieces have
-- `settings_checksum`.
--
-- Ids: a run has a number, which is never used twice. The id of a task is number * 2^32 + position in the run (from 0).
-- The id of a start or of a message is number * 2^32 + sequence number of the change. So the rows of a run lie
-- together, in the order of the changes.
--
-- A run that is made like an earlier run stores the same texts by reference: `copy_of` is the row of the earlier run that
-- holds them, and is never itself a copy. A checksum is over the texts of the own row or of that row, with the own id.
-- Before the row with the texts is deleted or changed, the texts move to the first copy.

-- Every text of more than 64 KiB, stored once for all results and messages with the same text, and the pieces of settings.
CREATE TABLE blobs (
    sha256 BLOB NOT NULL PRIMARY KEY,    -- of the text in UTF-8
    size INTEGER NOT NULL,               -- bytes in UTF-8
    content TEXT NOT NULL
) STRICT;

-- Without an owner, lease_expires_at is the time from which a run that waits for a person can go on: the deadline of a
-- question, or 0 once a person has answered.
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
    epoch INTEGER NOT NULL,              -- the number of claims
    owner_id TEXT,                       -- the owner; NULL without an owner
    owner_host TEXT,
    owner_boot_id TEXT,
    owner_pid INTEGER,
    owner_process_started TEXT,
    owner_claimed_at TEXT,
    lease_expires_at REAL,               -- Unix time in seconds
    claims TEXT NOT NULL,                -- JSON: [number of the claiming change, owner_id] for every epoch
    policy_state TEXT,                   -- JSON: the state of the run's policy, for its next call
    policy_seq INTEGER NOT NULL DEFAULT 0,  -- the number of the change with the state
    input_tokens INTEGER NOT NULL DEFAULT 0,  -- the sums over all attempts, here and below
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,   -- parts of input_tokens
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,    -- a part of output_tokens
    cost_is_partial INTEGER NOT NULL DEFAULT 0 CHECK (cost_is_partial = 0 OR cost_is_partial = 1),
    cost_usd REAL,                       -- NULL if unknown; a sum of the known costs if cost_is_partial
    row_checksum INTEGER,                -- over the columns above without epoch, with `number`
    settings_checksum INTEGER NOT NULL,  -- over run_id and settings
    settings TEXT NOT NULL               -- '' if the settings are in settings_pieces
) STRICT;

-- Settings of more than 64 KiB, in pieces (see pieces.py): runs with similar inputs share most pieces.
CREATE TABLE settings_pieces (
    run INTEGER NOT NULL REFERENCES runs (number),
    position INTEGER NOT NULL,
    sha256 BLOB NOT NULL REFERENCES blobs (sha256),
    PRIMARY KEY (run, position)
) STRICT, WITHOUT ROWID;

CREATE INDEX settings_pieces_sha256 ON settings_pieces (sha256);

-- One row for each task, with the values of the plan.
CREATE TABLE given_tasks (
    id INTEGER NOT NULL PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES runs (number),
    task_id TEXT NOT NULL,
    -- The status, if the status does not follow from the last attempt, as for a reopened task; else NULL.
    set_to TEXT CHECK (set_to = 'pending' OR set_to = 'waiting_input' OR set_to = 'cancelled'),
    crashes INTEGER NOT NULL DEFAULT 0,  -- the deaths of owners that count for the task
    answers TEXT,                        -- JSON: the answers of persons
    backend TEXT,                        -- the backend that the plan names; NULL for the default
    added_by TEXT,                       -- the task that added the task; NULL if RunCreated or the policy did
    row_checksum INTEGER NOT NULL,       -- over the row, with the texts of `copy_of` instead of the id
    copy_of INTEGER REFERENCES given_tasks (id),  -- the task with the three texts, which are then NULL here
    depends_on TEXT,                     -- JSON: the ids of the tasks that have to end first
    spec TEXT,
    prompt TEXT,
    UNIQUE (run, task_id)
) STRICT;

CREATE INDEX given_tasks_copy_of ON given_tasks (copy_of) WHERE copy_of IS NOT NULL;

-- One row for each attempt.
CREATE TABLE starts (
    id INTEGER NOT NULL PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES given_tasks (id),
    attempt INTEGER NOT NULL,
    backend TEXT NOT NULL,
    session_id TEXT,
    session_confirmed INTEGER NOT NULL DEFAULT 0 CHECK (session_confirmed = 0 OR session_confirmed = 1),
    started_at TEXT NOT NULL,
    row_checksum INTEGER NOT NULL,       -- over the row
    UNIQUE (task, attempt)
) STRICT;

-- One row for each ended attempt, with the result. The id is the id of the start.
CREATE TABLE ends (
    id INTEGER NOT NULL PRIMARY KEY REFERENCES starts (id),
    end_id INTEGER NOT NULL,             -- the run's number * 2^32 + the number of the change that ended it
    status TEXT NOT NULL CHECK (
        status = 'completed' OR status = 'retried' OR status = 'interrupted' OR status = 'failed' OR
        status = 'skipped' OR status = 'asked' OR status = 'cancelled'),
    ended_at TEXT,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,   -- parts of input_tokens
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,    -- a part of output_tokens
    cost_is_partial INTEGER NOT NULL DEFAULT 0 CHECK (cost_is_partial = 0 OR cost_is_partial = 1),
    cost_usd REAL,                       -- NULL if unknown; a sum of the known costs if cost_is_partial
    duration_s REAL,
    model TEXT,                          -- the model that answered, as the backend names it; NULL if unknown
    error_kind TEXT,
    error TEXT,
    question TEXT,                       -- the text for a person, while the task is waiting_input
    asked TEXT,                          -- more about the question as JSON, if the task itself asks
    row_checksum INTEGER NOT NULL,       -- over the columns above
    checksum INTEGER,                    -- over id, text and data; NULL without a result
    prompt_checksum INTEGER,             -- over id and prompt; NULL without a prompt
    text_sha256 BLOB REFERENCES blobs (sha256),
    data_sha256 BLOB REFERENCES blobs (sha256),
    prompt_sha256 BLOB REFERENCES blobs (sha256),
    copy_of INTEGER REFERENCES ends (id),  -- the end with the same text, data and prompt, which are then NULL here
    text TEXT,                           -- the result; NULL if in blobs or in `copy_of`
    data TEXT,                           -- the structured result as JSON; NULL if in blobs or in `copy_of`
    prompt TEXT                          -- the prompt, if prompt and text are the whole conversation of the attempt
) STRICT;

CREATE INDEX completions ON ends (end_id) WHERE status = 'completed';
CREATE INDEX ends_copy_of ON ends (copy_of) WHERE copy_of IS NOT NULL;
CREATE INDEX ends_text_sha256 ON ends (text_sha256) WHERE text_sha256 IS NOT NULL;
CREATE INDEX ends_data_sha256 ON ends (data_sha256) WHERE data_sha256 IS NOT NULL;
CREATE INDEX ends_prompt_sha256 ON ends (prompt_sha256) WHERE prompt_sha256 IS NOT NULL;

-- The traceback of a function that failed.
CREATE TABLE tracebacks (
    id INTEGER NOT NULL PRIMARY KEY REFERENCES ends (id),
    row_checksum INTEGER NOT NULL,       -- CRC-32 over the row
    content TEXT NOT NULL
) STRICT;

-- All messages but the prompt and the text of an end.
CREATE TABLE other_messages (
    id INTEGER NOT NULL PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES given_tasks (id),
    attempt INTEGER NOT NULL,            -- 0 for a message of a person after the run
    role TEXT NOT NULL,
    at TEXT NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    checksum INTEGER NOT NULL,           -- over the row
    content_sha256 BLOB REFERENCES blobs (sha256),
    content TEXT                         -- NULL if in blobs
) STRICT;

CREATE INDEX other_messages_task ON other_messages (task);
CREATE INDEX other_messages_content_sha256 ON other_messages (content_sha256) WHERE content_sha256 IS NOT NULL;

CREATE TABLE sessions (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    task_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,            -- the last attempt that used the session; 0 if a person continued the session
    opened_at TEXT NOT NULL,
    row_checksum INTEGER NOT NULL,       -- over the row without opened_at
    PRIMARY KEY (run_id, task_id, session_id)
) STRICT, WITHOUT ROWID;

-- All events but starts and completions, which follow from `starts` and `ends`.
CREATE TABLE other_events (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    seq INTEGER NOT NULL,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT,
    attempt INTEGER,
    detail TEXT NOT NULL,
    row_checksum INTEGER NOT NULL,       -- over the row
    PRIMARY KEY (run_id, seq)
) STRICT, WITHOUT ROWID;

-- Requests to the owner of a run. Notes are no changes of the run: any process may add a note.
CREATE TABLE notes (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    number INTEGER NOT NULL,             -- counts the run's notes from 1, in the order of their arrival
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT,                        -- the task concerned; NULL for a request about the run
    body TEXT NOT NULL,                  -- JSON
    checksum INTEGER NOT NULL,           -- over the row
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;

-- Every task with the last attempt and the result.
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
    coalesce(e.input_tokens, 0) AS input_tokens, coalesce(e.output_tokens, 0) AS output_tokens,
    coalesce(e.cache_read_tokens, 0) AS cache_read_tokens, coalesce(e.cache_write_tokens, 0) AS cache_write_tokens,
    coalesce(e.reasoning_tokens, 0) AS reasoning_tokens, coalesce(e.cost_is_partial, 0) AS cost_is_partial, e.cost_usd,
    e.duration_s, e.model, coalesce(t.depends_on, same.depends_on) AS depends_on, coalesce(t.spec, same.spec) AS spec,
    coalesce(t.prompt, same.prompt) AS prompt, e.checksum, e.text_sha256, e.data_sha256, coalesce(e.text, o.text) AS text,
    coalesce(e.data, o.data) AS data
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run
    LEFT JOIN given_tasks AS same ON same.id = t.copy_of
    LEFT JOIN starts AS s ON s.id = (SELECT id FROM starts WHERE task = t.id ORDER BY attempt DESC LIMIT 1)
    LEFT JOIN ends AS e ON e.id = s.id LEFT JOIN ends AS o ON o.id = e.copy_of;

-- Every edge: `task_id` waits for `depends_on`.
CREATE VIEW dependencies AS
SELECT r.run_id, t.task_id, edge.key AS position, edge.value AS depends_on
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run LEFT JOIN given_tasks AS same ON same.id = t.copy_of,
    json_each(coalesce(t.depends_on, same.depends_on)) AS edge;

-- Every attempt of every task.
CREATE VIEW attempts AS
SELECT r.run_id, t.task_id, s.attempt, coalesce(e.status, 'running') AS status, s.backend, e.model, s.session_id,
    s.started_at, e.ended_at, e.error_kind, e.error, coalesce(e.input_tokens, 0) AS input_tokens,
    coalesce(e.output_tokens, 0) AS output_tokens, coalesce(e.cache_read_tokens, 0) AS cache_read_tokens,
    coalesce(e.cache_write_tokens, 0) AS cache_write_tokens, coalesce(e.reasoning_tokens, 0) AS reasoning_tokens,
    coalesce(e.cost_is_partial, 0) AS cost_is_partial, e.cost_usd, e.duration_s, s.id & 4294967295 AS started_seq,
    e.end_id & 4294967295 AS ended_seq
FROM starts AS s JOIN given_tasks AS t ON t.id = s.task JOIN runs AS r ON r.number = t.run
    LEFT JOIN ends AS e ON e.id = s.id;

-- Every message; the order within a task is seq, part. Part 0 is a row of other_messages. Part 1 is the prompt of an
-- end, with the number before the end's. Part 2 is the text of an end, with the checksum of the result.
CREATE VIEW messages AS
SELECT r.run_id, t.task_id, m.id & 4294967295 AS seq, 0 AS part, m.attempt, m.role, m.at, m.input_tokens,
    m.output_tokens, m.checksum, m.content_sha256, m.content
FROM other_messages AS m JOIN given_tasks AS t ON t.id = m.task JOIN runs AS r ON r.number = t.run
UNION ALL
SELECT r.run_id, t.task_id, (e.end_id & 4294967295) - 1, 1, s.attempt, 'user', e.ended_at, 0, 0, e.prompt_checksum,
    e.prompt_sha256, coalesce(e.prompt, o.prompt)
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run JOIN starts AS s ON s.task = t.id JOIN ends AS e ON e.id = s.id
    LEFT JOIN ends AS o ON o.id = e.copy_of
WHERE e.prompt_checksum IS NOT NULL
UNION ALL
SELECT r.run_id, t.task_id, e.end_id & 4294967295, 2, s.attempt, 'assistant',
    e.ended_at, e.input_tokens, e.output_tokens, e.checksum, e.text_sha256, coalesce(e.text, o.text)
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run JOIN starts AS s ON s.task = t.id JOIN ends AS e ON e.id = s.id
    LEFT JOIN ends AS o ON o.id = e.copy_of
WHERE e.prompt_checksum IS NOT NULL AND (e.checksum IS NOT NULL OR e.text IS NOT NULL OR e.text_sha256 IS NOT NULL);

-- The history of every run; seq is the number of the change. A completed attempt need not be the last attempt, because
-- a task with a damaged result runs again.
CREATE VIEW events AS
SELECT run_id, seq, at, kind, task_id, attempt, NULL AS backend, detail FROM other_events
UNION ALL
SELECT run_id, started_seq, started_at, 'task_started', task_id, attempt, backend, '{}' FROM attempts
UNION ALL
SELECT run_id, ended_seq, ended_at, 'task_completed', task_id, attempt, NULL,
    '{"input_tokens":' || input_tokens || ',"output_tokens":' || output_tokens
    || iif(cache_read_tokens, ',"cache_read_tokens":' || cache_read_tokens, '')
    || iif(cache_write_tokens, ',"cache_write_tokens":' || cache_write_tokens, '')
    || iif(reasoning_tokens, ',"reasoning_tokens":' || reasoning_tokens, '')
    || iif(cost_usd IS NULL, '', printf(',"cost_usd":%!.17g', cost_usd))
    || iif(cost_is_partial, ',"cost_is_partial":true', '') || '}'
FROM attempts WHERE status = 'completed';

PRAGMA application_id = 1886151028;  -- "plat"
PRAGMA user_version = 103;           -- the format; 1 to 5 and 100 to 102 were used in development
