"""The tables, the same in SQLite and PostgreSQL, the statements on them, and the checksums and digests in them.

A dialect fills in the words in braces, renders a `Write` for many rows, and adapts the placeholders `?`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from functools import cache, lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar
from zlib import crc32

from plait.errors import StoreError
from plait.statuses import TASK_STATUSES, AttemptStatus, RunStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
Mode: TypeAlias = Literal["create", "existing", "read"]
Reading: TypeAlias = Generator[tuple[str, tuple[Any, ...]], Iterable[Row], T]
"""Work on a database: yields a statement with its parameters, is sent the rows, and returns the result."""

FORMAT: Final = 203
"""The one format that this plait reads and writes. Lower numbers were used in development."""
_SHOWN_ONLY = {RunStatus.INTERRUPTED, RunStatus.PARKED}
RUN_STATUSES: Final = tuple(status.value for status in RunStatus if status not in _SHOWN_ONLY)

_ENDS: Final = tuple(status.value for status in AttemptStatus if status is not AttemptStatus.RUNNING)

_SCHEMA: Final = """
-- Times are UTC, ISO 8601 with milliseconds. JSON is text. Checksums are CRC-32 over what people and models wrote.

CREATE TABLE texts (                     -- every text of more than 64 KiB, once: named by the columns ..._sha256
    sha256 {bytes} NOT NULL PRIMARY KEY,
    content {text} NOT NULL
){table};

CREATE TABLE runs (
    number {serial},                     -- the order of creation
    run_id {text} NOT NULL UNIQUE,
    name {text} NOT NULL,
    status {text} NOT NULL CHECK ({run_status}),
    created_at {text} NOT NULL,
    started_at {text},
    ended_at {text},
    error {text},
    last_seq {int} NOT NULL DEFAULT 0,   -- the number of the last applied change
    epoch {int} NOT NULL DEFAULT 0,      -- the number of claims
    claims {text} NOT NULL DEFAULT '[]', -- JSON: [number of the change, owner_id] of every claim
    owner_id {text},                     -- NULL without an owner
    owner_host {text},
    owner_boot_id {text},
    owner_pid {int},
    owner_process_started {text},
    owner_claimed_at {text},
    lease_expires_at {float},            -- Unix time; without an owner, the time from which a waiting run can go on
    policy_state {text},                 -- JSON: the state of the run's policy
    policy_seq {int} NOT NULL DEFAULT 0, -- the number of the change with that state
    input_tokens {int} NOT NULL DEFAULT 0,   -- the sums over all attempts, here and below
    output_tokens {int} NOT NULL DEFAULT 0,
    cost_usd {float},                    -- NULL if unknown
    cache_read_tokens {int} NOT NULL DEFAULT 0,
    cache_write_tokens {int} NOT NULL DEFAULT 0,
    reasoning_tokens {int} NOT NULL DEFAULT 0,
    cost_is_partial {int} NOT NULL DEFAULT 0,
    cache_write_1h_tokens {int} NOT NULL DEFAULT 0,
    settings_checksum {int} NOT NULL,
    settings_sha256 {bytes},
    settings {text}                      -- JSON; NULL if in texts
){table};

CREATE TABLE tasks (
    run_id {text} NOT NULL,
    position {int} NOT NULL,             -- in the order of adding, from 0: names the task in attempts and messages
    task_id {text} NOT NULL,
    status {text} NOT NULL DEFAULT 'pending' CHECK ({task_status}),
    attempt {int} NOT NULL DEFAULT 0,    -- the last attempt; 0 before the first
    attempt_backend {text},              -- of the last attempt, as the next three
    session_id {text},
    started_at {text},
    started_seq {int},                   -- the number of the change
    session_confirmed {int} NOT NULL DEFAULT 0,
    crashes {int} NOT NULL DEFAULT 0,    -- the deaths of owners that count for the task
    backend {text},
    added_by {text},
    question {text},                     -- while waiting_input
    asked {text},                        -- JSON
    answers {text},                      -- JSON
    answers_checksum {int},
    depends_on {text} NOT NULL,          -- JSON
    spec {text} NOT NULL,                -- JSON
    spec_checksum {int} NOT NULL,        -- over task_id, depends_on and spec
    prompt_checksum {int} NOT NULL,      -- over task_id and prompt
    prompt_sha256 {bytes},
    prompt {text},                       -- the template; NULL if in texts
    PRIMARY KEY (run_id, position),
    UNIQUE (run_id, task_id)
){table};

