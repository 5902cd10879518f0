"""The command `plait`: its subcommands in groups. Each subcommand is imported when used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import cast

import click
from click.shell_completion import CompletionItem, get_completion_class

from plait.errors import InvalidRequest
from plait.runner.cli.command_exits import EXIT_CODES
from plait.runner.cli.terminal_output import output, write

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Run": {
        "run": "Run a plan, or reach a goal by tasks that a model plans.",
        "resume": "Continue a run that was interrupted, waits, or failed.",
        "check": "Check a plan; run nothing.",
        "fork": "Run a stored run anew from one of its tasks.",
        "try": "Run one task of a stored run anew, beside the run.",
    },
    "Look": {
        "runs": "List the runs.",
        "show": "Show a run or one of its tasks.",
        "log": "Print the history of a run; with --follow, as it happens.",
        "graph": "Draw a plan or a run.",
        "diff": "Compare two runs, task by task.",
        "ui": "Open the web page on a store.",
    },
    "Steer": {
        "answer": "Show the open questions; answer one, or settle a waiting task.",
        "continue": "Continue the conversation of a task.",
        "cancel": "Cancel a run for good.",
    },
    "Share": {
        "serve": "Serve runs over HTTP to programs on this machine.",
        "mcp": "Offer plans to an agent as tools (MCP).",
        "worker": "Execute the runs that no process executes.",
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
_UNLISTED = frozenset({"host"})
"""`plait run` starts `plait host` over ssh."""
FORMER_WORDS = {
    "completion": "plait --completion SHELL",
    "crashtest": "make crashtest",
    "hosts": "plait doctor --hosts FILE",
    "orchestrate": "plait run --goal TEXT",
    "questions": "plait answer",
    "schema": "plait check --schema",
    "submit": "plait run --queue",
    "version": "plait --version",
}
"""What is typed now in place of each subcommand that there was."""


class LazyGroup(click.Group):
    """A group that imports a subcommand when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - signature of click
        """Return the names of the subcommands in the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - signature of click
        """Import and return the subcommand `cmd_name`; None for an unknown name."""
        if cmd_name not in COMMANDS and cmd_name not in _UNLISTED:
            return None
        name = "fork" if cmd_name == "try" else cmd_name
        module = import_module(f"plait.runner.cli.{name}_command")
        return cast("click.Command", getattr(module, f"{cmd_name}_command"))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that `args` begin with. The method of click knows no names to suggest."""
        if args[0] in FORMER_WORDS:
            raise InvalidRequest(f"`plait {args[0]}` is now `{FORMER_WORDS[args[0]]}`")
        if args[0] not in COMMANDS and args[0] not in _UNLISTED and not ctx.resilient_parsing:
            from plait.errors import nearest  # noqa: PLC0415 - only for this message

            ctx.fail(f"No such command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the subcommands that begin with `incomplete`, or options. The method of click would import every
        subcommand.
        """
        named = [CompletionItem(name, help=line) for name, line in COMMANDS.items() if name.startswith(incomplete)]
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
