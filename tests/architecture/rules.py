"""The rules of docs/explanation/design.md as functions from a file to the lines that break them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

from tests.architecture.layers import WORDS
from tests.architecture.source import Import, Source

PACKAGES = ("src/plait", "runner", "backends", "persistence")
PURE = (
    *(f"src/plait/{word}.py" for word in WORDS if word not in {"clock_and_ids", "program_log", "safe_text"}),
    "runner/prompts/*.py",
    "runner/domain/*.py",
    "runner/scheduling/*.py",
    "runner/policies/*.py",
    "runner/drawing/*.py",
    "backends/backend_protocol.py",
    "backends/output_schema.py",
    "backends/whole_answer.py",
    "persistence/store_records.py",
    "persistence/write_rules.py",
)
IMPURE = {"asyncio", "anyio", "time", "random", "os", "structlog"}
STATE_FIELDS = "runner/state/run_state.py"
STATE_WRITERS = (STATE_FIELDS,)
"""Files that may write to the fields of a RunState."""
STATE_NAMES = ("state", "_state")
"""The names that a RunState has as an attribute or a variable; the rule finds others by annotation or assignment."""
MUTATORS = {"add", "append", "clear", "cut", "difference_update", "discard", "extend", "insert", "intersection_update",
            "join", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "subtract",
            "symmetric_difference_update", "update"}  # fmt: skip


Findings = Iterator[tuple[int, str]]
Rule = Callable[[Source], Findings]


def pure_packages_stay_pure(source: Source) -> Findings:
    """A pure module imports no clock, no randomness and no I/O, and of ours only pure modules."""
    if not source.lies_in(*PURE):
        return
    for found in source.imports:
        if found.root in IMPURE:
            yield found.line, f"a pure module imports {found.module}"
        elif found.root in PACKAGES and not found.typing_only and not _is_pure(found):
            yield found.line, f"a pure module imports {found.module}, which is not pure"


def _is_pure(found: Import) -> bool:
    """Return whether the module is pure, or the modules that the import takes from a package are."""
    path = found.module.removeprefix("plait.").replace(".", "/")
    return any(Source(one, "").lies_in(*PURE) for one in [f"{path}.py", *(f"{path}/{name}.py" for name in found.names)])


def run_state_has_one_writer(source: Source) -> Findings:
    """Only the verbs of RunState write to its fields. A local name of a field or of a RunState counts as that."""
    if not source.lies_in("runner/**/*.py", "runner/*.py") or source.lies_in(*STATE_WRITERS):
        return
    fields = _run_state_fields()
    found: dict[int, str] = {}
    for scope in source.nodes():
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        states, views = _names_of_states(scope), dict[str, str]()
        for name, value in _bound(scope):
            if (field := _field_in(value, states, fields)) is not None:
                views[name] = field
        for line, written in _written(scope):
            field = _field_in(written, states, fields) or views.get(_root(written))
            if field is not None:
                found[line] = f"writes to {field!r} of a RunState; call one of its verbs"
    yield from found.items()


@cache
def _run_state_fields() -> frozenset[str]:
    """Return the names of all fields of a RunState, public and private."""
    source = Source(STATE_FIELDS, (Path(__file__).parents[2] / STATE_FIELDS).read_text(encoding="utf-8"))
    return frozenset(
        node.attr
        for node in source.nodes()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) == "self"
    )


def _names_of_states(scope: ast.AST) -> set[str]:
    names = set(STATE_NAMES)
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) and node.annotation is not None and "RunState" in ast.unparse(node.annotation):
            names.add(node.arg)
    for name, value in _bound(scope):
        if _name(value) in names or (isinstance(value, ast.Call) and _name(value.func) == "RunState"):
            names.add(name)
    return names


def _bound(scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each local name that is bound to an expression, with the expression."""
    for node in ast.walk(scope):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        for target, value in pairs:
            if isinstance(target, ast.Name):
                yield target.id, value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for one, its in zip(target.elts, value.elts, strict=False):
                    if isinstance(one, ast.Name):
                        yield one.id, its


def _written(scope: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    """Yield each expression whose value is changed, with its line: it is assigned, deleted, or has a mutator called."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node.lineno, node
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield node.lineno, node.func.value
        elif isinstance(node, ast.Call) and _name(node.func) in {"setattr", "delattr"} and len(node.args) > 1:
            named = node.args[1]
            if isinstance(named, ast.Constant):
                yield node.lineno, ast.Attribute(node.args[0], str(named.value), ast.Store())


def _field_in(node: ast.AST, states: Collection[str], fields: Collection[str]) -> str | None:
    """Return the field of a RunState that `node` is, or lies in; None if it is none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr in fields and _name(node.value) in states:
            return node.attr
        node = node.value
    return None


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return _name(node)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
