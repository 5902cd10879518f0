"""Children: spawned, fed, followed, ended, never left behind. For every program that is run for a turn.

A child gets a session of its own and everything by files, so that it needs nobody to live on: its input is a file that
has no name any more, its output goes into files in a folder of its own, and `child.json` there says who it is. When the
process that started it is killed, it works on, and another process follows the same files to the same end. A pipe would
have lost the answer with its reader; and nobody who holds a pipe open can keep us waiting.

    running: spawned -> followed* -> stopped (ended, swept, reaped)        child.json -> over.json

Whoever leaves, for whatever reason, ends the whole tree (`child.Child.stop`). What a process that was killed has left
is found by the marker in `child.json`, which is written before the child is started.
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

from plait.backends.errors import BackendError, BackendUnavailable, ErrorKind
from plait.backends.process.child import KILL_LIMIT, Child
from plait.backends.process.manifest import Known, left_below, lock_start, mark_over, read_known, tell, words_of
from plait.backends.process.private import private_folder
from plait.backends.process.proctable import PREFIX, boot_id, end, first_start_time, tag
from plait.backends.process.watchdog import GUARD
from plait.backends.text import one_line
from plait.backends.values import value

_ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
)  # fmt: skip


@value
class Start:
    """What is to be started. `environment` is the whole of it (see `child_environment`). `stdin` is all that it will
    read; None makes its standard input a FIFO in the folder, `stdin`, which never ends. `keeps` are descriptors that it
    inherits. `note` is small and kept in `child.json`. With `guarded` it dies with this process, however that dies.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path
    stdin: bytes | None
    keeps: Sequence[int] = ()
    note: Mapping[str, str] = field(default_factory=dict[str, str])
    guarded: bool = False


def child_environment(passes: Collection[str] = ()) -> dict[str, str]:
    """What a child may have of our environment: what programs need to run at all, the names in `passes`, and the
    markers of turns that we are part of ourselves.
    """
    names = {*_ENVIRONMENT, *passes}
    return {name: text for name, text in os.environ.items() if name in names or name.startswith(("LC_", PREFIX))}


@asynccontextmanager
async def running(start: Start, folder: Path) -> AsyncGenerator[Child]:
    """Start a child with its files in `folder`, which is made, for this user alone; leaving ends its whole tree.

    Raises BackendUnavailable when there is no such program or working folder here; BackendError (transient) when the
    machine has no room for another process or for its files, and (invalid_request) when no program can be given such
    arguments; FileExistsError when the folder has a child's files already.
    """
    async with _stopped(_spawn(start, folder)) as child:
        yield child


@asynccontextmanager
async def adopted(folder: Path) -> AsyncGenerator[Child | None]:
    """The child that another process started with its files in `folder`; None when there is none. Otherwise as
    `running`.
    """
    known = read_known(folder)
    if known is None:
        yield None
        return
    async with _stopped(Child(folder, known, None)) as child:
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
                _close(child.folder, child.known)


async def sweep(run_folder: Path, keep: Collection[Path]) -> int:
    """End what is left of the children whose files are somewhere below `run_folder`, but for those below one of the
    folders in `keep`; how many processes were killed. Children that are over cost nothing, those of another boot are
    left alone.
    """
    return await run_sync(_sweep, run_folder, tuple(keep))  # which no cancellation leaves half-way


def _sweep(run_folder: Path, keep: Sequence[Path]) -> int:
    kept = [folder.resolve() for folder in keep]
    left = {
        folder: known.turn
        for folder, known in left_below(run_folder)
        if not any(folder.is_relative_to(one) for one in kept)
    }
    if not left:
        return 0
    killed, is_gone = end(list(left.values()), KILL_LIMIT)
    if is_gone:
        for folder in left:
            mark_over(folder)
    return killed


def _spawn(start: Start, folder: Path) -> Child:
    if read_known(folder) is not None:
        raise FileExistsError(f"{folder} has the files of another child")
    known = Known(secrets.token_hex(8), boot_id(), 0, "", start.note, words_of(start.argv[1:]))
    try:
        private_folder(folder)
        tell(folder, known)
        if start.guarded:
            GUARD.watch(known.turn)
        ours = _popen(start, folder, known.marker)
    except (OSError, BackendError, BackendUnavailable) as error:
        _close(folder, known)
        raise _unwritten(start, error) if isinstance(error, OSError) else error from None
    tag(ours.pid, known.marker)
    known = replace(known, pid=ours.pid, started=first_start_time(ours.pid))
    child = Child(folder, known, ours)
    try:
        tell(folder, known)
        if start.guarded:
            GUARD.watch(known.turn)
    except BaseException as error:
        child.kill_at_once()
        _close(folder, known)
        if isinstance(error, OSError):
            raise _unwritten(start, error) from None
        raise
    return child


def _popen(start: Start, folder: Path, marker: str) -> subprocess.Popen[bytes]:
    with ExitStack() as files:
        stdin = _stdin(start.stdin, folder, files)
        outputs = [_output(folder / name, files) for name in ("stdout", "stderr")]
        lock_start(outputs[0])
        try:
            # In the loop's own thread: another one's answer could be lost to a cancellation, and the child with it.
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


def _refused(start: Start, error: OSError | ValueError) -> BackendError | BackendUnavailable:
    program = start.argv[0]
    if not isinstance(error, OSError):  # a NUL, or what is no text at all
        return BackendError(ErrorKind.INVALID_REQUEST, one_line(f"cannot start {program}: an argument has an {error}"))
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        if not start.cwd.is_dir():
            return BackendUnavailable(f"there is no folder {start.cwd} to work in; name another one with cwd")
        return BackendUnavailable(_missing(program))
    if isinstance(error, PermissionError):
        return BackendUnavailable(f"{program} may not be executed in {start.cwd}: {error.strerror}")
    if error.errno == errno.ENOEXEC:
        return BackendUnavailable(f"{program} is not a program for this machine; name another one with command")
    kind = ErrorKind.INVALID_REQUEST if error.errno == errno.E2BIG else ErrorKind.TRANSIENT
    return BackendError(kind, one_line(f"cannot start {program}: {error.strerror}"))


def _missing(program: str) -> str:
    if os.sep in program and Path(program).is_file():
        what = "the one that its first line names, or another system's loader"
        return f"{program} needs a program that is not here: {what}; install that"
    return f"there is no program {program}; install it, or name its path with command"


def _unwritten(start: Start, error: OSError) -> BackendError:
    what = f"cannot start {start.argv[0]}, because its files cannot be written: {error.strerror or error}"
    return BackendError(ErrorKind.TRANSIENT, one_line(what))


def _stdin(text: bytes | None, folder: Path, files: ExitStack) -> int:
    if text is None:
        fifo = folder / "stdin"
        os.mkfifo(fifo, 0o600)
        # Open for both, so that it never ends: whoever speaks to the child may come and go.
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


def _close(folder: Path, known: Known) -> None:
    """Nothing is left of the child."""
    mark_over(folder)
    GUARD.forget(known.marker)
