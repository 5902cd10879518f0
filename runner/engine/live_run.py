"""A run in this process: `LiveRun`, what its parts share from start to end, `Feed`, which passes its events to readers,
`LiveText`, the text of its answers while backends write them, and `Run`, the handle of its caller.

    made        by `ParallelRunner`, before anything is read or stored: from now on the run can be stopped
    prepared    with a state, an owner and the unfinished work of earlier processes: `prepare_resume`, for a stored run
    executed    by `execute_run`, which adds the scheduler and the sink of events

A run that restarts from what is stored (`LiveRun.restarts`) is prepared and executed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias
from weakref import ref

import anyio
import anyio.abc

from plait.backends.backend_protocol import DetachedTurn
from plait.backends.running_turn import Cancellation
from plait.clock_and_ids import stamper
from plait.errors import PlaitError
from plait.events import (
    Event,
    EventsDropped,
    Owner,
    RunCancelling,
    RunEnded,
    RunResumed,
    RunStarted,
    RunTuned,
    TaskEvent,
    TaskOutput,
    TaskStarted,
)
from plait.json_form import JsonValue, value
from plait.program_log import Log, logger
from plait.runner.domain.notify_target import NotifyTarget
from plait.runner.domain.policy import Policy
from plait.runner.domain.run_result import RunResult
from plait.runner.domain.run_tuning import Tuning
from plait.runner.engine.call_costs import CallCosts
from plait.runner.engine.checkpointer import EventSink, WritePosition
from plait.runner.engine.run_options import RunOptions, policy_backends
from plait.runner.reuse.earlier_answers import EarlierAnswers
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.state.budget import Budget
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import PolicyState
from plait.statuses import RunStatus
from plait.task import Task


class EventReader:
    """An iterator over a run's events, in order, from the creation of the reader to the event that ends the run.

    Up to `limit` events wait for a slow reader; beyond the limit, task outputs are dropped and counted in an
    EventsDropped. If several asyncio tasks iterate over the same reader, each event goes to exactly one task.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._waiting: deque[Event] = deque()
        self._limit = limit
        self._dropped = 0
        self._news = anyio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        """Append an event. Never waits."""
        if isinstance(event, TaskOutput) and len(self._waiting) >= self._limit:
            self._dropped += 1
            return
        if self._dropped:
            self._waiting.append(EventsDropped(event.at, self._dropped))
            self._dropped = 0
        self._waiting.append(event)
        self._news.set()

    def take_waiting(self) -> list[Event]:
        """Return and remove the events that wait for this reader. Never waits."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def close(self) -> None:
        """End the iteration after the events already received."""
        self._closed = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._news.is_set():  # otherwise other tasks already wait for this event object
                self._news = anyio.Event()
            await self._news.wait()
        return self._waiting.popleft()


class Feed:
    """The publisher of a run's events. Without readers, publishing costs nothing."""

    def __init__(self) -> None:
        self._readers: tuple[ref[EventReader], ...] = ()
        """Weak references: dropping the last reference to a reader frees the reader and the waiting events."""
        self._ended = False
        self.status = RunStatus.QUEUED
        """The status of the run according to the published events."""

    def reader(self) -> EventReader:
        """Return a new reader of the events published from now on."""
        reader = EventReader()
        self._readers = (*self._readers, ref(reader, self._remove))
        if self._ended:
            reader.close()
        return reader

    @property
    def has_readers(self) -> bool:
        """Whether anybody reads the events: without readers, an event that is not stored need not be made."""
        return bool(self._readers)

    def publish(self, event: Event) -> None:
        """Pass `event` to every reader, unless it is not shown. Do nothing after the event that ends the run."""
        if self._ended or not event.shown:
            return
        for reference in self._readers:
            if (reader := reference()) is not None:
                reader.put(event)
        if not isinstance(event, TaskEvent):
            self._note(event)

    def _note(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self.status = event.status
            self.close()
        elif isinstance(event, RunCancelling):
            self.status = RunStatus.CANCELLING
        elif isinstance(event, RunStarted | RunResumed):
            self.status = RunStatus.RUNNING

    def close(self) -> None:
        """Close all readers, later readers included, because the run is over."""
        self._ended = True
        for one in self._readers:
            if (reader := one()) is not None:
                reader.close()

    def _remove(self, gone: ref[EventReader]) -> None:
        # A new tuple, not a shorter list: a reader may be collected at any moment, even while `publish` iterates.
        self._readers = tuple(one for one in self._readers if one is not gone)


@value
class TextPiece:
    """A piece of the text of a running attempt."""

    task_id: str
    """Id of the task."""
    attempt: int
    """Number of the attempt, from 1. A further attempt begins a new text."""
    offset: int
    """Number of characters of the text before the piece."""
    text: str
    """The piece."""


class LiveText:
    """The texts of the running attempts of a run, for any number of readers. Readers never delay the run."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[int, list[str]]] = {}
        """The number of the attempt and the parts of its text, by task id."""
        self._news = anyio.Event()
        self._closed = False

    def take(self, event: Event) -> None:
        """Add the text of `event`, or drop the text of the task if `event` ends its attempt. The first text of a later
        attempt replaces the text.
        """
        if not isinstance(event, TaskEvent):
            return
        if not event.informs and not isinstance(event, TaskStarted | TaskOutput):
            self._texts.pop(event.task_id, None)
        elif isinstance(event, TaskOutput) and event.output == "text" and event.text:
            attempt, parts = self._texts.get(event.task_id, (0, []))
            if attempt != event.attempt:
                attempt, parts = self._texts[event.task_id] = event.attempt or 0, []
            parts.append(event.text)
            self._wake()

    def close(self) -> None:
        """End the readers."""
        self._closed = True
        self._wake()

    async def pieces(self) -> AsyncGenerator[TextPiece]:
        """Yield the texts of the running attempts up to now, then what follows. A slow reader receives fewer and longer
        pieces; the rest of an attempt that has ended meanwhile is left out.
        """
        sent: dict[str, tuple[int, int, int]] = {}  # of the last piece: its attempt, and the parts and length up to it
        while True:
            news = self._news
            for task_id, (attempt, parts) in list(self._texts.items()):
                last, count, length = sent.get(task_id, (0, 0, 0))
                if last != attempt:
                    count = length = 0
                if len(parts) > count:
                    text = "".join(parts[count:])
                    sent[task_id] = attempt, len(parts), length + len(text)
                    yield TextPiece(task_id, attempt, length, text)
            if self._closed:
                return
            await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()


EarlyEnd: TypeAlias = Literal["stop", "cancel"]


class Execution(Protocol):
    """The part of a run that executes tasks: see `Executor`."""

    def end(self, by: EarlyEnd) -> None:
        """Start nothing more, and cancel the attempts under way."""
        ...

    def wind_down(self) -> None:
        """Start nothing more, and ask the attempts under way to end."""
        ...

    def answer(self, task_id: str, attempt: int, value: JsonValue, by: str) -> bool:
        """Answer the question of an attempt. Return False if it is no longer open."""
        ...

    def tune(self, tuning: Tuning) -> None:
        """Start further tasks as `tuning` says."""
        ...

    def retry(self, task_id: str, attempt: int) -> None:
        """Run a task again whose last `attempt` has failed."""
        ...


async def _no_inbox(_task_id: str, _attempt: int, _deadline_at: str) -> None:
    return None


@dataclass(kw_only=True, eq=False, repr=False)
class LiveRun:
    """A run in this process."""

    run_id: str
    options: RunOptions
    feed: Feed = field(default_factory=Feed)
    parks: bool = False
    """Whether this process leaves the run once everything waits for a time: see `ParallelRunner`."""
    wakes: bool = False
    """Whether nobody is there: if this process is stopped, the run is due for the next one that wakes runs."""
    requires_record: bool = False
    """Whether a new run must not begin unless its creation is stored."""

    # Prepared.
    state: RunState = field(init=False)
    task_backends: list[str] = field(init=False)
    """The backend of each task, by position, as a key of the backends in `options`."""
    created_at: str = ""
    """The time at which the run was created, as stored."""
    owner: Owner | None = None
    """The claim of this process; None without a store."""
    position: WritePosition = WritePosition()  # noqa: RUF009 - frozen
    """The position of the next change in the store."""
    first_events: Sequence[Event] = ()
    """Events to store before any task starts, with the claim. For a resumed run they are stored already, and only
    published.
    """
    policy: Policy | None = None
    policy_state: PolicyState = PolicyState()  # noqa: RUF009 - frozen
    """The outcome of the policy's decisions so far."""
    policy_backlog: Sequence[str] = ()
    """Ids of ended tasks for which the run's policy has not been called."""
    next_tries: Mapping[int, float] = field(default_factory=dict[int, float])
    """The Unix time of the next attempt, in seconds, by position, for tasks whose last attempt failed."""
    adopted: Mapping[int, DetachedTurn] = field(default_factory=dict[int, DetachedTurn])
    """The turns of the attempts that outlived their processes, under way or ended unread, by position."""
    answers: EarlierAnswers | None = None
    """The answers of earlier runs that this run may take over."""
    budget: Budget | None = None
    """The money of the run; None without a limit."""
    priority: int = 0
    """Of the runs that share slots or an account, those of a higher number come first."""
    unpriced: bool = False
    """Whether calls without a known worst case are made under limits of money, and count once they cost something."""
    rows_error: str | None = None
    """Why no further rows of the run's file are read."""
    tuning: Tuning = Tuning()  # noqa: RUF009 - frozen
    """What a person has changed in the run."""
    notify: Sequence[NotifyTarget | None] = ()
    """Where the notices of the run go, as stored with it."""
    closed: Mapping[str, tuple[float | None, str]] = field(default_factory=dict[str, tuple[float | None, str]])
    """The backends that a limit had closed in an earlier process, each with the Unix time until which, None if that has
    passed, and the cause.
    """

    # Executed.
    scheduler: Scheduler = field(init=False)
    sink: EventSink = field(init=False)
    look_for_answer: Callable[[str, int, str], Awaitable[None]] = _no_inbox
    """Passes on the unread answers to an attempt of a task that were sent by a deadline."""
    cancellation: Cancellation = field(init=False)
    """The request to the attempts under way to end, because the run is being cancelled."""

    # Ended.
    restarts: bool = False
    """Whether the execution got ahead of what is stored, because the store refused results for good. In the store their
    tasks have failed, and the run still belongs to this process. It restarts from there, as in a resume.
    """
    ended_by: EarlyEnd | None = None
    """Who asked first for an early end."""
    asleep: anyio.CancelScope | None = None
    """The wait for the end of another process's lease, which a stop ends."""
    execution: Execution | None = None
    on_late_end: Callable[[], None] | None = None
    """Called by `end` once the execution has ended and only the writing of the last changes is left."""
    cancelled: anyio.Event = field(default_factory=anyio.Event)
    """Set once a run under way is being cancelled."""

    def __post_init__(self) -> None:
        self.stamp = stamper(self.options.clock)
        """Returns the time, as stored in events."""

    @cached_property
    def call_costs(self) -> CallCosts:
        """The costs of the calls of the run."""
        return CallCosts(self.options)

    async def take_budget(
        self, budget: Budget | None, tasks: Iterable[Task], names: Iterable[str], *, unpriced: bool
    ) -> None:
        """Give the run, which has not begun, its budget. `tasks`, on the backends `names`, are still to run. Raises
        InvalidRequest if the worst case of a call that a limit of money counts cannot be stated.
        """
        if budget is not None or self.options.limited_by_day:
            self.options.require_ledgers()
            further = () if self.policy is None else policy_backends(self.policy, self.options.default)
            has_budget = budget is not None
            await self.call_costs.require(tasks, [*names], further, has_budget=has_budget, unpriced=unpriced)
        self.budget, self.unpriced = budget, unpriced

    def backend_of(self, position: int) -> str:
        """Return the backend that the attempt calls for which the task has a slot: its own, or a spare."""
        if not self.options.spares:
            return self.task_backends[position]
        return self.scheduler.spare_of(position) or self.task_backends[position]

    @cached_property
    def program_log(self) -> Log:
        """The logger with the id of the run, made once something is logged."""
        return logger(run=self.run_id)

    @property
    def resumed(self) -> bool:
        """Whether the run was stored before this process began to execute it."""
        return self.position.next_seq > 1

    def execute_by(self, execution: Execution) -> None:
        """Pass on to `execution` what is asked of the run: also an end that was asked for before."""
        self.execution = execution
        if self.ended_by is not None:
            execution.end(self.ended_by)

    def end(self, by: EarlyEnd) -> None:
        """End the run early, or, after its end, the wait for its store. Only the first call has an effect on the
        run.
        """
        if self.on_late_end is not None:
            self.on_late_end()
        if self.ended_by is not None:
            return
        self.ended_by = by
        if self.execution is not None:
            self.execution.end(by)
        elif by == "stop" and self.asleep is not None:
            self.asleep.cancel()

    def cancel(self) -> None:
        """Cancel the run, but let the attempts under way finish until `end` is called. A run with nothing under way yet
        ends at once. Do nothing if the run is ending already.
        """
        if self.execution is None:
            self.end("cancel")
        elif self.ended_by is None:
            self.execution.wind_down()
            self.cancelled.set()

    def answer(self, task_id: str, attempt: int, value: JsonValue, by: str) -> bool:
        """Answer the question with which `attempt` of the task ended; `by` is the origin of the answer. Return whether
        the answer is used: not before the execution begins, or if the question is no longer open.
        """
        return self.execution is not None and self.execution.answer(task_id, attempt, value, by)

    def tune(self, changes: Sequence[RunTuned]) -> None:
        """Take over what a person changes; nothing happens for changes that hold already."""
        before, self.tuning = self.tuning, self.tuning.after(changes)
        if news := self.tuning.news_since(before):
            self.sink.submit([replace(one, at=self.stamp()) for one in news])
            if self.execution is not None:
                self.execution.tune(self.tuning)


Drive: TypeAlias = Callable[[LiveRun], Awaitable[RunResult]]
"""Executes a run to its end."""


class Run:
    """A run executing in the background of the caller, inside `async with runner.start(dag) as run:`.

    Execution begins when the block is entered. A normal exit from the block waits for the end of the run. An exception
    or a cancellation inside the block stops the run; `resume` can continue it later. All methods must be called from
    the event loop's thread. The first call of `stop` or `cancel` decides how the run ends.
    """

    def __init__(self, live: LiveRun, drive: Drive) -> None:
        self.run_id = live.run_id
        """The id of the run."""
        self._live = live
        self._drive = drive
        self._first_reader: EventReader | None = None
        self._ended = anyio.Event()
        self._result: RunResult | None = None
        self._error: Exception | None = None
        self._group: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError("a Run can be entered only once; start the DAG again for another run")
        self._first_reader = self._live.feed.reader()
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        if isinstance(error, Exception):
            # The error of the block is raised unchanged, not inside a group; errors of the run are raised by `result`
            # alone.
            self.stop()
            await self._group.__aexit__(None, None, None)
            return None
        return await self._group.__aexit__(kind, error, trace)

    async def to_end(self) -> RunResult:
        """Execute the run in place of a block, without events, and return the result. Raises as `result`."""
        async with self._live.options.own_store.opened():
            return await self._drive(self._live)

    def events(self) -> EventReader:
        """Return an iterator over the run's events, in order: `async for event in run.events()`.

        The iterator ends after the event that ends the run. The first call returns all events from the start; later
        calls return events from the moment of the call. A slow reader misses only task outputs; an `EventsDropped`
        event counts the missed outputs. Raises RuntimeError before the block is entered.
        """
        self._require_begun()
        reader, self._first_reader = self._first_reader, None
        return reader or self.reader()

    def reader(self) -> EventReader:
        """Return an iterator over the events from now on, also before the block is entered: see `events`."""
        return self._live.feed.reader()

    @property
    def status(self) -> RunStatus:
        """The stored status of the run. The value changes once a change is stored; events report each change."""
        return self._live.feed.status

    def require_record(self) -> None:
        """Do not begin a new run whose creation cannot be stored: `result` then raises the StoreError, and nothing is
        called. Later failures of the store are not fatal. To be called before the block is entered.
        """
        self._live.requires_record = True

    @property
    def is_storing(self) -> bool:
        """Whether the execution has ended, and only its last changes are left to be stored. `stop` then ends the wait
        for a store that is away.
        """
        return self._live.on_late_end is not None

    async def result(self) -> RunResult:
        """Wait for the end of the run and return the result. Raises the errors of `ParallelRunner.run`.

        Cancelling the wait does not affect the run.
        """
        self._require_begun()
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _require_begun(self) -> None:
        if self._group is None:
            raise RuntimeError("the run has not begun; use it as `async with runner.start(dag) as run:`")

    def stop(self, *, until_woken: bool = False) -> None:
        """Stop the run now: start no further task, end the running attempts, store the state. `resume` continues the
        run; with `until_woken`, for a shutdown of the machine, `Runs.wake` does so too, if the run parks. The cost of
        the ended attempts may be unknown.
        """
        self._live.wakes |= until_woken and self._live.parks
        self._live.end("stop")

    def cancel(self) -> None:
        """Cancel the run permanently: start no further task, and ask the running attempts to end (`cancel_requested`).

        The attempts may end by themselves for the `cancel_grace` of the runner, and are cut afterwards. Unfinished
        tasks are then marked as cancelled. `stop` cuts the attempts of a cancelled run at once. The cost of a cut
        attempt is the last cost reported by its backend (`Output.usage`).
        """
        self._live.cancel()

    async def _run(self) -> None:
        try:
            self._result = await self.to_end()
        except Exception as error:
            self._error = error
        finally:
            if self._result is None and self._error is None:
                self._error = PlaitError(f"run {self.run_id} was interrupted before its end; resume the run")
            self._live.feed.close()
            self._ended.set()


def state_of(run: Run) -> RunState | None:
    """Return what is known of the tasks of `run`, to be read by a display; None until the run is prepared."""
    # No name of Run for users: a display stands beside the run.
    return getattr(run._live, "state", None)  # pyright: ignore[reportPrivateUsage]
