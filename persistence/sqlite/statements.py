"""Every SQL statement that reads or writes, by name. The tables are in `schema_*.sql`.

A batch's rows go in as few statements as possible. The sqlite3 module gives the interpreter lock away at every step and
must win it back, which takes up to 5 ms while the event loop is busy: so one step for a thousand rows, not a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""How many rows one statement may carry; few sizes, so that the prepared ones are used again and again. The largest
keeps the widest rows below the 32,766 parameters that SQLite takes.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """A statement over many rows of one run, which come in the place of `{rows}`. Its last parameter is the run's id.
    Each row has to change exactly one stored row, unless its first value is NULL: it only fills the statement up.

    What is mostly missing comes as something that it cannot be, 0 for a text or '' for a number: see rows.py.

    Compared by identity: hashing the texts at every look-up would cost more than the look-up.
    """

    width: int
    statement: str


@lru_cache(maxsize=256)
def bulk_sql(bulk: Bulk, rows: int) -> str:
    """The statement for `rows` rows."""
    row = f"({', '.join('?' * bulk.width)})"
    return bulk.statement.replace("{rows}", f"(VALUES {', '.join([row] * rows)})")


ADD_TASKS = Bulk(
    7,
    """INSERT INTO tasks (task_id, position, backend, added_by, depends_on, prompt, spec, run_id)
    WITH new AS {rows} SELECT column1, column2, nullif(column3, 0), nullif(column4, 0), column5, column6, column7, ?
    FROM new WHERE column1 IS NOT NULL""",
)
START_TASKS = Bulk(
    7,
    """UPDATE tasks SET status = 'running', attempt = column2, attempt_status = 'running', attempt_backend = column3,
    session_id = nullif(column4, 0), session_confirmed = column5, started_at = column6, started_seq = column7,
    ended_at = NULL, ended_seq = NULL, error_kind = NULL, error = NULL, input_tokens = 0, output_tokens = 0,
    cost_usd = NULL, duration_s = NULL, model = NULL
    FROM {rows} AS new WHERE run_id = ? AND task_id = column1 AND status = 'pending' AND attempt = column2 - 1""",
)
SET_SESSIONS = Bulk(
    3,
    """UPDATE tasks SET session_id = column3, session_confirmed = iif(column2 > 0, 1, session_confirmed)
    FROM {rows} AS new
    WHERE run_id = ? AND task_id = column1 AND attempt > 0 AND attempt = iif(column2 > 0, column2, attempt)""",
)
COMPLETE_TASKS = Bulk(
    12,
    """UPDATE tasks SET status = 'completed', attempt_status = 'completed', ended_at = column3, ended_seq = column4,
    question = NULL, asked = NULL, input_tokens = input_tokens + column5, output_tokens = output_tokens + column6,
    cost_usd = iif(column7 = '', cost_usd, ifnull(cost_usd, 0) + column7),
    duration_s = ifnull(duration_s, 0) + column8, text = column9, data = nullif(column10, 0), checksum = column11,
    model = ifnull(nullif(column12, 0), model)
    FROM {rows} AS new WHERE run_id = ? AND task_id = column1 AND attempt = column2
    AND (status = 'running' OR status = 'waiting_input')""",
)
LINK_RESULTS = Bulk(
    3,
    """UPDATE tasks SET text_sha256 = column2, data_sha256 = column3
    FROM {rows} AS new WHERE run_id = ? AND task_id = column1 AND status = 'completed'""",
)
"""For results with a large part. A statement of its own, like ADD_LARGE_MESSAGES: in COMPLETE_TASKS its two columns
would be NULL in almost every row, and cost a seventh of it.
"""
END_TASKS = Bulk(
    17,
    """UPDATE tasks SET status = column5, attempt_status = column6, ended_at = column3, ended_seq = column4,
    error_kind = column7, error = column8, duration_s = coalesce(duration_s + column9, column9, duration_s),
    input_tokens = input_tokens + column10, output_tokens = output_tokens + column11,
    cost_usd = coalesce(cost_usd + column12, column12, cost_usd), question = column13, asked = column14,
    crashes = crashes + column15, session_confirmed = coalesce(column16, session_confirmed),
    model = ifnull(column17, model)
    FROM {rows} AS new WHERE run_id = ? AND task_id = column1 AND attempt = column2
    AND (status = 'running' OR status = 'waiting_input' AND (column5 = 'failed' OR column5 = 'skipped'))""",
)
CANCEL_TASKS = Bulk(
    7,
    """UPDATE tasks SET status = 'cancelled', attempt_status = iif(status = 'running', 'cancelled', attempt_status),
    ended_at = iif(status = 'running', column2, ended_at), ended_seq = iif(status = 'running', column3, ended_seq),
    input_tokens = iif(status = 'running', input_tokens + column4, input_tokens),
    output_tokens = iif(status = 'running', output_tokens + column5, output_tokens),
    cost_usd = iif(status = 'running' AND column6 IS NOT NULL, ifnull(cost_usd, 0) + column6, cost_usd),
    model = iif(status = 'running', ifnull(column7, model), model), question = NULL, asked = NULL
    FROM {rows} AS new WHERE run_id = ? AND task_id = column1 AND status IN ('pending', 'running', 'waiting_input')""",
)
REQUEUE_TASKS = Bulk(
    3,
    """UPDATE tasks SET status = 'pending', question = NULL, asked = NULL, text = NULL, data = NULL, checksum = NULL,
    text_sha256 = NULL, data_sha256 = NULL,
    session_confirmed = iif(column2 = 'waiting_input', session_confirmed, 0),
    answers = iif(column2 = 'waiting_input', coalesce(column3, answers), NULL)
    FROM {rows} AS new WHERE run_id = ? AND task_id = column1 AND status = column2""",
)
ADD_MESSAGES = Bulk(
    9,
    """INSERT INTO messages (task_id, seq, attempt, role, at, input_tokens, output_tokens, checksum, content, run_id)
    WITH new AS {rows} SELECT *, ? FROM new WHERE column1 IS NOT NULL""",
)
ADD_LARGE_MESSAGES = Bulk(
    9,
    """INSERT INTO messages (task_id, seq, attempt, role, at, input_tokens, output_tokens, checksum, content_sha256,
    run_id) WITH new AS {rows} SELECT *, ? FROM new WHERE column1 IS NOT NULL""",
)
ADD_SESSIONS = Bulk(
    4,
    """INSERT INTO sessions (task_id, session_id, attempt, opened_at, run_id)
    WITH new AS {rows} SELECT *, ? FROM new WHERE column1 IS NOT NULL
    ON CONFLICT (run_id, task_id, session_id) DO UPDATE SET attempt = excluded.attempt""",
)
ADD_EVENTS = Bulk(
    6,
    """INSERT INTO other_events (seq, at, kind, task_id, attempt, detail, run_id)
    WITH new AS {rows} SELECT *, ? FROM new WHERE column1 IS NOT NULL""",
)

KNOWN_TASKS = Bulk(1, "SELECT task_id FROM {rows} AS new CROSS JOIN tasks ON run_id = ? AND task_id = column1")
"""Which of some tasks are there. CROSS JOIN: the tasks are looked up one by one, never all of them."""
NEXT_POSITION = "SELECT ifnull(max(position) + 1, 0) FROM tasks WHERE run_id = ?"

IN_ORDER = (
    ADD_TASKS,
    REQUEUE_TASKS,
    START_TASKS,
    SET_SESSIONS,
    COMPLETE_TASKS,
    LINK_RESULTS,
    END_TASKS,
    CANCEL_TASKS,
    ADD_MESSAGES,
    ADD_LARGE_MESSAGES,
    ADD_SESSIONS,
    ADD_EVENTS,
)
"""The order in which gathered rows are written: a task exists before it starts, and starts before it ends."""

ADD_BLOB = """
INSERT INTO blobs (sha256, size, content) VALUES (?, ?, ?)
ON CONFLICT (sha256) DO UPDATE SET content = excluded.content WHERE content IS NOT excluded.content
"""
"""What is there stays, unless it was damaged."""

ADD_RUN = """
INSERT INTO runs (run_id, name, settings, settings_sha256, created_at, status, last_seq, epoch, claims)
VALUES (?, ?, ?, ?, ?, 'queued', 0, 0, '[]')
"""
SET_HEAD = """
UPDATE runs SET status = ?, started_at = ?, ended_at = ?, error = ?, last_seq = ?, epoch = ?, lease_expires_at = ?,
    claims = ?, policy_state = ?, policy_seq = ?, owner_id = ?, owner_host = ?, owner_boot_id = ?, owner_pid = ?,
    owner_process_started = ?, owner_claimed_at = ?
