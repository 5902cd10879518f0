"""The backends of a run: chosen from a plan, a file or options, opened, and kept in the settings of the run for
`resume` (see trusted_backends.py).

Settings never hold a key: a spec only names the environment variable of the key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from plait.backends.backend_protocol import Abilities, Backend, Conversation, ConversationRequest, answer_key
from plait.backends.hosts.dask_hosts import DaskHosts
from plait.backends.hosts.ssh_hosts import SSHHosts
from plait.backends.prices import Price
from plait.backends.specs.backend_specs import (
    KINDS,
    AgentSpec,
    BackendSpec,
    CommandSpec,
    FunctionSpec,
    LocalSpec,
    PersonSpec,
    PydanticAISpec,
    build,
    default_spec,
    make_unchecked,
    only_backend,
)
from plait.backends.specs.host_specs import HostsPart, placed
from plait.errors import InvalidRequest, KeyConflict, PlanError, nearest
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview
from plait.runner.client.runs import Runs
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.engine.run_options import (
    DEFAULT_BACKEND,
    RunOptions,
    needed_backends,
    policy_backends,
    task_backends,
)
from plait.runner.plan.plan_file import Plan
from plait.runner.plan.plan_models import PricePart
from plait.runner.plan.plan_positions import MAX_BYTES, read_source
from plait.runner.scheduling.own_limits import RateLimits
from plait.runner.scheduling.slots import DEFAULT_CONCURRENCY, Concurrency, default_concurrency
from plait.runner.state.stored_run import read_settings
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import COMMAND_BACKEND, tasks_within

SPECS: TypeAdapter[dict[str, BackendSpec]] = TypeAdapter(dict[str, BackendSpec])
_HOSTS: TypeAdapter[dict[str, HostsPart]] = TypeAdapter(dict[str, HostsPart])
_PRICES: TypeAdapter[dict[str, PricePart]] = TypeAdapter(dict[str, PricePart])
_LONG_ANSWER = 512  # tokens


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The backend given by options of the command line."""

    kind: str | None = None
    model: str | None = None
    base_url: str | None = None

    @property
    def is_empty(self) -> bool:
        return self == BackendOptions()


