"""Steps of a resume: an action and a reason for each task of a stored run. Pure.

`plait resume --dry-run` prints the steps and `resume` applies the steps: one function for both, so that preview and
resume agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum

from plait.backends.backend_protocol import DetachedTurn
from plait.json_form import value
from plait.persistence.store_records import TaskRecord
from plait.runner.domain.asked_question import RAISES, Way, answers_of
from plait.runner.domain.continuation import is_refusal
from plait.runner.domain.dag import DAG
from plait.statuses import TASK_DONE, TASK_STATUSES, TaskStatus
from plait.task import FailureMode, Join, Task, at_most_once_question, crash_question, may_start


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


@value
class Evidence:
    """Facts about tasks beside the task records."""

    answered: Mapping[str, Way] = field(default_factory=dict[str, Way])
    """The ways of open questions with an answer, by task id."""
    late: Collection[str] = ()
    """Tasks without an answer by the deadline."""
    detached: Mapping[str, DetachedTurn] = field(default_factory=dict[str, DetachedTurn])
    """The states of running attempts according to their files, by task id."""
    died: bool = True
    """Whether the last owner died. Otherwise its process lives, and lost the lease: no death counts."""


def plan_resume(
    dag: DAG, records: Sequence[TaskRecord], *, retry_failed: bool = False, evidence: Evidence | None = None
) -> list[ResumeStep]:
    """Return the step of each task, by position, for a run without a living owner. Executed tasks are assumed to
    succeed.
    """
    evidence = evidence or Evidence()
    steps = [
        _waiting(record, evidence)
        if record.asked is not None
        else _step_of_record(task, record, evidence, retry_failed=retry_failed)
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
    goes_on = dag.tasks[position].join == "any"
    return any(
        steps[n].action in RUNS and not (goes_on and records[n].status != _COMPLETED) for n in dag.needed(position)
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


def _step_of_record(task: Task, record: TaskRecord, evidence: Evidence, *, retry_failed: bool) -> ResumeStep:
    """Return the step of a task without regard to dependencies."""
    status = TASK_STATUSES[record.status]
    if status is TaskStatus.RUNNING:
        turn = evidence.detached.get(task.id)
        if turn is not None and outlives(turn):
            return _adopted(turn, task.id)
        return _under_way(task, record, died=evidence.died)
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


def _waiting(record: TaskRecord, evidence: Evidence) -> ResumeStep:
    """Return the step of a task with an open question."""
    if record.task_id in evidence.late:
        return ResumeStep(record.task_id, ResumeAction.FAIL, f"no answer by the deadline: {record.question}")
    if record.task_id in evidence.answered:
        return _answered(record, evidence.answered[record.task_id])
    return ResumeStep(record.task_id, ResumeAction.ASK, record.question or "waits for an answer")


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
        reason = f"the attempt was placed on {turn.place}, and goes on there if it is still under way"
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
        known = f"{reason}; session {record.session_id} is known"
        return ResumeStep(task.id, ResumeAction.CONTINUE, known, possibly_billed_twice=True)
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
    status = TASK_STATUSES[record.status]
    if status is TaskStatus.FAILED or record.damaged or step.action is ResumeAction.FAIL:
        return task.failure_mode is not FailureMode.HARD
    return status in {TaskStatus.COMPLETED, TaskStatus.SKIPPED}
