"""A turn of Claude Code that has spent its budget: a person raises the budget, and the turn goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait import DAG, ParallelRunner, PlaitError, RunResult, RunStatus, SQLiteStore, Task, TaskStatus
from plait.backends.agents.claude_code import TurnBudget
from plait.dialogue import Answer
from tests.support.agents.homes import Home, send, until
from tests.support.processes.command import PLAIT, environment, plait
from tests.support.processes.warm import Warm

PROMPT = "Work. [[tool]]"  # two requests, of $0.001 each
ASKED = (
    'Claude Code reached its budget of ${} (spent ${}). Raise it to? Answer with the new budget in dollars, or "stop"'
)
WAITING = 4


async def begun(home: Home, store: SQLiteStore, **options: Any) -> tuple[ParallelRunner, RunResult]:
    """A run whose agent has spent its budget with the second request, and the runner."""
    runner = ParallelRunner(home.claude(max_budget_usd=0.0015, **options), store=store)
    dag = DAG([Task("a", prompt=PROMPT), Task("b", prompt="After {{ a }}", depends_on=["a"])])
    return runner, await runner.run(dag, run_id="r")


async def test_a_raised_budget_lets_the_turn_go_on_in_its_session(home: Home) -> None:
    async with SQLiteStore(home.path / "runs.db") as store:
        runner, result = await begun(home, store)
        assert (result.status, result.waiting) == (RunStatus.WAITING_INPUT, ("a",))
        assert result.usage.cost_usd == pytest.approx(0.002)
        (asked,) = await runner.runs.questions("r")
        assert (asked.task_id, asked.question) == ("a", ASKED.format("0.0015", "0.002"))
    # As in another process, at another time.
    async with SQLiteStore(home.path / "runs.db") as store:
        runner = ParallelRunner(home.claude(max_budget_usd=0.0015), store=store)
        await runner.runs.answer("r", "a", 5)
        result = await runner.resume("r")
        (task,) = [one for one in await store.list_tasks("r") if one.task_id == "a"]
        roles = [message.role for message in await store.list_messages("r", "a")]
    assert result.status is RunStatus.COMPLETED
    first, last = home.calls[1], home.calls[2]
    assert (first["budget"], float(last["budget"])) == ("0.0015", pytest.approx(4.998))
    assert last["session"] == first["session"] == task.session_id
    said = [text for _, text in last["said"]]
    assert said[0] == PROMPT
    assert said.count(PROMPT) == 1
    assert said[-1].startswith("You were stopped because the budget")
    assert result["a"].text == f"answer {len(said)} to: {said[-1]}"
    assert result.usage.cost_usd == pytest.approx(0.004)  # of a, of a again, and of b
    assert home.calls[3]["budget"] == "0.0015"
    assert roles == ["user", "assistant", "user", "assistant"]


async def test_a_budget_is_raised_more_than_once(home: Home) -> None:
    async with SQLiteStore(home.path / "runs.db") as store:
        runner, _ = await begun(home, store)
        await runner.runs.answer("r", "a", 0.0025)
        await runner.resume("r")
        assert [one.question for one in await runner.runs.questions("r")] == [ASKED.format("0.0025", "0.003")]
        await runner.runs.answer("r", "a", 1)
        result = await runner.resume("r")
    assert result.status is RunStatus.COMPLETED
    assert [float(call["budget"]) for call in home.calls[1:4]] == pytest.approx([0.0015, 0.0005, 0.997])
    assert {call["session"] for call in home.calls[:4]} == {home.calls[0]["session"]}


async def test_the_answer_may_be_to_stop(home: Home) -> None:
    async with SQLiteStore(home.path / "runs.db") as store:
        runner, _ = await begun(home, store)
        await runner.runs.answer("r", "a", "stop")
        result = await runner.resume("r")
    assert (result["a"].status, result["a"].error_kind) == (TaskStatus.FAILED, "limit_reached")
    assert result["a"].error == "Claude Code reached its budget of $0.0015 (spent $0.002), and the answer was to stop"
    assert len(home.calls) == 2


@pytest.mark.parametrize("answer", [0.002, 0.0019, -1, "go on", True, None])
async def test_no_other_answer_is_taken(home: Home, answer: Any) -> None:
    async with SQLiteStore(home.path / "runs.db") as store:
        runner, _ = await begun(home, store)
        with pytest.raises(PlaitError, match="does not fit the question"):
            await runner.runs.answer("r", "a", answer)


async def test_a_budget_spent_on_the_repair_of_an_answer_is_asked_about(home: Home) -> None:
    schema = {"type": "array"}
    reply = await send(home.claude(max_budget_usd=0.0005), "Work. [[say none]]", session_id="s", output_schema=schema)
    assert reply.question is not None
    backend = home.claude(max_budget_usd=0.001)
    going_on = {"session_id": reply.session_id, "resume": True, "answer": Answer(0.0015), "output_schema": schema}
    reply = await send(backend, "0.0015", **going_on)
    assert reply.question is not None
    assert "JSON that fits this JSON Schema" in home.prompts[-1]
    assert reply.usage.cost_usd == pytest.approx(0.001)


async def test_an_answer_for_a_hook_is_no_budget(home: Home) -> None:
    backend = home.claude(ask_for=("Bash",), max_budget_usd=1)
    asked = await send(backend, "Clean up. [[ask]]", session_id="s")
    assert asked.session_id == "s"
    reply = await send(backend, "stop", session_id="s", resume=True, answer=Answer("stop"))
    assert reply.text == "went on"


def test_what_is_spent_when_the_cost_of_a_call_is_unknown() -> None:
    assert TurnBudget(2).after(None) == TurnBudget(2, 2)
    assert TurnBudget(2, 2.034).reached == "Claude Code reached its budget of $2.00 (spent $2.03)"


def plan(home: Home, folder: Path) -> None:
    coder = {"kind": "claude-code", "command": str(home.path / "claude"), "max_budget_usd": 0.0015}
    tasks = [{"id": "a", "prompt": PROMPT}]
    (folder / "plan.yaml").write_text(yaml.safe_dump({"backends": {"coder": coder}, "tasks": tasks}))


async def killed(home: Home, folder: Path, *words: str, begun: int) -> None:
    """SIGKILL of a `plait` once its agent has begun that many answers."""
    process = Warm([*PLAIT, *words], cwd=folder, env=environment(HOME=str(home.path)))
    try:
        await until(lambda: home.begun == begun)
    finally:
        process.kill()
        process.wait()


async def test_a_budget_reached_while_nobody_was_there_is_asked_about(home: Home, tmp_path: Path) -> None:
    plan(home, tmp_path)
    (home.path / "hold").touch()
    await killed(home, tmp_path, "run", "plan.yaml", begun=2)
    (home.path / "hold").unlink()
    await until(lambda: not home.processes)
    for _ in range(2):  # the question stays
        assert plait(tmp_path, "resume", "--json").code == WAITING
    (asked,) = plait(tmp_path, "answer", "last", "--json").value
    assert asked["question"] == ASKED.format("0.0015", "0.002")
    assert len(home.calls) == 2
    assert plait(tmp_path, "answer", "last", "a", "1").code == 0
    assert plait(tmp_path, "resume", "--json").code == 0
    assert len(home.calls) == 3
    shown = plait(tmp_path, "show", "last", "a", "--json").value
    assert [one["cost_usd"] for one in shown["history"]] == pytest.approx([0.002, 0.001])


@pytest.mark.parametrize("agent_too", [False, True])
async def test_a_raised_budget_holds_after_a_crash(home: Home, tmp_path: Path, agent_too: bool) -> None:
    plan(home, tmp_path)
    assert plait(tmp_path, "run", "plan.yaml", "--json").code == WAITING
    assert plait(tmp_path, "answer", "last", "a", "0.0025").code == 0
    (home.path / "hold").touch()
    await killed(home, tmp_path, "resume", begun=3)
    if agent_too:
        for pid in home.processes:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not home.processes)
    (home.path / "hold").unlink()
    assert plait(tmp_path, "resume", "--json").code == WAITING
    (asked,) = plait(tmp_path, "answer", "last", "--json").value
    # No killed agent says what it cost in dollars.
    assert asked["question"] == ASKED.format("0.0025", "0.003")
    assert [float(call["budget"]) for call in home.calls[2:]] == pytest.approx([0.0005] * (2 if agent_too else 1))
