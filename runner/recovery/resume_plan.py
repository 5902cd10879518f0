"""What a resume does with each task of a stored run, and why. `preview` shows the plan and `resume` carries it out: one
decision for both, so that they agree. `decide` reads what is known beside the records of the tasks, and stores nothing:

- the answers to open questions: from the inbox, from the caller of `resume`, or by default;
- the attempts that outlived the process that started them. The backend reads the state of an attempt from the files of
  the attempt alone (`DetachedBackend.inspect`). An attempt that is still running, or has ended without a stored end,
  continues in this process with the same number. Files of an interrupted attempt may name a session that the dead
  process had not stored yet; the session then counts as stored.

An attempt on another host is not asked about here: the host may be away, and would answer only to the next owner. Such
an attempt is adopted, and its host then says whether it is still there. The host refuses the earlier owner from then
on, so an owner that is only suspended can do no harm to the attempt.

`plan_resume` makes the steps from the records and these facts alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from anyio.to_thread import run_sync

from plait.backends.backend_protocol import DetachedBackend, DetachedTurn, Files, PlacedBackend
from plait.errors import AnswerConflict, PlaitError, RunNotResumable
from plait.json_form import JsonInput, JsonValue, value
from plait.persistence.store_records import TaskRecord
from plait.program_log import logger
from plait.runner.domain.asked_question import RAISES, AnsweredQuestion, Asking, Way, answers_of
from plait.runner.domain.continuation import is_refusal
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.engine.inbox import AnswerNote, answer_in
from plait.runner.engine.lease import Liveness, liveness, owner_is_gone
from plait.runner.engine.run_options import RunOptions
from plait.runner.state.attempt_files import attempt_files, files_root
from plait.runner.state.stored_run import (
    PolicyState,
    StoredPolicy,
    StoredRun,
    needs_no_work,
    next_tries,
    placed_attempts,
    read_policy_state,
    with_notes,
)
from plait.statuses import RUN_DONE, TASK_DONE, TASK_STATUSES, TaskStatus
from plait.task import FailureMode, Join, Task, at_most_once_question, crash_question, may_start, satisfies


class ResumeAction(StrEnum):
    """The action of a resume for a task."""

    KEEP = "keep"
    """The task is done and stays unchanged."""
    CONTINUE = "continue"
    """Continue the conversation, which is known to have begun, with a note about the interruption, with the awaited
    answer, or with the mistakes in the last reply.
    """
    ADOPT = "adopt"
    """Follow the attempt, which outlived its process, or read the waiting answer. No message is sent again."""
    START_OVER = "start over"
    """Start another attempt from the beginning."""
    START = "start"
    """Start the first attempt."""
    ASK = "ask"
    """Wait for a person: `plait answer`."""
    FAIL = "fail"
    """Fail as timed out: a question has neither an answer by the deadline nor a default."""
    BLOCKED = "blocked"
    """Do not start, because of the end of a dependency, or because the policy ended the run as failed."""
    CANCEL = "cancel"
    """Cancel the task with the run: the run was cancelled, or the policy ended the run as completed."""


MOST_DEATHS = 10
"""A person is asked about a task whenever its process has died this many times more during the task."""
QUESTION_ANSWERED = "the question is answered"
RUNS = frozenset({ResumeAction.CONTINUE, ResumeAction.START_OVER, ResumeAction.START})
"""Actions that execute the task."""
_PASSES = RUNS | {ResumeAction.ADOPT}
"""Actions assumed to end in success."""
_COMPLETED = TaskStatus.COMPLETED.value
_CONTINUES = frozenset({ResumeAction.CONTINUE, ResumeAction.ADOPT})
"""Actions that continue an existing conversation."""


@value
class ResumeStep:
    """The action of a resume for a task, with the reason."""

    task_id: str
    action: ResumeAction
    reason: str
    possibly_billed_twice: bool = False
    """Whether an attempt of unknown or discarded outcome is repeated, so that the task may be paid for twice."""
    input_tokens: int = 0
    """The estimated tokens of the repeated prompt and history, a quarter of the characters; 0 outside a preview."""


DECLARED_FAILED = "declared_failed"
"""The error kind of a task that a person declared failed."""


@value
class ResumeOptions:
    """The options of a resume. Raises ValueError for `prompts` without `retry_failed`."""

    retry_failed: bool = False
    """Whether failed tasks and damaged results start over."""
    answers: Mapping[str, JsonInput] | None = None
    """Answers to open questions, by task id."""
    policy: Policy | None = None
    """A policy of the stored kind; None for the built-in policy of that kind."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """New prompts of failed tasks that start over, by task id."""
    wakes: bool = False
    """Whether nobody is there: the run parks again, and goes on with the next process that wakes runs if this one is
    stopped.
    """

    def __post_init__(self) -> None:
        if self.prompts and not self.retry_failed:
            raise ValueError("prompts are for failed tasks, which run again with retry_failed=True only")


Answers: TypeAlias = Mapping[str, AnsweredQuestion | None]
"""The answers to open questions, by task id; None after a deadline without an answer and without a default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """What a resume does with each task of a stored run. `preview` shows it, and `prepare_resume` carries it out once.

    It holds for the run as read: the claim of `prepare_resume` is refused if the run has changed since.
    """

    run: StoredRun
    how: ResumeOptions
    ended: bool
    """Whether the run is over, so that a resume only returns the stored result."""
    cancelled: bool
    """Whether the run is to be cancelled: no task runs any more."""
    decided: PolicyState
    """The decisions of the run's policy so far."""
    answers: Answers
    died: bool
    """Whether the last owner died. Otherwise its process lives, and lost the lease: no death counts."""
    steps: Sequence[ResumeStep]
    """The step of each task, by position, without regard to an end that the policy has decided."""
    later: Mapping[int, float]
    """The Unix time of the next attempt, in seconds, by position, for tasks that wait for it."""


