"""A DAG as Mermaid text or as a self-contained SVG, alone or in an HTML page. Pure.

A large DAG is drawn with the parts of each `for_each` as one task (`folded`), so that the picture stays readable; a
program that draws by itself gets the positions of boxes and the curves of edges.

The layout is in plain layers. The column of a task is the length of the longest path to the task, so every edge points
to the right. Within a column, tasks are sorted by the positions of their neighbours in a few alternating sweeps. An
edge across several columns has a slot of its own in each column and so runs between the tasks, not behind them.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from plait.errors import DAGError
from plait.json_form import value
from plait.runner.domain.dag import DAG, group_of, groups_of
from plait.safe_text import shorten
from plait.statuses import TaskStatus, group_status
from plait.task import Task

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


_CHAR = 7.25  # width of a character in the 12 px monospace font, with a margin
_SMALL = 6.1  # the same at 10 px
_MARGIN, _HEAD = 24.0, 76.0
_LONGEST_NOTE = 48

_STYLES: Mapping[TaskStatus | None, tuple[str, str, str]] = {
    # fill, border, text
    None: ("#f6f8fa", "#8c959f", "#24292f"),
    TaskStatus.PENDING: ("#f6f8fa", "#8c959f", "#57606a"),
    TaskStatus.RUNNING: ("#ddf4ff", "#0969da", "#0550ae"),
    TaskStatus.WAITING_INPUT: ("#fbefff", "#8250df", "#6639ba"),
    TaskStatus.COMPLETED: ("#dafbe1", "#1a7f37", "#116329"),
    TaskStatus.FAILED: ("#ffebe9", "#cf222e", "#a40e26"),
    TaskStatus.SKIPPED: ("#fff8c5", "#9a6700", "#7d4e00"),
    TaskStatus.CANCELLED: ("#eaeef2", "#57606a", "#424a53"),
}

# Characters invalid in XML, and characters that reorder the surrounding text.
_UNFIT = re.compile(
    "[^\t\n\x20-\x7e\xa0-\u061b\u061d-\u200d\u2010-\u2027\u2030-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)


@value
class Look:
    """The appearance of a task."""

    status: TaskStatus | None = None
    """The status; None if not run."""
    note: str = ""
    """A short note below the id."""
    title: str = ""
    """A longer text shown on hover."""
    added_by: str | None = None
    """The id of the task that added this task to the run; drawn with a dashed border."""


_PLAIN = Look()


def mermaid(dag: DAG, looks: Mapping[str, Look] | None = None) -> str:
    """Return the DAG as a Mermaid flowchart, coloured by status."""
    looks = looks or {}
    lines = ["flowchart LR"]
    for position, task in enumerate(dag):
        look = looks.get(task.id, _PLAIN)
        label = _mermaid_text(task.id) + (f"<br/>{_mermaid_text(look.note)}" if look.note else "")
        mark = f":::{look.status.value}" if look.status else ""
        lines.append(f'    t{position}["{label}"]{mark}')
    for position, task in enumerate(dag):
        continued = dag.position(task.continues) if task.continues else -1
        lines += [
            f"    t{before} {'-.->' if before == continued else '-->'} t{position}"
            for before in dag.dependencies[position]
        ]
    used = {look.status for look in looks.values() if look.status}
    for status in (status for status in TaskStatus if status in used):
        fill, border, colour = _STYLES[status]
        lines.append(f"    classDef {status.value} fill:{fill},stroke:{border},color:{colour}")
    added = [f"t{position}" for position, task in enumerate(dag) if looks.get(task.id, _PLAIN).added_by]
    if added:
        lines += ["    classDef added stroke-dasharray:2 2", f"    class {','.join(added)} added"]
    return "\n".join(lines) + "\n"


def svg(dag: DAG, looks: Mapping[str, Look] | None = None, *, title: str = "", caption: str = "") -> str:
    """Return the DAG as an SVG picture without scripts or external references."""
    return _Picture(dag, looks or {}).draw(title, caption)


def page(dag: DAG, looks: Mapping[str, Look] | None = None, *, title: str = "", caption: str = "") -> str:
    """Return the SVG picture in an HTML page."""
    picture = svg(dag, looks, title=title, caption=caption)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        # The page shows text written by models; if an escape were missing, no script could run or load.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_xml(title)}</title>\n"
        "<style>body{margin:0;background:#fff}svg{display:block;margin:0 auto}</style></head>\n"
        f"<body>\n{picture}</body></html>\n"
    )


class _Picture:
    def __init__(self, dag: DAG, looks: Mapping[str, Look]) -> None:
        self._dag = dag
        self._looks = [looks.get(task.id, _PLAIN) for task in dag]
        self._at = Layout(dag, [self._width(position) for position in range(len(dag))])

    def _width(self, task: int) -> float:
        note = len(shorten(self._looks[task].note, _LONGEST_NOTE)) * _SMALL
        return max(72.0, len(self._dag.tasks[task].id) * _CHAR, note) + 22

    def draw(self, title: str, caption: str) -> str:
        legend, legend_width = self._legend()
        width = max(self._at.width, len(title) * 9.5, len(caption) * _SMALL, legend_width) + 2 * _MARGIN
        height = _HEAD + self._at.height + 8
        shift = (width - self._at.width) / 2
        return "".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
                f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="ui-monospace,Menlo,Consolas,'
                'DejaVu Sans Mono,monospace">\n',
                f"<title>{_xml(title)}</title>\n",
                f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>\n',
                _text(_MARGIN, 30, title, 'font-size="15" font-weight="bold" fill="#24292f"'),
                _text(_MARGIN, 48, caption, 'font-size="10" fill="#57606a"') if caption else "",
                legend,
                f'<g transform="translate({shift:.1f} {_HEAD:.0f})">\n',
                *(self._edge(route) for route in self._at.routes),
                *(self._node(box) for box in self._at.tasks),
                "</g>\n</svg>\n",
            )
        )

    def _legend(self) -> tuple[str, float]:
        counts = Counter(look.status for look in self._looks if look.status is not None)
        parts: list[str] = []
        x = _MARGIN
        for status in (status for status in TaskStatus if counts[status]):
            fill, border, _ = _STYLES[status]
            label = f"{counts[status]} {status.value.replace('_', ' ')}"
            parts.append(f'<rect x="{x:.1f}" y="57" width="9" height="9" rx="2" fill="{fill}" stroke="{border}"/>\n')
            parts.append(_text(x + 14, 65, label, 'font-size="10" fill="#57606a"'))
            x += len(label) * _SMALL + 30
        return "".join(parts), x - _MARGIN

    def _edge(self, route: Sequence[Box]) -> str:
        end = route[-1]
        dashes = ' stroke-dasharray="5 3"' if _continues(self._dag, route) else ""
        tip = self._at.lefts[end.column]
        return (
            f'<path d="{_curve(self._at, route, 5)}" fill="none" stroke="#8c959f" stroke-width="1.2"{dashes}/>\n'
            f'<path d="M{tip:.1f} {end.y:.1f}l-7 -3.5v7z" fill="#8c959f"/>\n'
        )

    def _node(self, box: Box) -> str:
        assert box.task is not None
        task, look = self._dag.tasks[box.task], self._looks[box.task]
        fill, border, colour = _STYLES[look.status]
        x, width, top = self._at.lefts[box.column], self._at.widths[box.column], box.y - HEIGHT / 2
        middle = x + width / 2
        dashes = ' stroke-dasharray="4 3"' if look.status is TaskStatus.PENDING else ""
        dashes = ' stroke-dasharray="2 2"' if look.added_by else dashes
        note = shorten(look.note, _LONGEST_NOTE)
        return "".join(
            (
                f"<g><title>{_xml(look.title or task.id)}</title>",
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{HEIGHT:.0f}" rx="6" fill="{fill}" '
                f'stroke="{border}" stroke-width="1.3"{dashes}/>',
                _text(middle, box.y - 2 if note else box.y + 4, task.id, f'font-size="12" {_CENTRED} fill="{colour}"'),
                _text(middle, box.y + 12, note, f'font-size="10" {_CENTRED} fill="{colour}"') if note else "",
                "</g>\n",
            )
        )


_CENTRED = 'text-anchor="middle"'


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{_xml(text)}</text>\n'


def _xml(text: str) -> str:
    return html.escape(_UNFIT.sub("\ufffd", text))


def _mermaid_text(text: str) -> str:
    """Return `text` with Mermaid entities: a quote would end the label, and markup or line breaks would be
    interpreted.
    """
    fit = _UNFIT.sub("\ufffd", " ".join(text.split()))
    return re.sub(r"[^\w .,:+\-·/()]", lambda match: f"#{ord(match[0])};", fit)


MOST_DRAWN = 200
"""Tasks from which on groups are folded."""
_FEWEST = 2


def fold(dag: DAG, looks: Mapping[str, Look]) -> tuple[DAG, Mapping[str, Look]]:
    """Return `dag` and `looks` with each group of parts, and the whole of the group if there is one, as one task. A DAG
    of at most `MOST_DRAWN` tasks is returned unchanged.
    """
    if len(dag) <= MOST_DRAWN:
        return dag, looks
    groups = groups_of(((task.id, task.item, task.id) for task in dag), _FEWEST)
    named = ((task.id, group_of(task.id, task.item)) for task in dag)
    name_of = {task_id: task_id if name is None or name not in groups else name for task_id, name in named}
    merged: dict[str, Task] = {}
    needs: dict[str, dict[str, None]] = {}
    for position, task in enumerate(dag):
        name = name_of[task.id]
        merged.setdefault(name, Task(name, name, continues=name_of.get(task.continues or "")))
        before = needs.setdefault(name, {})
        before.update(dict.fromkeys(name_of[dag.tasks[one].id] for one in dag.dependencies[position]))
        before.pop(name, None)
    tasks = [Task(name, name, tuple(needs[name]), continues=task.continues) for name, task in merged.items()]
    try:
        smaller = DAG(tasks, name=dag.name)
    except DAGError:  # parts of two groups need each other
        return dag, looks
    lone_looks = {name: look for name, look in looks.items() if name in merged and name not in groups}
    return smaller, {**lone_looks, **{name: _look(parts, looks) for name, parts in groups.items()}}


def _look(parts: Sequence[str], looks: Mapping[str, Look]) -> Look:
    statuses = [status for part in parts if part in looks and (status := looks[part].status) is not None]
    shown, counts = group_status(statuses) if statuses else (None, "")
    note = " · ".join(filter(None, (f"{len(parts):,} parts", counts)))
    return Look(shown, note, note)


_BOX_CHAR, _PADDING, _NARROWEST, _WIDEST = 7.4, 44.0, 148.0, 280.0


def coordinates(dag: DAG) -> dict[str, Any]:
    """Return the picture of `dag` as a JSON object, in pixels from the left upper corner. Large groups are folded.

    `boxes` have the name of a task or of a group, with their place and size. `edges` have the `path` of an SVG, and
    whether the second task `continues` the conversation of the first.
    """
    dag, _ = fold(dag, {})
    layout = Layout(dag, [min(max(_NARROWEST, len(task.id) * _BOX_CHAR + _PADDING), _WIDEST) for task in dag])
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
    edges = [{"path": _curve(layout, route, 0), "continues": _continues(dag, route)} for route in layout.routes]
    return {"width": round(layout.width, 1), "height": round(layout.height, 1), "boxes": boxes, "edges": edges}


def _curve(layout: Layout, route: Sequence[Box], gap: float) -> str:
    """Return the path from the right side of the first box to `gap` before the last one, level within each column."""
    start, end = route[0], route[-1]
    x, y = layout.lefts[start.column] + layout.widths[start.column], start.y
    path = f"M{x:.1f} {y:.1f}"
    for box in route[1:]:
        left = layout.lefts[box.column] - (gap if box is end else 0)
        middle = (x + left) / 2
        path += f"C{middle:.1f} {y:.1f} {middle:.1f} {box.y:.1f} {left:.1f} {box.y:.1f}"
        if box is not end:
            x = layout.lefts[box.column] + layout.widths[box.column]
            path += f"H{x:.1f}"
        y = box.y
    return path


def _continues(dag: DAG, route: Sequence[Box]) -> bool:
    start, end = route[0].task, route[-1].task
    assert start is not None and end is not None  # noqa: PT018 - the ends of a route are tasks
    return dag.tasks[end].continues == dag.tasks[start].id
