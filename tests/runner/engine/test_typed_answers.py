"""`output=Model` on a task: the schema of the answer, and `value` of the result as an instance."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from plait import DAG, MemoryStore, ParallelRunner, Task
from plait.testing import FakeBackend


class Review(BaseModel):
    mood: str
    stars: int = 3


async def test_values_are_instances_and_prompts_and_the_store_have_the_data() -> None:
    answers: dict[str, Any] = {
        "one": {"mood": "good"},
        "list": ["a", "b"],
        "each.1": {"mood": "bad", "stars": 1},
        "each.2": {"mood": "good", "stars": 5},
        "last": "done",
    }
    fake = FakeBackend(answers)
    tasks = [
        Task("one", "x", output=Review),
        Task("list", "x"),
        Task("each", "{{ item }}", for_each="list", output=Review),
        Task("last", "{{ one.mood }} {{ each }}", ["one", "each"]),
    ]
    async with MemoryStore() as store:
        result = await ParallelRunner(fake, store=store).run(DAG(tasks))
        (record,) = await store.list_tasks(result.run_id, "one")
        stored = await ParallelRunner(fake, store=store).resume(result.run_id)
    assert result.error is None
    assert result["one"].value == Review(mood="good", stars=3)
    assert result["one"].data == stored["one"].value == {"mood": "good"}
    assert result["each"].value == [Review(mood="bad", stars=1), Review(mood="good", stars=5)]
    assert result["each.2"].value.stars == 5
    assert result["last"].value == "done"
    assert fake.calls[-1].prompt == 'good [{"mood": "bad", "stars": 1}, {"mood": "good", "stars": 5}]'
    assert json.loads(record.spec) == {"output_schema": Review.model_json_schema()}


async def test_an_answer_that_does_not_fit_the_model_fails() -> None:
    result = await ParallelRunner(FakeBackend({"a": {"stars": 1}})).run([Task("a", "x", output=Review, retry=0)])
    assert result["a"].error_kind == "invalid_output"


def test_a_schema_beside_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="task 'a' has both output and output_schema; leave one of them out"):
        Task("a", "x", output=Review, output_schema={"type": "object"})
