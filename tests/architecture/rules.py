"""The rules of the house (docs/design.md) as functions from a file to what breaks them there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from tests.architecture.source import Source

PACKAGES = ("runner", "backends", "persistence")
PURE = (
    "runner/domain/task.py",
    "runner/domain/status.py",
    "runner/domain/prompt_values.py",
    "runner/domain/dag.py",
    "runner/domain/validation.py",
    "runner/domain/reachability.py",
    "runner/domain/policy.py",
    "runner/policies/**/*.py",
    "runner/policies/*.py",
    "runner/domain/result.py",
    "runner/domain/limits.py",
    "runner/scheduling/slots.py",
    "runner/scheduling/scheduler.py",
    "runner/scheduling/outset.py",
    "runner/scheduling/for_each.py",
    "runner/state/attempt_files.py",
    "runner/prompts/*.py",
    "runner/errors.py",
    "runner/drawing/picture.py",
    "runner/drawing/layout.py",
    "runner/cli/display/text.py",
    "persistence/event_log.py",
    "persistence/rules.py",
    "backends/errors.py",
    "backends/protocol.py",
    "backends/values.py",
    "persistence/changes.py",
    "persistence/values.py",
    "persistence/records.py",
    "persistence/errors.py",
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
    "fastapi": "runner/web/*.py",
    "starlette": "runner/web/*.py",
    "uvicorn": "runner/web/*.py",
}
LAZY = {"networkx", "openai", "anthropic", "langgraph", "xllamacpp"}
STATUSES = {"pending", "queued", "running", "waiting_input", "completed", "failed", "skipped", "cancelling",
            "cancelled", "interrupted"}  # fmt: skip
SPAWNERS = {"create_task", "ensure_future", "gather"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
SQL = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|REPLACE|CREATE|ALTER|DROP|PRAGMA|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|WITH|ATTACH|VACUUM)\b"
)
OWN_FILES = ("files(", "importlib.resources.files(", "Path(__file__)")
READERS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes"}
MOST_LINES, MOST_FUNCTION_LINES = 300, 60


Findings = Iterator[tuple[int, str]]
Rule = Callable[[Source], Findings]


def leaves_do_not_look_up(source: Source) -> Findings:
    """backends and persistence import neither runner nor one another, not even for types."""
    home = source.module.partition(".")[0]
    forbidden = [package for package in PACKAGES if home not in {"runner", package}]
    for found in source.imports:
        if found.root in forbidden:
            yield found.line, f"{home} imports {found.module}"


def pure_rooms_stay_pure(source: Source) -> Findings:
    """Pure rooms know no clock, no chance, no I/O, and of ours only pure rooms."""
    if not source.lies_in(*PURE):
        return
    for found in source.imports:
        if found.root in IMPURE:
            yield found.line, f"a pure room imports {found.module}"
        elif found.root in PACKAGES and not found.typing_only:
            path = found.module.replace(".", "/") + ".py"
            if not Source(path, "").lies_in(*PURE):
                yield found.line, f"a pure room imports {found.module}, which is not one"


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
    """The runner compares members of its enums, never their words."""
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
    """At most 300 lines a file and 60 a function, everything counted."""
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


def import_circle(sources: Iterable[Source]) -> list[str]:
    """A circle of modules that import each other when they are loaded, as `file:line imports module`; else empty."""
    by_module = {source.module: source for source in sources}
    edges = {source.module: dict(_edges(source, by_module)) for source in by_module.values()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        # The sorter names each module before the one that imports it.
        circle = error.args[1][::-1]
        return [f"{by_module[one].path}:{edges[one][other]} imports {other}" for one, other in pairwise(circle)]
    return []


def _edges(source: Source, known: dict[str, Source]) -> Iterator[tuple[str, int]]:
    for found in source.imports:
        if found.lazy or found.typing_only:
            continue
        inner = [f"{found.module}.{name}" for name in found.names]
        targets = [module for module in inner if module in known]
        if len(targets) < len(inner) or not inner:
            targets.append(found.module)
        yield from ((target, found.line) for target in targets if target in known and target != source.module)
