"""Turns with agents that speak ACP outlive the process that began them: another one goes on talking to the agent."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait.backends import Answer, ConversationRequest, DetachedBackend, DetachedTurn, Reply
from plait.backends.agents.acp_agent import Outbox, relayed_command, sent_messages
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Launch, child_environment, running
from plait.errors import BackendError, ErrorKind
from plait.runner.state.attempt_files import end_attempt
from tests.support.agents.homes import Home, until
from tests.support.processes.warm import Warm

pytestmark = pytest.mark.slow

TASKS = ("a", "b", "c", "d")
PARENT = """
import anyio, sys, json
from pathlib import Path
from plait.backends import ConversationRequest
from tests.support.agents.homes import Home

async def main(home, words, options, prompts):
    backend = home.acp(*words, **options)
    async def one(task, prompt):
        async with backend.open(ConversationRequest(files=home.files(1, task))) as conversation:
            await conversation.send(prompt)
    async with anyio.create_task_group() as group:
        for task, prompt in prompts.items():
            group.start_soon(one, task, prompt)

anyio.run(main, Home(Path(sys.argv[1])), *json.loads(sys.argv[2]))
"""


def begin(home: Home, prompts: dict[str, str], *words: str, **options: Any) -> Warm:
    """Another process, with a turn for each of these prompts."""
    return Warm([sys.executable, "-c", PARENT, str(home.path), json.dumps([words, options, prompts])])


def die(parent: Warm) -> None:
    parent.kill()
    parent.wait()


async def adopt(home: Home, prompt: str, task: str = "a", **options: Any) -> Reply:
    request = ConversationRequest(files=home.files(1, task), attaches=True)
    async with home.acp(**options).open(request) as conversation:
        return await conversation.send(prompt)


def left(home: Home, task: str = "a") -> DetachedTurn | None:
    return home.acp().inspect(home.files(1, task))


def state(home: Home, task: str = "a") -> str:
    turn = left(home, task)
    return "" if turn is None else turn.state


def said(home: Home, task: str = "a") -> list[str]:
    return [str(message.get("method")) for message in sent_messages(home.files(1, task).turn / "1")]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_whoever_takes_over_says_what_has_not_been_said(home: Home, count: int) -> None:
    prompt = f"Work. [[until {home.path / 'go'}]] [[say done]]"
    parent = begin(home, {"a": prompt}, "--slow=0.4", model="large")
    await until(lambda: len(said(home)) == count)
    die(parent)
    assert said(home) == ["initialize", "session/new", "session/set_model", "session/prompt"][:count]
    turn = left(home)
    assert turn is not None
    assert turn.state == "alive"
    assert (turn.session_id is not None) == (count == 4)  # before that, no session holds the prompt
    (home.path / "go").touch()
    reply = await adopt(home, prompt, model="large")
    assert reply.text == "done"
    assert [one["method"] for one in home.noted("heard")] == said(home)
    assert [call["session"] for call in home.calls] == [reply.session_id]
    assert home.processes == []


async def test_a_turn_that_ended_meanwhile_is_collected_and_its_agent_ended(home: Home) -> None:
    parent = begin(home, {"a": f"Work. [[until {home.path / 'go'}]] [[say done]]"})
    await until(lambda: home.calls)
    die(parent)
    (home.path / "go").touch()
    await until(lambda: state(home) == "ended")
    assert home.processes  # it would hear more
    reply = await adopt(home, "the same prompt")
    assert (reply.text, reply.usage.output_tokens) == ("done", 7)
    assert len(home.calls) == 1
    assert home.processes == []


@pytest.mark.parametrize(("permissions", "outcome"), [("allow", "a1"), ("deny", "r1")])
async def test_what_an_agent_asked_while_nobody_was_there_is_answered(
    home: Home, permissions: str, outcome: str
) -> None:
    prompt = f"Work. [[after {home.path / 'go'}]] [[ask rm x]] [[say done]]"
    parent = begin(home, {"a": prompt}, permissions=permissions)
    await until(lambda: home.calls)
    die(parent)
    (home.path / "go").touch()
    await until(lambda: b"request_permission" in (home.files(1, "a").turn / "1" / "stdout").read_bytes())
    reply = await adopt(home, prompt, permissions=permissions)
    assert reply.text == "done"
    assert [one["optionId"] for one in home.noted("outcomes")] == [outcome]


async def test_a_question_that_was_asked_when_the_process_died_is_asked(home: Home) -> None:
    parent = begin(home, {"a": "Work. [[ask rm x]] [[say done]]"}, "--deaf", "--slow=0.2", permissions="ask")
    await until(lambda: "session/cancel" in said(home))
    die(parent)
    reply = await adopt(home, "Work. [[ask rm x]] [[say done]]", permissions="ask")
    assert reply.question is not None
    assert len(home.noted("outcomes")) == 1
    answer = ConversationRequest(
        session_id=reply.session_id, resume=True, answer=Answer("Allow"), files=home.files(2, "a")
    )
    async with home.acp(permissions="ask").open(answer) as conversation:
        assert (await conversation.send("Allow [[ask rm x]] [[say done]]")).text == "done"
    assert home.noted("outcomes")[-1]["optionId"] == "a1"


async def test_an_agent_that_died_with_its_runner_is_gone_on_with(home: Home) -> None:
    parent = begin(home, {"a": "Work. [[tool]] [[until /dev/null/never]]"})
    await until(lambda: home.calls)
    die(parent)
    os.kill(home.calls[0]["pid"], signal.SIGKILL)
    await until(lambda: state(home) == "dead")
    turn = left(home)
    assert turn is not None
    request = ConversationRequest(
        session_id=turn.session_id, resume=True, resumes_interrupted=True, files=home.files(2, "a")
    )
    async with home.acp().open(request) as conversation:
        await conversation.send("Go on.")
    users = [text for role, text in home.calls[-1]["said"] if role == "user"]
    assert users == ["Work. [[tool]] [[until /dev/null/never]]", "Go on."]


async def test_turns_that_are_to_die_with_their_runner_do(home: Home) -> None:
    parent = begin(home, {"a": "Work. [[until /dev/null/never]]"}, on_runner_death="kill")
    await until(lambda: home.calls)
    die(parent)
    await until(lambda: not home.processes)


async def _finish(home: Home, task: str, prompt: str, replies: dict[str, Reply]) -> None:
    """What a resume does with a turn, as the runner does it."""
    turn = left(home, task)
    known = [turn.session_id] if turn is not None and turn.session_id is not None else []
    goes_on = turn is not None and turn.state == "dead" and bool(known)
    request = ConversationRequest(files=home.files(1, task), attaches=turn is not None and turn.state != "dead")
    if not request.attaches:
        await end_attempt(home.files(1, task).turn)  # killed before its number was written, it may just begin
    for attempt in range(2, 6):
        if goes_on:
            request = replace(request, session_id=known[-1], resume=True, resumes_interrupted=True)
        if not request.attaches:
            request = replace(request, files=home.files(attempt, task))
        try:
            async with home.acp().open(replace(request, on_session=known.append)) as conversation:
                replies[task] = await conversation.send(f"Go on. [[say {task}]]" if goes_on else prompt)
                return
        except BackendError as error:
            if error.kind not in {ErrorKind.CRASHED, ErrorKind.SESSION_LOST}:
                raise
            goes_on, request = error.continues_session, ConversationRequest()
    raise AssertionError(f"{task} fails again and again")


@pytest.mark.parametrize("seed", range(5))
async def test_killed_at_any_moment_all_turns_are_had_once(home: Home, seed: int) -> None:
    rng = random.Random(seed)
    prompts = {task: f"Work on {task}. [[until {home.path / 'go'}]] [[say {task}]]" for task in TASKS}
    parent = begin(home, prompts, f"--slow={rng.choice((0, 0.1))}")
    await anyio.sleep(rng.uniform(0.2, 1.2))
    die(parent)
    for pid in rng.sample(home.noted("starts"), k=min(len(home.noted("starts")), rng.randrange(3))):
        os.kill(pid, signal.SIGKILL)
    (home.path / "go").touch()
    replies: dict[str, Reply] = {}
    async with anyio.create_task_group() as group:
        for task in TASKS:
            group.start_soon(_finish, home, task, prompts[task], replies)
    assert {task: reply.text for task, reply in replies.items()} == {task: task for task in TASKS}
    for task, prompt in prompts.items():
        heard = [call for call in home.calls if call["said"][-1][1] == prompt]
        assert [call["session"] for call in heard] == [replies[task].session_id], "each prompt is heard once"
    assert home.processes == []


def _start(home: Home, folder: Path, seconds: float, *words: str) -> Launch:
    folder.mkdir(parents=True)
    Outbox(folder)
    command = relayed_command(folder, seconds, [str(home.path / "acp"), *words])
    return Launch(command, child_environment(), home.path, b"")


@pytest.mark.parametrize("words", [(), ("--deaf", "--immortal")])
async def test_an_agent_to_which_nobody_comes_back_ends(home: Home, words: tuple[str, ...]) -> None:
    folder = home.path / "turn"
    async with running(_start(home, folder, 0.1, *words), folder) as child:
        await until(lambda: home.noted("starts"))
        # As when its runner has died: nobody says anything, and nobody ends it.
        await child.wait(60)
        await until(lambda: not home.processes)


async def test_half_a_message_is_completed(home: Home) -> None:
    folder = home.path / "turn"
    message: Any = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"text": "x" * 100}}
    async with running(_start(home, folder, 60), folder):
        with (folder / "messages").open("ab") as file:
            file.write(json.dumps(message, separators=(",", ":")).encode()[:50])
        assert sent_messages(folder) == []
        speech = Outbox(folder)
        speech.send([message])
        await until(lambda: home.noted("heard"))
        assert home.noted("heard") == sent_messages(folder) == [message]
        speech.end()
        await until(lambda: not home.processes)


async def test_who_takes_over_gives_the_agent_more_time(home: Home) -> None:
    folder = home.path / "turn"
    async with running(_start(home, folder, 3), folder):
        await until(lambda: home.noted("starts"))
        speech = Outbox(folder)
        for _ in range(9):
            await anyio.sleep(0.4)
            speech.ring()
        assert read_manifest(folder) is not None
        assert home.processes
        speech.end()
        await until(lambda: not home.processes)


def test_reading_what_is_left_changes_nothing(home: Home) -> None:
    assert left(home) is None
    assert not home.files().turn.exists()
    assert isinstance(home.acp(), DetachedBackend)
