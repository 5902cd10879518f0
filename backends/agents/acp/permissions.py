"""An agent asks whether it may: what it wants to do, and who says yes. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from plait.backends.json_fields import at, deed, tables, text
from plait.backends.protocol import JsonValue, Question
from plait.backends.text import shown
from plait.backends.values import value

Policy: TypeAlias = Literal["deny", "allow", "ask"]
_FIRST: Mapping[str, Sequence[str]] = {
    "allow": ("allow_once", "allow_always"),
    "deny": ("reject_once", "reject_always"),
}
_MARKED = re.compile(r"(.*)\?asks-([0-9a-f]{16})", re.DOTALL)


@value
class Grant:
    """What somebody has decided about a deed: the name of the option that was chosen."""

    deed: str
    choice: str


@value
class Option:
    """One answer that the agent offers. `kind` is the protocol's word, such as allow_once."""

    identity: str
    name: str
    kind: str


@value
class Wish:
    """Something that an agent may not do unasked. `deed` tells it from all others, in any turn."""

    deed: str
    about: str
    options: Sequence[Option]

    @property
    def question(self) -> Question:
        """What a person is asked."""
        names = [option.name for option in self.options]
        return Question(f"it asks for permission: {self.about} ({', '.join(names)})", {"enum": list(names)})


def wish_of(params: JsonValue) -> Wish:
    """What `session/request_permission` asks for."""
    tool = at(params, "toolCall")
    return Wish(_deed(tool), about(tool), _options(params))


def about(tool: JsonValue) -> str:
    """A tool's use in a few words."""
    title, told = text(tool, "title"), deed("", at(tool, "rawInput")).removeprefix(": ")
    if told and told not in title:
        title = f"{title}: {told}" if title else told
    return shown(title or text(tool, "kind") or "a tool", 200)


def choose(wish: Wish, policy: Policy, grant: Grant | None) -> Option | None:
    """The option that is taken; None for none of them. A person's word about this very deed comes first."""
    if grant is not None and grant.deed == wish.deed:
        return next((option for option in wish.options if option.name == grant.choice), None)
    kinds = _FIRST["allow" if policy == "allow" else "deny"]
    return next((option for kind in kinds for option in wish.options if option.kind == kind), None)


def has_to_be_asked(wish: Wish, policy: Policy, grant: Grant | None) -> bool:
    """Whether a person is to decide, and has not."""
    return policy == "ask" and bool(wish.options) and (grant is None or grant.deed != wish.deed)


def marked(session_id: str, wish: Wish) -> str:
    """The session's id, with what is asked behind it: whoever brings the answer knows what it is about."""
    return f"{session_id}?asks-{wish.deed}"


def unmarked(session_id: str | None) -> tuple[str | None, str | None]:
    """The session's id itself, and the deed that was asked about when it was marked."""
    found = _MARKED.fullmatch(session_id or "")
    return (found[1], found[2]) if found else (session_id, None)


def told(answer: str) -> str:
    """What the agent, which was stopped when it asked, hears about the answer."""
    return (
        "You asked for permission to use a tool, and were stopped until there was an answer. If the answer allows it, "
        "use the tool now exactly as you wanted to, and go on with what you were asked to do; if not, go on without "
        f"it. The answer is: {answer}"
    )


def _deed(tool: JsonValue) -> str:
    given = at(tool, "rawInput")
    if isinstance(given, dict) and given:
        # Why it wants to is worded anew each time.
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
