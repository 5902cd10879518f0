"""`child.json`: who the child is that has its files in a folder, for processes that did not start it.

    child.json (marker) -> started -> child.json (marker, number, start time) -> over.json (nothing of it is left)

Whoever starts a child may be killed at any moment between. So it holds a lock on the child's `stdout` before it starts
it: the child has the lock with the descriptor from its first breath, before it is the program that carries the mark.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from plait.backends.process.private import private_file
from plait.backends.process.proctable import HAS_PROC, Process, Turn, boot_id, members, start_time
from plait.backends.values import value

_NAME, _OVER = "child.json", "over.json"
_START_LIMIT = 5.0  # seconds; a start takes milliseconds, and on a machine that has far too much to do, some hundred


@value
class Known:
    """Who a child is. `pid` is 0 while it is being started; `note` is what its starter wanted to know later; `words` is
    about its arguments, as `words_of` says.
    """

    marker: str
    boot: str
    pid: int
    started: str
    note: Mapping[str, str]
    words: str = ""

    @property
    def is_of_this_boot(self) -> bool:
        """Whether its numbers mean anything on this machine, since it was started."""
        return self.boot == boot_id()

    @property
    def turn(self) -> Turn:
        """What its processes are known by."""
        return Turn(self.marker, self.pid, self.started)

    @property
    def is_alive(self) -> bool:
        """Whether the child lives. No other process is taken for it."""
        # "": nobody can tell just now, which is no reason to give it up.
        return bool(self.pid) and self.is_of_this_boot and start_time(self.pid) in {self.started, ""}


def lock_start(stdout: int) -> None:
    """Say, by its output's descriptor, that a child is being started; over when nobody has that one any more."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(stdout, fcntl.LOCK_EX | fcntl.LOCK_NB)


def tell(folder: Path, known: Known) -> None:
    """Write `child.json`, all of it or none. Raises OSError."""
    text = json.dumps(
        {
            "version": 1,
            "marker": known.marker,
            "boot": known.boot,
            "pid": known.pid,
            "started": known.started,
            "words": known.words,
            "note": dict(known.note),
        }
    )
    new = folder / f"{_NAME}.new"
    private_file(new, text)
    new.replace(folder / _NAME)


def mark_over(folder: Path) -> None:
    """Nobody has to look for the child again."""
    with suppress(OSError):
        (folder / _NAME).replace(folder / _OVER)


def read_known(folder: Path) -> Known | None:
    """Who the child is, or was, that has its files in `folder`; None when there is none. One whose start is under way
    is waited for, in this thread: until then nobody can see whether it will live. Never raises.
    """
    known, until = _read(folder), time.monotonic() + _START_LIMIT
    while known is not None and not known.pid and HAS_PROC and known.is_of_this_boot:
        is_starting = _is_locked(folder / "stdout")  # before the look: then it has been started, or has ended
        found = _members(known)
        if found or not is_starting or time.monotonic() > until:
            return _with_number(known, found)
        time.sleep(0.005)
        known = _read(folder)
    return known


def left_below(folder: Path) -> Iterator[tuple[Path, Known]]:
    """The children with their files somewhere below `folder` of which nobody knows yet that nothing is left, each with
    the folder of its files. Those of another boot do not count.
    """
    # Never into a child's own folder: what its tools leave there comes and goes, and is nobody's word on who is whose.
    for path, below, names in os.walk(folder.resolve()):
        if _NAME in names or _OVER in names:
            below.clear()
        known = read_known(Path(path)) if _NAME in names else None
        if known is not None and known.is_of_this_boot:
            yield Path(path), known


def _read(folder: Path) -> Known | None:
    for name in (_NAME, _OVER):
        try:
            told = json.loads((folder / name).read_bytes())
            int(told["marker"], 16)
            return Known(
                told["marker"],
                str(told["boot"]),
                int(told["pid"]),
                str(told["started"]),
                {str(key): str(text) for key, text in told["note"].items()},
                str(told.get("words", "")),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return None


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def words_of(arguments: Sequence[str | bytes]) -> str:
    """The number of a program's arguments, its own name left out, and a digest of them."""
    try:
        told = b"\0".join(map(os.fsencode, arguments))
    except UnicodeEncodeError:  # nothing can be started with such ones
        return ""
    return f"{len(arguments)}:{sha256(told).hexdigest()}"


def _members(known: Known) -> Sequence[Process]:
    try:
        return members([known.turn])
    except OSError:  # no descriptor is left to look with
        return ()


def _with_number(known: Known, found: Sequence[Process]) -> Known:
    """Whoever started it may have been killed before it wrote the number down. The child is known by its arguments: it
    may be over, and what it has left at work be the leader of a session, too.
    """
    leaders = [process for process in found if process.pid == process.session and _is_called(process.pid, known)]
    first = min(leaders, key=lambda process: process.started, default=None)
    return known if first is None else replace(known, pid=first.pid, started=str(first.started))


def _is_called(pid: int, known: Known) -> bool:
    """A script's interpreter stands before the script in its arguments, so they are compared from the end."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return False
    count = known.words.partition(":")[0]
    return count.isdecimal() and words_of(words[max(0, len(words) - int(count)) :]) == known.words
