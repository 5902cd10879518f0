"""A disk that fails under an open store: what failed is unknown, and the next call works on a new connection."""
# ruff: noqa: ASYNC240 - the few small files of these tests are looked at at once

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from plait.errors import StoreError, StoreUnusable
from plait.persistence import SQLiteStore
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    DONE_A,
    OPENING,
    RUN,
    START_A,
    Writer,
    cancel_natively,
    reworded,
    whole,
)
from tests.support.processes import warm
from tests.support.stores import slow_disk

ROOT = Path(__file__).parent.parent.parent.parent
LONG = reworded(ANSWER, "x" * 50_000)


def limited(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def unlimited(kind: int) -> None:
    limited(kind, resource.getrlimit(kind)[1])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def full_disk(path: str) -> AsyncIterator[tuple[SQLiteStore, Writer]]:
    """A store whose files cannot grow, in this process."""
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING, START_A)
        limited(resource.RLIMIT_FSIZE, Path(f"{path}-wal").stat().st_size)
        yield store, writer


# What children do. Limits hold for a process, so none of this can be done in the one that runs the tests.


async def written_again_when_there_is_space(path: str) -> None:
    async with full_disk(path) as (store, writer):
        before, threads = await whole(store), threading.active_count()
        for _ in range(3):
            with pytest.raises(StoreError, match=r"check the disk|free some space"):
                await writer.write(ASK, LONG)
            assert await whole(store) == before
        open_files = descriptors()
        unlimited(resource.RLIMIT_FSIZE)
        await writer.write(ASK, LONG)
        await writer.write(DONE_A)
        assert (descriptors(), threading.active_count()) == (open_files, threads)


async def no_connection_to_be_had(path: str) -> None:
    async with full_disk(path) as (store, writer):
        with pytest.raises(StoreError):
            await writer.write(ASK, LONG)
        unlimited(resource.RLIMIT_FSIZE)
        limited(resource.RLIMIT_NOFILE, descriptors() - 1)  # the listing itself takes one
        for _ in range(2):
            with pytest.raises(StoreUnusable, match="cannot be opened"):
                await writer.write(ASK, LONG)
        with pytest.raises(StoreUnusable, match="cannot be opened"):
            await store.list_runs()
        unlimited(resource.RLIMIT_NOFILE)
        await writer.write(ASK, LONG)
        await writer.write(DONE_A)


async def cancelled_while_it_fails(path: str) -> None:
    async with full_disk(path) as (store, writer):
        threads = threading.active_count()
        for steps in range(8):
            try:
                await cancel_natively(store, writer.batch(ASK, LONG), steps)
            except* StoreError:
                pass
        unlimited(resource.RLIMIT_FSIZE)
        for steps in range(4):
            await cancel_natively(store, writer.batch(ASK, LONG), steps)
        await writer.write(ASK, LONG)
        await writer.write(DONE_A)
        assert threading.active_count() == threads


async def put_away_and_back(path: str) -> None:
    """The file that the next connection would find is another one."""
    async with full_disk(path) as (store, writer):
        with pytest.raises(StoreError):
            await writer.write(ASK, LONG)
        unlimited(resource.RLIMIT_FSIZE)
        away = Path(path).rename(f"{path}.away")
        Path(path).write_bytes(b"another")
        with pytest.raises(StoreError, match="removed or replaced"):
            await store.list_runs()
        away.rename(path)
        await writer.write(ASK, LONG)
        await writer.write(DONE_A)


async def closed_while_in_doubt(path: str) -> None:
    async with full_disk(path) as (_, writer):
        with pytest.raises(StoreError):
            await writer.write(ASK, LONG)
    unlimited(resource.RLIMIT_FSIZE)
    async with SQLiteStore(path, mode="existing") as store:
        writer.store = store
        await writer.write(ASK, LONG)
        await writer.write(DONE_A)


def synced_in_vain(folder: str, then: str = "") -> None:
    """A process for each of FAILING, because a process that loads the shim starts slowly."""
    for first in FAILING:
        os.environ["SYNC_FAIL_FROM"] = str(first)
        if (pid := os.fork()) == 0:
            asyncio.run(written_twice_where_it_fails(first, f"{folder}/{first}.db", then))
            os._exit(0)
        print(first, "exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


async def written_twice_where_it_fails(first: int, path: str, then: str) -> None:
    """Every change in a batch of its own; what fails is written once more."""
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        for change in (*OPENING, START_A, ASK, LONG, DONE_A):
            try:
                await writer.write(change)
            except StoreError:
                if then == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                await writer.write(change)
            print(first, "acknowledged", writer.next_seq - 1, flush=True)


CHILDREN = {
    child.__name__: child
    for child in (
        written_again_when_there_is_space,
        no_connection_to_be_had,
        cancelled_while_it_fails,
        put_away_and_back,
        closed_while_in_doubt,
    )
}
FAILING = (1, 4, 5, 6, 7, 8)
"""The syncs that fail, each in a process of its own."""


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.persistence.sqlite.test_reconnect", name, *arguments]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors as Linux lists them")
@pytest.mark.parametrize("name", CHILDREN)
async def test_a_disk_that_is_full_for_a_while(path: Path, name: str) -> None:
    child = warm.run(command(name, str(path)), cwd=ROOT, timeout=60)
    assert child.returncode == 0, child.stderr
    await all_there_once(path)


async def all_there_once(path: Path) -> None:
    async with SQLiteStore(path, mode="existing") as store:
        run, messages = await store.get_run(RUN), await store.list_messages(RUN, "a")
        assert run is not None
        assert (run.last_seq, run.counts) == (7, {"completed": 1, "pending": 2})
        assert [m.content for m in messages] == [ASK.message.content, LONG.message.content]


@pytest.mark.slow
@pytest.mark.skipif(bool(slow_disk.missing()), reason=str(slow_disk.missing()))
@pytest.mark.parametrize("then", ["", "killed"], ids=["goes on", "killed"])
async def test_a_commit_that_raised_is_there_or_not_and_may_be_written_again(tmp_path: Path, then: str) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(slow_disk.build(tmp_path)), "SYNC_FILES": ".db-wal"}
    words = command("synced_in_vain", str(tmp_path), then)
    child = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
    told = [line.split() for line in child.stdout.splitlines()]
    for first in FAILING:
        (code,) = (int(number) for process, what, number in told if (process, what) == (str(first), "exit"))
        killed = code == -signal.SIGKILL
        assert code == 0 or (then and killed), child.stderr
        acknowledged = max(
            [0, *(int(number) for process, what, number in told if (process, what) == (str(first), "acknowledged"))]
        )
        path = tmp_path / f"{first}.db"
        async with SQLiteStore(path, mode="existing") as store:
            run = await store.get_run(RUN)
            assert (0 if run is None else run.last_seq) in {acknowledged, acknowledged + killed}
            writer = Writer(store)
            await writer.write(*OPENING, START_A, ASK, LONG, DONE_A)
        await all_there_once(path)


async def test_an_error_that_leaves_a_transaction_open_is_no_end(path: Path) -> None:
    """A statement that could not even be rolled back."""
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)

        def left_open(connection):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE runs SET name = 'half'")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await store._call(left_open)
        with anyio.fail_after(60):  # no lock is waited for
            await writer.write(START_A)
        run = await store.get_run(RUN)
        assert run is not None
        assert run.name == "moon"


if __name__ == "__main__":
    if sys.argv[1] == "synced_in_vain":
        synced_in_vain(*sys.argv[2:])
    else:
        asyncio.run(CHILDREN[sys.argv[1]](*sys.argv[2:]))
