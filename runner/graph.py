"""A DAG as a picture: Mermaid text, or an SVG (alone or in an HTML page) that needs nothing but itself. Pure.

The layout is the plain layered one: a task's column is the length of the longest path to it, so every edge points to
the right; within a column tasks are sorted by where their neighbours are, a few sweeps to and fro; an edge over several
columns gets a place of its own in each, so that it runs between the tasks and not behind them.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from runner.dag import DAG
from runner.status import TaskStatus

_CHAR = 7.25  # width of a character of the 12 px monospace font, with room to spare
_SMALL = 6.1  # the same at 10 px
_HEIGHT, _GAP, _EDGE_GAP = 40.0, 16.0, 10.0
_BETWEEN, _MARGIN, _HEAD = 72.0, 24.0, 76.0
_SWEEPS = 4
_MOST_BENDS = 20_000  # beyond, long edges go straight: such a picture is a texture anyway
_LONGEST_NOTE = 34

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

# What XML cannot hold, and what would reorder the text around it.
_UNFIT = re.compile(
    "[^\t\n\x20-\x7e\xa0-\u061b\u061d-\u200d\u2010-\u2027\u2030-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)


@dataclass(frozen=True, slots=True)
class Look:
    """How a task is shown: its status (None: not run), a short note under its id, and a longer text on hover."""

    status: TaskStatus | None = None
    note: str = ""
    title: str = ""


_PLAIN = Look()


def layers(dag: DAG) -> list[int]:
    """For each task, by position, the number of tasks on the longest path before it."""
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


def mermaid(dag: DAG, looks: Mapping[str, Look] | None = None) -> str:
    """The DAG as a Mermaid flowchart; tasks with a status are coloured by it."""
    looks = looks or {}
    lines = ["flowchart LR"]
    for position, task in enumerate(dag):
        look = looks.get(task.id, _PLAIN)
        label = _mermaid_text(task.id) + (f"<br/>{_mermaid_text(look.note)}" if look.note else "")
        mark = f":::{look.status.value}" if look.status else ""
        lines.append(f'    t{position}["{label}"]{mark}')
    for position, task in enumerate(dag):
        goes_on = dag.position(task.continues) if task.continues else -1
        lines += [
            f"    t{before} {'-.->' if before == goes_on else '-->'} t{position}"
            for before in dag.dependencies[position]
        ]
    used = {look.status for look in looks.values() if look.status}
    for status in (status for status in TaskStatus if status in used):
        fill, border, colour = _STYLES[status]
        lines.append(f"    classDef {status.value} fill:{fill},stroke:{border},color:{colour}")
    return "\n".join(lines) + "\n"


def svg(dag: DAG, looks: Mapping[str, Look] | None = None, *, title: str = "", caption: str = "") -> str:
    """The DAG as an SVG picture: no script, no reference to anything outside of it."""
    return _Picture(dag, looks or {}).draw(title, caption)


def page(dag: DAG, looks: Mapping[str, Look] | None = None, *, title: str = "", caption: str = "") -> str:
    """The same picture in an HTML page."""
    picture = svg(dag, looks, title=title, caption=caption)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        # The page shows what models wrote; should an escape ever be missing, nothing of it may run or load.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_xml(title)}</title>\n"
        "<style>body{margin:0;background:#fff}svg{display:block;margin:0 auto}</style></head>\n"
        f"<body>\n{picture}</body></html>\n"
    )


@dataclass(slots=True)
class _Box:
    """A place in a column: a task, or (`task` None) where a long edge passes. `y` is its middle."""

    column: int
    task: int | None = None
    y: float = 0.0
    before: list[_Box] = field(default_factory=list["_Box"])
    after: list[_Box] = field(default_factory=list["_Box"])

    @property
    def height(self) -> float:
        return _EDGE_GAP if self.task is None else _HEIGHT


class _Picture:
    def __init__(self, dag: DAG, looks: Mapping[str, Look]) -> None:
        self._dag = dag
        self._looks = [looks.get(task.id, _PLAIN) for task in dag]
        depth = layers(dag)
        self._tasks = [_Box(column, position) for position, column in enumerate(depth)]
        self._columns: list[list[_Box]] = [[] for _ in range(max(depth, default=-1) + 1)]
        for box in self._tasks:
            self._columns[box.column].append(box)
        spans = (box.column - depth[before] - 1 for box in self._tasks for before in dag.dependencies[box.task or 0])
        self._bends = sum(spans) <= _MOST_BENDS
        self._routes = [
            (self._route(self._tasks[before], box), dag.tasks[position].continues == dag.tasks[before].id)
            for position, box in enumerate(self._tasks)
            for before in dag.dependencies[position]
        ]
        self._sort()
        self._place()

    def _route(self, start: _Box, end: _Box) -> list[_Box]:
        route = [start]
        for column in range(start.column + 1, end.column if self._bends else 0):
            route.append(_Box(column))
            self._columns[column].append(route[-1])
        route.append(end)
        for one, next_one in pairwise(route):
            one.after.append(next_one)
            next_one.before.append(one)
        return route

    def _sort(self) -> None:
        """Bring neighbours to the same height: each box to the mean rank of its neighbours, left, then right."""
        for column in self._columns:
            _number(column)
        for sweep in range(_SWEEPS):
            to_left = sweep % 2 == 0
            for column in self._columns if to_left else reversed(self._columns):
                column.sort(key=_left_of if to_left else _right_of)
                _number(column)

    def _place(self) -> None:
        heights = [sum(box.height + _GAP for box in column) for column in self._columns]
        self._tall = max(heights, default=0.0)
        for column, height in zip(self._columns, heights, strict=True):
            y = _HEAD + (self._tall - height) / 2
            for box in column:
                box.y = y + box.height / 2
                y += box.height + _GAP
        self._widths = [
            max((self._width(box.task) for box in column if box.task is not None), default=0.0)
            for column in self._columns
        ]
        self._lefts: list[float] = []
        x = _MARGIN
        for width in self._widths:
            self._lefts.append(x)
            x += width + _BETWEEN
        self._wide = x - _BETWEEN + _MARGIN

    def _width(self, task: int) -> float:
        note = len(_cut(self._looks[task].note)) * _SMALL
        return max(72.0, len(self._dag.tasks[task].id) * _CHAR, note) + 22

    def draw(self, title: str, caption: str) -> str:
        legend, legend_width = self._legend()
        width = max(self._wide, _MARGIN * 2 + max(len(title) * 9.5, len(caption) * _SMALL, legend_width))
        height = _HEAD + self._tall + 8
        shift = (width - self._wide) / 2
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
                f'<g transform="translate({shift:.1f} 0)">\n',
                *(self._edge(route, goes_on) for route, goes_on in self._routes),
                *(self._node(box) for box in self._tasks),
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

    def _edge(self, route: Sequence[_Box], goes_on: bool) -> str:
        """A curve from the right side of the first box to the left side of the last one, level within each column."""
        start, end = route[0], route[-1]
        x = self._lefts[start.column] + self._widths[start.column]
        path = f"M{x:.1f} {start.y:.1f}"
        y = start.y
        for box in route[1:]:
            left = self._lefts[box.column] - (5 if box is end else 0)
            middle = (x + left) / 2
            path += f"C{middle:.1f} {y:.1f} {middle:.1f} {box.y:.1f} {left:.1f} {box.y:.1f}"
            if box is not end:
                x = self._lefts[box.column] + self._widths[box.column]
                path += f"H{x:.1f}"
            y = box.y
        dashes = ' stroke-dasharray="5 3"' if goes_on else ""
        tip = self._lefts[end.column]
        return (
            f'<path d="{path}" fill="none" stroke="#8c959f" stroke-width="1.2"{dashes}/>\n'
            f'<path d="M{tip:.1f} {end.y:.1f}l-7 -3.5v7z" fill="#8c959f"/>\n'
        )

    def _node(self, box: _Box) -> str:
        assert box.task is not None
        task, look = self._dag.tasks[box.task], self._looks[box.task]
        fill, border, colour = _STYLES[look.status]
        x, width, top = self._lefts[box.column], self._widths[box.column], box.y - _HEIGHT / 2
        middle = x + width / 2
        dashes = ' stroke-dasharray="4 3"' if look.status is TaskStatus.PENDING else ""
        note = _cut(look.note)
        return "".join(
            (
                f"<g><title>{_xml(look.title or task.id)}</title>",
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_HEIGHT:.0f}" rx="6" fill="{fill}" '
                f'stroke="{border}" stroke-width="1.3"{dashes}/>',
                _text(middle, box.y - 2 if note else box.y + 4, task.id, f'font-size="12" {_CENTRED} fill="{colour}"'),
                _text(middle, box.y + 12, note, f'font-size="10" {_CENTRED} fill="{colour}"') if note else "",
                "</g>\n",
            )
        )


_CENTRED = 'text-anchor="middle"'


def _number(column: list[_Box]) -> None:
    """Until boxes have their places, `y` is their rank, as a fraction of the column."""
    for rank, box in enumerate(column):
        box.y = (rank + 0.5) / len(column)


def _left_of(box: _Box) -> float:
    return _mean(box.before, box.y)


def _right_of(box: _Box) -> float:
    return _mean(box.after, box.y)


def _mean(boxes: Sequence[_Box], otherwise: float) -> float:
    return sum(box.y for box in boxes) / len(boxes) if boxes else otherwise


def _cut(note: str) -> str:
    return note if len(note) <= _LONGEST_NOTE else note[: _LONGEST_NOTE - 1] + "…"


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{_xml(text)}</text>\n'


def _xml(text: str) -> str:
    return html.escape(_UNFIT.sub("\ufffd", text))


def _mermaid_text(text: str) -> str:
    """Mermaid's own entities: a quote would end the label, and markup or a line break would be taken as such."""
    fit = _UNFIT.sub("\ufffd", " ".join(text.split()))
    return re.sub(r"[^\w .,:+\-·/()]", lambda found: f"#{ord(found[0])};", fit)
