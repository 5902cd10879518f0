"""A server with many half-open connections: `python -m benchmarks.measure half_open [CONNECTIONS]`."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import anyio.to_thread
import httpx

BACKENDS = "backends: {w: {kind: person}}\n"
HEAD = b"GET /api/runs HTTP/1.1\r\nX-More: "


async def half_open(connections: str = "2000") -> dict[str, float]:
    """Measure a request to `plait serve`, without and with connections whose requests never end."""
    return await anyio.to_thread.run_sync(_half_open, int(connections))


def _half_open(connections: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        Path(folder, "backends.yaml").write_text(BACKENDS)
        command = [sys.executable, "-m", "plait", "serve", "--backends", "backends.yaml", "--port", "0", "--json"]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        held.enter_context(server)
        held.callback(server.kill)
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        url, token = told["url"], Path(told["token_file"]).read_text().strip()
        place = urlsplit(url)
        _median_ms(url, token)
        usual = _median_ms(url, token)
        for _ in range(connections):
            held.enter_context(socket.create_connection((place.hostname, place.port))).sendall(HEAD)
        _median_ms(url, token)
        return {"usual_ms": usual, "half_open_ms": _median_ms(url, token)}


def _median_ms(url: str, token: str, times: int = 50) -> float:
    took: list[float] = []
    for _ in range(times):
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False) as client:
            before = time.perf_counter()
            assert client.get("/api/runs").status_code == 200
            took.append((time.perf_counter() - before) * 1e3)
    return statistics.median(took)


MEASURES: dict[str, Callable[..., Awaitable[dict[str, float]]]] = {"half_open": half_open}
