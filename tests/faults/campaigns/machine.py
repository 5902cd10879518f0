"""The state machine: SQLite and a model driven side by side by Hypothesis, with crashes and errors within.

It is the one of tests/persistence/test_state_machine.py, with more and longer stories, and other ones for each seed.
"""

from __future__ import annotations

import contextlib
import io
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from plait.events import TaskCompleted, TaskStarted
from plait.persistence import sqlite_store
from plait.persistence.apply_events import TaskState, _Applier
from plait.usage import Usage
from tests.contracts.store.samples import TASKS, at
from tests.faults.campaigns.report import Report, Scale
from tests.persistence.test_state_machine import RUNS, SAID, TEXTS, StoreMachine

STORIES: dict[Scale, int] = {"quick": 30, "nightly": 1_000}
STEPS: dict[Scale, int] = {"quick": 25, "nightly": 60}
"""In each story at most."""
PLANTED_STORIES = 200
"""Stories tried at most until a planted bug shows."""


class Machine(StoreMachine):
    """The machine, with results that are told once more and otherwise. Counts the stories."""

    told = 0

    def __init__(self) -> None:
        type(self).told += 1
        super().__init__()

    @initialize(run_id=st.sampled_from(RUNS), done=st.integers(0, len(TASKS)))
    def begin(self, run_id: str, done: int) -> None:
        """Some stories begin in the middle of a run."""
        for task in TASKS[:done]:
            self.add(run_id, TaskStarted(at(2), task.task_id, 1, "default"))
            self.add(run_id, TaskCompleted(at(3), task.task_id, 1, "short"))

    @rule(run_id=st.sampled_from(RUNS), data=st.data(), said=SAID)
    def complete_again(self, run_id: str, data: st.DataObject, said: str) -> None:
        tasks = [task for task in self.do(self.model.list_tasks(run_id)) if task.status == "completed"]
        if tasks:
            task = data.draw(st.sampled_from(tasks))
            self.add(run_id, TaskCompleted(at(6), task.task_id, task.attempt, TEXTS[said], None, Usage(5, 6, 0.5), 1.5))


def run(*, scale: Scale, seed: int = 0) -> Report:
    """As many stories as `scale` says, and the planted bugs. Stories are told until the first one breaks."""
    began = time.monotonic()
    wrong, told = _stories(STORIES[scale], STEPS[scale], seed)
    return Report(
        method="state machine",
        unit="stories of a store",
        cases=told,
        violations=(wrong,) if wrong else (),
        planted={bug: is_caught(bug, seed) for bug in BUGS},
        seconds=time.monotonic() - began,
    )


def is_caught(bug: str, seed: int = 0) -> bool:
    """Whether some story shows the planted bug."""
    with BUGS[bug]():
        return bool(_stories(PLANTED_STORIES, STEPS["quick"], seed, Phase.generate)[0])


def _stories(count: int, steps: int, seed: int, *phases: Phase) -> tuple[str, int]:
    """What broke, with the shortest story that Hypothesis found, and how many were told."""
    before = Machine.told
    chosen = settings(
        max_examples=count,
        stateful_step_count=steps,
        phases=phases or (Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_state_machine_as_test(seeded(seed)(Machine), settings=chosen, _min_steps=0)
    except Exception as error:  # whatever it is, it is what the story came to
        told = "; ".join("".join([str(error)[:500], *getattr(error, "__notes__", [])]).split("\n"))
        return f"seed {seed}: {type(error).__name__}: {told[:3000]}", Machine.told - before
    return "", Machine.told - before


def _results_replaced() -> AbstractContextManager[object]:
    """A result that comes a second time takes the place of the one that is stored."""

    def require(self: Any, change: Any, _attempt: int | None = None, **_: bool) -> TaskState:
        self._touch(change.task_id)
        state: TaskState = self._state_of(change.task_id)
        return state

    return mock.patch.object(_Applier, "_require", require)


def _no_transaction() -> AbstractContextManager[object]:
    """Each statement of a batch is a transaction of its own."""

    def transaction(_connection: sqlite3.Connection, _begin: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    return mock.patch.object(sqlite_store, "transaction", transaction)


BUGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a stored result replaced": _results_replaced,
    "a batch without a transaction": _no_transaction,
}
