"""The format of a plan file as pydantic models, and as a JSON Schema for editors (`plan_schema`).

The docstrings of models and fields are the descriptions of the published schema.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from plait.backends.backend_specs import BackendSpec, DescribedModel, FunctionSpec, HostsPart
from plait.backends.prices import Price
from plait.errors import ErrorKind, nearest
from plait.json_form import from_json
from plait.runner.domain.notify_target import NOTICE_WORDS, NoticeWord, NotifyTarget
from plait.runner.domain.run_tuning import MOST_SLOTS
from plait.runner.policies.follow_ups import DEFAULT_CHAINS
from plait.runner.policies.goal_policy import DEFAULT_LIMITS
from plait.runner.policies.step_workflow import DEFAULT_TRIES, OnError
from plait.runner.prompts.prompt_names import RESERVED_NAMES
from plait.runner.state.budget import MOST_USD
from plait.task import (
    DEFAULT_RETRY,
    DEFAULT_RETRY_ON,
    MAX_DEPTH,
    MAX_FILES,
    MAX_REPEAT,
    MAX_TASKS,
    NEVER_RETRIED,
    Best,
    Check,
    Join,
)

MAX_MADE = 100_000
"""The maximum number of tasks that `for_each` over inputs makes before the run. Rows beyond are read as it goes."""
MAX_PLANNED = 1_000
"""The maximum number of tasks of an orchestration: each end of a task looks at all tasks."""
MAX_GOAL = 20_000
"""The maximum number of characters of a goal, which is part of every prompt of an orchestration."""
MAX_STEPS = 200
"""The maximum number of steps of a workflow: each step depends on all earlier steps."""
MAX_WORKERS = 100
MAX_ATTEMPTS = 1_000
"""The maximum number of attempts of a task."""
MAX_DESCRIPTION = 1_000
MAX_ROUNDS = 1_000
"""The maximum number of rounds of a loop."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = r"[0-9]{1,9}(\.[0-9]{1,3})?(ms|s|m|h)"
_RESERVED: dict[str, Any] = {"not": {"enum": sorted(RESERVED_NAMES)}}
_ID_SCHEMA = {"type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$", **_RESERVED}
_ROLE = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,31}$"
_STEP = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,55}$"
_KINDS = [kind.value for kind in ErrorKind if kind.value not in NEVER_RETRIED]


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not re.fullmatch(_DURATION, value):
        raise ValueError(f"must be a number of seconds or a text such as '90s', '5m' or '1h', not {value[:60]!r}")
    unit = value.lstrip("0123456789.")
    return float(value.removesuffix(unit)) * _UNITS[unit]


