"""`plait export`: one row a task or part, safe for a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from plait.runner.views.result_rows import as_csv
from tests.support.processes.command import plait_here

FUNCTIONS = """
from plait.backends import Reply, Usage
from plait.errors import BackendError, ErrorKind
from contextlib import asynccontextmanager

class Talk:
    session_id = None
    async def send(self, prompt):
        if "eve" in prompt:
            raise BackendError(ErrorKind.REFUSED, "=cmd|' /C calc'!A0")
        if "data" in prompt:
            return Reply("told", data={"score": -3, "why": "@sum(1)"}, usage=Usage(10, 2, 0.5))
        return Reply('=HYPERLINK("http://x")\\nsecond, "line"', usage=Usage(10, 2, 0.5))

class Backend:
    def new_session_id(self):
        return None
    @asynccontextmanager
    async def open(self, request):
        yield Talk()

work = Backend()
"""
PLAN = """
name: table
inputs:
  people: {rows: people.csv}
backends:
  work: {kind: function, call: "functions.py:work"}
tasks:
  - {id: part, prompt: "{{ item.name }}", for_each: people, failure_mode: soft}
  - {id: rated, prompt: data, output_schema: {type: object, properties: {score: {type: integer}, why: {type: string}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "plan.yaml").write_text(PLAN)
    people = [f"p{n},-{n}" for n in range(1, 10)] + ["eve,+1"]
    (folder / "people.csv").write_text("name,=age\n" + "\n".join(people) + "\n")
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 1
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_part_is_a_row_in_the_order_of_its_number(folder: Path) -> None:
    done = plait_here(folder, "export", "last", "--to", "all.csv")
    run_id = plait_here(folder, "runs", "--json").value[0]["run_id"]
    assert (done.code, done.out, done.err) == (0, "", f"11 rows of run {run_id} (table, failed) in all.csv\n")
    rows = table(folder / "all.csv")
    assert [row["task_id"] for row in rows] == [*(f"part.{n}" for n in range(1, 11)), "rated"]
    assert (rows[1]["item.name"], rows[1]["item.=age"]) == ("p2", "-2")
    assert (rows[1]["cost_usd"], rows[1]["input_tokens"], rows[1]["group"]) == ("0.5", "10", "part")
    assert (rows[10]["data.score"], rows[10]["status"]) == ("-3", "completed")
    assert all(len(row["duration_s"].partition(".")[2]) <= 3 for row in rows), "in milliseconds"
    assert stat.S_IMODE((folder / "all.csv").stat().st_mode) == 0o600


def test_with_a_plan_last_is_the_last_run_of_that_plan(folder: Path) -> None:
    first = plait_here(folder, "runs", "--json").value[0]["run_id"]
    (folder / "other.yaml").write_text((folder / "plan.yaml").read_text().replace("name: table", "name: other"))
    plait_here(folder, "run", "other.yaml", "-q")
    done = plait_here(folder, "export", "last", "--to", "rows.csv")
    assert "(other, failed)" in done.err
    done = plait_here(folder, "export", "last", "--plan", "plan.yaml", "--to", "rows.csv")
    assert done.err == f"11 rows of run {first} (table, failed) in rows.csv\n"
    done = plait_here(folder, "export", "last", "--plan", "none.yaml", "--to", "rows.csv")
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_no_cell_is_a_formula(folder: Path) -> None:
    plait_here(folder, "export", "last", "--to", "safe.csv")
    rows = table(folder / "safe.csv")
    assert rows[0]["text"] == '\'=HYPERLINK("http://x")\nsecond, "line"'
    assert rows[9]["error"] == "'=cmd|' /C calc'!A0"
    assert rows[10]["data.why"] == "'@sum(1)"
    for row in rows:
        for name, cell in row.items():
            assert not name.startswith("="), name
            assert not cell.startswith(("=", "@", "\t")), cell


def test_raw_cells_are_as_they_are(folder: Path) -> None:
    assert plait_here(folder, "export", "last", "--to", "raw.csv", "--raw").code == 0
    rows = table(folder / "raw.csv")
    assert rows[0]["text"].startswith("=HYPERLINK")
    assert (rows[10]["data.why"], rows[1]["item.=age"]) == ("@sum(1)", "-2")
    done = plait_here(folder, "export", "last", "--otlp", "--raw")
    assert (done.code, done.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("- one\n- two", "- one\n- two"),
        ("-- a dash", "-- a dash"),
        ("\n- one", "\n- one"),
        ("* one", "* one"),
        ("+ one", "'+ one"),
        ("+1.5e3", "+1.5e3"),
        ("\n=1+1", "'\n=1+1"),
        ("\t=1+1", "'\t=1+1"),
        ("@sum(1)", "'@sum(1)"),
        ("=1+1", "'=1+1"),
    ],
)
def test_a_list_is_no_formula(text: str, cell: str) -> None:
    file = io.StringIO(as_csv([{"text": text}]), newline="")
    assert next(csv.DictReader(file)) == {"text": cell}
    file = io.StringIO(as_csv([{"text": text}], raw=True), newline="")
    assert next(csv.DictReader(file)) == {"text": text}


def test_json_lines_hold_the_values_as_they_are(folder: Path) -> None:
    value = plait_here(folder, "export", "last", "--to", "all.jsonl", "--task", "part.*", "--json").value
    assert value["rows"] == 10
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]
    assert rows[1]["item"]["name"] == "p2"
    assert rows[1]["text"].startswith("=HYPERLINK")
    assert (rows[9]["status"], rows[9]["text"], rows[9]["error_kind"]) == ("failed", None, "refused")


def test_another_suffix_is_refused(folder: Path) -> None:
    done = plait_here(folder, "export", "last", "--to", "all.xlsx")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert not (folder / "all.xlsx").exists()
