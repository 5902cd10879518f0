"""What the stub model is to answer: read from the words of the prompt itself, so that tests at one time share nothing.

    [[say TEXT]]                    answers TEXT
    [[json {...}]]                  answers that JSON; through the tool for structured output where one is offered
    [[long N]]                      answers N words
    [[tool COMMAND]]                first calls the agent's shell tool; several: one a request, in order
    [[tool-named NAME {...}]]       first calls that tool with that input
    [[together]]                    all those tools in one answer
    [[slow S]]                      headers and first words at once, the rest after S seconds
    [[until PATH]]                  headers and first words at once, the rest when that file exists, or after 120 s
    [[break]]                       the connection is closed after the first words
    [[error 429]]                   refuses with that status; [[error 429 retry-after 2]], [[error 400 SOME MESSAGE]]

Tools come first, one a request; all else is about the answer that follows their results. Any of them may end in
` once`: then it counts the first time only, by the first and the last prompt of the conversation together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

_WORD = re.compile(r"\[\[(say|json|long|together|tool-named|tool|slow|until|break|error)\b ?")
_ERROR = re.compile(r"(\d+)(?: retry-after (\d+))?(?: (.+))?", re.DOTALL)
_SHELLS = re.compile(r"bash|shell|exec_command|run_shell_command|.*__shell|.*execute_command", re.IGNORECASE)
_STRUCTURED = "StructuredOutput"
# goose, opencode and qwen ask by themselves for a title, or for what is worth remembering.
_ASIDE = re.compile(r"Generate a (short )?title|Managed memory has TWO directories")
# Said by Claude Code itself in the user's name, where a deferred call was taken up.
NOBODYS = "Continue from where you left off."

Json = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """One piece of a conversation: what `role` said, or `tool` called, or `result` gave back."""

    role: str
    text: str
    kind: str = "text"

    @property
    def is_prompt(self) -> bool:
        return self.role == "user" and self.kind == "text" and self.text != NOBODYS

    def shown(self) -> list[str]:
        return [self.role, self.text if self.kind == "text" else f"<{self.kind} {self.text}>"]


@dataclass(frozen=True)
class Asked:
    """A request to the model, whatever the protocol. `tools` has each tool's input schema by its name."""

    model: str
    streams: bool
    messages: int
    said: Sequence[Said]
    system: str = ""
    tools: Mapping[str, Json] = field(default_factory=dict)
    schema: Any = None

    @property
    def is_aside(self) -> bool:
        """Whether the agent asks for something of its own: such a request is answered plainly, whatever its words."""
        return any(_ASIDE.search(prompt) for prompt in self.prompts())

    def prompts(self) -> list[str]:
        return [one.text for one in self.said if one.is_prompt]

    def results(self) -> list[str]:
        """What tools gave back since the last prompt."""
        found: list[str] = []
        for one in self.said:
            if one.kind == "result":
                found.append(one.text)
            elif one.is_prompt:
                found.clear()
        return found


@dataclass(frozen=True)
class Call:
    tool: str
    input: Json


@dataclass(frozen=True)
class Answer:
    """What to answer: an error, calls of tools, or a text."""

    text: str = ""
    calls: Sequence[Call] = ()
    status: int = 200
    retry_after: int | None = None
    seconds: float = 0
    until: str | None = None
    breaks: bool = False


class Script:
    """Answers requests. Remembers only what was to be done once."""

    def __init__(self) -> None:
        self._done: set[tuple[str, str, str]] = set()
        self._lock = Lock()

    def answer(self, asked: Asked) -> Answer:
        prompts = asked.prompts() or [""]
        if asked.is_aside:
            return Answer("STUB: an aside")
        words = parse(prompts[-1])
        tools = [word for word in words if word[0].startswith("tool")][len(asked.results()) :]
        if tools:
            now = tools if ("together", "") in words else tools[:1]
            if all(self._counts(text, prompts) for _, text in now):
                return _answer_with([_call(name, _bare(text), asked) for name, text in now])
        rest = [(n, _bare(text)) for n, text in words if not n.startswith("tool") and self._counts(text, prompts)]
        return _finish(dict(rest), asked)

    def _counts(self, text: str, prompts: Sequence[str]) -> bool:
        """Whether these words still count; those that say `once` do the first time only."""
        if _bare(text) == text:
            return True
        key = (text, prompts[0], prompts[-1])
        with self._lock:
            if key in self._done:
                return False
            self._done.add(key)
            return True


