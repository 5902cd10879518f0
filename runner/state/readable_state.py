"""The fields of `RunState`, how they are loaded from a store, and everything that reads them.

Each field that others may read has a public name, a read-only view of the same object: a view costs nothing to read,
and type checkers refuse a write to it. The verbs that write are in `run_state.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from plait.backends.protocol import NO_USAGE, JsonValue, Reply, Usage
from plait.persistence.records import TaskRecord
from plait.runner.domain.conversation import Continuation, History
from plait.runner.domain.dag import DAG
from plait.runner.domain.prompt_values import rendered
from plait.runner.domain.question import Answered, Asking, Way, answers_of, asking_of
from plait.runner.domain.result import ResumeSummary, RunResult, TaskResult
from plait.runner.domain.status import TASK_DONE, TASK_STATUSES, RunStatus, TaskStatus
from plait.runner.domain.task import Task, last_chance
from plait.runner.state.codec import decode_usage
from plait.runner.state.failures import Failures


class ReadableState:
    """The state of a run's tasks, all pending unless `records` of a stored run are given.

    `usage` is the cost of a stored run so far. With `keeps_all` every conversation stays in memory, because there is no
    store to read it from.
    """

    def __init__(  # noqa: PLR0915 - one statement a field
        self, dag: DAG, records: tuple[TaskRecord, ...] = (), *, usage: Usage = NO_USAGE, keeps_all: bool = False
    ) -> None:
        self.dag: Final = dag
        self.records: Final = records
        """The tasks as the store had them when the run was read."""
        self._keeps_all = keeps_all
        self._statuses: list[TaskStatus] = [TaskStatus.PENDING] * len(dag)
        self.statuses: Final[Sequence[TaskStatus]] = self._statuses
        self._attempts: list[int] = [0] * len(dag)
        self.attempts: Final[Sequence[int]] = self._attempts
        """How many attempts each task has begun; the number of the last one."""
        self._failures = Failures()
        self._results: dict[int, TaskResult] = {}
        self.results: Final[Mapping[int, TaskResult]] = self._results
        """Results of the tasks that are done."""
        self._continued = Counter(dag.position(task.continues) for task in dag if task.continues is not None)
        """Tasks whose conversation later tasks continue, and how many tasks do."""
        self._conversations: dict[int, History] = {}
        """Conversations kept in memory: of tasks that others continue, and of tasks that are not stored yet."""
        self._prompts: dict[int, str] = {}
        """Prompts of conversations that are a prompt and an answer, nothing else. The garbage collector skips texts."""
        self._going_on: dict[int, Continuation] = {}
        self.going_on: Final[Mapping[int, Continuation]] = self._going_on
        """Tasks whose conversation is known to have begun: their next attempt continues it."""
        self._added_by: dict[int, str | None] = {}
        """The task that added each task which was added to the run; None where the run's policy did."""
        self._depths: dict[int, int] = {}
        self.depths: Final[Mapping[int, int]] = self._depths
        """How many additions deep a task lies that another task added: 1 where the other was there from the start."""
        self._have_added: set[int] = set()
        """Tasks that have added others: none does so twice."""
        self._corrected: set[int] = set()
        """Tasks that were told once already which tasks of their reply were wrong."""
        self._parts: dict[int, list[int]] = {}
        self.parts: Final[Mapping[int, Sequence[int]]] = self._parts
        """The parts of each task with `for_each` that is expanded."""
        self._crashes: dict[int, int] = {}
        """How often an owner died while the task ran, where one did."""
        self._questions: dict[int, str] = {}
        self.questions: Final[Mapping[int, str]] = self._questions
        """The question to a person, of each task that waits for input."""
        self._asking: dict[int, Asking] = {}
        self.asking: Final[Mapping[int, Asking]] = self._asking
        """More about the question, where the task asked it itself."""
        self._answers: dict[int, tuple[Answered, ...]] = {}
        self.answers: Final[Mapping[int, tuple[Answered, ...]]] = self._answers
        """The answers that a task's questions have had so far."""
        self._started: set[int] = set()
        """Tasks that this process has begun."""
        self._adopted: set[int] = set()
        """Tasks whose attempt an earlier process began, and this process has taken over."""
        self._repeats: frozenset[int] = frozenset()
        """Tasks with an attempt that may be paid for twice, once they are begun."""
        self._usage = usage
        """The cost of all attempts that have ended, those of earlier processes included."""
        self._spent: dict[int, tuple[int, Usage]] = {}
        """The last attempt of a task that reported a cost before its end, and the cost."""
        for position, record in enumerate(records):
            self._load(position, record)

    def _load(self, position: int, record: TaskRecord) -> None:
        status = TASK_STATUSES[record.status]
        self._attempts[position] = record.attempt
        if record.crashes:
            self._crashes[position] = record.crashes
        if record.answers is not None:
            self._answers[position] = answers_of(record.answers)
        if record.added_by is not None:
            self._note_added(position, record.added_by)
        if status in TASK_DONE:
            result = _stored_result(record, status)
            self._statuses[position] = result.status
            self._results[position] = result
        else:
            self._statuses[position] = status
            if status is TaskStatus.WAITING_INPUT:
                self._questions[position] = record.question or ""
                if record.asked is not None:
                    self._asking[position] = asking_of(record.question or "", record.asked)

    def _note_added(self, position: int, added_by: str | None) -> None:
        self._added_by[position] = added_by
        if added_by is not None:
            adder = self.dag.position(added_by)
            self._have_added.add(adder)
            self._depths[position] = self._depths.get(adder, 0) + 1
            if self.dag.tasks[adder].for_each is not None:
                self._parts.setdefault(adder, []).append(position)

    def failures(self, position: int) -> int:
        """Return how many failed attempts of the task its retry policy counts."""
        return self._failures.of(position)

    def has_added(self, position: int) -> bool:
        """Return whether the task has added others."""
        return position in self._have_added

    def is_corrected(self, position: int) -> bool:
        """Return whether the task was told once already which tasks of its reply were wrong."""
        return position in self._corrected

    def keeps_conversation(self, position: int) -> bool:
        """Return whether the task's conversation was kept with all its messages."""
        return position in self._conversations

    def answers_for(self, position: int) -> list[tuple[str, JsonValue]]:
        """Return what `ask` finds in the task's next attempt: the answers since the conversation last moved."""
        found: list[tuple[str, JsonValue]] = []
        for answered in self._answers.get(position, ()):
            if answered.way is Way.REPLY:
                found.clear()
            else:
                found.append((answered.question, answered.value))
        return found

    def answer_to_say(self, position: int) -> Answered | None:
        """Return the last answer that the task's conversation continues with; None if it has none."""
        return next((one for one in reversed(self._answers.get(position, ())) if one.way is Way.REPLY), None)

    def asked_in(self, task_id: str) -> set[int]:
        """Return the attempts in which the task's conversation ended with a question that was answered."""
        answers = self._answers.get(self.dag.position(task_id), ())
        return {answered.attempt for answered in answers if answered.way is Way.REPLY}

    def on_their_last_chance(self) -> list[int]:
        """Return the positions of tasks that are to run alone: the next crash while such a task runs is its last."""
        return [
            position for position, crashes in self._crashes.items() if last_chance(self.dag.tasks[position], crashes)
        ]

    def resume_summary(self) -> ResumeSummary:
        """Return what a resume came to."""
        reused = sum(result.reused for result in self._results.values())
        return ResumeSummary(reused, len(self._started), len(self._started & self._repeats), len(self._adopted))

    def is_ours(self, position: int) -> bool:
        """Return whether this process has begun the task, or has taken over its attempt."""
        return position in self._started or position in self._adopted

    def is_completed(self, task_id: str) -> bool:
        """Return whether the task has a result, and a conversation that others can continue."""
        return self._statuses[self.dag.position(task_id)] is TaskStatus.COMPLETED

    def times_continued(self, position: int) -> int:
        """Return how many tasks continue the task's conversation, or will; a part counts those of its task, too."""
        times, folded = self._continued.get(position, 0), self._added_by.get(position)
        if folded is None or self.dag[folded].for_each is None:
            return times
        return max(times, self._continued.get(self.dag.position(folded), 0))

    def session_to_go_on_with(self, task: Task) -> str | None:
        """Return the session of the conversation that `task` continues; None if it has none."""
        if task.continues is None or not self.is_completed(task.continues):
            return None
        return self._results[self.dag.position(task.continues)].session_id

    def past(self, task: Task) -> History | None:
        """Return the conversation that `task` continues, if it is kept in memory; None if `task` begins one."""
        if task.continues is None:
            return None
        return self.conversation(task.continues)

    def conversation(self, task_id: str) -> History | None:
        """Return the completed task's conversation, if it is kept in memory."""
        position = self.dag.position(task_id)
        if position in self._prompts:
            result = self._results[position]
            said = Reply(result.text, usage=result.usage).turn(self._prompts[position])
            return History(result.session_id, said)
        return self._conversations.get(position)

    def prompt(self, task: Task) -> str:
        """Return the task's prompt, rendered. Raise PromptError if it cannot be."""
        return rendered(task, self.dag, self._results)

    def result(
        self, run_id: str, status: RunStatus, error: str | None = None, resume_summary: ResumeSummary | None = None
    ) -> RunResult:
        """Return the result of the run."""
        usage = replace(self._usage, model=None)  # several may have answered
        return RunResult(run_id, status, self.all_results(), error, resume_summary=resume_summary, usage=usage)

    def all_results(self) -> Mapping[str, TaskResult]:
        """Return the result of every task by id, tasks that are not done included."""
        return {
            task.id: self._results.get(position)
            or TaskResult(
                task.id,
                self._statuses[position],
                attempts=self._attempts[position],
                question=self._questions.get(position)
                if self._statuses[position] is TaskStatus.WAITING_INPUT
                else None,
            )
            for position, task in enumerate(self.dag.tasks)
        }


def _stored_result(record: TaskRecord, status: TaskStatus) -> TaskResult:
    usage = decode_usage(record.spent)
    if record.damaged:
        return TaskResult(
            record.task_id,
            TaskStatus.FAILED,
            error_kind="damaged",
            error="the stored result does not fit its checksum, so it is not used; resume with retry_failed "
            "(--retry-failed) runs it again",
            attempts=record.attempt,
            usage=usage,
        )
    return TaskResult(
        id=record.task_id,
        status=status,
        text=record.text or "",
        data=None if record.data is None else json.loads(record.data),
        error_kind=record.error_kind,
        error=record.error,
        attempts=record.attempt,
        usage=usage,
        duration_s=record.duration_s or 0.0,
        session_id=record.session_id,
        reused=status is TaskStatus.COMPLETED,
    )
