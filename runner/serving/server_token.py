"""The address of a server on this machine, and the token by which programs and browsers may use the server."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from plait.clock_and_ids import Clock
from plait.errors import InvalidRequest
from plait.json_form import value
from plait.runner.engine.run_options import StorePlace
from plait.runner.serving.http_guard import SignIn

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


@value
class Access:
    """The secret of one server, for one life of it."""

    token: str
    """The token of programs, which browsers receive when they sign in."""
    token_path: Path
    """The file of the token."""
    sign_in: SignIn
    """The sign-in of browsers."""


@contextmanager
def server_access(store: StorePlace, url: str, files_root: Path | None) -> Generator[Access]:
    """Make a new token for the server at `url`, and keep it beside the store while the server runs, in a file that only
    this user can read.
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
        yield Access(token, path, SignIn(token, urlsplit(url).netloc, Clock()))
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
        connection.request("GET", f"/page/proof?challenge={challenge}")
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
