"""Tasks that were under way when their process died: continued, started over later, or asked about."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from plait import DAG, ParallelRunner, PlaitError, RunStatus, Task, TaskStatus, events
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import BackendError, ErrorKind, OwnershipLost, StoreError
from plait.events import TaskPlaced
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store
from plait.results import ResumeAction
from plait.runner.engine.attempt import INTERRUPTED
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker
from tests.support.hosts import functions
from tests.support.hosts.world import HostFolder
from tests.support.stores.database import attempts_of
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

WORK = DAG([Task("a", prompt="first"), Task("b", prompt="then {{ a }}", depends_on=["a"])])


def hangs_on(*words: str):
    return lambda prompt: prompt.startswith(words)


async def test_a_confirmed_conversation_goes_on(store: Store) -> None:
    await die(store, Dying(hangs_on("then"), hangs_on("then")), WORK)
    session_id = (await store.list_tasks("r"))[1].session_id
    backend = Talker()
    result = await ParallelRunner(backend, store=store).resume("r")
    assert backend.prompts == [INTERRUPTED]
    assert [(o.session_id, o.resume, o.idempotency_key) for o in backend.requests] == [(session_id, True, "r:b")]
    assert result.resume_summary is not None
    assert (result.resume_summary.reused, result.resume_summary.ran, result.resume_summary.repeated) == (1, 1, 1)
    said = [(m.role, m.content) for m in await store.list_messages("r", "b")]
    assert said == [("user", "then re: first"), ("user", INTERRUPTED), ("assistant", f"re: {INTERRUPTED}")]


async def test_a_session_that_was_only_chosen_is_not_gone_on_with(store: Store) -> None:
    await die(store, Dying(hangs_on("then")), WORK)
    backend = Talker()
    result = await ParallelRunner(backend, store=store).resume("r")
    assert (backend.prompts, [o.resume for o in backend.requests]) == (["then re: first"], [False])
    assert result["b"].attempts == 2


async def test_a_conversation_cut_twice_is_still_the_same_one(store: Store) -> None:
    await die(store, Dying(hangs_on("then"), hangs_on("then")), WORK)
    await die(store, Dying(lambda _: True))
    backend = Talker()
    await ParallelRunner(backend, store=store).resume("r")
    assert backend.prompts == [INTERRUPTED]
    assert len({attempt.session_id for attempt in await store.list_attempts("r", "b")}) == 1


async def test_a_stop_is_no_crash_and_the_conversation_still_goes_on(store: Store) -> None:
    backend = Dying(hangs_on("then"), hangs_on("then"))
    async with ParallelRunner(backend, store=store).start(WORK, "r") as run:
        async for event in run.events():
            if event.kind == "session_opened":
                run.stop()
    record = (await store.list_tasks("r"))[1]
    assert (record.status, record.crashes, record.session_confirmed) == ("pending", 0, True)
    again = Talker()
    await ParallelRunner(again, store=store).resume("r")
    assert again.prompts == [INTERRUPTED]


async def test_a_session_that_is_gone_starts_over(store: Store) -> None:
    await die(store, Dying(hangs_on("then"), hangs_on("then")), WORK)
    lost = BackendError(ErrorKind.SESSION_LOST, "no such session")
    backend = Talker(lambda prompt, request: lost if request.resume else f"re: {prompt}")
    result = await ParallelRunner(backend, store=store).resume("r")
    assert result.status is RunStatus.COMPLETED
    assert backend.prompts == [INTERRUPTED, "then re: first"]


ONCE = DAG(
    [
        Task("pay", prompt="pay", at_most_once=True),
        Task("tell", prompt="paid: {{ pay }}", depends_on=["pay"]),
        Task("other", prompt="other"),
    ]
)


async def test_at_most_once_waits_for_a_person_and_the_rest_goes_on(store: Store) -> None:
    await die(store, Dying(hangs_on("pay", "other")), ONCE)
    backend = Talker()
    runner = ParallelRunner(backend, store=store)
    preview = await runner.runs.preview("r")
    assert {k: v.action for k, v in preview.tasks.items()} == {
        "pay": ResumeAction.ASK,
        "tell": ResumeAction.BLOCKED,
        "other": ResumeAction.START_OVER,
    }
    result = await runner.resume("r")
    assert (result.status, result.waiting, backend.prompts) == (RunStatus.WAITING_INPUT, ("pay",), ["other"])
    assert "at_most_once" in (result["pay"].question or "")
    record = await store.get_run("r")
    assert record is not None
    assert (record.status, record.owner) == ("waiting_input", None)


@pytest.mark.parametrize(
    ("how", "text", "prompts", "status"),
    [
        ("done", "receipt 7", ["paid: receipt 7"], RunStatus.COMPLETED),
        ("again", "", ["pay", "paid: re: pay"], RunStatus.COMPLETED),
        ("fail", "the bank was closed", [], RunStatus.FAILED),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
async def test_answers(store: Store, how, text, prompts, status, resumed: bool) -> None:
    await die(store, Dying(hangs_on("pay")), ONCE)
    backend = Talker()
    runner = ParallelRunner(backend, store=store)
    if resumed:
        await runner.resume("r")
    await runner.runs.settle("r", "pay", how, text)
    with pytest.raises(PlaitError, match="does not wait for an answer"):
        await runner.runs.settle("r", "pay", how, text)
    result = await runner.resume("r")
    assert (result.status, backend.prompts) == (status, prompts)
    if how == "fail":
        assert (result["pay"].error_kind, result["pay"].error) == ("declared_failed", text)
    if how == "done":
        said = [(m.role, m.content) for m in await store.list_messages("r", "pay")]
        assert said == [("user", "pay"), ("assistant", text)]


async def test_an_answer_has_to_fit_the_schema(store: Store) -> None:
    schema = {"type": "object", "required": ["id"]}
    dag = DAG([Task("pay", prompt="pay", at_most_once=True, output_schema=schema)])
    await die(store, Dying(hangs_on("pay")), dag)
    runner = ParallelRunner(Talker(), store=store)
    for text in ("nothing", "{}"):
        with pytest.raises(PlaitError, match="does not fit the output_schema of task 'pay'"):
            await runner.runs.settle("r", "pay", "done", text)
    await runner.runs.settle("r", "pay", "done", '{"id": 7}')
    assert (await runner.resume("r"))["pay"].data == {"id": 7}


async def test_a_task_is_settled_in_one_of_three_ways_and_no_other() -> None:
    with pytest.raises(ValueError, match="'done', 'again' or 'fail', not 'failed'"):
        await ParallelRunner(Talker(), store=MemoryStore()).runs.settle("r", "pay", "failed", "declined")  # type: ignore[arg-type]


async def test_at_most_once_is_neither_retried_nor_lost_at_a_stop(store: Store) -> None:
    reset = BackendError(ErrorKind.TRANSIENT, "reset")
    failed = await ParallelRunner(Talker(lambda *_: reset), store=store).run(ONCE, "f")
    assert failed["pay"].attempts == 1
    backend = Dying(hangs_on("pay"))
    async with ParallelRunner(backend, store=store).start(ONCE, "r") as run:
        async for event in run.events():
            if event.kind == "task_completed":
                run.stop()
    assert (await store.list_tasks("r"))[0].status == "waiting_input"
    assert (await store.list_tasks("r"))[0].crashes == 0


async def test_at_most_once_is_not_begun_while_its_start_cannot_be_written_down() -> None:
    backend = Talker()
    store = FaultyStore(MemoryStore(), on_write(lambda n: Fault.BEFORE if n > 1 else None))
    result = await ParallelRunner(backend, store=store, clock=QuickClock()).run(ONCE)
    assert (result["pay"].status, backend.prompts) == (TaskStatus.FAILED, ["other"])
    assert "the store does not answer" in (result["pay"].error or "")
    assert (await ParallelRunner(backend).run(ONCE)).status is RunStatus.COMPLETED  # nothing to resume, nothing to ask


CRASHER = DAG(
    [
        Task("bad", prompt="bad"),
        Task("long", prompt="long"),
        Task("after", prompt="after {{ bad }}", depends_on=["bad"]),
        Task("good", prompt="good {{ long }}", depends_on=["long"]),
    ]
)


class Longest(random.Random):
    """Draws the longest delays."""

    def uniform(self, a: float, b: float) -> float:
        return b


async def die_often(store: Store, times: int, *, beside: tuple[str, ...] = (), dag: DAG | None = CRASHER) -> None:
    for _ in range(times):
        assert not await die(store, Dying(hangs_on("bad", *beside)), dag)
        dag = None


@pytest.mark.parametrize("how", ["again", "fail"])
async def test_after_ten_deaths_a_person_is_asked(store: Store, how: Literal["again", "fail"]) -> None:
    await die_often(store, 1, beside=("long",))
    await die_often(store, 8, dag=None)
    assert (await ParallelRunner(Talker(), store=store).runs.preview("r")).tasks["bad"].action is not ResumeAction.ASK
    await die_often(store, 1, dag=None)
    backend = Talker()
    runner = ParallelRunner(backend, store=store)
    assert (await runner.runs.preview("r")).tasks["bad"].action is ResumeAction.ASK
    result = await runner.resume("r")
    assert (result.status, result.waiting, result["good"].status) == (
        RunStatus.WAITING_INPUT,
        ("bad",),
        TaskStatus.COMPLETED,
    )
    assert "died 10 times during this task" in (result["bad"].question or "")
    assert [task.crashes for task in await store.list_tasks("r")][:2] == [10, 1]
    await runner.runs.settle("r", "bad", how, "it kills")
    result = await runner.resume("r")
    if how == "again":
        assert (result.status, backend.prompts[-2:]) == (RunStatus.COMPLETED, ["bad", "after re: bad"])
    else:
        assert (result.status, result["bad"].error, result.blocked) == (RunStatus.FAILED, "it kills", ("after",))


async def test_a_person_may_answer_before_any_resume(store: Store) -> None:
    await die_often(store, 10)
    runner = ParallelRunner(Talker(), store=store)
    await runner.runs.settle("r", "bad", "again")
    assert (await store.list_tasks("r"))[0].crashes == 10
    assert (await runner.resume("r")).status is RunStatus.COMPLETED


async def test_after_an_answer_ten_further_deaths_ask_again(store: Store) -> None:
    await die_often(store, 10)
    await ParallelRunner(Talker(), store=store).runs.settle("r", "bad", "again")
    await die_often(store, 1, dag=None)
    runner = ParallelRunner(Talker(), store=store, clock=QuickClock())
    assert (await runner.runs.preview("r")).tasks["bad"].reason.endswith("; starts within 2 s")
    await die_often(store, 9, dag=None)
    assert (await runner.resume("r")).waiting == ("bad",)


async def test_the_delay_doubles_with_each_death_up_to_a_minute(store: Store) -> None:
    dag: DAG | None = DAG([Task("bad", prompt="bad"), Task("other", prompt="other")])
    foretold: list[str] = []
    for _ in range(9):
        await die_often(store, 1, dag=dag)
        dag = None
        step = (await ParallelRunner(Talker(), store=store).runs.preview("r")).tasks["bad"]
        foretold.append(step.reason.partition("; starts within ")[2])
    assert foretold == ["2 s", "4 s", "8 s", "16 s", "32 s", "60 s", "60 s", "60 s", "60 s"]
    clock = QuickClock()
    result = await ParallelRunner(Talker(), store=store, clock=clock, rng=Longest()).resume("r")
    assert result.status is RunStatus.COMPLETED
    assert max(clock.slept) == pytest.approx(60, abs=0.1)


async def test_only_the_tasks_under_way_wait(store: Store) -> None:
    await die_often(store, 1)
    began: dict[str, float] = {}
    clock = QuickClock()

    def answer(prompt: str, request: ConversationRequest) -> str:
        began[prompt] = clock.monotonic()
        return f"re: {prompt}"

    first = clock.monotonic()
    await ParallelRunner(Talker(answer), store=store, clock=clock, rng=Longest()).resume("r")
    assert began["bad"] - first == 2.0


async def test_a_stop_during_the_delay_does_not_shorten_it(store: Store) -> None:
    await die_often(store, 5)
    async with ParallelRunner(Talker(), store=store, rng=Longest()).start_resume("r") as run:
        async for event in run.events():
            if event.kind == "task_interrupted":
                run.stop()
    clock = QuickClock()
    clock.now = time.time()
    [record, *_] = await store.list_tasks("r")
    assert (record.status, record.crashes, record.attempt) == ("pending", 5, 5)
    runner = ParallelRunner(Talker(), store=store, clock=clock)
    assert "not before" in (await runner.runs.preview("r")).tasks["bad"].reason
    async with runner.start_resume("r") as run:
        told = [event async for event in run.events() if isinstance(event, events.TaskInterrupted)]
    assert [event.task_id for event in told] == ["bad"]
    assert max(clock.slept) == pytest.approx(told[0].delay_s, abs=0.1) == pytest.approx(32, abs=2)
    assert (await store.list_tasks("r"))[0].crashes == 5


async def test_a_lost_lease_is_no_death(store: Store) -> None:
    backend = Dying(hangs_on("bad"))
    async with ParallelRunner(backend, store=store).start(DAG([Task("bad", prompt="bad")]), "r") as run:
        async for event in run.events():
            if event.kind == "task_started":
                break
        result = await ParallelRunner(Talker(), store=store, clock=QuickClock(), lease=6).resume("r")
        run.stop()
        with pytest.raises(OwnershipLost):
            await run.result()
    assert (result.status, (await store.list_tasks("r"))[0].crashes) == (RunStatus.COMPLETED, 0)


async def test_a_passing_failure_of_the_store_only_delays_at_most_once() -> None:
    store = FaultyStore(MemoryStore(), on_write(lambda n: Fault.BEFORE if n == 2 else None))
    dag = DAG([Task("a", prompt="one"), Task("pay", prompt="pay", depends_on=["a"], at_most_once=True)])
    backend = Talker()
    result = await ParallelRunner(backend, store=store).run(dag, "r")
    assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["one", "pay"])


async def test_a_passing_failure_of_the_store_only_delays_at_most_once_on_a_host(tmp_path: Path) -> None:
    class Failing(FaultyStore):
        """Fails to store the first place of an attempt."""

        has_failed = False

        async def write(self, batch: Batch) -> None:
            if not self.has_failed and any(isinstance(change, TaskPlaced) for change in batch.events):
                self.has_failed = True
                raise StoreError("away")
            await super().write(batch)

    store, file = Failing(MemoryStore()), tmp_path / "file"
    file.touch()
    runner = ParallelRunner(HostFolder(tmp_path / "hosts").hosts("m1").placed(functions.until_file), store=store)
    result = await runner.run(DAG([Task("pay", prompt=str(file), at_most_once=True)]), "r")
    assert (store.has_failed, result["pay"].status, result["pay"].attempts) == (True, TaskStatus.COMPLETED, 1)
    assert len((tmp_path / "file.begun").read_text().split()) == 1


async def test_a_task_that_was_never_called_is_not_asked_about() -> None:
    inner, backend = MemoryStore(), Talker()

    class Stopping(FaultyStore):
        async def write(self, batch: Batch) -> None:
            await super().write(batch)
            if self.writes == 2:
                run.stop()  # its start is stored, and it is not called yet

    runner = ParallelRunner(backend, store=Stopping(inner))
    async with runner.start(DAG([Task("pay", prompt="pay", at_most_once=True)]), "r") as run:
        pass
    assert (backend.prompts, (await inner.list_tasks("r"))[0].status) == ([], "pending")


async def test_what_nobody_can_know_any_more_is_not_stored_as_asked(tmp_path) -> None:
    path = tmp_path / "p.db"
    dag = DAG([Task("a", prompt="one"), Task("pay", prompt="pay {{ a }}", depends_on=["a"], at_most_once=True)])
    async with SQLiteStore(path) as store:
        await die(store, Dying(hangs_on("pay")), dag)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(attempts_of("a", "text = 'tampered'"))
    async with SQLiteStore(path, mode="existing") as store:
        await ParallelRunner(Talker(), store=store).runs.settle("r", "pay", "done", "ok")
        assert [m.content for m in await store.list_messages("r", "pay")] == ["ok"]
