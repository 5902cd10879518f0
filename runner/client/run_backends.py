"""The backends of a run: chosen from a plan, a file or options, opened, and kept in the settings of the run; for a
stored run, taken from its settings and from files that a person names. And what changed in the plan file since: a
resume takes the prompts of failed tasks from it, and leaves the rest as stored.

Settings never hold a key: a spec only names the environment variable of the key.

The database may come from anywhere, so its contents are trusted only in part. A Python function is never imported by a
stored name, but taken from the present plan file. A key is not sent to a server that only the database names. The
permissions of an agent have to stand in the plan file as well. A file that a person names is trusted completely.

Whoever may write to the database chooses the path of the plan file, and nobody sees it at a worker. A worker therefore
uses a file in a folder that was named to it, or a file that nobody but its own user and root may change: neither the
file nor any folder on the way to it. A folder with the sticky bit, such as /tmp, is safe for what the two own in it,
because others can neither replace nor rename that.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import re
import stat
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from plait.backends.backend_protocol import Abilities, Backend, Conversation, ConversationRequest, answer_key
from plait.backends.backend_specs import (
    KINDS,
    AgentSpec,
    AnthropicSpec,
    BackendSpec,
    CommandSpec,
    FunctionSpec,
    HostsPart,
    LocalSpec,
    OpenAISpec,
    PersonSpec,
    ProgramSpec,
    PydanticAISpec,
    RatePart,
    build,
    default_spec,
    make_unchecked,
    only_backend,
    placed,
)
from plait.backends.command_backend import CommandBackend
from plait.backends.hosts.dask_hosts import DaskHosts
from plait.backends.hosts.host_backend import SSHHosts
from plait.backends.models.anthropic_api import AnthropicBackend
from plait.backends.models.http_client import is_environments
from plait.backends.models.openai_api import OpenAIBackend
from plait.backends.prices import Price
from plait.errors import BackendUnavailable, InvalidRequest, PlanError, nearest
from plait.json_form import JsonValue, value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.program_log import logger
from plait.runner.client.create_run import Fork, edited_prompt
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview
from plait.runner.client.runs import Need, Runs, RunsOfPlan
from plait.runner.domain.dag import DAG
from plait.runner.domain.notify_target import NOTIFY, NotifyTarget
from plait.runner.domain.policy import Policy
from plait.runner.engine.run_options import (
    DEFAULT_BACKEND,
    RunOptions,
    account_of,
    needed_backends,
    policy_backends,
    task_backends,
)
from plait.runner.plan.plan_file import Plan
from plait.runner.plan.plan_models import NotifyPart, PricePart
from plait.runner.plan.plan_positions import MAX_BYTES, read_source
from plait.runner.policies import policy_of
from plait.runner.policies.goal_policy import ANSWER_ID, OrchestratorPolicy
from plait.runner.scheduling.own_limits import RateLimits
from plait.runner.scheduling.slots import DEFAULT_CONCURRENCY, Concurrency, default_concurrency
from plait.runner.state.budget import BUDGET
from plait.runner.state.stored_run import (
    POSTED,
    StoredPolicy,
    StoredRun,
    has_ended,
    placed_attempts,
    read_settings,
    stored_run,
    stores_backends,
)
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import COMMAND_BACKEND, Task, commands_of, is_allowed, tasks_within

SPECS: TypeAdapter[dict[str, BackendSpec]] = TypeAdapter(dict[str, BackendSpec])
_HOSTS: TypeAdapter[dict[str, HostsPart]] = TypeAdapter(dict[str, HostsPart])
_NOTIFY: TypeAdapter[list[NotifyPart]] = TypeAdapter(list[NotifyPart])
_PRICES: TypeAdapter[dict[str, PricePart]] = TypeAdapter(dict[str, PricePart])
_LONG_ANSWER = 512  # tokens
_NO_SPECS: Mapping[str, BackendSpec] = {}


@value
class BackendOptions:
    """The backend given by options of the command line."""

    kind: str | None = None
    model: str | None = None
    base_url: str | None = None

    @property
    def is_empty(self) -> bool:
        return self == BackendOptions()


@value
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
    notify: Sequence[NotifyTarget] = ()
    """Where notices of the runs go."""

    def settings(self) -> dict[str, JsonValue]:
        """Return the settings that are stored with a run."""
        dumped = cast("JsonValue", SPECS.dump_python(dict(self.specs), mode="json", exclude_none=True))
        plan = None if self.plan is None else str(self.plan)
        stored: dict[str, JsonValue] = {"plan": plan, "folder": str(self.folder), "backends": dumped}
        stored["default_backend"] = self.default
        if self.plan is not None:
            stored["plan_sha256"] = plan_digest(self.plan)
        if self.prices:
            stored["prices"] = {
                model: {name: amount for name, amount in asdict(price).items() if amount is not None}
                for model, price in self.prices.items()
            }
        return stored

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
        limits_by_name = {name: getattr(spec, "limits", None) for name, spec in self.specs.items()}
        return {
            name: RateLimits(**limits.model_dump()) for name, limits in limits_by_name.items() if limits is not None
        }

    def options(self, made: Mapping[str, Backend], **options: Any) -> RunOptions:
        """Return the options of runs on the open backends `made`, with the default of this set."""
        # A task without a backend then runs under the name of the default, and the limit of that backend applies.
        limits = {name: limit for name, limit in self.limits().items() if name in made}
        or_else = {name: [one for one in spec.or_else if one in made] for name, spec in self.specs.items()}
        or_else = {name: spares for name, spares in or_else.items() if spares and name in made}
        rates = {name: limit for name, limit in self.rates().items() if name in made}
        if accounts := user_accounts():
            for name in self.specs.keys() & made.keys() - rates.keys():
                of_key = (account_of(made[name]) or "").rpartition(" ")[2]
                if (shared_limit := accounts.get(of_key) or accounts.get(self.specs[name].kind)) is not None:
                    rates[name] = shared_limit
        default = self.default if self.default in made else None
        notify = () if options.get("store") is None else self.notify  # a notice tells of what is stored
        shared: dict[str, Any] = {"limits": limits, "rates": rates, "prices": self.prices, "notify": notify}
        return RunOptions(backends=made, default=default, or_else=or_else, **shared, **options)


def required_backends(
    dag: DAG,
    default: str,
    statuses: Iterable[TaskStatus] = (),
    *,
    policy: Policy | None = None,
    known: Mapping[str, BackendSpec] = _NO_SPECS,
) -> list[str]:
    """Return the backends of all tasks that are not done, in the order of the tasks, then those that later tasks may
    use: a task that adds tasks may name any of `known`, the specs by name. With each come its spares.
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
    needed = list(dict.fromkeys([*names, *further]))
    for name in needed:  # it grows
        spares = known[name].or_else if name in known else ()
        needed += [one for one in spares if one in known and one not in needed]
    return needed


