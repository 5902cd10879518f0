"""`plait mcp`, used by the client of the official SDK: in a process of its own where that is the point."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, chdir
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

from plait import DAG, ParallelRunner, PersonBackend, Task
from plait.clock_and_ids import Clock
from plait.persistence import MemoryStore, SQLiteStore
from plait.runner.client.offered_plans import LocalPlans
from plait.runner.client.run_backends import BackendOptions, TrustedBackends
from plait.runner.engine.inbox import AnswerNote, answer_note
from plait.runner.serving.mcp_server import RunTools, make_server
from tests.support.agents.logs import wait_for
from tests.support.processes.command import PLAIT, environment, plait

pytestmark = pytest.mark.slow

PLAN = """
backends: {w: {kind: function, call: "work.py:work"}}
inputs: {topic: tea, items: [1, 2]}
tasks:
  - {id: part, prompt: "{{ topic }} {{ item }}", for_each: items}
  - {id: whole, prompt: "all: {% for one in part %}{{ one }} {% endfor %}", depends_on: part}
"""
ASKING = """
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: first, prompt: "ask"}
  - {id: second, prompt: "got {{ first }}", depends_on: first}
"""
HELD = """
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: done, prompt: "quick"}
  - {id: slow, prompt: "held {{ done }}", depends_on: done}
  - {id: last, prompt: "long {{ slow }}", depends_on: slow}
"""
WORK = """
import anyio
import anyio.to_thread
from pathlib import Path
from plait.backends import ask

async def work(prompt):
    print("noise on standard output")
    with Path("calls").open("a") as file:
        file.write(prompt + "\\n")
    while prompt.startswith("held") and not Path("go").exists():
        await anyio.sleep(0.01)
    if prompt.startswith("ask"):
        return str(await ask("Which one?", schema={"type": "integer"}))
    return "x" * 50_000 if prompt.startswith("long") else prompt.upper()
"""
WISE = """
async def work(prompt):
    if prompt.startswith("You plan"):
        return {"tasks": [{"id": "a", "prompt": "look"}]}
    return {"done": True} if prompt.startswith("You judge") else "the answer"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"plan.yaml": PLAN, "asking.yaml": ASKING, "held.yaml": HELD, "work.py": WORK}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


