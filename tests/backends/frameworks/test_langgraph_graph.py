"""LangGraphBackend on the real library: what goes in, what comes out, what goes wrong."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import anyio
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import interrupt

from plait.backends import ConversationRequest, LangGraphBackend, Message, Output, Reply, Usage
from plait.backends.extras import install_command
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.contracts.backend import SCHEMA, BackendContract, Subject
from tests.support.graphs import Work, chain, kept
from tests.support.wire import ChatCompletions, serve


class Mooded(MessagesState, total=False):
    mood: str
    steps: int


async def say(backend: LangGraphBackend, prompt: str = "p", request: ConversationRequest | None = None) -> Reply:
    async with backend.open(request or ConversationRequest()) as conversation:
        return await conversation.send(prompt)


def answer(state: Any) -> Any:
    asked = state["messages"][-1].content
    text = '{"mood": "good"}' if "mood" in asked else f"I heard {asked}"
    cost: Any = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    return {"messages": [AIMessage(text, usage_metadata=cost)]}


async def hang(state: Any) -> Any:
    await anyio.sleep(100)


def fail(state: Any) -> Any:
    raise ValueError("no\nluck")


CHAT = chain(answer, state=MessagesState)
HANGING, FAILING = chain(hang), chain(fail)


class TestWithoutCheckpointer(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        working, hanging, failing = (LangGraphBackend(graph.compile()) for graph in (CHAT, HANGING, FAILING))
        return Subject(working, hanging, failing)


class TestWithSaver(BackendContract):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[Subject]:
        path = tmp_path / "threads.db"
        async with kept(CHAT, path) as working, kept(HANGING, path) as hanging, kept(FAILING, path) as failing:
            yield Subject(LangGraphBackend(working), LangGraphBackend(hanging), LangGraphBackend(failing))

    async def test_a_reply_is_whole(self, subject: Subject) -> None:
        # The thread is named by the task, so unlike in the contract there is a session though none was chosen.
        seen: list[str] = []
        reply = await say(
            subject.working, "Say hello.", ConversationRequest(idempotency_key="r:t", on_session=seen.append)
        )
        assert reply == Reply("I heard Say hello.", session_id="r:t", usage=Usage(3, 2))
        assert seen == ["r:t"]

    async def test_a_history_is_continued(self, subject: Subject) -> None:
        with pytest.raises(BackendError, match="has no thread r:gone") as caught:
            await say(subject.working, request=ConversationRequest(session_id="r:gone", resume=True))
        assert caught.value.kind is ErrorKind.SESSION_LOST


async def test_who_keeps_no_thread_is_told_what_was_said() -> None:
    def count(state: MessagesState) -> Any:
        return {"messages": [AIMessage(" ".join(f"{one.type}:{one.content}" for one in state["messages"]))]}

    backend = LangGraphBackend(chain(count, state=MessagesState).compile())
    history = (Message("user", "a"), Message("assistant", "b"))
    reply = await say(backend, "c", ConversationRequest(session_id=None, resume=True, history=history))
    assert reply.text == "human:a ai:b human:c"
    assert reply.session_id is None


@dataclass
class Score:
    points: int
    judge: object


class Rich(TypedDict, total=False):
    prompt: str
    messages: list[Any]
    status: str
    score: Score
    odd: Any


async def test_data_is_the_json_part_of_the_state() -> None:
    circle: list[Any] = []
    circle.append(circle)

    def work(state: Rich) -> Any:
        blocks: Any = [{"type": "text", "text": "fi"}, {"type": "image", "url": "u"}, "ne\udc80"]
        return {
            "messages": [HumanMessage("how?"), AIMessage(blocks)],
            "status": "verified",
            "score": Score(3, object()),
            "odd": {"nan": float("nan"), "set": {1}, 5: "five", "list": [1, object(), None], "deep": circle},
        }

    reply = await say(LangGraphBackend(chain(work, state=Rich).compile(), to_input=lambda prompt: {"prompt": prompt}))
    assert reply.text == "fine\ufffd"
    assert isinstance(reply.data, dict)
    odd = reply.data.pop("odd")
    assert reply.data == {
        "prompt": "p",
        "messages": [{"role": "user", "content": "how?"}, {"role": "assistant", "content": "fine\ufffd"}],
        "status": "verified",
        "score": {"points": 3},
    }
    assert isinstance(odd, dict)
    assert odd.keys() == {"nan", "set", "list", "deep"}
    assert (odd["nan"], odd["set"], odd["list"]) == (None, [1], [1, None, None])


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ([1.0, float("nan"), 3.0], [1.0, None, 3.0]),
        ((1, float("inf"), -float("inf")), [1, None, None]),
        ([[1, float("nan")], {"a": [object(), 2]}, b"x"], [[1, None], {"a": [None, 2]}, None]),
        (deque([1, float("nan")]), [1, None]),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({2, float("nan")}), [2, None]),
        (float("nan"), None),
    ],
    ids=["list", "tuple", "nested", "deque", "set", "frozenset", "field"],
)
async def test_each_value_of_a_list_keeps_its_place(value: Any, kept: Any) -> None:
    backend = LangGraphBackend(chain(lambda _: {"odd": value}, state=Rich).compile(), to_input=lambda _: {})
    assert (await say(backend)).data == {"odd": kept}


FULL = {"reason": "max_output_tokens"}
CALL: Any = [{"name": "look", "args": {}, "id": "1"}]
K = ErrorKind


def _ending(text: str, reason: str, key: str = "finish_reason", **more: Any) -> AIMessage:
    return AIMessage(text, response_metadata={key: reason}, **more)


ENDINGS: dict[str, tuple[list[Any], str | ErrorKind]] = {
    "whole": ([_ending("4", "stop")], "4"),
    "whole, of Gemini": ([_ending("4", "STOP")], "4"),
    "whole, joined from a stream": ([_ending("4", "stopstop")], "4"),
    "whole, of Bedrock's stream": ([AIMessage("4", response_metadata={"stopReason": ["end_turn"]})], "4"),
    "whole, with a status": ([AIMessage("4", response_metadata={"status": "completed"})], "4"),
    "a tool and then the answer": (
        [_ending("I look.", "tool_calls", tool_calls=CALL), ToolMessage("42", tool_call_id="1"), _ending("4", "stop")],
        "4",
    ),
    "what a tool returned": (
        [_ending("I look.", "tool_calls", tool_calls=CALL), ToolMessage("42", tool_call_id="1")],
        "42",
    ),
    "an agent in the role of a user": ([AIMessage("I look."), HumanMessage("4", name="researcher")], "4"),
    "the prompt again": ([HumanMessage("p")], K.INVALID_OUTPUT),
    "thoughts before it": ([AIMessage("<think>Is it?</think>4")], "4"),
    "blocks": ([AIMessage([{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "4"}])], "4"),
    "empty after a tool": (
        [_ending("I look.", "tool_calls", tool_calls=CALL), ToolMessage("42", tool_call_id="1"), _ending("", "stop")],
        K.INVALID_OUTPUT,
    ),
    "empty": ([AIMessage("")], K.INVALID_OUTPUT),
    "blank": ([AIMessage(" \n")], K.INVALID_OUTPUT),
    "nothing": ([], K.INVALID_OUTPUT),
    "nothing but thoughts": ([AIMessage("<think>Is it 4?</think>")], K.INVALID_OUTPUT),
    "nothing but thinking": ([AIMessage([{"type": "thinking", "thinking": "?"}])], K.INVALID_OUTPUT),
    "a call of a tool that nobody offered": ([AIMessage("I look.", tool_calls=CALL)], K.INVALID_OUTPUT),
    "the reason of such a call": ([_ending("I look.", "tool_calls")], K.INVALID_OUTPUT),
    "cut": ([_ending("half an ans", "length")], K.TRUNCATED),
    "cut, of Anthropic": ([_ending("half", "max_tokens", "stop_reason")], K.TRUNCATED),
    "cut, of Gemini": ([_ending("half", "MAX_TOKENS")], K.TRUNCATED),
    "cut, of Ollama": ([_ending("half", "length", "done_reason")], K.TRUNCATED),
    "cut, of Bedrock": ([_ending("half", "max_tokens", "stopReason")], K.TRUNCATED),
    "cut, joined from a stream": ([_ending("half", "lengthlength")], K.TRUNCATED),
    "cut, of the Responses API": (
        [AIMessage("h", response_metadata={"status": "incomplete", "incomplete_details": FULL})],
        K.TRUNCATED,
    ),
    "cut before the last piece": ([_ending("half", "length"), _ending("the rest", "stop")], K.TRUNCATED),
    "two reasons": (
        [AIMessage("half", response_metadata={"finish_reason": "length", "stop_reason": "end_turn"})],
        K.TRUNCATED,
    ),
    "filtered": ([_ending("half", "content_filter")], K.REFUSED),
    "filtered, of Gemini": ([_ending("half", "SAFETY")], K.REFUSED),
    "declined": ([AIMessage("", additional_kwargs={"refusal": "I cannot."})], K.REFUSED),
    "broken": ([_ending("half", "error")], K.TRANSIENT),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "stored"), [*((ending, False) for ending in ENDINGS), ("whole", True), ("empty", True), ("cut", True)]
)
async def test_the_text_of_the_last_message_is_the_answer_if_it_is_whole(
    ending: str, stored: bool, tmp_path: Path
) -> None:
    messages, right = ENDINGS[ending]
    copies = [one.model_copy() for one in messages]
    graph = chain(lambda _: {"messages": copies}, state=MessagesState)
    async with kept(graph, tmp_path / "db") as saved:
        try:
            reply: Reply | BackendError = await say(LangGraphBackend(saved if stored else graph.compile()))
        except BackendError as error:
            reply = error
    if isinstance(right, ErrorKind):
        assert isinstance(reply, BackendError), reply
        assert reply.kind is right, reply
        if right is ErrorKind.TRUNCATED:
            assert [one.role for one in reply.messages] == ["user", "assistant"]
    else:
        assert isinstance(reply, Reply), reply
        assert reply.text == right


async def test_thoughts_are_kept_apart_from_the_answer() -> None:
    cost: Any = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    said = AIMessage("<think>Is it?</think>4", usage_metadata=cost)
    reply = await say(LangGraphBackend(chain(lambda _: {"messages": [said]}, state=MessagesState).compile()))
    assert reply.text == "4"
    assert reply.messages == (Message("user", "p"), Message("assistant", "4", Usage(3, 2), "Is it?"))


async def test_a_message_in_a_field_of_its_own_has_to_be_whole_too() -> None:
    async def said(message: AIMessage) -> Reply:
        graph = chain(lambda _: {"odd": message}, state=Rich).compile()
        return await say(LangGraphBackend(graph, to_input=lambda _: {}))

    assert (await said(_ending("4", "stop"))).data == {"odd": {"role": "assistant", "content": "4"}}
    for message, kind in ((_ending("4", "length"), K.TRUNCATED), (AIMessage(""), K.INVALID_OUTPUT)):
        with pytest.raises(BackendError) as caught:
            await said(message)
        assert caught.value.kind is kind


async def test_data_beside_an_empty_message_is_an_answer_if_it_is_new(tmp_path: Path) -> None:
    """As with a schema of LangChain's agents, which the model answers by calling a tool."""
    made: list[Any] = [{"mood": "good", "messages": [_ending("", "tool_calls", tool_calls=CALL)]}]
    made.append({"messages": [AIMessage("")]})
    request = ConversationRequest(output_schema=SCHEMA)
    compiling = kept(chain(lambda _: made.pop(0), state=Mooded), tmp_path / "db")
    async with compiling as graph, LangGraphBackend(graph).open(request) as conversation:
        assert (await conversation.send("How is it?")).data == {"mood": "good"}
        with pytest.raises(BackendError) as caught:
            await conversation.send("And now?")
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


