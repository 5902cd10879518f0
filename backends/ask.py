"""`ask`: a question from inside a task's code, to a person or to whoever answers for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import cast

from plait.backends.protocol import Answer, JsonInput, JsonValue, Question


class Asked(BaseException):
    """Ends the turn in which `ask` found no answer. Not an Exception, so that no `except Exception` swallows it."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.text)
        self.question = question


class _Answers:
    def __init__(self, given: Sequence[tuple[str, JsonValue]]) -> None:
        self._given = list(given)

    def next(self, text: str) -> Answer | None:
        """The next answer to this question. Answers to what the code asks no more are passed over; once it asks
        something new, none that follows fits.
        """
        while self._given:
            question, value = self._given.pop(0)
            if question == text:
                return Answer(value)
        return None


_answers: ContextVar[_Answers | None] = ContextVar("answers", default=None)


async def ask(
    text: str,
    *,
    schema: Mapping[str, object] | None = None,
    default: JsonInput = None,
    deadline: float | None = None,
) -> JsonValue:
    """The answer to a question that a task asks while it runs; see `Question` for the parameters.

    The first time there is no answer: the turn ends here, by an exception that is no Exception, and the task waits.
    Once somebody has answered, possibly days later and in another process, the task's function or turn is *run again
    from its start*, and this call returns the answer. So what comes before it should be cheap and do no harm when it
    is done twice. Several questions of one task are answered in the order in which they are asked, as long as it asks
    them with the same texts each time.

    Raises RuntimeError outside of a task.
    """
    answers = _answers.get()
    if answers is None:
        raise RuntimeError("ask() works only while a runner runs a task; nobody would hear the question here")
    answer = answers.next(text)
    if answer is None:
        raise Asked(Question(text, schema, cast("JsonValue", default), deadline))
    return answer.value


_NO_ANSWERS = _Answers(())


class answering:  # noqa: N801 - used as a statement, like a function
    """`with answering(given):` has `ask` find these answers, each to a question's text, in the code inside. Costs next
    to nothing where none are given and none are in effect.
    """

    __slots__ = ("_given", "_token")

    def __init__(self, given: Sequence[tuple[str, JsonValue]]) -> None:
        self._given = given
        self._token: Token[_Answers | None] | None = None

    def __enter__(self) -> None:
        if self._given or _answers.get() is not _NO_ANSWERS:
            self._token = _answers.set(_Answers(self._given) if self._given else _NO_ANSWERS)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _answers.reset(self._token)


def as_here() -> Callable[[], None]:
    """What has `ask` find, in the asyncio task that calls it, what it finds here: for code that belongs here, though a
    task that answers elsewhere has started it.
    """
    given = _answers.get()

    def set_here() -> None:
        _answers.set(given)

    return set_here
