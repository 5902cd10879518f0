"""Finding what a person names: a store, a run in it, a task of the run."""

from __future__ import annotations

import json
import time
from pathlib import Path

from plait.persistence import SQLiteStore
from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.cli.display.text import one_line
from plait.runner.cli.exits import STORE, Fault, say
from plait.runner.cli.options import DEFAULT_STORE, is_text
from plait.runner.domain.dag import nearest
from plait.runner.domain.status import RUN_REOPENINGS, RunStatus
from plait.runner.operations import inspect as looking
from plait.runner.state.owner import LEASE_SECONDS, Liveness, liveness

FAR_BACK = 10_000
"""How many runs are looked through for one that is not named by its whole id."""


def store_for_reading(path: Path) -> SQLiteStore:
    """The store at `path`, changing nothing."""
    _require(path)
    return SQLiteStore(path, mode="read")


def store_for_going_on(path: Path) -> SQLiteStore:
    """The store at `path`, which has to exist."""
    _require(path)
    return SQLiteStore(path, mode="existing")


def _require(path: Path) -> None:
    if path == DEFAULT_STORE and not path.exists():
        raise Fault(
            f"there is no store {path} in {Path.cwd()}; `plait run PLAN` makes one, --store PATH names another", STORE
        )


async def find_run(store: Store, word: str) -> RunRecord:
    """The run of that id, the only one whose id begins so, or the `last` one."""
    if not is_text(word):
        raise Fault(f"the store has no run {word!r}; `plait runs` lists those that it has")
    run_id = await _last(store) if word == "last" else word
    record = await store.get_run(run_id)
    if record is None:
        record = await store.get_run(await _by_prefix(store, run_id))
    if record is None:
        raise Fault(f"run {word} is gone from the store")
    return record


def say_if_watched(run: RunRecord) -> None:
    """Say why what follows takes half a minute, where the run's owner cannot be judged from here."""
    owner = run.owner
    if owner is not None and liveness(owner) is Liveness.UNKNOWN:
        say(
            f"process {owner.pid} on {one_line(owner.host)} owns run {run.run_id}, and cannot be seen from here; "
            f"watching for {LEASE_SECONDS:g} s whether it still lives"
        )


async def _last(store: Store) -> str:
    runs = await store.list_runs(1)
    if not runs:
        raise Fault("the store has no runs yet; `plait run PLAN` makes one")
    return runs[0].run_id


async def _by_prefix(store: Store, prefix: str) -> str:
    runs = await store.list_runs(FAR_BACK)
    found = [run.run_id for run in runs if run.run_id.startswith(prefix)] if prefix else []
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(one_line(run_id) for run_id in found[:5]) + (", ..." if len(found) > 5 else "")
        raise Fault(f"{len(found)} runs begin with {prefix!r}: {shown}; give more of the id")
    raise Fault(f"the store has no run {prefix!r}; `plait runs` lists those that it has")


async def newest_resumable(store: Store, retry_failed: bool) -> RunRecord:
    """The newest run that `resume` has something to do for."""
    wanted = {RunStatus.QUEUED, RunStatus.INTERRUPTED, RunStatus.WAITING_INPUT}
    if retry_failed:
        wanted |= RUN_REOPENINGS
    refused: RunRecord | None = None
    for run in await store.list_runs(FAR_BACK):
        if shown_status(run) in wanted:
            found = await find_run(store, run.run_id)
            if names_its_backends(found):
                return found
            refused = refused or found
    if refused is not None:  # which `resume` says why
        return refused
    kinds = "queued, interrupted, waiting" + (" or failed" if retry_failed else " for a person")
    hint = "" if retry_failed else " (--retry-failed looks for failed ones, too)"
    raise Fault(f"nothing to resume: no run in the store is {kinds}{hint}; `plait runs` lists them")


def names_its_backends(run: RunRecord) -> bool:
    """Whether the store says which backends the run needs, as for all that the command made: only then can the command
    go on with it. `run` is a record with its settings.
    """
    settings = json.loads(run.settings)
    kinds = {"backends": dict, "default_backend": str, "folder": str}
    return all(isinstance(settings.get(name), kind) for name, kind in kinds.items())


def shown_status(run: RunRecord) -> RunStatus:
    """The run's status; interrupted when it is stored as going on and nobody is there to go on with it."""
    return looking.shown_status(run, time.time())


async def find_task(store: Store, run: RunRecord, task_id: str) -> TaskRecord:
    """The run's task of that id."""
    tasks = await store.list_tasks(run.run_id)
    for task in tasks:
        if task.task_id == task_id:
            return task
    hint = nearest(task_id, [task.task_id for task in tasks])
    raise Fault(f"run {run.run_id} has no task {task_id!r}{hint or f'; `plait show {run.run_id}` lists them'}")
