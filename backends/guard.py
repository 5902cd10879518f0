"""Children that are to die with this process, however it dies.

One process of our own, started when it is first needed, is told their markers through a pipe. The pipe ends when we do,
kill -9 included; then it kills all that carry one of them, and ends. PR_SET_PDEATHSIG would not do: it tells of the end
of a thread, reaches the child alone, not its tools, and is Linux's.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

_PROGRAM = Path(__file__).with_name("_guard.py")


class _Guard:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe: int | None = None
        self._watched: dict[str, str] = {}

    def watch(self, marker: str, folder: Path | None = None) -> None:
        """Have all that carry `marker` killed when this process ends, until `forget`; `folder` is removed then, too."""
        with self._lock:
            self._watched[marker] = f"+{marker} {folder or ''}\n"
            self._say(self._watched[marker])

    def forget(self, marker: str) -> None:
        """Nothing of it is left."""
        with self._lock:
            if self._watched.pop(marker, None) is not None:
                self._say(f"-{marker}\n")

    def _say(self, line: str) -> None:
        if self._pipe is not None:
            try:
                os.write(self._pipe, os.fsencode(line))
            except OSError:  # it was killed: another one has to know of all
                os.close(self._pipe)
            else:
                return
        self._pipe = _start()
        os.write(self._pipe, os.fsencode("".join(self._watched.values())))


def _start() -> int:
    """The end of a pipe that a new guard listens to."""
    heard, said = os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        program = [sys.executable, "-I", "-S", str(_PROGRAM)]
        actions = [(os.POSIX_SPAWN_DUP2, own, as_) for own, as_ in ((heard, 0), (nowhere, 1), (nowhere, 2))]
        # Not `subprocess`, which would warn at our end of a child that is meant to outlive us.
        os.posix_spawn(program[0], program, {}, file_actions=actions, setsid=True)
    except BaseException:
        os.close(said)
        raise
    finally:
        os.close(heard)
        os.close(nowhere)
    return said


GUARD = _Guard()
"""That of this process."""
