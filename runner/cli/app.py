"""The command `plait`: a table of its subcommands, each imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import click

from plait.runner.cli.exits import EXIT_CODES

COMMANDS = {
    "answer": ("answer:answer_command", "Answer a task's question, or settle one that waits."),
    "cancel": ("cancel:cancel_command", "Cancel a run for good."),
    "check": ("check:check_command", "Check a plan; run nothing."),
    "continue": ("continue_task:continue_command", "Go on with a task's conversation."),
    "crashtest": ("crashtest:crashtest_command", "Kill runs at every boundary; certify that nothing is lost."),
    "doctor": ("doctor:doctor_command", "Say whether this machine, its agents and the store are fit."),
    "gc": ("gc:gc_command", "Delete old runs from the store."),
    "graph": ("graph:graph_command", "Draw a plan or a run."),
    "log": ("log:log_command", "Print what a run did, or does."),
    "orchestrate": ("orchestrate:orchestrate_command", "Reach a goal by tasks that are planned on the way."),
    "questions": ("questions:questions_command", "Show what waits for a person."),
    "resume": ("resume:resume_command", "Go on with a run."),
    "run": ("run:run_command", "Run a plan."),
    "runs": ("runs:runs_command", "List the runs."),
    "schema": ("schema:schema_command", "Print the JSON Schema of plan files."),
    "serve": ("serve:serve_command", "Serve runs over HTTP, to programs on this machine."),
    "show": ("show:show_command", "Show a run or one of its tasks."),
    "version": ("version:version_command", "Print the version."),
}
"""For each subcommand: its module in `commands` with the name of the function, and its line in `plait --help`.

The lines stand here because importing all modules takes ten times as long as printing the help.
"""


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Return the subcommand `cmd_name`, imported now; None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        return cast("click.Command", getattr(import_module(f"plait.runner.cli.commands.{module}"), function))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write the lines of the table; importing the subcommands would be click's way."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="plait", prog_name="plait", message="%(prog)s %(version)s")
def cli() -> None:
    """Run a DAG of LLM subtasks in parallel, write every step down, and resume it after a crash where it stopped.

    A run is named by its id, the beginning of its id, or `last`.
    """
