"""A plan whose one task is asked of a model server: the real server program, with a stand-in for its engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from tests.support.processes.command import PLAIT, environment

Sabotage: TypeAlias = Literal["children that do not watch their parent", "children not in a session"]

_PLAN = """
name: children
backends: {mine: {kind: local, gguf: model.gguf}}
tasks: [{id: a, backend: mine, prompt: Say hello.}]
"""
_ENGINE = '''
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
_SABOTAGED = """
import subprocess, sys
from pathlib import Path
from plait.backends.models import local_model
from plait.runner.cli import main

if sys.argv[1] == "children not in a session":
    popen = subprocess.Popen
    local_model.subprocess.Popen = lambda *words, start_new_session, **options: popen(*words, **options)
else:
    watching = "threading.Thread(target=watch_parent, daemon=True).start()"
    program = local_model._CHILD.read_text()
    assert watching in program
    local_model._CHILD = Path("deaf.py").absolute()
    local_model._CHILD.write_text(program.replace(watching, "pass"))
sys.argv[1:] = ["run", "plan.yaml"]
main()
"""


def missing() -> str | None:
    """Why no server can be started and looked at here; None when it can."""
    return None if Path("/proc/self/stat").exists() else "looks at processes through procfs"


def make(folder: Path) -> None:
    """The plan, as `plan.yaml`, and what its server needs."""
    (folder / "plan.yaml").write_text(_PLAN)
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "engine").mkdir()
    (folder / "engine" / "xllamacpp.py").write_text(_ENGINE)


def python_path(folder: Path) -> str:
    """The PYTHONPATH with which the stand-in is found."""
    return os.pathsep.join([str(folder / "engine"), environment()["PYTHONPATH"]])


def start(folder: Path, sabotage: Sabotage | None = None) -> subprocess.Popen[str]:
    """`plait run plan.yaml`."""
    sabotaged = (sys.executable, "-c", _SABOTAGED, sabotage or "")
    return subprocess.Popen(
        [*PLAIT, "run", "plan.yaml"] if sabotage is None else sabotaged,
        cwd=folder,
        env=environment(PYTHONPATH=python_path(folder)),
        stderr=subprocess.PIPE,
        text=True,
    )


def servers(folder: Path) -> list[int]:
    """The processes that were asked, in order."""
    return [int(pid) for pid in (folder / "asked").read_text().split()]


def asked(folder: Path) -> bool:
    """Whether a server has been asked."""
    return (folder / "asked").exists() and (folder / "asked").read_text().endswith("\n")


def let_answer(folder: Path) -> None:
    """From now on servers answer."""
    (folder / "go").touch()


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
