"""The part of `plait doctor` about a store on a server: the server's settings, and every row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from plait.errors import StoreError
from plait.persistence.findings import Finding, Fitness, checksums
from plait.runner.client.store_place import ServerAddress, open_server
from plait.statuses import TaskStatus

if TYPE_CHECKING:
    from plait.persistence import PostgresStore

_ALL = 1 << 31
_EVENTS_AT_ONCE = 1000


def check_server(place: ServerAddress) -> list[Finding]:
    """Check the server, the settings under which the server keeps every acknowledged batch, and the checksums. The
    check `store` is bad if the server does not answer, or lets this role store no run.
    """
    return anyio.run(_check_server, place)


async def _check_server(place: ServerAddress) -> list[Finding]:
    try:
        async with open_server(place, "read") as store:
            fit = Finding("store", Fitness.OK, f"{place}, PostgreSQL {store.server_version}")
            if (reason := await store.obstacle()) is not None:
                fit = Finding("store", Fitness.BAD, reason)
            durability = [Finding("durability", Fitness.WARNING, warning) for warning in await store.warnings()]
            return [fit, *durability, await _check_rows(store)]
    except StoreError as error:
        return [Finding("store", Fitness.BAD, str(error))]


async def _check_rows(store: PostgresStore) -> Finding:
    results = messages = 0
    damaged: list[str] = []
    for run in await store.list_runs(_ALL):
        try:
            await _read_history(store, run.run_id)
            for task in await store.list_tasks(run.run_id):
                talk = await store.list_messages(run.run_id, task.task_id)
                results += TaskStatus(task.status) is TaskStatus.COMPLETED
                messages += len(talk)
                if task.damaged or any(message.damaged for message in talk):
                    damaged.append(f"{run.run_id}/{task.task_id}")
        except StoreError as error:
            damaged.append(await _damage(store, error))
    try:
        await store.session_ids()
    except StoreError as error:
        damaged.append(await _damage(store, error))
    return checksums(damaged, results, messages)


async def _read_history(store: PostgresStore, run_id: str) -> None:
    """Read everything of the run but tasks and messages. Raises StoreError for a damaged row."""
    await store.get_run(run_id)
    await store.list_notes(run_id)
    await store.list_attempts(run_id)
    last = 0
    while events := await store.list_events(run_id, last, _EVENTS_AT_ONCE):
        last = events[-1].seq


async def _damage(store: PostgresStore, error: StoreError) -> str:
    """Return the name of the damaged part. Raises StoreError if the server does not answer any more."""
    await store.list_runs(1)
    return str(error).split(";", maxsplit=1)[0]
