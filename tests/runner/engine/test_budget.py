"""The money of a run: reserved before each call, settled after it, asked about at the limit."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import anyio
import pytest

from plait import Check, ParallelRunner, Retry, RunResult, RunStatus, Task, TaskStatus
from plait.backends import Conversation, ConversationRequest, Reply
from plait.backends.prices import Billing, Price
from plait.errors import BackendError, ErrorKind, InvalidRequest, PlaitError
from plait.events import BudgetRaised, TaskStarted
from plait.persistence import Store
from plait.runner.domain.asked_question import answers_of
from plait.runner.engine.call_costs import FRAMING_TOKENS
from plait.runner.state.budget import stored_budget
from plait.task import Call
from plait.usage import Usage

PRICE = Price(input=0.0, output=1_000_000.0)
"""A dollar for each token written, and nothing for input: sums are read off."""
MOST = 4
"""The most tokens of an answer, and so the dollars that a call reserves."""


@dataclass(eq=False)
class Priced:
    """A model that costs what `costs` says of each prompt: 1 dollar, unless told otherwise."""

    costs: Callable[[str], float | BackendError | None] = lambda _prompt: 1.0
    gate: anyio.Event | None = None
    """Calls wait for it."""
    most: int | None = MOST
    price: Price | None = PRICE
    calls: list[str] = field(default_factory=list[str])
    under_way: int = 0
    at_once: int = 0

    @property
    def billing(self) -> Billing:
        return Billing(None, "m", price=self.price, max_output_tokens=self.most)

    def new_session_id(self) -> str | None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        backend = self

        class Talk:
            session_id = None

            async def send(self, prompt: str) -> Reply:
                backend.calls.append(prompt)
                backend.under_way += 1
                backend.at_once = max(backend.at_once, backend.under_way)
                try:
                    await (anyio.lowlevel.checkpoint() if backend.gate is None else backend.gate.wait())
                    cost = backend.costs(prompt)
                finally:
                    backend.under_way -= 1
                if isinstance(cost, BackendError):
                    raise cost
                return Reply(prompt, usage=Usage(1, 1, cost_usd=cost))

        yield Talk()


def tasks(number: int, **more: object) -> list[Task]:
    return [Task(f"t{n}", f"prompt {n}", retry=Retry(attempts=1), **more) for n in range(number)]  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def asking(result: RunResult) -> list[str]:
    assert result.status is RunStatus.WAITING_INPUT
    return [one.id for one in result.tasks.values() if one.status is TaskStatus.WAITING_INPUT]


async def spent(store: Store, run_id: str) -> tuple[float, float]:
    """Return what a stored run has spent, and what is reserved for attempts without an end."""
    record = await store.get_run(run_id)
    assert record is not None
    budget = await stored_budget(store, run_id, json.loads(record.settings), (), is_limited=True)
    assert budget is not None
    return budget.spent, sum(budget.reserved.values())


async def test_parallel_calls_cannot_overspend() -> None:
    """Ten calls at once might cost 40 dollars: of a budget of 9 only two are under way together, and 1 + ... + 1."""
    backend = Priced()
    result = await ParallelRunner(backend, budget=9, concurrency=10).run(tasks(10))
    assert backend.at_once == 2
    assert (asking(result), len(backend.calls), result.usage.cost_usd) == (["t6"], 6, 6.0)
    question = "$6.00 of the budget of $9.00 is spent, and this call may cost $4.00: what is the new limit?"
    assert result["t6"].question == question
    assert [one.status for one in result.tasks.values()][7:] == [TaskStatus.PENDING] * 3


async def test_a_call_that_costs_its_worst_case_exactly_reaches_the_line() -> None:
    result = await ParallelRunner(Priced(lambda _: 4.0), budget=12, concurrency=10).run(tasks(3))
    assert (result.status, result.usage.cost_usd) == (RunStatus.COMPLETED, 12.0)


async def test_calls_under_way_end_normally_and_the_answer_lets_the_rest_run(store: Store) -> None:
    backend = Priced()
    runner = ParallelRunner(backend, store=store, budget=5, concurrency=10)
    first = await runner.run(tasks(8))
    assert (asking(first), first.usage.cost_usd) == (["t2"], 2.0)
    with pytest.raises(PlaitError, match="does not fit the question"):
        await runner.runs.answer(first.run_id, "t2", 5)
    assert await runner.runs.answer(first.run_id, "t2", 6)
    second = await ParallelRunner(backend, store=store, concurrency=10).resume(first.run_id)
    assert (asking(second), second.usage.cost_usd) == (["t3"], 3.0)
    assert second["t3"].question is not None and "$3.00 of the budget of $6.00 is spent" in second["t3"].question
    last = await ParallelRunner(backend, store=store, concurrency=10).resume(first.run_id, answers={"t3": 100})
    assert (last.status, last.usage.cost_usd, sorted(backend.calls)) == (
        RunStatus.COMPLETED,
        8.0,
        [task.prompt for task in tasks(8)],
    )
    raised = [json.loads(one.detail) for one in await store.list_events(first.run_id, kind=BudgetRaised.kind)]
    assert raised == [{"usd": 6.0}, {"usd": 100.0}]
    assert await spent(store, first.run_id) == (8.0, 0.0)


async def test_an_answer_while_other_calls_are_under_way_counts_at_once(store: Store) -> None:
    """A question in a live run is answered by the callback: twice, because the first raise is not enough."""
    raises, backend = iter([6.0, 50.0]), Priced()

    async def answer(_question: object) -> float:
        return next(raises)

    runner = ParallelRunner(backend, store=store, budget=5, concurrency=10, on_question=answer)
    result = await runner.run(tasks(8))
    assert (result.status, len(backend.calls)) == (RunStatus.COMPLETED, 8)
    assert [one.status for one in await store.list_attempts(result.run_id)].count("asked") == 2


async def test_a_higher_budget_of_a_resume_is_the_answer_and_holds_afterwards(store: Store) -> None:
    backend = Priced()
    run_id = (await ParallelRunner(backend, store=store, budget=4).run(tasks(6))).run_id
    lower = await ParallelRunner(backend, store=store, budget=3).resume(run_id)
    assert (asking(lower), len(backend.calls)) == (["t1"], 1)
    higher = await ParallelRunner(backend, store=store, budget=6).resume(run_id)
    assert (asking(higher), len(backend.calls)) == (["t3"], 3)
    answered = (await store.list_tasks(run_id))[1].answers
    assert answered is not None and [one.by for one in answers_of(answered)] == ["person"]
    assert higher["t3"].question is not None and "budget of $6.00" in higher["t3"].question
    again = await ParallelRunner(backend, store=store).resume(run_id)
    assert (asking(again), len(backend.calls)) == (["t3"], 3)


async def test_a_budget_given_to_a_run_without_one_counts_what_was_spent_before(store: Store) -> None:
    refused = BackendError(ErrorKind.REFUSED, "no", usage=Usage(1, 1, 3.0))
    backend = Priced(lambda _prompt: refused)
    failed = await ParallelRunner(backend, store=store).run([*tasks(1), Task("later", "later", ["t0"])])
    assert failed.status is RunStatus.FAILED
    backend.costs = lambda _prompt: 1.0
    result = await ParallelRunner(backend, store=store, budget=6).resume(failed.run_id, retry_failed=True)
    assert (asking(result), result.usage.cost_usd) == (["t0"], 3.0)


async def test_failed_attempts_count_and_a_retry_asks(store: Store) -> None:
    error = BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(1, 1, 1.5))
    backend = Priced(lambda _prompt: error)
    task = Task("a", "a", retry=Retry(attempts=9, base_delay=0))
    result = await ParallelRunner(backend, store=store, budget=6).run([task])
    assert (asking(result), len(backend.calls), result.usage.cost_usd) == (["a"], 2, 3.0)
    assert await spent(store, result.run_id) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("cost", "counted"),
    [
        (BackendError(ErrorKind.RATE_LIMITED, "later"), 0.0),
        (BackendError(ErrorKind.TRANSIENT, "503"), 0.0),
        (BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(cost_is_partial=True)), 4.0),
        (BackendError(ErrorKind.CRASHED, "gone"), 4.0),
        (BackendError(ErrorKind.REFUSED, "no", usage=Usage(1, 2, 0.5)), 0.5),
        (None, 1.0),  # priced by the tokens
    ],
)
async def test_an_attempt_of_unknown_cost_counts_at_its_worst_case(
    store: Store, cost: BackendError | None, counted: float
) -> None:
    """In memory, and the same read from the store."""
    backend = Priced(lambda prompt: cost if prompt == "prompt 0" else 1.0)
    result = await ParallelRunner(backend, store=store, budget=8.5).run(tasks(1))
    assert await spent(store, result.run_id) == (counted, 0.0)
    two = [*tasks(1), Task("next", "next")]
    enough = await ParallelRunner(backend, budget=4 + counted, concurrency=1).run(two)
    assert enough["next"].status is TaskStatus.COMPLETED
    less = await ParallelRunner(backend, budget=3.9 + counted, concurrency=1).run(two)
    assert less["next"].status is not TaskStatus.COMPLETED


async def test_what_costs_nothing_goes_on_while_the_run_asks(store: Store) -> None:
    async def free(prompt: str) -> str:
        return prompt

    backend = Priced(lambda _: 4.0)
    dag = [*tasks(2), *(Task(f"f{n}", "x", backend="free", depends_on=["t0"]) for n in range(3))]
    runner = ParallelRunner(backends={"paid": backend, "free": free}, default="paid", store=store, budget=4)
    result = await runner.run(dag)
    assert asking(result) == ["t1"]
    assert {result[f"f{n}"].status for n in range(3)} == {TaskStatus.COMPLETED}


async def test_the_max_cost_of_a_task_asks_for_the_task_alone(store: Store) -> None:
    error = BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(1, 1, 1.5))
    backend = Priced(lambda prompt: error if prompt == "a" else 1.0)
    dag = [Task("a", "a", retry=Retry(attempts=3, base_delay=0), max_cost=5), *tasks(3)]
    result = await ParallelRunner(backend, store=store).run(dag)
    assert asking(result) == ["a"]
    assert result["a"].question == (
        "$1.50 of the max_cost of $5.00 is spent, and this call may cost $4.00: what is the new limit?"
    )
    assert [result[f"t{n}"].status for n in range(3)] == [TaskStatus.COMPLETED] * 3
    again = await ParallelRunner(backend, store=store).resume(result.run_id, answers={"a": 6})
    assert (asking(again), again["a"].attempts) == (["a"], 4)
    backend.costs = lambda _prompt: 1.0
    last = await ParallelRunner(backend, store=store).resume(result.run_id, answers={"a": 8})
    assert (last.status, last.usage.cost_usd) == (RunStatus.COMPLETED, 7.0)


async def test_a_reservation_is_stored_with_the_start_and_counts_after_a_crash(store: Store) -> None:
    """Two calls under way when the process is lost: 4 dollars each, whatever they did."""
    gate = anyio.Event()
    backend = Priced(gate=gate)
    runner = ParallelRunner(backend, store=store, budget=9, concurrency=10)
    async with runner.start(tasks(4)) as run:
        while len(backend.calls) < 2:
            await anyio.lowlevel.checkpoint()
        assert await spent(store, run.run_id) == (0.0, 8.0)
        run.stop()
    starts = [json.loads(one.detail) for one in await store.list_events(run.run_id, kind=TaskStarted.kind)]
    assert starts == [{"backend": "default", "reserved_usd": 4.0}] * 2
    assert await spent(store, run.run_id) == (8.0, 0.0)
    gate.set()
    result = await ParallelRunner(backend, store=store).resume(run.run_id)
    assert (asking(result), len(backend.calls)) == (["t0"], 2)


async def test_without_a_budget_nothing_is_reserved_or_stored(store: Store) -> None:
    result = await ParallelRunner(Priced(), store=store).run(tasks(2))
    record = await store.get_run(result.run_id)
    assert record is not None and "budget" not in json.loads(record.settings)
    starts = [one.detail for one in await store.list_events(result.run_id, kind=TaskStarted.kind)]
    assert starts == ['{"backend":"default"}'] * 2


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (Priced(most=None), "an answer of backend 'api' has no limit; write one: max_tokens: 4096"),
        (
            Priced(price=None),
            """price of model 'm' of backend 'api' is unknown; add it to the plan: prices: {"m": {input: 1""",
        ),
    ],
)
async def test_a_run_whose_worst_case_is_unknown_is_refused_before_anything_is_stored(
    store: Store, backend: Priced, message: str
) -> None:
    runner = ParallelRunner(backends={"api": backend}, store=store, budget=5)
    with pytest.raises(InvalidRequest) as refused:
        await runner.run(tasks(1))
    assert message in str(refused.value)
    assert (await store.list_runs(), backend.calls) == ((), [])
    result = await ParallelRunner(backends={"api": backend}, store=store, budget=2, unpriced=True, concurrency=1).run(
        tasks(5)
    )
    assert (asking(result), len(backend.calls)) == (["t3"], 3)  # told by what the calls have cost


async def test_the_tasks_of_a_called_plan_count_in_the_one_run(store: Store) -> None:
    """Also those that are refused in it: the worst case of a call there must be known beforehand."""
    inner = [Task("one", "one"), Task("two", "two", ["one"])]
    dag = [*tasks(1), Task("called", "", ["t0"], call=Call(inner))]
    result = await ParallelRunner(Priced(), store=store, budget=5).run(dag)
    assert (asking(result), result.usage.cost_usd) == (["called.two"], 2.0)
    with pytest.raises(InvalidRequest, match="has no limit"):
        await ParallelRunner(Priced(most=None), store=store, budget=5).run([Task("c", "", call=Call(inner))])


async def test_a_queued_run_has_the_budget_it_was_made_with(store: Store) -> None:
    backend = Priced()
    run_id, _ = await ParallelRunner(backend, store=store, budget=50).runs.find_or_create(tasks(3), budget=5)
    result = await ParallelRunner(backend, store=store).resume(run_id)
    assert (asking(result), len(backend.calls)) == (["t2"], 2)


class Adjustable(Priced):
    """A model that takes a system prompt from a task."""

    adjustable: ClassVar[frozenset[str]] = frozenset({"system"})


@pytest.mark.parametrize(
    ("budget", "asks"), [(FRAMING_TOKENS + 24, ["a"]), (FRAMING_TOKENS + 44, ["b"]), (FRAMING_TOKENS + 45, [])]
)
async def test_the_worst_case_counts_every_byte_of_prompt_instructions_and_conversation(
    budget: int, asks: list[str]
) -> None:
    """A dollar for each token read: ten letters of two bytes, which the answer repeats."""
    backend = Adjustable(lambda _: 0.0, price=Price(input=1_000_000.0, output=0.0))
    dag = [Task("a", "\u00e4" * 10, system="s" * 5), Task("b", "12345", continues="a")]
    result = await ParallelRunner(backend, budget=budget).run(dag)
    assert [one.id for one in result.tasks.values() if one.status is TaskStatus.WAITING_INPUT] == asks


async def test_a_task_without_a_prompt_fails_and_asks_for_nothing() -> None:
    """Its prompt names a field that the answer before does not have."""
    backend = Priced()
    result = await ParallelRunner(backend, budget=9).run([Task("a", "a"), Task("b", "{{ a.field }}", ["a"])])
    assert (result["b"].error_kind, backend.calls, result.usage.cost_usd) == ("invalid_request", ["a"], 1.0)


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (BackendError(ErrorKind.TIMEOUT, "no answer", usage=Usage(1, 1, cost_usd=4.0)), 5.0),
        (BackendError(ErrorKind.TIMEOUT, "no answer"), 12.0),
    ],
    ids=["told", "not told"],
)
async def test_a_judge_is_paid_once(store: Store, error: BackendError, count: float) -> None:
    """One call of the judge is reserved. One that may have cost something is not made again, and counts."""
    judge = Priced(costs=lambda _prompt: error)
    runner = ParallelRunner(backends={"m": Priced(), "judge": judge}, default="m", budget=100, store=store)
    check = Check(judge="Fine? {{ answer }}", backend="judge")
    task = Task("t", "p", check=check, retry=Retry(attempts=4, base_delay=0))
    result = await runner.run([task], run_id="r")
    assert (result["t"].status, len(judge.calls)) == (TaskStatus.FAILED, 1)
    assert await spent(store, "r") == (pytest.approx(count), 0.0)


async def test_the_tokens_of_a_judge_without_a_price_are_counted() -> None:
    error = BackendError(ErrorKind.TIMEOUT, "no answer", usage=Usage(30, 20))
    judge = Priced(costs=lambda _prompt: error, price=None)
    runner = ParallelRunner(backends={"m": Priced(), "judge": judge}, default="m", budget=100, unpriced=True)
    result = await runner.run([Task("t", "p", check=Check(judge="Fine? {{ answer }}", backend="judge"))])
    assert result["t"].usage == Usage(31, 21, 1.0, cost_is_partial=True)


async def test_a_judge_that_was_refused_is_asked_again() -> None:
    replies: list[float | BackendError] = [BackendError(ErrorKind.TRANSIENT, "try again")]
    judge = Priced(costs=lambda _prompt: replies.pop() if replies else 1.0)
    runner = ParallelRunner(backends={"m": Priced(), "judge": judge}, default="m", budget=100)
    check = Check(judge="Fine? {{ answer }}", backend="judge", tries=1)
    await runner.run([Task("t", "p", check=check, retry=Retry(attempts=4, base_delay=0))])
    assert len(judge.calls) >= 2
