"""Every SQL statement, by name. `schema.sql` describes the tables.

The rows of a kind arrive as one array for each column, so a statement has the same text for any number of rows, and the
server plans it once. `write_sql` puts the head of the run and the rows of all kinds into one statement.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from plait.persistence.old_tables import kinds

if TYPE_CHECKING:
    from plait.persistence.old_tables.kinds import RowKind

_NUMBERS: Final = frozenset({
    "id", "run", "row_checksum", "end_id", "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens",
    "reasoning_tokens", "cost_is_partial", "task", "attempt", "session_confirmed", "checksum", "prompt_checksum",
    "crashes", "seq", "copy_of",
})  # fmt: skip
_FLOATS: Final = frozenset({"cost_usd", "duration_s"})
_KEYS: Final = frozenset({"text_sha256", "data_sha256", "prompt_sha256", "content_sha256"})
SUBSTITUTED: Final[dict[RowKind, dict[str, int | str]]] = {
    kinds.ADD_TASKS: {"backend": 0, "added_by": 0},
    kinds.ADD_TASK_COPIES: {"backend": 0, "added_by": 0},
    kinds.ADD_STARTS: {"session_id": 0},
    kinds.ADD_COMPLETION_COPIES: {"cost_usd": "", "model": 0, "prompt_checksum": ""},
    kinds.ADD_COMPLETIONS: {"cost_usd": "", "model": 0, "prompt_checksum": "", "data": 0, "prompt": 0},
    kinds.ADD_LARGE_COMPLETIONS: {
        "cost_usd": "",
        "model": 0,
        "prompt_checksum": "",
        "text": 0,
        "data": 0,
        "prompt": 0,
    },
}
"""The columns in which a substitute stands for NULL (see tables/rows.py), with the substitute."""
_UPDATED: Final[dict[RowKind, str]] = {
    kinds.FINISH_ENDS: "question = NULL, asked = NULL",
    kinds.DISCARD_RESULTS: """text = NULL, data = NULL, checksum = NULL, text_sha256 = NULL, data_sha256 = NULL,
    prompt = coalesce(t.prompt, (SELECT o.prompt FROM ends AS o WHERE o.id = t.copy_of)), copy_of = NULL""",
    kinds.SET_SESSIONS: "",
    kinds.SET_TASKS: "",
    kinds.SET_PROMPTS: "copy_of = NULL",
}
"""The kinds that change rows, with the columns whose values are not in the row."""
ONLY_ADDED: Final = tuple(kind for kind in kinds.IN_ORDER if kind not in _UPDATED)
"""The kinds that add rows: one statement may add rows of all of them, but cannot change a row that it adds."""
_COMPLETED: Final = frozenset({kinds.ADD_COMPLETIONS, kinds.ADD_COMPLETION_COPIES, kinds.ADD_LARGE_COMPLETIONS})
_RENEWED: Final = """ ON CONFLICT (run_id, task_id, session_id) DO UPDATE SET attempt = excluded.attempt,
    row_checksum = excluded.row_checksum"""

_INSERT, _UPDATE, _SELECT, _WITH = "INSERT INTO", "UPDATE", "SELECT", "WITH"
HEAD_WIDTH: Final = 28
"""The parameters of the head: 24 columns, then the number, and the epoch, last change and owner before the batch."""
SET_HEAD: Final = """
UPDATE runs SET status = $1, started_at = $2, ended_at = $3, error = $4, last_seq = $5, lease_expires_at = $6,
    claims = $7, policy_state = $8, policy_seq = $9, input_tokens = $10, output_tokens = $11, cache_read_tokens = $12,
    cache_write_tokens = $13, reasoning_tokens = $14, cost_is_partial = $15, cost_usd = $16, owner_id = $17,
    owner_host = $18, owner_boot_id = $19, owner_pid = $20, owner_process_started = $21, owner_claimed_at = $22,
    row_checksum = $23, epoch = $24, written_at = clock_timestamp()
