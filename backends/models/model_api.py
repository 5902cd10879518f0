"""Base of the adapters for a model's API: one client, created late, and conversations replayed with each request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from secrets import token_hex
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from plait.backends.backend_protocol import Conversation, ConversationRequest, Output, Placeable, Reply
from plait.backends.json_fields import at, at_least, parse
from plait.backends.large_answers import read_answer
from plait.backends.models.http_client import (
    Client,
    Endpoint,
    NotConnected,
    Response,
    ServerEvent,
    environment_headers,
    find_server,
    is_environments,
    reported_allowance,
)
from plait.backends.models.prompt_cache import PATIENCE_S, SHORTEST, PromptCache, SharedBeginning
from plait.backends.output_schema import Schema, fitting_answer, in_words
from plait.backends.whole_answer import is_whole, whole_answer
from plait.dialogue import Message
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import check_base_url, clean_text, one_line, parse_json, shown
from plait.usage import NO_USAGE, Usage

CONNECT_LIMIT = 15.0
"""Limit in seconds for connecting to a server. An answer may take far longer."""
# Keys not allowed in `extra`: keys with a setting of their own, and keys that change the form of the answer.
_OURS = frozenset(
    {"model", "messages", "system", "stream", "stream_options", "n", "temperature", "max_tokens"}
    | {"max_completion_tokens", "response_format", "output_format"}
)
# Fields of `extra` with a price of their own: OpenAI's "flex" and "priority", Anthropic's "fast".
_PRICED = frozenset({"service_tier", "speed"})
# Words in the error message of a server that supports no schema, or not the given schema.
_SCHEMA_WORDS = ("schema", "response_format", "output_config", "grammar")
_WAITS_FOR_CACHE = Output("waiting", "another task with the same beginning fills the server's cache")


BodyOf: TypeAlias = Callable[[int, Set[str]], dict[str, Any]]
"""Returns the body of a request, given the length in characters of the beginning of the prompt that the server is to
keep (0 for none), and the parts of a request to avoid.
"""


class ModelBackend(ABC):
    """What the backends of models have in common. Used with `async with`, a backend is closed at the end."""

    def new_session_id(self) -> str | None:
        """Return a random id. The id names the conversation in the store, and is not sent to the server."""
        return token_hex(16)

    @abstractmethod
    async def aclose(self) -> None:
        """End what the backend keeps for further conversations, after all conversations. A later one begins anew."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(eq=False, kw_only=True)
