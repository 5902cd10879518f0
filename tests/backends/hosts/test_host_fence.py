"""The files of runs on a host: kept while an answer may be collected, removed once the run is over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.backends.hosts.host_process import attempt_folder, remove_attempts, run_folder, take_fence

KEYS = ("0" * 32, "1" * 32)
DAY = 86400.0


def begun(state: Path, key: str) -> Path:
    """The folder of a run with the files of an attempt."""
    folder = run_folder(state, key, "m1")
    take_fence(folder, 1)
    turn = attempt_folder(folder, "a/1")
    turn.mkdir(parents=True)
    (turn / "stdout").touch()
    return folder


def test_a_run_that_is_over_leaves_its_fence_alone(tmp_path: Path) -> None:
    over, other = (begun(tmp_path, key) for key in KEYS)
    take_fence(over, 3)
    remove_attempts(tmp_path, over)
    assert not (over / "a").exists()
    assert (other / "a" / "1" / "stdout").exists()
    assert take_fence(over, 2) == 3


@pytest.mark.parametrize(("days", "there"), [(29, True), (31, False)])
def test_a_fence_is_removed_30_days_after_the_end_of_its_run(tmp_path: Path, days: int, there: bool) -> None:
    old, new = (begun(tmp_path, key) for key in KEYS)
    remove_attempts(tmp_path, old)
    ended = (old / ".over").stat().st_mtime - days * DAY
    os.utime(old / ".over", (ended, ended))
    remove_attempts(tmp_path, new)
    assert (old.exists(), old.parent.exists(), new.exists()) == (there, there, True)


def test_a_run_that_goes_on_after_its_end_keeps_its_files(tmp_path: Path) -> None:
    again, other = (begun(tmp_path, key) for key in KEYS)
    remove_attempts(tmp_path, again)
    take_fence(again, 2)
    attempt_folder(again, "a/2").mkdir(parents=True)
    remove_attempts(tmp_path, other)
    assert (again / "a" / "2").exists()


def test_names_are_folders_and_lead_to_no_other_place(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, KEYS[0], "Host-1.b_C")
    assert folder.name == "Host-1.b_C"
    assert attempt_folder(folder, "Task_A.9-z/1").is_relative_to(folder / "Task_A.9-z")
    for task in ["..", ".a", "a/b", "a" * 65, "", "é"]:
        with pytest.raises(ValueError):
            attempt_folder(folder, f"{task}/1")
