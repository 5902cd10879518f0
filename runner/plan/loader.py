"""From a plan file to a `Plan` with a checked `DAG`. Reports every mistake of the file at once."""

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
from plait.runner.domain.task import Limits
from plait.runner.errors import DAGError
from plait.runner.plan.errors import Path as Where
from plait.runner.plan.errors import PlanError, PlanProblem, spell
from plait.runner.plan.functions import missing_functions
from plait.runner.plan.inputs import Given, input_values
from plait.runner.plan.messages import describe, explain, model_at, real_path
from plait.runner.plan.schema import PlanPart
from plait.runner.plan.source import MAX_BYTES, Source, read_source
from plait.runner.plan.tasks import Graph
from plait.runner.plan.workflows import check_follow_ups, follow_ups_of

if TYPE_CHECKING:
    from plait.backends.protocol import JsonValue
    from plait.backends.spec.build import BackendSpec
    from plait.runner.policies.follow_ups import FollowUps

NAME_IT = "; name it under 'backends', or leave 'backend' out"
"""What to do about a backend that the plan does not have."""
_FORMATS = {".json": "json", ".toml": "toml"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that can run.

    `backends` holds the specs by name, empty where the file names none; `plait.backends.spec.build` makes them.
    `default_backend` is the one for tasks that name none, None where the caller is to choose. `path` is the plan file,
    or the folder that its relative paths start from when it came as text. `policy` is what `workflows` asks for:
    `runner.run(plan.dag, policy=plan.policy)`.
    """

    name: str
    dag: DAG
    backends: Mapping[str, BackendSpec] = field(default_factory=dict[str, Any])
    default_backend: str | None = None
    concurrency: int | None = None
    path: Path = Path()
    policy: FollowUps | None = None

    @property
    def folder(self) -> Path:
        """Where the plan's relative paths start."""
        return self.path if self.path.is_dir() else self.path.parent


def load_plan(path: str | Path, *, overrides: Mapping[str, str] | None = None) -> Plan:
    """The plan in the file at `path`: JSON or TOML by its ending, YAML otherwise.

    `overrides` are values for the plan's inputs as text, as `--set name=value` gives them. Reads the files that the
    inputs name; calls no backend. Raises PlanError with every mistake found.
    """
    path = Path(path)
    return _load(path, Given(path.parent, overrides or {}))


def load_plan_with_functions(path: Path, overrides: Mapping[str, str]) -> Plan:
    """As `load_plan`; the functions that its backends call are looked up as well, and none of their code is run."""
    return _load(path, Given(path.parent, overrides), with_functions=True)


def load_plan_of_run(path: Path, inputs: Mapping[str, JsonValue]) -> Plan:
    """The plan in the file as it is now, with the values that a run has for its inputs. Raises PlanError."""
    return _load(path, Given(path.parent, {}, inputs))


def _load(path: Path, given: Given, *, with_functions: bool = False) -> Plan:
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
    """The plan in `text`, which is `yaml`, `json` or `toml`; as `load_plan`, with paths relative to `folder`. `most` is
    how many bytes it may have; None where that was seen to before.
    """
    folder = folder or Path()
    return _build(read_source(text, format=format, most=most), Given(folder, overrides or {}), folder)


def _build(source: Source, given: Given, path: Path, *, with_functions: bool = False) -> Plan:
    part, lost = _shape(source)
    if part is None:
        raise PlanError(source.problems)
    _check_backends(part, source)
    if with_functions:
        _look_up_functions(part, path.parent, source)
    values = input_values(part.inputs, given, source)
    name = part.name.strip() or ("" if path.is_dir() else path.stem)
    dag = _dag(Graph(part, values, source), name, lost, _growth_of(part))
    policy = follow_ups_of(part, source)
    if dag is not None and policy is not None:
        check_follow_ups(policy, dag, source)
    if source.problems or dag is None:
        raise PlanError(source.problems)
    default = part.defaults.backend
    return Plan(name, dag, part.backends, default, part.concurrency, path, policy)


def _shape(source: Source) -> tuple[PlanPart | None, set[int]]:
    """The file as a model; with mistakes in it, something like it that lets the search go on."""
    if not isinstance(source.value, dict):
        message = f"a plan is a mapping with the key 'tasks'; this holds {describe(source.value)}"
        source.problems.append(source.problem((), message))
        return None, set()
    try:
        return PlanPart.model_validate(source.value), set()
    except ValidationError as error:
        # Where the reader refused something, its absence is no news.
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
    # Where a backend is wrong in itself, another one has been put in its place.
    wrong = {problem.where for problem in source.problems}
    for name, message in missing_functions(part.backends, folder):
        backend = spell(("backends", name))
        if not any(where == backend or where.startswith(f"{backend}.") for where in wrong):
            source.problems.append(source.problem(("backends", name, "call"), message))


def _growth_of(part: PlanPart) -> Limits | None:
    return None if part.growth is None else Limits(part.growth.max_tasks, part.growth.max_depth)


def _dag(graph: Graph, name: str, lost: set[int], growth: Limits | None) -> DAG | None:
    tasks = graph.tasks()
    if tasks is None:
        return None
    try:
        return DAG(tasks, name=name, inputs=graph.inputs, growth=growth)
    except DAGError as error:
        graph.report(error.problems, lost)
        return None


_ROUNDS = 3  # a key put right may turn out to hold a wrong value


def salvage(value: JsonValue, error: ValidationError) -> tuple[PlanPart | None, set[int]]:
    """A plan that fits the model, or None, and the indexes of tasks whose dependencies were lost on the way."""
    whole: Any = copy.deepcopy(value)
    lost: set[int] = set()
    for _ in range(_ROUNDS):
        if not isinstance(whole.get("tasks"), list):
            return None, lost
        # From the back, so that the indexes of what is still to be mended stay right.
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
    """Remove `key`; where it is a misspelt one, its value goes to the right key."""
    value = mapping.pop(key, None)
    known = model.model_fields if model else {}
    close = difflib.get_close_matches(key, known, n=1)
    if key not in known and close and close[0] not in mapping:
        mapping[close[0]] = value
