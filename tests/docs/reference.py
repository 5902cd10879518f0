"""The generated parts of docs/reference: commands, keys of plans, errors, statuses, events and public names.

    python -m tests.docs.reference     writes them into the pages, as `make reference` does, and docs/plan.schema.json

A part stands in its page between `<!-- NAME -->` and `<!-- end -->`. The texts come from click, docstrings and the
JSON Schema of plans, so each is written once, beside the code. tests/docs/test_reference.py fails while a page is old.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import click

import plait
from plait import events
from plait.errors import ErrorKind, PlaitError
from plait.runner.cli.command_line import BESIDE, EXIT_CODES, cli
from plait.runner.plan.plan_models import plan_schema
from plait.runner.state.run_state import THROTTLING
from plait.statuses import (
    RUN_DONE,
    RUN_TRANSITIONS,
    TASK_DONE,
    TASK_TRANSITIONS,
    AttemptStatus,
    RunStatus,
    TaskStatus,
    Transition,
)
from plait.task import DEFAULT_RETRY_ON, NEVER_RETRIED

FOLDER = Path(__file__).parent.parent.parent / "docs" / "reference"
_PART = re.compile(r"^<!-- (?!end )(?P<name>[^>]+) -->\n(?:.*?^<!-- end -->\n)?", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the pages of the reference."""
    return sorted(FOLDER.glob("*.md"))


def filled(text: str) -> str:
    """Return a page with its generated parts as they should be. Raise KeyError for an unknown part."""
    return _PART.sub(lambda part: f"<!-- {part['name']} -->\n\n{PARTS[part['name']]()}\n\n<!-- end -->\n", text)


# The command line, as click knows it.


def commands() -> str:
    """Return one section for each command, in the order of `plait --help`."""
    with click.Context(cli, info_name="plait") as top:
        names = [one for name in cli.list_commands(top) for one in (name, *_beside(name))]
        listed = {name: cli.get_command(top, name) for name in names}
        return "\n\n".join(_command(name, command, top) for name, command in listed.items() if command)


def _beside(home: str) -> list[str]:
    return [name for name, of in BESIDE.items() if of == home]


def _command(name: str, command: click.Command, top: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=top)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    options = [record for option in command.params if (record := option.get_help_record(context))]
    rows = [(f"`{flags}`", text) for flags, text in options]
    parts = [f"## plait {name}", f"```text\n{usage}\n```", _paragraphs(command.help or "")]
    return "\n\n".join([*parts, *([table(["option", ""], rows)] if rows else []), *_epilog(command)])


def _epilog(command: click.Command) -> list[str]:
    return [_paragraphs(command.epilog)] if command.epilog else []


def _paragraphs(text: str) -> str:
    """Return a help text as Markdown; a paragraph behind click's mark for kept line breaks is a block."""
    parts = inspect.cleandoc(text).partition("\f")[0].split("\n\n")
    return "\n\n".join(
        "```text\n" + part.removeprefix("\b\n") + "\n```" if part.startswith("\b") else _escaped(part) for part in parts
    )


def exit_codes() -> str:
    """Return a table with a row for each exit code."""
    return table(["code", "meaning"], [(str(code), meaning) for code, meaning in EXIT_CODES.items()])


# Errors.


def errors() -> str:
    """Return a table with a row for each error that a caller can catch, in the order of `plait.errors`."""
    rows = [
        (f"`{name}`", f"`{error.word}`", str(error.exit_code), str(error.http_status), _capital(about(error)))
        for name, error in vars(import_module("plait.errors")).items()
        if isinstance(error, type) and issubclass(error, PlaitError)
    ]
    return table(["error", "word", "exit code", "HTTP", "when"], rows)


def _capital(text: str) -> str:
    text = text.removeprefix("Raised if ")
    return text[:1].upper() + text[1:]


def kinds_of_errors() -> str:
    """Return a table with a row for each kind of failed turn."""
    texts = docstrings_of_fields(ErrorKind)
    rows = [(f"`{kind}`", texts[kind.name], _retried(kind)) for kind in ErrorKind]
    return table(["kind", "when", "tried again by default"], rows)


