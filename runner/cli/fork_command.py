"""`plait fork` and `plait try`: run a stored run anew from one of its tasks, or one of its tasks alone."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import click

from plait.errors import InvalidRequest
from plait.json_form import JsonValue
from plait.runner.cli.command_exits import print_note, redirect_prints
from plait.runner.cli.command_options import (
    KINDS,
    OutputOptions,
    apply_log_options,
    backends_option,
    concurrency_option,
    json_option,
    log_options,
    plan_option,
    quiet_option,
    set_option,
    store_option,
    verbose_option,
)
from plait.runner.cli.follow_run import follow_run
from plait.runner.cli.like import again_option, dry_run_option, list_effects, require_again
from plait.runner.cli.preview_report import print_reuse, summarize_reuse, with_effects_marked
from plait.runner.client.backend_set import (
    BackendOptions,
    BackendSet,
    requested_spec,
    required_backends,
    stored_concurrency,
)
from plait.runner.client.fork_run import Fork
from plait.runner.client.store_place import existing_store, find_run, is_utf8, read_only_store, runs_of_plan
from plait.runner.client.trusted_backends import FileOptions, StoredBackends
from plait.runner.parallel_runner import ParallelRunner
from plait.runner.plan.plan_inputs import converted
from plait.runner.state.stored_run import stored_record

MakeFork: TypeAlias = Callable[[ParallelRunner, str], Awaitable[Fork]]
"""Makes the new run from the stored run with the given id."""


def parse_files(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the text of the file of each `TASK=FILE`, by task. Raises BadParameter."""
    texts: dict[str, str] = {}
    for value in values:
        name, equals, file = value.partition("=")
        if not equals or not name or not file:
            raise click.BadParameter(f"{value!r} is not TASK=FILE")
        if name in texts:
            raise click.BadParameter(f"{name} is given twice")
        texts[name] = read_text(Path(file))
    return texts


def read_text(path: Path) -> str:
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


@click.command("fork")
@click.argument("run")
@click.option("--from", "start", metavar="TASK", required=True, help="Run on from TASK, with everything behind TASK.")
@click.option(
    "--prompt",
    "prompts",
    metavar="TASK=FILE",
    multiple=True,
    callback=parse_files,
    help="Give TASK the prompt in FILE; may be given more than once.",
)
@set_option
@click.option(
    "--result",
    "results",
    metavar="TASK=FILE",
    multiple=True,
    callback=parse_files,
    help="Give TASK the result in FILE, without a call; may be given more than once.",
)
@again_option
@dry_run_option
@plan_option
@backends_option
@concurrency_option("as stored with the run")
@store_option
@json_option
@quiet_option
@verbose_option
@log_options
def fork_command(run: str, start: str, **options: Any) -> int:
    """Start a new run from TASK of RUN (an id, the beginning of an id, or `last`), which may have ended, failed or been
    interrupted. RUN does not change.

    TASK runs. Tasks behind TASK or behind an edit, and tasks that did not complete, run unless nothing changed for
    them. All other tasks keep their results and conversations.
    """
    apply_log_options(options["log_style"], options["log_level"])
    files = FileOptions(options["plan"], options["backends"])
    request = ForkOptions(run, files, options["again"], options["dry_run"])
    prompts, results, given = options["prompts"], options["results"], options["inputs"]

    async def make(runner: ParallelRunner, run_id: str) -> Fork:
        inputs = await _inputs(runner, run_id, given)
        return await runner.fork(run_id, start, prompts=prompts, inputs=inputs, results=results)

    with redirect_prints():
        return anyio.run(run_fork, request, make, OutputOptions.of(options))


