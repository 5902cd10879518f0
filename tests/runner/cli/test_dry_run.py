"""`plait run PLAN --dry-run`: the first prompts, the calls and the cost of a run, before anything is called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync

from tests.support.processes.command import Done, plait
from tests.support.wire import ChatCompletions, events, serve

WIRE = ChatCompletions()
USED = {"prompt_tokens": 100, "completion_tokens": 10}
PLAN = """
name: reviews
inputs: {{rows: [a, b, c, d]}}
backends: {{api: {{kind: openai, model: m, base_url: "{url}/v1", api_key_env: NO_KEY}}}}
prices: {{m: {{input: 10, output: 100}}}}
tasks:
  - {{id: mood, for_each: rows, prompt: "The mood of {{{{ item }}}}"}}
  - {{id: all, depends_on: mood, prompt: "Sum up {{{{ mood }}}}"}}
  - {{id: listed, run: [ls, "--", "x y"]}}
"""
ANSWER = events([WIRE.chunk({"delta": {"content": "hi"}, "finish_reason": "stop"}), WIRE.chunk(None, usage=USED)])


async def command(folder: Path, *words: str) -> Done:
    done = await run_sync(partial(plait, folder, *words))
    assert done.code == 0, done.err
    return done


def rows(out: str) -> dict[str, list[str]]:
    table = out[out.index("TASK ") :].splitlines()[1:]
    return {line.split()[0]: line.split()[1:] for line in table}


async def test_without_a_run_the_calls_are_priced_by_an_assumption_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.format(url="http://127.0.0.1:9"))
    done = await command(tmp_path, "run", "plan.yaml", "--dry-run")
    assert "-- mood, the first of 4 prompts --\nThe mood of a\n" in done.out
    assert '-- listed --\n["ls", "--", "x y"]\n' in done.out
    assert "Sum up" not in done.out
    # 4 prompts of 13 characters, and one that is assumed to hold 4 answers of 500 tokens.
    assert rows(done.out)["mood"] == ["4", "api", "13+2,000", "$0.2001", "assumption"]
    assert rows(done.out)["all"] == ["1", "api", "2,005+500", "$0.0701", "assumption"]
    assert rows(done.out)["listed"] == ["1", "command"]
    assert "\nabout 6 calls, 2,018+2,500 tokens, $0.2702\n" in done.out
    assert "by assumption: 4 characters for a token, 500 tokens for an answer" in done.out
    assert not (tmp_path / ".plait").exists()


async def test_a_pilot_tells_what_the_whole_run_will_cost(tmp_path: Path) -> None:
    async with serve(ANSWER) as server:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=server.url).replace("ls, ", "echo, "))
        await command(tmp_path, "run", "plan.yaml", "--limit", "2")
        asked = len(server.requests)
        done = await command(tmp_path, "run", "plan.yaml", "--dry-run", "--no-store")
        assert "assumption" in rows(done.out)["mood"]
        done = await command(tmp_path, "run", "plan.yaml", "--dry-run")
        value: dict[str, Any] = (await command(tmp_path, "run", "plan.yaml", "--dry-run", "--json")).value
        assert len(server.requests) == asked == 3
    assert rows(done.out)["mood"] == ["4", "api", "400+40", "$0.0080", "2", "earlier", "calls"]
    assert "\nabout 6 calls, 500+50 tokens, $0.0100\n" in done.out
    assert f"by earlier calls: the mean of those of run {value['like']} of " in done.out
    assert (value["calls"], value["assumed"], value["grows"]) == (6, None, False)
    assert value["usage"]["cost_usd"] == pytest.approx(0.01)
    mood = value["tasks"][0]
    assert (mood["task_id"], mood["calls"], mood["earlier_calls"], mood["prompt"]) == ("mood", 4, 2, "The mood of a")


async def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    plan = """
        backends:
          me: {kind: claude-code, command: /bin/true}
          api: {kind: openai, model: m, base_url: "http://127.0.0.1:9", api_key_env: N}
        defaults: {backend: api}
        tasks:
          - {id: find, backend: me, prompt: files}
          - {id: read, for_each: find, prompt: "{{ item }}"}
          - {id: more, prompt: more, output: tasks}
    """
    (tmp_path / "plan.yaml").write_text(plan)
    out = (await command(tmp_path, "run", "plan.yaml", "--dry-run")).out
    assert rows(out)["find"] == ["1", "me", "unknown", "unknown"]
    assert rows(out)["read"][0] == "unknown"
    assert "\nat least 3 calls, " in out
    for line in ("agents and backends without a price", "the length of a list", "tasks that are added during the run"):
        assert line in out


async def test_a_dry_run_stores_nothing_for_a_worker_either(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.format(url="http://127.0.0.1:9"))
    assert plait(tmp_path, "run", "plan.yaml", "--dry-run", "--queue").code == 2
    assert plait(tmp_path, "run", "plan.yaml", "--fresh", "mood").code == 2
