"""The end of the command: exit codes, and one clear line for every error that is not a bug."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from plait.errors import DAGError, InvalidRequest, PlaitError, PlanError, TurnNotStored
from plait.runner.cli.terminal_output import print_line, print_note, visible, write

COMPLETED = 0
FAILED = 1
USAGE = 2
STORE = 3
WAITING = 4
TAKEN_OVER = 5
CANCELLED = 6
ABORTED = 130


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
        return _report(_usage_error(error), arguments)
    except (click.Abort, KeyboardInterrupt):
        return CANCELLED
    except PlaitError as error:
        # An answer that could not be stored is printed, because it has been paid for.
        if isinstance(error, TurnNotStored):
            print_line(visible(error.text))
        return _report(error, arguments)


def _report(error: PlaitError, arguments: Sequence[str]) -> int:
    """Print `error` in one line, with --json among `arguments` also as JSON in the shape of HTTP. Return the exit
    code.
    """
    # Each mistake in a plan has a line of its own with its place, as compilers print errors.
    print_note(str(error) if isinstance(error, PlanError | DAGError) else f"plait: {error}")
    words = list(arguments)
    if "--json" in words[: words.index("--") if "--" in words else None]:
        problem = {"error": {"kind": error.word, "message": str(error)}}
        print_line(json.dumps(problem).replace("\x7f", "\\u007f"))
    return error.exit_code


def _usage_error(error: click.ClickException) -> InvalidRequest:
    """Return `error` of click, whose own text takes four lines, as one line."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "plait"
    message = error.format_message().removesuffix(".").replace("a valid integer range", "a whole number")
    return InvalidRequest(f"{message[:1].lower()}{message[1:]}; see `{command} --help`")


def _require_working_directory() -> None:
    """Raise InvalidRequest if the working directory has been removed: paths start there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InvalidRequest(
            "the working directory has been removed; change to a folder that exists, as with `cd`"
        ) from None


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


def exit_process(code: int) -> NoReturn:
    """Exit with `code`, without waiting for threads: a thread that runs a function of the user cannot be stopped."""
    for stream in (sys.stdout, sys.stderr):
        write(stream, "")
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(code)
    sys.exit(code)