WHERE number = $25 AND epoch = $26 AND last_seq = $27 AND owner_id IS NOT DISTINCT FROM $28 RETURNING number
"""
"""No row comes back if another process has written to the run, or owns the run."""
SET_LEASE: Final = "UPDATE runs SET lease_s = $2 WHERE number = $1"


def _array(column: str) -> str:
    if column in _NUMBERS:
        return "bigint[]"
    if column in _FLOATS:
        return "double precision[]"
    return "bytea[]" if column in _KEYS else "text[]"


@lru_cache(maxsize=64)
def text_columns(kind: RowKind) -> tuple[int, ...]:
    """Return the positions of the columns of text."""
    return tuple(n for n, column in enumerate(kind.columns.split()) if _array(column) == "text[]")


def _values(kind: RowKind, first: int) -> str:
    columns = kind.columns.split()
    return ", ".join(f"${number}::{_array(column)}" for number, column in enumerate(columns, first))


def _insert(kind: RowKind, first: int, source: str) -> str:
    """Return the INSERT of rows whose arrays begin at parameter `first`. `source` goes before them in FROM."""
    names = ", ".join(kind.columns.split())
    status, completed = (", status", ", 'completed'") if kind in _COMPLETED else ("", "")
    rows = f"{_SELECT} u.*{completed} FROM {source}unnest({_values(kind, first)}) AS u ({names})"
    return f"{_INSERT} {kind.table} ({names}{status}) {rows}{_RENEWED if kind is kinds.ADD_SESSIONS else ''}"


@lru_cache(maxsize=512)
def write_sql(added: tuple[RowKind, ...]) -> str:
    """Return the one statement of a batch that only adds rows: the head of the run, and the rows of each kind."""
    parts, first = [f"head AS ({SET_HEAD})"], HEAD_WIDTH + 1
    for kind in added:
        parts.append(f"added_{first} AS ({_insert(kind, first, 'head, ')})")
        first += len(kind.columns.split())
    return f"{_WITH} {', '.join(parts)} {_SELECT} number FROM head"


@lru_cache(maxsize=64)
def rows_sql(kind: RowKind) -> str:
    """Return the statement that writes rows of one kind."""
    if kind not in _UPDATED:
        return _insert(kind, 1, "")
    _, *changed = columns = kind.columns.split()
    sets = ", ".join(filter(None, [*(f"{name} = u.{name}" for name in changed), _UPDATED[kind]]))
    rows = f"unnest({_values(kind, 1)}) AS u ({', '.join(columns)})"
    return f"{_UPDATE} {kind.table} AS t SET {sets} FROM {rows} WHERE t.id = u.id"


_START = "s.id, s.task, s.attempt, s.backend, s.session_id, s.session_confirmed, s.started_at, s.row_checksum"
_END = """e.id, e.end_id, e.status, e.ended_at, e.input_tokens, e.output_tokens, e.cache_read_tokens,
    e.cache_write_tokens, e.reasoning_tokens, e.cost_is_partial, e.cost_usd, e.duration_s, e.model, e.error_kind,
    e.error, e.question, e.asked, e.row_checksum"""
_GIVEN_TEXTS = "coalesce(t.depends_on, same.depends_on), coalesce(t.spec, same.spec), coalesce(t.prompt, same.prompt)"
_OF_TASK = "LEFT JOIN given_tasks AS same ON same.id = t.copy_of"
_TASK = f"t.id, t.task_id, t.set_to, t.crashes, t.answers, t.backend, t.added_by, {_GIVEN_TEXTS}, t.row_checksum"
_TEXT = """e.checksum, coalesce(e.text, o.text), coalesce(e.data, o.data), e.text_sha256, e.data_sha256,
    large_text.content"""
_OF_TEXT = """LEFT JOIN ends AS o ON o.id = e.copy_of
    LEFT JOIN blobs AS large_text ON large_text.sha256 = e.text_sha256"""
_LARGE_DATA = "large_data.content"
_OF_DATA = "LEFT JOIN blobs AS large_data ON large_data.sha256 = e.data_sha256"
_PROMPT = """e.prompt_checksum, coalesce(e.prompt, o.prompt), e.prompt_sha256,
    (SELECT content FROM blobs WHERE sha256 = e.prompt_sha256)"""
_NUMBER = "(SELECT number FROM runs WHERE run_id = $1)"
FIND: Final = {
    kinds.SET_SESSIONS: f"{_SELECT} {_START} FROM starts AS s WHERE s.id = ANY($1::bigint[])",
    kinds.FINISH_ENDS: f"{_SELECT} {_END} FROM ends AS e WHERE e.id = ANY($1::bigint[])",
    kinds.SET_TASKS: f"{_SELECT} {_TASK} FROM given_tasks AS t {_OF_TASK} WHERE t.id = ANY($1::bigint[])",
}
"""For rows that change: their checksums are renewed."""
FIND_TASKS = """SELECT task_id, position, status, attempt, started_seq FROM tasks
WHERE run_id = $1 AND task_id = ANY($2::text[])"""
FIND_OPEN_TASKS = """SELECT task_id, position, status, attempt, started_seq FROM tasks
WHERE run_id = $1 AND status IN ('pending', 'running', 'waiting_input')"""
NEXT_TASK = "SELECT max(id) + 1 FROM given_tasks WHERE run = $1"
LIST_ORIGINAL_TASKS = f"""{_SELECT} t.task_id, coalesce(t.copy_of, t.id), {_GIVEN_TEXTS}
FROM given_tasks AS t {_OF_TASK} WHERE t.run = {_NUMBER}"""
FIND_ORIGINAL_ANSWERS = """
SELECT r.run_id, t.task_id, s.attempt, coalesce(e.copy_of, e.id), coalesce(e.text, o.text), coalesce(e.data, o.data),
    coalesce(e.prompt, o.prompt)
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS u (run_id, task_id, attempt)
    JOIN runs AS r ON r.run_id = u.run_id JOIN given_tasks AS t ON t.run = r.number AND t.task_id = u.task_id
    JOIN starts AS s ON s.task = t.id AND s.attempt = u.attempt
    JOIN ends AS e ON e.id = s.id LEFT JOIN ends AS o ON o.id = e.copy_of
