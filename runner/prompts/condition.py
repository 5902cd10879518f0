"""Conditions, as in `when` of a task: an expression of the template language that is true or false. Pure.

    {{ review.data.ok }} == false        {{ score.value }} >= 3 and not {{ draft.final }}

The expression has the names, filters, tests and limits of a template (`prompts/template.py`). The braces around a name
are those of a prompt, and the expression reads them as parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from plait.errors import PromptError
from plait.json_form import JsonInput
from plait.runner.prompts.prompt_names import DEFAULT_LIMIT, PromptNames

if TYPE_CHECKING:
    from plait.runner.prompts.template import Template

_TEXT = r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\""""
_PIECE = re.compile(rf"({_TEXT})|\{{\{{-?((?:{_TEXT}|[^'\"])*?)-?\}}\}}", re.DOTALL)
"""A quoted text, or a construct in braces with its expression in the second group."""
_OUTCOMES = {"true": True, "false": False, "": False}
_ORDER = re.compile(r"'(<=?|>=?)' not supported between instances of '\w+' and '\w+'")
_SHORT = 60


def condition_names(condition: str) -> tuple[PromptNames, Sequence[PromptError]]:
    """Return the names that `condition` uses, as far as they can be read, and all mistakes of the condition itself."""
    try:
        template = _template(condition)
    except PromptError as error:
        return PromptNames(), (error,)
    return template.names, template.mistakes


def is_true(condition: str, values: Mapping[str, JsonInput]) -> bool:
    """Return whether `condition` is true of `values`. Raise PromptError if the condition cannot be evaluated, or has a
    value other than true, false, none and an empty text; none and an empty text are false.
    """
    try:
        text = _template(condition).render(values, DEFAULT_LIMIT)
    except PromptError as error:
        order = _ORDER.fullmatch(str(error))
        if order is None:
            raise
        message = f"{order[1]!r} needs two numbers or two texts; fields that are numbers come with an output_schema"
        raise PromptError(message, error.line) from error
    if text not in _OUTCOMES:
        shown = text if len(text) <= _SHORT else f"{text[:_SHORT]}..."
        raise PromptError(f"its value is {shown!r}, neither true nor false; compare the value, as in == {shown[:20]!r}")
    return _OUTCOMES[text]


@lru_cache(maxsize=128)
def _template(condition: str) -> Template:
    from plait.runner.prompts.template import Template  # noqa: PLC0415 - jinja2 takes long to import

    return Template(_PIECE.sub(lambda piece: piece[1] or f" ({piece[2]}) ", condition), is_condition=True)
