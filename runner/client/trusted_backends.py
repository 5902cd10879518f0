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
from plait.errors import BackendUnavailable, InvalidRequest
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
from plait.runner.client.runs import Need, Runs, run_options
from plait.runner.domain.dag import DAG
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.engine.run_options import RunOptions
from plait.runner.policies import policy_of
from plait.runner.recovery.resume_plan import RUNS, ResumeAction, plan_resume
from plait.runner.state.codec import decode_dag
from plait.runner.state.stored_run import StoredPolicy, StoredRun, has_ended, placed_attempts, stored_record
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


class TrustedBackends:
    """The backends that are stored with each run in `store`, as `plait resume` uses them: a `BackendSource`.

    `files` name replacements of stored backends. `note` is called if a backend that is wanted, but not needed, cannot
    be used here. `concurrency` replaces the number of tasks at once that is stored with a run; `options` are those of
    `run_options`.
    """

    def __init__(
        self,
        store: Store,
        files: FileOptions = _AS_STORED,
        *,
        note: Note = _log,
        concurrency: int | None = None,
        **options: Any,
    ) -> None:
        self._files = files
        self._note = note
        self._concurrency = concurrency
        self._options = options
        self._without = run_options(store=store, **options)
        assert self._without.store is not None
        self._store = self._without.store

    def runs(self) -> Runs:
        """Return the runs of the store, each on its own backends."""
        return Runs(self._without, source=self)

    def of(self, run: RunRecord) -> StoredBackends:
        """Return the backends of `run`, none of them opened. Raises InvalidRequest."""
        return StoredBackends.of(run, self._files)

    @asynccontextmanager
    async def for_run(
        self, run_id: str, need: Need, *, run: StoredRun | None = None, task_id: str | None = None
    ) -> AsyncGenerator[RunOptions]:
        """See `BackendSource`. A resume that has nothing to run, or only ends what runs, needs no backend."""
        if run is None:
            _, record = await stored_record(self._store, run_id)
            tasks = await self._store.list_tasks(run_id)
            dag = decode_dag(record, tasks)
        else:
            record, tasks, dag = run.record, run.tasks, run.state.dag
        retries = need is Need.RETRY
        async with AsyncExitStack() as stack:
            if need is Need.INSPECT:
                yield await self._inspecting(stack, record, dag, tasks)
            elif need is Need.CONTINUE:
                assert task_id is not None
                stored = self.of(record)
                name = dag.backend_of(dag[task_id]) or stored.default
                yield await self._opened(stack, record, stored.select([name]), [name])
            elif need is not Need.CANCEL and has_ended(record, tasks, retries):
                yield self._without
            elif need is Need.CANCEL or await is_to_be_cancelled(self._store, record):
                yield await self._cancelling(stack, record, dag, tasks)
            else:
                backend_set, names = select_backends(record, dag, tasks, self.of(record), retry_failed=retries)
                yield await self._opened(stack, record, backend_set, names)

    async def _opened(
        self, stack: AsyncExitStack, record: RunRecord, backend_set: BackendSet, names: Sequence[str]
    ) -> RunOptions:
        made = await stack.enter_async_context(backend_set.open(names))
        concurrency = self._concurrency or stored_concurrency(record) or backend_set.concurrency()
        return backend_set.options(made, store=self._store, concurrency=concurrency, **self._options)

    async def _cancelling(
        self, stack: AsyncExitStack, record: RunRecord, dag: DAG, tasks: Sequence[TaskRecord]
    ) -> RunOptions:
        """Open what reaches the attempts of the run on other hosts, and the sessions of a program's backends that wait
        for an answer.
        """
        ids = {task_id for task_id, _ in await placed_attempts(self._store, record.run_id)}
        placed = [one for one in tasks if one.task_id in ids]
        asking = [one for one in tasks if one.status == TaskStatus.WAITING_INPUT and one.session_id is not None]
        if placed or (asking and stores_backends(record)):
            try:
                stored = self.of(record)
                names = dict.fromkeys(dag.backend_of(dag[one.task_id]) or stored.default for one in placed)
                of_sessions = (dag.backend_of(dag[one.task_id]) or stored.default for one in asking)
                names |= dict.fromkeys(name for name in of_sessions if stored.is_of_program(name))
                made = await stack.enter_async_context(stored.select(names).open(names))
                return BackendSet({}, stored.default).options(made, store=self._store, **self._options)
            except (InvalidRequest, BackendUnavailable) as error:
                self._note(f"plait: backends of the run cannot be reached: {error}")
        return self._without

    async def _inspecting(
        self, stack: AsyncExitStack, record: RunRecord, dag: DAG, tasks: Sequence[TaskRecord]
    ) -> RunOptions:
        """Open what tells whether turns of the run have outlived their process. Otherwise the stored state counts."""
        under_way = [dag[task.task_id] for task in tasks if TaskStatus(task.status) is TaskStatus.RUNNING]
        if under_way:
            try:
                stored = self.of(record)
                made = stored.make_agents()
                names = list(dict.fromkeys(dag.backend_of(task) or stored.default for task in under_way))
                if others := [name for name in names if name not in made]:
                    made |= await stack.enter_async_context(stored.select(others).open(others))
                return BackendSet({}, stored.default).options(made, store=self._store, **self._options)
            except (InvalidRequest, BackendUnavailable) as error:
                self._note(f"plait: cannot check whether agents of the run still work: {error}")
        return self._without


def select_backends(
    record: RunRecord, dag: DAG, tasks: Sequence[TaskRecord], stored: StoredBackends, *, retry_failed: bool
) -> tuple[BackendSet, list[str]]:
    """Return the backends that the run still needs, and their names. Raises InvalidRequest."""
    statuses = statuses_after_resume(dag, tasks, retry_failed=retry_failed)
    led_by = StoredPolicy.of(record)
    policy = None if led_by is None else policy_of(led_by.kind, led_by.settings)
    names = required_backends(dag, stored.default, statuses.values(), policy=policy, known=stored.specs)
    return stored.select(names), names


def statuses_after_resume(dag: DAG, tasks: Sequence[TaskRecord], *, retry_failed: bool) -> dict[str, TaskStatus]:
    """Return the status of each task once a resume has begun, by task id. A running task stays running: events report
    whether its backend still works.
    """
    steps = plan_resume(dag, tasks, retry_failed=retry_failed)
    return {task.task_id: _status_after_resume(step.action, task) for task, step in zip(tasks, steps, strict=True)}


def _status_after_resume(action: ResumeAction, task: TaskRecord) -> TaskStatus:
    if TaskStatus(task.status) is TaskStatus.RUNNING:
        return TaskStatus.RUNNING
    if action in RUNS or action is ResumeAction.BLOCKED:
        return TaskStatus.PENDING
    if action is ResumeAction.FAIL or task.damaged:
        return TaskStatus.FAILED
    return TaskStatus.WAITING_INPUT if action is ResumeAction.ASK else TaskStatus(task.status)


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