async def test_an_answer_that_is_not_whole_is_paid_for() -> None:
    cost: Any = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    cut = _ending("half", "length", usage_metadata=cost)
    misfit = AIMessage("no mood", usage_metadata=cost)

    def break_down(_: Any) -> Any:
        raise ValueError("no luck")

    for graph in (
        chain(lambda _: {"messages": [cut]}, state=MessagesState),
        chain(lambda _: {"messages": [misfit]}, state=MessagesState),
        StateGraph(MessagesState).add_node("a", lambda _: {"messages": [misfit]}).add_node("b", break_down)
        .add_edge("__start__", "a").add_edge("a", "b"),
    ):  # fmt: skip
        with pytest.raises(BackendError) as caught:
            await say(LangGraphBackend(graph.compile()), request=ConversationRequest(output_schema=SCHEMA))
        assert caught.value.usage == Usage(3, 2)


async def test_without_messages_the_text_is_the_data() -> None:
    def work(state: Work) -> Any:
        return {"status": f"é {state['prompt']}"}

    reply = await say(LangGraphBackend(chain(work).compile()))
    assert reply == Reply('{"prompt": "p", "status": "é p", "done": []}', {"prompt": "p", "status": "é p", "done": []})


async def test_an_answer_of_before_is_none_of_this_turn(tmp_path: Path) -> None:
    def only_first(state: Any) -> Any:
        return answer(state) if len(state["messages"]) == 1 else {"steps": 2}

    compiling = kept(chain(only_first, state=Mooded), tmp_path / "db")
    async with compiling as graph, LangGraphBackend(graph).open(ConversationRequest()) as conversation:
        assert (await conversation.send("a")).usage == Usage(3, 2)
        second = await conversation.send("b")
    assert second.text.startswith('{"messages": [{"role": "user", "content": "a"}')
    assert second.usage == Usage()


