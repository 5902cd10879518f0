"""The backends of a stored run, from its settings and from files that a person names.

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
import json
import os
import pwd
import stat
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from plait.backends.backend_protocol import Backend
from plait.backends.models.anthropic_api import AnthropicBackend
from plait.backends.models.endpoint import is_environments
from plait.backends.models.openai_api import OpenAIBackend
from plait.backends.prices import Price
from plait.backends.specs.agent_specs import AgentSpec, PydanticAISpec
from plait.backends.specs.build_backend import AnthropicSpec, BackendSpec, FunctionSpec, OpenAISpec
from plait.backends.specs.host_specs import HostsPart
from plait.errors import BackendUnavailable, InvalidRequest, TaskNotFound
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.program_log import logger
from plait.runner.client.backend_set import (
    SPECS,
    BackendOptions,
    BackendSet,
    backend_set_of_file,
    hosts_of_file,
    read_hosts,
    read_plan_data,
    read_prices,
    required_backends,
    stored_concurrency,
    stores_backends,
)
from plait.runner.domain.dag import DAG
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.engine.lease import LEASE_SECONDS
from plait.runner.parallel_runner import ParallelRunner
from plait.runner.policies import policy_of
from plait.runner.recovery.resume_plan import RUNS, ResumeAction, plan_resume
from plait.runner.state.codec import decode_dag
from plait.runner.state.stored_run import StoredPolicy, has_ended, placed_attempts, stored_record
from plait.statuses import TaskStatus

Note: TypeAlias = Callable[[str], None]
"""Takes a message for a person."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class StoredBackends:
    """The backends of a stored run."""

    run_id: str
    specs: Mapping[str, Any]
    """Specs by name, as stored and not yet validated."""
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

    @classmethod
    def of(cls, run: RunRecord, files: FileOptions) -> StoredBackends:
        """Return the backends of `run`. Raises InvalidRequest, also for a program's run without a file of backends."""
        given = None if files.backends is None else backend_set_of_file(files.backends, BackendOptions())
        if not stores_backends(run):
            if given is not None:
                specs = given.specs
                prices = given.prices
                return cls(
                    run.run_id, specs, given.default, given.folder, None, files, specs, prices, made_by_program=True
                )
            raise InvalidRequest(
                f"run {run.run_id} was not made by `plait run`, so its store does not name the backends; "
                "resume the run from Python: ParallelRunner(...).resume(run_id); or name a plan file that names them "
                "by the same names: --backends FILE"
            )
        settings = json.loads(run.settings)
        specs, default, folder = (settings[key] for key in ("backends", "default_backend", "folder"))
        plan = settings.get("plan") if files.plan is None else files.plan.resolve()
        replacements = {} if given is None else {name: spec for name, spec in given.specs.items() if name in specs}
        try:
            stored_prices = read_prices(settings.get("prices"))
        except ValidationError:
            raise InvalidRequest(
                f"run {run.run_id} was stored with prices that are not in the form of a plan"
            ) from None
        prices = stored_prices | ({} if given is None else dict(given.prices))
        if given is not None and not replacements:
            raise InvalidRequest(
                f"{files.backends} names {_join_names(given.specs)} under `backends:`, and run {run.run_id} has "
                f"{_join_names(specs)}: give a replacement the name of a stored backend"
            )
        file = Path(plan) if plan else None
        if files.plans is not None:  # what is examined has to be what is read
            file, folder = None if file is None else file.resolve(), Path(folder).resolve()
        return cls(run.run_id, specs, default, Path(folder), file, files, replacements, prices)

    def make_agents(self) -> dict[str, Backend]:
        """Return the agents, to ask for turns that outlived their runner. Starts and checks nothing."""
        specs = {name: self._stored_spec(name) for name in self.specs}
        agents = {name: spec for name, spec in specs.items() if isinstance(spec, AgentSpec)}
        return {name: spec.make(self.folder) for name, spec in agents.items() if spec.on is None}

    def hosts(self, specs: Mapping[str, BackendSpec]) -> dict[str, HostsPart]:
        """Return the groups of hosts that `specs` name, from files alone. Raises InvalidRequest."""
        found: dict[str, HostsPart] = {}
        if all(spec.on is None for spec in specs.values()):
            return found
        if self.plan is not None and (path := self.plan).exists():
            found |= read_hosts(read_plan_data(path).get("hosts"), path)
        if self.files.backends is not None:
            found |= read_hosts(read_plan_data(self.files.backends).get("hosts"), self.files.backends)
        return found | hosts_of_file(self.files.hosts)

    def read_specs(self) -> dict[str, BackendSpec]:
        """Return the specs, validated. Raises InvalidRequest."""
        return {name: spec for name in self.specs if (spec := self._stored_spec(name)) is not None}

    def changed_options(self, now: Mapping[str, BackendSpec]) -> list[str]:
        """Return the options of backends that differ between the store and the plan file `now`. The stored options
        count.
        """
        found: list[str] = []
        for name in (self.specs.keys() & now.keys()) - self.replacements.keys():
            stored = self._stored_spec(name)
            if stored is not None and not isinstance(stored, FunctionSpec):
                old, new = stored.model_dump(), now[name].model_dump()
                found += (f"backends.{name}.{key}" for key in {**old, **new} if old.get(key) != new.get(key))
        return found

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
        return BackendSet(specs, self.default, folder, self.plan, folders, self.prices, self.hosts(specs))

    def _trusted_spec(self, name: str) -> BackendSpec | None:
        """Return the stored backend if trusted, else the same backend from the plan file; None for an unknown name."""
        spec = self._stored_spec(name)
        if isinstance(spec, FunctionSpec | AgentSpec) or (spec is not None and _uses_plan_file(spec)):
            self._require_trusted(name, [self.folder] if self.plan is None else [self.plan, self.folder])
        if spec is None:
            return None
        if isinstance(spec, FunctionSpec):
            if name not in (now := self._plan_specs(name)):
                raise InvalidRequest(
                    f"{self.plan} has no backend {name!r} any more; put it back, or name the plan with --plan"
                )
            spec = now[name]
        elif _needs_plan_file(spec) and (self.plan is None or self._plan_specs(name).get(name) != spec):
            raise InvalidRequest(self._distrust_message(name, spec))
        self._require_trusted(name, [(self.folder / file).resolve() for file in _files_called(spec)])
        return spec

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

    def _missing_message(self, name: str) -> str:
        has = f"{self.files.backends} names {_join_names(self.specs)} under `backends:`, and run {self.run_id} needs"
        if name == self.default:
            return f"{has} a backend for tasks that name none; name the default with `defaults: {{backend: NAME}}`"
        return f"{has} {name!r} as well; add it"

    def _distrust_message(self, name: str, spec: BackendSpec) -> str:
        if isinstance(spec, AgentSpec):
            why = f"agent {name!r} of run {self.run_id} may run commands, so a plan file has to have it as stored"
            if self.plan is None:
                return f"{why}, and the run has no plan file; name a file with --backends FILE"
            now = self._plan_specs(name).get(name)
            if now is None:
                return f"{why}, and {self.plan} has no such backend; put it back, or name a file with --backends FILE"
            old, new = spec.model_dump(), now.model_dump()
            differing = ", ".join(key for key in {**old, **new} if old.get(key) != new.get(key))
            return (
                f"{why}: the values of {differing} are not those of the plan file {self.plan}; change them there, or "
                "name a file with --backends FILE"
            )
        if isinstance(spec, PydanticAISpec):
            return (
                f"the tools or the MCP servers of backend {name!r} in the store of run {self.run_id} are not those of "
                f"the plan file; change the backend in the plan file, or name that file with --plan PATH"
            )
        assert isinstance(spec, OpenAISpec | AnthropicSpec)
        return (
            f"backend {name!r} as stored with run {self.run_id} sends the key in {spec.api_key_env} to "
            f"{', '.join(spec.base_urls) or 'its default server'}, and the plan file does not. To allow it, set "
            f"{spec.kind.upper()}_BASE_URL to that server, or name the backend in the plan file; to forbid it, unset "
            f"{spec.api_key_env}"
        )

    def is_of_program(self, name: str) -> bool:
        """Return whether the backend is named by `call`: a function, or a backend such as a graph."""
        return isinstance(self._stored_spec(name), FunctionSpec)

    def _stored_spec(self, name: str) -> BackendSpec | None:
        if name not in self.specs:
            return None
        try:
            return SPECS.validate_python({name: self.specs[name]})[name]
        except ValidationError:
            raise InvalidRequest(
                f"the stored backend {name!r} of run {self.run_id} cannot be read; start a new run"
            ) from None

    def _plan_specs(self, name: str) -> Mapping[str, BackendSpec]:
        why = f"backend {name!r} of run {self.run_id} is taken from the plan file, not from the store"
        plan = self.plan
        if plan is None:
            raise InvalidRequest(f"{why}; name the file with --plan PATH")
        try:
            value = read_plan_data(plan)
        except OSError as error:
            reason = f"{plan} cannot be read ({error.strerror})"
            raise InvalidRequest(f"{why}, and {reason}; if it has moved, name it with --plan PATH") from None
        try:
            return SPECS.validate_python(value.get("backends") or {})
        except ValidationError:
            raise InvalidRequest(f"{why}, and {plan} has mistakes now; `plait check` lists them") from None


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def backends_of_file_only(backend_set: BackendSet) -> list[str]:
    """Return the names of the backends that a resume or a worker takes from a plan file, never from the store alone."""
    return [
        name for name, spec in backend_set.specs.items() if isinstance(spec, FunctionSpec) or _needs_plan_file(spec)
    ]


