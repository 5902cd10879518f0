"""The rules of docs/explanation/design.md as functions from a file to the lines that break them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from plait.persistence import EventKind
from tests.architecture.source import Import, Source

PACKAGES = ("runner", "backends", "persistence")
PURE = (
    "runner/prompts/*.py",
    "runner/domain/*.py",
    "runner/scheduling/*.py",
    "runner/policies/*.py",
    "runner/policies/orchestrator/*.py",
    "runner/drawing/*.py",
    "runner/errors.py",
    "runner/state/attempt_files.py",
    "backends/errors.py",
    "backends/protocol.py",
    "backends/structured.py",
    "backends/text.py",
    "backends/values.py",
    "persistence/changes.py",
    "persistence/errors.py",
    "persistence/event_log.py",
    "persistence/records.py",
    "persistence/rules.py",
    "persistence/values.py",
)
IMPURE = {"asyncio", "anyio", "time", "random", "os", "structlog"}
HOMES = {
    "aiosqlite": "persistence/sqlite/*.py",
    "sqlite3": "persistence/sqlite/*.py",
    "networkx": "runner/domain/dag.py",
    "openai": "backends/llm/openai.py",
    "anthropic": "backends/llm/anthropic.py",
    "langgraph": "backends/langgraph/*.py",
    "xllamacpp": "backends/llm/_llama_server.py",
    "psutil": "backends/process/*.py",
    "fastapi": "runner/web/*.py",
    "starlette": "runner/web/*.py",
    "uvicorn": "runner/web/*.py",
}
LAZY = {"networkx", "openai", "anthropic", "langgraph", "xllamacpp"}
STATUSES = {"pending", "queued", "running", "waiting_input", "completed", "failed", "skipped", "cancelling",
            "cancelled", "interrupted"}  # fmt: skip
EVENT_KINDS = {kind.value for kind in EventKind}
SPAWNERS = {"create_task", "ensure_future", "gather"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
SQL = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|REPLACE|CREATE|ALTER|DROP|PRAGMA|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|WITH|ATTACH|VACUUM)\b"
)
OWN_FILES = ("files(", "importlib.resources.files(", "Path(__file__)")
READERS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes"}
MOST_LINES, MOST_FUNCTION_LINES = 500, 60


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
    in_functions = {
        id(inner)
        for node in source.nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for call in _calls(source):
        if _name(call.func) == "import_module" and call.args and isinstance(call.args[0], ast.Constant):
            root = str(call.args[0].value).partition(".")[0]
            if root in HOMES:
                yield root, call.lineno, id(call) in in_functions


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
                    yield inner.lineno, f"compares an event's kind with {inner.value!r}; use EventKind"


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
    """SQL is constant text with parameters; `executescript` commits behind the caller's back."""
    if not source.path.startswith("persistence/"):
        return
    for node in source.nodes():
        if isinstance(node, ast.JoinedStr) and _starts_as_sql(node.values[0] if node.values else None):
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
        if whole == "os.open" and re.search("O_EXCL|O_DIRECTORY", ast.unparse(call)):
            continue
        yield call.lineno, f"calls {whole}"


def files_and_functions_stay_short(source: Source) -> Findings:
    """At most 500 lines a file and 60 a function, comments and blank lines included."""
    lines = len(source.text.splitlines())
    if lines > MOST_LINES:
        yield lines, f"{lines} lines; {MOST_LINES} are allowed"
    for node in source.nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines; {MOST_FUNCTION_LINES} are allowed"


def _calls(source: Source) -> Iterator[ast.Call]:
    return (node for node in source.nodes() if isinstance(node, ast.Call))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
