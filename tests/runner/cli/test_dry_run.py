"""`plait run PLAN --dry-run`: the first prompts, the calls and the cost of a run, before anything is called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync

from plait.runner.client.run_estimate import RunEstimate
from plait.runner.views.view_models import json_schema
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


async def test_no_more_is_assumed_of_an_answer_than_its_backend_allows(tmp_path: Path) -> None:
    plan = """
budget: 1
backends: {api: {kind: openai, model: m, api_key_env: NO_KEY, max_tokens: 100}}
prices: {m: {input: 10, output: 100}}
tasks: [{id: a, prompt: Is it fine?, repeat: 2}]
"""
    (tmp_path / "plan.yaml").write_text(plan)
    out = (await command(tmp_path, "run", "plan.yaml", "--dry-run")).out
    assert rows(out)["a.1"] == ["1", "api", "3+100", "$0.0100", "assumption"]
    assert "about 2 calls, 6+200 tokens, $0.0201\nat most $0.0" in out, "the estimate is below the most"


async def test_neither_a_key_nor_a_program_is_needed(tmp_path: Path) -> None:
    plan = """
backends:
  api: {kind: openai, model: m, api_key_env: NO_KEY}
  agent: {kind: acp, command: [no-such-program]}
prices: {m: {input: 10, output: 100}}
tasks:
  - {id: a, prompt: Is it fine?, backend: api}
  - {id: b, prompt: Mend it., backend: agent}
"""
    (tmp_path / "plan.yaml").write_text(plan)
    done = await command(tmp_path, "run", "plan.yaml", "--dry-run")
    assert rows(done.out)["a"] == ["1", "api", "3+500", "$0.0500", "assumption"]
    assert rows(done.out)["b"] == ["1", "agent", "unknown", "unknown"]
    missing = "backends: {f: {kind: function, call: missing.py:f}}\ntasks: [{id: a, prompt: p, backend: f}]\n"
    (tmp_path / "plan.yaml").write_text(missing)
    done = await run_sync(partial(plait, tmp_path, "run", "plan.yaml", "--dry-run"))
    assert (done.code, done.out) == (2, "")
    assert "missing.py" in done.err


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


BUDGETED = """
name: limited
budget: 9
backends: {{api: {{kind: openai, model: m, base_url: "{url}/v1", api_key_env: NO_KEY, max_tokens: 400}}}}
prices: {{m: {{input: 1000, output: 10000}}}}
tasks:
"""


async def test_the_most_that_a_run_costs_names_what_it_assumes(tmp_path: Path) -> None:
    head = BUDGETED.format(url="http://127.0.0.1:9")
    lists = "  - {id: find, prompt: x, output_schema: {type: array}}\n  - {id: read, for_each: find, prompt: y}\n"
    loop = "  - id: fix\n    loop: {max: 3, until: \"'ok' in {{ say }}\", tasks: [{id: say, prompt: hi}]}\n"
    reads = "  - {id: a, prompt: x}\n  - {id: b, prompt: '{{ a }}', depends_on: a}\n"
    long, added = "no list or loop is longer than counted", "no task is added"
    read = "answers that are read have at most 500 tokens"
    for tasks, assumed in (
        ("  - {id: a, prompt: x}\n", []),
        (reads, [read]),
        (lists, [long]),
        (loop, [long, read]),
        ("  - {id: more, prompt: more, output: tasks}\n", [added]),
    ):
        (tmp_path / "plan.yaml").write_text(head + tasks)
        out = (await command(tmp_path, "run", "plan.yaml", "--dry-run")).out
        (line,) = [line for line in out.splitlines() if "of the budget" in line]
        assert line.startswith("at most $")
        told = f", if {' and '.join(assumed)}" if assumed else ""
        assert line.partition(" of the budget ")[2] == f"of $9.00, without retries{told}"
        value = (await command(tmp_path, "run", "plan.yaml", "--dry-run", "--json")).value
        assert value["most_assumes"] == assumed


async def test_the_most_counts_a_token_for_each_byte(tmp_path: Path) -> None:
    head = BUDGETED.format(url="http://127.0.0.1:9")
    most = list[float]()
    for prompt in ("aaaaaaaaaaaa", "日日日日"):
        (tmp_path / "plan.yaml").write_text(f"{head}  - {{id: a, prompt: {prompt}}}\n")
        most.append((await command(tmp_path, "run", "plan.yaml", "--dry-run", "--json")).value["most_usd"])
    assert most[0] == most[1] == pytest.approx((1012 * 1000 + 400 * 10000) / 1_000_000)


async def test_judges_are_calls_too(tmp_path: Path) -> None:
    plan = BUDGETED.format(url="http://127.0.0.1:9") + (
        "  - {id: a, prompt: hello, check: {judge: 'Is this polite? {{ answer }}'}}\n"
        "  - {id: b, prompt: hello, repeat: 3, vote: {best: 'Take the shortest.'}}\n"
    )
    (tmp_path / "plan.yaml").write_text(plan)
    out = (await command(tmp_path, "run", "plan.yaml", "--dry-run")).out
    assert "\na, judge      1  api " in out
    assert "\nabout 6 calls, " in out  # a task, its judge, three samples and the judge of these
    value = (await command(tmp_path, "run", "plan.yaml", "--dry-run", "--json")).value
    task, judge = value["tasks"][:2]
    assert (task["task_id"], task["is_judge"], judge["task_id"], judge["is_judge"]) == ("a", False, "a", True)
    assert judge["usage"]["input_tokens"] > 500 < judge["usage"]["cost_usd"] * 1000
    # The judge reads what was sent and the longest answer, and asks for an answer that fits its schema again.
    assert judge["most_usd"] > 2 * task["most_usd"]
    assert value["most_assumes"] == ["answers that are read have at most 500 tokens"]  # the judge of the samples
    schema = json_schema(RunEstimate)
    assert schema["properties"].keys() == value.keys()
    assert schema["$defs"]["TaskEstimate"]["properties"].keys() == judge.keys()


async def test_a_loop_has_the_rounds_of_the_newest_run(tmp_path: Path) -> None:
    no, yes = (
        events([WIRE.chunk({"delta": {"content": text}, "finish_reason": "stop"}), WIRE.chunk(None, usage=USED)])
        for text in ("no", "yes")
    )
    loop = "  - id: fix\n    loop: {{max: 5, until: \"'yes' in {{{{ say }}}}\", tasks: [{{id: say, prompt: {}}}]}}\n"
    async with serve(no, no, yes, no, yes) as server:
        head = BUDGETED.format(url=server.url).replace("budget: 9", "")
        for words, like in (("one", ()), ("two", ("--like", "last"))):
            (tmp_path / "plan.yaml").write_text(head + loop.format(words))
            await command(tmp_path, "run", "plan.yaml", "-q", *like)
        assert len(server.requests) == 5
        (task,) = (await command(tmp_path, "run", "plan.yaml", "--dry-run", "--json")).value["tasks"]
    assert (task["task_id"], task["calls"], task["length_is_known"]) == ("fix.say", 2, True)
    assert (task["earlier_calls"], task["usage"]["input_tokens"]) == (3, 200)
