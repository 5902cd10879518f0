"""What becomes of children whose parent is killed: taken over to the same end, or ended, and nobody else is hit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from plait.backends.process import child_manifest
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import adopted, sweep
from tests.support.agents.homes import until
from tests.support.processes.room import (  # fmt: skip
    WORST,
    Kin,
    Moment,
    Parent,
    Witnesses,
    kin,
    nothing_left,
    soon,
    witnesses,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs procfs")

WHOLE = [*map(str, range(1000)), "ready", *map(str, range(1000, 2000))]


@pytest.fixture(autouse=True)
def seen() -> Iterator[Witnesses]:
    """Processes beside that live on, whatever a test does; it leaves none of its own."""
    with nothing_left(), witnesses() as made:
        yield made


async def lines_of(folder: Path) -> list[str]:
    """All that the child of that folder says until it ends, when it is taken over."""
    found: list[bytes] = []
    async with adopted(folder) as child:
        assert child is not None
        await child.follow(lambda line: bool(found.append(line)), idle=60, until=anyio.current_time() + 60)
    return [line.decode() for line in found]


@pytest.mark.parametrize("moment", ["at work", "ended"])
async def test_a_child_whose_parent_was_killed_is_followed_to_the_same_end(
    moment: Moment, tmp_path: Path, holds: Kin
) -> None:
    if moment == "ended":
        (tmp_path / "go").touch()
    Parent(tmp_path, moment, ["counts"], holds, guarded=False).kill()
    known = read_manifest(tmp_path / "0")
    assert known is not None and known.is_alive == (moment != "ended")
    (tmp_path / "go").touch()
    assert await lines_of(tmp_path / "0") == WHOLE
    assert holds.is_gone(0)
    assert await sweep(tmp_path, []) == 0


async def test_a_child_that_was_never_started_says_nothing(tmp_path: Path, holds: Kin) -> None:
    Parent(tmp_path, "before the spawn", ["counts"], holds, guarded=False).kill()
    known = read_manifest(tmp_path / "0")
    assert known is not None and not known.pid and not known.is_alive
    assert await lines_of(tmp_path / "0") == []


@pytest.fixture
def starts_when_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child in the midst of its start becomes a program only when somebody waits for that."""

    def sleep(seconds: float) -> None:
        (tmp_path / "start").touch()
        time.sleep(seconds)

    monkeypatch.setattr(child_manifest, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


@pytest.mark.usefixtures("starts_when_looked_for")
async def test_a_child_whose_parent_was_killed_in_the_midst_of_the_start_is_swept(tmp_path: Path, holds: Kin) -> None:
    Parent(tmp_path, "in the spawn", ["counts"], holds, guarded=False).kill()
    assert not (tmp_path / "start").exists()
    known = read_manifest(tmp_path / "0")
    assert known is not None and not known.is_alive
    assert await sweep(tmp_path, []) == 1
    assert holds.is_gone(0)


async def test_a_child_that_is_taken_over_is_ended_with_its_turn(tmp_path: Path, holds: Kin) -> None:
    Parent(tmp_path, "at work", ["escapes"], holds, guarded=False).kill()
    async with adopted(tmp_path / "0") as child:
        assert child is not None and child.manifest.is_alive
    assert holds.is_gone(0) and child.is_gone
    assert (tmp_path / "0" / "over.json").exists()


@pytest.mark.parametrize("moment", WORST)
async def test_what_is_left_is_swept(moment: Moment, tmp_path: Path, holds: Kin) -> None:
    Parent(tmp_path, moment, [WORST[moment]], holds, guarded=False).kill()
    await sweep(tmp_path, [])
    # The watchdog of the killed parent ends a child that was being stopped, at the same time as the sweep.
    assert holds.is_gone(soon() if moment == "stopping" else 0)
    known = read_manifest(tmp_path / "0")
    assert known is not None and not known.is_alive
    assert await sweep(tmp_path, []) == 0


async def test_a_sweep_keeps_what_it_is_told_to(tmp_path: Path, seen: Witnesses) -> None:
    names = ["escapes", "counts", "leaves_a_vanished"]
    with kin() as kept, kin() as swept:
        Parent(tmp_path / "kept", "at work", names, kept, guarded=False).kill()
        Parent(tmp_path / "swept", "at work", names, swept, guarded=False).kill()
        for known in map(read_manifest, (tmp_path / "swept").iterdir()):
            assert known is not None
            seen.resemble(known.marker)
        for folder in ("kept", "swept"):  # whose last child said that it was ready just before its end
            await until(lambda folder=folder: not is_alive(tmp_path / folder / "2"))
        here = Path(f"/proc/self/root{tmp_path}")
        assert await sweep(here, [tmp_path / "kept" / name for name in "012"]) == 4
        assert swept.is_gone(0)
        assert not kept.is_gone(0)
        assert await sweep(tmp_path, [here / "kept" / "1"]) == 3
        (tmp_path / "kept" / "go").touch()
        assert await lines_of(tmp_path / "kept" / "1") == WHOLE
        assert kept.is_gone(0)


def is_alive(folder: Path) -> bool:
    known = read_manifest(folder)
    return known is not None and known.is_alive


def another(boot: str) -> str:
    return "0" + boot[1:] if boot[0] != "0" else "1" + boot[1:]


@pytest.mark.parametrize("what", ["boot", "namespace"])
async def test_a_child_of_another_boot_or_container_is_not_touched(what: str, tmp_path: Path, holds: Kin) -> None:
    Parent(tmp_path, "at work", ["counts"], holds, guarded=False).kill()
    file = tmp_path / "0" / "child.json"
    told = json.loads(file.read_bytes())
    boot, _, pids = told["boot"].partition("/")
    there = f"{another(boot)}/{pids}" if what == "boot" else f"{boot}/pid:[1]"
    file.write_text(json.dumps(told | {"boot": there}))
    known = read_manifest(tmp_path / "0")
    assert known is not None and known.pid > 0 and not known.is_alive
    assert await lines_of(tmp_path / "0") == WHOLE[:1001]
    assert await sweep(tmp_path, []) == 0
    assert not holds.is_gone(0)
    os.kill(known.pid, signal.SIGKILL)
    assert holds.is_gone(soon())


@pytest.mark.parametrize("how", ["adopted", "swept"])
async def test_another_process_with_the_same_number_is_not_touched(
    how: str, tmp_path: Path, holds: Kin, seen: Witnesses
) -> None:
    """The child is over, one that it has started is not, and the child's number is that of a session of others."""
    Parent(tmp_path, "ended", ["holds"], holds, guarded=False).kill()
    known = read_manifest(tmp_path / "0")
    assert known is not None
    number = seen.take_number(known.pid)
    if number != known.pid:  # not everybody may choose one
        file = tmp_path / "0" / "child.json"
        file.write_text(json.dumps(json.loads(file.read_bytes()) | {"pid": number}))
    assert not known.is_alive
    if how == "adopted":
        assert await lines_of(tmp_path / "0") == ["ready"]
    else:
        assert await sweep(tmp_path, []) == 1
    assert holds.is_gone(0)
    assert seen.are_alive
