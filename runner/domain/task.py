"""A task and its policies: plain frozen values. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from plait.backends.errors import ErrorKind
from plait.backends.protocol import JsonInput, JsonValue
from plait.runner.domain.status import TaskStatus
from plait.runner.errors import nearest


class FailureMode(StrEnum):
    """What a task's failure does to the tasks that depend on it."""

    HARD = "hard"
    """Dependents stay blocked. The default."""
    SOFT = "soft"
    """Dependents run without it: its name renders as an empty text. The run still counts as failed."""
    SKIP = "skip"
    """As if it had completed with an empty result: the task ends as *skipped* and does not fail the run."""


Mode: TypeAlias = FailureMode | Literal["hard", "soft", "skip"]
"""A failure mode as it may be written; what is kept is a `FailureMode`."""
DEFAULT_RETRY_ON: frozenset[str] = frozenset(
    {"transient", "rate_limited", "overloaded", "timeout", "crashed", "invalid_output"}
)
"""Error kinds (`backends.ErrorKind` values) that a second try may not meet. The rest fail the task at once."""
NEVER_RETRIED: frozenset[str] = frozenset({"unavailable"})
"""Error kinds that every try meets until a person has done something about it, whatever a policy says."""


@dataclass(frozen=True, slots=True)
class Retry:
    """When and how often a failed attempt is tried again.

    `attempts` counts all tries, the first included. Before try n+1 the runner waits a random time between 0 and
    min(`max_delay`, `base_delay` * 2**(n-1)) seconds (exponential backoff, full jitter). Where the server said how long
    to wait, it waits that long plus up to `base_delay`, or, after less than `base_delay`, plus the backoff: a hint is
    never shortened, also by a resume, and one of more than a day fails the task. A backend that says it is rate limited
    or overloaded is left alone meanwhile: nothing more starts on it, and then fewer tasks at once. Its saying so is not
    counted in `attempts`, unless a task has met it 20 times, or it has said nothing else for 20 such waits; with
    `attempts` 1 the task fails at once. `on` is any collection of `ErrorKind` values, kept as a frozenset; a backend
    that cannot be had here is never tried again.
    Raises ValueError for what is none of them, and for numbers that make no sense.
    A task that was running when its process died is run again by `resume`, until that has happened `max_crashes` times:
    then it fails as crashed. Its last try is made with nothing else running, so that no other task's crash convicts it;
    with `max_crashes` 1 the first try is the last one, and no such care is taken.
    """

    attempts: int = 3
    base_delay: float = 1.0
    max_delay: float = 60.0
    on: Collection[str] = DEFAULT_RETRY_ON
    max_crashes: int = 3

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"retry attempts must be at least 1, not {self.attempts}; 1 means no retry")
        if self.max_crashes < 1:
            raise ValueError(f"max_crashes must be at least 1, not {self.max_crashes}; 1 means no other try")
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


@dataclass(frozen=True, slots=True)
class Task:
    """One subtask: a prompt for a backend, run once everything in `depends_on` is done.

    `id` is 1 to 64 of letters, digits, `.`, `_`, `-`, not starting with a dot. `prompt` is a template: `{{ other }}` is
    the result of upstream task `other` (docs/guides/plan-files.md). `backend` names a backend of the runner; None is
    its default one, or the backend of the task in `continues`. `continues` goes on with that task's conversation and
    implies depending on it. `timeout` is seconds for one attempt, None for no limit. `output_schema` is a JSON Schema
    that the answer has to fit. `weight` is the expected relative duration, used to start long paths first. `item` is
    what `{{ item }}` stands for, and `aliases` gives further template names: each stands for one task's result, or for
    the list of several; plan files fill both for `for_each`. `metadata` is carried along and shown; only policies read
    it, such as the task's `role`.

    `for_each` names a task whose result is a list, or has one as its only field that is a list: when that task is done,
    this one becomes one task for each element (`id.1`, `id.2`, ...; in their prompts it is `{{ item }}`), and is itself
    the list of their results, once all of them are done. Another task with the same `for_each` that depends on it,
    directly or through others, or continues it, pairs up with it: `other.2` waits for `id.2`, and `{{ id }}` is the
    result of that one. `adds_tasks` has the task's answer, in the shape of a plan file's `tasks`, added to the run.

    `at_most_once` is for what must not happen twice: it is never retried, not begun while its start cannot be written
    down, and when its process ends before it does, it is waiting_input: a person says what follows (`answer`).
    """

    id: str
    prompt: str = ""
    depends_on: Sequence[str] = ()
    backend: str | None = None
    continues: str | None = None
    failure_mode: Mode = FailureMode.HARD
    retry: Retry = DEFAULT_RETRY
    timeout: float | None = None
    output_schema: Mapping[str, object] | None = None
    weight: float = 1.0
    item: JsonInput = None
    aliases: Mapping[str, str | Sequence[str]] = field(default_factory=dict[str, "str | Sequence[str]"])
    metadata: Mapping[str, JsonInput] = field(default_factory=dict[str, "JsonInput"])
    at_most_once: bool = False
    for_each: str | None = None
    adds_tasks: bool = False

    def __post_init__(self) -> None:
        # "soft" is as good as FailureMode.SOFT to whoever writes it, and must be so here too.
        if type(self.failure_mode) is not FailureMode:
            object.__setattr__(self, "failure_mode", FailureMode(self.failure_mode))

    @property
    def upstream(self) -> tuple[str, ...]:
        """What has to be done before this task: `depends_on`, and `continues` and `for_each` if not listed there."""
        if self.continues is None and self.for_each is None:
            return tuple(self.depends_on)
        further = dict.fromkeys((self.continues, self.for_each))
        return (*self.depends_on, *(name for name in further if name is not None and name not in self.depends_on))


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
"""An `output_schema` for a planner: a mapping whose `tasks` have an id, a prompt, and what they depend on. There is no
`backend` in it, so they run on the default one; give the planner a schema of its own to let it choose.
"""


def last_chance(task: Task, crashes: int) -> bool:
    """Whether the next death of its process would convict the task: then it runs alone, so that no other's is held
    against it.
    """
    return 0 < crashes == task.retry.max_crashes - 1


def at_most_once_question(attempt: int) -> str:
    """What a person is asked about a task that must not run twice."""
    return (
        f"attempt {attempt} was under way when its process ended, and the task is marked at_most_once: "
        f"did it take effect? Answer --done TEXT, --again or --fail"
    )


def failed_status(mode: Mode) -> TaskStatus:
    """What a failed task becomes."""
    return TaskStatus.SKIPPED if mode is FailureMode.SKIP else TaskStatus.FAILED


MAX_TASKS = 10_000


MAX_DEPTH = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a run may grow: to `max_tasks` tasks in all, and to tasks added by tasks that were added themselves, at
    most `max_depth` levels deep.
    """

    max_tasks: int = MAX_TASKS
    max_depth: int = MAX_DEPTH

    def within(self, others: Limits | None) -> Limits:
        """The narrower of both."""
        if others is None:
            return self
        return Limits(min(self.max_tasks, others.max_tasks), min(self.max_depth, others.max_depth))
