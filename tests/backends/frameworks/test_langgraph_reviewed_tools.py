"""Agents of LangChain whose tools a person reviews, with LangChain's own middleware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain", reason="needs langchain, of the extra `test`")

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.persistence import MemoryStore
from tests.runner.serving.test_lifecycle import created, events, post
from tests.support.processes.command import plait
from tests.support.processes.served import served
from tests.support.reviewed_agent import reviewed

WORK = "from tests.support.reviewed_agent import reviewed\nagent = reviewed()"
BACKENDS = 'backends: {agent: {kind: function, call: "work.py:agent"}}\n'
DECISIONS: Any = {"decisions": [{"type": "approve"}, {"type": "reject", "message": "not Bob"}]}
DONE = "send error: User rejected the tool call for `send` with reason: not Bob; send success: sent to ada"


@pytest.mark.parametrize(
    ("options", "answers"),
    [({}, [DECISIONS]), ({"interrupt_mode": "per_call"}, DECISIONS["decisions"])],
    ids=["all at once", "one by one"],
)
async def test_the_decisions_about_the_tools_are_the_answer(options: Any, answers: list[Any]) -> None:
    runner = ParallelRunner(reviewed(**options), store=MemoryStore())
    result = await runner.run(DAG([Task("report", "go")]))
    for answer in answers:
        assert result.status is RunStatus.WAITING_INPUT
        result = await runner.resume(result.run_id, answers={"report": answer})
    assert result.text == {"report": DONE}


def test_the_decisions_come_over_http_and_from_the_command(tmp_path: Path) -> None:
    with served(tmp_path, backends=BACKENDS, work=WORK) as server, server.client() as client:
        for by in ("HTTP", "the command"):
            run_id = created(client, {"tasks": [{"id": "report", "prompt": "go"}]})
            events(client, run_id, until_="run_waiting_input")
            if by == "HTTP":
                post(client, f"/api/runs/{run_id}/tasks/report/answer", {"value": DECISIONS}).raise_for_status()
            else:
                (asked,) = plait(tmp_path, "answer", run_id, "--json").value
                assert asked["command"] == f"plait answer {run_id} report VALUE"
                assert plait(tmp_path, "answer", run_id, "report", json.dumps(DECISIONS)).code == 0
            post(client, f"/api/runs/{run_id}/resume").raise_for_status()
            assert events(client, run_id)[-1].event == "run_completed"
            assert client.get(f"/api/runs/{run_id}").json()["tasks"][0]["text"] == DONE
