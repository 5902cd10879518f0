"""Runs that are stored and not begun: `create_run`, its keys, and who may begin them."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, Plan, Runs, RunStatus, Task
from plait.errors import BackendMissing, KeyConflict, RunExists, RunOwned, StoreError, StoreRequired
from plait.persistence import MemoryStore, SQLiteStore, Store
from plait.runner.client.run_backends import BackendOptions, backend_set_of_plan
from plait.workflows import FollowUp, FollowUps
from tests.support.fakes import QuickClock, Talker
from tests.support.processes.command import plait
from tests.support.stores.faulty_store import Fault, FaultyStore, by_number


def dag(prompt: str = "Hello, {{ who }}", **changes: object) -> DAG:
    tasks = [Task("a", prompt=prompt, metadata={"x": 1, "y": 2}), Task("b", prompt="b", depends_on=["a"])]
    return DAG(tasks, name="pair", inputs={"who": "Ada", **changes})


async def test_a_queued_run_is_begun_by_resume(store: Store) -> None:
    run_id = await ParallelRunner(Talker(), store=store).runs.create(dag(), "mine")
    record = await store.get_run("mine")
    assert record is not None
    assert (run_id, record.status, record.owner, record.epoch) == ("mine", "queued", None, 0)
    async with ParallelRunner(Talker(), store=store).start_resume("mine") as run:
        told = [event.kind async for event in run.events()]
    assert (await run.result()).status is RunStatus.COMPLETED
    assert (told[0], "run_resumed" in told) == ("run_started", False)
    stored = [event.kind for event in await store.list_events("mine")]
    assert stored[1] == "run_started"
    assert "run_resumed" not in stored


async def test_the_same_key_is_the_same_run(store: Store) -> None:
    first = await ParallelRunner(Talker(), store=store).runs.create(dag(), key="k", settings={"a": 1, "b": 2})
    other = ParallelRunner(Talker(), store=store, concurrency=3)  # after a restart with another option
    assert await other.runs.create(dag(), key="k", settings={"b": 2, "a": 1}) == first
    assert (await other.resume(first)).status is RunStatus.COMPLETED
    assert await other.runs.create(dag(), key="k", settings={"b": 2, "a": 1}) == first
    assert await other.runs.create(dag(), key="another", settings={"b": 2, "a": 1}) != first
    assert len(await store.list_runs()) == 2


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [(dag("Bye, {{ who }}"), None), (dag(who="Bob"), None), (DAG([Task("a", prompt="a")]), None), (dag(), {"a": 2})],
)
async def test_a_key_is_not_used_for_something_else(store: Store, wanted: DAG, settings: dict | None) -> None:
    runner = ParallelRunner(Talker(), store=store)
    run_id = await runner.runs.create(dag(), key="k")
    with pytest.raises(KeyConflict, match=f"key 'k' was used at .* for run {run_id}, with another DAG"):
        await runner.runs.create(wanted, key="k", settings=settings)


async def test_a_queued_run_keeps_its_policy(store: Store) -> None:
    coded = DAG([Task("parser", prompt="code", metadata={"role": "coder"})])
    led = FollowUps({"coder": [FollowUp("reviewer", "review {{ work }}")]})
    runner = ParallelRunner(Talker(), store=store)
    run_id = await runner.runs.create(coded, key="k", policy=led)
    assert await runner.runs.create(coded, key="k", policy=led) == run_id
    with pytest.raises(KeyConflict):
        await runner.runs.create(coded, key="k")
    away = FollowUps({"coder": [FollowUp("reviewer", "review", backend="elsewhere")]})
    with pytest.raises(BackendMissing):
        await runner.runs.create(coded, policy=away)
    done = await ParallelRunner(Talker(), store=store).resume(run_id)
    assert dict(done.text) == {"parser": "re: code", "parser.reviewer": "re: review re: code"}


async def test_callers_who_race_get_one_run(path: Path) -> None:
    ids: list[str] = []

    async def create() -> None:
        async with SQLiteStore(path) as store:  # each with a connection of its own, as in a process of its own
            ids.append(await ParallelRunner(Talker(), store=store).runs.create(dag(), key="k"))

    async with SQLiteStore(path) as store:
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(create)
        assert [run.run_id for run in await store.list_runs()] == list(set(ids))
    assert len(ids) == 8


async def test_of_services_that_race_one_makes_the_run(store: Store) -> None:
    made: list[tuple[str, bool]] = []
    clock = QuickClock()  # whose time stands still: the requests are alike

    async def create(service: Runs) -> None:
        made.append(await service.find_or_create(dag(), key="k"))

    services = [ParallelRunner(Talker(), store=store, clock=clock).runs for _ in range(6)]
    async with anyio.create_task_group() as group:
        for service in services:
            group.start_soon(create, service)
    assert len({run_id for run_id, _ in made}) == 1
    assert sorted(is_new for _, is_new in made) == [False] * 5 + [True]
    assert await services[0].create(dag(), key="k") == made[0][0]
    assert not (await services[1].find_or_create(dag(), key="k"))[1]
    assert (await services[1].find_or_create(dag()))[1]


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER])
async def test_after_an_error_the_key_is_tried_again(fault: Fault) -> None:
    store = FaultyStore(MemoryStore(), by_number({1: fault}))
    runner = ParallelRunner(Talker(), store=store)
    with pytest.raises(StoreError):
        await runner.runs.create(dag(), key="k")
    run_id = await runner.runs.create(dag(), key="k")
    assert [run.run_id for run in await store.list_runs()] == [run_id]


async def test_what_is_refused(store: Store) -> None:
    runner = ParallelRunner(Talker(), store=store)
    await runner.runs.create(dag(), "taken")
    with pytest.raises(RunExists, match="already has a run 'taken'"):
        await runner.runs.create(dag(), "taken")
    for key in ("", "k" * 201, "\ud800"):
        with pytest.raises(ValueError, match="a key is text of 1 to 200 characters"):
            await runner.runs.create(dag(), key=key)
    with pytest.raises(ValueError, match="not both"):
        await runner.runs.create(dag(), "mine", key="k")
    with pytest.raises(ValueError, match="run id 'last'"):
        await runner.runs.create(dag(), "last")
    with pytest.raises(StoreRequired):
        await ParallelRunner(Talker()).runs.create(dag())


async def test_the_command_begins_a_queued_run(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        'backends: {w: {kind: function, call: "work.py:work"}}\ntasks: [{id: a, prompt: hello}]\n'
    )
    (tmp_path / "work.py").write_text("async def work(prompt):\n    return prompt.upper()\n")
    plan = Plan.load(tmp_path / "plan.yaml")
    backing = backend_set_of_plan(plan, BackendOptions())
    async with SQLiteStore(tmp_path / "runs.db") as store, backing.open(["w"]) as made:
        run_id = await Runs(backing.options(made, store=store)).create(plan.dag, settings=backing.settings())
    shown = plait(tmp_path, "runs", "--json", "--store", "runs.db").value
    assert [run["status"] for run in shown] == ["queued"]
    resumed = plait(tmp_path, "resume", "--store", "runs.db")
    assert (resumed.code, resumed.out) == (0, "HELLO\n"), resumed.err
    history = plait(tmp_path, "log", run_id, "--json", "--store", "runs.db").out.splitlines()
    assert [json.loads(line)["kind"] for line in history][:2] == ["run_created", "run_started"]


async def test_a_queued_run_can_be_taken_from_once_it_has_run() -> None:
    made: list[str] = []

    async def work(prompt: str) -> str:
        made.append(prompt)
        return prompt

    runner, dag = ParallelRunner(work, store=MemoryStore()), DAG([Task("a", "a")])
    run_id = await runner.runs.create(dag, key="k")
    await runner.resume(run_id)
    await runner.run(dag, like=run_id)
    assert made == ["a"]


async def test_a_run_with_a_key_begins_and_then_returns_its_result(store: Store) -> None:
    talker = Talker()
    first = await ParallelRunner(talker, store=store).run(dag(), key="nightly-2026-11-27")
    assert (first.status, len(talker.prompts)) == (RunStatus.COMPLETED, 2)
    again = await ParallelRunner(talker, store=store).run(dag(), key="nightly-2026-11-27")
    assert (again.run_id, again.text, len(talker.prompts)) == (first.run_id, first.text, 2)
    other = await ParallelRunner(talker, store=store).run(dag(), key="nightly-2026-11-28")
    assert (other.run_id == first.run_id, len(talker.prompts)) == (False, 4)
    with pytest.raises(KeyConflict, match="another DAG"):
        await ParallelRunner(talker, store=store).run(dag("Bye"), key="nightly-2026-11-27")
    assert len(talker.prompts) == 4


async def test_a_run_with_a_key_goes_on_where_it_was_interrupted(store: Store) -> None:
    prompts: list[str] = []

    async def hangs_once(prompt: str) -> str:
        prompts.append(prompt)
        if prompt == "b" and prompts.count("b") == 1:
            scope.cancel()
            await anyio.sleep_forever()
        return prompt

    with anyio.CancelScope() as scope:
        await ParallelRunner(hangs_once, store=store).run(dag(), key="k")
    (stored,) = await store.list_runs()
    result = await ParallelRunner(hangs_once, store=store).run(dag(), key="k")
    assert (result.run_id, result.status) == (stored.run_id, RunStatus.COMPLETED)
    assert prompts[:2] == ["Hello, Ada", "b"]
    assert "Hello, Ada" not in prompts[2:]


async def test_a_failed_run_with_a_key_is_returned_as_it_failed(store: Store) -> None:
    calls: list[str] = []

    async def fails(prompt: str) -> str:
        calls.append(prompt)
        raise ValueError("broken")

    first = await ParallelRunner(fails, store=store).run(dag(), key="k")
    again = await ParallelRunner(fails, store=store).run(dag(), key="k")
    assert (first.status, again.status, again.error) == (RunStatus.FAILED, RunStatus.FAILED, first.error)
    assert calls == ["Hello, Ada"]


async def test_a_run_with_a_key_that_executes_elsewhere_is_left_to_its_owner(store: Store) -> None:
    began = anyio.Event()

    async def waits(prompt: str) -> str:
        began.set()
        await anyio.sleep_forever()
        return prompt

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: ParallelRunner(waits, store=store).run(dag(), key="k"))
        await began.wait()
        with pytest.raises(RunOwned):
            await ParallelRunner(Talker(), store=store).run(dag(), key="k")
        group.cancel_scope.cancel()


async def test_a_key_needs_a_store_and_excludes_a_run_id_and_other_answers(store: Store) -> None:
    with pytest.raises(StoreRequired):
        await ParallelRunner(Talker()).run(dag(), key="k")
    runner = ParallelRunner(Talker(), store=store)
    with pytest.raises(ValueError, match="a run id or a key"):
        await runner.run(dag(), "mine", key="k")
    with pytest.raises(ValueError, match="leave key or like out"):
        await runner.run(dag(), key="k", like="mine")
    assert await store.list_runs() == ()


async def test_a_queued_run_of_a_higher_priority_gets_the_slots_first(store: Store) -> None:
    order: list[str] = []
    are_started = anyio.Event()

    async def note(prompt: str) -> str:
        order.append(prompt)
        await are_started.wait()
        return prompt

    runs = ParallelRunner(note, store=store, concurrency=1, shared_limits=True).runs
    for name, priority in (("low", 0), ("high", 5)):
        await runs.find_or_create([Task(f"{name}{n}", name) for n in range(6)], name, priority=priority)
    async with runs:
        await runs.start("low")
        await runs.start("high")
        are_started.set()
        await runs.driven_to_end()
    first = order.index("high")
    assert order[first:] == ["high"] * 6 + ["low"] * (6 - first), "once it is there"
    assert first < 6