async def decide(options: RunOptions, run: StoredRun, how: ResumeOptions) -> ResumePlan:
    """Decide what a resume does with `run`, which has no living owner or has ended. Store nothing.

    Raises AnswerConflict for a late answer in `how`, PlaitError for an invalid answer, StoreError, and RunNotResumable
    if the run is cancelled, or if the resume would build on a damaged result.
    """
    ended = needs_no_work(run, how.retry_failed)
    decided = policy_state_of(run, how.retry_failed and not ended)
    answers, now, died = dict[str, AnsweredQuestion | None](), options.clock.wall(), owner_died(run)
    if run.state.asking or not owner_is_gone(run.record):  # notes may have come since the run was read
        run = await with_notes(run)
    cancelled = run.to_be_cancelled
    if not cancelled:
        outlive = any(isinstance(each, DetachedBackend | PlacedBackend) for each in options.backends.values())
        if outlive and decided.end is None:
            run = await with_detached_turns(options, run)
        if run.state.asking:
            answers = {**_budget_as_answer(options, run), **given_answers(run, now, how.answers)}
    if cancelled:
        steps = steps_of_cancelled(run.tasks)
    else:
        retry_failed = how.retry_failed and not ended
        steps = plan_resume(run.state.dag, run.tasks, answers, run.detached, retry_failed=retry_failed, died=died)
    if not (ended or cancelled):
        decides = StoredPolicy.of(run.record) is not None and decided.end is None
        _require_no_damaged_dependency(run, steps, decides=decides)
    times = await next_tries(run.store, run.record.run_id, run.tasks, now)
    later = {
        position: until
        for position, step in enumerate(steps)
        if step.action in RUNS and (until := times.get(step.task_id, now)) > now
    }
    return ResumePlan(
        run=run,
        how=how,
        ended=ended,
        cancelled=cancelled,
        decided=decided,
        answers=answers,
        died=died,
        steps=steps,
        later=later,
    )


def _require_no_damaged_dependency(run: StoredRun, steps: Sequence[ResumeStep], *, decides: bool) -> None:
    """Raise RunNotResumable if the resume would build on a damaged result: see `find_damaged_dependency`."""
    damaged = find_damaged_dependency(run.state.dag, run.tasks, steps, decides=decides)
    if damaged is None:
        return
    builds = "the run's policy would decide" if decides else "other tasks would run"
    remedy = "resume with retry_failed (plait resume --retry-failed) to run the task again"
    if run.state.dag[damaged].at_most_once:
        remedy = "the task must not take effect twice, so restore a copy of the store, or start a new run"
    raise RunNotResumable(
        f"run {run.record.run_id}: the stored result of task {damaged!r} does not fit its checksum, and {builds} "
        f"without the result; {remedy}"
    )


