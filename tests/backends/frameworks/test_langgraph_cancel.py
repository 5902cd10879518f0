"""A run is cancelled while its graph runs: the node under way ends, no other begins, and the thread can go on."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import anyio
import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from plait import DAG, ParallelRunner, RunStatus, SQLiteStore, Task, TaskStatus, Usage, cancel_requested
from plait.backends import ConversationRequest, LangGraphBackend, Output
from plait.backends.running_turn import Cancellation, Turn, in_turn
from plait.errors import BackendError
from tests.support.graphs import kept
from tests.support.polling import until

NAMES = "abcdefghij"
PLAN = DAG([Task("graph", "p"), Task("after", "{{ graph }}", depends_on=["graph"])])


class Work(TypedDict, total=False):
    prompt: str
    done: Annotated[list[str], operator.add]


class Done(TypedDict, total=False):
    done: Annotated[list[str], operator.add]


class Nodes:
    """Ten nodes that note their starts. The node `holds` runs until it reads that it is to end."""

    def __init__(self, holds: str, *, plain: bool) -> None:
        self.holds, self.plain = holds, plain
        self.begun: list[str] = []
        self.before = {holds}
        """The nodes that begin before the cancel."""
        self.late: list[str] = []
        """The nodes that began although the cancel was visible."""

    def _begin(self, name: str) -> bool:
        self.begun.append(name)
        if cancel_requested():
            self.late.append(name)
        return name == self.holds

    def node(self, name: str) -> Callable[..., Any]:
        def plain(_state: Work) -> Any:
            holds = self._begin(name)
            while holds and not cancel_requested():
                time.sleep(0.001)
            return {"done": [name]}

        async def awaiting(_state: Work) -> Any:
            holds = self._begin(name)
            if holds:
                await until(cancel_requested)
            return {"done": [name]}

        return plain if self.plain else awaiting

    def graph(self, order: list[str], **graphs: Any) -> StateGraph[Any, Any, Any, Any]:
        """A chain of nodes and of the compiled `graphs`; only `done` comes out of it."""
        graph = StateGraph(Work, output_schema=Done)
        for name in order:
            graph.add_node(name, graphs.get(name) or self.node(name))
        for before, after in zip([START, *order], [*order, END], strict=True):
            graph.add_edge(before, after)
        return graph


def flat(nodes: Nodes) -> Any:
    return nodes.graph(list(NAMES))


def nested(nodes: Nodes) -> Any:
    """Graphs in a graph in a graph: a (b (c d e f) g h) i j."""
    inner = nodes.graph(list("cdef")).compile()
    middle = nodes.graph(["b", "inner", "g", "h"], inner=inner).compile()
    return nodes.graph(["a", "middle", "i", "j"], middle=middle)


def called(nodes: Nodes) -> Any:
    """A graph that a node's own code calls: a (b c d e f) g h i j."""
    inner = nodes.graph(list("bcdef")).compile()

    async def calls(state: Work) -> Any:
        return await inner.ainvoke({"prompt": state.get("prompt", "")})

    return nodes.graph(["a", "calls", "g", "h", "i", "j"], calls=calls)


def parallel(nodes: Nodes) -> Any:
    """Branches of one node and of two graphs beside each other, then the others: (a | b c d | e f g) h i j."""
    graph = nodes.graph(["h", "i", "j"])
    graph.edges.remove((START, "h"))
    graph.add_node("a", nodes.node("a"))
    for name, inside in (("one", "bcd"), ("two", "efg")):
        graph.add_node(name, nodes.graph(list(inside)).compile())
    for branch in ("a", "one", "two"):
        graph.add_edge(START, branch)
    graph.add_edge(["a", "one", "two"], "h")
    return graph


async def cancel_while_held(nodes: Nodes, graph: Any, folder: Path, by: str) -> str:
    """Start a run of the graph, cancel the run while the node `holds` runs, and return the run's id at its end."""
    async with SQLiteStore(folder / "runs.db") as store:
        runner = ParallelRunner(LangGraphBackend(graph), store=store)
        if by == "handle":
            async with runner.start(PLAN) as run:
                await until(lambda: nodes.before <= set(nodes.begun))
                run.cancel()
            return run.run_id
        async with runner.runs as service:
            run_id = await service.create(PLAN)
            await service.start(run_id)
            await until(lambda: nodes.before <= set(nodes.begun))
            assert await service.cancel(run_id, wait=30) is RunStatus.CANCELLED
        return run_id


WAYS = [("handle", False), ("service", True), ("handle", True), ("service", False)]


