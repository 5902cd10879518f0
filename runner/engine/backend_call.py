"""The call of a backend for one attempt. Every result and every error becomes a `CallOutcome`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias, cast, get_args

import anyio

from plait.backends.backend_protocol import Backend, ConversationRequest, Reply
from plait.backends.function_backend import format_traceback
from plait.backends.large_answers import in_thread, is_large, read_answer
from plait.backends.output_schema import Mismatch, Schema, invalid_output
from plait.backends.running_turn import Cancellation, QuestionAsked, Turn, in_turn, question_in
from plait.dialogue import Message, Question, Role
from plait.errors import BackendError, BackendUnavailable, ErrorKind, PlaitError, PromptError
from plait.failpoints import reached
from plait.json_form import JsonValue, to_json, value
from plait.program_log import logger
from plait.runner.domain.asked_question import Asking, Way
from plait.runner.engine.run_options import Cancels
from plait.safe_text import clean_text, shown, without_secrets
from plait.usage import NO_USAGE, Usage


@value
class CallOutcome:
    """The outcome of an attempt: a reply, an error or a question."""

    reply: Reply | None = None
    """The reply, if the attempt succeeded."""
    data_json: str | None = None
    """The `data` of the reply as JSON; None without data."""
    error: BackendError | None = None
    """The error, if the attempt failed."""
    asked: Question | None = None
    """The unanswered question, if the code of the task called `ask`."""

    @property
    def usage(self) -> Usage:
        """What the attempt has used."""
        ended = self.reply or self.error
        return NO_USAGE if ended is None else ended.usage


Answers: TypeAlias = Sequence[tuple[str, JsonValue]]
"""The answers available to `ask`: pairs of question text and answer."""
_NEVER = Cancellation()
"""The cancellation of a turn outside a run: never requested."""


async def call_backend(
    backend: Backend,
    request: ConversationRequest,
    prompt: str,
    answers: Answers = (),
    cancellation: Cancellation = _NEVER,
) -> CallOutcome:
    """Open the conversation and run one turn, within the `timeout` of `request`. Return the outcome.

    The turn reads from `cancellation` whether its end is requested. Errors are returned, not raised. Cancellation
    of the call ends the turn, closes the conversation and is then re-raised.
    """
    replies: list[Reply] = []
    cancels = Cancels()
    timeout = request.timeout
    turn = Turn(cancellation, answers)
    try:
        if timeout is None:
            await in_turn(turn, _send(backend, request, prompt, replies))
        else:
            with anyio.move_on_after(timeout) as limit:
                await in_turn(turn, _send(backend, _timed_from_go(request, limit, timeout), prompt, replies))
            if limit.cancelled_caught and not replies:
                raise BackendError(ErrorKind.TIMEOUT, f"no answer within the task's timeout of {timeout:g} s")
        if not replies:
            raise BackendError(
                ErrorKind.UNEXPECTED, "the backend's conversation suppressed the exception that ended the turn"
            )
        reply = replies[0]
        if request.output_schema is not None:
            reply = await _with_data(reply, request.output_schema, prompt)
        data: object = getattr(reply, "data", None)  # a backend may return anything
        is_small = data is None or not is_large(data)
        outcome = _checked(reply) if is_small else await _checked_in_thread(reply)
    except QuestionAsked as asked:
        outcome = _asked(asked.question)
    except asyncio.CancelledError as error:
        if cancels.since:
            raise
        outcome = _failed(ErrorKind.UNEXPECTED, f"the backend raised {error!r}, but plait had not cancelled the call")
    except SystemExit as error:
        message = f"the backend called sys.exit({error.code!r}); raise BackendError instead"
        outcome = _failed(ErrorKind.UNEXPECTED, clean_text(message))
    except Exception as error:
        outcome = CallOutcome(error=classified(error))
    except BaseExceptionGroup as error:  # a task group in the task's code, around a call of `ask`
        inside = question_in(error)
        if inside is None:
            raise
        outcome = _asked(inside.question)
    cancels.withdraw()
    return outcome


def _timed_from_go(request: ConversationRequest, limit: anyio.CancelScope, timeout: float) -> ConversationRequest:
    """Let the time of a request for another host begin when the host may begin."""
    if request.placement is None:
        return request
    limit.deadline = inf

    def on_go() -> None:
        if limit.deadline == inf:
            limit.deadline = anyio.current_time() + timeout

    return replace(request, placement=replace(request.placement, on_go=on_go))


def _failed(kind: ErrorKind, message: str) -> CallOutcome:
    return CallOutcome(error=BackendError(kind, message))


def _asked(question: Question) -> CallOutcome:
    wrong = _question_problem(question)
    if wrong:
        return _failed(ErrorKind.UNEXPECTED, f"ask() was called with {wrong}")
    return CallOutcome(asked=question)


async def _send(backend: Backend, request: ConversationRequest, prompt: str, replies: list[Reply]) -> None:
    """Run one turn and append the reply to `replies`. The reply, already paid for, is kept even if closing the
    conversation fails or times out.
    """
    try:
        async with backend.open(request) as conversation:
            reached("attempt.before_call")
            replies.append(await conversation.send(prompt))
            reached("attempt.after_call")
    except Exception as error:
        if not replies:
            raise
        logger().warning("closing_failed", error=type(error).__name__, key=request.idempotency_key)


async def _with_data(reply: Reply, schema: Mapping[str, object], prompt: str) -> Reply:
    """Return the reply with data: of a backend that leaves the task's schema to plait, the value in the text. Raises
    BackendError (invalid_output) if the text holds no value that fits.
    """
    if _reply_problem(reply) or reply.data is not None or reply.question is not None or reply.tasks:
        return reply
    try:
        with anyio.CancelScope(shield=True):  # the reply is paid for
            return replace(reply, data=await read_answer(Schema(schema), reply.text))
    except Mismatch as mismatch:
        error = invalid_output(mismatch)
        error.usage, error.messages = reply.usage, reply.turn(prompt)
        raise error from None
    raise AssertionError("a shielded scope is not cancelled")


async def _checked_in_thread(reply: Reply) -> CallOutcome:
    with anyio.CancelScope(shield=True):  # the reply is paid for
        return await in_thread(_checked, reply)
    raise AssertionError("a shielded scope is not cancelled")


def _checked(reply: Reply) -> CallOutcome:
    """Return the outcome of a reply in storable form, so that no paid reply is lost at the store. Raises BackendError
    if `reply` is invalid.
    """
    if wrong := _reply_problem(reply):
        raise BackendError(ErrorKind.UNEXPECTED, f"the backend's reply cannot be stored: {wrong}")
    data_json = None
    if reply.data is not None:
        try:
            if _deeper_than(reply.data, _DEEPEST):
                raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
            data_json = to_json(reply.data)
            # The same form as a resume reads back: lists for tuples, all keys text.
            reply = replace(reply, data=json.loads(data_json))
        except (TypeError, ValueError, RecursionError) as error:
            raise BackendError(ErrorKind.INVALID_OUTPUT, f"the reply's data is not JSON: {error}") from error
    usage = kept_usage(reply.usage)
    is_ascii = reply.text.isascii() and (
        not reply.messages
        or all(one.content.isascii() and one.thoughts.isascii() and _countable(one.usage) for one in reply.messages)
    )
    if is_ascii and usage is reply.usage:
        return CallOutcome(reply, data_json)
    clean = replace(reply, text=clean_text(reply.text), messages=_clean(reply.messages), usage=usage)
    return CallOutcome(clean, data_json)


def _clean(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(Message(m.role, clean_text(m.content), kept_usage(m.usage), clean_text(m.thoughts)) for m in messages)


_MOST_TOKENS = 10**12
"""Most tokens of one turn. No model uses as many, and the sum of a million such turns still fits in 63 bits."""
_MOST_USD = 10**9
"""Highest cost of one turn, in US dollars."""
_LONGEST_HINT_S = 366 * 86_400.0
"""Longest hint of a server in seconds. A longer one is a mistake, such as a point in time in place of a duration."""
_ROLES = get_args(Role)
_DEEPEST = 200
"""Most levels of nesting in structured data: JSON readers have a depth limit, and a resume must read the data."""


def _reply_problem(reply: object) -> str | None:
    """Return a description of the reply's first defect, if any: third-party backends may lack type checks."""
    if not isinstance(reply, Reply):
        return f"send() returned {type(reply).__name__}, not a Reply"
    if not isinstance(reply.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"its text is of type {type(reply.text).__name__}"
    if odd := [message.role for message in reply.messages if message.role not in _ROLES]:
        return f"a message has the role {odd[0]!r}; the roles are {', '.join(_ROLES)}"
    if reply.question is not None and reply.tasks:
        return "the reply has both a question and tasks; return one of the two"
    if reply.question is not None and (wrong := _question_problem(reply.question)):
        return f"the question has {wrong}"
    return None


def _question_problem(question: Question) -> str | None:
    text, deadline = question.text, question.deadline
    if not isinstance(text, str) or not text.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        return "no text"
    if text != clean_text(text):
        return "a text that cannot be stored"
    if deadline is not None and not (isinstance(deadline, int | float) and 0 <= deadline < 1e9):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"a deadline of {deadline!r}, which is not a number of seconds"
    try:
        asking = Asking(question, Way.REPLY)
        encoded = asking.encoded()
        if encoded != clean_text(encoded):
            return "a schema or a default that cannot be stored"
        if question.schema is not None:
            Schema(question.schema)
        if question.default is not None:
            asking.checked(question.default)
    except (TypeError, ValueError, RecursionError, BackendError, PlaitError) as error:
        return f"a schema or a default that cannot be used: {error}"
    return None


def kept_usage(usage: Usage) -> Usage:
    """Return `usage` with a printable model name; an unknown usage if its numbers are impossible, such as a negative
    count.
    """
    if usage is NO_USAGE:
        return usage
    usage = usage if _countable(usage) else Usage(model=usage.model, cost_is_partial=True)
    name = None if usage.model is None else shown(usage.model) or None
    return usage if name == usage.model else replace(usage, model=name)


def _countable(usage: Usage) -> bool:
    """Return whether the numbers of `usage` are possible, and can be added up and stored."""
    read, written, reasoning, cost = usage.input_tokens, usage.output_tokens, usage.reasoning_tokens, usage.cost_usd
    cache_read, cache_write = usage.cache_read_tokens, usage.cache_write_tokens
    for_an_hour = usage.cache_write_1h_tokens
    counts = (read, written, reasoning, cache_read, cache_write, for_an_hour)
    whole = set(map(type, counts)) == {int} and min(counts) >= 0 and max(counts) <= _MOST_TOKENS
    whole = whole and cache_read + cache_write <= read and for_an_hour <= cache_write and reasoning <= written
    return whole and (cost is None or 0 <= cost <= _MOST_USD)


def _deeper_than(value: JsonValue, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(item, levels - 1) for item in inside)


def classified(error: Exception) -> BackendError:
    """Return `error` as a storable BackendError. A group of a single error counts as the error."""
    cause = only_error(error)
    if isinstance(cause, BackendError):
        return _tidied(cause)
    text = _text_of(cause)
    if isinstance(cause, BackendUnavailable):
        return BackendError(ErrorKind.UNAVAILABLE, text)
    if isinstance(cause, PromptError):
        return BackendError(ErrorKind.INVALID_REQUEST, text)
    name = type(cause).__name__
    message = f"{name}: {without_secrets(text)}"[:2000] if text else name
    unexpected = BackendError(ErrorKind.UNEXPECTED, message, traceback=format_traceback(cause))
    unexpected.__cause__ = cause
    return unexpected


def _tidied(error: BackendError) -> BackendError:
    """Return `error` with a valid kind and storable fields, whatever the backend set."""
    kind = ErrorKind(error.kind) if error.kind in set(ErrorKind) else ErrorKind.UNEXPECTED
    message, hint = error.message, error.retry_after
    text = clean_text(message) if isinstance(message, str) else _text_of(error)  # pyright: ignore[reportUnnecessaryIsInstance]
    sound = isinstance(hint, int | float) and 0 <= hint <= _LONGEST_HINT_S
    tidied = BackendError(
        kind,
        text[:2000],
        retry_after=hint if sound else None,
        usage=kept_usage(error.usage),
        messages=_clean(error.messages),
        continues_session=error.continues_session,
        traceback=error.traceback,
    )
    tidied.status = error.status
    tidied.__cause__ = error
    return tidied


def _text_of(error: BaseException) -> str:
    try:
        return clean_text(str(error))
    except Exception:  # an exception whose own text raises
        return ""


def only_error(error: BaseException) -> BaseException:
    """Return the single error inside nested groups; the group itself if a group holds several errors."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return only_error(group.exceptions[0]) if len(group.exceptions) == 1 else group
