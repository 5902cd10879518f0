"""Claude Code asks a person: what it wants to know, and how it hears the answer.

A hook of its own is called before each use of a tool that somebody is to be asked about. Without an answer the hook
defers: the turn ends, and the use stays in the session. When the session is gone on with, the hook is called for it
again, before anything else, and by then has the answer. Whatever comes next is asked about anew.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from plait.backends.json_fields import at, tables, text
from plait.backends.process.private import private_file
from plait.backends.protocol import JsonValue, Question
from plait.backends.text import shown

_HOOK = Path(__file__).with_name("_hook.py")
ANSWER = "answer.json"
_TOOL = "AskUserQuestion"
_LONGEST = 50_000


def hook_command(folder: Path) -> str:
    """The hook as a shell's command line, which is what Claude Code wants; it finds the answer in `folder`."""
    return shlex.join([sys.executable, "-I", "-S", str(_HOOK), str(folder / ANSWER)])


def write_answer(folder: Path, answer: JsonValue) -> None:
    """Have the hook find it."""
    private_file(folder / ANSWER, json.dumps(answer))


def question_of(deferred: JsonValue) -> Question:
    """What a person is asked about the use of a tool that was deferred."""
    if text(deferred, "name") == _TOOL:
        return _own_question(deferred)
    # All of it: who says yes has to have seen what to.
    given = json.dumps(at(deferred, "input"), ensure_ascii=False)
    what = shown(f"{text(deferred, 'name')} with {given}", _LONGEST)
    schema: dict[str, JsonValue] = {"anyOf": [{"enum": ["allow", "deny"]}, {"type": "string", "pattern": "^deny: ."}]}
    return Question(f'it wants to use {what}. Answer "allow", "deny" or "deny: REASON"', schema)


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
