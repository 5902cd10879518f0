"""The backends of a stored run: what its settings say of them, if the command made it, and what only a file may say.

The database may have come from anywhere: a Python function is never imported by a name from it, but taken from the plan
file as it is now; a key is not sent to a server that only the database names; and what an agent may do is for the plan
file to say, too. A file that a person names for it is believed in all.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.backends.errors import BackendUnavailable
from plait.backends.llm.anthropic import AnthropicBackend
from plait.backends.llm.openai import OpenAIBackend
from plait.backends.llm.sdk import is_environments
from plait.backends.protocol import Backend
from plait.backends.spec.agents import AgentSpec
from plait.backends.spec.build import AnthropicSpec, BackendSpec, FunctionSpec, OpenAISpec
from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.cli.backends import SPECS, BackendOptions, BackendSet, backend_set_of_file, read_plan_data
from plait.runner.cli.exits import CliError, print_note
from plait.runner.cli.lookup import stores_backends
from plait.runner.domain.status import TaskStatus
from plait.runner.parallel import ParallelRunner
from plait.runner.state.codec import dag_of


@dataclass(frozen=True, slots=True)
class Files:
    """What a person names for a stored run: `plan`, its plan file, if it is not where it was, and `backends`, a plan
    file whose backends are to be used in place of those of the same names.
    """

    plan: Path | None = None
    backends: Path | None = None


@dataclass(frozen=True, slots=True)
class StoredBackends:
    """What a stored run's settings say about its backends, and the files that a person names for it."""

    run_id: str
    specs: Mapping[str, Any]
    default: str
    folder: Path
    plan: Path | None
    files: Files
    replacements: Mapping[str, BackendSpec]
    """The backends of `files.backends` that are to be used in place of those in `specs`."""
    made_by_program: bool = False
    """A program made the run, so that its settings say nothing, and `files.backends` says it all."""

    @classmethod
    def of(cls, run: RunRecord, files: Files) -> StoredBackends:
        """Raises Fault, also where a program made the run and no file says what its backends are."""
        given = None if files.backends is None else backend_set_of_file(files.backends, BackendOptions())
        if not stores_backends(run):
            if given is not None:
                specs = given.specs
                return cls(run.run_id, specs, given.default, given.folder, None, files, specs, made_by_program=True)
            raise CliError(
                f"run {run.run_id} was not made by `plait run`, so its store does not say which backends it needs; "
                "go on with it from Python: ParallelRunner(...).resume(run_id); or name a plan file that has them "
                "by the same names: --backends FILE"
            )
        settings = json.loads(run.settings)
        specs, default, folder = (settings[key] for key in ("backends", "default_backend", "folder"))
        plan = settings.get("plan") if files.plan is None else files.plan.resolve()
        replacements = {} if given is None else {name: spec for name, spec in given.specs.items() if name in specs}
        if given is not None and not replacements:
            raise CliError(
                f"{files.backends} names {_join_names(given.specs)} under `backends:`, and run {run.run_id} has "
                f"{_join_names(specs)}: give what is to be used in place of one of these its name"
            )
        return cls(run.run_id, specs, default, Path(folder), Path(plan) if plan else None, files, replacements)

    def make_agents(self) -> dict[str, Backend]:
        """Those whose turns may have outlived their runner, to ask them what is left. Nothing is started or checked."""
        specs = {name: self._stored_spec(name) for name in self.specs}
        return {name: spec.make(self.folder) for name, spec in specs.items() if isinstance(spec, AgentSpec)}

    def changed_options(self, now: Mapping[str, BackendSpec]) -> list[str]:
        """Which options of backends are otherwise in the plan file than in the store, which is what counts for them."""
        found: list[str] = []
        for name in (self.specs.keys() & now.keys()) - self.replacements.keys():
            stored = self._stored_spec(name)
            if stored is not None and not isinstance(stored, FunctionSpec):
                old, new = stored.model_dump(), now[name].model_dump()
                found += (f"backends.{name}.{key}" for key in {**old, **new} if old.get(key) != new.get(key))
        return found

    def select(self, names: Iterable[str]) -> BackendSet:
        """The backends in `names`. Raises Fault."""
        plan_file, backends_file = self.files.plan, self.files.backends
        folder = self.folder if plan_file is None else plan_file.resolve().parent
        specs: dict[str, BackendSpec] = {}
        for name in names:
            spec = self.replacements[name] if name in self.replacements else self._trusted_spec(name)
            if spec is not None:
                specs[name] = spec
            elif self.made_by_program:
                raise CliError(self._missing_message(name))
        folders = {} if backends_file is None else dict.fromkeys(self.replacements, backends_file.resolve().parent)
        return BackendSet(specs, self.default, folder, self.plan, folders)

    def _trusted_spec(self, name: str) -> BackendSpec | None:
        """The stored backend, as far as its store is believed; None where there is none."""
        spec = self._stored_spec(name)
        if isinstance(spec, FunctionSpec):
            spec = self._plan_specs(name).get(name)
            if spec is None:
                raise CliError(
                    f"{self.plan} has no backend {name!r} any more; put it back, or name the plan with --plan"
                )
            return spec
        if spec is None or not _needs_plan_file(spec):
            return spec
        if self.plan is None or self._plan_specs(name).get(name) != spec:
            raise CliError(self._distrust_message(name, spec))
        return spec

    def _missing_message(self, name: str) -> str:
        has = f"{self.files.backends} names {_join_names(self.specs)} under `backends:`, and run {self.run_id} needs"
        if name == self.default:
            return f"{has} one for tasks that name none; say which with `defaults: {{backend: NAME}}`"
        return f"{has} {name!r} as well; add it"

    def _distrust_message(self, name: str, spec: BackendSpec) -> str:
        if isinstance(spec, AgentSpec):
            return (
                f"the store of run {self.run_id} says what agent {name!r} may do, or which command it is, and the plan "
                f"file says otherwise, or nothing; put it into the plan file, or name that file with --plan PATH"
            )
        assert isinstance(spec, OpenAISpec | AnthropicSpec)
        return (
            f"the store of run {self.run_id} says that backend {name!r} sends the key in {spec.api_key_env} to "
            f"{spec.base_url or 'its default server'}, and nothing else says so; if that is right, set "
            f"{spec.kind.upper()}_BASE_URL, or have the plan file name that backend; else unset the key"
        )

    def _stored_spec(self, name: str) -> BackendSpec | None:
        if name not in self.specs:
            return None
        try:
            return SPECS.validate_python({name: self.specs[name]})[name]
        except ValidationError:
            raise CliError(
                f"the stored backend {name!r} of run {self.run_id} cannot be read; start a new run"
            ) from None

    def _plan_specs(self, name: str) -> Mapping[str, BackendSpec]:
        why = f"backend {name!r} of run {self.run_id} is taken from the plan file, not from the store"
        plan = self.plan
        if plan is None:
            raise CliError(f"{why}; name the file with --plan PATH")
        try:
            value = read_plan_data(plan)
        except OSError as error:
            reason = f"{plan} cannot be read ({error.strerror})"
            raise CliError(f"{why}, and {reason}; if it has moved, name it with --plan PATH") from None
        try:
            return SPECS.validate_python(value.get("backends") or {})
        except ValidationError:
            raise CliError(f"{why}, and {plan} has mistakes now; `plait check` says which") from None


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _needs_plan_file(spec: BackendSpec) -> bool:
    """Whether a database, which may have come from anywhere, is not enough to have this done."""
    if isinstance(spec, AgentSpec):
        return not spec.is_harmless
    return isinstance(spec, OpenAISpec | AnthropicSpec) and _leaks_key(spec)


