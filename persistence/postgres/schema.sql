-- The tables and views of plait in PostgreSQL: names and meaning are those of SQLite (persistence/sqlite/schema.sql).
--
-- Text cannot hold U+0000 here: connection.py escapes it. Names are compared byte by byte, whatever the collation of
-- the database. Rows refer to rows without foreign keys: a check of each reference would cost a look-up a row, and only
-- the owner of a run, whose batches the rules check, writes rows. JSON is text, because jsonb keeps neither U+0000 nor
-- the spelling of a number.

-- One row: the format of the tables, and the id of this store, which names the folder of agents' files.
CREATE TABLE plait_store (
    format BIGINT NOT NULL,              -- 1 and 2 were used in development
    store_id TEXT NOT NULL
);

-- Every text of more than 64 KiB, stored once for all results and messages with the same text, and the pieces of settings.
CREATE TABLE blobs (
    sha256 BYTEA NOT NULL PRIMARY KEY,    -- of the text in UTF-8
    size BIGINT NOT NULL,               -- bytes in UTF-8
    content TEXT NOT NULL
);

-- Without an owner, lease_expires_at is the time from which a run that waits for a person can go on: the deadline of a
-- question, or 0 once a person has answered.
CREATE TABLE runs (
    number BIGINT NOT NULL PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    run_id TEXT COLLATE "C" NOT NULL UNIQUE,
    name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (
        status IN ('running', 'queued', 'waiting_input', 'completed', 'failed', 'cancelling', 'cancelled')),
    created_at TEXT COLLATE "C" NOT NULL,
    started_at TEXT,
    ended_at TEXT,
    error TEXT,
    last_seq BIGINT NOT NULL,           -- the number of the last change applied to this run
    epoch BIGINT NOT NULL,              -- the number of claims
    owner_id TEXT,                       -- the owner; NULL without an owner
    owner_host TEXT,
    owner_boot_id TEXT,
    owner_pid BIGINT,
    owner_process_started TEXT,
    owner_claimed_at TEXT,
    lease_expires_at DOUBLE PRECISION,               -- Unix time in seconds
    claims TEXT NOT NULL,                -- JSON: [number of the claiming change, owner_id] for every epoch
    policy_state TEXT,                   -- JSON: the state of the run's policy, for its next call
    policy_seq BIGINT NOT NULL DEFAULT 0,  -- the number of the change with the state
    input_tokens BIGINT NOT NULL DEFAULT 0,  -- the sums over all attempts, here and below
    output_tokens BIGINT NOT NULL DEFAULT 0,
    cache_read_tokens BIGINT NOT NULL DEFAULT 0,   -- parts of input_tokens
    cache_write_tokens BIGINT NOT NULL DEFAULT 0,
    reasoning_tokens BIGINT NOT NULL DEFAULT 0,    -- a part of output_tokens
    cost_is_partial BIGINT NOT NULL DEFAULT 0 CHECK (cost_is_partial IN (0, 1)),
    cost_usd DOUBLE PRECISION,                       -- NULL if unknown; a sum of the known costs if cost_is_partial
    row_checksum BIGINT,                -- over the columns above without epoch, with `number`
    settings_checksum BIGINT NOT NULL,  -- over run_id and settings
    settings TEXT NOT NULL,              -- '' if the settings are in settings_pieces
    written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),  -- the time of the last batch, by the server's clock
    lease_s DOUBLE PRECISION             -- seconds after written_at for which the last owner is taken to be alive
) WITH (fillfactor = 50);

-- Settings of more than 64 KiB, in pieces (see pieces.py): runs with similar inputs share most pieces.
CREATE TABLE settings_pieces (
    run BIGINT NOT NULL,
    position BIGINT NOT NULL,
    sha256 BYTEA NOT NULL,
    PRIMARY KEY (run, position)
);

CREATE INDEX settings_pieces_sha256 ON settings_pieces (sha256);

-- One row for each task, with the values of the plan.
CREATE TABLE given_tasks (
    id BIGINT NOT NULL PRIMARY KEY,
    run BIGINT NOT NULL,
    task_id TEXT COLLATE "C" NOT NULL,
    -- The status, if the status does not follow from the last attempt, as for a reopened task; else NULL.
    set_to TEXT CHECK (set_to IN ('pending', 'waiting_input', 'cancelled')),
    crashes BIGINT NOT NULL DEFAULT 0,  -- the deaths of owners that count for the task
    answers TEXT,                        -- JSON: the answers of persons
    backend TEXT,                        -- the backend that the plan names; NULL for the default
    added_by TEXT,                       -- the task that added the task; NULL if RunCreated or the policy did
    row_checksum BIGINT NOT NULL,       -- over the row
    copy_of BIGINT,                      -- the task with the three texts, which are then NULL here
    depends_on TEXT,                     -- JSON: the ids of the tasks that have to end first
    spec TEXT,
    prompt TEXT,
    UNIQUE (run, task_id)
);

