"""Messages of the Agent Client Protocol: JSON-RPC 2.0, one object a line; permission, progress, errors. Pure.

The requests of this client have fixed ids, so that each answer in an agent's output can be matched to its request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Literal, TypeAlias

from plait.backends.agents.agent_errors import THROTTLED, WORDS, by_phrase, classify
from plait.backends.error_kinds import error_text
from plait.backends.json_fields import at, count, counted, describe_tool_call, number, tables, text
from plait.backends.whole_answer import kind_of_reason
from plait.dialogue import Question
from plait.errors import ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import clean_text, shown
from plait.usage import Usage

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


def name_of(message: Mapping[str, JsonValue] | AcpStep) -> str:
    """Return a name that identifies a message to the agent, or the request of a step, within a turn: each message is
    sent once.
    """
    if isinstance(message, AcpStep):
        return f"request {message.value}"
    identity = json.dumps(at(message, "id"))
    if "method" not in message:
        return f"answer {identity}"
    return f"request {identity}" if "id" in message else text(message, "method")


def prompt_of(message: Mapping[str, JsonValue]) -> str | None:
    """Return the prompt in a message to the agent; None if the message is no prompt."""
    if text(message, "method") != "session/prompt":
        return None
    return "".join(text(part, "text") for part in tables(at(message, "params"), "prompt"))


PermissionPolicy: TypeAlias = Literal["deny", "allow", "ask"]
_FIRST: Mapping[str, Sequence[str]] = {
    "allow": ("allow_once", "allow_always"),
    "deny": ("reject_once", "reject_always"),
}


@value
class Grant:
    """A person's decision on an action."""

    action_id: str
    """Id of the action, as in `PermissionRequest`."""
    choice: str
    """Name of the chosen option."""


@value
class Option:
    """An answer offered by the agent."""

    identity: str
    name: str
    kind: str
    """The protocol's name, such as allow_once."""


@value
class PermissionRequest:
    """A permission request of an agent."""

    action_id: str
    """Id of the action: equal for an equal action in any turn."""
    about: str
    """Short description of the action."""
    options: Sequence[Option]

    @property
    def question(self) -> Question:
        """The question to a person."""
        names = [option.name for option in self.options]
        return Question(f"the agent asks for permission: {self.about} ({', '.join(names)})", {"enum": list(names)})


def permission_request(params: JsonValue) -> PermissionRequest:
    """Return the request in the parameters of `session/request_permission`."""
    tool, options = at(params, "toolCall"), list[Option]()
    for offer in tables(params, "options"):
        identity, name = text(offer, "optionId"), shown(text(offer, "name"), 200)
        if not name or any(option.name == name for option in options):
            name = f"{name} ({shown(identity, 100)})".lstrip()
        options.append(Option(identity, name, text(offer, "kind")))
    return PermissionRequest(_action_id(tool), describe(tool), options)


def describe(tool: JsonValue) -> str:
    """Return a short description of a tool call."""
    title, call = text(tool, "title"), describe_tool_call("", at(tool, "rawInput")).removeprefix(": ")
    if call and call not in title:
        title = f"{title}: {call}" if title else call
    return shown(title or text(tool, "kind") or "a tool", 200)


def choose(request: PermissionRequest, policy: PermissionPolicy, grant: Grant | None) -> Option | None:
    """Return the option to choose; None for none. A person's decision on the same action comes first."""
    if grant is not None and grant.action_id == request.action_id:
        return next((option for option in request.options if option.name == grant.choice), None)
    kinds = _FIRST["allow" if policy == "allow" else "deny"]
    return next((option for kind in kinds for option in request.options if option.kind == kind), None)


def needs_person(request: PermissionRequest, policy: PermissionPolicy, grant: Grant | None) -> bool:
    """Return whether a person has to decide and has not decided yet."""
    return policy == "ask" and bool(request.options) and (grant is None or grant.action_id != request.action_id)


