"""The fields of `RunState`, the code that loads the fields from a store, and the queries.

Each field for outside readers has a public name, a read-only view of the same object: reading a view costs nothing, and
type checkers refuse writes. The verbs that change the fields are in `run_state.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from plait.runner.state.failures import Failures

from plait.backends.backend_protocol import Reply
from plait.json_form import JsonValue
from plait.persistence.store_records import TaskRecord
from plait.runner.domain.asked_question import AnsweredQuestion, Asking, Way, answers_of, asking_of
from plait.runner.domain.continuation import Continuation, History
from plait.runner.domain.dag import DAG
from plait.runner.domain.prompt_values import is_wanted, rendered
from plait.runner.domain.run_result import ResumeSummary, RunResult, TaskResult
from plait.statuses import TASK_DONE, TASK_STATUSES, RunStatus, TaskStatus
from plait.task import Task
from plait.usage import NO_USAGE, Usage


class ReadableState:
    """The state of a run's tasks, all pending unless `records` of a stored run are given.

    `usage` is the cost of a stored run so far. With `keeps_all` every conversation stays in memory, because the run has
    no store.
    """

    def __init__(
        self, dag: DAG, records: tuple[TaskRecord, ...] = (), *, usage: Usage = NO_USAGE, keeps_all: bool = False
    ) -> None:
        self.dag: Final = dag
        self.records: Final = records
        """The stored records of the tasks, as of the reading of the run."""
        self.keeps_all: Final = keeps_all
        self._statuses: list[TaskStatus] = [TaskStatus.PENDING] * len(dag)
        self.statuses: Final[Sequence[TaskStatus]] = self._statuses
        self._attempts: list[int] = [0] * len(dag)
        self.attempts: Final[Sequence[int]] = self._attempts
        """The number of attempts of each task, equal to the number of the last attempt."""
        self._failures = Failures()
        self._results: dict[int, TaskResult] = {}
        self.results: Final[Mapping[int, TaskResult]] = self._results
        """Results of the tasks that are done."""
        self._continued = Counter(dag.position(task.continues) for task in dag if task.continues is not None)
        """The number of tasks that continue the conversation of a task."""
        self._conversations: dict[int, History] = {}
        """Conversations kept in memory: see `RunState.settle_conversation`."""
        self._prompts: dict[int, str] = {}
        """Prompts of conversations of only a prompt and an answer, as texts, which the garbage collector skips."""
        self._continuations: dict[int, Continuation] = {}
        self.continuations: Final[Mapping[int, Continuation]] = self._continuations
        """Conversations that the next attempts of tasks continue."""
        self._added_by: dict[int, str | None] = {}
        """The id of the adding task, for each added task; None if the run's policy added the task."""
        self._depths: dict[int, int] = {}
        self.depths: Final[Mapping[int, int]] = self._depths
        """The depth of each task added by another task: 1 if the other task was in the run from the start."""
        self._have_added: set[int] = set()
        """Tasks that have added tasks: each task adds tasks at most once."""
        self._corrected: set[int] = set()
        """Tasks with a correction of invalid added tasks already requested."""
        self._parts: dict[int, list[int]] = {}
        self.parts: Final[Mapping[int, Sequence[int]]] = self._parts
        """The parts of each expanded task with `for_each`."""
        self._questions: dict[int, str] = {}
        self.questions: Final[Mapping[int, str]] = self._questions
        """The question to a person, for each task that waits for input."""
        self._asking: dict[int, Asking] = {}
        self.asking: Final[Mapping[int, Asking]] = self._asking
        """The details of the question, if the task itself asked."""
        self._answers: dict[int, tuple[AnsweredQuestion, ...]] = {}
        self.answers: Final[Mapping[int, tuple[AnsweredQuestion, ...]]] = self._answers
        """The answers to a task's questions so far."""
        self._started: set[int] = set()
        """Tasks begun by this process."""
        self._adopted: set[int] = set()
        """Tasks with an attempt begun by an earlier process and taken over by this process."""
        self._repeats: frozenset[int] = frozenset()
        """Tasks with an earlier attempt that may be paid for a second time by the next attempt."""
        self._usage = usage
        """The cost of all ended attempts, attempts of earlier processes included."""
        self._spent: dict[int, tuple[int, Usage]] = {}
        """The number of the last attempt that reported a cost before the end, and the cost, by task."""
        for position, record in enumerate(records):
            self._load(position, record)

    def _load(self, position: int, record: TaskRecord) -> None:
        status = TASK_STATUSES[record.status]
        self._attempts[position] = record.attempt
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
        """Return the number of failed attempts of the task that count for the retry policy."""
        return self._failures.of(position)

    def added_by(self, position: int) -> str | None:
        """Return the id of the task that added the task; None for a task of the plan or of the run's policy."""
        return self._added_by.get(position)

    def has_added(self, position: int) -> bool:
        """Return whether the task has added tasks."""
        return position in self._have_added

    def is_corrected(self, position: int) -> bool:
        """Return whether a correction of invalid added tasks was already requested from the task."""
        return position in self._corrected

    def keeps_conversation(self, position: int) -> bool:
        """Return whether the task's conversation is kept in memory message by message."""
        return position in self._conversations

    def answers_for(self, position: int) -> list[tuple[str, JsonValue]]:
        """Return the answers for `ask` in the task's next attempt: pairs of question and answer since the last question
        in a reply.
        """
        found: list[tuple[str, JsonValue]] = []
        for answered in self._answers.get(position, ()):
            if answered.way is Way.REPLY:
                found.clear()
            else:
                found.append((answered.question, answered.value))
        return found

    def answer_to_send(self, position: int) -> AnsweredQuestion | None:
        """Return the last answer to a question in a reply, with which the conversation continues; None without."""
        return next((one for one in reversed(self._answers.get(position, ())) if one.way is Way.REPLY), None)

    def asked_in(self, task_id: str) -> set[int]:
        """Return the numbers of the task's attempts with a reply that ended with an answered question."""
        answers = self._answers.get(self.dag.position(task_id), ())
        return {answered.attempt for answered in answers if answered.way is Way.REPLY}

    def resume_summary(self) -> ResumeSummary:
        """Return the summary of a resume."""
        reused = sum(result.reused for result in self._results.values())
        return ResumeSummary(reused, len(self._started), len(self._started & self._repeats), len(self._adopted))

    def is_ours(self, position: int) -> bool:
        """Return whether this process has begun the task or taken over an attempt of the task."""
        return position in self._started or position in self._adopted

    def is_completed(self, task_id: str) -> bool:
        """Return whether the task is completed, so that other tasks can continue the conversation."""
        return self._statuses[self.dag.position(task_id)] is TaskStatus.COMPLETED

    def times_continued(self, position: int) -> int:
        """Return the number of tasks that continue the task's conversation; a part has at least the whole's number."""
        times, whole = self._continued.get(position, 0), self._added_by.get(position)
        if whole is None or self.dag[whole].for_each is None:
            return times
        return max(times, self._continued.get(self.dag.position(whole), 0))

    def continued_session(self, task: Task) -> str | None:
        """Return the id of the session that `task` continues; None without such a session."""
        if task.continues is None or not self.is_completed(task.continues):
            return None
        return self._results[self.dag.position(task.continues)].session_id

    def history(self, task: Task) -> History | None:
        """Return the conversation that `task` continues, if kept in memory; None otherwise."""
        if task.continues is None:
            return None
        return self.conversation(task.continues)

    def conversation(self, task_id: str) -> History | None:
        """Return the completed task's conversation, if kept in memory; None otherwise."""
        position = self.dag.position(task_id)
        if position in self._prompts:
            result = self._results[position]
            said = Reply(result.text, usage=result.usage).turn(self._prompts[position])
            return History(result.session_id, said)
        return self._conversations.get(position)

    def prompt(self, task: Task) -> str:
        """Return the task's rendered prompt. Raise PromptError if rendering fails."""
        return rendered(task, self.dag, self._results)

    def is_wanted(self, task: Task) -> bool:
        """Return whether the task's condition, if any, is true. Raise PromptError if the evaluation fails."""
        return is_wanted(task, self.dag, self._results)

    def result(
        self, run_id: str, status: RunStatus, error: str | None = None, resume_summary: ResumeSummary | None = None
    ) -> RunResult:
        """Return the result of the run."""
        usage = replace(self._usage, model=None)  # several models may have answered
        return RunResult(run_id, status, self.all_results(), error, resume_summary=resume_summary, usage=usage)

    def all_results(self) -> Mapping[str, TaskResult]:
        """Return the result of every task by id, unfinished tasks included."""
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
    usage = record.usage
    if record.damaged:
        return TaskResult(
            record.task_id,
            TaskStatus.FAILED,
            error_kind="damaged",
            error="the stored result does not fit its checksum, so the result is not used; to run the task again, "
            "resume with retry_failed (--retry-failed)",
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
