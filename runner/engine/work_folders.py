"""`WorkFolders`: one writer in a folder at a time, among the tasks of a run and with other runs and processes.

A task whose program may write takes its folder together with its slot, before it is recorded as running, and has it
until its attempt is over, the check of its answer included. A task that finds the folder taken gives its slot back and
waits in a line; the end of a writer of this run lets the first one try again at once, that of another run or process is
looked for. An attempt that was adopted has its folder by way of its program, which has inherited the lock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from plait import events
from plait.backends.process.child_process import ProgramBackend
from plait.backends.process.files_and_locks import FolderLock, lock_folder
from plait.errors import PromptError
from plait.runner.engine.live_run import LiveRun

_LOOK_S = 0.2
"""Seconds between two looks at the folders that tasks wait for."""


class WorkFolders:
    """The folders of the running tasks of `run`, and the tasks that wait for them. `wake` is called with the position
    of a task that may try again.
    """

    def __init__(self, run: LiveRun, wake: Callable[[int], None]) -> None:
        self._run = run
        self._wake = wake
        self._taken: dict[int, tuple[Path, FolderLock]] = {}
        self._waiting: dict[Path, list[int]] = {}
        self._reported: set[tuple[int, int]] = set()
        """The waits that were reported, each a position and the number of the attempt."""

    def take(self, position: int) -> list[events.Event] | None:
        """Take the folder of the task for its next attempt, if its program may write. If another one has the folder,
        let the task wait, and return the events.
        """
        folder = self._folder(position)
        if folder is None:
            return None
        lock = lock_folder(folder)
        if lock is not None:
            self._taken[position] = folder, lock
            return None
        self._waiting.setdefault(folder, []).append(position)
        wait = position, self._run.state.attempts[position] + 1
        if wait in self._reported:
            return []
        self._reported.add(wait)
        tasks = self._run.state.dag.tasks
        by = next((tasks[one].id for one, (other, _) in self._taken.items() if _are_one(folder, other)), None)
        return [events.FolderAwaited(self._run.stamp(), tasks[position].id, wait[1], str(folder), by)]

    def descriptors(self, position: int) -> Sequence[int]:
        """Return what the program of the task is to inherit."""
        taken = self._taken.get(position)
        return () if taken is None else taken[1].descriptors

    def give_back(self, position: int) -> None:
        """Give the folder of the task back, if it has one, and wake the first of the tasks that wait for it."""
        if position not in self._taken:
            return
        folder, lock = self._taken.pop(position)
        lock.close()
        for other in [other for other in self._waiting if _are_one(folder, other)]:
            self._wake_first(other)

    def end_wait(self, position: int) -> None:
        """End the wait of a task that is not to run any more, if it waits."""
        for folder, line in [*self._waiting.items()]:
            if position in line:
                line.remove(position)
                self._wake(position)
                if not line:
                    del self._waiting[folder]

    async def watch(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Wake the first of each line whose folder is free, until no task waits."""
        while self._waiting:
            await sleep(_LOOK_S)
            for folder in [*self._waiting]:
                if (lock := lock_folder(folder)) is not None:
                    lock.close()
                    self._wake_first(folder)

    def close(self) -> None:
        """Give all folders back at the end of the run's execution."""
        while self._taken:
            self._taken.popitem()[1][1].close()

    def _wake_first(self, folder: Path) -> None:
        line = self._waiting[folder]
        self._wake(line.pop(0))
        if not line:
            del self._waiting[folder]

    def _folder(self, position: int) -> Path | None:
        """Return the folder in which the task may write; None if it may not, or shares the folder."""
        run = self._run
        task, backend = run.state.dag.tasks[position], run.options.backends[run.backend_of(position)]
        if not isinstance(backend, ProgramBackend) or task.shared:
            return None
        try:
            return backend.folder_written(run.state.texts(task).workspace())
        except PromptError:  # reported by the attempt
            return None


def _are_one(folder: Path, other: Path) -> bool:
    return folder.is_relative_to(other) or other.is_relative_to(folder)
