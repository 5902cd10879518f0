"""The command `plait`: its subcommands in groups, each imported when used, what makes a function one of them, and the
completion of words; exit codes, and one clear line for every error that is not a bug.
"""

from __future__ import annotations

import codecs
import gc
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial, wraps
from importlib import import_module
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO, TypeAlias, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from plait.errors import DAGError, InvalidRequest, PlaitError, PlanError, TurnNotStored
from plait.runner.cli.terminal_output import STDOUT, output, print_line, print_note, visible, write

if TYPE_CHECKING:
    from plait.runner.plan.plan_file import Plan

Parameter: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"
"""What adds an option or an argument to a command."""
_COMPLETION_S = 2.0
"""Seconds until a shell gets no values from a slow store."""
COMPLETED = 0
FAILED = 1
USAGE = 2
STORE = 3
WAITING = 4
TAKEN_OVER = 5
CANCELLED = 6
PARKED = 7
ABORTED = 130

EXIT_CODES: Mapping[int, str] = {
    COMPLETED: "success: the run is completed, or the command did its work",
    FAILED: "tasks failed, the turn of `continue` failed, or an answer no longer passes its check (`check --run`)",
    USAGE: "usage or bad input: a mistake in a plan, an unknown run or task, a missing backend, a run that another "
    "process owns, an answer that comes too late",
    STORE: "the store cannot be used, or did not take a part of the run, as on a full disk: `plait resume` runs what "
    "is not stored again; or `doctor` found a bad check, or a host that cannot be used; or standard output cannot be "
    "written: the stored run is unharmed",
    WAITING: "waiting for a person: `plait answer` lists the questions, and answers one",
    TAKEN_OVER: "another process took the run over while this process slept",
    CANCELLED: "the run was cancelled, or interrupted by Ctrl-C, SIGTERM or SIGHUP (a closed terminal; ignored under "
    "`nohup`): `plait resume` continues",
    PARKED: "parked: everything waits for a time, such as the end of a provider's limit; `plait wake` continues then",
    ABORTED: "ended at once by a second Ctrl-C; 143 by a second SIGTERM",
}
"""The meaning of each exit code, for the help of the command and for the reference of the site."""
GROUPS: Mapping[str, Mapping[str, str]] = {
    "Run": {
        "run": "Run a plan, or reach a goal by tasks that a model plans.",
        "resume": "Continue a run that was interrupted, waits, or failed.",
        "check": "Check a plan; or check the answers of a run again.",
        "fork": "Run a stored run again from a task; `try` runs one task alone.",
    },
    "Look": {
        "runs": "List the runs; `budget` shows what they spend, and their limits.",
        "show": "Show a run or one of its tasks.",
        "log": "Print the history of a run; with --follow, as it happens.",
        "graph": "Draw a plan or a run.",
        "diff": "Compare two runs, task by task.",
        "ui": "Open the web page on a store.",
    },
    "Steer": {
        "answer": "Show the open questions; answer one, or settle a waiting task.",
        "continue": "Continue the conversation of a task.",
        "pause": "Pause a run; `tune` its concurrency, `retry` a task.",
        "cancel": "Cancel a run for good.",
    },
    "Share": {
        "serve": "Serve runs over HTTP to programs on this machine.",
        "mcp": "Offer plans to an agent as tools (MCP).",
        "worker": "Execute the runs that no process executes; `wake` those due.",
    },
    "Keep": {
        "export": "Write the results of a run to a .csv or .jsonl file.",
        "gc": "Delete old runs from the store.",
        "doctor": "Check this machine, its agents and the store, or other hosts.",
    },
}
"""The line in `plait --help` for each subcommand. The lines stand here because importing all modules takes ten times as
long as printing the help.
"""
COMMANDS = {name: line for commands in GROUPS.values() for name, line in commands.items()}
BESIDE = {"budget": "runs", "try": "fork", "tune": "pause", "retry": "pause", "wake": "worker"}
"""The subcommands that stand in the line of the help of another one."""
_MODULES: Mapping[str, str] = {
    command: module
    for module, commands in {
        "run_commands": "run resume fork try",
        "check_commands": "check doctor",
        "store_commands": "runs budget export gc",
        "show_commands": "show log diff graph",
        "steer_commands": "answer continue pause tune retry cancel",
        "serve_commands": "serve ui mcp worker wake",
        "host_command": "host",  # in no help: `plait run` starts it over ssh
    }.items()
    for command in commands.split()
}
"""The module of each subcommand."""


