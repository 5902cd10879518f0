"""A prompt rendered from upstream results, in one pass: an inserted value is never read as a template. Pure.

Plain prompts (`prompts/plain.py`) are filled in without a template engine: a graph of 100,000 tasks is checked in a
blink, and jinja2 is not imported. All other prompts go to `prompts/template.py`. Both give the same text for the same
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from plait.backends.protocol import JsonInput
from plait.runner.errors import PromptError
from plait.runner.prompts.base import DEFAULT_LIMIT, PromptNames, first_of, too_long
from plait.runner.prompts.plain import fill_in, names_of, plain_paths

if TYPE_CHECKING:
    from plait.runner.prompts.template import Template

_NOTHING = PromptNames()


def names_used(prompt: str) -> PromptNames:
    """Return the names that `prompt` uses. Raise PromptError, with the line, if the prompt cannot be used."""
    names, mistakes = parse_names(prompt)
    if mistakes:
        raise first_of(mistakes)
    return names


def parse_names(prompt: str) -> tuple[PromptNames, Sequence[PromptError]]:
    """Return the names that `prompt` uses, as far as they can be read, and all mistakes of the prompt itself."""
    if "{" not in prompt:
        return _NOTHING, ()
    plain = _plain(prompt)
    if plain is not None:
        return plain[1], ()
    try:
        template = _template(prompt)
    except PromptError as error:
        return _NOTHING, (error,)
    return template.names, template.mistakes


def render(prompt: str, values: Mapping[str, JsonInput], *, limit: int = DEFAULT_LIMIT) -> str:
    """Return `prompt` with its constructs replaced by `values`, which are inserted unchanged.

    Text is inserted unchanged, None as nothing, everything else as JSON. A prompt without any construct is returned
    unchanged; in all other prompts line ends become `\\n`. Raise PromptError for an unknown name or field, for a
    template that cannot be used, and for a result of more than `limit` characters.
    """
    plain = _plain(prompt)
    if plain is None:
        return _template(prompt).render(values, limit)
    if plain[0]:
        return fill_in(prompt, values, limit)
    if len(prompt) > limit:
        raise too_long(limit)
    return prompt


@lru_cache(maxsize=128)
def _plain(prompt: str) -> tuple[list[str], PromptNames] | None:
    """Return the paths and the names of a plain prompt; None for any other prompt. The parts of a `for_each` have one
    prompt, which is read once.
    """
    paths = plain_paths(prompt)
    return None if paths is None else (paths, names_of(paths) if paths else _NOTHING)


def _template(prompt: str) -> Template:
    # jinja2 takes longer to import than the whole check of a usual plan.
    from plait.runner.prompts.template import compile_template  # noqa: PLC0415

    return compile_template(prompt)
