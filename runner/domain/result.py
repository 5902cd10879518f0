"""What a run came to: plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.backends.protocol import NO_USAGE, JsonValue, Usage
from plait.backends.values import value
from plait.runner.domain.status import RunStatus, TaskStatus


@value
class TaskResult:
    """Where a task stands at the end. `text` and `data` are set when it completed, the error fields when it failed.

    `attempts` counts all attempts, earlier processes included. `reused` is True when an earlier process did it.
    `usage` and `duration_s` (seconds) are those of the last one. `question` is what a person is asked while it is
    waiting_input.
    """

    id: str
    status: TaskStatus = TaskStatus.PENDING
    text: str = ""
    data: JsonValue = None
    error_kind: str | None = None
    error: str | None = None
    attempts: int = 0
    usage: Usage = NO_USAGE
    duration_s: float = 0.0
    session_id: str | None = None
    reused: bool = False
    question: str | None = None

    @property
    def value(self) -> JsonValue:
        """What `{{ id }}` stands for in the prompts of dependents: the data if there is any, else the text."""
        return self.text if self.data is None else self.data


@dataclass(frozen=True, slots=True)
class Degradation:
    """A time during which the store failed. `until` is None when it never answered again. `lost` changes are not
    stored: the last ones of the run, or one that the store would never have taken.
    """

    since: str
    until: str | None
    error: str
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a resume did, in numbers of tasks: `reused` were done before, `ran` were executed by this process, and
    `repeated` of these had an attempt under way when they were interrupted, so that they may be billed twice. `adopted`
    had an attempt under way that had outlived its process, and nothing was said in it again.
    """

    reused: int
    ran: int
    repeated: int
    adopted: int = 0


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. `tasks` holds every task by id, in the order of the DAG.

    `status` is completed, failed, waiting_input, cancelled or interrupted. `degraded` lists when the store was away;
    empty is good. `receipt` is there after a resume that found something left to do. `usage` sums up all attempts,
    those that failed and those of earlier processes included; turns of `continue_task` are none.
    """

    run_id: str
    status: RunStatus
    tasks: Mapping[str, TaskResult]
    error: str | None = None
    degraded: tuple[Degradation, ...] = ()
    receipt: Receipt | None = None
    usage: Usage = NO_USAGE
    text: Mapping[str, str] = field(init=False)
    """The text of every completed task, by id."""

    def __post_init__(self) -> None:
        texts = {task.id: task.text for task in self.tasks.values() if task.status is TaskStatus.COMPLETED}
        object.__setattr__(self, "text", texts)

    def __getitem__(self, task_id: str) -> TaskResult:
        return self.tasks[task_id]

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the tasks that failed."""
        return tuple(task.id for task in self.tasks.values() if task.status is TaskStatus.FAILED)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the tasks that wait for a person."""
        return tuple(task.id for task in self.tasks.values() if task.status is TaskStatus.WAITING_INPUT)

    @property
    def blocked(self) -> tuple[str, ...]:
        """Ids of the tasks that could not start because one that they depend on failed. Empty unless the run ended."""
        if self.status not in {RunStatus.COMPLETED, RunStatus.FAILED}:
            return ()
        return tuple(task.id for task in self.tasks.values() if task.status is TaskStatus.PENDING)

    @property
    def reused(self) -> int:
        """How many tasks an earlier process had completed."""
        return sum(task.reused for task in self.tasks.values())
