"""LangGraphBackend on LangGraph's own SQLite saver: threads, questions and answers, and what is left by a cut."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt

from plait.backends import Answer, ConversationRequest, LangGraphBackend, Output, Reply
from plait.errors import BackendError, ErrorKind
from tests.support.graphs import Work, chain, kept, steps

KEY = "run:task"


class Desk:
    """A graph of nodes that ask, with a log of what ran in them, on a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ran: list[str] = []
        self.broken = False
        self.sessions: list[str] = []

    def draft(self, state: Work) -> Any:
        self.ran.append("draft")
        return {"done": ["draft"]}

    def approve(self, state: Work) -> Any:
        self.ran.append("approve")
        first = interrupt({"question": "Publish?", "why": "it is final"})
        self.ran.append(f"publish={first}")
        if self.broken:
            raise OSError("the disk is full")
        second = interrupt("Where?", response_schema={"enum": ["web", "paper"]})
        return {"done": [f"published {first} {second}"], "status": "published"}

    def budget(self, state: Work) -> Any:
        self.ran.append("budget")
        return {"done": [f"spent {interrupt({'euro': 5})}"]}

    def print_it(self, state: Work) -> Any:
        self.ran.append("print")
        if self.broken:
            raise OSError("the disk is full")
        return {"done": ["printed"]}

    @property
    def graph(self) -> Any:
        return chain(self.draft, self.approve)

    @property
    def forked(self) -> Any:
        graph = StateGraph(Work).add_node("approve", self.approve).add_node("budget", self.budget)
        for name in ("approve", "budget"):
            graph.add_edge(START, name).add_edge(name, END)
        return graph

    async def turn(self, graph: Any, prompt: str = "p", **request: Any) -> Reply:
        """One turn, each in a process's life of its own: nothing but the file is kept."""
        made = ConversationRequest(idempotency_key=KEY, on_session=self.sessions.append, **request)
        async with kept(graph, self.path) as compiled, LangGraphBackend(compiled).open(made) as conversation:
            reply = await conversation.send(prompt)
            assert conversation.session_id == reply.session_id
            return reply

    async def answer(self, graph: Any, value: Any, to: Reply) -> Reply:
        return await self.turn(graph, session_id=to.session_id, resume=True, answer=Answer(value))

    async def go_on(self, graph: Any, session_id: str | None = KEY) -> Reply:
        return await self.turn(graph, session_id=session_id, resume=True, resumes_interrupted=True)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "threads.db")


def asked(reply: Reply) -> str:
    assert reply.question is not None
    assert reply.question.text == reply.text
    return reply.text


async def test_a_question_is_answered_and_the_graph_goes_on(desk: Desk) -> None:
    first = await desk.turn(desk.graph)
    assert asked(first) == 'Publish?\n{"why": "it is final"}'
    assert desk.sessions == [KEY]
    assert desk.ran == ["draft", "approve"]
    second = await desk.answer(desk.graph, {"by": "Ada"}, first)
    assert asked(second) == "Where?"
    assert second.question is not None
    assert second.question.schema == {"enum": ["web", "paper"]}
    last = await desk.answer(desk.graph, "web", second)
    assert last == Reply(last.text, last.data, KEY)
    assert last.data == {"prompt": "p", "status": "published", "done": ["draft", "published {'by': 'Ada'} web"]}
    assert (desk.ran.count("draft"), desk.ran.count("approve")) == (1, 3)
    # A turn is reported as begun once the thread holds what it says, under the id that it was opened with.
    assert desk.sessions == [KEY, first.session_id, second.session_id]


async def test_an_answer_may_be_nothing(desk: Desk) -> None:
    assert asked(await desk.answer(desk.graph, None, await desk.turn(desk.graph))) == "Where?"
    assert "publish=None" in desk.ran


