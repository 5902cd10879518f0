"""`plait fork` and `plait try`: run a stored run anew from one of its tasks, or one of its tasks alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from plait.errors import InvalidRequest
from plait.json_form import JsonValue
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_options import (
    KINDS,
    OutputOptions,
    again_option,
    async_command,
    backends_option,
    complete,
    concurrency_option,
    dry_run_option,
    output_options,
    plan_option,
    run_argument,
    set_option,
    store_option,
)
from plait.runner.cli.follow_run import follow_run
from plait.runner.cli.preview_report import announce_reuse
from plait.runner.cli.terminal_output import print_note
from plait.runner.client.named_runs import find_run, runs_of_plan
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.engine.run_options import open_store
from plait.runner.plan.plan_inputs import converted
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import read_settings
from plait.safe_text import is_utf8


def _parse_files(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the text of the file of each `TASK=FILE`, by task. Raises BadParameter."""
    texts: dict[str, str] = {}
    for value in values:
        name, equals, file = value.partition("=")
        if not equals or not name or not file:
            raise click.BadParameter(f"{value!r} is not TASK=FILE")
        if name in texts:
            raise click.BadParameter(f"{name} is given twice")
        texts[name] = _read_text(Path(file))
    return texts


def _read_text(path: Path) -> str:
    """Return the text of a file without the line break at its end. Raises BadParameter."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise click.BadParameter(f"{path} is not text in UTF-8") from None
    if not is_utf8(text):
        raise click.BadParameter(f"{path} is not text in UTF-8")
    return text.removesuffix("\n")


_prompts_option = click.option(
    "--prompt",
    "prompts",
    metavar="TASK=FILE",
    multiple=True,
    callback=_parse_files,
    help="Give TASK the prompt in FILE; may be given more than once.",
)
_results_option = click.option(
    "--result",
    "results",
    metavar="TASK=FILE",
    multiple=True,
    callback=_parse_files,
    help="Give TASK the result in FILE, without a call; may be given more than once.",
)
_backend_option = click.option(
    "--backend", metavar="NAME", help=f"Run the one task on this backend of RUN, or {KINDS}."
)


@async_command("fork")
@run_argument
@click.option("--from", "start", metavar="TASK", help="Run on from TASK, with everything behind TASK.")
@click.option("--only", metavar="TASK", help="Run TASK alone, and print its result: the same as `plait try RUN TASK`.")
@_prompts_option
@set_option
@_results_option
@_backend_option
@again_option
@dry_run_option
@plan_option
@backends_option
@concurrency_option("as stored with the run")
@store_option
@output_options
async def fork_command(start: str | None, only: str | None, **options: Any) -> int:
    """Start a new run from TASK of RUN (an id, the beginning of an id, or `last`), which may have ended, failed or been
    interrupted. RUN does not change.

    TASK runs. Tasks behind TASK or behind an edit, and tasks that did not complete, run unless nothing changed for
    them. All other tasks keep their results and conversations.
    """
    task = only if start is None else start
    if task is None or None not in {start, only}:
        raise click.UsageError("give either --from TASK or --only TASK")
    return await _run_fork(options, task, only=start is None)


@async_command("try")
@run_argument
@click.argument("task", shell_complete=complete)
@click.option("--prompt-file", metavar="FILE", type=click.Path(path_type=Path), help="Use the prompt in FILE.")
@_backend_option
@again_option
@dry_run_option
@plan_option
@backends_option
@store_option
@output_options
async def try_command(task: str, prompt_file: Path | None, **options: Any) -> int:
    """Run TASK of RUN (an id, the beginning of an id, or `last`) alone, on the inputs recorded in RUN, and print the
    result: `plait fork RUN --only TASK`. RUN does not change; the attempt is kept as a run of its own.
    """
    prompts = {} if prompt_file is None else {task: _read_text(prompt_file)}
    return await _run_fork({**options, "prompts": prompts, "inputs": {}, "results": {}}, task, only=True)


async def _run_fork(options: Mapping[str, Any], task: str, *, only: bool) -> int:
    """Make a run from a stored run and show it to its end, or print its preview. Return the exit code."""
    output = replace(OutputOptions.of(options), result_of=task if only else None)
    files = FileOptions(options["plan"], options["backends"])
    async with open_store(options["store_path"], "read" if options["dry_run"] else "existing") as store:
        of = runs_of_plan(files.plan) if options["run"] == "last" else None
        record = await find_run(store, options["run"], of)
        edits = {"prompts": options["prompts"], "results": options["results"]}
        edits["inputs"] = _inputs(record, options["inputs"])
        trusted = TrustedBackends(store, files, note=print_note, concurrency=output.concurrency)
        async with trusted.fork(record, task, backend=options["backend"], only=only, **edits) as (runs, fork, used):
            preview = await runs.preview_fork(fork)
            effects = [] if options["again"] else used.effects(preview, runs.options.backends)
            if (code := announce_reuse(preview, effects, output, dry_run=options["dry_run"])) is not None:
                return code
            return await follow_run(runs.start_fork(fork), RunState(fork.dag.copy()), output, store)


def _inputs(record: RunRecord, texts: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return the values of inputs, each like the stored value. Raises InvalidRequest."""
    stored, values = read_settings(record).get("inputs", {}), dict[str, JsonValue]()
    for name, text in texts.items():
        try:
            values[name] = converted(text, stored.get(name))
        except ValueError as error:
            raise InvalidRequest(f"--set {name}: {error}") from None
    return values
