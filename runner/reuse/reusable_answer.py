"""`ReusableAnswer`: an answer that a task takes over in place of a call."""

from __future__ import annotations

from dataclasses import dataclass

from plait.dialogue import Message
from plait.json_form import JsonValue
from plait.task import Task


@dataclass(frozen=True, slots=True)
class ReusableAnswer:
    """An answer of a completed task of an earlier run, or given by a person."""

    text: str
    data: JsonValue
    data_json: str | None
    prompt: str | None
    """The prompt as sent; None to render the prompt of the task that takes the answer over."""
    messages: tuple[Message, ...] = ()
    """The conversation, if longer than the prompt and the answer."""
    adds: tuple[Task, ...] = ()
    """The tasks that the task added to the run."""
    session_id: str | None = None
    """The backend's id of the conversation, for a backend that can fork the session."""
    source: str | None = None
    """The source of the answer, for display; None for the earlier run."""
