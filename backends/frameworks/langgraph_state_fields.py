"""Fields of a graph's state that tell the graph about its run: `run_id`, `session_id`, `run_status`, `current_node`.

plait fills each of the fields that the graph's state declares. A node reads its own name in `current_node`. In the
thread, `current_node` names the nodes under way, and None once the graph rests.

The graph is copied for the turn: the channel of a field returns the value of plait, and each node's input receives the
node's name. LangGraph saves a step before its nodes are known, so the newest checkpoint is written again under the same
id when they begin, and when the graph rests. Nodes, triggers and unfinished work in the checkpoint stay as they are.

A field that a node or the input itself writes, with a value that is not plait's, belongs to the graph for the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, cast

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

    def begin(self, run_id: str | None, session_id: str | None, stored: Any, known: Collection[str | None]) -> None:
        """Fill the fields for a turn. `stored` are the thread's values. An id in the thread that is neither of this
        conversation nor one of `known` was written by the graph.
        """
        kept = cast("Mapping[str, Any]", stored) if isinstance(stored, Mapping) else dict[str, Any]()
        for name, mine in (("run_id", run_id), ("session_id", session_id)):
            if name in self._values and kept.get(name) not in (None, mine, *known):
                self.write(name, kept[name])
            self._set(name, mine)
        self.rest("running")

    def cancel(self, stored: Any) -> bool:
        """Fill the fields for a thread with the values `stored` that waits while its run is cancelled. Return False if
        the status in the thread is not plait's.
        """
        kept = cast("Mapping[str, Any]", stored)
        if "run_status" not in self._values or kept.get("run_status") not in {"running", "waiting_input", "failed"}:
            return False
        self.begin(kept.get("run_id"), kept.get("session_id"), kept, ())
        self._set("current_node", kept.get("current_node"))
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

        def mapped(given: Any) -> Any:
            known: Any = given
            if isinstance(given, dict) and "current_node" not in self._left:
                known = {**cast("dict[str, Any]", given), "current_node": node}
            return known if mapper is None else mapper(known)

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
        before = newest.parent_config["configurable"].get("checkpoint_id") if newest.parent_config else None
        place = {"thread_id": thread, "checkpoint_ns": "", **({} if before is None else {"checkpoint_id": before})}
        await saver.aput({"configurable": place}, checkpoint, newest.metadata, changed)


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
