"""Loading of plan files: from text to a `Plan` with a validated `DAG`. Reports all mistakes of a file at once.

The second half salvages a file with mistakes: `salvage` repairs or removes faulty entries, so that the search for
further mistakes can continue with the rest.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from plait.backends.protocol import JsonValue
from plait.runner.domain.dag import DAG, nearest
from plait.runner.domain.task import GrowthLimits
from plait.runner.errors import DAGError
from plait.runner.plan.errors import Path as Where
from plait.runner.plan.errors import PlanError, PlanProblem, spell
from plait.runner.plan.functions import missing_functions
from plait.runner.plan.inputs import SuppliedValues, input_values
from plait.runner.plan.messages import describe, explain, model_at, real_path
from plait.runner.plan.schema import PlanPart
from plait.runner.plan.source import MAX_BYTES, Source, read_source
from plait.runner.plan.tasks import PlanTasks
from plait.runner.plan.workflows import check_follow_ups, follow_ups_of

if TYPE_CHECKING:
    from plait.backends.protocol import JsonValue
    from plait.backends.spec.build import BackendSpec
    from plait.runner.policies.follow_ups import FollowUps

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
    """Specifications of backends by name, for `plait.backends.spec.build`; empty if the file names none."""
    default_backend: str | None = None
    """The name of the backend for tasks without a backend; None to let the caller choose."""
    concurrency: int | None = None
    """The number of tasks running at once; None if not given."""
    path: Path = Path()
    """The plan file, or the base folder of relative paths for a plan from text."""
    policy: FollowUps | None = None
    """The policy described by `workflows`; None without workflows."""

    @property
    def folder(self) -> Path:
        """The base folder of the plan's relative paths."""
        return self.path if self.path.is_dir() else self.path.parent


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
) -> Plan:
    """Return the plan in `text`, in the format `yaml`, `json` or `toml`. See `load_plan`.

    `folder` is the base of relative paths. `most` is the maximum size in bytes; None for no limit. Raises PlanError.
    """
    folder = folder or Path()
    return _build(read_source(text, format=format, most=most), SuppliedValues(folder, overrides or {}), folder)


def _build(source: Source, given: SuppliedValues, path: Path, *, with_functions: bool = False) -> Plan:
    part, lost = _shape(source)
    if part is None:
        raise PlanError(source.problems)
    _check_backends(part, source)
    if with_functions:
        _look_up_functions(part, path.parent, source)
    values = input_values(part.inputs, given, source)
    name = part.name.strip() or ("" if path.is_dir() else path.stem)
    dag = _dag(PlanTasks(part, values, source), name, lost, _growth_of(part))
    policy = follow_ups_of(part, source)
    if dag is not None and policy is not None:
        check_follow_ups(policy, dag, source)
    if source.problems or dag is None:
        raise PlanError(source.problems)
    default = part.defaults.backend
    return Plan(name, dag, part.backends, default, part.concurrency, path, policy)


def _shape(source: Source) -> tuple[PlanPart | None, set[int]]:
    """Return the file as a model. With mistakes in the file, return an approximation for further checks."""
    if not isinstance(source.value, dict):
        message = f"a plan must be a mapping with the key 'tasks', not {describe(source.value)}"
        source.problems.append(source.problem((), message))
        return None, set()
    try:
        return PlanPart.model_validate(source.value), set()
    except ValidationError as error:
        # A value refused by the reader is missing; do not report the absence again.
        refused = {problem.where for problem in source.problems}
        source.problems += [problem for problem in explain(error, source) if problem.where not in refused]
        return salvage(source.value, error)


def _check_backends(part: PlanPart, source: Source) -> None:
    named: list[tuple[Where, str | None]] = [(("defaults", "backend"), part.defaults.backend)]
    named += [(("tasks", index, "backend"), task.backend) for index, task in enumerate(part.tasks)]
    for index, workflow in enumerate(part.workflows):
        named += [(("workflows", index, "steps", n, "backend"), step.backend) for n, step in enumerate(workflow.steps)]
    for path, name in named:
        if name is not None and name not in part.backends:
            hint = nearest(name, part.backends) or NAME_IT
            source.problems.append(source.problem(path, f"unknown backend {name!r}{hint}"))


def _look_up_functions(part: PlanPart, folder: Path, source: Source) -> None:
    # An invalid backend was replaced by a placeholder.
    wrong = {problem.where for problem in source.problems}
    for name, message in missing_functions(part.backends, folder):
        backend = spell(("backends", name))
        if not any(where == backend or where.startswith(f"{backend}.") for where in wrong):
            source.problems.append(source.problem(("backends", name, "call"), message))


def _growth_of(part: PlanPart) -> GrowthLimits | None:
    return None if part.growth is None else GrowthLimits(part.growth.max_tasks, part.growth.max_depth)


def _dag(graph: PlanTasks, name: str, lost: set[int], growth: GrowthLimits | None) -> DAG | None:
    tasks = graph.tasks()
    if tasks is None:
        return None
    try:
        return DAG(tasks, name=name, inputs=graph.inputs, growth=growth)
    except DAGError as error:
        graph.report(error.problems, lost)
        return None


_ROUNDS = 3  # a corrected key may turn out to have a wrong value


def salvage(value: JsonValue, error: ValidationError) -> tuple[PlanPart | None, set[int]]:
    """Return a repaired plan, if possible, and the indexes of tasks whose dependencies were lost."""
    whole: Any = copy.deepcopy(value)
    lost: set[int] = set()
    for _ in range(_ROUNDS):
        if not isinstance(whole.get("tasks"), list):
            return None, lost
        # Backwards, to keep the indexes of the remaining findings valid.
        for finding in reversed(error.errors(include_url=False, include_input=False)):
            _mend(whole, real_path(finding["loc"]), finding["type"], lost)
        try:
            return PlanPart.model_validate(whole), lost
        except ValidationError as next_error:
            error = next_error
    return None, lost


def _mend(whole: Any, path: tuple[str | int, ...], kind: str, lost: set[int]) -> None:
    match path:
        case ("tasks", int() as index, *rest):
            _mend_task(whole, index, [str(part) for part in rest], kind, lost)
        case ("inputs", name, *_):
            whole["inputs"][name] = None
        case ("backends", name, *_):
            whole["backends"][name] = {"kind": "function", "call": "module:function"}
        case (name, *_):
            _take_out(whole, str(name), PlanPart)
        case _:
            pass


def _mend_task(whole: Any, index: int, rest: list[str], kind: str, lost: set[int]) -> None:
    task = whole["tasks"][index]
    if not rest or not isinstance(task, dict):
        whole["tasks"][index] = {"id": f"task-{index}-of-the-plan", "prompt": ""}
    elif rest[0] == "id":
        task["id"] = f"task-{index}-of-the-plan"
    elif rest[0] == "prompt":
        task["prompt"] = ""
    elif kind == "extra_forbidden" and len(rest) == 1:
        _take_out(task, rest[0], model_at(("tasks", index), whole))  # pyright: ignore[reportUnknownArgumentType]
    else:
        if rest[0] in {"depends_on", "continues"}:
            lost.add(index)
        task.pop(rest[0], None)  # pyright: ignore[reportUnknownMemberType]


def _take_out(mapping: dict[str, Any], key: str, model: type[BaseModel] | None) -> None:
    """Remove `key`. The value of a misspelt key moves to the correct key."""
    value = mapping.pop(key, None)
    known = model.model_fields if model else {}
    close = difflib.get_close_matches(key, known, n=1)
    if key not in known and close and close[0] not in mapping:
        mapping[close[0]] = value
