from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from pydantic import BaseModel

from plait import DAG, ParallelRunner, Price, Task
from plait.backends import ConversationRequest, Message, Output, PydanticAIBackend, Reply, Usage
from plait.backends.running_turn import Cancellation, Turn, in_turn
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.support.pydantic_agents import wired_agent
from tests.support.tool_calls import CHAT, calling, saying
from tests.support.wire import LIMITS, Answer, Script, events, hang_up, plain, serve, silence

MOOD: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
}


def look_up(city: str) -> str:
    """Return the weather in a city."""
    return f"sun in {city}"


async def say(backend: PydanticAIBackend, prompt: str = "Hello?", request: ConversationRequest | None = None) -> Reply:
    async with backend.open(request or ConversationRequest(session_id="s")) as conversation:
        return await conversation.send(prompt)


async def failure(*answers: Answer, **options: Any) -> tuple[BackendError, Script]:
    async with serve(*answers) as server:
        with pytest.raises(BackendError) as caught:
            await say(PydanticAIBackend(wired_agent(server.url, **options)))
    return caught.value, server


def roles(body: Any) -> list[str]:
    return [message["role"] for message in body["messages"]]


async def test_text_is_streamed_and_usage_counted() -> None:
    seen: list[Output] = []
    async with serve(saying("Good ", "morning.")) as server:
        agent = wired_agent(server.url, instructions="Be brief.")
        reply = await say(PydanticAIBackend(agent), request=ConversationRequest(session_id="s", on_output=seen.append))
    assert reply == Reply("Good morning.", session_id="s", usage=Usage(11, 7, model="m"))
    assert [one.text for one in seen if one.kind == "text"] == ["Good ", "morning."]
    (body,) = server.bodies
    assert [one["content"] for one in body["messages"]] == ["Be brief.", "Hello?"]


@pytest.mark.parametrize(
    ("details", "used"),
    [
        ({"completion_tokens_details": {"reasoning_tokens": 100}}, Usage(11, 107, model="m", reasoning_tokens=100)),
        ({"completion_tokens_details": {"reasoning_tokens": 6}}, Usage(11, 7, model="m", reasoning_tokens=6)),
        ({"prompt_tokens_details": {"cached_tokens": 20}}, Usage(11, 7, model="m", cache_read_tokens=11)),
    ],
)
async def test_counts_of_parts_stay_within_the_whole(details: dict[str, Any], used: Usage) -> None:
    told = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18, **details}
    parts = [*CHAT.parts("Good.", reason=None), CHAT.chunk({"delta": {}, "finish_reason": "stop"})]
    async with serve(events([*parts, CHAT.chunk(None, usage=told), "data: [DONE]\n\n"])) as server:
        reply = await say(PydanticAIBackend(wired_agent(server.url)))
    assert reply.usage == used


async def test_a_price_of_the_user_replaces_the_librarys_estimate() -> None:
    told = {"prompt_tokens": 1000, "completion_tokens": 100}
    begun = CHAT.chunk({"delta": {"content": "hi"}, "finish_reason": "stop"}, model="gpt-5-mini")
    async with serve(events([begun, CHAT.chunk(None, usage=told, model="gpt-5-mini")])) as server:
        backend = PydanticAIBackend(wired_agent(server.url))
        estimated = await ParallelRunner(backend).run(DAG([Task("a", "x")]))
        priced = await ParallelRunner(backend, prices={"gpt-5-mini": Price(10, 100)}).run(DAG([Task("a", "x")]))
    assert estimated.usage.cost_usd == pytest.approx((1000 * 0.25 + 100 * 2) / 1e6)
    assert priced.usage.cost_usd == pytest.approx((1000 * 10 + 100 * 100) / 1e6)