class RemoteBackend(ModelBackend, Placeable):
    """Base class of the adapters for a model's API.

    The client is created at the first conversation, in a thread, because importing aiohttp takes a while.
    """

    base_url: str | None = None
    """URL of the server, without a user or password (ValueError). None for the environment variable `url_env` if set,
    else `default_url`.
    """
    api_key_env: str
    """Environment variable with the key, read at the first conversation."""
    request_timeout: float = 600.0
    """Limit of one whole request in seconds, at most 15 of them for connecting."""
    extra: Mapping[str, JsonValue] | None = field(default=None, repr=False)
    """Fields merged into the body of each request, for further features of the server, such as `{"reasoning_effort":
    "low"}` (OpenAI) or `{"thinking": {"type": "adaptive"}}` (Anthropic). Raises ValueError for fields set by plait.
    """
    stream: bool = True
    """False for a server that cannot stream: at most servers the work then goes on after a cancellation."""
    prompt_cache: bool | None = None
    """Whether the server keeps the beginnings of prompts and charges less for them later. Of requests with a long
    common beginning the first is then sent alone, until its answer begins. None: at the vendor's own server.
    """
    max_tokens: int | None = None
    """Limit of one answer, in tokens; None for the server's default."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _client: Client | None = field(default=None, init=False, repr=False)
    _server: Endpoint = field(default=Endpoint("", ""), init=False, repr=False)
    _cache: PromptCache | None = field(default=None, init=False, repr=False)
    _avoided: set[str] = field(default_factory=set[str], init=False, repr=False)

    url_env: ClassVar[str]
    """Environment variable with the server's URL."""
    default_url: ClassVar[str]
    """The vendor's own URL."""
    headers_env: ClassVar[str]
    """Environment variable with further headers for the server that the environment names."""
    named_headers: ClassVar[Mapping[str, str]] = {}
    """Environment variables that each hold the value of a header for that server, and the names of the headers."""
    use_proxy: ClassVar[bool] = True
    """Whether the proxy that the environment names is used."""
    needs_cache_marks: ClassVar[bool] = False
    """Whether the server keeps only those beginnings of prompts that a request marks."""
    adjustable: ClassVar[frozenset[str]] = frozenset({"model", "system", "temperature"})
    """The settings that a task may have in place of the backend's: see `Abilities`."""
    takes_files: ClassVar[Literal["contents"]] = "contents"
    """Images and PDFs are sent with the prompt: see `Abilities`."""
    keep_alive: ClassVar[bool] = True
    """Whether connections are used again."""

    def __post_init__(self) -> None:
        check_base_url(self.base_url, f"the environment variable {self.api_key_env}")
        check_extra(self.extra)

    def answer_key(self) -> JsonValue:
        """Return a digest of the settings that determine an answer: the server, the model, the system prompt and the
        options of sampling.
        """
        url = self.base_url or os.environ.get(self.url_env) or self.default_url
        names = ("model", "system", "temperature", "max_tokens", "extra", "api_version")
        chosen = [type(self).__name__, url, {name: getattr(self, name, None) for name in names}]
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()

    @property
    def account(self) -> str:
        """The server and the key, unreadable: backends with the same account share the server's rate limits."""
        server = self._find_server()
        return f"{server.name} {hashlib.sha256(server.key.encode()).hexdigest()[:16]}"

    def check(self) -> None:
        """Raise BackendUnavailable if the key is missing or the URL is invalid. Imports nothing, needs no network."""
        self._find_server()

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation. Raises BackendUnavailable if the key is missing or the client cannot be made."""
        await self.connect()
        yield ReplayConversation(partial(self.ask, request), request)

    async def connect(self) -> Client:
        """Return the client, made at the first call. Raises BackendUnavailable if the client cannot be made."""
        if self._client is not None:
            return self._client
        return await asyncio.to_thread(self._connect)  # a thread of anyio would load all of anyio: 20 ms

    async def ask(self, request: ConversationRequest, messages: Sequence[Message]) -> Message:
        """Send the whole conversation in one request and return the answer. Raises BackendError."""
        client = await self.connect()
        answer = self._answer_type(request, self._server)
        try:
            return await self._ask(client, messages, answer)
        except asyncio.CancelledError:
            request.on_output(Output("text", "", answer.usage))
            raise
        except BackendError as error:
            failure = error
        except Exception as exc:  # aiohttp is not imported here; what it does not raise is a fault of plait
            failure = client.error_of(exc)
        if failure.status is not None or isinstance(failure, NotConnected):  # refused, or never sent
            answer.is_open = False
        failure.usage = answer.usage
        # Raise outside of the except block, so that the error has no context: an exception of the client holds the
        # request, whose headers hold the key.
        raise failure

    async def aclose(self) -> None:
        """Close the connections of this event loop, after all conversations. A later one reads the environment anew."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _ask(self, client: Client, messages: Sequence[Message], answer: PartialAnswer) -> Message:
        """Send one request and return the whole of `answer`. Raises BackendError, and any exception of the client."""
        request = answer.request
        answer.url, texts, body_of = await self._prepare(request, messages)
        async with self._sharing(request, texts, repeats=len(messages) > len(request.history) + 1) as answer.shared:
            build = partial(body_of, 0 if answer.shared is None else answer.shared.length)
            async with client.limit():
                answer.is_open = True
                with await self._answered(client, answer.url, build, request) as response:
                    await response.receive(answer.take, answer.take_whole, lambda: bool(answer.reasons))
                    is_counted = response.failure is None or answer.usage.input_tokens > 0
                answer.is_open = not answer.reasons or not is_counted
        return answer.finish(self.max_tokens)

    @abstractmethod
    async def _prepare(
        self, request: ConversationRequest, messages: Sequence[Message]
    ) -> tuple[str, Sequence[str], BodyOf]:
        """Return the URL, the parts of the prompt, and a function that returns the body. Raises as `_ask`."""

    @property
    @abstractmethod
    def _answer_type(self) -> type[PartialAnswer]:
        """The answers of the API."""

    @abstractmethod
    def _headers(self, server: Endpoint) -> Mapping[str, str]:
        """Return the headers of each request to `server`, with the key."""

    async def _answered(
        self, client: Client, url: str, build: Callable[[Set[str]], dict[str, Any]], request: ConversationRequest
    ) -> Response:
        """Send the request made by `build`, and return the response if its status is good. Raises BackendError if not.

        `build` gets the parts of a request to avoid. A part rejected by the server is replaced by an alternative, if
        there is one, in this and all later requests.
        """
        avoided = set(self._avoided)
        while True:
            body = build(avoided)
            response = await client.post(url, body)
            if request.on_allowance is not None:
                request.on_allowance(reported_allowance(response.headers, accepted=response.status < 300))
            if response.status < 300:
                self._avoided |= avoided
                return response
            with response:
                answer = json_or_text(await response.read())
            error = self._server.status_error(response.status, response.headers, answer, url)
            if error.status in {400, 422} and error.kind is not ErrorKind.INVALID_OUTPUT:  # the request, not the answer
                avoided |= self._to_avoid(json.dumps(answer, ensure_ascii=False).lower(), request)
            if build(avoided) == body:
                raise error
            request.on_output(Output("notice", "the server refuses a part of the request; asking without it"))

    def _sharing(
        self, request: ConversationRequest, texts: Sequence[str], *, repeats: bool
    ) -> AbstractAsyncContextManager[SharedBeginning | None]:
        """Return the context in which a request is sent; the value is None if there is nothing to share.

        `texts` are the parts of the prompt. `repeats` if the turn has sent the prompt before, to a misfit answer.
        """
        if self._cache is None or request.attachments or sum(map(len, texts)) < SHORTEST:
            return nullcontext()
        variant = "" if request.output_schema is None else in_words(request.output_schema)
        variant += request.options.model or ""
        # Waiting is a part of the attempt, and must leave the attempt most of its time.
        patience = PATIENCE_S if request.timeout is None else min(PATIENCE_S, request.timeout / 10)
        return SharedBeginning(
            self._cache,
            "".join(texts),
            variant=variant,
            repeats=repeats,
            patience=patience,
            on_wait=partial(request.on_output, _WAITS_FOR_CACHE),
        )

    def _to_avoid(self, complaint: str, request: ConversationRequest) -> set[str]:
        """Return the rejected parts, according to the server's `complaint` in lower case, for which an alternative
        exists.
        """
        if request.output_schema is not None and any(word in complaint for word in _SCHEMA_WORDS):
            return {in_words(request.output_schema)}
        return set()

    @property
    def _terms(self) -> tuple[tuple[str, str], ...]:
        """The options in `extra` on which the price of a request depends."""
        return tuple((name, str(value)) for name, value in (self.extra or {}).items() if name in _PRICED)

    @property
    def _is_custom(self) -> bool:
        """Whether the server is another server than the vendor's own."""
        return not _is_vendors(self._url, self.default_url)

    @property
    def _url(self) -> str:
        return (self.base_url or os.environ.get(self.url_env) or self.default_url).strip()

    def _find_server(self) -> Endpoint:
        return find_server(self._url, self.api_key_env, key_needed=not self._is_custom)

    def _connect(self) -> Client:
        with self._lock:
            if self._client is not None:
                return self._client
            self._server = server = self._find_server()
            uses_cache = not self._is_custom if self.prompt_cache is None else self.prompt_cache
            self._cache = PromptCache(needs_marks=self.needs_cache_marks) if uses_cache and self.stream else None
            headers = dict(self._headers(server))
            if is_environments(server.url, self.url_env, self.default_url):
                headers |= environment_headers(self.headers_env, self.named_headers)
            try:
                self._client = Client(
                    server,
                    headers,
                    request_timeout=self.request_timeout,
                    connect_timeout=min(CONNECT_LIMIT, self.request_timeout),
                    use_proxy=self.use_proxy,
                    keep_alive=self.keep_alive,
                )
            except BackendUnavailable:
                raise
            except Exception as exc:  # a broken certificate store, for example
                problem = server.safe_text(f"cannot make the client for {server.name}: {type(exc).__name__}: {exc}")
            else:
                return self._client
        raise BackendUnavailable(problem)  # without a context that holds the headers


