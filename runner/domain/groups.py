"""The parts of a `for_each` task as a group. Pure.

A part has the id `NAME.NUMBER` and an item, whether a plan file or a running task made it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from plait.json_form import JsonInput

_PART = re.compile(r"(.+)\.(\d+)")
_T = TypeVar("_T")


def group_of(task_id: str, item: JsonInput) -> str | None:
    """Return the name of the group of the task with this id and item; None for a task that is no part."""
    found = _PART.fullmatch(task_id)
    return None if found is None or item is None else found[1]


def part_number(task_id: str) -> int:
    """Return the number of a part, so that part 10 comes after part 2; 0 for a task that is no part."""
    found = _PART.fullmatch(task_id)
    return 0 if found is None else int(found[2])


def groups_of(tasks: Iterable[tuple[str, JsonInput, _T]], fewest: int) -> Mapping[str, list[_T]]:
    """Return the groups with at least `fewest` parts by name, from the id, the item and a value of each task. The
    values are in the order of the numbers of their parts.
    """
    found: dict[str, list[tuple[int, _T]]] = {}
    for task_id, item, value in tasks:
        name = group_of(task_id, item)
        if name is not None:
            found.setdefault(name, []).append((part_number(task_id), value))
    large = {name: parts for name, parts in found.items() if len(parts) >= fewest}
    return {name: [value for _, value in sorted(parts, key=lambda one: one[0])] for name, parts in large.items()}