CREATE TABLE attempts (                  -- the attempts that have ended: a running one is in the columns of its task
    run_id {text} NOT NULL,
    position {int} NOT NULL,             -- of the task
    task_id {text} NOT NULL,
    attempt {int} NOT NULL,
    status {text} NOT NULL CHECK ({attempt_status}),
    backend {text} NOT NULL,
    session_id {text},
    started_at {text} NOT NULL,
    started_seq {int} NOT NULL,
    ended_at {text} NOT NULL,
    ended_seq {int} NOT NULL,
    input_tokens {int} NOT NULL DEFAULT 0,
    output_tokens {int} NOT NULL DEFAULT 0,
    cost_usd {float},
    model {text},
    cache_read_tokens {int} NOT NULL DEFAULT 0,
    cache_write_tokens {int} NOT NULL DEFAULT 0,
    reasoning_tokens {int} NOT NULL DEFAULT 0,
    cost_is_partial {int} NOT NULL DEFAULT 0,
    cache_write_1h_tokens {int} NOT NULL DEFAULT 0,
    duration_s {float},
    error_kind {text},
    error {text},
    traceback {text},
    prompt_checksum {int},               -- over task_id and prompt
    prompt_sha256 {bytes},
    prompt {text},                       -- if the attempt was this prompt and the answer `text`, which are no messages
    result_checksum {int},               -- over task_id, text and data; NULL without a result
    text_sha256 {bytes},
    text {text},                         -- the result; NULL if in texts
    data {text},                         -- JSON: the structured result
    PRIMARY KEY (run_id, position, attempt)
){table};

CREATE TABLE messages (                  -- of conversations of more than one prompt and one answer
    run_id {text} NOT NULL,
    position {int} NOT NULL,             -- of the task
    task_id {text} NOT NULL,
    seq {int} NOT NULL,                  -- the number of the change
    part {int} NOT NULL,                 -- counts the messages of the change from 0
    attempt {int} NOT NULL,              -- 0 for a message of a person after the run
    role {text} NOT NULL,
    at {text} NOT NULL,
    input_tokens {int} NOT NULL,
    output_tokens {int} NOT NULL,
    checksum {int} NOT NULL,             -- over task_id, content and role
    content_sha256 {bytes},
    content {text},                      -- NULL if in texts
    PRIMARY KEY (run_id, position, seq, part)
){table};

CREATE TABLE events (                    -- the history of each run, for people and for listeners
    run_id {text} NOT NULL,
    seq {int} NOT NULL,                  -- the number of the change
    at {text} NOT NULL,
    kind {text} NOT NULL,
    task_id {text},
    attempt {int},
    detail {text} NOT NULL,              -- JSON without prompts and results
    PRIMARY KEY (run_id, seq)
){keyed};

CREATE TABLE notes (                     -- requests to the owner of a run, by any process
    run_id {text} NOT NULL,
    number {int} NOT NULL,
    at {text} NOT NULL,
    kind {text} NOT NULL,
    task_id {text},
    body {text} NOT NULL,                -- JSON
    checksum {int} NOT NULL,             -- over kind, task_id and body
    PRIMARY KEY (run_id, number)
){keyed};

