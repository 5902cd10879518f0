"""Which templates are allowed as prompts, and which names they use. Pure.

An allow-list, so that what jinja2 learns tomorrow is refused until somebody has thought about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from jinja2 import nodes

from plait.runner.errors import PromptError
from plait.runner.prompts.filters import FILTERS
from plait.runner.prompts.render import PromptNames

TESTS: frozenset[str] = frozenset(
    {"defined", "undefined", "none", "string", "number", "mapping", "boolean", "true", "false", "odd", "even"}
)
"""What stands after `is` in a prompt."""

MAX_DEPTH = 60
MAX_NODES = 20_000
MAX_LOOPS = 3
MAX_MISTAKES = 20
"""How many mistakes of one prompt are told at once."""

_LOOP_FIELDS = frozenset({"index", "index0", "first", "last", "length"})
_ALLOWED = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Const,
    nodes.List,
    nodes.If,
    nodes.Compare,
    nodes.Operand,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.CondExpr,
    nodes.Keyword,
)
_ARITHMETIC = (
    nodes.Add,
    nodes.Sub,
    nodes.Mul,
    nodes.Div,
    nodes.FloorDiv,
    nodes.Mod,
    nodes.Pow,
    nodes.Neg,
    nodes.Pos,
    nodes.Concat,
)
_MAGIC = frozenset({"self", "super", "caller", "varargs", "kwargs"})


class _Enough(Exception):  # noqa: N818 - no error
    """Looking further makes no sense."""


@dataclass(slots=True)
class _Found:
    """`defines_names`: something that is not allowed may give names a meaning that cannot be told here."""

    names: set[str] = field(default_factory=set[str])
    results: set[str] = field(default_factory=set[str])
    inputs: set[str] = field(default_factory=set[str])
    parts: int = 0
    mistakes: dict[tuple[str, int], PromptError] = field(default_factory=dict[tuple[str, int], PromptError])
    defines_names: bool = False

    def refuse(self, node: nodes.Node, message: str) -> None:
        self.mistakes.setdefault((message, node.lineno), PromptError(message, node.lineno))
        if len(self.mistakes) >= MAX_MISTAKES:
            raise _Enough


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the walk stands: the names that loops around it define, and how deep it is."""

    scope: frozenset[str] = frozenset()
    loops: int = 0
    depth: int = 0

    def deeper(self) -> _Place:
        return _Place(self.scope, self.loops, self.depth + 1)


def check_template(tree: nodes.Template) -> tuple[PromptNames, tuple[PromptError, ...]]:
    """The names that a parsed prompt uses, as far as they can be told, and what in it is not allowed, in its order."""
    found = _Found()
    with suppress(_Enough):
        _walk(tree, _Place(), found)
    mistakes = tuple(found.mistakes.values())
    if found.defines_names:
        return PromptNames(), mistakes
    # Walked only where nothing is wrong: what is nested too deep is.
    item = frozenset[str]() if mistakes else frozenset(_needed(tree))
    return PromptNames(frozenset(found.names), frozenset(found.results), frozenset(found.inputs), item), mistakes


def by_key(name: str) -> str:
    """How `name`, which is no plain name, is written in a prompt."""
    return f'write {{{{ results["{name}"] }}}} for a task, {{{{ inputs["{name}"] }}}} for an input'


def _walk(node: nodes.Node, place: _Place, found: _Found) -> None:
    found.parts += 1
    if place.depth > MAX_DEPTH:
        found.refuse(node, f"the prompt is nested deeper than {MAX_DEPTH} levels; make it simpler")
        raise _Enough
    if found.parts > MAX_NODES:
        found.refuse(node, f"the prompt has more than {MAX_NODES:,} parts; make it simpler")
        raise _Enough
    if isinstance(node, nodes.Name):
        _walk_name(node, place, found)
    elif isinstance(node, nodes.For):
        _walk_for(node, place, found)
    elif isinstance(node, nodes.Getattr | nodes.Getitem):
        _walk_field(node, place, found)
    else:
        for child in _allowed_parts(node, found):
            _walk(child, place.deeper(), found)


def _walk_name(node: nodes.Name, place: _Place, found: _Found) -> None:
    if node.name == "loop" and place.loops:
        found.refuse(node, "loop has the fields index, index0, first, last and length; write for example loop.index")
    elif node.name in _MAGIC or node.name == "loop":
        found.refuse(node, f"{node.name!r} means something else in templates; {by_key(node.name)}")
    elif node.name not in place.scope:
        found.names.add(node.name)


