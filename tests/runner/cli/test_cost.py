"""The cost of a run as the commands show it: known, partial, unknown."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync

from plait.backends.prices import Price
from plait.runner.client.run_backends import read_prices
from tests.support.processes.command import Done, plait
from tests.support.wire import ChatCompletions, events, serve

WIRE = ChatCompletions()
TOLD = {
    "prompt_tokens": 1000,
    "completion_tokens": 100,
    "prompt_tokens_details": {"cached_tokens": 400},
    "completion_tokens_details": {"reasoning_tokens": 60},
}
PLAN = """
name: {name}
backends: {{api: {{kind: openai, model: m, base_url: "{url}/v1", api_key_env: NO_KEY}}}}
tasks:
  - {{id: a, prompt: x, retry: {{attempts: 1}}}}
  - {{id: b, prompt: y, depends_on: a, retry: {{attempts: 1}}}}
"""
PRICES = "prices: {m: {input: 10, output: 100, cache_read: 1}}\n"
COST = (600 * 10 + 400 * 1 + 100 * 100) / 1e6  # 0.0164


def answer(usage: Any) -> Any:
    return events([WIRE.chunk({"delta": {"content": "hi"}, "finish_reason": "stop"}), WIRE.chunk(None, usage=usage)])


async def command(folder: Path, *words: str) -> Done:
    return await run_sync(partial(plait, folder, *words))


async def test_a_priced_run_shows_its_cost_everywhere(tmp_path: Path) -> None:
    async with serve(answer(TOLD)) as server:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=server.url, name="priced") + PRICES)
        done = await command(tmp_path, "run", "plan.yaml")
    assert "2 of 2 tasks completed, 2,000+200 tokens, $0.0328\n" in done.err
    assert "\n  tokens    800 read from the cache, 120 reasoning\n" in done.err
    assert "b completed" in done.err
    assert "1,000+100 tokens $0.0164\n" in done.err
    assert "unknown" not in done.err
    run_id = (await command(tmp_path, "runs", "--json")).value[0]["run_id"]

    listed = (await command(tmp_path, "runs")).out.splitlines()
    assert listed[0].split() == ["RUN", "NAME", "STATUS", "TASKS", "COST", "AGE"]
    assert "  completed  2 of 2  $0.0328  " in listed[1]

    shown = (await command(tmp_path, "show", run_id)).out
    assert "tokens    2,000+200 (800 read from the cache, 120 reasoning)\ncost      $0.0328\n" in shown
    task = (await command(tmp_path, "show", run_id, "a")).out
    assert "tokens    1,000+100 (400 read from the cache, 60 reasoning)\ncost      $0.0164\n" in task
    assert "1,000+100  $0.0164  400 read from the cache, 60 reasoning\n" in task

    value = (await command(tmp_path, "show", run_id, "a", "--json")).value
    for spent in (value, value["history"][0]):
        assert spent["cost_usd"] == pytest.approx(COST)
        assert (spent["cache_read_tokens"], spent["cache_write_tokens"], spent["reasoning_tokens"]) == (400, 0, 60)
        assert spent["cost_is_partial"] is False
    assert "1,000+100 tokens $0.0164" in (await command(tmp_path, "log", run_id)).out


async def test_an_unknown_cost_is_said_with_the_model_and_the_remedy(tmp_path: Path) -> None:
    async with serve(answer(TOLD)) as server:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=server.url, name="unpriced"))
        done = await command(tmp_path, "run", "plan.yaml")
    assert "2,000+200 tokens, cost unknown\n" in done.err
    assert "  cost      unknown for model m; add the price to `prices:` in the plan\n" in done.err
    assert "  2 of 2  unknown  " in (await command(tmp_path, "runs")).out
    run_id = (await command(tmp_path, "runs", "--json")).value[0]["run_id"]
    assert "\ncost      unknown\n" in (await command(tmp_path, "show", run_id)).out
    assert "\ncost      unknown for model m\n" in (await command(tmp_path, "show", run_id, "a")).out


async def test_a_sum_of_known_and_unknown_costs_is_at_least_the_known(tmp_path: Path) -> None:
    async with serve(answer({**TOLD, "cost": 1.25}), answer(TOLD)) as server:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=server.url, name="partial"))
        done = await command(tmp_path, "run", "plan.yaml")
    assert "tokens, at least $1.25\n" in done.err
    assert "unknown for model m" in done.err
    assert "  2 of 2  at least $1.25  " in (await command(tmp_path, "runs")).out
    value = (await command(tmp_path, "runs", "--json")).value[0]
    assert (value["cost_usd"], value["cost_is_partial"]) == (1.25, True)


async def test_an_attempt_that_is_not_the_last_names_its_model_without_a_price(tmp_path: Path) -> None:
    broken = events([WIRE.chunk({"delta": {}, "finish_reason": "tool_calls"}), WIRE.chunk(None, usage=TOLD)])
    async with serve(broken, answer({**TOLD, "cost": 1.25})) as server:
        plan = PLAN.format(url=server.url, name="retried").partition("  - {id: b")[0]
        plan = plan.replace("attempts: 1", "attempts: 2, base_delay: 0, on: [invalid_output]")
        (tmp_path / "plan.yaml").write_text(plan)
        done = await command(tmp_path, "run", "plan.yaml")
    assert "tokens, at least $1.25\n" in done.err
    assert "  cost      unknown for model m; " in done.err


_SNAPSHOT = """
class Amounts:
    input_mtok = output_mtok = cache_read_mtok = cache_write_mtok = 1
    requests_kcount = None


