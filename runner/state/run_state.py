"""`RunState`: the state of a run's tasks, by position in the DAG, and the only code that changes the state.

Reading is open. Every change is a verb, a method of this class; a test searches the rest of the runner for writes to
the fields. A verb that moves a task to another status checks the move against TASK_TRANSITIONS, changes all fields that
belong to the move, and returns the event of the move:

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

A move refused by the table is a bug of plait, never a mistake of a user: the verb raises RuntimeError and changes
nothing. The other verbs change the rest of the state: added tasks, conversations kept in memory, failures counted for
the retry policy.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from plait import events
from plait.backends.backend_protocol import Reply
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.persistence.store_records import AttemptRecord, TaskRecord
from plait.runner.domain.asked_question import AnsweredQuestion, Asking, Way, answers_of, asking_of, encode_answers
from plait.runner.domain.continuation import Continuation, History, is_refusal
from plait.runner.domain.dag import DAG, FREED
from plait.runner.domain.prompt_values import TaskTexts, named
from plait.runner.domain.run_result import ResumeSummary, RunResult, TaskResult
from plait.statuses import TASK_DONE, TASK_STATUSES, TASK_TRANSITIONS, AttemptStatus, RunStatus, TaskStatus
from plait.task import Task, failed_status
from plait.usage import NO_USAGE, Usage

MOST_STORED_IN_MEMORY = 32 * 2**20
"""The characters of stored conversations that stay in memory."""
_ENTRY_SIZE = 200
"""The memory of a conversation beside its text, counted as characters."""


class RunState:
    """The state of a run's tasks, all pending unless `records` of a stored run are given. `dag` grows with added tasks.

    `usage` is the cost of a stored run so far. With `keeps_all` every conversation stays in memory, because the run has
    no store. `unloaded` is the number of further tasks by status that the run has in the store.
    """

    def __init__(
        self,
        dag: DAG,
        records: tuple[TaskRecord, ...] = (),
        *,
        usage: Usage = NO_USAGE,
        keeps_all: bool = False,
        unloaded: Mapping[TaskStatus, int] | None = None,
    ) -> None:
        self.dag: Final = dag
        self.records: Final = records
        """The stored records of the tasks, as of the reading of the run."""
        self.keeps_all: Final = keeps_all
        self.statuses: list[TaskStatus] = [TaskStatus.PENDING] * len(dag)
        self.attempts: list[int] = [0] * len(dag)
        """The number of attempts of each task, equal to the number of the last attempt."""
        self._failures: Counter[int] = Counter()
        """The number of failed attempts of each task that count for retries. Interrupted attempts do not count."""
        self._throttled: Counter[int] = Counter()
        """How often the backend has refused the task because of a limit or an overload."""
        self.results: dict[int, TaskResult] = {}
        """Results of the tasks that are done."""
        self._continued = Counter(dag.position(task.continues) for task in dag if task.continues is not None)
        """The number of tasks that continue the conversation of a task."""
        self._conversations: dict[int, History] = {}
        """Conversations kept in memory: see `RunState.settle_conversation`."""
        self._prompts: dict[int, str] = {}
        """Prompts of conversations of only a prompt and an answer, as texts, which the garbage collector skips."""
        self.continuations: dict[int, Continuation] = {}
        """Conversations that the next attempts of tasks continue."""
        self._added_by: dict[int, str | None] = {}
        """The id of the adding task, for each added task; None if the run's policy added the task."""
        self.depths: dict[int, int] = {}
        """The depth of each task added by another task: 1 if the other task was in the run from the start."""
        self._have_added: set[int] = set()
        """Tasks that have added tasks: each task adds tasks at most once."""
        self._refusals: Counter[int] = Counter()
        """For each task, the answers that were refused, with a correction requested."""
        self.parts: dict[int, list[int]] = {}
        """The parts of each expanded task with `for_each`, and the tasks that each call has added."""
        self._seen: dict[int, frozenset[int]] = {}
        """The tasks of which the last prompt of a task with `join` had the results."""
        self.questions: dict[int, str] = {}
        """The question to a person, for each task that waits for input."""
        self.asking: dict[int, Asking] = {}
        """The details of the question, if the task itself asked."""
        self.answers: dict[int, tuple[AnsweredQuestion, ...]] = {}
        """The answers to a task's questions so far."""
        self.moved: dict[int, str] = {}
        """The backend of the last attempt of each task whose last attempt called a spare of the task's backend."""
        self._started = bytearray(len(dag))
        """Whether this process has begun the task: a byte for each, where a set would take 70."""
        self._adopted: set[int] = set()
        """Tasks with an attempt begun by an earlier process and taken over by this process."""
        self._repeats: frozenset[int] = frozenset()
        """Tasks with an earlier attempt that may be paid for a second time by the next attempt."""
        self._usage = usage
        """The cost of all ended attempts, attempts of earlier processes included."""
        self._spent: dict[int, tuple[int, Usage]] = {}
        """The number of the last attempt that reported a cost before the end, and the cost, by task."""
        self._stored: deque[tuple[int, int]] = deque()
        """Stored conversations that may be freed, longest stored first: the position of the task, and the size."""
        self._stored_size = 0
        """The sum of the sizes in `_stored`."""
        self.unloaded: Final[Mapping[TaskStatus, int]] = dict(unloaded or {})
        self._freed: Counter[TaskStatus] = Counter()
        """The number of tasks by status that have left memory: see `free`."""
        self._freed_summary = ResumeSummary(self.unloaded.get(TaskStatus.COMPLETED, 0), 0, 0, 0)
        """What these tasks, and those that were not loaded, add to the summary of a resume."""
        for position, record in enumerate(records):
            self._load(position, record)

    def _load(self, position: int, record: TaskRecord) -> None:
        status = TASK_STATUSES[record.status]
        self.attempts[position] = record.attempt
        if record.answers is not None:
            self.answers[position] = answers_of(record.answers)
        if record.added_by is not None:
            self._note_added(position, record.added_by)
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

    def _note_added(self, position: int, added_by: str | None) -> None:
        self._added_by[position] = added_by
        if added_by is not None:
            adder = self.dag.position(added_by)
            self._have_added.add(adder)
            # A called plan is part of the plan, and adds no more than is written there.
            self.depths[position] = self.depths.get(adder, 0) + (not self.dag.tasks[adder].calls)
            if self.dag.tasks[adder].gathers:
                self.parts.setdefault(adder, []).append(position)

    def failures(self, position: int) -> int:
        """Return the number of failed attempts of the task that count for the retry policy."""
        return self._failures[position]

    def added_by(self, position: int) -> str | None:
        """Return the id of the task that added the task; None for a task of the plan or of the run's policy."""
        return self._added_by.get(position)

    def has_added(self, position: int) -> bool:
        """Return whether the task has added tasks."""
        return position in self._have_added

    def refusals(self, position: int) -> int:
        """Return how many answers of the task were refused, each with a correction requested."""
        return self._refusals[position]

    def keeps_conversation(self, position: int) -> bool:
        """Return whether the task's conversation is kept in memory message by message."""
        return position in self._conversations

    def answers_for(self, position: int) -> list[tuple[str, JsonValue]]:
        """Return the answers for `ask` in the task's next attempt: pairs of question and answer since the last question
        in a reply.
        """
        pairs: list[tuple[str, JsonValue]] = []
        for answered in self.answers.get(position, ()):
            if answered.way is Way.REPLY:
                pairs.clear()
            elif answered.way is Way.CALL:
                pairs.append((answered.question, answered.value))
        return pairs

    def answer_to_send(self, position: int) -> AnsweredQuestion | None:
        """Return the last answer to a question in a reply, with which the conversation continues; None without."""
        return next((one for one in reversed(self.answers.get(position, ())) if one.way is Way.REPLY), None)

    def asked_in(self, task_id: str) -> set[int]:
        """Return the numbers of the task's attempts with a reply that ended with an answered question."""
        answers = self.answers.get(self.dag.position(task_id), ())
        return {answered.attempt for answered in answers if answered.way is Way.REPLY}

    def resume_summary(self) -> ResumeSummary:
        """Return the summary of a resume."""
        gone, reused = self._freed_summary, sum(result.reused for result in self.results.values())
        return ResumeSummary(
            reused=gone.reused + reused,
            ran=gone.ran + sum(self._started),
            repeated=gone.repeated + sum(self._started[position] for position in self._repeats),
            adopted=gone.adopted + len(self._adopted),
        )

    @property
    def counts(self) -> Counter[TaskStatus]:
        """The number of tasks by status, also of those that are in the store alone."""
        return Counter(self.statuses) + Counter(self.unloaded)

    def is_ours(self, position: int) -> bool:
        """Return whether this process has begun the task or taken over an attempt of the task."""
        return bool(self._started[position]) or position in self._adopted

    def is_completed(self, task_id: str) -> bool:
        """Return whether the task is completed, so that other tasks can continue the conversation."""
        return self.statuses[self.dag.position(task_id)] is TaskStatus.COMPLETED

    def times_continued(self, position: int) -> int:
        """Return the number of tasks that continue the task's conversation; a part has at least the whole's number."""
        if not self._continued:
            return 0
        times, whole = self._continued.get(position, 0), self._added_by.get(position)
        if whole is None or self.dag[whole].for_each is None:
            return times
        return max(times, self._continued.get(self.dag.position(whole), 0))

    def continued_session(self, task: Task) -> str | None:
        """Return the id of the session that `task` continues; None without such a session."""
        if task.continues is None or not self.is_completed(task.continues):
            return None
        return self.results[self.dag.position(task.continues)].session_id

    def history(self, task: Task) -> History | None:
        """Return the conversation that `task` continues, if kept in memory; None otherwise."""
        if task.continues is None:
            return None
        return self.conversation(task.continues)

    def conversation(self, task_id: str) -> History | None:
        """Return the completed task's conversation, if kept in memory; None otherwise."""
        position = self.dag.position(task_id)
        if position in self._prompts:
            result = self.results[position]
            turn = Reply(result.text, usage=result.usage).turn(self._prompts[position])
            return History(result.session_id, turn)
        return self._conversations.get(position)

    def _look(self, position: int, before: str | None = None) -> None:
        """Note the results that the prompt of the task has: those that are there now, or in the store at a time."""
        names = (name for name in named(self.dag.tasks[position]) if name in self.dag)
        self._seen[position] = frozenset(
            needed
            for needed in {*self.dag.dependencies[position], *map(self.dag.position, names)}
            if self.statuses[needed] is TaskStatus.COMPLETED
            and (before is None or (needed < len(self.records) and (self.records[needed].ended_at or "~") <= before))
        )

    def results_for(self, task: Task) -> Mapping[int, TaskResult]:
        """Return the results that the texts of the task may name: with `join`, those that it started with."""
        if task.join == "all":
            return self.results
        position = self.dag.position(task.id)
        record = self.records[position] if position < len(self.records) else None
        if position not in self._seen and record is not None and record.started_at is not None:
            self._look(position, before=record.started_at)
        if position not in self._seen:
            return self.results
        return {one: self.results[one] for one in self._seen[position] if one in self.results}

    def texts(self, task: Task) -> TaskTexts:
        """Return the texts of the task, with the results that it has or started with."""
        return TaskTexts(task, self.dag, self.results_for(task))

    def result(
        self, run_id: str, status: RunStatus, error: str | None = None, resume_summary: ResumeSummary | None = None
    ) -> RunResult:
        """Return the result of the run."""
        usage = replace(self._usage, model=None)  # several models may have answered
        results = dict(self.all_results())
        for task in self.dag.tasks:
            if task.output is not None:
                results[task.id] = replace(results[task.id], read=partial(_as_model, task))
        left_out = self._freed + Counter(self.unloaded)
        return RunResult(run_id, status, results, error, resume_summary=resume_summary, usage=usage, left_out=left_out)

    def all_results(self) -> Mapping[str, TaskResult]:
        """Return the result of every task in memory by id, unfinished tasks included."""
        results = {
            task.id: self.results.get(position)
            or TaskResult(
                task.id,
                self.statuses[position],
                attempts=self.attempts[position],
                question=self.questions.get(position) if self.statuses[position] is TaskStatus.WAITING_INPUT else None,
            )
            for position, task in enumerate(self.dag.tasks)
        }
        if self._freed:
            del results[FREED.id]
        return results

    # Verbs that move a task to another status.

    def start(
        self,
        position: int,
        at: str,
        backend: str,
        session_id: str | None = None,
        *,
        confirmed: bool = False,
        reserved_usd: float | None = None,
        moved_from: str | None = None,
    ) -> events.TaskStarted:
        """Begin the pending task's next attempt. A conversation to continue is consumed by the attempt."""
        self._move(position, events.TaskStarted.kind)
        self.attempts[position] = number = self.attempts[position] + 1
        self._started[position] = True
        if position in self.continuations:
            self._consume_continuation(position)
        elif self.dag.tasks[position].join != "all":
            self._look(position)
        if moved_from is not None:
            self.moved[position] = backend
        elif self.moved:
            self.moved.pop(position, None)
        task_id = self.dag.tasks[position].id
        return events.TaskStarted(
            at, task_id, number, backend, session_id, confirmed, reserved_usd=reserved_usd, moved_from=moved_from
        )

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
        task, number, usage = self.dag.tasks[position], self.attempts[position], reply.usage
        self._finish(
            position,
            TaskResult(
                task.id,
                TaskStatus.COMPLETED,
                text=reply.text,
                data=reply.data,
                error_kind=None,
                error=None,
                attempts=number,
                usage=usage,
                duration_s=duration_s,
                session_id=session_id,
            ),
        )
        if isinstance(turn, str) and task.continues is None:
            self._prompts[position] = turn
        elif not task.gathers:  # a task that only gathers has no conversation
            messages = reply.turn(turn) if isinstance(turn, str) else turn
            self._conversations[position] = History(session_id, (*earlier_messages, *messages), self.history(task))
        return events.TaskCompleted(
            at,
            task.id,
            attempt=number,
            text=reply.text,
            data_json=data_json,
            usage=usage,
            duration_s=duration_s,
            session_id=session_id,
            turn=turn,
        )

    def fail(
        self,
        position: int,
        at: str,
        error: BackendError,
        duration_s: float = 0.0,
        messages: tuple[Message, ...] = (),
    ) -> events.TaskFailed:
        """Fail the task for good, or skip the task, depending on the failure mode."""
        task, number, kind = self.dag.tasks[position], self.attempts[position], error.kind.value
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
        return failed(
            at,
            task.id,
            number,
            error_kind=kind,
            error=error.message,
            duration_s=duration_s,
            usage=error.usage,
            messages=messages,
            traceback=error.traceback,
        )

    def skip(self, position: int, at: str, error_kind: str, reason: str) -> events.TaskSkipped:
        """Skip the running task, whatever the failure mode. The task does not count as executed by this process."""
        task_id, number, status = self.dag.tasks[position].id, self.attempts[position], TaskStatus.SKIPPED
        self._finish(position, TaskResult(task_id, status, error_kind=error_kind, error=reason, attempts=number))
        self._started[position] = False
        return events.TaskSkipped(at, task_id, number, error_kind, reason)

    def cancel(self, position: int, at: str) -> events.TaskCancelled:
        """Cancel the unfinished task. The cost of an attempt under way is the cost reported so far."""
        task_id, number = self.dag.tasks[position].id, self.attempts[position]
        usage = self.spent(position) if self.statuses[position] is _RUNNING else NO_USAGE
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
            self.continuations[position] = continuation
        if is_refusal(error.message):
            self._refusals[position] += 1
        continues_session = continuation is not None and continuation.interrupted
        task_id, number, kind = self.dag.tasks[position].id, self.attempts[position], error.kind.value
        message, messages, traceback = error.message, error.messages, error.traceback
        return events.TaskRetried(
            at,
            task_id,
            attempt=number,
            error_kind=kind,
            error=message,
            delay_s=delay_s,
            duration_s=duration_s,
            usage=error.usage,
            messages=messages,
            continues_session=continues_session,
            traceback=traceback,
        )

    def interrupt(
        self, position: int, at: str, reason: str, *, crashed: bool = False, delay_s: float = 0.0
    ) -> events.TaskInterrupted:
        """Make the running task pending again, because the attempt ended with the owner of the run."""
        self._move(position, events.TaskInterrupted.kind)
        task_id, number = self.dag.tasks[position].id, self.attempts[position]
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
        self.questions[position] = question
        self.asking[position] = asking
        if continuation is not None:
            self.continuations[position] = continuation
        self._add_usage(usage)
        task_id, number = self.dag.tasks[position].id, self.attempts[position]
        return events.TaskWaiting(
            at,
            task_id,
            attempt=number,
            question=question,
            crashed=False,
            asked=asking.encoded(),
            duration_s=duration_s,
            usage=usage,
            messages=messages,
        )

    def wait_for_decision(self, position: int, at: str, question: str, *, crashed: bool) -> events.TaskWaiting:
        """Let the running task wait for a person's decision whether the attempt, which ended with the owner of the run,
        took effect.
        """
        self._move(position, events.TaskWaiting.kind)
        self.questions[position] = question
        return events.TaskWaiting(at, self.dag.tasks[position].id, self.attempts[position], question, crashed=crashed)

    def answer(self, position: int, at: str, value: JsonValue, by: str) -> events.TaskAnswered:
        """Answer the waiting task's own question with the valid `value`, and make the task pending again."""
        if position not in self.asking:
            raise self._illegal(position, _PENDING)
        self._move(position, events.TaskAnswered.kind)
        asking, number = self.asking.pop(position), self.attempts[position]
        answered = AnsweredQuestion(number, asking.way, self.questions.pop(position), value, by)
        self.answers[position] = answers = (*self.answers.get(position, ()), answered)
        if position in self.continuations and answered.way is Way.REPLY:
            self.continuations[position] = replace(self.continuations[position], answer=answered)
        return events.TaskAnswered(at, self.dag.tasks[position].id, number, encode_answers(answers))

    def reopen(self, position: int, at: str, *, prompt: str | None = None) -> events.TaskReopened:
        """Make the failed task pending again, at the request of a person; earlier failures count no more. `prompt` is
        the task's prompt if the prompt is new.
        """
        self._move(position, events.TaskReopened.kind)
        del self.results[position]
        self.answers.pop(position, None)
        self._forget_failures(position)
        damaged = position < len(self.records) and self.records[position].damaged
        return events.TaskReopened(at, self.dag.tasks[position].id, self.attempts[position], damaged, prompt)

    def _move(self, position: int, kind: str) -> None:
        """Change the task's status as an event of the kind does. Raise RuntimeError if the table refuses."""
        before, after = TASK_TRANSITIONS[kind]
        if self.statuses[position] not in before:
            raise self._illegal(position, after)
        self.statuses[position] = after

    def _finish(self, position: int, result: TaskResult) -> None:
        """End the task with `result`. Raise RuntimeError if the table refuses the end."""
        self._move(position, _ENDS[result.status])
        self.results[position] = result
        if result.usage is not NO_USAGE:
            self._usage += result.usage
        if position in self.continuations:
            del self.continuations[position]
        if position in self.questions:
            del self.questions[position]
            self.asking.pop(position, None)

    def _illegal(self, position: int, new: TaskStatus) -> RuntimeError:
        task_id, old = self.dag.tasks[position].id, self.statuses[position]
        return RuntimeError(f"task {task_id!r} is {old.value} and cannot become {new.value} here; a bug of plait")

    def _add_usage(self, usage: Usage) -> None:
        if usage is not NO_USAGE:
            self._usage += usage

    # Verbs that change the rest of the state.

    def assume(self, position: int, result: TaskResult) -> None:
        """End the pending task of a preview with `result`, without an attempt."""
        if self.dag.tasks[position].join != "all":
            self._look(position)
        self.statuses[position], self.results[position] = result.status, result

    def adopt(self, position: int) -> None:
        """Take over the running task's attempt, begun by an earlier process. The event is part of the run's resume."""
        if self.statuses[position] is not _RUNNING:
            raise self._illegal(position, _RUNNING)
        self._adopted.add(position)
        if position in self.continuations:
            self._consume_continuation(position)

    def add_tasks(self, tasks: Sequence[Task], added_by: str | None, at: str) -> events.TasksAdded:
        """Add `tasks` as pending. Raise DAGError and change nothing if the DAG refuses the tasks."""
        start = len(self.dag)
        self.dag.extend(tasks)
        self.statuses += [_PENDING] * len(tasks)
        self.attempts += [0] * len(tasks)
        self._started += bytes(len(tasks))
        for position, task in enumerate(tasks, start):
            self._note_added(position, added_by)
            if task.continues is not None:
                self._continued[self.dag.position(task.continues)] += 1
        return events.TasksAdded(at, tuple(map(events.NewTask.of, tasks)), added_by)

    def withdraw_tasks(self, start: int) -> None:
        """Undo the last `add_tasks`, which began at position `start`. To be called before the event is submitted."""
        for position in range(start, len(self.dag)):
            added_by = self._added_by.pop(position)
            self.depths.pop(position, None)
            if added_by is not None:
                adder = self.dag.position(added_by)
                parts = [part for part in self.parts.pop(adder, ()) if part < start]
                if parts:
                    self.parts[adder] = parts
                else:
                    self._have_added.discard(adder)
            if (before := self.dag.tasks[position].continues) is not None:
                self._continued[self.dag.position(before)] -= 1
        self.dag.cut(start)
        del self.statuses[start:], self.attempts[start:], self._started[start:]

    def expand(self, position: int) -> None:
        """Let the task with `for_each` or `call` wait for the parts of the task that were added last, if any."""
        joined = set(self.dag.dependencies[position])
        self.dag.join(position, [part for part in self.parts.setdefault(position, []) if part not in joined])

    def free(self, positions: Sequence[int]) -> None:
        """Let tasks leave memory that have ended, are stored, and are needed by no other task. Their statuses stay."""
        gone = self._freed_summary
        by_task: tuple[dict[int, Any], ...] = (
            *(self.results, self._conversations, self._prompts, self.continuations, self._added_by, self._seen),
            *(self.answers, self._spent, self._continued, self._refusals, self._failures, self._throttled),
        )
        for position in positions:
            self._freed[self.statuses[position]] += 1
            gone = replace(
                gone,
                reused=gone.reused + self.results[position].reused,
                ran=gone.ran + self._started[position],
                repeated=gone.repeated + (self._started[position] and position in self._repeats),
                adopted=gone.adopted + (position in self._adopted),
            )
            self._started[position] = False
            for values in by_task:
                values.pop(position, None)
        self._freed_summary = gone
        self._adopted.difference_update(positions)
        self.dag.free(positions)

    def spend(self, position: int, usage: Usage) -> None:
        """Record the cost reported so far by the task's attempt under way. NO_USAGE changes nothing."""
        if usage is not NO_USAGE:
            self._spent[position] = self.attempts[position], usage

    def spent(self, position: int) -> Usage:
        """Return the usage that the task's last attempt has reported; NO_USAGE if none."""
        attempt, usage = self._spent.get(position, (0, NO_USAGE))
        return usage if attempt == self.attempts[position] else NO_USAGE

    def count_failure(self, position: int, kind: str | None, refusals: int = 0, pauses: int = 0) -> int:
        """Count a failed attempt of the task with an error of `kind`.

        `refusals` and `pauses` are those of the backend before, since it last completed a task. Returns 0 unless the
        backend refused the task; else the number of refusals of the task so far, or `pauses` if greater.
        """
        if kind in _NOT_COUNTED:
            return 0  # has tries of its own, or ends with a person's answer
        if kind not in THROTTLING:
            self._failures[position] += 1
            return 0
        self._throttled[position] += 1
        own = self._throttled[position]
        times = max(own, pauses)
        if times > MOST_THROTTLINGS and (kind != ErrorKind.RATE_LIMITED or own > refusals + 1):
            self._failures[position] += 1
        return times

    def _forget_failures(self, position: int) -> None:
        """Reset the counts of the task, because a person has reopened the task."""
        del self._failures[position], self._throttled[position], self._refusals[position]

    def count_stored_failures(self, position: int, attempts: Iterable[AttemptRecord]) -> None:
        """Count the task's failed attempts of earlier processes. A crash thus gives a task no further attempts, and no
        further corrections.
        """
        for attempt in attempts:
            if attempt.status == AttemptStatus.RETRIED and attempt.error_kind != ErrorKind.SESSION_LOST.value:
                self.count_failure(position, attempt.error_kind)
                if is_refusal(attempt.error):
                    self._refusals[position] += 1
            elif attempt.status in {AttemptStatus.FAILED, AttemptStatus.COMPLETED}:  # reopened since, by a person
                self._forget_failures(position)

    def mark_repeats(self, positions: Iterable[int]) -> None:
        """Record the tasks with an earlier attempt that may be paid for a second time by the next attempt."""
        self._repeats = frozenset(positions)

    def continue_with(self, position: int, continuation: Continuation) -> None:
        """Record how the task's next attempt continues the conversation of earlier attempts."""
        self.continuations[position] = continuation

    def move_continuation(self, position: int) -> None:
        """Let the task's next attempt, on another backend, replay the conversation of the earlier ones. A turn that was
        interrupted begins anew: what it had done is in the session alone.
        """
        continuation = self.continuations.pop(position)
        if continuation.sends_message:
            self.continuations[position] = replace(continuation, session_id=None, interrupted=False)

    def load_moved(self, attempts: Iterable[AttemptRecord], spares: Mapping[str, Sequence[str]], default: str) -> None:
        """Note the tasks whose last attempt, of an earlier process, called one of the `spares` of their backend."""
        for attempt in attempts:
            position = self.dag.position(attempt.task_id)
            own = self.dag.backend_of(self.dag.tasks[position]) or default
            if attempt.attempt == self.attempts[position] and attempt.backend in spares.get(own, ()):
                self.moved[position] = attempt.backend

    def backend_of(self, position: int, default: str) -> str:
        """Return the backend of the task's last attempt: its own, or a spare. `default` is that of the run."""
        return self.moved.get(position) or self.dag.backend_of(self.dag.tasks[position]) or default

    def _consume_continuation(self, position: int) -> None:
        """Mark the conversation as continued by the task's current attempt."""
        continuation = self.continuations.pop(position)
        if continuation.sends_message:
            # Each further attempt repeats the message until the conversation holds the message.
            self.continuations[position] = replace(continuation, interrupted=False)

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
        elif (conversation := self._conversations.get(position)) is not None:
            size = sum(len(message.content) for message in conversation.own_messages)
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


THROTTLING: Final = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED})
"""Error kinds with which a backend requests a pause: not the fault of the task."""


MOST_THROTTLINGS: Final = 20
"""Number of throttlings, of the task or as pauses of the backend with no completed task in between, after which an
overload counts as a failure. A limit then counts only if other tasks have completed meanwhile: the task may be too
large for it.
"""
_NOT_COUNTED = frozenset({ErrorKind.CHECK_FAILED, ErrorKind.NO_CREDIT})


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


_PENDING, _RUNNING = TaskStatus.PENDING, TaskStatus.RUNNING
_ENDS = {move.after: kind for kind, move in TASK_TRANSITIONS.items() if move.after in TASK_DONE}
"""The kind of the event that ends a task, by the status."""


def _as_model(task: Task, data: JsonValue) -> Any:
    """Return the data of a completed task as its model, for a list of answers each of them."""
    assert task.output is not None
    gathers = task.for_each is not None or (task.repeat > 1 and task.vote in {None, "all"})
    if not (gathers and isinstance(data, list)):
        return task.output.model_validate(data)
    return ["" if one == "" else task.output.model_validate(one) for one in data]
