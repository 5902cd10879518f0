"""The table of processes, as far as it is needed to end a whole tree of them and nothing else.

A process number says little: numbers are used again. So a process is known by its number and its start time, and is
signalled through a descriptor of it (pidfd), checked after the descriptor was opened. Linux's /proc tells who carries a
marker in its environment; where there is none (macOS), only what we started ourselves is known, by its group.

Nothing of ours is imported: the guard (`_guard.py`) runs this file in a bare interpreter.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PREFIX = "PLAIT_TURN_"
"""How the variable's name begins that every process of a turn has in its environment; the turn's marker follows. A name
and not a value, so that an agent that runs plait itself hands on both.
"""

_PROC = Path("/proc")
HAS_PROC = (_PROC / "self" / "stat").exists()
_ENDED = (b"Z", b"X")  # states of processes that are over: zombie, dead


class Process(NamedTuple):
    """One line of the table. `started` is in clock ticks since the machine's start."""

    pid: int
    state: bytes
    parent: int
    group: int
    session: int
    started: int


def boot_id() -> str:
    """The boot of this machine and, behind a slash, the namespace that pids belong to; "" where neither is told."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """The process's start time as its host counts it, "" where the host does not tell, None when it is over."""
    try:
        process = _look(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None if HAS_PROC else _probe(pid)
    except OSError:  # no file descriptor is left, or we may not look: that says nothing of it
        return ""
    return None if process.state in _ENDED else str(process.started)


def _probe(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return ""
    return ""


def members(marker: str, leader: int | None) -> list[Process]:
    """All processes that belong to a turn and are not over: those that carry its marker, and those in the group, the
    session or the offspring of `leader`, a process number that is known to be still the turn's own.
    """
    table = list(_table())
    inside = {leader} if leader else set[int]()
    inside |= {process.pid for process in table if _carries(process.pid, marker)}
    inside |= {process.pid for process in table if leader and leader in {process.group, process.session}}
    grew = True
    while grew:
        born = {process.pid for process in table if process.parent in inside} - inside
        inside |= born
        grew = bool(born)
    return [process for process in table if process.pid in inside and process.state not in _ENDED]


def send(process: Process, number: int) -> None:
    """Signal that very process; nothing happens if it is over."""
    with suppress(OSError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if _look(process.pid).started == process.started:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def kill_members(marker: str, leader: int | None) -> int:
    """Kill all that belong to a turn; how many there were. They may bear more meanwhile: call until it returns 0."""
    if not HAS_PROC:
        return _kill_group(leader)
    found = members(marker, leader)
    for process in found:
        send(process, signal.SIGKILL)
    return len(found)


def _kill_group(leader: int | None) -> int:
    if leader is None:
        return 0
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        return 0
    return 1


def _table() -> Iterator[Process]:
    for name in os.listdir(_PROC):  # noqa: PTH208 - names alone, of which there may be thousands
        if name.isdigit():
            with suppress(OSError):  # it is over by now
                yield _look(int(name))


def _look(pid: int) -> Process:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - half the cost
        line = file.read(1024)
    # The command's name, in parentheses, may hold anything: count fields behind it. proc(5): state is 3, start time 22.
    fields = line.rpartition(b")")[2].split()
    return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def _carries(pid: int, marker: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123
            return f"{PREFIX}{marker}=".encode() in file.readall()
    except OSError:  # another user's, or over
        return False
