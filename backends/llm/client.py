"""HTTP client of the adapters for a model's API, on aiohttp.

Each call is one POST. aiohttp sends a request again on a fresh connection only for idempotent methods, never a POST:
a connection that breaks is the error of its attempt, and the runner decides about the next.

Connections are kept open between calls. A connection belongs to an event loop, so the client holds one session per
loop. An async generator owns the session: asyncio closes the generators of a loop when the loop ends, and collected
generators at once, so no connection outlives its loop, and a client that nobody closes leaves no warning.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import anyio

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.llm.endpoint import Endpoint
from plait.backends.llm.sse import EventDecoder, ServerEvent
from plait.backends.text import clean_text

if TYPE_CHECKING:
    import aiohttp

IDLE_LIMIT = 4.0
"""Seconds for which an unused connection is kept: less than the 5 of uvicorn, Node and llama.cpp, so that the client
ends a connection, and no request meets a connection that the server is just closing.
"""
_HANGS_UP = "llama.cpp"
"""Name of a server that closes the connection right after a stream, although it announces to keep the connection: the
next request would meet a closed connection.
"""
_TAIL_LIMIT = 0.1
"""Seconds to wait for the end of a stream after its last event, so that the connection can be used again."""

_OWN_HEADERS = {"content-type": "application/json", "user-agent": "plait", "accept-encoding": "identity"}
"""No compression: a compressor on the way would hold events back."""

_CLOSE = {"connection": "close"}

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_Sessions: TypeAlias = "dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[Any]]]"
Take: TypeAlias = Callable[[ServerEvent], bool]
"""Takes an event of a stream. Returns whether the event is the stream's last."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request in seconds."""

    request: float
    """For the whole request. A limit on silence alone would never be reached by an answer that drips."""
    connect: float
    """For connecting."""


class Response:
    """A server's response whose head has arrived, and a context manager that ends it.

    The connection is used again if the body was read to its end, and closed otherwise.
    """

    def __init__(self, raw: aiohttp.ClientResponse) -> None:
        self._raw = raw
        self.status = raw.status
        self.headers: Mapping[str, str] = raw.headers
        self.hangs_up = self.headers.get("server") == _HANGS_UP
        """Whether the server closes the connection after the response, whatever it says."""
        connection = raw.connection
        if self.hangs_up and connection is not None and connection.protocol is not None:
            connection.protocol.force_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    async def read(self) -> bytes:
        """Return the whole body."""
        return await self._raw.read()

    async def receive(self, take: Take, take_whole: Callable[[Any], None]) -> None:
        """Pass the body to `take`, event by event as they arrive, or to `take_whole` if it is a single JSON value.

        Returns at the end of the body, or shortly after the event for which `take` returns true.
        """
        if not self.headers.get("content-type", "").startswith("application/json"):
            await self._receive_events(take)
            return
        body = await self.read()
        try:
            whole = json.loads(body)
        except ValueError:  # events with a wrong content type
            decoder = EventDecoder()
            any(take(event) for event in (*decoder.feed(body), *decoder.end()))
        else:
            take_whole(whole)

    async def _receive_events(self, take: Take) -> None:
        decoder = EventDecoder()
        content = self._raw.content
        while piece := await content.readany():
            for event in decoder.feed(piece):
                if take(event):
                    if not content.is_eof():
                        await self._finish()
                    return
        any(take(event) for event in decoder.end())

    async def _finish(self) -> None:
        with anyio.move_on_after(_TAIL_LIMIT):
            while await self._raw.content.readany():
                pass


