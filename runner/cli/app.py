"""The command `plait`: a table of its subcommands. Each subcommand is imported when used."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import cast

import click
from click.shell_completion import CompletionItem

from plait.runner.cli.exits import EXIT_CODES

COMMANDS = {
    "answer": ("answer:answer_command", "Answer the question of a task, or settle a waiting task."),
    "cancel": ("cancel:cancel_command", "Cancel a run for good."),
    "check": ("check:check_command", "Check a plan; run nothing."),
    "completion": ("completion:completion_command", "Complete command lines in bash, zsh or fish."),
    "continue": ("continue_task:continue_command", "Continue the conversation of a task."),
    "crashtest": ("crashtest:crashtest_command", "Kill runs at every boundary; certify that nothing is lost."),
    "diff": ("diff:diff_command", "Compare two runs, task by task."),
    "doctor": ("doctor:doctor_command", "Check whether this machine, its agents and the store are fit."),
    "export": ("export:export_command", "Write the results of a run to a .csv or .jsonl file."),
    "fork": ("fork:fork_command", "Run a stored run anew from one of its tasks."),
    "gc": ("gc:gc_command", "Delete old runs from the store."),
    "graph": ("graph:graph_command", "Draw a plan or a run."),
    "host": ("host:host_command", "Run attempts for a run on another machine, over ssh."),
    "hosts": ("hosts:hosts_command", "Ask the hosts of a plan for their state."),
    "log": ("log:log_command", "Print the history of a run; with --follow, as it happens."),
    "mcp": ("mcp:mcp_command", "Offer plans to an agent as tools (MCP)."),
    "orchestrate": ("orchestrate:orchestrate_command", "Reach a goal by tasks that a model plans on the way."),
    "questions": ("questions:questions_command", "Show the questions that wait for a person."),
    "resume": ("resume:resume_command", "Continue a run that was interrupted, waits, or failed."),
    "run": ("run:run_command", "Run a plan."),
    "runs": ("runs:runs_command", "List the runs."),
    "schema": ("schema:schema_command", "Print the JSON Schema of plan files."),
    "serve": ("serve:serve_command", "Serve runs over HTTP to programs on this machine."),
    "show": ("show:show_command", "Show a run or one of its tasks."),
    "submit": ("submit:submit_command", "Store a run for the workers of a store."),
    "try": ("try_task:try_command", "Run one task of a stored run anew, beside the run."),
    "ui": ("ui:ui_command", "Open the web page on a store."),
    "version": ("version:version_command", "Print the version."),
    "worker": ("worker:worker_command", "Execute the runs that no process executes."),
}
"""For each subcommand, the module in `commands` with the name of the function, and the line in `plait --help`.

The lines stand here because importing all modules takes ten times as long as printing the help.
"""


class LazyGroup(click.Group):
    """A group that imports a subcommand when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - signature of click
        """Return the names of all subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the subcommand `cmd_name`; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command = cast("click.Command", getattr(import_module(f"plait.runner.cli.commands.{module}"), function))
        if ctx.resilient_parsing:  # a shell completes a line
            from plait.runner.cli.completion import add_values  # noqa: PLC0415 - imports a store

            add_values(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that `args` begin with. The method of click knows no names to suggest."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            from plait.runner.errors import nearest  # noqa: PLC0415 - only for this message

            ctx.fail(f"No such command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the subcommands that begin with `incomplete`, or options. The method of click would import every
        subcommand.
        """
        named = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - signature of click
        """Write the help lines from the table. The method of click would import every subcommand."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - signature of click
        """Write the meanings of the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="plait", prog_name="plait", message="%(prog)s %(version)s")
def cli() -> None:
    """Run a DAG of LLM subtasks in parallel, store every step, and resume after a crash exactly where the run stopped.

    Name a run by its id, by the beginning of its id, or as `last`, the last run that was not a `try`.
    """
    # Without a handler Python would print bare warnings in the middle of the display.
    logging.getLogger("plait").addHandler(logging.NullHandler())
