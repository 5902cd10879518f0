"""Flipped bits and cut logs: what is read is what was written, or is called damaged, or is not handed out at all."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import gc
import random
import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import StoreError, StoreUnusable
from plait.events import NewTask
from plait.persistence import RunRecord, SQLiteStore
from plait.persistence import store_health as health
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    CLAIMED,
    CREATED,
    DONE_A,
    RUN,
    RUNNING,
    START_A,
    Writer,
    reworded,
    whole,
)
from tests.support.sizes import size

pytestmark = pytest.mark.slow

RUNS = ("run-1", "run-2")
TASKS = tuple(f"t{number}" for number in range(20))
LARGE = "a large answer " * 5000
FLIPS = size(100, 300)

Texts = dict[tuple[str, ...], Any]


async def fill(path: Path) -> None:
    rng = random.Random(1)
    async with SQLiteStore(path) as store:
        for run_id in RUNS:
            writer = Writer(store, run_id)
            await writer.write(replace(CREATED, tasks=tuple(NewTask(t, "p") for t in TASKS)), CLAIMED, RUNNING)
            for task_id in TASKS:
                text = LARGE if task_id == "t7" else f"{task_id} says " * rng.choice([5, 50, 150])
                said = reworded(ASK, f"{text}?"), reworded(ANSWER, text), replace(DONE_A, text=text)
                await writer.write(*(replace(change, task_id=task_id) for change in (START_A, *said)))


async def texts(path: Path, mode: str) -> Texts:
    """All results and messages; None in place of what is said to be damaged."""
    found: Texts = {}
    async with SQLiteStore(path, mode=mode) as store:
        for run_id in RUNS:
            for task in await store.list_tasks(run_id):
                found[run_id, task.task_id] = None if task.damaged else (task.text, task.data)
            for task_id in TASKS:
                messages = await store.list_messages(run_id, task_id)
                found[run_id, task_id, "messages"] = [None if m.damaged else (m.role, m.content) for m in messages]
    return found


def flipped(pages: bytes, rng: random.Random) -> bytes:
    """One bit flipped, behind the page of the schema."""
    content = bytearray(pages)
    content[rng.randrange(8_192, len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def as_written_or_damaged(found: Texts, written: Texts) -> bool:
    for key, was in written.items():
        is_now = found.get(key, "gone")
        if isinstance(was, list):
            if len(is_now) != len(was) or any(new not in {None, old} for new, old in zip(is_now, was, strict=True)):
                return False
        elif is_now not in {None, was}:
            return False
    return set(found) == set(written)


async def test_flipped_bits_never_change_what_is_read(tmp_path: Path) -> None:
    await fill(tmp_path / "whole.db")
    pages, written = (tmp_path / "whole.db").read_bytes(), await texts(tmp_path / "whole.db", "existing")
    rng, outcomes = random.Random(2), {"refused": 0, "damaged": 0, "same": 0}
    for number in range(FLIPS):
        path = tmp_path / "flipped" / f"{number}.db"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(flipped(pages, rng))
        try:
            found = await texts(path, "existing")
        except StoreError:
            outcomes["refused"] += 1
            continue
        assert as_written_or_damaged(found, written), number
        outcomes["same" if found == written else "damaged"] += 1
    assert all(outcomes.values()), f"the flips showed too little: {outcomes}"


async def test_flipped_bits_in_a_file_that_is_only_read(tmp_path: Path) -> None:
    """Here pages are not looked through first, so an index may have lost a row; but no text is ever another one."""
    await fill(tmp_path / "whole.db")
    pages, written = (tmp_path / "whole.db").read_bytes(), await texts(tmp_path / "whole.db", "read")
    rng = random.Random(3)
    for number in range(FLIPS // 3):
        path = tmp_path / f"{number}.db"
        path.write_bytes(flipped(pages, rng))
        try:
            found = await texts(path, "read")
        except StoreError:
            continue
        for key, now in found.items():
            if isinstance(now, list):
                assert all(new is None or new in written[key] for new in now), number
            else:
                assert now is None or now == (None, None) or now == written[key], number


async def test_a_log_that_was_cut_is_a_prefix_of_what_happened(tmp_path: Path) -> None:
    states: dict[int, tuple[Any, ...]] = {0: (None, (), (), [], ())}
    path, crashed = tmp_path / "runs.db", tmp_path / "crashed.db"
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        for batch in ((CREATED, CLAIMED), (RUNNING,), (START_A,), (ASK, ANSWER), (DONE_A,)):
            await writer.write(*batch)
            states[writer.next_seq - 1] = await whole(store)
        for end in ("", "-wal"):  # by another process: closing the file in this one would drop SQLite's locks on it
            subprocess.run(["cp", f"{path}{end}", f"{crashed}{end}"], check=True)
    log = Path(f"{crashed}-wal").read_bytes()
    rng, seen, cuts = random.Random(4), list[int](), size(20, 80)
    frames = [32 + n * (8_192 + 24) for n in range((len(log) - 32) // (8_192 + 24) + 1)]
    for cut in sorted({*frames, *(frame - 1 for frame in frames), *(rng.randrange(len(log)) for _ in range(cuts))}):
        copy = tmp_path / f"{cut}.db"
        shutil.copy(crashed, copy)
        Path(f"{copy}-wal").write_bytes(log[:cut])
        async with SQLiteStore(copy, mode="existing") as store:
            run: RunRecord | None = await store.get_run(RUN)
            seen.append(0 if run is None else run.last_seq)
            assert await whole(store) == states[seen[-1]], cut
    assert seen == sorted(seen)
    assert set(seen) == set(states)


async def test_who_put_a_copy_back_beside_the_log_of_a_crash_is_told_to_remove_that(tmp_path: Path) -> None:
    path, copy = tmp_path / "runs.db", tmp_path / "copy.db"
    async with SQLiteStore(path) as store:
        for number in range(60):
            await Writer(store, f"run-{number}").write(CREATED, CLAIMED, RUNNING)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute(f"VACUUM INTO '{copy}'")  # with the same rows on other pages
        await Writer(store, "run-60").write(CREATED, CLAIMED, RUNNING)
        shutil.copyfile(f"{path}-wal", tmp_path / "of-the-crash")
    path.write_bytes(copy.read_bytes())
    shutil.copyfile(tmp_path / "of-the-crash", f"{path}-wal")
    told = "remove runs.db-wal and runs.db-shm, and restore a copy"
    with pytest.raises(StoreUnusable, match=told):
        async with SQLiteStore(path, mode="existing"):
            pass
    assert any("remove runs.db-wal and runs.db-shm" in one.found + one.advice for one in health.file(path))
    for end in ("-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    async with SQLiteStore(path, mode="existing") as store:
        assert len(await store.list_runs(99)) == 60


@pytest.mark.parametrize("at_work", [True, False])
async def test_the_collector_of_garbage_is_left_as_it_was_by_reading_what_is_damaged(
    at_work: bool, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"
    await fill(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE tasks SET depends_on = 'no list' WHERE task_id = 't3'")
        connection.commit()
    try:
        if not at_work:
            gc.disable()
        async with SQLiteStore(path) as store:
            for run_id in RUNS:
                with pytest.raises(StoreError, match=r"is damaged: task 't3' .* does not fit its checksum; restore"):
                    await store.list_tasks(run_id)
                assert gc.isenabled() is at_work
    finally:
        gc.enable()
