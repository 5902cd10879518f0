"""Delete runs without a trace, and measure the size of each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from plait.errors import Conflict
from plait.json_form import value
from plait.statuses import RUN_DONE

if TYPE_CHECKING:
    from collections.abc import Collection

    from plait.persistence.tables import Reading, Row

_TEXTS: Final = {
    "runs": ("settings error policy_state", "settings_sha256"),
    "tasks": ("prompt spec question asked answers", "prompt_sha256"),
    "attempts": ("prompt text data error traceback", "prompt_sha256 text_sha256"),
    "messages": ("content", "content_sha256"),
    "notes": ("body", ""),
}
"""The columns of each table with texts, and those with keys of `texts`."""
_KEYS: Final = [(table, key) for table, (_, keys) in _TEXTS.items() for key in keys.split()]

_GET_OWNERSHIP: Final = "SELECT run_id, status, owner_pid, owner_host FROM runs WHERE run_id = ?{lock}"
_DELETE_RUN: Final = tuple(
    f"DELETE FROM {table} WHERE run_id = ?" for table in ("notes", "events", "messages", "attempts", "tasks", "runs")
)
_DELETE_UNUSED_TEXTS: Final = "DELETE FROM texts WHERE sha256 IN (SELECT sha256 FROM texts" + (
    "".join(f" EXCEPT SELECT {key} FROM {table} WHERE {key} IS NOT NULL" for table, key in _KEYS) + ")"
)


@value
class Purged:
    """The effect of `SQLiteStore.purge` or `PostgresStore.purge`."""

    run_ids: tuple[str, ...]
    """The deleted runs, without unknown ids."""
    freed_bytes: int
    """The reduction of the file's size; 0 for a server."""
    remains: str | None = None
    """None if no byte of the deleted runs is left in the store. Else one line with the reason.

    Another purge, with the same ids or with none, removes the rest.
    """


def delete(run_ids: Collection[str]) -> Reading[tuple[str, ...]]:
    """Delete the runs, and return those stored. Raises Conflict, and deletes none, if one has not ended or is owned."""
    stored: list[Row] = []
    for run_id in dict.fromkeys(run_ids):
        stored += yield _GET_OWNERSHIP, (run_id,)
    refused: list[str] = []
    for run_id, status, owner_pid, owner_host in stored:
        if status not in RUN_DONE:
            refused.append(f"run {run_id!r} is {status}: resume or cancel it first")
        elif owner_host is not None:
            refused.append(f"run {run_id!r} is in use by process {owner_pid} on {owner_host}: stop that first")
    if refused:
        raise Conflict(f"nothing was deleted: {'; '.join(refused)}")
    for run_id, *_ in stored:
        for statement in _DELETE_RUN:
            yield statement, (run_id,)
    yield _DELETE_UNUSED_TEXTS, ()
    return tuple(row[0] for row in stored)


def run_sizes() -> Reading[dict[str, int]]:
    """See `SQLStore.run_sizes`."""
    parts: list[str] = []
    for table, (columns, _) in _TEXTS.items():
        total = " + ".join(f"coalesce({{bytes_of}}(CAST({column} AS {{bytes}})), 0)" for column in columns.split())
        parts.append(f"SELECT run_id, {total} AS bytes FROM {table}")
    keys = " UNION ".join(f"SELECT run_id, {key} AS sha256 FROM {table}" for table, key in _KEYS)
    large = f"({keys}) AS k JOIN texts AS x ON x.sha256 = k.sha256"
    parts.append(f"SELECT k.run_id, {{bytes_of}}(CAST(x.content AS {{bytes}})) FROM {large}")
    rows = yield f"SELECT run_id, sum(bytes) FROM ({' UNION ALL '.join(parts)}) AS s GROUP BY run_id", ()
    return {run_id: int(size) for run_id, size in rows}