def _retried(kind: ErrorKind) -> str:
    if kind in NEVER_RETRIED:
        return "never"
    if kind in THROTTLING:
        return "yes, beside the attempts"
    return "yes" if kind in DEFAULT_RETRY_ON else "no"


# Statuses and events.


def statuses_of_tasks() -> str:
    """Return a table with a row for each status of a task."""
    return _statuses("task status", TaskStatus, next_statuses(TASK_TRANSITIONS, TASK_DONE))


def statuses_of_runs() -> str:
    """Return a table with a row for each stored status of a run."""
    return _statuses("run status", RunStatus, next_statuses(RUN_TRANSITIONS, RUN_DONE))


def next_statuses(
    transitions: Mapping[str, Transition[TaskStatus]] | Mapping[str, Transition[RunStatus]], done: Collection[str]
) -> dict[str, set[str]]:
    """Return the statuses that may follow each status without a person who reopens what has ended."""
    moves = [(str(old), str(after)) for before, after in transitions.values() for old in before]
    statuses = {status for move in moves for status in move}
    return {
        status: {after for old, after in moves if old == status and status not in {*done, after}} for status in statuses
    }


def _statuses(heading: str, kind: type[StrEnum], after: Mapping[str, set[str]]) -> str:
    texts = docstrings_of_fields(kind)
    rows = [
        (f"`{status}`", ", ".join(f"`{new}`" for new in kind if new in after[status]) or "nothing", texts[status.name])
        for status in kind
        if status in after
    ]
    return table([heading, "may become", "meaning"], rows)


def statuses_of_attempts() -> str:
    """Return a table with a row for each status of an attempt."""
    texts = docstrings_of_fields(AttemptStatus)
    return table(["attempt status", "meaning"], [(f"`{status}`", texts[status.name]) for status in AttemptStatus])


def stored_events() -> str:
    """Return a table with a row for each kind of stored event."""
    stored = [(kind, event) for kind, event in events.EVENTS.items() if kind in events.HISTORY]
    rows = [(f"`{kind}`", _run_status(kind), about(event)) for kind, event in stored]
    return table(["stored event", "the run is now", "when"], rows)


def _run_status(kind: str) -> str:
    keeps = {events.RunInterrupted.kind, events.RunParked.kind, events.RunTuned.kind}
    if not kind.startswith("run_") or kind in keeps:  # the run keeps its status
        return ""
    beginnings = {
        events.RunCreated.kind: RunStatus.QUEUED,
        events.RunStarted.kind: RunStatus.RUNNING,
        events.RunResumed.kind: RunStatus.RUNNING,
    }
    return f"`{beginnings.get(kind) or RunStatus(kind.removeprefix('run_'))}`"


def live_events() -> str:
    """Return a table with a row for each event of a live run, in the order of the code."""
    rows = [
        (f"`{kind.__name__}`", _fields_of_event(kind), about(kind) + _missing_run(kind))
        for kind in events.EVENTS.values()
        if kind.shown
    ]
    return table(["event", "further fields", "when"], rows)


def _fields_of_event(kind: type[events.Event]) -> str:
    common = {"at", "run_id", "task_id", "attempt"}
    return ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind) if field.name not in common)


def _missing_run(kind: type[events.Event]) -> str:
    names = {field.name for field in dataclasses.fields(kind)}
    return "" if {"run_id", "task_id"} & names else " No `run_id`."


# Keys of plans, as the JSON Schema describes them.