def _walk_for(node: nodes.For, place: _Place, found: _Found) -> None:
    if place.loops >= MAX_LOOPS:
        found.refuse(node, f"loops may be nested {MAX_LOOPS} deep")
        return
    if node.recursive:
        found.refuse(node, "recursive loops are not allowed in a prompt")
    if not isinstance(node.target, nodes.Name):
        found.refuse(node, "a loop has one name: write {% for part in parts %}")
    _walk(node.iter, place.deeper(), found)
    targets = [node.target] if isinstance(node.target, nodes.Name) else node.target.find_all(nodes.Name)
    inside = _Place(place.scope.union(name.name for name in targets), place.loops + 1, place.depth + 1)
    for child in (*node.body, *((node.test,) if node.test else ())):
        _walk(child, inside, found)
    for child in node.else_:
        _walk(child, place.deeper(), found)


def _walk_field(node: nodes.Getattr | nodes.Getitem, place: _Place, found: _Found) -> None:
    key = node.attr if isinstance(node, nodes.Getattr) else _constant(node.arg)
    owner = node.node
    if isinstance(owner, nodes.Name) and owner.name == "loop" and place.loops and key in _LOOP_FIELDS:
        if isinstance(node, nodes.Getitem):
            found.refuse(node, f"write loop.{key}")
        return
    if isinstance(owner, nodes.Name) and owner.name not in place.scope and isinstance(key, str):
        if owner.name == "results":
            found.results.add(key)
        elif owner.name == "inputs":
            found.inputs.add(key)
    _walk(owner, place.deeper(), found)
    if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Neg):
        _walk(node.arg, place.deeper(), found)
    elif isinstance(node, nodes.Getitem) and key is None:
        for child in _allowed_parts(node.arg, found):
            _walk(child, place.deeper(), found)


def _needed(node: nodes.Node) -> Iterator[str]:
    """The fields of `item` that are looked up whenever `node` is rendered, and not only to be tested or defaulted."""
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
            # What is looked for in an empty list is never looked at.
            parts = (first.expr,) if first.op in {"in", "notin"} else (node.expr, first.expr)
        case nodes.Filter(name=name, node=nodes.Node() as inner) if name != "default":
            parts = (inner,)
        case nodes.Not() | nodes.Getattr() | nodes.Getitem():
            parts = (node.node,)
        case _:
            pass
    for part in parts:
        yield from _needed(part)


def _constant(node: nodes.Node) -> object:
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return node.node.value
    return node.value if isinstance(node, nodes.Const) else None


def _allowed_parts(node: nodes.Node, found: _Found) -> Iterable[nodes.Node]:
    """The parts of `node` to look at next: without those where what is wrong with it would be told once more."""
    if isinstance(node, nodes.Filter):
        _check_filter(node, found)
    elif isinstance(node, nodes.Test):
        if node.name not in TESTS or node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
            found.refuse(node, f"the test 'is {node.name}' is not available in prompts; there are {_list(TESTS)}")
    elif isinstance(node, nodes.Sub) and (dashed := _dashed(node)):
        found.refuse(node, f"{{{{ {dashed} }}}} means a subtraction; {by_key(dashed)}")
        return ()
    elif isinstance(node, _ARITHMETIC):
        found.refuse(node, "arithmetic is not allowed in a prompt; let a function task compute the value")
    elif isinstance(node, nodes.Call):
        found.refuse(node, "calls are not allowed in a prompt; use a filter, as in {{ name | upper }}")
        return [child for child in node.iter_child_nodes() if child is not node.node]
    elif isinstance(node, nodes.FilterBlock):
        found.refuse(node, "filter blocks are not allowed in a prompt; use {{ name | upper }}")
        return node.body
    elif not isinstance(node, _ALLOWED):
        found.refuse(node, f"{type(node).__name__.lower()} is not allowed in a prompt; there are if, for and filters")
        found.defines_names = found.defines_names or isinstance(node, nodes.Stmt)
    return node.iter_child_nodes()


def _check_filter(node: nodes.Filter, found: _Found) -> None:
    if node.name not in FILTERS:
        found.refuse(node, f"the filter {node.name!r} is not available in prompts; there are {_list(FILTERS)}")
    elif node.dyn_args or node.dyn_kwargs:
        found.refuse(node, f"write the arguments of {node.name!r} one by one")


def _dashed(node: nodes.Node) -> str | None:
    """The dashed id that somebody meant by `a-b`, which is a subtraction to the template language."""
    if isinstance(node, nodes.Sub):
        left, right = _dashed(node.left), _dashed(node.right)
        return f"{left}-{right}" if left and right else None
    if isinstance(node, nodes.Getattr | nodes.Getitem):
        return _dashed(node.node)
    if isinstance(node, nodes.Const) and isinstance(node.value, int):
        return str(node.value)
    return node.name if isinstance(node, nodes.Name) else None


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
