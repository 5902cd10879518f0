"""Every SQL statement that reads or writes, by name. The tables are in `schema_*.sql`.

A batch's rows go in as few statements as possible: one statement carries up to 256 rows as VALUES. The sqlite3 module
gives the interpreter lock away at every step and must win it back, which takes up to 5 ms while the event loop is busy;
so one step for 256 rows, not 256 steps. Beside a thread that never rests, updates alone went from 182 to 2,752 tasks/s
against executemany; on an idle machine the two are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

CHUNKS = (256, 64, 16, 4, 1)
"""How many rows one statement may carry; few sizes, so that the prepared ones are used again and again."""


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """A statement over many rows: `head`, the rows, `tail`. `exact`: each row has to change exactly one stored row.

    Compared by identity: hashing the texts at every look-up would cost more than the look-up.
    """

    head: str
    width: int
    tail: str = ""
    exact: bool = True


@lru_cache(maxsize=256)
def bulk_sql(bulk: Bulk, rows: int) -> str:
    """The statement for `rows` rows."""
    row = f"({', '.join('?' * bulk.width)})"
    return f"{bulk.head} {', '.join([row] * rows)} {bulk.tail}"


ADD_TASKS = Bulk("INSERT INTO tasks (run_id, task_id, position, backend, prompt, spec) VALUES", 6)
ADD_DEPENDENCIES = Bulk("INSERT INTO dependencies (run_id, task_id, position, depends_on) VALUES", 4)
REOPEN_TASKS = Bulk(
    "UPDATE tasks SET status = 'pending' FROM (VALUES",
    2,
    ") AS new WHERE run_id = new.column1 AND task_id = new.column2 AND status = 'failed'",
)
START_TASKS = Bulk(
    "UPDATE tasks SET status = 'running', attempt = new.column3 FROM (VALUES",
    3,
    """) AS new WHERE run_id = new.column1 AND task_id = new.column2
    AND status = 'pending' AND attempt = new.column3 - 1""",
)
ADD_ATTEMPTS = Bulk(
    "INSERT INTO attempts (run_id, task_id, attempt, seq, started_at, backend, session_id, status) VALUES", 8
)
ADD_SESSIONS = Bulk(
    "INSERT INTO sessions (run_id, task_id, session_id, attempt, opened_at) VALUES",
    5,
    "ON CONFLICT (run_id, task_id, session_id) DO UPDATE SET attempt = excluded.attempt",
)
SET_SESSIONS = Bulk(
    "UPDATE attempts SET session_id = new.column4 FROM (VALUES",
    4,
    """) AS new WHERE run_id = new.column1 AND task_id = new.column2 AND attempts.attempt = iif(new.column3 > 0,
    new.column3, (SELECT attempt FROM tasks WHERE run_id = new.column1 AND task_id = new.column2))""",
)
ADD_MESSAGES = Bulk(
    """INSERT INTO messages
    (run_id, task_id, seq, attempt, role, at, input_tokens, output_tokens, content, checksum) VALUES""",
    10,
)
COMPLETE_TASKS = Bulk(
    """UPDATE tasks SET status = 'completed', text = new.column4, data = new.column5, checksum = new.column6
    FROM (VALUES""",
    6,
    """) AS new WHERE run_id = new.column1 AND task_id = new.column2
    AND status = 'running' AND attempt = new.column3""",
)
END_TASKS = Bulk(
    "UPDATE tasks SET status = new.column4 FROM (VALUES",
    4,
    """) AS new WHERE run_id = new.column1 AND task_id = new.column2
    AND status = 'running' AND attempt = new.column3""",
)
END_ATTEMPTS = Bulk(
    """UPDATE attempts SET status = new.column4, ended_at = new.column5, error_kind = new.column6, error = new.column7,
    input_tokens = new.column8, output_tokens = new.column9, cost_usd = new.column10, duration_s = new.column11
    FROM (VALUES""",
    11,
    """) AS new WHERE run_id = new.column1 AND task_id = new.column2 AND attempts.attempt = new.column3
    AND attempts.status = 'running'""",
)
CANCEL_TASKS = Bulk(
    "UPDATE tasks SET status = 'cancelled' FROM (VALUES",
    2,
    """) AS new WHERE run_id = new.column1 AND task_id = new.column2
    AND status IN ('pending', 'running', 'waiting_input')""",
)
CANCEL_ATTEMPTS = Bulk(
    "UPDATE attempts SET status = 'cancelled', ended_at = new.column3 FROM (VALUES",
    3,
    ") AS new WHERE run_id = new.column1 AND task_id = new.column2 AND status = 'running'",
    exact=False,
)
ADD_EVENTS = Bulk("INSERT INTO events (run_id, seq, at, kind, task_id, attempt, detail) VALUES", 7)

IN_ORDER = (
    ADD_TASKS,
    ADD_DEPENDENCIES,
    REOPEN_TASKS,
    START_TASKS,
    ADD_ATTEMPTS,
    ADD_SESSIONS,
    SET_SESSIONS,
    ADD_MESSAGES,
    COMPLETE_TASKS,
    END_TASKS,
    END_ATTEMPTS,
    CANCEL_TASKS,
    CANCEL_ATTEMPTS,
    ADD_EVENTS,
)
"""The order in which a group's statements run: a task exists before it starts, and starts before it ends."""

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
SELECT t.task_id, t.position, t.prompt, t.backend, t.spec, t.status, t.attempt, t.text, t.data, t.checksum,
    a.error_kind, a.error, a.session_id, a.input_tokens, a.output_tokens, a.cost_usd, a.duration_s,
    a.started_at, a.ended_at
FROM tasks AS t LEFT JOIN attempts AS a ON a.run_id = t.run_id AND a.task_id = t.task_id AND a.attempt = t.attempt
WHERE t.run_id = ? ORDER BY t.position
"""
LIST_DEPENDENCIES = "SELECT task_id, depends_on FROM dependencies WHERE run_id = ? ORDER BY task_id, position"
_ATTEMPT = """SELECT task_id, attempt, status, backend, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s FROM attempts"""
LIST_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? ORDER BY seq"
LIST_TASK_ATTEMPTS = f"{_ATTEMPT} WHERE run_id = ? AND task_id = ? ORDER BY attempt"
LIST_MESSAGES = """
SELECT attempt, role, content, input_tokens, output_tokens, at, checksum
FROM messages WHERE run_id = ? AND task_id = ? ORDER BY seq
"""
LIST_EVENTS = """
SELECT seq, at, kind, task_id, attempt, detail FROM events WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?
"""
