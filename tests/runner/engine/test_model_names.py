"""Which model answered is known of every attempt, as its server or its agent names it, and kept."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from plait import DAG, ParallelRunner, Retry, Task
from plait.backends import CodexBackend, ConversationRequest, Reply, Usage
from plait.backends.agents.agent_output import AgentCall, ProcessEnd
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore, SQLiteStore
from tests.support.agents.homes import Home, send
from tests.support.fakes import Talker
from tests.support.processes.command import Done, plait
from tests.support.remotes import dialect, make
from tests.support.wire import ChatCompletions, Dialect, Messages, events, plain, serve

__all__ = ["dialect"]

WIRE = ChatCompletions()
UNNAMED: list[Any] = [None, "", "  ", 7, {"name": "m"}, ["m"]]
ODD = ["\x1b[31mred", "two\nlines", "\ud800", "\0", "m" * 10_000, "a\u202eb"]


def answer(dialect: Dialect, model: Any) -> list[str]:
    """An answer by a server that names its model so."""
    parts = dialect.parts("hi")
    if isinstance(dialect, Messages):
        told = json.loads(parts[0].split("data: ")[1])
        told["message"]["model"] = model
        return [f"event: message_start\ndata: {json.dumps(told)}\n\n", *parts[1:]]
    told = [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]
    return [*(f"data: {json.dumps({**one, 'model': model})}\n\n" for one in told), parts[-1]]


async def model_of(dialect: Dialect, model: Any) -> str | None:
    answered = events(answer(dialect, model))
    async with serve(answered) as server, make(dialect, server.url).open(ConversationRequest()) as conversation:
        reply = await conversation.send("Hello.")
    assert (reply.text, reply.messages[-1].usage.model) == ("hi", reply.usage.model)
    return reply.usage.model


async def test_the_servers_own_name_for_it(dialect: Dialect) -> None:
    assert await model_of(dialect, "m-2026-11-01") == "m-2026-11-01"


@pytest.mark.parametrize("model", UNNAMED, ids=repr)
async def test_what_is_no_name_costs_no_answer(dialect: Dialect, model: Any) -> None:
    assert await model_of(dialect, model) is None


@pytest.mark.parametrize("model", ODD, ids=lambda model: ascii(model)[:12])
async def test_a_name_can_be_shown_and_stored_whatever_the_server_says(dialect: Dialect, model: str) -> None:
    told = await model_of(dialect, model)
    assert told is not None
    assert told.isprintable()
    assert 0 < len(told.encode()) < 400


def test_a_sum_has_the_last_one() -> None:
    assert sum([Usage(1, 1, model="a"), Usage(2, 2, model="b"), Usage(3, 3)], Usage()) == Usage(6, 6, model="b")


def test_codex_is_taken_at_its_word_for_the_model_it_was_given(tmp_path: Path) -> None:
    reader = CodexBackend(model="gpt-x").reader(AgentCall(tmp_path))
    reader.read({"type": "turn.completed", "usage": {"input_tokens": 5, "output_tokens": 3}})
    assert reader.end(ProcessEnd(0)).usage == Usage(5, 3, model="gpt-x")


async def test_every_attempt_keeps_its_own_also_for_a_resume() -> None:
    """The first attempt fails after it was paid for, the second one is answered by another model."""
    calls: list[str] = []

    def say(prompt: str, _opening: ConversationRequest) -> Reply | BackendError:
        calls.append(prompt)
        if prompt == "a" and len(calls) == 1:
            return BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(1, 1, model="first"))
        return Reply("fine", usage=Usage(2, 2, model="second" if prompt == "a" else None))

    store = MemoryStore()
    dag = DAG([Task("a", prompt="a", retry=Retry(base_delay=0)), Task("b", prompt="b", depends_on=["a"])])
    result = await ParallelRunner(Talker(say), store=store).run(dag)
    assert (result["a"].usage.model, result["b"].usage.model) == ("second", None)
    again = await ParallelRunner(Talker(say), store=store).resume(result.run_id)
    assert [again[name].usage for name in "ab"] == [result[name].usage for name in "ab"]
    attempts = await store.list_attempts(result.run_id)
    assert [(one.task_id, one.attempt, one.usage.model) for one in attempts] == [
        ("a", 1, "first"),
        ("a", 2, "second"),
        ("b", 1, None),
    ]


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("m-1", "m-1"),
        ("Mod\u00e8le\u00a0X", "Mod\u00e8le X"),
        ("x\u200by", "x\\u200by"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\ud800", "\ufffd"),
        ("  ", None),
        ("m" * 100_000, "m" * 119 + "\u2026"),
    ],
    ids=lambda one: ascii(one)[:20],
)
@pytest.mark.parametrize("fails", [False, True], ids=["answers", "fails"])
async def test_no_answer_and_no_cost_is_lost_for_the_name_that_a_backend_gives(
    model: str, kept: str | None, fails: bool
) -> None:
    usage = Usage(2, 2, model=model)
    error = BackendError(ErrorKind.AUTH, "no key", usage=usage)
    backend = Talker(lambda _prompt, _opening: error if fails else Reply("fine", usage=usage))
    store = MemoryStore()
    result = await ParallelRunner(backend, store=store).run(DAG([Task("a", prompt="a")]))
    (task,) = await store.list_tasks(result.run_id)
    assert (result["a"].error, task.usage.input_tokens, task.usage.model) == ("no key" if fails else None, 2, kept)
    assert fails or result["a"].usage == Usage(2, 2, model=kept)


async def test_a_run_has_none_of_its_own() -> None:
    usage, store = Usage(1, 1, model="m"), MemoryStore()
    runner = ParallelRunner(Talker(lambda _prompt, _opening: Reply("fine", usage=usage)), store=store)
    result = await runner.run(DAG([Task("a", prompt="a")]))
    assert result.usage == (await runner.resume(result.run_id)).usage == Usage(1, 1)


async def test_an_agent_that_answered_nothing_names_no_model(home: Home) -> None:
    for words, model in (("[[die]]", "large"), ("Work.", "nosuch")):
        with pytest.raises(BackendError) as caught:
            await send(home.acp(model=model), words, files=home.files(1, model))
        assert caught.value.usage.model is None
    reply = await send(home.acp(model="large"), "Work.", files=home.files(1, "works"))
    assert reply.usage.model == "large"


async def test_an_attempt_that_pays_for_a_cut_one_has_not_its_model(home: Home) -> None:
    backend = home.claude()
    session = str(backend.new_session_id())
    await send(backend, "Work.", files=home.files(1), session_id=session)
    stdout = home.files(1).turn / "1" / "stdout"
    told = {
        "type": "assistant",
        "session_id": session,
        "message": {"id": "m", "model": "first", "usage": {"output_tokens": 3}},
    }
    kept = [line for line in stdout.read_text().splitlines() if '"type": "result"' not in line]
    stdout.write_text("\n".join([*kept, json.dumps(told), ""]))
    for path in home.files(1).turn.rglob("told"):
        path.unlink()
    with pytest.raises(BackendError) as caught:
        await send(
            backend,
            "Go on. [[error 401]]",
            files=home.files(2),
            session_id=session,
            resume=True,
            resumes_interrupted=True,
        )
    assert caught.value.usage.output_tokens >= 3, "paid for"
    assert caught.value.usage.model is None


PLAN = """
backends:
  far: {{kind: openai, model: old, base_url: "{url}/v1"}}
