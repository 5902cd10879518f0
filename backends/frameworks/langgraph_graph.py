"""A compiled LangGraph graph as a backend: the graph's thread is the conversation, interrupts are questions.

The work to do in a turn is read from the thread's newest checkpoint, never remembered: an interrupted thread continues
from the checkpoint, without running finished nodes again. Each checkpoint is marked with the turn that wrote it, so
that a later attempt at the same turn recognises its own unfinished work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import takewhile
from typing import Any, cast
from uuid import uuid4

from plait.backends.backend_protocol import Conversation, ConversationRequest, Output, Reply
from plait.backends.extras import require
from plait.backends.function_backend import error_of_code
from plait.backends.json_fields import at, count, counted, text
from plait.backends.large_answers import read_answer
from plait.backends.output_schema import Mismatch, Schema, invalid_output
from plait.backends.running_turn import when_cancelled
from plait.backends.whole_answer import whole_answer, without_calls
from plait.dialogue import Message, Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, one_line, shown
from plait.usage import NO_USAGE, Usage


class LangGraphBackend:
    """Runs the compiled `graph` as a conversation: each prompt is one run of the graph on the conversation's thread.

    `to_input` makes the graph's input of the prompt. Without it, the prompt becomes a user message if the input has
    `messages`, else the field `prompt`. Raises TypeError if the input has neither.

    The reply's `data` is the JSON part of the output's fields, and `text` the last assistant message, or else the JSON
    of `data`. With an output schema, the fields besides `messages` have to fit it or, without others, the text read as
    JSON; there is no second try.

    The thread is the session, `run:task`; a fork starts with a copy. Several questions at once (`interrupt()`) are
    asked one after the other. Interrupted nodes, and nodes that asked, run twice, as always in LangGraph.

    Without a checkpointer each run starts from the beginning, and an interrupt is an error. The caller owns the saver,
    which needs async methods.
    """

    def __init__(self, graph: Any, *, to_input: Callable[[str], Any] | None = None) -> None:
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
        """Set `run_status` in the unfinished thread of a cancelled run, if the graph declares the field."""
        if not self.can_fork:
            return
        waiting, fields = _WAITING.fullmatch(session_id), RunFields(self._graph)
        thread = waiting[1] if waiting else session_id
        state = await self._graph.aget_state({"configurable": {"thread_id": thread}})
        if state.next and fields.cancel(state.values):
            await fields.save(self._graph.checkpointer, thread)

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation on the thread of the session, or of the task. Raises as `check`."""
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
        messages = [{"role": message.role, "content": message.content} for message in earlier]
        return {"messages": [*messages, {"role": "user", "content": prompt}]}


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


_MARK = "plait_turn"
_RESUME = "__resume__"
"""Channel of a checkpoint's pending writes in which LangGraph keeps the answers already taken by a node."""
_WAITING = re.compile(r"(.+)\?(\w+)\+(\d+)", re.DOTALL)
"""Session id with an open question: the thread, the interrupt, and the number of answers taken before."""
_NO_CHECKPOINTER = (
    "a graph without a checkpointer cannot wait; compile the graph with a checkpointer, such as "
    "AsyncSqliteSaver of the package langgraph-checkpoint-sqlite"
)


