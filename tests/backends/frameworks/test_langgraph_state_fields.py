"""`run_id`, `session_id`, `run_status` and `current_node` in the state of a graph that declares them."""

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from plait import DAG, MemoryStore, OpenQuestion, ParallelRunner, Retry, RunStatus, Task, cancel_requested
from plait.backends import LangGraphBackend
from tests.support.processes.command import plait

ONE = DAG([Task("t", "p", retry=Retry(1))])
THREAD = {"configurable": {"thread_id": "r:t"}}


class State(TypedDict, total=False):
    prompt: str
    done: Annotated[list[str], operator.add]
    run_id: str
    session_id: str
    run_status: str
    current_node: str | None


class Scene:
    """A graph of `nodes` in a chain, each of which notes the state it gets and the state of the thread meanwhile."""

    def __init__(self, saver: Any) -> None:
        self.saver = saver
        self.seen: dict[str, tuple[str | None, ...]] = {}
        self.outside: dict[str, tuple[str | None, ...]] = {}
        self.builder = StateGraph(State)
        self.graph: Any = None

    def node(self, name: str, then: Any = None) -> Any:
        async def run(state: State) -> Any:
            self.seen[name] = fields(state)
            self.outside[name] = await self.thread()
            more = None if then is None else await then()
            return {"done": [name], **(more or {})}

        self.builder.add_node(name, run)
        return self

    def chain(self, *names: str) -> Any:
        for before, after in zip([START, *names], [*names, END], strict=True):
            self.builder.add_edge(before, after)
        return self.compile()

    def compile(self) -> Any:
        self.graph = self.builder.compile(checkpointer=self.saver)
        return self.graph

    async def thread(self, thread: str = "r:t") -> tuple[str | None, ...]:
        return fields((await self.graph.aget_state({"configurable": {"thread_id": thread}})).values)


def fields(values: Any) -> tuple[str | None, ...]:
    return tuple(values.get(name) for name in ("run_id", "session_id", "run_status", "current_node"))


