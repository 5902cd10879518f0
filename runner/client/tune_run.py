"""A person steers a run while it goes on: pauses, how many tasks run at once, a task again. By notes to its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.clock_and_ids import iso
from plait.errors import InvalidRequest, RunNotResumable, nearest
from plait.events import RunTuned
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.domain.run_tuning import checked_change, retry_note, tune_note, why_not_again
from plait.runner.domain.wait_reasons import stored_limits
from plait.runner.engine.inbox import wake
from plait.runner.engine.lease import owner_is_gone
from plait.runner.engine.run_options import RunOptions
from plait.runner.state.stored_run import StoredPolicy, listed_tasks, read_settings, stored_record, stored_run
from plait.statuses import RUN_DONE, RunStatus, TaskStatus


async def pause_run(config: RunOptions, run_id: str, backend: str | None, *, off: bool) -> bool:
    """Pause the run or a backend of it, or let it go on. See `Runs.pause`."""
    return await _send(config, run_id, [RunTuned(iso(config.clock.wall()), backend, paused=not off)])


async def tune_run(config: RunOptions, run_id: str, concurrency: int | None, limits: Mapping[str, int]) -> bool:
    """Change how many tasks run at once. See `Runs.tune`."""
    numbers: dict[str | None, int] = {} if concurrency is None else {None: concurrency}
    numbers.update(limits.items())
    if not numbers:
        raise InvalidRequest("say how many tasks run at once, of the run (-j N) or on a backend (--backend NAME=N)")
    at = iso(config.clock.wall())
    return await _send(config, run_id, [RunTuned(at, name, slots=number) for name, number in numbers.items()])


async def retry_task(config: RunOptions, run_id: str, task_id: str) -> None:
    """Ask the owner of the run to run a task again. See `Runs.retry`."""
    run = await stored_run(config.store, run_id)
    run.require_task(task_id)
    dag, position = run.state.dag, run.state.dag.position(task_id)
    status, attempt = run.state.statuses[position], run.state.attempts[position]
    why = None
    if status is TaskStatus.PENDING and not attempt:
        why = "it has not begun"
    elif status is not TaskStatus.FAILED and status is not TaskStatus.PENDING:
        why = f"it is {status.value}"
    elif owner_is_gone(run.record):
        retries = " --retry-failed" if status is TaskStatus.FAILED else ""
        why = f"no process works on the run; continue it: plait resume {run_id}{retries}"
    elif status is TaskStatus.FAILED:
        has_policy = StoredPolicy.of(run.record) is not None
        why = "the policy of the run knows that it failed" if has_policy else why_not_again(dag, dag[task_id])
    if why is not None:
        raise InvalidRequest(f"task {task_id!r} of run {run_id} cannot run again now: {why}")
    await run.store.send(run_id, retry_note(task_id, attempt, iso(config.clock.wall())))
    wake(run.record.owner)


async def _send(config: RunOptions, run_id: str, changes: Sequence[RunTuned]) -> bool:
    """Send a note for each of `changes`. Return whether a process works on the run, which reads them."""
    store, record = await stored_record(config.store, run_id)
    if (status := RunStatus(record.status)) in RUN_DONE or status is RunStatus.CANCELLING:
        raise RunNotResumable(f"run {run_id} is {status.value}; only a run that goes on can be paused or tuned")
    for change in changes:
        await _require_backend(store, record, checked_change(change).backend)
    for change in changes:
        await store.send(run_id, tune_note(change))
    wake(record.owner)
    return not owner_is_gone(record)


async def _require_backend(store: Store, record: RunRecord, name: str | None) -> None:
    """Raise InvalidRequest unless the run may call the backend `name`; None for any."""
    if name is None:
        return
    settings = read_settings(record)
    limits = stored_limits(settings)
    answer_keys: Mapping[str, object] = settings.get("answer_keys") or {}  # "" is the default backend
    known = {limits.default, *limits.backends, *filter(None, answer_keys)}
    known |= {one.backend for one in await listed_tasks(store, record) if one.backend is not None}
    if name not in known:
        raise InvalidRequest(f"run {record.run_id} has no backend {name!r}{nearest(name, known)}")