class UnstoredThread:
    """A conversation with a graph without a checkpointer, and the common part of both kinds."""

    def __init__(
        self, graph: Any, to_input: Callable[[str, ConversationRequest], Any], request: ConversationRequest
    ) -> None:
        self._graph = graph
        self._to_input = to_input
        self._request = request
        self._values: Any = None
        """The graph's values in this turn so far."""
        self._earlier: Set[Any] = frozenset()
        """Ids of the messages from before this turn."""
        self._start_values: Mapping[str, Any] | None = None
        """The values with which this turn has begun; None if it goes on from the middle."""
        self._fields = RunFields(graph)
        self._runnable = self._fields.graph_of(graph) if self._fields else graph

    @property
    def session_id(self) -> str | None:
        return None

    async def send(self, prompt: str) -> Reply:
        schema = None if self._request.output_schema is None else Schema(self._request.output_schema)
        errors = import_module("langgraph.errors")
        self._values = None
        try:
            reply = await self._turn(prompt, schema)
            return replace(reply, messages=_after(prompt, reply.messages)) if reply.messages else reply
        except BackendError as error:
            error.messages = _after(prompt, error.messages)
            raise
        except errors.GraphDrained as exc:
            await self._rest("cancelled")
            failure, cause = BackendError(ErrorKind.UNEXPECTED, f"the graph stopped between two nodes: {exc}"), exc
        except errors.GraphRecursionError as exc:
            await self._rest("failed")
            text = f"the graph did not end; fix its loop or raise its limit (with_config): {one_line(str(exc), 120)}"
            failure, cause = BackendError(ErrorKind.INVALID_REQUEST, text), exc
        except Exception as exc:  # of the graph's nodes
            await self._rest("failed", at_node=True)
            failure, cause = error_of_code(exc), exc
        failure.usage = _cost(self._values, self._earlier)
        raise failure from cause

    async def _turn(self, prompt: str, schema: Schema | None) -> Reply:
        if self._request.answer is not None:
            raise BackendError(ErrorKind.SESSION_LOST, f"an answer cannot be given: {_NO_CHECKPOINTER}")
        values: Any = None
        self._fields.begin(self._run_id, None, None, ())
        graph_input = self._to_input(prompt, self._request)
        self._start_values = _start_values(None, graph_input)
        async for values in self._run(graph_input, None):
            if isinstance(values, dict) and "__interrupt__" in values:
                raise BackendError(ErrorKind.INVALID_REQUEST, f"the graph asks a question: {_NO_CHECKPOINTER}")
        return await self._reply(values, schema)

    async def _run(self, graph_input: Any, config: Any, **options: Any) -> AsyncGenerator[Any]:
        """Run the graph and yield its values so far, after every event."""
        control = import_module("langgraph.runtime").RunControl()
        starts = False
        events: Any = self._runnable.astream(
            graph_input, config, stream_mode=["tasks", "values"], control=control, **options
        )
        with when_cancelled(partial(control.request_drain, "the run is being cancelled")):
            async with aclosing(events) as stream:
                async for mode, event in stream:
                    began, starts = starts, mode == "tasks" and "triggers" in event  # the end has no triggers
                    if mode == "values":
                        self._values = event
                    elif starts:
                        self._fields.enter(event["name"], same_step=began)
                        await self._save_fields()
                        self._request.on_output(Output("node", clean_text(event["name"])))
                    yield self._values
                    if starts and control.drain_requested:  # while the caller had the event, before the node began
                        raise import_module("langgraph.errors").GraphDrained(control.drain_reason)

    @property
    def _run_id(self) -> str:
        return self._request.idempotency_key.partition(":")[0]

    async def _save_fields(self) -> None:
        """Write the fields about the run to the thread, if there is a thread."""

    async def _rest(self, status: str, *, at_node: bool = False) -> None:
        if self._fields:
            self._fields.rest(status, at_node=at_node)
            await self._save_fields()

    async def _reply(self, values: Any, schema: Schema | None) -> Reply:
        ours = self._fields.values
        if ours and isinstance(values, dict):
            values = {name: one for name, one in cast("dict[str, Any]", values).items() if name not in ours}
        usage = _cost(values, self._earlier)
        names = getattr(self._graph, "output_channels", None)
        try:
            reply = await reply_of(
                values, names, schema, earlier=self._earlier, start_values=self._start_values, usage=usage
            )
        except BackendError as error:
            error.usage = usage
            await self._rest("failed")
            raise
        await self._rest("completed")
        return replace(reply, session_id=self.session_id)


