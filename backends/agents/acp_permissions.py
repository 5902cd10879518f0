"""Permission requests of an agent: the requested action, and the decision. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from plait.backends.json_fields import at, describe_tool_call, tables, text
from plait.dialogue import Question
from plait.json_form import JsonValue, value
from plait.safe_text import shown

PermissionPolicy: TypeAlias = Literal["deny", "allow", "ask"]
_FIRST: Mapping[str, Sequence[str]] = {
    "allow": ("allow_once", "allow_always"),
    "deny": ("reject_once", "reject_always"),
}
_MARKED = re.compile(r"(.*)\?asks-([0-9a-f]{16})", re.DOTALL)


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
    tool = at(params, "toolCall")
    return PermissionRequest(_action_id(tool), describe(tool), _options(params))


def describe(tool: JsonValue) -> str:
    """Return a short description of a tool call."""
    title, told = text(tool, "title"), describe_tool_call("", at(tool, "rawInput")).removeprefix(": ")
    if told and told not in title:
        title = f"{title}: {told}" if title else told
    return shown(title or text(tool, "kind") or "a tool", 200)


def choose(wanted: PermissionRequest, policy: PermissionPolicy, grant: Grant | None) -> Option | None:
    """Return the option to choose; None for none. A person's decision on the same action comes first."""
    if grant is not None and grant.action_id == wanted.action_id:
        return next((option for option in wanted.options if option.name == grant.choice), None)
    kinds = _FIRST["allow" if policy == "allow" else "deny"]
    return next((option for kind in kinds for option in wanted.options if option.kind == kind), None)


def needs_person(wanted: PermissionRequest, policy: PermissionPolicy, grant: Grant | None) -> bool:
    """Return whether a person has to decide and has not decided yet."""
    return policy == "ask" and bool(wanted.options) and (grant is None or grant.action_id != wanted.action_id)


def marked(session_id: str, wanted: PermissionRequest) -> str:
    """Return the session id, extended by the id of the request, so that the answer can be matched to the request."""
    return f"{session_id}?asks-{wanted.action_id}"


def unmarked(session_id: str | None) -> tuple[str | None, str | None]:
    """Return the plain session id, and the id of the action if `session_id` is marked."""
    found = _MARKED.fullmatch(session_id or "")
    return (found[1], found[2]) if found else (session_id, None)


def answer_prompt(answer: str) -> str:
    """Return the prompt that passes a person's answer to an agent stopped at a permission request."""
    return (
        "You asked for permission to use a tool, and were stopped until there was an answer. If the answer allows it, "
        "use the tool now exactly as you wanted to, and go on with what you were asked to do; if not, go on without "
        f"it. The answer is: {answer}"
    )


def _action_id(tool: JsonValue) -> str:
    given = at(tool, "rawInput")
    if isinstance(given, dict) and given:
        # The description is worded differently each time.
        done: JsonValue = {key: given[key] for key in given if not ("command" in given and key == "description")}
    else:
        done = [text(tool, "title"), at(tool, "content")]
    whole = json.dumps([text(tool, "kind"), done], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _options(params: JsonValue) -> list[Option]:
    options: list[Option] = []
    for told_option in tables(params, "options"):
        identity, name = text(told_option, "optionId"), shown(text(told_option, "name"), 200)
        if not name or any(option.name == name for option in options):
            name = f"{name} ({shown(identity, 100)})".lstrip()
        options.append(Option(identity, name, text(told_option, "kind")))
    return options
