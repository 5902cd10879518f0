"""Runs made from a point of a stored run, for `plait fork` and `plait try`: files, backends, preview, and the run."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from plait.persistence.records import RunRecord
from plait.runner.cli.backends import BackendOptions, BackendSet, requested_spec, required_backends
from plait.runner.cli.display.follow import follow_run
from plait.runner.cli.display.reuse import print_reuse, summarize_reuse, with_effects_marked
from plait.runner.cli.exits import print_note
from plait.runner.cli.like import list_effects, require_again
from plait.runner.cli.lookup import existing_store, find_run, read_only_store, runs_of_plan
from plait.runner.cli.options import OutputOptions, is_utf8
from plait.runner.cli.stored_backends import FileOptions, StoredBackends
from plait.runner.domain.concurrency import DEFAULT_CONCURRENCY
from plait.runner.operations.fork_run import Fork
from plait.runner.parallel import ParallelRunner

MakeFork = Callable[[ParallelRunner, str], Awaitable[Fork]]
"""Makes the new run from the stored run with the given id."""


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
            concurrency = options.concurrency or _stored_concurrency(record) or backend_set.concurrency()
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
    """Return the backends that the fork may call. Raises CliError, BackendUnavailable."""
    names = required_backends(fork.dag, stored.default, policy=fork.policy, known=stored.specs)
    if further is None or further in stored.specs:
        return stored.select(names)
    backend_set = stored.select(name for name in names if name != further)
    return replace(backend_set, specs={**backend_set.specs, further: requested_spec(BackendOptions(further))})


def _settings(kept: Mapping[str, Any], backend_set: BackendSet) -> dict[str, Any]:
    """Return the settings of the fork: those of the stored run, with the backends as they are used now."""
    now: dict[str, Any] = {**backend_set.settings()}
    return {**now, **kept, "backends": {**kept.get("backends", {}), **now["backends"]}}


def _stored_concurrency(record: RunRecord) -> int | None:
    stored: int | None = json.loads(record.settings).get("concurrency", DEFAULT_CONCURRENCY)
    return stored


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
