"""Base of the adapters on a vendor's SDK: one client, created late, and conversations replayed with each request."""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
from anyio.to_thread import run_sync

from plait.backends.errors import BackendError, BackendUnavailable, ErrorKind
from plait.backends.extras import require
from plait.backends.json_fields import count, number
from plait.backends.llm.sdk import NO_KEY, Endpoint, find_server, forget_environment, is_environments, translate
from plait.backends.protocol import NO_USAGE, Conversation, ConversationRequest, JsonValue, Message, Output, Usage
from plait.backends.replay import ReplayConversation
from plait.backends.text import check_base_url, one_line, shown

CONNECT_LIMIT = 15.0
"""Limit in seconds for connecting to a server. An answer may take far longer."""
# Keys not allowed in `extra`: keys with a setting of their own, and keys that change the form of the answer.
_OURS = frozenset(
    {"model", "messages", "system", "stream", "stream_options", "n", "temperature", "max_tokens"}
    | {"max_completion_tokens", "response_format", "output_format"}
)
# Words in the error message of a server that supports no schema, or not the given schema.
_SCHEMA_WORDS = ("schema", "response_format", "output_config", "grammar")


class StreamUsage:
    """Usage and model of a request, as reported in its stream. Servers repeat growing totals, and send zeros for
    missing counts.
    """

    def __init__(self) -> None:
        self.usage = NO_USAGE

    def note(self, usage: Any, *, read: Sequence[str], written: str) -> None:
        """Raise the usage to the counts in the SDK's `usage`. `read` and `written` name the token counts.

        Values that are not counts, as sent by some gateways, are ignored, so that no answer is lost.
        """
        if usage is None:
            return
        tokens = sum(count(getattr(usage, name, None)) for name in read)
        costs = [cost for cost in (self.usage.cost_usd, number(getattr(usage, "cost", None))) if cost is not None]
        self.usage = Usage(
            max(self.usage.input_tokens, tokens),
            max(self.usage.output_tokens, count(getattr(usage, written, None))),
            max(costs, default=None),
            self.usage.model,
        )

    def note_model(self, name: Any) -> None:
        """Record the name of the answering model. Values that are not names are ignored."""
        if isinstance(name, str) and name.strip():
            self.usage = replace(self.usage, model=shown(name))