class Agent:
    """A client of a server under way."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> Any:
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        return result.structured_content

    async def refused(self, tool: str, **arguments: Any) -> str:
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error
        return result.content[0].text  # type: ignore[union-attr]

    async def ended(self, run_id: str) -> Any:
        """Wait in calls of 20 s at most, as an agent does."""
        while (state := await self.call("wait_for_run", run_id=run_id))["status"] == "running":
            pass
        return state


@asynccontextmanager
async def agent(folder: Path, *plans: str, **extra: str) -> AsyncGenerator[Agent]:
    words = [*PLAIT[1:], "mcp", *(plans or ("plan.yaml", "asking.yaml", "held.yaml"))]
    parameters = StdioServerParameters(command=sys.executable, args=words, env=environment(**extra), cwd=folder)
    async with Client(stdio_client(parameters)) as client:
        yield Agent(client)


@asynccontextmanager
async def agent_here(folder: Path, *plans: str) -> AsyncGenerator[Agent]:
    """The same, with the server in this process."""
    with chdir(folder):
        async with SQLiteStore(folder / ".plait" / "plait.db") as store, TrustedBackends(store).runs() as runs:
            offered = LocalPlans(tuple(folder / name for name in plans), BackendOptions(), store, runs)
            async with Client(make_server(RunTools(runs, offered, Clock()))) as client:
                yield Agent(client)


async def test_a_run_from_its_start_to_its_results(folder: Path) -> None:
    async with agent(folder) as user:
        plans = (await user.call("list_plans"))["plans"]
        assert [one["plan"] for one in plans] == ["plan", "asking", "held"]
        assert plans[0]["inputs"] == {"topic": "tea", "items": [1, 2]}
        run_id = (await user.call("start_run", plan="plan", inputs={"topic": "jam", "items": [7]}))["run_id"]
        state = await user.ended(run_id)
        assert (state["status"], state["done"]) == ("completed", state["total"])
        results = (await user.call("get_result", run_id=run_id))["results"]
        assert [(one["task_id"], one["text"]) for one in results] == [("whole", "ALL: JAM 7 ")]
        assert [one["run_id"] for one in (await user.call("list_runs"))["runs"]] == [run_id]
    assert plait(folder, "show", run_id, "--json").value["status"] == "completed"


async def test_a_question_is_answered_and_the_run_continues(folder: Path) -> None:
    async with agent_here(folder, "asking.yaml") as user:
        run_id = (await user.call("start_run", plan="asking"))["run_id"]
        state = await user.ended(run_id)
        assert (state["status"], state["questions"]) == ("waiting_input", ["first"])
        (asked,) = (await user.call("list_questions", run_id=run_id))["questions"]
        assert (asked["question"], asked["schema"]) == ("Which one?", {"type": "integer"})
        said = await user.refused("answer_question", run_id=run_id, task_id="first", answer="seven")
        assert "integer" in said
        assert (await user.call("answer_question", run_id=run_id, task_id="first", answer=7))["taken"]
        assert (await user.ended(run_id))["status"] == "completed"
        (result,) = (await user.call("get_result", run_id=run_id))["results"]
        assert result["text"] == "GOT 7"


async def test_a_question_whose_answer_waits_in_the_inbox_is_no_longer_open() -> None:
    store = MemoryStore()
    runner = ParallelRunner(PersonBackend(), store=store)
    await runner.run(DAG([Task("a", prompt="Which one?")]), "r")
    tools = RunTools(runner.runs, LocalPlans((), BackendOptions(), store, runner.runs), Clock())
    assert [one["question"] for one in (await tools.list_questions("r"))["questions"]] == ["Which one?"]
    await store.send("r", answer_note(AnswerNote("a", 1, "this", "2026-01-01T00:00:00.000Z", "once")))
    assert (await tools.list_questions("r"))["questions"] == []


async def test_a_killed_server_is_replaced_by_the_next_with_the_same_key(folder: Path) -> None:
    process = await anyio.open_process([*PLAIT, "mcp", "held.yaml"], cwd=folder, env=environment(), stderr=None)
    async with process:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send(_call("start_run", {"plan": "held", "key": "k"}))
        while b'"id":2' not in await process.stdout.receive():
            pass
        await anyio.to_thread.run_sync(wait_for, lambda: "held" in (folder / "calls").read_text())
        process.kill()
    (folder / "go").touch()
    async with agent(folder) as user:
        run_id = (await user.call("start_run", plan="held", key="k"))["run_id"]
        assert (await user.ended(run_id))["status"] == "completed"
        assert len((await user.call("list_runs"))["runs"]) == 1
    calls = (folder / "calls").read_text().splitlines()
    assert calls.count("quick") == 1
    assert calls.count("held QUICK") == 2


def _call(tool: str, arguments: dict[str, Any]) -> bytes:
    client = {"name": "test", "version": "1"}
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": begin},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": tool, "arguments": arguments}},
    ]
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


async def test_a_signal_stops_the_runs_and_stores_them(folder: Path) -> None:
    process = await anyio.open_process([*PLAIT, "mcp", "held.yaml"], cwd=folder, env=environment())
    async with process:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send(_call("start_run", {"plan": "held", "key": "k"}))
        while b'"id":2' not in await process.stdout.receive():
            pass
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 6
    (run,) = plait(folder, "runs", "--json").value
    assert run["status"] == "interrupted"


async def test_a_long_result_comes_in_pieces(folder: Path) -> None:
    (folder / "go").touch()
    async with agent_here(folder, "held.yaml") as user:
        run_id = (await user.call("start_run", plan="held"))["run_id"]
        await user.ended(run_id)
        text, offset = "", 0
        while offset is not None:
            (piece,) = (await user.call("get_result", run_id=run_id, task_id="last", offset=offset))["results"]
            assert len(piece["text"]) <= 20_000
            text, offset = text + piece["text"], piece["next_offset"]
        assert text == "x" * 50_000


async def test_a_paused_run(folder: Path) -> None:
    async with agent_here(folder, "held.yaml") as user:
        run_id = (await user.call("start_run", plan="held"))["run_id"]
        assert "has no backend 'nobody'" in await user.refused("pause_run", run_id=run_id, backend="nobody")
        assert (await user.call("pause_run", run_id=run_id))["status"] == "running"
        assert (await user.call("tune_run", run_id=run_id, concurrency=3))["status"] == "running"
        assert (await user.call("pause_run", run_id=run_id, off=True))["status"] == "running"
        await user.call("cancel_run", run_id=run_id)


async def test_a_cancelled_run(folder: Path) -> None:
    async with agent_here(folder, "held.yaml") as user:
        run_id = (await user.call("start_run", plan="held"))["run_id"]
        assert (await user.call("wait_for_run", run_id=run_id, seconds=0))["status"] == "running"
        assert (await user.call("cancel_run", run_id=run_id))["status"] in {"cancelling", "cancelled"}
        while (state := await user.call("wait_for_run", run_id=run_id))["status"] == "cancelling":
            pass
        assert state["status"] == "cancelled"
        assert "cancelled" in await user.refused("resume_run", run_id=run_id)


async def test_mistakes_are_told_to_the_agent(folder: Path) -> None:
    assert plait(folder, "run", "asking.yaml", "-q").code == 4
    (other,) = plait(folder, "runs", "--json").value
    async with agent_here(folder, "plan.yaml") as user:
        assert "there is no plan 'plam'; did you mean 'plan'?" in await user.refused("start_run", plan="plam")
        assert "no input 'topik'" in await user.refused("start_run", plan="plan", inputs={"topik": 1})
        assert "the store has no run 'r'" in await user.refused("run_status", run_id="r")
        assert "seconds" in await user.refused("wait_for_run", run_id=other["run_id"], seconds=60)
        assert "no task 'zz'" in await user.refused("get_result", run_id=other["run_id"], task_id="zz")
        assert "not made from a plan of this server" in await user.refused("resume_run", run_id=other["run_id"])
        named = await user.call("start_run", plan="plan", inputs={"topic": {"files": "work.py"}})
        await user.ended(named["run_id"])
        (told,) = (await user.call("get_result", run_id=named["run_id"]))["results"]
        assert "ASYNC DEF" not in told["text"]
        assert "WORK.PY" in told["text"]
        first = await user.call("start_run", plan="plan", key="k")
        assert (await user.call("start_run", plan="plan", key="k"))["run_id"] == first["run_id"]
        said = await user.refused("start_run", plan="plan", key="k", inputs={"topic": "x"})
        assert "give a new run a new key" in said
        # The answer is stored, and the run of a person goes on when the person resumes it.
        state = await user.call("answer_question", run_id=other["run_id"], task_id="first", answer=1)
        assert state["status"] == "waiting_input"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "missing argument"),
        (["nowhere.yaml"], "nowhere.yaml cannot be read (No such file or directory)"),
        (["plan.yaml", "sub/plan.yaml"], "have the same name, 'plan'"),
        (["broken.yaml"], "broken.yaml"),
    ],
)
def test_files_that_cannot_be_offered(folder: Path, words: list[str], said: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "plan.yaml").write_text(PLAN)
    (folder / "broken.yaml").write_text("tasks: [")
    done = plait(folder, "mcp", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


async def test_an_input_without_a_default_is_asked_for(folder: Path) -> None:
    (folder / "asks.yaml").write_text(PLAN.replace("topic: tea", "topic: {required: true}"))
    async with agent_here(folder, "asks.yaml") as user:
        said = await user.refused("start_run", plan="asks")
        assert "the input 'topic' of plan 'asks' has no default; give it a value in `inputs`" in said
        assert (await user.call("start_run", plan="asks", inputs={"topic": "x"}))["total"] >= 1


async def test_an_agent_that_is_a_task_of_a_run_starts_no_runs(folder: Path) -> None:
    async with agent(folder, "plan.yaml", PLAIT_TURN_0123456789abcdef="1") as user:
        assert (await user.call("list_runs"))["runs"] == []
        said = await user.refused("start_run", plan="plan")
        assert "this agent works for a task of a run itself" in said


async def test_the_result_of_a_goal_is_its_answer(folder: Path) -> None:
    (folder / "work.py").write_text(WISE)
    (folder / "goal.yaml").write_text(f"{PLAN.splitlines()[1]}\norchestrate: {{goal: Find it.}}\n")
    async with agent_here(folder, "goal.yaml") as user:
        run_id = (await user.call("start_run", plan="goal"))["run_id"]
        assert (await user.ended(run_id))["status"] == "completed"
        (result,) = (await user.call("get_result", run_id=run_id))["results"]
        assert (result["task_id"], result["text"]) == ("answer", "the answer")


async def test_a_task_that_is_continued_is_no_final_task(folder: Path) -> None:
    (folder / "plan.yaml").write_text(PLAN + '  - {id: then, prompt: "and then?", continues: whole}\n')
    async with agent_here(folder, "plan.yaml") as user:
        run_id = (await user.call("start_run", plan="plan"))["run_id"]
        await user.ended(run_id)
        results = (await user.call("get_result", run_id=run_id))["results"]
        assert [one["task_id"] for one in results] == ["then"]


@pytest.mark.parametrize("items", [["a", "b"], []])
async def test_a_for_each_over_a_result_is_one_final_task(folder: Path, items: list[str]) -> None:
    (folder / "work.py").write_text(
        f"def work(prompt):\n    return {items!r} if prompt == 'list' else prompt.upper()\n"
    )
    tasks = ['{id: names, prompt: "list"}', '{id: each, prompt: "{{ item }}", for_each: names}']
    plan = [*PLAN.splitlines()[1:2], "tasks:", *(f"  - {task}" for task in tasks)]
    (folder / "plan.yaml").write_text("\n".join(plan))
    async with agent_here(folder, "plan.yaml") as user:
        run_id = (await user.call("start_run", plan="plan"))["run_id"]
        await user.ended(run_id)
        results = (await user.call("get_result", run_id=run_id))["results"]
        assert [(one["task_id"], one["data"]) for one in results] == [("each", [item.upper() for item in items])]
