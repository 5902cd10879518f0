"""The end of the command: exit codes, and one clear line for every error that is not a bug."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO

import click

from plait.runner.cli.display.text import visible

COMPLETED = 0
FAILED = 1
USAGE = 2
STORE = 3
WAITING = 4
TAKEN_OVER = 5
CANCELLED = 6
ABORTED = 130

_output: ContextVar[TextIO | None] = ContextVar("_output", default=None)
_READER_GONE = frozenset({errno.EPIPE, errno.EIO})  # the latter after a terminal has closed

EXIT_CODES: Mapping[int, str] = {
    COMPLETED: "completed; any other command did its work",
    FAILED: "tasks failed, or the turn of `continue` failed",
    USAGE: "usage or bad input: a mistake in a plan, an unknown run or task, a missing backend, a run that another "
    "process owns, an answer that comes too late",
    STORE: "the store cannot be used, or did not take a part of the run, as on a full disk: `plait resume` runs what "
    "is not stored again; or `doctor` found a bad check, or a host that cannot be used; or standard output cannot be "
    "written: the stored run is unharmed",
    WAITING: "waiting for a person: `plait answer` lists the questions, and answers one",
    TAKEN_OVER: "another process took the run over while this process slept",
    CANCELLED: "the run was cancelled, or interrupted by Ctrl-C, SIGTERM or SIGHUP (a closed terminal; ignored under "
    "`nohup`): `plait resume` continues",
    ABORTED: "ended at once by a second Ctrl-C; 143 by a second SIGTERM",
}
"""The meaning of each exit code, for the help of the command and for the reference of the site."""


_KINDS: Mapping[int, str] = {USAGE: "invalid_request", STORE: "store_failed", TAKEN_OVER: "ownership_lost"}


class CliError(click.ClickException):
    """An error that a person can mend: printed in one line, without a traceback."""

    def __init__(self, message: str, code: int = USAGE, lead: str = "plait: ", kind: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.lead = lead
        self.kind = kind or _KINDS.get(code, "refused")
        """The kind for `--json`, as over HTTP."""

    def show_json(self) -> None:
        """Print the error as one JSON object in one line on standard output, in the shape of HTTP."""
        problem = {"error": {"kind": self.kind, "message": self.message}}
        print_line(json.dumps(problem).replace("\x7f", "\\u007f"))

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 - signature of click
        """Print the error on standard error."""
        print_note(self.lead + self.message)


def run_cli(command: click.Command, arguments: Sequence[str]) -> int:
    """Run `command` and return the exit code. An error that is a bug is raised unchanged."""
    # If a stream was closed by the caller (`>&-`), Python has none.
    sys.stdout, sys.stderr = sys.stdout or _open_devnull(), _best_effort(sys.stderr) if sys.stderr else _open_devnull()
    for stream in (sys.stdout, sys.stderr):
        # A character that a terminal cannot show is escaped and raises no error.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    try:
        _require_working_directory()
        code: int | None = command.main(list(arguments), prog_name="plait", standalone_mode=False)
        return code or COMPLETED
    except click.ClickException as error:
        fault = error if isinstance(error, CliError) else _usage_error(error)
        return _report(fault, arguments)
    except (click.Abort, KeyboardInterrupt):
        return CANCELLED
    except Exception as error:
        known = cli_error_of(error)
        if known is None:
            raise
        # An answer that could not be stored is printed, because it has been paid for.
        if answer := getattr(error, "text", ""):
            print_line(visible(answer))
        return _report(known, arguments)


def _report(fault: CliError, arguments: Sequence[str]) -> int:
    """Print `fault`, with --json among `arguments` also as JSON. Return the exit code."""
    fault.show()
    words = list(arguments)
    if "--json" in words[: words.index("--") if "--" in words else None]:
        fault.show_json()
    return fault.code


def _usage_error(error: click.ClickException) -> CliError:
    """Return `error` of click, whose own text takes four lines, as one line."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "plait"
    message = error.format_message().removesuffix(".").replace("a valid integer range", "a whole number")
    return CliError(f"{message[:1].lower()}{message[1:]}; see `{command} --help`")


def _require_working_directory() -> None:
    """Raise CliError if the working directory has been removed: paths and the default store are relative to it."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise CliError("the working directory has been removed; change to a folder that exists, as with `cd`") from None


def _open_devnull() -> TextIO:
    return Path(os.devnull).open("w")


def _best_effort(stream: TextIO) -> TextIO:
    """Return a stream to the same file that ignores failed writes."""
    try:
        raw = _BestEffortFile(stream)
    except (OSError, ValueError):  # no descriptor, as in tests
        return stream
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, line_buffering=True)


class _BestEffortFile(io.FileIO):
    """A file for notes beside the work: a full disk or a closed terminal must not end a run."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream  # keeps the stream alive, whose end would close the descriptor

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


def cli_error_of(error: Exception) -> CliError | None:
    """Return the error to print for `error`; None if `error` is a bug."""
    from plait.backends.errors import BackendError, BackendUnavailable  # noqa: PLC0415 - heavy packages
    from plait.persistence.errors import StoreError  # noqa: PLC0415
    from plait.runner.errors import OwnershipLost, PlaitError, TurnNotStored  # noqa: PLC0415
    from plait.runner.operations.error_kinds import kind_of  # noqa: PLC0415

    kind = kind_of(error)
    if isinstance(error, TurnNotStored | StoreError):
        return CliError(str(error), STORE, kind=kind)
    if isinstance(error, OwnershipLost):
        return CliError(str(error), TAKEN_OVER, kind=kind)
    if isinstance(error, PlaitError | BackendUnavailable):
        # Each mistake in a plan has a line of its own with its place, as compilers print errors.
        return CliError(str(error), USAGE, "" if hasattr(error, "problems") else "plait: ", kind)
    if isinstance(error, BackendError):
        return CliError(str(error), FAILED, kind=kind)
    return None


def exit_process(code: int) -> NoReturn:
    """Exit with `code`, without waiting for threads: a thread that runs a function of the user cannot be stopped."""
    for stream in (sys.stdout, sys.stderr):
        write(stream, "")
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(code)
    sys.exit(code)


def print_note(text: str = "") -> None:
    """Print a line for the person on standard error."""
    write(sys.stderr, visible(text) + "\n")


def print_line(text: str) -> bool:
    """Print a line on standard output. Return False if the reader has closed its end."""
    return write(output(), text + "\n")


def output() -> TextIO:
    """Return standard output, also inside `redirect_prints`."""
    return _output.get() or sys.stdout


@contextmanager
def redirect_prints() -> Generator[None]:
    """Redirect `print` of a user's function or module to standard error, so that standard output holds only the output
    of plait.
    """
    token = _output.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _output.reset(token)


def write(stream: IO[str], text: str) -> bool:
    """Write and flush. Return False if the reader has closed its end (`| head`, a closed terminal); later writes are
    discarded. Raises CliError if writing fails for another reason, such as a full disk.
    """
    try:
        stream.write(text)
        stream.flush()
        return True
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if error.errno not in _READER_GONE:
            why = f"standard output cannot be written: {error.strerror}; send it to another place"
            raise CliError(why, STORE) from error
        return False
