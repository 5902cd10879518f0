"""Questions to a person, or to a program in the person's place: `ask` in a task's code, and a person as a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar, Token
from typing import cast

from plait.backends.backend_protocol import Conversation, ConversationRequest
from plait.backends.function_backend import FunctionBackend
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonInput, JsonValue


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


_answers: ContextVar[list[tuple[str, JsonValue]] | None] = ContextVar("answers", default=None)
"""The answers that are left for the code of the task: the text of each question, and its answer."""
_NO_ANSWERS: list[tuple[str, JsonValue]] = []


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
    answers = _answers.get()
    if answers is None:
        raise RuntimeError("ask() works only inside a task that a runner runs")
    # Answers to questions that the code no longer asks are skipped. After a new question, no later answer fits.
    while answers:
        question, answer = answers.pop(0)
        if question == text:
            return answer
    raise QuestionAsked(Question(text, schema, cast("JsonValue", default), deadline))


class answering:  # noqa: N801 - used as a statement, like a function
    """Provide `answers` for `ask` to the code inside `with answering(answers):`, each the text of a question and its
    answer. Almost free without answers, where none are in effect.
    """

    __slots__ = ("_pairs", "_token")

    def __init__(self, answers: Sequence[tuple[str, JsonValue]]) -> None:
        self._pairs = answers
        self._token: Token[list[tuple[str, JsonValue]] | None] | None = None

    def __enter__(self) -> None:
        if self._pairs or _answers.get() is not _NO_ANSWERS:
            self._token = _answers.set(list(self._pairs) or _NO_ANSWERS)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _answers.reset(self._token)


def given_answers() -> list[tuple[str, JsonValue]]:
    """Return the answers that `ask` would return in the current context: pairs of question text and answer."""
    return list(_answers.get() or ())


def as_here() -> Callable[[], None]:
    """Return a function that installs the current `ask()` answers in the asyncio task that calls it.

    Needed for a callback that a worker task starts but that belongs to the current context.
    """
    answers = _answers.get()

    def set_here() -> None:
        _answers.set(answers)

    return set_here


class PersonBackend:
    """A backend that asks a person, or a program answering in the person's place; see `ask`.

    The task waits for the answer (`waiting_input`). The answer is text, or a value that fits the task's
    `output_schema`. After `deadline` seconds without an answer, `default` is used; with a `default` of None the task
    fails. Without a deadline the question waits for ever. There are no sessions. A cancelled turn asks nothing.
    """

    def __init__(self, *, default: JsonInput = None, deadline: float | None = None) -> None:
        self.default = default
        self.deadline = deadline

    def answer_key(self) -> JsonValue:
        """Return the same key for every person: an answer is for the question, and the question is the prompt."""
        return "person"

    def new_session_id(self) -> str | None:
        """Return None: people have no sessions."""
        return None

    def open(self, request: ConversationRequest) -> AbstractAsyncContextManager[Conversation]:
        """Open a conversation in which every turn asks its prompt."""

        async def asked(prompt: str) -> JsonValue:
            if not prompt.strip():
                raise BackendError(ErrorKind.INVALID_REQUEST, "the prompt is empty: give the person a question")
            return await ask(prompt, schema=request.output_schema, default=self.default, deadline=self.deadline)

        return FunctionBackend(asked).open(request)
