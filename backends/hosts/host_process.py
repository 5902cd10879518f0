"""`serve`: the host process. It begins, follows and ends the attempts of one run on this host, as frames ask for.

The process exits with its connection, at once and without cleaning up: the agents under way work on, each in a session
of its own with its output in files, and the host process of the next connection follows them. An attempt that is no
agent ends with the process.

An attempt begins only at `go`, after the runner has stored the host, and is ended only at `cancel`, or by a `hello`
that does not name the attempt. So a lost connection ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import anyio
import anyio.abc
from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Backend, ConversationRequest, DetachedBackend, Files, Output, Reply
from plait.backends.function_backend import error_of_code
from plait.backends.hosts.host_connection import (
    LONGEST,
    Frame,
    error_json,
    frame_line,
    read_frame,
)
from plait.backends.hosts.host_session import ROUNDING
from plait.backends.process.child_manifest import manifests_below
from plait.backends.process.child_process import ProgramBackend, sweep
from plait.backends.process.files_and_locks import (
    FolderLock,
    is_locked,
    lock_file,
    lock_folder,
    private_file,
    private_folder,
    replace_file,
)
from plait.backends.process.process_table import boot_id, send_signal, start_time
from plait.backends.running_turn import Cancellation, Turn, in_turn, question_in
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue, as_json, from_json
from plait.safe_text import one_line
from plait.task import Workspace

Build: TypeAlias = Callable[[Mapping[str, JsonValue]], Backend]
"""Makes the backend that a runner describes. Raises BackendUnavailable."""
_RETRY_S = 0.5
"""Seconds between two searches for a slot that another process of this host may have freed."""
SESSIONS = "sessions"


async def serve(build: Build, state: Path, version: str) -> None:
    """Serve one connection on standard input and output, with files below `state`. Exit the process when the connection
    ends. Return only after a probe, which reads the state of the host, and after a refusal.
    """
    reader, write = await _standard_streams()

    def refuse(why: str, message: str) -> None:
        write({"op": "refused", "why": why, "message": message, "version": version})

    try:
        hello = read_frame(await reader.readline())
        if hello["op"] == "probe":
            with tempfile.TemporaryFile(dir=private_folder(state)) as file:  # the disk may be full, or read-only
                file.write(b"\0" * 4096)
            # The attempts that hold slots, or the living agents, if there are more of them.
            agents = sum(manifest.is_alive for _, manifest in manifests_below(state))
            write({"op": "state", "version": version, "at_work": max(agents, slots_taken(state))})
            return None
        if hello["version"] != version:
            return refuse("version", f"this host has plait {version}")
        folder = run_folder(state, hello["key"], hello["host"])
        slots = Slots(slots_folder(state, hello["pool"]), hello["resources"])
        if (highest := take_fence(folder, epoch := hello["epoch"])) > epoch:
            return refuse(
                "fenced", f"the run was claimed by another process: epoch {highest}, and this is epoch {epoch}"
            )
        await sweep(folder, [attempt_folder(folder, attempt) for attempt in hello["keep"]])
    except (ValueError, KeyError, TypeError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.strerror is not None:
            message = f"{error.filename or state} cannot be used: {error.strerror}"
        return refuse("error", one_line(message))
    write({"op": "ready", "version": version})
    async with AsyncExitStack() as opened, anyio.create_task_group() as attempts:
        host = _Host(build, folder, state, slots, write=write, opened=opened, attempts=attempts)
        with _exiting():
            while line := await reader.readline():
                await host.handle(read_frame(line))
        os._exit(0)


@contextmanager
def _exiting() -> Generator[None]:
    """Exit the process after an unexpected error. The task group of the attempts would end all agents instead."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        os._exit(1)


