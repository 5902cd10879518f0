"""Every SQL statement that reads or writes, by name. `schema.sql` describes the tables and their ids.

The rows of a batch are written by as few statements as possible. The sqlite3 module releases the interpreter lock at
every step, and waits up to 5 ms for the lock while the event loop is busy: one step for a thousand rows is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The numbers of rows that a statement may have. Few numbers, because prepared statements are used again. The largest
number keeps the widest rows below the 32,766 parameters that SQLite allows.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """A statement over many rows.

    Rows whose first value is NULL are ignored: they fill the statement up to one of `SIZES`. A value that is usually
    missing comes as a substitute, 0 for a text or '' for a number (see bulk.py).

    Compared by identity, because hashing the text at every look-up would cost more than the look-up.
    """

    width: int
    """The number of values in a row."""
    statement: str
    """The SQL, with `{rows}` in the place of the rows."""


@lru_cache(maxsize=256)
def bulk_sql(bulk: Bulk, rows: int) -> str:
    """Return the SQL for `rows` rows."""
    row = f"({', '.join('?' * bulk.width)})"
    return bulk.statement.replace("{rows}", f"(VALUES {', '.join([row] * rows)})")


ADD_TASKS = Bulk(
    8,
    """INSERT INTO given_tasks (id, run, task_id, backend, added_by, depends_on, spec, prompt)
    WITH new AS {rows} SELECT column1, column2, column3, nullif(column4, 0), nullif(column5, 0), column6, column7,
        column8 FROM new WHERE column1 IS NOT NULL""",
)
ADD_STARTS = Bulk(
    7,
    """INSERT INTO starts (id, task, attempt, backend, session_id, session_confirmed, started_at)
    WITH new AS {rows} SELECT column1, column2, column3, column4, nullif(column5, 0), column6, column7
    FROM new WHERE column1 IS NOT NULL""",
)
ADD_COMPLETIONS = Bulk(
    14,
    """INSERT INTO ends (id, end_id, status, ended_at, input_tokens, output_tokens, cost_usd, duration_s, model,
    checksum, prompt_checksum, text_checksum, text, data, prompt)
    WITH new AS {rows} SELECT column1, column2, 'completed', column3, column4, column5, nullif(column6, ''), column7,
        nullif(column8, 0), column9, nullif(column10, 0), nullif(column11, 0), column12, nullif(column13, 0),
        nullif(column14, 0)
    FROM new WHERE column1 IS NOT NULL""",
)
"""Completions without a large part. Three NULL columns less for the blobs save a seventh of the time."""
ADD_LARGE_COMPLETIONS = Bulk(
    17,
    """INSERT INTO ends (id, end_id, status, ended_at, input_tokens, output_tokens, cost_usd, duration_s, model,
    checksum, prompt_checksum, text_checksum, text, data, prompt, text_sha256, data_sha256, prompt_sha256)
    WITH new AS {rows} SELECT column1, column2, 'completed', column3, column4, column5, nullif(column6, ''), column7,
        nullif(column8, 0), column9, nullif(column10, 0), nullif(column11, 0), nullif(column12, 0),
        nullif(column13, 0), nullif(column14, 0), column15, column16, column17
    FROM new WHERE column1 IS NOT NULL""",
)
ADD_ENDS = Bulk(
    13,
    """INSERT INTO ends (id, end_id, status, ended_at, input_tokens, output_tokens, cost_usd, duration_s, model,
    error_kind, error, question, asked)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL""",
)
FINISH_ENDS = Bulk(
    16,
    """UPDATE ends SET end_id = column2, status = column3, ended_at = column4, input_tokens = input_tokens + column5,
    output_tokens = output_tokens + column6, cost_usd = coalesce(cost_usd + column7, column7, cost_usd),
    duration_s = coalesce(duration_s + column8, column8, duration_s), model = coalesce(column9, model),
    error_kind = column10, error = column11, checksum = column12, text = column13, data = column14,
    text_sha256 = column15, data_sha256 = column16, question = NULL, asked = NULL
    FROM {rows} AS new WHERE id = column1""",
)
"""For attempts of waiting tasks that are completed or failed without another attempt."""
DISCARD_RESULTS = Bulk(
    1,
    """UPDATE ends SET text = NULL, data = NULL, checksum = NULL, text_checksum = NULL, text_sha256 = NULL,
    data_sha256 = NULL FROM {rows} AS new WHERE id = column1""",
)
"""For damaged results, and for the messages that are stored with the results."""
SET_SESSIONS = Bulk(
    3,
    """UPDATE starts SET session_id = coalesce(column2, session_id),
    session_confirmed = coalesce(column3, session_confirmed)
    FROM {rows} AS new WHERE id = column1""",
)
SET_TASKS = Bulk(
    4,
    """UPDATE given_tasks SET set_to = column2, crashes = crashes + column3,
    answers = iif(column4 = 0, answers, column4)
    FROM {rows} AS new WHERE id = column1""",
)
ADD_MESSAGES = Bulk(
    9,
    """INSERT INTO other_messages (id, task, attempt, role, at, input_tokens, output_tokens, checksum, content)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL""",
)
ADD_LARGE_MESSAGES = Bulk(
    9,
    """INSERT INTO other_messages (id, task, attempt, role, at, input_tokens, output_tokens, checksum, content_sha256)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL""",
)
ADD_SESSIONS = Bulk(
    5,
    """INSERT INTO sessions (run_id, task_id, session_id, attempt, opened_at)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL
    ON CONFLICT (run_id, task_id, session_id) DO UPDATE SET attempt = excluded.attempt""",
)
ADD_EVENTS = Bulk(
    7,
    """INSERT INTO other_events (run_id, seq, at, kind, task_id, attempt, detail)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL""",
)

IN_ORDER = (
    ADD_TASKS,
    ADD_STARTS,
    ADD_COMPLETIONS,
    ADD_LARGE_COMPLETIONS,
    ADD_ENDS,
    FINISH_ENDS,
    DISCARD_RESULTS,
    SET_SESSIONS,
    SET_TASKS,
    ADD_MESSAGES,
    ADD_LARGE_MESSAGES,
    ADD_SESSIONS,
    ADD_EVENTS,
)
"""The order of the statements of a batch: rows are added before rows are changed."""

FIND_TASKS = Bulk(
    2,
    """SELECT tasks.task_id, position, status, attempt, started_seq FROM {rows} AS new
    CROSS JOIN tasks ON run_id = column1 AND tasks.task_id = column2""",
)
"""For the task cache. CROSS JOIN makes SQLite look the tasks up one by one, instead of reading all tasks."""
NEXT_TASK = "SELECT ifnull(max(id) + 1, :first) FROM given_tasks WHERE id BETWEEN :first AND :last"

ADD_BLOB = """
INSERT INTO blobs (sha256, size, content) VALUES (?, ?, ?)
ON CONFLICT (sha256) DO UPDATE SET content = excluded.content WHERE content IS NOT excluded.content
"""
"""Keeps an existing blob, but repairs a damaged blob."""

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

GET_NUMBER = "SELECT number FROM runs WHERE run_id = ?"
GET_HEAD = """
SELECT number, name, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims,
    policy_state, policy_seq, owner_id, owner_host, owner_boot_id, owner_pid, owner_process_started, owner_claimed_at