@dataclass(frozen=True, slots=True)
class BackendSet:
    """Specs of backends by name."""

    specs: Mapping[str, BackendSpec]
    default: str = DEFAULT_BACKEND
    """Name of the backend for tasks that name none."""
    folder: Path = field(default_factory=Path.cwd)
    """Folder from which relative paths in specs start."""
    plan: Path | None = None
    """Plan file that names the backends."""
    folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Folders of backends whose paths do not start from `folder`."""
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    """Prices by the name of the model."""
    hosts: Mapping[str, HostsPart] = field(default_factory=dict[str, HostsPart])
    """Groups of hosts by name. Never stored with a run: the database may come from anywhere."""

    def settings(self) -> dict[str, JsonValue]:
        """Return the settings that are stored with a run."""
        dumped = cast("JsonValue", SPECS.dump_python(dict(self.specs), mode="json", exclude_none=True))
        plan = None if self.plan is None else str(self.plan)
        kept: dict[str, JsonValue] = {"plan": plan, "folder": str(self.folder), "backends": dumped}
        kept["default_backend"] = self.default
        if self.plan is not None:
            kept["plan_sha256"] = plan_digest(self.plan)
        if self.prices:
            kept["prices"] = {model: _without_blanks(price) for model, price in self.prices.items()}
        return kept

    @asynccontextmanager
    async def open(self, names: Iterable[str]) -> AsyncGenerator[dict[str, Backend]]:
        """Open the backends in `names`; leaving the block ends processes that the backends have started. Raises
        BackendUnavailable.
        """
        made: dict[str, Backend] = {}
        hosts = {name: spec.make() for name, spec in self.hosts.items()}
        async with AsyncExitStack() as stack:
            for name in names:
                if name not in self.specs:
                    continue  # the runner reports the missing backend
                # The same model under two names is one server on this machine.
                same = next((one for one in made if self.specs[one] == self.specs[name]), None)
                if same is not None:
                    made[name] = made[same]
                    continue
                spec, folder = self.specs[name], self.folders.get(name, self.folder)
                backend = build(spec, folder=folder) if spec.on is None else self._placed(name, spec, folder, hosts)
                if isinstance(backend, AbstractAsyncContextManager):
                    await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", backend))
                made[name] = backend
            yield made

    @asynccontextmanager
    async def options_for(
        self, dag: DAG, policy: Policy | None, store: Store | None, *, concurrency: Concurrency | None, **options: Any
    ) -> AsyncGenerator[RunOptions]:
        """Open the backends that a run of `dag` with `policy` may call, and yield the options of such runs, with
        `options`; `store` need not be open yet. `concurrency` comes before the default. Raises BackendUnavailable.
        """
        async with self.open(required_backends(dag, self.default, policy=policy, known=self.specs)) as made:
            tasks_at_once = concurrency or self.concurrency()
            yield self.options(made, store=store, concurrency=tasks_at_once, **options)

    def effects(self, preview: ReusePreview, made: Mapping[str, Backend]) -> list[str]:
        """Return the tasks that would run again although they have effects and completed in the earlier run: an agent
        that may write, a tool. `made` are the open backends.
        """

        def has_effects(name: str) -> bool:
            spec = self.specs.get(name)
            if isinstance(spec, AgentSpec | PydanticAISpec):
                return not spec.is_harmless
            return not isinstance(spec, PersonSpec) and answer_key(made.get(name)) is None

        return [
            step.task_id
            for step in preview.tasks
            if (step.action is ReuseAction.RUN or step.runs_if_same)
            and step.was_completed
            and (step.at_most_once or has_effects(step.backend))
        ]

    def with_long_answers(self) -> BackendSet:
        """Return the backends, a small model on this machine with room for a plan: it stops late."""
        specs = {
            name: spec.model_copy(update={"max_tokens": _LONG_ANSWER}) if isinstance(spec, LocalSpec) else spec
            for name, spec in self.specs.items()
        }
        return replace(self, specs=specs)

    def unchecked(self, name: str) -> Backend | None:
        """Return the backend `name` for its properties alone: see `make_unchecked`."""
        return make_unchecked(self.specs[name], folder=self.folders.get(name, self.folder))

    def _placed(self, name: str, spec: BackendSpec, folder: Path, hosts: Mapping[str, SSHHosts | DaskHosts]) -> Backend:
        """Return the backend on its hosts. Raises InvalidRequest without them."""
        if spec.on is None or spec.on not in hosts:
            have = f"; the hosts given are {', '.join(sorted(hosts))}" if hosts else ""
            raise InvalidRequest(
                f"backend {name!r} runs on the hosts {spec.on!r}, which are not given{have}; put them under `hosts:` "
                "in the plan file, or name a file with --hosts"
            )
        return placed(spec, folder, hosts[spec.on])

    def limits(self) -> dict[str, int]:
        """Return the concurrency limit of each backend that has one: of a backend on hosts, the sum of their slots."""
        limits: dict[str, int] = {}
        for name, spec in self.specs.items():
            group = None if spec.on is None else self.hosts.get(spec.on)
            limit = spec.concurrency or (None if group is None else group.slots)
            if limit is not None:
                limits[name] = limit
        return limits

    def concurrency(self) -> int | None:
        """Return the default number of tasks at once: see `default_concurrency`. Backends on hosts count as many as
        their hosts have slots.

        None if a run finds the sum only once the hosts are connected.
        """
        used = {spec.on for spec in self.specs.values() if spec.on is not None}
        slots = [self.hosts[name].slots for name in used if name in self.hosts]
        if None in slots:
            return None
        return default_concurrency([*slots, *(spec.concurrency for spec in self.specs.values() if spec.on is None)])

    def rates(self) -> dict[str, RateLimits]:
        """Return the limits of rate of each backend that has one."""
        given = {name: getattr(spec, "limits", None) for name, spec in self.specs.items()}
        return {name: RateLimits(**limits.model_dump()) for name, limits in given.items() if limits is not None}

    def options(self, made: Mapping[str, Backend], **options: Any) -> RunOptions:
        """Return the options of runs on the open backends `made`, with the default of this set."""
        # A task without a backend then runs under the name of the default, and the limit of that backend applies.
        limits = {name: limit for name, limit in self.limits().items() if name in made}
        rates = {name: limit for name, limit in self.rates().items() if name in made}
        default = self.default if self.default in made else None
        return RunOptions(backends=made, default=default, limits=limits, rates=rates, prices=self.prices, **options)


def required_backends(
    dag: DAG,
    default: str,
    statuses: Iterable[TaskStatus] = (),
    *,
    policy: Policy | None = None,
    known: Iterable[str] = (),
) -> list[str]:
    """Return the backends of all tasks that are not done, in the order of the tasks, then those that later tasks may
    use: a task that adds tasks may name any of `known`.
    """
    statuses = list(statuses) or [TaskStatus.PENDING] * len(dag)
    names = needed_backends(task_backends(dag, default), statuses)
    further = [] if policy is None else sorted(policy_backends(policy, default))
    unfinished = [task for task, status in zip(dag, statuses, strict=True) if status not in TASK_DONE]
    checks = [task.check for task in unfinished if task.check is not None]
    further += [check.backend for check in checks if check.backend is not None]
    if any(check.run for check in checks):
        further.append(COMMAND_BACKEND)
    further += [name or default for task in unfinished if task.call is not None for name in task.call.backends]
    if any(task.adds_tasks for task in unfinished):
        further += known
    return list(dict.fromkeys([*names, *further]))


@dataclass(frozen=True, slots=True)
class HostsInUse:
    """A group of hosts in a file."""

    name: str
    part: HostsPart
    needs: Collection[Mapping[str, float] | None]
    """The resources of an attempt, of each kind that the backends in the file place on the hosts."""


def backend_set_of_file(path: Path | None, options: BackendOptions) -> BackendSet:
    """Return the backends of the plan file at `path`; without a file, that of `options` or of the environment."""
    if path is None:
        return BackendSet({DEFAULT_BACKEND: requested_spec(options)})
    if not options.is_empty:
        raise InvalidRequest(f"{path} names the backends; leave --backend, --model and --base-url out")
    value = read_plan_data(path)
    specs = _read_specs(value, path)
    if not specs:
        raise InvalidRequest(f"{path} names no backends; put them under `backends:`")
    given: object = value.get("defaults")
    default = cast("dict[str, object]", given).get("backend") if isinstance(given, dict) else None
    if default is None:
        default = only_backend(specs) or DEFAULT_BACKEND
    elif default not in specs:
        raise InvalidRequest(f"{path}: defaults.backend: there is no backend {default!r} under `backends:`")
    hosts = read_hosts(value.get("hosts"), path)
    with _mistakes_in(path, "prices"):
        prices = read_prices(value.get("prices"))
    return BackendSet(specs, str(default), path.resolve().parent, path.resolve(), prices=prices, hosts=hosts)


def _read_specs(value: Mapping[str, Any], path: Path) -> dict[str, BackendSpec]:
    with _mistakes_in(path, "backends"):
        return SPECS.validate_python(value.get("backends") or {})


def read_hosts(value: object, path: Path) -> dict[str, HostsPart]:
    """Return the groups of hosts, in the form of a plan's `hosts`, in the file at `path`. Raises InvalidRequest."""
    with _mistakes_in(path, "hosts"):
        return _HOSTS.validate_python(value or {})


