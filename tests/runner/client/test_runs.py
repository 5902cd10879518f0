"""`Runs`: runs begun, watched, stopped and cancelled by a process that serves many of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from plait import DAG, ParallelRunner, PlaitError, Runs, RunStatus, Task, TaskStatus
from plait.backends import ConversationRequest, JsonInput, Reply, ask
from plait.errors import (
    BackendError,
    BackendMissing,
    ErrorKind,
    RunNotFound,
    RunNotResumable,
    RunOwned,
    StoreError,
    StoreRequired,
)
from plait.events import RunEnded
from plait.persistence import Batch, MemoryStore, Store
from tests.runner.engine.test_lease import claimed_by
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker
from tests.support.quick_runs import quick_runs
from tests.support.stopped import DIAMOND, stopped_after
from tests.support.stores.faulty_store import Fault, FaultyStore, none, on_write
from tests.support.stores.on_server import OnServer

PAIR = DAG([Task("a", prompt="a"), Task("b", prompt="b {{ a }}", depends_on=["a"])], name="pair")
ENDED = "run_completed"


class Held:
    """A backend whose calls wait until they are let go; `called` is set by the first one."""

    def __init__(self) -> None:
        self.called, self.go = anyio.Event(), anyio.Event()
        self.prompts: list[str] = []

    async def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        self.called.set()
        await self.go.wait()
        return f"<{prompt}>"


def service(store: Store, backend: object = None) -> Runs:
    return quick_runs(ParallelRunner(backend or Talker(), store=store))  # type: ignore[arg-type]


async def kinds(runs: Runs, run_id: str, after: int = 0) -> list[str]:
    with anyio.fail_after(60):
        return [event.kind async for event in runs.events(run_id, after)]


async def test_a_run_from_queued_to_its_end(store: Store) -> None:
    async with service(store) as runs:
        run_id = await runs.create(PAIR, settings={"for": "Ada"})
        queued = await runs.get(run_id)
        assert (queued.status, queued.started_at, queued.counts) == (RunStatus.QUEUED, None, {"pending": 2})
        await runs.start(run_id)
        seen = await kinds(runs, run_id)
        assert seen == [
            *("run_created", "run_started", "task_started", "task_completed", "task_started", "task_completed"),
            "run_completed",
        ]
        done = await runs.get(run_id)
    assert (done.status, done.name, done.counts) == (RunStatus.COMPLETED, "pair", {"completed": 2})
    assert (done.tasks["b"].text, done.tasks["b"].attempts) == ("re: b re: a", 1)
    assert (done.tasks["b"].depends_on, done.tasks["b"].session_id) == (("a",), "session-2")
    assert done.usage.output_tokens == sum(task.usage.output_tokens for task in done.tasks.values()) > 0


async def test_starting_twice_runs_once(store: Store) -> None:
    backend = Held()
    async with service(store, backend) as runs:
        run_id = await runs.create(PAIR)
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(runs.start, run_id)
        await runs.start(run_id)
        await backend.called.wait()
        backend.go.set()
        assert (await kinds(runs, run_id))[-1] == ENDED
        before = await store.get_run(run_id)
        await runs.start(run_id)  # it has ended: nothing to do
        assert await store.get_run(run_id) == before
    assert backend.prompts == ["a", "b <a>"]


async def test_starting_a_failed_run_retries_nothing(store: Store) -> None:
    calls: list[str] = []

    async def fails(prompt: str) -> str:
        calls.append(prompt)
        raise BackendError(ErrorKind.INVALID_REQUEST, "no")

    async with service(store, fails) as runs:
        run_id = await runs.create(PAIR)
        await runs.start(run_id)
        assert (await kinds(runs, run_id))[-1] == "run_failed"
        before = await store.get_run(run_id)
        await runs.start(run_id)
        assert await store.get_run(run_id) == before
    assert (before and before.status, calls) == ("failed", ["a"])


async def test_a_start_that_nobody_waits_for_any_more_goes_on(store: Store) -> None:
    backend = Held()
    async with service(store, backend) as runs:
        run_id = await runs.create(PAIR)
        async with anyio.create_task_group() as group:
            group.start_soon(runs.start, run_id)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        backend.go.set()
        assert (await kinds(runs, run_id))[-1] == ENDED


async def test_what_cannot_be_started(store: Store) -> None:
    async with service(store) as runs:
        with pytest.raises(RunNotFound):
            await runs.start("nothing")
        with pytest.raises(RunNotFound):
            await runs.get("nothing")
        with pytest.raises(RunNotFound):
            await kinds(runs, "nothing")
        with pytest.raises(BackendMissing):
            await runs.create(DAG([Task("a", prompt="a", backend="other")]))
        gone = await runs.create(PAIR)
        assert await runs.cancel(gone) is RunStatus.CANCELLED
        with pytest.raises(RunNotResumable):
            await runs.start(gone)
        run_id = await runs.create(PAIR)
    with pytest.raises(PlaitError, match="inside its `async with`"):
        await runs.start(run_id)
    with pytest.raises(StoreRequired):
        async with ParallelRunner(Talker()).runs:
            pass


async def test_a_run_of_another_live_process_is_refused_and_yet_seen() -> None:
    store = MemoryStore()
    await claimed_by(store, pid=1, process_started="")
    async with service(store) as runs:
        assert (await runs.get("r")).status is RunStatus.RUNNING
        with pytest.raises(RunOwned, match="is being run by process 1 "):
            await runs.start("r")
        assert [run.run_id for run in await runs.list()] == ["r"]


async def test_a_dead_owner_is_shown_and_succeeded() -> None:
    store = MemoryStore()
    await claimed_by(store, pid=4_190_000)
    async with service(store) as runs:
        assert [run.status for run in await runs.list()] == [RunStatus.INTERRUPTED]
        await runs.start("r")
        assert (await kinds(runs, "r"))[-1] == ENDED


async def test_leaving_stops_the_runs_so_that_they_can_be_resumed(store: Store) -> None:
    backend = Held()
    async with service(store, backend) as runs:
        run_id = await runs.create(PAIR)
        waiting = await runs.create(PAIR)
        await runs.start(run_id)
        await backend.called.wait()
    record = await store.get_run(run_id)
    assert record is not None
    assert (record.status, record.owner) == ("running", None)
    async with service(store) as runs:
        assert {run.run_id: run.status for run in await runs.list()} == {
            run_id: RunStatus.INTERRUPTED,
            waiting: RunStatus.QUEUED,
        }
        await runs.start(run_id)
        assert (await kinds(runs, run_id))[-1] == ENDED


class AwayServer(OnServer, MemoryStore):
    """A server store that is away once a run has ended, for `failures` writes."""

    failures = 10

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = anyio.Event()

    async def write(self, batch: Batch) -> None:
        if self.failures and any(isinstance(change, RunEnded) for change in batch.events):
            self.failures -= 1
            if self.failures < 5:
                self.is_awaited.set()
            raise StoreError("the server is away")
        await super().write(batch)


async def test_leaving_lets_a_run_that_has_ended_wait_for_its_server() -> None:
    store = AwayServer()
    async with quick_runs(ParallelRunner(Talker(), store=store, clock=QuickClock())) as runs:
        run_id = await runs.create(PAIR)
        await runs.start(run_id)
        await store.is_awaited.wait()
    record = await store.get_run(run_id)
    assert record is not None
    assert (record.status, record.owner, store.failures) == ("completed", None, 0)


async def test_an_error_in_the_block_comes_out_as_it_is_and_stops_the_runs(store: Store) -> None:
    backend = Held()

    async def serve() -> None:
        async with service(store, backend) as runs:
            await runs.start(await runs.create(PAIR))
            await backend.called.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await serve()
    (record,) = await store.list_runs()
    assert record.owner is None


async def test_cancelling(store: Store) -> None:
    backend = Held()
    runner = ParallelRunner(backend, store=store, cancel_grace=0.0)
    async with quick_runs(runner) as runs:
        run_id = await runs.create(PAIR)
        await runs.start(run_id)
        await backend.called.wait()
        assert await runs.cancel(run_id, wait=10) is RunStatus.CANCELLED
        seen = await kinds(runs, run_id)
        assert seen[-4:] == ["run_cancelling", "task_cancelled", "task_cancelled", "run_cancelled"]
        before = await store.get_run(run_id)
        assert await runs.cancel(run_id) is RunStatus.CANCELLED
        assert await store.get_run(run_id) == before
        assert (await runs.get(run_id)).tasks["b"].status is TaskStatus.CANCELLED


async def test_a_run_that_waits_for_a_person(store: Store) -> None:
    once = DAG([Task("pay", prompt="pay", at_most_once=True), Task("tell", prompt="tell", depends_on=["pay"])])
    await die(store, Dying(lambda prompt: prompt == "pay"), once)
    runner = ParallelRunner(Talker(), store=store)
    async with quick_runs(runner) as runs:
        await runs.start("r")
        async for event in runs.events("r"):  # which goes on after this one
            if event.kind == "run_waiting_input":
                break
        asked = (await runs.get("r")).tasks["pay"]
        assert (asked.status, asked.question is not None) == (TaskStatus.WAITING_INPUT, True)
        await runner.runs.settle("r", "pay", "done", "paid")
        await runs.start("r")
        assert (await kinds(runs, "r", event.seq))[-1] == ENDED
        assert (await runs.get("r")).tasks["pay"].text == "paid"


async def test_the_history_is_followed_from_any_number_on(store: Store) -> None:
    await stopped_after(store, DIAMOND, 1)
    async with service(store) as runs, anyio.create_task_group() as group:
        whole: list[int] = []
        parts: list[int] = []

        async def read_whole() -> None:
            whole.extend([event.seq async for event in runs.events("r")])

        async def read_in_parts() -> None:
            reading = True
            while reading:  # a reader that leaves after each event and comes back
                reading = False
                async for event in runs.events("r", parts[-1] if parts else 0):
                    parts.append(event.seq)
                    reading = True
                    break

        group.start_soon(read_whole)
        group.start_soon(read_in_parts)
        with anyio.move_on_after(0.05):
            await kinds(runs, "r")  # cancelled while it waits for more
        await runs.start("r")
        assert (await kinds(runs, "r"))[-1] == ENDED
    stored = [event.seq for event in await store.list_events("r")]
    assert whole == parts == stored
    assert await kinds(service(store), "r", stored[-1]) == []


async def test_a_history_that_is_read_from_too_far_on_ends_with_its_run(store: Store) -> None:
    async with service(store) as runs, anyio.create_task_group() as group:
        run_id = await runs.create(PAIR)
        seen: list[list[str]] = []

        async def read() -> None:
            seen.append(await kinds(runs, run_id, 10_000))

        group.start_soon(read)
        await anyio.lowlevel.checkpoint()
        await runs.start(run_id)
    assert seen == [[]]


async def test_a_history_goes_on_after_the_end_of_a_run_that_was_reopened(store: Store) -> None:
    broken = True

    async def body(prompt: str) -> str:
        if broken:
            raise RuntimeError("not today")
        return prompt

    async with service(store, body) as runs:
        run_id = await runs.create(DAG([Task("a", prompt="a")]))
        await runs.start(run_id)
        assert (await kinds(runs, run_id))[-1] == "run_failed"
        broken = False
        await runs.start(run_id)
        assert (await runs.get(run_id)).status is RunStatus.FAILED
        await runs.start(run_id, retry_failed=True)
        seen = await kinds(runs, run_id)
    assert ("run_failed" in seen, seen[-1]) == (True, ENDED)


async def test_one_run_that_ends_badly_leaves_the_others_alone() -> None:
    store = FaultyStore(MemoryStore())
    backend = Held()
    async with quick_runs(ParallelRunner(backend, store=store, strict=True)) as runs:
        first, second = [await runs.create(PAIR) for _ in range(2)]
        await runs.start(first)
        await backend.called.wait()
        store.faults = on_write(lambda _: Fault.BEFORE)
        backend.go.set()
        with anyio.fail_after(60):
            while await is_driven(store, first):
                await anyio.lowlevel.checkpoint()
        store.faults = none
        await runs.start(second)
        assert (await kinds(runs, second))[-1] == ENDED
        await runs.start(first)
        assert (await kinds(runs, first))[-1] == ENDED


async def is_driven(store: Store, run_id: str) -> bool:
    """Whether a living process would be in the way of one more."""
    try:
        await ParallelRunner(Talker(), store=store).runs.preview(run_id)
    except RunOwned:
        return True
    return False


ASKING = DAG([Task("a", prompt="a")])


class LateStore(FaultyStore):
    """Its answer to the first write that leaves a run comes only once `answer` is set; `left` tells of that write."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.left, self.answer = anyio.Event(), anyio.Event()

    async def write(self, batch: Batch) -> None:
        await super().write(batch)
        if not self.left.is_set() and any(isinstance(change, RunEnded) for change in batch.events):
            self.left.set()
            await self.answer.wait()