CREATE INDEX given_tasks_copy_of ON given_tasks (copy_of) WHERE copy_of IS NOT NULL;

-- One row for each attempt.
CREATE TABLE starts (
    id BIGINT NOT NULL PRIMARY KEY,
    task BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    backend TEXT NOT NULL,
    session_id TEXT COLLATE "C",
    session_confirmed BIGINT NOT NULL DEFAULT 0 CHECK (session_confirmed IN (0, 1)),
    started_at TEXT NOT NULL,
    row_checksum BIGINT NOT NULL,       -- over the row
    UNIQUE (task, attempt)
);

-- One row for each ended attempt, with the result. The id is the id of the start.
CREATE TABLE ends (
    id BIGINT NOT NULL PRIMARY KEY,
    end_id BIGINT NOT NULL,             -- the run's number * 2^32 + the number of the change that ended it
    status TEXT NOT NULL CHECK (
        status IN ('completed', 'retried', 'interrupted', 'failed', 'skipped', 'asked', 'cancelled')),
    ended_at TEXT,
    input_tokens BIGINT NOT NULL DEFAULT 0,
    output_tokens BIGINT NOT NULL DEFAULT 0,
    cache_read_tokens BIGINT NOT NULL DEFAULT 0,   -- parts of input_tokens
    cache_write_tokens BIGINT NOT NULL DEFAULT 0,
    reasoning_tokens BIGINT NOT NULL DEFAULT 0,    -- a part of output_tokens
    cost_is_partial BIGINT NOT NULL DEFAULT 0 CHECK (cost_is_partial IN (0, 1)),
    cost_usd DOUBLE PRECISION,                       -- NULL if unknown; a sum of the known costs if cost_is_partial
    duration_s DOUBLE PRECISION,
    model TEXT,                          -- the model that answered, as the backend names it; NULL if unknown
    error_kind TEXT,
    error TEXT,
    question TEXT,                       -- the text for a person, while the task is waiting_input
    asked TEXT,                          -- more about the question as JSON, if the task itself asks
    row_checksum BIGINT NOT NULL,       -- over the columns above
    checksum BIGINT,                    -- over id, text and data; NULL without a result
    prompt_checksum BIGINT,             -- over id and prompt; NULL without a prompt
    text_sha256 BYTEA,
    data_sha256 BYTEA,
    prompt_sha256 BYTEA,
    copy_of BIGINT,                      -- the end with the same text, data and prompt, which are then NULL here
    text TEXT,                           -- the result; NULL if in blobs or in `copy_of`
    data TEXT,                           -- the structured result as JSON; NULL if in blobs or in `copy_of`
    prompt TEXT                          -- the prompt, if prompt and text are the whole conversation of the attempt
);

CREATE INDEX completions ON ends (end_id) WHERE status = 'completed';
CREATE INDEX ends_copy_of ON ends (copy_of) WHERE copy_of IS NOT NULL;
CREATE INDEX ends_text_sha256 ON ends (text_sha256) WHERE text_sha256 IS NOT NULL;
CREATE INDEX ends_data_sha256 ON ends (data_sha256) WHERE data_sha256 IS NOT NULL;
CREATE INDEX ends_prompt_sha256 ON ends (prompt_sha256) WHERE prompt_sha256 IS NOT NULL;

-- The traceback of a function that failed.
CREATE TABLE tracebacks (
    id BIGINT NOT NULL PRIMARY KEY,
    row_checksum BIGINT NOT NULL,       -- CRC-32 over the row
    content TEXT NOT NULL
);

-- All messages but the prompt and the text of an end.
CREATE TABLE other_messages (
    id BIGINT NOT NULL PRIMARY KEY,
    task BIGINT NOT NULL,
    attempt BIGINT NOT NULL,            -- 0 for a message of a person after the run
    role TEXT NOT NULL,
    at TEXT NOT NULL,
    input_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    checksum BIGINT NOT NULL,           -- over the row
    content_sha256 BYTEA,
    content TEXT                         -- NULL if in blobs
);

