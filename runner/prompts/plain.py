"""Prompts that hold names and nothing else, read with one regular expression. Pure.

    {{ review }}  {{ review.label }}  {{ parts.0 }}  {{ item["first name"] }}  {{ results["my-task"] }}  {{ '{{' }}

Two reasons: such a prompt costs next to nothing to check and to fill in, and text that a model wrote gets no more.
The template language gives each of these constructs the same meaning, so a prompt is plain or not by its text alone:
a plain prompt that was checked once when a model added its task stays plain in every store and after every resume.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from plait.backends.protocol import JsonInput
from plait.runner.errors import PromptError
from plait.runner.prompts.base import CONSTANTS, PromptNames, by_key, field_of, text_of, too_long, unknown_name

_NOT_NAMES = frozenset({*CONSTANTS, "not", "self"})
"""Words with a meaning of their own in the template language, where they stand in place of a name."""
STEP = r"""\. (?:[A-Za-z_]\w*|0|[1-9]\d{0,8}) | \[ (?:0|-?[1-9]\d{0,8}|"[^"\\\r\n]*"|'[^'\\\r\n]*') \]"""
"""One field or element, for a verbose pattern."""
_PATH = rf"(?! (?:{'|'.join(sorted(_NOT_NAMES))}) \b) [A-Za-z_]\w* (?:{STEP})*"
_CONSTRUCT = re.compile(rf"\{{ (?: \{{ (?: \s* ( {_PATH} | '\{{[{{%]' ) \s* \}}\}} )? | % )", re.ASCII | re.VERBOSE)
"""A construct with its path or its literal braces in the group; the beginning of any other construct, without."""
_TOKEN = re.compile(r"""\.?\[?(?:"([^"]*)"|'([^']*)'|(-?\d+)|([A-Za-z_]\w*))\]?""", re.ASCII)
_SHOWN = re.compile(r"\{[{%].{0,60}?[}%]\}|.{0,40}")
_DASHED = re.compile(r"\{\{\s*([\w-]+)[\s.\[}]", re.ASCII)
_MOST_SHOWN = 3
_MOST_READ = 20


def plain_paths(prompt: str) -> list[str] | None:
    """Return the paths of a plain prompt, None for a prompt that is not plain."""
    paths: list[str] = _CONSTRUCT.findall(prompt)
    return None if "" in paths else paths


def names_of(paths: Collection[str]) -> PromptNames:
    """Return the names that the paths of a plain prompt use."""
    if all(map(str.isidentifier, paths)):
        return PromptNames(frozenset(paths))
    names: set[str] = set()
    fields: dict[str, set[str]] = {"results": set(), "inputs": set(), "item": set()}
    for name, *keys in (_steps(path) for path in paths if path[0] != "'"):
        names.add(str(name))
        if name in fields and keys and isinstance(keys[0], str):
            fields[name].add(keys[0])
    return PromptNames(frozenset(names), **{name: frozenset(keys) for name, keys in fields.items()})


def fill_in(prompt: str, values: Mapping[str, JsonInput], limit: int) -> str:
    """Return the plain prompt with `values` in place of its names. Raise PromptError as `render` does."""
    prompt = prompt.replace("\r\n", "\n").replace("\r", "\n")
    # Counted while it grows: a check of the whole at the end would let a short prompt fill the memory first.
    pieces: list[str] = []
    end = size = 0
    for match in _CONSTRUCT.finditer(prompt):
        try:
            text = _text_at(match[1], values)
        except PromptError as error:
            error.line = _line(prompt, match.start())
            raise
        pieces += (prompt[end : match.start()], text)
        end = match.end()
        size += len(pieces[-2]) + len(text)
        if size > limit:
            raise too_long(limit)
    if size + len(prompt) - end > limit:
        raise too_long(limit)
    pieces.append(prompt[end:])
    return "".join(pieces)


def check_plain(prompt: str) -> PromptError | None:
    """Return the error for a model whose prompt is not plain; None for a plain prompt."""
    if plain_paths(prompt) is not None:
        return None
    first: int | None = None
    excerpts: dict[str, None] = {}
    for construct in _CONSTRUCT.finditer(prompt):
        if construct[1]:
            continue
        first = construct.start() if first is None else first
        excerpts[_excerpt(prompt, construct.start())] = None
        if len(excerpts) >= _MOST_READ:
            break
    shown = ", ".join([*excerpts][:_MOST_SHOWN]) + (", ..." if len(excerpts) > _MOST_SHOWN else "")
    ids = [found[1] for text in excerpts if (found := _DASHED.match(text)) and found[1] not in CONSTANTS]
    hint = next((f"; {by_key(name)}" for name in ids if name in _NOT_NAMES or not name.isidentifier()), "")
    message = (
        f"the prompt of an added task may hold names and fields, as in {{{{ name }}}} and {{{{ name.field }}}}, and no "
        f"other template syntax, such as {shown}{hint}; two braces as they are: {{{{ '{{{{' }}}}"
    )
    return PromptError(message, _line(prompt, first or 0))


def _text_at(path: str, values: Mapping[str, JsonInput]) -> str:
    if path[0] == "'":
        return path[1:-1]
    name, *keys = (path,) if path.isidentifier() else _steps(path)
    if name not in values:
        raise PromptError(unknown_name(str(name), values))
    value = values[str(name)]
    for place, key in enumerate(keys, 1):
        try:
            value = field_of(value, key)
        except LookupError as error:
            raise PromptError(f"{_first_steps(path, place)} {error.args[0]}") from error
    try:
        return text_of(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"the value of {path!r} cannot be written as JSON: {error}") from error


def _steps(path: str) -> Iterator[str | int]:
    for double, single, number, name in _TOKEN.findall(path):
        yield int(number) if number else double or single or name


def _first_steps(path: str, count: int) -> str:
    return "".join(found[0] for found, _ in zip(_TOKEN.finditer(path), range(count), strict=False))


def _excerpt(prompt: str, start: int) -> str:
    found = _SHOWN.match(prompt, start)
    return found[0] if found else ""


def _line(prompt: str, position: int) -> int:
    return prompt.count("\n", 0, position) + 1