@asynccontextmanager
async def just_ended(store: LateStore, runner: ParallelRunner) -> AsyncGenerator[tuple[Runs, str]]:
    """A service whose run has ended in the store a moment ago."""
    async with quick_runs(runner) as runs:
        run_id = await runs.create(ASKING)
        await runs.start(run_id)
        with anyio.fail_after(60):
            await store.left.wait()
        assert runs.driven == (run_id,)
        yield runs, run_id


async def ended(runs: Runs, run_id: str) -> RunStatus:
    with anyio.fail_after(60):
        async for _ in runs.events(run_id):
            pass
    return (await runs.get(run_id)).status


async def hear_of_it(store: LateStore, group: anyio.abc.TaskGroup, *calls: object) -> None:
    """Make the calls, and have the store answer once all of them wait."""
    for call in calls:
        group.start_soon(call)  # type: ignore[arg-type]
    await anyio.wait_all_tasks_blocked()
    store.answer.set()


async def test_an_answer_to_a_run_that_has_just_stopped_to_wait_for_it_makes_it_go_on() -> None:
    async def work(_prompt: str) -> str:
        return f"got {await ask('Go?')}"

    store = LateStore()
    async with just_ended(store, ParallelRunner(work, store=store)) as (runs, run_id):
        async with anyio.create_task_group() as group:
            await hear_of_it(store, group, lambda: runs.start(run_id, {"a": "yes"}))
        assert await ended(runs, run_id) is RunStatus.COMPLETED
        assert (await runs.get(run_id)).tasks["a"].text == "got yes"


