"""`plait submit`: store a run for the workers of a store."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import click

from plait.backends.protocol import Backend, Conversation, ConversationRequest
from plait.backends.spec.build import BackendSpec, FunctionSpec
from plait.json_form import JsonValue
from plait.persistence.protocol import Store
from plait.runner import Plan
from plait.runner.cli.backends import BackendOptions, BackendSet, backend_set_of_plan, required_backends
from plait.runner.cli.commands.resume import stored_concurrency
from plait.runner.cli.exits import COMPLETED, print_line, print_note
from plait.runner.cli.lookup import open_store
from plait.runner.cli.options import (
    StorePlace,
    backend_options,
    concurrency_option,
    read_plan,
    set_option,
    store_option,
)
from plait.runner.cli.stored_backends import backends_of_file_only
from plait.runner.errors import KeyConflict
from plait.runner.parallel import ParallelRunner


@click.command("submit")
@click.argument("plan", type=click.Path(path_type=Path))
@set_option
@click.option(
    "--key", metavar="TEXT", help="Store one run only, however often the same plan is submitted with this key."
)
@concurrency_option("as the plan says")
@backend_options
@store_option
def submit_command(plan: Path, inputs: dict[str, str], **options: Any) -> int:
    """Store a run of the plan in the file PLAN, or on standard input if PLAN is `-`, as queued, and print its id.
    `plait worker` or `plait resume` executes the run.

    No backend is opened, so keys and models are needed where the run is executed only.
    """
    loaded = read_plan(plan, inputs)
    backend_set = backend_set_of_plan(loaded, BackendOptions(options["backend"], options["model"], options["base_url"]))
    concurrency = options["concurrency"] or loaded.concurrency or backend_set.concurrency()
    return anyio.run(submit, loaded, backend_set, concurrency, options["key"], options["store_path"])


async def submit(
    plan: Plan, backend_set: BackendSet, concurrency: int | None, key: str | None, place: StorePlace
) -> int:
    """Store a queued run of `plan`, and print its id. Return the exit code."""
    async with open_store(place) as store:
        run_id = await queue_run(plan, backend_set, store, concurrency, key)
    print_line(run_id)
    if backend_set.plan is None and (names := backends_of_file_only(backend_set)):
        print_note(
            f"the plan is in no file, and workers take backend {', '.join(names)} from a file only: start them with "
            "--backends FILE, a plan file that has the backend as submitted"
        )
    return COMPLETED


async def queue_run(
    plan: Plan, backend_set: BackendSet, store: Store, concurrency: int | None, key: str | None = None
) -> str:
    """Store a queued run of `plan`, one for a key, and return its id. Raises as `ParallelRunner.create_run`, and
    KeyConflict if the run of the key has another `concurrency`.
    """
    plan = plan.fitted_to(backend_set.specs, backend_set.default)
    names = required_backends(plan.dag, backend_set.default, policy=plan.policy, known=backend_set.specs)
    runner = make_queueing_runner(backend_set, names, store, concurrency)
    run_id = await runner.create_run(plan.dag, key=key, settings=backend_set.settings(), policy=plan.policy)
    if key is not None and (record := await store.get_run(run_id)) is not None:
        # A runner may be restarted with another concurrency, but here the number is part of what was submitted.
        stored = stored_concurrency(record)
        if stored != concurrency:
            raise KeyConflict(
                f"key {key!r} was used at {record.created_at} for run {run_id}, with "
                f"{stored or 'a changing number of'} tasks at once, not {concurrency or 'a changing number'}; "
                "give a new run a new key"
            )
    return run_id


def make_queueing_runner(
    backend_set: BackendSet, names: Iterable[str], store: Store, concurrency: int | None
) -> ParallelRunner:
    """Return a runner that creates runs on the backends in `names`, and opens none of them."""
    unopened = {name: _unopened(backend_set, name) for name in names if name in backend_set.specs}
    return backend_set.make_runner(unopened, store=store, concurrency=concurrency)


def _unopened(backend_set: BackendSet, name: str) -> Backend:
    """Return a backend that stands for another one, which is opened only where the run is executed."""
    spec, answer_key = backend_set.specs[name], backend_set.answer_key(name)
    return _Unopened(spec) if answer_key is None else _UnopenedReusable(spec, answer_key)


class _Unopened:
    def __init__(self, spec: BackendSpec) -> None:
        self.adjustable = spec.adjustable
        self.needs_prompt = not isinstance(spec, FunctionSpec)
        if spec.file_form is not None:
            self.takes_files = spec.file_form

    def new_session_id(self) -> str | None:
        return None

    def open(self, request: ConversationRequest) -> AbstractAsyncContextManager[Conversation]:  # noqa: ARG002 - signature of Backend
        raise AssertionError("a queued run calls no backend")


class _UnopenedReusable(_Unopened):
    def __init__(self, spec: BackendSpec, answer_key: JsonValue) -> None:
        super().__init__(spec)
        self._answer_key = answer_key

    def answer_key(self) -> JsonValue:
        return self._answer_key
