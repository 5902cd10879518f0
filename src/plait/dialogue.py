"""What is said in a conversation: messages, and the questions and answers of a turn. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from plait.json_form import JsonValue, value
from plait.usage import NO_USAGE, Usage

Role = Literal["system", "user", "assistant"]
"""The author of a message."""


@value
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    usage: Usage = NO_USAGE
    """Usage of an assistant message, if the backend reports usage by message."""
    thoughts: str = ""
    """Thoughts that the model wrote into its answer, such as a block `<think>`: no part of `content`, and never sent to
    a model again.
    """


@value
class Question:
    """A question to a person, or to a program answering in the person's place."""

    text: str
    """The question as shown."""
    schema: Mapping[str, object] | None = None
    """JSON Schema of the answer. None accepts any text; an empty schema accepts any JSON value."""
    default: JsonValue = None
    """Answer used once `deadline` has passed. With None, the task fails instead."""
    deadline: float | None = None
    """Seconds to wait for an answer. None waits for ever."""


@value
class Answer:
    """The answer to a question."""

    value: JsonValue
    """Text, or the value described by the question's schema."""
