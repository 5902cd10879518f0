"""One attempt of one task: the only caller of backends. Whatever happens in there comes out as an `Outcome`."""

from __future__ import annotations

import asyncio
from types import NoneType
from typing import cast

import anyio

from backends.errors import BackendError, BackendUnavailable, ErrorKind
from backends.protocol import NO_USAGE, Backend, Message, Opening, Reply, Usage
from backends.text import clean_text
from backends.values import value
from runner.cancelling import being_cancelled
from runner.errors import PromptError
from runner.translate import to_json


@value
class Outcome:
    """What an attempt came to: a reply whose `data` is encoded in `data_json`, or an error."""

    reply: Reply | None
    data_json: str | None
    error: BackendError | None


async def attempt(backend: Backend, opening: Opening, prompt: str, timeout: float | None) -> Outcome:
    """Open the conversation and have one turn, in at most `timeout` seconds.

    Raises nothing but cancellation, which ends the turn and closes the conversation on its way out.
    """
    try:
        if timeout is None:
            return _checked(await _turn(backend, opening, prompt))
        with anyio.move_on_after(timeout):
            return _checked(await _turn(backend, opening, prompt))
        raise BackendError(ErrorKind.TIMEOUT, f"no answer within the task's timeout of {timeout:g} s")
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return Outcome(None, None, BackendError(ErrorKind.UNEXPECTED, f"the backend was cancelled from inside {error}"))
    except Exception as error:
        return Outcome(None, None, classified(error))


async def _turn(backend: Backend, opening: Opening, prompt: str) -> Reply:
    async with backend.open(opening) as conversation:
        return await conversation.send(prompt)


def _checked(reply: Reply) -> Outcome:
    """Refuse what is no reply, and make what is one storable: nothing that was paid for may be lost at the store."""
    wrong = _what_is_wrong(reply)
    if wrong:
        raise BackendError(ErrorKind.UNEXPECTED, f"the backend's reply cannot be kept: {wrong}")
    data_json = None
    if reply.data is not None:
        try:
            data_json = to_json(reply.data)
        except (TypeError, ValueError, RecursionError) as error:
            raise BackendError(ErrorKind.INVALID_OUTPUT, f"the reply's data is not JSON: {error}") from error
    if reply.text.isascii() and all(message.content.isascii() for message in reply.messages):
        return Outcome(reply, data_json, None)
    messages = tuple(Message(m.role, clean_text(m.content), m.usage) for m in reply.messages)
    clean = Reply(clean_text(reply.text), reply.data, reply.session_id, reply.usage, messages)
    return Outcome(clean, data_json, None)


_FIELDS = {"text": str, "session_id": (str, NoneType), "usage": Usage, "messages": tuple}


def _what_is_wrong(reply: object) -> str | None:
    """Backends come from outside, where no type checker may have been."""
    if not isinstance(reply, Reply):
        return f"send() returned {type(reply).__name__}, not a Reply"
    for name, kinds in _FIELDS.items():
        value = getattr(reply, name)
        if not isinstance(value, kinds):
            return f"its {name} is of type {type(value).__name__}"
    for message in reply.messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            return "its messages are not all a Message with text"
        if not _countable(message.usage):
            return f"its message has usage {message.usage!r}"
    return None if _countable(reply.usage) else f"its usage is {reply.usage!r}"


def _countable(usage: Usage) -> bool:
    if usage is NO_USAGE:
        return True
    tokens = (usage.input_tokens, usage.output_tokens)
    return all(isinstance(count, int) and 0 <= count < 2**63 for count in tokens) and isinstance(  # pyright: ignore[reportUnnecessaryIsInstance]
        usage.cost_usd, (int, float, NoneType)
    )


def classified(error: Exception) -> BackendError:
    """`error` in our words; a group with one error inside is that error."""
    cause = _only(error)
    if isinstance(cause, BackendError):
        return _tidied(cause)
    if isinstance(cause, PromptError | BackendUnavailable):
        return BackendError(ErrorKind.INVALID_REQUEST, str(cause))
    message = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    unexpected = BackendError(ErrorKind.UNEXPECTED, clean_text(message)[:2000])
    unexpected.__cause__ = cause
    return unexpected


def _tidied(error: BackendError) -> BackendError:
    """With a kind that is one and a message that can be kept, whatever a backend put there."""
    kinds = set(ErrorKind)
    error.kind = ErrorKind(error.kind) if error.kind in kinds else ErrorKind.UNEXPECTED
    error.message = clean_text(str(error.message))
    if error.retry_after is not None and not 0 <= error.retry_after < float("inf"):
        error.retry_after = None
    return error


def _only(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _only(group.exceptions[0]) if len(group.exceptions) == 1 else group
