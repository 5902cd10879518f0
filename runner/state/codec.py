"""The translation between the runner and `persistence`: tasks and DAGs to what is stored, and records back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from operator import attrgetter
from typing import Any, cast

from plait import events
from plait.errors import StoreError
from plait.json_form import JsonInput
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.domain.dag import DAG
from plait.safe_text import clean_text
from plait.task import FailureMode, GrowthLimits, Retry, Task, TaskFile

SETTINGS_FORMAT = 100
"""The format of the JSON in a run's settings and in a task's spec. Formats 1 and 2 were used in development."""


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Made once: `json.dumps` makes an encoder for each value."""


def to_json(value: Any) -> str:
    """Return `value` as stored JSON. Raises TypeError or ValueError for values outside JSON, NaN included.

    Non-ASCII text stays unescaped, except text with lone surrogates, which survive only as escapes.
    """
    text = _encode(value)
    return text if text == clean_text(text) else json.dumps(value, separators=(",", ":"))


def run_created(at: str, run_id: str, dag: DAG, settings: Mapping[str, JsonInput]) -> events.RunCreated:
    """Return the event that stores the run with its whole DAG."""
    kept: dict[str, Any] = {**settings, "format": SETTINGS_FORMAT, "inputs": dag.inputs}
    if dag.growth is not None:
        kept["growth"] = asdict(dag.growth)
    return events.RunCreated(at, run_id, dag.name, to_json(kept), tuple(map(new_task, dag)))


def new_task(task: Task) -> events.NewTask:
    """Return the task as it is stored."""
    return events.NewTask(task.id, task.prompt, tuple(task.depends_on), task.backend, _spec(task))


_OPTIONS = [one for one in fields(Task) if one.name not in {"id", "prompt", "depends_on", "backend"}]
_DEFAULTS = tuple(one.default if one.default_factory is MISSING else one.default_factory() for one in _OPTIONS)
_options_of = attrgetter(*(one.name for one in _OPTIONS))


def _spec(task: Task) -> str:
    """Return the JSON of the options that differ from the defaults. Most tasks of a large run share the empty spec."""
    options = _options_of(task)
    if options == _DEFAULTS:
        return "{}"
    named = zip(_OPTIONS, options, _DEFAULTS, strict=True)
    spec: dict[str, Any] = {one.name: option for one, option, default in named if option != default}
    if "failure_mode" in spec:
        spec["failure_mode"] = FailureMode(task.failure_mode).value
    if "retry" in spec:
        spec["retry"] = {**asdict(task.retry_policy), "on": sorted(task.retry_policy.on)}
    if "files" in spec:
        spec["files"] = [[file.path, file.sha256] for file in task.files if isinstance(file, TaskFile)]
    return to_json(spec)


def decode_task(record: TaskRecord | events.NewTask) -> Task:
    """Return the task as given at the creation of the run."""
    if record.spec == "{}":
        return Task(record.task_id, record.prompt, record.depends_on, record.backend)
    spec = json.loads(record.spec)
    if "retry" in spec:
        spec["retry"] = Retry(**spec["retry"])
    if "files" in spec:
        spec["files"] = tuple(TaskFile(path, digest) for path, digest in spec["files"])
    return Task(record.task_id, record.prompt, record.depends_on, record.backend, **spec)


def _parts(mine: Sequence[Task], tasks: Sequence[TaskRecord]) -> dict[str, list[str]]:
    """Return the ids of the parts of each expanded task with `for_each`, by task id."""
    whole = {task.id for task in mine if task.for_each is not None}
    parts: dict[str, list[str]] = {}
    for record in tasks:
        if record.added_by in whole:
            parts.setdefault(record.added_by, []).append(record.task_id)
    return parts


def decode_dag(run: RunRecord, tasks: tuple[TaskRecord, ...]) -> DAG:
    """Return the DAG of a stored run. Raises StoreError if the run is damaged, or is stored in another format."""
    try:
        settings = cast("Mapping[str, Any]", json.loads(run.settings))
        if (found := settings.get("format")) != SETTINGS_FORMAT:
            raise _of_another_format(run, found)
        growth = GrowthLimits(**settings["growth"]) if "growth" in settings else None
        mine = [decode_task(record) for record in tasks]
        inputs = settings.get("inputs", {})
        return DAG(mine, name=run.name, inputs=inputs, growth=growth, gathered=_parts(mine, tasks))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"the stored data of run {run.run_id!r} is damaged ({error}); restore a copy of the store"
        ) from error


def _of_another_format(run: RunRecord, found: object) -> StoreError:
    maker, advice = "a development version of plait", "Start a new run"
    if isinstance(found, int) and found > SETTINGS_FORMAT:
        maker, advice = "a newer plait", "Upgrade plait"
    made = f"{maker} ({'no format' if found is None else f'format {found!r}'})"
    reads = f"this plait reads format {SETTINGS_FORMAT} only"
    return StoreError(f"run {run.run_id!r} was stored by {made}; {reads}. {advice}")
