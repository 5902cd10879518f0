"""What turns of agents cost, where processes died: counted by whoever takes them over, once, whatever was counted."""

from __future__ import annotations

import json

import pytest

from plait import DAG, ParallelRunner, Retry, Task, TaskStatus
from plait.backends import CodexBackend
from plait.backends.agents.cli_agent import Sessions
from plait.backends.backend_protocol import Files
from plait.errors import BackendError
from plait.persistence import SQLiteStore
from plait.runner.engine.attempt import INTERRUPTED
from plait.usage import Usage
from tests.support.agents.homes import Home, send

SCHEMA = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}


def cut_off(files: Files, call: int, *lines: object) -> None:
    """As if the call with its files there had been cut before its last word, when it had said these lines instead."""
    stdout = files.turn / str(call) / "stdout"
    kept = [line for line in stdout.read_text().splitlines() if '"result":{"stop' not in line.replace(" ", "")]
    kept = [line for line in kept if '"type": "result"' not in line]
    stdout.write_text("\n".join([*kept, *map(json.dumps, lines), ""]))


@pytest.mark.parametrize("words", ["Work.", "Work. [[plain]]"])
async def test_cost_that_an_agent_counts_by_session_is_not_lost_to_who_counts_it_again(home: Home, words: str) -> None:
    """Its process was killed when it had counted, but stored nothing."""
    first = await send(home.acp(), "Before.", files=home.files(1, "before"))
    known = {"session_id": first.session_id, "resume": True, "files": home.files()}
    known["output_schema"] = None if words == "Work." else SCHEMA
    replies = [await send(home.acp(), words, **known, attaches=again) for again in (False, True, True)]
    assert [reply.usage.cost_usd for reply in replies] == pytest.approx([0.001 * len(home.calls[1:])] * 3)


async def test_cost_of_a_cut_turn_is_not_counted_with_all_of_its_session(home: Home) -> None:
    first = await send(home.acp(), "Before.", files=home.files(1, "before"))
    session = first.session_id
    known = {"session_id": session, "resume": True}
    await send(home.acp(), "Work.", files=home.files(1), **known)
    Sessions(home.files().sessions, "acp-acp").note_spent(str(session), Usage(cost_usd=0.001))
    (home.files(1).turn / "1" / "before.json").unlink(missing_ok=True)
    cut_off(home.files(1), 1)
    reply = await send(home.acp(), "Go on.", files=home.files(2), **known, resumes_interrupted=True)
    assert reply.usage.cost_usd == pytest.approx(0.002)


async def test_what_a_cut_turn_had_paid_for_before_its_last_call_is_counted(home: Home) -> None:
    backend = home.claude()
    session = str(backend.new_session_id())
    with pytest.raises(BackendError):
        await send(backend, "Work. [[plain]]", files=home.files(1), session_id=session, output_schema={"type": "null"})
    for path in home.files(1).turn.rglob("reported"):
        path.unlink()
    cut_off(home.files(1), 2)
    reply = await send(
        backend, "Go on.", files=home.files(2), session_id=session, resume=True, resumes_interrupted=True
    )
    assert reply.usage.input_tokens == 30


async def test_what_was_cut_is_paid_for_by_who_takes_it_up_and_fails(home: Home) -> None:
    backend = home.claude()
    session = str(backend.new_session_id())
    await send(backend, "Work.", files=home.files(1), session_id=session)
    cut_off(home.files(1), 1)
    with pytest.raises(BackendError) as failed:
        await send(
            backend, "[[error 500]]", files=home.files(2), session_id=session, resume=True, resumes_interrupted=True
        )
    assert failed.value.usage.input_tokens == 10


async def test_tokens_that_an_agent_counts_by_session_are_not_lost_either(home: Home) -> None:
    lines = [
        {"type": "thread.started", "thread_id": "t-1"},
        {"type": "item.completed", "item": {"id": "1", "type": "agent_message", "text": "done"}},
        {"type": "turn.completed", "usage": {"input_tokens": 130, "output_tokens": 27}},
    ]
    codex = home.path / "codex"
    codex.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(map(json.dumps, lines)) + "\nEND\n")
    codex.chmod(0o755)
    Sessions(home.files().sessions, "codex").note_spent("t-1", Usage(100, 20))
    backend = CodexBackend(command=str(codex), cwd=home.path)
    known = {"session_id": "t-1", "resume": True}
    replies = [
        await send(backend, "Work.", files=home.files(), **known, attaches=again) for again in (False, True, True)
    ]
    assert [reply.usage for reply in replies] == [Usage(30, 7)] * 3


async def test_a_turn_beyond_its_tasks_time_says_what_it_cost_and_is_gone_on_with(home: Home) -> None:
    """A turn's own limit is heeded just before the runner cuts it off, which leaves nobody to tell what it cost."""
    prompt, timeout = "Work. [[tool]] [[until /dev/null/never]]", 3.0
    once, twice = (Retry(attempts=tries, base_delay=0) for tries in (1, 2))
    dag = DAG([Task(name, prompt, timeout=timeout, retry=retry) for name, retry in (("a", once), ("b", twice))])
    async with SQLiteStore(home.path / "runs.db") as store:
        result = await ParallelRunner(home.claude(), store=store).run(dag)
        first, second = await store.list_attempts(result.run_id, "b")
    assert (result["a"].error_kind, result["a"].error) == ("timeout", "no answer within the task's timeout of 3 s")
    assert result["a"].usage.input_tokens == first.usage.input_tokens == 20
    assert (result["b"].status, second.usage.input_tokens) == (TaskStatus.COMPLETED, 10)
    assert home.prompts[-1] == INTERRUPTED