WHERE run_id = ?
"""
SET_LAST_SEQ = "UPDATE runs SET last_seq = ? WHERE run_id = ?"

GET_HEAD = """
SELECT name, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims,
    policy_state, policy_seq, owner_id, owner_host, owner_boot_id, owner_pid, owner_process_started, owner_claimed_at
FROM runs WHERE run_id = ?
"""
GET_SETTINGS = """
SELECT coalesce((SELECT content FROM blobs WHERE sha256 = settings_sha256), settings) FROM runs WHERE run_id = ?
"""
LIST_RUNS = """
SELECT run_id, name, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims,
    policy_state, policy_seq, owner_id, owner_host, owner_boot_id, owner_pid, owner_process_started, owner_claimed_at
FROM runs ORDER BY created_at DESC, rowid DESC LIMIT ?
"""
COUNT_TASKS = "SELECT status, count(*) FROM tasks WHERE run_id = ? GROUP BY status ORDER BY min(position)"
SUM_USAGE = "SELECT sum(input_tokens), sum(output_tokens), sum(cost_usd) FROM attempts WHERE run_id = ?"
GET_TASK_STATUS = "SELECT status, attempt FROM tasks WHERE run_id = ? AND task_id = ?"
LIST_TASKS = """
SELECT task_id, position, prompt, backend, spec, status, attempt,
    coalesce(text, (SELECT content FROM blobs WHERE sha256 = text_sha256)),
    coalesce(data, (SELECT content FROM blobs WHERE sha256 = data_sha256)), checksum, error_kind, error, session_id,
    input_tokens, output_tokens, cost_usd, duration_s, started_at, ended_at, crashes, session_confirmed, question,
    asked, answers, added_by, model, depends_on
