"""The three facets of a store: all that it tells, and no way to write a part of it alone."""

from __future__ import annotations

import inspect

import pytest

from plait.events import NewTask, RunCreated
from plait.persistence import Batch, ContextStore, RunStore, Store, TaskStore

FACETS = (RunStore, TaskStore, ContextStore)


def methods(protocol: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")}


def test_a_store_is_all_three_and_what_it_has_beside_them_concerns_the_whole() -> None:
    assert set(FACETS) < set(Store.__mro__)
    told = set.union(*map(methods, FACETS))
    assert methods(Store) - told == {"write", "send", "list_notes"}


@pytest.mark.parametrize("facet", FACETS)
def test_no_facet_writes(facet: type) -> None:
    assert all(name.startswith(("get_", "list_")) for name in methods(facet))


async def test_every_store_serves_as_each_of_them(store: Store) -> None:
    async def look(runs: RunStore, tasks: TaskStore, context: ContextStore) -> list[int]:
        told = (await runs.list_events("r"), await tasks.list_attempts("r"), await context.list_messages("r", "a"))
        return [len(await context.list_tasks("r")), *map(len, told)]

    created = RunCreated("2026-11-21T23:00:00.000Z", "r", "", "{}", (NewTask("a", "p"),))
    await store.write(Batch("r", 0, 1, (created,)))
    assert await look(store, store, store) == [1, 1, 0, 0]