CREATE TABLE accounts (                  -- the limits of requests that several processes keep together
    account {text} NOT NULL PRIMARY KEY, -- a digest of the server and the key, or a name
    state {text} NOT NULL                -- JSON
){keyed};
"""


def schema(words: Mapping[str, str]) -> str:
    """Return the statements that create the tables. `words` are the types and the kinds of tables of the dialect."""
    statuses = {"run_status": RUN_STATUSES, "task_status": TASK_STATUSES, "attempt_status": _ENDS}
    return _SCHEMA.format_map({**words, **{name: _is_one_of("status", values) for name, values in statuses.items()}})


def _is_one_of(column: str, words: Iterable[str]) -> str:
    # SQLite builds the list of an IN again for every row, which took a fifth of the time of a write.
    return " OR ".join(f"{column} = '{word}'" for word in words)


COLUMNS: Final = {
    table: re.findall(r"^    ([a-z]\w+) \{", columns, re.MULTILINE)
    for table, columns in re.findall(r"^CREATE TABLE (\w+) \((.*?)^\)", _SCHEMA, re.MULTILINE | re.DOTALL)
}


class Write:
    """A statement for many rows: an update of the rows that have the values of `key`, or an insert without a key. The
    values of a row: `columns`, by default all columns of the table, then those of the key.
    """

    __slots__ = ("at_once", "columns", "end", "key", "table")

    def __init__(self, table: str, columns: str = "", key: str = "", *, end: str = "", at_once: int = 1) -> None:
        self.table = table
        self.columns = tuple(columns.split() or COLUMNS[table])
        self.key = tuple(key.split())
        self.end = end
        """What follows the values of an insert."""
        self.at_once = at_once
        """The most rows of one statement in SQLite: few if they may be long, because the connection keeps the values.
        Every execution hands the interpreter lock over.
        """


@cache
def for_each_row(write: Write, count: int = 1) -> str:
    """Return the statement for `count` rows, in SQLite."""
    columns = (*write.columns, *write.key)
    marks = ", ".join([f"({', '.join('?' * len(columns))})"] * count)
    if not write.key:
        return f"INSERT INTO {write.table} ({', '.join(columns)}) VALUES {marks}{write.end}"
    if count > 1:  # SQLite names the columns of VALUES by number
        return _update_from(write, f"(VALUES {marks}) AS u", [f"column{n}" for n, _ in enumerate(columns, 1)])
    changed = ", ".join(f"{column} = ?" for column in write.columns)
    return f"UPDATE {write.table} SET {changed} WHERE {' AND '.join(f'{column} = ?' for column in write.key)}"


def _update_from(write: Write, rows: str, names: Sequence[str]) -> str:
    pairs = [f"{column} = u.{name}" for column, name in zip((*write.columns, *write.key), names, strict=True)]
    of_key = " AND ".join(f"t.{pair}" for pair in pairs[len(write.columns) :])
    return f"UPDATE {write.table} AS t SET {', '.join(pairs[: len(write.columns)])} FROM {rows} WHERE {of_key}"


KINDS: Final = dict(re.findall(r"^    (\w+) \{(\w+)\}", _SCHEMA, re.MULTILINE))
"""The kind of each column. Columns of one name are of one kind, but for the number of a run, which is never written."""
_ARRAYS: Final = {"text": "text[]", "int": "bigint[]", "float": "float8[]", "bytes": "bytea[]"}


@lru_cache(maxsize=512)
def for_all_rows(writes: tuple[Write, ...], head: Write | None = None) -> str:
    """Return the one statement for the rows of all writes, in PostgreSQL: each column is an array, so the statement has
    the same text for any number of rows, and the server plans it once. It returns 1.

    With a head, SET_HEAD or SET_LAST_SEQ, its row goes before the arrays. The statement then writes nothing and returns
    0 if the stored head is not the expected one, by its last change, epoch and owner.
    """
    parts: list[str] = []
    source = ""
    if head is not None:
        changed = ", ".join(f"{column} = ?" for column in head.columns)
        expected = "run_id = ? AND last_seq = ? AND epoch = ? AND owner_id IS NOT DISTINCT FROM ?"
        by_the_clock = "written_at = clock_timestamp(), lease_s = coalesce(?, lease_s)"
        parts.append(f"head AS (UPDATE runs SET {changed}, {by_the_clock} WHERE {expected} RETURNING number)")
        source = "head, "
    for number, write in enumerate(writes):
        columns = (*write.columns, *write.key)
        arrays = ", ".join(f"?::{_ARRAYS[KINDS[column]]}" for column in columns)
        rows = f"{source}unnest({arrays}) AS u ({', '.join(columns)})"
        if not write.key:
            names = ", ".join(f"u.{column}" for column in columns)
            part = f"INSERT INTO {write.table} ({', '.join(columns)}) SELECT {names} FROM {rows}{write.end}"
        else:
            part = _update_from(write, rows, columns)
        parts.append(f"w{number} AS ({part})")
    return f"WITH {', '.join(parts)} SELECT {'1' if head is None else 'count(*) FROM head'}"


_USAGE: Final = (
    "input_tokens output_tokens cost_usd model cache_read_tokens cache_write_tokens reasoning_tokens cost_is_partial "
    "cache_write_1h_tokens"
)
_SUMS: Final = _USAGE.replace(" model", "")
_TASK, _ATTEMPT = "run_id position", "run_id position attempt"
_RESULT: Final = "result_checksum text_sha256 text data"

ADD_TEXT: Final = Write(
    "texts",
    end=" ON CONFLICT (sha256) DO UPDATE SET content = excluded.content WHERE texts.content <> excluded.content",
)
"""Keeps a text that is there, but mends a damaged one."""
ADD_RUN: Final = Write("runs", "run_id name status created_at settings_checksum settings_sha256 settings")
_ADDED = "run_id position task_id depends_on spec spec_checksum prompt_checksum"
ADD_TASK: Final = Write("tasks", f"{_ADDED} prompt_sha256 prompt backend added_by")
ADD_TASK_USUALLY: Final = Write("tasks", f"{_ADDED} prompt", at_once=32)
"""A NULL is bound five times as slowly as a text or a number, so a task without a backend of its own, with a short
prompt, names only the columns that it needs. So does COMPLETE_USUALLY.
"""
END_ATTEMPT: Final = Write(
    "attempts",
    end=f" ON CONFLICT ({', '.join(_ATTEMPT.split())}) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in COLUMNS["attempts"][4:]),
)
"""An attempt that ended with a question ends again."""
_COMPLETED = (
    "run_id position task_id attempt backend started_at started_seq status ended_at ended_seq input_tokens "
    "output_tokens duration_s prompt_checksum prompt result_checksum text"
)
COMPLETE_USUALLY: Final = Write("attempts", f"{_COMPLETED} session_id cost_usd model", at_once=8)
"""A short prompt with a short answer, without data, and without tokens counted apart."""
COMPLETE_FUNCTION: Final = Write("attempts", _COMPLETED, at_once=8)
"""The same by a backend without sessions, costs and models."""
ADD_MESSAGE: Final = Write("messages")
ADD_EVENT: Final = Write("events", at_once=32)
ADD_NOTE: Final = Write("notes")

SET_HEAD: Final = Write(
    "runs",
    "status started_at ended_at error epoch claims owner_id owner_host owner_boot_id owner_pid owner_process_started "
    f"owner_claimed_at lease_expires_at policy_state policy_seq last_seq {_SUMS}",
    "run_id",
)
SET_LAST_SEQ: Final = Write("runs", f"last_seq {_SUMS}", "run_id")
_STARTED = "status attempt session_confirmed attempt_backend started_at started_seq"
START_TASK: Final = Write("tasks", _STARTED, _TASK, at_once=16)
START_IN_SESSION: Final = Write("tasks", f"{_STARTED} session_id", _TASK)
SET_STATUS: Final = Write("tasks", "status", _TASK, at_once=16)
LEAVE_QUESTION: Final = Write("tasks", "status question asked", _TASK)
ASK: Final = Write("tasks", "status question asked crashes", _TASK)
ANSWER: Final = Write("tasks", "status question asked answers answers_checksum", _TASK)
_REOPENED = "status session_confirmed answers answers_checksum"
REOPEN: Final = Write("tasks", _REOPENED, _TASK)
REOPEN_CHANGED: Final = Write("tasks", f"{_REOPENED} prompt_checksum prompt_sha256 prompt", _TASK)
"""One statement, because no batch changes a row twice at once: see apply_events.py."""
SET_SESSION: Final = Write("tasks", "session_id", _TASK)
CONFIRM_SESSION: Final = Write("tasks", "session_id session_confirmed", _TASK)
INTERRUPT: Final = Write("tasks", "status crashes", _TASK)
RETRY: Final = Write("tasks", "status session_confirmed", _TASK)
SET_ENDED_SESSION: Final = Write("attempts", "session_id", _ATTEMPT)
DROP_RESULT: Final = Write("attempts", _RESULT, _ATTEMPT)


# A dialect has its own words for `{among}`, "one of the names in this parameter"; for `{named}`, the tasks with the
# names in this parameter, of the run in the next one; for `{expired}`, "owned, with a lease that has expired"; and for
# `{now}`, the Unix time by the clock that judges leases. `{lock}` ends a read of a row that the transaction changes.
_HEAD = (
    "run_id, name, created_at, status, started_at, ended_at, error, last_seq, claims, owner_id, owner_host, "
    "owner_boot_id, owner_pid, owner_process_started, owner_claimed_at, lease_expires_at, policy_state, policy_seq, "
    f"{_SUMS.replace(' ', ', ')}, {{expired}}"
)
GET_LAST: Final = "SELECT last_seq, epoch, owner_id FROM runs WHERE run_id = ?"
GET_HEAD: Final = f"SELECT {_HEAD} FROM runs WHERE run_id = ?"
GET_SETTINGS: Final = """SELECT r.settings_checksum, r.settings_sha256, r.settings, x.content
FROM runs AS r LEFT JOIN texts AS x ON x.sha256 = r.settings_sha256 WHERE run_id = ?"""
LIST_RUNS: Final = f"SELECT {_HEAD} FROM runs ORDER BY created_at DESC, number DESC LIMIT ?"
LIST_CLAIMABLE: Final = f"""SELECT {_HEAD} FROM runs
WHERE status IN ('queued', 'running', 'cancelling', 'waiting_input') AND CASE WHEN owner_id IS NOT NULL THEN {{expired}}
    WHEN status = 'waiting_input' THEN lease_expires_at < {{now}} ELSE coalesce(lease_expires_at, 0) < {{now}} END
