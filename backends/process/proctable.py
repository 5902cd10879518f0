"""The table of processes, as far as it is needed to end a whole tree of them and nothing else.

A process number says little: numbers are used again. So a process is known by its number and its start time, and is
signalled through a descriptor of it (pidfd), checked after the descriptor was opened. Linux's /proc tells who carries a
turn's mark; where there is none (macOS), only what we started ourselves is known, by its group.

A turn's mark is twofold. Its name is in the environment, which every process inherits from its first breath, but can
clear, paint over (a server that shows its state in `ps`) or hide. So its number is a resource limit, too, that of file
locks: inherited like the environment and dropped by nobody, and without any effect since Linux 2.4.25.
Nothing of ours is imported: the guard (`_guard.py`) runs this file in a bare interpreter.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

PREFIX = "PLAIT_TURN_"
"""How the variable's name begins that every process of a turn has in its environment; the turn's marker follows. A name
and not a value, so that an agent that runs plait itself hands on both.
"""

_PROC = Path("/proc")
HAS_PROC = (_PROC / "self" / "stat").exists()
_ENDED = (b"Z", b"X")  # states of processes that are over: zombie, dead
_NAMES = re.compile(rb"(?:\A|\0)" + PREFIX.encode() + rb"([0-9a-f]+)=")
_RLIMIT_LOCKS = 10  # asm-generic/resource.h; `resource` has no name for it
_LOOKS = 30  # how many times in a row, at most, nothing has to be found while others' processes come and go


class Process(NamedTuple):
    """One line of the table. `started` is in clock ticks since the machine's start."""

    pid: int
    state: bytes
    parent: int
    group: int
    session: int
    started: int


class Turn(NamedTuple):
    """What the processes of a turn are known by: its marker (hexadecimal, 16 digits), and the number and start time (as
    `start_time` tells it) of the first of them, which is the leader of its session; 0 and "" while that is not known.
    """

    marker: str
    pid: int = 0
    started: str = ""


def boot_id() -> str:
    """The boot of this machine and, behind a slash, the namespace that pids belong to; "" where neither is told."""
    try:
        return _boot_id(os.getpid())
    except OSError:
        return ""


@lru_cache(maxsize=1)
def _boot_id(_pid: int) -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"


def start_time(pid: int) -> str | None:
    """The process's start time as its host counts it, "" where the host does not tell, None when it is over."""
    try:
        state, started = _state_of(pid)
    except ProcessLookupError:
        return None
    except OSError:  # no file descriptor is left, or we may not look: that says nothing of it
        return ""
    return None if state in _ENDED else started


def first_start_time(pid: int) -> str:
    """The same of a child of ours that was not waited for: it may be over already."""
    with suppress(OSError):
        return _state_of(pid)[1]
    return ""


def _state_of(pid: int) -> tuple[bytes, str]:
    """ProcessLookupError when there is no such process; another OSError when nobody tells."""
    if not HAS_PROC:
        return _state_by_ps(pid)
    try:
        process = _look(pid)
    except FileNotFoundError:
        raise ProcessLookupError from None
    return process.state, str(process.started)


def _state_by_ps(pid: int) -> tuple[bytes, str]:
    import subprocess  # noqa: PLC0415 - half of the guard's start, for hosts that have no /proc

    # The hour that it tells must be the same in summer and on a journey.
    where = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC0"}
    try:
        told = subprocess.run(  # noqa: S603
            ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)],  # noqa: S607 - by the system's own PATH
            capture_output=True,
            timeout=5,
            env=where,
            check=False,
        )
    except subprocess.SubprocessError:
        raise TimeoutError from None
    state, _, started = told.stdout.decode("ascii", "replace").strip().partition(" ")
    if told.returncode and told.stderr:
        raise OSError("ps tells nothing")
    if not started:
        raise ProcessLookupError
    return state[:1].encode(), started.strip()


def tag(pid: int, marker: str) -> None:
    """Give a process, and so all that it starts from now on, the turn's number. Where that cannot be (another system,
    a sandbox), its name in the environment has to do.
    """
    with suppress(OSError, ValueError, AttributeError):
        hard = resource.prlimit(pid, _RLIMIT_LOCKS)[1]
        resource.prlimit(pid, _RLIMIT_LOCKS, (_number(marker), hard))


def _number(marker: str) -> int:
    return int(marker[:15], 16)  # 60 bits: less than what means "no limit", and than what `resource` can tell


def members(turns: Collection[Turn]) -> list[Process]:
    """All processes that belong to one of the turns and are not over, but for this one: those that carry its mark, and
    those in the group, the session or the offspring of its first one. Raises OSError where no descriptor is left.
    """
    return list(_found(turns, set()))


