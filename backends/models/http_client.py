"""HTTP client of the adapters for a model's API, on aiohttp: one POST, server-sent events, the limits a server reports.

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
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import anyio

from plait.backends.backend_protocol import Allowance
from plait.backends.models.endpoint import Endpoint
from plait.errors import BackendError, ErrorKind
from plait.safe_text import clean_text, is_json

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler

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
_LONGEST_HEADER = 64 * 1024
"""Bytes of one field of a response's head."""
_MOST_HEADERS = 1_000

_OWN_HEADERS = {"content-type": "application/json", "user-agent": "plait", "accept-encoding": "identity"}
"""No compression: a compressor on the way would hold events back."""

_CLOSE = {"connection": "close"}

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# Server-sent events (WHATWG HTML): lines `field: value`, ended by LF, CR LF or CR; a blank line ends an event. Only
# `event` and `data` matter here. Deviating from the format, an event without a blank line at the end of the stream
# counts, because some servers forget the line, and an event cut within its JSON is unreadable anyway. A field `error`,
# in which llama.cpp sends its errors, is read as the data of an event named `error`.


class ServerEvent(NamedTuple):
    """One event."""

    name: str
    """The `event` field; empty if there is none."""
    data: bytes
    """The `data` lines, joined by line feeds."""


class EventDecoder:
    """Turns pieces of a stream, cut anywhere, into events. The cost is linear in the size of the stream."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        """Pieces of a line whose end has not arrived."""
        self._name = b""
        self._data: list[bytes] = []
        self._is_first = True
        self._ended_in_cr = False

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Return the events completed by `piece`, the next bytes of the stream."""
        if not piece:
            return []
        if self._ended_in_cr:
            piece = piece.removeprefix(b"\n")  # the second half of a CR LF
        self._ended_in_cr = piece.endswith(b"\r")
        cut = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if not cut:
            self._pending.append(piece)
            return []
        if self._pending or cut < len(piece):
            whole = b"".join([*self._pending, piece[:cut]])
            self._pending = [piece[cut:]] if cut < len(piece) else []
            return self._events(whole)
        return self._events(piece)

    def end(self) -> list[ServerEvent]:
        """Return the event that the end of the stream completes, if any."""
        whole = b"".join(self._pending)
        self._pending = []
        return self._events(whole + b"\n\n")

    def _events(self, lines: bytes) -> list[ServerEvent]:
        if self._is_first:
            lines, self._is_first = lines.removeprefix(BOM_UTF8), False
        events: list[ServerEvent] = []
        for line in lines.splitlines():
            if line.startswith(b"data: "):  # most lines, so they come first
                self._data.append(line[6:])
            elif not line:
                if self._data:
                    name = self._name.decode(errors="replace") if self._name else ""
                    events.append(ServerEvent(name, b"\n".join(self._data)))
                    self._data = []
                self._name = b""
            else:
                field, _, value = line.partition(b":")
                if field == b"data":
                    self._data.append(value.removeprefix(b" "))
                elif field == b"error":
                    self._name = field
                    self._data.append(value.removeprefix(b" "))
                elif field == b"event":
                    self._name = value.removeprefix(b" ")
        return events


_Sessions: TypeAlias = "dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[Any]]]"
Take: TypeAlias = Callable[[ServerEvent], bool]
"""Takes an event of a stream. Returns whether the event is the stream's last."""


