"""Prompts with more than plain names: templates of jinja2, written by the user. Pure.

A template is the user's own code, as a function is: loops and sizes have no limit but that of the rendered prompt.
The values are not: a model wrote most of them. A value is never read as a template, fields are looked up by key and
index alone, operators that would make a huge value of two small ones have limits, and jinja2's sandbox stands behind.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, nodes, pass_context, pass_environment
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.errors import PromptError
from plait.json_form import JsonInput
from plait.runner.prompts.checker import check_template
from plait.runner.prompts.prompt_names import (
    STEP,
    PromptNames,
    by_key,
    field_of,
    first_of,
    json_of,
    text_of,
    too_long,
    unknown_name,
)

MAX_BITS = 100_000
"""The length of the greatest whole number that `**` computes."""
_FILE = "<prompt>"
_NEVER = "\ufdd0" * 2  # no character, by the Unicode standard
_NUMBERED = re.compile(r"\{\{-?\s*([0-9][0-9_]*[A-Za-z][\w-]*)", re.ASCII)
"""A construct that begins with the id of a task such as `1a`, which the template language reads as a number."""
_OF_TEXT = "capitalize center indent lower replace string title trim truncate upper wordcount wordwrap"
_A_VALUE = "the value"


class Template:
    """A parsed and checked prompt; a prompt with `mistakes` cannot be rendered. With `is_condition` the text is an
    expression, rendered as its value.
    """

    names: PromptNames
    mistakes: Sequence[PromptError]

    def __init__(self, prompt: str, *, is_condition: bool = False) -> None:
        self._lines = prompt.splitlines()
        self._whole = " ".join(self._lines) if is_condition else None
        """The text of a condition, whose lines are one statement."""
        noun = "condition" if is_condition else "prompt"
        try:
            tree = _parse_expression(prompt) if is_condition else _environment().parse(prompt)
            self.names, self.mistakes = check_template(tree, prompt, _functions())
            self._compiled = None if self.mistakes else _compile(tree)
        except TemplateSyntaxError as error:
            raise _syntax(prompt, error, is_condition=is_condition) from error
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise PromptError(f"the {noun} is nested too deep; make it simpler") from error
        except (ValueError, ArithmeticError, TypeError) as error:  # such as a number of 5,000 digits
            raise PromptError(f"the {noun} cannot be read: {error}") from error

    def render(self, values: Mapping[str, JsonInput], limit: int) -> str:
        """Return the prompt with `values`. Raise PromptError as `plait.runner.prompts.prompt_template.render` does."""
        if self._compiled is None:
            raise first_of(self.mistakes)
        try:
            return _collect(self._compiled.generate(values), limit)
        except PromptError as error:
            error.line = _line_of(error) if error.line is None else error.line
            raise
        except Exception as error:
            line = _line_of(error)
            raise PromptError(self._explain(error, line, values), line) from error

    def _explain(self, error: Exception, line: int | None, values: Mapping[str, JsonInput]) -> str:
        message = str(error) or type(error).__name__
        if isinstance(error, RecursionError):
            return "a value in the prompt is nested too deep"
        if unknown := re.fullmatch(r"'(\w+)' is undefined", message):
            return unknown_name(unknown[1], values)
        if line and (field := re.match(rf"{_A_VALUE} .*?no (?:field )?'?(-?\w+)", message)):
            # The expression in front of the field, as its author wrote it.
            text = self._whole or self._lines[line - 1]
            owner = re.search(rf"(\b\w+ (?:{STEP})*?) [.\[]['\"]?{field[1]}\b", text, re.VERBOSE)
            return message.replace(_A_VALUE, owner[1], 1) if owner else message
        return message


@lru_cache(maxsize=128)
def compile_template(prompt: str) -> Template:
    """Return the template of `prompt`. Raise PromptError if the prompt cannot be parsed."""
    return Template(prompt)


class _Environment(ImmutableSandboxedEnvironment):
    """The language of the templates: values have keys and indexes, and objects of jinja2 have their safe attributes."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        return self._field(obj, attribute) if _is_value(obj) else super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return self._field(obj, argument) if _is_value(obj) else super().getitem(obj, argument)

    def _field(self, value: Any, key: Any) -> Any:
        if isinstance(value, Undefined):
            return value
        try:
            return field_of(value, key)
        except LookupError as error:
            return self.undefined(f"{_A_VALUE} {error.args[0]}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = [side for side in map(_defined, (left, right)) if isinstance(side, int | float)]
        if len(numbers) < 2:
            raise PromptError(f"{operator!r} needs two numbers; fields that are numbers come with an output_schema")
        if operator == "**" and left and math.log2(abs(left)) * abs(right) > MAX_BITS:
            raise PromptError("'**' would make a number that is too large")
        return super().call_binop(context, operator, left, right)


def _is_value(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | Mapping | list | tuple | Undefined)


def _compile(tree: nodes.Template) -> Any:
    environment = _environment()
    code = environment.compile(tree, name=None, filename=_FILE)
    return environment.template_class.from_code(environment, code, _functions())


def _parse_expression(text: str) -> nodes.Template:
    """Return a template that writes the value of the expression `text`. Raise TemplateSyntaxError."""
    parser = Parser(_environment(), text, state="variable")
    expression = parser.parse_expression()
    if not parser.stream.eos:
        raise TemplateSyntaxError(
            f"{parser.stream.current.value!r} follows a whole expression", parser.stream.current.lineno
        )
    output = nodes.Output([expression], lineno=expression.lineno)
    tree = nodes.Template([output], lineno=1)
    tree.set_environment(_environment())
    return tree


def _syntax(prompt: str, error: TemplateSyntaxError, *, is_condition: bool) -> PromptError:
    numbered = _NUMBERED.search(prompt)
    if numbered:
        message = f"{{{{ {numbered[1]} }}}} begins with a digit, so it is no plain name; {by_key(numbered[1])}"
        return PromptError(message, prompt.count("\n", 0, numbered.start()) + 1)
    message = (error.message or "it cannot be read").rstrip(".")
    if is_condition:
        message = message.replace("'end of template'", "end").replace("end of template", "end")
        example = "{{ review.ok }} == false and {{ draft }} != 'none'"
        return PromptError(
            f"the condition cannot be read: {message}; write a comparison such as {example}", error.lineno
        )
    advice = "to write two braces as they are, use {{ '{{' }}"
    return PromptError(f"the template cannot be read: {message}; {advice}", error.lineno)


def _collect(chunks: Iterator[str], limit: int) -> str:
    pieces: list[str] = []
    size = 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size > limit:
            raise too_long(limit)
    return "".join(pieces)


def _line_of(error: Exception) -> int | None:
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
    return lines[-1] if lines else None


def _defined(value: Any) -> Any:
    return str(value) if isinstance(value, Undefined) else value  # an undefined value raises here


def _text(value: Any) -> str:
    return text_of(_defined(value))


@pass_context  # keeps jinja2 from evaluating constants while a plan is only checked, as `optimized` does
def _write(_context: Context, value: Any) -> str:
    return _text(value)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json_of(_defined(value), indent)


@pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return str(d).join(map(_text, parts))


def _of_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with its value as the text that a prompt shows."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filter_text(*args: Any, **options: Any) -> Any:
        return function(*args[:place], _text(args[place]), *args[place + 1 :], **options)

    return filter_text


@lru_cache(maxsize=1)
def _functions() -> dict[str, Any]:
    """Return the functions of the template language, such as `range`, without the random text of `lipsum`: a prompt is
    rendered again at a retry and by a resume, and has to stay the same.
    """
    return {name: call for name, call in ImmutableSandboxedEnvironment().globals.items() if name != "lipsum"}


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        # No comments: text between {# and #} stays in the prompt.
        comment_start_string=f"{_NEVER}#",
        comment_end_string=f"#{_NEVER}",
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_write,
        autoescape=False,
        optimized=False,
    )
    # Functions are no globals of the environment: they would hide tasks of the same name.
    environment.globals.clear()
    environment.policies["truncate.leeway"] = 0
    environment.filters.update({name: _of_text(environment.filters[name]) for name in _OF_TEXT.split()})
    ours: dict[str, Any] = {"join": _join, "tojson": _to_json}
    environment.filters.update(ours)
    del environment.filters["random"]  # see _functions
    return environment