def owner_died(run: StoredRun) -> bool:
    """Return whether the last owner of the run died, for all that is known here. Otherwise it only lost the lease."""
    return run.record.owner is None or liveness(run.record.owner) is not Liveness.ALIVE


def _budget_as_answer(options: RunOptions, run: StoredRun) -> Answers:
    """Return the budget of `options` as the answer to questions that ask for a higher one."""
    answers: dict[str, AnsweredQuestion] = {}
    for position, asking in run.state.asking.items():
        if asking.way is Way.BUDGET and options.budget is not None:
            with suppress(PlaitError):  # it is no higher
                value = asking.checked(options.budget)
                answers[run.tasks[position].task_id] = _answered_question(run, position, value, "person")
    return answers


def policy_state_of(run: StoredRun, retry_failed: bool) -> PolicyState:
    """Return the stored decisions of the policy, without the end of the run if `retry_failed` reopens the run."""
    decided = read_policy_state(run.record.policy_state)
    if retry_failed and run.status in RUN_DONE:  # the run failed, or has damaged results
        return replace(decided, end=None, error=None, idle=False)
    return decided


def given_answers(run: StoredRun, now: float, own: Mapping[str, JsonInput] | None = None) -> Answers:
    """Return the answers to the open questions at Unix time `now`; `own` holds the answers of the caller, by task id.

    The first answer counts. Raises AnswerConflict if an answer in `own` comes after another answer or after the
    deadline, and PlaitError if an answer in `own` is invalid.
    """
    own = own or {}
    noted = first_notes(run)
    answers: dict[str, AnsweredQuestion | None] = {}
    for position, asking in run.state.asking.items():
        task_id = run.tasks[position].task_id
        if task_id in noted:
            answers[task_id] = _answered_question(run, position, noted[task_id].value, "person")
        elif asking.is_late(now) and asking.question.default is None:
            answers[task_id] = None
        elif asking.is_late(now):
            answers[task_id] = _answered_question(run, position, asking.question.default, "default")
        elif task_id in own:
            answers[task_id] = _answered_question(run, position, asking.checked(own[task_id]), "person")
        if task_id in own and (task_id in noted or asking.is_late(now)):
            raise AnswerConflict(too_late(run.record.run_id, task_id, asking, noted=task_id in noted))
    return answers


def _answered_question(run: StoredRun, position: int, value: JsonValue, by: str) -> AnsweredQuestion:
    asking = run.state.asking[position]
    return AnsweredQuestion(run.tasks[position].attempt, asking.way, asking.question.text, value, by)


def first_notes(run: StoredRun) -> dict[str, AnswerNote]:
    """Return the first valid answer in the inbox sent before the deadline, by task id, for each open question."""
    noted: dict[str, AnswerNote] = {}
    for note in filter(None, map(answer_in, run.notes if run.state.asking else ())):
        if note.task_id not in noted and note.task_id in run.state.dag and _fits(run, note):
            noted[note.task_id] = note
    return noted


def _fits(run: StoredRun, note: AnswerNote) -> bool:
    position = run.state.dag.position(note.task_id)
    asking, record = run.state.asking.get(position), run.tasks[position]
    if asking is None or record.attempt != note.attempt:
        return False
    if asking.deadline_at is not None and note.at > asking.deadline_at:
        return False
    try:
        asking.checked(note.value)
    except PlaitError as error:
        logger(run=run.record.run_id).warning("answer_refused", task=note.task_id, error=str(error))
        return False
    return True


