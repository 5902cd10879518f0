"""What a run knows of its tasks: statuses, attempts, results and conversations, by position in the DAG.

Kept in step with what was handed to the store: `Execution` changes it in the same step in which it submits the event.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.backends.protocol import NO_USAGE, JsonValue, Reply, Usage
from plait.persistence.records import TaskRecord
from plait.runner.domain import events
from plait.runner.domain.conversation import GoingOn, Past
from plait.runner.domain.dag import DAG
from plait.runner.domain.prompt_values import rendered
from plait.runner.domain.question import Answered, Asking, Way, answers_of, asking_of
from plait.runner.domain.result import Receipt, RunResult, TaskResult
from plait.runner.domain.status import TASK_DONE, TASK_STATUSES, TASK_TRANSITIONS, RunStatus, TaskStatus, may_follow
from plait.runner.domain.task import Task, last_chance
from plait.runner.state.codec import decode_usage
from plait.runner.state.failures import Failures


class RunState:
    """The state of a run's tasks, all pending unless `records` of a stored run are given. Its `dag` grows with it."""

    def __init__(self, dag: DAG, records: tuple[TaskRecord, ...] = (), *, keeps_all: bool = False) -> None:
        self.dag = dag
        self.records = records
        self.keeps_all = keeps_all
        """Whether every conversation is kept in memory, because there is no store to read it from."""
        self.statuses = [TaskStatus.PENDING] * len(dag)
        self.attempts = [0] * len(dag)
        self.failures = Failures()
        self.results: dict[int, TaskResult] = {}
        """Results of the tasks that are done."""
        self.continued = Counter(dag.position(task.continues) for task in dag if task.continues is not None)
        """Tasks whose conversation later ones go on with, and how many."""
        self.conversations: dict[int, Past] = {}
        """Conversations kept in memory: of the tasks that are continued, and of those that are not stored yet."""
        self.prompts: dict[int, str] = {}
        """Of those conversations that are a prompt and the task's answer, nothing else, the prompt alone. A text costs
        the collector of garbage nothing, messages do.
        """
        self.going_on: dict[int, GoingOn] = {}
        """Tasks whose conversation is known to have begun, by position: their next attempt goes on with it."""
        self.added_by: dict[int, str | None] = {}
        """For each task that was added to the run, who did: see TasksAdded."""
        self.depths: dict[int, int] = {}
        """How many additions deep each of those lies that a task has added: 1 where that was there from the start."""
        self.have_added: set[int] = set()
        """The tasks that brought others in: nobody does so twice."""
        self.corrected: set[int] = set()
        """The tasks that were told once already what was wrong with the tasks of their reply."""
        self.parts: dict[int, list[int]] = {}
        """The parts of each task with `for_each` that was unfolded, by position."""
        self.crashes: dict[int, int] = {}
        """How often an owner died while the task ran, where it did."""
        self.questions: dict[int, str] = {}
        """What a person is asked, by position."""
        self.asking: dict[int, Asking] = {}
        """More about it, where the task asked itself."""
        self.answers: dict[int, tuple[Answered, ...]] = {}
        """What a task's questions were answered with so far."""
        self.started: set[int] = set()
        """Tasks that this process has begun."""
        self.adopted: set[int] = set()
        """Tasks whose attempt an earlier process began, and this one has taken over."""
        self.repeats: frozenset[int] = frozenset()
        """Tasks with an attempt that may be paid for twice, once they are begun."""
        self.usage = NO_USAGE
        """What all attempts that have ended cost, those of earlier processes included."""
        self._spent: dict[int, tuple[int, Usage]] = {}
        """What the last attempt of tasks said to have cost so far, and which one it was."""
        for position, record in enumerate(records):
            self._load(position, record)

    def _load(self, position: int, record: TaskRecord) -> None:
        status = TASK_STATUSES[record.status]
        self.attempts[position] = record.attempt
        if record.crashes:
            self.crashes[position] = record.crashes
        if record.answers is not None:
            self.answers[position] = answers_of(record.answers)
        if record.added_by is not None:
            self.note_added(position, record.added_by)
        if status in TASK_DONE:
            result = _stored_result(record, status)
            self.statuses[position] = result.status
            self.results[position] = result
        else:
            self.statuses[position] = status
            if status is TaskStatus.WAITING_INPUT:
                self.questions[position] = record.question or ""
                if record.asked is not None:
                    self.asking[position] = asking_of(record.question or "", record.asked)

    def settle(self, position: int, result: TaskResult) -> None:
        """The task is done. Refused, as a bug of ours, unless the table of transitions allows it."""
        assert may_follow(TASK_TRANSITIONS, self.statuses[position], result.status), (position, result.status)
        self.statuses[position] = result.status
        self.results[position] = result
        if position in self.questions:
            del self.questions[position]
            self.asking.pop(position, None)

    def cancel(self, position: int, at: str) -> events.TaskCancelled:
        """The task, which is not done, is cancelled; the event that says so."""
        task_id, number = self.dag.tasks[position].id, self.attempts[position]
        attempt, usage = self._spent.pop(position, (0, NO_USAGE))
        if attempt != number or self.statuses[position] is not TaskStatus.RUNNING:
            usage = NO_USAGE
        self.usage += usage
        self.settle(position, TaskResult(task_id, TaskStatus.CANCELLED, attempts=number, usage=usage))
        return events.TaskCancelled(at, task_id, number, usage)

    def spend(self, position: int, usage: Usage) -> None:
        """The attempt of the task that is under way says that it has cost so much so far, if it says anything."""
        if usage is not NO_USAGE:
            self._spent[position] = self.attempts[position], usage

    def reopen(self, position: int) -> None:
        """The failed task is pending again."""
        self.statuses[position] = TaskStatus.PENDING
        del self.results[position]
        self.answers.pop(position, None)

    def ask(self, position: int, question: str, asking: Asking | None = None) -> None:
        """The running task waits for a person."""
        self.statuses[position] = TaskStatus.WAITING_INPUT
        self.questions[position] = question
        if asking is not None:
            self.asking[position] = asking

    def answer(self, position: int, value: JsonValue, by: str) -> None:
        """The waiting task's own question has its answer; the task is pending again."""
        asking = self.asking.pop(position)
        answered = Answered(self.attempts[position], asking.way, self.questions.pop(position), value, by)
        self.answers[position] = (*self.answers.get(position, ()), answered)
        self.statuses[position] = TaskStatus.PENDING
        if position in self.going_on and answered.way is Way.REPLY:
            self.going_on[position] = replace(self.going_on[position], answer=answered)

    def answers_for(self, position: int) -> list[tuple[str, JsonValue]]:
        """What `ask` finds in the task's next attempt: the answers since the conversation last moved."""
        found: list[tuple[str, JsonValue]] = []
        for answered in self.answers.get(position, ()):
            if answered.way is Way.REPLY:
                found.clear()
            else:
                found.append((answered.question, answered.value))
        return found

    def answer_to_say(self, position: int) -> Answered | None:
        """The last answer that the task's conversation goes on with; None where it has none."""
        return next((one for one in reversed(self.answers.get(position, ())) if one.way is Way.REPLY), None)

    def asked_in(self, task_id: str) -> set[int]:
        """The attempts in which the task's conversation ended with a question that it went on from."""
        answers = self.answers.get(self.dag.position(task_id), ())
        return {answered.attempt for answered in answers if answered.way is Way.REPLY}

    def grow(self, tasks: Sequence[Task], added_by: str | None) -> None:
        """Add `tasks`, pending. Raises DAGError, and then has changed nothing."""
        start = len(self.dag)
        self.dag.extend(tasks)
        self.statuses += [TaskStatus.PENDING] * len(tasks)
        self.attempts += [0] * len(tasks)
        for position, task in enumerate(tasks, start):
            self.note_added(position, added_by)
            if task.continues is not None:
                self.continued[self.dag.position(task.continues)] += 1

    def shrink(self, start: int) -> None:
        """Take back the last `grow`, which began at position `start`."""
        for position in range(start, len(self.dag)):
            added_by = self.added_by.pop(position)
            self.depths.pop(position, None)
            if added_by is not None:
                self.have_added.discard(self.dag.position(added_by))
                self.parts.pop(self.dag.position(added_by), None)
            if (before := self.dag.tasks[position].continues) is not None:
                self.continued[self.dag.position(before)] -= 1
        self.dag.cut(start)
        del self.statuses[start:], self.attempts[start:]

    def note_added(self, position: int, added_by: str | None) -> None:
        """Keep in mind who added the task."""
        self.added_by[position] = added_by
        if added_by is not None:
            brought_in_by = self.dag.position(added_by)
            self.have_added.add(brought_in_by)
            self.depths[position] = self.depths.get(brought_in_by, 0) + 1
            if self.dag.tasks[brought_in_by].for_each is not None:
                self.parts.setdefault(brought_in_by, []).append(position)

    def on_their_last_chance(self) -> list[int]:
        """Positions of tasks that are to run alone, because the next crash while they run is their last."""
        return [
            position for position, crashes in self.crashes.items() if last_chance(self.dag.tasks[position], crashes)
        ]

    def receipt(self) -> Receipt:
        """What a resume came to."""
        reused = sum(result.reused for result in self.results.values())
        return Receipt(reused, len(self.started), len(self.started & self.repeats), len(self.adopted))

    def is_ours(self, position: int) -> bool:
        """Whether this process has begun the task, or taken it over while it was under way."""
        return position in self.started or position in self.adopted

    def is_completed(self, task_id: str) -> bool:
        """Whether the task has a result and a conversation to go on with."""
        return self.statuses[self.dag.position(task_id)] is TaskStatus.COMPLETED

    def times_continued(self, position: int) -> int:
        """How many tasks go on with this one's conversation, or will; of a part those that continue its task, too."""
        times, folded = self.continued.get(position, 0), self.added_by.get(position)
        if folded is None or self.dag[folded].for_each is None:
            return times
        return max(times, self.continued.get(self.dag.position(folded), 0))

    def session_to_go_on_with(self, task: Task) -> str | None:
        """The session of the conversation that `task` continues; None where it has none."""
        if task.continues is None or not self.is_completed(task.continues):
            return None
        return self.results[self.dag.position(task.continues)].session_id

    def past(self, task: Task) -> Past | None:
        """The conversation that `task` goes on with; None when it begins one."""
        if task.continues is None:
            return None
        return self.conversation(task.continues)

    def conversation(self, task_id: str) -> Past | None:
        """The completed task's conversation, if it is kept in memory."""
        position = self.dag.position(task_id)
        if position in self.prompts:
            result = self.results[position]
            said = Reply(result.text, usage=result.usage).turn(self.prompts[position])
            return Past(result.session_id, said)
        return self.conversations.get(position)

    def prompt(self, task: Task) -> str:
        """The task's prompt, rendered. Raises PromptError."""
        return rendered(task, self.dag, self.results)

    def result(
        self, run_id: str, status: RunStatus, error: str | None = None, receipt: Receipt | None = None
    ) -> RunResult:
        """What the run of that id has come to."""
        usage = replace(self.usage, model=None)  # several may have answered
        return RunResult(run_id, status, self.all_results(), error, receipt=receipt, usage=usage)

    def all_results(self) -> Mapping[str, TaskResult]:
        """Every task by id, those that are not done included."""
        return {
            task.id: self.results.get(position)
            or TaskResult(
                task.id,
                self.statuses[position],
                attempts=self.attempts[position],
                question=self.questions.get(position) if self.statuses[position] is TaskStatus.WAITING_INPUT else None,
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
