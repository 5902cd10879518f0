"""Which backends a run needs, how they are made, and what its settings keep of them for `resume`.

Settings never hold a key: a spec only names the environment variable that has it. The database may have come from
anywhere: a Python function is never imported by a name from it, but taken from the plan file as it is now; a key is not
sent to a server that only the database names; and what an agent may do is for the plan file to say, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from backends.agents.spec import AgentSpec
from backends.anthropic import AnthropicBackend
from backends.openai import OpenAIBackend
from backends.protocol import Backend
from backends.sdk import is_environments
from backends.spec import KINDS, AnthropicSpec, BackendSpec, FunctionSpec, OpenAISpec, build, default_spec
from persistence.records import RunRecord
from runner import DAG, ParallelRunner, Plan
from runner.cli.exits import Fault
from runner.cli.lookup import names_its_backends
from runner.config import DEFAULT_BACKEND, needed_backends, policy_backends, task_backends
from runner.dag import nearest
from runner.plan.source import MAX_BYTES, read_source
from runner.policy import Policy
from runner.status import TASK_DONE, TaskStatus
from runner.task import JsonValue

_SPECS: TypeAdapter[dict[str, BackendSpec]] = TypeAdapter(dict[str, BackendSpec])


@dataclass(frozen=True, slots=True)
class Wish:
    """The backend that a person asked for on the command line."""

    kind: str | None = None
    model: str | None = None
    base_url: str | None = None

    @property
    def empty(self) -> bool:
        return self == Wish()


@dataclass(frozen=True, slots=True)
class Backing:
    """Backends by name, as specs. `default` is the name of the one for tasks that name none."""

    specs: Mapping[str, BackendSpec]
    default: str = DEFAULT_BACKEND
    folder: Path = field(default_factory=Path.cwd)
    plan: Path | None = None

    def settings(self) -> dict[str, JsonValue]:
        """What a run's settings keep."""
        dumped = cast("JsonValue", _SPECS.dump_python(dict(self.specs), mode="json", exclude_none=True))
        plan = None if self.plan is None else str(self.plan)
        return {"plan": plan, "folder": str(self.folder), "backends": dumped, "default_backend": self.default}

    @asynccontextmanager
    async def running(self, names: Iterable[str]) -> AsyncGenerator[dict[str, Backend]]:
        """The backends in `names`, made; what they started ends with the block. Raises BackendUnavailable."""
        made: dict[str, Backend] = {}
        async with AsyncExitStack() as stack:
            for name in names:
                if name not in self.specs:
                    continue  # the runner says what is missing
                # The same model under two names is one server on this machine, not two.
                same = next((one for one in made if self.specs[one] == self.specs[name]), None)
                if same is not None:
                    made[name] = made[same]
                    continue
                backend = build(self.specs[name], folder=self.folder)
                if isinstance(backend, AbstractAsyncContextManager):
                    await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", backend))
                made[name] = backend
            yield made

    def limits(self) -> dict[str, int]:
        """How many tasks may run at once on a backend, for those that say so."""
        return {name: spec.concurrency for name, spec in self.specs.items() if spec.concurrency is not None}

    def runner(self, made: Mapping[str, Backend], **options: Any) -> ParallelRunner:
        """A runner with `made`, whose default is ours."""
        # Tasks without a backend then run under the default's own name, so its limit holds for them as well.
        limits = {name: limit for name, limit in self.limits().items() if name in made}
        default = self.default if self.default in made else None
        return ParallelRunner(backends=made, default=default, limits=limits, **options)


def _needs_the_plan(spec: BackendSpec) -> bool:
    """Whether a database, which may have come from anywhere, is not enough to have this done."""
    if isinstance(spec, AgentSpec):
        return not spec.is_harmless
    return isinstance(spec, OpenAISpec | AnthropicSpec) and _gives_a_key_away(spec)


