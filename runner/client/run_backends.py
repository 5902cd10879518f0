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
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

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
from plait.runner.client.runs import Need, Runs
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
    stores_backends,
)
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import COMMAND_BACKEND, Task, commands_of, is_allowed, tasks_within

_T = TypeVar("_T")
SPECS: TypeAdapter[dict[str, BackendSpec]] = TypeAdapter(dict[str, BackendSpec])
_HOSTS: TypeAdapter[dict[str, HostsPart]] = TypeAdapter(dict[str, HostsPart])
_NOTIFY: TypeAdapter[list[NotifyPart]] = TypeAdapter(list[NotifyPart])
_PRICES: TypeAdapter[dict[str, PricePart]] = TypeAdapter(dict[str, PricePart])
_LONG_ANSWER = 512  # tokens


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

    def fit(self, plan: Plan) -> tuple[Plan, list[str]]:
        """Return the plan, fitted to these backends, and the names of the backends that its run may call."""
        plan = plan.fitted_to(self.specs, self.default)
        return plan, _required(plan.dag, self.default, self.specs, plan.policy)

    @asynccontextmanager
    async def open(self, names: Iterable[str]) -> AsyncGenerator[dict[str, Backend]]:
        """Open the backends in `names`; leaving the block ends processes that the backends have started. Raises
        BackendUnavailable, and InvalidRequest for a backend without its hosts.
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
                if spec.on is None:
                    backend = build(spec, folder=folder)
                elif spec.on in hosts:
                    backend = placed(spec, folder, hosts[spec.on])
                else:
                    have = f"; the hosts given are {', '.join(sorted(hosts))}" if hosts else ""
                    raise InvalidRequest(
                        f"backend {name!r} runs on the hosts {spec.on!r}, which are not given{have}; put them under "
                        "`hosts:` in the plan file, or name a file with --hosts"
                    )
                if isinstance(backend, AbstractAsyncContextManager):
                    await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", backend))
                made[name] = backend
            yield made

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

    def unopened(self, names: Iterable[str]) -> dict[str, Backend]:
        """Return stand-ins for the backends in `names`, for runs that are created here and executed elsewhere."""
        return {name: _Unopened(self.specs[name], self.unchecked(name)) for name in names if name in self.specs}

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

    def options(self, made: Mapping[str, Backend], **options: Any) -> RunOptions:
        """Return the options of runs on the open backends `made`, with the default of this set."""
        limits: dict[str, int] = {}
        rates: dict[str, RateLimits] = {}
        or_else: dict[str, list[str]] = {}
        accounts = user_accounts()
        for name, spec in self.specs.items():
            if name not in made:
                continue
            # A backend on hosts has the sum of their slots.
            group = None if spec.on is None else self.hosts.get(spec.on)
            if (limit := spec.concurrency or (None if group is None else group.slots)) is not None:
                limits[name] = limit
            if (own := getattr(spec, "limits", None)) is not None:
                rates[name] = RateLimits(**own.model_dump())
            elif accounts:
                of_key = (account_of(made[name]) or "").rpartition(" ")[2]
                if (shared := accounts.get(of_key) or accounts.get(spec.kind)) is not None:
                    rates[name] = shared
            if spares := [one for one in spec.or_else if one in made]:
                or_else[name] = spares
        return RunOptions(
            backends=made,
            # A task without a backend then runs under this name, and the limit of that backend applies.
            default=self.default if self.default in made else None,
            or_else=or_else,
            limits=limits,
            rates=rates,
            prices=self.prices,
            notify=() if options.get("store") is None else self.notify,  # a notice tells of what is stored
            **options,
        )


def _required(
    dag: DAG,
    default: str,
    specs: Mapping[str, BackendSpec],
    policy: Policy | None,
    statuses: Iterable[TaskStatus] = (),
) -> list[str]:
    """Return the backends of all tasks that are not done, in the order of the tasks, then those that later tasks may
    use: a task that adds tasks may name any of `specs`. With each come its spares.
    """
    statuses = list(statuses) or [TaskStatus.PENDING] * len(dag)
    names = needed_backends(task_backends(dag, default), statuses)
    further = [] if policy is None else sorted(policy_backends(policy, default))
    unfinished = [task for task, status in zip(dag, statuses, strict=True) if status not in TASK_DONE]
    further += [name for task in unfinished if task.check is not None for name in task.check.backends]
    further += [name or default for task in unfinished if task.call is not None for name in task.call.backends]
    if any(task.adds_tasks for task in unfinished):
        further += specs
    needed = list(dict.fromkeys([*names, *further]))
    for name in needed:  # it grows
        spares = specs[name].or_else if name in specs else ()
        needed += [one for one in spares if one in specs and one not in needed]
    return needed


def backend_set_of_file(path: Path | None, options: BackendOptions) -> BackendSet:
    """Return the backends of the plan file at `path`; without a file, that of `options` or of the environment."""
    if path is None:
        return BackendSet({DEFAULT_BACKEND: requested_spec(options)}, notify=user_targets())
    if not options.is_empty:
        raise InvalidRequest(f"{path} names the backends; leave --backend, --model and --base-url out")
    value = read_plan_data(path)
    specs = _read(SPECS, value, "backends", path)
    if not specs:
        raise InvalidRequest(f"{path} names no backends; put them under `backends:`")
    defaults: object = value.get("defaults")
    default = cast("dict[str, object]", defaults).get("backend") if isinstance(defaults, dict) else None
    if default is None:
        default = only_backend(specs) or DEFAULT_BACKEND
    elif default not in specs:
        raise InvalidRequest(f"{path}: defaults.backend: there is no backend {default!r} under `backends:`")
    hosts = _read(_HOSTS, value, "hosts", path) or {}
    prices = {model: one.price() for model, one in (_read(_PRICES, value, "prices", path) or {}).items()}
    return BackendSet(
        specs,
        str(default),
        path.resolve().parent,
        path.resolve(),
        prices=prices,
        hosts=hosts,
        notify=_read_notify(value, path) or user_targets(),
    )


def _read(form: TypeAdapter[_T], contents: Mapping[str, Any], key: str, path: Path) -> _T | None:
    """Return what the `contents` of the file at `path` have under `key`, in the form of a plan; None for nothing.
    Raises InvalidRequest.
    """
    try:
        return form.validate_python(contents[key]) if contents.get(key) else None
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{path}: {key}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _read_notify(contents: Mapping[str, Any], path: Path) -> tuple[NotifyTarget, ...]:
    targets = tuple(part.target() for part in _read(_NOTIFY, contents, NOTIFY, path) or ())
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


def _user_file() -> tuple[Path, dict[str, Any]]:
    """Return the path of the user's file, and its contents. Raises InvalidRequest, PlanError."""
    if not (named := os.environ.get(USER_FILE)):
        return Path(), {}
    path = Path(named).expanduser()
    contents = read_plan_data(path)
    if unknown := next((one for one in contents if one not in {NOTIFY, _ACCOUNTS_KEY}), None):
        hint = nearest(unknown, [NOTIFY, _ACCOUNTS_KEY]) or f"; there are {NOTIFY} and {_ACCOUNTS_KEY}"
        raise InvalidRequest(f"{path}: the file that {USER_FILE} names has no key {unknown!r}{hint}")
    return path, contents


