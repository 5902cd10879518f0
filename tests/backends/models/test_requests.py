"""What requests ask for, and what is asked instead where a server refuses a part of it, in both wire formats."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends import ConversationRequest
from plait.errors import BackendError, ErrorKind
from tests.support.remotes import Remote, dialect, make
from tests.support.wire import Answer, ChatCompletions, Dialect, Exchange, events, plain, serve

__all__ = ["dialect"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
OTHER_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}


async def ask_for(backend: Remote, schema: dict[str, Any]) -> Any:
    async with backend.open(ConversationRequest(output_schema=schema)) as conversation:
        return (await conversation.send("How many?")).data


def carries_schema(body: dict[str, Any]) -> bool:
    return bool({"response_format", "output_config"} & body.keys())


def system_of(body: dict[str, Any]) -> str:
    found = [m["content"] for m in body["messages"] if m["role"] == "system"]
    return str(body.get("system", found[0] if found else ""))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model."),
        (400, "output_config.format: Extra inputs are not permitted"),
        (422, "failed to parse Grammar"),
    ],
)
async def test_a_server_that_takes_no_schema_is_told_it_in_words(dialect: Dialect, status: int, said: str) -> None:
    refusal, answer = dialect.error(status, "invalid_request_error", said), events(dialect.parts('{"n": 3}'))
    async with serve(refusal, answer) as server:
        backend = make(dialect, server.url)
        assert await ask_for(backend, SCHEMA) == {"n": 3}
        assert await ask_for(backend, SCHEMA) == {"n": 3}
    assert [carries_schema(body) for body in server.bodies] == [True, False, False], "asked once, remembered"
    assert ["JSON Schema" in system_of(body) for body in server.bodies] == [False, True, True]


async def test_one_schema_refused_is_not_all_of_them(dialect: Dialect) -> None:
    refusal = dialect.error(400, "invalid_request_error", "this schema is too complex")
    answers = (events(dialect.parts('{"n": 3}')), events(dialect.parts("[3]")))
    async with serve(refusal, *answers) as server:
        backend = make(dialect, server.url)
        assert await ask_for(backend, SCHEMA) == {"n": 3}
        assert await ask_for(backend, OTHER_SCHEMA) == [3]
    assert [carries_schema(body) for body in server.bodies] == [True, False, True]


async def test_a_request_refused_without_its_schema_too_has_failed(dialect: Dialect) -> None:
    answer = dialect.error(400, "invalid_request_error", "no such model, whatever the schema")
    async with serve(answer) as server:
        backend = make(dialect, server.url)
        for _ in range(2):
            with pytest.raises(BackendError, match="no such model") as caught:
                await ask_for(backend, SCHEMA)
            assert caught.value.kind is ErrorKind.INVALID_REQUEST
            assert caught.value.__context__ is None
    assert [carries_schema(body) for body in server.bodies] == [True, False] * 2, "nothing was learnt from that"


async def test_a_schema_already_in_words_is_not_asked_for_twice(dialect: Dialect) -> None:
    async with serve(dialect.error(400, "invalid_request_error", "I dislike the word schema")) as server:
        with pytest.raises(BackendError):
            await ask_for(make(dialect, server.url), {"type": "object", "properties": {"a": {}}})
    assert [carries_schema(body) for body in server.bodies] == ([True, False] if dialect.name == "openai" else [False])


NO_USAGE_ASKED = {"loc": ["body", "stream_options", "include_usage"], "msg": "Extra inputs are not permitted"}


@pytest.mark.parametrize(
    "refusal",
    [
        plain(422, {"message": {"detail": [NO_USAGE_ASKED]}, "type": "invalid_request_error"}),
        plain(400, {"error": {"message": "Unrecognized request argument supplied: stream_options"}}),
    ],
)
async def test_a_server_that_counts_nothing_in_a_stream_is_not_asked_to(refusal: Answer) -> None:
    wire = ChatCompletions()
    async with serve(refusal, events(wire.parts('{"n": 3}'))) as server:
        backend = make(wire, server.url)
        for _ in range(2):
            assert await ask_for(backend, SCHEMA) == {"n": 3}
    assert ["stream_options" in body for body in server.bodies] == [True, False, False]
    assert all(map(carries_schema, server.bodies))


@pytest.mark.parametrize("code", ["json_validate_failed", "tool_use_failed"])
async def test_an_answer_that_the_server_refuses_is_no_fault_of_the_request(code: str) -> None:
    wire = ChatCompletions()
    said = "Generated JSON does not match the expected schema. See 'failed_generation'."
    async with serve(wire.error(400, code, said)) as server:
        with pytest.raises(BackendError, match="does not match") as caught:
            await ask_for(make(wire, server.url), SCHEMA)
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT
    assert [carries_schema(body) for body in server.bodies] == [True]


NEW_NAME = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."


async def test_a_server_that_wants_the_new_name_of_the_limit_gets_it() -> None:
    wire = ChatCompletions()
    refusal = wire.error(400, "invalid_request_error", NEW_NAME)
    schema_refused = wire.error(400, "invalid_request_error", "response_format is not supported")
    async with serve(refusal, schema_refused, events(wire.parts('{"n": 3}'))) as server:
        backend = make(wire, server.url, max_tokens=5)
        assert await ask_for(backend, SCHEMA) == {"n": 3}
        assert await ask_for(backend, SCHEMA) == {"n": 3}
    limits = [{name: body[name] for name in body if name.startswith("max_")} for body in server.bodies]
    assert limits == [{"max_tokens": 5}, *[{"max_completion_tokens": 5}] * 3]
    assert [carries_schema(body) for body in server.bodies] == [True, True, False, False]


async def test_without_a_limit_its_name_is_no_reason_to_ask_again() -> None:
    wire = ChatCompletions()
    async with serve(wire.error(400, "invalid_request_error", NEW_NAME)) as server:
        with pytest.raises(BackendError, match="max_completion_tokens"):
            await ask_for(make(wire, server.url), SCHEMA)
    assert len(server.requests) == 1


EXTRA: dict[str, Any] = {"top_p": 0.9, "stop": ["END"], "seed": None, "thinking": {"type": "adaptive"}}


async def test_extra_fields_go_into_each_request(dialect: Dialect) -> None:
    async with serve(events(dialect.parts('{"n": 3}'))) as server:
        backend = make(dialect, server.url, extra=EXTRA, temperature=0.5)
        for _ in range(2):
            assert await ask_for(backend, SCHEMA) == {"n": 3}
    for body in server.bodies:
        assert EXTRA.items() <= body.items()
        assert body["temperature"] == 0.5
        assert carries_schema(body)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"messages": [], "stream": False, "seed": 3}, "may not contain messages, stream: plait sets"),
        *(({name: 1}, f"may not contain {name}") for name in ("model", "system", "temperature", "max_tokens", "n")),
        *(({name: 1}, f"may not contain {name}") for name in ("stream_options", "response_format", "output_config")),
        ({"output_config": {"effort": "low", "format": {}}}, "may not contain output_config.format: plait sets"),
        ({"max_completion_tokens": 1}, "may not contain max_completion_tokens"),
        ({"seed": float("nan")}, "has to be valid JSON"),
        ({"seed": b"3"}, "has to be valid JSON"),
        ({"stop": "\udc80"}, "has to be valid JSON"),
    ],
)
def test_extra_fields_that_cannot_be_merged(dialect: Dialect, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(dialect, "http://127.0.0.1:9", extra=extra)


def typed(answer: Answer, content_type: str) -> Answer:
    async def other(exchange: Exchange) -> None:
        head = exchange.head

        async def changed(status: int, headers: dict[str, str]) -> None:
            await head(status, {**headers, "content-type": content_type})

        exchange.head = changed  # type: ignore[method-assign]
        await answer(exchange)

    return other


@pytest.mark.parametrize("form", ["one piece", "events"])
@pytest.mark.parametrize(
    "content_type", ["Application/JSON; charset=utf-8", "application/json", "text/plain", "text/event-stream", ""]
)
async def test_the_form_of_an_answer_is_read_from_its_body(dialect: Dialect, form: str, content_type: str) -> None:
    answer = dialect.whole("all") if form == "one piece" else events(dialect.parts("a", "ll"))
    async with (
        serve(typed(answer, content_type)) as server,
        make(dialect, server.url).open(ConversationRequest()) as conversation,
    ):
        assert (await conversation.send("Hello.")).text == "all"


async def test_an_answer_can_be_asked_for_in_one_piece(dialect: Dialect) -> None:
    async with serve(dialect.whole('{"n": 3}')) as server:
        assert await ask_for(make(dialect, server.url, stream=False), SCHEMA) == {"n": 3}
    [body] = server.bodies
    assert (body["stream"], "stream_options" in body, carries_schema(body)) == (False, False, True)
