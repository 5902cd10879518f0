"""The log lines that a program sees which configures no logging."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio
from plait import DAG, ParallelRunner, Task
from plait.errors import StoreError
from plait.persistence import MemoryStore

class Failing(MemoryStore):
    is_away = False

    async def write(self, batch):
        if self.is_away:
            raise StoreError("the disk is\\nfull \\x1b[31m")
        await super().write(batch)

async def work(prompt):
    store.is_away = True
    return prompt

store = Failing()
asyncio.run(ParallelRunner(work, store=store).run(DAG([Task("a", "a")]), "r"))
"""


def test_a_store_error_is_one_readable_line_without_a_configuration() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == r"store_degraded run=r error='the disk is\nfull \x1b[31m' unstored=1" + "\n"
