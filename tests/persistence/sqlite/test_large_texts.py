"""How large the file gets: long conversations, and large texts that are stored once."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import StoreError
from plait.events import Event
from plait.persistence import SQLiteStore
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    CREATED,
    DONE_A,
    OPENING,
    RUN,
    START_A,
    Writer,
    at,
    message,
    reworded,
    run_becomes,
)
from tests.support.stores.database import attempts_of, edit

LARGE = "All that the model said. " * 4000
TEXTS = {
    "200 bytes to 20 kB": (200, 2_000, 20_000),
    "about 1.5 kB": tuple(range(1_350, 1_650)),
    "exactly 1.5 kB": (1_500,),
    "2 to 10 kB": tuple(range(2_000, 10_000)),
}


async def conversation(path: Path, sizes: tuple[int, ...]) -> int:
    """A conversation of 1,000 turns, written turn by turn; its text in bytes."""
    rng, raw = random.Random(7), 0
    async with SQLiteStore(path) as store:
        writer = Writer(store, "20261122-021300-abcdef")
        await writer.write(*OPENING, START_A)
        for _ in range(1000):
            texts = ["x" * rng.choice(sizes) for _ in range(2)]
            roles = ("user", "assistant")
            turn = [message(at(3), "a", 1, r, t, 100, 1000) for r, t in zip(roles, texts, strict=True)]
            await writer.write(*turn)
            raw += sum(map(len, texts))
        assert len(await store.list_messages(writer.run_id, "a")) == 2000
    return raw


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
async def test_a_thousand_turns_take_little_more_than_their_text(path: Path, kind: str) -> None:
    raw = await conversation(path, TEXTS[kind])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "closing has brought the WAL in"
    assert path.stat().st_size < 1.3 * raw


def texts(path: Path) -> list[int]:
    """The bytes of each text that is stored apart."""
    with closing(sqlite3.connect(path)) as connection:
        return [size for (size,) in connection.execute("SELECT length(CAST(content AS BLOB)) FROM texts ORDER BY 1")]


async def write_large(path: Path, *runs: str, **texts: str | None) -> None:
    answer = reworded(ANSWER, texts.get("answer", LARGE))
    done = replace(DONE_A, text=texts.get("text", LARGE), data_json=texts.get("data"))
    async with SQLiteStore(path) as store:
        for run_id in runs:
            await Writer(store, run_id).write(*OPENING, START_A, ASK, answer, done)


async def test_a_large_text_is_stored_once_for_all_who_say_it(path: Path) -> None:
    await write_large(path, RUN, "run-2", "run-3")
    assert texts(path) == [len(LARGE)]
    assert path.stat().st_size < 400_000
    async with SQLiteStore(path, mode="read") as store:
        for run_id in (RUN, "run-2", "run-3"):
            task, (_, answer) = (await store.list_tasks(run_id))[0], await store.list_messages(run_id, "a")
            assert (task.text, task.data, task.damaged) == (LARGE, None, False)
            assert (answer.content, answer.damaged) == (LARGE, False)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("x" * 65_536, []),
        ("x" * 65_537, [65_537]),
        ("é" * 32_768, []),
        ("é" * 32_769, [65_538]),
        ("\U0001f311" * 16_384, []),
        ("\U0001f311" * 16_385, [65_540]),
    ],
    ids=["64 KiB", "one more", "two bytes each", "two more", "four bytes each", "four more"],
)
async def test_large_is_more_than_64_kib_of_utf_8(path: Path, text: str, stored: list[int]) -> None:
    await write_large(path, RUN, answer="short", text=text)
    assert texts(path) == stored
    async with SQLiteStore(path, mode="read") as store:
        task = (await store.list_tasks(RUN))[0]
        assert (task.text, task.damaged) == (text, False)


@pytest.mark.parametrize("large", ["text", "data", "prompt"])
async def test_of_a_completion_with_its_prompt_what_is_large_is_stored_apart(path: Path, large: str) -> None:
    parts = {"text": "short", "data": '"short"', "prompt": "First.", large: LARGE}
    done = replace(DONE_A, text=parts["text"], data_json=parts["data"], turn=parts["prompt"])
    async with SQLiteStore(path) as store:
        for run_id in (RUN, "run-2"):
            await Writer(store, run_id).write(*OPENING, START_A, done)
    assert texts(path) == ([] if large == "data" else [len(LARGE)])
    async with SQLiteStore(path, mode="read") as store:
        task, (asked, answer) = (await store.list_tasks(RUN))[0], await store.list_messages(RUN, "a")
        assert (task.text, task.data, task.damaged) == (parts["text"], parts["data"], False)
        assert [(m.role, m.content, m.damaged) for m in (asked, answer)] == [
            ("user", parts["prompt"], False),
            ("assistant", parts["text"], False),
        ]


@pytest.mark.parametrize(
    ("harmed", "damaged"),
    [("prompt", (False, True, False)), ("text", (True, False, True)), ("data", (True, False, True))],
)
async def test_damage_to_a_prompt_harms_the_message_and_not_the_result(
    path: Path, harmed: str, damaged: tuple[bool, bool, bool]
) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING, START_A, replace(DONE_A, turn="First."))
    edit(path, attempts_of("a", f"{harmed} = 'tampered'"))
    async with SQLiteStore(path, mode="existing") as store:
        task, (asked, answer) = (await store.list_tasks(RUN))[0], await store.list_messages(RUN, "a")
        assert (task.damaged, asked.damaged, answer.damaged) == damaged
        assert "tampered" not in (task.text, task.data, asked.content, answer.content)


DAMAGE = {
    "another text": "UPDATE texts SET content = 'x' || substr(content, 2)",
    "cut": "UPDATE texts SET content = substr(content, 1, 70000)",
    "not utf-8": "UPDATE texts SET content = CAST(x'ff00fe' AS TEXT)",
    "lost": "DELETE FROM texts",
    "not referred to": "UPDATE attempts SET text_sha256 = NULL",
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_or_missing_large_text_is_told_and_not_given(path: Path, kind: str) -> None:
    await write_large(path, RUN)
    edit(path, DAMAGE[kind])
    async with SQLiteStore(path, mode="existing") as store:
        task, messages = (await store.list_tasks(RUN))[0], await store.list_messages(RUN, "a")
        assert (task.damaged, task.text, task.data) == (True, None, None)
        assert messages[1].damaged == (kind != "not referred to")
        assert messages[1].content == ("" if messages[1].damaged else LARGE)


async def test_large_settings_are_kept_once_and_told_where_they_are_lost(path: Path) -> None:
    created = replace(CREATED, settings=f'{{"inputs": "{LARGE}"}}')
    kept: list[object] = []
    for run_id in ("one", "two"):
        async with SQLiteStore(path) as store:
            await Writer(store, run_id).write(created, run_becomes(at(9), "cancelled"))
        kept.append(texts(path))
    assert kept[0] == kept[1] != []
    async with SQLiteStore(path, mode="existing") as store:
        for run_id in ("one", "two"):
            run = await store.get_run(run_id)
            assert run is not None
            assert run.settings == created.settings
        await store.purge(["one"])
        assert texts(path) == kept[1], "the other one has them still"
    edit(path, "DELETE FROM texts")
    async with SQLiteStore(path, mode="existing") as store:
        assert [run.run_id for run in await store.list_runs()] == ["two"]
        with pytest.raises(StoreError, match=r"run 'two' is damaged: the text of its settings .*; restore a copy"):
            await store.get_run("two")


async def test_a_damaged_large_text_is_mended_by_whoever_says_it_again(path: Path) -> None:
    await write_large(path, RUN)
    edit(path, DAMAGE["another text"])
    await write_large(path, "run-2")
    assert len(texts(path)) == 1
    async with SQLiteStore(path, mode="existing") as store:
        assert [(await store.list_tasks(run_id))[0].text for run_id in (RUN, "run-2")] == [LARGE, LARGE]


async def test_a_refused_batch_leaves_no_large_text(path: Path) -> None:
    changes: tuple[Event, ...] = (*OPENING, START_A, replace(DONE_A, text=LARGE), replace(DONE_A, text=LARGE))
    async with SQLiteStore(path) as store:
        with pytest.raises(Exception, match="does not follow"):
            await Writer(store).write(*changes)
    assert texts(path) == []
