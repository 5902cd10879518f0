"""`plait worker` with a lease of LEASE_S seconds, as a program: `python -m ... STORE CONCURRENCY [HOST]`.

With HOST the worker counts as one on another machine.
"""

from __future__ import annotations

import platform
import sys
from unittest import mock

import anyio

from plait.runner.cli.commands.worker import work
from plait.runner.cli.fleet import WorkerOptions
from plait.runner.cli.options import store_place

LEASE_S = 2.0

if __name__ == "__main__":
    if sys.argv[3:]:
        mock.patch.object(platform, "node", return_value=sys.argv[3]).start()
    sys.exit(anyio.run(work, store_place(sys.argv[1]), WorkerOptions(int(sys.argv[2]), lease=LEASE_S)))