@pytest.mark.parametrize("callers", [1, 3])
async def test_a_run_that_has_just_failed_is_tried_again(callers: int) -> None:
    prompts: list[str] = []

    async def work(prompt: str) -> str:
        prompts.append(prompt)
        if len(prompts) == 1:
            raise RuntimeError("not today")
        return prompt

    store = LateStore()
    async with just_ended(store, ParallelRunner(work, store=store)) as (runs, run_id):
        async with anyio.create_task_group() as group:
            again = [lambda: runs.start(run_id, retry_failed=True)] * callers
            await hear_of_it(store, group, *again)
        assert await ended(runs, run_id) is RunStatus.COMPLETED
    assert len(prompts) == 2


async def test_a_mistake_of_one_caller_is_not_that_of_those_who_came_meanwhile() -> None:
    async def whether(_prompt: str) -> str:
        return str(await ask("how many?", schema={"type": "integer"}))

    store = MemoryStore()
    runner = ParallelRunner(whether, store=store)
    first = await runner.run(DAG([Task("a", "a"), Task("b", "b")]))
    told: list[str] = []
    async with quick_runs(runner) as runs, anyio.create_task_group() as group:

        async def resume(answers: dict[str, JsonInput] | None) -> None:
            try:
                await runs.start(first.run_id, answers)
            except PlaitError as error:
                told.append(str(error))

        for answers in ({"a": "no number"}, {"b": 7}, None):
            group.start_soon(resume, answers)
    assert ["no number" in one for one in told] == [True]
    assert [task.status for task in await store.list_tasks(first.run_id)] == ["waiting_input", "completed"]