async def test_a_schema_is_for_the_fields_beside_the_messages() -> None:
    def judge(state: Mooded) -> Any:
        return {"messages": [AIMessage("well")], "mood": state["messages"][0].content}

    backend = LangGraphBackend(chain(judge, state=Mooded).compile())
    reply = await say(backend, "bad", ConversationRequest(output_schema=SCHEMA))
    assert (reply.text, reply.data) == ("well", {"mood": "bad"})
    with pytest.raises(BackendError, match='"odd" is not one of') as caught:
        await say(backend, "odd", ConversationRequest(output_schema=SCHEMA))
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


async def test_only_the_declared_output_is_shown(tmp_path: Path) -> None:
    class Verdict(TypedDict):
        status: str

    def work(state: Work) -> Any:
        return {"status": "ok", "done": ["hidden"]}

    graph = chain(work, output_schema=Verdict)
    async with kept(graph, tmp_path / "db") as saved:
        for compiled in (graph.compile(), saved):
            assert (await say(LangGraphBackend(compiled))).data == {"status": "ok"}


async def test_nodes_are_noticed_as_they_start() -> None:
    seen: list[Output] = []
    await say(LangGraphBackend(CHAT.compile()), request=ConversationRequest(on_output=seen.append))
    assert seen == [Output("node", "answer")]


