"""Positions of tasks and routes of edges in a picture of a DAG. Pure.

A plain layered layout. The column of a task is the length of the longest path to the task, so every edge points to the
right. Within a column, tasks are sorted by the positions of their neighbours in a few alternating sweeps. An edge
across several columns has a slot of its own in each column and so runs between the tasks, not behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from plait.runner.domain.dag import DAG

HEIGHT = 40.0  # height of a task in pixels, the unit of all lengths here
_GAP, _EDGE_GAP, _BETWEEN = 16.0, 10.0, 72.0
_SWEEPS = 4
_MOST_BENDS = 20_000  # above this number, long edges are drawn straight: the picture is unreadable anyway


@dataclass(slots=True)
class Box:
    """A slot in a column: a task, or the passage of a long edge."""

    column: int
    task: int | None = None
    """The position of the task; None for the passage of a long edge."""
    y: float = 0.0
    """The vertical centre."""
    before: list[Box] = field(default_factory=list["Box"])
    after: list[Box] = field(default_factory=list["Box"])

    @property
    def height(self) -> float:
        return _EDGE_GAP if self.task is None else HEIGHT


class Layout:
    """The layout of `dag`, starting at (0, 0). `widths` holds the width needed by each task."""

    def __init__(self, dag: DAG, widths: Sequence[float]) -> None:
        depth = layers(dag)
        self.tasks = [Box(column, position) for position, column in enumerate(depth)]
        """The box of each task, by position."""
        self._columns: list[list[Box]] = [[] for _ in range(max(depth, default=-1) + 1)]
        for box in self.tasks:
            self._columns[box.column].append(box)
        edges = [(self.tasks[i], box) for box, before in zip(self.tasks, dag.dependencies, strict=True) for i in before]
        self._bends = sum(end.column - start.column - 1 for start, end in edges) <= _MOST_BENDS
        self.routes = [self._route(start, end) for start, end in edges]
        """For each edge, in the order of `dag.dependencies`, the boxes along the edge, both ends included."""
        self._sort()
        self._place(widths)

    def _route(self, start: Box, end: Box) -> list[Box]:
        route = [start]
        for column in range(start.column + 1, end.column if self._bends else 0):
            route.append(Box(column))
            self._columns[column].append(route[-1])
        route.append(end)
        for one, next_one in pairwise(route):
            one.after.append(next_one)
            next_one.before.append(one)
        return route

    def _sort(self) -> None:
        """Align neighbours: move each box to the mean rank of its left, then of its right neighbours."""
        for column in self._columns:
            _number(column)
        for sweep in range(_SWEEPS):
            to_left = sweep % 2 == 0
            for column in self._columns if to_left else reversed(self._columns):
                means = [_mean(box.before if to_left else box.after, box.y) for box in column]
                column[:] = [column[rank] for rank in sorted(range(len(column)), key=means.__getitem__)]
                _number(column)

    def _place(self, widths: Sequence[float]) -> None:
        heights = [sum(box.height + _GAP for box in column) for column in self._columns]
        self.height = max(heights, default=0.0)
        """The height of the layout."""
        for column, height in zip(self._columns, heights, strict=True):
            y = (self.height - height) / 2
            for box in column:
                box.y = y + box.height / 2
                y += box.height + _GAP
        self.widths = [
            max((widths[box.task] for box in column if box.task is not None), default=0.0) for column in self._columns
        ]
        """The widths of the columns."""
        self.lefts: list[float] = []
        """The left edges of the columns."""
        x = 0.0
        for width in self.widths:
            self.lefts.append(x)
            x += width + _BETWEEN
        self.width = x - _BETWEEN
        """The width of the layout."""


def layers(dag: DAG) -> list[int]:
    """Return, for each position, the number of tasks on the longest path before the task."""
    waits_for = [len(before) for before in dag.dependencies]
    ready = [position for position, count in enumerate(waits_for) if not count]
    depth = [0] * len(dag)
    for position in ready:
        for after in dag.dependents[position]:
            depth[after] = max(depth[after], depth[position] + 1)
            waits_for[after] -= 1
            if not waits_for[after]:
                ready.append(after)
    return depth


def _number(column: list[Box]) -> None:
    """Set the `y` of each box to its rank, as a fraction of the column, until final positions are computed."""
    for rank, box in enumerate(column):
        box.y = (rank + 0.5) / len(column)


def _mean(boxes: Sequence[Box], otherwise: float) -> float:
    return sum(box.y for box in boxes) / len(boxes) if boxes else otherwise
