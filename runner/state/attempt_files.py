"""The files of attempts below the files root of a store, and the child processes that they name.

    <root>/<run>/<task>/<attempt>/    files of a single attempt
    <root>/sessions/                  shared by all attempts

Ids are arbitrary texts. Different ids get different names, even on a file system that ignores case or limits the length
of names, and no name leads out of the parent folder.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Files
from plait.persistence.store_protocol import FilesStore, Store
from plait.persistence.store_records import TaskRecord
from plait.program_log import logger
from plait.statuses import TASK_STATUSES, TaskStatus

SESSIONS = "sessions"
_LONGEST, _DIGEST = 100, 32
"""Most characters of a name, and the characters of the digest at the end of some names. Only names with a digest
contain a `~`.
"""
_AS_IT_IS = re.compile(rf"[a-z0-9_-][a-z0-9._-]{{0,{_LONGEST - 1}}}")
"""Ids usable as names without a digest, as most ids are."""
_OTHERS = re.compile(r"[^A-Za-z0-9_-]")


def files_root(store: object) -> Path | None:
    """Return the folder for files of `store`, or None without a folder."""
    return store.files_root if isinstance(store, FilesStore) else None


@lru_cache(maxsize=16)  # called for every task of a run
def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of all files of the run's attempts."""
    return root / _name(run_id)


def attempt_files(root: Path, run_id: str, task_id: str, attempt: int | str) -> Files:
    """Return the files of an attempt of a task. For a person's turn after the run, `attempt` is `0-` and a number."""
    return Files(run_folder(root, run_id).joinpath(_name(task_id), str(attempt)), root / SESSIONS)


def hosts_key(run_id: str, created_at: str) -> str:
    """Return the name of the run on other hosts, different from the name of any other run of any store."""
    return sha256(f"{created_at} {run_id}".encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]


def _name(text: str) -> str:
    if _AS_IT_IS.fullmatch(text) and text != SESSIONS:
        return text
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return f"{_OTHERS.sub('_', text)[: _LONGEST - _DIGEST - 1]}~{digest}"


_UNUSED_S = 3600.0
"""Seconds without a change after which the folder of an unstored run is abandoned. A run that began while the store was
away is stored seconds after the store is back.
"""


async def kill_orphans(store: Store | None, run_id: str, keep: Iterable[tuple[str, int]] = ()) -> None:
    """End the child processes left over from attempts of the run, except those of the attempts in `keep`, pairs of task
    id and number. Errors are logged, not raised.

    The caller must own the run, unless the run has no owner.
    """
    root = files_root(store)
    if root is not None:
        folders = [attempt_files(root, run_id, task_id, attempt).turn for task_id, attempt in keep]
        await _end_below(run_folder(root, run_id), folders)


def under_way(tasks: Iterable[TaskRecord]) -> list[tuple[str, int]]:
    """Return the attempts recorded as running, which a resume may adopt."""
    return [(task.task_id, task.attempt) for task in tasks if TASK_STATUSES[task.status] is TaskStatus.RUNNING]


async def end_attempt(folder: Path) -> None:
    """End the child processes left over from the attempt with the files in `folder`. Errors are logged, not raised."""
    await _end_below(folder, ())


async def make_room(folder: Path) -> None:
    """Clear the `folder` of an attempt about to begin.

    An earlier attempt of the same number may have used the folder: if the store was away when the earlier process died,
    or if the store was replaced.
    """
    if _is_there(folder):
        await _end_below(folder, ())
        await run_sync(_remove, folder)


def has_sessions(root: Path | None) -> bool:
    """Return whether files of any session exist below `root`."""
    return root is not None and _is_there(root / SESSIONS)


async def delete_files(
    root: Path | None, deleted: Collection[str], stored: Collection[str], sessions: Collection[str] | None = None
) -> str | None:
    """Remove the files of deleted runs and sessions. Return an error message of a single line, or None on success.

    Removes the folders of the runs `deleted`, no longer in the store, and abandoned folders of runs that are not
    `stored`. Removes all sessions except `sessions`; with None, no session is removed.
    """
    failures: list[OSError] = []
    try:
        folders = [] if root is None else await run_sync(_unwanted, root, deleted, stored)
    except OSError as error:
        folders, failures = [], [error]
    for folder in folders:
        await _end_below(folder, ())
        failures += await run_sync(_remove, folder)
    if root is not None and sessions is not None and has_sessions(root):
        failures += await run_sync(_remove_sessions, root / SESSIONS, sessions)
    if not failures:
        return None
    return f"not all files of deleted runs were removed below {root}: {failures[0]}; remove the cause and purge again"


async def _end_below(folder: Path, keep: Collection[Path]) -> None:
    if not _is_there(folder):
        return
    from plait.backends.process.child_process import sweep  # noqa: PLC0415 - most runs have no children

    try:
        ended = await sweep(folder, keep)
    except Exception as error:
        logger().warning("leftovers_not_ended", folder=str(folder), error=f"{type(error).__name__}: {error}")
        return
    if ended:
        logger().info("leftovers_ended", folder=str(folder), processes=ended)


def _is_there(folder: Path) -> bool:
    # A link may lead to files of another program.
    return os.path.isdir(folder) and not folder.is_symlink()  # noqa: PTH112 - asked before each attempt


def _unwanted(root: Path, deleted: Collection[str], stored: Collection[str]) -> list[Path]:
    gone = [run_folder(root, run_id) for run_id in deleted]
    wanted = {run_folder(root, run_id) for run_id in stored}.union(gone)
    others = (
        [folder for folder in root.iterdir() if folder.is_dir() and folder.name != SESSIONS] if root.is_dir() else []
    )
    now = time.time()
    return gone + [folder for folder in others if folder not in wanted and now - folder.lstat().st_mtime > _UNUSED_S]


def _remove_sessions(folder: Path, sessions: Collection[str]) -> list[OSError]:
    from plait.backends.agents.cli_agent import remove_sessions_except  # noqa: PLC0415 - most stores have none

    try:
        return remove_sessions_except(sessions, folder, _UNUSED_S)
    except OSError as error:
        return [error]


def _remove(folder: Path) -> list[OSError]:
    """Remove the folder and return the errors. A link is removed, never followed."""
    failures: list[OSError] = []

    def note(_function: object, _path: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
        if isinstance(failure[1], OSError) and not isinstance(failure[1], FileNotFoundError):
            failures.append(failure[1])

    if folder.is_symlink():
        try:
            folder.unlink()
        except OSError as error:
            failures.append(error)
    elif folder.exists():
        shutil.rmtree(folder, onerror=note)
    return failures
