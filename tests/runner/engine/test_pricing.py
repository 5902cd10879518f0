"""The cost of attempts: priced once, stored, and summed over attempts and resumes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plait import DAG, Message, OpenAIBackend, ParallelRunner, Price, Reply, Retry, RunStatus, SQLiteStore, Task, Usage
from plait.backends import Billing, ConversationRequest
from plait.backends.prices import UNBILLED
from plait.errors import BackendError, ErrorKind
from plait.usage import NO_USAGE
from tests.support.wire import ChatCompletions, Script, events, serve

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

WIRE = ChatCompletions()
DETAILS = {
    "prompt_tokens": 1000,
    "completion_tokens": 100,
    "prompt_tokens_details": {"cached_tokens": 400, "cache_write_tokens": 100},
    "completion_tokens_details": {"reasoning_tokens": 60},
}
LINE = Price(10, 100, 1, 20)
COST = (500 * 10 + 400 * 1 + 100 * 20 + 100 * 100) / 1e6
"""The cost of DETAILS by LINE."""


def answer(usage: Any, reason: str = "stop") -> Any:
    return events([WIRE.chunk({"delta": {"content": "hi"}, "finish_reason": reason}), WIRE.chunk(None, usage=usage)])


@asynccontextmanager
async def server(*usages: Any, reason: str = "stop") -> AsyncGenerator[tuple[Script, OpenAIBackend]]:
    async with serve(*(answer(usage, reason) for usage in usages)) as script:
        yield script, OpenAIBackend("m", base_url=f"{script.url}/v1")


class Vendor(OpenAIBackend):
    """A stub server that counts as OpenAI's own, so that the list holds its models."""

    @property
    def billing(self) -> Billing:
        return Billing("https://api.openai.com/v1", "gpt-5-mini")


async def test_a_task_is_priced_by_the_users_line_with_its_cached_tokens(tmp_path: Path) -> None:
    async with server(DETAILS) as (_, backend), SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(backend, store=store, prices={"m": LINE})
        result = await runner.run(DAG([Task("a", "x"), Task("b", "{{ a }}", depends_on=["a"])]), run_id="r")
        for name in "ab":
            assert result[name].usage == Usage(1000, 100, pytest.approx(COST), "m", 400, 100, 60)  # type: ignore[arg-type]
        assert (result.usage.cost_usd, result.usage.cost_is_partial) == (pytest.approx(2 * COST), False)
        assert (result.usage.cache_read_tokens, result.usage.reasoning_tokens) == (800, 120)
        run = await store.get_run("r")
        assert run is not None
        assert run.usage.cost_usd == pytest.approx(2 * COST)
        assert (run.usage.cache_read_tokens, run.usage.cache_write_tokens) == (800, 200)
        assert [one.usage.cost_usd for one in await store.list_attempts("r")] == [pytest.approx(COST)] * 2


async def test_the_list_prices_a_task_and_is_loaded_by_the_first_that_needs_it(tmp_path: Path) -> None:
    async with server({"prompt_tokens": 1000, "completion_tokens": 100}) as (script, _):
        vendor = Vendor("gpt-5-mini", base_url=f"{script.url}/v1", api_key_env="NOTHING")
        async with SQLiteStore(tmp_path / "runs.db") as store:
            result = await ParallelRunner(vendor, store=store).run(DAG([Task("a", "x")]))
        # The stub names the model "m", which OpenAI does not have.
        assert (result["a"].usage.cost_usd, result["a"].usage.cost_is_unknown) == (None, True)

    used = Usage(1_000_000, 0, model="gpt-5-mini-2025-08-07")
    listed = await ParallelRunner(Says(used, billing=Billing("openai"))).run(DAG([Task("a", "x")]))
    assert listed.usage.cost_usd == pytest.approx(0.25)


class Says:
    """A backend whose calls end, one after the other, with these usages, replies or errors."""

    session_id = None

    def __init__(self, *ends: Usage | Reply | BackendError, billing: Billing = UNBILLED) -> None:
        self._ends = list(ends)
        self.billing = billing

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, _request: ConversationRequest) -> AsyncGenerator[Says]:
        yield self

    async def send(self, _prompt: str) -> Reply:
        end = self._ends.pop(0)
        if isinstance(end, BackendError):
            raise end
        return end if isinstance(end, Reply) else Reply("hi", usage=end)