def user_targets() -> tuple[NotifyTarget, ...]:
    """Return the targets in the user's file. Raises InvalidRequest, PlanError."""
    path, contents = _user_file()
    return _read_notify(contents, path)


def user_accounts() -> dict[str, RateLimits]:
    """Return the limits in the user's file, by the kind of backend or the digest of the key. Raises InvalidRequest,
    PlanError.
    """
    path, contents = _user_file()
    parts = _read(_ACCOUNTS, contents, _ACCOUNTS_KEY, path) or {}
    if unknown := next((name for name in parts if name not in KINDS and not _DIGEST.fullmatch(name)), None):
        raise InvalidRequest(
            f"{path}: {_ACCOUNTS_KEY}.{unknown}: an account is a kind of backend, or the first 16 hexadecimal digits "
            f"of the SHA-256 of a key, not {unknown!r}{nearest(unknown, KINDS)}"
        )
    return {name: RateLimits(**part.model_dump(), account=name) for name, part in parts.items()}


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
    parts = _read(_HOSTS, value if is_plan else {"hosts": value}, "hosts", path)
    if not parts:
        raise InvalidRequest(f"{path} names no hosts; put them under `hosts:`")
    specs = (_read(SPECS, value, "backends", path) if is_plan else None) or {}
    needs: dict[str, list[Mapping[str, float] | None]] = {}
    for spec in specs.values():
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


