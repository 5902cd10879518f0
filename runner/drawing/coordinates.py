"""A DAG as positions of boxes and curves of edges, for a program that draws by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.runner.domain.dag import DAG
from plait.runner.drawing.dag_layout import HEIGHT, Box, Layout
from plait.runner.drawing.folding import fold

_CHAR, _PADDING, _NARROWEST, _WIDEST = 7.4, 44.0, 148.0, 280.0


def coordinates(dag: DAG) -> dict[str, Any]:
    """Return the picture of `dag` as a JSON object, in pixels from the left upper corner. Large groups are folded.

    `boxes` have the name of a task or of a group, with their place and size. `edges` are lists of numbers: x and y of
    the start, then for each curve the x where it ends, its y, and the x up to which a level line follows; the last
    number of an edge is 1 if the second task continues the conversation of the first.
    """
    dag, _ = fold(dag, {})
    layout = Layout(dag, [min(max(_NARROWEST, len(task.id) * _CHAR + _PADDING), _WIDEST) for task in dag])
    boxes = [
        {
            "name": dag.tasks[box.task].id,
            "x": round(layout.lefts[box.column], 1),
            "y": round(box.y - HEIGHT / 2, 1),
            "width": round(layout.widths[box.column], 1),
            "height": HEIGHT,
        }
        for box in layout.tasks
        if box.task is not None
    ]
    edges = [_edge(dag, layout, route) for route in layout.routes]
    return {"width": round(layout.width, 1), "height": round(layout.height, 1), "boxes": boxes, "edges": edges}


def _edge(dag: DAG, layout: Layout, route: Sequence[Box]) -> list[float]:
    start, end = route[0], route[-1]
    numbers = [layout.lefts[start.column] + layout.widths[start.column], start.y]
    for box in route[1:]:
        left = layout.lefts[box.column]
        numbers += [left, box.y, left if box is end else left + layout.widths[box.column]]
    assert start.task is not None and end.task is not None  # noqa: PT018 - the ends of a route are tasks
    goes_on = dag.tasks[end.task].continues == dag.tasks[start.task].id
    return [*(round(number, 1) for number in numbers), float(goes_on)]
