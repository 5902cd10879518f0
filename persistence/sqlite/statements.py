"""Every SQL statement that reads or writes, by name. The tables are in `schema_*.sql`.

A batch's rows go in as few statements as possible. The sqlite3 module gives the interpreter lock away at every step and
must win it back, which takes up to 5 ms while the event loop is busy: so one step for a thousand rows, not a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""How many rows one statement may carry; few sizes, so that the prepared ones are used again and again. The largest
keeps the widest rows below the 32,766 parameters that SQLite takes.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """A statement over many rows: `head`, the rows, `tail`. Each row has to change exactly one stored row, unless it
    is all NULL: it only fills the statement up.

    Compared by identity: hashing the texts at every look-up would cost more than the look-up.
    """

    head: str
    width: int
    tail: str = "WHERE column1 IS NOT NULL"


@lru_cache(maxsize=256)
def bulk_sql(bulk: Bulk, rows: int) -> str:
    """The statement for `rows` rows."""
    row = f"({', '.join('?' * bulk.width)})"
    return f"{bulk.head} (VALUES {', '.join([row] * rows)}) {bulk.tail}"


ADD_TASKS = Bulk("INSERT INTO tasks (run_id, task_id, position, backend, prompt, spec) SELECT * FROM", 6)
ADD_DEPENDENCIES = Bulk("INSERT INTO dependencies (run_id, task_id, position, depends_on) SELECT * FROM", 4)
START_TASKS = Bulk(
    """UPDATE tasks SET status = 'running', attempt = column3, attempt_status = 'running', attempt_backend = column4,
    session_id = column5, started_at = column6, started_seq = column7, ended_at = NULL, ended_seq = NULL,
    error_kind = NULL, error = NULL, input_tokens = 0, output_tokens = 0, cost_usd = NULL, duration_s = NULL FROM""",
    7,
    "AS new WHERE run_id = column1 AND task_id = column2 AND status = 'pending' AND attempt = column3 - 1",
)
SET_SESSIONS = Bulk(
    "UPDATE tasks SET session_id = column4 FROM",
    4,
    """AS new WHERE run_id = column1 AND task_id = column2
    AND attempt > 0 AND attempt = iif(column3 > 0, column3, attempt)""",
)
COMPLETE_TASKS = Bulk(
    """UPDATE tasks SET status = 'completed', attempt_status = 'completed', ended_at = column4, ended_seq = column5,
    input_tokens = column6, output_tokens = column7, cost_usd = column8, duration_s = column9,
    text = column10, data = column11, checksum = column12 FROM""",
    12,
    "AS new WHERE run_id = column1 AND task_id = column2 AND status = 'running' AND attempt = column3",
)
END_TASKS = Bulk(
    """UPDATE tasks SET status = column6, attempt_status = column7, ended_at = column4, ended_seq = column5,
    error_kind = column8, error = column9, duration_s = column10, input_tokens = column11, output_tokens = column12,
    cost_usd = column13 FROM""",
    13,
    "AS new WHERE run_id = column1 AND task_id = column2 AND status = 'running' AND attempt = column3",
)
CANCEL_TASKS = Bulk(
    """UPDATE tasks SET status = 'cancelled', attempt_status = iif(status = 'running', 'cancelled', attempt_status),
    ended_at = iif(status = 'running', column3, ended_at), ended_seq = iif(status = 'running', column4, ended_seq)
    FROM""",
    4,
    "AS new WHERE run_id = column1 AND task_id = column2 AND status IN ('pending', 'running', 'waiting_input')",
)
REOPEN_TASKS = Bulk(
    "UPDATE tasks SET status = 'pending' FROM",
    2,
    "AS new WHERE run_id = column1 AND task_id = column2 AND status = 'failed'",
)
ADD_MESSAGES = Bulk(
    """INSERT INTO messages (run_id, task_id, seq, attempt, role, at, input_tokens, output_tokens, content, checksum)
    SELECT * FROM""",
    10,
)
ADD_SESSIONS = Bulk(
    "INSERT INTO sessions (run_id, task_id, session_id, attempt, opened_at) SELECT * FROM",
    5,
    """WHERE column1 IS NOT NULL
    ON CONFLICT (run_id, task_id, session_id) DO UPDATE SET attempt = excluded.attempt""",
)
ADD_EVENTS = Bulk("INSERT INTO other_events (run_id, seq, at, kind, task_id, attempt, detail) SELECT * FROM", 7)

IN_ORDER = (
    ADD_TASKS,
    ADD_DEPENDENCIES,
    REOPEN_TASKS,
    START_TASKS,
    SET_SESSIONS,
    COMPLETE_TASKS,
    END_TASKS,
    CANCEL_TASKS,
    ADD_MESSAGES,
    ADD_SESSIONS,
    ADD_EVENTS,
)
"""The order in which gathered rows are written: a task exists before it starts, and starts before it ends."""

ADD_RUN = """
INSERT INTO runs (run_id, name, settings, created_at, status, last_seq, epoch, claims)
VALUES (?, ?, ?, ?, 'queued', 0, 0, '[]')
"""
SET_HEAD = """
UPDATE runs SET status = ?, started_at = ?, ended_at = ?, error = ?, last_seq = ?, epoch = ?, lease_expires_at = ?,
    claims = ?, owner_id = ?, owner_host = ?, owner_boot_id = ?, owner_pid = ?, owner_process_started = ?,
    owner_claimed_at = ?
WHERE run_id = ?
"""
SET_LAST_SEQ = "UPDATE runs SET last_seq = ? WHERE run_id = ?"

GET_HEAD = """
SELECT name, settings, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims,
    owner_id, owner_host, owner_boot_id, owner_pid, owner_process_started, owner_claimed_at
FROM runs WHERE run_id = ?
"""
LIST_RUNS = """
SELECT run_id, name, settings, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims,
    owner_id, owner_host, owner_boot_id, owner_pid, owner_process_started, owner_claimed_at
FROM runs ORDER BY created_at DESC, rowid DESC LIMIT ?
"""
COUNT_TASKS = "SELECT status, count(*) FROM tasks WHERE run_id = ? GROUP BY status ORDER BY min(position)"
SUM_USAGE = "SELECT sum(input_tokens), sum(output_tokens), sum(cost_usd) FROM attempts WHERE run_id = ?"
GET_TASK_STATUS = "SELECT status, attempt FROM tasks WHERE run_id = ? AND task_id = ?"
LIST_TASKS = """
SELECT task_id, position, prompt, backend, spec, status, attempt, text, data, checksum, error_kind, error, session_id,
    input_tokens, output_tokens, cost_usd, duration_s, started_at, ended_at
FROM tasks WHERE run_id = ? ORDER BY position
"""
LIST_DEPENDENCIES = "SELECT task_id, depends_on FROM dependencies WHERE run_id = ? ORDER BY task_id, position"
_ATTEMPT = """SELECT task_id, attempt, status, backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s FROM attempts"""
LIST_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? ORDER BY started_seq"
LIST_TASK_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? AND task_id = ? ORDER BY attempt"
LIST_MESSAGES = """
SELECT attempt, role, content, input_tokens, output_tokens, at, checksum
FROM messages WHERE run_id = ? AND task_id = ? ORDER BY seq
"""
LIST_EVENTS = """
SELECT seq, at, kind, task_id, attempt, detail, backend FROM events WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?
"""
