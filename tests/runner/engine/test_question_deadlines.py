"""An answer that was sent by the deadline counts, also where its owner had not yet seen it when the deadline passed."""

from __future__ import annotations

import json

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait import events as new_events
from plait.backends import ask
from plait.clock_and_ids import iso, parse_time
from plait.json_form import JsonValue
from plait.persistence import MemoryStore, Note, Store
from plait.runner.domain.asked_question import answers_of
from tests.support.fakes import QuickClock
from tests.support.stores.faulty_store import Fault, FaultyStore

DEADLINE_S = 60.0
WIDE = DAG([Task("a", "late"), Task("hold", "hold")])


class AtTheDeadline(QuickClock):
    """No look into the inbox ever comes; the deadline passes when `passes` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = anyio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == DEADLINE_S:
            await self.passes.wait()
        await super().sleep(seconds)


class Scene:
    """Runs WIDE in `store`, where `a` asks with a default and `hold` waits until it goes on."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = AtTheDeadline()
        self.runner = ParallelRunner(self._work, store=store, clock=self.clock)
        self._limiter = anyio.Event()

    async def _work(self, prompt: str) -> str:
        if prompt == "hold":
            await self._limiter.wait()
            return "held"
        return str(await ask("Go?", default="later", deadline=DEADLINE_S))

    async def answered_with(self, *notes: Note) -> tuple[str, str]:
        """What the question came to, and by whom, where these were sent before its deadline passed."""
        answers: list[tuple[str, str]] = []
        with anyio.fail_after(60):
            async with self.runner.start(WIDE) as run:
                async for event in run.events():
                    if isinstance(event, new_events.TaskWaiting):
                        for note in notes:
                            await self.store.send(run.run_id, note)
                        self.clock.passes.set()
                    if isinstance(event, new_events.TaskAnswered):
                        answers += [(str(one.value), one.by) for one in answers_of(event.answers)]
                        self._limiter.set()
                result = await run.result()
        (answer,) = answers
        assert (result.status, result.text["a"]) == (RunStatus.COMPLETED, answer[0])
        return answer


def note(value: JsonValue, late_s: float = -0.5, attempt: int = 1) -> Note:
    """An answer, sent so many seconds after the deadline by the clock of its sender."""
    at = iso(QuickClock().wall() + DEADLINE_S + late_s)
    return Note("answer", at, "a", json.dumps({"attempt": attempt, "value": value, "nonce": "1"}))


@pytest.mark.parametrize(
    ("notes", "answer"),
    [
        ([note("yes")], ("yes", "person")),
        ([note("yes", late_s=0)], ("yes", "person")),
        ([note(1), note("first"), note("second")], ("first", "person")),
        ([note("too late", late_s=0.5)], ("later", "default")),
        ([note("another question", attempt=2)], ("later", "default")),
    ],
)
async def test_what_was_sent_in_time_comes_before_the_default(
    store: Store, notes: list[Note], answer: tuple[str, str]
) -> None:
    assert await Scene(store).answered_with(*notes) == answer


async def test_an_inbox_that_cannot_be_read_keeps_nobody_waiting() -> None:
    store = FaultyStore(MemoryStore(), lambda method, _: Fault.BEFORE if method == "list_notes" else None)
    assert await Scene(store).answered_with(note("yes")) == ("later", "default")


async def test_a_clock_that_is_set_back_lets_no_deadline_pass_early() -> None:
    class SetBack(QuickClock):
        set_back = False

        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            if seconds == DEADLINE_S and not self.set_back:
                self.set_back, self.now = True, self.now - DEADLINE_S / 2

    done, clock = anyio.Event(), SetBack()

    async def work(prompt: str) -> str:
        if prompt == "hold":
            await done.wait()
            return "held"
        return str(await ask("Go?", default="later", deadline=DEADLINE_S))

    times: list[str] = []
    async with ParallelRunner(work, store=MemoryStore(), clock=clock).start(WIDE) as run:
        async for event in run.events():
            if isinstance(event, new_events.TaskWaiting | new_events.TaskAnswered):
                times.append(event.at)
                if len(times) == 2:
                    done.set()
    asked, answered = map(parse_time, times)
    assert answered - asked >= DEADLINE_S
