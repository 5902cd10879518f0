"""Conversations after a restart and after the run: whoever goes on with them finds them whole."""

from __future__ import annotations

import anyio
import pytest

from plait import DAG, ParallelRunner, PlaitError, Retry, RunStatus, Task
from plait.backends import FunctionBackend, ask
from plait.clock_and_ids import parse_time
from plait.dialogue import Message
from plait.errors import BackendError, Conflict, ErrorKind, RunNotFound, TaskNotFound, TurnNotStored
from plait.events import MessageAppended
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store
from tests.support.crashed import Dying, die
from tests.support.fakes import Talker
from tests.support.stopped import DIAMOND, stopped_after
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write


class Confirming(Talker):
    """Its turns say that they have the session, and then fail."""

    def __init__(self, error: BackendError) -> None:
        super().__init__(lambda *_: error)

    def open(self, request):
        request.on_session(request.session_id)
        return super().open(request)


async def test_a_conversation_is_continued_after_a_restart(store: Store) -> None:
    x, y = Task("x", prompt="one"), Task("y", prompt="two", continues="x")
    dag = DAG([x, y, Task("z", prompt="three", continues="y")])
    hanging = anyio.Event()

    class Hanging(Talker):
        def open(self, request):
            if len(self.requests) == 1:
                hanging.set()
            return super().open(request)

    def answer(prompt, _opening):
        return f"re: {prompt}"

    first = Hanging(answer)
    async with ParallelRunner(first, store=store, concurrency=1).start(dag, "r") as run:
        async for event in run.events():
            if event.kind == "task_completed":
                run.stop()
    backend = Talker()
    backend.made = 100
    result = await ParallelRunner(backend, store=store).resume("r")
    assert result.status is RunStatus.COMPLETED
    history = [m.content for m in backend.requests[-1].history]
    assert history == ["one", "re: one", "two", "re: two"]
    assert backend.requests[-1].session_id == "session-1" and backend.requests[-1].resume


async def test_a_person_goes_on_with_any_conversation(store: Store) -> None:
    dag = DAG([Task("x", prompt="one"), Task("y", prompt="two", continues="x")])
    run_id = (await ParallelRunner(Talker(), store=store).run(dag)).run_id
    backend = Talker()
    runner = ParallelRunner(backend, store=store)
    assert (await runner.runs.continue_task(run_id, "y", "and now?")).text == "re: and now?"
    assert (await runner.runs.continue_task(run_id, "y", "again")).text == "re: again"
    assert [m.content for m in backend.requests[0].history] == ["one", "re: one", "two", "re: two"]
    assert [m.content for m in backend.requests[1].history][-2:] == ["and now?", "re: and now?"]
    assert backend.requests[0].resume and backend.requests[0].session_id == "session-1"
    stored = await store.list_messages(run_id, "y")
    assert [(m.attempt, m.role, m.content) for m in stored[2:]] == [
        (0, "user", "and now?"),
        (0, "assistant", "re: and now?"),
        (0, "user", "again"),
        (0, "assistant", "re: again"),
    ]
    record = await store.get_run(run_id)
    assert record is not None and (record.status, record.owner) == ("completed", None)
    result = await runner.resume(run_id)
    assert result["y"].text == "re: two", "the result stays as it was"


async def test_what_a_person_added_stays_out_of_conversations_of_the_run(store: Store) -> None:
    dag = DAG([Task("x", prompt="one"), Task("y", prompt="two", continues="x")])
    first = Talker()
    async with ParallelRunner(first, store=store).start(dag, "r") as run:
        async for event in run.events():
            if event.kind == "task_completed":
                run.stop()
    await ParallelRunner(Talker(), store=store).runs.continue_task("r", "x", "by the way")
    backend = Talker()
    await ParallelRunner(backend, store=store).resume("r")
    assert [m.content for m in backend.requests[0].history] == ["one", "re: one"]


async def test_answers_to_what_cannot_be_continued(store: Store) -> None:
    await stopped_after(store, DIAMOND, 1)
    runner = ParallelRunner(Talker(), store=store)
    for call in (
        runner.runs.continue_task("r", "e", "hello"),
        runner.runs.settle("r", "e", "done"),
        runner.runs.answer("r", "e", 1),
        runner.resume("r", answers={"e": 1}),
    ):
        with pytest.raises(TaskNotFound, match=r"has no task 'e'; `plait show .* lists them"):
            await call
    with pytest.raises(PlaitError, match="task 'd' of run r is pending, with no conversation"):
        await runner.runs.continue_task("r", "d", "hello")
    with pytest.raises(RunNotFound):
        await runner.runs.continue_task("nope", "a", "hello")
    with pytest.raises(PlaitError, match="a function never has one"):
        await runner.runs.continue_task("r", "a", "hello")
    await runner.run(DAG([Task("a", prompt="a")]), "t")
    failing = ParallelRunner(Talker(lambda *_: BackendError(ErrorKind.AUTH, "no key")), store=store)
    with pytest.raises(BackendError, match="no key"):
        await failing.runs.continue_task("t", "a", "hello")
    assert len(await store.list_messages("t", "a")) == 2
    faulty = FaultyStore(store, on_write(lambda n: Fault.BEFORE if n > 1 else None))
    with pytest.raises(TurnNotStored) as caught:
        await ParallelRunner(Talker(), store=faulty).runs.continue_task("t", "a", "hello")
    assert caught.value.text == "re: hello"
    assert (await runner.resume("r")).status is RunStatus.COMPLETED


