"""Answers to the open questions of a stored run: from the inbox, from the caller of `resume`, or by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from plait.errors import AnswerConflict, PlaitError
from plait.json_form import JsonInput, JsonValue, value
from plait.persistence.store_records import TaskRecord
from plait.program_log import logger
from plait.runner.domain.asked_question import Asking
from plait.runner.engine.inbox import AnswerNote, answer_in
from plait.runner.state.stored_run import StoredRun
from plait.statuses import TaskStatus

DECLARED_FAILED = "declared_failed"
"""The error kind of a task that a person declared failed."""


@value
class ReceivedAnswer:
    """The answer to the open question of a task."""

    value: JsonValue
    by: str
    """The source of the answer, as in `AnsweredQuestion`."""


@value
class ReceivedAnswers:
    """The answers to the open questions of a run."""

    answers: Mapping[str, ReceivedAnswer] = field(default_factory=dict[str, ReceivedAnswer])
    """Answers by task id."""
    late: frozenset[str] = frozenset()
    """Tasks without an answer and without a default after the deadline."""


def given_answers(run: StoredRun, now: float, own: Mapping[str, JsonInput] | None = None) -> ReceivedAnswers:
    """Return the answers at Unix time `now`; `own` holds the answers of the caller, by task id.

    The first answer counts. Raises AnswerConflict if an answer in `own` comes after another answer or after the
    deadline, and PlaitError if an answer in `own` is invalid.
    """
    own = own or {}
    noted = first_notes(run)
    answers: dict[str, ReceivedAnswer] = {}
    late: set[str] = set()
    for position, asking in run.state.asking.items():
        task_id = run.tasks[position].task_id
        if task_id in noted:
            answers[task_id] = ReceivedAnswer(noted[task_id].value, "person")
        elif asking.is_late(now) and asking.question.default is None:
            late.add(task_id)
        elif asking.is_late(now):
            answers[task_id] = ReceivedAnswer(asking.question.default, "default")
        elif task_id in own:
            answers[task_id] = ReceivedAnswer(asking.checked(own[task_id]), "person")
        if task_id in own and (task_id in noted or asking.is_late(now)):
            raise AnswerConflict(too_late(run.record.run_id, task_id, asking, noted=task_id in noted))
    return ReceivedAnswers(answers, frozenset(late))


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
            hint += f"; to go on with its conversation: plait continue {run_id} {task_id} MESSAGE"
        raise AnswerConflict(f"task {task_id!r} of run {run_id} is {record.status} and has no open question{hint}")
    return asking, record


def too_late(run_id: str, task_id: str, asking: Asking, *, noted: bool) -> str:
    """Return the message of the error that refuses a late answer; `noted` if another answer came first."""
    if noted:
        return f"the question of task {task_id!r} of run {run_id} has an earlier answer; this one was not used"
    became = "the task failed" if asking.question.default is None else "the default answer was used"
    return f"the question of task {task_id!r} of run {run_id} had to be answered by {asking.deadline_at}; {became}"
