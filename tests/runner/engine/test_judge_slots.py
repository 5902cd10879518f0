"""The judge of a check takes a slot, and a share of the rate limits, of its own backend, as a task does."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from plait import DAG, Check, MemoryStore, ParallelRunner, RateLimits, RunStatus, Task, TaskStatus, events
from plait.errors import Conflict
from plait.persistence import Batch
from tests.support.seeded_loop import VirtualClock, run_seeded
from tests.support.stores.faulty_store import FaultyStore

SEEDS = range(5)
PASSED = {"ok": True, "reason": "fine"}


class Judge:
    """Judges for `seconds`, and counts how many judge at once."""

    def __init__(self, seconds: float = 1.0, *verdicts: object) -> None:
        self.seconds = seconds
        self.verdicts = list(verdicts)
        self.began: list[float] = []
        self.at_once = self.most = 0

    async def __call__(self, prompt: str) -> Any:
        self.began.append(asyncio.get_running_loop().time())
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await anyio.sleep(self.seconds)
        finally:
            self.at_once -= 1
        verdict = self.verdicts.pop(0) if self.verdicts else PASSED
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


class Answers:
    """Answers at once, and notes when."""

    def __init__(self) -> None:
        self.began: list[float] = []

    async def __call__(self, prompt: str) -> str:
        self.began.append(asyncio.get_running_loop().time())
        return prompt


def judged(count: int, backend: str | None = "strict", **options: Any) -> DAG:
    check = Check(judge="Fine? {{ answer }}", backend=backend)
    return DAG([Task(f"t{number}", "p", check=check, **options) for number in range(count)])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("slots", "concurrency"), [(1, 8), (2, 8), (8, 8), (8, 1)])
def test_no_more_judge_at_once_than_their_backend_has_slots(seed: int, slots: int, concurrency: int) -> None:
    judge = Judge()

    async def run() -> None:
        runner = ParallelRunner(
            Answers(),
            backends={"strict": judge},
            limits={"strict": slots},
            concurrency=concurrency,
            clock=VirtualClock(),
        )
        result = await runner.run(judged(8))
        assert (result.status, len(judge.began)) == (RunStatus.COMPLETED, 8)

    run_seeded(run, seed)
    assert judge.most == min(slots, concurrency)


def test_while_an_answer_waits_for_its_judge_others_are_asked() -> None:
    answers, judge = Answers(), Judge(10.0)

    async def run() -> None:
        runner = ParallelRunner(
            answers,
            backends={"strict": judge},
            limits={"strict": 1, "default": 1},
            concurrency=2,
            clock=VirtualClock(),
        )
        assert (await runner.run(judged(4))).status is RunStatus.COMPLETED

    run_seeded(run, 1)
    assert max(answers.began) < judge.began[1], "the slot of an answer is free for the next one"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_judge_takes_its_share_of_the_limits_of_rate(seed: int) -> None:
    judge = Judge(0.0)

    async def run() -> None:
        rates = {"strict": RateLimits(requests_per_minute=60)}
        runner = ParallelRunner(Answers(), backends={"strict": judge}, rates=rates, clock=VirtualClock())
        assert (await runner.run(judged(80))).status is RunStatus.COMPLETED

    run_seeded(run, seed)
    begin = judge.began[0]
    for seconds in range(1, int(judge.began[-1] - begin)):
        assert sum(at <= begin + seconds for at in judge.began) <= 61 + seconds
    assert judge.began[-1] - begin >= 18, "eighty calls of sixty a minute"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_refused_answer_is_asked_for_again_in_a_slot_of_its_own_backend(seed: int) -> None:
    no = {"ok": False, "reason": "no"}
    judge, answers = Judge(1.0, no, no, ConnectionError("gone")), Answers()

    async def run() -> None:
        limits = {"strict": 1, "default": 1}
        runner = ParallelRunner(answers, backends={"strict": judge}, limits=limits, concurrency=2, clock=VirtualClock())
        result = await runner.run(judged(3))
        assert result.status is RunStatus.COMPLETED

    run_seeded(run, seed)
    assert (judge.most, len(judge.began), len(answers.began)) == (1, 6, 5)


def test_a_judge_of_the_same_backend_uses_the_slot_that_is_there() -> None:
    calls = Judge(1.0)

    async def run() -> None:
        runner = ParallelRunner(calls, concurrency=1, clock=VirtualClock())
        assert (await runner.run(judged(3, None, output_schema=None))).status is RunStatus.COMPLETED

    run_seeded(run, 1)
    assert (calls.most, len(calls.began)) == (1, 6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("end", ["cancel", "stop", "race"])
def test_an_end_while_an_answer_waits_for_its_judge_leaves_no_slot_taken(end: str, seed: int) -> None:
    judge = Judge(5.0)
    check = Check(judge="Fine? {{ answer }}", backend="strict")

    async def quick(prompt: str) -> str:
        await anyio.sleep(1.0)
        return prompt

    async def run() -> None:
        runner = ParallelRunner(
            Answers(),
            backends={"strict": judge, "quick": quick},
            limits={"strict": 1},
            concurrency=3,
            clock=VirtualClock(),
        )
        lost = [Task(name, "p", check=check, failure_mode="skip") for name in ("a", "b")]
        won = Task("won", "w", backend="quick")
        pick = Task("pick", "x", depends_on=["a", "b", "won"], join="any", race=True)
        last = Task("last", "x", depends_on=["pick"], backend="strict", output_schema={"type": "object"})
        async with runner.start(DAG([*lost, won, pick, last] if end == "race" else lost)) as run:
            async for event in run.events():
                if (
                    isinstance(event, events.TaskOutput)
                    and "waits for a slot of strict" in event.text
                    and end != "race"
                ):
                    (run.cancel if end == "cancel" else run.stop)()
            result = await run.result()
        if end == "race":
            assert [result[name].status for name in ("a", "b")] == [TaskStatus.CANCELLED] * 2
            assert result["last"].status is TaskStatus.COMPLETED
        else:
            assert result.status is (RunStatus.CANCELLED if end == "cancel" else RunStatus.INTERRUPTED)

    run_seeded(run, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_race_that_is_lost_while_a_judge_waits_starts_no_other_loser(seed: int) -> None:
    """The waiting judge stands before another loser in the queue of its backend."""
    judge = Judge()

    async def late(prompt: str) -> str:
        await anyio.sleep(0.5)
        return prompt

    async def run() -> None:
        runner = ParallelRunner(
            Answers(),
            backends={"strict": judge, "late": late},
            limits={"strict": 1},
            concurrency=8,
            clock=VirtualClock(),
        )
        check = Check(judge="Fine? {{ answer }}", backend="strict")
        busy = [Task("busy", "x", backend="strict"), Task("then", "x", depends_on=["busy"])]
        losers = [Task("judged", "x", check=check), Task("pending", "x", backend="strict")]
        won = Task("won", "w", backend="late")
        pick = Task("pick", "x", depends_on=["judged", "pending", "won"], join="any", race=True)
        result = await runner.run(DAG([*busy, Task("end", "x", depends_on=["then"]), *losers, won, pick]))
        assert result.status is RunStatus.COMPLETED
        assert [result[name].status for name in ("judged", "pending")] == [TaskStatus.CANCELLED] * 2
        assert len(judge.began) == 1

    run_seeded(run, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("answers_late", [False, True], ids=["waits already", "answers afterwards"])
def test_after_a_refusal_of_the_store_an_answer_is_still_judged(seed: int, answers_late: bool) -> None:
    """No slot is given out any more then, and the judge would wait for ever."""
    judge, answers = Judge(3.0), list[str]()

    async def late(prompt: str) -> str:
        await anyio.sleep(1.0 if prompt == "judged" and answers_late else 0.5)
        answers.append(prompt)
        return prompt

    class Refuses(FaultyStore):
        async def write(self, batch: Batch) -> None:
            if any(isinstance(one, events.TaskCompleted) and one.task_id == "broken" for one in batch.events):
                raise Conflict("a value cannot be stored")
            await super().write(batch)

    async def run() -> None:
        runner = ParallelRunner(
            late,
            backends={"strict": judge},
            limits={"strict": 1},
            concurrency=8,
            clock=VirtualClock(),
            store=Refuses(MemoryStore()),
        )
        check = Check(judge="Fine? {{ answer }}", backend="strict")
        busy, broken = Task("busy", "x", backend="strict"), Task("broken", "broken", retry=0)
        result = await runner.run(DAG([busy, broken, Task("judged", "judged", check=check)]), "r")
        assert result["judged"].status is TaskStatus.COMPLETED
        assert answers.count("judged") == 1, "the answer is not paid for twice"

    run_seeded(run, seed)