def parse(prompt: str) -> list[tuple[str, str]]:
    """The words of a prompt that are for the stub, in order, as (name, text). JSON may hold `]]`."""
    found: list[tuple[str, str]] = []
    at = 0
    while match := _WORD.search(prompt, at):
        at = match.end()
        end = prompt.find("]]", _past_json(prompt, at, match[1]))
        if end < 0:
            break
        found.append((match[1], prompt[at:end].strip()))
        at = end + 2
    return found


def _shown(prompt: str) -> str:
    """The prompt without its words for the stub: an answer that is passed on must not set them off again."""
    for name, text in parse(prompt):
        prompt = prompt.replace(f"[[{name} {text}]]" if text else f"[[{name}]]", "")
    return prompt


def _past_json(prompt: str, at: int, name: str) -> int:
    brace = prompt.find("{", at)
    if name not in {"json", "tool-named"} or brace < 0:
        return at
    try:
        return json.JSONDecoder().raw_decode(prompt, brace)[1]
    except json.JSONDecodeError:
        return at


def _bare(text: str) -> str:
    return "" if text == "once" else text.removesuffix(" once")


def _answer_with(calls: Sequence[Call | str]) -> Answer:
    return Answer(
        "\n".join(one for one in calls if isinstance(one, str)), [one for one in calls if isinstance(one, Call)]
    )


def _call(name: str, text: str, asked: Asked) -> Call | str:
    """The call; or why there is none, as a text."""
    if name == "tool-named":
        tool, _, given = text.partition(" ")
        return Call(tool, json.loads(given or "{}"))
    tool = next((offered for offered in asked.tools if _SHELLS.fullmatch(offered)), None)
    if tool is None:
        return f"STUB: no shell tool is offered, only {', '.join(asked.tools) or 'none at all'}"
    return Call(tool, _shell_input(text, asked.tools[tool]))


def _shell_input(command: str, schema: Json) -> Json:
    properties = schema.get("properties") or {}
    name = "cmd" if "cmd" in properties else "command"
    wants_list = (properties.get(name) or {}).get("type") == "array"
    others = {
        key: "stub" for key in schema.get("required") or () if (properties.get(key) or {}).get("type") == "string"
    }
    return {**others, name: ["bash", "-lc", command] if wants_list else command}


def _finish(words: Mapping[str, str], asked: Asked) -> Answer:
    if "error" in words:
        match = _ERROR.fullmatch(words["error"])
        if match is None:
            return Answer(f"STUB: not an error that can be made: {words['error']}")
        after = int(match[2]) if match[2] else None
        return Answer(match[3] or f"stub error {match[1]}", status=int(match[1]), retry_after=after)
    timing: Json = {"seconds": float(words.get("slow", 0)), "until": words.get("until"), "breaks": "break" in words}
    if "json" in words and _STRUCTURED in asked.tools and not asked.results():
        return Answer(calls=[Call(_STRUCTURED, json.loads(words["json"]))], **timing)
    return Answer(_text(words, asked), **timing)


def _text(words: Mapping[str, str], asked: Asked) -> str:
    if "long" in words:
        return " ".join(f"word{n}" for n in range(int(words["long"])))
    for name in ("say", "json"):
        if name in words:
            return words[name]
    prompts = asked.prompts()
    line = (_shown(prompts[-1] if prompts else "").strip().splitlines() or [""])[-1].strip()
    tools = "".join(f"; a tool said: {result.strip()[-200:]}" for result in asked.results())
    return f"STUB: {asked.messages} messages, {len(prompts)} from user; last user line: {line}{tools}"
