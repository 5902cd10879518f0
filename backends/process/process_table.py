"""Read the table of processes, and signal the processes of one tree and no others.

The system uses process numbers again, so a process is identified by its number and its start time, and is signalled
through a descriptor (pidfd); the start time is compared after opening the descriptor.

Every process of a child's tree carries a marker twice. (1) As a name in the environment, inherited from the first
instruction on. A process can clear, hide or paint over the environment; the workers of a PostgreSQL server paint over
all of it. (2) As a number, the limit of file locks: inherited, left alone by all programs, and without effect since
Linux 2.4.25. Without the number, a process with no environment, its own session and a dead parent belongs to nobody.

psutil reads the table on systems without /proc. Linux's is read here, because psutil lacks: a start time that a step of
the clock does not change (`create_time` is a time of day; the ticks since the boot are private); an environment behind
an empty string; speed (54 instead of 9 microseconds a process, 8 instead of 3 ms for each turn of an agent); a start of
the watchdog in 21 instead of 33 ms. On no system does psutil signal by pidfd: `send_signal` compares, then calls kill.
`_watchdog_main.py` and `_acp_relay.py` import this file in a bare interpreter, so nothing of plait is imported here.
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
"""The name of a tree's environment variable, without the marker at its end. Trees within trees have two variables."""

_PROC = Path("/proc")
HAS_PROC = (_PROC / "self" / "stat").exists()
_OVER = (b"Z", b"X")  # the states zombie and dead
_NAMES = re.compile(rb"(?:\A|\0)" + PREFIX.encode() + rb"([0-9a-f]+)=")
_RLIMIT_LOCKS = 10  # asm-generic/resource.h; the module `resource` has no name for the limit
_OOM_RAISE, _MOST_OOM = 300, 1000  # proc_pid_oom_score_adj(5): thousandths of all memory, added to a process's own
_SCANS = 30  # scans in a row without a find, at most, while processes of others come and go


class Process(NamedTuple):
    """One line of the table."""

    pid: int
    is_over: bool
    """Whether the process is a zombie, or dead."""
    parent: int
    session: int
    started: int
    """Hundredths of a second: since the boot on Linux (clock ticks), since 1970 elsewhere."""


class ProcessTag(NamedTuple):
    """The identity of a child's process tree."""

    marker: str
    """Hexadecimal, 16 digits."""
    pid: int = 0
    """The child, leader of its session; 0 while unknown."""
    started: str = ""
    """The child's start time, as `start_time` returns it; "" while unknown."""


def boot_id() -> str:
    """Return the boot of this machine and, behind a slash, the namespace of process numbers; "" without /proc."""
    try:
        return _boot_id(os.getpid())
    except OSError:
        return ""


@lru_cache(maxsize=1)
def _boot_id(_pid: int) -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"


def start_time(pid: int) -> str | None:
    """Return the start time of a process, None if the process is over, "" if the system does not answer."""
    try:
        process = _look(pid)
    except ProcessLookupError:
        return None
    except OSError:  # no descriptor is left, or access was denied
        return ""
    return None if process.is_over else str(process.started)


def first_start_time(pid: int) -> str:
    """Return the start time of a child of this process, be the child a zombie; "" if the system does not answer."""
    with suppress(OSError):
        return str(_look(pid).started)
    return ""


def library() -> str:
    """Return the folder from which a bare interpreter imports psutil for this module; "" where psutil is not used."""
    if HAS_PROC:
        return ""
    import psutil  # noqa: PLC0415 - Linux does without

    return str(Path(psutil.__file__).parents[1])


def mark(pid: int, marker: str) -> None:
    """Set the number of a marker as limit of a process and its later children, unless the system refuses."""
    with suppress(OSError, ValueError, AttributeError):
        hard = resource.prlimit(pid, _RLIMIT_LOCKS)[1]
        resource.prlimit(pid, _RLIMIT_LOCKS, (_number(marker), hard))


def _number(marker: str) -> int:
    return int(marker[:15], 16)  # 60 bits: below the value for "no limit", and within the range of `resource`


def offer_to_oom_killer(pid: int) -> None:
    """Raise the `oom_score_adj` of a process and its later children: when memory runs out, the kernel kills them first,
    not this process. Do nothing where the system has no such score.
    """
    with suppress(OSError, ValueError):
        score = _PROC / str(pid) / "oom_score_adj"
        score.write_text(str(min(int(score.read_text()) + _OOM_RAISE, _MOST_OOM)))


def members(tags: Collection[ProcessTag]) -> list[Process]:
    """Return the living processes of the tagged trees, except this process. Raise OSError if no descriptor is left.

    A tree is all processes with the marker or in the session of the child, and their descendants.
    """
    return list(_find(tags, set()))


def _find(tags: Collection[ProcessTag], scanned: set[int]) -> Iterator[Process]:
    """Yield each member at once, the youngest first: some live for a moment only. Skip, and add to, `scanned`."""
    oldest = min((_started(tag) for tag in tags), default=0)
    numbers, names = {_number(tag.marker) for tag in tags}, {tag.marker.encode() for tag in tags}
    table: dict[int, Process] = {}
    inside: set[int] = set()
    for process in _scan(scanned):
        if process.started >= oldest:
            table[process.pid] = process
            if _is_marked(process.pid, numbers, names):
                inside.add(process.pid)
                yield from _living(process)
    # Leaders and parents are checked after the scan: with the same start time, a number had the same owner throughout.
    leaders = {tag.pid for tag in tags if tag.pid and _has(tag.pid, _started(tag))}
    grown = {one.pid for one in table.values() if leaders & {one.pid, one.session}} - inside
    while True:
        yield from _living(*(table[pid] for pid in grown))
        inside |= grown
        born = [one for one in table.values() if one.parent in inside and one.pid not in inside]
        grown = {one.pid for one in born if _is_unchanged(one) and _has(one.parent, table[one.parent].started)}
        if not grown:
            return


