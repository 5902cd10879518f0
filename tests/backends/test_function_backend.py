from __future__ import annotations

import contextlib
import enum
import functools
import json
import math
import re
import threading
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends import ConversationRequest, FunctionBackend, OpenAIBackend, Reply, as_backend
from plait.errors import BackendError, ErrorKind
from plait.safe_text import clean_text, one_line, parse_json


async def say(function: Any, prompt: str = "p", request: ConversationRequest | None = None) -> Reply:
    async with FunctionBackend(function).open(request or ConversationRequest()) as conversation:
        return await conversation.send(prompt)


def returning(value: Any) -> Any:
    async def function(prompt: str) -> Any:
        return value

    return function


class Mood(enum.StrEnum):
    GOOD = "good"


class WithAsyncCall:
    async def __call__(self, prompt: str) -> str:
        return prompt.upper()


def _plain_function(prompt: str) -> str:
    return f"{prompt} {threading.current_thread() is threading.main_thread()}"


async def _with_more(prefix: str, prompt: str) -> str:
    return prefix + prompt


@pytest.mark.parametrize(
    ("value", "text", "data"),
    [
        ("plain", "plain", None),
        ("", "", None),
        (Mood.GOOD, "good", None),
        ("\udc80 \ud83d\ude00 \x00", "\ufffd \U0001f600 \x00", None),
        ({"a": [1, None, True, 1.5]}, '{"a": [1, null, true, 1.5]}', {"a": [1, None, True, 1.5]}),
        ((1, 2), "[1, 2]", [1, 2]),
        ({1: "é"}, '{"1": "é"}', {"1": "é"}),
        (["\udc80"], '["\ufffd"]', ["\ufffd"]),
        (0, "0", 0),
        (False, "false", False),
        (2**80, str(2**80), 2**80),
    ],
)
async def test_what_a_function_may_return(value: Any, text: str, data: Any) -> None:
    reply = await say(returning(value))
    assert reply == Reply(text, data)
    assert type(reply.text) is str


_circle: list[Any] = []
_circle.append(_circle)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "returned None; return text or a JSON value"),
        (object(), "returned object, which JSON cannot hold"),
        (b"bytes", "returned bytes"),
        ({1, 2}, "returned set"),
        (math.nan, "returned float"),
        ({"a": math.inf}, "returned dict"),
        ({(1, 2): 3}, "returned dict"),
        (_circle, "returned list"),
        pytest.param(10**5000, "returned int", id="huge"),
    ],
)
async def test_what_it_may_not(value: Any, words: str) -> None:
    with pytest.raises(BackendError, match=words) as caught:
        await say(returning(value))
    assert caught.value.kind is ErrorKind.UNEXPECTED
    assert "\n" not in caught.value.message


async def test_exceptions_become_unexpected_and_keep_their_cause() -> None:
    async def broken(prompt: str) -> str:
        raise LookupError("no such\n  thing")

    with pytest.raises(BackendError) as caught:
        await say(broken)
    place = rf"\(at test_function_backend\.py:{broken.__code__.co_firstlineno + 1} in broken\)"
    assert re.fullmatch(rf"unexpected: LookupError: no such thing {place}", str(caught.value))
    assert isinstance(caught.value.__cause__, LookupError)


class StatusError(Exception):
    """As the libraries of OpenAI and Anthropic raise it, unless `fields` say otherwise."""

    def __init__(self, status: int = 0, body: object = None, words: str = "no", **fields: object) -> None:
        super().__init__(words)
        self.status_code, self.body = status, body
        self.__dict__.update(fields)


class APIConnectionError(Exception):
    """As the vendors' libraries raise it."""


class Headed:
    """A response with a status and headers."""

    def __init__(self, status: int, **headers: str) -> None:
        self.status_code, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


BOTOCORE = {"Error": {"Code": "ThrottlingException"}, "ResponseMetadata": {"HTTPStatusCode": 400, "HTTPHeaders": {}}}
GEMINI = {"error": {"code": 429, "message": "quota", "details": [{"retryDelay": "34s"}]}}