class NotConnected(BackendError):  # noqa: N818 - reads as what it is
    """There is no connection to the server, so the request was not sent."""


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
        self.failure: Exception | None = None
        """The failure of the connection in the middle of the body; None without one."""
        connection = raw.connection
        if self.hangs_up and connection is not None and connection.protocol is not None:
            connection.protocol.force_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    async def read(self) -> bytes:
        """Return the body: of an answer with a good status the whole one, of an error what arrives."""
        pieces: list[bytes] = []
        while piece := await self._piece():
            pieces.append(piece)
        if self.failure is not None and self.status < 300 and not is_json(b"".join(pieces).decode(errors="replace")):
            raise self.failure
        return b"".join(pieces)

    async def receive(self, take: Take, take_whole: Callable[[Any], None], is_over: Callable[[], bool]) -> None:
        """Pass the body to `take`, event by event as they arrive, or to `take_whole` if it is a single JSON value.

        The body itself decides: servers and gateways send JSON under many content types, and events as well. Returns at
        the end of the body, or shortly after the event for which `take` returns true. A connection that fails after
        that, after the whole value, or while `is_over` says that the end of the answer has arrived, is closed, and its
        failure is no failure of the answer.
        """
        decoder, content = EventDecoder(), self._raw.content
        piece = await self._piece()
        while piece.isspace():
            piece = await self._piece()
        if piece.removeprefix(BOM_UTF8).lstrip().startswith((b"{", b"[", b'"')):  # no event begins so
            pieces = [piece]
            while piece := await self._piece():
                pieces.append(piece)
            body = b"".join(pieces)
            if self.failure is not None and not is_json(body.decode(errors="replace")):
                raise self.failure
            take_whole(json.loads(body))
            return
        while piece:
            for event in decoder.feed(piece):
                if take(event):
                    if not content.is_eof():
                        await self._finish()
                    return
            piece = await self._piece()
        if any(take(event) for event in decoder.end()) or self.failure is None or is_over():
            return
        raise self.failure

    async def _piece(self) -> bytes:
        """Return the next bytes of the body; empty at its end, and where the connection fails (`failure`)."""
        content = self._raw.content
        if self.failure is not None:
            return b""
        try:
            return await content.readany()
        except Exception as error:
            import aiohttp  # noqa: PLC0415 - imported by the client before

            if not isinstance(error, aiohttp.ClientError | OSError):
                raise
            self.failure = error
        # What arrived before the failure, and was not read yet, is still in the buffer.
        content.set_exception(cast("BaseException", None))
        return content.read_nowait()

    async def _finish(self) -> None:
        with anyio.move_on_after(_TAIL_LIMIT):
            while await self._piece():
                pass


class Client:
    """A client for one server. Creating a client imports aiohttp and may read certificates: create it in a thread."""

    def __init__(
        self,
        server: Endpoint,
        headers: Mapping[str, str],
        *,
        request_timeout: float,
        connect_timeout: float,
        use_proxy: bool = True,
        keep_alive: bool = True,
    ) -> None:
        import aiohttp  # noqa: PLC0415 - takes 0.15 s

        self._server = server
        self._request_timeout, self._connect_timeout = request_timeout, connect_timeout
        self._proxy = server.proxy() if use_proxy else None
        self._headers = None if keep_alive else _CLOSE
        self._options: dict[str, Any] = {
            # Names in lower case: a later header replaces an earlier one of the same name.
            "headers": _OWN_HEADERS | {name.lower(): value for name, value in headers.items()},
            # The limit of the whole request is `limit`: aiohttp's own costs a tenth of the time of a streamed answer.
            "timeout": aiohttp.ClientTimeout(connect=connect_timeout),
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

    def limit(self) -> AbstractAsyncContextManager[object]:
        """Return the context in which a request is sent and its response read. At the limit of the whole request the
        context ends the request and raises TimeoutError.
        """
        return asyncio.timeout(self._request_timeout)

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
        import aiohttp  # noqa: PLC0415 - imported by the client before

        kind, what, advice = self._explain(exc)
        is_unsent = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        failure = NotConnected if is_unsent else BackendError
        return failure(kind, self._server.safe_text(what, f"; {advice}"))

    def _explain(self, exc: Exception) -> tuple[ErrorKind, str, str]:
        """Return the kind of the failure, its description, and the next step for a person."""
        import aiohttp  # noqa: PLC0415 - imported by the client before

        name, kind = self._server.name, ErrorKind.TRANSIENT
        cause: Any = getattr(exc, "os_error", None)  # of an error while connecting
        why = getattr(cause, "reason", None) or getattr(cause, "strerror", None) or str(cause)
        log = "the server's log may say why, or the log of a proxy in between"
        match exc:  # the narrower class first
            case aiohttp.ConnectionTimeoutError():
                what = f"no connection to {name} within {self._connect_timeout:g} s"
                return ErrorKind.TIMEOUT, what, "check that the host is up, and that no firewall is in the way"
            case TimeoutError():
                what = f"no whole answer from {name} within {self._request_timeout:g} s"
                return ErrorKind.TIMEOUT, what, "raise request_timeout if answers may take longer"
            case aiohttp.ClientConnectorCertificateError():
                why = getattr(exc.certificate_error, "verify_message", "") or str(exc.certificate_error)
                advice = "SSL_CERT_FILE may name a file with the certificate to trust"
                return kind, f"the certificate of {name} is not trusted: {why}", advice
            case aiohttp.ClientSSLError():
                what = f"{name} did not begin an encrypted connection: {why}"
                return kind, what, "write http:// in base_url if the server has no TLS"
            case aiohttp.ClientConnectorDNSError():
                host = name.partition(":")[0] if self._proxy is None else exc.host
                what = f"no address is known for the host {host} ({why})"
                return kind, what, "check the host in base_url, and the network"
            case aiohttp.ClientProxyConnectionError():
                what = f"no connection to the proxy {exc.host}:{exc.port} on the way to {name} ({why})"
                advice = "check HTTP_PROXY, HTTPS_PROXY and ALL_PROXY; NO_PROXY names servers to reach without it"
                return kind, what, advice
            case aiohttp.ClientConnectorError() if isinstance(exc.os_error, ConnectionRefusedError):
                what = f"nothing listens at {name} (connection refused)"
                return kind, what, "start the server, or check host and port in base_url"
            case aiohttp.ClientConnectorError():
                return kind, f"no connection to {name} ({why})", "check the host in base_url, and the network"
            case aiohttp.InvalidURL():
                what = f"the URL of {name} cannot be called: {exc}"
                return ErrorKind.INVALID_REQUEST, what, "correct base_url"
            case aiohttp.ClientHttpProxyError():
                what = f"the proxy refused the way to {name}: {exc.status} {exc.message}"
                return kind, what, "NO_PROXY names servers to reach without the proxy"
            case aiohttp.ClientResponseError():
                what = f"{name} answers, but not as an HTTP server: {exc.message}"
                return kind, what, "check the port in base_url"
            case aiohttp.ClientPayloadError():
                return kind, f"{name} closed the connection in the middle of the answer", log
            case aiohttp.ClientError() | OSError():
                reason = f" ({exc.strerror})" if isinstance(exc, OSError) and exc.strerror else ""
                return kind, f"{name} closed the connection without an answer{reason}", log
            case ValueError():  # json.JSONDecodeError and UnicodeDecodeError
                what = f"the answer of {name} cannot be read as JSON: {exc}"
                return kind, what, "check that base_url is the URL of a model's API"
            case _:
                what = f"the answer of {name} cannot be read: {type(exc).__name__}: {exc}"
                return ErrorKind.UNEXPECTED, what, "this is a fault of plait; please report it"

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        entry = self._sessions.get(loop)
        if entry is None:
            owner = _open_session(self._options, self._tls)
            entry = self._sessions[loop] = await anext(owner), owner
            for other in [other for other in self._sessions if other.is_closed()]:
                del self._sessions[other]
        return entry[0]


async def _open_session(
    options: Mapping[str, Any], tls: ssl.SSLContext | bool
) -> AsyncGenerator[aiohttp.ClientSession]:
    """Yield a session that ends with the generator. A function, because a method would tie the client to the loop."""
    import aiohttp  # noqa: PLC0415 - imported by the client before

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_LIMIT, ssl=tls)
    connector._factory = partial(_protocol(), loop=asyncio.get_running_loop())  # pyright: ignore[reportPrivateUsage]
    head: dict[str, Any] = {"max_line_size": _LONGEST_HEADER, "max_field_size": _LONGEST_HEADER}
    if "max_headers" in (aiohttp.ClientSession.__init__.__kwdefaults__ or ()):  # older versions have no limit
        head["max_headers"] = _MOST_HEADERS
    session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), **head, **options)
    try:
        yield session
    finally:
        await session.close()


