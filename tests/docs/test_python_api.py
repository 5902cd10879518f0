"""The reference lists the events, fields and errors that there are."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from plait.runner import Retry, RunResult, Task, TaskResult
from plait.runner.domain import events

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"
PAGE = "".join((REFERENCE / name).read_text(encoding="utf-8") for name in ("python-api.md", "events-and-statuses.md"))


def rows(heading: str) -> dict[str, list[str]]:
    """The table whose first column is called `heading`: each name in a row's first cell to its other cells."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: row[1:] for row in cells for name in re.findall(r"`(\w+)`", row[0])}


def leaves(base: type) -> set[type]:
    below = base.__subclasses__()
    return set().union(*map(leaves, below)) if below else {base}


def test_every_event_is_listed_with_its_fields() -> None:
    common = {field.name for field in fields(events.TaskEvent)} | {"run_id"}
    there = {
        kind.__name__: [one.name for one in fields(kind) if one.name not in common] for kind in leaves(events.Event)
    }
    listed = rows("event")
    assert {name: re.findall(r"`(\w+)`", cells[0]) for name, cells in listed.items()} == there
    without = {
        kind.__name__ for kind in leaves(events.Event) if not {"run_id", "task_id"} & {f.name for f in fields(kind)}
    }
    assert {name for name, cells in listed.items() if "No `run_id`" in cells[1]} == without


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("field", Task),
        ("field of `Retry`", Retry),
        ("field of `RunResult`", RunResult),
        ("field of `TaskResult`", TaskResult),
    ],
)
def test_every_field_is_listed(heading: str, kind: type) -> None:
    assert rows(heading).keys() == {field.name for field in fields(kind)}