def backend_set_of_file(path: Path | None, options: BackendOptions) -> BackendSet:
    """Return the backends of the plan file at `path`; without a file, that of `options` or of the environment."""
    if path is None:
        return BackendSet({DEFAULT_BACKEND: requested_spec(options)}, notify=user_targets())
    if not options.is_empty:
        raise InvalidRequest(f"{path} names the backends; leave --backend, --model and --base-url out")
    value = read_plan_data(path)
    specs = _read_specs(value, path)
    if not specs:
        raise InvalidRequest(f"{path} names no backends; put them under `backends:`")
    defaults: object = value.get("defaults")
    default = cast("dict[str, object]", defaults).get("backend") if isinstance(defaults, dict) else None
    if default is None:
        default = only_backend(specs) or DEFAULT_BACKEND
    elif default not in specs:
        raise InvalidRequest(f"{path}: defaults.backend: there is no backend {default!r} under `backends:`")
    hosts = read_hosts(value.get("hosts"), path)
    with _mistakes_in(path, "prices"):
        prices = read_prices(value.get("prices"))
    notify = read_notify(value.get(NOTIFY), path) or user_targets()
    return BackendSet(
        specs, str(default), path.resolve().parent, path.resolve(), prices=prices, hosts=hosts, notify=notify
    )


def _read_specs(value: Mapping[str, Any], path: Path) -> dict[str, BackendSpec]:
    with _mistakes_in(path, "backends"):
        return SPECS.validate_python(value.get("backends") or {})


def read_hosts(value: object, path: Path) -> dict[str, HostsPart]:
    """Return the groups of hosts, in the form of a plan's `hosts`, in the file at `path`. Raises InvalidRequest."""
    with _mistakes_in(path, "hosts"):
        return _HOSTS.validate_python(value or {})


def read_notify(value: object, path: Path) -> tuple[NotifyTarget, ...]:
    """Return the targets of notices, in the form of a plan's `notify`, in the file at `path`. Raises InvalidRequest."""
    with _mistakes_in(path, NOTIFY):
        targets = tuple(part.target() for part in _NOTIFY.validate_python(value or []))
    for index, target in enumerate(targets):
        for key, why in target.mistakes():
            raise InvalidRequest(f"{path}: {NOTIFY}.{index}.{key}: {why}")
    return targets


USER_FILE = "PLAIT_CONFIG"
"""The environment variable that names the file of a user or a team, for all plans: its `notify` is for the runs of
those that have none, its `accounts` for the backends that have no `limits`.
"""
_ACCOUNTS: TypeAdapter[dict[str, RatePart]] = TypeAdapter(dict[str, RatePart])
_ACCOUNTS_KEY = "accounts"
_DIGEST = re.compile(r"[0-9a-f]{16}")


