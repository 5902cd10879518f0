"""How many tasks of a run are under way at once, if nobody gives the number: as many as the backends say."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, SQLiteStore
from plait.backends import ConversationRequest, Reply
from plait.runner.scheduling.slots import default_concurrency
from tests.support.processes.command import plait_here
from tests.support.sharing import COMPLETED, Meter, wide

STORE = Path(".plait/plait.db")
WORK = """
from pathlib import Path

import anyio

running = most = 0
began = None

async def meet(prompt):
    '''Return once so many calls are under way as the prompt says; note the most at once.'''
    global running, most, began
    began = began or anyio.current_time()
    running += 1
    most = max(most, running)
    Path("most").write_text(str(most))
    while most < int(prompt) and anyio.current_time() - began < 60:
        await anyio.sleep(0.01)
    await anyio.sleep(0.1)  # in which one more would begin, if it might
    running -= 1
    return "met"
"""
PLAN = """
{top}
backends:
{backends}
defaults: {{backend: one}}
tasks: [{tasks}]
"""
ONE = '  one: {{kind: function, call: "work.py:meet"{0}}}\n'
TWO = '  two: {{kind: function, call: "work.py:meet"{0}}}\n'


def plan_of(folder: Path, backends: str, top: str = "", most: int = 0) -> None:
    (folder / "work.py").write_text(WORK)
    tasks = ", ".join(f"{{id: t{number}, prompt: '{most}'}}" for number in range(20))
    (folder / "plan.yaml").write_text(PLAN.format(top=top, backends=backends, tasks=tasks))


@pytest.mark.parametrize(
    ("stated", "number"),
    [([], 8), ([None], 8), ([None, None], 8), ([32], 32), ([1], 1), ([32, 4], 36), ([32, None, None], 40)],
)
def test_the_default_is_the_sum_of_what_is_stated_and_8_for_the_rest(stated: list[int | None], number: int) -> None:
    assert default_concurrency(stated) == number


@pytest.mark.parametrize("number", ["many", "0", "10001"])
def test_what_is_no_number_of_tasks_is_said(tmp_path: Path, number: str) -> None:
    plan_of(tmp_path, ONE.format(""), "")
    done = plait_here(tmp_path, "run", "plan.yaml", "-j", number)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"'{number}' is neither a number of tasks from 1 to 10,000 nor auto" in done.err


@pytest.mark.parametrize(
    ("backends", "top", "words", "number"),
    [
        (ONE.format(", concurrency: 16"), "", (), 16),
        (ONE.format(", concurrency: 2") + TWO.format(", concurrency: 3"), "", (), 5),
        (ONE.format(", concurrency: 16") + TWO.format(""), "", (), 24),
        (ONE.format(""), "", (), 8),
        (ONE.format(", concurrency: 16"), "concurrency: 5", (), 5),
        (ONE.format(", concurrency: 16"), "concurrency: 5", ("-j", "7"), 7),
        (ONE.format(""), "concurrency: auto", (), "auto"),
        (ONE.format(""), "", ("-j", "auto"), "auto"),
    ],
)
def test_a_submitted_plan_stores_the_number(
    tmp_path: Path, backends: str, top: str, words: tuple[str, ...], number: int | str
) -> None:
    plan_of(tmp_path, backends, top)
    done = plait_here(tmp_path, "run", "plan.yaml", "--queue", *words)
    assert done.code == 0, done.err

    async def read() -> object:
        async with SQLiteStore(tmp_path / STORE, mode="read") as store:
            run = await store.get_run(done.out.strip())
            assert run is not None
            return json.loads(run.settings)["concurrency"]

    assert anyio.run(read) == number


@pytest.mark.parametrize(("backends", "most"), [(ONE.format(", concurrency: 12"), 12), (ONE.format(""), 8)])
def test_as_many_tasks_of_a_plan_run_at_once_as_its_backends_say(tmp_path: Path, backends: str, most: int) -> None:
    plan_of(tmp_path, backends, most=most)
    done = plait_here(tmp_path, "run", "plan.yaml", "-q", "--no-store")
    assert done.code == 0, done.err
    assert (tmp_path / "most").read_text() == str(most)


async def test_a_runner_has_the_sum_of_its_limits() -> None:
    async def most_of(**options: object) -> int:
        meter = Meter()
        runner = ParallelRunner(backends={"a": meter, "b": meter}, default="a", **options)  # type: ignore[arg-type]
        assert (await runner.run(wide("r", 60))).status is COMPLETED
        assert runner.runs.options.concurrency is not None
        return meter.most

    assert await most_of(limits={"a": 20, "b": 1}) == 20
    assert await most_of(limits={"a": 20}, concurrency=3) == 3
    assert await most_of() == 8


class Program(Meter):
    """Starts programs on this machine."""

    adjustable = ("cwd", "env")

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Program]:
        yield self

    async def send(self, prompt: str) -> Reply:
        return Reply(await Meter.__call__(self, prompt))


async def test_a_width_that_finds_itself_leaves_stated_numbers_and_programs_alone() -> None:
    free, stated, program = Meter(), Meter(), Program()
    backends: dict[str, Any] = {"free": free, "stated": stated, "program": program}
    dag = DAG([*wide("f", 300, "free"), *wide("s", 100, "stated"), *wide("p", 100, "program")])
    runner = ParallelRunner(backends=backends, limits={"stated": 3}, concurrency="auto")
    assert (await runner.run(dag)).status is COMPLETED
    assert free.most > 8
    assert (stated.most, program.most) == (3, 8)


@pytest.mark.parametrize("wrong", [0, "many", 1.5])
def test_another_word_or_number_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match='concurrency must be at least 1, "auto" or None'):
        ParallelRunner(Meter(), concurrency=wrong)
    plan_of(tmp_path, ONE.format(""))
    done = plait_here(tmp_path, "run", "plan.yaml", "-j", str(wrong))
    assert (done.code, "-j" in done.err) == (2, True)


@pytest.mark.parametrize(("words", "stored"), [((), 3), (("--priority", "-2"), -2)])
def test_the_priority_of_a_run_is_stored(tmp_path: Path, words: tuple[str, ...], stored: int) -> None:
    (tmp_path / "plan.yaml").write_text("priority: 3\ntasks: [{id: t, run: [echo, hi]}]\n")
    plait_here(tmp_path, "run", "plan.yaml", "--queue", *words)
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as database:
        [(settings,)] = database.execute("SELECT settings FROM runs")
    assert json.loads(settings)["priority"] == stored
