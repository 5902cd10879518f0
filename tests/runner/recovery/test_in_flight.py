"""Tasks that were under way when their process died: continued, started over, asked about, or failed as crashers."""

from __future__ import annotations

import logging
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest

from plait.backends import BackendError, ErrorKind, Reply
from plait.backends.protocol import ConversationRequest
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store, StoreError, TaskPlaced
from plait.runner import DAG, FailureMode, ParallelRunner, PlaitError, ResumeAction, Retry, RunStatus, Task, TaskStatus
from plait.runner.domain.suspects import WATCH_S
from plait.runner.engine.attempt import INTERRUPTED
from plait.runner.state.run_state import RunState
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker
from tests.support.hosts import functions
from tests.support.hosts.world import HostFolder
from tests.support.stores.database import end_of
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
    preview = await runner.preview_resume("r")
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
    await runner.answer("r", "pay", how, text)
    with pytest.raises(PlaitError, match="does not wait for an answer"):
        await runner.answer("r", "pay", how, text)
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
            await runner.answer("r", "pay", "done", text)
    await runner.answer("r", "pay", "done", '{"id": 7}')
    assert (await runner.resume("r"))["pay"].data == {"id": 7}


async def test_a_task_is_settled_in_one_of_three_ways_and_no_other() -> None:
    with pytest.raises(ValueError, match="'done', 'again' or 'fail', not 'failed'"):
        await ParallelRunner(Talker(), store=MemoryStore()).answer("r", "pay", "failed", "declined")  # type: ignore[arg-type]


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


async def test_a_crasher_fails_and_those_beside_it_do_not(store: Store) -> None:
    # Three times `long` is under way beside it; then each runs alone, and only one of them dies.
    for dag in (CRASHER, None, None):
        await die(store, Dying(hangs_on("bad", "long")), dag)
    assert [task.crashes for task in await store.list_tasks("r")][:2] == [2, 2]  # the third death is not settled yet
    alone: list[str] = []
    deaths: list[str] = []
    runner = ParallelRunner(Talker(), store=store)
    while (step := (await runner.preview_resume("r")).tasks["bad"]).repeats:
        deaths += re.findall(r"died (\d) times", step.reason)
        backend = Dying(hangs_on("bad"))
        assert not await die(store, backend)
        alone += backend.hanging
    # The owners with even epochs watch: those of the first and the third of the deaths alone.
    assert (alone, deaths) == (["bad"] * 3, ["3", "4", "4"])
    result = await ParallelRunner(Talker(), store=store).resume("r")
    assert (result["bad"].status, result["bad"].error_kind) == (TaskStatus.FAILED, "crashed")
    assert "died 5 times during the task, 2 of them with the task alone" in (result["bad"].error or "")
    assert (result["good"].status, result.blocked) == (TaskStatus.COMPLETED, ("after",))


async def test_deaths_with_several_tasks_under_way_convict_none(store: Store) -> None:
    dag = DAG([Task(name, prompt=name, retry=Retry(max_crashes=1)) for name in "ab"])
    await die(store, Dying(hangs_on("a", "b")), dag)
    for _ in range(11):
        # A rival that knows no suspects begins both, as a process of an earlier version would.
        with patch.object(RunState, "suspects", return_value=[]):
            await die(store, Dying(hangs_on("a", "b")))
    assert [task.crashes for task in await store.list_tasks("r")] == [3, 3]
    assert (await ParallelRunner(Talker(), store=store).resume("r")).status is RunStatus.COMPLETED


async def test_a_task_alone_is_not_convicted_where_the_process_has_not_waited(store: Store) -> None:
    # Of a single task, every death is one with the task alone: only those of the owners that watch count.
    dag = DAG([Task("a", prompt="a", retry=Retry(max_crashes=2))])
    await die(store, Dying(hangs_on("a")), dag)
    counted: list[int] = []
    for _ in range(5):
        await die(store, Dying(hangs_on("a")))
        counted.append((await store.list_tasks("r"))[0].crashes)
    assert counted == [1, 2, 3, 4, 4]
    assert (await ParallelRunner(Talker(), store=store).resume("r"))["a"].error_kind == "crashed"


async def test_a_suspect_runs_with_nothing_beside_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    dag = DAG([*(Task(name, prompt=name) for name in "abc"), Task("d", prompt="d", depends_on=["a"])])
    for plan in (dag, None, None):
        await die(store, Dying(hangs_on("a", "b")), plan)
    running: list[str] = []
    together: list[tuple[str, ...]] = []

    class Watching(Talker):
        def open(self, request: ConversationRequest):
            running.append(request.idempotency_key[-1])
            together.append(tuple(running))
            return super().open(request)

    def answer(prompt: str, request: ConversationRequest) -> Reply:
        running.remove(request.idempotency_key[-1])
        return Reply(prompt)

    clock = QuickClock()
    runner = ParallelRunner(Watching(answer), store=store, clock=clock)
    foretold = {name: step.reason for name, step in (await runner.preview_resume("r")).tasks.items()}
    alone = "; runs alone, because the process died 3 times during the task"
    assert [name for name, reason in foretold.items() if reason.endswith(alone)] == ["a", "b"]
    assert "not before" in foretold["a"]  # the fourth owner waits, to see whether the machine kills its processes
    began = clock.monotonic()
    with caplog.at_level(logging.WARNING):
        result = await runner.resume("r")
    assert clock.monotonic() - began >= WATCH_S
    assert "tasks_run_alone" in caplog.text
    assert result.status is RunStatus.COMPLETED
    assert all(len(these) == 1 for these in together if set(these) & {"a", "b"})


async def test_a_crasher_that_is_to_be_skipped_is_skipped(store: Store) -> None:
    dag = DAG(
        [
            Task("bad", prompt="bad", retry=Retry(max_crashes=1), failure_mode=FailureMode.SKIP),
            Task("after", prompt="after[{{ bad }}]", depends_on=["bad"]),
        ]
    )
    await die(store, Dying(hangs_on("bad")), dag)
    for _ in range(3):
        await die(store, Dying(hangs_on("bad")))
    result = await ParallelRunner(Talker(), store=store).resume("r")
    assert (result["bad"].status, result["after"].text) == (TaskStatus.SKIPPED, "re: after[]")


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
            if not self.has_failed and any(isinstance(change, TaskPlaced) for change in batch.changes):
                self.has_failed = True
                raise StoreError("away")
            await super().write(batch)

    store, file = Failing(MemoryStore()), tmp_path / "file"
    file.touch()
    runner = ParallelRunner(HostFolder(tmp_path / "hosts").hosts("m1").placed(functions.until_file), store=store)
    result = await runner.run(DAG([Task("pay", prompt=str(file), at_most_once=True)]), "r")
    assert (store.has_failed, result["pay"].status, result["pay"].attempts) == (True, TaskStatus.COMPLETED, 2)
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
        connection.execute(end_of("a", "text = 'tampered'"))
    async with SQLiteStore(path, mode="existing") as store:
        await ParallelRunner(Talker(), store=store).answer("r", "pay", "done", "ok")
        assert [m.content for m in await store.list_messages("r", "pay")] == ["ok"]
