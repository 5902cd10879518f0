"""Files that the command writes: private where they show a run, and under their name only when they are whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.errors import InvalidRequest
from plait.runner.cli.terminal_output import write_file
from tests.support.plans.logged import make
from tests.support.processes.command import plait_here


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_a_picture_of_a_run_is_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    make(tmp_path, "  - {id: a, prompt: one}\n")
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    before = os.umask(umask)
    try:
        assert plait_here(tmp_path, "graph", "last", "-o", "run.svg").code == 0
        assert plait_here(tmp_path, "graph", "last", "-o", "run.html").code == 0
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("run.svg", "run.html")] == [0o600, 0o600]
    assert not list(tmp_path.glob(".*.new"))


def test_other_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "plan.svg", "x", private=False)
    finally:
        os.umask(before)
    assert mode(tmp_path / "plan.svg") == 0o640


def test_what_was_there_is_replaced_at_once_or_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "a.svg", tmp_path / "link.svg"
    path.write_text("old")
    path.chmod(0o644)
    link.symlink_to(path)
    reader = path.open()
    write_file(link, "new" * 10_000, private=True)
    with reader:
        assert reader.read() == "old"  # who reads the old file never sees half of the new one
    assert link.is_symlink()
    assert (path.read_text(), mode(path)) == ("new" * 10_000, 0o600)
    with pytest.raises(UnicodeEncodeError):
        write_file(path, "half \ud800", private=True)
    assert path.read_text() == "new" * 10_000
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.svg", "link.svg"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    for name in ("no/where.svg", "folder.svg"):
        with pytest.raises(InvalidRequest, match="cannot write"):
            write_file(tmp_path / name, "x", private=True)
    assert [one.name for one in tmp_path.iterdir()] == ["folder.svg"]
