"""Plans with `kind: pydantic-ai`, by the command: run, kill -9, resume, continue."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from plait.backends.process.process_table import start_time
from tests.support.processes import warm
from tests.support.processes.command import PLAIT, Done, environment
from tests.support.processes.warm import Warm
from tests.support.tool_calls import calling, saying
from tests.support.wire import ChatCompletions, Script, events, serve, silence

pytestmark = pytest.mark.slow

SERVER = Path(__file__).parents[2] / "support" / "mcp_server.py"
LOADED = ("pydantic_ai", "pydantic_ai.mcp", "pydantic_ai.models.openai")
"""Libraries that take the command two seconds of a processor to import."""
TOOLS = '''
from pathlib import Path

def price(item: str) -> str:
    """Return the price of an item."""
    with Path("calls").open("a") as file:
        file.write(item + "\\n")
    return f"{item} costs 3 euros"

NOT_A_TOOL = 3
'''
PLAN = """
backends:
  shop:
    kind: pydantic-ai
    model: "openai-chat:m"
    instructions: You keep a shop.
    tools: ["tools.py:price"]
    mcp_servers:
      stock: {{command: ["{python}", "{server}", "{log}"], pass_env: [SHOP]}}
tasks:
  - {{id: ask, prompt: What do nails cost?}}
  - {{id: more, continues: ask, depends_on: ask, prompt: And ten of them?}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "plan.yaml").write_text(PLAN.format(python=sys.executable, server=SERVER, log=tmp_path / "log"))
    return tmp_path


def given(server: Script | None) -> dict[str, str]:
    if server is None:
        return {}
    return {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "a-secret-key", "SHOP": "Ada"}


async def command(folder: Path, server: Script | None, *words: str) -> Done:
    run = partial(warm.run, [*PLAIT, *words], cwd=folder, env=environment(**given(server)), timeout=60, loaded=LOADED)
    done = await anyio.to_thread.run_sync(run)
    return Done(done.returncode, done.stdout, done.stderr)


def contents(folder: Path) -> list[bytes]:
    found = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    assert any(b"ten of them" in one for one in found)
    return found


def roles(body: Any) -> list[str]:
    return [one["role"] for one in body["messages"]]


async def test_a_plan_runs_and_its_conversation_goes_on(folder: Path) -> None:
    answers = (
        calling(("price", {"item": "nails"}), ("stock_count", {"item": "nails"})),
        saying("Three, seven left."),
        saying("Thirty."),
        saying("Yes."),
    )
    async with serve(*answers) as server:
        done = await command(folder, server, "run", "plan.yaml")
        assert (done.code, done.out) == (0, "Thirty.\n"), done.err
        said = await command(folder, server, "continue", "last", "more", "Sure?")
        assert (said.code, said.out) == (0, "Yes.\n"), said.err
    first, second, third, fourth = server.bodies
    assert {tool["function"]["name"] for tool in first["tools"]} == {"price", "stock_count", "stock_hang", "stock_die"}
    assert roles(second) == ["system", "user", "assistant", "tool", "tool"]
    assert roles(third) == [*roles(second), "assistant", "user"]
    assert roles(fourth) == [*roles(third), "assistant", "user"]
    assert not any(b"a-secret-key" in file for file in contents(folder))


async def test_a_plan_limits_the_answers_and_a_cut_answer_names_the_setting(folder: Path) -> None:
    plan = folder / "plan.yaml"
    plan.write_text(plan.read_text().replace("instructions:", "max_tokens: 7\n    instructions:"))
    async with serve(events(ChatCompletions().parts("It is", reason="length"))) as server:
        done = await command(folder, server, "run", "plan.yaml")
    assert server.bodies[0]["max_completion_tokens"] == 7
    assert "truncated: the answer was cut after 7 tokens: " in done.err
    assert "set a higher `max_tokens` of the backend " in done.err