@contextmanager
def _mistakes_in(path: Path, key: str) -> Generator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{path}: {key}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def hosts_of_file(path: Path | None) -> dict[str, HostsPart]:
    """Return the groups of hosts in the file that `--hosts` names: a plan, or the part under `hosts` alone. Raises
    InvalidRequest.
    """
    return {one.name: one.part for one in hosts_in_use(path)}


def hosts_in_use(path: Path | None) -> list[HostsInUse]:
    """Return the groups of hosts in the file at `path`, as `hosts_of_file`, with their use by the backends there."""
    if path is None:
        return []
    value = read_plan_data(path)
    is_plan = "hosts" in value or "tasks" in value
    found = read_hosts(value.get("hosts") if is_plan else value, path)
    if not found:
        raise InvalidRequest(f"{path} names no hosts; put them under `hosts:`")
    specs = _read_specs(value, path).values() if is_plan else ()
    needs: dict[str, list[Mapping[str, float] | None]] = {}
    for spec in specs:
        if spec.on is not None and spec.needs not in (kinds := needs.setdefault(spec.on, [])):
            kinds.append(spec.needs)
    return [HostsInUse(name, part, needs.get(name, ())) for name, part in found.items()]


def _without_blanks(price: Price) -> dict[str, JsonValue]:
    return {name: amount for name, amount in asdict(price).items() if amount is not None}


def read_prices(value: object) -> dict[str, Price]:
    """Return the prices in the form of a plan. Raises ValidationError."""
    return {model: one.price() for model, one in _PRICES.validate_python(value or {}).items()}


def plan_digest(path: Path) -> str | None:
    """Return a digest of the plan file; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def read_plan_data(path: Path) -> dict[str, Any]:
    """Return the contents of a file that may be a plan. Raises InvalidRequest, PlanError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); check the path") from None
    form = path.suffix.lower().removeprefix(".")
    value = read_source(data, format=form if form in {"json", "toml"} else "yaml", file=str(path)).value
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def called_plan_data(path: Path) -> dict[Path, dict[str, Any]]:
    """Return the contents of the plan file at `path`, and of the plans that it calls, each by the path of the file.
    Called plans that cannot be read are left out. Raises InvalidRequest, PlanError.
    """
    contents = {path.resolve(): read_plan_data(path)}
    waiting = list(contents)
    while waiting:
        file = waiting.pop()
        for name in _called_files(contents[file].get("tasks")):
            called = (file.parent / Path(name).expanduser()).resolve()
            if called not in contents:
                with suppress(InvalidRequest, PlanError):
                    contents[called] = read_plan_data(called)
                    waiting.append(called)
    return contents