def _files_called(spec: BackendSpec) -> list[str]:
    """Return the Python files of the functions that the spec names: of `call` and of `tools`."""
    called = [getattr(spec, "call", None), *(getattr(spec, "tools", None) or ())]
    files = [one.rpartition(":")[0] for one in called if isinstance(one, str)]
    return [file for file in files if file.endswith(".py")]


def _uses_plan_file(spec: BackendSpec) -> bool:
    return spec.on is not None or _needs_plan_file(spec)


def _needs_plan_file(spec: BackendSpec) -> bool:
    """Return whether a stored spec has to stand in the plan file as well."""
    if isinstance(spec, AgentSpec | PydanticAISpec):
        return not spec.is_harmless
    return isinstance(spec, OpenAISpec | AnthropicSpec) and _leaks_key(spec)


def _leaks_key(spec: OpenAISpec | AnthropicSpec) -> bool:
    """Return whether a stored spec would send a key of this environment to a server of another origin."""
    # Headers from the environment go to the server of the environment only: see backends/models/endpoint.py.
    backend = OpenAIBackend if isinstance(spec, OpenAISpec) else AnthropicBackend
    as_usual = all(is_environments(url, backend.url_env, backend.default_url) for url in spec.base_urls)
    return not (as_usual and spec.api_key_env == backend.api_key_env) and bool(os.environ.get(spec.api_key_env))


