"""Hypothesis drives a SQLite store through any changes, crashes and errors, beside a model that has none.

`python -m tests.faults.campaigns --nightly` tries much more, and other things for each seed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait import failpoints
from plait.errors import Conflict, StoreError
from plait.events import (
    BackendThrottled,
    Event,
    HostAway,
    LeaseRenewed,
    NewTask,
    NodeStarted,
    PolicyDecided,
    RunClaimed,
    RunReleased,
    SessionOpened,
    TaskCompleted,
    TaskPlaced,
    TaskReopened,
    TasksAdded,
    TaskStarted,
)
from plait.persistence import Batch, SQLiteStore
from tests.contracts.store.samples import LEGAL, OPENING, TASKS, at, message, owner, run_becomes, status_changes, whole
from tests.support.sizes import size
from tests.support.stores.model_store import ModelStore

pytestmark = pytest.mark.slow

T = TypeVar("T")

RUNS = ("run-1", "run-2")
TEXTS = {"none": "", "short": "short", "odd": "\U0001f311 odd \0 text", "large": "a large text " * 6000}
SAID = st.sampled_from(list(TEXTS))
STATUSES = st.sampled_from(["running", "waiting_input", "completed", "failed", "cancelling", "cancelled"])
NAMES = st.sampled_from(["txn.begun", "txn.before_commit", "txn.after_commit"])
ENDED = {"completed", "failed", "cancelled"}


def task_changes(task_id: str, attempt: int, text: str, flag: bool) -> dict[str, Event]:
    """Every change of a task, with `attempt` as the last one."""
    return {
        "session": SessionOpened(at(3), task_id, attempt if flag else 0, text[:20]),
        "place": TaskPlaced(at(3), task_id, attempt, text[:20], interrupted=flag),
        "node": NodeStarted(at(3), task_id, attempt, text[:20]),
        "throttle": BackendThrottled(at(3), text[:20], None if flag else at(4), "429", attempt, 9),
        "away": HostAway(at(3), text[:20], None if flag else at(2), text[:20], () if flag else (task_id,)),
        "turn": message(at(3), task_id, attempt, "assistant", text, 1, 2),
        **status_changes(task_id, attempt, text, flag=flag),
    }


FOLLOWS = {
    "pending": (*["start"] * 9, "cancel"),
    "running": (
        *["complete", "complete its prompt", "turn", "session", "place", "node", "throttle", "away"] * 3,
        *["retry", "interrupt", "wait", "ask"] * 3,
        "fail",
        "skip",
        "cancel",
    ),
    "waiting_input": ("answer", "complete", "fail", "skip", "cancel", "turn"),
    "completed": ("reopen as damaged", "session", "turn"),
    "failed": ("reopen", "session"),
    "skipped": ("turn",),
    "cancelled": ("turn",),
}
BECOMES = {name: status for legal in LEGAL.values() for name, status in legal.items()}
NEW_TASKS = st.builds(
    NewTask, st.sampled_from("cdefgh"), st.just("p"), st.lists(st.sampled_from("abcdefg"), max_size=2).map(tuple)
)
ONE = st.tuples(st.integers(0, 5), st.integers(0, 1000), SAID, st.booleans())
STEPS = st.tuples(st.lists(ONE, min_size=2, max_size=12), st.sampled_from([False] * 5 + [True]))
"""What changes, and whether the last change need not follow."""


class PlantedError(Exception):
    """What a boundary raises."""


class StoreMachine(RuleBasedStateMachine):
    """One database file, and what it has to say."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.copies = 0
        self.path = Path(self.folder.name) / "0.db"
        self.store = SQLiteStore(self.path)
        self.model = ModelStore()
        self.written: list[Batch] = []
        self.do(self.store.__aenter__())

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(call)

    def teardown(self) -> None:
        failpoints.on_reach = None
        self.do(self.store.close())
        self.loop.close()
        self.folder.cleanup()

    def write(self, batch: Batch) -> None:
        """The same outcome in both stores."""
        expected = self.outcome(self.model, batch)
        assert self.outcome(self.store, batch) == expected, batch
        if expected is None:
            self.written.append(batch)

    def add(self, run_id: str, change: Event) -> None:
        batch = self.next_batch(run_id)
        self.write(replace(batch, events=(*batch.events, change)))

    def outcome(self, store: SQLiteStore | ModelStore, batch: Batch) -> type | None:
        try:
            self.do(store.write(batch))
        except (StoreError, PlantedError) as error:
            return type(error)
        return None

    def next_batch(self, run_id: str, steps: Any = ((), False)) -> Batch:
        """A batch that goes on where the run is, or begins it."""
        run, tasks = self.do(self.model.get_run(run_id)), self.do(self.model.list_tasks(run_id))
        attempts = {task.task_id: task.attempt for task in tasks}
        statuses = {task.task_id: task.status for task in tasks}
        changes: list[Event] = [] if run else list(OPENING)
        ids = list(statuses) or [task.task_id for task in TASKS]
        for number, (which, pick, said, flag) in enumerate(steps[0], 1):
            task_id = ids[which % len(ids)]
            wild = steps[1] and number == len(steps[0])
            status = statuses.get(task_id, "pending")
            possible = task_changes(task_id, attempts.get(task_id, 0) + (wild and flag), TEXTS[said], flag)
            names = list(possible) if wild else FOLLOWS[status]
            name = names[pick % len(names)]
            changes.append(possible[name])
            attempts[task_id] = attempts.get(task_id, 0) + (name == "start")
            statuses[task_id] = BECOMES.get(name, status)
        return Batch(run_id, run.epoch if run else 0, run.last_seq + 1 if run else 1, tuple(changes))

    def reopen(self, copy: Path) -> None:
        self.do(self.store.close())
        self.path, self.store = copy, SQLiteStore(copy, mode="existing")
        self.do(self.store.__aenter__())

    def copied(self) -> Path:
        """The files as a process that dies now would leave them."""
        self.copies += 1
        copy = Path(self.folder.name) / f"{self.copies}.db"
        for end in ("", "-wal"):
            shutil.copy(f"{self.path}{end}", f"{copy}{end}")
        return copy

    @rule(run_id=st.sampled_from(RUNS))
    def create(self, run_id: str) -> None:
        self.write(Batch(run_id, 0, 1, OPENING))

    @rule(run_id=st.sampled_from(RUNS), of=st.sampled_from(RUNS))
    def take_over(self, run_id: str, of: str) -> None:
        """Every pending task takes the answer of the completed task of the same name."""
        here = {task.task_id: task for task in self.do(self.model.list_tasks(run_id))}
        for there in self.do(self.model.list_tasks(of)):
            task = here.get(there.task_id)
            if task is None or task.status != "pending" or there.text is None:
                continue
            said = self.do(self.model.list_messages(of, there.task_id))
            prompts = [one.content for one in said if (one.attempt, one.role) == (there.attempt, "user")]
            prompt = prompts[-1] if prompts else ()
            self.add(run_id, TaskStarted(at(6), task.task_id, task.attempt + 1, "reused"))
            self.add(run_id, TaskCompleted(at(6), task.task_id, task.attempt + 1, there.text, there.data, turn=prompt))

    @rule(run_id=st.sampled_from(RUNS), said=SAID)
    def change_prompts(self, run_id: str, said: str) -> None:
        for task in self.do(self.model.list_tasks(run_id)):
            if task.status == "failed":
                self.add(run_id, TaskReopened(at(6), task.task_id, 1, prompt=TEXTS[said]))

    @rule(run_id=st.sampled_from(RUNS), steps=STEPS)
    def change_tasks(self, run_id: str, steps: Any) -> None:
        self.write(self.next_batch(run_id, steps))

    @rule(run_id=st.sampled_from(RUNS), status=STATUSES, resumed=st.booleans())
    def change_status(self, run_id: str, status: str, resumed: bool) -> None:
        self.add(run_id, run_becomes(at(6), status, "why", resumed))

    @rule(
        run_id=st.sampled_from(RUNS),
        tasks=st.lists(NEW_TASKS, max_size=3),
        by=st.sampled_from([None, *"aex"]),
    )
    def grow(self, run_id: str, tasks: list[NewTask], by: str | None) -> None:
        self.add(run_id, TasksAdded(at(6), tuple(tasks), by))

    @rule(run_id=st.sampled_from(RUNS), said=SAID)
    def decide(self, run_id: str, said: str) -> None:
        self.add(run_id, PolicyDecided(at(6), TEXTS[said]))

    @rule(run_id=st.sampled_from(RUNS), name=st.sampled_from(["next", "other"]))
    def claim(self, run_id: str, name: str) -> None:
        self.add(run_id, RunClaimed(at(7), owner(name), 2000.0))

    @rule(run_id=st.sampled_from(RUNS), release=st.booleans())
    def renew_or_release(self, run_id: str, release: bool) -> None:
        change = RunReleased(at(8)) if release else LeaseRenewed(at(9), 3000.0)
        self.add(run_id, change)

    @rule(run_id=st.sampled_from(RUNS), steps=STEPS, epoch=st.sampled_from([-1, 1]))
    def write_at_another_epoch(self, run_id: str, steps: Any, epoch: int) -> None:
        batch = self.next_batch(run_id, steps)
        self.write(replace(batch, epoch=batch.epoch + epoch))

    @rule(run_id=st.sampled_from(RUNS), steps=STEPS, shift=st.sampled_from([-2, 1]))
    def write_at_another_number(self, run_id: str, steps: Any, shift: int) -> None:
        batch = self.next_batch(run_id, steps)
        self.write(replace(batch, first_seq=batch.first_seq + shift))

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.written))
        cut = data.draw(st.integers(0, len(batch.events)))
        self.write(replace(batch, events=batch.events[:cut]))
        self.write(batch)

    @rule()
    def crash(self) -> None:
        self.reopen(self.copied())

    @rule(run_id=st.sampled_from(RUNS), steps=STEPS, name=NAMES, dies=st.booleans())
    def fail_inside_a_transaction(self, run_id: str, steps: Any, name: str, dies: bool) -> None:
        """The store raises, or its process dies, at a boundary; then the batch is written again."""
        batch, copies = self.next_batch(run_id, steps), list[Path]()

        def on_reach(reached: str) -> None:
            if reached == name:
                if dies:
                    copies.append(self.copied())
                raise PlantedError

        failpoints.on_reach = on_reach
        outcome = self.outcome(self.store, batch)
        failpoints.on_reach = None
        if copies:
            self.reopen(copies[0])
        if outcome is PlantedError and name == "txn.after_commit":
            assert self.outcome(self.model, batch) is None
        self.same_in_both_stores()
        self.write(batch)

    @rule(run_id=st.sampled_from(RUNS))
    def purge(self, run_id: str) -> None:
        run = self.do(self.model.get_run(run_id))
        if run is not None and (run.status not in ENDED or run.owner is not None):
            try:
                self.do(self.store.purge([run_id]))
            except Conflict:
                return
            raise AssertionError("a run that goes on was deleted")
        purged = self.do(self.store.purge([run_id]))
        assert (len(purged.run_ids), purged.remains) == (run is not None, None)
        self.model.runs.pop(run_id, None)
        self.written = [batch for batch in self.written if batch.run_id != run_id]

    @invariant()
    def same_in_both_stores(self) -> None:
        for run_id in RUNS:
            assert self.do(whole(self.store, run_id)) == self.do(whole(self.model, run_id))

    @invariant()
    def no_transaction_is_open(self) -> None:
        assert not self.do(self.store._call(lambda connection: connection.in_transaction))


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=size(12, 35),
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
