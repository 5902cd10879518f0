"""A prompt rendered from upstream results, in one pass: what is inserted is never read as a template again. Pure.

Most prompts hold nothing but `{{ name }}`; those are filled in with one regular expression, so that a graph of 100,000
tasks is checked in a blink and jinja2 is not even imported. All others go to `prompts/template.py`. Both give the
same text for the same prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.backends.protocol import JsonInput, JsonValue
from plait.runner.errors import PromptError

if TYPE_CHECKING:
    from plait.runner.prompts.template import Template

CONSTANTS: frozenset[str] = frozenset({"true", "false", "none", "True", "False", "None"})
"""Names that are values in a prompt: a task or an input called so would silently never be inserted."""
RESERVED_NAMES: frozenset[str] = frozenset({"inputs", "results", "item", *CONSTANTS})
"""Names that never stand for a task: the run's inputs, all upstream results by id, the element of a `for_each`, and
constants.
"""

DEFAULT_LIMIT = 1_000_000

_CONSTRUCT = re.compile(r"\{\{(?:\s*([A-Za-z_]\w*)\s*\}\})?", re.ASCII)
# Words that mean something of their own to the template language; as bare names they take the long way.
_SPECIAL = frozenset(
    [
        "and",
        "or",
        "not",
        "in",
        "is",
        "if",
        "else",
        "elif",
        "for",
        *CONSTANTS,
        "self",
        "super",
        "caller",
        "loop",
        "varargs",
        "kwargs",
    ]
)


@dataclass(frozen=True, slots=True)
class PromptNames:
    """What a prompt asks for.

    `names` holds every free top-level name, reserved ones included. `results` holds the constant keys asked of
    `results`, such as `my-task` in `{{ results["my-task"] }}`, and `inputs` those asked of `inputs`. `item` holds the
    fields of `item` without which the prompt cannot be rendered, whatever the other values are.
    """

    names: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    item: frozenset[str] = frozenset()


_NOTHING = PromptNames()


def names_used(prompt: str) -> PromptNames:
    """The names that `prompt` uses. Raises PromptError, with the line, for what cannot be parsed or is not allowed."""
    names, mistakes = look_into(prompt)
    if mistakes:
        raise first_of(mistakes)
    return names


def look_into(prompt: str) -> tuple[PromptNames, Sequence[PromptError]]:
    """The names that `prompt` uses, as far as they can be told, and everything that is wrong with it in itself."""
    if "{" not in prompt:
        return _NOTHING, ()
    simple = _simple_names(prompt)
    if simple is None:
        try:
            template = _template(prompt)
        except PromptError as error:
            return _NOTHING, (error,)
        return template.names, template.mistakes
    return (PromptNames(frozenset(simple)) if simple else _NOTHING), ()


def first_of(mistakes: Sequence[PromptError]) -> PromptError:
    """The first of a prompt's mistakes, to be raised: those are kept, and what is raised gathers tracebacks."""
    return PromptError(str(mistakes[0]), mistakes[0].line)


def render(prompt: str, values: Mapping[str, JsonInput], *, limit: int = DEFAULT_LIMIT) -> str:
    """`prompt` with its constructs replaced by `values`, which are inserted as they are.

    Text goes in unchanged, None as nothing, everything else as JSON. A prompt without any construct is returned as it
    is; in all others line ends become `\\n`. Raises PromptError for a name or field that does not exist, for what is
    not allowed in a prompt, and when the result would have more than `limit` characters.
    """
    simple = _simple_names(prompt)
    if simple is None:
        return _template(prompt).render(values, limit)
    if simple:
        return _substitute(prompt.replace("\r\n", "\n").replace("\r", "\n"), values, limit)
    if len(prompt) > limit:
        raise too_long(limit)
    return prompt


def text_of(value: JsonInput) -> str:
    """How a value is written into a prompt."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def too_long(limit: int) -> PromptError:
    """The error for a prompt that outgrows `limit` characters."""
    return PromptError(
        f"the rendered prompt has more than {limit:,} characters; insert less, for example with `| truncate(2000)`"
    )


def unknown_name(name: str, values: Mapping[str, JsonInput]) -> str:
    """What to say about a name that `values` does not have."""
    known = ", ".join(sorted(key for key in values if key.isidentifier())[:20]) or "no names at all"
    return f"nothing is called {name!r} here; the prompt may use {known}"


def _simple_names(prompt: str) -> list[str] | None:
    """The names of a prompt that holds only `{{ name }}`, or None when it holds more than that."""
    if "{%" in prompt:
        return None
    names: list[str] = _CONSTRUCT.findall(prompt)
    if "" in names or not _SPECIAL.isdisjoint(names):
        return None
    return names


def _substitute(prompt: str, values: Mapping[str, JsonInput], limit: int) -> str:
    # Counted while it grows: checking the whole at the end would let a short prompt fill the memory first.
    pieces: list[str] = []
    end = size = 0
    for match in _CONSTRUCT.finditer(prompt):
        name = match[1]
        if name not in values:
            raise PromptError(unknown_name(name, values), prompt.count("\n", 0, match.start()) + 1)
        pieces += (prompt[end : match.start()], _checked_text(values[name], name))
        end = match.end()
        size += len(pieces[-2]) + len(pieces[-1])
        if size > limit:
            raise too_long(limit)
    if size + len(prompt) - end > limit:
        raise too_long(limit)
    pieces.append(prompt[end:])
    return "".join(pieces)


def _checked_text(value: JsonInput, name: str) -> str:
    try:
        return text_of(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"the value of {name!r} cannot be written as JSON: {error}") from error


def _plain(value: object) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, Sequence):
        return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _template(prompt: str) -> Template:
    # jinja2 takes longer to import than the whole check of a usual plan.
    from plait.runner.prompts.template import compile_template  # noqa: PLC0415

    return compile_template(prompt)