async def test_tools_are_called_and_reported() -> None:
    seen: list[Output] = []
    async with serve(calling(("look_up", {"city": "Oslo"}), text="Let me look."), saying("It is sunny.")) as server:
        agent = wired_agent(server.url, tools=[look_up])
        reply = await say(PydanticAIBackend(agent), request=ConversationRequest(session_id="s", on_output=seen.append))
    assert reply.text == "It is sunny."
    assert reply.usage == Usage(31, 12, model="m")
    assert [one.text for one in seen if one.kind == "tool"] == ["look_up"]
    first, second = server.bodies
    assert first["tools"][0]["function"]["description"] == "Return the weather in a city."
    assert roles(second) == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "sun in Oslo"


async def test_a_second_turn_sees_the_tool_calls_of_the_first() -> None:
    async with serve(calling(("look_up", {"city": "Oslo"})), saying("Sunny."), saying("Yes.")) as server:
        backend = PydanticAIBackend(wired_agent(server.url, tools=[look_up]))
        async with backend.open(ConversationRequest(session_id="s")) as conversation:
            await conversation.send("The weather?")
            reply = await conversation.send("Sure?")
    assert roles(server.bodies[-1]) == ["user", "assistant", "tool", "assistant", "user"]
    assert reply.usage == Usage(11, 7, model="m")


async def test_a_stored_history_is_sent_as_text() -> None:
    history = (Message("system", "Be kind."), Message("user", "I am Ada."), Message("assistant", "Hello Ada."))
    async with serve(saying("Ada.")) as server:
        await say(
            PydanticAIBackend(wired_agent(server.url)),
            "My name?",
            ConversationRequest(session_id="s", resume=True, history=history),
        )
    said = [(one["role"], one["content"]) for one in server.bodies[0]["messages"]]
    assert said == [("system", "Be kind."), ("user", "I am Ada."), ("assistant", "Hello Ada."), ("user", "My name?")]


async def test_a_schema_becomes_the_output_type_and_is_checked_with_one_repair() -> None:
    wrong, right = calling(("final_result", {"mood": "odd"})), calling(("final_result", {"mood": "good"}))
    async with serve(wrong, right) as server:
        request = ConversationRequest(session_id="s", output_schema=MOOD)
        reply = await say(PydanticAIBackend(wired_agent(server.url)), request=request)
    assert reply.data == {"mood": "good"}
    assert json.loads(reply.text) == {"mood": "good"}
    assert reply.usage == Usage(40, 10, model="m")
    assert server.bodies[0]["tools"][0]["function"]["parameters"]["properties"] == MOOD["properties"]
    assert "odd" in json.dumps(server.bodies[1]["messages"])


async def test_an_answer_that_never_fits_is_invalid_output() -> None:
    async with serve(calling(("final_result", {"mood": "odd"}))) as server:
        request = ConversationRequest(session_id="s", output_schema=MOOD)
        with pytest.raises(BackendError, match="mood") as caught:
            await say(PydanticAIBackend(wired_agent(server.url)), request=request)
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT
    assert caught.value.usage == Usage(40, 10, model="m")
    assert len(server.requests) == 2


async def test_a_schema_that_is_no_object_is_asked_for_in_words() -> None:
    async with serve(saying("[1, 2]")) as server:
        request = ConversationRequest(session_id="s", output_schema={"type": "array", "items": {"type": "integer"}})
        reply = await say(PydanticAIBackend(wired_agent(server.url)), request=request)
    assert reply.data == [1, 2]
    assert '"integer"' in server.bodies[0]["messages"][-1]["content"]


class City(BaseModel):
    name: str
    people: int


async def test_an_output_type_of_the_agents_own_is_the_data() -> None:
    async with serve(calling(("final_result", {"name": "Oslo", "people": 700_000}))) as server:
        backend = PydanticAIBackend(wired_agent(server.url, output_type=City))
        reply = await say(backend)
        assert reply.data == {"name": "Oslo", "people": 700_000}
        assert json.loads(reply.text) == reply.data
        with pytest.raises(BackendError) as caught:
            await say(backend, request=ConversationRequest(session_id="s", output_schema=MOOD))
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