@pytest.mark.parametrize(
    ("error", "kind", "wait"),
    [
        (StatusError(429, response=Headed(429, retry_after="7")), "rate_limited", 7.0),
        (StatusError(429, words="Error code: 429 - Please try again in 20s."), "rate_limited", 20.0),
        (StatusError(429, {"code": "insufficient_quota", "message": "pay"}), "no_credit", None),
        (StatusError(503), "overloaded", None),
        (StatusError(529, {"type": "error", "error": {"type": "overloaded_error"}}), "overloaded", None),
        (StatusError(500), "transient", None),
        (StatusError(response=Headed(429, retry_after_ms="250")), "rate_limited", 0.25),  # httpx
        (StatusError(code=429, details=GEMINI), "rate_limited", 34.0),  # google-genai
        (StatusError(status=429, headers={"retry-after": "3"}), "rate_limited", 3.0),  # aiohttp
        (StatusError(words="(ThrottlingException): Too many tokens", response=BOTOCORE), "rate_limited", None),
        (APIConnectionError("Connection error."), "transient", None),
        (ConnectionResetError("reset"), "transient", None),
        (TimeoutError(), "transient", None),
        # A person has to act, so the traceback tells more than the kind.
        (StatusError(400), "unexpected", None),
        (StatusError(401), "unexpected", None),
        (StatusError(404, {"message": "no such model"}), "unexpected", None),
        (StatusError(status="429", code=7), "unexpected", None),
    ],
)
async def test_exceptions_of_client_libraries_that_report_a_limit(
    error: Exception, kind: str, wait: float | None
) -> None:
    async def asks(prompt: str) -> str:
        raise error

    async def asks_through_another_library(prompt: str) -> str:
        raise RuntimeError("the model failed") from error

    for function in (asks, asks_through_another_library):
        with pytest.raises(BackendError, match=r"\(at test_function_backend\.py:\d+ in asks") as caught:
            await say(function)
        assert (caught.value.kind.value, caught.value.retry_after) == (kind, wait)
        assert caught.value.traceback is not None


async def test_an_exception_that_is_its_own_cause() -> None:
    async def asks(prompt: str) -> str:
        try:
            raise ValueError("no luck")
        except ValueError as error:
            raise error from error

    with anyio.fail_after(10), pytest.raises(BackendError, match="unexpected: ValueError: no luck"):
        await say(asks)


async def test_exceptions_without_words() -> None:
    async def broken(prompt: str) -> str:
        raise MemoryError

    with pytest.raises(BackendError, match=r"^unexpected: MemoryError \(at test_function_backend\.py:\d+ in broken\)$"):
        await say(broken)


@pytest.mark.parametrize("deep", [False, True], ids=["its own line", "a line of Python's own"])
async def test_an_exception_names_the_innermost_line_of_the_users_code(deep: bool) -> None:
    def inner(prompt: str) -> str:
        found = json.loads("{") if deep else {}
        return str(found["missing"])

    def outer(prompt: str) -> str:
        return inner(prompt)

    line = inner.__code__.co_firstlineno + (1 if deep else 2)
    with pytest.raises(BackendError, match=rf"\(at test_function_backend\.py:{line} in inner\)$"):
        await say(outer)


async def test_an_exception_that_met_no_code_of_the_users_names_no_place() -> None:
    with pytest.raises(BackendError, match=r"^unexpected: ValueError: invalid literal for int\(\) .*: 'p'$"):
        await say(int)


async def test_neither_message_nor_traceback_holds_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"MY_API_KEY": "sk-very-secret-1", "db_password": "first line\nsecond line", "SHOWN": "not a secret"}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)

    def ask(prompt: str) -> str:
        try:
            raise ValueError(f"GET https://host.invalid/?key={secrets['MY_API_KEY']}")
        except ValueError as error:
            raise RuntimeError(f"{'x' * 280} {secrets['MY_API_KEY']} {prompt}") from error

    def log_in(prompt: str) -> str:
        raise ExceptionGroup("both", [ValueError(secrets["db_password"]), ValueError(secrets["SHOWN"])])

    with pytest.raises(BackendError) as asked:
        await say(ask)
    with pytest.raises(BackendError) as logged_in:
        await say(log_in)
    kept = "".join((one.value.message + (one.value.traceback or "")) for one in (asked, logged_in))
    assert "ValueError: GET https://host.invalid/?key=***\n" in kept
    assert "ValueError: not a secret\n" in kept
    assert not any(part in kept for part in ("sk-very", "secret-1", "first line", "second line"))


async def test_backend_errors_pass_through() -> None:
    error = BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=3.0)

    async def limited(prompt: str) -> str:
        raise error

    with pytest.raises(BackendError) as caught:
        await say(limited)
    assert caught.value is error


