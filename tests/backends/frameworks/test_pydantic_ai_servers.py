"""Real MCP servers: started for a conversation, and ended with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from plait.backends import ConversationRequest, PydanticAIBackend
from plait.backends.frameworks.pydantic_ai_agent import DeclaredAgentBackend, McpServer
from plait.backends.process.process_table import start_time
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.support.tool_calls import calling, saying
from tests.support.wire import plain, serve

pytestmark = pytest.mark.slow

SERVER = Path(__file__).parents[2] / "support" / "mcp_server.py"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")


def backend(*servers: McpServer, **options: Any) -> PydanticAIBackend:
    return DeclaredAgentBackend("openai-chat:m", servers=servers, **options)


def stock(log: Path, **options: Any) -> McpServer:
    return McpServer("stock", (sys.executable, str(SERVER), str(log)), **options)


def noted(log: Path) -> list[tuple[str, int]]:
    lines = log.read_text().split("\n") if log.exists() else []
    return [(event, int(pid)) for event, _, pid in (line.partition(" ") for line in lines if line)]


def oom_score(pid: str) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def until_noted(log: Path, event: str) -> str:
    with anyio.fail_after(60):
        while True:
            found = [one for one, _ in noted(log) if one.startswith(event)]
            if found:
                return found[-1]
            await anyio.sleep(0.02)


async def until_gone(*pids: int) -> None:
    with anyio.fail_after(60):
        while any(start_time(pid) is not None for pid in pids):  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_a_servers_tools_are_called_and_the_server_ends(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP", "Ada")
    monkeypatch.setenv("HIDDEN", "yes")
    async with serve(calling(("stock_count", {"item": "nails"})), saying("Seven.")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        async with backend(stock(log, pass_env=("SHOP",))).open(ConversationRequest(session_id="s")) as conversation:
            reply = await conversation.send("How many nails?")
        assert reply.text == "Seven."
        told = server.bodies[1]["messages"][-1]["content"]
    assert "7 pieces of nails for Ada" in json.dumps(told)
    (started, pid), counted = noted(log)
    assert (started, counted) == ("start", ("count-nails", pid))
    await until_gone(pid)


async def test_a_server_and_its_children_are_the_kernel_s_first_choice(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = oom_score("self")
    async with serve(calling(("stock_hang", {}))) as server, anyio.create_task_group() as group:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")

        async def run() -> None:
            async with backend(stock(log)).open(ConversationRequest(session_id="s")) as conversation:
                await conversation.send("Wait.")

        group.start_soon(run)
        child = (await until_noted(log, "hang-")).removeprefix("hang-")
        scores = [oom_score(str(noted(log)[0][1])), oom_score(child)]
        group.cancel_scope.cancel()
    assert scores == [min(own + 300, 1000)] * 2


async def test_cancelling_ends_the_servers_whole_tree(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So long the library would wait for it. By name, for the library takes a second of every worker that only looks.
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 600.0)
    async with serve(calling(("stock_hang", {}))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")

        async def run() -> None:
            async with backend(stock(log)).open(ConversationRequest(session_id="s")) as conversation:
                await conversation.send("Wait.")

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            child = int((await until_noted(log, "hang-")).removeprefix("hang-"))
            assert psutil.pid_exists(child)
            group.cancel_scope.cancel()
    with anyio.fail_after(60):
        await until_gone(child, noted(log)[0][1])


async def test_a_server_that_dies_fails_the_turn_with_a_kind(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(calling(("stock_die", {}))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        async with backend(stock(log)).open(ConversationRequest(session_id="s")) as conversation:
            with pytest.raises(BackendError) as caught:
                await conversation.send("End it.")
    assert caught.value.kind is ErrorKind.TRANSIENT, caught.value
    assert "\n" not in caught.value.message


async def test_a_command_that_is_missing_is_named() -> None:
    for command in ("no-such-program", "./no-such-file"):
        with pytest.raises(BackendUnavailable, match=f"the command '{command}' of MCP server 'stock' was not found"):
            backend(McpServer("stock", (command,))).check()


async def test_a_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP", raising=False)
    for server in (
        McpServer("stock", ("true",), pass_env=("SHOP",)),
        McpServer("stock", url="http://127.0.0.1:9/mcp", api_key_env="SHOP"),
    ):
        with pytest.raises(BackendUnavailable, match="'stock' needs the environment variable SHOP; set it"):
            backend(server).check()


async def test_a_server_that_ends_at_once_is_unavailable_with_its_last_line() -> None:
    broken = McpServer("stock", ("sh", "-c", "echo 'there is no shop' >&2; exit 2"))
    with pytest.raises(BackendUnavailable, match=r"'stock' \(sh\) did not start: .*its last line: there is no shop"):
        async with backend(broken).open(ConversationRequest(session_id="s")):
            pass


async def test_a_url_where_nobody_answers_is_transient() -> None:
    with pytest.raises(BackendError, match=r"'far' at http://127.0.0.1:9/mcp does not answer") as caught:
        async with backend(McpServer("far", url="http://127.0.0.1:9/mcp")).open(ConversationRequest(session_id="s")):
            pass
    assert caught.value.kind is ErrorKind.TRANSIENT


async def test_a_url_gets_the_token_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "a-secret-token")
    async with serve(plain(401, {"error": "a-secret-token is wrong"})) as server:
        far = McpServer("far", url=f"{server.url}/mcp", api_key_env="SHOP_TOKEN")
        with pytest.raises(BackendError) as caught:
            async with backend(far).open(ConversationRequest(session_id="s")):
                pass
    assert server.requests[0].headers["authorization"] == "Bearer a-secret-token"
    assert "a-secret-token" not in caught.value.message
