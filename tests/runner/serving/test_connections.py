"""Connections that anybody on the machine opens, without the token, against a real server."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.abc import SocketStream

from plait.backends import FunctionBackend
from plait.clock_and_ids import Clock
from plait.persistence import MemoryStore
from plait.runner.parallel_runner import ParallelRunner
from plait.runner.serving import http_server
from plait.runner.serving.http_guard import SignIn
from plait.runner.serving.http_routes import ServedRuns
from plait.runner.serving.http_server import ApiServer
from tests.support.processes.served import Served, heard, served

pytestmark = pytest.mark.slow

HALF_OPEN = 2000
HEADS = (
    b"",
    b"GET",
    b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-More: ",
    b"POST /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
)
"""Beginnings of requests: no byte, a word, half a head, and a head without the token before a body that never comes."""


def connect(server: Served) -> socket.socket:
    to = urlsplit(server.url)
    return socket.create_connection((to.hostname, to.port), timeout=60)


@contextmanager
def half_open(server: Served, number: int, heads: Sequence[bytes] = HEADS) -> Generator[list[socket.socket]]:
    """`number` connections with unfinished requests."""
    with ExitStack() as held:
        opened: list[socket.socket] = []
        for index in range(number):
            opened.append(held.enter_context(connect(server)))
            opened[-1].sendall(heads[index % len(heads)])
        yield opened


def request(server: Served, timeout: float = 5.0) -> None:
    """A request on a connection of its own, answered within the usual time-out of a client."""
    with server.client() as client:
        assert client.get("/api/runs", timeout=timeout).status_code == 200


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as the system allows, for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < HALF_OPEN + 500:
        pytest.skip(f"the system allows only {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (HALF_OPEN + 500, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit_files(server: Served, number: int) -> None:
    _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (number, hard))


def count_files(server: Served) -> int:
    return sum(1 for _ in Path(f"/proc/{server.process.pid}/fd").iterdir())


@pytest.mark.usefixtures("many_files")
def test_two_thousand_half_open_connections_keep_nobody_out(tmp_path: Path) -> None:
    """`python -m benchmarks.measure half_open` measures the delay."""
    with served(tmp_path) as server:
        limit_files(server, 1024)  # the usual limit of Linux
        with half_open(server, HALF_OPEN) as opened:
            for _ in range(3):
                request(server)  # all of the others are accepted by then
            assert count_files(server) < 256
            are_open = [not is_closed(connection) for connection in opened]
            assert sum(are_open) <= http_server.MOST_WAITING
            assert are_open[-4:-1] == [True] * 3
        code, said = server.stop()
    assert (code, len(said.splitlines())) == (0, 3), said  # the address, the token, and the end


def test_a_stream_with_the_token_outlasts_any_number_of_others(tmp_path: Path) -> None:
    plan = {"tasks": [{"id": "held", "prompt": "held"}]}
    with served(tmp_path) as server, server.client() as client:
        run_id = client.post("/api/runs", json={"plan": plan}).json()["run_id"]
        with client.stream("GET", f"/api/runs/{run_id}/events") as stream:
            seen = heard(stream)
            while next(seen).event != "task_started":
                pass
            with half_open(server, 3 * http_server.MOST_WAITING):
                request(server)
                (tmp_path / "go").touch()
                assert [one.event for one in seen][-1] == "run_completed"


def test_one_connection_too_many_ends_the_oldest_that_waits(tmp_path: Path) -> None:
    with served(tmp_path) as server, half_open(server, http_server.MOST_WAITING, [b"GET"]) as opened:
        request(server)
        assert is_closed(opened[0])
        assert not is_closed(opened[1])


def test_an_idle_connection_counts_like_any_other_that_waits(tmp_path: Path) -> None:
    with served(tmp_path) as server, connect(server) as idle:
        head = f"GET /api/runs HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\nAuthorization: Bearer {server.token}"
        idle.sendall(f"{head}\r\n\r\n".encode())
        while b'"runs"' not in idle.recv(65536):
            pass
        assert not is_closed(idle)
        with half_open(server, http_server.MOST_WAITING, [b"GET"]):
            request(server)
            assert is_closed(idle)


def test_a_burst_is_accepted_in_parts(tmp_path: Path) -> None:
    """All of the burst at once would take more files than the process may have."""
    with served(tmp_path, "--log", "json") as server:
        limit_files(server, 256)
        request(server)
        server.process.send_signal(signal.SIGSTOP)
        with half_open(server, 400):
            server.process.send_signal(signal.SIGCONT)
            request(server)
        _, said = server.stop()
        assert "cannot be accepted" not in said


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it. What it closes ends here before the next answer of it comes."""
    connection.settimeout(0)
    try:
        while connection.recv(65536):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@asynccontextmanager
async def impatient(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[int]:
    """The port of a server in this process that waits for a head for a fifth of a second."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    runner = ParallelRunner(FunctionBackend(str.upper), store=MemoryStore())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with runner.runs as service, anyio.create_task_group() as beside:
            server = ApiServer(ServedRuns(service), listening, SignIn("token", "127.0.0.1:8377", Clock()))
            beside.start_soon(server.serve)
            yield listening.getsockname()[1]
            server.stop()


@pytest.mark.parametrize("requests_before", [0, 1])
async def test_a_head_that_drips_in_is_cut_off(monkeypatch: pytest.MonkeyPatch, requests_before: int) -> None:
    async with impatient(monkeypatch) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        for _ in range(requests_before):
            whole = f"GET /nothing HTTP/1.1\r\nHost: localhost:{port}\r\nAuthorization: Bearer token\r\n\r\n"
            await stream.send(whole.encode())
            assert (await stream.receive()).startswith(b"HTTP/1.1 404")
        await stream.send(b"GET / HTTP/1.1\r\nX-Slow: ")
        with anyio.fail_after(60):
            await drip(stream)


async def drip(stream: SocketStream) -> None:
    """Send a byte again and again, until the other side has closed the connection."""
    with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
        while True:
            await stream.send(b"x")
            with anyio.move_on_after(0.02):
                await stream.receive()
