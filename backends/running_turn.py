"""What the code of a running turn may ask of its run: whether the turn is to end, and the answers of a person (`ask`).

The runner makes one `Cancellation` for each run, and runs each turn in a context of its own (`in_turn`). The request to
end is read at the safe points of a turn, such as between two calls of a model: a task's code reads it with
`cancel_requested`; a backend passes it on in its own protocol (`when_cancelled`). A turn that goes on regardless is cut
when the grace time of its run is over.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from math import inf
from types import coroutine
from typing import Any, TypeVar, cast

from plait.backends.backend_protocol import ConversationRequest
from plait.dialogue import Question
from plait.json_form import JsonInput, JsonValue

_T = TypeVar("_T")


def cancel_requested() -> bool:
    """Return whether the task in which the caller runs is to end: its run is being cancelled, or the attempt has ended.

    For code that runs for long: functions, nodes of a graph, and the threads and tasks that they start with a copy of
    their context. The attempt of a plain function has ended when the time limit is over or the run was stopped: nobody
    reads the result. False outside of a task. Cheap, and callable from any thread.
    """
    turn = TURN.get()
    return turn is not None and (turn.over or turn.cancellation.requested)


class Cancellation:
    """The request to end the turns of one run. Used from the event loop's thread; `requested` is read by any thread."""

    __slots__ = ("_callbacks", "requested")

    def __init__(self) -> None:
        self.requested = False
        """Whether `request` was called."""
        self._callbacks: dict[object, Callable[[], object]] = {}

    def request(self) -> None:
        """Set `requested` and call the registered callbacks. A second call does nothing."""
        if not self.requested:
            self.requested = True
            for callback in list(self._callbacks.values()):
                callback()

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Generator[None]:
        """Call `callback` once when the request is made inside the block, or at once if it was made before."""
        key = object()
        self._callbacks[key] = callback
        try:
            if self.requested:
                callback()
            yield
        finally:
            del self._callbacks[key]


class Turn:
    """A turn whose code can read the request to end, and the answers to its questions."""

    __slots__ = ("answers", "cancellation", "over")

    def __init__(self, cancellation: Cancellation, answers: Sequence[tuple[str, JsonValue]] = ()) -> None:
        self.cancellation = cancellation
        self.answers = list(answers)
        """The answers that are left for `ask`: the text of each question, and its answer."""
        self.over = False
        """Whether the attempt has ended: code in a thread may go on."""


TURN: ContextVar[Turn | None] = ContextVar("turn", default=None)
"""The turn in which the code runs; None outside of a run."""


@coroutine
def in_turn(turn: Turn, inner: Coroutine[Any, Any, _T]) -> Generator[Any, Any, _T]:
    """Await `inner` as the code of `turn`, in a copy of the current context, and return the result.

    A worker runs many attempts in one asyncio task, and the next attempt must not see a context variable that the code
    of this attempt sets. Exceptions, cancellation included, pass in both directions.
    """
    run = copy_context().run
    run(TURN.set, turn)
    try:
        awaited = run(inner.send, None)
        while True:
            try:
                value = yield awaited
            except BaseException as error:
                awaited = run(inner.throw, error)
            else:
                awaited = run(inner.send, value)
    except StopIteration as end:
        result: _T = end.value
        return result
    finally:
        turn.over = True


_EARLY = 0.5


def end_of_turn(request: ConversationRequest) -> float:
    """Return the time of anyio's clock at which a turn of `request`, opened now, has to end: half a second before the
    task's timeout, or a tenth of it, so that its usage is recorded and the next attempt can go on from there.
    """
    from anyio import current_time  # noqa: PLC0415 - small answers do without anyio

    limit = request.timeout
    return inf if limit is None else current_time() + limit - min(_EARLY, limit / 10)


@contextmanager
def when_cancelled(callback: Callable[[], object]) -> Generator[None]:
    """Call `callback` in the event loop's thread when the cancellation of the current turn's run is requested inside
    the block, or at once if it was requested before. Never called outside of a run. The callback must not raise.
    """
    turn = TURN.get()
    if turn is None:
        yield
        return
    with turn.cancellation.calling(callback):
        yield


class QuestionAsked(BaseException):
    """Ends the turn in which `ask` found no answer. Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.text)
        self.question = question


def question_in(error: BaseException) -> QuestionAsked | None:
    """Return `error` if it is a question, or the first question among the errors of a task group. Other errors recur
    once the question is answered.
    """
    if isinstance(error, QuestionAsked):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    inside = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return next((question for one in inside if (question := question_in(one)) is not None), None)


async def ask(
    text: str,
    *,
    schema: Mapping[str, object] | None = None,
    default: JsonInput = None,
    deadline: float | None = None,
) -> JsonValue:
    """Ask a question from a running task and return the answer. See `Question` for the parameters.

    The first call has no answer: the call raises a BaseException that is not an Exception, which ends the turn, and the
    task waits. After an answer is given, possibly days later and in another process, the task's function or turn is
    *run again from its start*, and the same call returns the answer. Code before the call should therefore be cheap and
    safe to repeat. A task may ask several questions; answers are matched in the order of the questions, provided that
    each run asks the same texts.

    Raises RuntimeError outside of a task.
    """
    turn = TURN.get()
    if turn is None:
        raise RuntimeError("ask() works only inside a task that a runner runs")
    # Answers to questions that the code no longer asks are skipped. After a new question, no later answer fits.
    while turn.answers:
        question, answer = turn.answers.pop(0)
        if question == text:
            return answer
    raise QuestionAsked(Question(text, schema, cast("JsonValue", default), deadline))