class Model:
    def get_prices(self, at):
        return Amounts()


class Snapshot:
    def find_provider_model(self, *words):
        return None, Model()


def get_snapshot():
    return Snapshot()
"""


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ({"__init__": ""}, "ModuleNotFoundError: No module named 'genai_prices.data_snapshot'"),
        ({"__init__": "raise OSError('broken')"}, "OSError: broken"),
        ({"__init__": "", "data_snapshot": ""}, "AttributeError: module 'genai_prices.data_snapshot' has no"),
        ({"__init__": "", "data_snapshot": _SNAPSHOT}, "AttributeError: 'Amounts' object has no attribute"),
    ],
    ids=["no module", "failed import", "no function", "no attribute"],
)
async def test_another_version_of_the_list_makes_costs_unknown_and_is_logged_once(
    tmp_path: Path, modules: dict[str, str], problem: str
) -> None:
    package = tmp_path / "other" / "genai_prices"
    package.mkdir(parents=True)
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    paths = f"{package.parent}:{Path(__file__).parents[4]}"
    async with serve(answer(TOLD)) as server:
        # The list is not loaded for a server named by an IP address, so the server is the proxy of another.
        plan = PLAN.format(url="http://api.example.com/v1", name="other").replace("depends_on: a, ", "")
        (tmp_path / "plan.yaml").write_text(plan)
        around = {"PYTHONPATH": paths, "HTTP_PROXY": server.url}
        done = await run_sync(partial(plait, tmp_path, "run", "plan.yaml", "--log", "json", **around))
        said = await run_sync(partial(plait, tmp_path, "continue", "last", "a", "more", **around))
    assert "2 of 2 tasks completed, 2,000+200 tokens, cost unknown\n" in done.err
    assert done.err.count("genai-prices cannot be read") == 1
    assert f"cannot be read ({problem}" in done.err
    assert (done.code, said.code, said.out) == (0, 0, "hi\n"), done.err + said.err


async def test_the_prices_of_the_plan_are_kept_for_a_resume_and_a_file_of_backends_replaces_them(
    tmp_path: Path,
) -> None:
    broken = events([WIRE.chunk({"delta": {}, "finish_reason": "tool_calls"})])
    async with serve(answer(TOLD), broken) as server:
        plan = PLAN.format(url=server.url, name="resumed")
        (tmp_path / "plan.yaml").write_text(plan + PRICES)
        failed = await command(tmp_path, "run", "plan.yaml")
        assert "1 of 2 tasks completed, 1 failed, 1,000+100 tokens, $0.0164\n" in failed.err
        assert "  failed  1 of 2, 1 failed  $0.0164  " in (await command(tmp_path, "runs")).out
        server.answers[:] = [answer(TOLD)]
        (tmp_path / "plan.yaml").write_text(plan)  # the stored prices count
        run_id = (await command(tmp_path, "runs", "--json")).value[0]["run_id"]
        resumed = await command(tmp_path, "resume", run_id, "--retry-failed")
        assert "2,000+200 tokens, $0.0328\n" in resumed.err
        (tmp_path / "plan.yaml").write_text(plan + PRICES)
        server.answers[:] = [answer(TOLD), broken]
        await command(tmp_path, "run", "plan.yaml")
        (tmp_path / "other.yaml").write_text(plan + "prices: {m: {input: 0, output: 0}}\n")
        server.answers[:] = [answer(TOLD)]
        newest = (await command(tmp_path, "runs", "--json")).value[0]["run_id"]
        resumed = await command(tmp_path, "resume", newest, "--retry-failed", "--backends", "other.yaml")
        assert "2,000+200 tokens, $0.0164\n" in resumed.err


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ("prices: {m: {input: 3}}", "output"),
        ("prices: {m: {input: -3, output: 1}}", "input"),
        ("prices: {m: {input: 3, output: 1, cached: 1}}", "cached"),
    ],
)
def test_a_wrong_price_in_a_plan_is_one_clear_line(tmp_path: Path, prices: str, problem: str) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.format(url="http://127.0.0.1:1", name="wrong") + prices)
    done = plait(tmp_path, "check", "plan.yaml")
    assert done.code == 2
    assert "prices" in done.err
    assert problem in done.err
    assert "Traceback" not in done.err


def test_a_plan_prices_what_the_cache_keeps_for_an_hour() -> None:
    given = {"m": {"input": 3, "output": 15, "cache_write": 3.75, "cache_write_1h": 6}}
    assert read_prices(given) == {"m": Price(3, 15, cache_write=3.75, cache_write_1h=6)}


def test_a_plan_prices_reasoning() -> None:
    given = {"m": {"input": 3, "output": 15, "reasoning": 50}}
    assert read_prices(given) == {"m": Price(3, 15, reasoning=50)}


def test_the_list_of_runs_fits_80_columns(tmp_path: Path) -> None:
    plan = (
        "name: a-name-of-forty-characters-and-some-more\n"
        "backends: {f: {kind: function, call: 'f:go'}}\ntasks:\n"
        + "".join(f"  - {{id: t{n}, prompt: '{n}', retry: {{attempts: 1}}}}\n" for n in range(30))
    )
    (tmp_path / "plan.yaml").write_text(plan)
    (tmp_path / "f.py").write_text("async def go(prompt):\n    assert prompt not in '34'\n    return prompt\n")
    plait(tmp_path, "run", "plan.yaml")
    lines = plait(tmp_path, "runs").out.splitlines()
    assert "  failed  28 of 30, 2 failed  " in lines[1]
    assert max(map(len, lines)) <= 80
