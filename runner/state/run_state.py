"""`RunState`: everything that a run knows of its tasks, by position in the DAG, and the only code that changes it.

Reading is open: the public fields are read-only views. Every change is a verb, a method of this class. A verb that
moves a task to another status checks the move against TASK_TRANSITIONS, changes all fields that belong to the move, and
returns the event that reports it:

    start                               pending -> running
    complete, fail                      running or waiting_input -> completed; failed or skipped
    retry, interrupt                    running -> pending
    wait_for_answer, wait_for_decision  running -> waiting_input
    answer                              waiting_input -> pending
    cancel                              pending, running or waiting_input -> cancelled
    reopen                              failed -> pending, as TASK_REOPENINGS allows when a person asks for it

The caller submits the event to the checkpointer in the same step, with no await between the verb and the submission.
State and submission therefore agree at every await, and the stored events lead a later process to the same state.

A move that the table refuses is a bug of plait, never a mistake of a user: the verb raises IllegalTransition and has
changed nothing. The other verbs change what is known beside the statuses: tasks that are added, conversations that are
kept in memory, failures that a retry policy counts. A test searches the rest of the runner for writes to these fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.protocol import NO_USAGE, JsonValue, Message, Reply, Usage
from plait.persistence.records import AttemptRecord
from plait.runner.domain import events
from plait.runner.domain.conversation import NOT_ADDED, Continuation, History
from plait.runner.domain.question import Answered, Asking, Way
from plait.runner.domain.result import TaskResult
from plait.runner.domain.status import TASK_REOPENINGS, TASK_TRANSITIONS, TaskStatus
from plait.runner.domain.task import Task, failed_status
from plait.runner.state.readable_state import ReadableState

_PENDING, _RUNNING, _WAITING = TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.WAITING_INPUT


class IllegalTransition(RuntimeError):  # noqa: N818 - reads as what it is
    """A verb was called for a task whose status does not allow it: a bug of plait."""


class RunState(ReadableState):
    """The state of a run's tasks, and the verbs that change it. Its `dag` grows with it."""

    # Verbs that move a task to another status.

    def start(
        self, position: int, at: str, backend: str, session_id: str | None = None, *, confirmed: bool = False
    ) -> events.TaskStarted:
        """Begin the pending task's next attempt. The conversation that the attempt takes up is then taken."""
        self._move(position, _PENDING, _RUNNING)
        self._attempts[position] = number = self._attempts[position] + 1
        self._started.add(position)
        if position in self._going_on:
            self._take_up(position)
        return events.TaskStarted(at, self.dag.tasks[position].id, number, backend, session_id, confirmed)

    def complete(  # noqa: PLR0913 - what a result consists of
        self,
        position: int,
        at: str,
        reply: Reply,
        data_json: str | None,
        duration_s: float = 0.0,
        session_id: str | None = None,
        *,
        said: tuple[Message, ...] | str = (),
        said_before: tuple[Message, ...] = (),
    ) -> events.TaskCompleted:
        """Complete the task with `reply`, and keep its conversation until `forget_conversation`.

        `said` is as in TaskCompleted; `said_before` is what earlier attempts of the task said in its conversation.
        """
        task, number, usage = self.dag.tasks[position], self._attempts[position], reply.usage
        self._finish(
            position,
            TaskResult(
                task.id,
                TaskStatus.COMPLETED,
                reply.text,
                reply.data,
                attempts=number,
                usage=usage,
                duration_s=duration_s,
                session_id=session_id,
            ),
        )
        if isinstance(said, str) and task.continues is None:
            self._prompts[position] = said
        elif task.for_each is None:  # a task that only gathers has no conversation
            messages = reply.turn(said) if isinstance(said, str) else said
            self._conversations[position] = History(session_id, (*said_before, *messages), self.past(task))
        return events.TaskCompleted(
            at, task.id, number, reply.text, reply.data, data_json, usage, duration_s, session_id, said
        )

    def fail(
        self,
        position: int,
        at: str,
        error: BackendError,
        duration_s: float = 0.0,
        messages: tuple[Message, ...] = (),
    ) -> events.TaskFailed:
        """Fail the task for good, or skip it, as its failure mode says."""
        task, number, kind = self.dag.tasks[position], self._attempts[position], error.kind.value
        status = failed_status(task.failure_mode)
        self._finish(
            position,
            TaskResult(
                task.id,
                status,
                error_kind=kind,
                error=error.message,
                attempts=number,
                usage=error.usage,
                duration_s=duration_s,
            ),
        )
        return events.TaskFailed(at, task.id, number, status, kind, error.message, duration_s, error.usage, messages)

    def cancel(self, position: int, at: str) -> events.TaskCancelled:
        """Cancel the task, which is not done. An attempt that is under way costs what it has reported so far."""
        task_id, number = self.dag.tasks[position].id, self._attempts[position]
        attempt, usage = self._spent.get(position, (0, NO_USAGE))
        if attempt != number or self._statuses[position] is not _RUNNING:
            usage = NO_USAGE
        self._finish(position, TaskResult(task_id, TaskStatus.CANCELLED, attempts=number, usage=usage))
        return events.TaskCancelled(at, task_id, number, usage)

    def retry(
        self,
        position: int,
        at: str,
        error: BackendError,
        delay_s: float,
        duration_s: float,
        going_on: Continuation | None = None,
    ) -> events.TaskRetrying:
        """Make the running task, whose attempt failed, pending again. `going_on`: its next attempt takes this up."""
        self._move(position, _RUNNING, _PENDING)
        self._add_usage(error.usage)
        if going_on is not None:
            self._going_on[position] = going_on
            if going_on.wrong is not None:
                self._corrected.add(position)
        goes_on = going_on is not None and going_on.interrupted
        task_id, number, kind = self.dag.tasks[position].id, self._attempts[position], error.kind.value
        return events.TaskRetrying(
            at, task_id, number, kind, error.message, delay_s, duration_s, error.usage, error.messages, goes_on
        )

    def interrupt(self, position: int, at: str, reason: str, *, crashed: bool = False) -> events.TaskInterrupted:
        """Make the running task, whose attempt ended with its owner, pending again."""
        self._move(position, _RUNNING, _PENDING)
        if crashed:
            self._crashes[position] = self._crashes.get(position, 0) + 1
        return events.TaskInterrupted(
            at, self.dag.tasks[position].id, self._attempts[position], reason, crashed=crashed
        )

    def wait_for_answer(  # noqa: PLR0913 - what a turn that ends with a question consists of
        self,
        position: int,
        at: str,
        asking: Asking,
        duration_s: float,
        usage: Usage = NO_USAGE,
        messages: tuple[Message, ...] = (),
        *,
        going_on: Continuation | None = None,
    ) -> events.TaskWaiting:
        """Let the running task wait for the answer to its own question. `going_on` as in `retry`."""
        self._move(position, _RUNNING, _WAITING)
        question = asking.question.text
        self._questions[position] = question
        self._asking[position] = asking
        if going_on is not None:
            self._going_on[position] = going_on
        self._add_usage(usage)
        task_id, number = self.dag.tasks[position].id, self._attempts[position]
        return events.TaskWaiting(at, task_id, number, question, False, asking, duration_s, usage, messages)

    def wait_for_decision(self, position: int, at: str, question: str, *, crashed: bool = False) -> events.TaskWaiting:
        """Let the running task, whose attempt ended with its owner, wait for a person to say whether it took effect."""
        self._move(position, _RUNNING, _WAITING)
        self._questions[position] = question
        return events.TaskWaiting(at, self.dag.tasks[position].id, self._attempts[position], question, crashed=crashed)

    def answer(self, position: int, at: str, value: JsonValue, by: str) -> events.TaskAnswered:
        """Answer the waiting task's own question with `value`, which fits it; the task is pending again."""
        if position not in self._asking:
            raise self._illegal(position, _PENDING)
        self._move(position, _WAITING, _PENDING)
        asking, number = self._asking.pop(position), self._attempts[position]
        answered = Answered(number, asking.way, self._questions.pop(position), value, by)
        self._answers[position] = answers = (*self._answers.get(position, ()), answered)
        if position in self._going_on and answered.way is Way.REPLY:
            self._going_on[position] = replace(self._going_on[position], answer=answered)
        return events.TaskAnswered(at, self.dag.tasks[position].id, number, answers)

    def reopen(self, position: int, at: str) -> events.TaskReopened:
        """Make the failed task of a stored run pending again, as a person asked for it."""
        if self._statuses[position] not in TASK_REOPENINGS:
            raise self._illegal(position, _PENDING)
        self._statuses[position] = _PENDING
        del self._results[position]
        self._answers.pop(position, None)
        damaged = self.records[position].damaged
        return events.TaskReopened(at, self.dag.tasks[position].id, self._attempts[position], damaged=damaged)

    def _move(self, position: int, old: TaskStatus, new: TaskStatus) -> None:
        """Change the task's status from `old` to `new`. Raise IllegalTransition if it is another, or may not follow."""
        if self._statuses[position] is not old or new not in TASK_TRANSITIONS[old]:
            raise self._illegal(position, new)
        self._statuses[position] = new

    def _finish(self, position: int, result: TaskResult) -> None:
        """End the task with `result`. Raise IllegalTransition if the status of the result may not follow."""
        status = result.status
        if status not in TASK_TRANSITIONS[self._statuses[position]]:
            raise self._illegal(position, status)
        self._statuses[position] = status
        self._results[position] = result
        if result.usage is not NO_USAGE:
            self._usage += result.usage
        if position in self._going_on:
            del self._going_on[position]
        if position in self._questions:
            del self._questions[position]
            self._asking.pop(position, None)

    def _illegal(self, position: int, new: TaskStatus) -> IllegalTransition:
        task_id, old = self.dag.tasks[position].id, self._statuses[position]
        return IllegalTransition(f"task {task_id!r} is {old.value} and cannot become {new.value} here; a bug of plait")

    def _add_usage(self, usage: Usage) -> None:
        if usage is not NO_USAGE:
            self._usage += usage

    # Verbs that change what is known beside the statuses.

    def adopt(self, position: int) -> None:
        """Take over the running task's attempt, which an earlier process began. The run's resume has told of it."""
        if self._statuses[position] is not _RUNNING:
            raise self._illegal(position, _RUNNING)
        self._adopted.add(position)
        if position in self._going_on:
            self._take_up(position)

    def add_tasks(self, tasks: Sequence[Task], added_by: str | None, at: str) -> events.TasksAdded:
        """Add `tasks`, pending. Raise DAGError if the DAG cannot take them, and then change nothing."""
        start = len(self.dag)
        self.dag.extend(tasks)
        self._statuses += [_PENDING] * len(tasks)
        self._attempts += [0] * len(tasks)
        for position, task in enumerate(tasks, start):
            self._note_added(position, added_by)
            if task.continues is not None:
                self._continued[self.dag.position(task.continues)] += 1
        return events.TasksAdded(at, tuple(tasks), added_by)

    def withdraw_tasks(self, start: int) -> None:
        """Take back the last `add_tasks`, which began at position `start`, before its event is submitted."""
        for position in range(start, len(self.dag)):
            added_by = self._added_by.pop(position)
            self._depths.pop(position, None)
            if added_by is not None:
                self._have_added.discard(self.dag.position(added_by))
                self._parts.pop(self.dag.position(added_by), None)
            if (before := self.dag.tasks[position].continues) is not None:
                self._continued[self.dag.position(before)] -= 1
        self.dag.cut(start)
        del self._statuses[start:], self._attempts[start:]

    def expand(self, position: int) -> None:
        """Have the task with `for_each` wait for its parts, all of which were added, or for nothing if it has none."""
        self.dag.join(position, self._parts.setdefault(position, []))

    def spend(self, position: int, usage: Usage) -> None:
        """Note that the task's attempt under way has reported to cost `usage` so far, if it reports anything."""
        if usage is not NO_USAGE:
            self._spent[position] = self._attempts[position], usage

    def count_failure(self, position: int, kind: ErrorKind, in_a_row: int = 0) -> int:
        """Count a failed attempt of the task. Return how often its backend was throttled, as `Failures.note`."""
        return self._failures.note(position, kind, in_a_row)

    def count_stored_failures(self, position: int, attempts: Iterable[AttemptRecord]) -> None:
        """Count the task's failed attempts of earlier processes: a crash gives a task no new tries, and a planner no
        second correction.
        """
        for attempt in attempts:
            if attempt.status == "retried" and attempt.error_kind != ErrorKind.SESSION_LOST.value:
                self._failures.note(position, attempt.error_kind)
                if (attempt.error or "").startswith(NOT_ADDED):
                    self._corrected.add(position)
            elif attempt.status in {TaskStatus.FAILED.value, TaskStatus.COMPLETED.value}:  # reopened since, by a person
                self._failures.forget(position)
                self._corrected.discard(position)

    def mark_repeats(self, positions: Iterable[int]) -> None:
        """Note the tasks with an attempt that may be paid for twice, once they are begun."""
        self._repeats = frozenset(positions)

    def continue_with(self, position: int, going_on: Continuation) -> None:
        """Note how the task's next attempt takes up a conversation that earlier attempts began."""
        self._going_on[position] = going_on

    def _take_up(self, position: int) -> None:
        """Let the task's attempt take up its conversation."""
        going_on = self._going_on.pop(position)
        if going_on.says:
            # Until the conversation has taken it, each further attempt says it again.
            self._going_on[position] = replace(going_on, interrupted=False)

    def keep_conversation(self, position: int, past: History) -> None:
        """Keep the completed task's conversation, read back from the store, for the tasks that continue it."""
        self._conversations[position] = past

    def forget_conversation(self, position: int) -> None:
        """Free the memory of the task's conversation, which is stored by now, unless another task continues it."""
        if not (self._keeps_all or self.times_continued(position)):
            self._prompts.pop(position, None)
            self._conversations.pop(position, None)
