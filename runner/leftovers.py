"""What processes that died have left of a run's turns: children that still live, and files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from pathlib import Path

from anyio.to_thread import run_sync

from runner.folders import SESSIONS, run_folder
from runner.log import logger

_FORGOTTEN_S = 3600.0
"""How long nothing has happened in the folder of a run that is not stored, and never will be any more: a run that began
while its store was away is stored seconds after that answers again.
"""


async def end_leftovers(root: Path | None, run_id: str, keep: Collection[Path] = ()) -> None:
    """End what is left of the children of the run's turns, but for those in the folders `keep`. Never raises."""
    if root is not None:
        await _end_below(run_folder(root, run_id), keep)


async def delete_files(root: Path | None, deleted: Collection[str], stored: Collection[str]) -> str | None:
    """Remove the files of the runs `deleted`, which are not in the store any more, and what earlier deletions of runs
    that are not `stored` have left, once nobody writes there any more. Why that cannot be done in one line, or None.
    """
    failures: list[OSError] = []
    try:
        folders = [] if root is None else await run_sync(_unwanted, root, deleted, stored)
    except OSError as error:
        folders, failures = [], [error]
    for folder in folders:
        await _end_below(folder, ())
        failures += await run_sync(_remove, folder)
    if not failures:
        return None
    return f"not all files of deleted runs could be removed below {root}: {failures[0]}; mend that and purge again"


async def _end_below(folder: Path, keep: Collection[Path]) -> None:
    if not _is_there(folder):
        return
    from backends.process import sweep  # noqa: PLC0415 - most runs have no children

    try:
        ended = await sweep(folder, keep)
    except Exception as error:
        logger().warning("leftovers_not_ended", folder=str(folder), error=f"{type(error).__name__}: {error}")
        return
    if ended:
        logger().info("leftovers_ended", folder=str(folder), processes=ended)


def _is_there(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()  # a link would lead to what is not ours


def _unwanted(root: Path, deleted: Collection[str], stored: Collection[str]) -> list[Path]:
    gone = [run_folder(root, run_id) for run_id in deleted]
    known = {run_folder(root, run_id) for run_id in stored}.union(gone)
    others = [one for one in root.iterdir() if one.is_dir() and one.name != SESSIONS] if root.is_dir() else []
    now = time.time()
    return gone + [one for one in others if one not in known and now - one.lstat().st_mtime > _FORGOTTEN_S]


def _remove(folder: Path) -> list[OSError]:
    """What could not be removed, and why. A link is removed, never followed."""
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
