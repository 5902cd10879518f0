"""Checks between the socket and the routes: who may ask, from where, and how much; the token of a server, in its file,
and the sign-in of browsers.

Listening on the loopback alone does not keep web pages out: a browser on this machine carries the requests of a page to
the server. So each request holds the token, which a browser adds by itself to no request of another page: the page of
this server reads it from the storage of its own origin. A request names this server as its host; a page whose name was
pointed at 127.0.0.1 does not.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import anyio

from plait.clock_and_ids import Clock, iso
from plait.errors import InvalidRequest
from plait.runner.engine.run_options import StorePlace
from plait.safe_text import clean_text

CODE_SECONDS = 60
"""Seconds for which a code is good."""
_NONCE_BYTES = 6  # an address of 66 characters stays in one line of a terminal
_MAC_BYTES = 12
_AGAIN = "; run `plait ui` again on the same store, and open the new address"


class SignIn:
    """The codes of the server at `address` (`127.0.0.1:8377`) with `token`."""

    def __init__(self, token: str, address: str, clock: Clock) -> None:
        self.token = token
        """The token of programs, which browsers receive when they sign in."""
        self._address = address
        self._clock = clock
        self._used: set[str] = set()  # only codes that a holder of the token has made

    def new_code(self) -> str:
        """Return a code that can be redeemed once, within `CODE_SECONDS`."""
        end = int(self._clock.wall()) + CODE_SECONDS
        content = f"{end}.{secrets.token_urlsafe(_NONCE_BYTES)}"
        return f"{content}.{self._mac('code', content)}"

    def redeem(self, code: str) -> str:
        """Return the token for `code`. Raises ValueError with the reason for which it is refused."""
        content, _, mac = code.rpartition(".")
        if not content or not code.isascii() or not hmac.compare_digest(mac, self._mac("code", content)):
            raise ValueError(f"the code is not whole, or of another server, or of one that has ended{_AGAIN}")
        if code in self._used:
            raise ValueError(f"the code was used already, and is good for one sign-in{_AGAIN}")
        end = int(content.partition(".")[0])
        if self._clock.wall() >= end:
            raise ValueError(f"the code expired at {iso(end)}, {CODE_SECONDS} s after it was made{_AGAIN}")
        self._used.add(code)
        return self.token

    def prove(self, challenge: str) -> str:
        """Return what only a holder of the token can make of `challenge`."""
        return self._mac("proof", challenge)

    def _mac(self, purpose: str, text: str) -> str:
        """The address is in it: a server cannot pass on what another one of the same store has made."""
        mac = hmac.digest(self.token.encode(), f"{purpose} {self._address} {text}".encode(), "sha256")
        return base64.urlsafe_b64encode(mac[:_MAC_BYTES]).decode()


Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_HEAD_BYTES = 16 * 1024
MOST_BODY_BYTES = 4 * 1024 * 1024
BODY_SECONDS = 30.0
MOST_OPEN_BODY_BYTES = 4 * 1024
"""Of a request that needs no token."""
LINGER_SECONDS = 2.0
"""Seconds during which the rest of a refused request is read and discarded, up to twice the size limit of a body."""
SIGN_IN = "/page/sign-in"
"""The path that changes a code into the token."""
QUESTION = "/page/question"
"""The path that shows and answers the question of a signed link, which the request holds in place of the token."""
PROOF = "/page/proof"
"""The path under which the server proves that it holds the token."""
ADMIT = "admit"
"""The entry of `scope["state"]` that is called, without arguments, once a request has passed the checks of its head."""
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""The content security policy of the page: its own files alone, and text never becomes markup or a script."""
_NO_PAGE_POLICY = "default-src 'none'; frame-ancestors 'none'"
_SECURITY_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class RequestRefused(Exception):  # noqa: N818 - never leaves this package
    """A request is refused."""

    def __init__(self, code: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.code, self.kind, self.message = code, kind, message


class Guard:
    """`app` behind the checks, for one `token`. `hosts` are all names of this server, each with its port.

    Browsers load the page, the files at the paths `page`, without the token: it holds no data, and signs in. They load
    it under the one name `page_host`: under `localhost`, another user's server at ::1 could have the same origin.
    """

    def __init__(
        self, app: App, token: str, hosts: frozenset[str], page_host: str = "", page: Collection[str] = ()
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = hosts
        self._page_host = page_host
        self._open = {("POST", SIGN_IN), ("POST", QUESTION), ("GET", PROOF), *(("GET", path) for path in page)}
        """The requests that need no token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks only HTTP, not {scope['type']}")

        is_open = (scope["method"], scope["path"]) in self._open
        if scope["path"] == "/":  # a program hears what to send
            is_open = is_open and "text/html" in (_single_header(scope, b"accept") or "")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = _PAGE_POLICY if is_open else _NO_PAGE_POLICY
                added = (*_SECURITY_HEADERS, (b"content-security-policy", policy.encode()))
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            self._check_head(scope, {self._page_host} if is_open else self._hosts)
            if not is_open:
                self._check_token(scope)
            kind = (_single_header(scope, b"content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json" and (kind or _has_body(scope)):
                why = f"send application/json, not {kind[:80] or 'a body of no type'}"
                raise RequestRefused(415, "unsupported_type", why)
            if not is_open and ADMIT in scope.get("state", {}):
                scope["state"][ADMIT]()
            body = await _read_body(scope, receive, MOST_OPEN_BODY_BYTES if is_open else MOST_BODY_BYTES)
        except RequestRefused as refusal:
            await _send_refusal(refusal, receive, guarded)
        else:
            if body is None:
                return
            has_gone = anyio.Event()
            try:
                await self._app(scope, _replay_body(body, receive, has_gone), guarded)
            except* anyio.BrokenResourceError:
                # Of a client that has gone, FastAPI closes a stream into which its own task is still sending.
                if not has_gone.is_set():
                    raise

    def _check_head(self, scope: Scope, hosts: Collection[str]) -> None:
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MOST_HEAD_BYTES:
            raise RequestRefused(431, "too_large", f"a request's head may have {MOST_HEAD_BYTES:,} bytes")
        host = _single_header(scope, b"host") or ""
        if host not in hosts:
            raise RequestRefused(403, "forbidden", f"the host here is {' or '.join(sorted(hosts))}, not {host[:80]!r}")

    def _check_token(self, scope: Scope) -> None:
        scheme, _, token = (_single_header(scope, b"authorization") or "").partition(" ")
        is_right = hmac.compare_digest(token.strip().encode("latin-1"), self._token)
        if not is_right or scheme.lower() != "bearer":
            raise RequestRefused(
                401, "unauthorized", "send the token in the file that this server named at its start: Bearer TOKEN"
            )


def _has_body(scope: Scope) -> bool:
    return (
        _single_header(scope, b"content-length") not in {None, "0"}
        or _single_header(scope, b"transfer-encoding") is not None
    )


def _single_header(scope: Scope, name: bytes) -> str | None:
    """Return the value of the header; None if absent. A repeated header is ambiguous, so it is treated as invalid."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return None if not values else values[0].decode("latin-1") if len(values) == 1 else "(given more than once)"


async def _read_body(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """Return the whole body; None if the client disconnects before the end. Raises RequestRefused as soon as the body
    is known to have more than `most` bytes.
    """
    too_large = RequestRefused(413, "too_large", f"this request may have {most:,} bytes")
    stated = _single_header(scope, b"content-length") or "0"
    if stated.isdecimal() and int(stated[:20]) > most:
        raise too_large
    parts: list[bytes] = []
    held = 0
    with anyio.move_on_after(BODY_SECONDS):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            held += len(parts[-1])
            if held > most:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(parts)
    raise RequestRefused(408, "too_slow", f"the request was not whole after {BODY_SECONDS:g} s")


def _replay_body(body: bytes, receive: Receive, has_gone: anyio.Event) -> Receive:
    """Return a `receive` that first hands out `body`, which has been read already, and sets `has_gone` when the client
    disconnects.
    """
    waiting = [body]

    async def receive_again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        message = await receive()
        if message["type"] == "http.disconnect":
            has_gone.set()
        return message

    return receive_again


async def _send_refusal(refusal: RequestRefused, receive: Receive, send: Send) -> None:
    body = json.dumps(problem(refusal.kind, refusal.message)).encode()
    # The rest of the body may never be read, so this connection cannot be used again.
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refusal.code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.code, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    # Closing while the client is sending resets the connection, and the response is lost.
    with anyio.move_on_after(LINGER_SECONDS):
        await _discard_body(receive)
    await send({"type": "http.response.body"})


async def _discard_body(receive: Receive) -> None:
    thrown = 0
    while thrown <= 2 * MOST_BODY_BYTES:
        message = await receive()
        thrown += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def problem(kind: str, message: str) -> Mapping[str, Any]:
    """Return the JSON of an error, in the one shape of all errors."""
    return {"error": {"kind": kind, "message": clean_text(message)}}


# The address of a server on this machine, and the token by which programs and browsers may use the server.

_TOKEN_BYTES = 32
_ANSWERS_S = 5.0
_MOST_PROOF_BYTES = 1024


@contextmanager
def listen(host: str, port: int) -> Generator[socket.socket]:
    """Open a socket that listens on `host` and `port`; 0 takes a free port. Raises InvalidRequest."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        # The text of Python (`strerror`) would repeat the address.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise InvalidRequest(
            f"cannot listen on {host}, port {port}: {why}; choose another one with --port, or 0 for any that is free"
        ) from None
    with listening:
        yield listening


def url_of(host: str, port: int) -> str:
    """Return the address of the server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def server_access(store: StorePlace, url: str, files_root: Path | None) -> Generator[tuple[SignIn, Path]]:
    """Make a new token for the server at `url`, and keep it beside the store while the server runs, in a file that only
    this user can read. Yield the sign-in of browsers with the token, and the file.
    """
    path = token_path(_folder(store, files_root), url)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123 - the mode holds from the first byte
        file.write(token + "\n")
    fresh.replace(path)
    try:
        yield SignIn(token, urlsplit(url).netloc, Clock()), path
    finally:
        path.unlink(missing_ok=True)


def _folder(store: StorePlace, files_root: Path | None) -> Path:
    """Return the folder of the store: beside a file; for a server the folder of the store on this host."""
    folder = store.absolute().parent if isinstance(store, Path) else files_root
    assert folder is not None
    return folder


def token_path(folder: Path, url: str) -> Path:
    """Return the file of the token of the server at `url`."""
    return folder / f"serve-{urlsplit(url).port}.token"


def page_of_running_server(store: StorePlace, url: str, files_root: Path | None) -> str | None:
    """Return the address of the page, with a new code, if the server of the same store runs at `url`; None otherwise.
    Another program may listen there, so the server proves that it holds the token, and nothing secret is sent to it.
    """
    try:
        token = token_path(_folder(store, files_root), url).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    place = urlsplit(url)
    sign_in = SignIn(token, place.netloc, Clock())
    challenge = secrets.token_urlsafe(_TOKEN_BYTES)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=_ANSWERS_S)
    try:
        connection.request("GET", f"{PROOF}?challenge={challenge}")
        proof = connection.getresponse().read(_MOST_PROOF_BYTES)
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
    is_proved = secrets.compare_digest(proof, sign_in.prove(challenge).encode())
    return page_address(url, sign_in) if is_proved else None


def page_address(url: str, sign_in: SignIn) -> str:
    """Return the address of the page with a new code, behind `#`: a browser sends this part to no server."""
    return f"{url}/#{sign_in.new_code()}"
