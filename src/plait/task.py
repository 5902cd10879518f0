"""`Task`: one task as written, stored and run, with its files, retries and limits: frozen values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import PurePath
from typing import Literal, TypeAlias

from plait.errors import DAGError, ErrorKind, Problem, nearest
from plait.json_form import JsonInput, JsonValue, value
from plait.statuses import TaskStatus


class FailureMode(StrEnum):
    """The effect of a task's failure on its dependents."""

    HARD = "hard"
    """Dependents stay blocked. The default."""
    SOFT = "soft"
    """Dependents run; the name of the failed task renders as an empty text. The run still counts as failed."""
    SKIP = "skip"
    """The task ends as *skipped*, as if completed with an empty result, and does not fail the run."""


Mode: TypeAlias = FailureMode | Literal["hard", "soft", "skip"]
"""Accepted spellings of a failure mode; stored as `FailureMode`."""
DEFAULT_RETRY_ON: frozenset[str] = frozenset(
    {"transient", "rate_limited", "overloaded", "timeout", "crashed", "invalid_output"}
)
"""Error kinds (`backends.ErrorKind` values) that may disappear with a second attempt. Other kinds fail the task at
once.
"""
NEVER_RETRIED: frozenset[str] = frozenset({"unavailable"})
"""Error kinds that persist until a person acts. Never retried, whatever the retry policy."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The retry policy for failed attempts.

    The wait before attempt n+1 is random, between 0 and min(`max_delay`, `base_delay` * 2**(n-1)) seconds (exponential
    backoff, full jitter). A wait that the server asks for is never shortened, not even by a resume, and may last for
    weeks; one of more than a year counts as none.

    A rate limit or an overload is a wait of the whole backend and counts as no attempt, until a task has met 20
    overloads, or 20 rate limits while other tasks completed: it may be too large for the limit. With `attempts` 1,
    either fails the task at once. A backend that is unavailable on this machine is never retried.

    Raises ValueError for unknown error kinds and invalid numbers.
    """

    attempts: int = 3
    """The maximum number of attempts, including the first."""
    base_delay: float = 1.0
    """The initial backoff limit, in seconds."""
    max_delay: float = 60.0
    """The maximum backoff, in seconds, unless the server asks for a longer wait."""
    on: Collection[str] = DEFAULT_RETRY_ON
    """The error kinds to retry: any collection of `ErrorKind` values, stored as a frozenset."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"retry attempts must be at least 1, not {self.attempts}; 1 means no retry")
        if not (self.base_delay >= 0 and self.max_delay >= 0):
            raise ValueError(f"retry delays must be at least 0 s, not {self.base_delay} and {self.max_delay}")
        if max(self.base_delay, self.max_delay) == float("inf"):
            raise ValueError("retry delays must be finite numbers of seconds")
        object.__setattr__(self, "on", _kinds(self.on))


def _kinds(given: Collection[str]) -> frozenset[str]:
    if isinstance(given, str):
        raise ValueError(f"retry on must be a collection of error kinds, not one text; write [{given!r}]")
    known = [kind.value for kind in ErrorKind]
    kinds = tuple(given)
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"retry on: unknown error kind {kind!r}{nearest(str(kind), known)}")
    return frozenset(ErrorKind(kind).value for kind in kinds)


DEFAULT_RETRY = Retry()


NO_PROMPT = "there is no prompt; write one, or name a function that needs none as the `backend`"
"""The message about a prompt that is missing or blank."""


def lacks_prompt(prompt: str | None, backend: str | None, files: Sequence[object] = ()) -> bool:
    """Return whether nothing would be asked: the prompt is blank, there are no files, and no `backend`, which may be a
    function, is named.
    """
    return backend is None and not files and (prompt is None or (isinstance(prompt, str) and not prompt.strip()))  # pyright: ignore[reportUnnecessaryIsInstance]


@value
class ModelOptions:
    """Settings of the model for a single task. None stands for the backend's own setting."""

    model: str | None = None
    """Name of the model."""
    system: str | None = None
    """System prompt, in place of the backend's own."""
    temperature: float | None = None
    """Sampling temperature, from 0."""

    def over(self, own: ModelOptions) -> ModelOptions:
        """Return these settings, completed by the backend's `own`."""
        if self is OWN_OPTIONS:
            return own
        return ModelOptions(
            own.model if self.model is None else self.model,
            own.system if self.system is None else self.system,
            own.temperature if self.temperature is None else self.temperature,
        )


