"""One attempt of one task: the only caller of backends. Whatever happens in there comes out as an `Outcome`."""

from __future__ import annotations

from typing import cast

import anyio

from backends.errors import BackendError, BackendUnavailable, ErrorKind
from backends.protocol import Backend, Message, Opening, Reply
from backends.text import clean_text
from backends.values import value
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
            reply = await _turn(backend, opening, prompt)
        else:
            with anyio.move_on_after(timeout) as limit:
                reply = await _turn(backend, opening, prompt)
            if limit.cancelled_caught:
                raise BackendError(ErrorKind.TIMEOUT, f"no answer within the task's timeout of {timeout:g} s")
        return _checked(reply)  # pyright: ignore[reportPossiblyUnboundVariable] - bound unless the limit was hit
    except Exception as error:
        return Outcome(None, None, classified(error))


async def _turn(backend: Backend, opening: Opening, prompt: str) -> Reply:
    async with backend.open(opening) as conversation:
        return await conversation.send(prompt)


def _checked(reply: Reply) -> Outcome:
    """Refuse what is no reply, and make what is one storable: nothing that was paid for may be lost at the store."""
    if not isinstance(reply, Reply):  # pyright: ignore[reportUnnecessaryIsInstance] - backends come from outside
        kind = type(reply).__name__
        raise BackendError(ErrorKind.UNEXPECTED, f"the backend's send() returned {kind}, not a Reply")
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


def classified(error: Exception) -> BackendError:
    """`error` in our words; a group with one error inside is that error."""
    cause = _only(error)
    if isinstance(cause, BackendError):
        cause.message = clean_text(cause.message)
        return cause
    if isinstance(cause, PromptError | BackendUnavailable):
        return BackendError(ErrorKind.INVALID_REQUEST, str(cause))
    message = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    unexpected = BackendError(ErrorKind.UNEXPECTED, clean_text(message)[:2000])
    unexpected.__cause__ = cause
    return unexpected


def _only(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _only(group.exceptions[0]) if len(group.exceptions) == 1 else group
