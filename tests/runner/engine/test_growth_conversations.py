"""Tasks that are added to go on with a conversation which nobody knew would be continued when it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, RunStatus, Task
from plait.persistence import MemoryStore, Store
from plait.persistence.store_records import MessageRecord
from plait.runner.engine.attempt import STORE_WAITS_S
from plait.runner.state import run_state
from plait.workflows import Decision
from tests.support.fakes import QuickClock
from tests.support.growth import Scripted, by_end, talker
from tests.support.stores.faulty_store import Fault, FaultyStore

MORE = Decision(add=(Task("more", "more", continues="a"),))


@pytest.mark.parametrize("reads", [True, False])
async def test_one_that_the_store_was_too_far_away_to_take_is_kept(reads: bool) -> None:
    """The completion of `a` is the first thing that cannot be written down."""

    def faults(method: str, _number: int) -> Fault | None:
        away = "a" in backend.prompts
        return Fault.BEFORE if away and (method == "write" or not reads) else None

    backend = talker()
    runner = ParallelRunner(backend, store=FaultyStore(MemoryStore(), faults), clock=QuickClock())
    dag = DAG([Task("a", "a"), Task("b", "b", ["a"])])
    result = await runner.run(dag, policy=Scripted(by_end({"b": MORE})))
    assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["a", "b", "more"])
    assert [message.content for message in backend.requests[-1].history] == ["a", "<a>"]
    assert backend.requests[-1].session_id == "session-1"
    assert result.degraded[0].lost


CHAIN = DAG([Task("a", "a"), Task("b", "b", ["a"], continues="a"), Task("c", "c", ["b"])])
AFTER_C: dict[str | None, Decision] = {"c": Decision(add=(Task("more", "more", continues="b"),))}


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stored conversation stays in memory."""
    monkeypatch.setattr(run_state, "MOST_STORED_IN_MEMORY", 0)


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.HANG, Fault.ODD])
async def test_a_stored_conversation_goes_on_though_the_store_cannot_be_read(fault: Fault) -> None:
    def faults(method: str, _number: int) -> Fault | None:
        return None if method in {"write", "list_notes"} else fault

    backend = talker()
    runner = ParallelRunner(backend, store=FaultyStore(MemoryStore(), faults), clock=QuickClock())
    result = await runner.run(CHAIN, policy=Scripted(by_end(AFTER_C)))
    assert (result.status, result["more"].attempts, result.degraded) == (RunStatus.COMPLETED, 1, ())
    assert [message.content for message in backend.requests[-1].history] == ["a", "<a>", "b", "<b>"]


async def test_stored_conversations_stay_in_memory_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MOST_STORED_IN_MEMORY", 1_000)
    read: list[str] = []

    def faults(method: str, _number: int) -> None:
        read.append(method)

    # Room for four: the one that was stored first has to be read back. That of t5 is continued before it is stored.
    dag = DAG([Task(f"t{i}", f"t{i}", [f"t{i - 1}"] if i else []) for i in range(6)])
    added = Decision(add=tuple(Task(f"more{i}", f"more{i}", continues=f"t{i}") for i in range(6)))
    backend = talker()
    runner = ParallelRunner(backend, store=FaultyStore(MemoryStore(), faults), clock=QuickClock())
    result = await runner.run(dag, policy=Scripted(by_end({"t5": added})))
    assert result.status is RunStatus.COMPLETED
    assert read.count("list_messages") == 1
    for request in backend.requests[6:]:
        name = request.idempotency_key.removeprefix(f"{result.run_id}:more")
        assert [message.content for message in request.history] == [f"t{name}", f"<t{name}>"]


@pytest.mark.usefixtures("forgets")
async def test_only_what_is_not_in_memory_is_read_back_and_nothing_else() -> None:
    read: list[str] = []

    def faults(method: str, _number: int) -> None:
        read.append(method)

    backend = talker()
    store = FaultyStore(MemoryStore(), faults)
    await ParallelRunner(backend, store=store, clock=QuickClock()).run(CHAIN, policy=Scripted(by_end(AFTER_C)))
    assert [message.content for message in backend.requests[-1].history] == ["a", "<a>", "b", "<b>"]
    assert [method for method in read if method != "write"] == ["list_messages"]