def named_plan(path: Path) -> tuple[str, Path]:
    """Return the name of the plan in the file, and its absolute path, for `find_run`. Raises InvalidRequest,
    PlanError.
    """
    return str(read_plan_data(path).get("name") or path.stem), path.resolve()


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
    plan, names = backend_set.fit(plan)
    options = backend_set.options(
        backend_set.unopened(names),
        store=store,
        concurrency=concurrency,
        budget=plan.budget if budget is None else budget,
        unpriced=unpriced,
        priority=plan.priority if priority is None else priority,
    )
    return await Runs(options).create(plan.dag, key=key, settings=backend_set.settings(), policy=plan.policy)


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

    run: RunRecord
    specs: Mapping[str, BackendSpec]
    """Specs by name, as stored; of a run whose settings name no backends, because a program made it, those of
    `files.backends`.
    """
    default: str
    folder: Path
    plan: Path | None
    prices: Mapping[str, Price]
    """Prices by the name of the model: those stored with the run, replaced by those of `files.backends`."""
    files: FileOptions
    replacement: BackendSet | None
    """The backends of `files.backends`."""

    @classmethod
    def of(cls, run: RunRecord, files: FileOptions) -> StoredBackends:
        """Return the backends of `run`. Raises InvalidRequest, also for a program's run without a file of backends."""
        new = None if files.backends is None else backend_set_of_file(files.backends, BackendOptions())
        if not stores_backends(run):
            if new is None:
                raise InvalidRequest(
                    f"run {run.run_id} was not made by `plait run`, so its store does not name the backends; "
                    "resume the run from Python: ParallelRunner(...).resume(run_id); or name a plan file that names "
                    "them by the same names: --backends FILE"
                )
            return cls(run, new.specs, new.default, new.folder, None, new.prices, files, new)
        settings = read_settings(run)
        try:
            specs, prices = SPECS.validate_python(settings["backends"]), read_prices(settings.get("prices"))
        except ValidationError:
            raise InvalidRequest(
                f"the backends or the prices stored with run {run.run_id} cannot be read; start a new run"
            ) from None
        if new is not None and not specs.keys() & new.specs.keys():
            raise InvalidRequest(
                f"{files.backends} names {_join_names(new.specs)} under `backends:`, and run {run.run_id} has "
                f"{_join_names(specs)}: give a replacement the name of a stored backend"
            )
        plan = settings.get("plan") if files.plan is None else files.plan.resolve()
        file, folder = Path(plan) if plan else None, Path(settings["folder"])
        if files.plans is not None:  # what is examined has to be what is read
            file, folder = None if file is None else file.resolve(), folder.resolve()
        prices |= {} if new is None else new.prices
        return cls(run, specs, settings["default_backend"], folder, file, prices, files, new)

    @property
    def replacements(self) -> dict[str, BackendSpec]:
        """The backends of `files.backends` that replace those in `specs`."""
        if self.replacement is None:
            return {}
        return {name: spec for name, spec in self.replacement.specs.items() if name in self.specs}

    def hosts(self, specs: Mapping[str, BackendSpec]) -> dict[str, HostsPart]:
        """Return the groups of hosts that `specs` name, from files alone. Raises InvalidRequest."""
        parts: dict[str, HostsPart] = {}
        if all(spec.on is None for spec in specs.values()):
            return parts
        if self.plan is not None and (path := self.plan).exists():
            parts = _read(_HOSTS, read_plan_data(path), "hosts", path) or {}
        if self.replacement is not None:
            parts |= self.replacement.hosts
        return parts | hosts_of_file(self.files.hosts)

    def select(self, names: Iterable[str]) -> BackendSet:
        """Return the backends in `names`. Raises InvalidRequest."""
        specs: dict[str, BackendSpec] = {}
        for name in names:
            if (spec := self._trusted_spec(name)) is not None:
                specs[name] = spec
            elif not stores_backends(self.run):
                has = f"{self.files.backends} names {_join_names(self.specs)} under `backends:`"
                needs = f"{has}, and run {self.run.run_id} needs"
                if name == self.default:
                    raise InvalidRequest(
                        f"{needs} a backend for tasks that name none; name the default with `defaults: {{backend: "
                        "NAME}`"
                    )
                raise InvalidRequest(f"{needs} {name!r} as well; add it")
        return BackendSet(
            specs,
            self.default,
            folder=self.folder if self.files.plan is None else self.files.plan.resolve().parent,
            plan=self.plan,
            folders={} if self.replacement is None else dict.fromkeys(self.replacements, self.replacement.folder),
            prices=self.prices,
            hosts=self.hosts(specs),
            notify=(*self.notify(), *user_targets()) if NOTIFY in read_settings(self.run) else (),
        )

    def needed(self, run: StoredRun, *, retry_failed: bool) -> BackendSet:
        """Return the backends that a resume of the run may call. Raises InvalidRequest."""
        led_by = StoredPolicy.of(run.record)
        policy = None if led_by is None else policy_of(led_by.kind, led_by.settings)
        statuses = run.statuses_of_resume(retry_failed=retry_failed)
        specs = {**self.specs, **self.replacements}
        names = _required(run.state.dag, self.default, specs, policy, statuses)
        names += [name for name in run.state.moved.values() if name not in names]
        tasks = zip(run.state.dag, statuses, strict=True)
        self.require_commands(task for task, status in tasks if status not in TASK_DONE)
        return self.select(names)

    def _trusted_spec(self, name: str) -> BackendSpec | None:
        """Return the backend that a person's file names, else the stored one if trusted, else the same backend from the
        plan file; None for an unknown name.
        """
        if (new := self.replacements.get(name)) is not None:
            return new
        if (spec := self.specs.get(name)) is None:
            return None
        needs_file = _needs_plan_file(spec)
        is_file_read = needs_file or isinstance(spec, FunctionSpec | ProgramSpec) or spec.on is not None
        if is_file_read and self.files.plans is not None:  # a worker has to trust each of the plans that are called
            plans = () if self.plan is None else called_plan_data(self.plan) if self.plan.exists() else (self.plan,)
            self._require_trusted(name, [*plans, self.folder])
        if isinstance(spec, FunctionSpec):
            if name not in (now := self._plan_specs(name)):
                raise InvalidRequest(
                    f"{self.plan} no longer has a backend {name!r}; put it back, or name the plan with --plan"
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
            return _read_notify(read_plan_data(file), file)
        return ()

    def _require_trusted(self, name: str, files: Iterable[Path]) -> None:
        """Raise InvalidRequest if a worker does not trust one of the files or folders, which backend `name` uses."""
        if self.files.plans is None:
            return
        for file in files:
            if (why := why_untrusted(file, self.files.plans)) is not None:
                raise InvalidRequest(
                    f"backend {name!r} of run {self.run.run_id} is not used, because {why}; trust the folder with "
                    f"--plans {file if file.is_dir() else file.parent}, or let no other user write there"
                )

    def require_commands(self, tasks: Iterable[Task]) -> None:
        """Raise InvalidRequest if one of the `tasks` runs a command that neither stands in the plan file, word for
        word, nor is allowed by the backend in a file; or if a folder or an environment does not stand there.
        """
        commands: list[tuple[Task, str, Sequence[str]]] = []
        places: list[tuple[Task, str]] = []
        for task in tasks:
            for part in (task, *(() if task.call is None else task.call.leaves)):
                if part.cwd or part.env:
                    places.append((task, _place(part.cwd, part.env)))
                if part.run:
                    commands.append((task, part.backend or COMMAND_BACKEND, part.run))
                if part.check is not None and part.check.run:
                    commands.append((task, COMMAND_BACKEND, part.check.run))
        if not (commands or places):
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
                    f"cwd and env of task {task.id!r} of run {self.run.run_id} are taken from a plan file, not from "
                    f"the store alone, and {self.plan or 'no plan file'} has them: {place[:200]}; put them back"
                )
        # Once for each backend: each look validates the backend, and at a worker reads the plan file.
        specs = {name: self._trusted_spec(name) for name in dict.fromkeys(backend for _, backend, _ in commands)}
        for task, backend, run in commands:
            spec = specs[backend]
            allows = spec.allows if isinstance(spec, CommandSpec) else ()
            if tuple(run) not in written and not is_allowed(run, allows):
                raise InvalidRequest(
                    f"the command of task {task.id!r} of run {self.run.run_id} is taken from a plan file, not from the "
                    f"store alone, and {self.plan or 'no plan file'} has it: {' '.join(run)[:200]!r}; put it back, or "
                    "allow it (`allows` of the backend) in a file named with --backends FILE"
                )

    def _distrust_message(self, name: str, spec: BackendSpec) -> str:
        may = "may run commands or tools"
        if isinstance(spec, OpenAISpec | AnthropicSpec):
            may = f"sends the key in {spec.api_key_env} to {', '.join(spec.base_urls) or 'its default server'}"
        if self.plan is None:
            why = "the run has no plan file"
        elif (now := self._plan_specs(name).get(name)) is None:
            why = f"{self.plan} has no such backend"
        else:
            old, new = spec.model_dump(), now.model_dump()
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            why = f"the values of {_join_names(keys)} are not those of the plan file {self.plan}"
        return (
            f"backend {name!r} of run {self.run.run_id} {may}, so a plan file has to have it as stored, and {why}; put "
            "it there, or name a file with --backends FILE"
        )

    def _plan_specs(self, name: str) -> Mapping[str, BackendSpec]:
        why = f"backend {name!r} of run {self.run.run_id} is taken from the plan file, not from the store"
        if self.plan is None:
            raise InvalidRequest(f"{why}; name the file with --plan PATH")
        try:
            # A calling plan counts before the plans that it calls.
            plans = reversed([*called_plan_data(self.plan).items()])
            parts = [_read(SPECS, data, "backends", file) or {} for file, data in plans]
            return {name: spec for part in parts for name, spec in part.items()}
        except InvalidRequest as error:
            raise InvalidRequest(f"{why}, and {error}; if the file has moved, name it with --plan PATH") from None


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
    async def for_run(self, run: StoredRun, need: Need, task_id: str | None = None) -> AsyncGenerator[RunOptions]:
        """Open the backends of the run: see `BackendSource`. A resume that has nothing to run needs no backend."""
        async with AsyncExitStack() as stack:
            if need in {Need.INSPECT, Need.CANCEL}:
                yield await self._reached(stack, run, need)
            elif need is Need.CONTINUE:
                assert task_id is not None
                stored = self.of(run.record)
                name = run.state.backend_of(run.state.dag.position(task_id), stored.default)
                yield await self._opened(stack, run.record, stored.select([name]))
            elif has_ended(run.record, run.tasks, need is Need.RETRY):
                yield self._without
            else:
                backend_set = self.of(run.record).needed(run, retry_failed=need is Need.RETRY)
                yield await self._opened(stack, run.record, backend_set)

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
        names = _required(fork.dag, stored.default, stored.specs, fork.policy)
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
            options = await self._opened(stack, record, backend_set, **money)
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
        self, stack: AsyncExitStack, record: RunRecord, backend_set: BackendSet, **more: Any
    ) -> RunOptions:
        made = await stack.enter_async_context(backend_set.open(backend_set.specs))
        concurrency = self._concurrency or stored_concurrency(record) or backend_set.concurrency()
        return backend_set.options(made, store=self._store, concurrency=concurrency, **{**self._options, **more})

    async def _reached(self, stack: AsyncExitStack, run: StoredRun, need: Need) -> RunOptions:
        """Open what tells whether turns of the run have outlived their process; to cancel the run, what reaches its
        attempts on other hosts, and the sessions of a program's backends that wait for an answer. If that cannot be
        opened, the stored state counts.
        """
        record, state = run.record, run.state
        asking: list[int] = []
        if need is Need.INSPECT:
            under_way = [i for i, status in enumerate(state.statuses) if status is TaskStatus.RUNNING]
        else:
            placed = {task_id for task_id, _ in await placed_attempts(self._store, record.run_id)}
            under_way = [i for i, task in enumerate(run.tasks) if task.task_id in placed]
            if stores_backends(record):
                waiting = [i for i, status in enumerate(state.statuses) if status is TaskStatus.WAITING_INPUT]
                asking = [i for i in waiting if run.tasks[i].session_id is not None]
        if not (under_way or asking):
            return self._without
        try:
            stored, made = self.of(record), dict[str, Backend]()
            names = [state.backend_of(i, stored.default) for i in under_way]
            of_sessions = [state.backend_of(i, stored.default) for i in asking]
            names += [name for name in of_sessions if isinstance(stored.specs.get(name), FunctionSpec)]
            for name in dict.fromkeys(names):
                spec = stored.specs.get(name)
                if isinstance(spec, ProgramSpec) and spec.on is None:  # its files are looked at, and nothing is started
                    made[name] = spec.make(stored.folder)
            others = [name for name in dict.fromkeys(names) if name not in made]
            made |= await stack.enter_async_context(stored.select(others).open(others))
            return BackendSet({}, stored.default).options(made, store=self._store, **self._options)
        except (InvalidRequest, BackendUnavailable) as error:
            self._note(f"plait: backends of the run cannot be reached, so its stored state counts: {error}")
            return self._without


