"""Which tasks of a graph wait for which others, directly or not: for many pairs at once. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Neighbours: TypeAlias = Sequence[Sequence[int]]
"""For each task, by position, the positions of the tasks that it waits for, or of those that wait for it."""

_NEAR = 100
"""Tasks and dependencies that are looked at upwards, before one task is looked for from another on downwards."""


def not_upstream(
    dependencies: Neighbours, dependents: Neighbours, pairs: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Those of `pairs` of positions whose second task does not wait, directly or through others, for the first.

    Most are near each other, so it is looked for upwards, where there is little. Of the others all those with the
    same first task are looked for at once, from there, and nothing is kept from one to the next.
    """
    apart: set[tuple[int, int]] = set()
    far: dict[int, set[int]] = {}
    for target, position in pairs:
        near = _is_near_above(dependencies, target, position)
        if near is None:
            far.setdefault(target, set()).add(position)
        elif not near:
            apart.add((target, position))
    for target, positions in far.items():
        apart |= {(target, position) for position in _not_reached(dependents, target, positions)}
    return apart


def _is_near_above(dependencies: Neighbours, target: int, position: int) -> bool | None:
    """Whether `target` is upstream of `position`; None if that is not known after `_NEAR` steps."""
    steps, seen, waiting = 0, {position}, deque([position])
    while waiting:
        needed = dependencies[waiting.popleft()]
        if target in needed:
            return True
        steps += 1 + len(needed)
        if steps > _NEAR:
            return None
        waiting += [earlier for earlier in needed if earlier not in seen]
        seen.update(needed)
    return False


def _not_reached(dependents: Neighbours, start: int, positions: Iterable[int]) -> set[int]:
    """Those of `positions` that are not downstream of `start`."""
    missing, seen, waiting = set(positions), {start}, deque([start])
    while waiting and missing:
        for dependent in dependents[waiting.popleft()]:
            if dependent not in seen:
                seen.add(dependent)
                missing.discard(dependent)
                waiting.append(dependent)
    return missing
