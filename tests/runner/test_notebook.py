"""Values in a notebook: a real kernel runs the cells of the page, and shows tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from plait import DAG, ParallelRunner, RunResult, RunStatus, Task, TaskResult, TaskStatus
from plait.backends import Usage
from plait.persistence import MemoryStore
from plait.runner.domain.run_result import MOST_ROWS
from tests.docs.documents import blocks

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "python.md"
EVIL = '<script>alert("x")</script>'


def cells(page: Path) -> list[str]:
    """The cells of the notebook on the page, which are apart by empty lines."""
    text = page.read_text(encoding="utf-8")
    after = text[: text.index("## In a notebook")].count("\n")
    block = next(one for one in blocks("python.md", text) if one.line > after)
    return block.text.strip().split("\n\n")


# The kernel's own sockets are collected late.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_notebook_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in cells(PAGE)])  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        "".join(out["data"].get("text/html", "") for out in cell["outputs"] if "data" in out) for cell in notebook.cells
    ]
    dag, result, preview = (table for table in shown if table)
    assert "<th" in dag and ">depends on</th>" in dag and ">haiku</td>" in dag
    assert re.search(r"<caption>run \S+: completed</caption>", result)
    assert "A HAIKU ABOUT TEA." in result
    assert ">keep</td>" in preview


async def test_texts_of_models_do_not_act() -> None:
    async def answer(prompt: str) -> str:
        return EVIL + prompt

    store = MemoryStore()
    runner = ParallelRunner(answer, store=store)
    dag = DAG([Task("a", prompt=EVIL)], name=EVIL)
    result = await runner.run(dag)
    preview = await runner.runs.preview(result.run_id)
    for shown in (dag, result, preview, RunResult(EVIL, RunStatus.FAILED, {}, error=EVIL)):
        assert "<script" not in shown._repr_html_()
    assert "&lt;script&gt;alert(&quot;x&quot;)" in result._repr_html_()


def test_a_failure_is_shown_with_its_reason() -> None:
    failed = TaskResult("a", TaskStatus.FAILED, error="not today", attempts=3)
    asks = TaskResult("b", TaskStatus.WAITING_INPUT, question="Who?")
    shown = RunResult("r", RunStatus.FAILED, {"a": failed, "b": asks}, error="1 task failed")._repr_html_()
    assert "run r: failed: 1 task failed" in shown
    assert ">not today</td>" in shown
    assert ">Who?</td>" in shown


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (Usage(), ""),
        (Usage(5, 5), ", cost unknown"),
        (Usage(5, 5, 0.0), ", $0.0000"),
        (Usage(5, 5, 0.25), ", $0.2500"),
        (Usage(5, 5, 1.25) + Usage(5, 5), ", at least $1.25"),
    ],
)
def test_a_cost_that_is_not_known_is_said(usage: Usage, words: str) -> None:
    shown = RunResult("r", RunStatus.COMPLETED, {}, usage=usage)._repr_html_()
    assert f"<caption>run r: completed{words}</caption>" in shown


def test_a_large_graph_is_cut() -> None:
    dag = DAG([Task(f"t{n}", prompt="x" * 1000) for n in range(MOST_ROWS + 5)])
    shown = dag._repr_html_()
    assert shown.count("<tr>") == MOST_ROWS + 2
    assert "and 5 more tasks" in shown
    assert "x" * 201 not in shown