WHERE e.status = 'completed' AND e.checksum IS NOT NULL
"""
"""The rows with the texts that a batch takes over, see tables/originals.py."""
HAND_OVER_TASKS = """
UPDATE given_tasks AS t SET copy_of = nullif(h.heir, t.id),
    depends_on = CASE WHEN t.id = h.heir THEN o.depends_on END,
    spec = CASE WHEN t.id = h.heir THEN o.spec END,
    prompt = CASE WHEN t.id = h.heir THEN o.prompt END
    FROM (
        SELECT copy_of AS source, min(id) AS heir FROM given_tasks
        WHERE copy_of BETWEEN $1 AND $2 AND id NOT BETWEEN $1 AND $2 GROUP BY copy_of
    ) AS h JOIN given_tasks AS o ON o.id = h.source
WHERE t.copy_of = h.source AND t.id NOT BETWEEN $1 AND $2
"""
HAND_OVER_ANSWERS = """
UPDATE ends AS t SET copy_of = nullif(h.heir, t.id),
    text = CASE WHEN t.id = h.heir THEN o.text END,
    data = CASE WHEN t.id = h.heir THEN o.data END,
    prompt = CASE WHEN t.id = h.heir THEN o.prompt END
    FROM (
        SELECT copy_of AS source, min(id) AS heir FROM ends
        WHERE copy_of BETWEEN $1 AND $2 AND id NOT BETWEEN $1 AND $2 GROUP BY copy_of
    ) AS h JOIN ends AS o ON o.id = h.source
WHERE t.copy_of = h.source AND t.id NOT BETWEEN $1 AND $2
"""
"""Move the texts of the rows from $1 to $2 to the first copy outside, to which the other copies then refer."""
ADD_BLOBS = """
INSERT INTO blobs (sha256, size, content) SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::text[])
ON CONFLICT (sha256) DO UPDATE SET content = excluded.content WHERE blobs.content IS DISTINCT FROM excluded.content
"""
"""Keeps an existing blob, but repairs a damaged blob. The keys arrive sorted: in any other order two batches with the
same texts could wait for each other.
"""
ADD_RUN = """
INSERT INTO runs (run_id, name, settings, settings_checksum, created_at, status, last_seq, epoch, claims)
VALUES ($1, $2, $3, $4, $5, 'queued', 0, 0, '[]') ON CONFLICT (run_id) DO NOTHING RETURNING number
"""
ADD_PIECES = """
INSERT INTO settings_pieces (run, position, sha256)
SELECT $1, u.position, u.sha256 FROM unnest($2::bytea[]) WITH ORDINALITY AS u (sha256, position)
"""

_SILENCE = "extract(epoch FROM clock_timestamp() - written_at)::float8"
_HAS_EXPIRED = f"owner_id IS NOT NULL AND {_SILENCE} > lease_s"
"""The lease of the owner has expired. Only the clock of the server counts: the clocks of owners and readers differ."""
_HEAD = f"""{_SELECT} number, run_id, name, created_at, status, started_at, ended_at, error, last_seq,
    lease_expires_at, claims, policy_state, policy_seq, input_tokens, output_tokens, cache_read_tokens,
    cache_write_tokens, reasoning_tokens, cost_is_partial, cost_usd, owner_id, owner_host, owner_boot_id, owner_pid,
    owner_process_started, owner_claimed_at, row_checksum, {_HAS_EXPIRED} FROM runs"""
GET_HEAD = f"{_HEAD} WHERE run_id = $1"
LOCK_HEAD = f"{GET_HEAD} FOR NO KEY UPDATE"
LIST_RUNS = f"{_HEAD} ORDER BY created_at DESC, number DESC LIMIT $1"
LIST_CLAIMABLE = f"""{_HEAD}
WHERE {_HAS_EXPIRED} AND status IN ('queued', 'running', 'cancelling', 'waiting_input')
    OR owner_id IS NULL AND status IN ('queued', 'running', 'cancelling')
    OR owner_id IS NULL AND status = 'waiting_input' AND lease_expires_at < extract(epoch FROM clock_timestamp())
