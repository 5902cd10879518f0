"""Children for the process room, who is of them, and processes beside them that nobody may touch."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from plait.backends.process.child_process import Launch, child_environment, scratch

NASTY = Path(__file__).with_name("nasty.py")
ROOT = Path(__file__).parent.parent.parent.parent
PYTHON = (sys.executable, "-I", "-S")

LIFE = 300.0  # seconds; nothing lives longer, should it be left over
Moment = Literal[
    "before the spawn", "in the spawn", "after the spawn",
    "at work", "ended", "stopping", "left", "one by one", "copied",
]  # fmt: skip
"""When a parent is killed: before it starts its child; when that is no program yet, until the folder has a `start`;
when it has, but has not written down which process that is; when the children are at their worst; when they have
ended; when one was asked to end and has not; when all is over.
Or at work, but the second child is started only when the parent is told to `go_on`; or when it has made a copy of
itself, which lives on.
"""
WORST: dict[Moment, str] = {
    "before the spawn": "escapes",
    "after the spawn": "escapes",  # it has no mark yet that outlasts its environment
    "at work": "vanishes",
    "ended": "leaves_a_vanished",
    "stopping": "vanishes",
    "left": "leaves_a_vanished",
}
"""The hardest child to be rid of at each moment."""


class Kin:
    """A child and all that it starts: they hold one end of a pipe, whatever they do to their session, their group and
    their environment.
    """

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()

    def close(self) -> None:
        for descriptor in (self._reading, self.writing):
            if descriptor >= 0:
                os.close(descriptor)
        self._reading = self.writing = -1

    def is_gone(self, seconds: float) -> bool:
        """Whether the last of them is gone, within that time; nobody else may hold the end from now on."""
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1
        return bool(select.select([self._reading], [], [], seconds)[0])


@contextmanager
def kin() -> Iterator[Kin]:
    """One of them, closed at the end."""
    made = Kin()
    try:
        yield made
    finally:
        made.close()


def nasty(name: str, holds: Kin, cwd: Path, prompt: bytes = b"", *, guarded: bool = False) -> Launch:
    """How one of the nasty children is started."""
    argv = (*PYTHON, str(NASTY), name, str(holds.writing))
    return Launch(argv, child_environment(), cwd, prompt, (holds.writing,), guarded=guarded)


class Witnesses:
    """Processes of the same user that belong to no turn, however much they look like it."""

    def __init__(self) -> None:
        self._processes = [self._sleeper({})]

    def resemble(self, marker: str) -> None:
        """More of them, who come as close to the turn of this marker as can be."""
        names = (f"PLAIT_TURN_{marker}0", f"PLAIT_TURN_{marker[:-1]}", f"X_PLAIT_TURN_{marker}", f"PLAIT_TURN{marker}")
        resembling = {**dict.fromkeys(names, "1"), "ABOUT": f"PLAIT_TURN_{marker}=1"}
        self._processes += [self._sleeper(resembling), self._sleeper(resembling)]
        locks, number = 10, int(marker[:15], 16)
        resource.prlimit(self._processes[-1].pid, locks, (number + 1, resource.RLIM_INFINITY))

    def take_number(self, number: int) -> int:
        """One more, the leader of a session, with this process number, if we may choose one and it is free soon; the
        number that it has. 0: any.
        """
        chosen = Path("/proc/sys/kernel/ns_last_pid")
        if os.access(chosen, os.W_OK):
            within(soon(), lambda: not Path(f"/proc/{number}").exists())
        for _ in range(50):
            with suppress(OSError):
                chosen.write_text(str(number - 1) if number else "")
            self._processes.append(self._sleeper({}, session=True))
            if number in {0, self._processes[-1].pid} or not os.access(chosen, os.W_OK):
                break
        return self._processes[-1].pid

    def _sleeper(self, environment: dict[str, str], *, session: bool = False) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sleep", str(LIFE)], env=environment, start_new_session=session)

    @property
    def are_alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def witnesses() -> Iterator[Witnesses]:
    """They are alive at the end."""
    made = Witnesses()
    try:
        yield made
        assert made.are_alive
    finally:
        made.end()


def zombies() -> list[int]:
    """Our children that are over and were not waited for."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and int(fields[1]) == os.getpid():
            found.append(int(stat.parent.name))
    return found


def told_of(pid: int) -> bytes:
    """What everybody of the same user can see of it: its arguments and its environment; nothing when it is over."""
    told = b""
    with suppress(ProcessLookupError):
        for place in ("cmdline", "environ"):
            told += Path(f"/proc/{pid}/{place}").read_bytes()
    return told


@contextmanager
def nothing_left() -> Iterator[None]:
    """No child that ended and no open file is left that was not there before."""
    gc.collect()  # closes what earlier tests have left to it
    gc.freeze()  # what is alive need not be looked through before each test: half a second, after some thousand tests
    with scratch():  # the watchdog, whose socket is kept, starts with its first use
        pass
    before = _descriptors()
    yield
    assert zombies() == []
    assert _descriptors() == before


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def soon() -> float:
    """A minute, in which a machine that has more to do than it can comes to it, too. All that is left lives longer."""
    return 60.0


def within(seconds: float, happens: Callable[[], bool]) -> bool:
    """Whether `happens()` becomes true in that time."""
    until = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


class Parent:
    """A process that runs nasty children, each with its files below `folder`, to be killed at one `moment`."""

    def __init__(self, folder: Path, moment: Moment, children: Sequence[str], holds: Kin, *, guarded: bool) -> None:
        words = [str(folder), moment, str(int(guarded)), str(holds.writing), *children]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes.room_parent", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[holds.writing],
        )
        self.pid = self._process.pid
        self._said: str | None = None

    def come(self) -> str:
        """Wait until it has come to its moment; what it said then, "" when it has killed itself."""
        assert self._process.stdout is not None
        if self._said is None:
            self._said = self._process.stdout.readline().decode().strip()
        return self._said

    def go_on(self) -> None:
        """Have it start its second child."""
        self.come()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._said = None

    def kill(self) -> None:
        """Kill it when it has come to its moment."""
        self.come()
        self._process.kill()
        assert self._process.wait(60) == -signal.SIGKILL
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def guards_of(parent: Parent) -> list[int]:
    """The processes that are to kill the children of this one at its end."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = place.read_bytes().split(b"\0")
            program = b"%s/src/plait/backends/process/_watchdog_main.py" % os.fsencode(ROOT)
            if words[3:5] == [program, b"%d" % parent.pid]:
                found.append(int(place.parent.name))
    return found