@lru_cache(maxsize=256)
def _is_vendors(url: str, default_url: str) -> bool:
    """Return whether `url` is on the vendor's host, which is the host of `default_url`."""
    try:
        host, own = (urlsplit(one).hostname or "" for one in (url, default_url))
    except ValueError:  # not a URL; reported when connecting
        return False
    # A regional host, such as eu.api.openai.com, belongs to the vendor.
    return f".{host}".endswith(f".{own}")


def is_error(body: JsonValue) -> bool:
    """Return whether a JSON value that came with status 200, or in a stream, is an error. An `object` named so comes
    from vLLM and Mistral, and `base_resp` from MiniMax.
    """
    if at(body, "error") or at(body, "object") in ("error", "Error") or at(body, "type") == "error":
        return True
    return bool(at(body, "base_resp", "status_code"))


@dataclass(eq=False)
class PartialAnswer(ABC):
    """The part of an answer that has arrived, and its usage. Base of the answers of each API.

    Servers repeat growing totals of the usage, and send zeros for missing counts.
    """

    request: ConversationRequest
    server: Endpoint
    url: str = ""
    shared: SharedBeginning | None = None
    model: str | None = None
    """The name of the answering model; None while unknown."""
    is_open: bool = False
    """Whether the request is under way, so that the server may bill more than it has reported."""
    reasons: list[str] = field(default_factory=list[str])
    """The reasons for the end of the answer, as the server names them, in order; empty before the end."""
    refusals: list[str] = field(default_factory=list[str])
    """The words with which the model declined to answer."""
    calls_tool: bool = False
    """Whether a call of a tool has arrived, and no text after it: the text announces the call, whatever the reason."""
    pieces: int = 0
    """The number of events, or chunks, that have arrived."""
    noise: str = ""
    """The last line of the stream that was neither an event nor empty."""
    begun: bool = False
    """Whether the server has begun the answer: an error from then on is a broken answer, not a refused request."""
    api: ClassVar[str]
    """The kind of API, for a hint about a wrong URL."""
    _counts: Usage = NO_USAGE
    _is_unknown: bool = False

    @property
    def usage(self) -> Usage:
        """The usage so far. The cost of a request under way is partial."""
        if self.is_open or self._is_unknown or self.model is not None:
            return replace(self._counts, model=self.model, cost_is_partial=self.is_open or self._is_unknown)
        return self._counts

    def note_usage(self, used: Usage, *, is_impossible: bool) -> None:
        """Raise the usage to the counts in `used`, as reported by the server; `is_impossible` if the server also
        reported a number that counts nothing: the usage is then known in part.
        """
        self._counts = at_least(self._counts, used)
        self._is_unknown = self._is_unknown or is_impossible

    def note_model(self, name: Any) -> None:
        """Record the name of the answering model. Values that are not names are ignored."""
        if isinstance(name, str) and name.strip():
            self.model = shown(name)

    @property
    @abstractmethod
    def text(self) -> str:
        """The text that has arrived, not cleaned: a surrogate pair may be split over two pieces."""

    @abstractmethod
    def _add(self, event: Mapping[str, JsonValue], name: str) -> bool:
        """Add an event, with the name of the event if it has one. Returns whether the event ends the stream."""

    @abstractmethod
    def take_whole(self, answer: JsonValue) -> None:
        """Add the whole `answer`, sent in one piece. Raises BackendError if there is none in it."""

    def take(self, event: ServerEvent) -> bool:
        """Add an event of the stream. Returns whether the event ends the stream. Raises BackendError for an error.

        A line of data that is empty, or not meant to be JSON, is noise that keeps the connection alive. Half a piece of
        JSON is none: a part of the answer is lost (ValueError). After the end of a whole answer, both are no failure.
        """
        data = event.data.strip()
        if data.startswith(b"[DONE]"):
            return True
        try:
            value = parse(data.decode(errors="surrogatepass")) if data else None
        except ValueError:
            if b"\n" in data:  # a server that separates its events by single line ends
                return any(self.take(ServerEvent(event.name, line)) for line in data.split(b"\n"))
            if data.startswith((b"{", b"[")) and not is_whole(self.reasons):
                raise
            value = data.decode(errors="replace")
            if event.name != "error" and not value.lower().startswith("error"):
                self.noise = value
                return False
            event = ServerEvent("error", event.data)
        if isinstance(value, list):  # Gemini sends errors so
            value = next((one for one in value if isinstance(one, dict)), None)
        if event.name == "error" or is_error(value):
            if is_whole(self.reasons):  # the answer came before it
                return True
            self.is_open = self.begun
            raise self.server.broken_off(value, begun=self.begun)
        if not isinstance(value, dict):
            if not event.name:
                return False
            value = {}
        self.pieces += 1
        return self._add(value, event.name)

    def finish(self, max_tokens: int | None) -> Message:
        """Return the whole message. Raises BackendError if the answer is not whole."""
        missing = f"the answer broke off after {self.pieces} events, without a finish reason"
        if not self.pieces:
            missing = f"the server's answer held no events; is base_url the URL of a {self.api} API?"
        if self.noise:
            missing = self.server.safe_text(f"{missing}: {self.noise}")
        return whole_answer(
            self.text,
            self.reasons,
            missing=missing,
            refusal="".join(self.refusals),
            usage=self.usage,
            max_tokens=max_tokens,
            calls_tool=self.calls_tool,
            has_thought=self.begun,  # by something that is no text
        )


