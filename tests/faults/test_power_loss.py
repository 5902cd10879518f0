"""What a power loss leaves of the store, at any moment of a real run."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from plait.persistence import SQLiteStore
from tests.support.sizes import size

pytest.importorskip("apsw", reason="records the disk through apsw, of the extra `test`")

from tests.faults.campaigns import power
from tests.support.stores.power_images import Disk, Kept
from tests.support.stores.power_vfs import Entry, Sync, SyncFolder, Truncate, Write

pytestmark = pytest.mark.slow


def test_nothing_acknowledged_is_lost_and_nothing_is_half_there() -> None:
    found = power.Found()
    for seed in range(size(2, 3)):
        power.check(power.record(seed), found, limit=size(200, 520) * (seed + 1))
    assert found.violations == []
    assert found.images > size(300, 1000)
    assert found.resumed > size(5, 10)


def test_the_images_of_a_disk() -> None:
    disk, rng = Disk(), random.Random(0)
    for operation in (Entry("a", 0), Write(0, 0, b"one"), Sync(0), SyncFolder(), Write(0, 3, b"two"), Entry("b", 1)):
        disk.do(operation)
    assert disk.after_power_loss("none", rng) == {"a": b"one"}
    assert disk.after_power_loss("all", rng) == {"a": b"onetwo", "b": b""}
    disk.do(Truncate(0, 1))
    first = {disk.after_power_loss("first", rng)["a"] for _ in range(50)}
    assert first == {b"one", b"onetwo", b"o"}
    assert disk.after_power_loss("none", rng) == {"a": b"one"}


def test_a_torn_write_leaves_sectors() -> None:
    disk, rng = Disk(), random.Random(0)
    for operation in (Entry("a", 0), SyncFolder(), Write(0, 0, b"-" * 2048), Sync(0), Write(0, 512, b"x" * 1024)):
        disk.do(operation)
    kinds: tuple[Kept, ...] = ("none", "all", "torn")
    images = {disk.after_power_loss(kept, rng)["a"] for kept in kinds for _ in range(50)}
    assert {image[::512] for image in images} == {b"----", b"-xx-", b"-x--", b"--x-"}


async def test_a_new_store_and_its_folders_have_names_that_outlast_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one" / "two" / "runs.db"
    synced: dict[Path, list[str]] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> Any:
        fsync(descriptor)
        found = os.fstat(descriptor)
        for folder in (path.parent, *path.parents):
            if stat.S_ISDIR(found.st_mode) and folder.exists() and os.path.samestat(folder.stat(), found):
                synced[folder] = [one.name for one in folder.iterdir()]

    monkeypatch.setattr(os, "fsync", noted)
    async with SQLiteStore(path):
        assert "runs.db" in synced[path.parent]
        assert "two" in synced[path.parent.parent]
        assert "one" in synced[tmp_path]
