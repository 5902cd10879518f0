"""From a plan file to a `Plan` with a checked `DAG`. Reports all mistakes of a file at once."""

from __future__ import annotations

import ast
import codecs
import importlib.machinery
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from plait.backends.specs.build_backend import FunctionSpec
from plait.errors import DAGError, PlanError, PlanProblem
from plait.json_form import JsonValue
from plait.runner.domain.dag import DAG, nearest
from plait.runner.plan.plan_inputs import SuppliedValues, input_values
from plait.runner.plan.plan_mistakes import describe, explain, salvage
from plait.runner.plan.plan_models import GIVEN_BY, FollowUpPart, PlanPart, StepPart, TaskPart
from plait.runner.plan.plan_policies import (
    check_follow_ups,
    fit_to_models,
    follow_ups_of,
    orchestrator_dag,
    orchestrator_of,
    workflow_dag,
    workflow_of,
)
from plait.runner.plan.plan_positions import MAX_BYTES, Source, read_source, spell
from plait.runner.plan.plan_positions import Path as Where
from plait.runner.plan.plan_tasks import PlanTasks
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.task import MODEL_SETTINGS, TEXT, GrowthLimits, media_type, no_such_setting, takes_no_such_file

if TYPE_CHECKING:
    from plait.backends.prices import Price
    from plait.backends.specs.build_backend import BackendSpec
    from plait.backends.specs.host_specs import HostsPart
    from plait.json_form import JsonValue
    from plait.runner.domain.policy import Policy


