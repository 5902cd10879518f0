from __future__ import annotations

import gc
import json
import subprocess
import sys

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, Task
from plait.backends import ConversationRequest, Message, OpenAIBackend, Output, Usage
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.support.wire import Answer, ChatCompletions, Script, events, plain, serve

WIRE = ChatCompletions()
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def make(server: Script, model: str | None = "m", **options: object) -> OpenAIBackend:
    return OpenAIBackend(model, base_url=f"{server.url}/v1", **options)  # type: ignore[arg-type]


async def say(backend: OpenAIBackend, prompt: str = "Hello.", request: ConversationRequest | None = None):
    async with backend.open(request or ConversationRequest()) as conversation:
        return await conversation.send(prompt)


async def test_a_turn_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", " k-1 \n")
    async with serve(events(WIRE.parts("Good ", "day."))) as server:
        backend = make(server, api_key_env="SOME_KEY", system="Be brief.", temperature=0.5, max_tokens=9)
        reply = await say(backend)
    request = server.requests[0]
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.headers["authorization"] == "Bearer k-1"
    assert request.body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 9,
    }
    assert reply.text == "Good day."
    assert reply.usage == Usage(11, 7, model="m")
    assert reply.messages == (Message("user", "Hello."), Message("assistant", "Good day.", Usage(11, 7, model="m")))


async def test_turns_of_one_conversation_build_on_each_other() -> None:
    history = (Message("system", "Be kind."), Message("user", "a"), Message("assistant", "b"))
    request = ConversationRequest(session_id="s", resume=True, history=history)
    async with (
        serve(events(WIRE.parts("d")), events(WIRE.parts("f"))) as server,
        make(server).open(request) as conversation,
    ):
        await conversation.send("c")
        reply = await conversation.send("e")
    sent = [(message["role"], message["content"]) for message in server.bodies[-1]["messages"]]
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    assert sent == list(zip(roles, ("Be kind.", "a", "b", "c", "d", "e"), strict=True))
    assert [message.content for message in reply.messages] == ["e", "f"]
    assert reply.session_id == "s"


async def test_a_server_without_key_and_model_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    listed = plain(200, {"object": "list", "data": [{"id": "nomic-embed-text"}, {"id": "first"}, {"id": "other"}]})
    async with serve(listed, events(WIRE.parts("x"))) as server:
        backend = make(server, None)
        await say(backend)
        await say(backend)
    assert [request.path for request in server.requests] == ["/v1/models", *["/v1/chat/completions"] * 2]
    assert [body["model"] for body in server.bodies[1:]] == ["first", "first"]


def listing(*names: str) -> Answer:
    return plain(200, {"object": "list", "data": [{"id": name} for name in names]})


NO_CHAT = ("text-embedding-3", "Whisper-1", "tts-1", "bge-reranker")


async def test_models_that_answer_no_prompts_are_passed_over() -> None:
    async with serve(listing(*NO_CHAT, "small"), events(WIRE.parts("x"))) as server:
        await say(make(server, None))
    assert server.bodies[-1]["model"] == "small"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (listing(), "lists no model; name one with `model`"),
        (listing(*NO_CHAT), r"lists no model that answers prompts \(text-emb.*; name one with `model`"),
        (plain(200, b"<html>welcome</html>"), "does not list its models .* or name a model"),
        (plain(200, {"data": [3]}), "does not list its models"),
    ],
)
async def test_a_server_that_lists_no_model(answer: Answer, words: str) -> None:
    async with serve(answer) as server:
        with pytest.raises(BackendError, match=words) as caught:
            await say(make(server, None))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert caught.value.__context__ is None


