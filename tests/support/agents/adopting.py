"""Runs of agents that outlive their runner, resumed and looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from plait import ParallelRunner, Run, events
from plait.results import Preview
from tests.support.agents.outliving import RUN, World


async def foretold(world: World, **options: Any) -> Preview:
    async with world.store() as store:
        return await ParallelRunner(world.backend, store=store, **options).runs.preview(RUN)


async def resumed(world: World, on_event: Callable[[events.Event, Run], None] = lambda *_: None, **options: Any) -> Any:
    """The run's result, and what it told."""
    told: list[events.Event] = []
    async with world.store() as store, ParallelRunner(world.backend, store=store, **options).start_resume(RUN) as run:
        async for event in run.events():
            told.append(event)
            on_event(event, run)
        return await run.result(), told


def is_adopted(event: events.Event) -> TypeGuard[events.TaskStarted]:
    return isinstance(event, events.TaskAdopted)


def allow_once_adopted(world: World, name: str) -> Callable[[events.Event, Run], None]:
    def on_event(event: events.Event, _run: Run) -> None:
        if is_adopted(event):
            world.allow(name)

    return on_event


async def history(world: World) -> list[str]:
    async with world.store() as store:
        return [event.kind for event in await store.list_events(RUN)]


async def said_in(world: World, task_id: str) -> list[tuple[int, str, str]]:
    async with world.store() as store:
        return [(m.attempt, m.role, m.content) for m in await store.list_messages(RUN, task_id)]