def _called_files(tasks: object) -> Iterator[str]:
    for task in cast("list[object]", tasks) if isinstance(tasks, list) else []:
        if isinstance(task, dict):
            part = cast("dict[str, Any]", task)
            for holder in (part, part.get("loop")):
                if isinstance(holder, dict) and isinstance(name := cast("dict[str, Any]", holder).get("plan"), str):
                    yield name
            yield from _called_files([inner for _, inner in tasks_within(part)])


def backend_set_of_plan(plan: Plan, options: BackendOptions, hosts: Path | None = None) -> BackendSet:
    """Return the backends of the plan, and the backend of `options` or of the environment if the plan leaves the choice
    open. Groups of hosts in the file `hosts` replace those of the plan.
    """
    specs, default = dict(plan.backends), plan.default_backend or DEFAULT_BACKEND
    named = [*map(plan.dag.backend_of, plan.dag), *(plan.policy.backends() if plan.policy else ())]
    named += [name for task in plan.dag if task.call is not None for name in task.call.backends]
    is_open = default not in specs and None in named
    file = None if plan.path.is_dir() else plan.path.resolve()
    if not options.is_empty and not is_open:
        named_by = plan.path if file else "the plan"
        raise InvalidRequest(f"{named_by} names its backends itself; leave --backend, --model and --base-url out")
    if is_open:
        specs[default] = requested_spec(options)
    groups = {**plan.hosts, **hosts_of_file(hosts)}
    return BackendSet(specs, default, plan.folder.resolve(), file, prices=plan.prices, hosts=groups)


def requested_spec(options: BackendOptions) -> BackendSpec:
    """Return the backend that `options` or the environment names. Raises InvalidRequest for a misspelt kind,
    BackendUnavailable.
    """
    if options.kind and options.kind not in KINDS and (hint := nearest(options.kind, KINDS)):
        raise InvalidRequest(f"there is no backend {options.kind!r}{hint}")
    model = options.model
    if options.kind == "local" and model is not None:
        # A path on the command line starts from the current folder; a path in a spec starts from the folder of the
        # plan.
        model = str(Path(model).expanduser().resolve())
    return default_spec(os.environ, kind=options.kind, model=model, base_url=options.base_url)


async def queue_run(
    plan: Plan,
    backend_set: BackendSet,
    store: Store,
    concurrency: Concurrency | None,
    key: str | None = None,
    *,
    budget: float | None = None,
    unpriced: bool = False,
) -> str:
    """Store a queued run of `plan`, one for a key, and return its id. `budget` comes before that of the plan. Raises as
    `Runs.create`, and KeyConflict if the run of the key has another `concurrency`.
    """
    plan = plan.fitted_to(backend_set.specs, backend_set.default)
    names = required_backends(plan.dag, backend_set.default, policy=plan.policy, known=backend_set.specs)
    budget = plan.budget if budget is None else budget
    runs = Runs(queueing_options(backend_set, names, store, concurrency, budget=budget, unpriced=unpriced))
    run_id = await runs.create(plan.dag, key=key, settings=backend_set.settings(), policy=plan.policy)
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


def queueing_options(
    backend_set: BackendSet, names: Iterable[str], store: Store, concurrency: Concurrency | None, **options: Any
) -> RunOptions:
    """Return the options of runs that are created for the backends in `names`, none of which is opened."""
    specs = backend_set.specs
    unopened = {name: _Unopened(specs[name], backend_set.unchecked(name)) for name in names if name in specs}
    return backend_set.options(unopened, store=store, concurrency=concurrency, **options)


class _Unopened:
    """Stands for a backend that is opened only where the run is executed."""

    def __init__(self, spec: BackendSpec, made: Backend | None) -> None:
        self.adjustable = spec.adjustable
        self.needs_prompt = not isinstance(spec, FunctionSpec)
        self.allows = spec.allows if isinstance(spec, CommandSpec) else None
        self.takes_files = spec.file_form
        self.parameters = Abilities.of(made).parameters
        self._answer_key = answer_key(made)

    def answer_key(self) -> JsonValue:
        return self._answer_key

    def new_session_id(self) -> str | None:
        return None

    def open(self, request: ConversationRequest) -> AbstractAsyncContextManager[Conversation]:  # noqa: ARG002 - signature of Backend
        raise AssertionError("a queued run calls no backend")


def stored_concurrency(record: RunRecord) -> Concurrency | None:
    """Return how many tasks of the run may be under way at once, as stored with the run. None: as many as the hosts of
    the backends have slots.
    """
    stored = read_settings(record).get("concurrency", DEFAULT_CONCURRENCY)
    if stored == "auto":
        return "auto"
    return stored if stored is None or (isinstance(stored, int) and stored > 0) else DEFAULT_CONCURRENCY