class Thread(UnstoredThread):
    """A conversation kept by the graph's checkpointer."""

    def __init__(
        self, graph: Any, to_input: Callable[[str, ConversationRequest], Any], request: ConversationRequest
    ) -> None:
        super().__init__(graph, to_input, request)
        resumed = request.session_id if request.resume else None
        self._name = resumed or request.idempotency_key or uuid4().hex
        waiting = _WAITING.fullmatch(self._name) if resumed else None
        self._thread = waiting[1] if waiting else self._name
        self._asked = (waiting[2], int(waiting[3])) if waiting else None
        self._forks = None if resumed or request.fork_of is None else _WAITING.sub(r"\1", request.fork_of)
        self._has_begun = False
        """Whether a turn has run: the request describes the thread before the first turn only."""

    @property
    def session_id(self) -> str:
        return self._name

    async def _turn(self, prompt: str, schema: Schema | None) -> Reply:
        state = await self._state()
        mark = hashlib.sha256(f"{self._request.idempotency_key}\0{clean_text(prompt)}".encode()).hexdigest()
        continues = self._continues_thread(state, mark)
        if not continues:
            state = await self._made_ready(state)
        self._earlier = {message.id for message in messages_of(state.values)}
        own_ids = () if self._forks is None else (self._forks, self._forks.partition(":")[0])
        self._fields.begin(self._run_id, self._thread, state.values, own_ids)
        if continues:
            await self._continue_thread(state)
        else:
            await self._begin(prompt, state, mark)
        return await self._finished(await self._state(), schema)

    def _continues_thread(self, state: Any, mark: str) -> bool:
        """Return whether the thread's unfinished work is to be continued, instead of starting with a new input."""
        if self._has_begun or _checkpoint_of(state) is None:
            return False
        if self._request.resumes_interrupted or self._request.answer is not None:
            return True
        return bool(state.next) and state.metadata.get(_MARK) == mark

    async def _made_ready(self, state: Any) -> Any:
        """Return the state of a thread ready for a new input: unchanged, emptied, or a fresh copy of another thread.
        Raises BackendError if the thread to continue is missing, or waits for an answer.
        """
        continues = self._has_begun or self._request.resume
        if not continues and _checkpoint_of(state) is not None:
            # Left by an earlier attempt at the task, after a failure or for another prompt.
            await self._graph.checkpointer.adelete_thread(self._thread)
        if not continues and self._forks is not None:
            await copy_thread(self._graph.checkpointer, self._forks, self._thread)
        if not continues:
            state = await self._state()
        continues = continues or self._forks is not None
        if continues and _checkpoint_of(state) is None:
            text = f"the graph's checkpointer has no thread {self._forks or self._thread}"
            raise BackendError(ErrorKind.SESSION_LOST, text)
        if continues and state.interrupts:
            waits = f"the graph waits for an answer: {one_line(question_of(state.interrupts[0]).text, 120)}"
            raise BackendError(ErrorKind.INVALID_REQUEST, waits)
        return state

    async def _begin(self, prompt: str, state: Any, mark: str) -> None:
        self._has_begun, before = True, _checkpoint_of(state)

        async def has_input() -> bool:
            return _checkpoint_of(await self._state()) not in (None, before)

        graph_input = self._to_input(prompt, self._request)
        self._start_values = _start_values(state.values, graph_input)
        await self._run_until_it_rests(graph_input, mark, has_input)

    async def _continue_thread(self, state: Any) -> None:
        self._has_begun = True
        mark, answer = state.metadata.get(_MARK), self._request.answer
        if answer is None or self._asked is None or await self._is_answered():
            self._request.on_session(self._name)
            await self._run_until_it_rests(None, mark, None)
        else:
            command = import_module("langgraph.types").Command(resume={self._asked[0]: answer.value})
            await self._run_until_it_rests(command, mark, self._is_answered)

    async def _run_until_it_rests(
        self, graph_input: Any, mark: Any, holds: Callable[[], Awaitable[bool]] | None
    ) -> None:
        """Run the graph to its end or its next question. The session is reported as soon as `holds` shows that the
        thread contains this turn's input, which an attempt after an interruption need not send again.
        """
        # `sync`: a node starts only after the state it builds on is written.
        async for _ in self._run(graph_input, self._config(mark), durability="sync"):
            if holds is not None and await holds():
                holds = None
                self._request.on_session(self._name)

    async def _save_fields(self) -> None:
        if not self._fields:
            return
        try:
            await self._fields.save(self._graph.checkpointer, self._thread)
        except Exception as exc:  # a copy of what plait knows; no reason to lose the work of the turn
            text = f"{type(exc).__name__}: {one_line(str(exc), 200)}"
            self._request.on_output(Output("notice", f"the fields about the run could not be written: {text}"))

    async def _finished(self, state: Any, schema: Schema | None) -> Reply:
        if state.interrupts:
            await self._rest("waiting_input", at_node=True)
            interrupt = state.interrupts[0]
            self._name = f"{self._thread}?{interrupt.id}+{await self._answers()}"
            question = question_of(interrupt)
            cost = _cost(state.values, self._earlier)
            return Reply(question.text, session_id=self.session_id, usage=cost, question=question)
        if state.next:
            text = f"the graph stopped before {', '.join(state.next)}; ask with interrupt() inside a node instead"
            raise BackendError(ErrorKind.INVALID_REQUEST, text)
        self._name = self._thread
        return await self._reply(state.values, schema)

    # A turn with an answer may be repeated after an interruption or failure, when the node has already taken the
    # answer: given again, the answer would apply to the node's next question. The session id of a waiting conversation
    # therefore holds the interrupt in question, and the number of answers taken by the thread before.

    async def _is_answered(self) -> bool:
        if self._asked is None:
            return True
        interrupt_id, answers = self._asked
        waiting = {interrupt.id for interrupt in (await self._state()).interrupts}
        return interrupt_id not in waiting or await self._answers() > answers

    async def _answers(self) -> int:
        """Return the number of answers taken by the nodes of the current step, including nodes of nested graphs."""
        saved = [await self._graph.checkpointer.aget_tuple(place) for place in _places(await self._state())]
        writes = [write for one in saved if one is not None for write in one.pending_writes or ()]
        return sum(len(values) for _, channel, values in writes if channel == _RESUME)

    async def _state(self) -> Any:
        return await self._graph.aget_state(self._config(), subgraphs=True)

    def _config(self, mark: Any = None) -> dict[str, Any]:
        return {"configurable": {"thread_id": self._thread}, "metadata": {} if mark is None else {_MARK: mark}}


