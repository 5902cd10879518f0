"""A server that `plait ui` expects on a port proves itself, and the one who listens there instead learns nothing."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from plait.clock_and_ids import Clock
from plait.runner.serving.http_guard import SignIn, page_of_running_server, token_path
from tests.support.processes.browser import ui
from tests.support.processes.command import plait

TOKEN = "t0ken" * 9


class Listener(ThreadingHTTPServer):
    """Another program on a port: it keeps all that it is sent, and answers each request with `answer`."""

    def __init__(self, answer: str = "", address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), _Handler)
        self.answer = answer
        self.seen = ""

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"

    def proof(self, path: str) -> str:
        return self.answer


class _Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        body = self.server.proof(self.path).encode()
        self.server.seen += f"{self.raw_requestline.decode()}{self.headers}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - named by the library

    def log_message(self, *_args: object) -> None:
        pass


@contextmanager
def running(listener: Listener) -> Generator[Listener]:
    with listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield listener
        finally:
            listener.shutdown()
            thread.join()


def page_at(folder: Path, url: str) -> str | None:
    token_path(folder, url).write_text(TOKEN + "\n")
    return page_of_running_server(folder / "plait.db", url, None)


@pytest.mark.parametrize("answer", ["", "{}", "A" * 16, TOKEN, "A" * 100_000, "\u00e9", "true"])
def test_a_listener_without_the_token_is_no_server(tmp_path: Path, answer: str) -> None:
    with running(Listener(answer)) as listener:
        assert page_at(tmp_path, listener.url) is None
        assert listener.seen.startswith("GET /page/proof?challenge=")
        assert TOKEN not in listener.seen
        assert "authorization" not in listener.seen.lower()


def test_a_proof_cannot_be_passed_on(tmp_path: Path) -> None:
    """The listener asks a server of the same store, and has the file's token, at another address."""

    class Between(Listener):
        def proof(self, path: str) -> str:
            return SignIn(TOKEN, f"127.0.0.2:{self.server_port}", Clock()).prove(path.rpartition("=")[2])

    with running(Between()) as listener:
        assert page_at(tmp_path, listener.url) is None


def test_nobody_listens(tmp_path: Path) -> None:
    with running(Listener()) as listener:
        url = listener.url
    assert page_at(tmp_path, url) is None
    token_path(tmp_path, url).unlink()
    assert page_of_running_server(tmp_path / "plait.db", url, None) is None


def test_the_port_of_a_killed_server_gets_nothing_of_it(tmp_path: Path) -> None:
    with ui(tmp_path) as server:
        server.process.kill()
        server.process.wait(60)
    with running(Listener()) as listener:
        port = str(listener.server_port)
        server.token_file.rename(token_path(server.token_file.parent, listener.url))
        done = plait(tmp_path, "ui", "--port", port, "--no-browser")
        assert (done.code, done.out) == (2, "")
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in done.err
        assert server.token not in listener.seen + done.err


def test_a_second_page_signs_in_to_the_server_that_runs(tmp_path: Path) -> None:
    with ui(tmp_path) as server:
        port = str(urlsplit(server.url).port)
        for host in ("127.0.0.1", "localhost"):
            done = plait(tmp_path, "ui", "--host", host, "--port", port, "--no-browser", "--json")
            assert (done.code, done.value["url"]) == (0, server.url)
            assert done.err.splitlines() == ["a server runs on this store already; its page:", done.value["page"]]
            code = {"code": urlsplit(done.value["page"]).fragment}
            assert httpx.post(f"{server.url}/page/sign-in", json=code, trust_env=False, verify=False).status_code == 200
        (tmp_path / "other").mkdir()
        refused = plait(tmp_path, "ui", "--port", port, "--no-browser", "--store", "other/plait.db")
        assert (refused.code, len(refused.err.splitlines())) == (2, 1)
        assert "choose another one with --port" in refused.err
