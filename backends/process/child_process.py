"""Start, follow, adopt, end and sweep children: the programs that run for a turn. No child is left behind.

A child has a session of its own and exchanges everything by files, so the child does not depend on its starter: the
input is a file without a name, the output goes into files in a folder of the child, and `child.json` there holds the
child's identity. If the starter is killed, the child works on, and another process follows the same files to the same
end. With a pipe, the answer would be lost with its reader, and any process with a copy of the pipe could delay the end.

    running: spawned -> followed* -> stopped (ended, swept, reaped)        child.json -> over.json

Leaving `running` or `adopted` ends the whole tree, whatever the reason (`Child.stop`). The children of a killed process
are found by the marker in `child.json`, which is written before the start.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import ClassVar, Literal, Self

import anyio
import anyio.lowlevel
from anyio.to_thread import run_sync

from plait.backends.backend_protocol import ConversationRequest, Files, Placeable
from plait.backends.process.child_manifest import (
    ChildManifest,
    manifests_below,
    mark_over,
    read_manifest,
    write_manifest,
)
from plait.backends.process.files_and_locks import HELD, lock, name_held, private_folder
from plait.backends.process.process_table import (
    PREFIX,
    Process,
    ProcessTag,
    boot_id,
    first_start_time,
    kill_tree,
    library,
    mark,
    offer_to_oom_killer,
    send_signal,
    signal_tree,
    start_time,
)
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import value
from plait.safe_text import one_line
from plait.task import Workspace

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL, for agents to end their tools."""
MOST_OUTPUT = 4 * 2**30
"""Bytes; a child with more output is ended before the disk is full."""
KILL_LIMIT = 5.0
"""Seconds; the kernel holds processes that live longer."""
_QUICK, _SLOW = 0.02, 1.0
"""Seconds between two reads of the output. A read may be late by a fifth of the silence before."""
_POLL = 0.3  # seconds between two checks for the end of a child, on a system without pidfd
LONGEST_LINE = 8 * 2**20
"""Bytes; longer lines are left out."""
_PIECE = 2**16  # bytes handed on without a pause
_ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
)  # fmt: skip


@value
class Launch:
    """A program to start."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    """The whole environment; see `child_environment`."""
    cwd: Path
    stdin: bytes
    """The whole input."""
    keeps: Sequence[int] = ()
    """Descriptors to inherit."""
    note: Mapping[str, str] = field(default_factory=dict[str, str])
    """Small facts to keep in `child.json`."""
    guarded: bool = False
    """Whether the child is killed when this process ends, by whatever cause."""


@dataclass(eq=False, kw_only=True)
class ProgramBackend(Placeable):
    """What the backends share that run programs for a turn: coding agents, and commands.

    Cancelling a turn ends the program and all its child processes: SIGTERM, three seconds, SIGKILL.
    """

    kind: ClassVar[str]
    """The backend's kind, as named in plans."""

    cwd: str | os.PathLike[str] | None = None
    """Folder in which the program works. None uses the current folder of this process."""
    pass_env: Sequence[str] = ()
    """Names of further environment variables for the program. It otherwise gets only the variables that any program
    needs, and an agent its own keys.
    """
    on_runner_death: Literal["adopt", "kill"] = "adopt"
    """Fate of a turn if this process is killed, provided that the request has files. "adopt": the program works on, and
    the process that resumes the run adopts the turn. "kill": the program is ended.
    """

    @property
    def writes(self) -> bool:
        """Whether the program may write in its folder: then no other one of plait's writes there meanwhile."""
        return True

    @property
    def folder(self) -> Path:
        """The folder in which the program works. Raises BackendUnavailable if the folder would be the working directory
        of this process, or lie in it, and that directory has been removed.
        """
        try:
            return Path(self.cwd or ".").expanduser().absolute()
        except FileNotFoundError:
            raise BackendUnavailable(
                f"the working directory of this process has been removed; name another folder for {self.kind} as cwd"
            ) from None

    def working_in(self, place: Workspace | None) -> Self:
        """Return this backend in the folder of a task. Raises BackendError (invalid_request) if a value in its path
        leads out of the folder that is written out before.
        """
        if place is None or (place.cwd == "." and place.below is None):
            return self
        root = self.folder / Path(place.cwd).expanduser()
        if place.below is None:
            return replace(self, cwd=root)
        try:
            real = os.path.realpath(root)
            folder = Path(os.path.realpath(os.path.join(real, place.below)))  # noqa: PTH118 - an absolute part wins
        except ValueError as error:
            raise BackendError(ErrorKind.INVALID_REQUEST, f"the cwd has an {error}") from None
        if not folder.is_relative_to(real):
            message = f"the cwd {one_line(place.below, 200)!r} leads out of {real}; only a cwd that is written out may"
            raise BackendError(ErrorKind.INVALID_REQUEST, message)
        return replace(self, cwd=folder)

    def folder_written(self, place: Workspace | None) -> Path | None:
        """Return the folder in which the program of a task may write; None if it may not, or cannot work there, which
        its attempt reports.
        """
        try:
            return self.working_in(place).folder.resolve() if self.writes else None
        except (BackendError, BackendUnavailable, OSError, RuntimeError):
            return None

    @contextmanager
    def files_of(self, request: ConversationRequest) -> Generator[tuple[Files, bool]]:
        """Yield the folders of a turn, temporary ones if the request has none, and whether the programs of the turn end
        with this process.
        """
        if request.files is not None:
            yield request.files, self.on_runner_death == "kill"
            return
        with scratch() as folder:
            yield Files(folder / "turn" / "1", folder / "sessions"), True


