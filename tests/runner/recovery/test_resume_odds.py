"""Resumes of runs in odd states: damaged conversations, reopened tasks, owners out of sight, things said since."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, RunStatus, Task, TaskStatus, events
from plait.backends import Message, Reply
from plait.errors import BackendError, ErrorKind, RunNotFound, RunOwned, StoreError
from plait.events import RunClaimed
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store
from plait.results import ResumeAction
from plait.runner.engine.attempt import INTERRUPTED
from plait.runner.engine.lease import Liveness, claim_for_this_process, liveness, unregister
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker
from tests.support.stores.database import attempts_of
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

REFUSED = BackendError(ErrorKind.REFUSED, "no")
AT = "2026-01-01T00:00:00.000Z"


def hangs_on(*words: str):
    return lambda prompt: prompt.startswith(words)


def tamper(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


CHAT = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a"), Task("z", prompt="zed", depends_on=["a"])])


@pytest.mark.parametrize("retry_failed", [False, True])
async def test_a_damaged_message_harms_only_those_who_continue_it(tmp_path: Path, retry_failed: bool) -> None:
    path = tmp_path / "p.db"
    async with SQLiteStore(path) as store:
        await die(store, Dying(hangs_on("two", "zed")), CHAT)
    tamper(path, attempts_of("a", "prompt = 'tampered'"))
    async with SQLiteStore(path, mode="existing") as store:
        runner = ParallelRunner(Talker(), store=store)
        preview = await runner.runs.preview("r", retry_failed=retry_failed)
        result = await runner.resume("r", retry_failed=retry_failed)
    to_run = {
        name for name, step in preview.tasks.items() if step.action in {ResumeAction.START_OVER, ResumeAction.CONTINUE}
    }
    ran = {name for name, task in result.tasks.items() if task.status is TaskStatus.COMPLETED and not task.reused}
    assert to_run == ran
    assert (result.status is RunStatus.COMPLETED) == retry_failed


async def test_conversations_to_continue_are_read_before_the_run_is_claimed(store: Store) -> None:
    """A store that fails afterwards keeps no task from its conversation."""
    await die(store, Dying(hangs_on("two", "zed")), CHAT)
    session_id = (await store.list_tasks("r"))[0].session_id

    def no_messages_after_the_claim(method: str, _number: int) -> Fault | None:
        return Fault.BEFORE if method == "list_messages" and failing.writes else None

    failing, backend = FaultyStore(store, no_messages_after_the_claim), Talker()
    result = await ParallelRunner(backend, store=failing).resume("r")
    assert result.status is RunStatus.COMPLETED
    (two,) = [request for request in backend.requests if request.idempotency_key == "r:b"]
    assert [message.content for message in two.history] == ["one", "re: one"]
    assert (two.session_id, two.resume) == (session_id, True)


async def test_a_reopened_task_begins_a_new_conversation(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    async with SQLiteStore(path) as store:
        await ParallelRunner(Talker(own_ids=True), store=store).run(DAG([Task("a", prompt="one")]), "r")
    tamper(path, "UPDATE attempts SET text = 'tampered'")
    async with SQLiteStore(path, mode="existing") as store:
        only_the_claim = FaultyStore(store, on_write(lambda n: None if n == 1 else Fault.BEFORE))
        runner = ParallelRunner(Talker(own_ids=True), store=only_the_claim, clock=QuickClock())
        await runner.resume("r", retry_failed=True)
        preview = await ParallelRunner(Talker(), store=store).runs.preview("r")
    assert preview.tasks["a"].action is ResumeAction.START_OVER


async def test_what_a_person_says_confirms_no_session(store: Store) -> None:
    # An id was chosen, and never confirmed; but an attempt that failed has been answered.
    wrong = (Message("user", "one"), Message("assistant", "many"), Message("user", "no"))
    failing = Talker(lambda *_: BackendError(ErrorKind.INVALID_OUTPUT, "no number", messages=wrong))
    tries = iter([False, True])
    dag = DAG([Task("a", prompt="one", retry=Retry(base_delay=0))])
    await die(store, Dying(lambda _: next(tries), answer=failing), dag)
    forking = Talker(lambda prompt, _: Reply(f"re: {prompt}", session_id="forked"))
    await ParallelRunner(forking, store=store).runs.continue_task("r", "a", "hello?")
    backend = Talker()
    await ParallelRunner(backend, store=store).resume("r")
    assert backend.prompts == ["one"]


async def test_a_conversation_stays_what_it_was_when_it_was_had(store: Store) -> None:
    dag = DAG(
        [
            Task("a", prompt="A", failure_mode=FailureMode.SOFT),
            Task("b", prompt="B", continues="a"),
            Task("c", prompt="C", continues="b"),
        ]
    )

    def refusing(words: str) -> Talker:
        return Talker(lambda prompt, _: REFUSED if prompt in words else f"re: {prompt}")

    clock = QuickClock()  # whose time goes on by itself only when asked to
    await ParallelRunner(refusing("AC"), store=store, clock=clock).run(dag, "r")
    clock.now += 60
    await ParallelRunner(refusing("C"), store=store, clock=clock).resume("r", retry_failed=True)
    backend = Talker()
    await ParallelRunner(backend, store=store, clock=clock).resume("r", retry_failed=True)
    assert [message.content for message in backend.requests[0].history] == ["B", "re: B"]


async def test_a_damaged_result_is_not_called_reused(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    async with SQLiteStore(path) as store:
        await die(store, Dying(hangs_on("zed")), DAG([Task("a", prompt="one"), Task("z", prompt="zed")]))
    tamper(path, attempts_of("a", "text = 'tampered'"))
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(Talker(), store=store).resume("r")
    assert result.resume_summary is not None
    assert (result.resume_summary.reused, result.reused) == (0, 0)


async def test_a_conversation_does_not_go_on_when_what_it_was_about_is_run_again(store: Store) -> None:
    dag = DAG(
        [
            Task("a", prompt="A", failure_mode=FailureMode.SOFT),
            Task("b", prompt="B with [{{ a }}]", depends_on=["a"]),
        ]
    )
    await die(store, Dying(hangs_on("B"), hangs_on("B"), Talker(lambda p, _: REFUSED if p == "A" else p)), dag)
    await ParallelRunner(Talker(), store=store).resume("r", retry_failed=True)
    said = [message.content for message in await store.list_messages("r", "b")]
    assert (INTERRUPTED in said, said[0]) == (False, "B with [re: A]")


async def test_asked_for_again_it_has_all_its_tries_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "p.db", 0

    def third_time(prompt: str, _: object) -> str | BackendError:
        nonlocal calls
        calls += 1
        return BackendError(ErrorKind.TRANSIENT, "reset") if calls % 3 else "ok"

    dag = DAG([Task("a", prompt="one", retry=Retry(attempts=3, base_delay=0))])
    async with SQLiteStore(path) as store:
        await ParallelRunner(Talker(third_time), store=store).run(dag, "r")
    tamper(path, "UPDATE attempts SET text = 'tampered'")
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(Talker(third_time), store=store).resume("r", retry_failed=True)
    assert result.status is RunStatus.COMPLETED


async def test_what_took_effect_and_must_not_happen_twice_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    async with SQLiteStore(path) as store:
        await ParallelRunner(Talker(), store=store).run(DAG([Task("pay", prompt="pay", at_most_once=True)]), "r")
    tamper(path, "UPDATE attempts SET text = 'tampered'")
    async with SQLiteStore(path, mode="existing") as store:
        backend = Talker()
        await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
    assert backend.prompts == []


async def test_a_run_deleted_meanwhile_is_not_found(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "p.db") as store:
        await ParallelRunner(Talker(), store=store).run(DAG([Task("a", prompt="one")]), "r")

        class Purging(FaultyStore):
            async def list_tasks(self, run_id: str, only: str | range | None = None):
                await store.purge([run_id])
                return await super().list_tasks(run_id, only)

        with pytest.raises(RunNotFound, match="was deleted from the store just now"):
            await ParallelRunner(Talker(), store=Purging(store)).resume("r")


@pytest.mark.parametrize("spec", ['{"at_most_once": tr', "[]", '{"retry": {"attempts": 0}}', '{"unknown": 1}'])
async def test_options_that_cannot_be_read_are_said_in_one_line(store: Store, spec: str) -> None:
    """Of a store without checksums, or of another version of plait."""

    class Changing(FaultyStore):
        async def list_tasks(self, run_id: str, only: str | range | None = None):
            return tuple(replace(task, spec=spec) for task in await super().list_tasks(run_id, only))

    await die(store, Dying(hangs_on("one")), DAG([Task("a", prompt="one")]))
    with pytest.raises(StoreError, match="the stored data of run 'r' is damaged"):
        await ParallelRunner(Talker(), store=Changing(store)).resume("r")


CHANGES = {
    "prompt": ("UPDATE tasks SET prompt = 'Transfer 900 EUR'", r"task 'b' \(prompt, dependencies"),
    "options": ("UPDATE tasks SET spec = '{\"timeout\": 9}'", r"task 'b' \(prompt, dependencies, options"),
    "edges": ("UPDATE tasks SET depends_on = '[]'", r"task 'b' \(prompt, dependencies"),
    "answers": ("UPDATE tasks SET answers = '[]'", r"task 'b' \(prompt, dependencies, options, answers\)"),
    "inputs": ("UPDATE runs SET settings = replace(settings, 'Bob', 'Bop')", "the text of its settings and inputs"),
    "run": ("UPDATE runs SET claims = 'none'", "its row"),
}
"""A change behind the back of plait, and the part of the run that is then damaged. Task b is to run."""


@pytest.mark.parametrize("change", CHANGES)
async def test_a_run_whose_work_is_damaged_is_refused(tmp_path: Path, change: str) -> None:
    path, (statement, part) = tmp_path / "p.db", CHANGES[change]
    dag = DAG(
        [Task("a", prompt="one"), Task("b", "Transfer 100 EUR to {{ payee }}", depends_on=("a",))],
        inputs={"payee": "Bob"},
    )
    async with SQLiteStore(path) as store:
        await die(store, Dying(hangs_on("Transfer")), dag)
    where = " WHERE task_id = 'b'" if "UPDATE tasks" in statement else ""
    tamper(path, statement + where)
    backend = Talker()
    async with SQLiteStore(path, mode="existing") as store:
        runner = ParallelRunner(backend, store=store)
        for call in (runner.resume, runner.runs.preview):
            with pytest.raises(StoreError, match=f"run 'r' is damaged: {part}.*; restore a copy of the store"):
                await call("r")
    assert backend.prompts == []


async def owned_elsewhere(store: Store, **changes: object) -> None:
    """Leave run "r" crashed, and claimed by a process that cannot be judged from here."""
    await die(store, Dying(hangs_on("one")), DAG([Task("a", prompt="one")]))
    record = await store.get_run("r")
    assert record is not None and record.owner is not None
    owner = replace(record.owner, host="another host", **changes)  # type: ignore[arg-type]
    await store.write(Batch("r", record.epoch, record.last_seq + 1, (RunClaimed(AT, owner, 1.0),)))


async def test_the_owner_that_is_named_is_the_one_that_owns_it_now(store: Store) -> None:
    await owned_elsewhere(store, pid=111)

    class Succeeding(QuickClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            if len(self.slept) == 2:
                record = await store.get_run("r")
                assert record is not None and record.owner is not None
                claim = RunClaimed(AT, replace(record.owner, owner_id="another", pid=222), 1.0)
                await store.write(Batch("r", record.epoch, record.last_seq + 1, (claim,)))

    with pytest.raises(RunOwned, match="process 222"):
        await ParallelRunner(Talker(), store=store, clock=Succeeding(), lease=6.0).resume("r")


async def test_a_stop_while_an_owner_is_watched_leaves_the_run_as_it_is(store: Store) -> None:
    await owned_elsewhere(store)
    async with ParallelRunner(Talker(), store=store, lease=60.0).start_resume("r") as run:
        async for event in run.events():
            if isinstance(event, events.RunWatched):
                run.stop()
    assert (await run.result()).status is RunStatus.INTERRUPTED
    record = await store.get_run("r")
    assert record is not None
    assert record.epoch == 2


def test_without_descriptors_nobody_is_declared_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = claim_for_this_process(AT)
    unregister(owner)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
            other = replace(owner, pid=process.pid, process_started=started)
            assert liveness(other) is Liveness.ALIVE
            read = Path.read_text

            def full(self: Path, *arguments: str) -> str:
                if self.name == "stat":
                    raise OSError(24, "Too many open files")
                return read(self, *arguments)

            monkeypatch.setattr(Path, "read_text", full)
            assert liveness(other) is not Liveness.DEAD
        finally:
            process.kill()


async def test_a_run_that_waits_for_a_person_can_be_cancelled() -> None:
    store = MemoryStore()
    dag = DAG([Task("pay", prompt="pay", at_most_once=True), Task("then", prompt="then", depends_on=["pay"])])
    await die(store, Dying(hangs_on("pay")), dag)
    runner = ParallelRunner(Talker(), store=store)
    assert (await runner.resume("r")).status is RunStatus.WAITING_INPUT
    async with runner.start_resume("r") as run:
        run.cancel()
    assert (await run.result()).status is RunStatus.CANCELLED
