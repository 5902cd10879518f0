"""`fork` from every task of finished, failed and cut runs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from plait import DAG, OpenQuestion, ParallelRunner, PlaitError, RunStatus, Task
from plait.backends import PersonBackend, Reply
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import BackendError, ErrorKind
from plait.events import TaskCompleted
from plait.persistence import MemoryStore
from plait.runner.client.create_run import Fork
from plait.statuses import TaskStatus
from tests.support.sizes import size

ANSWERS: dict[str, object] = {
    "l": ["x", "y", "z"],
    "plan": [{"id": "n", "prompt": "n"}, {"id": "o", "prompt": "o {{ n }}", "depends_on": ["n"]}],
}
ENDS = size(["completed", "cut early"], ["completed", "failed", "cut early", "cut late"])
NAMES = ["a", "b", "l", "t", "t.1", "t.2", "t.3", "u", "soft", "plan", "n", "o", "no", "yes", "talk", "sign", "end"]


class Model:
    """Answers from a table, else with the prompt in brackets; records the calls, and refuses the prompts in `fails`."""

    session_id = None

    def __init__(self) -> None:
        self.made: list[str] = []
        self.fails = {"soft"}

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Model]:
        yield self

    async def send(self, prompt: str) -> Reply:
        self.made.append(prompt)
        if prompt in self.fails:
            raise BackendError(ErrorKind.REFUSED, "no")
        answer = ANSWERS.get(prompt, f"<{prompt}>")
        return Reply(answer) if isinstance(answer, str) else Reply(json.dumps(answer), answer)  # type: ignore[arg-type]

    async def person(self, question: OpenQuestion) -> str:
        self.made.append(question.text)
        return "yes"


def dag() -> DAG:
    return DAG(
        [
            Task("a", "a"),
            Task("b", "b {{ a }}", ["a"]),
            Task("l", "l", ["b"], output_schema={"type": "array"}),
            Task("t", "t {{ item }}", ["l"], for_each="l"),
            Task("u", "u {{ t }}", ["t"]),
            Task("soft", "soft", failure_mode="soft"),
            Task("plan", "plan", ["soft"], adds_tasks=True),
            Task("no", "no", ["a"], when="{{ a }} == 'no'"),
            Task("yes", "yes {{ no }}", ["no"], when="{{ a }} != 'no'"),
            Task("talk", "talk", ["yes"], continues="a"),
            Task("sign", "sign {{ talk }}", ["talk"], "person"),
            Task("end", "end {{ u }} {{ sign }}", ["u", "sign", "plan"]),
        ]
    )


async def made(end: str) -> tuple[ParallelRunner, Model]:
    """Return a runner and its model, after a run "first" that ended in this way."""
    model = Model()
    runner = ParallelRunner(
        backends={"model": model, "person": PersonBackend()},  # type: ignore[dict-item]
        default="model",
        store=MemoryStore(),
        on_question=model.person,
        concurrency=1,
    )
    if end == "failed":
        model.fails.add("t y")
    run = runner.start(dag(), "first")
    last = {"cut early": "b", "cut late": "talk"}.get(end)
    async with run:
        async for event in run.events():
            if isinstance(event, TaskCompleted) and event.task_id == last:
                run.stop()
    await run.result()
    model.fails.discard("t y")
    model.made.clear()
    return runner, model


async def snapshot(runner: ParallelRunner, run_id: str = "first") -> object:
    store = runner.runs.options.store
    assert store is not None
    return await store.get_run(run_id), await store.list_tasks(run_id), await store.list_attempts(run_id)


async def called(runner: ParallelRunner, fork: Fork) -> tuple[str, set[str]]:
    """Run the fork. Return its id and the tasks that were called, which have to be those of the preview."""
    preview = await runner.runs.preview_fork(fork)
    async with runner.runs.start_fork(fork) as run:
        pass
    assert (await run.result()).status in {RunStatus.COMPLETED, RunStatus.FAILED}
    store = runner.runs.options.store
    assert store is not None
    attempts = await store.list_attempts(run.run_id)
    made = {one.task_id for one in attempts if one.backend in {"model", "person"}}
    actions = {action: {step.task_id for step in preview.tasks if step.action == action} for action in ("run", "reuse")}
    assert actions["run"] - {"t"} <= made  # t stands for parts of a list that is not known yet
    assert not actions["reuse"] & made
    return run.run_id, made


@pytest.mark.parametrize("end", ENDS)
async def test_a_fork_from_every_task(end: str) -> None:
    runner, model = await made(end)
    store = runner.runs.options.store
    assert store is not None
    before, tasks = await snapshot(runner), {one.task_id: one for one in await store.list_tasks("first")}
    done = {name for name, one in tasks.items() if one.status == TaskStatus.COMPLETED}
    for start in NAMES:
        if start not in tasks:
            with pytest.raises(PlaitError, match=f"no task '{start}'"):
                await runner.runs.fork("first", start)
            continue
        model.made.clear()
        run_id, made_tasks = await called(runner, await runner.runs.fork("first", start))
        forked = {one.task_id: one for one in await store.list_tasks(run_id)}
        assert forked.keys() >= tasks.keys()
        assert {one.status for one in forked.values()} <= {"completed", "failed", "skipped"}
        assert {name for name, one in forked.items() if one.status == "failed"} == {"soft"}
        assert forked[start].status == "skipped" or start == "t" or start in made_tasks
        # A completed task is called again only as the start, behind the start, or behind a task that had not completed.
        roots = {start} | (tasks.keys() - done)
        for name in made_tasks & done - {start}:
            assert behind(name) & roots or start == "t", (start, name)
        assert await snapshot(runner) == before


def behind(name: str) -> set[str]:
    """Return every task before `name`, by the plan."""
    graph = {"n": {"plan"}, "o": {"n", "plan"}, **{f"t.{number}": {"l"} for number in (1, 2, 3)}}
    graph |= {task.id: set(task.upstream) for task in dag()}
    graph["u"] |= {"t.1", "t.2", "t.3"}
    found, waiting = set[str](), [name]
    while waiting:
        for before in graph[waiting.pop()] - found:
            found.add(before)
            waiting.append(before)
    return found


@pytest.mark.parametrize("end", ENDS)
async def test_every_task_is_tried(end: str) -> None:
    runner, model = await made(end)
    store = runner.runs.options.store
    assert store is not None
    before, tasks = await snapshot(runner), {one.task_id for one in await store.list_tasks("first")}
    tried = 0
    for name in NAMES:
        if name not in tasks:
            with pytest.raises(PlaitError, match=f"no task '{name}'"):
                await runner.runs.fork("first", name, only=True)
            continue
        model.made.clear()
        try:
            fork = await runner.runs.fork("first", name, only=True)
        except PlaitError as error:
            assert "has no result yet" in str(error) or name == "t"  # noqa: PT017 - some tasks cannot be tried yet
            continue
        _, made_tasks = await called(runner, fork)
        assert made_tasks == ({name} if name != "no" else set())
        assert len(model.made) == (name != "no")
        tried += 1
    assert await snapshot(runner) == before
    assert tried >= (3 if end == "cut early" else 8)