def child_environment(passes: Collection[str] = ()) -> dict[str, str]:
    """Return the part of this process's environment for a child.

    The part holds the variables that programs need to run, the names in `passes`, and the markers of this process.
    """
    names = {*_ENVIRONMENT, *passes}
    return {name: text for name, text in os.environ.items() if name in names or name.startswith(("LC_", PREFIX, HELD))}


def own_variables(request: ConversationRequest) -> Mapping[str, str]:
    """Return the variables of the task alone for its program, and the one that names its locked folder."""
    own: Mapping[str, str] = {} if request.workspace is None else request.workspace.env
    return {**own, **name_held(request.keeps)} if request.keeps else own


@asynccontextmanager
async def running(start: Launch, folder: Path) -> AsyncGenerator[Child]:
    """Start a child with its files in `folder`, made for this user alone; leaving ends the child's whole tree.

    Raise BackendUnavailable if the program or its working folder is missing. Raise BackendError (transient) if the
    machine has no room for another process or its files, and (invalid_request) if no program accepts the arguments.
    Raise FileExistsError if the folder has the files of another child.
    """
    async with _stopped(_spawn(start, folder)) as child:
        yield child


@asynccontextmanager
async def adopted(folder: Path) -> AsyncGenerator[Child | None]:
    """Yield the child that another process started with its files in `folder`; None without a child.

    Leaving ends the child's whole tree, as in `running`.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        yield None
        return
    async with _stopped(Child(folder, manifest, None)) as child:
        yield child


@asynccontextmanager
async def _stopped(child: Child) -> AsyncGenerator[Child]:
    try:
        yield child
    finally:
        try:
            await child.stop()
        finally:
            if child.is_gone:
                _close(child.folder, child.manifest)


async def sweep(run_folder: Path, keep: Collection[Path]) -> int:
    """Kill the trees of all children with files below `run_folder`, except below the folders in `keep`.

    Return the number of killed processes. Children that are over cost nothing; children of another boot are not
    touched. Cancellation takes effect after the sweep.
    """
    return await run_sync(_sweep, run_folder, tuple(keep))


def _sweep(run_folder: Path, keep: Sequence[Path]) -> int:
    folders = [folder.resolve() for folder in keep]
    tags = {
        folder: manifest.tag
        for folder, manifest in manifests_below(run_folder)
        if not any(folder.is_relative_to(one) for one in folders)
    }
    if not tags:
        return 0
    killed, is_gone = kill_tree(list(tags.values()), KILL_LIMIT)
    if is_gone:
        for folder in tags:
            mark_over(folder)
    return killed


def _spawn(start: Launch, folder: Path) -> Child:
    if read_manifest(folder) is not None:
        raise FileExistsError(f"{folder} has the files of another child")
    manifest = ChildManifest(secrets.token_hex(8), boot_id(), 0, "", start.note, guarded=start.guarded)
    try:
        private_folder(folder)
        write_manifest(folder, manifest)
        if start.guarded:
            WATCHDOG.watch(manifest.tag)
        ours = _popen(start, folder, manifest.marker)
    except (OSError, BackendError, BackendUnavailable) as error:
        _close(folder, manifest)
        raise _unwritten(start, error) if isinstance(error, OSError) else error from None
    mark(ours.pid, manifest.marker)
    offer_to_oom_killer(ours.pid)
    manifest = replace(manifest, pid=ours.pid, started=first_start_time(ours.pid))
    child = Child(folder, manifest, ours)
    try:
        write_manifest(folder, manifest)
        if start.guarded:
            WATCHDOG.watch(manifest.tag)
    except BaseException as error:
        child.kill_at_once()
        _close(folder, manifest)
        if isinstance(error, OSError):
            raise _unwritten(start, error) from None
        raise
    return child


def _popen(start: Launch, folder: Path, marker: str) -> subprocess.Popen[bytes]:
    with ExitStack() as files:
        stdin = files.enter_context(tempfile.TemporaryFile(dir=folder))
        stdin.write(start.stdin)
        stdin.seek(0)
        outputs = list[int]()
        for name in ("stdout", "stderr"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            outputs.append(os.open(folder / name, flags, 0o600))
            files.callback(os.close, outputs[-1])
        with suppress(OSError):  # a file system without locks
            lock(outputs[0])  # while the child is being started: the lock ends with the last copy of the descriptor
        try:
            # In the loop's thread: a cancellation could lose the result of another thread, and the child with it.
            return subprocess.Popen(  # noqa: S603 - no shell; the command is the user's own
                list(start.argv),
                stdin=stdin,
                stdout=outputs[0],
                stderr=outputs[1],
                cwd=start.cwd,
                env={**start.environment, PREFIX + marker: "1"},
                pass_fds=tuple(start.keeps),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise _refused(start, error) from None


def _refused(start: Launch, error: OSError | ValueError) -> BackendError | BackendUnavailable:
    program = start.argv[0]
    if not isinstance(error, OSError):  # a NUL, or a lone surrogate
        return BackendError(ErrorKind.INVALID_REQUEST, one_line(f"cannot start {program}: an argument has an {error}"))
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        if not start.cwd.is_dir():
            return BackendUnavailable(f"there is no folder {start.cwd} to work in; name another folder with cwd")
        if os.sep in program and Path(program).is_file():
            what = "the interpreter of its first line, or its loader, is missing; install that"
            return BackendUnavailable(f"{program} cannot run: {what}")
        return BackendUnavailable(f"there is no program {program}; install it, or name its path with command")
    if isinstance(error, PermissionError):
        return BackendUnavailable(f"{program} may not be executed in {start.cwd}: {error.strerror}")
    if error.errno == errno.ENOEXEC:
        return BackendUnavailable(f"{program} is not a program for this machine; name another program with command")
    kind = ErrorKind.INVALID_REQUEST if error.errno == errno.E2BIG else ErrorKind.TRANSIENT
    return BackendError(kind, one_line(f"cannot start {program}: {error.strerror}"))


def _unwritten(start: Launch, error: OSError) -> BackendError:
    text = f"cannot start {start.argv[0]}, because its files cannot be written: {error.strerror or error}"
    return BackendError(ErrorKind.TRANSIENT, one_line(text))


def _close(folder: Path, manifest: ChildManifest) -> None:
    """Record that no process of the child is left."""
    mark_over(folder)
    WATCHDOG.unwatch(manifest.marker)


@dataclass(eq=False)
class Child:
    """A running program and its files."""

    folder: Path
    manifest: ChildManifest
    ours: subprocess.Popen[bytes] | None
    """None for a child that another process started."""
    status: int | None = None
    """The exit status, negative for a signal; None before the stop, and for a child of another process."""
    skipped: int = 0
    """Lines left out because of their length."""
    is_gone: bool = False
    """Whether the child was stopped and no process of its tree is left."""
    _ended: anyio.Event = field(default_factory=anyio.Event, repr=False)
    _signalled: Sequence[Process] = ()
    """The processes with a SIGTERM; after the end of their parents, nothing else may lead to them."""

    async def follow(
        self, on_line: Callable[[bytes], bool], *, idle: float, until: float, name: str = "stdout"
    ) -> None:
        """Hand on every line of the output `name`, from the first, until the child has ended and all lines are read.

        Return earlier if `on_line` returns True: enough. Raise BackendError (timeout) after `idle` seconds without
        output, or at `until`, a time of `anyio.current_time`. Raise BackendError (invalid_output) for more output than
        MOST_OUTPUT. Cancellation does not touch the child.
        """
        failure: Exception | None = None
        async with self._watched():
            try:
                with (self.folder / name).open("rb", buffering=0) as output:
                    other = self.folder / ("stderr" if name == "stdout" else "stdout")
                    await self._read(output, other, on_line, idle, until)
            except Exception as error:
                failure = error
        if failure is not None:  # raised here, outside the task group, to keep its type
            raise failure

    async def wait(self, seconds: float) -> None:
        """Wait until the child has ended, or `seconds` have passed."""
        with anyio.move_on_after(seconds):
            async with self._watched():
                await self._ended.wait()

    @asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None]:
        """Watch for the end of the child within the context."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            yield
            group.cancel_scope.cancel()

    async def _read(
        self, output: FileIO, other: Path, on_line: Callable[[bytes], bool], idle: float, until: float
    ) -> None:
        lines = Lines(output.read, on_line)
        latest, last = anyio.current_time(), None
        while True:
            # In this order: after its end, the child's own output is complete. The output of strays may never end.
            ended, now = self._ended.is_set(), anyio.current_time()
            size = os.fstat(output.fileno()).st_size
            if ended and last is None:
                last = size
            if size < lines.total:  # a process has emptied the file, as `> /dev/stdout` does
                output.seek(0)
                lines.restart()
            more = lines.total < (size if last is None else min(size, last))
            if more:
                latest = now
                lines.pump()
            elif ended:
                lines.flush()
            self.skipped = lines.skipped
            if lines.enough or (ended and not more):
                return
            with suppress(OSError):
                size += os.stat(other).st_size  # noqa: PTH116 - called all the time
            self._check(size, now - latest, idle, now >= until)
            if more:
                await anyio.lowlevel.checkpoint()
                continue
            pause, now = min(max((now - latest) / 5, _QUICK), _SLOW), anyio.current_time()
            # All silent children are read at the same moments: a hundred children wake the loop once.
            awake = now + pause if pause < _SLOW else (now // _SLOW + 1) * _SLOW
            with anyio.move_on_after(min(awake, latest + idle, until) - now):
                await self._ended.wait()

    def _check(self, written: int, silent: float, idle: float, late: bool) -> None:
        if written > MOST_OUTPUT:
            raise BackendError(
                ErrorKind.INVALID_OUTPUT, f"more than {MOST_OUTPUT >> 30} GiB of output", continues_session=True
            )
        if late:
            raise BackendError(ErrorKind.TIMEOUT, "the turn took longer than its turn_timeout", continues_session=True)
        if silent >= idle:
            raise BackendError(ErrorKind.TIMEOUT, f"no output for {idle:g} s (idle_timeout)", continues_session=True)

    def tail(self, name: str, size: int = 2**16) -> str:
        """Return the last `size` bytes of the child's file `name`, as text."""
        with suppress(OSError), (self.folder / name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace")
        return ""

    def interrupt(self) -> None:
        """Send SIGINT to the child, not to the rest of its tree. Do nothing if the child has ended."""
        manifest = self.manifest
        if manifest.is_of_this_boot and manifest.started.isdecimal():
            with suppress(OSError):
                send_signal(manifest.pid, int(manifest.started), signal.SIGINT)

    async def stop(self) -> None:
        """End the child's process tree, and return when no process is left.

        Send SIGTERM, wait GRACE seconds, and send SIGKILL until the tree is empty. Reap the child last: until then the
        child keeps its number, and no other process can be hit. Cancellation by a scope does not shorten the stop;
        native cancellation kills at once; if this process is killed meanwhile, the watchdog kills the tree. Do nothing
        about a child of another boot.
        """
        if not self.manifest.is_of_this_boot:
            return
        try:
            with anyio.CancelScope(shield=True):
                if not self._has_ended():
                    with suppress(OSError):  # no process can be started
                        WATCHDOG.watch(self.manifest.tag)
                    with suppress(OSError):
                        # SIGCONT, because a stopped process does not react to SIGTERM.
                        self._signalled = signal_tree([self.manifest.tag], signal.SIGTERM, signal.SIGCONT)
                    await self.wait(GRACE)
                # A thread outside the limit: the kill must not wait for the threads of other work.
                self.is_gone = await run_sync(self._kill, KILL_LIMIT, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            self.kill_at_once()
            raise
        finally:
            self._reap()

    def kill_at_once(self) -> None:
        """Send SIGKILL to the tree without SIGTERM before, in this thread, for at most two seconds."""
        self.is_gone = self._kill(2.0)
        self._reap()

    def _kill(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        try:
            is_gone = kill_tree([self.manifest.tag], seconds, self._signalled)[1]
        except OSError:  # no descriptor is left to read the table with: kill at least the child's group
            is_gone = False
            if self.ours is not None and self.ours.returncode is None:
                with suppress(OSError):
                    os.killpg(self.ours.pid, signal.SIGKILL)
        while not self._has_ended() and time.monotonic() < until:
            time.sleep(0.01)  # the table did not show the end
        return is_gone

    def _has_ended(self) -> bool:
        if self.ours is None:
            return not self.manifest.is_alive
        if self.ours.returncode is not None:
            return True
        try:
            # The child stays a zombie: its number must stay its own until the whole tree is gone.
            return os.waitid(os.P_PID, self.ours.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # other code of this process has reaped the child
            return True
        except AttributeError:  # macOS before Python 3.13
            return self.ours.poll() is not None

    def _reap(self) -> None:
        if self.ours is not None and self._has_ended():
            self.status = self.ours.wait()

    async def _watch(self) -> None:
        """Set `_ended` when the child has ended. A child of this process stays a zombie."""
        try:
            descriptor = os.pidfd_open(self.manifest.pid)
        except (OSError, AttributeError):
            descriptor = None
        try:
            while not self._has_ended():
                if descriptor is None:
                    await anyio.sleep(_POLL)
                else:
                    await anyio.wait_readable(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._ended.set()


class Lines:
    """Hand each line from `read` on to `on_line`, without its end, until `on_line` returns True: enough."""

    def __init__(self, read: Callable[[int], bytes], on_line: Callable[[bytes], bool]) -> None:
        self._read = read
        self._on_line = on_line
        self._rest = bytearray()
        self._skipping = False
        self.skipped = 0
        """The number of lines left out."""
        self.total = 0
        """Bytes read so far."""
        self.enough = False

    def pump(self) -> int:
        """Read one piece and hand its lines on. Return the bytes of the piece."""
        piece = self._read(_PIECE)
        self.total += len(piece)
        start = 0
        while not self.enough and (end := piece.find(b"\n", start)) >= 0:
            self._line(piece[start:end])
            start = end + 1
        if not self.enough:
            self._keep(piece[start:])
        return len(piece)

    def flush(self) -> None:
        """Hand on the rest behind the last line end as a line."""
        if self._rest or self._skipping:
            self._line(b"")

    def restart(self) -> None:
        """Begin at the start of the file again."""
        self._rest.clear()
        self._skipping = False
        self.total = 0

    def _keep(self, part: bytes) -> None:
        if self._skipping or len(self._rest) + len(part) > LONGEST_LINE:
            self._skipping = True
            self._rest.clear()
        else:
            self._rest += part

    def _line(self, part: bytes) -> None:
        self._keep(part)
        if self._skipping:
            self._skipping = False
            self.skipped += 1
        else:
            self.enough = self._on_line(bytes(self._rest))
        self._rest.clear()


# Kill the children of this process when this process ends, whatever ends it.
#
# The first use starts one process, the watchdog, and sends the tags of the children to it through a socket. The socket
# ends with this process, even by kill -9; the watchdog then kills all processes of the tags, and exits.
# PR_SET_PDEATHSIG would not do: the signal follows the end of a thread, reaches the child but not the child's tools,
# and is Linux's alone.

_PROGRAM = Path(__file__).with_name("_watchdog_main.py")
# SIGPIPE could kill this process, and a full socket of a stuck watchdog must not block it.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_NO_WAIT = _NO_SIGNAL | socket.MSG_DONTWAIT


class _Watchdog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._watched: dict[str, bytes] = {}

    def watch(self, tag: ProcessTag, folder: Path | None = None) -> None:
        """Have the processes of a tag killed, and `folder` removed, when this process ends, until `unwatch`.

        Call again when more of the tag is known. Raise OSError if no process can be started.
        """
        with self._lock:
            line = json.dumps([*tag, None if folder is None else os.fspath(folder)]).encode() + b"\n"
            self._watched[tag.marker] = line
            self._send(line)

    def unwatch(self, marker: str) -> None:
        """Stop watching a marker: no process carries it any more."""
        with self._lock:
            if self._watched.pop(marker, None) is not None:
                with suppress(OSError):  # no watchdog can be started, so none will kill anything
                    self._send(json.dumps([marker]).encode() + b"\n")

    def reset_after_fork(self) -> None:
        """Drop everything in a forked copy: the children die with the original, whose end the copy must not hide."""
        if self._socket is not None:
            self._socket.close()
        self._lock, self._socket, self._watched = threading.Lock(), None, {}

    def _send(self, line: bytes) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(line, _NO_WAIT)
            except OSError:  # the watchdog was killed: a new watchdog receives everything
                self._drop(self._socket)
            else:
                return
        self._pid, self._socket = _start_watchdog()
        self._socket.sendall(b"".join(self._watched.values()), _NO_SIGNAL)

    def _drop(self, ours: socket.socket) -> None:
        self._socket = None
        with suppress(OSError):
            ours.close()  # a watchdog that lives after all waits for the end of this process
        with suppress(OSError):
            os.waitpid(self._pid, os.WNOHANG)


def _start_watchdog() -> tuple[int, socket.socket]:
    """Start a watchdog. Return its process number, and the end of the socket to its standard input."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            watched = [str(os.getpid()), start_time(os.getpid()) or "", library()]
            program = [sys.executable, "-I", "-S", str(_PROGRAM), *watched]
            standard = (theirs.fileno(), nowhere.fileno(), nowhere.fileno())
            actions = [(os.POSIX_SPAWN_DUP2, descriptor, as_) for as_, descriptor in enumerate(standard)]
            # `subprocess` would warn at exit of a child that is meant to outlive this process.
            return os.posix_spawn(program[0], program, {}, file_actions=actions, setsid=True), ours
    except BaseException:
        ours.close()
        raise


WATCHDOG = _Watchdog()
"""The watchdog of this process."""
os.register_at_fork(after_in_child=WATCHDOG.reset_after_fork)


@contextmanager
def scratch() -> Generator[Path]:
    """Make a temporary folder, and remove the folder on leaving, or when this process is killed before."""
    name = secrets.token_hex(8)
    try:
        with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as folder:
            with suppress(OSError):
                WATCHDOG.watch(ProcessTag(name), Path(folder))
            yield Path(folder)
    finally:
        WATCHDOG.unwatch(name)
