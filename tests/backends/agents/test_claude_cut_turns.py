"""Turns of Claude Code that are cut: at the cancel of their run, and before the model had said anything."""

from __future__ import annotations

import json

import anyio
import pytest

from plait import DAG, MemoryStore, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.backends.agents.claude_code import ANSWER
from plait.backends.agents.cli_agent import digest
from plait.backends.process.child_manifest import ChildManifest, write_manifest
from plait.backends.running_turn import Cancellation, Turn, in_turn
from plait.errors import ErrorKind
from tests.support.agents.homes import Home, fails, send, until


@pytest.mark.parametrize("taken", [False, True])
def test_an_answer_is_in_the_session_once_its_hook_has_taken_it(home: Home, taken: bool) -> None:
    folder = home.files(2).turn / "1"
    folder.mkdir(parents=True)
    write_manifest(
        folder,
        ChildManifest(
            "0123456789abcdef",
            "another boot",
            1,
            "1",
            {"kind": "claude-code", "goes_on": "no", "input_digest": digest("")},
        ),
    )
    (folder / "stdout").write_text(json.dumps({"type": "system", "subtype": "init", "session_id": "s"}) + "\n")
    (folder / ANSWER).write_text('"allow"')
    if taken:
        (folder / ANSWER).unlink()
    session = home.path / ".claude" / "projects" / "here" / "s.jsonl"
    session.parent.mkdir(parents=True)
    result = {"type": "tool_result", "tool_use_id": "earlier", "content": "done"}
    session.write_text(json.dumps({"type": "user", "message": {"role": "user", "content": [result]}}) + "\n")
    left = home.claude(ask_for=("Bash",)).inspect(home.files(2))
    assert left is not None
    assert (left.state, left.session_id) == ("dead", "s" if taken else None)


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
