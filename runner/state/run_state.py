"""`RunState`: the state of a run's tasks, by position in the DAG, and the only code that changes the state.

Reading is open: the public fields are read-only views. Every change is a verb, a method of this class. A verb that
moves a task to another status checks the move against TASK_TRANSITIONS, changes all fields that belong to the move, and
returns the event of the move:

    start                               pending -> running
    complete, fail                      running or waiting_input -> completed; failed or skipped
    skip                                running -> skipped
    retry, interrupt                    running -> pending
    wait_for_answer, wait_for_decision  running -> waiting_input
    answer                              waiting_input -> pending
    cancel                              pending, running or waiting_input -> cancelled
    reopen                              failed -> pending, at a person's request

The caller submits the event to the checkpointer in the same step, with no await between the verb and the submission.
State and submission therefore agree at every await, and the stored events lead a later process to the same state.

A move refused by the table is a bug of plait, never a mistake of a user: the verb raises IllegalTransition and changes
nothing. The other verbs change the rest of the state: added tasks, conversations kept in memory, failures counted for
the retry policy. A test searches the rest of the runner for writes to the fields.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait import events
from plait.backends.backend_protocol import Reply
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.persistence.store_records import AttemptRecord, TaskRecord
from plait.runner.domain.conversation import INVALID_TASKS, Continuation, History
from plait.runner.domain.dag import DAG
from plait.runner.domain.question import AnsweredQuestion, Asking, Way, encode_answers
from plait.runner.domain.result import TaskResult
from plait.runner.domain.task import Task, failed_status
from plait.runner.state.codec import new_task
from plait.runner.state.readable_state import ReadableState
from plait.statuses import TASK_DONE, TASK_TRANSITIONS, AttemptStatus, TaskStatus
from plait.usage import NO_USAGE, Usage

_PENDING, _RUNNING = TaskStatus.PENDING, TaskStatus.RUNNING
_ENDS = {move.after: kind for kind, move in TASK_TRANSITIONS.items() if move.after in TASK_DONE}
"""The kind of the event that ends a task, by the status."""


MOST_STORED_IN_MEMORY = 32 * 2**20
"""The characters of stored conversations that stay in memory."""
_ENTRY_SIZE = 200
"""The memory of a conversation beside its text, counted as characters."""


class IllegalTransition(RuntimeError):  # noqa: N818 - the name says enough
    """A verb was called for a task in a status that does not allow the verb: a bug of plait."""


class RunState(ReadableState):
    """The state of a run's tasks, and the verbs that change the state. `dag` grows with added tasks."""

    def __init__(
        self, dag: DAG, records: tuple[TaskRecord, ...] = (), *, usage: Usage = NO_USAGE, keeps_all: bool = False
    ) -> None:
        super().__init__(dag, records, usage=usage, keeps_all=keeps_all)
        self._stored: deque[tuple[int, int]] = deque()
        """Stored conversations that may be freed, longest stored first: the position of the task, and the size."""
        self._stored_size = 0
        """The sum of the sizes in `_stored`."""

    # Verbs that move a task to another status.

    def start(
        self, position: int, at: str, backend: str, session_id: str | None = None, *, confirmed: bool = False
    ) -> events.TaskStarted:
        """Begin the pending task's next attempt. A conversation to continue is consumed by the attempt."""
        self._move(position, events.TaskStarted.kind)
        self._attempts[position] = number = self._attempts[position] + 1
        self._started.add(position)
        if position in self._continuations:
            self._consume_continuation(position)
        return events.TaskStarted(at, self.dag.tasks[position].id, number, backend, session_id, confirmed)

    def complete(
        self,
        position: int,
        at: str,
        reply: Reply,
        data_json: str | None,
        duration_s: float = 0.0,
        session_id: str | None = None,
        *,
        turn: tuple[Message, ...] | str = (),
        earlier_messages: tuple[Message, ...] = (),
    ) -> events.TaskCompleted:
        """Complete the task with `reply`, and keep the conversation in memory until `settle_conversation`.

        `turn` is as in TaskCompleted; `earlier_messages` holds the messages of earlier attempts in the conversation.
        """
        task, number, usage = self.dag.tasks[position], self._attempts[position], reply.usage
        self._finish(
            position,
            TaskResult(
                task.id, TaskStatus.COMPLETED, reply.text, reply.data, None, None, number, usage, duration_s, session_id
            ),
        )
        if isinstance(turn, str) and task.continues is None:
            self._prompts[position] = turn
        elif task.for_each is None:  # a task that only gathers has no conversation
            messages = reply.turn(turn) if isinstance(turn, str) else turn
            self._conversations[position] = History(session_id, (*earlier_messages, *messages), self.history(task))
        return events.TaskCompleted(at, task.id, number, reply.text, data_json, usage, duration_s, session_id, turn)

    def fail(
        self,
        position: int,
        at: str,
        error: BackendError,
        duration_s: float = 0.0,
        messages: tuple[Message, ...] = (),
    ) -> events.TaskFailed:
        """Fail the task for good, or skip the task, depending on the failure mode."""
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
        failed = events.TaskSkipped if status is TaskStatus.SKIPPED else events.TaskFailed
        message, usage, traceback = error.message, error.usage, error.traceback
        return failed(at, task.id, number, kind, message, duration_s, usage, messages, traceback)

    def skip(self, position: int, at: str, error_kind: str, reason: str) -> events.TaskSkipped:
        """Skip the running task, whatever the failure mode. The task does not count as executed by this process."""
        task_id, number, status = self.dag.tasks[position].id, self._attempts[position], TaskStatus.SKIPPED
        self._finish(position, TaskResult(task_id, status, error_kind=error_kind, error=reason, attempts=number))
        self._started.discard(position)
        return events.TaskSkipped(at, task_id, number, error_kind, reason)

    def cancel(self, position: int, at: str) -> events.TaskCancelled:
        """Cancel the unfinished task. The cost of an attempt under way is the cost reported so far."""
        task_id, number = self.dag.tasks[position].id, self._attempts[position]
        usage = self.spent(position) if self._statuses[position] is _RUNNING else NO_USAGE
        self._finish(position, TaskResult(task_id, TaskStatus.CANCELLED, attempts=number, usage=usage))
        return events.TaskCancelled(at, task_id, number, usage)

    def retry(
        self,
        position: int,
        at: str,
        error: BackendError,
        delay_s: float,
        duration_s: float,
        continuation: Continuation | None = None,
    ) -> events.TaskRetried:
        """Make the running task pending again after a failed attempt. `continuation`: how the next attempt begins."""
        self._move(position, events.TaskRetried.kind)
        self._add_usage(error.usage)
        if continuation is not None:
            self._continuations[position] = continuation
            if continuation.correction is not None:
                self._corrected.add(position)
        goes_on = continuation is not None and continuation.interrupted
        task_id, number, kind = self.dag.tasks[position].id, self._attempts[position], error.kind.value
        message, said, traceback = error.message, error.messages, error.traceback
        return events.TaskRetried(
            at, task_id, number, kind, message, delay_s, duration_s, error.usage, said, goes_on, traceback
        )

    def interrupt(
        self, position: int, at: str, reason: str, *, crashed: bool = False, delay_s: float = 0.0
    ) -> events.TaskInterrupted:
        """Make the running task pending again, because the attempt ended with the owner of the run."""
        self._move(position, events.TaskInterrupted.kind)
        task_id, number = self.dag.tasks[position].id, self._attempts[position]
        return events.TaskInterrupted(at, task_id, number, reason, crashed=crashed, delay_s=delay_s)

    def wait_for_answer(
        self,
        position: int,
        at: str,
        asking: Asking,
        duration_s: float,
        usage: Usage = NO_USAGE,
        messages: tuple[Message, ...] = (),
        *,
        continuation: Continuation | None = None,
    ) -> events.TaskWaiting:
        """Let the running task wait for the answer to the task's own question. `continuation` as in `retry`."""
        self._move(position, events.TaskWaiting.kind)
        question = asking.question.text
        self._questions[position] = question
        self._asking[position] = asking
        if continuation is not None:
            self._continuations[position] = continuation
        self._add_usage(usage)
        task_id, number = self.dag.tasks[position].id, self._attempts[position]
        return events.TaskWaiting(at, task_id, number, question, False, asking.encoded(), duration_s, usage, messages)

    def wait_for_decision(self, position: int, at: str, question: str, *, crashed: bool) -> events.TaskWaiting:
        """Let the running task wait for a person's decision whether the attempt, which ended with the owner of the run,
        took effect.
        """
        self._move(position, events.TaskWaiting.kind)
        self._questions[position] = question
        return events.TaskWaiting(at, self.dag.tasks[position].id, self._attempts[position], question, crashed=crashed)

    def answer(self, position: int, at: str, value: JsonValue, by: str) -> events.TaskAnswered:
        """Answer the waiting task's own question with the valid `value`, and make the task pending again."""
        if position not in self._asking:
            raise self._illegal(position, _PENDING)
        self._move(position, events.TaskAnswered.kind)
        asking, number = self._asking.pop(position), self._attempts[position]
        answered = AnsweredQuestion(number, asking.way, self._questions.pop(position), value, by)
        self._answers[position] = answers = (*self._answers.get(position, ()), answered)
        if position in self._continuations and answered.way is Way.REPLY:
            self._continuations[position] = replace(self._continuations[position], answer=answered)
        return events.TaskAnswered(at, self.dag.tasks[position].id, number, encode_answers(answers))

    def reopen(self, position: int, at: str, *, prompt: str | None = None) -> events.TaskReopened:
        """Make the failed task of a stored run pending again, at the request of a person. `prompt` is the task's prompt
        if the prompt is new.
        """
        self._move(position, events.TaskReopened.kind)
        del self._results[position]
        self._answers.pop(position, None)
        damaged = self.records[position].damaged
        return events.TaskReopened(at, self.dag.tasks[position].id, self._attempts[position], damaged, prompt)

    def _move(self, position: int, kind: str) -> None:
        """Change the task's status as an event of the kind does. Raise IllegalTransition if the table refuses."""
        before, after = TASK_TRANSITIONS[kind]
        if self._statuses[position] not in before:
            raise self._illegal(position, after)
        self._statuses[position] = after

    def _finish(self, position: int, result: TaskResult) -> None:
        """End the task with `result`. Raise IllegalTransition if the table refuses the end."""
        self._move(position, _ENDS[result.status])
        self._results[position] = result
        if result.usage is not NO_USAGE:
            self._usage += result.usage
        if position in self._continuations:
            del self._continuations[position]
        if position in self._questions:
            del self._questions[position]
            self._asking.pop(position, None)

    def _illegal(self, position: int, new: TaskStatus) -> IllegalTransition:
        task_id, old = self.dag.tasks[position].id, self._statuses[position]
        return IllegalTransition(f"task {task_id!r} is {old.value} and cannot become {new.value} here; a bug of plait")

    def _add_usage(self, usage: Usage) -> None:
        if usage is not NO_USAGE:
            self._usage += usage

    # Verbs that change the rest of the state.

    def adopt(self, position: int) -> None:
        """Take over the running task's attempt, begun by an earlier process. The event is part of the run's resume."""
        if self._statuses[position] is not _RUNNING:
            raise self._illegal(position, _RUNNING)
        self._adopted.add(position)
        if position in self._continuations:
            self._consume_continuation(position)

    def add_tasks(self, tasks: Sequence[Task], added_by: str | None, at: str) -> events.TasksAdded:
        """Add `tasks` as pending. Raise DAGError and change nothing if the DAG refuses the tasks."""
        start = len(self.dag)
        self.dag.extend(tasks)
        self._statuses += [_PENDING] * len(tasks)
        self._attempts += [0] * len(tasks)
        for position, task in enumerate(tasks, start):
            self._note_added(position, added_by)
            if task.continues is not None:
                self._continued[self.dag.position(task.continues)] += 1
        return events.TasksAdded(at, tuple(map(new_task, tasks)), added_by)

    def withdraw_tasks(self, start: int) -> None:
        """Undo the last `add_tasks`, which began at position `start`. To be called before the event is submitted."""
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
        """Let the task with `for_each` wait for the parts of the task, if any. All parts must have been added."""
        self.dag.join(position, self._parts.setdefault(position, []))

    def spend(self, position: int, usage: Usage) -> None:
        """Record the cost reported so far by the task's attempt under way. NO_USAGE changes nothing."""
        if usage is not NO_USAGE:
            self._spent[position] = self._attempts[position], usage

    def spent(self, position: int) -> Usage:
        """Return the usage that the task's last attempt has reported; NO_USAGE if none."""
        attempt, usage = self._spent.get(position, (0, NO_USAGE))
        return usage if attempt == self._attempts[position] else NO_USAGE

    def count_failure(self, position: int, kind: ErrorKind, in_a_row: int = 0) -> int:
        """Count a failed attempt of the task. Return the number of throttlings, as `Failures.note`."""
        return self._failures.note(position, kind, in_a_row)

    def count_stored_failures(self, position: int, attempts: Iterable[AttemptRecord]) -> None:
        """Count the task's failed attempts of earlier processes. A crash thus gives a task no further attempts, and a
        planner no second correction.
        """
        for attempt in attempts:
            if attempt.status == AttemptStatus.RETRIED and attempt.error_kind != ErrorKind.SESSION_LOST.value:
                self._failures.note(position, attempt.error_kind)
                if (attempt.error or "").startswith(INVALID_TASKS):
                    self._corrected.add(position)
            elif attempt.status in {AttemptStatus.FAILED, AttemptStatus.COMPLETED}:  # reopened since, by a person
                self._failures.reset(position)
                self._corrected.discard(position)

    def mark_repeats(self, positions: Iterable[int]) -> None:
        """Record the tasks with an earlier attempt that may be paid for a second time by the next attempt."""
        self._repeats = frozenset(positions)

    def continue_with(self, position: int, continuation: Continuation) -> None:
        """Record how the task's next attempt continues the conversation of earlier attempts."""
        self._continuations[position] = continuation

    def _consume_continuation(self, position: int) -> None:
        """Mark the conversation as continued by the task's current attempt."""
        continuation = self._continuations.pop(position)
        if continuation.sends_message:
            # Each further attempt repeats the message until the conversation holds the message.
            self._continuations[position] = replace(continuation, interrupted=False)

    def keep_conversation(self, position: int, past: History) -> None:
        """Keep the completed task's conversation, read back from the store, for the tasks that continue it."""
        self._conversations[position] = past

    def settle_conversation(self, position: int) -> None:
        """Keep the task's stored conversation only while there is room for it, unless another task continues the
        conversation. A task added later can then continue the conversation even if the store cannot be read.
        """
        if self.keeps_all or self.times_continued(position):
            return
        if (prompt := self._prompts.get(position)) is not None:
            size = len(prompt)
        elif (kept := self._conversations.get(position)) is not None:
            size = sum(len(message.content) for message in kept.own_messages)
        else:
            return
        size += _ENTRY_SIZE
        self._stored.append((position, size))
        self._stored_size += size
        while self._stored_size > MOST_STORED_IN_MEMORY:
            self._free_conversation()

    def _free_conversation(self) -> None:
        """Free the memory of the conversation that was stored longest ago, unless a task added since continues it."""
        position, size = self._stored.popleft()
        self._stored_size -= size
        if not self.times_continued(position):
            self._prompts.pop(position, None)
            self._conversations.pop(position, None)