async def test_deps_reach_the_tools() -> None:
    from pydantic_ai import RunContext

    def whose(ctx: Any) -> str:
        return f"it belongs to {ctx.deps}"

    whose.__annotations__["ctx"] = RunContext[str]

    async with serve(calling(("whose", {})), saying("Ada's.")) as server:
        agent = wired_agent(server.url, tools=[whose], deps_type=str)
        await say(PydanticAIBackend(agent, deps="Ada"))
    assert server.bodies[1]["messages"][-1]["content"] == "it belongs to Ada"


ERRORS = [
    (401, "invalid_api_key", "Incorrect API key", ErrorKind.AUTH),
    (403, "forbidden", "no", ErrorKind.RATE_LIMITED),  # it says when to try again
    (404, "model_not_found", "there is no model m", ErrorKind.INVALID_REQUEST),
    (400, "invalid_request_error", "bad", ErrorKind.INVALID_REQUEST),
    (400, "context_length_exceeded", "too long", ErrorKind.CONTEXT_OVERFLOW),
    (429, "rate_limit_exceeded", "slow down", ErrorKind.RATE_LIMITED),
    (429, "insufficient_quota", "pay first", ErrorKind.NO_CREDIT),
    (500, "server_error", "broken", ErrorKind.TRANSIENT),
    (503, "overloaded", "later", ErrorKind.OVERLOADED),
    (529, "overloaded_error", "later", ErrorKind.OVERLOADED),
]


@pytest.mark.parametrize(("status", "code", "message", "kind"), ERRORS)
async def test_a_status_becomes_a_kind_after_one_request(status: int, code: str, message: str, kind: ErrorKind) -> None:
    error, server = await failure(CHAT.error(status, code, message, retry_after="7"))
    assert error.kind is kind
    assert message in error.message
    assert error.retry_after == 7.0
    assert len(server.requests) == 1  # the SDK's own two retries are off
    assert not error.continues_session


@pytest.mark.parametrize(("status", "words", "wait"), LIMITS)
async def test_a_limit_and_its_end_told_in_words_only(status: int, words: str, wait: float | None) -> None:
    code = {400: "invalid_request_error", 403: "permission_error"}.get(status, "")
    error, _ = await failure(CHAT.error(status, code, words))
    assert (error.kind, error.retry_after) == (ErrorKind.RATE_LIMITED, wait)
    error, _ = await failure(CHAT.error(status, code, words, retry_after="7"))
    assert (error.kind, error.retry_after) == (ErrorKind.RATE_LIMITED, 7.0)
    error, _ = await failure(CHAT.error(401, "invalid_api_key", words))
    assert error.kind is ErrorKind.AUTH
    error, _ = await failure(CHAT.error(429, "insufficient_quota", words))
    assert error.kind is ErrorKind.NO_CREDIT


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (hang_up, ErrorKind.TRANSIENT),
        (events(CHAT.parts("It is", reason=None), end="cut"), ErrorKind.TRANSIENT),
        (events(CHAT.parts("It is", reason=None)), ErrorKind.TRANSIENT),
        (events(CHAT.parts("It is", reason="length")), ErrorKind.TRUNCATED),
        (events(CHAT.parts("", reason="content_filter")), ErrorKind.REFUSED),
        (events(CHAT.parts("It is", reason="content_filter")), ErrorKind.REFUSED),
        (events(CHAT.parts("It is", reason="error")), ErrorKind.TRANSIENT),
        (events([CHAT.error_event("overloaded_error", "no room")]), ErrorKind.OVERLOADED),
        (plain(200, b"<html>a proxy's page</html>"), ErrorKind.INVALID_OUTPUT),
    ],
    ids=["hang-up", "cut", "no-end", "length", "filter", "half-filter", "half-error", "error-event", "html"],
)
async def test_an_answer_that_is_not_whole_is_an_error(answer: Answer, kind: ErrorKind) -> None:
    error, server = await failure(answer)
    assert error.kind is kind, error
    assert "\n" not in error.message
    assert len(server.requests) == 1


