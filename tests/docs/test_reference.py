"""The reference says what the code does: commands, keys, errors, statuses, events, names. Pages name real files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click
import pytest

import plait
from plait import (
    ErrorKind,
    FailureMode,
    backends,
    errors,
    events,
    hosts,
    orchestration,
    persistence,
    results,
    workflows,
)
from plait.runner.cli import command_line
from plait.runner.cli.command_line import BESIDE, cli
from plait.runner.plan.plan_models import plan_schema
from plait.statuses import RUN_DONE, RUN_TRANSITIONS, TASK_DONE, TASK_TRANSITIONS, AttemptStatus, Transition
from plait.task import DEFAULT_RETRY_ON
from tests.docs import reference

ROOT = Path(__file__).parent.parent.parent
RECOVERY = (ROOT / "docs" / "guides" / "recovery.md").read_text(encoding="utf-8")


def table(text: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first column is called `heading`: first cell to the others."""
    start = text.index(f"| {heading} |")
    lines = text[start:].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].split()[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize(
    ("kind", "transitions", "done"),
    [("task", TASK_TRANSITIONS, TASK_DONE), ("run", RUN_TRANSITIONS, RUN_DONE)],
    ids=["task", "run"],
)
def test_the_transitions_are_those_of_the_code(
    kind: str, transitions: Mapping[str, Transition[Any]], done: frozenset[Any]
) -> None:
    listed = table(getattr(reference, f"statuses_of_{kind}s")(), f"{kind} status")
    written = {(old, new) for old, cells in listed.items() for new in re.findall(r"`(\w+)`", cells[0])}
    moves = {(old, move.after) for move in transitions.values() for old in move.before - done}
    assert written == {(old, new) for old, new in moves if old != new}
    assert [status for status, cells in listed.items() if not cells[1]] == []


def test_every_status_of_an_attempt_is_explained() -> None:
    listed = table(reference.statuses_of_attempts(), "attempt status")
    assert set(listed) == set(AttemptStatus)
    assert [status for status, cells in listed.items() if not cells[0]] == []


def test_every_stored_event_is_explained() -> None:
    listed = table(reference.stored_events(), "stored event")
    assert set(listed) == set(events.HISTORY)
    assert [kind for kind, cells in listed.items() if not cells[1]] == []


def test_the_failure_modes_are_those_of_the_code() -> None:
    assert set(table(RECOVERY, "failure mode")) == set(FailureMode)


def test_each_error_has_a_word_an_exit_code_and_a_status() -> None:
    listed = table(reference.errors(), "error")
    assert {"PlaitError", "BackendError", "StoreError", "PlanError"} < listed.keys()
    assert listed["RunNotFound"][:3] == ["`run_not_found`", "2", "404"]
    assert {int(cells[1]) for cells in listed.values()} <= command_line.EXIT_CODES.keys()
    over_http = (ROOT / "docs" / "guides" / "http.md").read_text(encoding="utf-8")
    rows = {code.strip(): kinds for code, kinds in re.findall(r"^\| (\d{3}) \| (.*) \|$", over_http, re.MULTILINE)}
    assert [error for error, cells in listed.items() if cells[0] not in rows[cells[2]]] == []


def test_the_kinds_of_errors_are_those_of_the_code() -> None:
    listed = table(reference.kinds_of_errors(), "kind")
    assert set(listed) == set(ErrorKind)
    assert [kind for kind, cells in listed.items() if not cells[0]] == []
    assert {kind for kind, cells in listed.items() if cells[1].startswith("yes")} == DEFAULT_RETRY_ON


def test_the_exit_codes_are_those_of_the_code() -> None:
    codes = {value for name, value in vars(command_line).items() if name.isupper() and isinstance(value, int)}
    assert set(command_line.EXIT_CODES) == codes


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.name)
def test_the_page_is_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert reference.filled(text) == text, "run `make reference`"


def test_every_part_is_in_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in reference.pages())
    assert [name for name in reference.PARTS if f"<!-- {name} -->\n" not in text] == []
    with pytest.raises(KeyError, match="nothing"):
        reference.filled("<!-- nothing -->\n")


NAMES = [*cli.list_commands(click.Context(cli)), *BESIDE]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_command_is_in_the_reference(name: str) -> None:
    section = reference.commands().partition(f"## plait {name}\n")[2].partition("\n## ")[0]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.help is not None
    shown = [option for option in command.params if not getattr(option, "hidden", False)]
    flags = [flag for option in shown for flag in option.opts if flag.startswith("-")]
    assert [flag for flag in flags if flag not in section] == []


