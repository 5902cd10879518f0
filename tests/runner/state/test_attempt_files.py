"""Where the files of turns lie: different ids never share a folder, and no id leads out of its own."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runner.state.attempt_files import attempt_files, run_folder

ROOT = Path("/root.files")
ODD = [
    "",
    ".",
    "..",
    "...",
    "sessions",
    "SESSIONS",
    "a/b",
    "a\\b",
    "/etc",
    "~",
    "a~b",
    "é",
    "e\u0301",
    "\ud800",
    "\0",
    "a b",
]
IDS = st.one_of(
    st.text(), st.sampled_from(ODD), st.text("aA.%~-", max_size=6), st.text("aB", min_size=90, max_size=140)
)


def as_seen(path: Path) -> str:
    """What a file system that folds case and Unicode makes of it."""
    return unicodedata.normalize("NFC", str(path)).casefold()


@given(IDS, IDS)
def test_different_ids_have_different_folders_wherever_they_are_kept(one: str, other: str) -> None:
    assert (as_seen(run_folder(ROOT, one)) == as_seen(run_folder(ROOT, other))) == (one == other)
    folders = [attempt_files(ROOT, "r", task_id, 1).turn for task_id in (one, other)]
    assert (as_seen(folders[0]) == as_seen(folders[1])) == (one == other)


@given(IDS, IDS)
def test_a_turn_has_a_folder_of_its_own_below_its_run(run_id: str, task_id: str) -> None:
    files = attempt_files(ROOT, run_id, task_id, 12)
    assert files.turn.parent.parent == run_folder(ROOT, run_id)
    assert files.turn.parent.parent.parent == ROOT == files.sessions.parent
    assert run_folder(ROOT, run_id) != files.sessions
    assert os.path.normpath(files.turn) == str(files.turn)
    for name in files.turn.relative_to(ROOT).parts:
        assert name.isascii() and name.isprintable() and 0 < len(name) <= 100


@pytest.mark.parametrize(
    ("ids", "path"),
    [
        (("20261122-101500-123-k3f9ab", "write", 1), "20261122-101500-123-k3f9ab/write/1"),
        (("r", "part.1", 2), "r/part.1/2"),
        (("r", "a b/ü", 1), "r/a_b__~736afe6567bb38b374aa95187b5c3f83/1"),
        (("r", "..", "0-17"), "r/__~5ec1f7e700f37c3d0b2981d04855fc34/0-17"),
        (("r", "Write", 1), "r/Write~3f00927a719345edd4a8316599d3b328/1"),
    ],
)
def test_people_can_read_them(ids: tuple, path: str) -> None:
    assert str(attempt_files(ROOT, *ids).turn.relative_to(ROOT)) == path
