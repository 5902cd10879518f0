"""Answers and decisions of a person for a waiting task."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal, TypeAlias

from plait.backends.large_answers import read_answer
from plait.backends.output_schema import Mismatch, Schema
from plait.clock_and_ids import iso
from plait.dialogue import Message
from plait.errors import AnswerConflict, BackendError, PlaitError, RunOwned
from plait.events import Event, TaskAnswered, TaskCompleted, TaskFailed, TaskSkipped, TaskWaiting
from plait.json_form import JsonInput, to_json
from plait.persistence.store_records import TaskRecord
from plait.runner.domain.asked_question import Way
from plait.runner.engine.inbox import AnswerNote, answer_note, wake
from plait.runner.engine.lease import owner_is_gone, wait_for_expiry, write_beside
from plait.runner.engine.run_options import RunOptions
from plait.runner.recovery.resume_plan import (
    DECLARED_FAILED,
    ResumeAction,
    first_notes,
    given_answers,
    owner_died,
    plan_resume,
    question_of,
    too_late,
    with_detached_turns,
)
from plait.runner.state.attempt_files import attempt_files, end_attempt, files_root
from plait.runner.state.budget import raise_of
from plait.runner.state.stored_run import StoredRun, require_unfailed, stored_run
from plait.safe_text import clean_text
from plait.statuses import TaskStatus
from plait.task import Task, failed_status

_LOOK_AGAIN_S = 0.2

How: TypeAlias = Literal["done", "again", "fail"]


async def apply_decision(config: RunOptions, run_id: str, task_id: str, how: How, text: str) -> None:
    """Claim the run, store the outcome of the decision, release the run. See `Runs.settle`."""
    run = await stored_run(config.store, run_id)
    dag = run.state.dag
    run.require_task(task_id)
    await wait_for_expiry(config, run)
    position, run = dag.position(task_id), await with_detached_turns(config, run)
    died = owner_died(run)
    record, step = run.tasks[position], plan_resume(dag, run.tasks, detached=run.detached, died=died)[position]
    if position in run.state.asking:
        await _require_decidable(config, run, task_id, how)
    if step.action is ResumeAction.ADOPT:
        raise PlaitError(f"task {task_id!r} of run {run_id} needs no answer: {step.reason}; resume the run")
    if step.action is not ResumeAction.ASK:
        raise PlaitError(f"task {task_id!r} of run {run_id} is {record.status} and does not wait for an answer")
    at = iso(config.clock.wall())
    then: list[Event] = []
    if TaskStatus(record.status) is not TaskStatus.WAITING_INPUT:  # the process died and the run was not resumed
        then.append(TaskWaiting(at, task_id, record.attempt, step.reason, crashed=died))
    then += await _outcome(run, dag[task_id], record, how, text, at)
    await write_beside(config, run, then)
    if (root := files_root(run.store)) is not None:  # programs of an owner that died
        await end_attempt(attempt_files(root, run_id, task_id, record.attempt).turn)


async def _require_decidable(config: RunOptions, run: StoredRun, task_id: str, how: How) -> None:
    """Raise PlaitError or AnswerConflict unless the open question may be settled. The first answer or default
    counts.
    """
    run_id, asking = run.record.run_id, run.state.asking[run.state.dag.position(task_id)]
    answers = given_answers(run, config.clock.wall())
    if task_id in answers:
        noted = (first := answers[task_id]) is not None and first.by == "person"
        raise AnswerConflict(too_late(run_id, task_id, asking, noted=noted))
    if how == "again":
        raise PlaitError(
            f"task {task_id!r} of run {run_id} asks {asking.question.text[:200]!r}, and would ask again after "
            f"--again; answer the question (plait answer {run_id} {task_id} VALUE), or use --done TEXT or --fail REASON"
        )


async def answer_question(
    config: RunOptions, run_id: str, task_id: str, value: JsonInput, attempt: int | None, wait: float
) -> bool:
    """Answer a question. See `Runs.answer`."""
    ends = config.clock.monotonic() + wait
    mine: AnswerNote | None = None
    while True:
        run = await stored_run(config.store, run_id)
        if mine is not None and _is_taken(run, mine):
            return True
        asking, record = question_of(run, task_id)
        if mine is None:
            require_unfailed(run)
            if attempt is not None and attempt != record.attempt:
                raise AnswerConflict(
                    f"the question of attempt {attempt} of task {task_id!r} of run {run_id} was answered; attempt "
                    f"{record.attempt} asks {asking.question.text[:200]!r}"
                )
        noted = first_notes(run).get(task_id)
        if noted is not None and (mine is None or noted.nonce != mine.nonce):
            raise AnswerConflict(too_late(run_id, task_id, asking, noted=True))
        if mine is None and asking.is_late(config.clock.wall()):
            raise AnswerConflict(too_late(run_id, task_id, asking, noted=False))
        owner = run.record.owner
        if owner_is_gone(run.record):
            answer, at = asking.checked(value), iso(config.clock.wall())
            raises = raise_of(asking, task_id, answer, at)
            answered = run.state.answer(run.state.dag.position(task_id), at, answer, "person")
            try:
                await write_beside(config, run, [answered, *raises])
            except RunOwned:
                continue  # another process claimed the run first
            return True
        if mine is None:
            at = iso(config.clock.wall())
            nonce = secrets.token_hex(8)
            mine = AnswerNote(task_id, record.attempt, asking.checked(value), at, nonce)
            await run.store.send(run_id, answer_note(mine))
            wake(owner)
        elif config.clock.monotonic() >= ends:
            return False
        await _wait_for_news(config, run, task_id, ends)


async def _wait_for_news(config: RunOptions, run: StoredRun, task_id: str, ends: float) -> None:
    """Wait for an event of the task, a change or the death of the owner, or the time `ends`.

    Reads only the run's record and new events: reading a run with thousands of tasks would block the event loop.
    """
    store, run_id, owner, after = run.store, run.record.run_id, run.record.owner, run.record.last_seq
    while owner is not None and config.clock.monotonic() < ends:
        await config.clock.sleep(_LOOK_AGAIN_S)
        now = await store.get_run(run_id)
        if now is None or now.owner != owner or owner_is_gone(now):
            return
        while news := await store.list_events(run_id, after):
            if any(event.task_id == task_id for event in news):
                return
            after = news[-1].seq


def _is_taken(run: StoredRun, mine: AnswerNote) -> bool:
    """Return whether the question has this answer. Raises AnswerConflict if the question has another answer."""
    position = run.state.dag.position(mine.task_id)
    for answered in run.state.answers.get(position, ()):
        if answered.attempt == mine.attempt:
            if (answered.value, answered.by) == (mine.value, "person"):
                return True
            run_id = run.record.run_id
            raise AnswerConflict(f"the question of task {mine.task_id!r} of run {run_id} was answered by {answered.by}")
    return False


async def _outcome(run: StoredRun, task: Task, record: TaskRecord, how: How, text: str, at: str) -> Sequence[Event]:
    text = clean_text(text)
    if how == "again":
        return [TaskAnswered(at, task.id, record.attempt)]
    if how == "fail":
        failed = TaskSkipped if failed_status(task.failure_mode) is TaskStatus.SKIPPED else TaskFailed
        said_by = text or "a person marked the task as failed"
        return [failed(at, task.id, record.attempt, DECLARED_FAILED, said_by)]
    data = None if task.output_schema is None else await _data(task, text)
    position = run.state.dag.position(task.id)
    turn = [Message("assistant", text)]
    asking = run.state.asking.get(position)
    begun = asking is not None and asking.way is Way.REPLY  # the conversation is stored up to the question
    damaged = any(run.tasks[n].damaged for n in run.state.dag.dependencies[position])
    if not begun and not damaged:  # the prompt can be rendered again
        turn.insert(0, Message("user", clean_text(run.state.texts(task).prompt())))
    return [TaskCompleted(at, task.id, record.attempt, text, data, turn=tuple(turn))]


async def _data(task: Task, text: str) -> str:
    try:
        return to_json(await read_answer(Schema(task.output_schema or {}), text))
    except (Mismatch, BackendError) as error:
        raise PlaitError(f"the answer does not fit the output_schema of task {task.id!r}: {error}") from None
