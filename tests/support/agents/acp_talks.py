"""The machine that holds a turn with an agent that speaks ACP, talked to without an agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.backends.agents.acp_machine import AcpMachine, TurnGoals
from plait.backends.agents.agent_output import AgentCall, ProcessEnd, TurnAnswer
from plait.backends.agents.cli_agent import whole_turn
from plait.backends.backend_protocol import Output
from plait.errors import BackendError
from tests.support.agents.recorded import NOW, ROOT

RECORDED = sorted(path.stem for path in (ROOT / "acp").glob("*.jsonl"))
AIMS = TurnGoals("/home/user/project", permissions="allow", prompt="the prompt")
NOWHERE = Path("/nowhere")
ENDED = ProcessEnd(0)
OURS = {"initialize": 1, "session/new": 2, "session/load": 2, "session/prompt": 7}


@dataclass
class Recorded:
    """One prompt and all that the agent said about it, from its start, numbered as we number our requests."""

    prompt: str
    opened_with: str
    session: str
    said: list[dict[str, Any]]


def recorded_turns(agent: str) -> Iterator[Recorded]:
    for lines in _connections(agent):
        methods = {msg["id"]: msg["method"] for side, msg in lines if side == "client" and "method" in msg}
        before: list[dict[str, Any]] = []
        turn: Recorded | None = None
        opened, session = "", ""
        for side, msg in lines:
            if side == "client" and msg.get("method") in {"session/new", "session/load"} and turn is None:
                opened, session = msg["method"], msg["params"].get("sessionId", "")
            if side == "client" and msg.get("method") == "session/prompt":
                session = msg["params"]["sessionId"]
                turn = Recorded(msg["params"]["prompt"][0]["text"], opened, session, list(before))
            if side != "agent":
                continue
            is_ours = "method" not in msg
            message = {**msg, "id": OURS[methods[msg["id"]]]} if is_ours else msg
            (before if turn is None else turn.said).append(message)
            if turn is not None and is_ours and methods[msg["id"]] == "session/prompt":
                yield turn
                turn = None


def _connections(agent: str) -> list[list[tuple[str, Any]]]:
    found: list[list[tuple[str, Any]]] = [[]]
    for line in (ROOT / "acp" / f"{agent}.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["dir"] == "event":
            found.append([])
        else:
            found[-1].append((entry["dir"], entry["msg"]))
    return found


@dataclass
class Held:
    """A turn as it was held: what we said, what was shown, and what came of it."""

    talk: AcpMachine
    said: list[dict[str, Any]]
    outputs: list[Output]
    answered: TurnAnswer | None = None
    error: BackendError | None = None

    @property
    def methods(self) -> list[str]:
        return [message.get("method", "") for message in self.said]

    @property
    def streamed(self) -> str:
        return "".join(output.text for output in self.outputs if output.kind == "text")

    @property
    def shown(self) -> list[tuple[str, str]]:
        return [(output.kind, output.text) for output in self.outputs if output.kind != "text"]


def hold(talk: AcpMachine, messages: list[Any], ending: ProcessEnd = ENDED) -> Held:
    held = Held(talk, list(talk.take()), [])
    for message in messages:
        held.outputs += talk.read(message)
        held.said += talk.take()
    try:
        answered = talk.end(ending)
        whole_turn(talk, answered, answered.usage)
        held.answered = answered
    except BackendError as error:
        held.error = error
    return held


def talk_of(turn: Recorded, goals: TurnGoals = AIMS) -> AcpMachine:
    resume = turn.opened_with == "session/load"
    call = AgentCall(NOWHERE, turn.session if resume else None, resume=resume)
    # So that what is recorded of loading is an answer to what we ask.
    holds = ("first TURN-A",) if resume else ()
    return AcpMachine(call, replace(goals, prompt=turn.prompt, holds=holds), lambda: NOW)


def start(**capabilities: Any) -> dict[str, Any]:
    agent = {"name": capabilities.pop("name", "fake"), "title": "Fake"}
    result = {"protocolVersion": 1, "agentInfo": agent, "agentCapabilities": capabilities}
    return {"jsonrpc": "2.0", "id": 1, "result": result}


OPEN = {"jsonrpc": "2.0", "id": 2, "result": {"sessionId": "s-1"}}


def update(kind: str, session: str = "s-1", **more: Any) -> dict[str, Any]:
    return {"method": "session/update", "params": {"sessionId": session, "update": {"sessionUpdate": kind, **more}}}


def chunk(text: str, session: str = "s-1") -> dict[str, Any]:
    return update("agent_message_chunk", session, content={"type": "text", "text": text})


def tool(identity: str) -> dict[str, Any]:
    return update("tool_call", toolCallId=identity, title="Look")


def done(reason: str = "end_turn", **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "result": {"stopReason": reason, **more}}


def failed(error: Any, identity: int = 7) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identity, "error": error}


def new_talk(**goals: Any) -> AcpMachine:
    return AcpMachine(AgentCall(NOWHERE), replace(AIMS, **goals), lambda: NOW)