def _gives_a_key_away(spec: OpenAISpec | AnthropicSpec) -> bool:
    """Whether a stored spec would send a key that is set here to where the environment does not send it by itself."""
    # Headers that the environment adds never go anywhere else: see backends/sdk.py.
    backend = OpenAIBackend if isinstance(spec, OpenAISpec) else AnthropicBackend
    as_usual = spec.base_url is None or is_environments(spec.base_url, backend.url_env, backend.default_url)
    return not (as_usual and spec.api_key_env == backend.api_key_env) and bool(os.environ.get(spec.api_key_env))


def names_needed(
    dag: DAG,
    default: str,
    statuses: Iterable[TaskStatus] = (),
    *,
    policy: Policy | None = None,
    known: Iterable[str] = (),
) -> list[str]:
    """The backends of all tasks that are not done, in the order of the tasks, and of those that may follow them: a task
    that adds tasks may name any of the `known` ones.
    """
    statuses = list(statuses) or [TaskStatus.PENDING] * len(dag)
    names = needed_backends(task_backends(dag, default), statuses)
    further = [] if policy is None else sorted(policy_backends(policy, default))
    if any(task.adds_tasks and status not in TASK_DONE for task, status in zip(dag, statuses, strict=True)):
        further += known
    return list(dict.fromkeys([*names, *further]))