PLAN_PARTS = {
    "keys of a plan": "",
    "keys of a task": "TaskPart",
    "keys of a check": "CheckPart",
    "keys of a loop": "LoopPart",
    "keys of a vote": "VotePart",
    "keys of a retry policy": "RetryPart",
    "keys of the defaults": "DefaultsPart",
    "keys of an input of files": "FilesInput",
    "keys of an input of rows": "RowsInput",
    "keys of a needed input": "RequiredInput",
    "keys of growth": "GrowthPart",
    "keys of a goal": "OrchestratePart",
    "keys of a workflow's step": "StepPart",
    "keys of a chain": "ChainPart",
    "keys of a step": "FollowUpPart",
    "keys of an MCP server": "McpServerPart",
    "keys of limits": "RatePart",
    "keys of a group of hosts reached with OpenSSH": "SSHHostsPart",
    "keys of a group of hosts on a Dask cluster": "DaskHostsPart",
    "keys of a host": "HostPart",
    "keys of a price": "PricePart",
    "keys of a target of notices": "NotifyPart",
}
"""The definition of the schema behind each part; empty for the schema itself."""


def keys(definition: str) -> str:
    """Return a table with a row for each key of a definition of the schema."""
    schema = _plan_schema()
    return _keys(schema["$defs"][definition] if definition else schema)


@cache
def _plan_schema() -> dict[str, Any]:
    return plan_schema()


def kinds_of_backends() -> str:
    """Return one section for each kind of backend, with a row for each key."""
    specs = {name: spec for name, spec in plan_schema()["$defs"].items() if name.endswith("Spec")}
    by_kind = {spec["properties"].pop("kind")["const"]: spec for spec in specs.values()}
    sections = [(f"### kind: {kind}", by_kind[kind]["description"], _keys(by_kind[kind])) for kind in sorted(by_kind)]
    return "\n\n".join("\n\n".join(section) for section in sections)


def _keys(definition: dict[str, Any]) -> str:
    # A part with a short form is one of several types; the keys are those of the mapping.
    definition = next((option for option in definition.get("anyOf", ()) if "properties" in option), definition)
    needed = set(definition.get("required", ()))
    rows = [
        (f"`{key}`", _type(value), _default_of_key(value, key in needed), _description(key, value))
        for key, value in definition["properties"].items()
    ]
    return table(["key", "type", "default", "meaning"], rows) if rows else "No key besides `kind`."


def _description(key: str, value: dict[str, Any]) -> str:
    if "description" not in value:
        raise ValueError(f"the key {key!r} has no description in the schema of plans; write one in the model")
    return str(value["description"])


def _type(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(option) for option in value["anyOf"] if option.get("type") != "null"))
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    if "$ref" in value:
        return "mapping"
    names = {"object": "mapping", "string": "text", "null": "null", "boolean": "true or false"}
    return names.get(value.get("type", ""), str(value.get("type", "anything")))


def _default_of_key(value: dict[str, Any], needed: bool) -> str:
    if needed:
        return "needed"
    default = value.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


# Public names, with their docstrings.

HOMES = ("plait.results", "plait.workflows", "plait.orchestration", "plait.hosts", "plait.testing")
"""Modules whose further names have an entry each."""
AUTHORS = ("plait.backends", "plait.persistence")
"""Packages whose further names are for authors of backends and stores, who read the docstrings in the code."""
TABLED = ("Task", "Retry", "RunResult", "TaskResult")
"""Classes whose fields have a table of their own."""
CALLED = ("ParallelRunner", "Run", "Runs")
"""Classes whose calls have a table of their own."""
OF_BACKENDS = frozenset({"check", "aclose"})
"""What the user of a backend that comes with plait calls; the runner calls the rest, which `Backend` describes."""


def names(package: str, *, without: Collection[str] = ()) -> str:
    """Return one entry for each name in the `__all__` of `package`, classes before functions before values.

    Left out are modules, errors, which have a page of their own, and the names `without`. Raise ValueError if none is
    left.
    """
    module = import_module(package)
    values = {name: getattr(module, name) for name in set(module.__all__) - set(without)}
    errors_page = {name for name, value in values.items() if inspect.isclass(value) and issubclass(value, Exception)}
    listed = [name for name in values if not inspect.ismodule(values[name]) and name not in errors_page]
    if not listed:
        raise ValueError(f"{package} has no further names: remove the heading and the part")
    listed.sort(key=lambda name: (_order(values[name]), name.lower()))
    return "\n\n".join(_entry(package, name, values[name]) for name in listed)