def _of_user(key: str) -> tuple[Path, Any]:
    """Return the path of the user's file, and what it has under `key`. Raises InvalidRequest, PlanError."""
    if not (named := os.environ.get(USER_FILE)):
        return Path(), None
    path = Path(named).expanduser()
    value = read_plan_data(path)
    if unknown := next((one for one in value if one not in {NOTIFY, _ACCOUNTS_KEY}), None):
        hint = nearest(unknown, [NOTIFY, _ACCOUNTS_KEY]) or f"; there are {NOTIFY} and {_ACCOUNTS_KEY}"
        raise InvalidRequest(f"{path}: the file that {USER_FILE} names has no key {unknown!r}{hint}")
    return path, value.get(key)


def user_targets() -> tuple[NotifyTarget, ...]:
    """Return the targets in the user's file. Raises InvalidRequest, PlanError."""
    path, value = _of_user(NOTIFY)
    return read_notify(value, path)


def user_accounts() -> dict[str, RateLimits]:
    """Return the limits in the user's file, by the kind of backend or the digest of the key. Raises InvalidRequest,
    PlanError.
    """
    path, value = _of_user(_ACCOUNTS_KEY)
    with _mistakes_in(path, _ACCOUNTS_KEY):
        parts = _ACCOUNTS.validate_python(value or {})
    if unknown := next((name for name in parts if name not in KINDS and not _DIGEST.fullmatch(name)), None):
        raise InvalidRequest(
            f"{path}: {_ACCOUNTS_KEY}.{unknown}: an account is a kind of backend, or the first 16 hexadecimal digits "
            f"of the SHA-256 of a key, not {unknown!r}{nearest(unknown, KINDS)}"
        )
    return {name: RateLimits(**part.model_dump(), account=name) for name, part in parts.items()}


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
    return {name: part for name, (part, _) in hosts_in_use(path).items()}


def hosts_in_use(path: Path | None) -> dict[str, tuple[HostsPart, Collection[Mapping[str, float] | None]]]:
    """Return the groups of hosts in the file at `path`, as `hosts_of_file`, each with the resources of an attempt of
    each kind that the backends there place on it.
    """
    if path is None:
        return {}
    value = read_plan_data(path)
    is_plan = "hosts" in value or "tasks" in value
    parts = read_hosts(value.get("hosts") if is_plan else value, path)
    if not parts:
        raise InvalidRequest(f"{path} names no hosts; put them under `hosts:`")
    specs = _read_specs(value, path).values() if is_plan else ()
    needs: dict[str, list[Mapping[str, float] | None]] = {}
    for spec in specs:
        if spec.on is not None and spec.needs not in (kinds := needs.setdefault(spec.on, [])):
            kinds.append(spec.needs)
    return {name: (part, needs.get(name, ())) for name, part in parts.items()}


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


def runs_of_plan(path: Path) -> RunsOfPlan:
    """Return the runs of the plan file that a person names. Raises InvalidRequest, PlanError."""
    return RunsOfPlan(str(read_plan_data(path).get("name") or path.stem), path.resolve())


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
    groups, notify = {**plan.hosts, **hosts_of_file(hosts)}, plan.notify or user_targets()
    return BackendSet(specs, default, plan.folder.resolve(), file, prices=plan.prices, hosts=groups, notify=notify)


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
    priority: int | None = None,
) -> str:
    """Store a queued run of `plan`, one for a key, and return its id. `budget` and `priority` come before those of the
    plan. Raises as `Runs.create`.
    """
    plan = plan.fitted_to(backend_set.specs, backend_set.default)
    names = required_backends(plan.dag, backend_set.default, policy=plan.policy, known=backend_set.specs)
    budget = plan.budget if budget is None else budget
    settings = {"budget": budget, "unpriced": unpriced, "priority": plan.priority if priority is None else priority}
    runs = Runs(queueing_options(backend_set, names, store, concurrency, **settings))
    return await runs.create(plan.dag, key=key, settings=backend_set.settings(), policy=plan.policy)


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


def result_task(run: RunRecord) -> str | None:
    """Return the task whose result is that of the run: the answer, of a run that plans towards a goal; None for the
    final tasks.
    """
    led_by = StoredPolicy.of(run)
    return ANSWER_ID if led_by is not None and led_by.kind == OrchestratorPolicy.kind else None


@value
class FileOptions:
    """Files that a person names for a stored run."""

    plan: Path | None = None
    """The plan file, if moved since the run was made."""
    backends: Path | None = None
    """A plan file whose backends replace stored backends of the same names."""
    hosts: Path | None = None
    """A file whose groups of hosts replace those of the plan file."""
    plans: tuple[Path, ...] | None = None
    """The folders of plan files named to a worker, without links: see `why_untrusted`. None for a person, who answers
    for the plan file of the run.
    """


