"""One SQLite file and several processes, one of which may be killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore
from tests.contracts.store.samples import ANSWER, ASK, DONE_A, OPENING, START_A, Writer
from tests.support.stores.database import in_child

WRITE_RUNS = """
import asyncio, sys
from plait.persistence import SQLiteStore
from tests.contracts.store.samples import ANSWER, ASK, DONE_A, OPENING, START_A, Writer

async def main(path, name, runs):
    async with SQLiteStore(path) as store:
        for number in range(runs):
            writer = Writer(store, f"{name}-{number}")
            await writer.write(*OPENING)
            for change in (START_A, ASK, ANSWER, DONE_A):
                await writer.write(change)
                print(writer.run_id, writer.next_seq - 1, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def test_two_processes_make_and_fill_one_store(path: Path) -> None:
    children = [in_child(WRITE_RUNS, str(path), name, "30") for name in ("left", "right")]
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, errors) == (0, "")
    async with SQLiteStore(path, mode="existing") as store:
        runs = await store.list_runs(1000)
        assert [(run.last_seq, run.counts) for run in runs] == [(7, {"completed": 1, "pending": 2})] * 60
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("acknowledged", [1, 3, 50])
async def test_what_was_acknowledged_survives_a_kill(path: Path, acknowledged: int) -> None:
    child = in_child(WRITE_RUNS, str(path), "run", "100000")
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(acknowledged)]
    child.send_signal(signal.SIGKILL)
    lines += child.communicate(timeout=60)[0].splitlines()
    last = {line.split()[0]: int(line.split()[1]) for line in lines if len(line.split()) == 2}
    async with SQLiteStore(path, mode="existing") as store:
        for run_id, seq in last.items():
            run = await store.get_run(run_id)
            assert run is not None
            assert run.last_seq >= seq
            await store.write(Writer(store, run_id).batch(*OPENING, START_A, ASK, ANSWER, DONE_A))
            assert len(await store.list_messages(run_id, "a")) == 2
