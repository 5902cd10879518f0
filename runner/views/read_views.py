"""A run, its tasks, events and questions read from a store, as views."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import anyio.to_thread

from plait.clock_and_ids import Clock, iso, parse_time
from plait.errors import PlaitError, StoreError
from plait.events import (
    OWN_LIMITS,
    BackendThrottled,
    FolderAwaited,
    HostAway,
    RunResumed,
    TaskPlaced,
)
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import AttemptRecord, RunRecord, TaskRecord
from plait.runner.domain.asked_question import Way, answers_of, asking_of
from plait.runner.domain.run_tuning import Tuning
from plait.runner.domain.wait_reasons import WaitReason, Waits, clock_time, stored_limits
from plait.runner.engine.lease import due_at, liveness, shown_status, wait_for_expiry
from plait.runner.engine.run_options import RunOptions
from plait.runner.policies.goal_policy import Loop, OrchestratorPolicy
from plait.runner.recovery.resume_plan import (
    QUESTION_ANSWERED,
    RUNS,
    Answers,
    ResumeAction,
    ResumeOptions,
    ResumeStep,
    deaths_with,
    decide,
    first_notes,
    longest_delay,
    steps_of_decided,
)
from plait.runner.state.budget import stored_budget
from plait.runner.state.stored_conversations import load_history
from plait.runner.state.stored_run import (
    MOST_RUNS_SEARCHED,
    StoredPolicy,
    StoredRun,
    decode_dag,
    decode_task,
    listed_tasks,
    moved_attempts,
    needs_no_work,
    next_tries,
    placed_attempts,
    read_policy_state,
    read_settings,
    stored_events,
    stored_record,
    stored_run,
    task_not_found,
    tasks_beside,
)
from plait.runner.views.view_models import (
    ANSWERED,
    AnswerView,
    AskedView,
    AttemptView,
    BudgetView,
    EventView,
    LoopView,
    OwnerView,
    Preview,
    QuestionView,
    RunDetail,
    RunView,
    TaskDetail,
    TaskView,
    view_of,
)
from plait.safe_text import is_utf8
from plait.statuses import RUN_DONE, TASK_DONE, TASK_STATUSES, UNDER_WAY, AttemptStatus, RunStatus, TaskStatus
from plait.task import command_text

_LOOKS_A_RECORD = 25
_WAY_OF_BUDGET = f'"way":"{Way.BUDGET.value}"'


def _loop_of(run: RunRecord) -> LoopView | None:
    """Return the loop of a run that plans towards a goal; None for every other run, and if the state is damaged. In a
    list of runs, whose records have no settings, a loop is known once its planner has answered.
    """
    if run.policy_state is None:
        policy = StoredPolicy.of(run) if run.settings else None
        return _loop_view(Loop()) if policy is not None and policy.kind == OrchestratorPolicy.kind else None
    try:
        loop = Loop.found_in(read_policy_state(run.policy_state).state)
    except (ValueError, KeyError, TypeError):
        return None
    return None if loop is None else _loop_view(loop)


def _loop_view(loop: Loop) -> LoopView:
    return view_of(LoopView, loop, ended_by=loop.ended_by)


async def look_up(store: Store, run_id: str, now: float, with_tasks: bool) -> RunDetail:
    """Return the run at Unix time `now`, with its tasks if `with_tasks`. Raises RunNotFound, StoreError."""
    _, record = await stored_record(store, run_id)
    records = await listed_tasks(store, record) if with_tasks else ()
    tasks = await task_views(store, record, records, now) if with_tasks else {}
    return await run_detail(store, record, records, now, tasks)


async def run_detail(
    store: Store,
    run: RunRecord,
    records: Sequence[TaskRecord],
    now: float,
    tasks: Mapping[str, TaskView] = MappingProxyType({}),
) -> RunDetail:
    """Return the run at Unix time `now`, with `tasks`; `records` are those of its tasks. Raises StoreError."""
    throttled = await throttled_backends(store, run, now)
    budget = await budget_view(store, run, records)
    tuned = (await read_tuning(store, run)).in_force
    if shown_status(run) is RunStatus.INTERRUPTED:
        _, run = await stored_record(store, run.run_id)  # the run may have ended since the record was read
    return _of_run(RunDetail, run, tasks=tasks, throttled=throttled, budget=budget, tuned=tuned)


async def budget_view(store: Store, run: RunRecord, tasks: Sequence[TaskRecord]) -> BudgetView | None:
    """Return the money of the run, whose `tasks` may have limits of their own; None without a limit. Raises
    StoreError.
    """
    settings = read_settings(run)
    limited = [decode_task(one) for one in tasks if '"max_cost"' in one.spec]
    budget = await stored_budget(store, run.run_id, settings, limited)
    return None if budget is None else BudgetView.of(budget)


async def read_tuning(store: Store, run: RunRecord) -> Tuning:
    """Return what a person has changed in a run that has not ended."""
    if RunStatus(run.status) in RUN_DONE:
        return Tuning()
    try:
        return Tuning.of(await store.list_notes(run.run_id))
    except StoreError:  # a damaged note: everything else can still be shown
        return Tuning()


async def throttled_backends(store: Store, run: RunRecord, now: float) -> tuple[BackendThrottled, ...]:
    """Return the last event of each backend that is throttled at Unix time `now`; none unless the run is running or
    parked.

    A pause that is over has no `until`. Raises StoreError.
    """
    views = (_at(one, now) for one in (await _throttlings(store, run)).values())
    return tuple(one for one in views if one.until is not None or one.slots < one.total)


async def _throttlings(store: Store, run: RunRecord) -> Mapping[str, BackendThrottled]:
    """Return the last event of each backend of a running or parked run since its last resume; none of any other."""
    return {one.backend: one async for one in _events_of_owner(store, run, BackendThrottled)}


_OfOwner = TypeVar("_OfOwner", BackendThrottled, FolderAwaited, HostAway)
_Run = TypeVar("_Run", bound=RunView)


async def _events_of_owner(store: Store, run: RunRecord, kind: type[_OfOwner]) -> AsyncGenerator[_OfOwner]:
    """Yield the events of a running or parked run since its last resume; none of any other run."""
    if shown_status(run) not in {RunStatus.RUNNING, RunStatus.PARKED}:
        return
    begun = [event.seq for event in await store.list_events(run.run_id, kind=RunResumed.kind)]
    async for event in stored_events(store, run.run_id, kind, max(begun, default=0)):
        yield event


def _at(throttled: BackendThrottled, now: float) -> BackendThrottled:
    over = throttled.until is not None and parse_time(throttled.until) <= now
    return replace(throttled, until=None) if over else throttled


async def task_views(
    store: Store, run: RunRecord, records: Sequence[TaskRecord], now: float, only: str | None = None
) -> dict[str, TaskView]:
    """Return the tasks in `records`, all tasks of `run`, by id; with `only` that task alone. Raises StoreError."""
    tries, find_waits = await read_waits(store, run, records, now)
    chosen = [task for task in records if only in (None, task.task_id)]

    def make_views() -> dict[str, TaskView]:
        waits = find_waits()
        views: dict[str, TaskView] = {}
        for task in chosen:
            reason = None if waits is None else waits.reason(task.task_id)
            next_try = iso(tries[task.task_id]) if task.task_id in tries else None
            views[task.task_id] = task_view(task, next_try, reason)
        return views

    # In a worker thread: thousands of tasks take long to decode, and other runs of this process would stand still.
    return await anyio.to_thread.run_sync(make_views) if records else {}


async def read_waits(
    store: Store, run: RunRecord, records: Sequence[TaskRecord], now: float
) -> tuple[Mapping[str, float], Callable[[], Waits | None]]:
    """Return the times of the next tries by task, and the function that finds why tasks wait, for a worker thread: it
    decodes all tasks. It returns None if every task has ended, or if the stored run is damaged. Raises StoreError.
    """
    tries = await next_tries(store, run.run_id, () if RunStatus(run.status) in RUN_DONE else records)
    throttlings = await _throttlings(store, run)
    away = {one.host: one async for one in _events_of_owner(store, run, HostAway)}
    folders = {one.task_id: one async for one in _events_of_owner(store, run, FolderAwaited)}
    tuning = await read_tuning(store, run)

    def find_waits() -> Waits | None:
        statuses = {task.task_id: TaskStatus(task.status) for task in records}
        if TASK_DONE.issuperset(statuses.values()):
            return None
        try:
            dag = decode_dag(run, tuple(records))
        except StoreError:  # everything else can still be shown
            return None
        return Waits(
            now,
            shown_status(run),
            dag,
            statuses=statuses,
            limits=stored_limits(read_settings(run)),
            throttled={name: _at(one, now) for name, one in throttlings.items()},
            rated=[name for name, one in throttlings.items() if one.cause == OWN_LIMITS],
            retries=tries,
            deadlines={
                one.task_id: None if (asks := _asks(one)) is None else asks.deadline_at
                for one in records
                if one.asked is not None
            },
            owner="" if run.owner is None else run.owner.process,
            away=away,
            asks_for_budget=next((one.task_id for one in records if _WAY_OF_BUDGET in (one.asked or "")), None),
            folders=folders,
            tuning=tuning,
        )

    return tries, find_waits


def run_view(run: RunRecord) -> RunView:
    """Return the run that the record describes, as lists of runs show it."""
    return _of_run(RunView, run)


def _of_run(kind: type[_Run], run: RunRecord, **more: Any) -> _Run:
    status, owner, loop, due = shown_status(run), run.owner, _loop_of(run), due_at(run)
    counts = {TaskStatus(name): number for name, number in run.counts.items()}
    return view_of(
        kind,
        run,
        status=status,
        reason=_reason(run, status, counts.get(TaskStatus.WAITING_INPUT, 0), loop, due),
        owner=owner and view_of(OwnerView, owner, liveness=liveness(owner).value),
        done=sum(counts.get(one, 0) for one in TASK_DONE),
        total=sum(counts.values()),
        counts=counts,
        loop=loop,
        due_at=iso(due) if due and status in _WAIT else None,
        **more,
    )


_WAIT = frozenset({RunStatus.PARKED, RunStatus.WAITING_INPUT})


def _reason(run: RunRecord, status: RunStatus, asking: int, loop: LoopView | None, due: float | None) -> str | None:
    """Return the reason for the status, in a few words; None if the status needs none."""
    asks = None if not asking else "1 task asks a person" if asking == 1 else f"{asking:,} tasks ask a person"
    owner = "" if run.owner is None else f" ({run.owner.process})"
    progress = None if loop is None else loop.description
    reasons = {
        RunStatus.QUEUED: "no process has started the run",
        RunStatus.INTERRUPTED: f"owner dead{owner}; resume the run",
        RunStatus.PARKED: f"everything waits until {clock_time(due or 0.0, 0.0)}; `plait wake` continues the run then",
        RunStatus.CANCELLING: "running attempts may end by themselves for a grace time",
        RunStatus.RUNNING: asks or progress,
        RunStatus.COMPLETED: progress,
        RunStatus.WAITING_INPUT: asks or ANSWERED,
        RunStatus.FAILED: run.error,
    }
    return reasons.get(status)


def _called(spec: Mapping[str, Any]) -> str:
    """Return what a task does that calls a plan, in words; empty for another task."""
    if "call" not in spec:
        return ""
    call = spec["call"]
    until = "" if call["until"] is None else f", at most {call['max']} times, until {call['until']}"
    return f"the tasks {', '.join(part['id'] for part in call['tasks'])}{until}"


def task_view(task: TaskRecord, next_try_at: str | None = None, waits: WaitReason | None = None) -> TaskView:
    """Return the task that the record describes."""
    spec = json.loads(task.spec)
    return view_of(
        TaskView,
        task,
        status=TaskStatus(task.status),
        model=task.usage.model,
        prompt=command_text(spec["run"], task.prompt) if "run" in spec else _called(spec) or task.prompt,
        attempts=task.attempt,
        data=None if task.data is None else json.loads(task.data),
        next_try_at=next_try_at,
        waits=waits,
        asks=_asks(task),
        answers=_answers(task),
        spec=spec,
    )


def _asks(task: TaskRecord) -> AskedView | None:
    if task.question is None or task.asked is None:
        return None
    try:
        return AskedView.of(asking_of(task.question, task.asked))
    except (ValueError, KeyError, TypeError):  # damaged: the text of the question alone is better than nothing
        return None


def _answers(task: TaskRecord) -> tuple[AnswerView, ...]:
    try:
        return tuple([view_of(AnswerView, one) for one in answers_of(task.answers)])
    except (ValueError, KeyError, TypeError):  # damaged
        return ()


async def find_task(store: Store, run: RunRecord, task_id: str) -> TaskRecord:
    """Return the task of the run with the id `task_id`. Raises TaskNotFound, StoreError."""
    for task in await store.list_tasks(run.run_id, task_id) if is_utf8(task_id) else ():
        return task
    raise task_not_found(run.run_id, task_id, [task.task_id for task in await listed_tasks(store, run)])


async def task_detail(store: Store, run: RunRecord, task_id: str, now: float) -> TaskDetail:
    """Return the task of `run` at Unix time `now`. Raises TaskNotFound, StoreError."""
    task, messages = await find_task(store, run, task_id), await store.list_messages(run.run_id, task_id)
    # The reason for which a task waits depends on the other tasks.
    records = [task] if TaskStatus(task.status) in TASK_DONE else await tasks_beside(store, run, task)
    shown = (await task_views(store, run, records, now, only=task.task_id))[task.task_id]
    attempts = await store.list_attempts(run.run_id, task.task_id)
    placed = await placed_attempts(store, run.run_id)
    moved = await moved_attempts(store, run, task.task_id)
    views = [_attempt_view(one, placed.get((one.task_id, one.attempt)), moved.get(one.attempt)) for one in attempts]
    return view_of(TaskDetail, shown, run_id=run.run_id, messages=tuple(messages), history=tuple(views))


def _attempt_view(attempt: AttemptRecord, placed: TaskPlaced | None, moved_from: str | None) -> AttemptView:
    return view_of(
        AttemptView,
        attempt,
        status=AttemptStatus(attempt.status),
        model=attempt.usage.model,
        place=None if placed is None else placed.place,
        moved_from=moved_from,
    )


async def rendered_prompt(store: Store, run_id: str, task_id: str) -> str | None:
    """Return the prompt of a task that has no stored message yet; None while the prompt cannot be rendered."""
    run = await stored_run(store, run_id)
    try:
        return run.state.texts(run.state.dag[task_id]).prompt()
    except PlaitError:  # a dependency has no result yet
        return None


async def history(store: Store, run_id: str, after: int, clock: Clock, poll: float) -> AsyncGenerator[EventView]:
    """Yield the stored events numbered above `after`, and until the end of the run also new events, polled every `poll`
    s.

    Raises RunNotFound, StoreError.
    """
    ended, looks = False, 0
    while not ended:
        if looks % _LOOKS_A_RECORD == 0:
            # Read the record before the events: if the run had ended by then, its last event is among the events read
            # next. Not every time, because the record's query counts the tasks, while a query without new events costs
            # almost nothing.
            _, run = await stored_record(store, run_id)
            ended = RunStatus(run.status) in RUN_DONE
        looks += 1
        while records := await store.list_events(run_id, after):
            for record in records:
                event = view_of(EventView, record, detail=json.loads(record.detail))
                after = event.seq
                if event.task_id is None:  # a person's message to a task does not reopen an ended run
                    ended = event.is_last
                yield event
        if not ended:
            await clock.sleep(poll)


async def find_runs(
    store: Store,
    limit: int,
    *,
    offset: int = 0,
    statuses: Collection[RunStatus] = (),
    name: str | None = None,
    search: str = "",
    searched: int = MOST_RUNS_SEARCHED,
) -> Sequence[RunRecord]:
    """Return the newest runs, at most `limit` after the first `offset`, as `Runs.list` chooses them, among the newest
    `searched`. Raises StoreError.
    """
    text, end = search.casefold(), offset + limit
    chooses = bool(statuses or text or name is not None)

    def fits(run: RunRecord) -> bool:
        return (
            (not statuses or shown_status(run) in statuses)
            and name in {None, run.name}
            and (text in run.name.casefold() or text in run.run_id.casefold())
        )

    many = end
    while True:  # the shown status is not a column of the store: larger and larger pages are read
        records = await store.list_runs(min(many, searched) if chooses else end)
        fitting = [run for run in records if fits(run)]
        if not chooses or len(fitting) >= end or len(records) < many:
            return fitting[offset:end]
        many *= 4


def waiting_tasks(run: StoredRun) -> list[QuestionView]:
    """Return the tasks of the run that wait for a person, in the order of the DAG, except those whose answer is stored
    already.
    """
    noted = first_notes(run)
    task_ids = {run.tasks[position].task_id for position in run.state.asking} - noted.keys()
    return [
        question_view(run.record, task, task.question or "", _asks(task) if task.task_id in task_ids else None)
        for task in run.tasks
        if TaskStatus(task.status) is TaskStatus.WAITING_INPUT and (task.asked is None or task.task_id in task_ids)
    ]


def question_view(run: RunRecord, task: TaskRecord, question: str, asks: AskedView | None = None) -> QuestionView:
    """Return the view of a task that waits for a person."""
    names = {"run_id": run.run_id, "run_name": run.name}
    return view_of(QuestionView, task, **names, question=question, since=task.started_at, asks=asks)


_DEFAULTED = "no answer by the deadline, so the default answer is used"
_CHARACTERS_A_TOKEN = 4
"""The usual rate of tokenizers for English text. An estimate: exact counts need a call of the model."""


async def preview_resume(options: RunOptions, run: StoredRun, retry_failed: bool) -> Preview:
    """Return what a resume does with each task: see `Runs.preview`. Raises as `wait_for_expiry` and `decide`, and
    StoreError if a conversation that is to be repeated cannot be read.
    """
    if not needs_no_work(run, retry_failed):
        await wait_for_expiry(options, run)
    plan = await decide(options, run, ResumeOptions(retry_failed=retry_failed))
    run, steps = plan.run, list(plan.steps)
    if plan.decided.end is not None and not plan.cancelled:
        steps = steps_of_decided(steps, fails=plan.decided.end is RunStatus.FAILED)
    for position, (record, step) in enumerate(zip(run.tasks, steps, strict=True)):
        reason = step.reason
        if _is_defaulted(run, step, plan.answers):
            reason = reason.replace(QUESTION_ANSWERED, _DEFAULTED)
        if position in plan.later and step.action in RUNS:
            reason += f"; not before {iso(plan.later[position])}"
        if TASK_STATUSES[record.status] is TaskStatus.RUNNING and step.action in RUNS and plan.died:
            reason += f"; starts within {longest_delay(deaths_with(record)):g} s"
        steps[position] = replace(step, reason=reason)
        if step.possibly_billed_twice:
            steps[position] = await _with_input_tokens(run, steps[position])
    status = shown_status(run.record)
    status = RunStatus.INTERRUPTED if status in UNDER_WAY else status
    damaged = tuple(
        task.task_id for task, step in zip(run.tasks, steps, strict=True) if task.damaged and step.action not in RUNS
    )
    to_run = [step for step in steps if step.action in RUNS]
    repeats = [step for step in to_run if step.possibly_billed_twice]
    return Preview(
        run_id=run.record.run_id,
        status=status,
        ended=plan.ended,
        damaged=damaged,
        runs=len(to_run),
        adopted=sum(step.action is ResumeAction.ADOPT for step in steps),
        possibly_billed_twice=len(repeats),
        repeated_input_tokens=sum(step.input_tokens for step in repeats),
        tasks={step.task_id: step for step in steps},
    )


def _is_defaulted(run: StoredRun, step: ResumeStep, answers: Answers) -> bool:
    """Return whether the last question of the task is answered by its default."""
    answer = answers.get(step.task_id)
    before = run.state.answers.get(run.state.dag.position(step.task_id), ())
    return (answer.by if answer is not None else before[-1].by if before else None) == "default"


async def _with_input_tokens(run: StoredRun, step: ResumeStep) -> ResumeStep:
    task = run.state.dag[step.task_id]
    try:
        characters = len(run.state.texts(task).prompt())
        if task.continues is not None and run.state.is_completed(task.continues):
            history = await load_history(run.store, run.record.run_id, run.state, task.continues)
            characters += sum(len(message.content) for message in history.messages)
    except StoreError:
        raise
    except PlaitError:  # an unreadable prompt or conversation costs nothing
        return step
    return replace(step, input_tokens=-(-characters // _CHARACTERS_A_TOKEN))