@value
class StoredBackends:
    """The backends of a stored run."""

    run_id: str
    specs: Mapping[str, BackendSpec]
    """Specs by name, as stored; of a program's run those of `files.backends`."""
    default: str
    folder: Path
    plan: Path | None
    files: FileOptions
    replacements: Mapping[str, BackendSpec]
    """Backends of `files.backends` that replace those in `specs`."""
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    """Prices by the name of the model: those stored with the run, replaced by those of `files.backends`."""
    made_by_program: bool = False
    """A program made the run: its settings name no backends, and `files.backends` names all of them."""
    notifies: bool = False
    """Whether notices of the run go anywhere."""

    @classmethod
    def of(cls, run: RunRecord, files: FileOptions) -> StoredBackends:
        """Return the backends of `run`. Raises InvalidRequest, also for a program's run without a file of backends."""
        replacement = None if files.backends is None else backend_set_of_file(files.backends, BackendOptions())
        if not stores_backends(run) and replacement is not None:
            return cls(
                run.run_id,
                replacement.specs,
                default=replacement.default,
                folder=replacement.folder,
                plan=None,
                files=files,
                replacements=replacement.specs,
                prices=replacement.prices,
                made_by_program=True,
            )
        if not stores_backends(run):
            raise InvalidRequest(
                f"run {run.run_id} was not made by `plait run`, so its store does not name the backends; "
                "resume the run from Python: ParallelRunner(...).resume(run_id); or name a plan file that names them "
                "by the same names: --backends FILE"
            )
        settings = read_settings(run)
        default, folder = settings["default_backend"], settings["folder"]
        try:
            specs, stored_prices = SPECS.validate_python(settings["backends"]), read_prices(settings.get("prices"))
        except ValidationError:
            raise InvalidRequest(
                f"the backends or the prices stored with run {run.run_id} cannot be read; start a new run"
            ) from None
        plan = settings.get("plan") if files.plan is None else files.plan.resolve()
        replacements = (
            {} if replacement is None else {name: spec for name, spec in replacement.specs.items() if name in specs}
        )
        prices = stored_prices | ({} if replacement is None else dict(replacement.prices))
        if replacement is not None and not replacements:
            raise InvalidRequest(
                f"{files.backends} names {_join_names(replacement.specs)} under `backends:`, and run {run.run_id} has "
                f"{_join_names(specs)}: give a replacement the name of a stored backend"
            )
        file = Path(plan) if plan else None
        if files.plans is not None:  # what is examined has to be what is read
            file, folder = None if file is None else file.resolve(), Path(folder).resolve()
        return cls(
            run.run_id,
            specs,
            default=default,
            folder=Path(folder),
            plan=file,
            files=files,
            replacements=replacements,
            prices=prices,
            notifies=NOTIFY in settings,
        )

    def make_agents(self) -> dict[str, Backend]:
        """Return the agents, to ask for turns that outlived their runner. Starts and checks nothing."""
        agents = {name: spec for name, spec in self.specs.items() if isinstance(spec, ProgramSpec)}
        return {name: spec.make(self.folder) for name, spec in agents.items() if spec.on is None}

    def hosts(self, specs: Mapping[str, BackendSpec]) -> dict[str, HostsPart]:
        """Return the groups of hosts that `specs` name, from files alone. Raises InvalidRequest."""
        parts: dict[str, HostsPart] = {}
        if all(spec.on is None for spec in specs.values()):
            return parts
        if self.plan is not None and (path := self.plan).exists():
            parts |= read_hosts(read_plan_data(path).get("hosts"), path)
        if self.files.backends is not None:
            parts |= read_hosts(read_plan_data(self.files.backends).get("hosts"), self.files.backends)
        return parts | hosts_of_file(self.files.hosts)

    def select(self, names: Iterable[str]) -> BackendSet:
        """Return the backends in `names`. Raises InvalidRequest."""
        plan_file, backends_file = self.files.plan, self.files.backends
        folder = self.folder if plan_file is None else plan_file.resolve().parent
        specs: dict[str, BackendSpec] = {}
        for name in names:
            spec = self.replacements[name] if name in self.replacements else self._trusted_spec(name)
            if spec is not None:
                specs[name] = spec
            elif self.made_by_program:
                raise InvalidRequest(self._missing_message(name))
        folders = {} if backends_file is None else dict.fromkeys(self.replacements, backends_file.resolve().parent)
        return BackendSet(
            specs,
            self.default,
            folder=folder,
            plan=self.plan,
            folders=folders,
            prices=self.prices,
            hosts=self.hosts(specs),
            notify=(*self.notify(), *user_targets()) if self.notifies else (),
        )

    def needed(self, run: StoredRun, *, retry_failed: bool) -> tuple[BackendSet, list[str]]:
        """Return the backends that a resume of the run may call, and their names. Raises InvalidRequest."""
        led_by = StoredPolicy.of(run.record)
        policy = None if led_by is None else policy_of(led_by.kind, led_by.settings)
        statuses = run.statuses_of_resume(retry_failed=retry_failed)
        specs = {**self.specs, **self.replacements}
        names = required_backends(run.state.dag, self.default, statuses, policy=policy, known=specs)
        names += [name for name in run.state.moved.values() if name not in names]
        tasks = zip(run.state.dag, statuses, strict=True)
        self.require_commands(task for task, status in tasks if status not in TASK_DONE)
        return self.select(names), names

    def _trusted_spec(self, name: str) -> BackendSpec | None:
        """Return the stored backend if trusted, else the same backend from the plan file; None for an unknown name."""
        spec = self.specs.get(name)
        needs_file = spec is not None and _needs_plan_file(spec)
        if isinstance(spec, FunctionSpec | ProgramSpec) or (spec is not None and spec.on is not None) or needs_file:
            self._require_trusted(name, [*self._plan_files(), self.folder])
        if spec is None:
            return None
        if isinstance(spec, FunctionSpec):
            if name not in (now := self._plan_specs(name)):
                raise InvalidRequest(
                    f"{self.plan} has no backend {name!r} any more; put it back, or name the plan with --plan"
                )
            spec = now[name]
        elif needs_file and (self.plan is None or self._plan_specs(name).get(name) != spec):
            raise InvalidRequest(self._distrust_message(name, spec))
        self._require_trusted(name, [(self.folder / file).resolve() for file in _files_called(spec)])
        return spec

    def notify(self) -> tuple[NotifyTarget, ...]:
        """Return the targets of notices in the plan file as it is now; none if it cannot be read, or is not trusted."""
        file, folders = self.plan, self.files.plans
        if file is None or (folders is not None and why_untrusted(file, folders) is not None):
            return ()
        with suppress(InvalidRequest, PlanError):
            return read_notify(read_plan_data(file).get(NOTIFY), file)
        return ()

    def _plan_files(self) -> list[Path]:
        """Return the plan file, with those of the plans that it calls for a worker, who has to trust each."""
        if self.plan is None:
            return []
        return [self.plan] if self.files.plans is None or not self.plan.exists() else [*called_plan_data(self.plan)]

    def _require_trusted(self, name: str, files: Iterable[Path]) -> None:
        """Raise InvalidRequest if a worker does not trust one of the files or folders, which backend `name` uses."""
        if self.files.plans is None:
            return
        for file in files:
            if (why := why_untrusted(file, self.files.plans)) is not None:
                raise InvalidRequest(
                    f"backend {name!r} of run {self.run_id} is not used, because {why}; trust the folder with "
                    f"--plans {file if file.is_dir() else file.parent}, or let no other user write there"
                )

    def require_commands(self, tasks: Iterable[Task]) -> None:
        """Raise InvalidRequest if one of the `tasks` runs a command that neither stands in the plan file, word for
        word, nor is allowed by the backend in a file; or if a folder or an environment does not stand there.
        """
        runs: list[tuple[Task, str, Sequence[str]]] = []
        places: list[tuple[Task, str]] = []
        for task in tasks:
            own = {"cwd": task.cwd, "env": dict(task.env)} if task.cwd or task.env else {}
            inner = () if task.call is None else task.call.tasks
            places += [(task, place) for part in (own, *inner) for place in _places_of(part)]
            runs += [(task, task.backend or "", task.run)] if task.run else []
            runs += [(task, COMMAND_BACKEND, task.check.run)] if task.check and task.check.run else []
            for called in () if task.call is None else task.call.tasks:
                backend = called.get("backend") or COMMAND_BACKEND
                commands = commands_of(called).items()
                runs += [(task, backend if key == "run" else COMMAND_BACKEND, words) for key, words in commands]
        if not (runs or places):
            return
        written: set[tuple[str, ...]] = set()
        written_places: set[str] = set()
        if self.plan is not None and self.plan.exists():
            for data in called_plan_data(self.plan).values():
                parts: object = data.get("tasks")
                for part in cast("list[object]", parts) if isinstance(parts, list) else []:
                    written |= set(map(tuple, commands_of(part).values()))
                    written_places.update(_places_of(part))
        for task, place in places:
            if place not in written_places:
                raise InvalidRequest(
                    f"cwd and env of task {task.id!r} of run {self.run_id} are taken from a plan file, not from the "
                    f"store alone, and {self.plan or 'no plan file'} has them: {place[:200]}; put them back"
                )
        # Once for each backend: each look validates the backend, and at a worker reads the plan file.
        specs = {name: self._trusted_spec(name) for name in dict.fromkeys(backend for _, backend, _ in runs)}
        for task, backend, run in runs:
            spec = specs[backend]
            allows = spec.allows if isinstance(spec, CommandSpec) else ()
            if tuple(run) not in written and not is_allowed(run, allows):
                where = "no plan file" if self.plan is None else str(self.plan)
                raise InvalidRequest(
                    f"the command of task {task.id!r} of run {self.run_id} is taken from a plan file, not from the "
                    f"store alone, and {where} has it: {' '.join(run)[:200]!r}; put it back, or allow it "
                    "(`allows` of the backend) in a file named with --backends FILE"
                )

    def _missing_message(self, name: str) -> str:
        has = f"{self.files.backends} names {_join_names(self.specs)} under `backends:`, and run {self.run_id} needs"
        if name == self.default:
            return f"{has} a backend for tasks that name none; name the default with `defaults: {{backend: NAME}}`"
        return f"{has} {name!r} as well; add it"

    def _distrust_message(self, name: str, spec: BackendSpec) -> str:
        may = "may run commands or tools"
        if isinstance(spec, OpenAISpec | AnthropicSpec):
            may = f"sends the key in {spec.api_key_env} to {', '.join(spec.base_urls) or 'its default server'}"
        if self.plan is None:
            why = "the run has no plan file"
        elif (now := self._plan_specs(name).get(name)) is None:
            why = f"{self.plan} has no such backend"
        else:
            why = f"the values of {_join_names(_differing(spec, now))} are not those of the plan file {self.plan}"
        return (
            f"backend {name!r} of run {self.run_id} {may}, so a plan file has to have it as stored, and {why}; put it "
            "there, or name a file with --backends FILE"
        )

    def is_of_program(self, name: str) -> bool:
        """Return whether the backend is named by `call`: a function, or a backend such as a graph."""
        return isinstance(self.specs.get(name), FunctionSpec)

    def _plan_specs(self, name: str) -> Mapping[str, BackendSpec]:
        why = f"backend {name!r} of run {self.run_id} is taken from the plan file, not from the store"
        if self.plan is None:
            raise InvalidRequest(f"{why}; name the file with --plan PATH")
        try:
            # A calling plan counts before the plans that it calls.
            plans = reversed([*called_plan_data(self.plan).items()])
            return {name: spec for file, data in plans for name, spec in _read_specs(data, file).items()}
        except InvalidRequest as error:
            raise InvalidRequest(f"{why}, and {error}; if the file has moved, name it with --plan PATH") from None


