"""Messages of the Agent Client Protocol: JSON-RPC 2.0, one object per line. Pure.

The requests of this client have fixed ids, so that each answer in an agent's output can be matched to its request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import TypeAlias

from plait.backends.json_fields import at, tables, text
from plait.json_form import JsonValue
from plait.safe_text import parse_json

Message: TypeAlias = "dict[str, JsonValue]"
VERSION = 1
AUTH_REQUIRED, NOT_FOUND, NO_SUCH_METHOD = -32000, -32002, -32601


class AcpStep(IntEnum):
    """The requests of a turn, in order. The value is the request's id."""

    INITIALIZE = 1
    OPEN = 2
    AUTHENTICATE = 3
    OPEN_AGAIN = 4
    """Sent after authentication."""
    MODEL = 5
    MODE = 6
    PROMPT = 7


def request(step: AcpStep, method: str, params: Message) -> Message:
    """Return a request to the agent."""
    return {"jsonrpc": "2.0", "id": step.value, "method": method, "params": params}


def notification(method: str, params: Message) -> Message:
    """Return a message that needs no answer."""
    return {"jsonrpc": "2.0", "method": method, "params": params}


def answer(identity: JsonValue, result: JsonValue) -> Message:
    """Return the answer to a request of the agent."""
    return {"jsonrpc": "2.0", "id": identity, "result": result}


def refusal(identity: JsonValue, method: str) -> Message:
    """Return the answer to a request for an unsupported method."""
    error: JsonValue = {"code": NO_SUCH_METHOD, "message": f"{method[:80]} is not supported"}
    return {"jsonrpc": "2.0", "id": identity, "error": error}


def encoded(message: Message) -> bytes:
    """Return the message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def name_of(message: Mapping[str, JsonValue]) -> str:
    """Return a name that identifies a message to the agent within a turn: each message is sent once."""
    identity = json.dumps(at(message, "id"))
    if "method" not in message:
        return f"answer {identity}"
    return f"request {identity}" if "id" in message else text(message, "method")


def prompt_of(message: Mapping[str, JsonValue]) -> str | None:
    """Return the prompt in a message to the agent; None if the message is no prompt."""
    if text(message, "method") != "session/prompt":
        return None
    return "".join(text(part, "text") for part in tables(at(message, "params"), "prompt"))


def decoded(line: bytes) -> Message | None:
    """Return the message in a line to the agent; None if the line is no message."""
    try:
        message = parse_json(line.decode())
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
