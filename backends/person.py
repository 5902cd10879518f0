"""A person as a backend: the task's prompt is the question, and their answer is its result."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from plait.backends.ask import ask
from plait.backends.errors import BackendError, ErrorKind
from plait.backends.function import FunctionBackend
from plait.backends.protocol import Conversation, JsonInput, JsonValue, Opening


class PersonBackend:
    """Asks a person, and whoever answers for one; see `ask`. The task waits meanwhile (`waiting_input`).

    The answer is text, or what fits the task's `output_schema`. When `deadline` seconds have passed without one,
    `default` is taken, or, if that is None, the task fails; without a deadline the question waits for ever. There are
    no sessions. A cancelled turn asks nothing.
    """

    def __init__(self, *, default: JsonInput = None, deadline: float | None = None) -> None:
        self.default = default
        self.deadline = deadline

    def new_session_id(self) -> str | None:
        """None: people have no sessions."""
        return None

    def open(self, opening: Opening) -> AbstractAsyncContextManager[Conversation]:
        """A conversation whose every turn asks its prompt."""

        async def asked(prompt: str) -> JsonValue:
            if not prompt.strip():
                raise BackendError(ErrorKind.INVALID_REQUEST, "the prompt is empty: give the person a question")
            return await ask(prompt, schema=opening.output_schema, default=self.default, deadline=self.deadline)

        return FunctionBackend(asked).open(opening)
