"""What is kept by session, beside the turns: who writes to it now, and what it has cost so far.

Two processes in one session do harm: one agent loses a branch of the talk without a word, another one runs for ever.
So whoever has a turn holds a lock on a file, and its child inherits the descriptor: the lock lasts as long as one of
the two lives, also when the other was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.process.private import private_file, private_folder
from plait.backends.protocol import Usage

_LOOK = 0.2  # seconds between two tries for a lock


class SessionInUse(BackendError):  # noqa: N818
    """Another process writes to the session."""

    def __init__(self, holder: str) -> None:
        super().__init__(ErrorKind.TRANSIENT, f"{holder}; wait until its turn is over, or end that process")
        self.holder = holder


class Sessions:
    """The sessions of one kind of agent, with their files in `folder`, which is made for this user alone."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind

    @asynccontextmanager
    async def writing(self, session_id: str, patience: float, on_wait: Callable[[str], None]) -> AsyncGenerator[int]:
        """Be the only one who writes to the session; the descriptor that a child has to keep. Where another process
        does, `on_wait` is told so, and after `patience` seconds SessionInUse is raised.
        """
        private_folder(self._folder)
        descriptor = os.open(self._path(session_id, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await _lock(descriptor, session_id, patience, on_wait)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def spent(self, session_id: str) -> Usage | None:
        """What the session has cost so far, as its program counts; None where that is not known."""
        return _read(self._path(session_id, "json"))

    def note_spent(self, session_id: str, total: Usage) -> None:
        """The same, from now on. A folder that cannot be written to only makes the next turn's usage wrong."""
        with suppress(OSError):
            private_folder(self._folder)
        _write(self._path(session_id, "json"), total)

    def _path(self, session_id: str, what: str) -> Path:
        return self._folder / f"{self._kind}-{_name(session_id)}.{what}"


def _name(session_id: str) -> str:
    return hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()[:32]


_KEPT = re.compile(r"(?P<session>.+-(?P<name>[0-9a-f]{32}))\.(lock|json|[0-9]+\.new)")


def forget_all_but(known: Iterable[str], folder: Path, idle: float) -> list[OSError]:
    """Remove what is kept in `folder` of all sessions but the `known` ones, once nobody has written to one for `idle`
    seconds, or does now. What could not be removed, and why.
    """
    names = {_name(session_id) for session_id in known}
    files: dict[str, list[Path]] = {}
    for one in folder.iterdir():
        found = _KEPT.fullmatch(one.name)
        if found is not None and found["name"] not in names:
            files.setdefault(found["session"], []).append(one)
    failures: list[OSError] = []
    for session, kept in files.items():
        try:
            if time.time() - max(one.lstat().st_mtime for one in kept) > idle and not _is_held(
                folder / f"{session}.lock"
            ):
                for one in kept:
                    one.unlink(missing_ok=True)
        except FileNotFoundError:  # somebody else removes them
            continue
        except OSError as error:
            failures.append(error)
    return failures


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def first_before(folder: Path, before: Usage) -> Usage:
    """What the session of the call with its files in `folder` had cost before: `before`, or what that was when the call
    was counted first, by a process that was killed before its word was stored.
    """
    path = folder / "before.json"
    known = _read(path)
    if known is None:
        _write(path, before)
    return before if known is None else known


def _read(path: Path) -> Usage | None:
    try:
        told = json.loads(path.read_bytes())
        cost = told["cost_usd"]
        return Usage(int(told["input_tokens"]), int(told["output_tokens"]), None if cost is None else float(cost))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, usage: Usage) -> None:
    text = json.dumps(
        {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens, "cost_usd": usage.cost_usd}
    )
    with suppress(OSError):
        new = path.with_suffix(f".{os.getpid()}.new")
        private_file(new, text)
        new.replace(path)


async def _lock(descriptor: int, session_id: str, patience: float, on_wait: Callable[[str], None]) -> None:
    until = anyio.current_time() + patience
    waits = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return
        who = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        holder = f"session {session_id} is in use by process {who} or its agent" if who else f"{session_id} is in use"
        if anyio.current_time() >= until:
            raise SessionInUse(holder)
        if not waits:
            on_wait(holder)
            waits = True
        await anyio.sleep(_LOOK)


def since(total: Usage, before: Usage) -> Usage:
    """What has been added to a count that only grows."""
    cost = None
    if total.cost_usd is not None:
        cost = max(0.0, total.cost_usd - (before.cost_usd or 0.0))
    read, written = total.input_tokens - before.input_tokens, total.output_tokens - before.output_tokens
    return Usage(max(0, read), max(0, written), cost, total.model)