def _leaks_key(spec: OpenAISpec | AnthropicSpec) -> bool:
    """Whether a stored spec would send a key that is set here to where the environment does not send it by itself."""
    # Headers that the environment adds never go anywhere else: see backends/sdk.py.
    backend = OpenAIBackend if isinstance(spec, OpenAISpec) else AnthropicBackend
    as_usual = spec.base_url is None or is_environments(spec.base_url, backend.url_env, backend.default_url)
    return not (as_usual and spec.api_key_env == backend.api_key_env) and bool(os.environ.get(spec.api_key_env))


_AS_STORED = Files()


@asynccontextmanager
async def inspecting_runner(
    store: Store, record: RunRecord, tasks: tuple[TaskRecord, ...], files: Files = _AS_STORED
) -> AsyncGenerator[ParallelRunner]:
    """A runner on `store` that can tell whether the run's turns have outlived their process. Where a backend cannot be
    had here it says so, and knows what is stored.
    """
    async with AsyncExitStack() as stack:
        yield await _make_runner(stack, store, record, tasks, files)


async def _make_runner(
    stack: AsyncExitStack, store: Store, record: RunRecord, tasks: tuple[TaskRecord, ...], files: Files
) -> ParallelRunner:
    dag = dag_of(record, tasks)
    under_way = [dag[task.task_id] for task in tasks if TaskStatus(task.status) is TaskStatus.RUNNING]
    if under_way:
        try:
            stored = StoredBackends.of(record, files)
            made = stored.make_agents()
            names = list(dict.fromkeys(dag.backend_of(task) or stored.default for task in under_way))
            others = [name for name in names if name not in made]
            if others:
                made |= await stack.enter_async_context(stored.select(others).open(others))
            return BackendSet({}, stored.default).runner(made, store=store)
        except (CliError, BackendUnavailable) as error:
            why = error.message if isinstance(error, CliError) else error
            print_note(f"plait: whether anything of it is still at work cannot be told: {why}")
    return BackendSet({}).runner({}, store=store)