def question_of(run: StoredRun, task_id: str) -> tuple[Asking, TaskRecord]:
    """Return the open question and the record of the task.

    Raises TaskNotFound for an unknown task, AnswerConflict if the task has no open question, and PlaitError if the
    task waits for a decision of a person (`Runs.settle`) instead of an answer.
    """
    run_id, dag = run.record.run_id, run.state.dag
    run.require_task(task_id)
    position = dag.position(task_id)
    record, asking = run.tasks[position], run.state.asking.get(position)
    if asking is None and TaskStatus(record.status) is TaskStatus.WAITING_INPUT:
        raise PlaitError(
            f"task {task_id!r} of run {run_id} has no question of its own: settle the task with --done TEXT, "
            f"--again or --fail REASON (runs.settle)"
        )
    if asking is None:
        before = run.state.answers.get(position, ())
        hint = f"; the last question was answered by {before[-1].by}" if before else ""
        if TaskStatus(record.status) is TaskStatus.COMPLETED:
            hint += f"; to continue its conversation: plait continue {run_id} {task_id} MESSAGE"
        raise AnswerConflict(f"task {task_id!r} of run {run_id} is {record.status} and has no open question{hint}")
    return asking, record


def too_late(run_id: str, task_id: str, asking: Asking, *, noted: bool) -> str:
    """Return the message of the error that refuses a late answer; `noted` if another answer came first."""
    if noted:
        return f"the question of task {task_id!r} of run {run_id} has an earlier answer; this one was not used"
    became = "the task failed" if asking.question.default is None else "the default answer was used"
    return f"the question of task {task_id!r} of run {run_id} had to be answered by {asking.deadline_at}; {became}"


async def with_detached_turns(options: RunOptions, run: StoredRun) -> StoredRun:
    """Return `run` with the states of the running attempts in `detached`, read from files. No living owner exists.

    Attempts that were placed on another host count as alive: their hosts have not been asked. One without a stored
    place has not begun. Raises StoreError.
    """
    turns: dict[str, tuple[DetachedBackend, Files]] = {}
    elsewhere: set[tuple[str, int]] = set()
    root, run_id = files_root(run.store), run.record.run_id
    for position, (task, record) in enumerate(zip(run.state.dag, run.tasks, strict=True)):
        if TASK_STATUSES[record.status] is not TaskStatus.RUNNING:
            continue
        backend = options.backends.get(run.state.backend_of(position, options.default))
        if root is not None and not task.gathers and isinstance(backend, DetachedBackend):
            turns[task.id] = backend, attempt_files(root, run_id, task.id, record.attempt)
        if isinstance(backend, PlacedBackend):
            elsewhere.add((task.id, record.attempt))
    places = await placed_attempts(run.store, run_id) if elsewhere else {}
    placed = {
        task_id: DetachedTurn("alive", None, at.interrupted, f"on {at.place}", at.place)
        for (task_id, attempt), at in places.items()
        if (task_id, attempt) in elsewhere
    }
    if not turns and not placed:
        return run
    detached = await run_sync(_inspect, turns)
    if not owner_is_gone(run.record):
        # The owner may only be suspended, and ends its child processes after waking up: do not adopt running attempts.
        # The sessions and replies in the files are valid all the same.
        detached = {
            task_id: replace(turn, state="dead") if turn.state == "alive" else turn
            for task_id, turn in detached.items()
        }
    detached |= placed
    return replace(
        run, tasks=tuple(_with_session(record, detached.get(record.task_id)) for record in run.tasks), detached=detached
    )


def _inspect(turns: Mapping[str, tuple[DetachedBackend, Files]]) -> dict[str, DetachedTurn]:
    states: dict[str, DetachedTurn] = {}
    for task_id, (backend, files) in turns.items():
        try:
            detached = backend.inspect(files)
        except Exception as error:
            logger(task=task_id).warning("left_failed", error=type(error).__name__)
            continue
        if detached is not None:
            states[task_id] = detached
    return states


def _with_session(record: TaskRecord, detached: DetachedTurn | None) -> TaskRecord:
    if detached is None or detached.session_id is None:
        return record
    return replace(record, session_id=detached.session_id, session_confirmed=True)


_NO_ANSWERS: Answers = {}
_NONE_DETACHED: Mapping[str, DetachedTurn] = {}


