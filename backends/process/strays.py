"""Find children that outlived the process that started them.

A model server (`LocalBackend`) ends when its standard input ends, so a server whose parent is gone is a fault: the
system has handed the server to another process (process 1, or a collector of orphans) with another program than the
Python that starts servers. Agents outlive their parent on purpose: a resume takes them over. The files of an agent say
which processes belong to it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from plait.backends.process.child_manifest import manifests_below
from plait.backends.process.process_table import members
from plait.json_form import value

_ARGUMENTS = ["-P", str(Path(__file__).parent.parent / "llm" / "_llama_server.py")]


@value
class AtWork:
    """A child with living processes."""

    folder: Path
    """The folder of the child's files."""
    kind: str
    """The kind of the child's backend."""
    pids: tuple[int, ...]
    """The processes, the child first if the child lives."""


def agents_at_work(root: Path) -> list[AtWork]:
    """Return all living agents with files below `root`, whether or not the process that started them lives."""
    found: list[AtWork] = []
    for folder, manifest in manifests_below(root):
        pids = sorted((one.pid for one in members([manifest.tag])), key=lambda pid: (pid != manifest.pid, pid))
        if pids:
            found.append(AtWork(folder, manifest.note.get("kind", ""), tuple(pids)))
    return sorted(found, key=lambda one: one.folder)


def left_over_servers() -> list[int] | None:
    """Return the process numbers of this user's model servers whose parent is gone; None if the table is unreadable."""
    try:
        return [server.pid for server in psutil.process_iter() if _is_left_over(server)]
    except (psutil.Error, OSError):
        return None


def _is_left_over(process: psutil.Process) -> bool:
    try:
        if process.uids().effective != os.geteuid() or process.cmdline()[1:3] != _ARGUMENTS:
            return False
        return _program(process.ppid()) != process.exe()
    except (psutil.Error, OSError):  # the process has ended meanwhile
        return False


def _program(pid: int) -> str:
    try:
        return psutil.Process(pid).exe()
    except (psutil.Error, OSError):
        return ""