async def test_several_questions_at_once_are_asked_one_by_one(desk: Desk) -> None:
    replies = [await desk.turn(desk.forked)]
    for value in ("yes", "web", 7):
        replies.append(await desk.answer(desk.forked, value, replies[-1]))
    assert [asked(reply) for reply in replies[:-1]] == [
        'Publish?\n{"why": "it is final"}',
        "Where?",
        '{"euro": 5}',
    ]
    data = replies[-1].data
    assert isinstance(data, dict)
    assert data["done"] == ["published yes web", "spent 7"]


@pytest.mark.parametrize("nested", [False, True])
async def test_an_answer_said_again_answers_no_other_question(nested: bool, desk: Desk) -> None:
    graph = StateGraph(Work).add_node("inside", desk.graph.compile()).add_edge(START, "inside")
    graph = graph if nested else desk.graph
    first = await desk.turn(graph)
    desk.broken = True
    for _ in range(2):  # the node takes the answer, then fails
        with pytest.raises(BackendError, match="disk is full"):
            await desk.answer(graph, "yes", first)
    desk.broken = False
    second = await desk.answer(graph, "yes", first)
    assert asked(second) == "Where?"
    # The reply was lost on its way, or this one's.
    assert await desk.answer(graph, "yes", first) == second
    last = await desk.answer(graph, "web", second)
    assert last.question is None
    assert await desk.answer(graph, "web", second) == last


async def test_an_answer_said_again_does_not_reach_another_node(desk: Desk) -> None:
    first = await desk.turn(desk.forked)
    second = await desk.answer(desk.forked, "yes", first)
    third = await desk.answer(desk.forked, "web", second)
    assert asked(third) == '{"euro": 5}'
    assert await desk.answer(desk.forked, "web", second) == third
    assert not any("spent" in line for line in desk.ran)


async def test_a_cut_turn_asks_its_question_again(desk: Desk) -> None:
    first = await desk.turn(desk.graph)
    assert await desk.go_on(desk.graph) == first
    second = await desk.answer(desk.graph, "yes", first)
    assert await desk.go_on(desk.graph, first.session_id) == second
    last = await desk.answer(desk.graph, "web", second)
    desk.ran.clear()
    assert await desk.go_on(desk.graph, second.session_id) == last
    assert desk.ran == []


async def test_a_waiting_graph_takes_an_answer_only(desk: Desk) -> None:
    first = await desk.turn(desk.graph)
    with pytest.raises(BackendError, match=r"waits for an answer: Publish\?") as caught:
        await desk.turn(desk.graph, "something else", session_id=first.session_id, resume=True)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert asked(await desk.answer(desk.graph, "yes", first)) == "Where?"


async def test_a_second_attempt_goes_on_where_the_first_one_failed(desk: Desk) -> None:
    graph = chain(desk.draft, desk.print_it)
    desk.broken = True
    with pytest.raises(BackendError, match="disk is full"):
        await desk.turn(graph)
    desk.broken = False
    assert (await desk.turn(graph)).data == {"prompt": "p", "done": ["draft", "printed"]}
    assert desk.ran == ["draft", "print", "print"]
    # One after an end begins anew, and so does one with another prompt.
    assert (await desk.turn(graph)).data == {"prompt": "p", "done": ["draft", "printed"]}
    desk.broken = True
    with pytest.raises(BackendError, match="disk is full"):
        await desk.turn(graph, "q")
    desk.broken = False
    assert (await desk.turn(graph)).data == {"prompt": "p", "done": ["draft", "printed"]}
    assert desk.ran.count("draft") == 4


async def test_a_later_message_is_new_input_on_the_thread(desk: Desk) -> None:
    def echo(state: MessagesState) -> Any:
        return {"messages": [AIMessage(" ".join(str(one.content) for one in state["messages"]))]}

    graph = chain(echo, state=MessagesState)
    assert (await desk.turn(graph, "a")).text == "a"
    again = await desk.turn(graph, "a", session_id=KEY, resume=True)
    assert (again.text, again.session_id) == ("a a a", KEY)
    assert (await desk.turn(graph, "b")).text == "b"
    request = ConversationRequest(session_id=KEY, resume=True, resumes_interrupted=True)
    async with kept(graph, desk.path) as compiled, LangGraphBackend(compiled).open(request) as conversation:
        assert [(await conversation.send(prompt)).text for prompt in ("cut", "c")] == ["b", "b b c"]


