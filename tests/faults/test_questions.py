"""A run whose tasks ask in every way dies at each of its writes in turn, and comes to the same end all the same."""

from __future__ import annotations

from contextlib import suppress

import pytest

from plait import DAG, OpenQuestion, ParallelRunner, RunResult, RunStatus, Task
from plait.backends import ask
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.dialogue import Question
from plait.errors import StoreError
from plait.json_form import JsonValue
from plait.persistence import MemoryStore, Store
from plait.runner.engine.attempt import INTERRUPTED
from tests.support.fakes import QuickClock, Talker
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

DAG_THAT_ASKS = DAG(
    [
        Task("talk", "a", backend="talker"),
        Task("later", "so {{ code }}", continues="talk", depends_on=["code"]),
        Task("code", "c", backend="code"),
        Task("late", "d", backend="code"),
    ]
)
GIVEN: dict[str, JsonValue] = {"Where to?": "Rome", "How many?": 3, "One?": "1", "Two?": "2"}
TEXTS = {"talk": "re: 3", "later": "re: so 1 and 2", "code": "1 and 2", "late": "by default"}


def talk(prompt: str, request: ConversationRequest) -> str | Reply:
    if prompt == "a":
        return Reply("Where to?", session_id=request.session_id, question=Question("Where to?"))
    if prompt == "Rome":
        question = Question("How many?", schema={"type": "integer"})
        return Reply("How many?", session_id=request.session_id, question=question)
    return f"re: {prompt}"


async def code(prompt: str) -> str:
    if prompt == "d":
        return str(await ask("Nobody knows?", default="by default", deadline=0))
    return f"{await ask('One?')} and {await ask('Two?')}"


async def answers(question: OpenQuestion) -> JsonValue:
    return GIVEN.get(question.text)


async def live(store: Store, run_id: str | None = None, *, callback: bool = True) -> RunResult:
    """One process's life: it ends with StoreError at its first failing write, and writes nothing after that."""
    runner = ParallelRunner(
        backends={"talker": Talker(talk, own_ids=True), "code": code},
        default="talker",
        store=store,
        strict=True,
        on_question=answers if callback else None,
        clock=QuickClock(),
    )
    return await (runner.run(DAG_THAT_ASKS, "r") if run_id is None else runner.resume(run_id))


async def see_through(store: Store, *, callback: bool) -> RunResult:
    """Resume until the run is over, with answers from the callback or, between two lives, from a person."""
    for _ in range(20):
        result = await live(store, "r", callback=callback)
        if result.status is not RunStatus.WAITING_INPUT:
            return result
        person = ParallelRunner(store=store)
        for question in await person.runs.questions("r"):
            if question.question in GIVEN:
                await person.runs.answer("r", question.task_id, GIVEN[question.question])
    raise AssertionError("it waits for ever")


def dying_at(inner: Store, last: int, fault: Fault) -> FaultyStore:
    return FaultyStore(inner, on_write(lambda number: fault if number >= last else None))


@pytest.mark.parametrize(
    ("fault", "callback", "second"),
    [
        (Fault.BEFORE, True, 1),
        (Fault.BEFORE, False, 3),
        (Fault.AFTER, True, 2),
        (Fault.AFTER, False, 8),
        (Fault.BEFORE, True, 5),
    ],
)
async def test_death_at_every_write(fault: Fault, callback: bool, second: int) -> None:
    """And once more at the `second` write of the life after that."""
    deaths = 0
    for last in range(1, 100):
        inner = MemoryStore()
        store = dying_at(inner, last, fault)
        try:
            result = await live(store, callback=callback)
        except StoreError:
            deaths += 1
        else:
            assert result.status is (RunStatus.COMPLETED if callback else RunStatus.WAITING_INPUT)
        if await inner.get_run("r") is None:
            continue
        with suppress(StoreError):
            await live(dying_at(inner, second, fault), "r", callback=callback)
        result = await see_through(inner, callback=callback)
        assert (result.status, dict(result.text)) == (RunStatus.COMPLETED, TEXTS), last
        said = [one.content for one in await inner.list_messages("r", "talk") if one.content != INTERRUPTED]
        assert said == ["a", "Where to?", "Rome", "How many?", "3", "re: 3"], last
        if store.writes < last:
            break
    assert deaths > (8 if callback else 4)
