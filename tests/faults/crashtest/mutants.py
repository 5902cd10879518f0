"""Planted bugs: each bug must break an invariant, as evidence that the harness detects bugs.

A bug replaces one function, in the children only. The bugs use private attributes, and stand for mistakes made in other
projects or possible in this project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio.lowlevel

from plait import events
from plait.errors import Fenced
from plait.events import PolicyDecided, TasksAdded
from plait.failpoints import FAILPOINTS
from plait.persistence import Batch, sql_store, sqlite_store, write_rules
from plait.runner.engine.checkpointer import COMMITTED, Checkpointer, WritePosition
from plait.runner.recovery import resume as takeover
from plait.runner.recovery import resume_plan as verdict
from plait.runner.state.run_state import RunState
from plait.statuses import TASK_DONE, TaskStatus
from tests.faults.crashtest.cases import Case
from tests.faults.crashtest.trial import Kind

Original = Callable[..., Any]


def _any(_case: Case) -> bool:
    return True


def _grows(case: Case) -> bool:
    """Return whether the case has `for_each` tasks and is small, so that few hits reach far into the run."""
    return len(case.dag) <= 6 and any(task.for_each is not None for task in case.dag)


def _decides(case: Case) -> bool:
    return _grows(case) and case.reviewed is not None


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug, and the trials in which the bug shows."""

    name: str
    owner: Any
    """The class or module with the replaced function."""
    attribute: str
    """The name of the replaced function."""
    instead: Callable[..., Any]
    """The replacement, called as `instead(original, ...)`."""
    names: Sequence[str] = FAILPOINTS[3:]
    """Boundaries of the disturbance."""
    hits: range = range(1, 11)
    """Hits of the boundary."""
    kind: Kind = Kind.KILLS
    """The kind of the trials."""
    fits: Callable[[Case], bool] = _any
    """Whether the bug can show in a case."""
    seed: int = 0
    """The seed tried first, three times since timing differs between runs: the bug has shown in its case."""

    def __post_init__(self) -> None:
        # A child that cannot plant its bug dies, and would look as if the bug had been caught.
        if not hasattr(self.owner, self.attribute):
            raise AttributeError(f"{self.name!r} changes {self.attribute}, which is not in {self.owner} any more")

    def plant(self) -> None:
        """Put the bug into this process."""
        original: Original = getattr(self.owner, self.attribute)

        def buggy(*args: Any, **options: Any) -> Any:
            return self.instead(original, *args, **options)

        setattr(self.owner, self.attribute, buggy)


async def _publish_first(write_group: Original, self: Any) -> None:
    for event in self._gathered:
        self._publish_event(event)
    await _loop_cycles()
    await write_group(self)


async def _wake_first(write_group: Original, self: Any) -> None:
    if self._commit is not None:
        self._commit.set()
    await _loop_cycles()
    await write_group(self)


async def _loop_cycles() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


def _start_unwritten(submit: Original, self: Any, happened: Sequence[events.Event]) -> Any:
    stored = submit(self, happened)
    return COMMITTED if happened and all(isinstance(event, events.TaskStarted) for event in happened) else stored


async def _write_in_pieces(try_write: Original, self: Any, head: Sequence[Any]) -> Any:
    error = None
    for length in range(1, len(head) + 1):
        error = error or await try_write(self, head[:length])
    return error


async def _write_added_tasks_apart(try_write: Original, self: Any, head: Sequence[Any]) -> Any:
    return await _write_apart(try_write, self, head, lambda one: type(one) is TasksAdded and one.added_by is not None)


async def _write_decisions_apart(try_write: Original, self: Any, head: Sequence[Any]) -> Any:
    return await _write_apart(try_write, self, head, lambda one: type(one) is PolicyDecided)


async def _write_apart(try_write: Original, self: Any, head: Sequence[Any], apart: Callable[[Any], bool]) -> Any:
    error = None
    cuts = [number for number, change in enumerate(head) if number and apart(change)]
    for end in (*cuts, len(head)):
        error = error or await try_write(self, head[:end])
    return error


async def _ask_about_all(_unasked: Original, run: Any, _happened: Any) -> list[str]:
    statuses = run.state.statuses
    return [task.id for task, status in zip(run.state.dag, statuses, strict=True) if status in TASK_DONE]