MODEL_SETTINGS = tuple(one.name for one in fields(ModelOptions))
"""The names of the settings of the model that a task may have."""
OWN_OPTIONS = ModelOptions()
"""The options of a task that leaves all settings to its backend."""


MAX_FILE_BYTES = 20 * 2**20
"""The maximum size of a file of a task."""
MAX_FILES = 100
"""The maximum number of files of a task."""
_MEDIA = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".pdf": "application/pdf",
}
TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A file of a task, as it was when the run was made."""

    path: str
    """The absolute path."""
    sha256: str
    """The digest of the contents, in hexadecimal."""

    @property
    def name(self) -> str:
        """The name without the folder."""
        return PurePath(self.path).name

    @property
    def media_type(self) -> str:
        """The type of an image or a PDF, by the suffix; TEXT for all other files."""
        return media_type(self.path)


def media_type(path: str) -> str:
    """Return the type of the image or the PDF at `path`, by the suffix; TEXT for all other files."""
    return _MEDIA.get(PurePath(path).suffix.lower(), TEXT)


def takes_no_such_file(backend: str, name: str, kind: str) -> str:
    """Return the message about an image or a PDF for a `backend` that takes text alone."""
    return f"backend {backend!r} takes text files only, not {name} ({kind}); leave the file out"


@dataclass(frozen=True, slots=True)
class Task:
    """A subtask: a prompt for a backend, run once all tasks in `depends_on` are done.

    Raises ValueError for a blank prompt without files and without a `backend`, which may be a function.
    """

    id: str
    """1 to 64 letters, digits, `.`, `_` or `-`, not starting with a dot."""
    prompt: str = ""
    """A template: `{{ other }}` is the result of the upstream task `other`. See docs/guides/plan-files.md."""
    depends_on: Sequence[str] = ()
    """The ids of the tasks to be done before: a list, or a single id."""
    backend: str | None = None
    """The name of a backend of the runner. None: the backend of the task in `continues`, or the default backend."""
    continues: str | None = None
    """The id of a task whose conversation to continue. Implies a dependency."""
    failure_mode: Mode = FailureMode.HARD
    """The effect of a failure on the dependents."""
    retry: Retry | int = DEFAULT_RETRY
    """The retry policy, or the number of retries: 3 allows four attempts."""
    timeout: float | None = None
    """The time limit of an attempt in seconds; None for no limit."""
    output_schema: Mapping[str, object] | None = None
    """A JSON Schema for the answer, such as the schema of a pydantic model. The result then has `data`."""
    weight: float = 1.0
    """The expected relative duration; long paths start first."""
    item: JsonInput = None
    """The value of `{{ item }}`. Filled by `for_each`."""
    aliases: Mapping[str, str | Sequence[str]] = field(default_factory=dict[str, "str | Sequence[str]"])
    """Further names in the prompt, each for the result of a task or for the list of several. Filled by `for_each`."""
    metadata: Mapping[str, JsonInput] = field(default_factory=dict[str, "JsonInput"])
    """JSON values for display. Only policies read the values, such as `role`."""
    at_most_once: bool = False
    """True for a task whose effects must not happen twice: it is never retried, and after a crash during its attempt a
    person decides (see `answer`).
    """
    for_each: str | None = None
    """The id of a task whose result is a list, or an object with exactly one list among its fields.

    Once that task is done, this task becomes a part for each element (`id.1`, `id.2`, ...), with the element as
    `{{ item }}`. Its own result is the list of the parts' results. Tasks with the same `for_each` that depend on each
    other are paired: `other.2` waits for `id.2`, and in its prompt `{{ id }}` is the result of `id.2`.
    """
    adds_tasks: bool = False
    """True if the answer, in the shape of a plan file's `tasks`, is to be added to the run."""
    model: str | None = None
    """The name of the model; None for the backend's own."""
    system: str | None = None
    """The system prompt, a text without templates, in place of the backend's own; None for the backend's own."""
    temperature: float | None = None
    """The sampling temperature, from 0; None for the backend's own."""
    files: Sequence[str | TaskFile] = ()
    """Paths of files that the prompt comes with: a list, or a single path. Text stands before the prompt, images and
    PDFs are sent as the API takes them, and agents get the paths. The contents are those at the start of the run.
    """
    cache: bool | float = False
    """True to take the answer of an earlier task with the same prompt, settings and conversation from any run of the
    store, without a call; a number is the maximum age of the answer in seconds. For backends with an `answer_key`.
    """
    when: str | None = None
    """A condition, such as `{{ review.ok }} == false`. If it is false once the dependencies are done, the task is
    skipped, and dependents continue as after an empty result. With `for_each`, the condition of each part counts.
    """

    def __post_init__(self) -> None:
        if lacks_prompt(self.prompt, self.backend, self.files):
            raise ValueError(f"task {self.id!r}: {NO_PROMPT}")
        # Convert a plain text such as "soft" to the enum.
        if type(self.failure_mode) is not FailureMode:
            object.__setattr__(self, "failure_mode", FailureMode(self.failure_mode))
        if isinstance(self.depends_on, str):
            object.__setattr__(self, "depends_on", (self.depends_on,))
        if isinstance(self.files, str):
            object.__setattr__(self, "files", (self.files,))
        if type(self.retry) is int and self.retry >= 0:  # the check of the DAG reports any other number
            object.__setattr__(self, "retry", Retry(attempts=self.retry + 1))

    @property
    def retry_policy(self) -> Retry:
        """The retry policy as a `Retry`. Raises TypeError for a value that the check of the DAG refuses."""
        if not isinstance(self.retry, Retry):
            raise TypeError(f"retry must be a Retry or a number of retries from 0 up, not {self.retry!r}")
        return self.retry

    @property
    def options(self) -> ModelOptions:
        """The settings of the model for this task."""
        if self.model is None and self.system is None and self.temperature is None:
            return OWN_OPTIONS
        return ModelOptions(self.model, self.system, self.temperature)

    @property
    def upstream(self) -> tuple[str, ...]:
        """The ids of all tasks to be done before: `depends_on`, then `continues` and `for_each` if not already
        listed.
        """
        if self.continues is None and self.for_each is None:
            return tuple(self.depends_on)
        further = dict.fromkeys((self.continues, self.for_each))
        return (*self.depends_on, *(name for name in further if name is not None and name not in self.depends_on))