tasks:
  - {{id: a, prompt: one, retry: {{attempts: 1}}}}
  - {{id: b, prompt: "two {{{{ a }}}}", depends_on: a, retry: {{attempts: 1}}}}
"""
OTHER = 'backends: {{far: {{kind: openai, model: new, base_url: "{url}/v1"}}}}\n'


async def test_two_models_of_one_backend_are_told_apart(tmp_path: Path) -> None:
    """`--backends` names another one for the rest of a run."""

    async def command(*words: str) -> Done:
        return await anyio.to_thread.run_sync(partial(plait, tmp_path, *words))

    first, second = (events(answer(WIRE, f"{name}-2026")) for name in ("old", "new"))
    async with serve(first, plain(401, {"error": {"message": "closed"}})) as old, serve(second) as new:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=old.url))
        (tmp_path / "other.yaml").write_text(OTHER.format(url=new.url))
        assert (await command("run", "plan.yaml")).code == 1
        done = await command("resume", "last", "--retry-failed", "--backends", "other.yaml", "--json")
    assert [(one["task_id"], one["model"]) for one in json.loads(done.out)["tasks"]] == [
        ("a", "old-2026"),
        ("b", "new-2026"),
    ]
    shown = json.loads((await command("show", "last", "--json")).out)
    assert [(one["backend"], one["model"]) for one in shown["tasks"]] == [(None, "old-2026"), (None, "new-2026")]
    assert "model     old-2026 (1 task), new-2026 (1 task)\n" in (await command("show", "last")).out
    task = json.loads((await command("show", "last", "b", "--json")).out)
    assert [(one["status"], one["model"]) for one in task["history"]] == [("failed", None), ("completed", "new-2026")]
    page = (await command("show", "last", "b")).out
    assert "model     new-2026\n" in page
    assert "far (new-2026)" in page
    log = (await command("log", "last", "--json")).out.splitlines()
    ended = [json.loads(line) for line in log if '"task_completed"' in line]
    assert [one["detail"]["model"] for one in ended] == ["old-2026", "new-2026"]
    async with SQLiteStore(tmp_path / ".plait" / "plait.db", mode="read") as store:
        (run,) = await store.list_runs()
        assert [task.usage.model for task in await store.list_tasks(run.run_id)] == ["old-2026", "new-2026"]
