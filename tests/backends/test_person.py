"""A person as a task's backend: the prompt is asked, and the answer is the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait import DAG, ParallelRunner, PlaitError, RunStatus, Task, TaskStatus
from plait.backends import PersonBackend
from plait.backends.backend_specs import PersonSpec, build
from plait.persistence import Store
from tests.support.fakes import QuickClock, Talker

WORDS = Task("words", "draft")


def dag(approval: Task) -> DAG:
    return DAG([WORDS, approval, Task("sent", "{{ words }}: {{ approved }}", depends_on=["words", "approved"])])


@pytest.mark.parametrize(
    ("schema", "answer", "sent"), [(None, "fine", "re: draft: fine"), ({"type": "boolean"}, True, "re: draft: true")]
)
async def test_the_answer_is_the_result(store: Store, schema: object, answer: str | bool, sent: str) -> None:
    model = Talker()
    runner = ParallelRunner(model, backends={"boss": PersonBackend()}, store=store)
    approval = Task("approved", "Send {{ words }}?", ["words"], backend="boss", output_schema=schema)  # type: ignore[arg-type]
    first = await runner.run(dag(approval))
    assert (first.status, first.waiting) == (RunStatus.WAITING_INPUT, ("approved",))
    (question,) = await runner.runs.questions(first.run_id)
    assert question.asks is not None
    assert (question.question, question.asks.schema) == ("Send re: draft?", schema)
    if schema:
        with pytest.raises(PlaitError, match="does not fit the question"):
            await runner.resume(first.run_id, answers={"approved": "perhaps"})
    again = await runner.resume(first.run_id, answers={"approved": answer})
    assert (again.status, again["approved"].data, model.prompts) == (
        RunStatus.COMPLETED,
        answer if schema else None,
        ["draft", sent],
    )


@pytest.mark.parametrize(("default", "status"), [("no", TaskStatus.COMPLETED), (None, TaskStatus.FAILED)])
async def test_who_does_not_answer_in_time(store: Store, default: str | None, status: TaskStatus) -> None:
    boss = PersonBackend(default=default, deadline=60)
    runner = ParallelRunner(Talker(), backends={"boss": boss}, store=store, clock=QuickClock())
    result = await runner.run(dag(Task("approved", "Send?", backend="boss")))
    assert (result["approved"].status, result["approved"].text) == (status, default or "")


def test_it_is_had_from_a_plan(tmp_path: Path) -> None:
    backend = build(PersonSpec(kind="person", default=[1], deadline=5), folder=tmp_path)
    assert isinstance(backend, PersonBackend)
    assert (backend.default, backend.deadline) == ([1], 5)
