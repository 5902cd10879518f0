"""Conversations for servers that keep no history: the whole history is sent with every turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from plait.backends.backend_protocol import ConversationRequest, Output, Reply
from plait.backends.output_schema import Mismatch, Schema, invalid_output, repair_prompt
from plait.backends.threads import read_answer
from plait.dialogue import Message
from plait.errors import BackendError
from plait.json_form import JsonValue
from plait.safe_text import clean_text
from plait.usage import NO_USAGE, Usage

Ask: TypeAlias = Callable[[Sequence[Message]], Awaitable[Message]]
"""One request: takes the whole conversation, the question last, and returns the assistant's whole message."""


class ReplayConversation:
    """A conversation built on `ask`. A failed turn leaves no trace in the history."""

    def __init__(self, ask: Ask, request: ConversationRequest) -> None:
        self._ask = ask
        self._request = request
        self._history = [Message(old.role, clean_text(old.content), old.usage) for old in request.history]
        self._schema = None if request.output_schema is None else Schema(request.output_schema)

    @property
    def session_id(self) -> str | None:
        """Id chosen by the caller; unknown to the server."""
        return self._request.session_id

    async def send(self, prompt: str) -> Reply:
        turn: list[Message] = []
        data = None
        try:
            text = await self._exchange(turn, prompt)
            if self._schema is not None:
                text, data = await self._fitting(turn, text, self._schema)
        except BackendError as error:
            # The requests before the failure were paid for as well.
            error.usage += _usage_of(turn)
            arrived = (*turn, *error.messages)
            error.messages = arrived if len(arrived) > 1 else ()
            raise
        self._history += turn
        return Reply(text, data, self.session_id, _usage_of(turn), tuple(turn))

    async def _exchange(self, turn: list[Message], prompt: str) -> str:
        turn.append(Message("user", clean_text(prompt)))
        answer = await self._ask([*self._history, *turn])
        turn.append(answer)
        return answer.content

    async def _fitting(self, turn: list[Message], text: str, schema: Schema) -> tuple[str, JsonValue]:
        try:
            return text, await read_answer(schema, text)
        except Mismatch as mismatch:
            problem = mismatch
        self._request.on_output(Output("notice", "the answer does not fit its schema; asking once more"))
        text = await self._exchange(turn, repair_prompt(problem, schema))
        try:
            return text, await read_answer(schema, text)
        except Mismatch as mismatch:
            raise invalid_output(mismatch) from None


def _usage_of(turn: Sequence[Message]) -> Usage:
    return sum((message.usage for message in turn), NO_USAGE)