async def test_a_prompt_that_nobody_answered_is_no_conversation(store: Store) -> None:
    dag = DAG([Task("x", prompt="one"), Task("y", prompt="two", continues="x")])
    await die(store, Dying(lambda prompt: prompt == "two"), dag)
    talker = Talker()
    runner = ParallelRunner(talker, store=store)
    with pytest.raises(PlaitError, match=r"'y' of run r is running, .* it has no reply yet"):
        await runner.runs.continue_task("r", "y", "hello")
    assert talker.prompts == []
    assert [m.content for m in await store.list_messages("r", "y")] == []
    await runner.resume("r")
    assert (await runner.runs.continue_task("r", "y", "hello")).text == "re: hello"


@pytest.mark.parametrize("ends", ["dies", "fails", "fails again"])
async def test_a_session_that_its_backend_keeps_is_gone_on_with_however_it_ended(store: Store, ends: str) -> None:
    """As an agent's: only its session knows what was done in it."""
    if ends == "dies":
        await die(store, Dying(lambda _: True, confirms=lambda _: True), DAG([Task("a", prompt="one")]))
    else:
        retry = Retry(1 if ends == "fails" else 2, base_delay=0)
        opened = Confirming(BackendError(ErrorKind.TIMEOUT, "too slow"))
        await ParallelRunner(opened, store=store).run(DAG([Task("a", prompt="one", retry=retry)]), "r")
    session = (await store.list_tasks("r"))[0].session_id
    talker = Talker()
    assert (await ParallelRunner(talker, store=store).runs.continue_task("r", "a", "go on")).text == "re: go on"
    assert (talker.requests[0].session_id, talker.requests[0].resume) == (session, True)


async def test_a_conversation_with_an_answer_outlasts_a_failure(store: Store) -> None:
    asked = (Message("user", "one"), Message("assistant", "many"), Message("user", "no, a number"))
    wrong = BackendError(ErrorKind.INVALID_OUTPUT, "no number", messages=(*asked, Message("assistant", "several")))
    dag = DAG([Task("a", prompt="one", retry=Retry(attempts=1))])
    await ParallelRunner(Talker(lambda *_: wrong), store=store).run(dag, "r")
    talker = Talker()
    await ParallelRunner(talker, store=store).runs.continue_task("r", "a", "why not?")
    assert [m.content for m in talker.requests[0].history] == ["one", "many", "no, a number", "several"]


@pytest.mark.slow
async def test_a_long_chain_of_conversations_is_read_back(store: Store) -> None:
    dag = DAG([Task(f"t{i}", prompt=str(i), continues=f"t{i - 1}" if i else None) for i in range(1100)])
    run_id = (await ParallelRunner(Talker(lambda p, _: p), store=store).run(dag)).run_id
    backend = Talker()
    await ParallelRunner(backend, store=store).runs.continue_task(run_id, "t1099", "hello")
    assert len(backend.requests[0].history) == 2200


async def test_a_turn_that_cannot_be_stored_is_said_and_not_lost() -> None:
    store = MemoryStore()
    await ParallelRunner(Talker(), store=store).run(DAG([Task("a", prompt="one")]), "r")

    class Picky(FaultyStore):
        async def write(self, batch: Batch) -> None:
            if any(isinstance(one, MessageAppended) and one.message.content == "hello" for one in batch.events):
                raise Conflict("cannot keep this")
            await super().write(batch)

    with pytest.raises(TurnNotStored) as failed:
        await ParallelRunner(Talker(), store=Picky(store)).runs.continue_task("r", "a", "hello")
    assert failed.value.text == "re: hello"


async def test_half_characters_of_a_person_are_stored_as_whole_ones(sqlite_store: SQLiteStore) -> None:
    runner = ParallelRunner(Talker(), store=sqlite_store)
    await runner.run(DAG([Task("a", prompt="one")]), "r")
    await runner.runs.continue_task("r", "a", "hello \ud800")
    assert [m.content[:5] for m in await sqlite_store.list_messages("r", "a")][2:] == ["hello", "re: h"]


async def test_a_paid_turn_survives_one_passing_failure() -> None:
    store = MemoryStore()
    await ParallelRunner(Talker(), store=store).run(DAG([Task("a", prompt="one")]), "r")
    faulty = FaultyStore(store, on_write(lambda n: Fault.BEFORE if n == 2 else None))  # the claim is the first write
    await ParallelRunner(Talker(), store=faulty).runs.continue_task("r", "a", "hello")
    record = await store.get_run("r")
    assert record is not None
    assert (record.owner, len(await store.list_messages("r", "a"))) == (None, 4)


async def test_a_message_in_another_conversation_keeps_the_deadline_of_a_question(store: Store) -> None:
    async def answer(prompt: str) -> str:
        return str(await ask("Who?", default="nobody", deadline=600.0)) if prompt == "ask" else prompt

    backends = {"asks": FunctionBackend(answer), "talks": Talker()}
    runner = ParallelRunner(backends=backends, default="talks", store=store)
    dag = DAG([Task("a", prompt="ask", backend="asks"), Task("b", prompt="b")])
    run_id = (await runner.run(dag)).run_id
    record = await store.get_run(run_id)
    assert record is not None and record.lease_expires_at is not None
    (question,) = await runner.runs.questions(run_id)
    assert question.asks is not None
    assert question.asks.deadline_at is not None
    assert record.lease_expires_at == parse_time(question.asks.deadline_at)
    await runner.runs.continue_task(run_id, "b", "and now?")
    after = await store.get_run(run_id)
    assert after is not None
    assert (after.status, after.owner, after.lease_expires_at) == ("waiting_input", None, record.lease_expires_at)
    assert await runner.runs.answer(run_id, "a", "Ada")
    answered = await store.get_run(run_id)
    assert answered is not None
    assert (answered.status, answered.lease_expires_at) == ("waiting_input", 0.0)