def plan_resume(
    dag: DAG,
    records: Sequence[TaskRecord],
    answers: Answers = _NO_ANSWERS,
    detached: Mapping[str, DetachedTurn] = _NONE_DETACHED,
    *,
    retry_failed: bool = False,
    died: bool = True,
) -> list[ResumeStep]:
    """Return the step of each task, by position, for a run without a living owner. Executed tasks are assumed to
    succeed. `detached` are the states of running attempts according to their files, by task id; `died`: see ResumePlan.
    """
    steps = [
        _waiting(record, answers)
        if record.asked is not None
        else _step_of_record(task, record, detached.get(task.id), retry_failed=retry_failed, died=died)
        for task, record in zip(dag.tasks, records, strict=True)
    ]
    passes = [False] * len(steps)
    waits = [False] * len(steps)  # for a person, or behind a task that does
    for position in dag.order:
        step, task = steps[position], dag.tasks[position]
        # A running at-most-once attempt is not discarded, even if a dependency runs again: the effect has begun.
        stays = step.action is ResumeAction.ADOPT and task.at_most_once
        if step.action in _PASSES and not stays:
            needed = [n for n in dag.needed(position) if not dag.pairs_up(position, n)]
            in_the_way = [dag.tasks[n].id for n in needed if not passes[n]]
            if (join := dag.join_of(position)) != "all":
                in_the_way = _in_the_way_of_join(join, dag.dependencies[position], records, steps, passes, waits)
            if in_the_way:
                step = ResumeStep(task.id, ResumeAction.BLOCKED, f"waits for {', '.join(in_the_way[:3])}")
                steps[position] = step
            elif step.action in _CONTINUES and _runs_again(dag, records, steps, position):
                # The prompt in the session holds the old results of the dependencies.
                reason = "a dependency runs again"
                step = replace(step, action=ResumeAction.START_OVER, reason=reason, possibly_billed_twice=True)
                steps[position] = step
        passes[position] = step.action in _PASSES or _lets_pass(task, records[position], step)
        waits[position] = step.action is ResumeAction.ASK
        if step.action is ResumeAction.BLOCKED:
            waits[position] = any(waits[n] for n in dag.needed(position))
    return steps


def _in_the_way_of_join(
    join: Join,
    needed: Sequence[int],
    records: Sequence[TaskRecord],
    steps: Sequence[ResumeStep],
    passes: Sequence[bool],
    waits: Sequence[bool],
) -> list[str]:
    """Return the dependencies for which a task with `join` cannot start; none if it can."""
    unended = [n for n in needed if waits[n]]
    dead = [n for n in needed if not passes[n] and not waits[n]]
    completed = sum(passes[n] and (steps[n].action in _PASSES or records[n].status == _COMPLETED) for n in needed)
    starts = may_start(join, completed=completed, unended=len(unended), dead=len(dead))
    return [] if starts else [steps[n].task_id for n in (unended or dead)]


def _runs_again(dag: DAG, records: Sequence[TaskRecord], steps: Sequence[ResumeStep], position: int) -> bool:
    """Return whether a dependency of the task runs again, which the task did not start without."""
    needs_one = dag.tasks[position].join == "any"
    return any(
        steps[n].action in RUNS and not (needs_one and records[n].status != _COMPLETED) for n in dag.needed(position)
    )


def steps_of_cancelled(records: Sequence[TaskRecord]) -> list[ResumeStep]:
    """Return the step of each task of a cancelled run: no task runs any more."""
    return [
        ResumeStep(record.task_id, ResumeAction.KEEP, record.status)
        if TASK_STATUSES[record.status] in TASK_DONE
        else ResumeStep(record.task_id, ResumeAction.CANCEL, "the run is to be cancelled")
        for record in records
    ]


def steps_of_decided(steps: Sequence[ResumeStep], *, fails: bool) -> list[ResumeStep]:
    """Return `steps` changed for a run that the policy has ended, as failed if `fails`, otherwise as completed.

    No task runs any more. Unfinished tasks are blocked in a failed run, and cancelled in a completed run.
    """
    ended = f"the run's policy has ended the run as {'failed' if fails else 'completed'}"
    stopped = _PASSES if fails else _PASSES | {ResumeAction.ASK, ResumeAction.BLOCKED}
    action = ResumeAction.BLOCKED if fails else ResumeAction.CANCEL
    return [ResumeStep(step.task_id, action, ended) if step.action in stopped else step for step in steps]


