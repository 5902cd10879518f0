"""The command `plait` and its subcommands."""

from __future__ import annotations

import click

from plait.runner.cli.commands.answer_command import answer_command
from plait.runner.cli.commands.cancel_command import cancel_command
from plait.runner.cli.commands.crashtest import crash_command
from plait.runner.cli.commands.doctor_command import doctor_command
from plait.runner.cli.commands.gc_command import gc_command
from plait.runner.cli.commands.log_command import log_command
from plait.runner.cli.commands.look_commands import runs_command, show_command
from plait.runner.cli.commands.orchestrate import orchestrate_command
from plait.runner.cli.commands.plan_commands import check_command, graph_command, schema_command, version_command
from plait.runner.cli.commands.questions_command import questions_command
from plait.runner.cli.commands.run_commands import continue_command, resume_command, run_command
from plait.runner.cli.commands.serve_command import serve_command
from plait.runner.cli.exits import EXIT_CODES


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="plait", prog_name="plait", message="%(prog)s %(version)s")
def cli() -> None:
    """Run a DAG of LLM subtasks in parallel, write every step down, and resume it after a crash where it stopped.

    A run is named by its id, the beginning of its id, or `last`.
    """


for _command in (
    check_command,
    run_command,
    resume_command,
    continue_command,
    orchestrate_command,
    questions_command,
    answer_command,
    cancel_command,
    runs_command,
    show_command,
    log_command,
    graph_command,
    serve_command,
    gc_command,
    doctor_command,
    crash_command,
    schema_command,
    version_command,
):
    cli.add_command(_command)
