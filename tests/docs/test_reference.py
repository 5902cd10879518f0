"""The statuses, failure modes, errors and exit codes of the pages are those of the code; design.md names real files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import ModuleType

import pytest

from plait import backends, persistence, runner
from plait.runner import FailureMode, RunStatus, TaskStatus
from plait.runner.cli import exits
from plait.runner.domain.status import RUN_TRANSITIONS, TASK_TRANSITIONS

ROOT = Path(__file__).parent.parent.parent
PAGE = "".join(
    (ROOT / "docs" / page).read_text(encoding="utf-8")
    for page in ("reference/events-and-statuses.md", "guides/recovery.md", "reference/cli.md")
)


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first column is called `heading`: first cell to the others."""
    start = PAGE.index(f"| {heading} |")
    lines = PAGE[start:].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].split()[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize(
    ("heading", "transitions"), [("task status", TASK_TRANSITIONS), ("run status", RUN_TRANSITIONS)]
)
def test_the_transitions_are_those_of_the_code(heading: str, transitions: Mapping[StrEnum, frozenset[StrEnum]]) -> None:
    written = {status: set(re.findall(r"`(\w+)`", cells[0])) for status, cells in table(heading).items()}
    assert written == {status: set(after) for status, after in transitions.items()}


def test_every_status_is_explained() -> None:
    for status in [*TaskStatus, *RunStatus]:
        assert f"`{status}`" in PAGE


def test_the_failure_modes_are_those_of_the_code() -> None:
    assert set(table("failure mode")) == set(FailureMode)


@pytest.mark.parametrize("package", [runner, backends, persistence], ids=lambda package: package.__name__)
def test_the_errors_of_each_package_are_those_of_the_code(package: ModuleType) -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    name = package.__name__.removeprefix("plait.")
    rows = re.findall(rf"^\| (`.*`) \| `{name}` \|", page, re.MULTILINE)
    kept = {
        name
        for name in package.__all__
        if isinstance(one := getattr(package, name), type) and issubclass(one, Exception)
    }
    assert set(re.findall(r"\w+", " ".join(rows))) == kept


def test_the_exit_codes_are_those_of_the_code() -> None:
    codes = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert set(exits.EXIT_CODES) == codes


@pytest.mark.parametrize("page", ["docs/explanation/design.md", "docs/explanation/reliability.md", "CONTRIBUTING.md"])
def test_the_files_that_pages_for_contributors_name_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:runner|backends|persistence|tests|docs|examples|\.ci)/[\w./]*)`", text)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
