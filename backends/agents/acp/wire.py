"""Messages of the Agent Client Protocol: JSON-RPC 2.0, one object a line. Pure.

Our requests have fixed numbers, so that whoever reads an agent's output knows what it answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import TypeAlias

from plait.backends.json_fields import at, tables, text
from plait.backends.protocol import JsonValue
from plait.backends.text import parse_json

Message: TypeAlias = "dict[str, JsonValue]"
VERSION = 1
AUTH_REQUIRED, NOT_FOUND, NO_SUCH_METHOD = -32000, -32002, -32601


class Step(IntEnum):
    """What we ask an agent for in a turn, in this order; its value is the request's id."""

    INITIALIZE = 1
    OPEN = 2
    AUTHENTICATE = 3
    OPEN_AGAIN = 4
    """Once authenticated."""
    MODEL = 5
    MODE = 6
    PROMPT = 7


def request(step: Step, method: str, params: Message) -> Message:
    """A request of ours."""
    return {"jsonrpc": "2.0", "id": step.value, "method": method, "params": params}


def notification(method: str, params: Message) -> Message:
    """What wants no answer."""
    return {"jsonrpc": "2.0", "method": method, "params": params}


def answer(identity: JsonValue, result: JsonValue) -> Message:
    """The answer to a request of the agent's."""
    return {"jsonrpc": "2.0", "id": identity, "result": result}


def refusal(identity: JsonValue, method: str) -> Message:
    """The answer to a request for something that we do not offer."""
    return {"jsonrpc": "2.0", "id": identity, "error": {"code": NO_SUCH_METHOD, "message": f"no {method[:80]} here"}}


def encoded(message: Message) -> bytes:
    """The message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def name_of(message: Mapping[str, JsonValue]) -> str:
    """What tells a message of ours from all others in a turn: each of them is said once."""
    identity = json.dumps(at(message, "id"))
    if "method" not in message:
        return f"answer {identity}"
    return f"request {identity}" if "id" in message else text(message, "method")


def prompt_of(message: Mapping[str, JsonValue]) -> str | None:
    """What was prompted with a message of ours; None where it is no prompt."""
    if text(message, "method") != "session/prompt":
        return None
    return "".join(text(part, "text") for part in tables(at(message, "params"), "prompt"))


def decoded(line: bytes) -> Message | None:
    """The message in a line of ours; None where there is none."""
    try:
        message = parse_json(line.decode())
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