@pytest.mark.parametrize("text", [" \n", "<think>It is Monday.</think>", "<thinking>It is Monday.</thinking>\n"])
async def test_an_answer_without_text_is_an_error_after_the_tries_of_the_agent(text: str) -> None:
    error, _ = await failure(events(CHAT.parts(text)), retries=0)
    assert error.kind is ErrorKind.INVALID_OUTPUT


async def test_a_call_of_a_tool_that_nobody_offered_is_a_bad_sample() -> None:
    error, _ = await failure(calling(("no_such_tool", {})), retries=0)
    assert error.kind is ErrorKind.INVALID_OUTPUT
    error, _ = await failure(events(CHAT.parts("I look.", reason="tool_calls")))
    assert error.kind is ErrorKind.INVALID_OUTPUT


async def test_thoughts_in_the_text_are_no_part_of_the_answer_nor_of_the_next_prompt() -> None:
    async with serve(events(CHAT.parts("[THINK]Monday?[/THINK]It is Monday.")), events(CHAT.parts("Yes."))) as server:
        backend = PydanticAIBackend(wired_agent(server.url))
        async with backend.open(ConversationRequest(session_id="s")) as conversation:
            reply = await conversation.send("Which day is it?")
            assert (reply.text, reply.messages[-1].thoughts) == ("It is Monday.", "Monday?")
            assert (await conversation.send("Sure?")).text == "Yes."
    said = [message["content"] for message in server.bodies[1]["messages"] if message["role"] == "assistant"]
    assert said == ["It is Monday."]


async def test_the_text_of_a_cut_answer_is_kept() -> None:
    error, _ = await failure(events(CHAT.parts("It is", reason="length")))
    assert error.messages == (Message("user", "Hello?"), Message("assistant", "It is", Usage(11, 7, model="m")))
    assert error.usage == Usage(11, 7, model="m")
    assert "cut after 7 tokens" in error.message


async def test_a_failing_tool_is_named_with_its_place() -> None:
    def break_it() -> str:
        raise RuntimeError("the disk\nis gone")

    error, _ = await failure(calling(("break_it", {})), tools=[break_it])
    assert error.kind is ErrorKind.UNEXPECTED
    assert error.message.startswith("RuntimeError: the disk is gone (at test_pydantic_ai_agent.py:")
    assert error.usage == Usage(20, 5, model="m")


async def test_a_failing_tool_gives_its_traceback_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "a-very-secret-value")

    def break_it() -> str:
        raise RuntimeError("a-very-secret-value is refused")

    error, _ = await failure(calling(("break_it", {})), tools=[break_it])
    assert error.traceback is not None
    lines = error.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: *** is refused"
    assert any(line.endswith("in break_it") for line in lines)
    assert "secret-value" not in error.traceback
    refused, _ = await failure(CHAT.error(401, "no", "no such key"))
    assert refused.traceback is None


async def test_a_limit_that_a_tool_meets_at_another_server_is_a_limit() -> None:
    from openai import AsyncOpenAI

    async with serve(CHAT.error(429, "rate_limit_exceeded", "slow down; try again in 7s")) as other:

        async def ask_another() -> str:
            async with AsyncOpenAI(base_url=f"{other.url}/v1", api_key="a-key", max_retries=0) as client:
                await client.chat.completions.create(model="n", messages=[{"role": "user", "content": "Hello?"}])
            return "never"

        error, _ = await failure(calling(("ask_another", {})), tools=[ask_another])
    assert (error.kind, error.retry_after) == (ErrorKind.RATE_LIMITED, 7.0)
    assert error.message.startswith("RateLimitError: the server answered with status 429: slow down")
    assert "in ask_another" in (error.traceback or "")