def find_damaged_dependency(
    dag: DAG, records: Sequence[TaskRecord], steps: Sequence[ResumeStep], *, decides: bool
) -> str | None:
    """Return the id of a task whose damaged result the resume would build on, or None.

    A damaged result counts as failed. If the failure mode lets dependents run nevertheless, they would do other work
    than planned. `decides`: a policy decides about the run, and would decide on another result.
    """
    unfinished = {i for i, record in enumerate(records) if TASK_STATUSES[record.status] not in TASK_DONE}
    for position, (task, record, step) in enumerate(zip(dag.tasks, records, steps, strict=True)):
        if not record.damaged or step.action is not ResumeAction.KEEP:
            continue
        after = unfinished.intersection(dag.needed_by(position))
        passes = any(task.failure_mode is not FailureMode.HARD or dag.tasks[n].join != "all" for n in after)
        if decides or passes:
            return task.id
    return None


def needs_correction(record: TaskRecord) -> bool:
    """Return whether the last answer was refused, and the conversation has not received the reason yet."""
    return TASK_STATUSES[record.status] is TaskStatus.PENDING and is_refusal(record.error)


def _step_of_record(
    task: Task, record: TaskRecord, turn: DetachedTurn | None, *, retry_failed: bool, died: bool
) -> ResumeStep:
    """Return the step of a task without regard to dependencies."""
    status = TASK_STATUSES[record.status]
    if status is TaskStatus.RUNNING:
        if turn is not None and outlives(turn):
            return _adopted(turn, task.id)
        return _under_way(task, record, died=died)
    if status is TaskStatus.PENDING:
        return _pending(task, record)
    if status is TaskStatus.WAITING_INPUT:
        return ResumeStep(task.id, ResumeAction.ASK, record.question or "waits for an answer")
    action = ResumeAction.START_OVER if retry_failed else ResumeAction.KEEP
    if record.damaged:
        return _damaged(task, retry_failed=retry_failed)
    if status is TaskStatus.FAILED:
        return ResumeStep(task.id, action, f"failed ({record.error_kind})")
    return ResumeStep(task.id, ResumeAction.KEEP, status.value)


def _waiting(record: TaskRecord, answers: Answers) -> ResumeStep:
    """Return the step of a task with an open question."""
    if record.task_id not in answers:
        return ResumeStep(record.task_id, ResumeAction.ASK, record.question or "waits for an answer")
    if (answer := answers[record.task_id]) is None:
        return ResumeStep(record.task_id, ResumeAction.FAIL, f"no answer by the deadline: {record.question}")
    return _answered(record, answer.way)


def _answered(record: TaskRecord, way: Way) -> ResumeStep:
    task_id = record.task_id
    if way in RAISES or way is Way.CREDIT:
        action = ResumeAction.CONTINUE if record.session_confirmed else ResumeAction.START_OVER
        again = "money" if way in RAISES else "credit"
        return ResumeStep(task_id, action, f"{QUESTION_ANSWERED}, and there is {again} again")
    if way is Way.REPLY:
        return ResumeStep(task_id, ResumeAction.CONTINUE, QUESTION_ANSWERED)
    return ResumeStep(
        task_id, ResumeAction.START_OVER, f"{QUESTION_ANSWERED}, and the task's code runs again from the start"
    )


def _damaged(task: Task, *, retry_failed: bool) -> ResumeStep:
    reason = "the stored result does not fit its checksum"
    if task.at_most_once:
        return ResumeStep(task.id, ResumeAction.KEEP, f"{reason}; the task took effect, and must not take effect twice")
    if retry_failed:
        return ResumeStep(task.id, ResumeAction.START_OVER, reason, possibly_billed_twice=True)
    return ResumeStep(
        task.id, ResumeAction.KEEP, f"{reason}, so the task counts as failed; --retry-failed runs the task again"
    )


def outlives(turn: DetachedTurn) -> bool:
    """Return whether the attempt is still running, or has ended without a stored end."""
    return turn.state != "dead"