class Client:
    """A client for one server. Creating a client imports aiohttp and may read certificates: create it in a thread."""

    def __init__(
        self,
        server: Endpoint,
        headers: Mapping[str, str],
        limits: Limits,
        *,
        use_proxy: bool = True,
        keep_alive: bool = True,
    ) -> None:
        import aiohttp  # noqa: PLC0415 - takes 0.15 s

        self._aiohttp = aiohttp
        self._server = server
        self._limits = limits
        self._proxy = server.proxy() if use_proxy else None
        self._headers = None if keep_alive else _CLOSE
        self._options: dict[str, Any] = {
            # Names in lower case: a later header replaces an earlier one of the same name.
            "headers": _OWN_HEADERS | {name.lower(): value for name, value in headers.items()},
            "timeout": aiohttp.ClientTimeout(total=limits.request, connect=limits.connect),
        }
        self._tls = _trusted_roots() if server.url.startswith("https:") else True
        self._sessions: _Sessions = {}
        weakref.finalize(self, _close_at_exit, self._sessions)

    async def post(self, url: str, body: Mapping[str, Any]) -> Response:
        """Send `body` as JSON, and return the response, whatever its status. Raises the exceptions of aiohttp, which
        `error_of` translates.
        """
        # A lone surrogate would not survive the encoding.
        data = clean_text(_to_json(body)).encode()
        session = await self._session()
        response = Response(
            await session.post(url, data=data, headers=self._headers, allow_redirects=False, proxy=self._proxy)
        )
        if response.hangs_up:  # a response that arrived whole has given its connection back already
            self._headers = _CLOSE
        return response

    async def get(self, url: str) -> Response:
        """Request `url`, and return the response, whatever its status. Raises the exceptions of aiohttp."""
        session = await self._session()
        return Response(await session.get(url, headers=self._headers, allow_redirects=False, proxy=self._proxy))

    async def aclose(self) -> None:
        """Close the connections of the running event loop. A later request opens new ones."""
        _, owner = self._sessions.pop(asyncio.get_running_loop(), (None, None))
        if owner is not None:
            await owner.aclose()

    def error_of(self, exc: Exception) -> BackendError:
        """Return the BackendError for an exception raised by a request or while its response was read."""
        server, name = self._server, type(exc).__name__
        if isinstance(exc, self._aiohttp.ConnectionTimeoutError):
            text = f"no connection to {server.name} within {self._limits.connect:g} s"
            return BackendError(ErrorKind.TIMEOUT, text)
        if isinstance(exc, TimeoutError):
            text = f"no whole answer from {server.name} within {self._limits.request:g} s (request_timeout)"
            return BackendError(ErrorKind.TIMEOUT, text)
        if isinstance(exc, self._aiohttp.ClientSSLError):
            doubt = "; SSL_CERT_FILE may name a file with the certificate to trust"
            text = server.safe_text(f"the connection to {server.name} failed: {name}: {exc}", doubt)
            return BackendError(ErrorKind.TRANSIENT, text)
        if isinstance(exc, self._aiohttp.ClientError | OSError):
            text = server.safe_text(f"the connection to {server.name} failed: {name}: {exc}")
            return BackendError(ErrorKind.TRANSIENT, text)
        # json.JSONDecodeError and UnicodeDecodeError are ValueErrors.
        kind = ErrorKind.TRANSIENT if isinstance(exc, ValueError) else ErrorKind.UNEXPECTED
        return BackendError(kind, server.safe_text(f"the answer of {server.name} cannot be read: {name}: {exc}"))

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        found = self._sessions.get(loop)
        if found is None:
            owner = _open_session(self._options, self._tls)
            found = self._sessions[loop] = await anext(owner), owner
            for other in [other for other in self._sessions if other.is_closed()]:
                del self._sessions[other]
        return found[0]


async def _open_session(
    options: Mapping[str, Any], tls: ssl.SSLContext | bool
) -> AsyncGenerator[aiohttp.ClientSession]:
    """Yield a session that ends with the generator. A function, because a method would tie the client to the loop."""
    import aiohttp  # noqa: PLC0415 - imported by the client before

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_LIMIT, ssl=tls)
    session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), **options)
    try:
        yield session
    finally:
        await session.close()


def _close_at_exit(sessions: _Sessions) -> None:
    """Close the sessions of loops that nobody closed: aiohttp complains about them on standard error otherwise."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return  # the client was collected in a running program, and the loops close the sessions
    for loop, (_, owner) in sessions.items():
        if not loop.is_running() and not loop.is_closed():
            loop.run_until_complete(owner.aclose())


def _trusted_roots() -> ssl.SSLContext:
    """Return a context that trusts the system's certificates, or SSL_CERT_FILE and SSL_CERT_DIR in their place.

    A Python that finds no certificates, such as one from python.org on macOS, gets those of certifi.
    """
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if not paths.cafile and not paths.capath and not context.get_ca_certs():
        import certifi  # noqa: PLC0415 - rarely needed

        context.load_verify_locations(certifi.where())
    return context
