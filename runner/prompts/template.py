"""Prompts with more in them than plain names: jinja2, cut down to what a prompt needs. Pure.

Prompts may have been written by a model, so they are taken to be hostile. Three locks, one behind the other: the parsed
template may hold only the nodes of an allow-list (no calls, no arithmetic, no assignments); fields, loops and
comparisons are rewritten into filters of ours that know keys and indexes alone and pay from a budget; and the result
runs in jinja2's sandbox.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, nodes, pass_context
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from plait.backends.protocol import JsonInput
from plait.runner.errors import PromptError
from plait.runner.prompts.checker import TESTS, by_key, check_template
from plait.runner.prompts.filters import BUDGET_KEY, FILTERS, GUARDS, Budget
from plait.runner.prompts.render import PromptNames, first_of, text_of, too_long, unknown_name

MAX_TEMPLATE = 200_000  # characters; a prompt of plain names may be longer
_FILE = "<prompt>"
_NEVER = "\ufdd0" * 2  # no character, by the Unicode standard
_NUMBERED = re.compile(r"\{\{-?\s*([0-9][0-9_]*[A-Za-z][\w-]*)", re.ASCII)
"""A construct that begins with the id of a task such as `1a`, which the template language takes for a number."""


class Template:
    """A parsed and checked prompt; one with `mistakes` cannot be rendered."""

    def __init__(self, prompt: str) -> None:
        tree = _parse(prompt)
        self.names: PromptNames
        self.mistakes: Sequence[PromptError]
        self.names, self.mistakes = check_template(tree)
        self._compiled = None if self.mistakes else _compile(tree)

    def render(self, values: Mapping[str, JsonInput], limit: int) -> str:
        """See `plait.runner.prompts.render.render`."""
        if self._compiled is None:
            raise first_of(self.mistakes)
        try:
            return _collect(self._compiled.generate({**values, BUDGET_KEY: Budget(limit)}), limit)
        except PromptError as error:
            if error.line is None:
                error.line = _line_of(error)
            raise
        except Exception as error:
            # Undefined names arrive here, and whatever hostile values make the template do.
            raise PromptError(_explain(error, values), _line_of(error)) from error


@lru_cache(maxsize=128)
def compile_template(prompt: str) -> Template:
    """The template of `prompt`. Raises PromptError for what cannot be parsed."""
    return Template(prompt)


class _Guard(NodeTransformer):
    """Puts our filters around everything that reaches into values or whose cost grows with them."""

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Expr:  # noqa: N802
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            return node
        shown = show(node.node)
        self.generic_visit(node)
        return _filter(node.node, "_field", node.attr, shown)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        shown = show(node.node)
        self.generic_visit(node)
        return _filter(node.node, "_field", node.arg, shown)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        step = sum(1 for _ in node.find_all(nodes.Node)) + 1
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_loop", step)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_compared")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_compared")
        return node


def show(node: nodes.Node) -> str:
    """The expression as a person wrote it, for messages."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        return f"{show(node.node)}.{node.attr}"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return f"{show(node.node)}[{node.arg.value!r}]"
    return "the value"


def _filter(node: nodes.Node, name: str, *args: Any) -> nodes.Filter:
    made = [arg if isinstance(arg, nodes.Expr) else nodes.Const(arg, lineno=node.lineno) for arg in args]
    guarded = nodes.Filter(cast(nodes.Expr, node), name, made, [], None, None, lineno=node.lineno)
    guarded.set_environment(_environment())
    return guarded


def _parse(prompt: str) -> nodes.Template:
    if len(prompt) > MAX_TEMPLATE:
        raise PromptError(
            f"a prompt with more than plain names may have {MAX_TEMPLATE:,} characters, not {len(prompt):,}; "
            "move the long text into an input or a task of its own"
        )
    try:
        return _environment().parse(prompt)
    except TemplateSyntaxError as error:
        numbered = _NUMBERED.search(prompt)
        if numbered is None:
            raise PromptError(_syntax(error), error.lineno) from error
        message = f"{{{{ {numbered[1]} }}}} begins with a digit, so it is no plain name; {by_key(numbered[1])}"
        raise PromptError(message, prompt.count("\n", 0, numbered.start()) + 1) from error
    except (RecursionError, MemoryError) as error:
        raise PromptError("the prompt is nested too deep; make it simpler") from error
    except ValueError as error:  # such as a number of 5,000 digits
        raise PromptError(f"the prompt cannot be read: {error}") from error


def _compile(tree: nodes.Template) -> Any:
    environment = _environment()
    try:
        guarded: nodes.Template = _Guard().visit(tree)
        code = environment.compile(guarded, name=None, filename=_FILE)
        return environment.template_class.from_code(environment, code, {})
    except TemplateSyntaxError as error:
        raise PromptError(_syntax(error), error.lineno) from error
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise PromptError("the prompt is nested too deep; make it simpler") from error


def _syntax(error: TemplateSyntaxError) -> str:
    message = (error.message or "it cannot be read").rstrip(".")
    return f"the template cannot be read: {message}; to write two braces as they are, use {{{{ '{{{{' }}}}"


def _collect(chunks: Iterator[str], limit: int) -> str:
    pieces: list[str] = []
    size = 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size > limit:
            raise too_long(limit)
    return "".join(pieces)


def _explain(error: Exception, values: Mapping[str, JsonInput]) -> str:
    unknown = re.fullmatch(r"'(\w+)' is undefined", str(error)) if isinstance(error, UndefinedError) else None
    if unknown:
        return unknown_name(unknown[1], values)
    if isinstance(error, RecursionError):
        return "a value in the prompt is nested too deep"
    return str(error) or type(error).__name__


def _line_of(error: Exception) -> int | None:
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
    return lines[-1] if lines else None


@pass_context  # also keeps jinja2 from working out constants while it compiles, outside of every limit
def _write(_context: Context, value: Any) -> str:
    if isinstance(value, Undefined):
        return str(value)  # raises: the class is strict
    return text_of(value)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        # No comments: what stands between {# and #} is text, and would be left out of the prompt without a word.
        comment_start_string=f"{_NEVER}#",
        comment_end_string=f"#{_NEVER}",
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_write,
        autoescape=False,
        optimized=False,
    )
    environment.globals.clear()
    environment.filters = {**FILTERS, **GUARDS}
    environment.tests = {name: environment.tests[name] for name in TESTS}
    return environment
