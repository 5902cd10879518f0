"""`budget` and `max_cost` of a plan, `--budget` and `--unpriced`: asked at the limit, refused without a price."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from anyio.to_thread import run_sync

from tests.support.processes.command import Done, plait
from tests.support.wire import ChatCompletions, events, serve

WIRE = ChatCompletions()
USED = {"prompt_tokens": 1000, "completion_tokens": 100}
ANSWER = events([WIRE.chunk({"delta": {"content": "hi"}, "finish_reason": "stop"}), WIRE.chunk(None, usage=USED)])
PLAN = """
name: limited
{top}
backends: {{api: {{kind: openai, model: m, base_url: "{url}/v1", api_key_env: NO_KEY{more}}}}}
tasks:
  - {{id: a, prompt: x}}
  - {{id: b, prompt: y, depends_on: a}}
  - {{id: c, prompt: z, depends_on: b}}
"""
PRICES = "prices: {m: {input: 1000, output: 10000}}"  # 2 dollars for an answer
BOUND = ", max_tokens: 400"
WORST = 1001 * 0.001 + 400 * 0.01  # a letter, what a request has beside its texts, and the longest answer


async def command(folder: Path, *words: str) -> Done:
    return await run_sync(partial(plait, folder, *words))


async def test_a_run_asks_at_its_budget_and_shows_what_it_has_spent(tmp_path: Path) -> None:
    async with serve(ANSWER) as server:
        (tmp_path / "plan.yaml").write_text(PLAN.format(top=f"budget: 7\n{PRICES}", url=server.url, more=BOUND))
        estimate = await command(tmp_path, "run", "plan.yaml", "--dry-run")
        assert "\nat most $15.00 of the budget of $7.00, without retries\n" in estimate.out
        done = await command(tmp_path, "run", "plan.yaml")
        assert (done.code, len(server.requests)) == (4, 1)
        assert (
            f"$2.00 of the budget of $7.00 is spent, and this call may cost ${WORST:.2f}: what is the new limit?"
            in done.err
        )
        shown = await command(tmp_path, "show", "last")
        assert "\nbudget    $7.00, $2.00 spent\n" in shown.out
        assert (await command(tmp_path, "answer", "last", "b", "7")).code == 2  # no raise
        assert (await command(tmp_path, "answer", "last", "b", "8")).code == 0
        again = await command(tmp_path, "resume", "last")
        assert (again.code, len(server.requests)) == (4, 2)
        log = await command(tmp_path, "log", "last")
        assert "the budget is now $8.00" in log.out
        last = await command(tmp_path, "resume", "last", "--budget", "20")
        assert (last.code, len(server.requests)) == (0, 3)
    budget = (await command(tmp_path, "show", "last", "--json")).value["budget"]
    assert budget == {"usd": 20.0, "spent_usd": 6.0, "unsure_usd": 0.0, "reserved_usd": 0.0, "reserved_by": {}}


async def test_a_run_without_a_worst_case_is_refused_in_one_line_before_anything_is_stored(tmp_path: Path) -> None:
    async with serve(ANSWER) as server:
        for top, more, told in (
            ("", BOUND, """the price of model 'm' of backend 'api' is unknown; add it to the plan: prices: {"m": """),
            (PRICES, "", "an answer of backend 'api' has no limit; write one: max_tokens: 4096"),
        ):
            (tmp_path / "plan.yaml").write_text(PLAN.format(top=top, url=server.url, more=more))
            done = await command(tmp_path, "run", "plan.yaml", "--budget", "5")
            assert (done.code, server.requests) == (2, [])
            assert told in done.err and done.err.count("\n") == 1
            estimate = await command(tmp_path, "run", "plan.yaml", "--budget", "5", "--dry-run")
            assert f"\nwould be refused: the run has a budget, and {told}" in estimate.out
        assert (await command(tmp_path, "runs", "--json")).value == []
        done = await command(tmp_path, "run", "plan.yaml", "--budget", "3", "--unpriced")
        assert (done.code, len(server.requests)) == (4, 2)  # the second call has told that it was one too many


async def test_the_max_cost_of_a_task_is_a_question_of_that_task(tmp_path: Path) -> None:
    async with serve(ANSWER) as server:
        plan = PLAN.format(top=PRICES, url=server.url, more=BOUND).replace("id: c,", "id: c, max_cost: 1.5,")
        (tmp_path / "plan.yaml").write_text(plan)
        done = await command(tmp_path, "run", "plan.yaml")
        assert (done.code, len(server.requests)) == (4, 2)
        assert (
            f"$0.0000 of the max_cost of $1.50 is spent, and this call may cost ${WORST:.2f}: what is the new limit?"
            in done.err
        )
        assert (await command(tmp_path, "answer", "last", "c", "10")).code == 0
        assert (await command(tmp_path, "resume", "last")).code == 0
