"""Histories in files: interrupted turns, failed turns, forks, and what `plait gc` keeps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, SQLiteStore, Task
from plait.backends import ConversationRequest, Files, Message, Output, PydanticAIBackend, Reply
from plait.backends.agents.cli_agent import remove_sessions_except
from plait.errors import BackendError, ErrorKind
from tests.support.pydantic_agents import wired_agent
from tests.support.tool_calls import CHAT, calling, saying
from tests.support.wire import Script, events, serve, silence


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "turn", tmp_path / "sessions")


class Shop:
    """A tool that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def count(self, item: str) -> str:
        """Count an item."""
        self.calls.append(item)
        return f"7 {item}"


async def say(server: Script, files: Files, prompt: str, *, shop: Shop | None = None, **request: Any) -> Reply:
    """One turn as in a process of its own: with a new agent and a new backend."""
    backend = PydanticAIBackend(wired_agent(server.url, tools=[(shop or Shop()).count]))
    async with backend.open(ConversationRequest(files=files, **request)) as conversation:
        return await conversation.send(prompt)


def said(body: Any) -> list[tuple[str, Any]]:
    return [(one["role"], one.get("content")) for one in body["messages"]]


async def test_a_later_process_goes_on_with_tool_calls_and_all(files: Files) -> None:
    async with serve(calling(("count", {"item": "nails"})), saying("Seven."), saying("Sure.")) as server:
        await say(server, files, "How many nails?", session_id="s")
        history = (Message("user", "How many nails?"), Message("assistant", "Seven."))
        await say(server, files, "Sure?", session_id="s", resume=True, history=history)
    assert [role for role, _ in said(server.bodies[-1])] == ["user", "assistant", "tool", "assistant", "user"]
    assert said(server.bodies[-1])[2] == ("tool", "7 nails")


async def test_an_interrupted_turn_goes_on_where_it_was(files: Files) -> None:
    shop = Shop()
    async with serve(calling(("count", {"item": "nails"})), silence) as server:
        assert await cut_at_the_second_request(server, files, shop) == ["s"]
        server.answers = [saying("Seven.")]
        reply = await say(
            server, files, "You were interrupted.", shop=shop, session_id="s", resume=True, resumes_interrupted=True
        )
    assert reply.text == "Seven."
    assert shop.calls == ["nails"], "the finished step is not repeated"
    assert said(server.bodies[-1])[-1] == ("tool", "7 nails")
    assert server.bodies[-1] == server.bodies[-2], "the same request as the one that was cut"
    assert reply.usage.input_tokens == 20 + 11, "what the dead process paid is counted with the next"


async def cut_at_the_second_request(server: Script, files: Files, shop: Shop) -> list[str]:
    told: list[str] = []

    async def turn() -> None:
        await say(server, files, "How many nails?", shop=shop, session_id="s", on_session=told.append)

    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        with anyio.fail_after(60):
            while len(server.requests) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    return told


async def test_a_turn_cut_while_tools_run_calls_the_tools_again(files: Files) -> None:
    started = anyio.Event()

    async def slow(item: str) -> str:
        started.set()
        await anyio.sleep_forever()
        raise AssertionError(item)

    async with serve(calling(("count", {"item": "nails"})), saying("Seven.")) as server:
        backend = PydanticAIBackend(wired_agent(server.url, tools=[named(slow)]))
        async with anyio.create_task_group() as group:

            async def turn() -> None:
                async with backend.open(ConversationRequest(session_id="s", files=files)) as conversation:
                    await conversation.send("How many nails?")

            group.start_soon(turn)
            with anyio.fail_after(60):
                await started.wait()
            group.cancel_scope.cancel()
        shop = Shop()
        reply = await say(server, files, "-", shop=shop, session_id="s", resume=True, resumes_interrupted=True)
    assert (reply.text, shop.calls) == ("Seven.", ["nails"])
    assert len(server.requests) == 2


def named(tool: Any) -> Any:
    tool.__name__ = "count"
    return tool


