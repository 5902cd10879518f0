"""Prompts with more than plain names: templates of jinja2, written by the user, checked before the run. Pure.

A template is the user's own code, as a function is: loops and sizes have no limit but that of the rendered prompt.
The values are not: a model wrote most of them. A value is never read as a template, fields are looked up by key and
index alone, operators that would make a huge value of two small ones have limits, and jinja2's sandbox stands behind.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from itertools import islice
from typing import Any

from jinja2 import (
    StrictUndefined,
    TemplateAssertionError,
    TemplateSyntaxError,
    meta,
    nodes,
    pass_context,
    pass_environment,
)
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.errors import PromptError, nearest
from plait.json_form import JsonInput, json_of, text_of
from plait.runner.prompts.prompt_names import (
    STEP,
    PromptNames,
    by_key,
    field_of,
    first_of,
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
    compared: tuple[Sequence[Sequence[str | int]], Sequence[object]] | None = None
    """What a condition that only compares reads, each name with its keys, and its literals; None for another text."""

    def __init__(self, prompt: str, *, is_condition: bool = False) -> None:
        self._lines = prompt.splitlines()
        self._whole = " ".join(self._lines) if is_condition else None
        """The text of a condition, whose lines are one statement."""
        noun = "condition" if is_condition else "prompt"
        try:
            tree = _parse_expression(prompt) if is_condition else _environment().parse(prompt)
            self.names, self.mistakes = check_template(tree, prompt, _functions())
            self._compiled: Any = None
            if not self.mistakes:
                environment = _environment()
                code = environment.compile(tree, name=None, filename=_FILE)
                self._compiled = environment.template_class.from_code(environment, code, _functions())
            paths, literals = list[Sequence[str | int]](), list[object]()
            if is_condition and all(_compares(node, paths, literals) for node in tree.body[0].iter_child_nodes()):
                self.compared = paths, literals
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


_COMPARING = (nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.List, nodes.Tuple, nodes.Neg)


def _compares(node: nodes.Node, paths: list[Sequence[str | int]], literals: list[object]) -> bool:
    """Return whether an expression only compares fields and literals, which are added to the lists."""
    match node:
        case nodes.Const(value=value):
            literals += value if isinstance(value, list | tuple) else [value]  # jinja2 folds constants
            return True
        case nodes.Name() | nodes.Getattr() | nodes.Getitem():
            keys: list[str | int] = []
            while not isinstance(node, nodes.Name):
                match node:
                    case (
                        nodes.Getattr(node=owner, attr=key)
                        | nodes.Getitem(node=owner, arg=nodes.Const(value=str(key) | int(key)))
                    ):
                        node, keys = owner, [key, *keys]
                    case _:
                        return False
            paths.append([node.name, *keys])
            return True
        case nodes.And() | nodes.Or() | nodes.Not() if any(
            isinstance(side, nodes.Const) for side in node.iter_child_nodes()
        ):
            return False  # switched on or off by its author
        case _:
            return isinstance(node, _COMPARING) and all(
                _compares(inner, paths, literals) for inner in node.iter_child_nodes()
            )


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
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filter_text(*args: Any, **options: Any) -> Any:
        return function(*args[:position], _text(args[position]), *args[position + 1 :], **options)

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


MAX_MISTAKES = 20
"""Mistakes of one prompt that are reported at once."""
_TEMPLATES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_TOLERANT = frozenset({"default", "d", "items", "pprint"})
"""Filters that accept a field that does not exist."""


def check_template(
    tree: nodes.Template, prompt: str, functions: Collection[str]
) -> tuple[PromptNames, tuple[PromptError, ...]]:
    """Return the names that the parsed `prompt` uses, as far as they can be read, and its mistakes in their order.

    A name that the template calls, and that is in `functions`, is none of them.
    """
    mistakes = list(islice(_unavailable(tree), MAX_MISTAKES))
    set_here = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    mistakes += () if "self" in set_here else _selves(tree)
    free: set[str] = set()
    try:
        free = meta.find_undeclared_variables(tree) - _only_called(tree).intersection(functions)
    except TemplateAssertionError as error:
        mistakes.append(PromptError(str(error.message), error.lineno))
    dashed = _dashed_ids(tree, prompt, free)
    mistakes += dashed.values()
    free -= {part for name in dashed for part in name.split("-")}
    mistakes.sort(key=lambda mistake: mistake.line or 0)
    reported = {(str(mistake), mistake.line): mistake for mistake in mistakes}
    results, inputs = (
        _keys(tree, name) if name not in set_here else frozenset[str]() for name in ("results", "inputs")
    )
    item = frozenset[str]() if "item" in set_here else frozenset(_needed(tree))
    return PromptNames(frozenset(free), results, inputs, item), tuple(islice(reported.values(), MAX_MISTAKES))


def _unavailable(tree: nodes.Template) -> Iterator[PromptError]:
    """Yield a mistake for each unknown filter or test and for each use of another template, and rename the unknown: the
    search for names would stop there.
    """
    environment = tree.environment
    assert environment is not None
    for node in tree.find_all((nodes.Filter, nodes.Test, *_TEMPLATES)):
        if isinstance(node, nodes.Filter | nodes.Test):
            kind, names = (
                ("filter", environment.filters) if isinstance(node, nodes.Filter) else ("test", environment.tests)
            )
            if node.name not in names:
                message = f"the {kind} {node.name!r} is not available in prompts{nearest(node.name, names)}"
                node.name = "string"
                yield PromptError(message, node.lineno)
        else:
            yield PromptError(
                "a prompt cannot use another template: there is no include, import or extends", node.lineno
            )


def _only_called(tree: nodes.Template) -> set[str]:
    """Return the names that the template calls and never uses as values."""
    callees = [call.node for call in tree.find_all(nodes.Call)]
    identities = set(map(id, callees))
    values = {name.name for name in tree.find_all(nodes.Name) if id(name) not in identities}
    return {node.name for node in callees if isinstance(node, nodes.Name)} - values


def _selves(tree: nodes.Template) -> list[PromptError]:
    """Return a mistake for each use of `self`, which the template language never reports as an unknown name."""
    uses = [name for name in tree.find_all(nodes.Name) if name.name == "self"]
    return [PromptError(f"'self' means something else in templates; {by_key('self')}", use.lineno) for use in uses]


def _dashed_ids(tree: nodes.Template, prompt: str, free: Collection[str]) -> dict[str, PromptError]:
    """Return a mistake for each `a-b` without spaces: the id of a task, and a subtraction to the template language."""
    ids: dict[str, PromptError] = {}
    for node in tree.find_all(nodes.Sub):  # the longest id first
        name = _dashed(node)
        if name and name in prompt and name.split("-")[0] in free and not any(name in other for other in ids):
            message = f"{{{{ {name} }}}} is read as a subtraction; {by_key(name)}, or put spaces around a minus"
            ids[name] = PromptError(message, node.lineno)
    return ids


def _dashed(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.Sub):
        left, right = _dashed(node.left), _dashed(node.right)
        return f"{left}-{right}" if left and right else None
    if isinstance(node, nodes.Getattr | nodes.Getitem):
        return _dashed(node.node)
    if isinstance(node, nodes.Const) and isinstance(node.value, int):
        return str(node.value)
    return node.name if isinstance(node, nodes.Name) else None


def _keys(tree: nodes.Template, owner: str) -> frozenset[str]:
    """Return the constant keys that `tree` asks of `owner`."""
    keys: set[str] = set()
    for node in tree.find_all(nodes.Expr):
        match node:
            case (
                nodes.Getattr(node=nodes.Name(name=name), attr=key)
                | nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=str(key)))
            ) if name == owner:
                keys.add(key)
            case _:
                pass
    return frozenset(keys)


def _needed(node: nodes.Node) -> Iterator[str]:
    """Yield the fields of `item` that each rendering of `node` looks up, and not only to test or replace them."""
    parts: Iterable[nodes.Node] = ()
    match node:
        case (
            nodes.Getattr(node=nodes.Name(name="item"), attr=key)
            | nodes.Getitem(node=nodes.Name(name="item"), arg=nodes.Const(value=str(key)))
        ):
            yield key
        case nodes.Template() | nodes.Output():
            parts = node.iter_child_nodes()
        case nodes.If() | nodes.CondExpr():
            parts = (node.test,)
        case nodes.For():
            parts = (node.iter,)
        case nodes.And() | nodes.Or():
            parts = (node.left,)
        case nodes.Compare():
            first = node.ops[0]
            # A search in an empty list does not look at the value that it searches for.
            parts = (first.expr,) if first.op in {"in", "notin"} else (node.expr, first.expr)
        case nodes.Filter(name=name, node=nodes.Node() as inner) if name not in _TOLERANT:
            parts = (inner,)
        case nodes.Not() | nodes.Getattr() | nodes.Getitem():
            parts = (node.node,)
        case _:
            pass
    for part in parts:
        yield from _needed(part)