def overview(package: str, *, without: Collection[str]) -> str:
    """Return a table with a row for each further name of `package`."""
    module = import_module(package)
    rows = [
        (f"`{name}`", _paragraph(_text_of_value(name, value)) if _order(value) == 2 else about(value))
        for name in sorted(set(module.__all__) - set(without), key=str.lower)
        if not inspect.ismodule(value := getattr(module, name))
    ]
    return table(["name", "what it is"], rows)


def _order(value: object) -> int:
    if inspect.isclass(value):
        return 0
    return 1 if inspect.isroutine(value) else 2


def _entry(package: str, name: str, value: object) -> str:
    heading = f"### {package}.{name}"
    if inspect.isclass(value):
        return "\n\n".join([heading, docstring(value), *_members(value)])
    if inspect.isroutine(value):
        return "\n\n".join([heading, f"`{name}({', '.join(_parameters(value))})`", docstring(value)])
    return f"{heading}\n\n{_escaped(_text_of_value(name, value))}"


def _members(kind: type[Any]) -> list[str]:
    """Return what an entry says of the members of a class: its fields in a table, its calls one by one.

    Left out are calls that a base class has already, and of a backend all that its user neither gives nor calls.
    """
    texts = {name: text for name, text in docstrings_of_fields(kind).items() if text}
    is_backend = hasattr(kind, "new_session_id") and not getattr(kind, "_is_protocol", False)
    if is_backend:
        given = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set[str]()
        texts = {name: text for name, text in texts.items() if name in given}
    shown: list[str] = []
    if texts and kind.__name__ not in TABLED:
        defaults = {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
        rows = [
            (f"`{name}`", _default(defaults[name]) if name in defaults else "", text) for name, text in texts.items()
        ]
        shown.append(table(["field", "default", "meaning"], rows))
    for name, value in vars(kind).items():
        has_it = any(hasattr(base, name) for base in kind.__bases__)
        is_hook = name not in OF_BACKENDS if is_backend else has_it
        if not name.startswith("_") and inspect.isfunction(value) and inspect.getdoc(value) and not is_hook:
            shown.append(f"**`{name}({', '.join(_parameters(value))})`**\n\n{docstring(value)}")
    return shown


def _text_of_value(name: str, value: object) -> str:
    """Return the docstring under the assignment of a value. Raise ValueError if there is none."""
    for home, module in sorted(sys.modules.items()):
        if not home.startswith("plait.") or vars(module).get(name) is not value:
            continue
        source = inspect.getsource(module)
        # Most modules that have the value import it; to parse them all takes seconds.
        if not re.search(rf"^{name}\b", source, re.MULTILINE):
            continue
        for node, after in pairwise(ast.parse(source).body):
            targets: list[ast.expr] = [node.target] if isinstance(node, ast.AnnAssign) else []
            targets = node.targets if isinstance(node, ast.Assign) else targets
            if any(isinstance(target, ast.Name) and target.id == name for target in targets) and (text := _text(after)):
                return text
    raise ValueError(f"{name} has no docstring under its assignment, so the reference would show that of its type")


def calls(name: str) -> str:
    """Return a table with a row for each public method and property of the class `name` of plait."""
    rows: list[tuple[str, str]] = []
    members: dict[str, Any] = dict(vars(cast("type", getattr(plait, name))))
    for member, value in members.items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            rows.append((f"`{member}`", sentence(about(value))))
        elif inspect.isfunction(value):
            rows.append((f"`{member}()`", sentence(about(value))))
    return table(["call", "meaning"], rows)


def _parameters(function: Any) -> list[str]:
    return [
        parameter.name
        if parameter.default is inspect.Parameter.empty
        else f"{parameter.name}={_repr(parameter.default)}"
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]


def _repr(value: object) -> str:
    text = repr(value.value) if isinstance(value, enum.Enum) else repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def fields(name: str) -> str:
    """Return a table with a row for each field and property of the dataclass `name` of plait."""
    kind: Any = getattr(plait, name)
    known = {field.name: field for field in dataclasses.fields(kind)}
    rows = [
        (f"`{member}`", _default(known[member]) if member in known else "", text)
        for member, text in docstrings_of_fields(kind).items()
    ]
    return table(["field", "default", "meaning"], rows)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        made: Any = field.default_factory()
        return f"`{_repr(made)}`" if isinstance(made, str | int | float | tuple | list | dict) else ""
    if field.default is dataclasses.MISSING:
        return ""
    value: Any = field.default
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and value == type(value)():
        return f"`{type(value).__name__}()`"
    if isinstance(value, frozenset):
        return ", ".join(f"`{item}`" for item in sorted(cast("frozenset[str]", value)))
    return f"`{value.value}`" if isinstance(value, enum.Enum) else f"`{_repr(value)}`"


# Docstrings and Markdown.


def docstring(value: object) -> str:
    """Return the docstring of `value`. Raise ValueError if it has none."""
    text = inspect.getdoc(value)
    if not text:
        raise ValueError(f"{value!r} has no docstring, so its entry in the reference would be empty")
    return _escaped(text)


def about(value: object) -> str:
    """Return the first paragraph of the docstring of `value` as one line. Raise ValueError without a docstring."""
    text = inspect.getdoc(value)
    if not text:
        raise ValueError(f"{value!r} has no docstring, so its row in the reference would be empty")
    return _paragraph(text)


def sentence(text: str) -> str:
    """Return the first sentence of `text`."""
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", text, maxsplit=1)[0]


def docstrings_of_fields(kind: type) -> dict[str, str]:
    """Return the first paragraph under each field, member or property of `kind` and its bases, in their order."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("plait."):
            texts |= _own_fields(base)
    return texts


@cache
def _own_fields(kind: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    texts: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        name = _name(node)
        if name and not name.startswith("_"):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else _text(after)
            texts[name] = _paragraph(text) if text else ""
    return texts


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    is_property = isinstance(node, ast.FunctionDef) and any(
        isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list
    )
    return node.name if is_property and isinstance(node, ast.FunctionDef) else ""


def _text(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return inspect.cleandoc(value.value) if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. Raise ValueError for a table without rows."""
    lines = [_row([_escaped(" ".join(text.split())).replace("|", r"\|") for text in row]) for row in rows]
    if not lines:
        raise ValueError(f"the table {' | '.join(header)} has no rows")
    return "\n".join([_row(header), "|" + "---|" * len(header), *lines])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Return `text` with everything but code escaped that would be markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"(?<!\n)(?<!^)([*])", r"\\\1", part.replace("<", "&lt;"))
        for part in parts
    )


