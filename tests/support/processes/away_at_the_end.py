"""`plait WORDS` with a store that is a server, and is away while there is a file `away`, as a program.

Each write that fails prints a line.
"""

from __future__ import annotations

import sys

import anyio

from plait.errors import StoreError
from plait.persistence import Batch, SQLiteStore, sqlite_store
from plait.runner.cli.command_line import cli, run_cli
from tests.support.stores.on_server import OnServer

AWAY = anyio.Path("away")
FAILED = "a write has failed"


class AwayServer(OnServer, SQLiteStore):
    async def write(self, batch: Batch) -> None:
        if await AWAY.exists():
            print(FAILED, file=sys.stderr, flush=True)
            raise StoreError("the server is away")
        await super().write(batch)


if __name__ == "__main__":
    sqlite_store.SQLiteStore = AwayServer  # type: ignore[misc]
    sys.exit(run_cli(cli, sys.argv[1:]))