def _place(cwd: object, env: object) -> str:
    return json.dumps([cwd, env or {}], sort_keys=True)


def _places_of(part: object) -> Iterator[str]:
    """Yield the folder and the environment of a task as written, and those of the tasks within it, as JSON."""
    if isinstance(part, dict):
        task = cast("dict[str, object]", part)
        if task.get("cwd") or task.get("env"):
            yield _place(task.get("cwd"), task.get("env"))
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
    settings = read_settings(run.record)
    if stored.files.plan is None or stored.plan is None or settings.get(POSTED) or settings.get("plan") is None:
        return {}  # the tasks of the run did not come from a file
    pilot = settings.get("growth", {}).get("pilot")
    plan = Plan.load(stored.plan, inputs=settings.get("inputs"), limit=pilot).fitted_to(stored.specs, stored.default)
    now = {task.id: task.prompt for task in plan.dag if task.call is None}
    tasks = zip(run.state.dag, run.state.statuses, strict=True)
    failed = [task for task, status in tasks if status is TaskStatus.FAILED]
    return {task.id: new for task in failed if (new := edited_prompt(task, now)) is not None and new != task.prompt}


def plan_has_changed(run: StoredRun, stored: StoredBackends) -> bool:
    """Return whether the plan file is no longer as it was when the run was stored."""
    digest = read_settings(run.record).get("plan_sha256")
    now = None if stored.plan is None else plan_digest(stored.plan)
    return None not in {digest, now} and now != digest