def _differing(one: BackendSpec, other: BackendSpec) -> list[str]:
    """Return the keys in which two specs differ."""
    old, new = one.model_dump(), other.model_dump()
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def backends_of_file_only(backend_set: BackendSet) -> list[str]:
    """Return the names of the backends that a resume or a worker takes from a plan file, never from the store alone."""
    return [
        name
        for name, spec in backend_set.specs.items()
        if isinstance(spec, FunctionSpec | CommandSpec) or _needs_plan_file(spec)
    ]


def _files_called(spec: BackendSpec) -> list[str]:
    """Return the Python files of the functions that the spec names: of `call` and of `tools`."""
    called = [getattr(spec, "call", None), *(getattr(spec, "tools", None) or ())]
    files = [one.rpartition(":")[0] for one in called if isinstance(one, str)]
    return [file for file in files if file.endswith(".py")]


def _needs_plan_file(spec: BackendSpec) -> bool:
    """Return whether a stored spec has to stand in the plan file as well."""
    if isinstance(spec, ProgramSpec | PydanticAISpec):
        return not spec.is_harmless
    if not isinstance(spec, OpenAISpec | AnthropicSpec):
        return False
    # It would send a key of this environment to a server of another origin. Headers from the environment go to the
    # server of the environment only: see backends/models/http_client.py.
    backend = OpenAIBackend if isinstance(spec, OpenAISpec) else AnthropicBackend
    as_usual = all(is_environments(url, backend.url_env, backend.default_url) for url in spec.base_urls)
    return not (as_usual and spec.api_key_env == backend.api_key_env) and bool(os.environ.get(spec.api_key_env))


