"""The generated tables of the reference name every call, event and field that there is, each with its meaning."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import plait
from plait import events
from tests.docs.extensions import load_extension

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"

TOLD = [one for one in events.EVENTS.values() if one.shown]


@pytest.fixture
def python_reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_extension("python_reference", monkeypatch)


def rows(table: str) -> dict[str, list[str]]:
    """The rows of a table: the name in the first cell to the other cells."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {found[1]: row[1:] for row in cells if (found := re.search(r"`(\w+)", row[0]))}


def test_every_event_is_listed_with_its_fields(event_reference: Any) -> None:
    common = {field.name for field in fields(events.TaskEvent)} | {"run_id"}
    there = {kind.__name__: [one.name for one in fields(kind) if one.name not in common] for kind in TOLD}
    listed = rows(event_reference.live_events())
    assert {name: re.findall(r"`(\w+)`", cells[0]) for name, cells in listed.items()} == there
    without = {kind.__name__ for kind in TOLD if not {"run_id", "task_id"} & {f.name for f in fields(kind)}}
    assert {name for name, cells in listed.items() if "No `run_id`" in cells[1]} == without
    assert "<!-- events of a live run -->" in (REFERENCE / "events-and-statuses.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["Task", "Retry", "RunResult", "TaskResult"])
def test_every_field_is_listed_with_its_meaning(python_reference: Any, kind: str) -> None:
    assert f"<!-- fields of plait.{kind} -->" in (REFERENCE / "python-api.md").read_text(encoding="utf-8")
    listed = rows(python_reference.fields(f"plait.{kind}"))
    assert {field.name for field in fields(getattr(plait, kind))} <= listed.keys()
    assert [name for name, cells in listed.items() if not cells[-1]] == []


@pytest.mark.parametrize("kind", ["ParallelRunner", "Run", "Runs"])
def test_every_call_is_listed_with_its_meaning(python_reference: Any, kind: str) -> None:
    assert f"<!-- calls of plait.{kind} -->" in (REFERENCE / "python-api.md").read_text(encoding="utf-8")
    listed = rows(python_reference.calls(f"plait.{kind}"))
    assert listed.keys() == {name for name in vars(getattr(plait, kind)) if not name.startswith("_")}
    assert [name for name, cells in listed.items() if not cells[-1]] == []
