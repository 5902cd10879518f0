"""HTTP client of the adapters for a model's API, on aiohttp: the destination of requests, with its URL, key, proxy and
headers; one POST, server-sent events, error answers, the limits a server reports.

Each call is one POST. aiohttp sends a request again on a fresh connection only for idempotent methods, never a POST:
a connection that breaks is the error of its attempt, and the runner decides about the next.

Connections are kept open between calls. A connection belongs to an event loop, so the client holds one session per
loop. An async generator owns the session: asyncio closes the generators of a loop when the loop ends, and collected
generators at once, so no connection outlives its loop, and a client that nobody closes leaves no warning.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import time
import weakref
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast
from urllib.parse import urlsplit

import anyio

from plait.backends.backend_protocol import Allowance
from plait.backends.error_kinds import announced_wait, kind_of, read_error, retry_after
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import check_base_url, clean_text, header_values, is_json, masked, one_line

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler

# The destination of requests, and its error answers as ours.

_HOST = re.compile(r"(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?|[\da-f:.]*:[\da-f:.]*(?:%\w+)?")
"""A name of up to 63 characters a part, or an address of IPv6 without its brackets."""
_OWN_PATHS = ("/chat/completions", "/v1/messages")
_HEADERS = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")


@value
class Endpoint:
    """The destination of requests. Messages show the `name` only, and never the key."""

    url: str
    key: str = field(repr=False)
    """The key; empty for a server without keys."""

    def safe_text(self, text: str, doubt: str = "") -> str:
        """Return `text` as one line followed by the whole of `doubt`.

        The key and the values of headers added by the environment are masked.
        """
        headers = [value for name in _HEADERS for value in header_values(os.environ.get(name, ""))]
        return one_line(masked(text, [self.key, *headers]), 300 - len(doubt)) + doubt

    def status_error(self, status: int, headers: Mapping[str, str], body: JsonValue, url: str) -> BackendError:
        """Return the error for an answer with an error `status` to a request of `url`.

        `body` is the value of a JSON body, and the text of any other. Only its text for a person is shown: servers that
        validate fields return the request, including the prompt.
        """
        words, detail = read_error(body)
        if 300 <= status < 400:
            detail = "the server redirects; set base_url to the target of the redirect"
        hint = retry_after(headers, time.time())
        doubt = _doubt(url) if status == 404 and "model" not in detail.lower() else ""
        text = self.safe_text(f"{self.name} answered {status}: {detail}", doubt)
        wait = announced_wait(body, time.time()) if hint is None else hint
        kind = kind_of(status, words, detail, has_wait=hint is not None)
        error = BackendError(kind, text, retry_after=wait)
        error.status = status
        return error

    def broken_off(self, body: JsonValue, *, begun: bool) -> BackendError:
        """Return the error for the error `body` within a stream; `begun` if a part of the answer had arrived.

        A rate limit or an overload then refuses no call: the server had accepted the call, and bills the call. Such an
        error is transient, so that the attempt counts.
        """
        what = f"{self.name} broke off the answer"
        error = self._without_status(body, what)
        if begun and error.kind in {ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED}:
            error = self._without_status(body, f"{what} it had begun ({error.kind.value.replace('_', ' ')})")
            error.kind = ErrorKind.TRANSIENT
        return error

    def no_answer(self, body: JsonValue, url: str) -> BackendError:
        """Return the error for a JSON `body` with status 200 that holds no answer."""
        return self._without_status(body, f"{self.name} answered with JSON that holds no answer", _doubt(url))

    def _without_status(self, body: JsonValue, what: str, doubt: str = "") -> BackendError:
        words, detail = read_error(body)
        status = next((int(word) for word in words if word.isdigit() and 400 <= int(word) < 600), 0)
        text = self.safe_text(f"{what}: {detail}", doubt)
        return BackendError(kind_of(status, words, detail), text, retry_after=announced_wait(body, time.time()))

    @property
    def name(self) -> str:
        """Host and port."""
        parts = urlsplit(self.url)
        host = parts.hostname or self.url
        host = f"[{host}]" if ":" in host else host
        try:
            return f"{host}:{parts.port}" if parts.port else host
        except ValueError:
            return host

    def url_of(self, path: str, query: str = "") -> str:
        """Return the URL of `path` below the server's own; `query` joins the server's."""
        return _joined(self.url, path, query)

    def proxy(self) -> str | None:
        """Return the proxy that the environment or the system names for this server; None for a direct connection.

        Raises BackendUnavailable for a proxy that is no HTTP proxy.
        """
        from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415 - brings the whole of http and email

        parts = urlsplit(self.url)
        proxies = getproxies()
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(parts.netloc):
            return None
        proxy = proxy if "://" in proxy else f"http://{proxy}"
        try:
            named = urlsplit(proxy)
            is_http = named.scheme in {"http", "https"} and bool(named.hostname) and named.port != 0
        except ValueError:
            is_http = False
        if not is_http:
            name = f"{parts.scheme.upper()}_PROXY" if proxies.get(parts.scheme) else "ALL_PROXY"
            raise BackendUnavailable(
                f"the proxy in {name} has to be like http://host:3128; NO_PROXY names servers to reach without it"
            )
        return proxy


def _doubt(url: str) -> str:
    if "/v1/v1/" in url:
        return "; leave /v1 out of base_url"
    return "" if re.search(r"/v\d|/deployments/", url) else "; is /v1 missing at the end of base_url?"


@lru_cache(maxsize=256)
def _joined(url: str, path: str, query: str) -> str:
    parts = urlsplit(url)
    joined_query = "&".join(part for part in (parts.query, query) if part)
    return parts._replace(path=parts.path.rstrip("/") + path, query=joined_query, fragment="").geturl()


def read_key(variable: str, *, needed: bool) -> str:
    """Return the key in environment variable `variable`; empty if there is none and none is needed. Raises
    BackendUnavailable if a needed key is missing, or the key is malformed.
    """
    key = os.environ.get(variable, "").strip()
    if key.isascii() and key.isprintable() and key:
        return key
    if key:
        raise BackendUnavailable(
            f"the key in {variable} holds characters not allowed in a key; was the key copied completely?"
        )
    if needed:
        raise BackendUnavailable(f"no key: set {variable}, or name a server that needs none by base_url (--base-url)")
    return ""


def find_server(url: str, variable: str, *, key_needed: bool) -> Endpoint:
    """Return the server at `url`, with the key in environment variable `variable`. Raises BackendUnavailable if `url`
    cannot be called or holds a user or password, or a needed key is missing.
    """
    try:
        check_base_url(url, f"the environment variable {variable}")
    except ValueError as error:
        raise BackendUnavailable(str(error)) from None
    fault = url_fault(url)
    if fault is not None:
        raise BackendUnavailable(f"{fault}; a base_url is like http://host:8080/v1")
    return Endpoint(url, read_key(variable, needed=key_needed))


def url_fault(url: str) -> str | None:
    """Return the fault of a `base_url` that cannot be called, or None. Repeats nothing of the URL, which may hold a
    secret.
    """
    if any(char.isspace() or not char.isprintable() for char in url):
        return "base_url holds a space or a control character"
    if not url.lower().startswith(("http://", "https://")):
        return "base_url does not begin with http:// or https://"
    path = ""
    try:
        parts = urlsplit(url)
        path, is_address = parts.path, bool(_HOST.fullmatch(parts.hostname or "")) and parts.port != 0
    except ValueError:  # brackets that do not fit, or a port that is no number
        is_address = False
    if not is_address:
        return "base_url does not name a host, or a host and a port"
    end = next((end for end in _OWN_PATHS if path.rstrip("/").endswith(end)), None)
    return None if end is None else f"base_url ends in {end}, which plait adds; leave it out"


def is_environments(url: str, variable: str, default: str) -> bool:
    """Return whether `url` is the URL in environment variable `variable`, or `default` if the variable is not set."""
    return url.rstrip("/") == (os.environ.get(variable) or default).strip().rstrip("/")


def environment_headers(lines: str, named: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that the environment adds to each request: variable `lines` holds them as `Name: value`, one
    per line, and `named` gives for a variable with a value the name of its header.
    """
    headers = {header: value for name, header in named.items() if (value := os.environ.get(name, "").strip())}
    for line in os.environ.get(lines, "").split("\n"):
        name, colon, value = line.partition(":")
        if colon and name.strip():
            headers[name.strip()] = value.strip()
    return headers


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


# A server's rate limits, as its response headers report them. Both forms are limits per minute; a server that
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
