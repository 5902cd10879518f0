"""Checks of answers against schemas that are made to take long: bounded, and large answers off the event loop."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, Task
from plait.backends import ConversationRequest, FunctionBackend
from plait.backends.large_answers import LARGE, in_thread
from plait.errors import BackendError, ErrorKind


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


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        ([{"id": n} for n in range(4_000)], {"uniqueItems": True}),
        ("a" * 60_000, {"pattern": "^([a-z]+)+$"}),
        ([{"id": n, "name": f"n {n}"} for n in range(4_000)], {"items": {"required": ["id", "name"]}}),
    ],
)
async def test_a_large_answer_that_fits_is_returned_within_two_seconds(answer: Any, schema: dict[str, Any]) -> None:
    start = time.process_time()
    assert await read(json.dumps(answer), schema) == answer
    assert time.process_time() - start < 2


async def test_patterns_take_linear_time() -> None:
    start = time.process_time()
    with pytest.raises(BackendError, match="does not match"):
        await read(json.dumps("a" * 100_000 + "!"), {"pattern": "^([a-z]+)+$"})
    assert time.process_time() - start < 2


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
async def test_a_schema_that_stands_for_too_much_is_refused_before_the_call(keyword: str) -> None:
    with pytest.raises(BackendError, match="too costly to check") as caught:
        await read('"x"', fanned(40, {"type": "string"}, keyword))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        (NUMBERS, ENDLESS),
        ("a" * 20_000, {"pattern": "(a{1,300}){1,100}z"}),
    ],
)
async def test_a_check_that_would_take_hours_or_minutes_is_not_begun(answer: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="checking it would take too long") as caught:
        await read(answer, schema)
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


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


@pytest.mark.parametrize(
    ("size", "words"), [(2_000, r"at \$\[1000\]\.id: \"x\" is not of type"), (40_000, "too large")]
)
async def test_the_places_of_mismatches_are_told_unless_there_may_be_too_many(size: int, words: str) -> None:
    schema = {"items": {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}}
    answer: list[Any] = [{"id": n} for n in range(size)]
    assert await read(answer, schema) == answer
    answer[1_000] = {"id": "x"}
    with pytest.raises(BackendError, match=words):
        await read(answer, schema)


@pytest.mark.parametrize(
    ("levels", "alternatives", "words"),
    [
        (25, [{"$ref": "#"}, {"type": "null"}], "is not valid under any"),
        (5, [{"$ref": "#"}, {"$ref": "#"}], "is not valid under any"),
        (25, [{"$ref": "#"}, {"$ref": "#"}], "too large to list where"),
    ],
)
async def test_a_mismatch_in_each_alternative_at_each_level_is_not_listed(
    levels: int, alternatives: list[Any], words: str
) -> None:
    """With two alternatives that are recursive, 18 levels would take a minute."""
    value: Any = {"c": 1}
    for _ in range(levels):
        value = {"c": value}
    with pytest.raises(BackendError, match=words) as caught:
        await read(value, {"type": "object", "properties": {"c": {"anyOf": alternatives}}})
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


@pytest.mark.parametrize("levels", [100, 250])
async def test_deep_answers_do_not_exhaust_the_stack(levels: int) -> None:
    schema: dict[str, Any] = {"items": {"$ref": "#"}}
    for _ in range(60):
        schema = {"items": schema}
    schema["items"] = {"anyOf": [schema["items"], {"$ref": "#"}]}
    with pytest.raises(BackendError, match="nested too deeply"):
        await read("[" * levels + "]" * levels, schema)
    assert await read("[" * 50 + "]" * 50, schema) is not None


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
