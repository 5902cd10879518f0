"""`child.json`: the identity of the child with its files in a folder, for later processes; children left at work.

    child.json (marker) -> started -> child.json (marker, number, start time) -> over.json (no process is left)

The starting process may be killed between any two of these steps. It therefore locks the child's `stdout` before the
start: the child inherits the lock with the descriptor at once, before the child becomes the program with the marker.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from plait.backends.process.files_and_locks import is_locked, replace_file
from plait.backends.process.process_table import ProcessTag, boot_id, members, start_time
from plait.json_form import as_json, from_json, value

_NAME, _OVER = "child.json", "over.json"
_START_LIMIT = 5.0  # seconds; a start takes milliseconds, and some hundred on an overloaded machine


@value
class ChildManifest:
    """The identity of a child."""

    marker: str
    """Hexadecimal, 16 digits; in the environment of every process of the child."""
    boot: str
    """The boot of the machine, from `boot_id`."""
    pid: int
    """0 while the child is being started."""
    started: str
    """The start time, from `start_time`."""
    note: Mapping[str, str]
    """Small facts kept by the starting process for later."""
    guarded: bool = False
    """Whether the child ends with the process that started it."""

    @property
    def is_of_this_boot(self) -> bool:
        """Whether this machine has not been started again since, so that the process number still has a meaning."""
        return self.boot == boot_id()

    @property
    def tag(self) -> ProcessTag:
        """The identity of the child's process tree."""
        return ProcessTag(self.marker, self.pid, self.started)

    @property
    def is_alive(self) -> bool:
        """Whether the child lives; never true because of another process with its number."""
        # "": the system does not answer at the moment; a missing answer does not mean that the child has ended.
        return bool(self.pid) and self.is_of_this_boot and start_time(self.pid) in {self.started, ""}

    @property
    def outlives_starter(self) -> bool:
        """Whether the child lives, and works on without the process that started it. A guarded child ends at any
        moment, or is ended by the process that resumes the run.
        """
        return self.is_alive and not self.guarded


def write_manifest(folder: Path, manifest: ChildManifest) -> None:
    """Write `child.json`, whole or not at all. Raise OSError if the file cannot be written."""
    replace_file(folder / _NAME, json.dumps(as_json(manifest)))


def mark_over(folder: Path) -> None:
    """Rename `child.json`, so that no later process looks for the child."""
    with suppress(OSError):
        (folder / _NAME).replace(folder / _OVER)


def read_manifest(folder: Path) -> ChildManifest | None:
    """Return the manifest of the child with its files in `folder`, living or over; None without a child.

    Wait, in this thread, for a start under way: before its end, a sweep might not find the child. A child whose starter
    was killed within the start has no number: nothing follows it, and the sweep ends it by its marker. Never raise.
    """
    manifest, until = _read(folder), time.monotonic() + _START_LIMIT
    while manifest is not None and not manifest.pid and manifest.is_of_this_boot and time.monotonic() < until:
        try:
            # In this order: an unlocked child has started or ended.
            if not is_locked(folder / "stdout") or members([manifest.tag]):
                break
        except OSError:  # no locks, or no descriptor is left to read the table with
            break
        time.sleep(0.005)
        manifest = _read(folder)
    return manifest


def manifests_below(folder: Path) -> Iterator[tuple[Path, ChildManifest]]:
    """Yield the folder and the manifest of each child below `folder` that may have living processes.

    Children of another boot do not count.
    """
    # Never enter a child's own folder: its tools make and remove files there, and could leave a `child.json`.
    for path, below, names in os.walk(folder.resolve()):
        if _NAME in names or _OVER in names:
            below.clear()
        manifest = read_manifest(Path(path)) if _NAME in names else None
        if manifest is not None and manifest.is_of_this_boot:
            yield Path(path), manifest


def _read(folder: Path) -> ChildManifest | None:
    for name in (_NAME, _OVER):
        try:
            manifest = from_json(ChildManifest, json.loads((folder / name).read_bytes()))
            int(manifest.marker, 16)
            return manifest
        except (OSError, ValueError):
            continue
    return None


@value
class AtWork:
    """An agent with living processes."""

    folder: Path
    """The folder of its files."""
    kind: str
    """The kind of its backend."""
    pids: tuple[int, ...]
    """The processes, the child first if the child lives."""


def agents_at_work(root: Path) -> list[AtWork]:
    """Return all living agents with files below `root`, whether or not the process that started them lives: agents
    outlive it on purpose, for a resume to take them over.
    """
    agents: list[AtWork] = []
    for folder, manifest in manifests_below(root):
        pids = sorted((process.pid for process in members([manifest.tag])), key=lambda pid: (pid != manifest.pid, pid))
        if pids:
            agents.append(AtWork(folder, manifest.note.get("kind", ""), tuple(pids)))
    return sorted(agents, key=lambda agent: agent.folder)
