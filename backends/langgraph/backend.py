"""A compiled LangGraph graph as a backend: its thread is the conversation, its interrupts are questions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from plait.backends.extras import require
from plait.backends.langgraph.thread import Graph, Thread, Unkept
from plait.backends.protocol import Conversation, Opening
from plait.backends.text import clean_text


class LangGraphBackend:
    """Runs `graph`, compiled, as a conversation: each prompt is one run of it on the conversation's thread.

    `to_input` makes the graph's input of the prompt. Without it the prompt becomes a user message where the input has
    `messages`, else the field `prompt`; TypeError when it has neither.

    The reply's `data` is the JSON part of the output's fields, its `text` the last assistant message, or else the JSON
    of `data`. A graph whose output is `messages` alone gives text only. With an output schema the fields besides
    `messages` have to fit it, or the text, read as JSON, where there are no others; there is no second try within the
    turn. `usage` is what the assistant messages of this turn say that they cost; what a crash cut off is not counted.

    The thread is named by the opening's idempotency key, run and task, and is the session; while a question waits, the
    session id says after a `?` which one. A fork begins with a copy of the other thread, all of its checkpoints.
    `interrupt()` ends the turn with a question; of several at once the first is asked, and the others one by one after
    it. Going on with a thread that is not in the checkpointer any more is `session_lost`. Nodes are run twice where
    LangGraph runs them twice: those that were cut, and those that asked.

    A graph without a checkpointer has no sessions: it runs from its start each time, earlier messages are given to it
    where the prompt becomes a message, and an interrupt is an error.

    The saver is the caller's: it has to be one with async methods, and open while the backend is used.
    """

    def __init__(self, graph: Graph, *, to_input: Callable[[str], Any] | None = None) -> None:
        if not (hasattr(graph, "astream") and hasattr(graph, "aget_state")):
            raise TypeError(f"LangGraphBackend takes a compiled graph, not {type(graph).__name__}; call its compile()")
        self._graph = graph
        self._to_input = to_input
        self._field = "" if to_input is not None else _input_field(graph)

    def new_session_id(self) -> str | None:
        """None: the thread is named after the task, and reported once its first checkpoint is written."""
        return None

    @property
    def can_fork(self) -> bool:
        """Whether there is a checkpointer, which keeps threads apart."""
        return self._graph.checkpointer not in (None, False)

    def check(self) -> None:
        """BackendUnavailable when the extra is missing. Imports nothing."""
        require("langgraph", "langgraph")

    @asynccontextmanager
    async def open(self, opening: Opening) -> AsyncGenerator[Conversation]:
        """A conversation on the thread `session_id` when it is resumed, else on the task's own."""
        self.check()
        yield (Thread if self.can_fork else Unkept)(self._graph, self._input, opening)

    def _input(self, prompt: str, opening: Opening) -> Any:
        prompt = clean_text(prompt)
        if self._to_input is not None:
            return self._to_input(prompt)
        if self._field == "prompt":
            return {"prompt": prompt}
        # A thread remembers; who has none is told.
        earlier = () if self._graph.checkpointer else opening.history
        said = [{"role": message.role, "content": message.content} for message in earlier]
        return {"messages": [*said, {"role": "user", "content": prompt}]}


def _input_field(graph: Any) -> str:
    """Where the prompt goes in the graph's input."""
    builder = getattr(graph, "builder", None)
    names: list[str] = [] if builder is None else list(builder.schemas.get(builder.input_schema, ()))
    for name in ("messages", "prompt"):
        if name in names:
            return name
    raise TypeError(
        f"the graph's input has neither `messages` nor `prompt`, but {', '.join(names) or 'no named fields'}; "
        "say how a prompt becomes its input with to_input"
    )
