"""The process room with children that are hard to be rid of: nothing of them is left, and nobody else is hit."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

import anyio
import pytest

from plait.backends.process import child_process
from plait.backends.process.child_process import Child, Launch, running
from plait.errors import BackendError, ErrorKind
from tests.support.cancelling import HOWS, Cancelled, How
from tests.support.processes.room import Witnesses, kin, nasty, nothing_left, soon, told_of, witnesses

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs procfs")]

End = Literal["enough", "raises", "scope", "native", "native twice", "late", "idle"]
ENDS: Final[tuple[End, ...]] = get_args(End)
CHILDREN = (
    "deaf", "escapes", "vanishes", "leaves_a_vanished", "cleared", "orphans", "hides", "bears", "guards_itself",
    "regroups", "stopped", "floods", "holds", "goes_on_writing", "never_reads", "closes", "empties", "rubbish", "dies",
    "dies_by_signal",
)  # fmt: skip
SECRET = b"what nobody else may see"
PROMPT = SECRET * 20
GRACE = 0.3


class Turn:
    """One turn with a nasty child, ended in one way as soon as the child is at its worst."""

    def __init__(self, name: str, end: End, folder: Path, seen: Witnesses) -> None:
        self._name = name
        self._end = end
        self._folder = folder
        self._seen = seen
        self._child: Child | None = None
        self._ends_at = 0.0

    async def run(self) -> None:
        prompt = PROMPT * 20_000 if self._name == "never_reads" else PROMPT
        with kin() as holds:
            task = asyncio.current_task()
            assert task is not None
            with anyio.CancelScope() as scope:
                self._stops: dict[End, Callable[[], object]] = {
                    "scope": scope.cancel, "native": task.cancel, "native twice": lambda: self._twice(task.cancel),
                }  # fmt: skip
                try:
                    async with running(nasty(self._name, holds, self._folder, prompt), self._folder / "t") as child:
                        await self._body(child)
                except (BackendError, ZeroDivisionError, asyncio.CancelledError) as error:
                    self._judge(error)
            took = anyio.current_time() - self._ends_at
            assert holds.is_gone(0), f"{self._name}, {self._end}: something is left {took:.2f} s after the end"
            assert took < soon()
        while task.cancelling():
            task.uncancel()
        self._look_behind()

    async def _body(self, child: Child) -> None:
        self._child = child
        self._ends_at = now = anyio.current_time()
        assert SECRET not in told_of(child.manifest.pid)
        self._seen.resemble(child.manifest.marker)
        idle, until = (0.2 if self._end == "idle" else 60), (0.4 if self._end in {"late", "idle"} else 60)
        self._ends_at += until if until < 1 else 0
        await child.follow(self._on_line, idle=idle, until=now + until)

    def _on_line(self, line: bytes) -> bool:
        if line != b"ready":
            return False
        if self._end in self._stops or self._end == "raises":
            self._ends_at = anyio.current_time()
        if self._end == "raises":
            raise ZeroDivisionError
        self._stops.get(self._end, int)()
        return self._end == "enough"

    def _twice(self, cancel: Callable[[], object]) -> None:
        cancel()
        asyncio.get_running_loop().call_later(GRACE / 3, cancel)

    def _judge(self, error: BaseException) -> None:
        if isinstance(error, BackendError):
            assert self._end in {"late", "idle"} and error.kind is ErrorKind.TIMEOUT and error.continues_session
        elif isinstance(error, ZeroDivisionError):
            assert self._end == "raises"
        else:
            assert self._end in {"native", "native twice", "scope"}

    def _look_behind(self) -> None:
        assert self._child is not None and self._child.status is not None and self._child.is_gone
        folder = self._folder / "t"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {one.name for one in folder.iterdir()} == {"over.json", "stdout", "stderr"}
        for file in folder.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert SECRET not in file.read_bytes()
            file.unlink()  # there may be a lot


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(child_process, "GRACE", GRACE)
    with nothing_left():
        yield


@pytest.mark.parametrize("name", CHILDREN)
async def test_nothing_of_a_child_is_left_and_nobody_else_is_hit(name: str, tmp_path: Path) -> None:
    with witnesses() as seen:
        async with anyio.create_task_group() as group:
            for end in ENDS:
                (tmp_path / end).mkdir()
                (tmp_path / end / "go").touch()
                group.start_soon(Turn(name, end, tmp_path / end, seen).run)


@pytest.mark.parametrize("end", ["enough", "native twice"])
async def test_a_child_that_is_another_process_at_every_moment_is_caught(end: End, tmp_path: Path) -> None:
    with witnesses() as seen:
        await Turn("runs_away", end, tmp_path, seen).run()


@pytest.mark.parametrize("how", HOWS)
async def test_a_turn_that_is_cancelled_at_any_moment_leaves_nothing(how: How, tmp_path: Path) -> None:
    """At each of its waits in turn, until it comes to its end."""
    at, ended = 0, False
    with witnesses() as seen:
        while not ended:
            at += 1
            with kin() as holds:
                folder = tmp_path / str(at)
                cancelled = Cancelled(at, how)
                await cancelled.call(partial(_whole_turn, nasty("escapes", holds, tmp_path), folder, seen))
                ended = cancelled.waits < at
                assert holds.is_gone(0), f"something is left of the turn that was cancelled at wait {at}"
            assert (folder / "over.json").exists() == (folder / "stdout").exists()
    assert at > 8


async def _whole_turn(start: Launch, folder: Path, seen: Witnesses) -> None:
    async with running(start, folder) as child:
        await child.follow(lambda line: line == b"ready", idle=60, until=anyio.current_time() + 60)
        await child.wait(0.02)