def _found(turns: Collection[Turn], seen: set[int]) -> Iterator[Process]:
    """The same, each as soon as it is found, the youngest first: some are there for a moment only. Numbers in `seen`
    are not looked at; the others are added to it.
    """
    oldest = min((_ticks(turn) for turn in turns), default=0)
    marks = _Marks(turns)
    table: dict[int, Process] = {}
    inside: set[int] = set()
    for process in _table(seen):
        if process.started >= oldest:
            table[process.pid] = process
            if marks.are_on(process.pid):
                inside.add(process.pid)
                yield from _living(process)
    # Here, after the table was read: whoever still has its number had it all the while, as a leader or a parent.
    leaders = {turn.pid for turn in turns if turn.pid and _has(turn.pid, _ticks(turn))}
    grown = {one.pid for one in table.values() if leaders & {one.pid, one.group, one.session}} - inside
    while True:
        yield from _living(*(table[pid] for pid in grown))
        inside |= grown
        born = [one for one in table.values() if one.parent in inside and one.pid not in inside]
        grown = {one.pid for one in born if _look_again(one) == one and _has(one.parent, table[one.parent].started)}
        if not grown:
            return


def _living(*processes: Process) -> Iterator[Process]:
    return (one for one in processes if one.state not in _ENDED and one.pid != os.getpid())


class _Marks:
    """By what the processes of some turns can be told."""

    def __init__(self, turns: Collection[Turn]) -> None:
        self._names = {turn.marker.encode() for turn in turns}
        self._numbers = {_number(turn.marker) for turn in turns}

    def are_on(self, pid: int) -> bool:
        with suppress(OSError, ValueError, AttributeError):
            if resource.prlimit(pid, _RLIMIT_LOCKS)[0] in self._numbers:
                return True
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123 - half the cost
                return not self._names.isdisjoint(_NAMES.findall(file.readall()))
        except OSError:  # another user's, or over
            return False


def tell(turns: Collection[Turn], *numbers: int) -> list[Process]:
    """Send the signals, in order, to all that belong to the turns; who was told, as far as a table says."""
    if not HAS_PROC:
        for turn in turns:
            _tell_group(turn, numbers)
        return []
    return [process for process in members(turns) if all(send(process, number) for number in numbers)]


def end(turns: Collection[Turn], seconds: float, told: Iterable[Process] = ()) -> tuple[int, bool]:
    """Kill all that belong to the turns, those `told` before, and what they start meanwhile; how many, and whether none
    is left. Other users' do not count, which we may not kill. What hangs in the kernel is given up after `seconds`.
    """
    if not HAS_PROC:
        return sum([_tell_group(turn, (signal.SIGKILL,)) for turn in turns]), True
    until, pause, looks = time.monotonic() + seconds, 0.002, 0
    killed = {(one.pid, one.started) for one in told if send(one, signal.SIGKILL)}
    seen: set[int] = set()
    while looks < _LOOKS:
        before = len(seen)
        dying = {(one.pid, one.started) for one in _found(turns, seen) if send(one, signal.SIGKILL)}
        dying |= {one for one in killed if start_time(one[0]) == str(one[1])}  # with a dead parent, it is nobody's
        killed |= dying
        if dying:
            if time.monotonic() >= until:
                return len(killed), False
            time.sleep(pause)
            pause, looks = min(2 * pause, 0.1), 0
            seen.clear()
        elif len(seen) == before:
            break
        looks += 1
    return len(killed), True


def send(process: Process, number: int) -> bool:
    """Signal that very process; nothing happens if it is over. False if it is another user's."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # an old kernel, a Python that was built for one, a sandbox
        descriptor = None
    try:
        if _has(process.pid, process.started):
            if descriptor is None:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def _tell_group(turn: Turn, numbers: Collection[int]) -> bool:
    # Its number is its own as long as the process is there, a zombie included.
    if not turn.pid or not turn.started or first_start_time(turn.pid) != turn.started:
        return False
    try:
        for number in numbers:
            os.killpg(turn.pid, number)
    except OSError:
        return False
    return True


def _table(seen: set[int]) -> Iterator[Process]:
    """See `_found`."""
    new = {int(name) for name in os.listdir(_PROC) if name.isdigit()} - seen  # noqa: PTH208 - there may be thousands
    seen |= new
    for pid in sorted(new, reverse=True):
        # It may be over by now, or another user's in a /proc that hides them.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            yield _look(pid)


def _has(pid: int, started: int) -> bool:
    """Whether the process that started then still has its number; it may be a zombie."""
    try:
        return _look(pid).started == started
    except (FileNotFoundError, ProcessLookupError):
        return False


def _look_again(process: Process) -> Process | None:
    """Its line as it is now, but for the state; None when it is over."""
    try:
        return _look(process.pid)._replace(state=process.state)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _ticks(turn: Turn) -> int:
    return int(turn.started) if turn.started.isdecimal() else 0


def _look(pid: int) -> Process:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
        line = file.read(1024)
    # The command's name, in parentheses, may hold anything: count fields behind it. proc(5): state is 3, start time 22.
    fields = line.rpartition(b")")[2].split()
    return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