NAME_IT = "; name it under 'backends', or leave 'backend' out"
"""The remedy for a backend missing from the plan."""
_FORMATS = {".json": "json", ".toml": "toml"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan ready to run: `runner.run(plan.dag, policy=plan.policy)`."""

    name: str
    """The name of the runs."""
    dag: DAG
    """The validated graph."""
    backends: Mapping[str, BackendSpec] = field(default_factory=dict[str, Any])
    """Specifications of backends by name, for `plait.backends.specs.build_backend`; empty if the file names none."""
    default_backend: str | None = None
    """The name of the backend for tasks without a backend; None to let the caller choose."""
    concurrency: int | None = None
    """The number of tasks running at once; None if not given."""
    path: Path = Path()
    """The plan file, or the base folder of relative paths for a plan from text."""
    prices: Mapping[str, Price] = field(default_factory=dict[str, Any])
    """The prices of models, by name: `ParallelRunner(prices=plan.prices)`."""
    policy: Policy | None = None
    """The policy described by `orchestrate`, `workflow` or `follow_ups`; None without any."""
    hosts: Mapping[str, HostsPart] = field(default_factory=dict[str, Any])
    """The groups of other machines, by name."""

    @property
    def folder(self) -> Path:
        """The base folder of the plan's relative paths."""
        return self.path if self.path.is_dir() else self.path.parent

    def fitted_to(self, specs: Mapping[str, BackendSpec], default: str) -> Plan:
        """Return the plan for a run on the backends `specs`: a goal given to small local models asks them for short
        answers.
        """
        if not isinstance(self.policy, OrchestratorPolicy):
            return self
        policy = fit_to_models(self.policy, specs, default)
        dag = orchestrator_dag(policy, self.dag.name, self.dag.inputs, self.dag.growth)
        return replace(self, policy=policy, dag=dag)


def load_plan(path: str | Path, *, overrides: Mapping[str, str] | None = None) -> Plan:
    """Return the plan in the file at `path`: JSON or TOML by suffix, YAML otherwise.

    `overrides` are values for the inputs as text, in the manner of `--set name=value`. Reads the files named by inputs;
    calls no backend. Raises PlanError with all mistakes found.
    """
    path = Path(path)
    return _load(path, SuppliedValues(path.parent, overrides or {}))


def load_plan_with_functions(path: Path, overrides: Mapping[str, str]) -> Plan:
    """Load a plan as `load_plan` does, and check that the functions of its backends exist without executing their
    code.
    """
    return _load(path, SuppliedValues(path.parent, overrides), with_functions=True)


def load_piped_plan(data: bytes, overrides: Mapping[str, str], *, with_functions: bool = False) -> Plan:
    """Return the plan in `data`, as read from standard input: JSON if the text begins with `{`, YAML otherwise. Paths
    in the plan are relative to the working directory. `with_functions` checks as `load_plan_with_functions` does.
    Raises PlanError.
    """
    form = "json" if data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") else "yaml"
    source = read_source(data, format=form, file="standard input")
    return _build(source, SuppliedValues(Path(), overrides), Path(), with_functions=with_functions)


def load_plan_of_run(path: Path, inputs: Mapping[str, JsonValue]) -> Plan:
    """Return the plan in the current file, with the input values of an existing run. Raises PlanError."""
    return _load(path, SuppliedValues(path.parent, {}, inputs))


def _load(path: Path, given: SuppliedValues, *, with_functions: bool = False) -> Plan:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot read the plan: {error.strerror}; check the path"
        raise PlanError([PlanProblem(message, file=str(path))]) from error
    source = read_source(data, format=_FORMATS.get(path.suffix.lower(), "yaml"), file=str(path))
    return _build(source, given, path, with_functions=with_functions)


def parse_plan(
    text: str,
    *,
    format: str = "yaml",  # noqa: A002 - the plain word
    folder: Path | None = None,
    overrides: Mapping[str, str] | None = None,
    most: int | None = MAX_BYTES,
    names_default: bool = False,
) -> Plan:
    """Return the plan in `text`, in the format `yaml`, `json` or `toml`. See `load_plan`.

    `folder` is the base of relative paths. `most` is the maximum size in bytes; None for no limit. With
    `names_default`, each task without a backend gets the name of `defaults.backend`, for a runner with a default of its
    own. Raises PlanError.
    """
    folder = folder or Path()
    given = SuppliedValues(folder, overrides or {})
    return _build(read_source(text, format=format, most=most), given, folder, names_default=names_default)


def _build(
    source: Source, given: SuppliedValues, path: Path, *, with_functions: bool = False, names_default: bool = False
) -> Plan:
    part, lost = _shape(source)
    if part is None:
        raise PlanError(source.problems)
    if names_default:
        _name_default(part)
    _check_backends(part, source)
    if not names_default:  # otherwise the specs stand for the runner's own backends
        _check_settings(part, source)
    if with_functions:
        _look_up_functions(part, path if path.is_dir() else path.parent, source)
    values = input_values(part.inputs, given, source)
    name = part.name.strip() or ("" if path.is_dir() else path.stem)
    dag, policy = _work(part, values, (name, given.folder), lost, source)
    if source.problems or dag is None:
        raise PlanError(source.problems)
    default = part.defaults.backend
    prices = {model: price.price() for model, price in part.prices.items()}
    return Plan(dag.name, dag, part.backends, default, part.concurrency, path, prices, policy, part.hosts)


def _work(
    part: PlanPart, values: dict[str, JsonValue], place: tuple[str, Path], lost: set[int], source: Source
) -> tuple[DAG | None, Policy | None]:
    """Return the initial DAG and the policy of the plan's runs. `place` is the name and the folder of the plan."""
    name, folder = place
    growth = None if part.growth is None else GrowthLimits(part.growth.max_tasks, part.growth.max_depth)
    if part.orchestrate is not None:
        policy = orchestrator_of(part.orchestrate, part.defaults, values, source)
        return (None if policy is None else orchestrator_dag(policy, name, values, growth)), policy
    if part.workflow:
        workflow = workflow_of(part, name, source)
        return (None if workflow is None else workflow_dag(workflow, values, growth, source)), workflow
    if not part.tasks and source.problems:
        return None, None
    dag = _dag(PlanTasks(part, values, source, folder), name, lost, growth)
    follow_ups = follow_ups_of(part, source)
    if dag is not None and follow_ups is not None:
        check_follow_ups(follow_ups, dag, source)
    return dag, follow_ups


def _shape(source: Source) -> tuple[PlanPart | None, set[int]]:
    """Return the file as a model. With mistakes in the file, return an approximation for further checks."""
    if not isinstance(source.value, dict):
        message = f"a plan must be a mapping with the key 'tasks', not {describe(source.value)}"
        source.problems.append(source.problem((), message))
        return None, set()
    if not _has_one_kind(source.value, source):
        return None, set()
    try:
        return PlanPart.model_validate(source.value), set()
    except ValidationError as error:
        # A value refused by the reader is missing; do not report the absence again.
        refused = {problem.where for problem in source.problems}
        source.problems += [problem for problem in explain(error, source) if problem.where not in refused]
        return salvage(source.value, error)


def _has_one_kind(value: Mapping[str, JsonValue], source: Source) -> bool:
    """Return whether at most one key gives the tasks of the run; with two, every further problem follows from that.
    Other problems of these keys are added to `source.problems`.
    """
    given = [key for key in GIVEN_BY if value.get(key) is not None]
    if not given and not any(nearest(key, GIVEN_BY) for key in value.keys() - PlanPart.model_fields.keys()):
        message = "'tasks' is missing; add it, or 'orchestrate' with a goal, or 'workflow' with steps"
        source.problems.append(source.problem(("tasks",), message))
    for key in given[1:]:
        message = f"a plan has one of {', '.join(GIVEN_BY)}, and this plan has {given[0]!r} already; leave one out"
        source.problems.append(source.problem((key,), message, at_key=True))
    if given[1:]:
        return False
    if given and given != ["tasks"] and value.get("follow_ups"):
        message = "'follow_ups' follow 'tasks', and this plan has none; leave them out"
        source.problems.append(source.problem(("follow_ups",), message, at_key=True))
    if value.get("workflow") == []:
        source.problems.append(source.problem(("workflow",), "there are no steps; add at least one"))
    return True


def _check_backends(part: PlanPart, source: Source) -> None:
    named: list[tuple[Where, str | None]] = [(("defaults", "backend"), part.defaults.backend)]
    named += [(("tasks", index, "backend"), task.backend) for index, task in enumerate(part.tasks)]
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
                source.problems.append(source.problem(("hosts", group, "hosts", index), message))
    for backend, spec in part.backends.items():
        if part.hosts and spec.on is not None and spec.on not in part.hosts:
            message = f"unknown hosts {spec.on!r}{nearest(spec.on, part.hosts) or '; name them under `hosts`'}"
            source.problems.append(source.problem(("backends", backend, "on"), message))
        if spec.needs is not None and spec.on in part.hosts and part.hosts[spec.on].kind == "ssh":
            message = "hosts reached with ssh have slots in place of resources; leave `needs` out"
            source.problems.append(source.problem(("backends", backend, "needs"), message))
    for path, name in named:
        if name is not None and name not in part.backends:
            hint = nearest(name, part.backends) or NAME_IT
            source.problems.append(source.problem(path, f"unknown backend {name!r}{hint}"))


def _check_settings(part: PlanPart, source: Source) -> None:
    """Report settings and files of tasks that their backends do not take, as far as the plan names the backends."""
    only = next(iter(part.backends)) if len(part.backends) == 1 else None
    for index, task in enumerate(part.tasks):
        name = task.backend or (None if task.continues else part.defaults.backend or only)
        if name not in part.backends:
            continue
        known = part.backends[name].adjustable
        for setting in MODEL_SETTINGS:
            if getattr(task, setting) is not None and setting not in known:
                message = no_such_setting(name, setting, known)
                source.problems.append(source.problem(("tasks", index, setting), message))
        for place, written in enumerate(task.files if part.backends[name].file_form is None else ()):
            if (kind := media_type(written)) != TEXT:
                at: Where = ("tasks", index, "files", place)
                path = at if at in source.values else at[:3]
                source.problems.append(source.problem(path, takes_no_such_file(name, written, kind)))


def _name_default(part: PlanPart) -> None:
    """Write `defaults.backend` into each part that names no backend and continues no conversation."""
    steps = (step for chain in part.follow_ups for step in chain.steps)
    parts: list[TaskPart | FollowUpPart | StepPart] = [*part.tasks, *steps, *part.workflow]
    for one in parts:
        if one.backend is None and not getattr(one, "continues", None):
            one.backend = part.defaults.backend
    if (goal := part.orchestrate) is not None:
        goal.planner = goal.planner or part.defaults.backend
        goal.executor = goal.executor or part.defaults.backend
        goal.reflector = goal.reflector or part.defaults.backend


def _look_up_functions(part: PlanPart, folder: Path, source: Source) -> None:
    # An invalid backend was replaced by a placeholder.
    wrong = {problem.where for problem in source.problems}
    for name, message in missing_functions(part.backends, folder):
        backend = spell(("backends", name))
        if not any(where == backend or where.startswith(f"{backend}.") for where in wrong):
            source.problems.append(source.problem(("backends", name, "call"), message))


def _dag(graph: PlanTasks, name: str, lost: set[int], growth: GrowthLimits | None) -> DAG | None:
    tasks = graph.tasks()
    if tasks is None:
        return None
    try:
        return DAG(tasks, name=name, inputs=graph.inputs, growth=growth)
    except DAGError as error:
        graph.report(error.problems, lost)
        return None


_DYNAMIC = re.compile(rb"\b(?:globals|vars|exec|eval|setattr|__getattr__|__dict__|modules)\b|import +\*")
"""Code that may give names to values in other ways than by a statement."""


def missing_functions(backends: Mapping[str, BackendSpec], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each backend whose function cannot exist, with the reason.

    `folder` is the base of relative paths. Reads the files that define the functions; imports nothing, and says nothing
    of code that may make names while it runs.
    """
    for name, spec in backends.items():
        if not isinstance(spec, FunctionSpec) or spec.on is not None:
            continue
        where, _, function = spec.call.rpartition(":")
        if not where.endswith(".py"):
            file, problem = _module_file(where)
        else:
            file, problem = folder / where, None
            if not file.is_file():
                problem = f"there is no file {file}; write `call` relative to the plan file's folder"
        if problem is None and file is not None:
            problem = _missing_name(file, where, function.partition(".")[0])
        if problem:
            yield name, problem


def _missing_name(file: Path, where: str, name: str) -> str | None:
    try:
        code = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        return f"{where} is not Python: {error.msg}{line}"
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    names: set[str] = set()  # those of functions and classes too
    for node in ast.walk(tree):
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            words = (getattr(node, field, None) for field in ("id", "name", "asname", "rest"))
            names.update(word.partition(".")[0] for word in words if isinstance(word, str))
    # A submodule becomes an attribute of its package at its first import.
    submodules = _modules_in([file.parent]) if file.name == "__init__.py" else []
    if name in names or name in submodules or _DYNAMIC.search(code):
        return None
    return f"{where} has no {name!r}{nearest(name, names)}"


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
            return None, f"{package} has no module {part!r}{nearest(part, _modules_in(folders))}"
    is_source = isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    return (Path(spec.origin) if is_source and spec.origin else None), None


def _modules_in(folders: Iterable[str | Path]) -> list[str]:
    return [file.stem for folder in folders for file in Path(folder).glob("*")]
