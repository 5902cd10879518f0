"""Graphs as tasks of a run: questions, answers and crashes, with a store of ours and a saver of LangGraph's."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

from plait import DAG, ParallelRunner, RunResult, RunStatus, Task, TaskStatus
from plait.backends import LangGraphBackend
from plait.persistence import MemoryStore, SQLiteStore
from tests.support.graphs import RUN, Work, chain, kept, steps

PLAN = DAG([Task("report", "write"), Task("sign", "so it is {{ report.status }}", depends_on=["report"])])


def draft(state: Work) -> Any:
    return {"done": ["draft"]}


def approve(state: Work) -> Any:
    if state.get("prompt") != "write":
        return {}
    where = interrupt({"question": "Where to?"})
    copies = interrupt("How many?", response_schema={"type": "integer"})
    return {"status": f"{where} {copies}"}


class Office:
    """A store and a saver on files; each call is a process's life of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def run(self) -> RunResult:
        async with SQLiteStore(self.folder / "runs.db") as store, kept(self.graph, self.folder / "db") as graph:
            return await ParallelRunner(LangGraphBackend(graph), store=store).run(PLAN)

    async def resume(self, run_id: str, **more: Any) -> RunResult:
        async with SQLiteStore(self.folder / "runs.db") as store, kept(self.graph, self.folder / "db") as graph:
            return await ParallelRunner(LangGraphBackend(graph), store=store).resume(run_id, **more)

    @property
    def graph(self) -> Any:
        return chain(draft, approve)


async def test_a_run_waits_for_answers_and_completes(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first = await office.run()
    assert first.status is RunStatus.WAITING_INPUT
    assert (first["report"].status, first["report"].question) == (TaskStatus.WAITING_INPUT, "Where to?")
    second = await office.resume(first.run_id, answers={"report": "press"})
    assert (second.status, second["report"].question) == (RunStatus.WAITING_INPUT, "How many?")
    last = await office.resume(first.run_id, answers={"report": 3})
    assert last.status is RunStatus.COMPLETED
    assert last["report"].data == {"prompt": "write", "status": "press 3", "done": ["draft"]}
    assert last["report"].session_id == f"{first.run_id}:report"
    assert last["sign"].data == {"prompt": "so it is press 3", "done": ["draft"]}
    async with SQLiteStore(tmp_path / "runs.db") as store:
        said = [message.content for message in await store.list_messages(first.run_id, "report")]
    assert said == ["write", "Where to?", "press", "How many?", "3", last["report"].text]


@pytest.mark.parametrize(
    "value", ["text", "", False, 0, 1.5, None, [], [1, "a"], {}, {"decisions": [{"type": "approve"}]}]
)
async def test_a_question_without_a_schema_takes_any_value(value: Any) -> None:
    def ask(state: Work) -> Any:
        return {"status": repr(interrupt("Well?"))}

    runner = ParallelRunner(LangGraphBackend(chain(ask).compile(checkpointer=InMemorySaver())), store=MemoryStore())
    asked = await runner.run(DAG([Task("a", "go")]))
    (question,) = await runner.runs.questions(asked.run_id)
    assert question.asks is not None
    assert question.asks.schema == {}
    done = await runner.resume(asked.run_id, answers={"a": value})
    assert done["a"].data == {"prompt": "go", "status": repr(value), "done": []}


async def test_a_killed_run_goes_on_inside_its_graph(tmp_path: Path) -> None:
    (tmp_path / "deadly").touch()
    script = "import anyio, pathlib, sys, tests.support.graphs as g\nanyio.run(g.run_a_run, pathlib.Path(sys.argv[1]))"
    done = await anyio.run_process([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (tmp_path / "deadly").unlink()
    async with SQLiteStore(tmp_path / "runs.db") as store, kept(steps(tmp_path), tmp_path / "db") as graph:
        result = await ParallelRunner(LangGraphBackend(graph), store=store).resume(RUN)
    assert result["task"].data == {"prompt": "p", "status": "verified", "done": ["one", "two", "three"]}
    assert (tmp_path / "ran").read_text() == "one\ntwo\nthree\n"