_AS_STORED = FileOptions()


class TrustedBackends:
    """The backends that are stored with each run in `store`, as `plait resume` uses them.

    `files` name replacements of stored backends. `note` is called if a backend that is wanted, but not needed, cannot
    be used here. `concurrency` replaces the number of tasks at once that is stored with a run; `options` are those of
    `RunOptions`.
    """

    def __init__(
        self,
        store: Store,
        files: FileOptions = _AS_STORED,
        *,
        note: Callable[[str], None] = lambda note: logger().warning(note),
        concurrency: Concurrency | None = None,
        **options: Any,
    ) -> None:
        self._files = files
        self._note = note
        self._concurrency = concurrency
        self._options = options
        self._last: tuple[RunRecord, StoredBackends] | None = None
        """The run asked about last, and its backends: whoever resumes a run asks more than once."""
        self._without = RunOptions(store=store, concurrency=concurrency, **options)
        assert self._without.store is not None
        self._store = self._without.store

    def runs(self) -> Runs:
        """Return the runs of the store, each on its own backends."""
        return Runs(self._without, source=self.for_run)

    def of(self, run: RunRecord) -> StoredBackends:
        """Return the backends of `run`, none of them opened. Raises InvalidRequest."""
        if self._last is None or self._last[0] is not run:
            self._last = run, StoredBackends.of(run, self._files)
        return self._last[1]

    @asynccontextmanager
    async def for_run(
        self, run_id: str, need: Need, run: StoredRun | None = None, task_id: str | None = None
    ) -> AsyncGenerator[RunOptions]:
        """Open the backends of the run: see `BackendSource`. A resume that has nothing to run needs no backend."""
        if run is None:
            run = await stored_run(self._store, run_id)
        async with AsyncExitStack() as stack:
            if need is Need.INSPECT:
                yield await self._inspecting(stack, run)
            elif need is Need.CONTINUE:
                assert task_id is not None
                stored = self.of(run.record)
                name = run.state.backend_of(run.state.dag.position(task_id), stored.default)
                yield await self._opened(stack, run.record, stored.select([name]), [name])
            elif need is Need.CANCEL:
                yield await self._cancelling(stack, run)
            elif has_ended(run.record, run.tasks, need is Need.RETRY):
                yield self._without
            else:
                backend_set, names = self.of(run.record).needed(run, retry_failed=need is Need.RETRY)
                yield await self._opened(stack, run.record, backend_set, names)

    @asynccontextmanager
    async def fork(
        self, record: RunRecord, start: str, *, backend: str | None = None, **edits: Any
    ) -> AsyncGenerator[tuple[Runs, Fork, BackendSet]]:
        """Plan a fork of the run, with the `edits` of `Runs.fork`, and open the backends that it may call; `backend`
        may also be a kind of backend. Yield runs on these backends, the fork and the backends. Raises as `Runs.fork`.
        """
        stored = self.of(record)
        fork = await self.runs().fork(record.run_id, start, backend=backend, **edits)
        stored.require_commands(fork.dag)
        names = required_backends(fork.dag, stored.default, policy=fork.policy, known=stored.specs)
        further = backend is not None and backend not in stored.specs
        backend_set = stored.select(name for name in names if not (further and name == backend))
        if backend is not None and further:
            specs = {**backend_set.specs, backend: requested_spec(BackendOptions(backend))}
            backend_set = replace(backend_set, specs=specs)
        now = backend_set.settings()
        backends = {**fork.settings.get("backends", {}), **cast("dict[str, Any]", now["backends"])}
        fork = replace(fork, settings={**now, **fork.settings, "backends": backends})
        async with AsyncExitStack() as stack:
            stored_limit = read_settings(record).get(BUDGET, {})
            money = {"budget": stored_limit.get("usd"), "unpriced": stored_limit.get("unpriced", False)}
            options = await self._opened(stack, record, backend_set, list(backend_set.specs), **money)
            yield Runs(options), fork, backend_set

    def of_checks(self, run: StoredRun) -> CommandBackend:
        """Return the backend for the commands that checked the completed tasks of `run`. Raises InvalidRequest."""
        stored = self.of(run.record)
        done = zip(run.state.dag, run.state.statuses, strict=True)
        stored.require_commands(task for task, status in done if status is TaskStatus.COMPLETED and not task.run)
        spec = stored.select([COMMAND_BACKEND]).specs.get(COMMAND_BACKEND)
        if not isinstance(spec, CommandSpec) or spec.on is not None:
            raise InvalidRequest(f"run {run.record.run_id} has no backend 'command' for checks on this machine")
        return spec.make(stored.folder if self._files.plan is None else self._files.plan.resolve().parent)

    async def _opened(
        self, stack: AsyncExitStack, record: RunRecord, backend_set: BackendSet, names: Sequence[str], **more: Any
    ) -> RunOptions:
        made = await stack.enter_async_context(backend_set.open(names))
        concurrency = self._concurrency or stored_concurrency(record) or backend_set.concurrency()
        return backend_set.options(made, store=self._store, concurrency=concurrency, **{**self._options, **more})

    async def _cancelling(self, stack: AsyncExitStack, run: StoredRun) -> RunOptions:
        """Open what reaches the attempts of the run on other hosts, and the sessions of a program's backends that wait
        for an answer.
        """
        record, dag, tasks = run.record, run.state.dag, run.tasks
        ids = {task_id for task_id, _ in await placed_attempts(self._store, record.run_id)}
        placed = [one for one in tasks if one.task_id in ids]
        asking = [one for one in tasks if one.status == TaskStatus.WAITING_INPUT and one.session_id is not None]
        if placed or (asking and stores_backends(record)):
            try:
                stored = self.of(record)
                names, of_sessions = (
                    dict.fromkeys(run.state.backend_of(dag.position(one.task_id), stored.default) for one in tasks)
                    for tasks in (placed, asking)
                )
                names |= dict.fromkeys(name for name in of_sessions if stored.is_of_program(name))
                made = await stack.enter_async_context(stored.select(names).open(names))
                return BackendSet({}, stored.default).options(made, store=self._store, **self._options)
            except (InvalidRequest, BackendUnavailable) as error:
                self._note(f"plait: backends of the run cannot be reached: {error}")
        return self._without

    async def _inspecting(self, stack: AsyncExitStack, run: StoredRun) -> RunOptions:
        """Open what tells whether turns of the run have outlived their process. Otherwise the stored state counts."""
        under_way = [i for i, status in enumerate(run.state.statuses) if status is TaskStatus.RUNNING]
        if under_way:
            try:
                stored = self.of(run.record)
                made = stored.make_agents()
                names = list(dict.fromkeys(run.state.backend_of(i, stored.default) for i in under_way))
                if others := [name for name in names if name not in made]:
                    made |= await stack.enter_async_context(stored.select(others).open(others))
                return BackendSet({}, stored.default).options(made, store=self._store, **self._options)
            except (InvalidRequest, BackendUnavailable) as error:
                self._note(f"plait: cannot check whether agents of the run still work: {error}")
        return self._without


