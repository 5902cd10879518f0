"""`for_each` over an input: a task of the file becomes a family of tasks, one for each element of a list.

`summary` over five documents becomes `summary.1` to `summary.5`, a family. A task with the same `for_each` that depends
on `summary` is paired with it element by element; any other dependent depends on the whole family. In prompts, the name
`summary` stands for the result of the partner, or for the list of all results in order.

A `for_each` that names a task is left to the run, which iterates over the future result of the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.json_form import JsonValue
from plait.runner.plan.plan_models import TaskPart

MAX_EDGES = 2_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """The values of a generated task that depend on its place in the family."""

    id: str
    depends_on: tuple[str, ...]
    continues: str | None
    aliases: Mapping[str, str | Sequence[str]]
    item: JsonValue
    first: bool
    """True for the first member of a family."""
    for_each: str | None = None


class Families:
    """The tasks of the run generated from each task of the file.

    `parts` have unique ids and known dependencies; `items` holds the elements of each input named by a `for_each`.
    """

    def __init__(self, parts: Sequence[TaskPart], items: Mapping[str, Sequence[JsonValue]]) -> None:
        self._parts = {part.id: part for part in parts}
        self._items = items
        self._ids = {part.id: self._member_ids(part) for part in parts}
        self._above = _families_above(self._parts, items)

    def size(self) -> tuple[int, int]:
        """Return the number of tasks and the number of dependencies to be generated."""
        tasks = sum(len(ids) for ids in self._ids.values())
        edges = sum(
            len(self._ids[part.id]) * (1 if self._pairs(part, name) else len(self._ids[name]))
            for part in self._parts.values()
            for name in part.depends_on
        )
        return tasks, edges

    def members(self, part: TaskPart) -> Iterator[Member]:
        """Yield the tasks generated from `part`: one, or one for each element."""
        elements: Sequence[JsonValue] = [None] if self._is_single(part) else self._items[part.for_each or ""]
        for place, element in enumerate(elements):
            yield Member(
                id=self._ids[part.id][place],
                depends_on=tuple(one for name in part.depends_on for one in self._partners(part, name, place)),
                continues=None if part.continues is None else self._partners(part, part.continues, place)[0],
                aliases={name: self._alias(part, name, place) for name in sorted(self._above[part.id])},
                item=element,
                first=place == 0,
                for_each=part.for_each if self._is_single(part) else None,
            )

    def splits(self, part: TaskPart) -> bool:
        """Return whether `continues` names a family without a single matching partner."""
        if part.continues is None or self._is_single(self._parts[part.continues]):
            return False
        return not self._pairs(part, part.continues)

    def _is_single(self, part: TaskPart) -> bool:
        return part.for_each not in self._items

    def _member_ids(self, part: TaskPart) -> tuple[str, ...]:
        if self._is_single(part):
            return (part.id,)
        return tuple(f"{part.id}.{number}" for number in range(1, len(self._items[part.for_each or ""]) + 1))

    def _pairs(self, part: TaskPart, name: str) -> bool:
        return part.for_each is not None and self._parts[name].for_each == part.for_each

    def _partners(self, part: TaskPart, name: str, place: int) -> tuple[str, ...]:
        return (self._ids[name][place],) if self._pairs(part, name) else self._ids[name]

    def _alias(self, part: TaskPart, name: str, place: int) -> str | tuple[str, ...]:
        return self._ids[name][place] if self._pairs(part, name) else self._ids[name]


def _families_above(parts: Mapping[str, TaskPart], items: Mapping[str, object]) -> dict[str, set[str]]:
    """Return, for each task of the file, the families upstream. For tasks in a cycle the sets are incomplete."""
    above: dict[str, set[str]] = {name: set() for name in parts}
    needs = {name: [*part.depends_on, *([part.continues] if part.continues else [])] for name, part in parts.items()}
    waiting = {name: len(needed) for name, needed in needs.items()}
    dependents: dict[str, list[str]] = {name: [] for name in parts}
    for name, needed in needs.items():
        for earlier in needed:
            dependents[earlier].append(name)
    ready = [name for name, count in waiting.items() if not count]
    for earlier in ready:
        own = {earlier} if parts[earlier].for_each in items else set[str]()
        for name in dependents[earlier]:
            above[name] |= above[earlier] | own
            waiting[name] -= 1
            if not waiting[name]:
                ready.append(name)
    return above