async def _standard_streams() -> tuple[asyncio.StreamReader, Callable[[Frame], None]]:
    """Return the reader of standard input, and a function that writes frames to standard output.

    Everything else that this process and its children print goes to standard error.
    """
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LONGEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, _ = await loop.connect_write_pipe(_Output, output)
    unsent = bytearray()

    def send() -> None:
        transport.write(bytes(unsent))
        unsent.clear()

    def write(frame: Frame) -> None:
        line = frame_line(frame)
        if not unsent:  # the frames of a moment go out together: one wake of the reader
            loop.call_soon(send)
        unsent.extend(line)

    return reader, write


class _Output(asyncio.BaseProtocol):
    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - signature of asyncio
        os._exit(0)  # nobody reads any more


class _Host:
    """The attempts of a run on this host."""

    def __init__(
        self,
        build: Build,
        folder: Path,
        state: Path,
        slots: Slots,
        write: Callable[[Frame], None],
        opened: AsyncExitStack,
        attempts: anyio.abc.TaskGroup,
    ) -> None:
        """`opened` holds the backends, and `attempts` the attempts."""
        self._build, self._write, self._opened, self._attempts = build, write, opened, attempts
        self._folder = folder
        self._state = state
        self._sessions = state / SESSIONS
        self._slots = slots
        self._waiting: dict[str, Path | None] = {}
        """The attempts that wait for room and for the folder in which they write, the first to ask first."""
        self._needs: dict[str, Mapping[str, float]] = {}
        """The resources that each attempt takes."""
        self._folders: dict[str, FolderLock] = {}
        """The folders of the attempts that have one."""
        self._reported = set[str]()
        """The attempts whose wait for a folder was reported."""
        self._under_way: dict[str, anyio.CancelScope] = {}
        self._backends: dict[str, Backend] = {}
        self._making = anyio.Lock()
        self._cancellation = Cancellation()
        attempts.start_soon(self._look_for_slots)

    async def handle(self, frame: Frame) -> None:
        """Handle a frame of the runner. Unknown frames are ignored."""
        match frame["op"]:
            case "ask":
                self._needs[frame["attempt"]] = frame["needs"]
                self._waiting[frame["attempt"]] = await self._folder_written(frame.get("writes"))
                self._grant()
            case "go":
                attempt = frame["attempt"]
                self._under_way[attempt] = scope = anyio.CancelScope()
                self._needs[attempt] = frame["needs"]
                self._take(attempt)
                self._attempts.start_soon(self._run, attempt, frame, scope)
            case "cancel":
                await self._cancel(frame["attempt"])
            case "wind_down":
                self._cancellation.request()
            case "remove_files":
                await sweep(self._folder, ())
                await run_sync(remove_attempts, self._state, self._folder)
            case _:
                pass

    def _grant(self) -> None:
        for attempt, folder in [*self._waiting.items()]:
            if not self._lock(attempt, folder):
                continue
            if not self._take(attempt):
                self._unlock(attempt)
                return
            del self._waiting[attempt]
            self._reported.discard(attempt)
            self._write({"op": "slot", "attempt": attempt})

    def _take(self, attempt: str) -> bool:
        return self._slots.take(attempt, self._needs[attempt])

    async def _folder_written(self, writes: Mapping[str, Any] | None) -> Path | None:
        """Return the folder in which an attempt writes; None for one that writes in none, or shares it."""
        if writes is None:
            return None
        try:
            backend = await self._backend(writes["backend"])
        except BackendUnavailable:  # reported by the attempt
            return None
        if not isinstance(backend, ProgramBackend):
            return None
        place = writes["workspace"]
        return backend.folder_written(None if place is None else from_json(Workspace, place))

    def _lock(self, attempt: str, folder: Path | None) -> bool:
        """Return whether the attempt has its folder now, and report once if another writer has it."""
        if folder is None or attempt in self._folders:
            return True
        if (lock := lock_folder(folder)) is not None:
            self._folders[attempt] = lock
            return True
        if attempt not in self._reported:
            self._reported.add(attempt)
            output = Output("waiting", f"waits until nothing else writes in {folder}")
            self._write({"op": "output", "output": as_json(output), "attempt": attempt})
        return False

    def _unlock(self, attempt: str) -> None:
        if (lock := self._folders.pop(attempt, None)) is not None:
            lock.close()

    async def _look_for_slots(self) -> None:
        with _exiting():
            while True:
                await anyio.sleep(_RETRY_S)
                for attempt in self._under_way:  # one that is followed began without room if all was taken
                    self._take(attempt)
                self._grant()

    async def _cancel(self, attempt: str) -> None:
        self._waiting.pop(attempt, None)
        if (scope := self._under_way.get(attempt)) is not None:
            scope.cancel()  # `_run` reports the end
            return
        self._needs.pop(attempt, None)
        self._slots.free(attempt)
        self._unlock(attempt)
        self._grant()
        self._attempts.start_soon(self._end, attempt)

    async def _end(self, attempt: str) -> None:
        """End the processes of an attempt that this process has never followed."""
        with _exiting():
            await sweep(attempt_folder(self._folder, attempt), ())
            self._write({"op": "ended", "attempt": attempt})

    async def _run(self, attempt: str, frame: Frame, scope: anyio.CancelScope) -> None:
        with _exiting():
            answer: Frame = {"op": "ended"}
            try:
                with scope:
                    turn = Turn(self._cancellation, [(text, value) for text, value in frame["answers"]])
                    answer = {"op": "reply", "reply": as_json(await in_turn(turn, self._reply(attempt, frame)))}
            except BaseException as error:  # one that leaves the attempt would end all others of the task group
                answer = _failure(error)
            finally:
                del self._under_way[attempt], self._needs[attempt]
                self._slots.free(attempt)
                self._unlock(attempt)
            try:
                self._write({**answer, "attempt": attempt})
            except (TypeError, ValueError) as error:
                message = f"the reply is no JSON, so it cannot be sent: {one_line(str(error))}"
                self._write({**_error_frame(BackendError(ErrorKind.UNEXPECTED, message)), "attempt": attempt})
            self._grant()

    async def _reply(self, attempt: str, frame: Frame) -> Reply:
        backend = await self._backend(frame["backend"])
        folder = attempt_folder(self._folder, attempt)
        request = self._request(attempt, frame, Files(folder, self._sessions))
        if not request.attaches:  # else the program that it follows has the lock
            written = await self._folder_written(frame.get("writes"))
            while not self._lock(attempt, written):  # noqa: ASYNC110 - another program has it, and tells nobody of its end
                await anyio.sleep(_RETRY_S)
            if (lock := self._folders.get(attempt)) is not None:
                request = replace(request, keeps=lock.descriptors)
        if request.attaches:
            await self._require_left(backend, request, folder)
        elif folder.exists():  # an earlier connection has left it
            await sweep(folder, ())
            await run_sync(shutil.rmtree, folder)
        if request.session_id is None and not request.attaches and (new := backend.new_session_id()) is not None:
            request = replace(request, session_id=new)
        async with backend.open(request) as conversation:
            return await conversation.send(frame["prompt"])

    async def _require_left(self, backend: Backend, request: ConversationRequest, folder: Path) -> None:
        """Raise BackendError (crashed) if nothing is left of the attempt that is to be followed."""
        turn = None
        if isinstance(backend, DetachedBackend):
            turn = await run_sync(backend.inspect, Files(folder, self._sessions))
        if turn is not None and turn.session_id is not None:
            request.on_session(turn.session_id)
        if turn is None or turn.state == "dead":
            await sweep(folder, ())
            has_session = turn is not None and turn.session_id is not None
            raise BackendError(
                ErrorKind.CRASHED, "the attempt ended with the process that followed it", continues_session=has_session
            )

    def _request(self, attempt: str, frame: Frame, files: Files) -> ConversationRequest:
        def report(op: str, name: str, held: object) -> None:
            with suppress(TypeError, ValueError):  # no JSON
                self._write({"op": op, name: as_json(held) if is_dataclass(held) else held, "attempt": attempt})

        return replace(
            from_json(ConversationRequest, frame["request"]),
            files=files,
            on_output=partial(report, "output", "output"),
            on_session=partial(report, "session", "session_id"),
            on_allowance=partial(report, "allowance", "limits") if frame.get("wants_allowance") else None,
        )

    async def _backend(self, described: Mapping[str, JsonValue]) -> Backend:
        """Return the backend described, made once. Raise BackendUnavailable."""
        key = json.dumps(described)
        if key not in self._backends:
            async with self._making:
                if key not in self._backends:
                    backend = self._build(described)
                    if isinstance(backend, AbstractAsyncContextManager):
                        await self._opened.enter_async_context(cast("AbstractAsyncContextManager[Any]", backend))
                    self._backends[key] = backend
        return self._backends[key]


