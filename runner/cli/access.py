"""The address of a server on this machine, and the secrets by which programs and browsers may use the server."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from plait.runner.cli.exits import CliError
from plait.runner.cli.options import StorePlace
from plait.runner.cli.output_files import write_file
from plait.runner.clock import Clock

if TYPE_CHECKING:
    from plait.runner.web.sign_in import SignIn

_TOKEN_BYTES = 32
_KEY_FILE = "page.key"
_ANSWERS_S = 5.0


@contextmanager
def listen(host: str, port: int) -> Generator[socket.socket]:
    """Open a socket that listens on `host` and `port`; 0 takes a free port. Raises CliError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        # The text of Python (`strerror`) would repeat the address.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise CliError(
            f"cannot listen on {host}, port {port}: {why}; choose another one with --port, or 0 for any that is free"
        ) from None
    with listening:
        yield listening


def url_of(host: str, listening: socket.socket) -> str:
    """Return the address of the server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


@dataclass(frozen=True, slots=True)
class Access:
    """The secrets of one server."""

    token: str
    """The token of programs."""
    token_path: Path
    """The file of the token."""
    sign_in: SignIn
    """The sign-in of browsers."""


def make_access(store: StorePlace, listening: socket.socket, files_root: Path | None) -> Access:
    """Return a new token, and the sign-in with the key that is kept beside the store. Raises CliError."""
    from plait.runner.web.sign_in import SignIn  # noqa: PLC0415 - of an extra

    port = listening.getsockname()[1]
    folder = _folder(store, files_root)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = token_path(folder, port)
    return Access(secrets.token_urlsafe(_TOKEN_BYTES), path, SignIn(_page_key(folder / _KEY_FILE), port, Clock()))


def _folder(store: StorePlace, files_root: Path | None) -> Path:
    """Return the folder of the store: beside a file; for a server the folder of the store on this host."""
    folder = store.absolute().parent if isinstance(store, Path) else files_root
    assert folder is not None
    return folder


def token_path(folder: Path, port: int) -> Path:
    """Return the file of the token of the server on `port`."""
    return folder / f"serve-{port}.token"


def code_of_running_server(store: StorePlace, files_root: Path | None, port: int) -> str | None:
    """Return a code for the page of a server that runs on the same store on `port`; None without such a server."""
    try:
        token = token_path(_folder(store, files_root), port).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    connection = HTTPConnection("127.0.0.1", port, timeout=_ANSWERS_S)
    try:
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        connection.request("POST", "/page/code", "{}", headers)
        value: dict[str, str] = json.loads(connection.getresponse().read())
        return value.get("code")
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


@contextmanager
def token_file(access: Access) -> Generator[None]:
    """Keep the token in a file that only this user can read, while the server runs."""
    write_file(access.token_path, access.token + "\n", private=True)
    try:
        yield
    finally:
        access.token_path.unlink(missing_ok=True)


def page_address(url: str, sign_in: SignIn) -> str:
    """Return the address of the page with a new code, behind `#`: a browser sends this part to no server."""
    return f"{url}/#{sign_in.new_code()}"


def _page_key(path: Path) -> str:
    """Return the key in the file at `path`, which is made if it is missing. A page stays signed in over a restart."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        key = ""
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{path} cannot be read ({error}); remove it, and open browsers sign in again") from None
    if not key:
        key = secrets.token_urlsafe(_TOKEN_BYTES)
        write_file(path, key + "\n", private=True)
    return key
