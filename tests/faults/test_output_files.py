"""Files that are cut off, and disks without space; see tests/faults/campaigns/{files,slow}.py."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("apsw", reason="records the disk through apsw, of the extra `test`")

from tests.faults.campaigns import files, slow
from tests.support.stores import slow_disk, system_calls

pytestmark = pytest.mark.slow

watched = pytest.mark.skipif(system_calls.missing() is not None, reason=str(system_calls.missing()))
preloaded = pytest.mark.skipif(slow_disk.missing() is not None, reason=str(slow_disk.missing()))


@watched
def test_a_file_is_the_old_one_or_the_new_one_whole() -> None:
    report = files.run(scale="quick")
    assert report.violations == ()
    assert report.cases > 1_000
    assert report.planted == dict.fromkeys(get_args(files.Sabotage), True)


@preloaded
@pytest.mark.parametrize(
    "settings", [{"FULL_FROM": 1}, {"FULL_FROM": 30}, {"FULL_FROM": 17, "FULL_COUNT": slow.FOR_EVER}, {"PAGES_FROM": 4}]
)
def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path, settings: dict[str, int]) -> None:
    assert slow.without_space(slow_disk.build(tmp_path), tmp_path / "run", settings) == []
