"""Commands: a program with its arguments, run for a task, started here or adopted from a dead process.

    attempt folder/1/   child.json   stdout   stderr   code

A shell of a few bytes starts the program and writes the exit code into `code`: the process that waited for the program
may be dead, and the exit code would be lost with it. The words of the command never become shell text.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary

import anyio

from plait.backends.backend_protocol import (
    Conversation,
    ConversationRequest,
    DetachedTurn,
    Files,
    Output,
    Reply,
)
from plait.backends.large_answers import read_answer
from plait.backends.output_schema import Mismatch, Schema, invalid_output
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import (
    Child,
    Launch,
    ProgramBackend,
    adopted,
    child_environment,
    own_variables,
    running,
)
from plait.dialogue import Message
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, one_line, without_secrets
from plait.task import command_not_allowed, is_allowed, read_command

MOST_STDOUT = 2**20
"""Bytes of standard output in a result. Of more, the beginning and the end are kept."""
MOST_STDERR = 2**16
"""Bytes of standard error in a result. Of more, the beginning and the end are kept."""
_MOST_IN_ERROR = 1_000
_START = 'ended=; trap ended=1 TERM; "$@"; code=$?; [ "$ended" ] || { echo $code >"$0.new" && mv "$0.new" "$0"; }'
"""`$0` is the file for the exit code. The program is named by its path, so the shell finds no command of its own. At a
SIGTERM the shell waits for the end of the program, and writes no code: the program did not end by itself. The program
is in a group of its own, so that one that signals its group, as by `kill 0`, does not reach the shell.
"""
_FROM_OUTSIDE = {128 + signal.SIGKILL, 128 + signal.SIGTERM}
"""Exit codes of programs that were ended from outside, as by a lack of memory. Unless the task names them, the program
did not end by itself.
"""


@dataclass(eq=False, kw_only=True)
class CommandBackend(ProgramBackend):
    """A backend that runs the command of a task (`Task.run`). The prompt of the task is the standard input.

    An exit code other than 0, or those in `Task.codes`, fails the attempt (`command_failed`). What the command leaves
    running is ended with it.
    """

    kind: ClassVar[str] = "command"

    allows: Sequence[Sequence[str]] = ()
    """The first words of the commands that tasks may run which a model adds, or which are posted over HTTP, such as
    [["pytest"], ["git", "status"]]. Other tasks may run any command.
    """
    only_allowed: bool = False
    """Whether no other command runs, wherever its task comes from: for a server that anyone may post plans to."""
    checks: int | None = None
    """The number of checks of answers (`Task.check`) that run at once in an event loop, apart from the tasks that run
    commands. None: as many as there are processors.
    """

    needs_prompt: ClassVar[bool] = False
    adjustable: ClassVar[frozenset[str]] = frozenset({"cwd", "env", "shared"})

    def __post_init__(self) -> None:
        if self.checks is not None and self.checks < 1:
            raise ValueError(f"checks must be at least 1, not {self.checks}")
        self._check_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.CapacityLimiter] = WeakKeyDictionary()

    def check_slot(self) -> AbstractAsyncContextManager[None]:
        """Return a context that waits for one of the slots of checks, and holds it. Cancellable."""
        loop = asyncio.get_running_loop()
        if loop not in self._check_slots:
            self._check_slots[loop] = anyio.CapacityLimiter(self.checks or max(2, os.cpu_count() or 2))
        return self._check_slots[loop]

    def new_session_id(self) -> str | None:
        """Return None: commands have no sessions."""
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation in which each turn runs one command."""
        backend = self.working_in(request.workspace)
        with self.files_of(request) as (files, guarded):
            yield _CommandConversation(backend, request, files.turn / "1", guarded=guarded)

    def inspect(self, files: Files) -> DetachedTurn | None:
        """Implement `DetachedBackend.inspect`."""
        folder = files.turn / "1"
        manifest = read_manifest(folder)
        if manifest is None or manifest.note.get("kind") != self.kind:
            return None
        is_alive = manifest.outlives_starter
        about = f"{manifest.note.get('program', self.kind)}, pid {manifest.pid}"
        # After the question whether the command lives: the code is written before its end.
        has_ended = _exit_code(folder) not in {None, *_FROM_OUTSIDE}
        return DetachedTurn("alive" if is_alive else "ended" if has_ended else "dead", about=about)

    def digests(self, words: Sequence[str]) -> dict[str, str]:
        """Return the digest of each file, and of each folder with all its files, that a word of a command names."""
        names = {word.partition("=")[2] if word.startswith("-") else word.partition("::")[0] for word in words}
        folder = self.folder
        return {name: _digest(folder / name) for name in sorted(names) if name.strip("./") and (folder / name).exists()}

    def launch(
        self, words: Sequence[str], stdin: str, folder: Path, request: ConversationRequest, *, guarded: bool
    ) -> Launch:
        """Return the start of a command with its files in `folder`. Raises BackendUnavailable if there is no such
        program.
        """
        cwd = self.folder
        if not cwd.is_dir():
            raise BackendUnavailable(f"there is no folder {one_line(str(cwd), 200)} to work in; name another with cwd")
        environment = {**child_environment(self.pass_env), **own_variables(request)}
        program = os.path.join(cwd, words[0]) if os.sep in words[0] else words[0]  # noqa: PTH118 - keeps `..`
        path = shutil.which(program, path=environment.get("PATH"))
        if path is None:
            raise BackendUnavailable(f"there is no program {words[0]!r} here; install it, or correct the name in `run`")
        alone = shutil.which("setsid")  # not on macOS, where such a command ends the shell with itself
        argv = ["/bin/sh", "-c", _START, str(folder.absolute() / "code"), *([alone] if alone else [])]
        argv += [str(Path(path).absolute()), *words[1:]]
        note = {"kind": self.kind, "program": one_line(words[0], 80)}
        return Launch(argv, environment, cwd, stdin.encode(), keeps=request.keeps, note=note, guarded=guarded)