ORDER BY created_at, number LIMIT $1"""
GET_SETTINGS = """
SELECT number, settings, settings_checksum FROM runs WHERE run_id = $1
"""
LIST_PIECES = """
SELECT content FROM settings_pieces LEFT JOIN blobs USING (sha256) WHERE run = $1 ORDER BY position
"""
COUNT_TASKS = """SELECT run_id, status, count(*) FROM tasks WHERE run_id = ANY($1::text[])
GROUP BY run_id, status ORDER BY min(position)"""
_LAST_START = "SELECT * FROM starts WHERE task = t.id ORDER BY attempt DESC LIMIT 1"
LIST_TASKS = f"""{_SELECT} {_TASK}, {_START}, {_END}, {_TEXT}, {_LARGE_DATA}
FROM given_tasks AS t {_OF_TASK} LEFT JOIN LATERAL ({_LAST_START}) AS s ON true
    LEFT JOIN ends AS e ON e.id = s.id {_OF_TEXT} {_OF_DATA}
WHERE t.run = {_NUMBER} AND ($2::text IS NULL OR t.task_id = $2) ORDER BY t.id"""
LIST_ATTEMPTS = f"""{_SELECT} t.task_id, b.id, b.content, b.row_checksum, {_START}, {_END}
FROM starts AS s JOIN given_tasks AS t ON t.id = s.task LEFT JOIN ends AS e ON e.id = s.id
    LEFT JOIN tracebacks AS b ON b.id = s.id
WHERE t.run = {_NUMBER} AND ($2::text IS NULL OR t.task_id = $2) ORDER BY s.id"""
_TASK_ID = f"(SELECT id FROM given_tasks WHERE run = {_NUMBER} AND task_id = $2)"  # noqa: S608 - constants
LIST_MESSAGES = f"""{_SELECT} m.id, m.task, m.attempt, m.role, m.at, m.input_tokens, m.output_tokens, m.checksum,
    m.content, m.content_sha256, large.content