def with_prompt(task: Task, prompt: str) -> Task:
    """Return the task with another prompt. Raises DAGError if the task would lack one."""
    if lacks_prompt(prompt, task.backend, task.files):
        raise DAGError([Problem(NO_PROMPT, task.id, "prompt")])
    return replace(task, prompt=prompt)


def no_such_setting(backend: str, setting: str, known: Collection[str]) -> str:
    """Return the message about a setting of a task that is not among the `known` settings of its `backend`."""
    have = f"a task may set {', '.join(sorted(known))} there" if known else "a task cannot set anything there"
    return f"backend {backend!r} takes no {setting} from a task ({have}); leave {setting!r} out"


TASKS_SCHEMA: Mapping[str, JsonValue] = {
    "type": "object",
    "properties": {
        "tasks": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"},
                    "prompt": {"type": "string"},
                    "depends_on": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["id", "prompt"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["tasks"],
    "additionalProperties": False,
}
"""An `output_schema` for planners: an object whose `tasks` have an id, a prompt and dependencies. Without a field
`backend`, the new tasks run on the default backend; a planner that chooses backends needs a custom schema.
"""


def at_most_once_question(attempt: int) -> str:
    """Return the question for a person about an interrupted task marked `at_most_once`."""
    return (
        f"the process ended during attempt {attempt}, and the task is marked at_most_once: "
        f"did the attempt take effect? Answer --done TEXT, --again or --fail"
    )


def crash_question(deaths: int) -> str:
    """Return the question for a person about a task during which the process died `deaths` times."""
    return f"the process died {deaths} times during this task: run it once more? Answer --again or --fail REASON"


def failed_status(mode: Mode) -> TaskStatus:
    """Return the status of a failed task with the failure mode `mode`."""
    return TaskStatus.SKIPPED if mode is FailureMode.SKIP else TaskStatus.FAILED


MAX_TASKS = 10_000
"""Default limit on the tasks of a run."""


MAX_DEPTH = 10
"""Default limit on the depth of added tasks."""


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Limits on the growth of a run."""

    max_tasks: int = MAX_TASKS
    """The maximum number of tasks in all."""
    max_depth: int = MAX_DEPTH
    """The maximum number of levels at which tasks added by tasks may add tasks."""

    def within(self, others: GrowthLimits | None) -> GrowthLimits:
        """Return the narrower limits of `self` and `others`."""
        if others is None:
            return self
        return GrowthLimits(min(self.max_tasks, others.max_tasks), min(self.max_depth, others.max_depth))