class _CommandConversation:
    session_id: str | None = None

    def __init__(self, backend: CommandBackend, request: ConversationRequest, folder: Path, *, guarded: bool) -> None:
        self._backend = backend
        self._request = request
        self._folder = folder
        self._guarded = guarded

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`."""
        try:
            words, stdin, codes = read_command(prompt)
        except ValueError as error:
            raise BackendError(ErrorKind.INVALID_REQUEST, f"the task has no command; give it `run`: {error}") from None
        if self._backend.only_allowed and not is_allowed(words, self._backend.allows):
            raise BackendError(ErrorKind.INVALID_REQUEST, command_not_allowed(words, self._backend.kind))
        folder = self._folder
        try:
            async with AsyncExitStack() as stack:
                child = await stack.enter_async_context(adopted(folder)) if self._request.attaches else None
                if child is None:
                    launch = self._backend.launch(words, stdin, folder, self._request, guarded=self._guarded)
                    child = await stack.enter_async_context(running(launch, folder))
                await _follow_output(child, self._request.on_output)
        except BaseException:
            with suppress(OSError):  # of a program that ended because of the cancellation
                (folder / "code").unlink()
            raise
        code = _exit_code(folder)
        is_wanted = codes == "any" or code in codes
        if code is None:
            raise BackendError(ErrorKind.CRASHED, "the command was ended before its exit code was known")
        if code in _FROM_OUTSIDE and not is_wanted:
            name = signal.Signals(code - 128).name
            message = f"{one_line(words[0], 80)} ended with exit code {code}, as if ended by {name} from outside"
            raise BackendError(ErrorKind.CRASHED, f"{message}; a task takes that code if its `codes` name it")
        stdout, is_cut = _bounded(folder / "stdout", MOST_STDOUT)
        stderr, _ = _bounded(folder / "stderr", MOST_STDERR)
        if not is_wanted:
            message = f"{one_line(words[0], 80)} ended with exit code {code}"
            end = (stderr.strip() or stdout.strip())[-_MOST_IN_ERROR:]
            if end:
                message += f": {one_line(without_secrets(end), _MOST_IN_ERROR)}"
            messages = Message("user", prompt), Message("assistant", f"{stdout}{stderr}")
            raise BackendError(ErrorKind.COMMAND_FAILED, message, messages=messages)
        data: dict[str, JsonValue] = {"code": code, "stdout": stdout, "stderr": stderr}
        if self._request.output_schema is not None:
            try:
                if is_cut:
                    raise Mismatch(f"standard output has more than {MOST_STDOUT:,} bytes")
                data["data"] = await read_answer(Schema(self._request.output_schema), stdout)
            except Mismatch as mismatch:
                raise invalid_output(mismatch) from None
        return Reply(stdout, data)


async def _follow_output(child: Child, on_output: Callable[[Output], None]) -> None:
    """Pass each line of the command's output on, until the command has ended."""

    def on_line(line: bytes) -> bool:
        on_output(Output("text", clean_text(line.decode("utf-8", "replace")) + "\n"))
        return False

    try:
        async with anyio.create_task_group() as group:
            for name in ("stdout", "stderr"):
                group.start_soon(partial(child.follow, on_line, name=name, idle=inf, until=inf))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _exit_code(folder: Path) -> int | None:
    """Return the exit code of the command with its files in `folder`; None if it has none, or not yet."""
    with suppress(OSError, ValueError):
        return int((folder / "code").read_bytes())
    return None


def _digest(path: Path) -> str:
    """Return the digest of a file, or of the files below a folder without hidden ones and those that Python makes."""
    digest = hashlib.sha256()
    for folder, below, names in os.walk(path) if path.is_dir() else [(str(path.parent), list[str](), [path.name])]:
        below[:] = sorted(name for name in below if not name.startswith((".", "__pycache__")))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                digest.update(f"{file.relative_to(path.parent)}\0".encode("utf-8", "surrogateescape"))
                with suppress(OSError), file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
    return f"sha256:{digest.hexdigest()[:16]}"


def _bounded(path: Path, most: int) -> tuple[str, bool]:
    """Return the text in a file, and whether its middle is left out because the file has more than `most` bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            return clean_text(file.read().decode("utf-8", "replace")), False
        begin = file.read(most // 2)
        file.seek(size - most // 2)
        middle = f"\n[{size - most:,} bytes of {size:,} left out]\n"
        texts = begin.decode("utf-8", "replace"), middle, file.read().decode("utf-8", "replace")
        return clean_text("".join(texts)), True
