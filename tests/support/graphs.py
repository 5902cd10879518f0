"""Small LangGraph graphs of plain Python nodes, on the real library."""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from plait import DAG, ParallelRunner, Task
from plait.backends import ConversationRequest, LangGraphBackend
from plait.persistence import SQLiteStore

RUN = "killed"
Node = Callable[..., Any]


class Work(TypedDict, total=False):
    prompt: str
    status: str
    done: Annotated[list[str], operator.add]


def chain(*nodes: Node, state: Any = Work, **kinds: Any) -> Any:
    """The nodes one after the other, each named as its function; not compiled. `kinds`: schemas of input or output."""
    graph = StateGraph(state, **kinds)
    names = [node.__name__ for node in nodes]
    for name, node in zip(names, nodes, strict=True):
        graph.add_node(name, node)
    for before, after in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(before, after)
    return graph


@asynccontextmanager
async def kept(graph: Any, path: Path, **options: Any) -> AsyncGenerator[Any]:
    """`graph`, compiled with a saver on the file `path`."""
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        yield graph.compile(checkpointer=saver, **options)


def steps(folder: Path) -> Any:
    """Three nodes that each add a line to the file `ran`; the second one kills its process while `deadly` exists."""

    def note(name: str) -> dict[str, Any]:
        with (folder / "ran").open("a") as file:
            file.write(f"{name}\n")
        return {"done": [name]}

    def one(state: Work) -> dict[str, Any]:
        return note("one")

    def two(state: Work) -> dict[str, Any]:
        if (folder / "deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return note("two")

    def three(state: Work) -> dict[str, Any]:
        return {**note("three"), "status": "verified"}

    return chain(one, two, three)


async def run_steps(folder: Path) -> None:
    """Run `steps` as the task `run:task`, with its session id in the file `session` as soon as it is known."""
    async with kept(steps(folder), folder / "db") as graph:
        request = ConversationRequest(idempotency_key="run:task", on_session=(folder / "session").write_text)
        async with LangGraphBackend(graph).open(request) as conversation:
            await conversation.send("p")


async def run_a_run(folder: Path) -> None:
    """Run `steps` as the only task of the run RUN."""
    async with SQLiteStore(folder / "runs.db") as store, kept(steps(folder), folder / "db") as graph:
        await ParallelRunner(LangGraphBackend(graph), store=store).run(DAG([Task("task", "p")]), run_id=RUN)