_AS_STORED = FileOptions()


def _log(note: str) -> None:
    logger().warning(note)


@asynccontextmanager
async def inspecting_runner(
    store: Store, record: RunRecord, tasks: tuple[TaskRecord, ...], files: FileOptions = _AS_STORED, note: Note = _log
) -> AsyncGenerator[ParallelRunner]:
    """Open a runner on `store` that can ask whether turns of the run have outlived their process. If a backend is not
    available here, `note` is called and the stored state counts.
    """
    async with AsyncExitStack() as stack:
        yield await _make_runner(stack, store, record, tasks, files, note)


@asynccontextmanager
async def cancelling_runner(
    store: Store, record: RunRecord, files: FileOptions = _AS_STORED, note: Note = _log
) -> AsyncGenerator[ParallelRunner]:
    """Open a runner on `store` that reaches the attempts of the run on other hosts, and the sessions of a program's
    backends that wait for an answer. If a backend cannot be used here, `note` is called.
    """
    async with AsyncExitStack() as stack:
        places, tasks = await placed_attempts(store, record.run_id), await store.list_tasks(record.run_id)
        ids = {task_id for task_id, _ in places}
        placed = [one for one in tasks if one.task_id in ids]
        asking = [one for one in tasks if one.status == TaskStatus.WAITING_INPUT and one.session_id is not None]
        made: dict[str, Backend] = {}
        default = ""
        if placed or (asking and stores_backends(record)):
            try:
                stored, dag = StoredBackends.of(record, files), decode_dag(record, tasks)
                default = stored.default
                names = dict.fromkeys(dag.backend_of(dag[one.task_id]) or default for one in placed)
                of_sessions = (dag.backend_of(dag[one.task_id]) or default for one in asking)
                names |= dict.fromkeys(name for name in of_sessions if stored.is_of_program(name))
                made = await stack.enter_async_context(stored.select(names).open(names))
            except (InvalidRequest, BackendUnavailable) as error:
                note(f"plait: backends of the run cannot be reached: {error}")
        yield BackendSet({}, default).make_runner(made, store=store)


async def _make_runner(
    stack: AsyncExitStack,
    store: Store,
    record: RunRecord,
    tasks: tuple[TaskRecord, ...],
    files: FileOptions,
    note: Note,
) -> ParallelRunner:
    dag = decode_dag(record, tasks)
    under_way = [dag[task.task_id] for task in tasks if TaskStatus(task.status) is TaskStatus.RUNNING]
    if under_way:
        try:
            stored = StoredBackends.of(record, files)
            made = stored.make_agents()
            names = list(dict.fromkeys(dag.backend_of(task) or stored.default for task in under_way))
            others = [name for name in names if name not in made]
            if others:
                made |= await stack.enter_async_context(stored.select(others).open(others))
            return BackendSet({}, stored.default).make_runner(made, store=store)
        except (InvalidRequest, BackendUnavailable) as error:
            note(f"plait: cannot check whether agents of the run still work: {error}")
    return BackendSet({}).make_runner({}, store=store)