async def test_an_answer_that_was_written_is_not_asked_for_again(files: Files) -> None:
    async with serve(saying("Good morning.")) as server:
        first = await say(server, files, "Hello?", session_id="s")
        again = await say(server, files, "-", session_id="s", resume=True, resumes_interrupted=True)
    assert (again.text, again.usage) == (first.text, first.usage)
    assert len(server.requests) == 1


async def test_a_failed_attempt_is_continued_from_its_last_step_and_counted_once(files: Files) -> None:
    shop = Shop()
    answers = (calling(("count", {"item": "nails"})), CHAT.error(503, "overloaded", "later"), saying("Seven."))
    async with serve(*answers) as server:
        with pytest.raises(BackendError) as caught:
            await say(server, files, "How many nails?", shop=shop, session_id="s")
        assert caught.value.continues_session
        assert caught.value.usage.input_tokens == 20
        reply = await say(server, files, "-", shop=shop, session_id="s", resume=True, resumes_interrupted=True)
    assert (reply.text, shop.calls, reply.usage.input_tokens) == ("Seven.", ["nails"], 11)


async def test_a_turn_out_of_time_is_continued_from_its_last_step_and_counted_once(tmp_path: Path) -> None:
    shop = Shop()
    async with serve(calling(("count", {"item": "nails"})), silence, saying("Seven.")) as server:
        backend = PydanticAIBackend(wired_agent(server.url, tools=[shop.count]))
        async with SQLiteStore(tmp_path / "runs.db") as store:
            # The answer that never comes is not waited for longer than this; the steps before take milliseconds.
            task = Task("ask", "How many nails?", timeout=3, retry=Retry(attempts=2, base_delay=0.01))
            result = await ParallelRunner(backend, store=store).run(DAG([task]))
    assert (result["ask"].text, result["ask"].attempts, shop.calls) == ("Seven.", 2, ["nails"])
    assert server.bodies[2] == server.bodies[1], "the finished step is not paid for again"
    assert (result.usage.input_tokens, result.usage.output_tokens) == (20 + 11, 5 + 7)


async def test_a_turn_out_of_time_tells_its_usage_and_the_timeout(files: Files) -> None:
    async with serve(calling(("count", {"item": "nails"})), silence) as server:
        with anyio.fail_after(60), pytest.raises(BackendError, match=r"no answer within .* timeout of 2 s") as caught:
            await say(server, files, "How many nails?", session_id="s", timeout=2.0)
    assert (caught.value.kind, caught.value.continues_session) == (ErrorKind.TIMEOUT, True)
    assert caught.value.usage.input_tokens == 20


async def test_half_an_answer_is_no_place_to_go_on_from(files: Files) -> None:
    broken = events(CHAT.parts("It is", reason=None), end="cut")
    async with serve(broken, saying("It is sunny.")) as server:
        with pytest.raises(BackendError) as caught:
            await say(server, files, "The weather?", session_id="s")
        assert caught.value.continues_session
        await say(server, files, "-", session_id="s", resume=True, resumes_interrupted=True)
    assert said(server.bodies[1]) == [("user", "The weather?")]


async def test_an_invalid_answer_is_not_continued(files: Files) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    async with serve(calling(("final_result", {"n": "x"}))) as server:
        with pytest.raises(BackendError) as caught:
            await say(server, files, "Count.", session_id="s", output_schema=schema)
    assert not caught.value.continues_session


async def test_an_unfinished_turn_is_left_out_by_the_next(files: Files) -> None:
    async with serve(saying("One."), CHAT.error(500, "x", "broken"), saying("Three.")) as server:
        await say(server, files, "1", session_id="s")
        with pytest.raises(BackendError):
            await say(server, files, "2", session_id="s", resume=True)
        await say(server, files, "3", session_id="s", resume=True)
    assert said(server.bodies[-1]) == [("user", "1"), ("assistant", "One."), ("user", "3")]