@pytest.mark.usefixtures("forgets")
async def test_a_store_that_is_behind_is_asked_again() -> None:
    class Behind(FaultyStore):
        asked = 0

        async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
            self.asked += 1
            return () if self.asked == 1 else await super().list_messages(run_id, task_id)

    backend = talker()
    runner = ParallelRunner(backend, store=Behind(MemoryStore()), clock=QuickClock())
    result = await runner.run(CHAIN, policy=Scripted(by_end(AFTER_C)))
    assert (result.status, result["more"].attempts) == (RunStatus.COMPLETED, 1)
    assert [message.content for message in backend.requests[-1].history] == ["a", "<a>", "b", "<b>"]


@pytest.mark.usefixtures("forgets")
@pytest.mark.parametrize("failures", [3, len(STORE_WAITS_S), 10_000])
async def test_a_conversation_that_only_the_store_has_is_waited_for(failures: int) -> None:
    def faults(method: str, number: int) -> Fault | None:
        return Fault.BEFORE if method == "list_messages" and number <= failures else None

    backend, clock = talker(), QuickClock()
    runner = ParallelRunner(backend, store=FaultyStore(MemoryStore(), faults), clock=clock)
    more = Task("more", "more", continues="b", retry=Retry(attempts=1))
    result = await runner.run(CHAIN, policy=Scripted(by_end({"c": Decision(add=(more,))})))
    if failures > len(STORE_WAITS_S):
        assert (result["more"].error_kind, "more" in backend.prompts) == ("transient", False)
        assert "the conversation of task 'b' cannot be read: planted" in (result["more"].error or "")
    else:
        assert (result.status, result["more"].attempts) == (RunStatus.COMPLETED, 1)
        assert [message.content for message in backend.requests[-1].history] == ["a", "<a>", "b", "<b>"]
    assert [wait for wait in clock.slept if wait in STORE_WAITS_S] == list(STORE_WAITS_S[:failures])


async def test_a_conversation_of_an_earlier_process_is_waited_for() -> None:
    inner = MemoryStore()
    first = talker({"c": ValueError("no")})
    await ParallelRunner(first, store=inner, clock=QuickClock()).run(CHAIN, "r", policy=Scripted())

    def faults(method: str, number: int) -> Fault | None:
        return Fault.BEFORE if method == "list_messages" and number <= 3 else None

    backend = talker()
    runner = ParallelRunner(backend, store=FaultyStore(inner, faults), clock=QuickClock())
    result = await runner.resume("r", retry_failed=True, policy=Scripted(by_end(AFTER_C)))
    assert (result.status, result["more"].attempts) == (RunStatus.COMPLETED, 1)
    assert [message.content for message in backend.requests[-1].history] == ["a", "<a>", "b", "<b>"]


@pytest.mark.parametrize(
    ("fails", "ran", "history"),
    [
        (["b"], ["b", "c", "more"], ["a", "<a>", "b", "<b>"]),
        (["a", "c"], ["a", "c", "more"], ["b", "<b>"]),  # b began a conversation of its own, before a had one
        (["c"], ["c", "more"], ["a", "<a>", "b", "<b>"]),
    ],
)
async def test_after_a_resume_it_is_the_conversation_that_there_really_was(
    store: Store, fails: list[str], ran: list[str], history: list[str]
) -> None:
    dag = DAG([replace(task, failure_mode=FailureMode.SOFT if task.id == "a" else task.failure_mode) for task in CHAIN])
    first = await ParallelRunner(talker(dict.fromkeys(fails, ValueError("no"))), store=store).run(
        dag, policy=Scripted()
    )
    backend = talker()
    result = await ParallelRunner(backend, store=store).resume(
        first.run_id, retry_failed=True, policy=Scripted(by_end(AFTER_C))
    )
    assert (result.status, sorted(backend.prompts)) == (RunStatus.COMPLETED, sorted(ran))
    by_task = {request.idempotency_key.partition(":")[2]: request for request in backend.requests}
    assert [message.content for message in by_task["more"].history] == history