ORDER BY created_at, number LIMIT ?"""
LIST_RUN_IDS: Final = "SELECT run_id FROM runs ORDER BY number"
COUNT_TASKS: Final = """SELECT run_id, status, count(*) FROM tasks WHERE run_id {among}
GROUP BY run_id, status ORDER BY min(position)"""
LIST_TASK_IDS: Final = "SELECT task_id FROM tasks WHERE run_id = ? ORDER BY position"
GET_SIZE: Final = "SELECT count(*) FROM tasks WHERE run_id = ?"
_SPENT = ", ".join(f"a.{column}" for column in _USAGE.split())
_WITH_ATTEMPT = "a.run_id = t.run_id AND a.position = t.position AND a.attempt = t.attempt"
_STATE = f"""t.task_id, t.position, t.status, t.attempt, t.crashes, t.attempt_backend, t.session_id, t.started_at,
    t.started_seq, a.duration_s, {_SPENT}"""
GET_STATES: Final = f"SELECT {_STATE} FROM {{named}} AS t LEFT JOIN attempts AS a ON {_WITH_ATTEMPT}"
GET_OPEN_STATES: Final = f"""SELECT {_STATE} FROM tasks AS t LEFT JOIN attempts AS a ON {_WITH_ATTEMPT}
WHERE t.run_id = ? AND t.status IN ('pending', 'running', 'waiting_input')"""
LIST_TASKS: Final = f"""SELECT t.task_id, t.position, t.status, t.attempt, t.session_confirmed, t.crashes, t.backend,
    t.added_by, t.question, t.asked, t.answers, t.answers_checksum, t.depends_on, t.spec, t.spec_checksum,
    t.prompt_checksum, t.prompt_sha256, t.prompt, p.content, t.session_id, t.started_at, a.ended_at, a.duration_s,
    a.error_kind, a.error, a.result_checksum, a.text_sha256, a.text, x.content, a.data, {_SPENT}
