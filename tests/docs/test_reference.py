"""The statuses, failure modes, errors and exit codes of the pages are those of the code; design.md names real files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait import FailureMode
from plait.errors import ErrorKind
from plait.events import HISTORY
from plait.runner.cli import command_exits
from plait.statuses import RUN_DONE, RUN_TRANSITIONS, TASK_DONE, TASK_TRANSITIONS, AttemptStatus, Transition
from plait.task import DEFAULT_RETRY_ON
from tests.docs.extensions import load_extension

ROOT = Path(__file__).parent.parent.parent
STATUSES = (ROOT / "docs" / "reference" / "events-and-statuses.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
RECOVERY = (ROOT / "docs" / "guides" / "recovery.md").read_text(encoding="utf-8")


@pytest.fixture
def error_reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_extension("error_reference", monkeypatch)


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
    event_reference: Any, kind: str, transitions: Mapping[str, Transition[Any]], done: frozenset[Any]
) -> None:
    assert f"<!-- statuses of {kind}s -->" in STATUSES
    listed = table(getattr(event_reference, f"{kind}_statuses")(), f"{kind} status")
    written = {(old, new) for old, cells in listed.items() for new in re.findall(r"`(\w+)`", cells[0])}
    moves = {(old, move.after) for move in transitions.values() for old in move.before - done}
    assert written == {(old, new) for old, new in moves if old != new}
    assert [status for status, cells in listed.items() if not cells[1]] == []


def test_every_status_of_an_attempt_is_explained(event_reference: Any) -> None:
    assert "<!-- statuses of attempts -->" in STATUSES
    listed = table(event_reference.attempt_statuses(), "attempt status")
    assert set(listed) == set(AttemptStatus)
    assert [status for status, cells in listed.items() if not cells[0]] == []


def test_every_stored_event_is_explained(event_reference: Any) -> None:
    assert "<!-- stored events -->" in STATUSES
    listed = table(event_reference.stored_events(), "stored event")
    assert set(listed) == set(HISTORY)
    assert [kind for kind, cells in listed.items() if not cells[1]] == []


def test_the_failure_modes_are_those_of_the_code() -> None:
    assert set(table(RECOVERY, "failure mode")) == set(FailureMode)


def test_each_error_has_a_word_an_exit_code_and_a_status(error_reference: Any) -> None:
    assert "<!-- errors -->" in ERRORS
    listed = table(error_reference.errors(), "error")
    assert {"PlaitError", "BackendError", "StoreError", "PlanError"} < listed.keys()
    assert listed["RunNotFound"][:3] == ["`run_not_found`", "2", "404"]
    assert {int(cells[1]) for cells in listed.values()} <= command_exits.EXIT_CODES.keys()
    over_http = (ROOT / "docs" / "guides" / "http.md").read_text(encoding="utf-8")
    rows = {code.strip(): kinds for code, kinds in re.findall(r"^\| (\d{3}) \| (.*) \|$", over_http, re.MULTILINE)}
    assert [error for error, cells in listed.items() if cells[0] not in rows[cells[2]]] == []


def test_the_kinds_of_errors_are_those_of_the_code(error_reference: Any) -> None:
    assert "<!-- kinds of errors -->" in ERRORS
    listed = table(error_reference.kinds(), "kind")
    assert set(listed) == set(ErrorKind)
    assert [kind for kind, cells in listed.items() if not cells[0]] == []
    assert {kind for kind, cells in listed.items() if cells[1].startswith("yes")} == DEFAULT_RETRY_ON


def test_the_exit_codes_are_those_of_the_code() -> None:
    codes = {value for name, value in vars(command_exits).items() if name.isupper() and isinstance(value, int)}
    assert set(command_exits.EXIT_CODES) == codes


@pytest.mark.parametrize("page", ["docs/explanation/design.md", "docs/explanation/reliability.md", "CONTRIBUTING.md"])
def test_the_files_that_pages_for_contributors_name_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|runner|backends|persistence|tests|docs|examples|\.ci)/[\w./]*)`", text)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