def _failure(error: BaseException) -> Frame:
    """Return the frame for an attempt that `error` has ended, and not its cancel scope."""
    if (question := question_in(error)) is not None:
        return {"op": "asked", "question": as_json(question.question)}
    if isinstance(error, BackendError):
        return _error_frame(error)
    if isinstance(error, BackendUnavailable):
        return _error_frame(BackendError(ErrorKind.UNAVAILABLE, str(error)))
    failure = error_of_code(error)
    if isinstance(error, asyncio.CancelledError):
        failure.message = f"the backend raised {error!r}, but plait had not cancelled the call"
    return _error_frame(failure)


def _error_frame(error: BackendError) -> Frame:
    return {"op": "error", "error": error_json(error)}


# What host processes share on a host: the fence of each run, and the slots of the machine.
#
#     <state>/<run>/<host>/fence.json      the highest epoch, and the host process that serves it
#     <state>/<run>/<host>/.over           the run is over
#     <state>/<run>/<host>/TASK/ATTEMPT/   the files of an attempt
#     <state>/sessions/                    shared by all attempts
#     <state>/slots/MACHINE/ID.json        the resources of an attempt that has room, locked by it; machines with one
#                                          home folder have room of their own, as have workers of Dask on a machine
#
# One host process serves a run at a time. A host process that takes the fence kills the previous one, which may belong
# to an owner whose connection broke without notice, or to a suspended owner whose lease expired. Agents have sessions
# of their own and continue. So a frame that an earlier owner sends afterwards is refused or never read.
#
# The system frees the room of a process that is killed. An attempt that outlives its host process then holds none until
# it is followed again.
#
# The files of the attempts are removed only after the runner has reported the end of the run, because a later owner may
# collect the answer of an attempt that ended unobserved. Any host process that serves the end of a run removes the
# fences of runs that ended 30 days ago.

