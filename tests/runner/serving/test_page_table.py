"""A run over rows is a table of results: sorted, filtered, and saved as a file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.runner.serving.test_page import open_run, run
from tests.runner.serving.test_page_accessibility import expect_accessible
from tests.support.processes.browser import expect_value, needs_chromium, ui, watched

pytestmark = [pytest.mark.slow, needs_chromium]

WORK = """
async def work(prompt):
    n = int(prompt.rpartition(" ")[2])
    if n == 7:
        raise ValueError("no seven")
    return {"label": f"=label {n % 5}", "score": n * 3 % 11}
"""
TASKS = """
- id: part
  for_each: rows
  prompt: "judge {{ item }}"
  failure_mode: soft
  retry: 1
  output_schema:
    {type: object, properties: {label: {type: string}, score: {type: integer}}, required: [label, score]}
- {id: end, prompt: "end 1", depends_on: part}
"""


def expect_column(page: Page, n: int, *texts: str) -> None:
    """The texts of a column, from the first row to the last."""
    read = "all => all.map(one => [Number(one.parentElement.ariaRowIndex), one.innerText])"
    cells = page.locator(f".line > :nth-child({n})")
    expect_value(page, lambda: [text for _, text in sorted(cells.evaluate_all(read))], [*texts])


def test_results_are_sorted_filtered_and_saved(tmp_path: Path, browser: Browser) -> None:
    rows = json.dumps([f"row {n}" for n in range(1, 13)])
    run(tmp_path, TASKS, more=f"inputs: {{rows: {rows}}}\n", work=WORK)
    with ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        open_run(seen, server.page)
        expect(page.get_by_role("tab", name="Table")).to_have_attribute("aria-selected", "true")
        heads = page.get_by_role("columnheader")
        expect(heads).to_have_text(["Item", "label", "score", "Status", "Time", "Tokens", "Cost"])
        expect_column(page, 1, *(f"row {n}" for n in range(1, 13)))
        expect_accessible(page)
        page.get_by_role("button", name="score").click()
        expect(heads.nth(2)).to_have_attribute("aria-sort", "ascending")
        scores = [n * 3 % 11 for n in range(1, 13) if n != 7]
        expect_column(page, 3, *map(str, sorted(scores)), "")  # what has no answer comes last
        page.get_by_role("button", name="score").click()
        expect(heads.nth(2)).to_have_attribute("aria-sort", "descending")
        expect_column(page, 3, *map(str, sorted(scores, reverse=True)), "")
        page.get_by_role("button", name="failed 1").click()
        expect(page.locator(".line")).to_have_count(1)
        expect(page.locator(".line")).to_contain_text("no seven")
        page.get_by_role("button", name="failed 1").click()
        expect(page.locator(".line")).to_have_count(12)
        page.get_by_label("Find tasks by id").fill("label 4")
        expect(page.locator(".line")).to_have_count(2)
        page.get_by_label("Find tasks by id").fill("")
        with page.expect_download() as saving:
            page.get_by_role("button", name="Download CSV").click()
        assert saving.value.suggested_filename == "part.csv"
        written = list(csv.DictReader(io.StringIO(saving.value.path().read_text())))
        assert [row["item"] for row in written] == [f"row {n}" for n in range(1, 13)]
        assert written[0]["data.label"] == "'=label 1", "a spreadsheet takes it for no formula"
        with page.expect_download() as saving:
            page.get_by_role("button", name="JSON Lines").click()
        lines = [json.loads(line) for line in saving.value.path().read_text().splitlines()]
        assert lines[2]["data"] == {"label": "=label 3", "score": 9}
        page.locator(".line").first.click()
        expect(page.locator(".part-sent")).to_contain_text("Schema of the answer")
        expect(page.locator(".part-sent")).to_contain_text("judge row")
        expect(page.locator(".part-result")).to_contain_text("label")
        expect_accessible(page)
