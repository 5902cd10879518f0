"""The shape of a plan file, as pydantic models; `plan_schema` is the same shape for editors."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator

from plait.backends.errors import ErrorKind
from plait.backends.spec.build import BackendSpec
from plait.runner.domain.dag import nearest
from plait.runner.domain.task import DEFAULT_RETRY, DEFAULT_RETRY_ON, MAX_DEPTH, MAX_TASKS, NEVER_RETRIED
from plait.runner.policies.follow_ups import DEFAULT_CHAINS
from plait.runner.prompts.base import RESERVED_NAMES

MAX_MADE = 100_000
"""How many tasks `for_each` over inputs may make of a plan."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = r"[0-9]{1,9}(\.[0-9]{1,3})?(ms|s|m|h)"
_RESERVED: dict[str, Any] = {"not": {"enum": sorted(RESERVED_NAMES)}}
_ID_SCHEMA = {"type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$", **_RESERVED}
_ROLE = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,31}$"
_KINDS = [kind.value for kind in ErrorKind if kind.value not in NEVER_RETRIED]


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not re.fullmatch(_DURATION, value):
        raise ValueError(f"must be a number of seconds or a text such as '90s', '5m' or '1h', not {value[:60]!r}")
    unit = value.lstrip("0123456789.")
    return float(value.removesuffix(unit)) * _UNITS[unit]


def _known_kind(value: Any) -> Any:
    if isinstance(value, str) and value not in _KINDS:
        raise ValueError(f"must be one of {', '.join(_KINDS)}, not {value[:60]!r}{nearest(value, _KINDS)}")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_NUMBER_OR_DURATION = {
    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": f"^{_DURATION}$"}]
}
Seconds: TypeAlias = Annotated[float, BeforeValidator(_seconds), WithJsonSchema(_NUMBER_OR_DURATION)]
Kind: TypeAlias = Annotated[str, BeforeValidator(_known_kind), WithJsonSchema({"type": "string", "enum": _KINDS})]
Ids: TypeAlias = Annotated[
    list[str],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Id: TypeAlias = Annotated[str, WithJsonSchema(_ID_SCHEMA)]
Mode: TypeAlias = Literal["hard", "soft", "skip"]


def _allow_empty(schema: dict[str, Any]) -> None:
    """Let every key that may be left out be null, as `_leave_out_empty` has it."""
    for name, shape in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in shape.get("anyOf", ()):
            about = {key: shape.pop(key) for key in ("default", "description", "title") if key in shape}
            choices = shape.pop("anyOf", None) or [shape.copy()]
            shape.clear()
            shape |= {"anyOf": [*choices, {"type": "null"}], **about}


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, json_schema_extra=_allow_empty
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, data: Any) -> Any:
        # `backend:` with nothing behind it is how people write "none", so it counts as not given.
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}  # pyright: ignore[reportUnknownVariableType]
        return data


class RetryPart(_Part):
    """When and how often a failed attempt is tried again."""

    attempts: int = Field(default=DEFAULT_RETRY.attempts, ge=1, le=1000)
    """All tries, the first included; 1 means no retry."""
    base_delay: float = Field(default=DEFAULT_RETRY.base_delay, ge=0, allow_inf_nan=False)
    """Seconds; the wait before try n+1 is a random time up to base_delay * 2**(n-1)."""
    max_delay: float = Field(default=DEFAULT_RETRY.max_delay, ge=0, allow_inf_nan=False)
    """Seconds that a wait is at most, unless the server asks for longer."""
    on: list[Kind] = Field(default_factory=lambda: sorted(DEFAULT_RETRY_ON))
    """Kinds of errors that are tried again."""
    max_crashes: int = Field(default=DEFAULT_RETRY.max_crashes, ge=1, le=1000)
    """How often the run's process may die while the task runs, before the task fails as crashed."""


class DefaultsPart(_Part):
    """What holds for every task that does not say otherwise."""

    backend: str | None = None
    """Name of a backend under `backends`."""
    failure_mode: Mode = "hard"
    """What a failure does to the tasks that depend on it."""
    retry: RetryPart = Field(default_factory=RetryPart)
    timeout: Seconds | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time limit of one attempt: seconds, or a text such as 90s, 5m, 1h."""


class TaskPart(_Part):
    """One task."""

    id: Id
    """Unique name: 1 to 64 of letters, digits, '.', '_', '-', not starting with '.'."""
    prompt: str
    """What the backend is asked: a template, in which {{ other }} is the result of upstream task `other`."""
    depends_on: Ids = Field(default_factory=list[str])
    """Tasks that have to be done before this one: one id or a list."""
    backend: str | None = None
    """Name of a backend under `backends`. Default: defaults.backend."""
    continues: str | None = None
    """Go on with this task's conversation."""
    failure_mode: Mode | None = None
    """hard: dependents stay blocked. soft: they run without it. skip: as if it had completed, empty."""
    retry: RetryPart | None = None
    timeout: Seconds | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time limit of one attempt: seconds, or a text such as 90s, 5m, 1h."""
    output_schema: dict[str, Any] | None = None
    """A JSON Schema that the answer has to fit; its fields are then there for other prompts."""
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Expected relative duration; long paths start first."""
    for_each: str | None = None
    """Name of an input that is a list, or of a task that returns one: one task for each element, which is {{ item }} in
    the prompt."""
    output: Literal["tasks"] | None = None
    """tasks: the answer is a list of tasks in this very shape, which are added to the run."""
    at_most_once: bool = False
    """Never run twice: not retried, and after a crash a person says what follows (plait answer)."""
    role: str | None = Field(default=None, pattern=_ROLE)
    """What it is to `workflows`, such as coder: 1 to 32 of letters, digits, '.', '_', '-', not starting with '.'."""
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Carried along and shown."""


class FollowUpPart(_Part):
    """A task that follows each task of a role."""

    role: str = Field(pattern=_ROLE)
    """Its own role: 1 to 32 of letters, digits, '.', '_', '-', not starting with '.'."""
    prompt: str | None = None
    """A template, in which {{ work }} is the result of the task that it follows. A reviewer and a tester have one."""
    backend: str | None = None
    """Name of a backend under `backends`. Default: defaults.backend."""
    failure_mode: Mode | None = None
    """hard: those behind it stay blocked. soft: they run without it. skip: as if it had completed, empty."""
    retry: RetryPart | None = None
    timeout: Seconds | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time limit of one attempt: seconds, or a text such as 90s, 5m, 1h."""
    output_schema: dict[str, Any] | None = None
    """A JSON Schema that the answer has to fit; its fields are then there for the prompts behind it."""