def _forget_parts(load: Original, state: Any, position: int, record: Any) -> None:
    load(state, position, record)
    state.parts.clear()


async def _number_anew(try_write: Original, self: Any, head: Sequence[Any]) -> Any:
    error = await try_write(self, head)
    if error is not None and (run := await self._store.get_run(self._run_id)) is not None:
        self._position = WritePosition(run.epoch, run.last_seq + 1)
    return error


def _use_the_number_again(settled: Original, plan: Any, position: int, *judged: Any) -> Any:
    event = settled(plan, position, *judged)
    if isinstance(event, events.TaskInterrupted):
        plan.run.state.attempts[position] -= 1
    return event


def _queue_completed(load: Original, state: Any, position: int, record: Any) -> None:
    load(state, position, record)
    if state.statuses[position] is TaskStatus.COMPLETED:
        state.statuses[position] = TaskStatus.PENDING
        del state.results[position]


def _forget_crashes(deaths_with: Original, record: Any) -> Any:
    return deaths_with(replace(record, crashes=0))


def _ignore_the_epoch(count_applied: Original, batch: Batch, head: Any) -> Any:
    try:
        return count_applied(batch, head)
    except Fenced:
        return min(len(batch.events), max(0, head.last_seq - batch.first_seq + 1))


async def _do_not_wait(_wait_until_free: Original, *_: Any) -> bool:
    return True


def _create_always(open_database: Original, path: Any, mode: str, **options: Any) -> Any:
    return open_database(path, "create" if mode == "existing" else mode, **options)


class _Equal:
    """Equal to every checksum."""

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def _skip_checksums(_checksum: Original, *_: Any) -> Any:
    return _Equal()


_TXN = ("txn.begun", "txn.before_commit")
_COMMIT = ("batch.before_write", *_TXN)
_STOP = ("batch.before_write",)
_LOSE = ("txn.after_commit",)

MUTANTS = (
    Mutant("told before the commit", Checkpointer, "_write_group", _publish_first, _COMMIT, seed=2),
    Mutant("dependents woken before the commit", Checkpointer, "_write_group", _wake_first, _COMMIT),
    Mutant("called before its start is stored", Checkpointer, "submit", _start_unwritten, _TXN, range(2, 4)),
    Mutant("a batch committed in pieces", Checkpointer, "_try_write", _write_in_pieces, _TXN, range(3, 11), seed=24),
    Mutant(
        "a lost answer taken for no commit",
        Checkpointer,
        "_try_write",
        _number_anew,
        _LOSE,
        range(2, 11),
        Kind.UNSURE,
        seed=1,
    ),
    Mutant("an attempt's number used twice", takeover, "_end_attempt", _use_the_number_again, seed=1),
    Mutant(
        "added tasks stored after their planner's end",
        Checkpointer,
        "_try_write",
        _write_added_tasks_apart,
        _COMMIT,
        range(5, 10),
        fits=_grows,
        seed=26,
    ),
    Mutant(
        "a decision stored after what it added",
        Checkpointer,
        "_try_write",
        _write_decisions_apart,
        _COMMIT,
        range(5, 10),
        fits=_decides,
        seed=522,
    ),
    Mutant("a policy asked again about all", takeover, "_policy_backlog", _ask_about_all, fits=_decides, seed=6),
    Mutant(
        "a list expanded again by resume", RunState, "_load", _forget_parts, hits=range(7, 11), fits=_grows, seed=42
    ),
    Mutant("completed tasks queued again", RunState, "_load", _queue_completed, seed=1),
    Mutant("crashes not counted", verdict, "deaths_with", _forget_crashes, kind=Kind.CRASHER),
    Mutant("no epoch check", write_rules, "count_applied", _ignore_the_epoch, _STOP, range(2, 11), Kind.RIVAL),
    Mutant(
        "claimed beside a living owner",
        takeover,
        "wait_for_expiry",
        _do_not_wait,
        _STOP,
        range(2, 11),
        Kind.RIVAL,
    ),
    Mutant(
        "a missing store made to resume",
        sqlite_store,
        "open_database",
        _create_always,
        ("file.before_link",),
        range(1, 2),
    ),
    Mutant("checksums not looked at", sql_store, "checksum", _skip_checksums, kind=Kind.ROT),
)
"""All planted bugs."""