async def test_base_url_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(events(WIRE.parts("x"))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        assert (await say(OpenAIBackend("m"))).text == "x"


async def test_openai_itself_insists_on_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    backend = OpenAIBackend()
    with pytest.raises(BackendUnavailable, match="set OPENAI_API_KEY"):
        await say(backend)
    with pytest.raises(BackendUnavailable, match="set MY_KEY"):
        OpenAIBackend(api_key_env="MY_KEY").check()
    with pytest.raises(BackendUnavailable, match="set OPENAI_API_KEY"):
        OpenAIBackend(base_url="https://api.openai.com/v1/").check()
    with pytest.raises(BackendUnavailable, match="set OPENAI_API_KEY"):
        OpenAIBackend(base_url="https://eu.api.openai.com/v1").check()
    OpenAIBackend(base_url="https://notapi.openai.com.example/v1").check()
    OpenAIBackend(base_url="https://notapi.openai.com/v1").check()
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    backend.check()


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("localhost:8080/v1", "does not begin with http:// or https://"),
        ("127.0.0.1:8080", "does not begin with http:// or https://"),
        ("example.com/v1", "does not begin with http:// or https://"),
        ("//host/v1", "does not begin with http:// or https://"),
        ("ftp://host", "does not begin with http:// or https://"),
        ("http:/host", "does not begin with http:// or https://"),
        ("http://", "does not name a host"),
        ("http://:8080", "does not name a host"),
        ("http://h:x", "does not name a host"),
        ("http://h:0", "does not name a host"),
        ("http://h:65536", "does not name a host"),
        ("http://[::1]:x", "does not name a host"),
        ("http://[", "does not name a host"),
        ("http://${HOST}/v1", "does not name a host"),
        ("http://host..example/v1", "does not name a host"),
        ("http://exa mple/v1", "holds a space or a control character"),
        ("http://host/v1\x00", "holds a space or a control character"),
        ("http://host/v1/chat/completions", "ends in /chat/completions, which plait adds; leave it out"),
    ],
)
async def test_each_fault_of_a_base_url_is_named(url: str, fault: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        OpenAIBackend("m", base_url=url).check()
    assert fault in str(caught.value)
    assert str(caught.value).endswith("; a base_url is like http://host:8080/v1")
    with pytest.raises(BackendUnavailable, match="base_url"):
        await say(OpenAIBackend("m", base_url=url))


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "HTTPS://h/v1/",
        "http://a_b:8080/v1",
        "http://[::1]:8080",
        "http://m\u00fcnchen.example/v1?x=1",
        " http://h\n",
    ],
)
def test_urls_without_a_fault(url: str) -> None:
    OpenAIBackend("m", base_url=url).check()


@pytest.mark.parametrize("key", ["sk-canary\nx", "sk-canary\u2026"])
async def test_a_key_that_cannot_be_one(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(BackendUnavailable, match="the key in OPENAI_API_KEY") as caught:
        await say(OpenAIBackend("m"))
    assert "canary" not in str(caught.value)


async def test_schema_goes_along_and_data_comes_back() -> None:
    async with serve(events(WIRE.parts('{"n":', " 3}"))) as server:
        reply = await say(make(server), request=ConversationRequest(output_schema=SCHEMA))
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert server.bodies[0]["response_format"] == wanted
    assert reply.data == {"n": 3}
    assert reply.text == '{"n": 3}'
    assert len(server.requests) == 1


async def test_one_repair_turn() -> None:
    seen: list[Output] = []
    async with serve(events(WIRE.parts("It is three.")), events(WIRE.parts('```json\n{"n": 3}\n```'))) as server:
        reply = await say(make(server), "How many?", ConversationRequest(output_schema=SCHEMA, on_output=seen.append))
    assert reply.data == {"n": 3}
    assert reply.usage == Usage(22, 14, model="m")
    assert [message.role for message in reply.messages] == ["user", "assistant", "user", "assistant"]
    assert reply.messages[1].content == "It is three."
    complaint = reply.messages[2].content
    assert "it is not JSON" in complaint
    assert json.dumps(SCHEMA) in complaint
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["How many?", "It is three.", complaint]
    assert "notice" in {output.kind for output in seen}


@pytest.mark.parametrize(("attempts", "calls"), [(1, 2), (3, 6)])
async def test_a_task_makes_two_calls_in_each_attempt_if_no_answer_fits(attempts: int, calls: int) -> None:
    async with serve(*[events(WIRE.parts('{"n": "x"}'))] * 9) as server:
        task = Task("a", "a", output_schema=SCHEMA, retry=Retry(attempts=attempts, base_delay=0))
        result = await ParallelRunner(make(server)).run(DAG([task]))
    assert (result["a"].error_kind, len(server.requests)) == ("invalid_output", calls)


async def test_no_second_repair_turn() -> None:
    async with serve(events(WIRE.parts('{"n": "three"}'))) as server:
        with pytest.raises(BackendError, match='n: "three" is not of type "integer"') as caught:
            await say(make(server), request=ConversationRequest(output_schema=SCHEMA))
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("max_tokens", "words"),
    [
        (7, "`max_tokens: 7` is reached; raise it"),
        (500, "after 7 tokens"),
        (None, "after 7 tokens"),
        (None, "set a higher `max_tokens` of the backend"),
    ],
)
async def test_length_says_which_limit(max_tokens: int | None, words: str) -> None:
    async with serve(events(WIRE.parts("so far", reason="length"))) as server:
        with pytest.raises(BackendError, match=words):
            await say(make(server, max_tokens=max_tokens))


async def test_refusal_field() -> None:
    parts = [WIRE.chunk({"delta": {"refusal": "I cannot "}}), WIRE.chunk({"delta": {"refusal": "do that."}})]
    async with serve(events([*parts, *WIRE.parts()])) as server:
        with pytest.raises(BackendError, match=r"I cannot do that\.") as caught:
            await say(make(server))
    assert caught.value.kind is ErrorKind.REFUSED
    assert caught.value.usage == Usage(11, 7, model="m")