def _places_of(part: object) -> Iterator[str]:
    """Yield the folder and the environment of a task as written, and those of the tasks within it, as JSON."""
    if isinstance(part, dict):
        task = cast("dict[str, object]", part)
        if task.get("cwd") or task.get("env"):
            yield json.dumps([task.get("cwd"), task.get("env") or {}], sort_keys=True)
        for _, inner in tasks_within(task):
            yield from _places_of(inner)


def why_untrusted(path: Path, folders: Collection[Path]) -> str | None:
    """Return why a worker does not trust the file or folder at the absolute `path`, which has no links in it; None if
    it does. `folders` were named to the worker, and have no links in them either.
    """
    if any(path.is_relative_to(folder) for folder in folders):
        return None
    for part in (path, *path.parents):
        try:
            file_stat = part.stat()
        except FileNotFoundError:  # reported when the file is read
            continue
        except OSError as error:
            return f"{part} cannot be examined ({error.strerror})"
        if file_stat.st_uid not in {0, os.geteuid()}:
            return f"{part} belongs to user {file_stat.st_uid}"
        if file_stat.st_mode & stat.S_IWOTH and not _keeps_others_out(file_stat):
            return f"every user may write to {part}"
        if file_stat.st_mode & stat.S_IWGRP and not (_keeps_others_out(file_stat) or _is_of_one_user(file_stat)):
            return f"the group {file_stat.st_gid} may write to {part}"
    return None