async def test_a_tool_without_connection_is_transient() -> None:
    def fetch() -> str:
        raise ConnectionRefusedError("nobody there")

    error, _ = await failure(calling(("fetch", {})), tools=[fetch])
    assert error.kind is ErrorKind.TRANSIENT


async def test_a_model_that_keeps_calling_wrongly_is_invalid_output() -> None:
    error, _ = await failure(calling(("look_up", {"town": 1})), tools=[look_up])
    assert error.kind is ErrorKind.INVALID_OUTPUT
    assert "look_up" in error.message


@pytest.mark.slow
async def test_a_loop_of_tool_calls_ends_at_the_agents_limit() -> None:
    error, server = await failure(calling(("look_up", {"city": "Oslo"})), tools=[look_up])
    assert error.kind is ErrorKind.INVALID_REQUEST
    assert "50" in error.message
    assert len(server.requests) == 50
    assert error.usage == Usage(50 * 20, 50 * 5, model="m")


async def test_no_key_appears_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISTRAL_API_KEY", "a-very-secret-value")
    error, _ = await failure(CHAT.error(401, "no", "the key a-very-secret-value is wrong"))
    assert "secret" not in error.message
    assert "***" in error.message


async def test_cancelling_closes_the_request() -> None:
    async with serve(silence) as server:
        backend = PydanticAIBackend(wired_agent(server.url))
        async with anyio.create_task_group() as group:
            group.start_soon(say, backend)
            with anyio.fail_after(60):
                await server.streaming.wait()
            group.cancel_scope.cancel()
        with anyio.fail_after(60):
            await server.gone.wait()


async def test_a_requested_cancellation_stops_before_the_next_request() -> None:
    cancellation = Cancellation()

    def cancel_meanwhile() -> str:
        cancellation.request()
        return "done"

    async with serve(calling(("cancel_meanwhile", {}))) as server:
        agent = wired_agent(server.url, tools=[cancel_meanwhile])
        with pytest.raises(BackendError, match="between two steps") as caught:
            await in_turn(Turn(cancellation), say(PydanticAIBackend(agent)))
    assert len(server.requests) == 1
    assert caught.value.usage == Usage(20, 5, model="m")


async def test_a_requested_cancellation_stops_before_the_tools() -> None:
    cancellation, called = Cancellation(), list[str]()

    def act() -> str:
        called.append("act")
        return "done"

    def stop(output: Output) -> None:
        if output.kind == "text":
            cancellation.request()

    async with serve(calling(("act", {}), text="I will act.")) as server:
        request = ConversationRequest(session_id="s", on_output=stop)
        backend = PydanticAIBackend(wired_agent(server.url, tools=[act]))
        with pytest.raises(BackendError, match="between two steps"):
            await in_turn(Turn(cancellation), say(backend, request=request))
    assert called == []


def test_only_agents_are_taken() -> None:
    from pydantic_ai import Agent

    for wrong in ("openai:gpt-5", Agent, None):
        with pytest.raises(TypeError, match=r"takes a pydantic_ai\.Agent"):
            PydanticAIBackend(wrong)  # type: ignore[arg-type]


async def test_a_failed_turn_leaves_no_trace_in_the_history() -> None:
    async with serve(saying("One."), CHAT.error(500, "x", "broken"), saying("Three.")) as server:
        backend = PydanticAIBackend(wired_agent(server.url))
        async with backend.open(ConversationRequest(session_id="s")) as conversation:
            await conversation.send("1")
            with pytest.raises(BackendError):
                await conversation.send("2")
            await conversation.send("3")
    assert [one["content"] for one in server.bodies[-1]["messages"]] == ["1", "One.", "3"]


async def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic_ai import Agent

    import plait.backends.extras as extras

    monkeypatch.setattr(extras, "find_spec", lambda _name: None)
    backend = PydanticAIBackend(Agent("test"))
    with pytest.raises(BackendUnavailable, match=r"the pydantic_ai package is not installed; run: .*pydantic-ai"):
        backend.check()
