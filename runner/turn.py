"""One attempt from its start on: its session, its prompt, and what its backend reports meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from backends.errors import BackendError, ErrorKind
from backends.protocol import Backend, Message, Opening, Output, Reply
from backends.text import clean_text
from runner import events
from runner.attempt import Outcome, attempt, classified
from runner.clock import Clock
from runner.feed import Feed
from runner.log import logger
from runner.sink import Sink
from runner.state import Past, RunState
from runner.task import Task

_NOT_WRITTEN_DOWN = (
    "the store is away, so this at_most_once task is not begun: after a crash nobody could tell that it had been; "
    "resume with --retry-failed when the store answers"
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an execution works with. `names` gives each task's backend, by position, as a key of `backends`."""

    run_id: str
    backends: Mapping[str, Backend]
    names: Sequence[str]
    sink: Sink
    feed: Feed
    clock: Clock
    rng: random.Random


INTERRUPTED = (
    "You were interrupted while you worked on the request above: the program that asked you ended before your answer "
    "was written down. Look at what you have done already, do what is missing, and give your whole answer again."
)
"""What is said in a conversation that an interruption cut, instead of the prompt, which it holds already."""


@dataclass(slots=True, eq=False)
class Turn:
    """Attempt `number` of the task at `position`, recorded as running. `session_id` is as far as it is known.

    `goes_on`: it takes up the conversation of an attempt that was interrupted. `confirmed`: see SessionOpened.
    """

    position: int
    task: Task
    number: int
    session_id: str | None
    goes_on: bool = False
    confirmed: bool = False
    prompt: str = ""
    called: bool = False
    waits: int = 0
    over: bool = False

    def messages(self, reply: Reply) -> tuple[Message, ...]:
        """What was said in the turn that `reply` ended."""
        if not self.goes_on:
            return reply.turn(self.prompt)
        return (Message("user", self.prompt), *reply.turn(INTERRUPTED))


class Turns:
    """Begins turns and has them."""

    def __init__(self, state: RunState, around: Surroundings, stamp: Callable[[], str]) -> None:
        self._state = state
        self._around = around
        self._stamp = stamp
        self._log = logger(run=around.run_id)

    def begin(self, position: int) -> Turn:
        """The turn that is to be recorded as running."""
        task = self._state.dag.tasks[position]
        number = self._state.attempts[position]
        begun = self._state.interrupted.pop(position, None)
        if begun is not None:
            return Turn(position, task, number, begun, goes_on=True, confirmed=True)
        past = self._state.past(task)
        session_id = self._new_session_id(self._around.names[position]) if past is None else past.session_id
        return Turn(position, task, number, session_id)

    async def have(self, turn: Turn) -> Outcome:
        """Render the prompt and call the backend. Raises nothing but cancellation."""
        if turn.task.at_most_once and self._around.sink.away:
            return Outcome(None, None, BackendError(ErrorKind.TRANSIENT, _NOT_WRITTEN_DOWN))
        try:
            turn.prompt = clean_text(self._state.prompt(turn.task))
        except Exception as error:
            return Outcome(None, None, classified(error))
        past = self._state.past(turn.task) or Past()
        opening = Opening(
            session_id=turn.session_id,
            resume=turn.goes_on or past.session_id is not None,
            history=past.messages,
            output_schema=turn.task.output_schema,
            idempotency_key=f"{self._around.run_id}:{turn.task.id}",
            metadata=turn.task.metadata,
            on_output=partial(self._output, turn),
            on_session=partial(self._session, turn),
        )
        backend = self._around.backends[self._around.names[turn.position]]
        turn.called = True
        outcome = await attempt(backend, opening, INTERRUPTED if turn.goes_on else turn.prompt, turn.task.timeout)
        turn.over = True
        if outcome.reply is not None and outcome.reply.session_id is not None:
            self._session(turn, outcome.reply.session_id, last=True)
        return outcome

    def _new_session_id(self, name: str) -> str | None:
        try:
            session_id = self._around.backends[name].new_session_id()
        except Exception as error:
            self._log.warning("no_session_id", backend=name, error=type(error).__name__)
            return None
        return clean_text(session_id) if isinstance(session_id, str) else None

    def _output(self, turn: Turn, output: Output) -> None:
        if not turn.over:
            event = events.TaskOutput(self._stamp(), turn.task.id, turn.number, output.kind, str(output.text))
            self._around.feed.publish(event)

    def _session(self, turn: Turn, session_id: str, *, last: bool = False) -> None:
        """The id became known, or another one, or was confirmed. A call after the turn's end, or with no text, changes
        nothing; `last` is the reply's own word, which need not confirm what the turn's end has settled.
        """
        known = clean_text(session_id) if isinstance(session_id, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if known is None or (turn.over and not last):
            return
        if known == turn.session_id and (turn.confirmed or last):
            return
        turn.session_id, turn.confirmed = known, True
        self._around.sink.submit([events.SessionOpened(self._stamp(), turn.task.id, turn.number, known)])
