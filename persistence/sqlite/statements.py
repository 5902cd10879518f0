"""Every SQL statement that reads or writes, by name. `schema.sql` describes the tables and their ids.

The rows of a batch are written by as few statements as possible. The sqlite3 module releases the interpreter lock at
every step, and waits up to 5 ms for the lock while the event loop is busy: one step for a thousand rows is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from plait.persistence.old_tables import kinds

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The numbers of rows that a statement may have. Few numbers, because prepared statements are used again. The largest
number keeps the widest rows below the 32,766 parameters that SQLite allows.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """A statement over many rows.

    Rows whose first value is NULL are ignored: they fill the statement up to one of `SIZES`. A value that is usually
    missing comes as a substitute, 0 for a text or '' for a number (see tables/rows.py).

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
    9,
    """INSERT INTO given_tasks (id, run, task_id, backend, added_by, row_checksum, depends_on, spec, prompt)
    WITH new AS {rows} SELECT column1, column2, column3, nullif(column4, 0), nullif(column5, 0), column6, column7,
        column8, column9 FROM new WHERE column1 IS NOT NULL""",
)
ADD_TASK_COPIES = Bulk(
    7,
    """INSERT INTO given_tasks (id, run, task_id, backend, added_by, row_checksum, copy_of)
    WITH new AS {rows} SELECT column1, column2, column3, nullif(column4, 0), nullif(column5, 0), column6, column7
    FROM new WHERE column1 IS NOT NULL""",
)
ADD_STARTS = Bulk(
    8,
    """INSERT INTO starts (id, task, attempt, backend, session_id, session_confirmed, started_at, row_checksum)
    WITH new AS {rows} SELECT column1, column2, column3, column4, nullif(column5, 0), column6, column7, column8
    FROM new WHERE column1 IS NOT NULL""",
)
ADD_COMPLETIONS = Bulk(
    14,
    """INSERT INTO ends (id, end_id, status, ended_at, input_tokens, output_tokens, cost_usd, duration_s, model,
    row_checksum, checksum, prompt_checksum, text, data, prompt)
    WITH new AS {rows} SELECT column1, column2, 'completed', column3, column4, column5, nullif(column6, ''), column7,
        nullif(column8, 0), column9, column10, nullif(column11, ''), column12, nullif(column13, 0), nullif(column14, 0)
    FROM new WHERE column1 IS NOT NULL""",
)
"""Completions without a large part and without tokens counted apart. Three NULL columns less for the blobs save a
seventh of the time.
"""
ADD_COMPLETION_COPIES = Bulk(
    12,
    """INSERT INTO ends (id, end_id, status, ended_at, input_tokens, output_tokens, cost_usd, duration_s, model,
    row_checksum, checksum, prompt_checksum, copy_of)
    WITH new AS {rows} SELECT column1, column2, 'completed', column3, column4, column5, nullif(column6, ''), column7,
        nullif(column8, 0), column9, column10, nullif(column11, ''), column12
    FROM new WHERE column1 IS NOT NULL""",
)
ADD_LARGE_COMPLETIONS = Bulk(
    21,
    """INSERT INTO ends (id, end_id, status, ended_at, input_tokens, output_tokens, cost_usd, duration_s, model,
    cache_read_tokens, cache_write_tokens, reasoning_tokens, cost_is_partial, row_checksum, checksum, prompt_checksum,
    text, data, prompt, text_sha256, data_sha256, prompt_sha256)
    WITH new AS {rows} SELECT column1, column2, 'completed', column3, column4, column5, nullif(column6, ''), column7,
        nullif(column8, 0), column9, column10, column11, column12, column13, column14, nullif(column15, ''),
        nullif(column16, 0), nullif(column17, 0), nullif(column18, 0), column19, column20, column21
    FROM new WHERE column1 IS NOT NULL""",
)
ADD_ENDS = Bulk(
    18,
    """INSERT INTO ends (id, end_id, status, ended_at, input_tokens, output_tokens, cache_read_tokens,
    cache_write_tokens, reasoning_tokens, cost_is_partial, cost_usd, duration_s, model, error_kind, error, question,
    asked, row_checksum)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL""",
)
ADD_TRACEBACKS = Bulk(
    3,
    """INSERT INTO tracebacks (id, content, row_checksum)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL""",
)
FINISH_ENDS = Bulk(
    21,
    """UPDATE ends SET end_id = column2, status = column3, ended_at = column4, input_tokens = column5,
    output_tokens = column6, cache_read_tokens = column7, cache_write_tokens = column8, reasoning_tokens = column9,
    cost_is_partial = column10, cost_usd = column11, duration_s = column12, model = column13, error_kind = column14,
    error = column15, row_checksum = column16, checksum = column17, text = column18, data = column19,
    text_sha256 = column20, data_sha256 = column21, question = NULL, asked = NULL
    FROM {rows} AS new WHERE id = column1""",
)
"""For attempts of waiting tasks that are completed or failed without another attempt."""
DISCARD_RESULTS = Bulk(
    1,
    """UPDATE ends SET text = NULL, data = NULL, checksum = NULL, text_sha256 = NULL, data_sha256 = NULL,
    prompt = coalesce(prompt, (SELECT o.prompt FROM ends AS o WHERE o.id = ends.copy_of)), copy_of = NULL
    FROM {rows} AS new WHERE id = column1""",
)
"""For damaged results, and for the messages that are stored with the results."""
SET_SESSIONS = Bulk(
    4,
    """UPDATE starts SET session_id = column2, session_confirmed = column3, row_checksum = column4
    FROM {rows} AS new WHERE id = column1""",
)
SET_TASKS = Bulk(
    5,
    """UPDATE given_tasks SET set_to = column2, crashes = column3, answers = column4, row_checksum = column5
    FROM {rows} AS new WHERE id = column1""",
)
SET_PROMPTS = Bulk(
    4,
    """UPDATE given_tasks SET depends_on = column2, spec = column3, prompt = column4, copy_of = NULL
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
    6,
    """INSERT INTO sessions (run_id, task_id, session_id, attempt, opened_at, row_checksum)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL
    ON CONFLICT (run_id, task_id, session_id) DO UPDATE SET attempt = excluded.attempt,
        row_checksum = excluded.row_checksum""",
)
ADD_EVENTS = Bulk(
    8,
    """INSERT INTO other_events (run_id, seq, at, kind, task_id, attempt, detail, row_checksum)
    WITH new AS {rows} SELECT * FROM new WHERE column1 IS NOT NULL""",
)

BY_KIND = {
    kinds.ADD_TASKS: ADD_TASKS,
    kinds.ADD_TASK_COPIES: ADD_TASK_COPIES,
    kinds.ADD_STARTS: ADD_STARTS,
    kinds.ADD_COMPLETIONS: ADD_COMPLETIONS,
    kinds.ADD_COMPLETION_COPIES: ADD_COMPLETION_COPIES,
    kinds.ADD_LARGE_COMPLETIONS: ADD_LARGE_COMPLETIONS,
    kinds.ADD_ENDS: ADD_ENDS,
    kinds.ADD_TRACEBACKS: ADD_TRACEBACKS,
    kinds.FINISH_ENDS: FINISH_ENDS,
    kinds.DISCARD_RESULTS: DISCARD_RESULTS,
    kinds.SET_SESSIONS: SET_SESSIONS,
    kinds.SET_TASKS: SET_TASKS,
    kinds.SET_PROMPTS: SET_PROMPTS,
    kinds.ADD_MESSAGES: ADD_MESSAGES,
    kinds.ADD_LARGE_MESSAGES: ADD_LARGE_MESSAGES,
    kinds.ADD_SESSIONS: ADD_SESSIONS,
    kinds.ADD_EVENTS: ADD_EVENTS,
}
"""The statement for each kind of row."""

_SELECT = "SELECT"
_START = "s.id, s.task, s.attempt, s.backend, s.session_id, s.session_confirmed, s.started_at, s.row_checksum"
"""The columns of `starts`, with the checksum behind."""
_END = """e.id, e.end_id, e.status, e.ended_at, e.input_tokens, e.output_tokens, e.cache_read_tokens,
    e.cache_write_tokens, e.reasoning_tokens, e.cost_is_partial, e.cost_usd, e.duration_s, e.model, e.error_kind,
    e.error, e.question, e.asked, e.row_checksum"""
"""The columns of `ends` without prompt, text and data, with the checksum behind."""
_GIVEN_TEXTS = "coalesce(t.depends_on, same.depends_on), coalesce(t.spec, same.spec), coalesce(t.prompt, same.prompt)"
_OF_TASK = "LEFT JOIN given_tasks AS same ON same.id = t.copy_of"
_TASK = f"t.id, t.task_id, t.set_to, t.crashes, t.answers, t.backend, t.added_by, {_GIVEN_TEXTS}, t.row_checksum"
"""The columns of `given_tasks` without `run`, with the checksum behind."""
_TEXT = """e.checksum, coalesce(e.text, o.text), coalesce(e.data, o.data), e.text_sha256, e.data_sha256,
    large_text.content"""
"""The result, as stored and from `blobs`, without the large data."""
_OF_TEXT = """LEFT JOIN ends AS o ON o.id = e.copy_of
    LEFT JOIN blobs AS large_text ON large_text.sha256 = e.text_sha256"""
"""Joined, because SQLite copies the result of a subquery once more, and a text may have hundreds of megabytes."""
_LARGE_DATA = "large_data.content"
_OF_DATA = "LEFT JOIN blobs AS large_data ON large_data.sha256 = e.data_sha256"
_PROMPT = """e.prompt_checksum, coalesce(e.prompt, o.prompt), e.prompt_sha256,
    iif(e.prompt_sha256 IS NULL, NULL, (SELECT content FROM blobs WHERE sha256 = e.prompt_sha256))"""
FIND_STARTS = Bulk(1, f"{_SELECT} {_START} FROM {{rows}} AS new CROSS JOIN starts AS s ON s.id = column1")
FIND_ENDS = Bulk(1, f"{_SELECT} {_END} FROM {{rows}} AS new CROSS JOIN ends AS e ON e.id = column1")
FIND_GIVEN_TASKS = Bulk(
    1, f"{_SELECT} {_TASK} FROM {{rows}} AS new CROSS JOIN given_tasks AS t ON t.id = column1 {_OF_TASK}"
)
"""For rows that change: their checksums are renewed."""
FIND_TASKS = Bulk(
    2,
    """SELECT tasks.task_id, position, status, attempt, started_seq FROM {rows} AS new
    CROSS JOIN tasks ON run_id = column1 AND tasks.task_id = column2""",
)
"""For the task cache. CROSS JOIN makes SQLite look the tasks up one by one, instead of reading all tasks."""
NEXT_TASK = "SELECT ifnull(max(id) + 1, :first) FROM given_tasks WHERE id BETWEEN :first AND :last"

LIST_ORIGINAL_TASKS = f"""{_SELECT} t.task_id, coalesce(t.copy_of, t.id), {_GIVEN_TEXTS}
FROM given_tasks AS t {_OF_TASK} WHERE t.run = (SELECT number FROM runs WHERE run_id = ?)"""  # noqa: S608 - constants
FIND_ORIGINAL_ANSWERS = Bulk(
    3,
    """SELECT column1, column2, column3, coalesce(e.copy_of, e.id), coalesce(e.text, o.text), coalesce(e.data, o.data),
        coalesce(e.prompt, o.prompt)
    FROM {rows} AS new CROSS JOIN runs AS r ON r.run_id = column1
    CROSS JOIN given_tasks AS t ON t.run = r.number AND t.task_id = column2
    CROSS JOIN starts AS s ON s.task = t.id AND s.attempt = column3
    CROSS JOIN ends AS e ON e.id = s.id LEFT JOIN ends AS o ON o.id = e.copy_of
    WHERE e.status = 'completed' AND e.checksum IS NOT NULL""",
)
"""The rows with the texts that a batch takes over, see tables/originals.py."""
HAND_OVER_TASKS = """
UPDATE given_tasks SET copy_of = nullif(h.heir, given_tasks.id),
    depends_on = iif(given_tasks.id = h.heir, o.depends_on, NULL),
    spec = iif(given_tasks.id = h.heir, o.spec, NULL),
    prompt = iif(given_tasks.id = h.heir, o.prompt, NULL)
    FROM (
        SELECT copy_of AS source, min(id) AS heir FROM given_tasks
        WHERE copy_of BETWEEN :first AND :last AND id NOT BETWEEN :first AND :last GROUP BY copy_of
    ) AS h JOIN given_tasks AS o ON o.id = h.source
WHERE given_tasks.copy_of = h.source AND given_tasks.id NOT BETWEEN :first AND :last
"""
HAND_OVER_ANSWERS = """
UPDATE ends SET copy_of = nullif(h.heir, ends.id),
    text = iif(ends.id = h.heir, o.text, NULL),
    data = iif(ends.id = h.heir, o.data, NULL),
    prompt = iif(ends.id = h.heir, o.prompt, NULL)
    FROM (
        SELECT copy_of AS source, min(id) AS heir FROM ends
        WHERE copy_of BETWEEN :first AND :last AND id NOT BETWEEN :first AND :last GROUP BY copy_of
    ) AS h JOIN ends AS o ON o.id = h.source
WHERE ends.copy_of = h.source AND ends.id NOT BETWEEN :first AND :last
"""
"""Move the texts of the rows from :first to :last to the first copy outside, to which the other copies then refer."""

ADD_BLOB = """
INSERT INTO blobs (sha256, size, content) VALUES (?, ?, ?)
ON CONFLICT (sha256) DO UPDATE SET content = excluded.content WHERE content IS NOT excluded.content
"""
"""Keeps an existing blob, but repairs a damaged blob."""

ADD_RUN = """
INSERT INTO runs (run_id, name, settings, settings_checksum, created_at, status, last_seq, epoch, claims)
VALUES (?, ?, ?, ?, ?, 'queued', 0, 0, '[]')
"""
ADD_PIECE = "INSERT INTO settings_pieces (run, position, sha256) VALUES (?, ?, ?)"
SET_HEAD = """
UPDATE runs SET status = ?, started_at = ?, ended_at = ?, error = ?, last_seq = ?, lease_expires_at = ?, claims = ?,
    policy_state = ?, policy_seq = ?, input_tokens = ?, output_tokens = ?, cache_read_tokens = ?,
    cache_write_tokens = ?, reasoning_tokens = ?, cost_is_partial = ?, cost_usd = ?, owner_id = ?, owner_host = ?,
    owner_boot_id = ?, owner_pid = ?, owner_process_started = ?, owner_claimed_at = ?, row_checksum = ?, epoch = ?
WHERE number = ?
"""
SET_LAST_SEQ = """
UPDATE runs SET last_seq = ?, input_tokens = ?, output_tokens = ?, cache_read_tokens = ?, cache_write_tokens = ?,
    reasoning_tokens = ?, cost_is_partial = ?, cost_usd = ?, row_checksum = ? WHERE number = ?
"""

LIST_RUN_IDS = "SELECT run_id FROM runs ORDER BY number"
GET_NUMBER = "SELECT number FROM runs WHERE run_id = ?"
_HEAD = """SELECT number, run_id, name, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at,
    claims, policy_state, policy_seq, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,
    reasoning_tokens, cost_is_partial, cost_usd, owner_id, owner_host, owner_boot_id, owner_pid, owner_process_started,
    owner_claimed_at, row_checksum FROM runs"""
GET_HEAD = f"{_HEAD} WHERE run_id = ?"
GET_SETTINGS = """
SELECT number, settings, settings_checksum FROM runs WHERE run_id = ?
"""
LIST_PIECES = """
SELECT content FROM settings_pieces LEFT JOIN blobs USING (sha256) WHERE run = ? ORDER BY position
"""
LIST_RUNS = f"{_HEAD} ORDER BY created_at DESC, number DESC LIMIT ?"
LIST_CLAIMABLE = f"""{_HEAD}
WHERE lease_expires_at < ?
    AND (status = 'queued' OR status = 'running' OR status = 'cancelling' OR status = 'waiting_input')
    OR (owner_id IS NULL OR lease_expires_at IS NULL)
    AND (status = 'queued' OR status = 'running' OR status = 'cancelling')
ORDER BY created_at, number LIMIT ?"""
COUNT_TASKS = "SELECT status, count(*) FROM tasks WHERE run_id = ? GROUP BY status ORDER BY min(position)"
_GIVEN = f"{_SELECT} {_TASK}, {_START}, {_END}, {_TEXT}, {_LARGE_DATA}"
LIST_TASKS = f"""{_GIVEN}
FROM given_tasks AS t {_OF_TASK}
    LEFT JOIN starts AS s ON s.id = (SELECT id FROM starts WHERE task = t.id ORDER BY attempt DESC LIMIT 1)
    LEFT JOIN ends AS e ON e.id = s.id {_OF_TEXT} {_OF_DATA}
WHERE t.id BETWEEN :first AND :last ORDER BY t.id LIMIT :limit"""  # noqa: S608 - put together from the constants above
_ATTEMPTS = f"""{_SELECT} t.task_id, b.id, b.content, b.row_checksum, {_START}, {_END}
FROM starts AS s JOIN given_tasks AS t ON t.id = s.task LEFT JOIN ends AS e ON e.id = s.id
    LEFT JOIN tracebacks AS b ON b.id = s.id"""
LIST_ATTEMPTS = f"{_ATTEMPTS} WHERE s.id BETWEEN :first AND :last ORDER BY s.id"
LIST_TASK_ATTEMPTS = f"{_ATTEMPTS} WHERE s.task = :task ORDER BY s.attempt"
GET_TASK = "SELECT t.id FROM given_tasks AS t JOIN runs AS r ON r.number = t.run WHERE r.run_id = ? AND t.task_id = ?"
LIST_MESSAGES = """
SELECT m.id, m.task, m.attempt, m.role, m.at, m.input_tokens, m.output_tokens, m.checksum, m.content, m.content_sha256,
    large.content
FROM other_messages AS m LEFT JOIN blobs AS large ON large.sha256 = m.content_sha256
WHERE m.task = :task ORDER BY m.id
"""
LIST_END_MESSAGES = f"""{_SELECT} {_START}, {_END}, {_TEXT}, {_PROMPT}
FROM starts AS s JOIN ends AS e ON e.id = s.id {_OF_TEXT}
WHERE s.task = :task AND coalesce(e.prompt_checksum, e.prompt, e.prompt_sha256) IS NOT NULL ORDER BY s.attempt"""
LAST_SEQ = "SELECT number, last_seq FROM runs WHERE run_id = ?"
LIST_OTHER_EVENTS = """
SELECT run_id, seq, at, kind, task_id, attempt, detail, row_checksum FROM other_events
WHERE run_id = :run_id AND seq > :after AND (:kind IS NULL OR kind = :kind) ORDER BY seq LIMIT :limit
"""
LIST_STARTS = f"""{_SELECT} t.task_id, {_START} FROM starts AS s JOIN given_tasks AS t ON t.id = s.task
WHERE s.id BETWEEN :first AND :last ORDER BY s.id LIMIT :limit"""
LIST_COMPLETIONS = f"""{_SELECT} t.task_id, s.attempt, {_END}
FROM ends AS e JOIN starts AS s ON s.id = e.id JOIN given_tasks AS t ON t.id = s.task
WHERE e.end_id BETWEEN :first AND :last AND e.status = 'completed' ORDER BY e.end_id LIMIT :limit"""
"""With LIST_OTHER_EVENTS and LIST_STARTS the rows of the view `events`. Each has the limit itself, so the cost of a
page depends on the page alone.
"""

NEXT_NOTE = "SELECT ifnull(max(number), 0) + 1 FROM notes WHERE run_id = ?"
ADD_NOTE = "INSERT INTO notes (run_id, number, kind, at, task_id, body, checksum) VALUES (?, ?, ?, ?, ?, ?, ?)"
LIST_NOTES = """
SELECT run_id, number, kind, at, task_id, body, checksum FROM notes WHERE run_id = ? AND number > ? ORDER BY number
"""

GET_OWNERSHIP = """
SELECT status = 'completed' OR status = 'failed' OR status = 'cancelled', status, owner_pid, owner_host
FROM runs WHERE run_id = ?
"""
DELETE_RUN = (
    HAND_OVER_TASKS,
    HAND_OVER_ANSWERS,
    "DELETE FROM notes WHERE run_id = :run_id",
    "DELETE FROM other_events WHERE run_id = :run_id",
    "DELETE FROM sessions WHERE run_id = :run_id",
    "DELETE FROM other_messages WHERE id BETWEEN :first AND :last",
    "DELETE FROM tracebacks WHERE id BETWEEN :first AND :last",
    "DELETE FROM ends WHERE id BETWEEN :first AND :last",
    "DELETE FROM starts WHERE id BETWEEN :first AND :last",
    "DELETE FROM given_tasks WHERE id BETWEEN :first AND :last",
    "DELETE FROM settings_pieces WHERE run = :run",
    "DELETE FROM runs WHERE number = :run",
)
"""In the order of the references, the referring rows first."""
DELETE_UNUSED_BLOBS = """
DELETE FROM blobs WHERE NOT EXISTS (SELECT 1 FROM ends WHERE text_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM ends WHERE data_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM ends WHERE prompt_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM other_messages WHERE content_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM settings_pieces WHERE settings_pieces.sha256 = blobs.sha256)
"""
CHECK_REFERENCES = (
    "PRAGMA foreign_key_check(ends)",
    "PRAGMA foreign_key_check(tracebacks)",
    "PRAGMA foreign_key_check(other_events)",
    "PRAGMA foreign_key_check(sessions)",
    "PRAGMA foreign_key_check(notes)",
)
"""The rows without a parent, for tables whose indexes do not show a changed id. Other tables have such indexes."""
LIST_SESSIONS = "SELECT run_id, task_id, session_id, attempt, row_checksum FROM sessions"
RUN_SIZES = """
SELECT run_id, sum(bytes) FROM (
    SELECT number, length(CAST(settings AS BLOB)) + ifnull(length(CAST(error AS BLOB)), 0)
        + ifnull(length(CAST(policy_state AS BLOB)), 0) AS bytes FROM runs
    UNION ALL
    SELECT id >> 32, ifnull(length(CAST(prompt AS BLOB)), 0) + ifnull(length(CAST(spec AS BLOB)), 0)
        + ifnull(length(CAST(answers AS BLOB)), 0) FROM given_tasks
    UNION ALL
    SELECT id >> 32, ifnull(length(CAST(text AS BLOB)), 0) + ifnull(length(CAST(data AS BLOB)), 0)
        + ifnull(length(CAST(prompt AS BLOB)), 0) + ifnull(length(CAST(error AS BLOB)), 0)
        + ifnull(length(CAST(question AS BLOB)), 0) + ifnull(length(CAST(asked AS BLOB)), 0) FROM ends
    UNION ALL
    SELECT id >> 32, length(CAST(content AS BLOB)) FROM tracebacks
    UNION ALL
    SELECT id >> 32, length(CAST(content AS BLOB)) FROM other_messages WHERE content IS NOT NULL
    UNION ALL
    SELECT r.number, length(CAST(n.body AS BLOB)) FROM notes AS n JOIN runs AS r ON r.run_id = n.run_id
    UNION ALL
    SELECT number, size FROM (
        SELECT run AS number, sha256 FROM settings_pieces
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
