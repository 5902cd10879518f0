"""Answers and decisions of a person for a task of a run that no process executes."""

from __future__ import annotations

from plait import DAG, ParallelRunner, PersonBackend, Store, Task


async def test_an_answered_run_that_nobody_runs_is_due_for_a_worker(store: Store) -> None:
    runner = ParallelRunner(PersonBackend(), store=store)
    await runner.run(DAG([Task("a", prompt="Which one?")]), "r")
    assert await store.list_claimable() == ()
    assert await runner.runs.answer("r", "a", "this")
    assert [run.run_id for run in await store.list_claimable()] == ["r"]