def backing_of_file(path: Path | None, wish: Wish) -> Backing:
    """The backends that the plan file at `path` names; what `wish` or the environment gives where there is no file."""
    if path is None:
        return Backing({DEFAULT_BACKEND: asked_for(wish)})
    if not wish.empty:
        raise Fault(f"{path} names the backends; leave --backend, --model and --base-url out")
    try:
        value = _read(path)
    except OSError as error:
        raise Fault(f"{path} cannot be read ({error.strerror}); check --backends") from None
    try:
        specs = _SPECS.validate_python(value.get("backends") or {})
    except ValidationError as error:
        first = error.errors()[0]
        raise Fault(f"{path}: backends.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not specs:
        raise Fault(f"{path} names no backends; put them under `backends:`")
    given: object = value.get("defaults")
    default = cast("dict[str, object]", given).get("backend") if isinstance(given, dict) else None
    if default is None:
        default = next(iter(specs)) if len(specs) == 1 else DEFAULT_BACKEND
    elif default not in specs:
        raise Fault(f"{path}: defaults.backend: there is no backend {default!r} under `backends:`")
    return Backing(specs, str(default), path.resolve().parent, path.resolve())


def _read(path: Path) -> dict[str, Any]:
    """What stands in a plan file, whether it is a plan or not. Raises OSError, PlanError."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    form = path.suffix.lower().removeprefix(".")
    value = read_source(data, format=form if form in {"json", "toml"} else "yaml", file=str(path)).value
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def backing_of_plan(plan: Plan, wish: Wish) -> Backing:
    """The plan's backends, and what `wish` or the environment gives where it leaves the choice open."""
    specs, default = dict(plan.backends), plan.default_backend
    if default is None and len(specs) == 1:
        default = next(iter(specs))
    default = default or DEFAULT_BACKEND
    named = [*map(plan.dag.backend_of, plan.dag), *(plan.policy.backends() if plan.policy else ())]
    is_open = default not in specs and None in named
    if not wish.empty and not is_open:
        raise Fault(f"{plan.path} names its backends itself; leave --backend, --model and --base-url out")
    if is_open:
        specs[default] = asked_for(wish)
    return Backing(specs, default, plan.folder.resolve(), plan.path.resolve())


def asked_for(wish: Wish) -> BackendSpec:
    """The backend that `wish` or the environment gives. Raises Fault for a misspelt kind, BackendUnavailable."""
    if wish.kind and wish.kind not in KINDS and (hint := nearest(wish.kind, KINDS)):
        raise Fault(f"there is no backend {wish.kind!r}{hint}")
    model = wish.model
    if wish.kind == "local" and model is not None:
        # What is typed is relative to where it is typed, while a spec's paths start from the plan's folder.
        model = str(Path(model).expanduser().resolve())
    return default_spec(os.environ, kind=wish.kind, model=model, base_url=wish.base_url)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a stored run's settings say about its backends."""

    run_id: str
    specs: Mapping[str, Any]
    default: str
    folder: Path
    plan: Path | None

    @classmethod
    def of(cls, run: RunRecord) -> Kept:
        """Raises Fault for a run that did not come from a plan file."""
        if not names_its_backends(run):
            raise Fault(
                f"run {run.run_id} was not made by `plait run`, so its store does not say which backends it needs; "
                "go on with it from Python: ParallelRunner(...).resume(run_id)"
            )
        settings = json.loads(run.settings)
        specs, default, folder = (settings[key] for key in ("backends", "default_backend", "folder"))
        plan = settings.get("plan")
        return cls(run.run_id, specs, default, Path(folder), Path(plan) if plan else None)

    def outliving(self) -> dict[str, Backend]:
        """Those whose turns may have outlived their runner, to ask them what is left. Nothing is started or checked."""
        specs = {name: self._spec(name) for name in self.specs}
        return {name: spec.make(self.folder) for name, spec in specs.items() if isinstance(spec, AgentSpec)}

    def differing(self, now: Mapping[str, BackendSpec]) -> list[str]:
        """Which options of backends are otherwise in the plan file than in the store, which is what counts for them."""
        found: list[str] = []
        for name in self.specs.keys() & now.keys():
            kept = self._spec(name)
            if kept is not None and not isinstance(kept, FunctionSpec):
                old, new = kept.model_dump(), now[name].model_dump()
                found += (f"backends.{name}.{key}" for key in {**old, **new} if old.get(key) != new.get(key))
        return found

    def backing(self, names: Iterable[str], moved_to: Path | None) -> Backing:
        """The backends in `names`. `moved_to` is the plan file, if it is not where it was."""
        plan = self.plan if moved_to is None else moved_to.resolve()
        folder = self.folder if moved_to is None or plan is None else plan.parent
        on_disk: Mapping[str, BackendSpec] | None = None
        specs: dict[str, BackendSpec] = {}
        for name in names:
            spec = self._spec(name)
            if isinstance(spec, FunctionSpec):
                on_disk = self._on_disk(plan, name) if on_disk is None else on_disk
                spec = on_disk.get(name)
                if spec is None:
                    raise Fault(f"{plan} has no backend {name!r} any more; put it back, or name the plan with --plan")
            elif spec is not None and _needs_the_plan(spec):
                on_disk = self._on_disk(plan, name) if on_disk is None and plan is not None else on_disk or {}
                if on_disk.get(name) != spec:
                    raise Fault(self._distrust(name, spec))
            if spec is not None:
                specs[name] = spec
        return Backing(specs, self.default, folder, plan)

    def _distrust(self, name: str, spec: BackendSpec) -> str:
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

    def _spec(self, name: str) -> BackendSpec | None:
        if name not in self.specs:
            return None
        try:
            return _SPECS.validate_python({name: self.specs[name]})[name]
        except ValidationError:
            raise Fault(f"the stored backend {name!r} of run {self.run_id} cannot be read; start a new run") from None

    def _on_disk(self, plan: Path | None, name: str) -> Mapping[str, BackendSpec]:
        why = f"backend {name!r} of run {self.run_id} is taken from the plan file, not from the store"
        if plan is None:
            raise Fault(f"{why}; name the file with --plan PATH")
        try:
            value = _read(plan)
        except OSError as error:
            reason = f"{plan} cannot be read ({error.strerror})"
            raise Fault(f"{why}, and {reason}; if it has moved, name it with --plan PATH") from None
        try:
            return _SPECS.validate_python(value.get("backends") or {})
        except ValidationError:
            raise Fault(f"{why}, and {plan} has mistakes now; `plait check` says which") from None
