"""What is read of a stored run."""

from __future__ import annotations

import pytest

from plait import DAG, MemoryStore, Task
from plait.events import RunCreated
from plait.json_form import to_json
from plait.persistence.store_records import Batch
from plait.runner.state.stored_run import SETTINGS_FORMAT, stored_run

AT = "2026-11-21T23:00:00.000Z"


async def test_a_run_is_read_with_the_tasks_of_a_plan_that_have_the_same_rows() -> None:
    async with MemoryStore() as store:
        stored = DAG([Task("a", "p", item={"n": 1}), Task("b", "p", item={"n": 1}), Task("c", "p", ["a"])])
        await store.write(
            Batch("r", 0, 1, (RunCreated(AT, "r", "", to_json({"format": SETTINGS_FORMAT}), stored.stored[1]),))
        )
        same, other = Task("a", "p", item={"n": 1}), Task("b", "p", item={"n": True})
        run = await stored_run(store, "r", plan=DAG([same, other, Task("c", "p")]))
        assert run.state.dag["a"] is same
        assert [to_json(task.item) for task in run.state.dag] == ['{"n":1}', '{"n":1}', "null"]
        assert run.state.dag["c"].upstream == ("a",)


@pytest.mark.parametrize("last", ["{{ item }} {{ a }}", "{{ item }}"])
async def test_a_run_keeps_its_own_graph_where_a_plan_has_other_items_or_another_prompt(last: str) -> None:
    def graph(name: str, number: int, last: str) -> DAG:
        part = Task("c", last, ["b"], item={"n": number})
        return DAG([Task("a", "p"), Task("b", "p", ["a"]), part], name=name, inputs={"n": number})

    stored, plan = graph("stored", 1, "{{ item }} {{ a }}"), graph("plan", 2, last)
    async with MemoryStore() as store:
        settings = to_json({"format": SETTINGS_FORMAT, "inputs": stored.inputs})
        await store.write(Batch("r", 0, 1, (RunCreated(AT, "r", "stored", settings, stored.stored[1]),)))
        dag = (await stored_run(store, "r", plan=plan)).state.dag
    assert (dag.name, dag.inputs, dag["c"].item, plan["c"].item) == ("stored", {"n": 1}, {"n": 1}, {"n": 2})
    assert [list(dag.needed(position)) for position in range(3)] == [[], [0], [1, 0]]
    assert [list(dag.needed_by(position)) for position in range(3)] == [[1, 2], [2], []]