def select_backends(
    record: RunRecord, dag: DAG, tasks: Sequence[TaskRecord], stored: StoredBackends, *, retry_failed: bool
) -> tuple[BackendSet, list[str], dict[str, TaskStatus]]:
    """Return the backends that the run still needs, their names, and the status of each task after the resume. Raises
    InvalidRequest.
    """
    steps = plan_resume(dag, tasks, retry_failed=retry_failed)
    statuses = {task.task_id: _status_after_resume(step.action, task) for task, step in zip(tasks, steps, strict=True)}
    led_by = StoredPolicy.of(record)
    policy = None if led_by is None else policy_of(led_by.kind, led_by.settings)
    names = required_backends(dag, stored.default, statuses.values(), policy=policy, known=stored.specs)
    return stored.select(names), names, statuses


def _status_after_resume(action: ResumeAction, task: TaskRecord) -> TaskStatus:
    """Return the status of a task after the resume. A running task stays running: events report whether its backend
    still works.
    """
    if TaskStatus(task.status) is TaskStatus.RUNNING:
        return TaskStatus.RUNNING
    if action in RUNS or action is ResumeAction.BLOCKED:
        return TaskStatus.PENDING
    if action is ResumeAction.FAIL or task.damaged:
        return TaskStatus.FAILED
    return TaskStatus.WAITING_INPUT if action is ResumeAction.ASK else TaskStatus(task.status)


class StoredRunners:
    """The runners of the runs in `store`. `files` name replacements of stored backends; `lease` is that of the runners,
    in seconds.
    """

    def __init__(self, store: Store, files: FileOptions = _AS_STORED, *, lease: float = LEASE_SECONDS) -> None:
        self._store = store
        self._files = files
        self._lease = lease

    @asynccontextmanager
    async def open(
        self, run_id: str, *, retry_failed: bool = False, task_id: str | None = None
    ) -> AsyncGenerator[ParallelRunner]:
        """Open a runner on the backends that the run still needs, or on the backend of one task. Raises PlaitError."""
        record, tasks = await self._read(run_id)
        if task_id is None and has_ended(record, tasks, retry_failed):
            yield BackendSet({}).make_runner({}, store=self._store, lease=self._lease)
            return
        if task_id is None and await is_to_be_cancelled(self._store, record):
            async with cancelling_runner(self._store, record, self._files) as runner:
                yield runner
            return
        backend_set, names = self._select(record, tasks, retry_failed, task_id)
        async with backend_set.open(names) as made:
            concurrency = stored_concurrency(record) or backend_set.concurrency()
            yield backend_set.make_runner(made, store=self._store, concurrency=concurrency, lease=self._lease)

    @asynccontextmanager
    async def inspect(self, run_id: str) -> AsyncGenerator[ParallelRunner]:
        """Open a runner that can judge turns which outlived their process. Raises PlaitError."""
        record, tasks = await self._read(run_id)
        async with inspecting_runner(self._store, record, tasks, self._files) as runner:
            yield runner

    async def _read(self, run_id: str) -> tuple[RunRecord, tuple[TaskRecord, ...]]:
        _, record = await stored_record(self._store, run_id)
        return record, await self._store.list_tasks(run_id)

    def _select(
        self, record: RunRecord, tasks: tuple[TaskRecord, ...], retry_failed: bool, task_id: str | None
    ) -> tuple[BackendSet, list[str]]:
        dag = decode_dag(record, tasks)
        stored = StoredBackends.of(record, self._files)
        if task_id is None:
            backend_set, names, _ = select_backends(record, dag, tasks, stored, retry_failed=retry_failed)
            return backend_set, names
        if task_id not in dag:
            raise TaskNotFound(f"run {record.run_id} has no task {task_id!r}")
        names = [dag.backend_of(dag[task_id]) or stored.default]
        return stored.select(names), names


def why_untrusted(path: Path, folders: Collection[Path]) -> str | None:
    """Return why a worker does not trust the file or folder at the absolute `path`, which has no links in it; None if
    it does. `folders` were named to the worker, and have no links in them either.
    """
    if any(path.is_relative_to(folder) for folder in folders):
        return None
    for part in (path, *path.parents):
        try:
            found = part.stat()
        except FileNotFoundError:  # reported when the file is read
            continue
        except OSError as error:
            return f"{part} cannot be examined ({error.strerror})"
        if found.st_uid not in {0, os.geteuid()}:
            return f"{part} belongs to {_user(found.st_uid)}"
        if found.st_mode & stat.S_IWOTH and not _keeps_others_out(found):
            return f"every user may write to {part}"
        if found.st_mode & stat.S_IWGRP and not (_keeps_others_out(found) or _is_of_one_user(found)):
            return f"the group {_group(found.st_gid)} may write to {part}"
    return None


def _keeps_others_out(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX)


def _is_of_one_user(found: os.stat_result) -> bool:
    """Return whether the group is the owner's own: many systems give each user one, and let it write by default."""
    try:
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
