"""Several tasks that go on from one LangGraph thread: each gets a copy of its own, and the thread stays as it is."""

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import anyio
import pytest
from langchain_core.messages import AIMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends import Abilities, ConversationRequest, LangGraphBackend, Reply
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore
from tests.support.graphs import chain, kept


def joined(before: list[str], writes: Sequence[list[str]]) -> list[str]:
    return [*before, *(one for some in writes for one in some)]


class Talk(MessagesState, total=False):
    changes: Annotated[list[str], DeltaChannel(joined)]


class Inner(TypedDict, total=False):
    seen: Annotated[list[str], operator.add]


def remember(state: Inner) -> Any:
    return {"seen": [f"{len(state.get('seen', []))} before"]}


REMEMBERING = chain(remember, state=Inner).compile(checkpointer=True)


def said(state: Any) -> str:
    return " ".join(str(one.content) for one in state["messages"])


def echo(state: Talk) -> Any:
    seen = REMEMBERING.invoke({})["seen"]
    cost: Any = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    text = f"<{state['messages'][-1].content}; {len(state.get('changes', []))} changes, {seen[-1]}>"
    return {"messages": [AIMessage(text, usage_metadata=cost)], "changes": [text]}


@pytest.fixture(params=["memory", "file"])
async def graph(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Any]:
    """A graph whose every memory counts: messages, a channel that is kept as changes, and a graph inside the graph."""
    made = chain(echo, state=Talk)
    if request.param == "memory":
        yield made.compile(checkpointer=InMemorySaver())
        return
    async with kept(made, tmp_path / "db") as compiled:
        yield compiled


async def turn(graph: Any, key: str, prompt: str, **more: Any) -> Reply:
    async with LangGraphBackend(graph).open(ConversationRequest(idempotency_key=key, **more)) as conversation:
        return await conversation.send(prompt)


async def messages(graph: Any, thread: str) -> str:
    return said((await graph.aget_state({"configurable": {"thread_id": thread}})).values)


async def test_forks_know_all_and_share_nothing(graph: Any) -> None:
    assert Abilities.of(LangGraphBackend(graph)).can_fork
    for prompt in ("one", "two"):
        parent = await turn(graph, "r:a", prompt, **({} if prompt == "one" else {"session_id": "r:a", "resume": True}))
    before = await messages(graph, "r:a")
    assert before == "one <one; 0 changes, 0 before> two <two; 1 changes, 1 before>"
    replies: dict[str, Reply] = {}

    async def fork(key: str) -> None:
        replies[key] = await turn(graph, key, key, fork_of=parent.session_id)

    async with anyio.create_task_group() as group:
        for key in ("r:b", "r:c"):
            group.start_soon(fork, key)
    for key, reply in replies.items():
        assert (reply.text, reply.session_id) == (f"<{key}; 2 changes, 2 before>", key)
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (3, 2)
        assert await messages(graph, key) == f"{before} {key} {reply.text}"
    assert await messages(graph, "r:a") == before
    again = await turn(graph, "r:b", "more", session_id="r:b", resume=True, fork_of=parent.session_id)
    assert again.text == "<more; 3 changes, 3 before>"


async def test_a_copy_that_was_cut_is_made_anew(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await turn(graph, "r:a", "one")
    put, puts = graph.checkpointer.aput, 0

    async def fail_in_the_middle(*arguments: Any) -> Any:
        nonlocal puts
        puts += 1
        if puts == 3:
            raise OSError("the disk is full")
        return await put(*arguments)

    monkeypatch.setattr(graph.checkpointer, "aput", fail_in_the_middle)
    with pytest.raises(BackendError, match="disk is full"):
        await turn(graph, "r:b", "two", fork_of="r:a")
    monkeypatch.undo()
    assert puts == 3
    for _ in range(2):  # a second attempt after a whole answer forks again, too
        assert (await turn(graph, "r:b", "two", fork_of="r:a")).text == "<two; 1 changes, 1 before>"
    assert await messages(graph, "r:b") == "one <one; 0 changes, 0 before> two <two; 1 changes, 1 before>"


async def test_a_thread_that_cannot_be_forked() -> None:
    def ask(state: MessagesState) -> Any:
        return {"messages": [AIMessage(interrupt("Really?"))]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile(checkpointer=InMemorySaver())
    with pytest.raises(BackendError, match="has no thread r:a") as caught:
        await turn(graph, "r:b", "two", fork_of="r:a")
    assert caught.value.kind is ErrorKind.SESSION_LOST
    waiting = await turn(graph, "r:a", "one")
    with pytest.raises(BackendError, match=r"waits for an answer: Really\?"):
        await turn(graph, "r:b", "two", fork_of=waiting.session_id)
    bare = LangGraphBackend(chain(echo, state=MessagesState).compile())
    assert not bare.can_fork


async def test_tasks_that_continue_one_run_side_by_side(graph: Any) -> None:
    dag = DAG([Task("a", "one"), *(Task(name, name, continues="a") for name in "bcd"), Task("e", "e", continues="d")])
    result = await ParallelRunner(LangGraphBackend(graph), store=MemoryStore()).run(dag, "r")
    assert result.status is RunStatus.COMPLETED
    assert {name: task.session_id for name, task in result.tasks.items()} == {name: f"r:{name}" for name in "abcde"}
    for name in "bcd":
        assert result[name].text == f"<{name}; 1 changes, 1 before>"
    assert result["e"].text == "<e; 2 changes, 2 before>"
    assert await messages(graph, "r:a") == "one <one; 0 changes, 0 before>"