def check_extra(extra: Mapping[str, JsonValue] | None) -> None:
    """Raise ValueError if `extra` cannot be merged into a request."""
    reserved = _OURS & set(extra or ())
    output = (extra or {}).get("output_config", {})
    if not isinstance(output, Mapping):
        reserved |= {"output_config"}
    elif "format" in output:  # fields beside it, such as the effort, belong to the user
        reserved |= {"output_config.format"}
    if reserved:
        raise ValueError(
            f"extra may not contain {', '.join(sorted(reserved))}: plait sets these fields; model, system, "
            "temperature, max_tokens and stream are settings beside extra"
        )
    try:
        json.dumps(extra, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise ValueError(f"extra has to be valid JSON: {one_line(str(exc), 120)}") from None


def json_or_text(body: bytes) -> JsonValue:
    """Return the value of a JSON `body`, or the text of any other."""
    text = body.decode(errors="replace")
    try:
        return parse_json(text)
    except ValueError:
        return text.strip()


# Conversations for servers that keep no history: the whole history is sent with every turn.

Ask: TypeAlias = Callable[[Sequence[Message]], Awaitable[Message]]
"""One request: takes the whole conversation, the question last, and returns the assistant's whole message."""


class ReplayConversation:
    """A conversation built on `ask`. A failed turn leaves no trace in the history."""

    def __init__(self, ask: Ask, request: ConversationRequest) -> None:
        self._ask = ask
        self._request = request
        self.session_id = request.session_id
        """Id chosen by the caller; unknown to the server."""
        self._history = [Message(old.role, clean_text(old.content), old.usage) for old in request.history]
        self._schema = None if request.output_schema is None else Schema(request.output_schema)

    async def send(self, prompt: str) -> Reply:
        turn: list[Message] = []
        data = None
        try:
            text = await self._exchange(turn, prompt)
            if self._schema is not None:
                text, data = await fitting_answer(
                    self._schema, text, read_answer, partial(self._exchange, turn), self._request.on_output
                )
        except BackendError as error:
            # The requests before the failure were paid for as well.
            error.usage += _usage_of(turn)
            arrived = (*turn, *error.messages)
            error.messages = arrived if len(arrived) > 1 else ()
            raise
        self._history += turn
        return Reply(text, data, self.session_id, _usage_of(turn), tuple(turn))

    async def _exchange(self, turn: list[Message], prompt: str) -> str:
        turn.append(Message("user", clean_text(prompt)))
        answer = await self._ask([*self._history, *turn])
        turn.append(answer)
        return answer.content


def _usage_of(turn: Sequence[Message]) -> Usage:
    return sum((message.usage for message in turn), NO_USAGE)
