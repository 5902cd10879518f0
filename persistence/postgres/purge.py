"""Delete runs, measure their sizes, and look at the server's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.persistence.errors import Conflict
from plait.persistence.old_tables.purged import Purged
from plait.persistence.old_tables.task_cache import ids_of
from plait.persistence.postgres import statements as sql
from plait.persistence.postgres.connection import escaped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plait.persistence.postgres.connection import Connection


async def purge(connection: Connection, run_ids: Sequence[str]) -> Purged:
    """See `PostgresStore.purge`."""
    async with connection.transaction():
        await connection.execute(sql.LOCK_BLOBS)
        found = await connection.fetch(sql.GET_OWNERSHIP, list(map(escaped, run_ids)))
        refused = [reason for row in found if (reason := _reason_to_keep(*row))]
        if refused:
            raise Conflict(f"nothing was deleted: {'; '.join(refused)}")
        stored = [row[0] for row in found]
        for statement in sql.DELETE_RUNS:
            await connection.execute(statement, list(map(escaped, stored)))
        for _, number, *_ in found:
            ids = ids_of(number)
            for statement in sql.DELETE_ROWS:
                await connection.execute(statement, ids["first"], ids["last"])
            for statement in sql.DELETE_HEAD:
                await connection.execute(statement, number)
        await connection.execute(sql.DELETE_UNUSED_BLOBS)
    remains = "the runs are deleted; the log, the backups and pages before the next VACUUM of the server keep copies"
    return Purged(tuple(stored), 0, remains if stored else None)


def _reason_to_keep(
    run_id: str, _number: int, has_ended: bool, status: str, owner_pid: int | None, owner_host: str | None
) -> str | None:
    if not has_ended:
        return f"run {run_id!r} is {status}: resume or cancel it first"
    if owner_host is not None:
        return f"run {run_id!r} is in use by process {owner_pid} on {owner_host}: stop that first"
    return None


async def run_sizes(connection: Connection) -> dict[str, int]:
    """See `PostgresStore.run_sizes`."""
    return dict(await connection.fetch(sql.RUN_SIZES))


async def durability_warnings(connection: Connection) -> tuple[str, ...]:
    """See `PostgresStore.warnings`."""
    found: list[str] = []
    if await connection.fetchval("SELECT current_setting('fsync')") == "off":
        found.append("fsync is off: a crash of the server's machine can damage the whole database")
    commit = await connection.fetchval("SELECT current_setting('synchronous_commit')")
    synchronous = await connection.fetchval("SELECT current_setting('synchronous_standby_names')")
    if commit == "off":
        found.append("synchronous_commit is off: a crash of the server loses the last acknowledged batches")
    if commit == "local" and synchronous:
        found.append(
            "synchronous_commit is local: no batch waits for the standby servers of synchronous_standby_names, and a "
            "failover loses the last acknowledged batches; set synchronous_commit to on"
        )
    # Without synchronous_standby_names every standby is asynchronous. A usual user reads NULL as its `sync_state`.
    standbys = await connection.fetchval(
        "SELECT count(*) FROM pg_stat_replication WHERE application_name <> 'pg_basebackup'"
    )
    if standbys and not synchronous:
        found.append(
            f"{standbys} standby servers are asynchronous: a failover loses the last acknowledged batches; "
            "set synchronous_standby_names"
        )
    return tuple(found)