class WorkflowPart(_Part):
    """What follows each task of a role, once it is completed."""

    after: str = Field(pattern=_ROLE)
    """The role of the tasks that are followed."""
    steps: list[FollowUpPart] = Field(
        default_factory=lambda: [FollowUpPart(role=step.role) for step in DEFAULT_CHAINS["coder"]]
    )
    """One behind the other. Default: a reviewer, then a tester."""


class FilesInput(_Part):
    """Text files: each becomes {name, path, text}."""

    files: str
    """A glob such as docs/*.md, relative to the plan file, or a folder: all *.md, *.txt and *.rst in it."""
    max_chars: int = Field(default=20_000, ge=1)
    """Characters kept of each file."""
    max_files: int = Field(default=50, ge=1, le=10_000)
    """More matches than this are an error."""


class RowsInput(_Part):
    """Rows of a file: one JSON value a line, a list in JSON, or a table with a header."""

    rows: str
    """A file *.jsonl, *.ndjson, *.json, *.csv or *.tsv, relative to the plan file."""
    max_rows: int = Field(default=1_000, ge=1, le=MAX_MADE)
    """More rows than this are an error."""


class RequiredInput(_Part):
    """An input without a default."""

    required: Literal[True]
    """The run must give a value: --set name=value."""


def input_kind(value: Any) -> str:
    """Which kind of input `value` is under `inputs`: files, rows, required or value."""
    if isinstance(value, FilesInput) or (isinstance(value, dict) and "files" in value):
        return "files"
    # A table may well have its rows under this key.
    if isinstance(value, RowsInput) or (isinstance(value, dict) and isinstance(value.get("rows"), str)):  # pyright: ignore[reportUnknownMemberType]
        return "rows"
    if isinstance(value, RequiredInput) or (isinstance(value, dict) and "required" in value):
        return "required"
    return "value"


_SPECIAL: list[dict[str, Any]] = [
    {"required": ["files"]},
    {"required": ["rows"], "properties": {"rows": {"type": "string"}}},
    {"required": ["required"]},
]
_PLAIN_VALUE: dict[str, Any] = {"not": {"type": "object", "anyOf": _SPECIAL}}
InputPart: TypeAlias = Annotated[
    Annotated[FilesInput, Tag("files")]
    | Annotated[RowsInput, Tag("rows")]
    | Annotated[RequiredInput, Tag("required")]
    | Annotated[Any, Tag("value"), WithJsonSchema(_PLAIN_VALUE)],
    Discriminator(input_kind),
]


class GrowthPart(_Part):
    """How far a run may grow."""

    max_tasks: int = Field(default=MAX_TASKS, ge=1, le=MAX_TASKS)
    """How many tasks it may have in all, those of the plan included."""
    max_depth: int = Field(default=MAX_DEPTH, ge=0, le=MAX_DEPTH)
    """How many tasks may have brought a task in, one the other; 0: no task adds any."""


class PlanPart(_Part):
    """A plan: tasks, what they depend on, and what answers them."""

    name: str = ""
    """Shown in lists of runs. Default: the file's name."""
    inputs: dict[str, InputPart] = Field(default_factory=dict[str, Any], json_schema_extra={"propertyNames": _RESERVED})
    """Values that prompts use by name, with their defaults; --set name=value replaces one."""
    defaults: DefaultsPart = Field(default_factory=DefaultsPart)
    backends: dict[str, BackendSpec] = Field(default_factory=dict[str, BackendSpec])
    """Backends by name. A plan without any runs on the backend that the command line chooses."""
    concurrency: int | None = Field(default=None, ge=1, le=10_000)
    """How many tasks run at once."""
    growth: GrowthPart | None = None
    """How far a run may grow by tasks that its tasks add."""
    tasks: list[TaskPart] = Field(json_schema_extra={"minItems": 1})
    """The tasks, in any order."""
    workflows: list[WorkflowPart] = Field(default_factory=list[WorkflowPart])
    """What follows tasks of which `role`."""


SPEC_CLASSES: dict[str, type[BaseModel]] = {
    get_args(spec.model_fields["kind"].annotation)[0]: spec for spec in get_args(get_args(BackendSpec)[0])
}
"""The model of each kind of backend."""


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of the file format, as published in docs/plan.schema.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "plan.schema.json",
        **PlanPart.model_json_schema(),
        "title": "plait plan",
    }
