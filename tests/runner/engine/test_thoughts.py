"""Thoughts that a model wrote into its answer: stored and shown, and no part of a conversation or of a later prompt."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, Task
from plait.backends import ConversationRequest, Message, Reply, Usage
from plait.json_form import as_json, from_json
from plait.persistence import SQLiteStore
from plait.persistence.store_protocol import Store
from plait.runner.cli.command_line import cli, run_cli
from plait.runner.views.trace_spans import _content
from tests.support.fakes import Talker

USED = Usage(3, 2)


def thoughtful(prompt: str, _request: ConversationRequest) -> Reply:
    text = f"re: {prompt}"
    messages = (Message("user", prompt), Message("assistant", text, USED, f"secret plan for {prompt} \ud800"))
    return Reply(text, usage=USED, messages=messages)


async def test_thoughts_are_stored_beside_the_answer_and_sent_to_nobody(store: Store) -> None:
    backend = Talker(thoughtful)
    runner = ParallelRunner(backend, store=store)
    tasks = [Task("a", "one"), Task("b", "two", continues="a"), Task("c", "three {{ a }}", depends_on=["a"])]
    result = await runner.run(DAG(tasks))
    assert result.text == {"a": "re: one", "b": "re: two", "c": "re: three re: one"}
    stored = await store.list_messages(result.run_id, "a")
    assert [(one.role, one.content, one.output_tokens) for one in stored] == [
        ("user", "one", 0),
        ("thoughts", "secret plan for one \ufffd", 0),
        ("assistant", "re: one", 2),
    ]
    assert "secret" not in str([(one.content) for one in (*backend.requests[1].history, *backend.requests[2].history)])
    await runner.runs.continue_task(result.run_id, "b", "more?")
    said = [(one.role, one.content) for one in backend.requests[-1].history]
    assert said == [("user", "one"), ("assistant", "re: one"), ("user", "two"), ("assistant", "re: two")]
    assert "secret plan for more?" in (await store.list_messages(result.run_id, "b"))[-2].content


def test_thoughts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plait.db"

    async def made() -> None:
        async with SQLiteStore(path) as store:
            await ParallelRunner(Talker(thoughtful), store=store).run(DAG([Task("a", "one")]), run_id="r")

    anyio.run(made)
    assert run_cli(cli, ["show", "r", "a", "--store", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("-- thoughts") < shown.index("secret plan for one") < shown.index("-- assistant")


async def test_thoughts_are_the_reasoning_of_a_trace(store: Store) -> None:
    result = await ParallelRunner(Talker(thoughtful), store=store).run(DAG([Task("a", "one")]))
    told = _content(await store.list_messages(result.run_id, "a"))["gen_ai.output.messages"]
    assert [part["type"] for part in json.loads(str(told))[0]["parts"]] == ["reasoning", "text"]


def test_thoughts_arrive_from_a_host() -> None:
    reply = Reply("fine", messages=(Message("user", "?"), Message("assistant", "fine", thoughts="hm")))
    assert from_json(Reply, json.loads(json.dumps(as_json(reply)))) == reply
