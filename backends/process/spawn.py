"""Start, adopt and sweep children: the programs that run for a turn. No child is left behind.

A child has a session of its own and exchanges everything by files, so the child does not depend on its starter: the
input is a file without a name, the output goes into files in a folder of the child, and `child.json` there holds the
child's identity. If the starter is killed, the child works on, and another process follows the same files to the same
end. With a pipe, the answer would be lost with its reader, and any process with a copy of the pipe could delay the end.

    running: spawned -> followed* -> stopped (ended, swept, reaped)        child.json -> over.json

Leaving `running` or `adopted` ends the whole tree, whatever the reason (`child.Child.stop`). The children of a killed
process are found by the marker in `child.json`, which is written before the start.
"""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import field, replace
from pathlib import Path

from anyio.to_thread import run_sync

from plait.backends.process.child_manifest import (
    ChildManifest,
    digest_of_arguments,
    lock_start,
    manifests_below,
    mark_over,
    read_manifest,
    write_manifest,
)
from plait.backends.process.child_process import KILL_LIMIT, Child
from plait.backends.process.private import private_folder
from plait.backends.process.process_table import PREFIX, boot_id, first_start_time, kill_tree, mark, offer_to_oom_killer
from plait.backends.process.watchdog import WATCHDOG
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import value
from plait.safe_text import one_line

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
    stdin: bytes | None
    """The whole input; None makes standard input an endless FIFO, `stdin` in the folder."""
    keeps: Sequence[int] = ()
    """Descriptors to inherit."""
    note: Mapping[str, str] = field(default_factory=dict[str, str])
    """Small facts to keep in `child.json`."""
    guarded: bool = False
    """Whether the child is killed when this process ends, by whatever cause."""


def child_environment(passes: Collection[str] = ()) -> dict[str, str]:
    """Return the part of this process's environment for a child.

    The part holds the variables that programs need to run, the names in `passes`, and the markers of this process.
    """
    names = {*_ENVIRONMENT, *passes}
    return {name: text for name, text in os.environ.items() if name in names or name.startswith(("LC_", PREFIX))}


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
    kept = [folder.resolve() for folder in keep]
    left = {
        folder: manifest.tag
        for folder, manifest in manifests_below(run_folder)
        if not any(folder.is_relative_to(one) for one in kept)
    }
    if not left:
        return 0
    killed, is_gone = kill_tree(list(left.values()), KILL_LIMIT)
    if is_gone:
        for folder in left:
            mark_over(folder)
    return killed


def _spawn(start: Launch, folder: Path) -> Child:
    if read_manifest(folder) is not None:
        raise FileExistsError(f"{folder} has the files of another child")
    manifest = ChildManifest(secrets.token_hex(8), boot_id(), 0, "", start.note, digest_of_arguments(start.argv[1:]))
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
        stdin = _stdin(start.stdin, folder, files)
        outputs = [_output(folder / name, files) for name in ("stdout", "stderr")]
        lock_start(outputs[0])
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
        return BackendUnavailable(_missing(program))
    if isinstance(error, PermissionError):
        return BackendUnavailable(f"{program} may not be executed in {start.cwd}: {error.strerror}")
    if error.errno == errno.ENOEXEC:
        return BackendUnavailable(f"{program} is not a program for this machine; name another program with command")
    kind = ErrorKind.INVALID_REQUEST if error.errno == errno.E2BIG else ErrorKind.TRANSIENT
    return BackendError(kind, one_line(f"cannot start {program}: {error.strerror}"))


def _missing(program: str) -> str:
    if os.sep in program and Path(program).is_file():
        return f"{program} cannot run: the interpreter of its first line, or its loader, is missing; install that"
    return f"there is no program {program}; install it, or name its path with command"


def _unwritten(start: Launch, error: OSError) -> BackendError:
    text = f"cannot start {start.argv[0]}, because its files cannot be written: {error.strerror or error}"
    return BackendError(ErrorKind.TRANSIENT, one_line(text))


def _stdin(text: bytes | None, folder: Path, files: ExitStack) -> int:
    if text is None:
        fifo = folder / "stdin"
        os.mkfifo(fifo, 0o600)
        # Open for reading and writing: the input then never ends, however often its writers change.
        descriptor = os.open(fifo, os.O_RDWR)
        files.callback(os.close, descriptor)
        return descriptor
    file = files.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - the stack closes it
    file.write(text)
    file.seek(0)
    return file.fileno()


def _output(path: Path, files: ExitStack) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    files.callback(os.close, descriptor)
    return descriptor


def _close(folder: Path, manifest: ChildManifest) -> None:
    """Record that no process of the child is left."""
    mark_over(folder)
    WATCHDOG.unwatch(manifest.marker)
