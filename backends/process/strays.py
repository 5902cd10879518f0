"""Children of ours that outlived the process which started them.

No model server should (LocalBackend); they end when their standard input does. One that is left over has been handed to
another process (pid 1, or whatever collects orphans), which does not run the Python that starts servers. Agents do, so
that a resume may take them over; their files say who they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from plait.backends.process.manifest import left_below
from plait.backends.process.proctable import HAS_PROC, members
from plait.backends.values import value

_ARGUMENTS = [b"-P", os.fsencode(Path(__file__).parent.parent / "llm" / "_llama_server.py")]


@value
class AtWork:
    """A child that lives, or of which something does: the folder of its files, the kind of its backend, and the numbers
    of its processes, its own first.
    """

    folder: Path
    kind: str
    pids: tuple[int, ...]


def agents_at_work(root: Path) -> list[AtWork]:
    """All agents that live and have their files somewhere below `root`, whoever started them, and whether or not that
    process lives.
    """
    found: list[AtWork] = []
    for folder, known in left_below(root):
        if HAS_PROC:
            pids = sorted((one.pid for one in members([known.turn])), key=lambda pid: (pid != known.pid, pid))
        else:
            pids = [known.pid] if known.pid and known.is_alive else []
        if pids:
            found.append(AtWork(folder, known.note.get("kind", ""), tuple(pids)))
    return sorted(found, key=lambda one: one.folder)


def left_over_servers(proc: Path = Path("/proc")) -> list[int] | None:
    """The pids of this user's model servers whose parent is gone; None where processes cannot be looked at (`proc` is
    Linux's).
    """
    if not (proc / "self" / "stat").exists():
        return None
    return sorted(pid for pid, parent in _servers(proc) if _program(proc, parent) != _program(proc, pid))


def _servers(proc: Path) -> Iterator[tuple[int, int]]:
    for entry in proc.iterdir():
        try:
            if (
                entry.name.isdigit()
                and entry.stat().st_uid == os.geteuid()
                and (entry / "cmdline").read_bytes().split(b"\0")[1:3] == _ARGUMENTS
            ):
                # The command's name, in parentheses, may hold spaces; the parent is the second field behind it.
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue


def _program(proc: Path, pid: int) -> str:
    try:
        return str((proc / str(pid) / "exe").readlink())
    except OSError:
        return ""