FROM other_messages AS m LEFT JOIN blobs AS large ON large.sha256 = m.content_sha256
WHERE m.task = {_TASK_ID} ORDER BY m.id"""
LIST_END_MESSAGES = f"""{_SELECT} {_START}, {_END}, {_TEXT}, {_PROMPT}
FROM starts AS s JOIN ends AS e ON e.id = s.id {_OF_TEXT}
WHERE s.task = {_TASK_ID} AND (e.prompt_checksum IS NOT NULL OR e.prompt IS NOT NULL OR e.prompt_sha256 IS NOT NULL)
ORDER BY s.attempt"""
LAST_SEQ = "SELECT number, last_seq FROM runs WHERE run_id = $1"
LIST_OTHER_EVENTS = """
SELECT run_id, seq, at, kind, task_id, attempt, detail, row_checksum FROM other_events
WHERE run_id = $1 AND seq > $2 AND ($3::text IS NULL OR kind = $3) ORDER BY seq LIMIT $4
"""
LIST_STARTS = f"""{_SELECT} t.task_id, {_START} FROM starts AS s JOIN given_tasks AS t ON t.id = s.task
WHERE s.id BETWEEN $1 AND $2 ORDER BY s.id LIMIT $3"""
LIST_COMPLETIONS = f"""{_SELECT} t.task_id, s.attempt, {_END}
FROM ends AS e JOIN starts AS s ON s.id = e.id JOIN given_tasks AS t ON t.id = s.task
WHERE e.end_id BETWEEN $1 AND $2 AND e.status = 'completed' ORDER BY e.end_id LIMIT $3"""

SILENCE = f"{_SELECT} {_SILENCE} FROM runs WHERE run_id = $1"
LOCK_RUN = "SELECT number FROM runs WHERE run_id = $1 FOR NO KEY UPDATE"
NEXT_NOTE = "SELECT coalesce(max(number), 0) + 1 FROM notes WHERE run_id = $1"
ADD_NOTE = "INSERT INTO notes (run_id, number, kind, at, task_id, body, checksum) VALUES ($1, $2, $3, $4, $5, $6, $7)"
LIST_NOTES = """
SELECT run_id, number, kind, at, task_id, body, checksum FROM notes WHERE run_id = $1 AND number > $2 ORDER BY number
"""

GET_OWNERSHIP = """
SELECT run_id, number, status IN ('completed', 'failed', 'cancelled') AS has_ended, status, owner_pid, owner_host
FROM runs WHERE run_id = ANY($1::text[]) ORDER BY number FOR UPDATE
"""
LOCK_BLOBS = "LOCK TABLE blobs IN SHARE ROW EXCLUSIVE MODE"
"""For a purge: no batch adds a reference to a text while texts are deleted or moved."""
LOCK_ORIGINALS = "LOCK TABLE blobs IN ROW EXCLUSIVE MODE"
"""For a batch that refers to rows of other runs: no purge deletes or moves their texts meanwhile."""
DELETE_RUNS = (
    "DELETE FROM notes WHERE run_id = ANY($1::text[])",
    "DELETE FROM other_events WHERE run_id = ANY($1::text[])",
    "DELETE FROM sessions WHERE run_id = ANY($1::text[])",
)
DELETE_ROWS = (
    HAND_OVER_TASKS,
    HAND_OVER_ANSWERS,
    "DELETE FROM other_messages WHERE id BETWEEN $1 AND $2",
    "DELETE FROM tracebacks WHERE id BETWEEN $1 AND $2",
    "DELETE FROM ends WHERE id BETWEEN $1 AND $2",
    "DELETE FROM starts WHERE id BETWEEN $1 AND $2",
    "DELETE FROM given_tasks WHERE id BETWEEN $1 AND $2",
)
DELETE_HEAD = ("DELETE FROM settings_pieces WHERE run = $1", "DELETE FROM runs WHERE number = $1")
DELETE_UNUSED_BLOBS = """
DELETE FROM blobs WHERE NOT EXISTS (SELECT 1 FROM ends WHERE text_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM ends WHERE data_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM ends WHERE prompt_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM other_messages WHERE content_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT 1 FROM settings_pieces WHERE settings_pieces.sha256 = blobs.sha256)
"""
LIST_SESSIONS = "SELECT run_id, task_id, session_id, attempt, row_checksum FROM sessions"
RUN_SIZES = """
SELECT run_id, sum(bytes)::bigint FROM (
    SELECT number, octet_length(settings) + coalesce(octet_length(error), 0)
        + coalesce(octet_length(policy_state), 0) AS bytes FROM runs
    UNION ALL
    SELECT id >> 32, coalesce(octet_length(prompt), 0) + coalesce(octet_length(spec), 0)
        + coalesce(octet_length(answers), 0) FROM given_tasks
    UNION ALL
    SELECT id >> 32, coalesce(octet_length(text), 0) + coalesce(octet_length(data), 0)
        + coalesce(octet_length(prompt), 0) + coalesce(octet_length(error), 0)
        + coalesce(octet_length(question), 0) + coalesce(octet_length(asked), 0) FROM ends
    UNION ALL
    SELECT id >> 32, octet_length(content) FROM tracebacks
    UNION ALL
    SELECT id >> 32, octet_length(content) FROM other_messages WHERE content IS NOT NULL
    UNION ALL
    SELECT r.number, octet_length(n.body) FROM notes AS n JOIN runs AS r ON r.run_id = n.run_id
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
    ) AS used JOIN blobs USING (sha256)
) AS parts JOIN runs USING (number) GROUP BY run_id
"""
