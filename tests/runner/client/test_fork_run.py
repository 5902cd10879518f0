"""`fork`: a new run from a point of a stored run, which stays as it is."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from plait import DAG, ParallelRunner, PlaitError, RunResult, RunStatus, Task
from plait.backends import Reply, Usage
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import BackendError, DAGError, ErrorKind, RunNotResumable, TaskNotFound
from plait.persistence import MemoryStore, SQLiteStore, Store
from plait.runner.client.create_run import Fork
from plait.runner.client.runs import earlier_runs_needed
from plait.workflows import FollowUp, FollowUps

LIST = {"type": "array"}


class Agent:
    """An agent without an answer key: answers from a table, else with the prompt in brackets; records the calls."""

    session_id = None

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.made: list[str] = []
        self.histories: list[list[str]] = []

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Agent]:
        self.histories.append([message.content for message in request.history])
        yield self

    async def send(self, prompt: str) -> Reply:
        self.made.append(prompt)
        answer = self.answers.get(prompt, f"<{prompt}>")
        if answer is None:
            raise BackendError(ErrorKind.REFUSED, "no")
        if isinstance(answer, str):
            return Reply(answer, usage=Usage(1, 1, 0.25))
        return Reply(json.dumps(answer), answer, usage=Usage(1, 1, 0.25))  # type: ignore[arg-type]

    def take(self) -> list[str]:
        made, self.made = self.made, []
        return made


def chain() -> DAG:
    tasks = [Task("a", "a {{ topic }}"), Task("b", "b {{ a }}", ["a"]), Task("c", "c {{ b }}", ["b"]), Task("d", "d")]
    return DAG(tasks, inputs={"topic": "x"})


async def ended(runner: ParallelRunner, fork: Fork) -> RunResult:
    """Run the fork, whose preview has to be right."""
    preview = await runner.runs.preview_fork(fork)
    async with runner.runs.start_fork(fork) as run:
        pass
    result = await run.result()
    reused = {step.task_id for step in preview.tasks if step.action.value == "reuse"}
    store = runner.runs.options.store
    assert store is not None
    attempts = {name: await store.list_attempts(run.run_id, name) for name in result.tasks}
    took = {name for name, tries in attempts.items() if tries and tries[0].backend.startswith(("reused", "given"))}
    assert reused <= took
    return result


async def first(agent: Agent, dag: DAG, status: RunStatus = RunStatus.COMPLETED) -> tuple[ParallelRunner, Store]:
    store = MemoryStore()
    runner = ParallelRunner(agent, store=store, concurrency=1)  # type: ignore[arg-type]
    result = await runner.run(dag, "first")
    assert result.status is status
    agent.take()
    return runner, store


async def test_a_fork_runs_the_task_and_everything_behind_it_and_keeps_the_rest() -> None:
    agent = Agent()
    runner, store = await first(agent, chain())
    before = await store.list_tasks("first")
    result = await ended(runner, await runner.runs.fork("first", "b"))
    assert agent.take() == ["b <a x>", "c <b <a x>>"]
    assert result.text["d"] == "<d>"
    assert result.usage.cost_usd == 0.5
    assert await store.list_tasks("first") == before


async def test_the_parent_is_stored_and_the_answers_name_it() -> None:
    runner, store = await first(Agent(), chain())
    result = await ended(runner, await runner.runs.fork("first", "b"))
    record = await store.get_run(result.run_id)
    assert record is not None
    assert json.loads(record.settings)["reuse"]["like"] == "first"
    (attempt,) = await store.list_attempts(result.run_id, "d")
    assert attempt.backend == "reused from first"


async def test_edits_of_prompts_inputs_and_results() -> None:
    agent = Agent()
    runner, _ = await first(agent, chain())
    result = await ended(runner, await runner.runs.fork("first", "c", prompts={"b": "B {{ a }}"}))
    assert agent.take() == ["B <a x>", "c <B <a x>>"]
    result = await ended(runner, await runner.runs.fork("first", "b", inputs={"topic": "y"}))
    assert agent.take() == ["a y", "b <a y>", "c <b <a y>>"]
    result = await ended(runner, await runner.runs.fork("first", "c", results={"b": "mine"}))
    assert agent.take() == ["c mine"]
    assert result.text["b"] == "mine"


async def test_a_given_result_fits_the_schema_of_its_task() -> None:
    agent = Agent(l=["x", "y"])
    dag = DAG([Task("l", "l", output_schema=LIST), Task("t", "do {{ item }}", ["l"], for_each="l")])
    runner, _ = await first(agent, dag)
    result = await ended(runner, await runner.runs.fork("first", "t", results={"l": '["x", "z"]'}))
    assert agent.take() == ["do x", "do z"]
    assert result["t"].data == ["<do x>", "<do z>"]
    with pytest.raises(PlaitError, match="does not fit its output_schema"):
        await runner.runs.fork("first", "t", results={"l": "{}"})
    with pytest.raises(PlaitError, match=r"give the results of parts: t\.1"):
        await runner.runs.fork("first", "t", results={"t": "[]"})


async def test_one_part_runs_and_the_others_are_kept() -> None:
    agent = Agent(l=["x", "y"])
    parts, end = Task("t", "do {{ item }}", ["l"], for_each="l"), Task("end", "end {{ t }}", ["t"])
    dag = DAG([Task("l", "l", output_schema=LIST), parts, end])
    runner, _ = await first(agent, dag)
    await ended(runner, await runner.runs.fork("first", "t.2"))
    assert agent.take() == ["do y", 'end ["<do x>", "<do y>"]']
    await ended(runner, await runner.runs.fork("first", "t"))
    assert agent.take() == ["do x", "do y", 'end ["<do x>", "<do y>"]']


async def test_parts_paired_over_one_list_are_kept_apart() -> None:
    agent = Agent(l=["x", "y"])
    one = Task("t", "do {{ item }}", ["l"], for_each="l")
    other = Task("u", "then {{ t }}", ["l", "t"], for_each="l")
    runner, _ = await first(agent, DAG([Task("l", "l", output_schema=LIST), one, other]))
    await ended(runner, await runner.runs.fork("first", "t.1"))
    assert agent.take() == ["do x", "then <do x>"]


async def test_a_planner_is_kept_with_its_tasks() -> None:
    agent = Agent(p=[{"id": "n", "prompt": "n {{ p }}", "depends_on": ["p"]}, {"id": "m", "prompt": "m"}])
    runner, _ = await first(agent, DAG([Task("p", "p", adds_tasks=True), Task("z", "z")]))
    result = await ended(runner, await runner.runs.fork("first", "z"))
    assert (agent.take(), set(result.text)) == (["z"], {"p", "z", "n", "m"})
    await ended(runner, await runner.runs.fork("first", "m"))
    assert agent.take() == ["m"]
    await ended(runner, await runner.runs.fork("first", "p"))
    assert [prompt[0] for prompt in sorted(agent.take())] == ["m", "n", "p"]
    with pytest.raises(PlaitError, match="made during the run"):
        await runner.runs.fork("first", "m", prompts={"m": "M"})


async def test_a_failed_run_goes_on_behind_the_repaired_task() -> None:
    agent = Agent(**{"b <a x>": None})
    runner, _ = await first(agent, chain(), RunStatus.FAILED)
    result = await ended(runner, await runner.runs.fork("first", "b", prompts={"b": "B {{ a }}"}))
    assert result.status is RunStatus.COMPLETED
    assert agent.take() == ["B <a x>", "c <B <a x>>"]


async def test_a_kept_conversation_is_continued_and_never_shared() -> None:
    agent = Agent()
    dag = DAG([Task("a", "a"), Task("b", "b", continues="a"), Task("c", "c", continues="b")])
    runner, _ = await first(agent, dag)
    agent.histories.clear()
    await ended(runner, await runner.runs.fork("first", "c"))
    assert agent.take() == ["c"]
    assert agent.histories == [["a", "<a>", "b", "<b>"]]


class Forking(Agent):
    """An agent that keeps sessions and can fork them."""

    can_fork = True

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[ConversationRequest] = []
        self.sessions = 0

    def new_session_id(self) -> str:  # type: ignore[override]
        self.sessions += 1
        return f"session-{self.sessions}"

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Agent]:
        self.requests.append(request)
        yield self


async def test_a_kept_session_is_forked_and_never_written_to() -> None:
    agent = Forking()
    runner, store = await first(agent, DAG([Task("a", "a"), Task("b", "b", continues="a")]))
    (kept,) = await store.list_tasks("first", "a")
    agent.requests.clear()
    await ended(runner, await runner.runs.fork("first", "b"))
    await ended(runner, await runner.runs.fork("first", "b", only=True))
    assert [(one.fork_of, one.resume) for one in agent.requests] == [(kept.session_id, False)] * 2
    assert kept.session_id not in {one.session_id for one in agent.requests}


async def test_a_fork_of_a_run_with_a_policy_keeps_what_the_policy_added() -> None:
    agent = Agent()
    policy = FollowUps({"writer": [FollowUp("review", "review {{ work }}")]})
    runner = ParallelRunner(agent, store=MemoryStore(), concurrency=1)  # type: ignore[arg-type]
    dag = DAG([Task("a", "a", metadata={"role": "writer"}), Task("b", "b", metadata={"role": "writer"})])
    result = await runner.run(dag, "first", policy=policy)
    added = sorted(set(result.tasks) - {"a", "b"})
    assert len(added) == 2
    agent.take()
    forked = await ended(runner, await runner.runs.fork("first", "b"))
    assert agent.take() == ["b", "review <b>"]
    assert set(forked.tasks) == set(result.tasks)


async def test_a_fork_that_is_cut_goes_on_from_the_store() -> None:
    agent = Agent()
    runner, store = await first(agent, chain())
    fork = await runner.runs.fork("first", "b", results={"d": "mine"})
    async with runner.runs.start_fork(fork) as run:
        async for event in run.events():
            if getattr(event, "task_id", None) == "b":
                run.stop()
    assert (await run.result()).status in {RunStatus.INTERRUPTED, RunStatus.COMPLETED}
    agent.take()
    result = await ParallelRunner(agent, store=store).resume(run.run_id)  # type: ignore[arg-type]
    assert result.status is RunStatus.COMPLETED
    assert result.text["d"] == "mine"
    assert not {"a x", "d"} & set(agent.take())


async def cut_at(runner: ParallelRunner, start: str, *tasks: str) -> str:
    """Make a fork, and stop it once one of `tasks` has started. Return its id."""
    async with runner.runs.start_fork(await runner.runs.fork("first", start)) as run:
        async for event in run.events():
            if event.kind == "task_started" and getattr(event, "task_id", None) in tasks:
                run.stop()
    return run.run_id


async def test_a_fork_that_keeps_tasks_behind_a_call_needs_its_parent_until_it_has_them(tmp_path: Path) -> None:
    """With one slot, a call comes before a kept task: something has begun, and not all is taken over."""
    agent, tasks = Agent(), [*chain().tasks, Task("pay", "pay", at_most_once=True)]
    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(agent, store=store, concurrency=1)  # type: ignore[arg-type]
        await runner.run(DAG(tasks, inputs={"topic": "x"}), "first")
        cut = await cut_at(runner, "a", "a")
        assert [task.status for task in await store.list_tasks(cut)][3:] == ["pending", "pending"]
        assert await earlier_runs_needed(store, await store.list_runs(9)) == {"first"}
        await store.purge(["first"])
        agent.take()
        with pytest.raises(RunNotResumable, match="which is deleted"):
            await runner.resume(cut)
        assert agent.take() == []


async def test_a_fork_that_has_taken_all_goes_on_without_its_parent(tmp_path: Path) -> None:
    """Also where the parent left a task undone, which no fork can keep."""
    agent = Agent(d=None)
    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(agent, store=store, concurrency=1)  # type: ignore[arg-type]
        assert (await runner.run(chain(), "first")).status is RunStatus.FAILED
        agent.answers = {}
        cut = await cut_at(runner, "c", "c")
        assert [task.status for task in await store.list_tasks(cut)][:2] == ["completed", "completed"]
        await store.purge(["first"])
        agent.take()
        result = await runner.resume(cut)
        assert result.status is RunStatus.COMPLETED
        assert {"c <b <a x>>"} <= set(agent.take()) <= {"c <b <a x>>", "d"}
        assert await earlier_runs_needed(store, await store.list_runs(9)) == set()


async def test_edits_that_do_not_fit_are_refused() -> None:
    runner, _ = await first(Agent(), chain())
    with pytest.raises(TaskNotFound, match="no task 'bb'"):
        await runner.runs.fork("first", "bb")
    with pytest.raises(TaskNotFound, match="no task 'bb'"):
        await runner.runs.fork("first", "b", prompts={"bb": "x"})
    with pytest.raises(TaskNotFound, match=r"^run first has no task 'other'; `plait show first` lists them$"):
        await runner.runs.fork("first", "other")
    with pytest.raises(PlaitError, match="there is no input 'topics'; did you mean 'topic'"):
        await runner.runs.fork("first", "b", inputs={"topics": "x"})
    with pytest.raises(DAGError, match="gone"):
        await runner.runs.fork("first", "b", prompts={"b": "{{ gone }}"})
    with pytest.raises(DAGError, match="task 'b': there is no prompt; write one"):
        await runner.runs.fork("first", "b", prompts={"b": " "})
    with pytest.raises(DAGError, match="task 'b': there is no prompt; write one"):
        await runner.runs.fork("first", "b", prompts={"b": ""}, only=True)


async def test_a_task_is_tried_on_its_recorded_inputs() -> None:
    agent = Agent()
    runner, store = await first(agent, chain())
    before = await store.list_tasks("first")
    result = await ended(runner, await runner.runs.fork("first", "c", only=True))
    assert (agent.take(), result.text["c"]) == (["c <b <a x>>"], "<c <b <a x>>>")
    assert set(result.tasks) == {"b", "c"}
    result = await ended(
        runner, await runner.runs.fork("first", "b", prompts={"b": "better {{ a }} {{ topic }}"}, only=True)
    )
    assert (agent.take(), result.text["b"]) == (["better <a x> x"], "<better <a x> x>")
    assert await store.list_tasks("first") == before


async def test_a_part_a_conversation_and_a_planner_are_tried() -> None:
    agent = Agent(l=["x", "y"], p=[{"id": "n", "prompt": "n"}])
    listed = Task("l", "l", output_schema=LIST)
    parts, end = Task("t", "do {{ item }}", ["l"], for_each="l"), Task("end", "end {{ t }}", ["t"])
    talk = Task("talk", "more {{ end }}", ["end"], continues="l")
    runner, _ = await first(agent, DAG([listed, parts, end, talk, Task("p", "p", adds_tasks=True)]))
    agent.histories.clear()
    await ended(runner, await runner.runs.fork("first", "t.2", prompts={"t.2": "Do {{ item }}"}, only=True))
    await ended(runner, await runner.runs.fork("first", "end", only=True))
    await ended(runner, await runner.runs.fork("first", "talk", only=True))
    result = await ended(runner, await runner.runs.fork("first", "p", only=True))
    assert agent.take() == ["Do y", 'end ["<do x>", "<do y>"]', 'more <end ["<do x>", "<do y>"]>', "p"]
    assert agent.histories[2] == ["l", '["x", "y"]']
    assert set(result.tasks) == {"p"}
    with pytest.raises(PlaitError, match=r"try one of them: t\.1"):
        await runner.runs.fork("first", "t", only=True)


async def test_a_task_behind_a_soft_failure_and_one_without_inputs_are_tried() -> None:
    agent = Agent(s=None)
    tasks = [Task("s", "s", failure_mode="soft"), Task("b", "b {{ s }}", ["s"]), Task("c", "c {{ b }}", ["b"])]
    runner, _ = await first(agent, DAG(tasks), RunStatus.FAILED)
    await ended(runner, await runner.runs.fork("first", "b", only=True))
    await ended(runner, await runner.runs.fork("first", "c", only=True))
    assert agent.take() == ["b ", "c <b >"]
    agent = Agent(**{"a x": None})
    runner, _ = await first(agent, chain(), RunStatus.FAILED)
    with pytest.raises(PlaitError, match=r"task 'a' of run first has no result yet \(failed\)"):
        await runner.runs.fork("first", "b", only=True)


async def test_a_task_is_tried_on_another_backend() -> None:
    one, other, store = Agent(), Agent(a="other"), MemoryStore()
    runner = ParallelRunner(backends={"one": one, "other": other}, default="one", store=store)  # type: ignore[dict-item]
    await runner.run(DAG([Task("a", "a")]), "first")
    result = await ended(runner, await runner.runs.fork("first", "a", only=True, backend="other"))
    assert result.text["a"] == "other"
