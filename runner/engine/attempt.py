"""One attempt from its start on: its session, its prompt, and what its backend reports meanwhile."""

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
    "the store is away, so this at_most_once task is not begun: after a crash nobody could tell that it had been; "
    "resume with --retry-failed when the store answers"
)


async def _nothing_to_recall(_task_id: str) -> History:
    return NO_HISTORY


async def _no_inbox(_task_id: str, _attempt: int, _deadline_at: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class RunContext:
    """What an execution works with. `names` gives each task's backend, by position, as a key of `backends`."""

    run_id: str
    backends: Mapping[str, Backend]
    names: Sequence[str]
    sink: EventSink
    feed: Feed
    clock: Clock
    rng: random.Random
    on_question: OnQuestion | None = None
    inherited: Handover = NO_HANDOVER
    recall: Callable[[str], Awaitable[History]] = _nothing_to_recall
    """The conversation of a completed task, read back from the store. Raises BackendError, transient where the store
    does not have it now; PlaitError.
    """
    files_root: Path | None = None
    """Where the store keeps files; None where there are none."""
    look_for_answer: Callable[[str, int, str], Awaitable[None]] = _no_inbox
    """Passes on what the inbox holds by the deadline in answer to an attempt of a task."""


_TO_TAKE_HOLD_S = 1.0
"""What a turn of an earlier process is given at least, whose time is over: enough to take hold of it, and end it."""
INTERRUPTED = (
    "You were interrupted while you worked on the request above: the program that asked you ended before your answer "
    "was written down. Look at what you have done already, do what is missing, and give your whole answer again."
)
"""What is said in a conversation that an interruption cut, instead of the prompt, which it holds already."""


@dataclass(slots=True, eq=False)
class Attempt:
    """Attempt `number` of the task at `position`, recorded as running. `session_id` is as far as it is known.

    `going_on`: it takes up a conversation that an earlier attempt began. `confirmed`: see SessionOpened. `resume` and
    `forks`: see Opening. `prompt` is the task's, or what is said instead. `adopted`: an earlier process began it.
    """

    position: int
    task: Task
    number: int
    session_id: str | None
    going_on: Continuation | None = None
    confirmed: bool = False
    resume: bool = False
    forks: str | None = None
    prompt: str = ""
    called: bool = False
    waits: int = 0
    over: bool = False
    adopted: AdoptedAttempt | None = None

    @property
    def takes_up(self) -> bool:
        """Whether it takes up a turn that was interrupted."""
        return self.going_on is not None and self.going_on.interrupted

    def messages(self, reply: Reply) -> tuple[Message, ...]:
        """What was said in the turn that `reply` ended."""
        refused = () if self.going_on is None else self.going_on.refused
        if self.takes_up:
            return (*refused, Message("user", self.prompt), *reply.turn(INTERRUPTED))
        return (*refused, *reply.turn(self.prompt))


class AttemptRunner:
    """Begins turns and has them."""

    def __init__(self, state: RunState, context: RunContext, stamp: Callable[[], str]) -> None:
        self._state = state
        self._context = context
        self._stamp = stamp
        self._log = logger(run=context.run_id)
        # Asked once: to ask a protocol costs more than all else that a turn's start does.
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
        """Take over the attempt that an earlier process began: as that process began it, as far as can be told."""
        task, number = self._state.dag.tasks[position], self._state.attempts[position]
        going_on = self._state.going_on.get(position)
        self._state.adopt(position)
        before = None if going_on is not None else self._state.session_to_go_on_with(task)
        session_id = adopted.session_id
        # It may have gone on in a session of its own, where that one was lost.
        same = before is not None and (before == session_id or not self._forks(task))
        resume, forks = going_on is not None or same, None if same else before
        return Attempt(
            position, task, number, session_id, going_on, adopted.confirmed, resume, forks, called=True, adopted=adopted
        )

    def _forks(self, task: Task) -> bool:
        """Whether the task branches off from the conversation that it continues, so that this stays as it is: because
        its backend can do so, or because several tasks would get into each other's way.
        """
        assert task.continues is not None
        before = self._state.dag.position(task.continues)
        backend = self._context.backends[self._context.names[before]]
        return self._state.times_continued(before) > 1 or (isinstance(backend, ForkingBackend) and backend.can_fork)

    def run(self, turn: Attempt) -> Awaitable[CallOutcome]:
        """Render the prompt and call the backend. Raises nothing but cancellation."""
        return self._have(turn) if turn.adopted is None else self._have_adopted(turn)

    async def _have_adopted(self, turn: Attempt) -> CallOutcome:
        outcome = await self._have(turn)
        if (files := self._files(turn)) is not None:
            await end_turn(files.turn)  # its backend may never have taken hold of it
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
        """Seconds that the attempt may take from now on."""
        limit = turn.task.timeout
        if limit is None or turn.adopted is None:
            return limit
        return max(limit - self.earlier_duration(turn), _TO_TAKE_HOLD_S)

    def earlier_duration(self, turn: Attempt) -> float:
        """For how many seconds the turn has been at work since another process began it; 0 where this one did. When one
        that has ended did so nobody knows.
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
        """What the task's conversation goes on from, read back where it was not kept."""
        if not self._state.is_completed(continues):
            return NO_HISTORY
        past = self._state.past(task)
        if past is None:
            past = await self._context.recall(continues)
            self._state.keep_conversation(self._state.dag.position(continues), past)
        return past

    def _request(self, turn: Attempt, past: History) -> ConversationRequest:
        going_on, answer = turn.going_on, None
        history = () if past is NO_HISTORY else past.messages  # which are put together anew each time
        if going_on is not None:
            history += (*going_on.said, *going_on.refused)
            if going_on.answer is not None and not going_on.interrupted:
                answer = Answer(going_on.answer.value)
        task = turn.task
        files = self._files(turn) if self._outlive[self._context.names[turn.position]] else None
        return ConversationRequest(  # by position: fourteen keywords take as long as all else that is done here
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
        """The id became known, or another one, or was confirmed. A call after the turn's end, or with no text, changes
        nothing; `last` is the reply's own word, which need not confirm what the turn's end has settled.
        """
        known = clean_text(session_id) if isinstance(session_id, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if known is None or (turn.over and not last):
            return
        if known == turn.session_id and (turn.confirmed or last):
            return
        turn.session_id, turn.confirmed = known, True
        self._context.sink.submit([events.SessionOpened(self._stamp(), turn.task.id, turn.number, known)])