async def copy_thread(saver: Any, source: str, target: str) -> None:
    """Copy all checkpoints of thread `source` to the new thread `target`: some channels are stored as changes between
    steps. After an interrupted copy, the newest one carries a mark from `source`, and a later attempt copies again.
    """
    chain = [one async for one in saver.alist({"configurable": {"thread_id": source}})]
    for one in reversed(chain):  # the list starts with the newest, which has to be written last
        versions = one.checkpoint["channel_versions"]
        stored = await saver.aput(_place_of(one, target), one.checkpoint, one.metadata, versions)
        writes: dict[str, list[tuple[str, Any]]] = {}
        for task, channel, written in one.pending_writes or ():
            writes.setdefault(task, []).append((channel, written))
        for task, those in writes.items():
            await saver.aput_writes(stored, those, task)


def _place_of(saved: Any, thread: str) -> dict[str, Any]:
    """Return the place in `thread` at which a checkpoint is written in place of `saved`, or as its copy."""
    parent: Any = saved.parent_config
    before: Any = parent["configurable"].get("checkpoint_id") if parent else None
    place = {"thread_id": thread, "checkpoint_ns": saved.config["configurable"].get("checkpoint_ns", "")}
    return {"configurable": place if before is None else {**place, "checkpoint_id": before}}


def _places(state: Any) -> Iterator[Any]:
    """Yield the checkpoints that make up a state."""
    yield state.config
    for task in state.tasks:
        if hasattr(task.state, "tasks"):
            yield from _places(task.state)


def _checkpoint_of(state: Any) -> str | None:
    """Return the id of the newest checkpoint; None if the thread does not exist."""
    checkpoint_id: str | None = state.config["configurable"].get("checkpoint_id")
    return checkpoint_id


