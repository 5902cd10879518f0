"""A killed command leaves no model server behind. The server's program is the real one, its engine is a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import PLAIT, environment, plait

pytest.importorskip("openai", reason="the local backend speaks through the SDK of the extra `local`")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through procfs")

PLAN = """
name: children
backends: {mine: {kind: local, gguf: model.gguf}}
tasks: [{id: a, backend: mine, prompt: Say hello.}]
"""
SERVER = '''
"""Stands in for the engine: notes its process, and answers as soon as there is a file "go" beside the model."""
import http.server, json, os, threading, time
from pathlib import Path
from types import SimpleNamespace


class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())


class Server:
    def __init__(self, params):
        folder = Path(params.model.path).parent
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "local"}
        chunk["choices"] = [{"index": 0, "delta": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}]

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                with (folder / "asked").open("a") as file:
                    file.write(f"{os.getpid()}\\n")
                while not (folder / "go").exists():
                    time.sleep(0.01)
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self.wfile.write(f"data: {json.dumps(chunk)}\\n\\ndata: [DONE]\\n\\n".encode())

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
'''


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_server_and_the_next_start_has_its_own(tmp_path: Path, by: signal.Signals) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "xllamacpp.py").write_text(SERVER)
    asked = tmp_path / "asked"
    path = os.pathsep.join([str(tmp_path / "engine"), environment()["PYTHONPATH"]])
    process = subprocess.Popen(
        [*PLAIT, "run", "plan.yaml"], cwd=tmp_path, env=environment(PYTHONPATH=path), stderr=subprocess.PIPE, text=True
    )
    try:
        assert within(20, asked.exists), process.poll()
        process.send_signal(by)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    (first,) = map(int, asked.read_text().split())
    assert within(2, lambda: not is_alive(first))
    (tmp_path / "go").touch()
    done = plait(tmp_path, "resume", "last", PYTHONPATH=path)
    assert done.code == 0, done.err
    servers = [int(pid) for pid in asked.read_text().split()]
    assert len(set(servers)) == 2
    assert within(2, lambda: not any(is_alive(pid) for pid in servers))