CREATE INDEX other_messages_task ON other_messages (task);
CREATE INDEX other_messages_content_sha256 ON other_messages (content_sha256) WHERE content_sha256 IS NOT NULL;

CREATE TABLE sessions (
    run_id TEXT COLLATE "C" NOT NULL,
    task_id TEXT COLLATE "C" NOT NULL,
    session_id TEXT COLLATE "C" NOT NULL,
    attempt BIGINT NOT NULL,            -- the last attempt that used the session; 0 if a person continued the session
    opened_at TEXT NOT NULL,
    row_checksum BIGINT NOT NULL,       -- over the row without opened_at
    PRIMARY KEY (run_id, task_id, session_id)
);

-- All events but starts and completions, which follow from `starts` and `ends`.
CREATE TABLE other_events (
    run_id TEXT COLLATE "C" NOT NULL,
    seq BIGINT NOT NULL,
    at TEXT NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    task_id TEXT COLLATE "C",
    attempt BIGINT,
    detail TEXT NOT NULL,
    row_checksum BIGINT NOT NULL,       -- over the row
    PRIMARY KEY (run_id, seq)
);

-- Requests to the owner of a run. Notes are no changes of the run: any process may add a note.
CREATE TABLE notes (
    run_id TEXT COLLATE "C" NOT NULL,
    number BIGINT NOT NULL,             -- counts the run's notes from 1, in the order of their arrival
    at TEXT NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    task_id TEXT COLLATE "C",                        -- the task concerned; NULL for a request about the run
    body TEXT NOT NULL,                  -- JSON
    checksum BIGINT NOT NULL,           -- over the row
    PRIMARY KEY (run_id, number)
);

-- Every task with the last attempt and the result.
CREATE VIEW tasks AS
SELECT r.run_id, t.task_id, t.id & 4294967295 AS position,
    coalesce(t.set_to, CASE
        WHEN s.id IS NULL OR e.status IN ('retried', 'interrupted') THEN 'pending'
        WHEN e.id IS NULL THEN 'running'
        WHEN e.status = 'asked' THEN 'waiting_input' ELSE e.status END) AS status,
    t.backend, t.added_by, coalesce(s.attempt, 0) AS attempt,
    CASE WHEN s.id IS NOT NULL THEN coalesce(e.status, 'running') END AS attempt_status, s.backend AS attempt_backend,
    s.session_id, coalesce(s.session_confirmed, 0) AS session_confirmed, t.crashes, s.started_at,
    s.id & 4294967295 AS started_seq, e.ended_at, e.end_id & 4294967295 AS ended_seq, e.error_kind, e.error,
    CASE WHEN coalesce(t.set_to, e.status) IN ('waiting_input', 'asked') THEN e.question END AS question,
    CASE WHEN coalesce(t.set_to, e.status) IN ('waiting_input', 'asked') THEN e.asked END AS asked, t.answers,
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
SELECT r.run_id, t.task_id, edge.number - 1 AS position, edge.upstream AS depends_on
FROM given_tasks AS t JOIN runs AS r ON r.number = t.run LEFT JOIN given_tasks AS same ON same.id = t.copy_of,
    json_array_elements_text(coalesce(t.depends_on, same.depends_on)::json) WITH ORDINALITY AS edge (upstream, number);

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
SELECT run_id, seq, at, kind, task_id, attempt, NULL::TEXT AS backend, detail FROM other_events
UNION ALL
SELECT run_id, started_seq, started_at, 'task_started', task_id, attempt, backend, '{}' FROM attempts
UNION ALL
SELECT run_id, ended_seq, ended_at, 'task_completed', task_id, attempt, NULL,
    '{"input_tokens":' || input_tokens || ',"output_tokens":' || output_tokens
    || CASE WHEN cache_read_tokens <> 0 THEN ',"cache_read_tokens":' || cache_read_tokens ELSE '' END
    || CASE WHEN cache_write_tokens <> 0 THEN ',"cache_write_tokens":' || cache_write_tokens ELSE '' END
    || CASE WHEN reasoning_tokens <> 0 THEN ',"reasoning_tokens":' || reasoning_tokens ELSE '' END
    || coalesce(',"cost_usd":' || cost_usd, '')
    || CASE WHEN cost_is_partial = 1 THEN ',"cost_is_partial":true' ELSE '' END || '}'
FROM attempts WHERE status = 'completed';