FROM tasks AS t LEFT JOIN attempts AS a ON {_WITH_ATTEMPT}
    LEFT JOIN texts AS x ON x.sha256 = a.text_sha256 LEFT JOIN texts AS p ON p.sha256 = t.prompt_sha256
WHERE t.run_id = ?"""
LIST_TASK: Final = f"{LIST_TASKS} AND t.task_id = ?"
LIST_TASKS_AT: Final = f"{LIST_TASKS} AND t.position >= ? AND t.position < ?"
_ATTEMPTS = f"""SELECT a.started_seq, a.task_id, a.attempt, a.status, a.backend, a.session_id, a.started_at, a.ended_at,
    a.error_kind, a.error, a.duration_s, a.traceback, {_SPENT} FROM"""
_RUNNING = """UNION ALL SELECT t.started_seq, t.task_id, t.attempt, t.status, t.attempt_backend, t.session_id,
    t.started_at, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, 0, 0, 0, 0, 0
    FROM tasks AS t WHERE t.status = 'running' AND"""
LIST_ATTEMPTS: Final = f"{_ATTEMPTS} attempts AS a WHERE a.run_id = ? {_RUNNING} t.run_id = ?"
_OF_TASK = "a.run_id = t.run_id AND a.position = t.position"
_THE_TASK = "t.run_id = ? AND t.task_id = ?"
LIST_TASK_ATTEMPTS: Final = (
    f"{_ATTEMPTS} tasks AS t JOIN attempts AS a ON {_OF_TASK} WHERE {_THE_TASK} {_RUNNING} {_THE_TASK}"
)
LIST_MESSAGES: Final = f"""SELECT a.seq, a.part, a.attempt, a.role, a.at, a.input_tokens, a.output_tokens, a.checksum,
    a.content_sha256, a.content, x.content
