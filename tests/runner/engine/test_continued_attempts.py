"""Attempts whose failure left their session whole: the next one takes it up, also in a later process, in its time."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task, TaskStatus, events
from plait.backends import ConversationRequest, Question, Reply
from plait.errors import BackendError, ErrorKind
from plait.persistence import SQLiteStore, Store
from plait.persistence.store_records import TaskRecord
from plait.results import ResumeAction
from plait.runner.engine.attempt import INTERRUPTED
from tests.support.fakes import Answer, QuickClock, Talker
from tests.support.plans.logged import make
from tests.support.processes.command import plait_here
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

HOURS = 5 * 3600.0
LIMIT = BackendError(ErrorKind.RATE_LIMITED, "usage limit reached", retry_after=HOURS, continues_session=True)
RESET = BackendError(ErrorKind.TRANSIENT, "reset")
WORK = DAG([Task("a", prompt="work", retry=Retry(attempts=3, base_delay=0.5))])


def failing(*errors: BackendError, then: Answer | None = None) -> Talker:
    """Fails so, one error a turn; then answers."""
    left = list(errors)

    def answer(prompt: str, request: ConversationRequest) -> str | Reply | Exception:
        if left:
            return left.pop(0)
        return f"re: {prompt}" if then is None else then(prompt, request)

    return Talker(answer)


def seen(backend: Talker) -> list[tuple[str, str | None, bool, bool]]:
    """The prompt of each turn, its session, and whether that was resumed and the turn taken up."""
    return [
        (prompt, one.session_id, one.resume, one.resumes_interrupted)
        for prompt, one in zip(backend.prompts, backend.requests, strict=True)
    ]


async def test_the_next_attempt_goes_on_in_the_same_session(store: Store) -> None:
    backend, clock = failing(LIMIT, LIMIT), QuickClock()
    async with ParallelRunner(backend, store=store, clock=clock).start(WORK, "r") as run:
        told = [event async for event in run.events()]
    assert (await run.result()).text["a"] == f"re: {INTERRUPTED}"
    again = (INTERRUPTED, "session-1", True, True)
    assert seen(backend) == [("work", "session-1", False, False), again, again]
    retrying = [event for event in told if isinstance(event, events.TaskRetried)]
    assert [event.continues_session for event in retrying] == [True, True]
    assert [event.confirmed for event in told if isinstance(event, events.TaskStarted)] == [False, True, True]
    said = [(m.attempt, m.role, m.content) for m in await store.list_messages("r", "a")]
    assert said == [(3, "user", "work"), (3, "user", INTERRUPTED), (3, "assistant", f"re: {INTERRUPTED}")]


async def test_others_start_over(store: Store) -> None:
    backend = failing(RESET, LIMIT, RESET)
    dag = DAG([Task("a", prompt="work", retry=Retry(attempts=4))])
    await ParallelRunner(backend, store=store, clock=QuickClock()).run(dag)
    new = [("work", f"session-{number}", False, False) for number in (1, 2, 3)]
    assert seen(backend) == [*new[:2], (INTERRUPTED, "session-2", True, True), new[2]]


async def test_where_no_session_is_known_there_is_none_to_take_up(store: Store) -> None:
    class Early(Talker):
        """Fails before it has a session."""

        def open(self, request: ConversationRequest):
            talk = super().open(request)
            if len(self.requests) == 1:
                raise LIMIT
            return talk

    early = Early(own_ids=True)
    await ParallelRunner(early, store=store, clock=QuickClock()).run(WORK)
    assert [(one.session_id, one.resume) for one in early.requests] == [(None, False), (None, False)]


async def test_a_session_that_is_gone_by_then_is_no_failure_of_the_task(store: Store) -> None:
    lost = BackendError(ErrorKind.SESSION_LOST, "no such session")
    backend = failing(LIMIT, lost, RESET)
    result = await ParallelRunner(backend, store=store, clock=QuickClock()).run(WORK)
    assert result.status is RunStatus.COMPLETED
    assert [prompt for prompt, *_ in seen(backend)] == ["work", INTERRUPTED, "work", "work"]


async def test_an_answer_is_taken_up_with_all_that_was_said_before(store: Store) -> None:
    asks = Reply("Where?", session_id="session-1", question=Question("Where?"))

    def answer(prompt: str, request: ConversationRequest) -> str | Reply | Exception:
        if prompt == "work":
            return asks
        return LIMIT if request.answer is not None else f"re: {prompt}"

    backend, clock = Talker(answer), QuickClock()
    runner = ParallelRunner(backend, store=store, clock=clock)
    await runner.run(WORK, "r")
    await runner.resume("r", answers={"a": "Rome"})
    assert [prompt for prompt, *_ in seen(backend)] == ["work", "Rome", INTERRUPTED]
    last = backend.requests[-1]
    assert [message.content for message in last.history] == ["work", "Where?"]
    assert (last.session_id, last.answer, last.resumes_interrupted) == ("session-1", None, True)
    said = [m.content for m in await store.list_messages("r", "a")]
    assert said == ["work", "Where?", "Rome", INTERRUPTED, f"re: {INTERRUPTED}"]


async def test_a_correction_is_taken_up_with_what_it_corrects(store: Store) -> None:
    replies: list[str | BackendError] = ["no tasks at all", LIMIT, "[]"]
    backend = Talker(lambda *_: replies.pop(0))
    plan = DAG([Task("plan", prompt="plan", adds_tasks=True, retry=Retry(attempts=3))])
    assert (await ParallelRunner(backend, store=store, clock=QuickClock()).run(plan, "r")).status is RunStatus.COMPLETED
    assert {session_id for _, session_id, *_ in seen(backend)} == {"session-1"}
    wrong = backend.prompts[1]
    assert "cannot be added" in wrong
    assert backend.prompts[2] == INTERRUPTED
    last = [(m.role, m.content) for m in await store.list_messages("r", "plan") if m.attempt == 3]
    assert last == [
        ("user", "plan"),
        ("assistant", "no tasks at all"),
        ("user", wrong),
        ("user", INTERRUPTED),
        ("assistant", "[]"),
    ]


async def died_while_it_waited(store: Store, error: BackendError, clock: QuickClock) -> None:
    """Leave run "r" as a process leaves it that dies while its task waits for the next attempt."""
    dead = False
    dying = FaultyStore(store, on_write(lambda _: Fault.BEFORE if dead else None))

    class Patient(QuickClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(10.0 if seconds >= 1.0 else seconds)

    patient = Patient()
    patient.now = clock.now
    async with ParallelRunner(failing(error), store=dying, clock=patient).start(WORK, "r") as run:
        async for event in run.events():
            if isinstance(event, events.TaskRetried):
                dead = True
                run.stop()


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_crash_in_the_meantime_changes_nothing(goes_on: bool, store: Store) -> None:
    clock = QuickClock()
    error = BackendError(ErrorKind.RATE_LIMITED, "usage limit reached", retry_after=HOURS, continues_session=goes_on)
    await died_while_it_waited(store, error, clock)
    record = (await store.list_tasks("r"))[0]
    assert (TaskStatus(record.status), record.session_confirmed) == (TaskStatus.PENDING, goes_on)
    clock.now += 3600
    backend = Talker()
    backend.made = 1
    runner = ParallelRunner(backend, store=store, clock=clock)
    step = (await runner.runs.preview("r")).tasks["a"]
    assert step.action is (ResumeAction.CONTINUE if goes_on else ResumeAction.START_OVER)
    assert not step.possibly_billed_twice
    assert "; not before 2027-01-15T1" in step.reason
    async with runner.start_resume("r") as run:
        told = [event async for event in run.events()]
    assert (await run.result()).status is RunStatus.COMPLETED
    again = (INTERRUPTED, "session-1", True, True) if goes_on else ("work", "session-2", False, False)
    assert seen(backend) == [again]
    (retrying,) = (event for event in told if isinstance(event, events.TaskRetried))
    assert (retrying.continues_session, retrying.error) == (goes_on, "usage limit reached")
    # What is left of five hours, and of the half second at most by which they were stretched.
    assert HOURS - 3600 <= retrying.delay_s <= HOURS - 3600 + 0.5
    # The task and its backend wait for the same time, in steps of a minute.
    assert -0.002 <= sum(clock.slept) - retrying.delay_s <= 60.002
    assert len(await store.list_messages("r", "a")) == (3 if goes_on else 2)


async def test_the_time_of_the_next_attempt_may_have_come_by_then(store: Store) -> None:
    clock = QuickClock()
    await died_while_it_waited(store, LIMIT, clock)
    clock.now += HOURS + 60
    assert (await ParallelRunner(Talker(), store=store, clock=clock).resume("r")).status is RunStatus.COMPLETED
    assert clock.slept == []


async def test_the_time_of_the_next_attempt_may_come_while_the_resume_takes_the_run(store: Store) -> None:
    """A case of `make crashtest`:

    kills-1-txn.before_commit:6-events.published:3-events.published:1-txn.before_commit:3-txn.after_commit:3
    """
    clock = QuickClock()
    await died_while_it_waited(store, LIMIT, clock)

    def passes(_number: int) -> None:
        clock.now += HOURS + 60

    slow = FaultyStore(store, on_write(passes))
    assert (await ParallelRunner(Talker(), store=slow, clock=clock).resume("r")).status is RunStatus.COMPLETED
    assert {*clock.slept} == {0.0}


async def test_hours_and_weeks_are_waited_for(store: Store) -> None:
    for wait in (HOURS, 7 * 86_400.0, 31 * 86_400.0):
        clock = QuickClock()
        limit = BackendError(ErrorKind.RATE_LIMITED, "limit reached", retry_after=wait, continues_session=True)
        async with ParallelRunner(failing(limit), store=store, clock=clock).start(WORK) as run:
            (retrying,) = [event async for event in run.events() if isinstance(event, events.TaskRetried)]
            assert (await run.result()).status is RunStatus.COMPLETED
        assert wait <= retrying.delay_s <= wait + 0.5
        assert sum(clock.slept) > wait - 0.1, "a minute at a time"


def test_a_person_sees_when_it_goes_on(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: one}\n")
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0  # so that there is a store

    async def leave_a_run() -> TaskRecord:
        async with SQLiteStore(tmp_path / ".plait" / "plait.db", mode="existing") as store:
            await died_while_it_waited(store, LIMIT, QuickClock())
            return (await store.list_tasks("r"))[0]

    ends = datetime.fromisoformat(anyio.run(leave_a_run).ended_at or "").timestamp() + HOURS
    shown = plait_here(tmp_path, "show", "r").out
    line = next(line for line in shown.splitlines() if line.startswith("a "))
    said, _, at = line.rpartition("; retry at ")
    assert said.endswith("rate_limited: usage limit reached")
    assert shown.count("owner dead") == 1, "for the whole run, above its tasks"
    (task,) = plait_here(tmp_path, "show", "r", "--json").value["tasks"]
    next_try = datetime.fromisoformat(task["next_try_at"])
    assert ends <= next_try.timestamp() <= ends + 1
    assert datetime.fromisoformat(task["waits"]["until"]) == next_try
    assert at.endswith(f"{next_try.astimezone():%H:%M}") or f"{next_try.astimezone():%H:%M:%S}" == at
    assert '"continues_session": true' in plait_here(tmp_path, "log", "r", "--json").out


async def test_a_clock_that_was_put_back_makes_nobody_wait_longer_than_was_said(store: Store) -> None:
    clock = QuickClock()
    await died_while_it_waited(store, LIMIT, clock)
    clock.now -= 10 * HOURS
    async with ParallelRunner(Talker(), store=store, clock=clock).start_resume("r") as run:
        told = [event async for event in run.events()]
    (retrying,) = (event for event in told if isinstance(event, events.TaskRetried))
    assert HOURS <= retrying.delay_s <= HOURS + 0.5
    assert (await run.result()).status is RunStatus.COMPLETED
