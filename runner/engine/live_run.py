"""`LiveRun`: what the parts of one run share in this process, from its start to its end.

    made        by `ParallelRunner`, before anything is read or stored: from now on the run can be stopped
    prepared    with a state, an owner and the unfinished work of earlier processes: `prepare_resume`, for a stored run
    executed    by `execute_run`, which adds the scheduler and the sink of events

A run that goes on from what is stored (`Diverged`) is prepared and executed again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import anyio

from plait.backends.backend_protocol import DetachedTurn
from plait.backends.turn_cancellation import Cancellation
from plait.clock_and_ids import stamper
from plait.events import Event, Owner
from plait.json_form import JsonValue
from plait.runner.domain.policy import Policy
from plait.runner.engine.checkpointer import EventSink, WritePosition
from plait.runner.engine.event_feed import Feed
from plait.runner.engine.run_options import RunOptions
from plait.runner.reuse.earlier_answers import EarlierAnswers
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import PolicyState

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


@dataclass(frozen=True, slots=True)
class AdoptedAttempt:
    """An attempt that outlived the process which started the attempt."""

    session_id: str | None
    """The id of the session, as stored."""
    confirmed: bool
    """See SessionOpened."""
    since: float | None
    """The Unix time of the start, in seconds, if known."""
    detached: DetachedTurn
    """The state of the attempt's turn, read from files: "alive", or "ended" with an answer still to be read."""

    @property
    def has_ended(self) -> bool:
        """True if the attempt has ended and only the answer has to be read."""
        return self.detached.state == "ended"


async def _no_inbox(_task_id: str, _attempt: int, _deadline_at: str) -> None:
    return None


@dataclass(kw_only=True, eq=False, repr=False)
class LiveRun:
    """A run in this process."""

    run_id: str
    options: RunOptions
    feed: Feed = field(default_factory=Feed)
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
    adopted: Mapping[int, AdoptedAttempt] = field(default_factory=dict[int, AdoptedAttempt])
    """Attempts of earlier processes, still under way or ended unread, by position."""
    answers: EarlierAnswers | None = None
    """The answers of earlier runs that this run may take over."""

    # Executed.
    scheduler: Scheduler = field(init=False)
    sink: EventSink = field(init=False)
    look_for_answer: Callable[[str, int, str], Awaitable[None]] = _no_inbox
    """Passes on the unread answers to an attempt of a task that were sent by a deadline."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """The request to the attempts under way to end, because the run is being cancelled."""

    # Ended.
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