FROM runs WHERE run_id = ?
"""
GET_SETTINGS = """
SELECT coalesce((SELECT content FROM blobs WHERE sha256 = settings_sha256), settings) FROM runs WHERE run_id = ?
"""
LIST_RUNS = """
SELECT run_id, name, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims,
    policy_state, policy_seq, owner_id, owner_host, owner_boot_id, owner_pid, owner_process_started, owner_claimed_at
FROM runs ORDER BY created_at DESC, number DESC LIMIT ?
"""
COUNT_TASKS = "SELECT status, count(*) FROM tasks WHERE run_id = ? GROUP BY status ORDER BY min(position)"
SUM_USAGE = "SELECT sum(input_tokens), sum(output_tokens), sum(cost_usd) FROM attempts WHERE run_id = ?"
LIST_TASKS = """
SELECT task_id, position, prompt, backend, spec, status, attempt,
    coalesce(text, (SELECT content FROM blobs WHERE sha256 = text_sha256)),
    coalesce(data, (SELECT content FROM blobs WHERE sha256 = data_sha256)), checksum, error_kind, error, session_id,
    input_tokens, output_tokens, cost_usd, duration_s, started_at, ended_at, crashes, session_confirmed, question,
    asked, answers, added_by, model, depends_on
FROM tasks WHERE run_id = ? ORDER BY position
"""
_ATTEMPT = """SELECT task_id, attempt, status, backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, model, duration_s FROM attempts"""
LIST_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? ORDER BY started_seq"
LIST_TASK_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? AND task_id = ? ORDER BY attempt"
LIST_MESSAGES = """
SELECT attempt, role, coalesce(content, (SELECT content FROM blobs WHERE sha256 = content_sha256)),
    part, input_tokens, output_tokens, at, checksum