_NAME, _OVER = "fence.json", ".over"
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_ATTEMPT = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?")
_KEY = re.compile(r"[0-9a-f]{16,64}")
_END_LIMIT = 5.0
"""Seconds for a killed host process to be gone."""
_FENCE_S = 30 * 86400.0
"""Seconds after the end of a run for which its fence is kept."""


def state_folder() -> Path:
    """Return the folder for the files of attempts on this host: below XDG_STATE_HOME, else below ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "plait" / "hosts"


def run_folder(state: Path, key: str, host: str) -> Path:
    """Return the folder of a run on the host named `host`. Raise ValueError if a name could lead elsewhere."""
    if not _KEY.fullmatch(key) or not _ID.fullmatch(host):
        raise ValueError(f"the run {key!r} or the host {host!r} is no name of plait")
    return state / key / host


def attempt_folder(run: Path, name: str) -> Path:
    """Return the folder of the attempt `task/attempt`. Raise ValueError if the name could lead elsewhere."""
    task, _, attempt = name.rpartition("/")
    if not _ID.fullmatch(task) or not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"{name!r} is no attempt of plait")
    return run.joinpath(task, attempt)


def take_fence(folder: Path, epoch: int) -> int:
    """Make this process the host process of the run, and end the one before, unless that has a higher epoch. Return the
    epoch of the fence.
    """
    private_folder(folder)
    with _locked(folder):
        before = dict[str, Any]()
        with suppress(OSError, ValueError):
            before = json.loads((folder / _NAME).read_bytes())
            if before["epoch"] > epoch:
                return int(before["epoch"])
        pid = os.getpid()
        if before and before["boot"] == boot_id() and before["pid"] != pid and before["started"].isdecimal():
            _kill(before["pid"], before["started"])
        holder = {"epoch": epoch, "boot": boot_id(), "pid": pid, "started": start_time(pid) or ""}
        replace_file(folder / _NAME, json.dumps(holder))
        (folder / _OVER).unlink(missing_ok=True)
    return epoch


def remove_attempts(state: Path, folder: Path) -> None:
    """Remove the attempts of the run in `folder`, which is over and has no processes, and all that earlier calls have
    left below `state`. Errors are ignored: a later call tries again.
    """
    with _locked(folder):
        private_file(folder / _OVER, "")
    oldest = time.time() - _FENCE_S
    for over in state.glob(f"*/*/{_OVER}"):
        with suppress(OSError), _locked(over.parent):
            ended = over.stat().st_mtime  # raises if the run goes on
            for path in over.parent.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            if ended < oldest:
                shutil.rmtree(over.parent, ignore_errors=True)
                over.parent.parent.rmdir()


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    descriptor = lock_file(folder / "fence.lock", wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


def _kill(pid: int, started: str) -> None:
    """End the process that has this id since the time `started`, and wait until it is gone."""
    until = time.monotonic() + _END_LIMIT
    while start_time(pid) == started and time.monotonic() < until:
        with suppress(OSError):
            send_signal(pid, int(started), signal.SIGKILL)
        time.sleep(0.005)


def slots_taken(state: Path) -> int:
    """Return the number of attempts that have room on this machine, of any process."""
    return sum(map(is_locked, slots_folder(state).rglob("*.json")))


def slots_folder(state: Path, pool: str = "") -> Path:
    """Return the folder with the files of `Slots`. Raise ValueError if the name could lead elsewhere."""
    if pool and not _ID.fullmatch(pool):
        raise ValueError(f"{pool!r} is no host of plait")
    return state / "slots" / platform.node() / pool


class Slots:
    """The room of a host, its `resources`, which processes share with files in `folder`; and the attempts of this
    process that have some of it.
    """

    def __init__(self, folder: Path, resources: Mapping[str, float]) -> None:
        self._folder = private_folder(folder)
        self._resources = resources
        self._locks: dict[str, tuple[Path, int]] = {}
        """The file and the descriptor of each attempt that has room."""

    def take(self, attempt: str, needs: Mapping[str, float]) -> bool:
        """Take the resources that the attempt needs. Return False if too many are taken, also by other processes."""
        if attempt in self._locks:
            return True
        with _locked(self._folder):
            used = self._used()
            if any(used[name] + need > self._resources.get(name, 0) + ROUNDING for name, need in needs.items()):
                return False
            file = self._folder / f"{secrets.token_hex(8)}.json"
            descriptor = lock_file(file)
            assert descriptor is not None
            self._locks[attempt] = file, descriptor
            os.write(descriptor, json.dumps(needs).encode())
        return True

    def free(self, attempt: str) -> None:
        """Give up the room of the attempt, if any."""
        if (lock := self._locks.pop(attempt, None)) is not None:
            file, descriptor = lock
            file.unlink(missing_ok=True)
            os.close(descriptor)

    def _used(self) -> Counter[str]:
        """Return the resources taken by any process, and remove the files of those that were killed."""
        used = Counter[str]()
        for file in self._folder.glob("*.json"):
            if is_locked(file):
                used.update(json.loads(file.read_bytes()))
            else:
                file.unlink(missing_ok=True)
        return used
