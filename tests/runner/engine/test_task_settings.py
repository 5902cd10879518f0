"""`Task(model=..., system=..., temperature=...)`: settings of a task in place of those of its backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends import AnthropicBackend, Backend, LocalBackend, OpenAIBackend, Price
from plait.errors import DAGError
from plait.persistence import SQLiteStore
from tests.support.growth import plan, spec, talker
from tests.support.wire import ChatCompletions, Messages, Script, events, plain, serve

OPENAI, ANTHROPIC = ChatCompletions(), Messages()
TASK = Task("own", "own", ["usual"], model="big", system="Be long.", temperature=0.0)
DAG_OF = DAG([Task("usual", "usual"), TASK])


def openai(server: Script) -> OpenAIBackend:
    return OpenAIBackend("small", base_url=f"{server.url}/v1", system="Be brief.", temperature=0.7)


def anthropic(server: Script) -> AnthropicBackend:
    return AnthropicBackend("small", base_url=server.url, system="Be brief.", temperature=0.7)


def system_of(body: dict[str, Any]) -> str:
    return body.get("system") or body["messages"][0]["content"]


@pytest.mark.parametrize(("make", "wire"), [(openai, OPENAI), (anthropic, ANTHROPIC)])
async def test_a_request_has_the_settings_of_its_task(make: Any, wire: Any) -> None:
    async with serve(events(wire.parts("x"))) as server:
        result = await ParallelRunner(make(server)).run(DAG_OF)
    assert result.status is RunStatus.COMPLETED
    settings = [(body["model"], system_of(body), body["temperature"]) for body in server.bodies]
    assert settings == [("small", "Be brief.", 0.7), ("big", "Be long.", 0.0)]


async def test_a_later_attempt_and_a_resume_have_the_settings_from_the_store(tmp_path: Path) -> None:
    refused = plain(401, {"error": {"message": "no"}})
    async with serve(refused, events(OPENAI.parts("x"))) as server, SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(openai(server), store=store)
        failed = await runner.run(DAG([Task("a", "a", model="big", system="Be long.", temperature=0.0)]), "r")
        assert failed.status is RunStatus.FAILED
        result = await runner.resume("r", retry_failed=True)
        assert result.status is RunStatus.COMPLETED
        await runner.runs.continue_task("r", "a", "And?")
    assert [(body["model"], body["temperature"]) for body in server.bodies] == [("big", 0.0)] * 3
    assert {system_of(body) for body in server.bodies} == {"Be long."}


async def test_a_model_without_a_reported_name_is_priced_as_the_model_of_the_task() -> None:
    usage = {"prompt_tokens": 1_000_000, "completion_tokens": 0}
    whole = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage}
    async with serve(plain(200, whole)) as server:
        backend = OpenAIBackend("small", base_url=f"{server.url}/v1", stream=False)
        dag = DAG([Task("usual", "usual"), Task("own", "own", model="big")])
        result = await ParallelRunner(backend, prices={"small": Price(1, 1), "big": Price(9, 9)}).run(dag)
    assert {task.id: task.usage.cost_usd for task in result.tasks.values()} == {"usual": 1.0, "own": 9.0}


@pytest.mark.parametrize(
    "changed", [{"model": "other"}, {"system": "Other."}, {"temperature": 0.1}, {"temperature": None}]
)
async def test_each_setting_is_part_of_the_key_of_an_answer(tmp_path: Path, changed: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"model": "big", "system": "Be long.", "temperature": 0.0}
    async with serve(events(OPENAI.parts("x"))) as server, SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(openai(server), store=store)
        await runner.run(DAG([Task("a", "a", **settings)]), "first")
        await runner.run(DAG([Task("a", "a", **settings)]), like="first")
        assert len(server.bodies) == 1
        await runner.run(DAG([Task("a", "a", **settings | changed)]), like="first")
        assert len(server.bodies) == 2


async def _say(_prompt: str) -> str:
    raise AssertionError("nothing may be called")


@pytest.mark.parametrize(
    ("backend", "settings", "message"),
    [
        (_say, {"model": "m"}, "backend 'default' takes no model from a task (a task cannot set anything there)"),
        (_say, {"temperature": 0.0}, "backend 'default' takes no temperature from a task"),
        (LocalBackend(), {"model": "m"}, "takes no model from a task (a task may set system, temperature there)"),
    ],
)
async def test_a_setting_that_the_backend_does_not_have_is_refused_before_the_run(
    tmp_path: Path, backend: Backend, settings: dict[str, Any], message: str
) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(backend, store=store)
        dag = DAG([Task("b", "b"), Task("a", "a", **settings)])
        with pytest.raises(DAGError) as caught:
            await runner.run(dag)
        assert str(caught.value) == f"task 'a': {caught.value.problems[0].message}"
        assert message in str(caught.value)
        with pytest.raises(DAGError):
            await runner.runs.create(dag)
        assert not await store.list_runs()


@pytest.mark.parametrize("settings", [{"model": ""}, {"system": 3}, {"temperature": -1}, {"temperature": float("nan")}])
def test_a_wrong_setting_is_refused_by_the_graph(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(DAGError, match=f"{name} must be a"):
        DAG([Task("a", "a", **settings)])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model": "big"}, "an added task has no 'model' of its own; leave 'model' out"),
        ({"temperature": 1.5}, "backend 'default' takes no temperature from a task"),
    ],
)
async def test_an_added_task_has_no_model_and_no_unknown_setting(more: dict[str, Any], says: str) -> None:
    backend = talker({"plan": plan(spec("a", **more)), "These": plan(spec("a"))})
    result = await ParallelRunner(backend).run(DAG([Task("plan", "plan", adds_tasks=True)]))
    assert result.status is RunStatus.COMPLETED
    assert says in next(prompt for prompt in backend.prompts if prompt.startswith("These tasks cannot be added"))