@pytest.fixture(params=["memory", "sqlite"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Scene]:
    if request.param == "memory":
        yield Scene(InMemorySaver())
        return
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.db")) as saver:
        yield Scene(saver)


async def test_nodes_and_readers_of_the_thread_see_where_the_graph_is(scene: Scene) -> None:
    async def ask() -> Any:
        return {"prompt": interrupt("Right?")}

    graph = scene.node("a").node("b", ask).chain("a", "b")
    runner = ParallelRunner(LangGraphBackend(graph), store=MemoryStore())
    assert (await runner.run(ONE, "r")).status is RunStatus.WAITING_INPUT
    assert scene.seen == scene.outside == {"a": ("r", "r:t", "running", "a"), "b": ("r", "r:t", "running", "b")}
    assert await scene.thread() == ("r", "r:t", "waiting_input", "b")
    assert (await graph.aget_state(THREAD)).next == ("b",)
    scene.seen.clear()
    result = await runner.resume("r", answers={"t": "yes"})
    assert scene.seen == {"b": ("r", "r:t", "running", "b")}
    assert scene.outside["b"] == ("r", "r:t", "running", "b")
    assert await scene.thread() == ("r", "r:t", "completed", None)
    assert result["t"].data == {"prompt": "yes", "done": ["a", "b"]}, "the fields are no part of the answer"


async def test_nodes_that_run_together_read_their_own_names(scene: Scene) -> None:
    routed: list[Any] = []

    def route(state: State) -> str:
        routed.append(fields(state))
        return END

    scene.node("a").node("b").node("c")
    scene.builder.add_edge(START, "a")
    scene.builder.add_edge("a", "b")
    scene.builder.add_edge("a", "c")
    scene.builder.add_conditional_edges("b", route)
    await ParallelRunner(LangGraphBackend(scene.compile())).run(ONE, "r")
    assert [scene.seen[name][3] for name in "abc"] == ["a", "b", "c"]
    assert [scene.outside[name][3] for name in "abc"] == ["a", "b, c", "b, c"]
    assert routed == [("r", "r:t", "running", "b, c")]
    assert await scene.thread() == ("r", "r:t", "completed", None)


async def test_after_a_failure_the_graph_goes_on_and_tells_so(scene: Scene) -> None:
    fails = [True]

    async def break_once() -> Any:
        if fails.pop():
            raise ValueError("broken")

    graph = scene.node("a").node("b", break_once).chain("a", "b")
    store = MemoryStore()
    runner = ParallelRunner(LangGraphBackend(graph), store=store)
    assert (await runner.run(ONE, "r")).status is RunStatus.FAILED
    assert await scene.thread() == ("r", "r:t", "failed", "b")
    fails[:] = [False]
    scene.outside.clear()
    assert (await runner.resume("r", retry_failed=True)).status is RunStatus.COMPLETED
    assert scene.outside == {"b": ("r", "r:t", "running", "b")}, "node a is not run again"
    assert await scene.thread() == ("r", "r:t", "completed", None)


async def test_a_cancelled_graph_says_so(scene: Scene) -> None:
    began = anyio.Event()

    async def hold() -> Any:
        began.set()
        while not cancel_requested():
            await anyio.lowlevel.checkpoint()

    graph = scene.node("a", hold).node("b").chain("a", "b")
    async with ParallelRunner(LangGraphBackend(graph)).start(ONE, "r") as run:
        await began.wait()
        run.cancel()
    assert await scene.thread() == ("r", "r:t", "cancelled", None)
    assert (await graph.aget_state(THREAD)).next == ("b",)
    assert (await graph.ainvoke(None, THREAD))["done"] == ["a", "b"]


@pytest.mark.parametrize("how", ["stored", "in the run", "by a resume", "without a store"])
async def test_a_graph_that_waits_while_its_run_is_cancelled_says_so(scene: Scene, how: str) -> None:
    async def ask() -> Any:
        return {"prompt": interrupt("Right?")}

    graph = scene.node("a").node("b", ask).chain("a", "b")
    asked = anyio.Event()

    async def wait(question: OpenQuestion) -> None:
        asked.set()
        await anyio.sleep_forever()

    store = None if how == "without a store" else MemoryStore()
    runner = ParallelRunner(LangGraphBackend(graph), store=store, on_question=wait)
    if how in {"stored", "by a resume"}:
        runner = ParallelRunner(LangGraphBackend(graph), store=store)
        assert (await runner.run(ONE, "r")).status is RunStatus.WAITING_INPUT
    if how == "stored":
        assert await scene.thread() == ("r", "r:t", "waiting_input", "b")
        assert await runner.runs.cancel("r") is RunStatus.CANCELLED
    else:
        again = ParallelRunner(LangGraphBackend(graph), store=store, on_question=wait)
        async with again.start_resume("r") if how == "by a resume" else again.start(ONE, "r") as run:
            await asked.wait()
            run.cancel()
            assert (await run.result()).status is RunStatus.CANCELLED
    assert await scene.thread() == ("r", "r:t", "cancelled", "b")
    assert (await graph.aget_state(THREAD)).next == ("b",)
    assert (await graph.ainvoke(Command(resume="yes"), THREAD))["done"] == ["a", "b"], "the thread can still go on"


async def test_the_command_that_cancels_says_so_in_the_thread(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        """
import aiosqlite
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import interrupt
from plait.backends import LangGraphBackend
from tests.backends.frameworks.test_langgraph_state_fields import Scene

def ask(state):
    return {"prompt": interrupt("Right?")}

scene = Scene(AsyncSqliteSaver(aiosqlite.connect("threads.db")))
scene.builder.add_node("ask", ask)
backend = LangGraphBackend(scene.chain("ask"))
"""
    )
    (tmp_path / "plan.yaml").write_text(
        'backends: {g: {kind: function, call: "work.py:backend"}}\ntasks: [{id: t, prompt: p}]'
    )
    asked = await anyio.to_thread.run_sync(plait, tmp_path, "run", "plan.yaml", "--json")
    run_id = asked.value["run_id"]
    cancelled = await anyio.to_thread.run_sync(plait, tmp_path, "cancel", "last")
    assert (asked.code, cancelled.code) == (4, 0), asked.err + cancelled.err
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.db")) as saver:
        scene = Scene(saver)
        scene.node("ask").chain("ask")
        assert await scene.thread(f"{run_id}:t") == (run_id, f"{run_id}:t", "cancelled", "ask")


async def test_a_status_that_the_graph_wrote_outlives_a_cancel_of_its_run(scene: Scene) -> None:
    async def verify() -> Any:
        return {"run_status": "verified"}

    async def ask() -> Any:
        return {"prompt": interrupt("Right?")}

    runner = ParallelRunner(
        LangGraphBackend(scene.node("a", verify).node("b", ask).chain("a", "b")), store=MemoryStore()
    )
    await runner.run(ONE, "r")
    await runner.runs.cancel("r")
    assert (await scene.thread())[2] == "verified"


async def test_a_saver_that_refuses_keeps_no_run_from_being_cancelled() -> None:
    class Refuses(InMemorySaver):
        async def aget_tuple(self, config: Any) -> Any:
            if broken:
                raise OSError("planted")
            return await super().aget_tuple(config)

    async def ask() -> Any:
        return {"prompt": interrupt("Right?")}

    broken: list[bool] = []
    scene = Scene(Refuses())
    runner = ParallelRunner(LangGraphBackend(scene.node("a", ask).chain("a")), store=MemoryStore())
    await runner.run(ONE, "r")
    broken.append(True)
    assert await runner.runs.cancel("r") is RunStatus.CANCELLED


async def test_a_continued_conversation_and_a_fork_have_their_own_session(scene: Scene) -> None:
    graph = scene.node("a").chain("a")
    dag = DAG([Task("t", "p"), Task("u", "p", continues="t"), Task("v", "p", continues="t")])
    await ParallelRunner(LangGraphBackend(graph)).run(dag, "r")
    for task in "tuv":
        assert await scene.thread(f"r:{task}") == ("r", f"r:{task}", "completed", None)


async def test_a_field_that_the_graph_writes_is_the_graphs(scene: Scene) -> None:
    async def point() -> Any:
        return {"current_node": "elsewhere"}

    graph = scene.node("a", point).node("b").chain("a", "b")
    backend = LangGraphBackend(graph, to_input=lambda prompt: {"prompt": prompt, "session_id": "chat 7"})
    result = await ParallelRunner(backend).run(ONE, "r")
    assert scene.seen == {"a": ("r", "chat 7", "running", "a"), "b": ("r", "chat 7", "running", "elsewhere")}
    assert await scene.thread() == ("r", "chat 7", "completed", "elsewhere")
    assert result["t"].data == {
        "prompt": "p",
        "done": ["a", "b"],
        "session_id": "chat 7",
        "current_node": "elsewhere",
    }


async def test_nodes_that_return_their_whole_state_leave_the_fields_to_plait(scene: Scene) -> None:
    async def whole(state: State) -> Any:
        return {**state, "done": []}

    scene.builder.add_node("whole", whole)
    graph = scene.node("b").chain("whole", "b")
    await ParallelRunner(LangGraphBackend(graph)).run(ONE, "r")
    assert scene.seen == {"b": ("r", "r:t", "running", "b")}
    assert await scene.thread() == ("r", "r:t", "completed", None)


async def test_a_saver_that_refuses_the_fields_costs_no_answer() -> None:
    class Refuses(InMemorySaver):
        async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
            if set(new_versions) == {"run_id", "session_id", "run_status", "current_node"}:
                raise OSError("planted")
            return await super().aput(config, checkpoint, metadata, new_versions)

    scene = Scene(Refuses())
    result = await ParallelRunner(LangGraphBackend(scene.node("a").chain("a"))).run(ONE, "r")
    assert result["t"].data == {"prompt": "p", "done": ["a"]}
    assert scene.seen == {"a": ("r", "r:t", "running", "a")}


async def test_without_a_thread_the_nodes_read_the_fields_too() -> None:
    class Small(TypedDict, total=False):
        prompt: str
        run_status: str
        run_id: str
        text: str

    def tell(state: Small) -> Any:
        return {"text": f"{state['run_id']} {state['run_status']}"}

    graph = StateGraph(Small).add_node("tell", tell).add_edge(START, "tell").compile()
    result = await ParallelRunner(LangGraphBackend(graph)).run(ONE, "r")
    assert result["t"].data == {"prompt": "p", "text": "r running"}
