"""A person steers a run while it goes on: pauses it, changes how many tasks run at once. By notes to its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.clock_and_ids import iso
from plait.errors import InvalidRequest, nearest
from plait.events import RunTuned
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.domain.run_tuning import checked_change, tune_note
from plait.runner.domain.wait_reasons import stored_limits
from plait.runner.engine.inbox import wake
from plait.runner.engine.lease import owner_is_gone
from plait.runner.engine.run_options import RunOptions
from plait.runner.state.stored_run import read_settings, stored_record
from plait.statuses import RUN_DONE, RunStatus


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


async def _send(config: RunOptions, run_id: str, changes: Sequence[RunTuned]) -> bool:
    """Send a note for each of `changes`. Return whether a process works on the run, which reads them."""
    store, record = await stored_record(config.store, run_id)
    if (status := RunStatus(record.status)) in RUN_DONE or status is RunStatus.CANCELLING:
        raise InvalidRequest(f"run {run_id} is {status.value}; only a run that goes on can be paused or tuned")
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
    known = {limits.default, *limits.backends, *filter(None, settings.get("answer_keys") or ())}
    known |= {one.backend for one in await store.list_tasks(record.run_id) if one.backend is not None}
    if name not in known:
        raise InvalidRequest(f"run {record.run_id} has no backend {name!r}{nearest(name, known)}")