FROM messages WHERE run_id = ? AND task_id = ? ORDER BY seq, part
"""
LAST_SEQ = "SELECT number, last_seq FROM runs WHERE run_id = ?"
LIST_EVENTS = """
SELECT * FROM (SELECT seq, at, kind, task_id, attempt, detail, NULL AS backend FROM other_events
    WHERE run_id = :run_id AND seq > :after ORDER BY seq LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT s.id & 4294967295, s.started_at, 'task_started', t.task_id, s.attempt, '{}', s.backend
    FROM starts AS s JOIN given_tasks AS t ON t.id = s.task
    WHERE s.id BETWEEN :first AND :last ORDER BY s.id LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT e.end_id & 4294967295, e.ended_at, 'task_completed', t.task_id, s.attempt,
        '{"input_tokens":' || e.input_tokens || ',"output_tokens":' || e.output_tokens || '}', NULL
    FROM ends AS e JOIN starts AS s ON s.id = e.id JOIN given_tasks AS t ON t.id = s.task
    WHERE e.end_id BETWEEN :first AND :last AND e.status = 'completed'
    ORDER BY e.end_id LIMIT :limit)
ORDER BY 1 LIMIT :limit
"""
"""The rows of the view `events`. Each part has the limit itself, so the cost of a page depends on the page alone."""

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
    "DELETE FROM notes WHERE run_id = :run_id",
    "DELETE FROM other_events WHERE run_id = :run_id",
    "DELETE FROM sessions WHERE run_id = :run_id",
    "DELETE FROM other_messages WHERE id BETWEEN :first AND :last",
    "DELETE FROM ends WHERE id BETWEEN :first AND :last",
    "DELETE FROM starts WHERE id BETWEEN :first AND :last",
    "DELETE FROM given_tasks WHERE id BETWEEN :first AND :last",
    "DELETE FROM runs WHERE number = :run",
)
"""In the order of the references, the referring rows first."""
DELETE_UNUSED_BLOBS = """
DELETE FROM blobs WHERE NOT EXISTS (SELECT 1 FROM ends WHERE text_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM ends WHERE data_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM ends WHERE prompt_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM other_messages WHERE content_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM runs WHERE settings_sha256 = blobs.sha256)
"""
LIST_SESSIONS = "SELECT DISTINCT session_id FROM sessions"
RUN_SIZES = """
SELECT run_id, sum(bytes) FROM (
    SELECT number, length(CAST(settings AS BLOB)) + ifnull(length(CAST(error AS BLOB)), 0)
        + ifnull(length(CAST(policy_state AS BLOB)), 0) AS bytes FROM runs
    UNION ALL
    SELECT id >> 32, length(CAST(prompt AS BLOB)) + length(CAST(spec AS BLOB))
        + ifnull(length(CAST(answers AS BLOB)), 0) FROM given_tasks
    UNION ALL
    SELECT id >> 32, ifnull(length(CAST(text AS BLOB)), 0) + ifnull(length(CAST(data AS BLOB)), 0)
        + ifnull(length(CAST(prompt AS BLOB)), 0) + ifnull(length(CAST(error AS BLOB)), 0)
        + ifnull(length(CAST(question AS BLOB)), 0) + ifnull(length(CAST(asked AS BLOB)), 0) FROM ends
    UNION ALL
    SELECT id >> 32, length(CAST(content AS BLOB)) FROM other_messages WHERE content IS NOT NULL
    UNION ALL
    SELECT r.number, length(CAST(n.body AS BLOB)) FROM notes AS n JOIN runs AS r ON r.run_id = n.run_id
    UNION ALL
    SELECT number, size FROM (
        SELECT number, settings_sha256 AS sha256 FROM runs WHERE settings_sha256 IS NOT NULL
        UNION
        SELECT id >> 32, text_sha256 FROM ends WHERE text_sha256 IS NOT NULL
        UNION
        SELECT id >> 32, data_sha256 FROM ends WHERE data_sha256 IS NOT NULL
        UNION
        SELECT id >> 32, prompt_sha256 FROM ends WHERE prompt_sha256 IS NOT NULL
        UNION
        SELECT id >> 32, content_sha256 FROM other_messages WHERE content_sha256 IS NOT NULL
    ) JOIN blobs USING (sha256)
) JOIN runs USING (number) GROUP BY number
"""