_ELSEWHERE: frozenset[str] = frozenset({*plait.__all__, *import_module("plait.errors").__all__})
PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "exit codes": exit_codes,
    "errors": errors,
    "kinds of errors": kinds_of_errors,
    "statuses of tasks": statuses_of_tasks,
    "statuses of runs": statuses_of_runs,
    "statuses of attempts": statuses_of_attempts,
    "stored events": stored_events,
    "events of a live run": live_events,
    "kinds of backends": kinds_of_backends,
    "names of plait": partial(names, "plait"),
    **{name: partial(keys, definition) for name, definition in PLAN_PARTS.items()},
    **{f"fields of plait.{name}": partial(fields, name) for name in TABLED},
    **{f"calls of plait.{name}": partial(calls, name) for name in CALLED},
    **{f"further names of {home}": partial(names, home, without=_ELSEWHERE) for home in HOMES},
    **{f"further names of {home}": partial(overview, home, without=_ELSEWHERE) for home in AUTHORS},
}
"""What makes each part."""


if __name__ == "__main__":
    schema = json.dumps(plan_schema(), indent=2, ensure_ascii=False) + "\n"
    made = {FOLDER.parent / "plan.schema.json": schema, **{page: filled(page.read_text("utf-8")) for page in pages()}}
    for path, text in made.items():
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(FOLDER.parent.parent)}")