async def test_a_killed_turn_goes_on_from_its_last_step(folder: Path) -> None:
    async with serve(calling(("price", {"item": "nails"})), silence) as server:
        process = Warm([*PLAIT, "run", "plan.yaml"], cwd=folder, env=environment(**given(server)), loaded=LOADED)
        with anyio.fail_after(60):
            while len(server.requests) < 2:  # noqa: ASYNC110 - it is another process's doing
                await anyio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        await anyio.to_thread.run_sync(process.wait)
        (pid,) = {int(line.split()[1]) for line in (folder / "log").read_text().splitlines()}
        with anyio.fail_after(60):
            while start_time(pid) is not None:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        server.answers = [saying("Three."), saying("Thirty.")]
        done = await command(folder, server, "resume", "last")
        assert (done.code, done.out) == (0, "Thirty.\n"), done.err
    assert (folder / "calls").read_text() == "nails\n", "the tool's result was stored"
    assert server.bodies[2] == server.bodies[1]
    assert roles(server.bodies[3]) == [*roles(server.bodies[2]), "assistant", "user"]


async def test_a_stored_run_executes_no_tool_that_the_plan_does_not_name(folder: Path) -> None:
    async with serve(saying("Three."), saying("Thirty.")) as server:
        assert (await command(folder, server, "run", "plan.yaml")).code == 0
        (folder / "plan.yaml").write_text(
            (folder / "plan.yaml").read_text().replace("tools.py:price", "other.py:price")
        )
        done = await command(folder, server, "continue", "last", "more", "Sure?")
    assert done.code == 2
    assert (
        "backend 'shop' of run " in done.err and "may run commands or tools, so a plan file has to have it" in done.err
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tools.py:price", "tools.py:prize", "tools.py:prize: tools.py has no 'prize'"),
        ("tools.py:price", "tools.py:NOT_A_TOOL", "a tool is a function, not int"),
        ("openai-chat:m", "m", "model"),
        ("pass_env: [SHOP]", "pass_env: [NO_SHOP]", "needs the environment variable NO_SHOP; set it"),
        ("pass_env: [SHOP]", "url: 'http://x/mcp'", "an MCP server has either command or url"),
        (f'"{sys.executable}", ', '"no-such-program", ', "the command 'no-such-program' of MCP server 'stock'"),
        ("stock:", "1stock:", "'1stock' is no name for a server"),
    ],
)
async def test_a_mistake_in_a_plan_is_one_line(folder: Path, old: str, new: str, said: str) -> None:
    plan = folder / "plan.yaml"
    plan.write_text(plan.read_text().replace(old, new))
    async with serve(silence) as server:
        done = await command(folder, server, "run", "plan.yaml")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


async def test_an_unknown_provider_and_a_missing_key_fail_in_one_line(folder: Path) -> None:
    (folder / "plan.yaml").write_text(
        "backends: {a: {kind: pydantic-ai, model: 'openai-chat:m'}, b: {kind: pydantic-ai, model: 'nobody:m'}}\n"
        "tasks: [{id: a, prompt: x, backend: a}, {id: b, prompt: x, backend: b}]\n"
    )
    done = await command(folder, None, "run", "plan.yaml")
    assert done.code == 1
    assert "OPENAI_API_KEY" in done.err
    assert "nobody:m" in done.err
    assert "Traceback" not in done.err


def test_checking_a_plan_imports_no_library(folder: Path) -> None:
    (folder / "plan.yaml").write_text(
        "backends: {a: {kind: pydantic-ai, model: 'bedrock:m'}}\ntasks: [{id: a, prompt: x, backend: a}]\n"
    )
    program = (
        "import sys\n"
        "from plait.runner.cli.command_line import cli\n"
        "from plait.runner.cli.command_line import run_cli\n"
        "code = run_cli(cli, ['check', 'plan.yaml'])\n"
        "sys.exit(code or ('pydantic_ai' in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