def _age(value: Any) -> Any:
    """Return true, false, or a number of seconds above 0."""
    if isinstance(value, bool):
        return value
    age = _seconds(value)
    if not isinstance(age, int | float) or not 0 < age < float("inf"):
        raise ValueError(
            f"must be true, false, a number of seconds or a text such as '90s' or '24h', not {value!r}"[:200]
        )
    return float(age)


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
Age: TypeAlias = Annotated[
    Any, BeforeValidator(_age), WithJsonSchema({"anyOf": [{"type": "boolean"}, *_NUMBER_OR_DURATION["anyOf"]]})
]
Kind: TypeAlias = Annotated[str, BeforeValidator(_known_kind), WithJsonSchema({"type": "string", "enum": _KINDS})]
Ids: TypeAlias = Annotated[
    list[str],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Id: TypeAlias = Annotated[str, WithJsonSchema(_ID_SCHEMA)]
_FILE: dict[str, Any] = {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"]}
Prompt: TypeAlias = Annotated[
    str, WithJsonSchema({"anyOf": [{"type": "string"}, {**_FILE, "additionalProperties": False}]})
]
"""A text, or in a plan file the name of a file with the text: see `read_prompt_files`."""
Mode: TypeAlias = Literal["hard", "soft", "skip"]


def _exit_codes(value: Any) -> Any:
    codes: Any = [value] if type(value) is int else value
    if codes != "any":
        numbers = cast("list[object]", codes) if isinstance(codes, list) else []
        if not numbers or not all(type(code) is int and 0 <= code < 256 for code in numbers):
            raise ValueError(f"must be `any`, a number from 0 to 255, or a list of such numbers, not {value!r}"[:200])
    return cast("Any", codes)


def _slots(value: Any) -> Any:
    if value != "auto" and not (type(value) is int and 1 <= value <= MOST_SLOTS):
        raise ValueError(f"must be auto, or a whole number from 1 to {MOST_SLOTS:,}, not {value!r}"[:200])
    return value


def _plan_file(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be the name of a plan file, not {value!r}"[:200])
    return value


_CODE = {"type": "integer", "minimum": 0, "maximum": 255}
Codes: TypeAlias = Annotated[
    Any,
    BeforeValidator(_exit_codes),
    WithJsonSchema({"anyOf": [{"const": "any"}, _CODE, {"type": "array", "items": _CODE, "minItems": 1}]}),
]
PlanFile: TypeAlias = Annotated[Any, BeforeValidator(_plan_file), WithJsonSchema({"type": "string", "minLength": 1})]
"""The name of a plan file; once that has been read, the `Call`."""


def _allow_empty(schema: dict[str, Any]) -> None:
    """Allow null for every optional key, in agreement with `_leave_out_empty`."""
    for name, shape in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in shape.get("anyOf", ()):
            about: JsonSchemaValue = {
                key: shape.pop(key) for key in ("default", "description", "title") if key in shape
            }
            choices = shape.pop("anyOf", None) or [shape.copy()]
            shape.clear()
            shape |= {"anyOf": [*choices, {"type": "null"}], **about}


def _one_of(forms: Iterable[JsonSchemaValue]) -> Callable[[dict[str, Any]], None]:
    """Return what allows null for optional keys, and one of the `forms`."""
    one_of = [*forms]

    def extend(schema: dict[str, Any]) -> None:
        _allow_empty(schema)
        schema["oneOf"] = one_of

    return extend


def keys_of(model: type[DescribedModel]) -> dict[str, FieldInfo]:
    """Return the fields of a part by their keys in a plan file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


class _Part(DescribedModel):
    model_config = ConfigDict(strict=True, json_schema_extra=_allow_empty)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, data: Any) -> Any:
        # Authors write a key without a value (`backend:`) to say "none": treat such a key as absent.
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}  # pyright: ignore[reportUnknownVariableType]
        return data


class _GuessedPart(_Part):
    """A part that `approximate_plan` reads with mistakes in it: a wrong value counts as missing, and the value of a
    misspelt key belongs to the right key.
    """

    stand_ins: ClassVar[Mapping[str, str]] = {}
    """Values for required keys, with `{}` for a number that makes them unique."""
    entry_stand_ins: ClassVar[Mapping[str, Any]] = {}
    """Values for wrong entries of mappings, by the key of the mapping."""

    @model_validator(mode="before")
    @classmethod
    def _guess_keys(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is None:
            return data
        fields = keys_of(cls)
        keys: dict[str, Any] = dict(data) if isinstance(data, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
        for key in [key for key in keys if key not in fields]:
            value = keys.pop(key)
            near = difflib.get_close_matches(key, fields, n=1)
            if near and near[0] not in keys:
                keys[near[0]] = value
        missing = [key for key, field in fields.items() if field.is_required() and keys.get(key) is None]
        return keys | {key: cls._stand_in(key, info.context) for key in missing}

    @field_validator("*", mode="wrap")
    @classmethod
    def _guess_values(cls, value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return read(value)
        except ValidationError:
            key = str(info.field_name).rstrip("_")
            if info.context is None:
                raise
            if key not in cls.entry_stand_ins or not isinstance(value, dict):
                return cls._stand_in(key, info.context)
        entries: dict[str, Any] = {}
        for name, entry in cast("dict[str, Any]", value).items():
            try:
                entries |= read({name: entry})
            except ValidationError:
                entries[name] = cls.entry_stand_ins[key]
        return entries

    @classmethod
    def _stand_in(cls, key: str, numbers: Iterator[int]) -> Any:
        if key in cls.stand_ins:
            return cls.stand_ins[key].format(next(numbers))
        return keys_of(cls)[key].get_default(call_default_factory=True)


class _ShortPart(_Part):
    """A part that may also be written in a short form."""

    short_form: ClassVar[JsonSchemaValue]

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        shape = handler.resolve_ref_schema(reference)
        if "anyOf" not in shape:
            about: JsonSchemaValue = {key: shape.pop(key) for key in ("description", "title") if key in shape}
            mapping = shape.copy()
            shape.clear()
            shape |= {**about, "anyOf": [cls.short_form, mapping]}
        return reference


class RetryPart(_ShortPart):
    """The retry policy for failed attempts, or the number of retries: 3 allows four attempts."""

    short_form: ClassVar[JsonSchemaValue] = {"type": "integer", "minimum": 0, "maximum": MAX_ATTEMPTS - 1}

    @model_validator(mode="before")
    @classmethod
    def _read_number(cls, data: Any) -> Any:
        if type(data) is not int:
            return data
        if not 0 <= data < MAX_ATTEMPTS:
            raise ValueError(f"must be a number of retries from 0 to {MAX_ATTEMPTS - 1}, or a mapping, not {data}")
        return {"attempts": data + 1}

    attempts: int = Field(default=DEFAULT_RETRY.attempts, ge=1, le=MAX_ATTEMPTS)
    """The maximum number of attempts, including the first; 1 means no retry."""
    base_delay: float = Field(default=DEFAULT_RETRY.base_delay, ge=0, allow_inf_nan=False)
    """Seconds. The wait before attempt n+1 is random, up to base_delay * 2**(n-1)."""
    max_delay: float = Field(default=DEFAULT_RETRY.max_delay, ge=0, allow_inf_nan=False)
    """The maximum wait in seconds, unless the server asks for a longer wait."""
    on: list[Kind] = Field(default_factory=lambda: sorted(DEFAULT_RETRY_ON))
    """The kinds of errors to retry."""


class DefaultsPart(_Part):
    """Default values for all tasks."""

    backend: str | None = None
    """The name of a backend under `backends`."""
    failure_mode: Mode = "hard"
    """The effect of a failure on the dependents."""
    retry: RetryPart = Field(default_factory=RetryPart)
    """The retry policy."""
    timeout: Seconds | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time limit of an attempt: seconds, or a text such as 90s, 5m, 1h."""
    cache: Age = False
    """true: take exact answers from all runs of the store; a duration such as 24h is the maximum age."""


class CheckPart(_Part):
    """What each answer has to pass before the task is done: all that is named here, in this order."""

    output_schema: dict[str, Any] | None = None
    """A JSON Schema for the JSON in the answer, which then becomes the data of the result."""
    passes: str | None = Field(default=None, min_length=1)
    """A condition over the answer, such as "{{ answer.score }} >= 3", as in `when`."""
    run: list[str] = Field(default_factory=list[str])
    """A command: the program and its arguments, such as [pytest, -q, tests], as in `run` of a task. The answer is its
    standard input.
    """
    judge: str | None = Field(default=None, min_length=1)
    """A prompt such as "Is this a haiku? {{ answer }}". The judge answers with ok and reason."""
    backend: str | None = None
    """The backend of the judge. Default: that of the task."""
    tries: int = Field(default=3, ge=1, le=MAX_ATTEMPTS)
    """The number of answers that are checked. The reason of a failed check is the next message of the conversation."""

    @model_validator(mode="after")
    def _has_something(self) -> CheckPart:
        self.check()
        return self

    def check(self) -> Check:
        """Return the check. Raises ValueError."""
        return Check(self.run, self.tries, self.output_schema, self.passes, self.judge, self.backend)


class LoopPart(_GuessedPart):
    """Tasks that are repeated, round by round, until a condition is true."""

    model_config = ConfigDict(json_schema_extra=_one_of({"required": [key]} for key in ("plan", "tasks")))
    stand_ins: ClassVar[Mapping[str, str]] = {"until": "true"}

    plan: PlanFile = None
    """The file of the plan whose tasks are a round, relative to this one."""
    tasks: list[TaskPart] = Field(default_factory=list["TaskPart"])
    """The tasks of a round, in place of `plan`."""
    with_: dict[str, Any] = Field(default_factory=dict[str, Any], alias="with")
    """Values for the inputs of the plan, or further names for the prompts of `tasks`; as `with` of a task. {{ previous
    }} are the results of the previous round by name, such as {{ previous.test.stdout }}; empty in the first round.
    """
    until: str
    """A condition on the results of a round, such as "{{ test.code }} == 0". Once it is true, the loop is completed."""
    max: int = Field(default=10, ge=1, le=MAX_ROUNDS)
    """The number of rounds after which the loop fails."""
    returns: Any = None
    """The result, as `returns` of a plan, for a loop with `tasks`: the results of the last round by default."""


class VotePart(_ShortPart):
    """The answer of a task with `repeat`: all, majority, or the best for a judge."""

    short_form: ClassVar[JsonSchemaValue] = {"enum": ["all", "majority"]}

    @model_validator(mode="before")
    @classmethod
    def _read_word(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        if data not in {"all", "majority"}:
            raise ValueError(f"must be all, majority, or a mapping such as {{best: PROMPT}}, not {data[:60]!r}")
        return {"by": data}

    by: Literal["all", "majority"] | None = None
    """all or majority: what `vote: majority` stands for."""
    best: str | None = Field(default=None, min_length=1)
    """A prompt that says what makes an answer good. The judge, the task ID.judge, reads the numbered answers behind
    it.
    """
    backend: str | None = None
    """The backend of the judge. Default: that of the task."""

    @model_validator(mode="after")
    def _has_one(self) -> VotePart:
        if (self.by is None) == (self.best is None):
            raise ValueError("must be all, majority, or a mapping with `best`, the prompt of a judge")
        return self

    def vote(self) -> Literal["all", "majority"] | Best:
        """Return the vote of a task."""
        return Best(self.best, self.backend) if self.best is not None else self.by or "all"


def _one_work(schema: dict[str, Any]) -> None:
    _allow_empty(schema)
    schema["required"].remove("prompt")
    schema["anyOf"] = [{"required": [key]} for key in ("prompt", "run", "plan", "loop", "backend", "files")]


class TaskPart(_GuessedPart):
    """A task."""

    model_config = ConfigDict(json_schema_extra=_one_work)

    stand_ins: ClassVar[Mapping[str, str]] = {"id": "task-{}-of-the-plan", "prompt": "?"}

    @model_validator(mode="before")
    @classmethod
    def _other_work_needs_no_prompt(cls, data: Any, info: ValidationInfo) -> Any:
        keys = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        if any(keys.get(key) for key in ("run", "plan", "loop")):
            # A command or a call with mistakes counts as missing, and is no missing prompt.
            return {"prompt": "" if info.context is None else cls.stand_ins["prompt"], **keys}
        # The backend may be a function.
        return {"prompt": "", **keys} if keys.get("backend") or keys.get("files") else cast("Any", data)

    id: Id
    """Unique name of 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.'. At most 58 for a task over the
    list of another task. Not inputs, results, item, true, false or none: prompts use these words.
    """
    prompt: Prompt
    """The prompt for the backend: a template, in which {{ other }} is the result of the upstream task `other`. Left out
    only with `run`, `plan`, `loop`, `files` or a function as `backend`. The parameters of a function that are named
    like upstream tasks, inputs or `item` receive their values. {file: NAME} stands for the text in a file.
    """
    depends_on: Ids = Field(default_factory=list[str])
    """Tasks to be done before: an id or a list of ids."""
    when: str | None = None
    """A condition such as "{{ review.ok }} == false": if false once the dependencies are done, the task is skipped, and
    dependents continue as after a completion with an empty result.
    """
    run: list[str] = Field(default_factory=list[str])
    """A command in place of a model: the program and its arguments, such as [ruff, check, src]. The prompt is its
    standard input. Each word is a template; names stand behind '--', or in an option such as --file={{ path }}. The
    result has code, stdout and stderr, and with an output_schema data, the JSON in stdout.
    """
    codes: Codes = Field(default_factory=lambda: [0])
    """The exit codes with which a command completes the task, 0 by default: a number, a list of numbers, or any."""
    plan: PlanFile = None
    """The file of a plan that the task stands for, relative to this one: its tasks become tasks of the run, such as
    report.draft for the task draft of the plan that the task report calls. The result is that plan's `returns`.
    """
    with_: dict[str, Any] = Field(default_factory=dict[str, Any], alias="with")
    """Values for the inputs of `plan`, by name. Texts are templates as prompts are; a text that is one name, such as
    "{{ item }}", is the value itself.
    """
    loop: LoopPart | None = None
    """Tasks, or a plan, that are repeated until a condition is true: fix.1.test, fix.2.test, ..."""
    cwd: str | None = Field(default=None, min_length=1)
    """The folder in which a command or an agent works, such as "repos/{{ item.repo }}", relative to that of its
    backend. What a name stands for stays below the folder that is written out before it. Default: the folder of the
    task in `continues`, or of the backend.
    """
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Further environment variables of a command or an agent, by name; texts are templates. They are stored: name the
    variables with keys in `pass_env` of the backend.
    """
    shared: bool = False
    """true: a command or an agent that may work in its folder while another one writes there."""
    check: CheckPart | None = None
    """What each answer has to pass: a schema, a condition, a command, a judge. Not for a task with `run`."""
    join: Join = "all"
    """all: starts once all dependencies are done. any: once the first has completed. done: once all have ended,
    whatever happened. A result that is not there when the task starts is empty in its prompt.
    """
    race: bool = False
    """With join: any. The first dependency that completes cancels the others, and the tasks that only serve them."""
    repeat: int = Field(default=1, ge=1, le=MAX_REPEAT)
    """The number of samples: tasks ID.1, ID.2, ... with the same prompt; the task itself is decided by `vote`."""
    vote: VotePart | None = None
    """With repeat. all, the default: the list of the answers. majority: the answer that most samples gave. {best:
    PROMPT, backend: NAME}: the one that a judge prefers.
    """
    backend: str | None = None
    """The name of a backend under `backends`. Default: defaults.backend; for a command, command."""
    model: str | None = Field(default=None, min_length=1)
    """The name of the model, in place of the backend's. For openai, anthropic and coding agents."""
    system: str | None = Field(default=None, min_length=1)
    """The system prompt, in place of the backend's. For openai, anthropic, local, claude-code and codex."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """The sampling temperature, in place of the backend's. For openai, anthropic and local."""
    files: Ids = Field(default_factory=list[str], max_length=MAX_FILES)
    """Files that the prompt comes with: a path or glob, relative to the plan, or a list; {{ name }} is an input,
    {{ item }} an element of an input. Text stands before the prompt; images and PDFs are sent as the API takes them.
    """
    continues: str | None = None
    """The task whose conversation to continue. Implies the dependency."""
    failure_mode: Mode | None = None
    """hard: dependents stay blocked. soft: they run without the result, and the run fails. skip: as if completed with
    an empty result.
    """
    retry: RetryPart | None = None
    """The retry policy; `defaults` fills missing keys."""
    timeout: Seconds | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time limit of an attempt: seconds, or a text such as 90s, 5m, 1h."""
    output_schema: dict[str, Any] | None = None
    """A JSON Schema for the answer; the fields of the answer are then available to other prompts. `$ref` only within
    the schema.
    """
    max_cost: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """What the task may cost in all its attempts, in US dollars. A call that might cost more than what is left is not
    made: the task asks for a higher limit. With for_each or repeat: for each part.
    """
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Expected relative duration; long paths start first."""
    for_each: str | None = None
    """An input with a list, or a task that returns a list: one task for each element, {{ item }} in the prompt."""
    output: Literal["tasks"] | None = None
    """tasks: the answer is a list of tasks in this same shape, to be added to the run."""
    cache: Age | None = None
    """true: take an exact answer from any run of the store in place of a call; a duration such as 24h is the maximum
    age. Default: defaults.cache.
    """
    at_most_once: bool = False
    """Never run twice: no retry, and after a crash a person decides (plait answer)."""
    role: str | None = Field(default=None, pattern=_ROLE)
    """The role for `follow_ups`, such as coder: 1 to 32 letters, digits, '.', '_' or '-', not beginning with '.'. Kept
    in `metadata`.
    """
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    """JSON values for display."""


LoopPart.model_rebuild()


class FollowUpPart(_Part):
    """A task added after each task of a role."""

    role: str = Field(pattern=_ROLE)
    """The role of the follow-up: 1 to 32 letters, digits, '.', '_' or '-', not beginning with '.'. Also the end of its
    id, its name in prompts of later steps, and a role for other chains.
    """
    prompt: Prompt | None = None
    """A template, in which {{ work }} is the result of the followed task, and an earlier role of the chain stands for
    its result. The roles reviewer and tester have a default.
    """
    backend: str | None = None
    """The name of a backend under `backends`. Default: defaults.backend."""
    failure_mode: Mode | None = None
    """hard: later steps stay blocked. soft: they run without the result. skip: as if completed with an empty result."""
    retry: RetryPart | None = None
    """The retry policy; `defaults` fills missing keys."""
    timeout: Seconds | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time limit of an attempt: seconds, or a text such as 90s, 5m, 1h."""
    output_schema: dict[str, Any] | None = None
    """A JSON Schema for the answer; the fields of the answer are then available to the prompts of later steps."""


class ChainPart(_Part):
    """The follow-ups of each completed task of a role."""

    after: str = Field(pattern=_ROLE)
    """The role of the followed tasks. Each role once."""
    steps: list[FollowUpPart] = Field(
        default_factory=lambda: [FollowUpPart(role=step.role) for step in DEFAULT_CHAINS["coder"]]
    )
    """The follow-ups in sequence. Default: a reviewer, then a tester."""


class StepPart(_GuessedPart):
    """A step of a workflow."""

    stand_ins: ClassVar[Mapping[str, str]] = {"name": "step-{}-of-the-plan", "prompt": "?"}

    name: str = Field(pattern=_STEP)
    """1 to 56 letters, digits, '.', '_' or '-', not beginning with '.'. Each name once. Not inputs, results, item,
    true, false or none: prompts use these words.
    """
    prompt: Prompt
    """A template, in which {{ earlier }} is the result of the earlier step `earlier`: empty if that step failed. Blank
    only for a function.
    """
    backend: str | None = None
    """The name of a backend under `backends`. Default: defaults.backend."""
    on_error: OnError = "end"
    """retry: the same step again, up to max_tries times. go_on: the next step. end: the run fails."""
    max_tries: int = Field(default=DEFAULT_TRIES, ge=1, le=1000)
    """The maximum number of tries with on_error: retry."""
    continues: bool = False
    """Continue the conversation of the previous step, on its backend."""
    retry: RetryPart | None = None
    """The retry policy within a try; `defaults` fills missing keys."""
    timeout: Seconds | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time limit of an attempt: seconds, or a text such as 90s, 5m, 1h."""
    output_schema: dict[str, Any] | None = None
    """A JSON Schema for the answer; the fields of the answer are then available to the prompts of later steps."""


class OrchestratePart(_GuessedPart):
    """A goal, reached by tasks that are planned during the run."""

    stand_ins: ClassVar[Mapping[str, str]] = {"goal": "the goal"}

    goal: str = Field(min_length=1, max_length=MAX_GOAL)
    """The goal. {{ name }} stands for an input; no other template syntax."""
    max_iterations: int = Field(default=DEFAULT_LIMITS.max_iterations, ge=1, le=MAX_PLANNED)
    """The number of tasks to execute at most; then the answer is written from the results at hand."""
    reflect_every: int = Field(default=DEFAULT_LIMITS.reflect_every, ge=1, le=MAX_PLANNED)
    """The number of executed tasks between two reflections."""
    max_tasks: int = Field(default=DEFAULT_LIMITS.max_tasks, ge=1, le=MAX_PLANNED)
    """The number of planned tasks at most."""
    planner: str | None = None
    """The backend that plans the tasks and writes the answer. Default: defaults.backend."""
    executor: str | None = None
    """The backend of the tasks that name no worker. Default: defaults.backend."""
    reflector: str | None = None
    """The backend that judges the results. Default: defaults.backend."""
    registry: dict[str, Annotated[str, Field(min_length=1, max_length=MAX_DESCRIPTION)]] = Field(
        default_factory=dict[str, str], max_length=MAX_WORKERS
    )
    """The backends that a planned task may name, each with a description of its abilities for the planner."""


class FilesInput(_Part):
    """Text files: each becomes {name, path, text}."""

    files: str
    """A glob such as docs/*.md, relative to the plan file, or a folder: all its *.md, *.txt and *.rst files."""
    max_chars: int | None = Field(default=None, ge=1)
    """The number of characters kept of each file; without it all, and a file of more than 1,000,000 is an error."""
    max_files: int = Field(default=50, ge=1, le=10_000)
    """The maximum number of matching files; more are an error."""


class RowsInput(_Part):
    """Rows of a file: JSON values by line, a JSON list, or a table with a header."""

    rows: str
    """A file *.jsonl, *.ndjson, *.json, *.csv, *.tsv or *.parquet, relative to the plan file."""
    max_rows: int = Field(default=1_000, ge=1)
    """The maximum number of rows; more are an error."""


class RequiredInput(_Part):
    """An input without a default."""

    required: Literal[True]
    """The run must supply a value: --set name=value."""


def input_kind(value: Any) -> str:
    """Return the kind of the input `value`: files, rows, required or value."""
    if isinstance(value, FilesInput) or (isinstance(value, dict) and "files" in value):
        return "files"
    # A plain mapping may contain a list under the key `rows`.
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
    """Limits on the growth of a run."""

    max_tasks: int = Field(default=MAX_TASKS, ge=1, le=MAX_TASKS)
    """The maximum number of tasks in all, including the tasks of the plan."""
    max_depth: int = Field(default=MAX_DEPTH, ge=0, le=MAX_DEPTH)
    """The maximum number of levels at which added tasks may add tasks; 0: no task adds any."""


class PricePart(_Part):
    """The price of a model, in US dollars for a million tokens."""

    input: float = Field(ge=0, allow_inf_nan=False)
    """The price of input."""
    output: float = Field(ge=0, allow_inf_nan=False)
    """The price of output."""
    cache_read: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The price of input read from the provider's cache. Default: input."""
    cache_write: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The price of input written to the provider's cache. Default: input."""
    cache_write_1h: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The price of input that the provider's cache keeps for an hour. Default: cache_write."""
    reasoning: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The price of output spent on reasoning. Default: output."""

    def price(self) -> Price:
        """Return the price."""
        return Price(**self.model_dump())


class NotifyPart(_Part):
    """A target of notices: one of url, url_env and run."""

    model_config = ConfigDict(json_schema_extra=_one_of({"required": [key]} for key in ("url", "url_env", "run")))

    url: str | None = None
    """An address that is no secret, such as https://ntfy.sh/topic. The notice is posted there as JSON."""
    url_env: str | None = None
    """The name of an environment variable that holds the address, as for a webhook of Slack."""
    run: list[str] = Field(default_factory=list[str])
    """A command in place of an address: the program and its arguments. The notice is its standard input, as JSON."""
    form: Literal["json", "slack"] = "json"
    """slack: post {"text": ...} alone, as webhooks of Slack, Mattermost and others take it."""
    headers_env: dict[str, str] = Field(default_factory=dict[str, str])
    """Further headers of the request by name, each with the name of an environment variable that holds its value."""
    pass_env: list[str] = Field(default_factory=list[str])
    """Names of further environment variables for the command."""
    link: str | None = None
    """The address under which a person reaches plait serve or plait ui, such as https://plait.example.org. The notice
    of a question has a signed link to its form there; the environment variable PLAIT_LINK_KEY holds the key.
    """
    on: list[NoticeWord] = Field(default_factory=lambda: list(NOTICE_WORDS), min_length=1)
    """What is told. question: a task asks a person. budget: a task asks for a higher budget. parked: all that is left
    waits for a time. failed, done: the end of the run. Default: all.
    """

    def target(self) -> NotifyTarget:
        """Return the target, which may have mistakes."""
        return from_json(NotifyTarget, self.model_dump())


GIVEN_BY = ("tasks", "orchestrate", "workflow")
"""The keys of a plan that give the tasks of its run. A plan has one of them."""


class PlanPart(_GuessedPart):
    """A plan: tasks with their dependencies, or a goal, or the steps of a workflow; and the backends."""

    model_config = ConfigDict(
        json_schema_extra=_one_of(
            {"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in GIVEN_BY
        )
    )
    entry_stand_ins: ClassVar[Mapping[str, Any]] = {
        "backends": FunctionSpec(kind="function", call="module:function"),
        "inputs": None,
    }

    name: str = ""
    """Shown in lists of runs. Default: the name of the file."""
    inputs: dict[str, InputPart] = Field(default_factory=dict[str, Any], json_schema_extra={"propertyNames": _RESERVED})
    """Values for prompts, by name, with their defaults; --set name=value replaces a value."""
    defaults: DefaultsPart = Field(default_factory=DefaultsPart)
    """Values for tasks that lack the key."""
    backends: dict[str, BackendSpec] = Field(default_factory=dict[str, BackendSpec])
    """Backends by name. A plan without backends uses the backend chosen on the command line."""
    hosts: dict[str, HostsPart] = Field(default_factory=dict[str, HostsPart])
    """Groups of other machines by name, for `on` of a backend."""
    concurrency: Annotated[
        Annotated[int, Field(ge=1, le=MOST_SLOTS)] | Literal["auto"] | None, BeforeValidator(_slots)
    ] = None
    """The number of tasks running at once; `auto` finds it for each backend that states none. Default: the sum of the
    slots of the hosts, else 8.
    """
    priority: int = 0
    """Of the runs that share the slots of a worker, or an account on the store, those of a higher number come first. Of
    a called plan, it does not count.
    """
    prices: dict[str, PricePart] = Field(default_factory=dict[str, PricePart])
    """Prices by the name of the model, in place of the list of the extra `prices`."""
    budget: float | None = Field(default=None, ge=0, le=MOST_USD)
    """What the run may spend over all its attempts and resumes, in US dollars. A call that might cost more than what is
    left is not made: the task asks for a higher budget. Of a called plan, only the budget of the calling one counts.
    """
    notify: list[NotifyPart] = Field(default_factory=list[NotifyPart])
    """Where a run tells people of its questions and its end. Of a called plan, it does not count."""
    growth: GrowthPart | None = None
    """Limits on the tasks added by tasks."""
    tasks: list[TaskPart] = Field(default_factory=list[TaskPart], json_schema_extra={"minItems": 1})
    """The tasks, in any order. A plan has `tasks`, `orchestrate` or `workflow`."""
    returns: Any = None
    """The result of a task that calls this plan: a text such as "{{ review }}", a list or a mapping. Default: the
    results of all tasks by name.
    """
    follow_ups: list[ChainPart] = Field(default_factory=list[ChainPart])
    """The follow-ups of `tasks`, by `role`."""
    orchestrate: OrchestratePart | None = None
    """A goal to reach, in place of `tasks`."""
    workflow: list[StepPart] = Field(
        default_factory=list[StepPart], max_length=MAX_STEPS, json_schema_extra={"minItems": 1}
    )
    """Steps that run one after the other, in place of `tasks`; at most 200."""


def _by_kind(union: Any) -> dict[str, type[DescribedModel]]:
    return {get_args(part.model_fields["kind"].annotation)[0]: part for part in get_args(get_args(union)[0])}


CLASSES = {"backends": _by_kind(BackendSpec), "hosts": _by_kind(HostsPart)}
"""The model of each kind of backend, and of each kind of hosts."""
INPUT_CLASSES: dict[str, type[DescribedModel]] = {"files": FilesInput, "rows": RowsInput, "required": RequiredInput}
"""The model of each kind of input but a plain value."""


def approximate_plan(data: Any) -> PlanPart | None:
    """Return a plan like the wrong one in `data`, for further checks: what is wrong counts as missing. None if nothing
    gives the tasks of a run.
    """
    try:
        part = PlanPart.model_validate(data, context=itertools.count())
    except ValidationError:
        return None
    return part if part.tasks or part.workflow or part.orchestrate or part.follow_ups else None


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file format, as published in docs/plan.schema.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "plan.schema.json",
        **PlanPart.model_json_schema(),
        "title": "plait plan",
    }