FROM tasks AS t JOIN messages AS a ON {_OF_TASK} LEFT JOIN texts AS x ON x.sha256 = a.content_sha256
WHERE {_THE_TASK}"""
LIST_EXCHANGES: Final = f"""SELECT a.ended_seq, a.attempt, a.ended_at, a.input_tokens, a.output_tokens,
    a.prompt_checksum, a.prompt_sha256, a.prompt, p.content, a.result_checksum, a.text_sha256, a.text, x.content, a.data
FROM tasks AS t JOIN attempts AS a ON {_OF_TASK}
    LEFT JOIN texts AS x ON x.sha256 = a.text_sha256 LEFT JOIN texts AS p ON p.sha256 = a.prompt_sha256
WHERE {_THE_TASK} AND a.prompt_checksum IS NOT NULL"""
"""The attempts that were one prompt and one answer."""
LIST_EVENTS: Final = """SELECT seq, at, kind, task_id, attempt, detail FROM events
WHERE run_id = ? AND seq > ? AND kind = coalesce(?, kind) ORDER BY seq LIMIT ?"""
NEXT_NOTE: Final = "SELECT coalesce(max(number), 0) + 1 FROM notes WHERE run_id = ?"
GET_ACCOUNT: Final = "SELECT account, state, {now} FROM accounts WHERE account = coalesce(?, account){lock}"
ADD_ACCOUNT: Final = "INSERT INTO accounts (account, state) VALUES (?, ?) ON CONFLICT DO NOTHING"
SET_ACCOUNT: Final = "UPDATE accounts SET state = ? WHERE account = ?"
LIST_NOTES: Final = """SELECT number, at, kind, task_id, body, checksum FROM notes
WHERE run_id = ? AND number > ? ORDER BY number"""
LIST_SESSIONS: Final = """SELECT session_id FROM attempts WHERE session_id IS NOT NULL
UNION SELECT session_id FROM tasks WHERE session_id IS NOT NULL"""
LIST_OPENED_SESSIONS: Final = "SELECT detail FROM events WHERE kind = 'session_opened'"
"""With the sessions that another session of the same attempt has replaced."""


GET_OWNERSHIP: Final = "SELECT run_id, status, owner_pid, owner_host FROM runs WHERE run_id = ?{lock}"
DELETE_RUN: Final = tuple(
    f"DELETE FROM {table} WHERE run_id = ?" for table in ("notes", "events", "messages", "attempts", "tasks", "runs")
)
_TEXTS: Final = {
    "runs": ("settings error policy_state", "settings_sha256"),
    "tasks": ("prompt spec question asked answers", "prompt_sha256"),
    "attempts": ("prompt text data error traceback", "prompt_sha256 text_sha256"),
    "messages": ("content", "content_sha256"),
    "notes": ("body", ""),
}
"""The columns of each table with texts, and those with keys of `texts`."""
_KEYS: Final = [(table, key) for table, (_, keys) in _TEXTS.items() for key in keys.split()]
DELETE_UNUSED_TEXTS: Final = "DELETE FROM texts WHERE sha256 IN (SELECT sha256 FROM texts" + (
    "".join(f" EXCEPT SELECT {key} FROM {table} WHERE {key} IS NOT NULL" for table, key in _KEYS) + ")"
)


def _run_sizes() -> str:
    parts: list[str] = []
    for table, (columns, _) in _TEXTS.items():
        total = " + ".join(f"coalesce({{bytes_of}}(CAST({column} AS {{bytes}})), 0)" for column in columns.split())
        parts.append(f"SELECT run_id, {total} AS bytes FROM {table}")
    keys = " UNION ".join(f"SELECT run_id, {key} AS sha256 FROM {table}" for table, key in _KEYS)
    large = f"({keys}) AS k JOIN texts AS x ON x.sha256 = k.sha256"
    parts.append(f"SELECT k.run_id, {{bytes_of}}(CAST(x.content AS {{bytes}})) FROM {large}")
    return f"SELECT run_id, sum(bytes) FROM ({' UNION ALL '.join(parts)}) AS s GROUP BY run_id"


GET_RUN_SIZES: Final = _run_sizes()


_LARGE: Final = 64 * 1024
SHORT: Final = _LARGE // 4
"""The number of characters of a text that is never large, because a character takes four bytes at most."""


def damaged(run_id: str, what: str) -> StoreError:
    return StoreError(
        f"run {run_id!r} is damaged: {what} does not fit its checksum; restore a copy of the store, or start a new run"
    )


def checksum(owner: str, text: str | None, more: str | None = None) -> int:
    """Return the CRC-32 of the text, and of more, that belong to the task or run `owner`."""
    if len(text or "") + len(more or "") <= SHORT:
        whole = f"{owner}\0{text}" if more is None else f"{owner}\0{text}\0{len(more)}\0{more}"
        return crc32(whole.encode())
    rest = ("",) if more is None else (f"\0{len(more)}\0", more)
    value = 0
    for part in (f"{owner}\0", str(text), *rest):
        for piece in _encoded(part):
            value = crc32(piece, value)
    return value


def digest(text: str) -> bytes | None:
    """Return the key in `texts` of a large text; None for a text that belongs into its row."""
    if len(text) <= SHORT or (len(text) <= _LARGE and len(text.encode()) <= _LARGE):
        return None
    value = sha256()
    for piece in _encoded(text):
        value.update(piece)
    return value.digest()


def _encoded(text: str) -> Iterator[bytes]:
    """Yield the text in pieces, because a copy of a large text needs as much memory again."""
    for start in range(0, len(text), SHORT):
        yield text[start : start + SHORT].encode()
