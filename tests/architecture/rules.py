"""The rules of docs/explanation/design.md as functions from a file to the lines that break them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

from plait.events import EVENTS
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
HOMES = {
    "aiosqlite": "persistence/sqlite_store.py",
    "sqlite3": "persistence/*.py",
    "asyncpg": "persistence/postgres_connection.py",
    "distributed": "backends/hosts/dask_*.py",
    "networkx": "runner/domain/dag.py",
    "aiohttp": "backends/models/http_client.py",
    "langgraph": "backends/frameworks/langgraph_*.py",
    "pydantic_ai": "backends/frameworks/pydantic_ai_*.py",
    "fastmcp": "backends/frameworks/pydantic_ai_agent.py",
    "xllamacpp": "backends/models/_llama_server.py",
    "jsonschema_rs": "backends/output_schema.py",
    "genai_prices": "backends/prices.py",
    "psutil": "backends/process/*.py",
    "fastapi": "runner/serving/*.py",
    "starlette": "runner/serving/*.py",
    "uvicorn": "runner/serving/*.py",
    "mcp": "runner/serving/*.py",
}
LAZY = {
    "aiohttp",
    "networkx",
    "langgraph",
    "pydantic_ai",
    "fastmcp",
    "xllamacpp",
    "jsonschema_rs",
    "genai_prices",
    "distributed",
}
STATUSES = {"pending", "queued", "running", "waiting_input", "completed", "failed", "skipped", "cancelling",
            "cancelled", "interrupted"}  # fmt: skip
EVENT_KINDS = set(EVENTS)
SPAWNERS = {"create_task", "ensure_future", "gather"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
SQL = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|REPLACE|CREATE|ALTER|DROP|PRAGMA|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|WITH|ATTACH|VACUUM)\b"
)
SQL_MODULES = {"persistence/tables.py", "persistence/delete_runs.py"}
OWN_FILES = ("files(", "importlib.resources.files(", "Path(__file__)")
READERS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes"}
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


def libraries_have_one_home(source: Source) -> Findings:
    """Each heavy or dangerous library is imported in its own place alone."""
    for library, line, _ in _library_imports(source):
        if not source.lies_in(HOMES[library]):
            yield line, f"{library} belongs to {HOMES[library]}"


def heavy_libraries_load_lazily(source: Source) -> Findings:
    """SDKs and networkx are imported inside functions, when first needed."""
    for library, line, lazy in _library_imports(source):
        if library in LAZY and not lazy:
            yield line, f"{library} is imported at module level"


def _library_imports(source: Source) -> Iterator[tuple[str, int, bool]]:
    for found in source.imports:
        if found.root in HOMES and not found.typing_only:
            yield found.root, found.line, found.lazy
    for call in _calls(source):
        if _name(call.func) == "import_module" and call.args and isinstance(call.args[0], ast.Constant):
            root = str(call.args[0].value).partition(".")[0]
            if root in HOMES:
                yield root, call.lineno, _is_in_a_function(call, source)


def _is_in_a_function(node: ast.AST, source: Source) -> bool:
    functions = (node for node in source.nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(inner is node for function in functions for inner in ast.walk(function))


def work_belongs_to_task_groups(source: Source) -> Findings:
    """No free-floating tasks."""
    for node in source.nodes():
        if isinstance(node, ast.Name | ast.Attribute) and _name(node) in SPAWNERS:
            yield node.lineno, f"{_name(node)}: start it in a task group"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in SPAWNERS:
                    yield node.lineno, f"{alias.name}: start it in a task group"


def statuses_are_no_strings(source: Source) -> Findings:
    """The runner compares members of enums, never the words of a status or of an event's kind."""
    if not source.lies_in("runner/**/*.py", "runner/*.py"):
        return
    for node in source.nodes():
        compared: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        for part in compared:
            for inner in part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]:
                if isinstance(inner, ast.Constant) and inner.value in STATUSES:
                    yield inner.lineno, f"compares a status with {inner.value!r}; use TaskStatus or RunStatus"
                elif isinstance(inner, ast.Constant) and inner.value in EVENT_KINDS:
                    yield inner.lineno, f"compares an event's kind with {inner.value!r}; use that of its class"


def nothing_is_executed_or_unpickled(source: Source) -> Findings:
    """No code from data, no shell."""
    for found in source.imports:
        if found.root in UNSAFE_MODULES:
            yield found.line, f"imports {found.module}"
    for call in _calls(source):
        name = ast.unparse(call.func)
        if name in {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}:
            yield call.lineno, f"calls {name}"
        elif name in {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}:
            yield call.lineno, f"calls {name}; use yaml.safe_load or the plan reader"
        for keyword in call.keywords:
            if keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                yield call.lineno, "starts a shell"


def sql_is_written_out(source: Source) -> Findings:
    """SQL is constant text with parameters, put together from constants when a module is imported, or in SQL_MODULES.
    `executescript` commits behind the caller's back.
    """
    if not source.path.startswith("persistence/") or source.path in SQL_MODULES:
        return
    for node in source.nodes():
        if isinstance(node, ast.JoinedStr) and _starts_as_sql(node.values[0] if node.values else None):
            if _is_in_a_function(node, source):
                yield node.lineno, "SQL in an f-string"
        elif isinstance(node, ast.BinOp) and _starts_as_sql(node.left):
            yield node.lineno, "SQL put together with an operator"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in {"format", "join", "replace"} and _starts_as_sql(node.func.value):
                yield node.lineno, f"SQL put together with .{node.func.attr}"
            elif node.func.attr == "executescript":
                yield node.lineno, "executescript"
            elif (
                node.func.attr.startswith("execute")
                and node.args
                and isinstance(node.args[0], ast.JoinedStr | ast.BinOp)
            ):
                yield node.lineno, f"{node.func.attr} of text that was put together"


def _starts_as_sql(node: ast.AST | None) -> bool:
    if isinstance(node, ast.BinOp):
        return _starts_as_sql(node.left)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.match(node.value) is not None


def only_sqlite_opens_the_database(source: Source) -> Findings:
    """Closing a descriptor of the file drops SQLite's locks on it: nothing here opens files, but `os.open` with O_EXCL
    to make a new one or with O_DIRECTORY for a folder, and files of the package itself.
    """
    if not source.path.startswith("persistence/"):
        return
    for call in _calls(source):
        name, whole = _name(call.func), ast.unparse(call.func)
        if name not in READERS or whole.startswith(OWN_FILES):
            continue
        if whole == "os.open" and re.search(r"O_EXCL|O_DIRECTORY", ast.unparse(call)):
            continue
        yield call.lineno, f"calls {whole}"


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


def _calls(source: Source) -> Iterator[ast.Call]:
    return (node for node in source.nodes() if isinstance(node, ast.Call))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
