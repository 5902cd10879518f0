"""`plait.testing.FakeBackend`: answers by task, by rule or of a stored run, in place of any backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait import DAG, BackendError, ErrorKind, MemoryStore, ParallelRunner, RunResult, Task
from plait.testing import FakeBackend

SCHEMA: Mapping[str, object] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def framed(prompt: str) -> str:
    return f"<{prompt}>"


async def run(fake: FakeBackend, *tasks: Task) -> RunResult:
    return await ParallelRunner(fake).run(DAG(tasks))


async def test_answers_by_task_by_part_and_by_rule() -> None:
    async def count(prompt: str) -> int:
        return len(prompt)

    fake = FakeBackend({"list": ["a", "b"], "part": "any", "part.2": framed, "count": count}, rule=str.upper)
    result = await run(
        fake,
        Task("list", "x"),
        Task("part", "{{ item }}", for_each="list"),
        Task("count", "four"),
        Task("other", "hi", model="large", system="s", temperature=0.5),
    )
    values = {name: task.value for name, task in result.tasks.items()}
    assert values == {
        "list": ["a", "b"],
        "part": ["any", "<b>"],
        "count": 4,
        "other": "HI",
        "part.1": "any",
        "part.2": "<b>",
    }
    (call,) = [call for call in fake.calls if call.task_id == "other"]
    assert (call.prompt, call.options.model, call.options.temperature) == ("hi", "large", 0.5)


async def test_failures_and_what_does_not_fit_are_those_of_a_backend() -> None:
    answers: dict[str, Any] = {"a": BackendError(ErrorKind.AUTH, "no key"), "b": {"m": 1}, "c": '{"n": 2}'}
    tasks = [Task(name, "x", output_schema=None if name == "a" else SCHEMA, retry=0) for name in ("a", "b", "c", "d")]
    result = await run(FakeBackend(answers), *tasks)
    kinds = [result[name].error_kind for name in ("a", "b", "c", "d")]
    assert kinds == ["auth", "invalid_output", None, "invalid_request"]
    assert result["c"].data == {"n": 2}
    assert str(result["d"].error).startswith("there is no answer for task 'd'; give FakeBackend({'d': ...}), or a rule")


async def test_a_stored_run_is_replayed_without_its_backends() -> None:
    tasks = [Task("a", "x"), Task("b", "{{ a.n }}", "a")]
    async with MemoryStore() as store:
        first = await ParallelRunner(FakeBackend({"a": {"n": 7}, "b": "seven"}), store=store).run(DAG(tasks))
        fake = await FakeBackend.of_run(store, first.run_id)
    result = await run(fake, *tasks)
    assert {name: task.value for name, task in result.tasks.items()} == {"a": {"n": 7}, "b": "seven"}
    assert [call.prompt for call in fake.calls] == ["x", "7"]
