"""Attempts: the session, the prompt, the call of the backend, and the reports during the call."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.protocol import (
    Answer,
    Backend,
    ConversationRequest,
    DetachedBackend,
    Files,
    ForkingBackend,
    Message,
    Output,
    Reply,
)
from plait.backends.text import clean_text
from plait.runner.clock import Clock
from plait.runner.domain import events
from plait.runner.domain.conversation import NO_HISTORY, Continuation, History
from plait.runner.domain.question import OnQuestion
from plait.runner.domain.task import Task
from plait.runner.engine.backend_call import CallOutcome, call_backend, classified, kept_usage
from plait.runner.engine.checkpointer import EventSink
from plait.runner.engine.feed import Feed
from plait.runner.engine.handover import NO_HANDOVER, AdoptedAttempt, Handover
from plait.runner.log import logger
from plait.runner.state.attempt_files import turn_files
from plait.runner.state.orphans import end_turn, make_room
from plait.runner.state.run_state import RunState

_NOT_WRITTEN_DOWN = (
    "the store does not answer, so this at_most_once task was not started: after a crash "
    "no record would show the start; resume with --retry-failed when the store answers again"
)


async def _nothing_to_recall(_task_id: str) -> History:
    return NO_HISTORY


async def _no_inbox(_task_id: str, _attempt: int, _deadline_at: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class RunContext:
    """The environment of an executor."""

    run_id: str
    backends: Mapping[str, Backend]
    names: Sequence[str]
    """The backend of each task, by position, as a key of `backends`."""
    sink: EventSink
    feed: Feed
    clock: Clock
    rng: random.Random
    on_question: OnQuestion | None = None
    inherited: Handover = NO_HANDOVER
    recall: Callable[[str], Awaitable[History]] = _nothing_to_recall
    """Reads the conversation of a completed task back from the store. Raises BackendError, of kind transient if the
    store cannot provide the conversation now, or PlaitError if a message is damaged.
    """
    files_root: Path | None = None
    """The folder for files of attempts; None if the store keeps no files."""
    look_for_answer: Callable[[str, int, str], Awaitable[None]] = _no_inbox
    """Passes on the unread answers to an attempt of a task that were sent by a deadline."""


_TO_TAKE_HOLD_S = 1.0
"""Least time for an adopted attempt, in seconds, even after the timeout: enough to attach to the attempt and end the
attempt.
"""
INTERRUPTED = (
    "You were interrupted while you worked on the request above: the program that asked you ended before your answer "
    "was written down. Look at what you have done already, do what is missing, and give your whole answer again."
)
"""The message that resumes an interrupted conversation. The conversation holds the prompt already."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt of a task, recorded as running."""

    position: int
    """The position of the task in the DAG."""
    task: Task
    number: int
    """The number of the attempt, from 1."""
    session_id: str | None
    """The id of the session, if known."""
    going_on: Continuation | None = None
    """The conversation of an earlier attempt to continue, if any."""
    confirmed: bool = False
    """See SessionOpened."""
    resume: bool = False
    """See ConversationRequest."""
    forks: str | None = None
    """`fork_of` of the ConversationRequest."""
    prompt: str = ""
    """The prompt of the task, or the message sent instead."""
    called: bool = False
    """True once the backend was called."""
    waits: int = 0
    """The number of waits for the store so far, for a task marked at_most_once."""
    over: bool = False
    """True once the call has ended."""
    adopted: AdoptedAttempt | None = None
    """The attempt as an earlier process left the attempt behind, if an earlier process began the attempt."""

    @property
    def takes_up(self) -> bool:
        """True if the attempt resumes an interrupted turn."""
        return self.going_on is not None and self.going_on.interrupted

    def messages(self, reply: Reply) -> tuple[Message, ...]:
        """Return the messages of the turn that `reply` ended."""
        refused = () if self.going_on is None else self.going_on.refused
        if self.takes_up:
            return (*refused, Message("user", self.prompt), *reply.turn(INTERRUPTED))
        return (*refused, *reply.turn(self.prompt))