@dataclass(eq=False, kw_only=True)
class RemoteBackend(ABC):
    """Base class of the adapters on a vendor's SDK.

    The client is created at the first conversation, in a thread, because importing an SDK takes a second. The client
    keeps no idle connections: no connection stays open after a request or is tied to an event loop, and no request uses
    a connection already closed by the server. The price is a TLS handshake per request, small compared with an answer.
    """

    base_url: str | None = None
    """URL of the server. None for the environment variable `url_env` if set, else `default_url`. Raises ValueError for
    a URL with a user or password, in the environment BackendUnavailable.
    """
    api_key_env: str
    """Environment variable with the key, read at the first conversation."""
    request_timeout: float = 600.0
    """Limit of one whole request in seconds, at most 15 of them for connecting."""
    extra: Mapping[str, JsonValue] | None = field(default=None, repr=False)
    """Fields merged into the body of each request, for further features of the server, such as `{"reasoning_effort":
    "low"}` (OpenAI) or `{"thinking": {"type": "adaptive"}}` (Anthropic). Raises ValueError for fields set by plait.
    """
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _client: Any = field(default=None, init=False, repr=False)
    _server: Endpoint = field(default=Endpoint("", NO_KEY), init=False, repr=False)
    _avoided: set[str] = field(default_factory=set[str], init=False, repr=False)

    package: ClassVar[str]
    """The SDK's module, and the name of plait's extra."""
    client_class: ClassVar[str]
    """Name of the SDK's client class."""
    url_env: ClassVar[str]
    """Environment variable with the server's URL."""
    default_url: ClassVar[str]
    """The vendor's own URL."""

    def __post_init__(self) -> None:
        check_base_url(self.base_url, f"the environment variable {self.api_key_env}")
        check_extra(self.extra)

    def new_session_id(self) -> str | None:
        """Return a random id. The id names the conversation in the store, and is not sent to the server."""
        return uuid4().hex

    def check(self) -> None:
        """Raise BackendUnavailable if the SDK or the key is missing. Imports nothing, needs no network."""
        self._find_server()

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation. Raises BackendUnavailable if the SDK or the key is missing."""
        if self._client is None:
            await run_sync(self._connect, abandon_on_cancel=True)
        yield ReplayConversation(partial(self._guarded, self._client, request), request)

    async def aclose(self) -> None:
        """Close the client. All conversations have to be closed before. A later conversation creates a new client."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def _ask(
        self, client: Any, request: ConversationRequest, messages: Sequence[Message], spent: StreamUsage
    ) -> Message:
        """Send one streamed request and return the answer. The usage is recorded in `spent` as it arrives.

        Raises any exception of the SDK.
        """

    async def _begin(
        self,
        create: Callable[..., Awaitable[Any]],
        build: Callable[[Set[str]], dict[str, Any]],
        request: ConversationRequest,
    ) -> Any:
        """Send the request made by `build`, and return the stream of the answer.

        `build` gets the parts of a request to avoid. A part rejected by the server is replaced by an alternative, if
        there is one, in this and all later requests.
        """
        avoided = set(self._avoided)
        while True:
            body = build(avoided)
            try:
                stream = await create(**body)
            except Exception as exc:
                avoided |= self._to_avoid(_complaint(exc), request)
                if build(avoided) == body:
                    raise
            else:
                self._avoided |= avoided
                return stream
            request.on_output(Output("notice", "the server refuses a part of the request; asking without it"))

    def _to_avoid(self, complaint: str, request: ConversationRequest) -> set[str]:
        """Return the rejected parts, according to the server's `complaint` in lower case, for which an alternative
        exists.
        """
        if request.output_schema is not None and any(word in complaint for word in _SCHEMA_WORDS):
            return {in_words(request.output_schema)}
        return set()

    @property
    def _is_custom(self) -> bool:
        """Whether the server is another server than the vendor's own."""
        try:
            host, own = (urlsplit(url).hostname or "" for url in (self._url, self.default_url))
        except ValueError:  # not a URL; reported when connecting
            return True
        # A regional host, such as eu.api.openai.com, belongs to the vendor.
        return not f".{host}".endswith(f".{own}")

    @property
    def _url(self) -> str:
        return self.base_url or os.environ.get(self.url_env) or self.default_url

    def _find_server(self) -> Endpoint:
        require(self.package, self.package)
        return find_server(self._url, self.api_key_env, key_needed=not self._is_custom)

    def _connect(self) -> None:
        with self._lock:
            if self._client is None:
                self._server = self._find_server()
                self._client = self._make_or_explain(self._server)

    def _make_or_explain(self, server: Endpoint) -> Any:
        try:
            return self._make_client(server)
        except Exception as exc:  # an SDK of another version, a broken certificate store, an invalid proxy URL
            problem = server.safe_text(f"cannot make the {self.package} client: {type(exc).__name__}: {exc}")
        raise BackendUnavailable(problem)

    def _make_client(self, server: Endpoint, *, trust_env: bool = True) -> Any:
        sdk: Any = import_module(self.package)
        limits = type(sdk.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=0)
        # No redirects: the key would be sent to another host.
        http = sdk.DefaultAsyncHttpxClient(limits=limits, follow_redirects=False, trust_env=trust_env)
        timeout = sdk.Timeout(self.request_timeout, connect=min(CONNECT_LIMIT, self.request_timeout))
        make = getattr(sdk, self.client_class)
        client = make(api_key=server.key, base_url=server.url, max_retries=0, timeout=timeout, http_client=http)
        if not is_environments(server.url, self.url_env, self.default_url):
            forget_environment(client, sdk.Omit())
        return client

    async def _guarded(self, client: Any, request: ConversationRequest, messages: Sequence[Message]) -> Message:
        spent = StreamUsage()
        try:
            # The SDK's own limit applies to the silence between two reads; slow dripping data would never reach the
            # limit.
            with anyio.fail_after(self.request_timeout):
                return await self._ask(client, request, messages, spent)
        except BackendError as error:
            error.usage = spent.usage
            raise
        except TimeoutError:
            text = f"no whole answer from {self._server.name} within {self.request_timeout:g} s (request_timeout)"
            failure = BackendError(ErrorKind.TIMEOUT, text)
        except Exception as exc:
            failure = translate(exc, self._server)
        failure.usage = spent.usage
        # Raise outside of the except block, so that the error has no context: see sdk.py.
        raise failure


def check_extra(extra: Mapping[str, JsonValue] | None) -> None:
    """Raise ValueError if `extra` cannot be merged into a request."""
    taken = _OURS & set(extra or ())
    output = (extra or {}).get("output_config", {})
    if not isinstance(output, Mapping):
        taken |= {"output_config"}
    elif "format" in output:  # fields beside it, such as the effort, belong to the user
        taken |= {"output_config.format"}
    if taken:
        raise ValueError(
            f"extra may not hold {', '.join(sorted(taken))}: plait sets these fields; model, system, "
            "temperature and max_tokens are settings beside extra"
        )
    try:
        json.dumps(extra, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise ValueError(f"extra has to be valid JSON: {one_line(str(exc), 120)}") from None


def in_words(schema: Mapping[str, object]) -> str:
    """Return the instruction to the model for a server that cannot be given `schema`."""
    return f"Answer with nothing but JSON that fits this JSON Schema: {json.dumps(schema, ensure_ascii=False)}"


def _complaint(exc: Any) -> str:
    """Return the server's whole error text in lower case if the server rejected the request; empty otherwise."""
    return str(exc.body).lower() if getattr(exc, "status_code", None) in {400, 422} else ""
