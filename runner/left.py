"""What is left of the turns that were under way when the process that ran a run died."""

from __future__ import annotations

from anyio.to_thread import run_sync

from backends.protocol import LeftTurn, OutlivingBackend
from persistence.files import files_root
from runner.config import Config
from runner.folders import run_folder, turn_files
from runner.status import TaskStatus
from runner.stored import StoredRun


async def left_turns(config: Config, run: StoredRun) -> dict[str, LeftTurn]:
    """By task, where its backend can tell. Nothing is changed; the run has no living owner."""
    root, run_id = files_root(config.store), run.record.run_id
    if root is None or not run_folder(root, run_id).is_dir():
        return {}
    found: dict[str, LeftTurn] = {}
    for task, record in zip(run.state.dag, run.tasks, strict=True):
        backend = config.backends.get(run.state.dag.backend_of(task) or config.default)
        if record.status == TaskStatus.RUNNING and isinstance(backend, OutlivingBackend):
            left = await run_sync(backend.left, turn_files(root, run_id, task.id, record.attempt))
            if left is not None:
                found[task.id] = left
    return found
