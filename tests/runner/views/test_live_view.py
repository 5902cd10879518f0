"""The rows of a run for the page: small, with the answer in cells, and with the attempts of a task tried again."""

from __future__ import annotations

from typing import Any

from plait import DAG, ParallelRunner, Retry, Task
from plait.clock_and_ids import Clock
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore
from plait.runner.views.live_view import LiveView

SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "score": {"type": "number"}, "why": {"type": "array"}},
}


async def rows(*tasks: Task) -> dict[str, dict[str, Any]]:
    """The rows of an ended run of `tasks`. The first call with `again` in its prompt fails."""
    refused: set[str] = set()

    async def work(prompt: str) -> object:
        if "again" in prompt and prompt not in refused:
            refused.add(prompt)
            raise BackendError(ErrorKind.TRANSIENT, "busy")
        return {"label": "x" * 500, "score": 2.5, "why": ["a", "b"]} if "data" in prompt else prompt

    store = MemoryStore()
    run = await ParallelRunner(work, store=store).run(DAG(tasks))
    view = LiveView(store, Clock(), run.run_id)
    return {row["id"]: row async for change in view.changes() for row in change.value.get("rows", ())}


async def test_an_answer_is_a_cell_or_the_fields_of_an_object() -> None:
    shown = await rows(Task("a", "one"), Task("b", "data", output_schema=SCHEMA))
    assert shown["a"]["answer"] == "one"
    cells = shown["b"]["answer"]
    assert (cells["score"], cells["why"]) == (2.5, '["a", "b"]')
    assert len(cells["label"]) == 120, "a row is small, however long the answer"


async def test_only_a_task_tried_again_has_its_attempts() -> None:
    shown = await rows(Task("a", "one"), Task("b", "again", retry=Retry(attempts=2, base_delay=0, max_delay=0)))
    assert "bars" not in shown["a"]
    (first, _, ends), (second, starts, _) = shown["b"]["bars"]
    assert (first, second) == ("retried", "completed")
    assert ends <= starts