FROM tasks WHERE run_id = ? ORDER BY position
"""
_ATTEMPT = """SELECT task_id, attempt, status, backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s, model FROM attempts"""
LIST_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? ORDER BY started_seq"
LIST_TASK_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? AND task_id = ? ORDER BY attempt"
LIST_MESSAGES = """
SELECT attempt, role, coalesce(content, (SELECT content FROM blobs WHERE sha256 = content_sha256)), input_tokens,
    output_tokens, at, checksum
FROM messages WHERE run_id = ? AND task_id = ? ORDER BY seq
"""
LAST_SEQ = "SELECT last_seq FROM runs WHERE run_id = ?"
LIST_EVENTS = """
SELECT * FROM (SELECT seq, at, kind, task_id, attempt, detail, NULL AS backend FROM other_events
    WHERE run_id = :run_id AND seq > :after ORDER BY seq LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT started_seq, started_at, 'task_started', task_id, attempt, '{}', attempt_backend FROM tasks
    WHERE run_id = :run_id AND started_seq > :after ORDER BY started_seq LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT started_seq, started_at, 'task_started', task_id, attempt, '{}', backend FROM earlier_attempts
    WHERE run_id = :run_id AND started_seq > :after ORDER BY started_seq LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT ended_seq, ended_at, 'task_completed', task_id, attempt,
        '{"input_tokens":' || input_tokens || ',"output_tokens":' || output_tokens || '}', NULL
    FROM tasks WHERE run_id = :run_id AND ended_seq > :after AND attempt_status = 'completed'
    ORDER BY ended_seq LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT ended_seq, ended_at, 'task_completed', task_id, attempt,
        '{"input_tokens":' || input_tokens || ',"output_tokens":' || output_tokens || '}', NULL
    FROM earlier_attempts WHERE run_id = :run_id AND ended_seq > :after AND status = 'completed'
    ORDER BY ended_seq LIMIT :limit)