class LazyGroup(click.Group):
    """A group that imports a subcommand when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - signature of click
        """Return the names of the subcommands in the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - signature of click
        """Import and return the subcommand `cmd_name`; None for an unknown name."""
        if cmd_name not in _MODULES:
            return None
        module = import_module(f"plait.runner.cli.{_MODULES[cmd_name]}")
        return cast("click.Command", getattr(module, f"{cmd_name}_command"))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that `args` begin with. The method of click knows no names to suggest."""
        if args[0] not in _MODULES and not ctx.resilient_parsing:
            from plait.errors import nearest  # noqa: PLC0415 - only for this message

            ctx.fail(f"No such command {args[0]!r}{nearest(args[0], (*COMMANDS, *BESIDE))}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the subcommands that begin with `incomplete`, or options. The method of click would import every
        subcommand.
        """
        lines = COMMANDS | {name: COMMANDS[home] for name, home in BESIDE.items()}
        named = [CompletionItem(name, help=line) for name, line in lines.items() if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - signature of click
        """Write the help lines from the table. The method of click would import every subcommand."""
        widest = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{name:<{widest}}", line) for name, line in commands.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - signature of click
        """Write the meanings of the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])


def _print_completion(context: click.Context, _parameter: click.Parameter, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:
        return
    completion = get_completion_class(shell)
    assert completion is not None
    write(output(), completion(context.command, {}, "plait", "_PLAIT_COMPLETE").source())
    context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="plait", prog_name="plait", message="%(prog)s %(version)s")
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=_print_completion,
    help="Print the completion of command lines for this shell, and exit.",
)
def cli() -> None:
    """Run a DAG of LLM subtasks in parallel, store every step, and resume after a crash exactly where the run stopped.

    Name a run by its id, by the beginning of its id, or as `last`, the last run that was not a `try`.
    """
    # Without a handler Python would print bare warnings in the middle of the display.
    logging.getLogger("plait").addHandler(logging.NullHandler())


class Rule(NamedTuple):
    """What goes with the options and arguments `given`, words without spaces in one text; an empty text stands for
    every command line.
    """

    message: str
    given: str = ""
    needs: str = ""
    """At least one of these has to be there."""
    excludes: str = ""
    """None of these may be there."""
    one_of: str = ""
    """Exactly one of these has to be there."""

    def check(self, context: click.Context) -> None:
        """Raise UsageError if the command line breaks the rule."""

        def count(names: str) -> int:
            sources = map(context.get_parameter_source, names.split())
            return sum(source not in {None, ParameterSource.DEFAULT} for source in sources)

        if self.given and not count(self.given):
            return
        is_lacking = bool(self.needs) and not count(self.needs)
        if is_lacking or count(self.excludes) or (self.one_of and count(self.one_of) != 1):
            raise click.UsageError(self.message, context)


def subcommand(name: str, parameters: Sequence[Parameter | Rule] = ()) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function the subcommand `name`: its arguments are the values of `parameters`, its docstring is the help,
    and it returns the exit code, None for 0. While an async function runs, `print` of a user's function goes to
    standard error.
    """

    def make(function: Callable[..., Any]) -> click.Command:
        @wraps(function)
        def call(**options: Any) -> Any:
            context = click.get_current_context()
            for one in parameters:
                if isinstance(one, Rule):
                    one.check(context)
            level = options.pop("log_level", "")
            if style := options.get("log_style"):
                from plait.program_log import configure_logging  # noqa: PLC0415 - imports structlog

                configure_logging("json" if style == "json" else "console", level)
            if not iscoroutinefunction(function):
                return function(**options)
            import anyio  # noqa: PLC0415 - `plait --help` needs no event loop

            with redirect_stdout(sys.stderr):
                return anyio.run(partial(function, **options))

        decorated: Callable[..., Any] = call
        for one in reversed(parameters):
            if not isinstance(one, Rule):
                decorated = one(decorated)
        return click.command(name)(decorated)

    return make


def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return what a shell offers for an argument: the newest runs of the store, or the tasks of the run named before.
    Nothing if the store cannot be read in time: a message would stand in the middle of the line.
    """
    try:
        import anyio  # noqa: PLC0415 - `plait --help` needs no event loop

        items = anyio.run(_stored_items, context, parameter.name == "task")
    except Exception:
        items = []
    items = [item for item in items if item.value.startswith(incomplete)]
    return items or ([CompletionItem(incomplete, type="file")] if parameter.name == "what" else [])


async def _stored_items(context: click.Context, of_tasks: bool) -> list[CompletionItem[str]]:
    import anyio  # noqa: PLC0415 - as above

    from plait.runner.client.runs import find_run  # noqa: PLC0415 - for completions only
    from plait.runner.engine.run_options import (  # noqa: PLC0415 - as above
        DEFAULT_STORE,
        STORE_VARIABLE,
        ServerAddress,
        open_store,
        store_place,
    )
    from plait.runner.state.stored_run import listed_tasks  # noqa: PLC0415 - as above

    place = context.params.get("store_path") or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    place = place if isinstance(place, ServerAddress) else store_place(str(place))
    with anyio.move_on_after(_COMPLETION_S):
        async with open_store(place, "read") as store:
            if of_tasks:
                run = await find_run(store, context.params.get("run") or "last")
                return [CompletionItem(task.task_id, help=task.status) for task in await listed_tasks(store, run)]
            runs = await store.list_runs(50)
            newest = [CompletionItem("last", help="the last run, but for a try")] if runs else []
            return newest + [CompletionItem(run.run_id, help=f"{run.name} {run.status}".strip()) for run in runs]
    return []


def read_plan(path: Path, inputs: Mapping[str, str], *, with_functions: bool = False, limit: int | None = None) -> Plan:
    """Return the plan in the file at `path`, or on standard input for the path `-`. `with_functions` checks that its
    functions can be imported; for `limit` see `Plan.load`. Raises PlanError with every mistake.
    """
    from plait.runner.plan import Plan, parse_plan  # noqa: PLC0415 - `plait --help` needs no plan
    from plait.runner.plan.plan_positions import MAX_BYTES  # noqa: PLC0415 - as above

    if str(path) == "-":
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
        form = "json" if data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") else "yaml"
        read = partial(parse_plan, data, format=form, file="standard input")
        return read(overrides=inputs, with_functions=with_functions, limit=limit)
    from plait.safe_text import is_utf8  # noqa: PLC0415 - as above

    if not is_utf8(str(path)):
        raise InvalidRequest(
            f"the name of the plan file {str(path)!r} is not text in UTF-8, so it cannot be stored; rename it"
        )
    return Plan.load(path, overrides=inputs, with_functions=with_functions, limit=limit)


def main() -> None:
    """Run the command with the arguments of this process, and exit with its exit code."""
    # A command makes its plan and its tasks once, and they stay: with the usual 700 a tenth of its start is the search
    # for garbage among them, with 50,000 still a twentieth for 10,000 tasks.
    gc.set_threshold(400_000)
    exit_process(run_cli(cli, sys.argv[1:]))


def run_cli(command: click.Command, arguments: Sequence[str]) -> int:
    """Run `command` and return the exit code. An error that is a bug is raised unchanged."""
    # If a stream was closed by the caller (`>&-`), Python has none.
    sys.stdout, sys.stderr = sys.stdout or _open_devnull(), _best_effort(sys.stderr) if sys.stderr else _open_devnull()
    for stream in (sys.stdout, sys.stderr):
        # A character that a terminal cannot show is escaped and raises no error.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    token = STDOUT.set(sys.stdout)
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
    finally:
        STDOUT.reset(token)


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
    if isinstance(error, click.NoSuchOption):
        close = [option for option in error.possibilities or () if option != "--help"]  # close to every short option
        message = f"No such option {error.option_name}{f'; did you mean {close[0]}?' if close else ''}"
    else:
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