async def test_a_history_ends_also_where_somebody_went_on_with_a_conversation_after_the_run() -> None:
    def another_session(prompt: str, request: ConversationRequest) -> Reply:
        request.on_session(f"session of {prompt}")
        return Reply(prompt, session_id=f"session of {prompt}")

    runner = ParallelRunner(Talker(another_session, own_ids=True), store=MemoryStore())
    result = await runner.run(ASKING)
    await runner.runs.continue_task(result.run_id, "a", "more")
    async with quick_runs(runner, 3600) as runs:
        kinds = [event.kind async for event in runs.events(result.run_id)]
    assert kinds[-2:] == ["run_completed", "session_opened"]


async def test_runs_are_exported_and_deleted(tmp_path: Path) -> None:
    async def echo(prompt: str) -> str:
        return prompt

    async with ParallelRunner(echo, store=tmp_path / "runs.db") as runner:
        for run_id in ("old", "new"):
            await runner.run([Task("a", "one"), Task("b", "two")], run_id)
        assert [(row["task_id"], row["text"]) for row in await runner.runs.export("old")] == [
            ("a", "one"),
            ("b", "two"),
        ]
        assert [row["task_id"] for row in await runner.runs.export("old", "b*")] == ["b"]
        would = await runner.runs.delete(keep=1, dry_run=True)
        assert ([run.run_id for run in would.runs], would.kept) == (["old"], 1)
        assert [run.run_id for run in (await runner.runs.delete(keep=1)).runs] == ["old"]
        assert [run.run_id for run in await runner.runs.list()] == ["new"]
        assert (await runner.runs.delete()).runs == []
    with pytest.raises(PlaitError, match="a MemoryStore deletes no runs"):
        await ParallelRunner(echo, store=MemoryStore()).runs.delete(keep=0)


