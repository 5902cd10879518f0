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
import shutil
import sys
import tempfile
import traceback
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
from plait.backends.function_backend import unexpected
from plait.backends.hosts.host_fence import (
    LowEpoch,
    Slots,
    attempt_folder,
    remove_attempts,
    run_folder,
    slots_taken,
    take_fence,
)
from plait.backends.hosts.host_frames import (
    LONGEST,
    Frame,
    error_json,
    frame_line,
    read_frame,
)
from plait.backends.process.child_manifest import manifests_below
from plait.backends.process.child_process import ProgramBackend, sweep
from plait.backends.process.files_and_locks import FolderLock, lock_folder, private_folder
from plait.backends.running_turn import Cancellation, Turn, in_turn, question_in
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue, as_json, from_json
from plait.safe_text import one_line
from plait.task import Workspace

Build: TypeAlias = Callable[[Mapping[str, JsonValue]], Backend]
"""Makes the backend that a runner describes. Raises BackendUnavailable."""
_Going: TypeAlias = tuple[str, Frame, anyio.CancelScope]
"""An attempt that the runner lets begin: its name, its frame `go`, and the scope that ends it."""
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
        folder, slots = run_folder(state, hello["key"], hello["host"]), Slots(state, hello["slots"])
        take_fence(folder, hello["epoch"])
        await sweep(folder, [attempt_folder(folder, attempt) for attempt in hello["keep"]])
        slots.taken()  # raises where files cannot be locked
    except LowEpoch as error:
        return refuse("fenced", str(error))
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
        """The attempts that wait for a slot and for the folder in which they write, the first to ask first."""
        self._folders: dict[str, FolderLock] = {}
        """The folders of the attempts that have one."""
        self._told = set[str]()
        """The attempts whose wait for a folder was reported."""
        self._under_way: dict[str, anyio.CancelScope] = {}
        self._idle: list[asyncio.Future[_Going]] = []
        """The idle workers. Waking an idle worker costs a third of starting a new one."""
        self._earlier_tasks = {path.name for path in folder.iterdir()}
        """The tasks that an earlier connection may have left folders of."""
        self._backends: dict[str, Backend] = {}
        self._making = anyio.Lock()
        self._cancellation = Cancellation()
        attempts.start_soon(self._look_for_slots)

    async def handle(self, frame: Frame) -> None:
        """Handle a frame of the runner. Unknown frames are ignored."""
        match frame["op"]:
            case "ask":
                self._waiting[frame["attempt"]] = await self._folder_written(frame.get("writes"))
                self._grant()
            case "go":
                attempt = frame["attempt"]
                self._under_way[attempt] = scope = anyio.CancelScope()
                self._slots.take(attempt)
                if self._idle:
                    self._idle.pop().set_result((attempt, frame, scope))
                else:
                    self._attempts.start_soon(self._work, (attempt, frame, scope))
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
            if not self._slots.take(attempt):
                self._unlock(attempt)
                return
            del self._waiting[attempt]
            self._told.discard(attempt)
            self._write({"op": "slot", "attempt": attempt})

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
        """Return whether the attempt has its folder now, and tell once if another writer has it."""
        if folder is None or attempt in self._folders:
            return True
        if (lock := lock_folder(folder)) is not None:
            self._folders[attempt] = lock
            return True
        if attempt not in self._told:
            self._told.add(attempt)
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
                for attempt in self._under_way:  # one that is followed began without a slot if all were taken
                    self._slots.take(attempt)
                self._grant()

    async def _cancel(self, attempt: str) -> None:
        self._waiting.pop(attempt, None)
        if (scope := self._under_way.get(attempt)) is not None:
            scope.cancel()  # `_run` reports the end
            return
        self._slots.free(attempt)
        self._unlock(attempt)
        self._grant()
        self._attempts.start_soon(self._end, attempt)

    async def _end(self, attempt: str) -> None:
        """End the processes of an attempt that this process has never followed."""
        with _exiting():
            await sweep(attempt_folder(self._folder, attempt), ())
            self._write({"op": "ended", "attempt": attempt})

    async def _work(self, going: _Going) -> None:
        """Run an attempt, then wait for the next."""
        with _exiting():
            await self._run(*going)
            while True:
                idle: asyncio.Future[_Going] = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                await self._run(*await idle)

    async def _run(self, attempt: str, frame: Frame, scope: anyio.CancelScope) -> None:
        answer: Frame = {"op": "ended"}
        try:
            with scope:
                turn = Turn(self._cancellation, [(text, value) for text, value in frame["answers"]])
                answer = {"op": "reply", "reply": as_json(await in_turn(turn, self._reply(attempt, frame)))}
        except BaseException as error:  # one that leaves the attempt would end all others of the task group
            answer = _failure(error)
        finally:
            del self._under_way[attempt]
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
        elif folder.parent.name in self._earlier_tasks and await run_sync(folder.exists):
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
    failure = unexpected(error)
    if isinstance(error, asyncio.CancelledError):
        failure.message = f"the backend raised {error!r}, but plait had not cancelled the call"
    return _error_frame(failure)


def _error_frame(error: BackendError) -> Frame:
    return {"op": "error", "error": error_json(error)}