@pytest.mark.parametrize(
    ("shape", "holds", "by", "plain"),
    [
        (shape, holds, *WAYS[(column + row) % len(WAYS)])
        for row, shape in enumerate([flat, nested, called, parallel])
        for column, holds in enumerate("af")
    ],
)
async def test_no_node_begins_after_the_cancel(
    tmp_path: Path, shape: Callable[[Nodes], Any], holds: str, *, plain: bool, by: str
) -> None:
    nodes = Nodes(holds, plain=plain)
    if shape is parallel:  # a node of another branch that is scheduled beside the cancel counts as under way
        nodes.before |= {"a": set("bcdefg"), "c": set("aefg"), "f": set("abcd"), "i": set()}[holds]
    async with kept(shape(nodes), tmp_path / "threads.db") as graph:
        run_id = await cancel_while_held(nodes, graph, tmp_path, by)
        assert nodes.late == []
        assert nodes.begun[-1] == holds or shape is parallel
        async with SQLiteStore(tmp_path / "runs.db") as store:
            tasks = {task.task_id: task.status for task in await store.list_tasks(run_id)}
            assert tasks == {"graph": TaskStatus.CANCELLED, "after": TaskStatus.CANCELLED}
            assert [one.status for one in await store.list_attempts(run_id, "graph")] == ["cancelled"]
            kinds = [event.kind for event in await store.list_events(run_id)]
        assert kinds[-1] == "run_cancelled" and "task_failed" not in kinds and "task_retried" not in kinds

        # LangGraph itself can go on with the thread, and runs no node twice.
        thread = {"configurable": {"thread_id": f"{run_id}:graph"}}
        assert (await graph.aget_state(thread)).next
        values = await graph.ainvoke(None, thread)
        assert sorted(nodes.begun) == list(NAMES)
        assert set(values["done"]) == set(NAMES)


async def test_a_cancel_that_comes_just_before_a_node_begins(tmp_path: Path) -> None:
    nodes, cancellation = Nodes("", plain=False), Cancellation()

    def on_output(output: Output) -> None:
        if output.text == "c":  # LangGraph has decided to run the node already
            cancellation.request()

    async with kept(flat(nodes), tmp_path / "threads.db") as graph:
        request = ConversationRequest(idempotency_key="run:graph", on_output=on_output)
        async with LangGraphBackend(graph).open(request) as conversation:
            with pytest.raises(BackendError, match="the graph stopped between two nodes"):
                await in_turn(Turn(cancellation), conversation.send("p"))
        assert nodes.begun == ["a", "b"]
        assert (await graph.aget_state({"configurable": {"thread_id": "run:graph"}})).next == ("c",)


async def test_a_graph_without_a_thread_stops_too() -> None:
    nodes = Nodes("c", plain=True)
    async with ParallelRunner(LangGraphBackend(flat(nodes).compile())).start(PLAN) as run:
        await until(lambda: "c" in nodes.begun)
        run.cancel()
        result = await run.result()
    assert (result.status, nodes.begun, nodes.late) == (RunStatus.CANCELLED, ["a", "b", "c"], [])


async def test_what_the_graph_spent_before_it_stopped_is_the_cost_of_the_attempt() -> None:
    def ask_model(state: MessagesState) -> Any:
        usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
        return {"messages": [AIMessage("yes", usage_metadata=usage)]}  # type: ignore[arg-type]

    async def hold(state: MessagesState) -> Any:
        begun.set()
        await until(cancel_requested)
        return {}

    begun = anyio.Event()
    last = StateGraph(MessagesState).add_sequence([("ask", ask_model), ("hold", hold), ("again", ask_model)])
    graph = last.add_edge(START, "ask").compile(checkpointer=InMemorySaver())
    async with ParallelRunner(LangGraphBackend(graph)).start(PLAN) as run:
        await begun.wait()
        run.cancel()
        result = await run.result()
    assert result["graph"].usage == Usage(10, 5)


async def test_a_cancelled_graph_can_be_continued_with_a_message(tmp_path: Path) -> None:
    nodes = Nodes("c", plain=False)
    async with kept(flat(nodes), tmp_path / "threads.db") as graph:
        run_id = await cancel_while_held(nodes, graph, tmp_path, "handle")
        nodes.holds = ""
        async with SQLiteStore(tmp_path / "runs.db") as store:
            reply = await ParallelRunner(LangGraphBackend(graph), store=store).runs.continue_task(
                run_id, "graph", "again"
            )
    assert reply.data == {"done": [*"abc", *NAMES]}
    assert nodes.late == []
