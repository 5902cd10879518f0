"""Bugs that the adoptions have to show, each planted by changing one thing while it is looked for."""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from plait.persistence.store_protocol import Store
from plait.runner.client import answer_task, continue_task
from plait.runner.engine import run_lifecycle
from plait.runner.recovery import resume_plan as verdict
from plait.runner.state import attempt_files as leftovers
from tests.faults.campaigns.adoption_plans import LAST, Script


def _started_over() -> AbstractContextManager[object]:
    return mock.patch.object(verdict, "outlives", return_value=False)


def _nothing_ended() -> AbstractContextManager[object]:
    async def end(_folder: Path, _keep: Collection[Path]) -> None:
        pass

    return mock.patch.object(leftovers, "_end_below", end)


def _wrong_turn_kept() -> AbstractContextManager[object]:
    """The attempt behind the one that is adopted is kept, and that one ended."""
    end_leftovers = run_lifecycle.kill_orphans

    async def end(store: Store | None, run_id: str, keep: Iterable[tuple[str, int]] = ()) -> None:
        await end_leftovers(store, run_id, [(task_id, attempt + 1) for task_id, attempt in keep])

    return mock.patch.object(run_lifecycle, "kill_orphans", end)


@contextmanager
def _all_ended_by_an_answer() -> Generator[None]:
    """So does what a person says in a conversation."""

    async def end(folder: Path) -> None:
        await leftovers.end_attempt(folder.parents[1])

    with (
        mock.patch.object(answer_task, "end_attempt", end),
        mock.patch.object(continue_task, "under_way", return_value=[]),
    ):
        yield


def _agents_with_strays_die(script: Script) -> Script:
    tasks = {"t8": _AT_WORK, **script.tasks}
    tasks = {task_id: {**task, "prompt": f"{task['prompt']} [[stray]]"} for task_id, task in tasks.items()}
    rounds = [replace(one, lasts=max(one.lasts, _LONG), dies=_WHICH) for one in script.rounds]
    return replace(script, tasks=tasks, rounds=rounds)


def _questions_beside_work(script: Script) -> Script:
    rounds = [replace(one, lasts=max(one.lasts, _LONG), answered=True) for one in script.rounds]
    return replace(script, tasks={"t8": _AT_WORK, "t9": _ASKS, **script.tasks}, rounds=rounds)


def _as_drawn(script: Script) -> Script:
    return script


_AT_WORK = {"id": "t8", "prompt": f"p8 [[until {LAST}]]", "retry_attempts": 1}
_ASKS = {"id": "t9", "prompt": "p9 [[ask Q9?]]", "retry_attempts": 1}
_LONG = 0.5  # seconds
_WHICH = 0.5


@dataclass(frozen=True, slots=True)
class Bug:
    planted: Callable[[], AbstractContextManager[object]]
    occasion: Callable[[Script], Script] = _as_drawn
    """Makes of a case one in which it is likely to show."""


BUGS = {
    "started over what it should adopt": Bug(_started_over),
    "leftovers not ended": Bug(_nothing_ended, _agents_with_strays_die),
    "the wrong turn kept": Bug(_wrong_turn_kept),
    "an answer ends who is at work": Bug(_all_ended_by_an_answer, _questions_beside_work),
}
