"""Checks of answers against schemas that are made to take long: bounded, off the event loop, and ended by a cancel."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from plait.backends import BackendError, ConversationRequest, ErrorKind, FunctionBackend
from plait.backends.answers import process
from plait.backends.answers.threads import LARGE, in_thread
from plait.runner import DAG, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from tests.support.agents.homes import until

ROOT = Path(__file__).parents[3]


async def read(answer: Any, schema: dict[str, Any]) -> Any:
    async def function(prompt: str) -> Any:
        return answer

    async with FunctionBackend(function).open(ConversationRequest(output_schema=schema)) as conversation:
        return (await conversation.send("?")).data


def fanned(levels: int, leaf: dict[str, Any], keyword: str = "allOf") -> dict[str, Any]:
    """Return a schema that stands for 2 ** `levels` times `leaf`."""
    defs: dict[str, Any] = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**defs, f"d{levels}": leaf}, "$ref": "#/$defs/d0"}


# 300,000 alternatives for each of 50,000 numbers: hours of work. The schema alone is within the bound.
ENDLESS = {
    "type": "array",
    "items": {"anyOf": [{"$ref": "#/$defs/d0"}, True]},
    "$defs": fanned(16, {"type": "null"}, "anyOf")["$defs"],
}
NUMBERS = [*range(50_000)]


def checking(owner: int | None = None) -> list[psutil.Process]:
    """Return the processes that check something for process `owner`, or for this one."""
    mine = psutil.Process(owner).children(recursive=True)
    found: list[psutil.Process] = []
    for one in mine:
        with suppress(psutil.NoSuchProcess):
            if any("answers.process" in word for word in one.cmdline()):
                found.append(one)
    return found


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        ([{"id": n} for n in range(4_000)], {"uniqueItems": True}),
        ("a" * 60_000, {"pattern": "^([a-z]+)+$"}),
        ([{"id": n, "name": f"n {n}"} for n in range(4_000)], {"items": {"required": ["id", "name"]}}),
    ],
)
async def test_an_answer_that_fits_is_returned_whatever_its_size(answer: Any, schema: dict[str, Any]) -> None:
    assert await read(json.dumps(answer), schema) == answer


async def test_patterns_take_linear_time() -> None:
    with pytest.raises(BackendError, match="does not match"):
        await read(json.dumps("a" * 100_000 + "!"), {"pattern": "^([a-z]+)+$"})


async def test_a_pattern_with_lookaround_is_bounded_too() -> None:
    schema = {"items": {"pattern": "^(?=(a|a)*b)(a|a)*$"}}
    assert await read(["aab", "b"][:0], schema) == []
    with pytest.raises(BackendError, match="does not match"):
        await read(["a" * 40] * 20, schema)


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
async def test_a_schema_that_stands_for_too_much_is_refused_before_the_call(keyword: str) -> None:
    with pytest.raises(BackendError, match="too costly to check") as caught:
        await read('"x"', fanned(40, {"type": "string"}, keyword))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


async def test_a_costly_check_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CPU_LIMIT", 1)
    with pytest.raises(BackendError, match="took more than 1 s") as caught:
        await read(NUMBERS, ENDLESS)
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT
    assert checking() == []


async def test_the_loop_runs_during_a_costly_check_and_a_cancel_ends_the_check() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(read, NUMBERS, ENDLESS)
        await until(lambda: len(checking()) == 1)  # the loop looks around while the process works
        group.cancel_scope.cancel()
    await until(lambda: checking() == [])


async def test_the_time_limit_of_a_task_and_a_cancel_work_during_a_check() -> None:
    async def work(prompt: str) -> list[int]:
        return NUMBERS

    once = Retry(attempts=1)
    runner = ParallelRunner(work)
    result = await runner.run(DAG([Task("a", "", output_schema=ENDLESS, timeout=1, retry=once)]))
    assert (result["a"].status, result["a"].error_kind) == (TaskStatus.FAILED, "timeout")
    async with runner.start(DAG([Task("a", "", output_schema=ENDLESS, retry=once)])) as run:
        await until(checking)
        run.cancel()
        assert (await run.result()).status is RunStatus.CANCELLED
    await until(lambda: checking() == [])


async def test_a_check_dies_with_its_process() -> None:
    """By itself: nobody is left to kill it."""
    program = (
        "import asyncio\n"
        "from plait.backends.answers import process\n"
        "from tests.backends.answers.test_reader import ENDLESS, NUMBERS, read\n"
        "process.CPU_LIMIT = 2\n"
        "asyncio.run(read(NUMBERS, ENDLESS))\n"
    )
    async with await anyio.open_process([sys.executable, "-c", program], cwd=ROOT) as process:
        await until(lambda: checking(process.pid))
        (check,) = checking(process.pid)
        process.kill()
    await until(lambda: not check.is_running() or check.status() == psutil.STATUS_ZOMBIE)


async def test_a_large_answer_is_parsed_and_checked_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    decode = json.JSONDecoder.decode

    def noted(decoder: json.JSONDecoder, text: str) -> Any:
        if len(text) > LARGE:
            threads.add(threading.get_ident())
        return decode(decoder, text)

    monkeypatch.setattr(json.JSONDecoder, "decode", noted)
    text = json.dumps([{"name": "x" * 100}] * (LARGE // 50))
    assert len(await read(text, {"items": {"required": ["name"]}})) == LARGE // 50
    assert threads
    assert threading.get_ident() not in threads


async def test_the_mismatches_of_a_costly_check_are_told() -> None:
    schema = {"items": {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}}
    answer: list[Any] = [{"id": n} for n in range(40_000)]
    assert await read(answer, schema) == answer
    answer[30_000] = {"id": "x"}
    with pytest.raises(BackendError, match=r"at \$\[30000\]\.id: \"x\" is not of type"):
        await read(answer, schema)


async def test_alternatives_of_a_recursive_schema_are_listed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mismatch deep in the value has a mismatch in each alternative of each level."""
    monkeypatch.setattr(process, "CPU_LIMIT", 1)
    node = {"type": "object", "properties": {"c": {"$ref": "#"}}}
    value: Any = 1
    for _ in range(25):
        value = {"c": value}
    with pytest.raises(BackendError, match="does not fit output_schema") as caught:
        await read(value, {"anyOf": [node, node]})
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


async def test_nothing_is_fetched() -> None:
    async def refuse(_stream: Any) -> None:
        raise AssertionError("a schema was fetched")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, refuse)
        for schema in (
            {"$ref": f"http://127.0.0.1:{port}/s"},
            {"$schema": f"http://127.0.0.1:{port}/s", "type": "string"},
            {"$id": f"http://127.0.0.1:{port}/s", "$defs": {"a": {"$dynamicRef": "t#x"}}},
            {"$ref": "file:///etc/passwd"},
            {"unknown": {"$ref": f"http://127.0.0.1:{port}/s"}, "properties": {"a": {"$ref": "#/unknown"}}},
        ):
            with pytest.raises(BackendError, match="output_schema"):
                await read('"x"', schema)
        group.cancel_scope.cancel()


async def test_two_runs_at_once_have_one_thread_for_large_answers() -> None:
    """Parsing holds the interpreter: several threads would stop the event loop of all runs in turn."""
    lock, now, most = threading.Lock(), 0, 0

    def parse() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    async def answer(prompt: str) -> str:
        await in_thread(parse)
        return prompt

    async with anyio.create_task_group() as group:
        for name in "ab":
            dag = DAG(Task(f"{name}{n}", "x") for n in range(5))
            group.start_soon(ParallelRunner(FunctionBackend(answer), concurrency=5).run, dag)
    assert most == 1