async def _inputs(runner: ParallelRunner, run_id: str, given: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return the values of inputs, each like the stored value. Raises InvalidRequest."""
    if not given:
        return {}
    _, record = await stored_record(runner.config.store, run_id)
    stored = json.loads(record.settings).get("inputs", {})
    values: dict[str, JsonValue] = {}
    for name, text in given.items():
        try:
            values[name] = converted(text, stored.get(name))
        except ValueError as error:
            raise InvalidRequest(f"--set {name}: {error}") from None
    return values


@click.command("try")
@click.argument("run")
@click.argument("task")
@click.option("--prompt-file", metavar="FILE", type=click.Path(path_type=Path), help="Use the prompt in FILE.")
@click.option("--backend", metavar="NAME", help=f"Use this backend of RUN, or {KINDS}.")
@again_option
@dry_run_option
@plan_option
@backends_option
@store_option
@json_option
@quiet_option
@verbose_option
@log_options
def try_command(run: str, task: str, prompt_file: Path | None, **options: Any) -> int:
    """Run TASK of RUN (an id, the beginning of an id, or `last`) alone, on the inputs recorded in RUN, and print the
    result. RUN does not change; the attempt is kept as a run of its own.
    """
    apply_log_options(options["log_style"], options["log_level"])
    prompt = None if prompt_file is None else read_text(prompt_file)
    backend = options["backend"]
    files = FileOptions(options["plan"], options["backends"])
    request = ForkOptions(run, files, options["again"], options["dry_run"], backend)

    async def make(runner: ParallelRunner, run_id: str) -> Fork:
        prompts = {} if prompt is None else {task: prompt}
        return await runner.fork(run_id, task, prompts=prompts, only=True, backend=backend)

    with redirect_prints():
        return anyio.run(run_fork, request, make, replace(OutputOptions.of(options), result_of=task))


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """The run that is taken from, and how the new run is made."""

    run: str
    """Name of the stored run."""
    files: FileOptions = FileOptions()  # noqa: RUF009 - frozen
    again: bool = False
    """Tasks with effects may run again."""
    dry_run: bool = False
    backend: str | None = None
    """A backend that the stored run may lack, such as `openai`."""


async def run_fork(request: ForkOptions, make: MakeFork, options: OutputOptions) -> int:
    """Make a run from a stored run and show it to its end, or print its preview. Return the exit code."""
    assert options.store is not None
    open_store = read_only_store if request.dry_run else existing_store
    async with open_store(options.store) as store:
        record = await find_run(store, request.run, runs_of_plan(request.files.plan) if request.run == "last" else None)
        stored = StoredBackends.of(record, request.files)
        fork = await make(BackendSet({}).make_runner({}, store=store), record.run_id)
        backend_set = _select(stored, fork, request.backend)
        async with backend_set.open(backend_set.specs) as made:
            concurrency = options.concurrency or stored_concurrency(record) or backend_set.concurrency()
            runner = backend_set.make_runner(made, store=store, concurrency=concurrency)
            preview = await runner.preview_fork(fork)
            effects = [] if request.again else list_effects(preview, backend_set, made)
            if request.dry_run:
                return print_reuse(with_effects_marked(preview, effects), options.as_json)
            require_again(preview, effects)
            if not options.quiet:
                print_note(summarize_reuse(preview))
            fork = replace(fork, settings=_settings(fork.settings, backend_set))
            return await follow_run(runner.start_fork(fork), fork.dag, options, store)


def _select(stored: StoredBackends, fork: Fork, further: str | None) -> BackendSet:
    """Return the backends that the fork may call. Raises InvalidRequest, BackendUnavailable."""
    names = required_backends(fork.dag, stored.default, policy=fork.policy, known=stored.specs)
    if further is None or further in stored.specs:
        return stored.select(names)
    backend_set = stored.select(name for name in names if name != further)
    return replace(backend_set, specs={**backend_set.specs, further: requested_spec(BackendOptions(further))})


def _settings(kept: Mapping[str, Any], backend_set: BackendSet) -> dict[str, Any]:
    """Return the settings of the fork: those of the stored run, with the backends as they are used now."""
    now: dict[str, Any] = {**backend_set.settings()}
    return {**now, **kept, "backends": {**kept.get("backends", {}), **now["backends"]}}