async def test_a_task_that_a_crash_cut_waits_for_a_person_before_any_resume(store: Store) -> None:
    runs = ParallelRunner(Talker(), store=store).runs
    await die(store, Dying(lambda prompt: prompt == "pay"), DAG([Task("pay", "pay", at_most_once=True)], name="bills"))
    assert await runs.questions() == await runs.questions("r") == []
    (one,) = await runs.questions("r", interrupted=True)
    assert await runs.questions(interrupted=True) == [one]
    assert (one.run_name, one.task_id, one.attempt, one.asks) == ("bills", "pay", 1, None)
    await runs.settle("r", "pay", "done", "paid")
    assert await runs.questions("r", interrupted=True) == []


async def test_an_estimate_counts_the_calls_of_an_earlier_run_and_calls_nothing() -> None:
    talker, store = Talker(), MemoryStore()
    runner, dag = ParallelRunner(talker, store=store), DAG([Task("a", "a"), Task("b", "b {{ a }}", ["a"])])
    await runner.run(dag, "r")
    prompts = len(talker.prompts)
    estimate = await runner.runs.estimate(dag, like="r")
    assert (estimate.calls, estimate.like, [task.earlier_calls for task in estimate.tasks]) == (2, "r", [1, 1])
    assert ((await runner.runs.estimate(dag)).like, len(talker.prompts)) == (None, prompts)
    with pytest.raises(RunNotFound):
        await runner.runs.estimate(dag, like="nope")


async def test_taking_up_starts_the_posted_runs_that_nobody_executes(store: Store) -> None:
    told: dict[str, PlaitError | None] = {}
    runner = ParallelRunner(Talker(), store=store)
    dag, posted = DAG([Task("a", "a")]), {"posted": True}
    async with runner.runs as runs:
        await runs.create(dag, "mine", settings=posted)
        await runs.create(dag, "other")
        await runner.run(dag, "ended", settings=posted)
        other = ParallelRunner(backends={"gone": Talker()}, store=store)
        await other.runs.create(DAG([Task("a", "a", backend="gone")]), "lost", settings=posted)
        await runs.take_up(told.__setitem__)
        async for _ in runs.events("mine"):
            pass
        assert (await runs.get("other")).status is RunStatus.QUEUED
    assert told["mine"] is None and "gone" in str(told["lost"]) and len(told) == 2