def test_the_commands_that_users_know_are_among_them() -> None:
    assert {"run", "resume", "show", "answer", "serve"} <= set(NAMES)


def test_every_key_of_a_plan_is_in_the_reference() -> None:
    schema = plan_schema()
    assert set(reference.PLAN_PARTS.values()) == {""} | {name for name in schema["$defs"] if not name.endswith("Spec")}
    for part in reference.PLAN_PARTS.values():
        shape = schema["$defs"][part] if part else schema
        wanted = next(option for option in (shape, *shape.get("anyOf", ())) if "properties" in option)["properties"]
        text = reference.keys(part)
        assert [key for key in wanted if f"| `{key}` |" not in text] == []


def test_every_key_of_every_kind_of_backend_is_in_the_reference() -> None:
    text = reference.kinds_of_backends()
    for spec in (definition for name, definition in plan_schema()["$defs"].items() if name.endswith("Spec")):
        section = text.partition(f"### kind: {spec['properties']['kind']['const']}\n")[2].partition("\n### ")[0]
        assert [key for key in spec["properties"] if key != "kind" and f"| `{key}` |" not in section] == []


PACKAGES = (plait, results, workflows, orchestration, hosts, backends, persistence)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package: ModuleType) -> None:
    text = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
    elsewhere: set[str] = {*(plait.__all__ if package is not plait else ()), *errors.__all__, "events"}
    entries = {f"### {package.__name__}.{name}\n": name for name in package.__all__ if name not in elsewhere}
    assert [name for entry, name in entries.items() if entry not in text and f"| `{name}` |" not in text] == []


def test_an_entry_of_a_backend_shows_what_its_user_gives_and_calls() -> None:
    text = reference.names("plait")
    claude = text.partition("### plait.ClaudeCodeBackend\n")[2].partition("\n### ")[0]
    assert "| `allowed_tools` |" in claude and "| `turn_timeout` |" in claude
    assert "takes_schema" not in claude and "| `billing` |" not in claude
    assert "**`check()`**" in text.partition("### plait.LocalBackend\n")[2].partition("\n### ")[0]
    protocol = text.partition("### plait.Backend\n")[2].partition("\n### ")[0]
    assert "**`open(request)`**" in protocol and "**`new_session_id()`**" in protocol


def test_a_value_is_shown_with_its_own_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reference.overview("plait.backends", without=())
    assert "| `JsonValue` | " in text
    monkeypatch.setattr(plait.backends, "__all__", ["UNEXPLAINED"])
    monkeypatch.setattr(plait.backends, "UNEXPLAINED", 7, raising=False)
    with pytest.raises(ValueError, match="UNEXPLAINED has no docstring under its assignment"):
        reference.names("plait.backends")


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a table: the name in the first cell to the other cells."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {name[1]: row[1:] for row in cells if (name := re.search(r"`(\w+)", row[0]))}


def test_every_event_is_listed_with_its_fields() -> None:
    shown = [event for event in events.EVENTS.values() if event.shown]
    common = {field.name for field in fields(events.TaskEvent)} | {"run_id"}
    there = {kind.__name__: [field.name for field in fields(kind) if field.name not in common] for kind in shown}
    listed = rows(reference.live_events())
    assert {name: re.findall(r"`(\w+)`", cells[0]) for name, cells in listed.items()} == there
    without = {kind.__name__ for kind in shown if not {"run_id", "task_id"} & {field.name for field in fields(kind)}}
    assert {name for name, cells in listed.items() if "No `run_id`" in cells[1]} == without


@pytest.mark.parametrize("kind", reference.TABLED)
def test_every_field_is_listed_with_its_meaning(kind: str) -> None:
    listed = rows(reference.fields(kind))
    assert {field.name for field in fields(getattr(plait, kind))} <= listed.keys()
    assert [name for name, cells in listed.items() if not cells[-1]] == []


@pytest.mark.parametrize("kind", reference.CALLED)
def test_every_call_is_listed_with_its_meaning(kind: str) -> None:
    listed = rows(reference.calls(kind))
    assert listed.keys() == {name for name in cast("type", getattr(plait, kind)).__dict__ if not name.startswith("_")}
    assert [name for name, cells in listed.items() if not cells[-1]] == []


@pytest.mark.parametrize("page", ["docs/explanation/design.md", "docs/explanation/reliability.md", "CONTRIBUTING.md"])
def test_the_files_that_pages_for_contributors_name_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|runner|backends|persistence|tests|docs|examples|\.ci)/[\w./]*)`", text)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
