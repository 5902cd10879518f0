"""Functions whose parameters are named like tasks, inputs or the item receive their values beside the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from plait import DAG, MemoryStore, ParallelRunner, RunResult, Task
from plait.errors import DAGError
from plait.json_form import JsonInput


def length(prompt: str) -> dict[str, int]:
    return {"n": len(prompt)}


def echo(prompt: str) -> str:
    return prompt


def misspelt_beside_the_prompt(prompt: str, summry: str) -> str:
    return prompt + summry


def misspelt(summry: str) -> str:
    return summry


def of_no_dependency(other: str) -> str:
    return other


def of_no_part(prompt: str, item: str) -> str:
    return prompt + item


async def run(tasks: Sequence[Task], inputs: dict[str, JsonInput] | None = None, **functions: Any) -> RunResult:
    return await ParallelRunner(backends=functions, default=next(iter(functions))).run(DAG(tasks, inputs=inputs))


async def test_400_answers_of_3_000_characters_are_reduced_as_data() -> None:
    def listed() -> list[int]:
        return list(range(400))

    async def read(item: int) -> dict[str, JsonInput]:
        return {"number": item, "text": "x" * 3_000}

    def reduce(read: list[dict[str, Any]], factor: int, limit: int = 2) -> int:
        assert all(len(answer["text"]) == 3_000 for answer in read)
        return factor * limit * sum(answer["number"] for answer in read)

    tasks = [
        Task("listed", backend="listed"),
        Task("read", backend="read", for_each="listed"),
        Task("reduce", backend="reduce", depends_on=["read"]),
    ]
    result = await run(tasks, {"factor": 10}, listed=listed, read=read, reduce=reduce)
    assert result.error is None
    assert result["reduce"].data == 20 * sum(range(400))


async def test_names_that_are_no_identifiers_and_the_prompt_and_paired_parts() -> None:
    calls: list[tuple[str, Any, Any]] = []

    def work(prompt: str, *, my_task: str, item: str | None = None) -> str:
        calls.append((prompt, my_task, item))
        return "done"

    def items() -> list[str]:
        return ["a", "b"]

    def framed(text: str) -> str:
        return f"<{text}>"

    tasks = [
        Task("items", backend="items"),
        Task("my-task", "{{ item }}", backend="framed", for_each="items"),
        Task("work", "say {{ item }}", ["my-task"], backend="work", for_each="items"),
    ]
    assert (await run(tasks, framed=framed, items=items, work=work)).error is None
    assert sorted(calls) == [("say a", "<a>", "a"), ("say b", "<b>", "b")]


async def test_a_function_that_changes_a_value_changes_no_result() -> None:
    def one() -> list[int]:
        return [3, 1, 2]

    def two(one: list[int]) -> int:
        one.sort()
        return one.pop()

    def three(one: list[int], two: int) -> list[Any]:
        return [one, two]

    tasks = [Task("one", backend="one"), Task("two", "", "one", backend="two")]
    result = await run([*tasks, Task("three", "", "two", backend="three")], one=one, two=two, three=three)
    assert result["three"].data == [[3, 1, 2], 3]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            misspelt_beside_the_prompt,
            "the function has the parameter 'summry', which is neither a task nor an input; did",
        ),
        (misspelt, "the function has the parameter 'summry', which is neither a task nor an input; di"),
        (of_no_dependency, "the function has the parameter 'other', but 'other' is not upstream; add it to depends_on"),
        (of_no_part, "the function has the parameter 'item', which has a value only in a task with for_e"),
    ],
)
async def test_a_parameter_that_names_nothing_is_a_mistake(function: Any, says: str) -> None:
    tasks = [Task("summary", "x"), Task("other", "x"), Task("last", "", "summary", backend="function")]
    with pytest.raises(DAGError, match="last") as raised:
        await run(tasks, model=echo, function=function)
    assert says in str(raised.value)


async def test_the_only_parameter_may_have_any_name_and_takes_the_prompt() -> None:
    def shout(text: str) -> str:
        return text.upper()

    result = await run([Task("a", "hi"), Task("b", "{{ a }}!", "a", backend="other")], shout=shout, other=str.upper)
    assert (result["a"].text, result["b"].text) == ("HI", "HI!")


async def test_a_resume_needs_only_the_store_and_a_changed_value_runs_again() -> None:
    store, calls = MemoryStore(), list[Any]()

    def fails(prompt: str) -> str:
        raise ValueError(prompt)

    def reduce(rows: list[int], answer: dict[str, int]) -> int:
        calls.append((rows, answer))
        return sum(rows) + answer["n"]

    def runner(answer: Any) -> ParallelRunner:
        return ParallelRunner(backends={"answer": answer, "reduce": reduce}, default="answer", store=store)

    def dag(rows: list[int]) -> DAG:
        return DAG([Task("answer", "x"), Task("reduce", "", "answer", backend="reduce")], inputs={"rows": rows})

    async with store:
        first = await runner(fails).run(dag([1, 2]))
        result = await runner(length).resume(first.run_id, retry_failed=True)
        assert result["reduce"].data == 4
        (record,) = await store.list_tasks(first.run_id, "reduce")
        assert json.loads(record.spec)["arguments"] == ["rows", "answer"]
        like: dict[str, Any] = {"like": first.run_id}
        same = await runner(length).run(dag([1, 2]), **like)
        assert calls == [([1, 2], {"n": 1})]
        assert same["reduce"].data == 4
        preview = await runner(length).runs.preview_like(dag([5]), first.run_id)
        assert {step.task_id: step.reason for step in preview.tasks}["reduce"] == "input rows changed"
        await runner(length).run(dag([5]), **like)
    assert calls[1:] == [([5], {"n": 1})]