async def test_two_runs_at_once_share_no_checkpoint(tmp_path: Path) -> None:
    """Each run waits inside its first node for the other one to be there too."""
    arrived = {"a": anyio.Event(), "b": anyio.Event()}
    replies: dict[str, Reply] = {}

    async def meet(state: Work) -> Any:
        name = state.get("prompt", "")
        arrived[name].set()
        await arrived["b" if name == "a" else "a"].wait()
        return {"done": [name]}

    def check(state: Work) -> Any:
        return {"done": [interrupt(f"{state.get('prompt')}?")]}

    async with kept(chain(meet, check), tmp_path / "db") as graph:
        backend = LangGraphBackend(graph)

        async def run(name: str, **more: Any) -> None:
            request = ConversationRequest(idempotency_key=f"{name}:task", **more)
            async with backend.open(request) as conversation:
                replies[name] = await conversation.send(name)

        for more in ({}, {"resume": True, "answer": Answer("ok")}):
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    for name in ("a", "b"):
                        sessions = {"session_id": replies[name].session_id} if more else {}
                        group.start_soon(lambda n=name, m={**more, **sessions}: run(n, **m))
    for name in ("a", "b"):
        assert replies[name].data == {"prompt": name, "done": [name, "ok"]}
        assert replies[name].session_id == f"{name}:task"


@pytest.mark.parametrize("in_memory", [True, False])
async def test_the_session_is_known_while_the_first_node_runs(in_memory: bool, desk: Desk) -> None:
    known = anyio.Event()

    async def wait(state: Work) -> Any:
        await known.wait()

    request = ConversationRequest(idempotency_key=KEY, on_session=lambda _: known.set())
    async with kept(chain(wait), desk.path) as graph:
        compiled = chain(wait).compile(checkpointer=InMemorySaver()) if in_memory else graph
        with anyio.fail_after(60):
            async with LangGraphBackend(compiled).open(request) as conversation:
                await conversation.send("p")


@pytest.mark.slow
async def test_a_killed_process_is_gone_on_from(tmp_path: Path) -> None:
    script = (
        "import anyio, pathlib, sys, tests.support.graphs as graphs\n"
        "anyio.run(graphs.run_steps, pathlib.Path(sys.argv[1]))"
    )
    (tmp_path / "deadly").touch()
    done = await anyio.run_process([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (tmp_path / "ran").read_text() == "one\n"
    (tmp_path / "deadly").unlink()
    desk = Desk(tmp_path / "db")
    reply = await desk.go_on(steps(tmp_path), (tmp_path / "session").read_text())
    assert reply.data == {"prompt": "p", "status": "verified", "done": ["one", "two", "three"]}
    assert (tmp_path / "ran").read_text() == "one\ntwo\nthree\n"
    assert await desk.go_on(steps(tmp_path)) == reply
    assert (tmp_path / "ran").read_text() == "one\ntwo\nthree\n"


async def test_a_cancelled_turn_ends_at_once_and_is_gone_on_from(desk: Desk) -> None:
    """Also where a plain `def` node hangs in its thread, which runs on unheard."""
    release = threading.Event()
    scope = anyio.CancelScope()

    def slow(state: Work) -> Any:
        desk.ran.append("slow")
        release.wait(120)
        return {"done": ["slow"]}

    def stop_at_slow(output: Output) -> None:
        if output.text == "slow":
            scope.cancel()

    with anyio.fail_after(60), scope:
        await desk.turn(chain(desk.draft, slow), on_output=stop_at_slow)
    assert scope.cancelled_caught
    release.set()
    reply = await desk.go_on(chain(desk.draft, slow))
    assert reply.data == {"prompt": "p", "done": ["draft", "slow"]}
    assert desk.ran.count("draft") == 1