def _after(prompt: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return `messages` with the prompt before an answer that lacks it."""
    lacks_prompt = bool(messages) and messages[0].role == "assistant"
    return (Message("user", clean_text(prompt)), *messages) if lacks_prompt else messages


def _start_values(before: Any, graph_input: Any) -> Mapping[str, Any]:
    merged: dict[str, Any] = {}
    for values in (before, graph_input):
        if isinstance(values, Mapping):
            merged |= cast("Mapping[str, Any]", values)
    return merged


def _cost(values: Any, earlier: Set[Any]) -> Usage:
    return tokens_of([message for message in messages_of(values) if message.id not in earlier])


# Fields of a graph's state that tell the graph about its run.
#
# plait fills each of the fields that the graph's state declares. A node reads its own name in `current_node`. In the
# thread, `current_node` names the nodes under way, and None once the graph rests.
#
# The graph is copied for the turn: the channel of a field returns the value of plait, and each node's input receives
# the node's name. LangGraph saves a step before its nodes are known, so the newest checkpoint is written again under
# the same id when they begin, and when the graph rests. Nodes, triggers and unfinished work in it stay as they are.
#
# A field that a node or the input itself writes, with a value that is not plait's, belongs to the graph for the turn.

NAMES = ("run_id", "session_id", "run_status", "current_node")


class RunFields:
    """The fields that one graph declares, with their values in one turn."""

    def __init__(self, graph: Any) -> None:
        plain = import_module("langgraph.channels").LastValue
        channels = cast("Mapping[str, Any]", getattr(graph, "channels", {}))
        self._values: dict[str, Any] = {name: None for name in NAMES if type(channels.get(name)) is plain}
        self._given: dict[str, set[Any]] = {name: {None} for name in self._values}
        self._left: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def values(self) -> dict[str, Any]:
        """The fields that plait fills, without the fields that the graph writes itself."""
        return {name: one for name, one in self._values.items() if name not in self._left}

    def begin(self, run_id: str | None, session_id: str | None, stored: Any, own_ids: Collection[str | None]) -> None:
        """Fill the fields for a turn. `stored` are the thread's values. An id in the thread that is neither of this
        conversation nor one of `own_ids` was written by the graph.
        """
        stored_values = cast("Mapping[str, Any]", stored) if isinstance(stored, Mapping) else dict[str, Any]()
        for name, mine in (("run_id", run_id), ("session_id", session_id)):
            if name in self._values and stored_values.get(name) not in (None, mine, *own_ids):
                self.write(name, stored_values[name])
            self._set(name, mine)
        self.rest("running")

    def cancel(self, stored: Any) -> bool:
        """Fill the fields for a thread with the values `stored` that waits while its run is cancelled. Return False if
        the status in the thread is not plait's.
        """
        stored_values = cast("Mapping[str, Any]", stored)
        if "run_status" not in self._values or stored_values.get("run_status") not in {
            "running",
            "waiting_input",
            "failed",
        }:
            return False
        self.begin(stored_values.get("run_id"), stored_values.get("session_id"), stored_values, ())
        self._set("current_node", stored_values.get("current_node"))
        self.rest("cancelled", at_node=True)
        return True

    def enter(self, node: str, *, same_step: bool) -> None:
        """Note that `node` begins, together with the nodes before it if `same_step`."""
        before = self._values.get("current_node") if same_step else None
        self._set("current_node", f"{before}, {node}" if before else node)

    def rest(self, status: str, *, at_node: bool = False) -> None:
        """Note the status of the run; `at_node` if the nodes under way are to go on."""
        self._set("run_status", status)
        if not at_node:
            self._set("current_node", None)

    def _set(self, name: str, value: Any) -> None:
        if name in self._values and name not in self._left:
            self._values[name] = value
            self._given[name].add(value)

    def read(self, name: str) -> Any:
        """Return the value of the field."""
        return self._values[name]

    def write(self, name: str, value: Any) -> None:
        """Note that the graph's code wrote the field. Nodes that return their whole state change nothing."""
        if not (isinstance(value, str | None) and value in self._given[name]):
            self._left.add(name)
            self._values[name] = value

    def input_of(self, node: str, mapper: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Return `mapper` with the name of the node added to the input."""

        def mapped(values: Any) -> Any:
            node_input: Any = values
            if isinstance(values, dict) and "current_node" not in self._left:
                node_input = {**cast("dict[str, Any]", values), "current_node": node}
            return node_input if mapper is None else mapper(node_input)

        self._given["current_node"].add(node)
        return mapped

    def graph_of(self, graph: Any) -> Any:
        """Return a copy of `graph` whose nodes read the fields."""
        channels = {name: _field_channel()(graph.channels[name].typ, name, self) for name in self._values}
        nodes: dict[str, Any] = {}
        for name, node in graph.nodes.items():
            read: Any = node.channels  # one name for a node that reads one channel alone
            if isinstance(read, list) and "current_node" in read and "current_node" in self._values:
                nodes[name] = node.copy({"mapper": self.input_of(name, node.mapper)})
        return graph.copy({"channels": {**graph.channels, **channels}, "nodes": {**graph.nodes, **nodes}})

    async def save(self, saver: Any, thread: str) -> None:
        """Write the fields to the newest checkpoint of the thread, if it has one."""
        newest = await saver.aget_tuple({"configurable": {"thread_id": thread}})
        if newest is None or not self.values:
            return
        versions = newest.checkpoint["channel_versions"]
        version = saver.get_next_version(max(versions.values(), default=None), None)
        changed = dict.fromkeys(self.values, version)
        checkpoint = {
            **newest.checkpoint,
            "channel_values": {**newest.checkpoint["channel_values"], **self.values},
            "channel_versions": {**versions, **changed},
        }
        await saver.aput(_place_of(newest, thread), checkpoint, newest.metadata, changed)


@cache
def _field_channel() -> type[Any]:
    last_value: type[Any] = import_module("langgraph.channels").LastValue

    class FieldChannel(last_value):  # type: ignore[misc]
        """A channel whose value is that of plait."""

        __slots__ = ("fields",)

        def __init__(self, typ: Any, key: str, fields: RunFields) -> None:
            super().__init__(typ, key)  # pyright: ignore[reportUnknownMemberType]
            self.fields = fields

        def copy(self) -> Any:
            return FieldChannel(self.typ, self.key, self.fields)

        def from_checkpoint(self, checkpoint: Any) -> Any:  # noqa: ARG002 - `begin` has read the thread
            return self.copy()

        def update(self, values: Sequence[Any]) -> bool:
            for value in values:
                self.fields.write(self.key, value)
            return bool(values)

        def get(self) -> Any:
            return self.fields.read(self.key)

        def is_available(self) -> bool:
            return True

        def checkpoint(self) -> Any:
            return self.get()

    return FieldChannel


# The state of a graph as a reply or a question, without importing the library.

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "HumanMessageChunk": "user"}
_REASONS = ("finish_reason", "stop_reason", "done_reason", "stopReason", "finishReason")
"""Where the providers' packages put the reason for the end of a message."""
_DEEPEST = 100
_LEFT_OUT = object()


def json_part(values: Mapping[Any, Any]) -> dict[str, JsonValue]:
    """Return the fields of `values` that JSON can hold, whole or in part. Never raises.

    Messages become `role` and `content`; pydantic models and dataclasses become their fields; tuples and sets become
    lists. A number that JSON cannot hold is null, and so is any other such value in a list, whose places count; other
    fields that JSON cannot hold are omitted.
    """
    return cast("dict[str, JsonValue]", _fields(values, 0))


async def reply_of(
    values: Any,
    names: Any,
    schema: Schema | None,
    *,
    earlier: Set[Any],
    start_values: Mapping[str, Any] | None,
    usage: Usage,
) -> Reply:
    """Return the reply of a graph that ended with `values`; `names` are the declared output fields, or None. Its
    messages, without the prompt, are there only for the sake of thoughts in the answer.

    `earlier` are the ids of the messages before the turn, and `start_values` those with which it began: neither is
    an answer of this turn. `start_values` is None if the turn went on from its middle. Raises BackendError if the
    answer is not whole, or does not fit `schema`.
    """
    fields_shown = _shown(values, names)
    messages = messages_of(fields_shown)
    fields = json_part({name: one for name, one in fields_shown.items() if name != "messages" or not messages})
    begun = json_part({name: one for name, one in (start_values or {}).items() if name in fields})
    made = {name: fields_shown[name] for name in fields if name not in begun or begun[name] != fields[name]}
    new = [one for one in messages if start_values is None or one.id is None or one.id not in earlier]
    turn = _last_words(new, _prompts((start_values or {}).get("messages")))
    turn += [one for one in made.values() if _is_message(one)]
    is_data = any(not _is_message(one) for one in made.values())
    last = turn[-1] if turn else None
    text = "" if last is None else _text(last)
    answered = [reason for one in (turn if is_data else turn[:-1]) for reason in without_calls(_reasons(one))]
    message = whole_answer(
        text,
        answered if is_data or last is None else [*answered, *_reasons(last)],
        refusal="" if last is None else _refusal(last),
        usage=usage,
        raise_limit="set a higher limit for the graph's own model",
        calls_tool=bool(getattr(last, "tool_calls", None)) and not is_data,
        # A graph that keeps no messages answers with its fields, as a function does with its value.
        needs_text=not is_data and bool(turn or messages),
    )
    content = message.content if message.content.strip() else None
    data: JsonValue = json_part(fields_shown) if fields or content is None else None
    text = json.dumps(data, ensure_ascii=False) if content is None else content
    try:
        if schema is not None:
            data = await read_answer(schema, text, fields if fields or content is None else None)
    except Mismatch as mismatch:
        raise invalid_output(mismatch) from None
    apart = (Message("assistant", text, usage, message.thoughts),) if message.thoughts else ()
    return Reply(text, data, usage=usage, messages=apart)


def question_of(interrupt: Any) -> Question:
    """Return the question of an interrupt.

    A text value is the question. In a mapping with `question`, that field is the question, followed by the other fields
    as JSON, such as the available choices. Any other value is shown as JSON. Without a `response_schema` the node takes
    any value, such as the decisions of LangChain's HumanInTheLoopMiddleware: the schema is empty.
    """
    value: Any = interrupt.value
    fields = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else dict[str, Any]()
    text: Any = fields.pop("question", None) if fields else interrupt.value
    if not isinstance(text, str):
        part = _part(value, 0)
        text = json.dumps(None if part is _LEFT_OUT else part, ensure_ascii=False)
    elif rest := json_part(fields):
        text = f"{text}\n{json.dumps(rest, ensure_ascii=False)}"
    schema: Any = getattr(interrupt, "response_schema", None)
    return Question(clean_text(text), cast("Mapping[str, JsonValue]", schema) if isinstance(schema, Mapping) else {})


def messages_of(values: Any) -> list[Any]:
    """Return the messages in a state's values, oldest first."""
    messages: Any = at(values, "messages")
    return [message for message in cast("list[Any]", messages or ()) if _is_message(message)]


def _last_words(messages: Sequence[Any], prompts: Set[str]) -> list[Any]:
    """Return the last message of a turn, and the assistant's messages just before it: pieces of one answer.

    The words before a call of a tool are no answer, and neither is one of `prompts`.
    """
    candidates = [one for one in messages if _role(one) not in {"system", "remove"}]
    pieces = list(takewhile(lambda one: _role(one) == "assistant", reversed(candidates)))
    if not pieces and candidates:
        # What a tool returned, if the graph ends with the tool, or what an agent said in the role of a user.
        is_prompt = _role(candidates[-1]) == "user" and not (prompts and _text(candidates[-1]) not in prompts)
        pieces = [] if is_prompt else candidates[-1:]
    return pieces[::-1]


def _prompts(messages: Any) -> Set[str]:
    """Return the texts of the messages that a turn was given, in any of the forms that LangChain takes."""
    texts: set[str] = set()
    each: list[Any] = []
    each += messages if isinstance(messages, list) else [messages]
    for one in each:
        content: Any = at(cast("Any", one), "content") if isinstance(one, Mapping) else one
        content = cast("Sequence[Any]", one)[-1] if isinstance(one, tuple) and one else content
        texts |= {_text(one)} if _is_message(one) else {clean_text(content)} if isinstance(content, str) else set()
    return texts


def _reasons(message: Any) -> list[str]:
    """Return the reasons for the end of a message that its provider reported."""
    metadata: Any = getattr(message, "response_metadata", None)
    values: list[Any] = [at(metadata, name) for name in _REASONS]
    if at(metadata, "status") in {"incomplete", "failed", "cancelled"}:  # of OpenAI's Responses API
        values += [at(metadata, "incomplete_details", "reason"), at(metadata, "status")]
    each: list[Any] = []
    for reason in values:
        each += reason if isinstance(reason, list) else [getattr(reason, "name", reason)]
    return [reason for reason in each if isinstance(reason, str)]


def _refusal(message: Any) -> str:
    """Return the words with which the model declined, which OpenAI keeps apart from the text."""
    content: Any = message.content
    blocks: Any = () if isinstance(content, str) else content or ()
    words = (at(getattr(message, "additional_kwargs", None), "refusal"), *(at(block, "refusal") for block in blocks))
    return "".join(word for word in words if isinstance(word, str))


def tokens_of(messages: Sequence[Any]) -> Usage:
    """Return the sum of the usage reported by the messages."""
    return sum((_tokens(message) for message in messages), NO_USAGE)


def _shown(values: Any, names: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        return {"output": values}
    fields = cast("Mapping[str, Any]", values)
    return {name: fields[name] for name in fields if not isinstance(names, list) or name in names}


def _tokens(message: Any) -> Usage:
    usage: Any = getattr(message, "usage_metadata", None)
    if not usage:
        return NO_USAGE
    return counted(
        count(usage, "input_tokens"),
        count(usage, "output_tokens"),
        model=shown(text(getattr(message, "response_metadata", None), "model_name")) or None,
        cache_read=count(usage, "input_token_details", "cache_read"),
        cache_write=count(usage, "input_token_details", "cache_creation"),
        reasoning=count(usage, "output_token_details", "reasoning"),
    )


def _is_message(value: Any) -> bool:
    return isinstance(getattr(value, "type", None), str) and hasattr(value, "content")


def _role(message: Any) -> str:
    return _ROLES.get(message.type) or str(message.type)


def _text(message: Any) -> str:
    content: Any = message.content
    blocks: Any = [content] if isinstance(content, str) else content or ()
    pieces = (block if isinstance(block, str) else at(block, "text") for block in blocks)
    return clean_text("".join(piece for piece in pieces if isinstance(piece, str)))


def _part(value: Any, depth: int) -> Any:
    """Return `value` as JSON, or _LEFT_OUT."""
    if value is None or isinstance(value, bool | str | int | float):
        return _plain(value)
    if depth >= _DEEPEST:
        return _LEFT_OUT
    if isinstance(value, list | tuple | Set | deque):
        parts = [_part(one, depth + 1) for one in cast("Sequence[Any]", value)]
        parts = [None if part is _LEFT_OUT else part for part in parts]
        return sorted(parts, key=json.dumps) if isinstance(value, Set) else parts
    if _is_message(value):
        return {"role": _role(value), "content": _text(value)}
    members = _members(value)
    return _LEFT_OUT if members is None else _fields(members, depth)


def _plain(value: str | float | None) -> Any:
    # Convert subclasses, such as enumerations, to the base type.
    if isinstance(value, str):
        return clean_text(str(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _fields(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    parts = {clean_text(name): _part(one, depth + 1) for name, one in values.items() if isinstance(name, str)}
    return {name: part for name, part in parts.items() if part is not _LEFT_OUT}


def _members(value: Any) -> Mapping[str, Any] | None:
    """Return the fields of a mapping, a dataclass or a pydantic model; None for other values."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    kind = cast("Any", type(value))
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None
    names = getattr(kind, "model_fields", None) if names is None else names
    return None if names is None else {name: getattr(value, name, _LEFT_OUT) for name in names}
