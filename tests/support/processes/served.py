"""`plait serve` in a process of its own, and clients of it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes.command import PLAIT, environment
from tests.support.processes.warm import Warm

BACKENDS = 'backends: {w: {kind: function, call: "work.py:work"}}\n'
WORK = """
import anyio
from pathlib import Path
from plait.backends import ask

async def work(prompt):
    Path(prompt[:40].replace("/", "-")).touch()
    while prompt.startswith("held") and not Path("go").exists():
        await anyio.sleep(0.01)
    if prompt.startswith("fail") and not Path("go").exists():
        raise ValueError("not today")
    if prompt.startswith("ask"):
        return await ask("Which one?", schema={"type": "integer"}, default=0)
    return prompt.upper()
"""
_LIMIT = 60.0


@dataclass
class Served:
    """A server under way."""

    process: Warm
    url: str
    token_file: Path
    token: str

    def client(self, **headers: str) -> httpx.Client:
        given = {"authorization": f"Bearer {self.token}", **headers}
        # There is no TLS here, and each client would read the certificates of the system first: 20 to 40 ms.
        return httpx.Client(base_url=self.url, headers=given, timeout=_LIMIT, trust_env=False, verify=False)

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """As Ctrl-C does; the exit code and what it said."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=_LIMIT)[1]
        return self.process.returncode, said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_LIMIT)


@contextmanager
def served(folder: Path, *options: str, backends: str = BACKENDS, work: str = WORK) -> Generator[Served]:
    """A server in `folder`, on its default store and on a function that answers in capitals. A prompt that begins with
    `held` waits, and one with `fail` fails, until there is a file `go`. One with `ask` asks for a number.
    `backends` and `work` replace the function.
    """
    (folder / "backends.yaml").write_text(backends)
    (folder / "work.py").write_text(work)
    process = Warm(
        [*PLAIT, "serve", "--backends", "backends.yaml", "--port", "0", "--json", *options],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            told = json.loads(line)
            path = Path(told["token_file"])
            yield Served(process, told["url"], path, path.read_text().strip())
        finally:
            process.kill()


@dataclass
class Heard:
    """One server-sent event."""

    id: int
    event: str
    data: Any


def heard(response: httpx.Response) -> Iterator[Heard]:
    """The events of a stream as they come, comments left out."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        else:
            if "data" in fields:
                yield Heard(int(fields["id"]), fields["event"], json.loads(fields["data"]))
            fields = {}