def answer_prompt(answer: str) -> str:
    """Return the prompt that passes a person's answer to an agent stopped at a permission request."""
    return (
        "You asked for permission to use a tool, and were stopped until there was an answer. If the answer allows it, "
        "use the tool now exactly as you wanted to, and go on with what you were asked to do; if not, go on without "
        f"it. The answer is: {answer}"
    )


def _action_id(tool: JsonValue) -> str:
    tool_input = at(tool, "rawInput")
    if isinstance(tool_input, dict) and tool_input:
        # The description is worded differently each time.
        action: JsonValue = {
            key: tool_input[key] for key in tool_input if not ("command" in tool_input and key == "description")
        }
    else:
        action = [text(tool, "title"), at(tool, "content")]
    whole = json.dumps([text(tool, "kind"), action], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def tokens_of(usage: JsonValue) -> Usage:
    """Return the tokens in `usage`. Agents count cached and thought tokens inside or beside the rest; the total shows
    which.
    """
    read, written, total = (count(usage, f"{name}Tokens") for name in ("input", "output", "total"))
    cache_read, cache_write = count(usage, "cachedReadTokens"), count(usage, "cachedWriteTokens")
    if read + written != total:
        read += cache_read + cache_write
        written = max(written, total - read)
    thought = count(usage, "thoughtTokens")
    return counted(read, written, cache_read=cache_read, cache_write=cache_write, reasoning=thought)


_LOST = ("not found", "invalid session identifier", "no previous sessions", "service failure")
"""Parts of a message, in lower case, with which agents refuse to open a session that they do not have."""
_BY_CODE: Mapping[int, ErrorKind] = {
    AUTH_REQUIRED: ErrorKind.AUTH,
    NOT_FOUND: ErrorKind.SESSION_LOST,
    -32600: ErrorKind.INVALID_REQUEST,
    -32601: ErrorKind.INVALID_REQUEST,
    -32602: ErrorKind.INVALID_REQUEST,
}


def error_of(error: JsonValue, *, opens_session: bool = False) -> tuple[ErrorKind, str]:
    """Return kind and message of a JSON-RPC `error`; `opens_session` if the error may mean that the session cannot be
    continued.
    """
    code, message = at(error, "code"), _message(error)
    code = code if isinstance(code, int) else int(number(error, "code") or 0)
    if opens_session and code != AUTH_REQUIRED:
        kind = by_phrase(message)
        is_lost = kind is ErrorKind.SESSION_LOST or (kind is None and any(part in message.lower() for part in _LOST))
        if code == NOT_FOUND or is_lost:
            return ErrorKind.SESSION_LOST, message
    if THROTTLED in message.lower():
        return ErrorKind.OVERLOADED, message
    word = text(error, "data", "errorKind")
    if named := WORDS.get(word) or kind_of_reason(word):
        return named, message
    if 400 <= code < 600:
        return classify(message, code), message
    return _BY_CODE.get(code) or classify(message), message


def stopped_by_denial(reason: str, denied: Sequence[str], *, is_silent: bool) -> tuple[ErrorKind, str] | None:
    """Return kind and message of the error of a turn that a denied action ended, for `reason`; None for another turn.

    `is_silent` says that the agent wrote no text after the last of the `denied` actions.
    """
    if denied and (reason == "cancelled" or (reason == "end_turn" and is_silent)):
        return ErrorKind.INVALID_REQUEST, f"the turn stopped after a denied action: {denied[-1]}; change `permissions`"
    return None


def list_login_methods(methods: JsonValue) -> str:
    """Return the login methods offered in the agent's answer to `initialize`."""
    ways = [f"{text(way, 'id')} ({text(way, 'name')})" for way in tables({"all": methods}, "all")]
    return shown(", ".join(ways) or "none", 200)


def _words(value: JsonValue, name: str) -> str:
    return text(value, name) or clean_text(error_text(at(value, name)))


def _message(error: JsonValue) -> str:
    """Return the error's message, without details that repeat the request."""
    message, data = _words(error, "message"), at(error, "data")
    details = data if isinstance(data, str) else _words(data, "details") or _words(data, "message")
    return f"{message}: {details}" if details and details not in message else message or "no reason given"