async def test_cancellation_passes_through() -> None:
    started = anyio.Event()

    async def forever(prompt: str) -> str:
        started.set()
        await anyio.sleep_forever()
        return prompt

    async with anyio.create_task_group() as group:
        group.start_soon(say, forever)
        await started.wait()
        group.cancel_scope.cancel()
    assert group.cancel_scope.cancel_called


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_plain_function, "p False"),
        (WithAsyncCall(), "P"),
        (functools.partial(_with_more, ">"), ">p"),
        (lambda prompt: _with_more("=", prompt), "=p"),
        (str.upper, "P"),
    ],
)
async def test_kinds_of_functions(function: Any, text: str) -> None:
    assert (await say(function)).text == text


async def test_plain_functions_are_not_held_to_forty_threads() -> None:
    barrier = threading.Barrier(60, timeout=60)

    def meet(prompt: str) -> str:
        barrier.wait()
        return prompt

    async with anyio.create_task_group() as group:
        for _ in range(60):
            group.start_soon(say, meet)


async def test_a_cancelled_plain_function_is_abandoned() -> None:
    release, ended = threading.Event(), threading.Event()

    def wait(prompt: str) -> str:
        release.wait(120)
        ended.set()
        return prompt

    with anyio.fail_after(60), anyio.move_on_after(0.05) as scope:
        await say(wait)
    assert scope.cancelled_caught
    assert not ended.is_set()
    release.set()
    assert ended.wait(60)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("value", [{"n": 1}, '{"n": 1}', 'Here:\n```json\n{"n": 1}\n```\n', '```\n{"n": 1}```'])
async def test_values_that_fit_the_schema(value: Any) -> None:
    assert (await say(returning(value), request=ConversationRequest(output_schema=SCHEMA))).data == {"n": 1}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"n": "x"}, r"at \$\.n: \"x\" is not of type \"integer\""),
        ({}, r"at \$: \"n\" is a required property"),
        ("no JSON", "it is not JSON"),
        ("```json\nnope\n```", "fenced block is not JSON"),
        ('{"n": NaN}', "NaN is not JSON"),
        ('{"n": 1e999}', "it cannot be read: the number 1e999 is too large"),
        ("[" * 100_000, "nested too deeply"),
        ('{"n": ' + "1" * 5000 + "}", "it cannot be read: a number has more than 4,300 digits"),
    ],
)
async def test_values_that_do_not(value: Any, words: str) -> None:
    calls: list[str] = []

    async def function(prompt: str) -> Any:
        calls.append(prompt)
        return value

    with pytest.raises(BackendError, match=words) as caught:
        await say(function, request=ConversationRequest(output_schema=SCHEMA))
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT
    assert len(calls) == 1, "a function gets no second try"
    assert len(caught.value.message) < 1500


async def test_a_schema_may_not_reach_out() -> None:
    schema = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(BackendError, match="output_schema") as caught:
        await say(returning({"n": 1}), request=ConversationRequest(output_schema=schema))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


def test_as_backend() -> None:
    backend = OpenAIBackend("m")
    assert as_backend(backend) is backend
    assert isinstance(as_backend(_plain_function), FunctionBackend)
    with pytest.raises(TypeError, match="OpenAIBackend is a class; give an instance"):
        as_backend(OpenAIBackend)
    with pytest.raises(TypeError, match="int is neither"):
        as_backend(3)
    with pytest.raises(TypeError, match="not str"):
        FunctionBackend("name")  # type: ignore[arg-type]


@given(st.text(st.characters(exclude_categories=())))
def test_clean_text_is_always_storable_and_otherwise_the_same(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert clean_text(cleaned) == cleaned
    pure = text.encode("utf-8", "ignore").decode() == text
    assert (cleaned == text) is pure
    # Everything that was fine is still there, in its order.
    assert [c for c in cleaned if c != "\ufffd" and c in text] == [
        c for c in text if c != "\ufffd" and not "\ud800" <= c <= "\udfff" and c in cleaned
    ] or any("\ud800" <= c <= "\udbff" for c in text)


@given(st.text(st.characters(exclude_categories=()), max_size=2000))
def test_one_line_is_one_short_line(text: str) -> None:
    line = one_line(text, 50)
    assert len(line) <= 50
    assert len(line.splitlines()) <= 1


@given(st.text(alphabet='{}[]",:0123456789.eE-+NaInfityulrse \\', max_size=50))
def test_parse_json_raises_nothing_but_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        json.dumps(parse_json(text), allow_nan=False)