@pytest.mark.parametrize("options", [{}, {"checkpointer": False}])
async def test_asking_without_a_checkpointer_is_refused(options: Any) -> None:
    def ask(state: Any) -> Any:
        interrupt("really?")

    with pytest.raises(
        BackendError, match=r"compile the graph with a checkpointer, such as AsyncSqliteSaver"
    ) as caught:
        await say(LangGraphBackend(chain(ask).compile(**options)))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


async def test_exceptions_of_nodes() -> None:
    def refuse(state: Any) -> Any:
        raise BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=3)

    with pytest.raises(
        BackendError, match=r"^unexpected: ValueError: no luck \(at test_langgraph_graph.py:\d+ in \w+\)$"
    ) as caught:
        await say(LangGraphBackend(FAILING.compile()))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.traceback is not None
    assert 'raise ValueError("no\\nluck")' in caught.value.traceback
    with pytest.raises(BackendError, match="slow down") as caught:
        await say(LangGraphBackend(chain(refuse).compile()))
    assert caught.value.retry_after == 3


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (429, "rate_limit_exceeded", ErrorKind.RATE_LIMITED),
        (429, "insufficient_quota", ErrorKind.NO_CREDIT),
        (503, "overloaded", ErrorKind.OVERLOADED),
        (401, "invalid_api_key", ErrorKind.UNEXPECTED),
    ],
)
async def test_a_limit_that_a_model_of_the_graph_meets(status: int, code: str, kind: ErrorKind) -> None:
    openai = pytest.importorskip("openai")

    async def asks(state: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])

    async with serve(ChatCompletions().error(status, code, "no", retry_after="7")) as server:
        with pytest.raises(BackendError) as caught:
            await say(LangGraphBackend(chain(asks).compile()))
    limited = kind is not ErrorKind.UNEXPECTED
    assert (caught.value.kind, caught.value.retry_after) == (kind, 7.0 if limited else None)
    with pytest.raises(BackendError) as caught:
        await say(LangGraphBackend(chain(asks).compile()))
    assert caught.value.kind is ErrorKind.TRANSIENT  # nobody listens


async def test_a_graph_that_does_not_end() -> None:
    def again(state: Any) -> Any:
        return {"done": ["again"]}

    graph = StateGraph(Work).add_node("again", again).add_edge("__start__", "again").add_edge("again", "again")
    with pytest.raises(BackendError, match=r"did not end; .*limit of 3 reached") as caught:
        await say(LangGraphBackend(graph.compile().with_config(recursion_limit=3)))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


async def test_stopping_before_a_node_is_no_answer(tmp_path: Path) -> None:
    async with kept(CHAT, tmp_path / "db", interrupt_before=["answer"]) as graph:
        with pytest.raises(BackendError, match=r"stopped before answer; ask with interrupt\(\)"):
            await say(LangGraphBackend(graph))


def test_graphs_that_cannot_be_used() -> None:
    class Numbers(TypedDict):
        number: int

    with pytest.raises(TypeError, match=r"not StateGraph; call its compile\(\)"):
        LangGraphBackend(CHAT)
    graph = chain(fail, state=Numbers).compile()
    with pytest.raises(TypeError, match=r"neither `messages` nor `prompt`, but number; pass to_input"):
        LangGraphBackend(graph)
    LangGraphBackend(graph, to_input=lambda prompt: {"number": int(prompt)})


async def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LangGraphBackend(CHAT.compile())
    backend.check()
    monkeypatch.setitem(sys.modules, "langgraph", None)
    with pytest.raises(BackendUnavailable, match=re.escape(install_command("langgraph"))):
        await say(backend)
