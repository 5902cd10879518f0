"""A compiled LangGraph graph as a backend: the graph's thread is the conversation, interrupts are questions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from plait.backends.backend_protocol import Conversation, ConversationRequest
from plait.backends.extras import require
from plait.backends.frameworks.langgraph_thread import CompiledGraph, Thread, UnstoredThread, note_cancelled
from plait.safe_text import clean_text


class LangGraphBackend:
    """Runs the compiled `graph` as a conversation: each prompt is one run of the graph on the conversation's thread.

    `to_input` converts the prompt to the graph's input. Without `to_input`, the prompt becomes a user message if the
    input has `messages`, else the field `prompt`. Raises TypeError if the input has neither field.

    The reply's `data` is the JSON part of the output's fields, and `text` the last assistant message, or else the JSON
    of `data`. A graph whose output is `messages` alone returns text only. With an output schema, the fields besides
    `messages` have to fit the schema or, without other fields, the text read as JSON; there is no repair turn. `usage`
    is the sum reported by the assistant messages of the turn; work lost in a crash is not counted.

    The thread is the session, named by the request's idempotency key (run and task). While a question is open, the
    session id ends in `?` and an id of the question. A fork starts with a copy of all checkpoints of the other thread.
    `interrupt()` ends the turn with a question; several simultaneous questions are asked one after the other.
    Continuing a thread missing from the checkpointer is `session_lost`. Interrupted nodes, and nodes that asked a
    question, run twice, as always in LangGraph.

    A graph without a checkpointer has no sessions: each run starts from the beginning, earlier messages are included if
    the prompt becomes a message, and an interrupt is an error.

    The caller owns the saver, which needs async methods and has to be open while the backend is used.
    """

    def __init__(self, graph: CompiledGraph, *, to_input: Callable[[str], Any] | None = None) -> None:
        if not (hasattr(graph, "astream") and hasattr(graph, "aget_state")):
            raise TypeError(f"LangGraphBackend takes a compiled graph, not {type(graph).__name__}; call its compile()")
        self._graph = graph
        self._to_input = to_input
        self._field = "" if to_input is not None else _input_field(graph)

    def new_session_id(self) -> str | None:
        """Return None: the thread is named after the task, and reported after the first checkpoint is written."""
        return None

    @property
    def can_fork(self) -> bool:
        """Whether the graph has a checkpointer, which is needed for separate threads."""
        return self._graph.checkpointer not in (None, False)

    def check(self) -> None:
        """Raise BackendUnavailable if the extra is missing. Imports nothing."""
        require("langgraph", "langgraph")

    async def note_cancelled(self, session_id: str) -> None:
        """Set `run_status` in the waiting thread of a cancelled run, if the graph declares the field."""
        if self.can_fork:
            await note_cancelled(self._graph, session_id)

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation on the thread `session_id` if resumed, else on the task's own thread.

        Raises BackendUnavailable if the extra is missing.
        """
        self.check()
        yield (Thread if self.can_fork else UnstoredThread)(self._graph, self._input, request)

    def _input(self, prompt: str, request: ConversationRequest) -> Any:
        prompt = clean_text(prompt)
        if self._to_input is not None:
            return self._to_input(prompt)
        if self._field == "prompt":
            return {"prompt": prompt}
        # A thread keeps its messages; without a thread, the history is passed on.
        earlier = () if self._graph.checkpointer else request.history
        said = [{"role": message.role, "content": message.content} for message in earlier]
        return {"messages": [*said, {"role": "user", "content": prompt}]}


def _input_field(graph: Any) -> str:
    """Return the field of the graph's input for the prompt. Raises TypeError if there is none."""
    builder = getattr(graph, "builder", None)
    names: list[str] = [] if builder is None else list(builder.schemas.get(builder.input_schema, ()))
    for name in ("messages", "prompt"):
        if name in names:
            return name
    raise TypeError(
        f"the graph's input has neither `messages` nor `prompt`, but {', '.join(names) or 'no named fields'}; "
        "pass to_input to convert the prompt to the input"
    )