async def test_a_fork_leaves_its_origin_as_it_is(files: Files) -> None:
    async with serve(calling(("count", {"item": "nails"})), saying("Seven."), saying("Fine.")) as server:
        await say(server, files, "How many nails?", session_id="s")
        await say(server, files, "A?", session_id="a", fork_of="s")
        await say(server, files, "B?", session_id="b", fork_of="s")
        await say(server, files, "More?", session_id="a", resume=True)
    assert [role for role, _ in said(server.bodies[3])] == ["user", "assistant", "tool", "assistant", "user"]
    assert [text for role, text in said(server.bodies[4]) if role == "user"] == ["How many nails?", "A?", "More?"]


async def test_a_lost_file_is_replaced_by_the_stored_text(files: Files) -> None:
    history = (Message("user", "I am Ada."), Message("assistant", "Hello."))
    async with serve(saying("Ada.")) as server:
        await say(server, files, "My name?", session_id="gone", resume=True, history=history)
    assert said(server.bodies[0])[:2] == [("user", "I am Ada."), ("assistant", "Hello.")]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_a_history_that_json_cannot_hold_is_replaced_by_the_stored_text(files: Files) -> None:
    from pydantic_ai import ToolReturn

    def look() -> Any:
        """Look."""
        return ToolReturn("7 nails", metadata=object())

    seen: list[Output] = []
    async with serve(calling(("look", {})), saying("Seven."), saying("Sure.")) as server:
        backend = PydanticAIBackend(wired_agent(server.url, tools=[look]))
        async with backend.open(
            ConversationRequest(session_id="s", files=files, on_output=seen.append)
        ) as conversation:
            reply = await conversation.send("How many nails?")
        assert any("the stored text is used instead" in one.text for one in seen if one.kind == "notice")
        assert not list(files.sessions.glob("*.json"))
        history = (Message("user", "How many nails?"), Message("assistant", reply.text))
        await say(server, files, "Sure?", session_id="s", resume=True, history=history)
    assert said(server.bodies[-1]) == [("user", "How many nails?"), ("assistant", "Seven."), ("user", "Sure?")]


async def test_a_character_in_two_parts_of_a_stream_is_kept_whole(files: Files) -> None:
    async with serve(saying("Hello ", "\ud83d", "\ude00"), saying("Yes.")) as server:
        reply = await say(server, files, "Hello?", session_id="s")
        await say(server, files, "Sure?", session_id="s", resume=True)
    assert reply.text == "Hello \U0001f600"
    assert said(server.bodies[-1]) == [("user", "Hello?"), ("assistant", "Hello \U0001f600"), ("user", "Sure?")]


@pytest.mark.parametrize("damage", ["gone", "damaged"])
async def test_an_interrupted_turn_whose_file_is_lost_starts_over(files: Files, damage: str) -> None:
    async with serve(saying("Ada.")) as server:
        await say(server, files, "Hello?", session_id="s")
        (file,) = files.sessions.iterdir()
        file.write_text('{"turn": 0') if damage == "damaged" else file.unlink()
        with pytest.raises(BackendError) as caught:
            await say(server, files, "-", session_id="s", resume=True, resumes_interrupted=True)
    assert caught.value.kind is ErrorKind.SESSION_LOST


async def test_a_disk_that_is_full_loses_no_answer(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Output] = []
    told: list[str] = []

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    async with serve(saying("Good morning.")) as server:
        reply = await say(server, files, "Hello?", session_id="s", on_output=seen.append, on_session=told.append)
    assert reply.text == "Good morning."
    assert told == [], "a session that is not written is not reported"
    assert any("No space left" in one.text for one in seen if one.kind == "notice")
    assert not list(files.sessions.glob("*.json"))


async def test_files_are_the_users_alone_and_known_to_gc(files: Files) -> None:
    async with serve(saying("Good morning.")) as server:
        for session_id in ("kept", "old"):
            await say(server, files, "Hello?", session_id=session_id)
    for file in files.sessions.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        os.utime(file, (time.time() - 1e6, time.time() - 1e6))
    assert files.sessions.stat().st_mode & 0o777 == 0o700
    assert remove_sessions_except(["kept"], files.sessions, 3600) == []
    async with serve(saying("Yes.")) as server:
        await say(server, files, "Still there?", session_id="kept", resume=True)
        assert len(said(server.bodies[0])) == 3
    assert len(list(files.sessions.iterdir())) == 1
