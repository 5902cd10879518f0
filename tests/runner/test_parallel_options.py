"""What a runner is made with and a run is called: kept as given, or refused in one line."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import get_args, get_type_hints

import anyio
import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, Task
from plait.errors import BackendError, BackendMissing, ErrorKind, RunExists
from plait.persistence import MemoryStore, SQLiteStore
from plait.workflows import FollowUp, FollowUps
from tests.support.fakes import QuickClock, Talker

HAIKU = DAG(
    [
        Task("facts", prompt="List three facts."),
        Task("haiku", prompt="Write a haiku from these facts:\n{{ facts }}", depends_on=["facts"]),
    ]
)


async def test_a_given_run_id_is_kept_and_may_not_be_used_twice() -> None:
    runner = ParallelRunner(Talker(), store=MemoryStore())
    assert (await runner.run(HAIKU, run_id="mine")).run_id == "mine"
    with pytest.raises(RunExists, match="already has a run 'mine'; resume it, or give another run id"):
        await runner.run(HAIKU, run_id="mine")


async def test_made_run_ids_sort_by_time_and_differ() -> None:
    runner = ParallelRunner(Talker())
    ids = [(await runner.run(DAG([Task("a", "a")]))).run_id for _ in range(20)]
    assert len(set(ids)) == 20
    clock = QuickClock()
    runner = ParallelRunner(Talker(), clock=clock)
    timed = []
    for _ in range(5):
        timed.append((await runner.run(DAG([Task("a", "a")]))).run_id)
        clock.now += 1.0
    assert timed == sorted(timed)


async def test_one_runner_runs_several_dags_at_once() -> None:
    store = MemoryStore()
    runner = ParallelRunner(Talker(), store=store)
    ids: list[str] = []

    async def one() -> None:
        ids.append((await runner.run(HAIKU)).run_id)

    async with anyio.create_task_group() as tg:
        for _ in range(5):
            tg.start_soon(one)
    assert {run.run_id for run in await store.list_runs()} == set(ids)
    assert {run.status for run in await store.list_runs()} == {"completed"}


@pytest.mark.parametrize("bad", [{"concurrency": 0}, {"limits": {"x": 0}}])
def test_bad_options_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1.*, not 0"):
        ParallelRunner(Talker(), **bad)


def test_a_failure_mode_may_be_given_as_a_word() -> None:
    assert Task("a", "a", failure_mode="soft").failure_mode is FailureMode.SOFT
    with pytest.raises(ValueError, match="'sotf' is not a valid FailureMode"):
        Task("a", "a", failure_mode="sotf")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Task, FollowUp])
def test_type_checkers_accept_the_words_of_all_failure_modes(kind: type) -> None:
    enum, words = get_args(get_type_hints(kind)["failure_mode"])
    assert enum is FailureMode
    assert set(get_args(words)) == {mode.value for mode in FailureMode}


@pytest.mark.parametrize("kinds", [["timeout"], {"timeout"}, (ErrorKind.TIMEOUT,), iter(["timeout"])])
def test_the_kinds_that_are_tried_again_may_be_any_collection(kinds: Collection[str]) -> None:
    retry = Retry(on=kinds)
    assert retry == Retry(on=frozenset({"timeout"}))
    assert hash(retry) == hash(Retry(on={"timeout"}))
    assert "{'timeout'}" in repr(retry)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rate_limit"}, "unknown error kind 'rate_limit'; did you mean 'rate_limited'?"),
        ([3], "unknown error kind 3"),
        ("timeout", "retry on must be a collection of error kinds, not one text; write ['timeout']"),
    ],
)
def test_kinds_that_there_are_not_are_refused(bad: Collection[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Retry(on=bad)


async def test_what_a_list_of_kinds_names_is_tried_again() -> None:
    talker = Talker(lambda *_: BackendError(ErrorKind.REFUSED, "no"))
    dag = DAG([Task("a", "a", retry=Retry(2, on=["refused"]))])
    result = await ParallelRunner(talker, store=MemoryStore(), clock=QuickClock()).run(dag)
    assert (result["a"].attempts, result["a"].error) == (2, "no")


@pytest.mark.parametrize("store", [None, MemoryStore()])
@pytest.mark.parametrize("bad", [{"a": object()}, {"a": float("nan")}])
async def test_settings_that_are_no_json_are_refused(store: MemoryStore | None, bad: dict) -> None:
    dag, refused = DAG([Task("a", "a")]), "settings have to be JSON, to be stored with the run: "
    with pytest.raises(ValueError, match=refused):
        await ParallelRunner(Talker(), store=store).run(dag, settings=bad)


async def test_a_policy_whose_settings_are_no_json_is_refused() -> None:
    class Odd(FollowUps):
        def settings(self) -> dict:
            return {"a": {1, 2}}

    with pytest.raises(ValueError, match="the settings of policy 'follow_ups' have to be JSON"):
        await ParallelRunner(Talker()).run(DAG([Task("a", "a")]), policy=Odd())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"limits": {"nope": 1}}, "limits names 'nope', which is no backend of this runner"),
        ({"default": "nope"}, "default names 'nope', which is no backend of this runner"),
        ({"store_timeout": -1}, "store_timeout must be more than 0 seconds, not -1"),
    ],
)
def test_misspelt_options_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelRunner(backends={"one": Talker(), "two": Talker()}, **bad)


async def test_a_task_that_names_no_backend_needs_a_default_one() -> None:
    runner = ParallelRunner(backends={"one": Talker(), "two": Talker()})
    with pytest.raises(BackendMissing, match=r"task 'a' names no backend; set `default=`.* runner: one, two"):
        await runner.run(DAG([Task("a", "a")]))


@pytest.mark.parametrize("bad", ["last", "", "a b", "\ud800", "x" * 200, ".hidden"])
def test_run_ids_that_could_not_be_typed_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        ParallelRunner(Talker()).start(DAG([Task("a", "a")]), bad)


@pytest.mark.parametrize("key", ["concurrency", "digest", "format", "inputs", "key", "policy", "ticket"])
async def test_settings_that_plait_keeps_itself_are_refused(key: str) -> None:
    """Read back, they would be taken for its own."""
    store, settings = MemoryStore(), {"for": "Ada", key: "strict"}
    runner, dag = ParallelRunner(Talker(), store=store), DAG([Task("a", prompt="a")])
    refused = rf"settings cannot have '{key}', reserved for plait"
    with pytest.raises(ValueError, match=refused):
        await runner.run(dag, settings=settings)
    with pytest.raises(ValueError, match=refused):
        runner.start(dag, settings=settings)
    with pytest.raises(ValueError, match=refused):
        await runner.runs.create(dag, settings=settings)
    assert await store.list_runs() == ()


def test_on_another_event_loop_it_says_which_one_it_needs(tmp_path: Path) -> None:
    async def opens() -> None:
        async with SQLiteStore(tmp_path / "runs.db"):
            pass

    async def runs() -> None:
        await ParallelRunner(Talker()).run(DAG([Task("a", "a")]))

    for coroutine in (opens(), runs()):
        with pytest.raises(RuntimeError, match=r"needs asyncio's event loop: asyncio\.run\(main\(\)\)"):
            coroutine.send(None)


@pytest.mark.parametrize(("error", "tries"), [(ConnectionResetError("reset"), 3), (TimeoutError(), 3), (OSError(), 1)])
async def test_what_ails_the_connection_is_tried_again(error: Exception, tries: int) -> None:
    called: list[str] = []

    async def calls(prompt: str) -> str:
        called.append(prompt)
        raise error

    result = await ParallelRunner(calls).run(DAG([Task("a", "x", retry=Retry(attempts=3, base_delay=0))]))
    assert (len(called), result["a"].error_kind) == (tries, "transient" if tries == 3 else "unexpected")
