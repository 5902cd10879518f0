"""`preview_like`: the preview of a run with `like=` says what the run then does."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends import Reply, Usage
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import BackendError, ErrorKind, RunNotFound, TaskNotFound
from plait.persistence import MemoryStore
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview
from plait.runner.state.run_state import RunState

LIST = {"type": "array"}


class Calls:
    """A backend that answers from a table, else with the prompt in brackets, and records the prompts."""

    session_id = None

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.made: list[str] = []

    def new_session_id(self) -> None:
        return None

    def answer_key(self) -> str:
        return "calls"

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Calls]:
        yield self

    async def send(self, prompt: str) -> Reply:
        self.made.append(prompt)
        answer = self.answers.get(prompt, f"<{prompt}>")
        if isinstance(answer, str):
            return Reply(answer, usage=Usage(1, 1, 0.25))
        if answer is None:
            raise BackendError(ErrorKind.REFUSED, "no")
        return Reply(json.dumps(answer), answer, usage=Usage(1, 1, 0.25))  # type: ignore[arg-type]


async def previewed(
    calls: Calls, before: DAG, after: DAG, fresh: Collection[str] = ()
) -> tuple[ReusePreview, list[str]]:
    """Run `before`, preview `after`, run `after`. Return the preview, and the calls of the second run."""
    runner = ParallelRunner(calls, store=MemoryStore(), concurrency=1)
    await runner.run(before, "first")
    calls.made.clear()
    preview = await runner.runs.preview_like(after, "first", fresh=fresh)
    assert calls.made == []
    result = await runner.run(after, "second", like="first", fresh=fresh)
    assert result.status is not RunStatus.INTERRUPTED
    return preview, calls.made


def actions(preview: ReusePreview) -> dict[str, str]:
    return {step.task_id: step.action.value for step in preview.tasks}


def reasons(preview: ReusePreview) -> dict[str, str]:
    return {step.task_id: step.reason for step in preview.tasks}


def chain(first: str, last: str = "c {{ b }}") -> DAG:
    return DAG([Task("a", first), Task("b", "b {{ a }}", ["a"]), Task("c", last, ["b"]), Task("d", "d")])


async def test_an_unchanged_plan_is_reused_with_the_date() -> None:
    preview, made = await previewed(Calls(), chain("a"), chain("a"))
    assert made == []
    assert set(actions(preview).values()) == {"reuse"}
    assert reasons(preview)["a"] == f"reused from first of {preview.created_at[:10]}"
    assert preview.cost(ReuseAction.RUN).cost_usd is None


async def test_a_changed_prompt_names_its_line_and_the_tasks_behind_depend_on_its_answer() -> None:
    preview, made = await previewed(Calls(), chain("one\ntwo\nthree"), chain("one\ntwo\nTHREE"))
    assert actions(preview) == {"a": "run", "b": "depends", "c": "depends", "d": "reuse"}
    assert reasons(preview)["a"] == "prompt changed: line 3"
    assert reasons(preview)["b"] == "runs unless a gives the same answer"
    assert reasons(preview)["c"] == "runs unless b gives the same answer"
    assert len(made) == 3
    assert preview.cost(ReuseAction.RUN).cost_usd == 0.25
    assert preview.cost(ReuseAction.DEPENDS).cost_usd == 0.5


async def test_the_same_answer_cuts_off_as_foretold() -> None:
    preview, made = await previewed(Calls(a="same", A="same"), chain("a"), chain("A"))
    assert actions(preview) == {"a": "run", "b": "depends", "c": "depends", "d": "reuse"}
    assert made == ["A"]


async def test_a_task_in_the_middle_leaves_the_tasks_before_it_alone() -> None:
    preview, made = await previewed(Calls(), chain("a"), chain("a", "C {{ b }}"))
    assert actions(preview) == {"a": "reuse", "b": "reuse", "c": "run", "d": "reuse"}
    assert made == ["C <b <a>>"]


async def test_the_cost_of_an_answer_that_was_taken_over_is_that_of_its_call() -> None:
    runner = ParallelRunner(Calls(), store=MemoryStore())
    await runner.run(chain("a"), "first")
    await runner.run(chain("a"), "second", like="first")
    preview = await runner.runs.preview_like(chain("A"), "second")
    assert preview.cost(ReuseAction.RUN).cost_usd == 0.25
    assert preview.cost(ReuseAction.DEPENDS).cost_usd == 0.5


async def test_of_an_earlier_run_that_used_nothing_no_task_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, plan = ParallelRunner(Calls(), store=MemoryStore()), chain("a")
    await runner.run(plan, "calls")
    for number, like in enumerate(["calls", "took-0", "took-1", "took-2"]):
        await runner.run(plan, f"took-{number}", like=like)
    read: list[str] = []
    list_tasks = MemoryStore.list_tasks

    async def noted(self: MemoryStore, run_id: str, *rest: Any, **options: Any) -> Any:
        read.append(run_id)
        return await list_tasks(self, run_id, *rest, **options)

    monkeypatch.setattr(MemoryStore, "list_tasks", noted)
    preview = await runner.runs.preview_like(chain("a", "c2 {{ b }}"), "took-3", fresh=["a"])
    assert read == ["took-3", "calls"]
    assert preview.cost(ReuseAction.RUN).cost_usd == 0.5


async def test_a_run_of_another_runner_takes_no_answer_over_because_a_preview_did() -> None:
    class Others(Calls):
        def answer_key(self) -> str:
            return "others"

    store, plan, others = MemoryStore(), chain("a"), Others()
    runner = ParallelRunner(Calls(), store=store)
    await runner.run(plan, "first")
    preview = await runner.runs.preview_like(plan, "first")
    assert set(actions(preview).values()) == {"reuse"}
    async with ParallelRunner(others, store=store, concurrency=1).start(plan, "second", like=preview) as run:
        await run.result()
    assert sorted(others.made) == ["a", "b <a>", "c <b <a>>", "d"]


async def test_fresh_tasks_run_again() -> None:
    preview, made = await previewed(Calls(), chain("a"), chain("a"), fresh=["b"])
    assert actions(preview) == {"a": "reuse", "b": "run", "c": "depends", "d": "reuse"}
    assert reasons(preview)["b"] == "asked to run again (fresh)"
    assert made == ["b <a>"]


async def test_fresh_parts_run_again_by_the_name_of_their_task_and_one_by_one() -> None:
    dag = DAG([Task("l", "l", output_schema=LIST), Task("t", "do {{ item }}", ["l"], for_each="l")])
    calls = Calls(l=["x", "y"])
    _, made = await previewed(calls, dag, dag, fresh=["t"])
    assert made == ["do x", "do y"]


async def test_an_order_without_a_name_in_the_prompt_is_no_reason_to_run() -> None:
    def dag(first: str) -> DAG:
        return DAG([Task("a", first), Task("b", "b", ["a"])])

    preview, made = await previewed(Calls(), dag("a"), dag("A"))
    assert actions(preview) == {"a": "run", "b": "reuse"}
    assert made == ["A"]


async def test_parts_and_planners_are_foretold() -> None:
    def dag(prompt: str) -> DAG:
        return DAG(
            [
                Task("l", prompt, output_schema=LIST),
                Task("t", "do {{ item }}", ["l"], for_each="l"),
                Task("end", "end {{ t }}", ["t"]),
                Task("p", "p", adds_tasks=True),
            ]
        )

    calls = Calls(one=["x", "y"], two=["x", "y"], p=[{"id": "n", "prompt": "n"}])
    preview, made = await previewed(calls, dag("one"), dag("two"))
    assert actions(preview) == {
        "l": "run",
        "t.1": "depends",
        "t.2": "depends",
        "end": "depends",
        "p": "run",
        "n": "depends",
    }
    assert reasons(preview)["p"] == "adds tasks"
    assert sorted(made) == ["p", "two"]


async def test_failed_new_and_effectful_tasks_have_their_reasons() -> None:
    before = DAG(
        [Task("a", "a", failure_mode="soft"), Task("b", "b {{ a }}", ["a"]), Task("m", "m", at_most_once=True)]
    )
    after = DAG([*before, Task("n", "n"), Task("o", "o {{ n }}", ["n"])])
    preview, made = await previewed(Calls(a=None), before, after)
    assert reasons(preview) | {"b": ""} == {
        "a": "failed in first",
        "b": "",
        "m": "has effects: at_most_once",
        "n": "new task",
        "o": "new task",
    }
    assert actions(preview)["b"] == "depends"
    assert "b " not in made


async def test_a_changed_input_schema_and_backend_are_named() -> None:
    def dag(topic: str, schema: dict[str, object] | None) -> DAG:
        tasks = [Task("a", "a {{ topic }}"), Task("b", "b", output_schema=schema)]
        return DAG(tasks, inputs={"topic": topic})

    calls = Calls(b=1)
    preview, _ = await previewed(calls, dag("x", {"type": "integer"}), dag("y", {"type": "number"}))
    assert reasons(preview) == {"a": "input topic changed", "b": "output schema changed"}


async def test_a_continued_conversation_depends_on_its_beginning() -> None:
    def dag(first: str) -> DAG:
        return DAG([Task("a", first), Task("b", "go on", continues="a"), Task("c", "and on", continues="b")])

    preview, made = await previewed(Calls(), dag("a"), dag("A"))
    assert reasons(preview) == {
        "a": "prompt changed: line 1",
        "b": "upstream a changed",
        "c": "upstream b changed",
    }
    assert made == ["A", "go on", "and on"]


async def test_a_conversation_may_be_long() -> None:
    def dag(first: str) -> DAG:
        talk = [Task(f"t{n}", "go on", continues=f"t{n - 1}") for n in range(1, 600)]
        return DAG([Task("t0", first), *talk, Task("end", "end", continues="t599", at_most_once=True)])

    runner = ParallelRunner(Calls(), store=MemoryStore())
    await runner.run(dag("a"), "first")
    preview = await runner.runs.preview_like(dag("a"), "first")
    assert reasons(preview)["end"] == "has effects: at_most_once"
    preview = await runner.runs.preview_like(dag("A"), "first")
    assert reasons(preview)["end"] == "upstream t599 changed"


async def test_unknown_names_are_refused() -> None:
    runner = ParallelRunner(Calls(), store=MemoryStore())
    with pytest.raises(RunNotFound, match="'gone'"):
        await runner.runs.preview_like(chain("a"), "gone")
    await runner.run(chain("a"), "first")
    with pytest.raises(TaskNotFound, match="no task 'bb'; did you mean 'b'"):
        await runner.runs.preview_like(chain("a"), "first", fresh=["bb"])
    with pytest.raises(TaskNotFound, match="no task 'bb'"):
        await runner.run(chain("a"), "second", like="first", fresh=["bb"])
    assert len(await runner.runs.options.store.list_runs()) == 1  # type: ignore[union-attr]


def gated(first: str, condition: str) -> DAG:
    return DAG([Task("a", first), Task("b", "b", ["a"], when=condition), Task("c", "c {{ b }}", ["b"])])


async def test_a_false_condition_is_decided_again_without_a_call() -> None:
    dag = gated("a", "{{ a }} == 'yes'")
    preview, made = await previewed(Calls(), dag, dag)
    assert actions(preview) == {"a": "reuse", "c": "reuse"}
    assert made == []


async def test_a_condition_behind_a_task_that_runs_again_is_said_to_depend_on_it() -> None:
    condition = "{{ a }} == 'yes'"
    preview, made = await previewed(Calls(A="yes"), gated("a", condition), gated("A", condition))
    assert actions(preview) == {"a": "run", "b": "depends", "c": "depends"}
    assert reasons(preview)["b"] == "skipped, unless a changes its condition"
    assert made == ["A", "b", "c <b>"]


async def test_a_changed_condition_is_a_reason_to_run() -> None:
    preview, made = await previewed(Calls(), gated("a", "{{ a }} != 'no'"), gated("a", "{{ a }} != 'yes'"))
    assert actions(preview) == {"a": "reuse", "b": "run", "c": "depends"}
    assert reasons(preview)["b"] == "condition changed"
    assert made == ["b"]


async def test_a_task_that_a_changed_list_or_condition_may_leave_out_runs_if_the_answer_is_the_same() -> None:
    def dag(first: str, words: str) -> DAG:
        return DAG(
            [
                Task("l", first, output_schema=LIST),
                Task("t", f"{words} {{{{ item }}}}", ["l"], for_each="l"),
                Task("c", words, ["l"], when="'x' in {{ l }}"),
            ]
        )

    calls = Calls(one=["x", "y"], two=["z"])
    preview, made = await previewed(calls, dag("one", "do"), dag("two", "make"))
    assert actions(preview) == {"l": "run", "t.1": "depends", "t.2": "depends", "c": "depends"}
    assert reasons(preview)["t.1"] == "prompt changed: line 1, if l gives the same answer"
    assert {step.task_id: (step.depends_on, step.runs_if_same) for step in preview.tasks} == {
        "l": ((), False),
        "t.1": (("l",), True),
        "t.2": (("l",), True),
        "c": (("l",), True),
    }
    assert made == ["two", "make z"]


async def test_nothing_runs_behind_a_condition_that_cannot_be_evaluated() -> None:
    dag = DAG([Task("a", "a"), Task("b", "b", ["a"], when="{{ a.ok }}"), Task("c", "c", ["b"])])
    runner = ParallelRunner(Calls(), store=MemoryStore())
    await runner.run(dag, "first")
    preview = await runner.runs.preview_like(dag, "first")
    assert actions(preview) == {"a": "reuse"}


async def test_answers_of_the_cache_are_foretold() -> None:
    calls = Calls()
    runner = ParallelRunner(calls, store=MemoryStore())
    await runner.run(DAG([Task("x", "a")]), "other")
    await runner.run(DAG([Task("b", "b")]), "first")
    after = DAG([Task("a", "a", cache=True), Task("b", "{{ a }}", ["a"], cache=True)])
    preview = await runner.runs.preview_like(after, "first")
    assert actions(preview) == {"a": "reuse", "b": "run"}
    assert reasons(preview)["a"] == "reused from other (cache)"
    preview = await runner.runs.preview_like(after, "first", fresh=["a"])
    assert actions(preview) == {"a": "run", "b": "depends"}
    assert reasons(preview)["b"] == "prompt changed: line 1, if a gives the same answer"


async def test_a_large_plan_in_which_all_changed_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, added_by = 0, RunState.added_by

    def counted(state: RunState, position: int) -> str | None:
        nonlocal asked
        asked += 1
        return added_by(state, position)

    runner, many = ParallelRunner(Calls(), store=MemoryStore()), range(300)
    await runner.run(DAG([Task(f"t{n}", f"{n}") for n in many]), "first")
    monkeypatch.setattr(RunState, "added_by", counted)
    preview = await runner.runs.preview_like(DAG([Task(f"t{n}", f"{n}!") for n in many]), "first")
    assert len(preview.steps(ReuseAction.RUN)) == len(many)
    assert asked <= 3 * len(many)