@pytest.mark.parametrize("lengths", [(100_000, 300_000), (300_000, 100_000)])
async def test_a_turn_with_one_long_prompt_has_the_price_of_long_prompts(lengths: tuple[int, ...]) -> None:
    def turn(*lengths: int) -> Reply:
        used = [Usage(length, 0, model="gpt-5.4") for length in lengths]
        messages = tuple(Message("assistant", "hi", one) for one in used)
        return Reply("hi", usage=sum(used, NO_USAGE), messages=messages)

    backend = Says(turn(100_000), turn(100_000, 300_000), turn(*lengths), billing=Billing("openai"))
    dag = DAG([Task("short", "x"), Task("a", "x"), Task("b", "x")])
    result = await ParallelRunner(backend, concurrency=1).run(dag)
    short, one, other = (result[name].usage.cost_usd for name in ("short", "a", "b"))
    assert short is not None
    assert one == other == pytest.approx(2 * 4 * short)  # a token of a long prompt costs twice as much


async def test_the_cost_that_the_server_reports_stays() -> None:
    async with server({**DETAILS, "cost": 0.125}) as (_, backend):
        result = await ParallelRunner(backend, prices={"m": LINE}).run(DAG([Task("a", "x")]))
    assert result["a"].usage.cost_usd == 0.125


async def test_a_sum_with_an_unknown_cost_says_that_it_is_partial(tmp_path: Path) -> None:
    async with server(DETAILS, {**DETAILS, "cost": 0.125}) as (_, backend), SQLiteStore(tmp_path / "r.db") as store:
        runner = ParallelRunner(backend, store=store)
        result = await runner.run(DAG([Task("a", "x"), Task("b", "{{ a }}", depends_on=["a"])]), run_id="r")
        assert (result["a"].usage.cost_is_unknown, result["b"].usage.cost_usd) == (True, 0.125)
        run = await store.get_run("r")
        assert run is not None
        for total in (result.usage, run.usage):
            assert (total.cost_usd, total.cost_is_partial, total.cost_is_unknown) == (0.125, True, False)


async def test_a_failed_attempt_costs_what_it_used(tmp_path: Path) -> None:
    retry = Retry(attempts=2, base_delay=0, on=frozenset({ErrorKind.INVALID_OUTPUT}))
    async with server(DETAILS, reason="tool_calls") as (_, backend), SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(backend, store=store, prices={"m": LINE})
        result = await runner.run(DAG([Task("a", "x", retry=retry)]), run_id="r")
        attempts = await store.list_attempts("r")
    assert result.status is RunStatus.FAILED
    assert [(one.status, one.usage.cost_usd) for one in attempts] == [
        ("retried", pytest.approx(COST)),
        ("failed", pytest.approx(COST)),
    ]
    assert result.usage.cost_usd == pytest.approx(2 * COST)


async def test_the_cost_is_summed_over_resumes(tmp_path: Path) -> None:
    dag = DAG([Task("a", "x"), Task("b", "{{ a }}", depends_on=["a"], retry=Retry(attempts=1))])
    done, failed = Usage(1000, 100, model="m"), Usage(1000, 100, model="m", cache_read_tokens=400)
    backend = Says(done, BackendError(ErrorKind.AUTH, "no", usage=failed), done)
    plain, cached = (1000 * 10 + 100 * 100) / 1e6, (600 * 10 + 400 * 1 + 100 * 100) / 1e6
    async with SQLiteStore(tmp_path / "runs.db") as store:
        first = await ParallelRunner(backend, store=store, prices={"m": LINE}).run(dag, run_id="r")
        assert first.usage.cost_usd == pytest.approx(plain + cached)
        again = await ParallelRunner(backend, store=store, prices={"m": LINE}).resume("r", retry_failed=True)
        assert again.usage.cost_usd == pytest.approx(2 * plain + cached)
        assert again.usage.cache_read_tokens == 400
        run = await store.get_run("r")
        assert run is not None
        assert run.usage.cost_usd == pytest.approx(2 * plain + cached)


async def test_a_wrong_price_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the price of 'm' has input=-1"):
        ParallelRunner(prices={"m": Price(-1, 1)})