ORDER BY seq LIMIT :limit
"""
"""What the view `events` shows, but each part ends at the limit by itself: a page costs what is on it."""

ADD_NOTE = """
INSERT INTO notes (run_id, number, kind, at, task_id, body)
SELECT run_id, (SELECT ifnull(max(number), 0) + 1 FROM notes WHERE run_id = runs.run_id), ?, ?, ?, ?
FROM runs WHERE run_id = ?
"""
LIST_NOTES = "SELECT number, kind, at, task_id, body FROM notes WHERE run_id = ? AND number > ? ORDER BY number"

GET_OWNERSHIP = """
SELECT status = 'completed' OR status = 'failed' OR status = 'cancelled', status, owner_pid, owner_host
FROM runs WHERE run_id = ?
"""
DELETE_RUN = (
    "DELETE FROM notes WHERE run_id = ?",
    "DELETE FROM other_events WHERE run_id = ?",
    "DELETE FROM messages WHERE run_id = ?",
    "DELETE FROM sessions WHERE run_id = ?",
    "DELETE FROM earlier_attempts WHERE run_id = ?",
    "DELETE FROM tasks WHERE run_id = ?",
    "DELETE FROM runs WHERE run_id = ?",
)
"""Those who refer to others first."""
DELETE_UNUSED_BLOBS = """
DELETE FROM blobs WHERE NOT EXISTS (SELECT 1 FROM tasks WHERE text_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM tasks WHERE data_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM messages WHERE content_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM runs WHERE settings_sha256 = blobs.sha256)
"""
LIST_SESSIONS = "SELECT DISTINCT session_id FROM sessions"
RUN_SIZES = """
SELECT run_id, sum(bytes) FROM (
    SELECT run_id, length(CAST(settings AS BLOB)) + ifnull(length(CAST(error AS BLOB)), 0)
        + ifnull(length(CAST(policy_state AS BLOB)), 0) AS bytes FROM runs
    UNION ALL
    SELECT run_id, length(CAST(prompt AS BLOB)) + length(CAST(spec AS BLOB)) + ifnull(length(CAST(text AS BLOB)), 0)
        + ifnull(length(CAST(data AS BLOB)), 0) + ifnull(length(CAST(error AS BLOB)), 0)
        + ifnull(length(CAST(question AS BLOB)), 0) + ifnull(length(CAST(asked AS BLOB)), 0)
        + ifnull(length(CAST(answers AS BLOB)), 0) FROM tasks
    UNION ALL
    SELECT run_id, ifnull(length(CAST(error AS BLOB)), 0) FROM earlier_attempts
    UNION ALL
    SELECT run_id, length(CAST(content AS BLOB)) FROM messages WHERE content IS NOT NULL
    UNION ALL
    SELECT run_id, length(CAST(body AS BLOB)) FROM notes
    UNION ALL
    SELECT run_id, size FROM (
        SELECT run_id, settings_sha256 AS sha256 FROM runs WHERE settings_sha256 IS NOT NULL
        UNION
        SELECT run_id, text_sha256 FROM tasks WHERE text_sha256 IS NOT NULL
        UNION
        SELECT run_id, data_sha256 FROM tasks WHERE data_sha256 IS NOT NULL
        UNION
        SELECT run_id, content_sha256 FROM messages WHERE content_sha256 IS NOT NULL
    ) JOIN blobs USING (sha256)
) GROUP BY run_id
"""
