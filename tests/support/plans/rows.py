"""Plans whose input `people` is the rows of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.runner.plan import PlanError, PlanProblem, parse_plan

TASKS = 'tasks:\n  - {id: t, for_each: people, prompt: "{{ item }}"}\n'


def rows(folder: Path, name: str, data: str | bytes, *, more: str = "") -> object:
    """What the input is when file `name` in `folder` holds `data`."""
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return parse_plan(f"inputs: {{people: {{rows: {name}{more}}}}}\n{TASKS}", folder=folder).dag.inputs["people"]


def mistakes(folder: Path, name: str, data: str | bytes, *, more: str = "") -> list[PlanProblem]:
    """What is said of the plan when file `name` in `folder` holds `data`."""
    with pytest.raises(PlanError) as caught:
        rows(folder, name, data, more=more)
    return list(caught.value.problems)
