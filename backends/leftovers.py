"""Children of ours that outlived the process which started them. None should: this is for seeing that there is none.

Only LocalBackend starts children, model servers that end when their standard input does. One that is left over has been
handed to another process (pid 1, or whatever collects orphans), which does not run the Python that starts servers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ARGUMENTS = [b"-P", os.fsencode(Path(__file__).with_name("_llama_server.py"))]


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