@cache
def _protocol() -> type[ResponseHandler]:
    """Return a reader of responses that takes a head before its body. aiohttp loses the head, and with it a whole
    answer, if the body that came in the same packet ends in an error.
    """
    from aiohttp.client_proto import ResponseHandler  # noqa: PLC0415 - imported by the client before

    class Protocol(ResponseHandler):
        def data_received(self, data: bytes) -> None:
            if data.startswith(b"HTTP/") and (body := data.partition(b"\r\n\r\n")[2]):
                super().data_received(data[: -len(body)])
                data = body
            super().data_received(data)

    return Protocol


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


# A server's limits of rate, as its response headers report them. Both forms are limits per minute; a server that
# reports a longer window only names a number that is too high, which lowers nothing.

_ALLOWANCE_HEADERS = ("x-ratelimit-{what}-{unit}", "anthropic-ratelimit-{unit}-{what}")


def reported_allowance(headers: Mapping[str, str], *, accepted: bool = True) -> Allowance:
    """Return the limits in `headers`. Values that are not numbers, and limits that are not positive, are unknown."""
    requests, requests_left = _limit(headers, "requests")
    tokens, tokens_left = _limit(headers, "tokens")
    return Allowance(requests, requests_left, tokens, tokens_left, accepted)


def _limit(headers: Mapping[str, str], unit: str) -> tuple[float | None, float | None]:
    for form in _ALLOWANCE_HEADERS:
        limit = _number(headers.get(form.format(what="limit", unit=unit)))
        if limit:  # some servers of Azure send -1 or 0 for both
            return limit, _number(headers.get(form.format(what="remaining", unit=unit)))
    return None, None


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
