"""The real command `plait` in a process of its own: through pipes, or on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from unittest import mock

from plait.runner.cli.command_line import cli, run_cli
from tests.support.processes import warm
from tests.support.processes.warm import Warm

_LIMIT = 120.0  # seconds that anything here may take at most
PLAIT = (sys.executable, "-W", "error", "-m", "plait")


def environment(**extra: str) -> dict[str, str]:
    """Ours without whatever configures a backend, a store or colours."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"OPENAI|ANTHROPIC|PLAIT|NO_COLOR|FORCE_COLOR|COLUMNS|LINES", name)
    }
    return {**kept, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[3]), **extra}


@dataclass(frozen=True)
class Done:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)


def plait(
    folder: Path, *words: str, stdin: Path = Path(os.devnull), loaded: tuple[str, ...] = (), **extra: str
) -> Done:
    """Run `plait WORDS` in `folder`, through pipes, with the file `stdin` as its standard input.

    `loaded` names modules that the command imports and most commands do not.
    """
    options: dict[str, Any] = {"cwd": folder, "env": environment(**extra), "timeout": _LIMIT, "loaded": loaded}
    with stdin.open() as file:
        done = warm.run([*PLAIT, *words], stdin=file, **options)
    return Done(done.returncode, done.stdout, done.stderr)


def plait_here(folder: Path, *words: str, **extra: str) -> Done:
    """The same within this process, for where a process of its own would add nothing but its start."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment(**extra), clear=True),
    ):
        code = run_cli(cli, words)
    return Done(code, *(cast("io.BytesIO", stream.buffer).getvalue().decode() for stream in (out, err)))


class Terminal:
    """`plait WORDS` on a pseudo-terminal of 30 lines; `seen` is every byte that reached it."""

    def __init__(self, folder: Path, *words: str, out: Path | None = None, columns: int = 100, **extra: str) -> None:
        """`out` is a file for standard output; without one it is the terminal, too."""
        self.seen = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        with contextlib.nullcontext(slave) if out is None else out.open("w") as stdout:
            self._process = Warm(
                [*PLAIT, *words],
                cwd=folder,
                env=environment(**extra),
                stdin=slave,
                stdout=stdout,
                stderr=slave,
                start_new_session=True,
            )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self.go_away()

    def go_away(self) -> None:
        """Be gone, as after a lost connection; no signal says so."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def until(self, marker: str) -> None:
        """Read until `marker` was seen."""
        ends = time.monotonic() + _LIMIT
        while marker.encode() not in self.seen:
            assert time.monotonic() < ends, f"no {marker!r} in {self.seen!r}"
            assert self._read(), f"it ended without {marker!r}: {self.seen!r}"

    def type(self, text: str) -> None:
        """What the terminal sends to the process when a person types `text`."""
        os.write(self._master, text.encode())

    def press_ctrl_c(self) -> None:
        """What the terminal sends to the process when a person presses it."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Read to the end; the exit code."""
        while self._master >= 0 and self._read():
            pass
        return self._process.wait(_LIMIT)

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._master], [], [], _LIMIT)
        assert ready, f"nothing came for {_LIMIT:g} s after {self.seen!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how a pseudo-terminal says that nobody holds its other end any more
            data = b""
        self.seen += data
        return data
