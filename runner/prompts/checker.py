"""The names that a parsed template uses, and the mistakes that a check finds before the first rendering. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from jinja2 import TemplateAssertionError, meta, nodes

from plait.errors import PromptError, nearest
from plait.runner.prompts.prompt_names import PromptNames, by_key

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
    told = {(str(mistake), mistake.line): mistake for mistake in sorted(mistakes, key=lambda one: one.line or 0)}
    results, inputs = (
        _keys(tree, name) if name not in set_here else frozenset[str]() for name in ("results", "inputs")
    )
    item = frozenset[str]() if "item" in set_here else frozenset(_needed(tree))
    return PromptNames(frozenset(free), results, inputs, item), tuple(islice(told.values(), MAX_MISTAKES))


def _unavailable(tree: nodes.Template) -> Iterator[PromptError]:
    """Yield a mistake for each unknown filter or test and for each use of another template, and rename the unknown: the
    search for names would stop there.
    """
    environment = tree.environment
    assert environment is not None
    for node in tree.find_all((nodes.Filter, nodes.Test, *_TEMPLATES)):
        if isinstance(node, nodes.Filter | nodes.Test):
            kind, known = (
                ("filter", environment.filters) if isinstance(node, nodes.Filter) else ("test", environment.tests)
            )
            if node.name not in known:
                message = f"the {kind} {node.name!r} is not available in prompts{nearest(node.name, known)}"
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
    found: dict[str, PromptError] = {}
    for node in tree.find_all(nodes.Sub):  # the longest id first
        name = _dashed(node)
        if name and name in prompt and name.split("-")[0] in free and not any(name in other for other in found):
            message = f"{{{{ {name} }}}} is read as a subtraction; {by_key(name)}, or put spaces around a minus"
            found[name] = PromptError(message, node.lineno)
    return found


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
