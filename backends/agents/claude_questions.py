"""Questions of Claude Code to a person, and the path of the answer back to the agent.

Claude Code calls a hook before each tool use that needs a person's answer. Without an answer the hook defers: the turn
ends, and the tool use stays in the session. When the session is continued, the hook is called first for the same tool
use, and then finds the answer. Each later tool use is a new question.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from plait.backends.json_fields import at, tables, text
from plait.backends.process.private_files import private_file
from plait.dialogue import Question
from plait.json_form import JsonValue
from plait.safe_text import shown

_HOOK = Path(__file__).with_name("_claude_hook.py")
ANSWER = "answer.json"
_TOOL = "AskUserQuestion"
_LONGEST = 50_000


def hook_command(folder: Path) -> str:
    """Return the hook as a shell command line, as required by Claude Code. The hook finds the answer in `folder`."""
    return shlex.join([sys.executable, "-I", "-S", str(_HOOK), str(folder / ANSWER)])


def write_answer(folder: Path, answer: JsonValue) -> None:
    """Write the answer for the hook."""
    private_file(folder / ANSWER, json.dumps(answer))


def question_of(deferred: JsonValue) -> Question:
    """Return the question to a person about a deferred tool use."""
    if text(deferred, "name") == _TOOL:
        return _own_question(deferred)
    # Show the whole input: a person has to see everything to be allowed.
    given = json.dumps(at(deferred, "input"), ensure_ascii=False)
    what = shown(f"{text(deferred, 'name')} with {given}", _LONGEST)
    schema: dict[str, JsonValue] = {"anyOf": [{"enum": ["allow", "deny"]}, {"type": "string", "pattern": "^deny: ."}]}
    return Question(f'Claude Code asks to use {what}. Answer "allow", "deny" or "deny: REASON"', schema)


def _own_question(deferred: JsonValue) -> Question:
    asked = tables(deferred, "input", "questions")
    texts = [_with_options(one) for one in asked]
    if len(asked) == 1:
        return Question(texts[0], {"type": "string", "minLength": 1})
    each: dict[str, JsonValue] = {text(one, "question"): {"type": "string", "minLength": 1} for one in asked}
    fields: dict[str, JsonValue] = {"type": "object", "properties": each, "additionalProperties": False}
    return Question(" ".join(texts), {**fields, "required": list(each)})


def _with_options(asked: Mapping[str, JsonValue]) -> str:
    question = shown(text(asked, "question"), 2000)
    options = [shown(text(option, "label"), 200) for option in tables(asked, "options")]
    return f"{question} ({', '.join(options)})" if options else question