async def test_lenient_servers() -> None:
    """No role chunk, no usage, null where others leave out, no [DONE]: complete all the same."""
    parts = [
        WIRE.chunk({"delta": {"content": "a"}}),
        WIRE.chunk({"delta": {"content": None, "reasoning_content": "hm"}}),
        WIRE.chunk({"delta": {"content": "b"}, "finish_reason": "stop"}),
        'data: {"choices": null, "usage": null}\n\n',
        "data: {}\n\n",
    ]
    async with serve(events(parts)) as server:
        reply = await say(make(server))
    assert reply.text == "ab"
    assert reply.usage == Usage(model="m")


async def test_surrogates_split_over_two_chunks() -> None:
    async with serve(events(WIRE.parts("\ud83d", "\ude00", "\udc80"))) as server:
        reply = await say(make(server))
    assert reply.text == "\U0001f600\ufffd"


async def test_ten_megabytes() -> None:
    async with serve(events(WIRE.parts(*["x" * 1_000_000] * 10))) as server:
        assert len((await say(make(server))).text) == 10_000_000


async def test_closing_is_optional_and_repeatable() -> None:
    async with serve(events(WIRE.parts("x"))) as server:
        async with make(server) as backend:
            await say(backend)
        await backend.aclose()
        assert (await say(backend)).text == "x"


def test_one_backend_serves_several_event_loops() -> None:
    backend = OpenAIBackend("m")

    async def once() -> str:
        async with serve(events(WIRE.parts("x"))) as server:
            backend.base_url = f"{server.url}/v1"
            await backend.aclose()
            return (await say(backend)).text

    assert [anyio.run(once), anyio.run(once)] == ["x", "x"]


def test_nothing_warns_when_it_is_never_closed() -> None:
    async def main() -> None:
        async with serve(events(WIRE.parts("x")), events(WIRE.parts("y", reason=None), end="cut")) as server:
            backend = make(server)
            await say(backend)
            with pytest.raises(BackendError):
                await say(backend)

    # Warnings are errors in this suite, those of collected objects included.
    anyio.run(main)
    gc.collect()


def test_import_loads_no_client() -> None:
    code = (
        "import sys, backends; early = set(sys.modules); backends.OpenAIBackend(); backends.AnthropicBackend(); "
        "backends.LocalBackend(); print(*[m for m in ('anyio', 'pydantic', 'jsonschema_rs') if m in early], "
        "*[m for m in ('aiohttp', 'xllamacpp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


WHOLE = {
    "object": "chat.completion",
    "model": "big",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "all \ud83d\ude00"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
}


async def test_an_answer_in_one_piece() -> None:
    seen: list[Output] = []
    async with serve(plain(200, WHOLE)) as server:
        reply = await say(make(server), request=ConversationRequest(on_output=seen.append))
    assert (reply.text, reply.usage) == ("all \U0001f600", Usage(5, 2, model="big"))
    assert [output.text for output in seen] == ["all \U0001f600"]


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"message": {"content": "half"}, "finish_reason": "length"}, ErrorKind.TRUNCATED),
        ({"message": {"content": "half"}, "finish_reason": None}, ErrorKind.TRANSIENT),
        ({"message": {"content": None, "refusal": "no"}, "finish_reason": "stop"}, ErrorKind.REFUSED),
    ],
)
async def test_an_answer_in_one_piece_has_to_be_whole(choice: dict[str, object], kind: ErrorKind) -> None:
    async with serve(plain(200, {**WHOLE, "choices": [choice]})) as server:
        with pytest.raises(BackendError) as caught:
            await say(make(server))
    is_partial = kind is ErrorKind.TRANSIENT
    assert (caught.value.kind, caught.value.usage) == (kind, Usage(5, 2, model="big", cost_is_partial=is_partial))


async def test_azures_form_of_addressing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_KEY", "k-1")
    not_found = plain(404, {"error": {"code": "DeploymentNotFound", "message": "The deployment does not exist."}})
    async with serve(events(WIRE.parts("x")), not_found) as server:
        backend = OpenAIBackend("my deployment", base_url=server.url, api_version="2024-10-21", api_key_env="AZURE_KEY")
        assert (await say(backend)).text == "x"
        with pytest.raises(BackendError, match=r"answered 404: The deployment does not exist\.$"):
            await say(backend)
    request = server.requests[0]
    assert request.path == "/openai/deployments/my%20deployment/chat/completions?api-version=2024-10-21"
    assert request.headers["api-key"] == "k-1"
    assert "authorization" not in request.headers
    with pytest.raises(BackendError, match="name the deployment with `model`"):
        await say(OpenAIBackend(base_url="http://127.0.0.1:9", api_version="2024-10-21"))