def _keeps_others_out(file_stat: os.stat_result) -> bool:
    return stat.S_ISDIR(file_stat.st_mode) and bool(file_stat.st_mode & stat.S_ISVTX)


def _is_of_one_user(file_stat: os.stat_result) -> bool:
    """Return whether the group is the owner's own: many systems give each user one, and let it write by default."""
    try:
        user, group = pwd.getpwuid(file_stat.st_uid), grp.getgrgid(file_stat.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def repaired_prompts(run: StoredRun, stored: StoredBackends) -> dict[str, str]:
    """Return the prompts of failed tasks that differ in the plan file that a person names, by task id: a resume is then
    a fork that continues the run. A part takes the prompt of its `for_each` task. Raises PlanError, InvalidRequest.
    """
    if stored.files.plan is None or stored.plan is None or (plan := _plan_now(run, stored, stored.plan)) is None:
        return {}
    now = {task.id: task.prompt for task in plan.dag if task.call is None}
    tasks = zip(run.state.dag, run.state.statuses, strict=True)
    failed = [task for task, status in tasks if status is TaskStatus.FAILED]
    return {task.id: new for task in failed if (new := edited_prompt(task, now)) is not None and new != task.prompt}


def plan_has_changed(run: StoredRun, stored: StoredBackends) -> bool:
    """Return whether the plan file is no longer as it was when the run was stored."""
    digest = read_settings(run.record).get("plan_sha256")
    now = None if stored.plan is None else plan_digest(stored.plan)
    return None not in {digest, now} and now != digest


def _plan_now(run: StoredRun, stored: StoredBackends, path: Path) -> Plan | None:
    """Return the plan in the file with the inputs of the run; None if the tasks of the run did not come from a file."""
    settings = read_settings(run.record)
    if settings.get(POSTED) or settings.get("plan") is None:
        return None
    pilot = settings.get("growth", {}).get("pilot")
    return Plan.load(path, inputs=settings.get("inputs"), limit=pilot).fitted_to(stored.specs, stored.default)
