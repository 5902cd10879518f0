"""`plait run PLAN` on a store that is a server and goes away after its first writes, as a program."""

from __future__ import annotations

import sys

from plait.persistence import Batch, SQLiteStore, StoreError
from plait.persistence.changes import RunCreated
from plait.runner.cli import lookup
from plait.runner.cli.app import cli
from plait.runner.cli.exits import run_cli
from tests.support.stores.on_server import OnServer


class AwayServer(OnServer, SQLiteStore):
    async def write(self, batch: Batch) -> None:
        if not isinstance(batch.changes[0], RunCreated):
            raise StoreError("the server is away")
        await super().write(batch)


if __name__ == "__main__":
    lookup.SQLiteStore = AwayServer  # type: ignore[misc]
    sys.exit(run_cli(cli, ["run", *sys.argv[1:]]))
