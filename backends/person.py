"""A person as a backend: the task's prompt is the question, and the person's answer is the result."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from plait.backends.ask import ask
from plait.backends.backend_protocol import Conversation, ConversationRequest
from plait.backends.function_backend import FunctionBackend
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonInput, JsonValue


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