class AttemptRunner:
    """Prepares and runs the attempts of one run."""

    def __init__(self, state: RunState, context: RunContext, stamp: Callable[[], str]) -> None:
        self._state = state
        self._context = context
        self._stamp = stamp
        self._log = logger(run=context.run_id)
        # Computed once: isinstance with a protocol costs more than the rest of an attempt's start.
        self._outlive = {name: isinstance(backend, DetachedBackend) for name, backend in context.backends.items()}

    def begin(self, position: int) -> Attempt:
        """Return the pending task's next attempt, which is to be recorded as running."""
        task = self._state.dag.tasks[position]
        number = self._state.attempts[position] + 1
        if (going_on := self._state.going_on.get(position)) is not None:
            session_id, confirmed = going_on.session_id, going_on.interrupted
            return Attempt(position, task, number, session_id, going_on, confirmed=confirmed, resume=True)
        before = self._state.session_to_go_on_with(task)
        if before is not None and not self._forks(task):
            return Attempt(position, task, number, before, resume=True)
        return Attempt(position, task, number, self._new_session_id(self._context.names[position]), forks=before)

    def adopt(self, position: int, adopted: AdoptedAttempt) -> Attempt:
        """Return the attempt that an earlier process began, reconstructed as far as possible."""
        task, number = self._state.dag.tasks[position], self._state.attempts[position]
        going_on = self._state.going_on.get(position)
        self._state.adopt(position)
        before = None if going_on is not None else self._state.session_to_go_on_with(task)
        session_id = adopted.session_id
        # If the earlier session was lost, the attempt may have continued in a session of its own.
        same = before is not None and (before == session_id or not self._forks(task))
        resume, forks = going_on is not None or same, None if same else before
        return Attempt(
            position, task, number, session_id, going_on, adopted.confirmed, resume, forks, called=True, adopted=adopted
        )

    def _forks(self, task: Task) -> bool:
        """Return whether the task forks the continued conversation and so leaves the original unchanged: if the backend
        can fork, or if several tasks continue the same conversation and would disturb each other.
        """
        assert task.continues is not None
        before = self._state.dag.position(task.continues)
        backend = self._context.backends[self._context.names[before]]
        return self._state.times_continued(before) > 1 or (isinstance(backend, ForkingBackend) and backend.can_fork)

    def run(self, turn: Attempt) -> Awaitable[CallOutcome]:
        """Render the prompt and call the backend. Errors become part of the outcome; cancellation is re-raised."""
        return self._have(turn) if turn.adopted is None else self._have_adopted(turn)

    async def _have_adopted(self, turn: Attempt) -> CallOutcome:
        outcome = await self._have(turn)
        if (files := self._files(turn)) is not None:
            await end_turn(files.turn)  # the backend may never have attached to the attempt
        return outcome

    async def _have(self, turn: Attempt) -> CallOutcome:
        if turn.task.at_most_once and self._context.sink.away and turn.adopted is None:
            return CallOutcome(None, None, BackendError(ErrorKind.TRANSIENT, _NOT_WRITTEN_DOWN))
        try:
            turn.prompt = clean_text(self._prompt(turn))
            past = NO_HISTORY if turn.task.continues is None else await self._history(turn.task, turn.task.continues)
        except Exception as error:
            return CallOutcome(None, None, classified(error))
        opening = self._request(turn, past)
        backend = self._context.backends[self._context.names[turn.position]]
        answers = self._state.answers_for(turn.position) if turn.position in self._state.answers else ()
        if opening.files is not None and turn.adopted is None:
            await make_room(opening.files.turn)
        turn.called = True
        said = INTERRUPTED if turn.takes_up else turn.prompt
        outcome = await call_backend(backend, opening, said, answers)
        turn.over = True
        if outcome.reply is not None and outcome.reply.session_id is not None:
            self._session(turn, outcome.reply.session_id, last=True)
        return outcome

    def _time_left(self, turn: Attempt) -> float | None:
        """Return the seconds until the attempt times out; None without a timeout."""
        limit = turn.task.timeout
        if limit is None or turn.adopted is None:
            return limit
        return max(limit - self.earlier_duration(turn), _TO_TAKE_HOLD_S)

    def earlier_duration(self, turn: Attempt) -> float:
        """Return the seconds since another process started this attempt; 0 if this process did, or if the attempt has
        already ended (the end time is unknown).
        """
        adopted = turn.adopted
        if adopted is None or adopted.since is None or adopted.has_ended:
            return 0.0
        return max(0.0, self._context.clock.wall() - adopted.since)

    def _prompt(self, turn: Attempt) -> str:
        if (going_on := turn.going_on) is not None and going_on.answer is not None:
            return going_on.answer.text
        if going_on is not None and going_on.wrong is not None:
            return going_on.wrong
        return self._state.prompt(turn.task)

    async def _history(self, task: Task, continues: str) -> History:
        """Return the conversation that the task continues, read back from the store if not in memory."""
        if not self._state.is_completed(continues):
            return NO_HISTORY
        past = self._state.past(task)
        if past is None:
            past = await self._context.recall(continues)
            self._state.keep_conversation(self._state.dag.position(continues), past)
        return past

    def _request(self, turn: Attempt, past: History) -> ConversationRequest:
        going_on, answer = turn.going_on, None
        history = () if past is NO_HISTORY else past.messages  # the property builds a new tuple at each call
        if going_on is not None:
            history += (*going_on.said, *going_on.refused)
            if going_on.answer is not None and not going_on.interrupted:
                answer = Answer(going_on.answer.value)
        task = turn.task
        files = self._files(turn) if self._outlive[self._context.names[turn.position]] else None
        return ConversationRequest(  # positional: fourteen keyword arguments take as long as the rest of this method
            turn.session_id,
            turn.resume,
            history,
            task.output_schema,
            f"{self._context.run_id}:{task.id}",
            task.metadata,
            answer,
            turn.takes_up,
            turn.forks,
            files,
            turn.adopted is not None,
            partial(self._output, turn),
            partial(self._session, turn),
            self._time_left(turn),
        )

    def _files(self, turn: Attempt) -> Files | None:
        root = self._context.files_root
        return None if root is None else turn_files(root, self._context.run_id, turn.task.id, turn.number)

    def _new_session_id(self, name: str) -> str | None:
        try:
            session_id = self._context.backends[name].new_session_id()
        except Exception as error:
            self._log.warning("no_session_id", backend=name, error=type(error).__name__)
            return None
        return clean_text(session_id) if isinstance(session_id, str) else None

    def _output(self, turn: Attempt, output: Output) -> None:
        if not turn.over:
            usage = kept_usage(output.usage)
            self._state.spend(turn.position, usage)
            event = events.TaskOutput(self._stamp(), turn.task.id, turn.number, output.kind, str(output.text), usage)
            self._context.feed.publish(event)

    def _session(self, turn: Attempt, session_id: str, *, last: bool = False) -> None:
        """Record a new, changed or confirmed session id. A call after the end of the attempt, or with an id that is
        not a text, changes nothing. `last` marks the id in the reply, for which confirming a known id is unnecessary.
        """
        known = clean_text(session_id) if isinstance(session_id, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if known is None or (turn.over and not last):
            return
        if known == turn.session_id and (turn.confirmed or last):
            return
        turn.session_id, turn.confirmed = known, True
        self._context.sink.submit([events.SessionOpened(self._stamp(), turn.task.id, turn.number, known)])
