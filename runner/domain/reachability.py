"""Reachability in a graph of tasks, direct or indirect, for many pairs at once. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Neighbours: TypeAlias = Sequence[Sequence[int]]
"""For each position, the positions of the dependencies, or of the dependents."""

_NEAR = 100
"""The number of steps of an upward search before the search from the other task downward takes over."""


def not_upstream(
    dependencies: Neighbours, dependents: Neighbours, pairs: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the pairs `(target, position)` whose second task does not depend, directly or indirectly, on the first.

    Most pairs are close together, so a short upward search comes first. The remaining pairs with the same first task
    share a single downward search, and nothing is cached between searches.
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
    """Return whether `target` is upstream of `position`; None if undecided after `_NEAR` steps."""
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
    """Return the `positions` that are not downstream of `start`."""
    missing, seen, waiting = set(positions), {start}, deque([start])
    while waiting and missing:
        for dependent in dependents[waiting.popleft()]:
            if dependent not in seen:
                seen.add(dependent)
                missing.discard(dependent)
                waiting.append(dependent)
    return missing