def _living(*processes: Process) -> Iterator[Process]:
    return (one for one in processes if not one.is_over and one.pid != os.getpid())


def _is_marked(pid: int, numbers: set[int], names: set[bytes]) -> bool:
    with suppress(OSError, ValueError, AttributeError):
        if resource.prlimit(pid, _RLIMIT_LOCKS)[0] in numbers:
            return True
    try:
        return not names.isdisjoint(_markers(pid))
    except OSError:  # the process is another user's, or over
        return False


def signal_tree(tags: Collection[ProcessTag], *signals: int) -> list[Process]:
    """Send the signals, in order, to all members of the tagged trees, and return the members."""
    return [one for one in members(tags) if all(send_signal(one.pid, one.started, number) for number in signals)]


def kill_tree(tags: Collection[ProcessTag], seconds: float, signalled: Iterable[Process] = ()) -> tuple[int, bool]:
    """Kill the tagged trees, the processes in `signalled`, and all processes that both start meanwhile.

    Return the number of killed processes, and whether none but other users' is left. After `seconds`, return anyway:
    processes are left that the kernel holds.
    """
    until, pause, scans = time.monotonic() + seconds, 0.002, 0
    killed = {(one.pid, one.started) for one in signalled if send_signal(one.pid, one.started, signal.SIGKILL)}
    scanned: set[int] = set()
    while scans < _SCANS:
        before = len(scanned)
        living = _find(tags, scanned)
        dying = {(one.pid, one.started) for one in living if send_signal(one.pid, one.started, signal.SIGKILL)}
        # A dead parent no longer leads to these.
        dying |= {(pid, started) for pid, started in killed if start_time(pid) == str(started)}
        killed |= dying
        if dying:
            if time.monotonic() >= until:
                return len(killed), False
            time.sleep(pause)
            pause, scans = min(2 * pause, 0.1), 0
            scanned.clear()
        elif len(scanned) == before:
            break
        scans += 1
    return len(killed), True


def send_signal(pid: int, started: int, signal_number: int) -> bool:
    """Signal one process, if alive, and never a later process of the number. Return False for another user's."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # an old kernel, a Python built for an old kernel, a sandbox, macOS
        descriptor = None
    try:
        if _has(pid, started):
            if descriptor is None:
                os.kill(pid, signal_number)
            else:
                signal.pidfd_send_signal(descriptor, signal_number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def _scan(scanned: set[int]) -> Iterator[Process]:
    """Yield the lines of the table, as `_find` does."""
    new = set(_pids()) - scanned
    scanned |= new
    for pid in sorted(new, reverse=True):
        # The process may be over by now, or hidden by the mount options of /proc.
        with suppress(ProcessLookupError, PermissionError):
            yield _look(pid)


def _has(pid: int, started: int) -> bool:
    """Return whether the process with this start time still has its number, be it as a zombie."""
    try:
        return _look(pid).started == started
    except ProcessLookupError:
        return False


def _is_unchanged(process: Process) -> bool:
    """Return whether the line of a process is the same now, except for the end of the process."""
    try:
        return _look(process.pid)._replace(is_over=process.is_over) == process
    except ProcessLookupError:
        return False


def _started(tag: ProcessTag) -> int:
    return int(tag.started) if tag.started.isdecimal() else 0


def _pids() -> Iterable[int]:
    if HAS_PROC:
        return (int(name) for name in os.listdir(_PROC) if name.isdigit())  # noqa: PTH208 - there may be thousands
    import psutil  # noqa: PLC0415

    return psutil.pids()


def _look(pid: int) -> Process:
    """Return the line of a process. Raise ProcessLookupError if none has the number, OSError if reading fails."""
    if not HAS_PROC:
        return _look_by_psutil(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - half the cost
            line = file.read(1024)
    except FileNotFoundError:
        raise ProcessLookupError from None
    # The command's name, in parentheses, may hold anything: count fields behind it. proc(5): state is 3, start time 22.
    fields = line.rpartition(b")")[2].split()
    return Process(pid, fields[0] in _OVER, int(fields[1]), int(fields[3]), int(fields[19]))


def _look_by_psutil(pid: int) -> Process:
    import psutil  # noqa: PLC0415

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            is_over = process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
            parent, created = process.ppid(), process.create_time()
    except psutil.NoSuchProcess:
        raise ProcessLookupError from None
    except psutil.AccessDenied:
        raise PermissionError from None
    session = 0
    with suppress(OSError):  # macOS does not answer for a zombie
        session = os.getsid(pid)
    return Process(pid, is_over, parent, session, round(created * 100))


def _markers(pid: int) -> Iterable[bytes]:
    """Return the markers in the environment of a process. Raise OSError if the environment cannot be read."""
    if HAS_PROC:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123
            return _NAMES.findall(file.readall())
    import psutil  # noqa: PLC0415

    try:
        names = psutil.Process(pid).environ()
    except psutil.Error:
        raise PermissionError from None
    return [os.fsencode(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX)]
