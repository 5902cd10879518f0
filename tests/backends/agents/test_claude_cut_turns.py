"""Turns of Claude Code that are cut at the cancel of their run."""

from __future__ import annotations

import anyio

from plait import DAG, MemoryStore, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.backends.running_turn import Cancellation, Turn, in_turn
from plait.errors import ErrorKind
from tests.support.agents.homes import Home, fails, send, until


async def test_the_agent_of_a_cancelled_run_ends_its_turn_long_before_the_grace_time_ends(home: Home) -> None:
    runner = ParallelRunner(home.claude(), store=MemoryStore(), cancel_grace=600)
    prompt = "Work. [[tool]] [[until /dev/null/never]]"
    async with runner.start(DAG([Task("a", prompt=prompt, retry=Retry(attempts=5))])) as run:
        await until(lambda: home.begun == 2)
        run.cancel()
        with anyio.fail_after(60):
            result = await run.result()
    assert (result.status, result["a"].status) == (RunStatus.CANCELLED, TaskStatus.CANCELLED)
    usage = result["a"].usage
    assert (usage.input_tokens, usage.output_tokens, usage.cost_usd) == (20, 14, 0.002)  # only the agent's end says so
    assert home.processes == []
    session = home.calls[0]["session"]
    await send(home.claude(), "And now?", session_id=session, resume=True)
    said = [text for _, text in home.calls[-1]["said"]]
    assert said == [prompt, "<tool Bash>", "<result done>", "[Request interrupted by user]", "And now?"]


async def test_an_agent_that_does_not_heed_the_cancel_is_cut_at_the_end_of_the_grace_time(home: Home) -> None:
    runner = ParallelRunner(home.claude(), store=MemoryStore(), cancel_grace=0.3)
    async with runner.start(DAG([Task("a", prompt="Work. [[deaf]] [[until /dev/null/never]]")])) as run:
        await until(lambda: home.begun == 1)
        run.cancel()
        with anyio.fail_after(60):
            result = await run.result()
    assert (result.status, result["a"].status) == (RunStatus.CANCELLED, TaskStatus.CANCELLED)
    assert home.processes == []


async def test_no_agent_is_called_any_more_once_its_run_is_being_cancelled(home: Home) -> None:
    """The answer does not fit the schema, and the cancel comes before the agent is asked again."""
    cancellation = Cancellation()
    request = {
        "output_schema": {"type": "array"},
        "on_output": lambda output: cancellation.request() if output.kind == "notice" else None,
    }
    error = await in_turn(Turn(cancellation), fails(home.claude(), "[[say no array]]", **request))
    assert (error.kind, error.usage.cost_usd) == (ErrorKind.CRASHED, 0.001)
    assert "being cancelled" in error.message
    assert len(home.calls) == 1
