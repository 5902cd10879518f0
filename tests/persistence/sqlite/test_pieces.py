"""Large settings are stored in pieces, which similar runs share."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore
from plait.persistence.contract.samples import CREATED, Writer
from plait.persistence.old_tables.pieces import cut_settings

ROWS = [{"text": f"{number} " + "some words " * 20} for number in range(4000)]
"""About a megabyte."""
EDITS = {
    "changed": [*ROWS[:1000], {"text": "new"}, *ROWS[1001:]],
    "inserted": [*ROWS[:1000], {"text": "new"}, *ROWS[1000:]],
    "deleted": [*ROWS[:1000], *ROWS[1001:]],
    "first": [{"text": "new"}, *ROWS],
}


def settings(rows: list[dict[str, str]]) -> str:
    return json.dumps({"inputs": {"rows": rows}}, separators=(",", ":"))


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_the_pieces_around_it(edit: str) -> None:
    before, after = cut_settings(settings(ROWS)), cut_settings(settings(EDITS[edit]))
    assert "".join(text for _, _, text in after) == settings(EDITS[edit])
    new = {key: size for key, size, _ in after if key not in {key for key, _, _ in before}}
    assert len(before) > 50
    assert 0 < sum(new.values()) < 64 * 1024 * 2


@pytest.mark.parametrize("text", ["x" * 300_000, "1," * 100_000, "\u20ac, " * 60_000, '"a","b",' * 30_000])
def test_any_text_is_cut_into_small_pieces(text: str) -> None:
    pieces = cut_settings(text)
    assert "".join(piece for _, _, piece in pieces) == text
    assert all(0 < len(piece) <= 64 * 1024 and size == len(piece.encode()) for _, size, piece in pieces)


async def test_a_run_with_similar_inputs_takes_little_space(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store, "one").write(replace(CREATED, settings=settings(ROWS)))
        for name, rows in EDITS.items():
            await Writer(store, name).write(replace(CREATED, settings=settings(rows)))
        for name, rows in EDITS.items():
            run = await store.get_run(name)
            assert run is not None
            assert run.settings == settings(rows)
        sizes = await store.run_sizes()
    with closing(sqlite3.connect(path)) as connection:
        (stored,) = connection.execute("SELECT sum(size) FROM blobs").fetchone()
    assert stored < len(settings(ROWS)) * 1.5
    assert sizes["changed"] > len(settings(ROWS)) * 0.99