def _adopted(turn: DetachedTurn, task_id: str) -> ResumeStep:
    if turn.place is not None:
        reason = f"the attempt was placed on {turn.place}, and continues there if it is still under way"
        return ResumeStep(task_id, ResumeAction.ADOPT, reason)
    about = f" ({turn.about})" if turn.about else ""
    if turn.state == "alive":
        return ResumeStep(task_id, ResumeAction.ADOPT, f"the agent is still running{about}")
    return ResumeStep(task_id, ResumeAction.ADOPT, f"the agent has finished, and its answer can be read{about}")


def deaths_with(record: TaskRecord) -> int:
    """Return the number of deaths during the task under way, including the one that cut the last attempt."""
    return record.crashes + 1


def longest_delay(deaths: int) -> float:
    """Return the longest delay, in seconds, before a task starts again after this number of deaths: 2, then twice as
    many with each death, up to a minute. After a person's answer the delays begin anew.

    The delay is any part of the longest one, so that tasks that were cut together start apart: while a task that kills
    its process waits, the others have time. A crasher is under way at each death, so a task beside it is asked about
    only if it was under way at all ten. For a task of 25 s a simulation gives 0.03 % if the crasher kills at once, and
    at most 1.1 % whenever it kills; with delays of at least half of the longest 18 %.
    """
    return min(60.0, 2.0 ** ((deaths - 1) % MOST_DEATHS + 1))


def _under_way(task: Task, record: TaskRecord, *, died: bool) -> ResumeStep:
    deaths = deaths_with(record)
    reason = f"the process {'died' if died else 'lost the run'} during attempt {record.attempt}"
    if task.at_most_once:
        return ResumeStep(task.id, ResumeAction.ASK, at_most_once_question(record.attempt))
    if died and deaths % MOST_DEATHS == 0:
        return ResumeStep(task.id, ResumeAction.ASK, crash_question(deaths))
    if record.session_confirmed:
        why = f"{reason}; session {record.session_id} is known"
        return ResumeStep(task.id, ResumeAction.CONTINUE, why, possibly_billed_twice=True)
    return ResumeStep(task.id, ResumeAction.START_OVER, reason + _from_where(record), possibly_billed_twice=True)


def _from_where(record: TaskRecord) -> str:
    """Return the end of the reason for starting over: a sent answer is sent again."""
    begun = record.answers and any(answered.way is Way.REPLY for answered in answers_of(record.answers))
    return "; the answer to the question is sent again" if begun else ""


def _pending(task: Task, record: TaskRecord) -> ResumeStep:
    if not record.attempt:
        return ResumeStep(task.id, ResumeAction.START, "never started")
    if record.error_kind is not None:
        return _failed_before(task, record)
    answers = answers_of(record.answers)
    if answers and answers[-1].attempt == record.attempt:
        return _answered(record, answers[-1].way)
    interrupted = f"attempt {record.attempt} was interrupted"
    if record.session_confirmed:
        reason = f"{interrupted}; session {record.session_id} is known"
        return ResumeStep(task.id, ResumeAction.CONTINUE, reason, possibly_billed_twice=True)
    return ResumeStep(task.id, ResumeAction.START_OVER, interrupted + _from_where(record), possibly_billed_twice=True)


def _failed_before(task: Task, record: TaskRecord) -> ResumeStep:
    failed = f"attempt {record.attempt} failed ({record.error_kind})"
    if needs_correction(record):
        return ResumeStep(task.id, ResumeAction.CONTINUE, f"{failed}; the mistakes are sent to the agent")
    if record.session_confirmed:
        return ResumeStep(
            task.id, ResumeAction.CONTINUE, f"{failed}; session {record.session_id} has kept the conversation"
        )
    return ResumeStep(task.id, ResumeAction.START_OVER, failed)


def _lets_pass(task: Task, record: TaskRecord, step: ResumeStep) -> bool:
    if step.action not in {ResumeAction.KEEP, ResumeAction.FAIL}:
        return False
    fails = record.damaged or step.action is ResumeAction.FAIL
    return satisfies(task, TaskStatus.FAILED if fails else TASK_STATUSES[record.status])
