"""Pictures of DAGs: self-contained, escaped, and laid out so that every edge points forward."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from plait import DAG, Task, TaskStatus
from plait.runner.drawing.dag_picture import Look, layers, mermaid, page, svg

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title></text><script>alert(1)</script>\"'&<img src=x onerror=y>\x1b[31m\x00\u202e\ud800"


def digest() -> DAG:
    tasks = [Task(f"s{i}", "x") for i in range(5)]
    tasks += [Task(f"c{i}", "x", depends_on=[f"s{i}"]) for i in range(5)]
    return DAG(
        [*tasks, Task("rank", "x", depends_on=[f"c{i}" for i in range(5)] + ["s0"]), Task("t", "t", continues="rank")]
    )


@st.composite
def dags(draw: st.DrawFn) -> DAG:
    size = draw(st.integers(1, 14))
    chosen = [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set[int]() for i in range(size)]
    return DAG([Task(f"t{i}", "x", depends_on=[f"t{j}" for j in sorted(before)]) for i, before in enumerate(chosen)])


def boxes(picture: str) -> dict[str, tuple[float, float, float, float]]:
    """By task: left, top, width, height."""
    found: dict[str, tuple[float, float, float, float]] = {}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        if rect is not None and text is not None:
            left, top, width, height = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
            found[text.text or ""] = left, top, width, height
    return found


@given(dags())
def test_edges_point_right_and_tasks_do_not_overlap(dag: DAG) -> None:
    at = boxes(svg(dag))
    assert set(at) == {task.id for task in dag}
    for task in dag:
        for before in task.depends_on:
            assert at[before][0] + at[before][2] < at[task.id][0]
    slots = list(at.values())
    for i, (left, top, width, height) in enumerate(slots):
        for other in slots[:i]:
            apart = left + width <= other[0] or other[0] + other[2] <= left
            assert apart or top + height <= other[1] or other[1] + other[3] <= top


@given(dags())
def test_a_task_s_layer_is_the_longest_path_to_it(dag: DAG) -> None:
    depth = layers(dag)
    for position, before in enumerate(dag.dependencies):
        assert depth[position] == max((depth[one] + 1 for one in before), default=0)


def test_every_edge_is_drawn_once_and_continuations_are_dashed() -> None:
    root = ElementTree.fromstring(svg(digest()))
    curves = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert len(curves) == 12
    assert sum("stroke-dasharray" in path.attrib for path in curves) == 1


def test_statuses_show_as_colour_and_as_words() -> None:
    looks = {f"s{i}": Look(status, status.value) for i, status in enumerate(list(TaskStatus)[:5])}
    picture = svg(digest(), looks, title="digest", caption="run 1")
    fills = re.findall(r'height="40" rx="6" fill="(#\w+)"', picture)
    assert len(set(fills)) == 5  # pending looks like not run, the other four differ
    for status in list(TaskStatus)[:5]:
        assert f"1 {status.value.replace('_', ' ')}" in picture


def test_nothing_in_a_picture_runs_or_loads() -> None:
    looks = {"s0": Look(TaskStatus.FAILED, HOSTILE, HOSTILE)}
    picture = svg(digest(), looks, title=HOSTILE, caption=HOSTILE)
    allowed = {"svg", "title", "rect", "text", "g", "path"}
    root = ElementTree.fromstring(picture)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    assert not any(name.startswith("on") or "href" in name for element in root.iter() for name in element.attrib)
    whole = page(digest(), looks, title=HOSTILE, caption=HOSTILE)
    assert "<script" not in whole
    assert "<img" not in whole
    assert "\x1b" not in whole
    assert "\u202e" not in whole
    assert "default-src 'none'" in whole
    assert re.findall(r"https?://[^\s\"]+", whole) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    whole.encode()


def test_mermaid_cannot_be_broken_out_of() -> None:
    text = mermaid(digest(), {"s0": Look(TaskStatus.FAILED, HOSTILE + '"]\n click t0 "javascript:alert(1)"')})
    first = text.splitlines()[1]
    assert first.count('"') == 2
    assert "<script" not in text
    assert text.count("\n") == 1 + 12 + 12 + 1  # head, tasks, edges, one class
    assert "t10 -.-> t11" in text


def test_a_large_plan_is_drawn_in_reasonable_size() -> None:
    chain = [Task("t0", "x")] + [Task(f"t{i}", "x", depends_on=[f"t{i - 1}"]) for i in range(1, 400)]
    last = Task("end", "x", depends_on=[task.id for task in chain])
    assert len(svg(DAG([*chain, last]))) < 2_000_000
