"""Rows of a file that a run reads as it goes: in blocks, none lost and none twice, and gone from memory once done."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from datetime import date
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, MemoryStore, ParallelRunner, RunStatus, SQLiteStore, events
from plait.backends import Reply, extras
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import InvalidRequest, PlanError, RunNotResumable, StoreRequired
from plait.persistence import Store
from plait.runner.cli import show_commands
from plait.runner.domain.dag import FREED
from plait.runner.engine import row_reader
from plait.runner.engine.live_run import state_of
from plait.runner.plan import plan_file, plan_inputs
from plait.runner.plan.plan_file import Plan
from plait.runner.state import stored_run
from plait.statuses import TaskStatus
from tests.support.fakes import QuickClock
from tests.support.processes import warm
from tests.support.processes.command import plait_here
from tests.support.sizes import size
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

MOST, AT_ONCE = 20, 5
PLAN = """
inputs: {people: {rows: people.jsonl, max_rows: 1000}}
backends: {fast: {kind: openai, model: m}}
tasks:
"""
ONE = '  - {id: note, for_each: people, prompt: "note {{ item.n }}"}\n'
PAIR = ONE + '  - {id: sum, for_each: people, depends_on: [note], prompt: "sum {{ item.n }} of {{ note }}"}\n'
ALL = """
  - {id: intro, prompt: who}
  - {id: note, for_each: people, depends_on: [intro], prompt: "note {{ item.n }} {{ intro }}"}
  - {id: sum, for_each: people, depends_on: [note], prompt: "sum {{ item.n }} {{ intro }}"}
  - {id: report, depends_on: [note, sum], prompt: report, backend: collect}
  - {id: last, depends_on: [report], prompt: "last {{ report }}"}
"""
"""Tasks before and behind the rows."""
PLAN_OF_ALL = PLAN.replace("model: m}}", "model: m}, collect: {kind: openai, model: m}}")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 21 tasks be many, and 5 rows a block."""
    monkeypatch.setattr(plan_file, "MAX_MADE", MOST)
    monkeypatch.setattr(plan_inputs, "ROWS_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(row_reader, "ROWS_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(stored_run, "TASKS_AT_ONCE", 2 * AT_ONCE)


def write_rows(folder: Path, count: int) -> Path:
    path = folder / "people.jsonl"
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(1, count + 1)))
    return path


def load(folder: Path, tasks: str = ONE, rows: int = 60, limit: int | None = None) -> Plan:
    write_rows(folder, rows)
    (folder / "plan.yaml").write_text(PLAN + tasks)
    return Plan.load(folder / "plan.yaml", limit=limit)


class Calls:
    """A backend that notes its prompts, and fails for those in `fails`."""

    def __init__(self, *fails: str) -> None:
        self.prompts: list[str] = []
        self.fails = fails

    async def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if prompt in self.fails:
            raise ValueError("no")
        return f"<{prompt}>"


class Planner:
    """A backend that adds a task to the run, also when it is corrected."""

    session_id = None

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Planner]:
        yield self

    async def send(self, prompt: str) -> Reply:
        adds = prompt == "note 30" or not prompt.startswith("note ")
        return Reply(prompt, tasks=({"id": "more", "prompt": "more"},) if adds else ())


def refused(folder: Path, tasks: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        load(folder, tasks)
    return [f"{one.where}: {one.message}" for one in caught.value.problems]


async def test_a_list_of_few_rows_is_made_into_tasks_before_the_run(tmp_path: Path) -> None:
    dag = load(tmp_path, rows=MOST).dag
    assert (len(dag), dag.rows_file) == (MOST, None)
    assert len(dag.inputs["people"]) == MOST  # type: ignore[arg-type]


@pytest.mark.parametrize(("tasks", "width"), [(ONE, 1), (PAIR, 2)])
async def test_the_first_rows_are_stored_first_and_all_are_done_once(tmp_path: Path, tasks: str, width: int) -> None:
    dag, calls = load(tmp_path, tasks).dag, Calls()
    assert dag.rows_file is not None
    assert (len(dag), dag.rows_file.width, dag.inputs) == (AT_ONCE * width, width, {})
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store, concurrency=2)
        most = 0
        async with runner.start(dag, "r") as run:
            async for _ in run.events():
                if (state := state_of(run)) is not None:
                    most = max(most, sum(task is not FREED for task in state.dag))
            result = await run.result()
        assert result.status is RunStatus.COMPLETED
        assert sorted(calls.prompts) == sorted(
            [f"note {n}" for n in range(1, 61)]
            + [f"sum {n} of <note {n}>" for n in range(1, 61) for _ in range(width - 1)]
        )
        assert most < 60 * width / 2
        assert result.left_out[TaskStatus.COMPLETED] + len(result.tasks) == 60 * width
        tasks_stored = await store.list_tasks("r")
        ids = [f"{name}.{n}" for n in range(1, 61) for name in ("note", "sum")[:width]]
        assert [task.task_id for task in tasks_stored] == ids
        assert {task.status for task in tasks_stored} == {"completed"}
        blocks = [json.loads(one.detail)["tasks"] for one in await store.list_events("r", kind="tasks_added")]
        assert blocks == [AT_ONCE * width] * (60 // AT_ONCE - 1)
        again = await runner.resume("r")
        assert (again.status, len(calls.prompts)) == (RunStatus.COMPLETED, 60 * width)


async def test_a_failed_row_and_those_that_it_blocks_do_not_hold_up_the_others(tmp_path: Path) -> None:
    calls = Calls("note 7", "note 55")
    dag = load(tmp_path, PAIR).dag
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store, concurrency=2)
        result = await runner.run(dag, "r")
        assert result.status is RunStatus.FAILED
        assert (result.failed, result.blocked) == (("note.7", "note.55"), ("sum.7", "sum.55"))
        calls.fails = ()
        calls.prompts.clear()
        mended = await runner.resume("r", retry_failed=True)
        assert mended.status is RunStatus.COMPLETED
        assert sorted(calls.prompts) == ["note 55", "note 7", "sum 55 of <note 55>", "sum 7 of <note 7>"]
        assert mended.resume_summary is not None
        assert (mended.resume_summary.reused, mended.resume_summary.ran) == (116, 4)


async def test_rows_that_wait_or_cannot_go_on_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "MOST_OPEN", 10)
    calls = Calls(*(f"note {n}" for n in range(1, 61)))
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store, concurrency=2)
        result = await runner.run(load(tmp_path, PAIR).dag, "r")
    assert (result.status, len(calls.prompts)) == (RunStatus.FAILED, 60)
    assert result.error is not None
    assert result.error.startswith("60 failed (note.1, note.2, note.3, note.4, note.5, ...), 60 blocked; note.1:")


@pytest.mark.parametrize("how", ["other", "gone", "touched"])
async def test_a_file_that_changed_before_a_resume_is_told(tmp_path: Path, how: str) -> None:
    dag, calls = load(tmp_path).dag, Calls()
    path = tmp_path / "people.jsonl"
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store, concurrency=1)
        run_id = await runner.runs.create(dag)
        if how == "other":
            path.write_text(path.read_text().replace('"n": 40', '"n": 41'))
        elif how == "gone":
            path.unlink()
        else:
            os.utime(path, (1, 1))
        if how == "touched":
            assert (await runner.resume(run_id)).status is RunStatus.COMPLETED
            return
        why = "has changed since the run was made" if how == "other" else "cannot be read"
        with pytest.raises(RunNotResumable, match=f"reads its rows from .*people.jsonl, which {why}"):
            await runner.resume(run_id)
        assert calls.prompts == []


async def test_a_file_that_changes_during_the_run_is_read_no_further(tmp_path: Path) -> None:
    dag, path = load(tmp_path).dag, tmp_path / "people.jsonl"
    calls = Calls()

    async def changes(prompt: str) -> str:
        if prompt == "note 12":
            path.write_text(path.read_text() + '{"n": 61}\n')
        return await calls(prompt)

    async with SQLiteStore(tmp_path / "runs.db") as store:
        result = await ParallelRunner(changes, backends={"fast": changes}, store=store, concurrency=1).run(dag, "r")
    assert result.status is RunStatus.FAILED
    read = len(calls.prompts)
    assert 12 <= read < 60
    assert result.error == f"{path}: it has changed since the run was made; the rows behind row {read} were not read"


async def test_a_mistake_in_a_later_row_ends_the_reading_and_is_told_by_check(tmp_path: Path) -> None:
    path, calls = write_rows(tmp_path, 60), Calls()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:40], "{oops", *lines[40:]]))
    (tmp_path / "plan.yaml").write_text(PLAN + ONE)
    with pytest.raises(PlanError, match="this is not JSON"):
        Plan.load(tmp_path / "plan.yaml", with_functions=True)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store)
        result = await runner.run(Plan.load(tmp_path / "plan.yaml").dag, "r")
    assert (result.status, len(calls.prompts)) == (RunStatus.FAILED, 40)
    assert result.error is not None
    assert "line 41: this is not JSON" in result.error
    assert result.error.endswith("the rows behind row 40 were not read")


async def test_only_rows_whose_ends_are_stored_leave_memory(tmp_path: Path) -> None:
    inner, calls, is_away, compared = MemoryStore(), Calls(), False, Counter[bool]()
    store = FaultyStore(inner, on_write(lambda n: Fault.BEFORE if n > 3 and is_away else None))
    runner = ParallelRunner(calls, backends={"fast": calls}, store=store, concurrency=2, clock=QuickClock())
    async with runner.start(load(tmp_path).dag, "r") as run:
        async for event in run.events():
            is_away = 10 <= len(calls.prompts) < 45
            state = state_of(run)
            if state is None or not isinstance(event, events.TaskEvent):
                continue
            freed = sum(task is FREED for task in state.dag)
            stored = sum(task.status == "completed" for task in await inner.list_tasks("r"))
            assert freed <= stored
            compared[is_away] += 1
        result = await run.result()
    assert compared[True] > 20
    assert (result.status, len(calls.prompts), len(result.degraded)) == (RunStatus.COMPLETED, 60, 1)
    assert {task.status for task in await inner.list_tasks("r")} == {"completed"}


async def collect(prompt: str, note: AsyncIterable[str], sum: AsyncIterable[str]) -> str:  # noqa: A002
    """Count the answers of all rows, and return the first and the last."""
    notes, sums = [one async for one in note], [one async for one in sum]
    return f"{len(notes)} {notes[0]} {notes[-1]} {sums[-1]}"


def collect_in_a_thread(prompt: str, note: Iterable[str], sum: Iterable[str]) -> str:  # noqa: A002
    notes, sums = [*note], [*sum]
    return f"{len(notes)} {notes[0]} {notes[-1]} {sums[-1]}"


def load_all(
    folder: Path, calls: Calls, store: Store, tasks: str = ALL, gather: Callable[..., Any] = collect
) -> tuple[DAG, ParallelRunner]:
    write_rows(folder, 60)
    (folder / "plan.yaml").write_text(PLAN_OF_ALL + tasks)
    backends: dict[str, Callable[..., Any]] = {"fast": calls, "collect": gather}
    return Plan.load(folder / "plan.yaml").dag, ParallelRunner(calls, backends=backends, store=store, concurrency=2)


@pytest.mark.parametrize("gather", [collect, collect_in_a_thread])
async def test_a_task_runs_before_the_rows_and_another_behind_all_of_them(
    tmp_path: Path, gather: Callable[..., Any]
) -> None:
    calls = Calls()
    async with SQLiteStore(tmp_path / "runs.db") as store:
        dag, runner = load_all(tmp_path, calls, store, gather=gather)
        assert dag.rows_file is not None
        assert [task.id for task in dag][:5] == ["intro", "report", "last", "note.1", "sum.1"]
        assert (dag.rows_file.first, dag.rows_file.width, dag.rows_file.behind) == (3, 2, ["report"])
        assert [task.id for task in dag.finals] == ["last"]
        result = await runner.run(dag, "r")
        told = "60 <note 1 <who>> <note 60 <who>> <sum 60 <who>>"
        assert (result.status, result["report"].text) == (RunStatus.COMPLETED, told)
        assert result["last"].text == f"<last {told}>"
        assert calls.prompts[0] == "who"
        assert len(calls.prompts) == 122
        pages = [rows async for rows in runner.runs.export_pages("r")]
        assert [row["task_id"] for row in pages[0]] == ["intro", "report", "last"]
        assert sum(map(len, pages)) == 123
        shown = await stored_run.listed_tasks(store, (await store.get_run("r")) or pytest.fail("no run"))
        assert [task.task_id for task in shown][:4] == ["intro", "report", "last", "note.1"]


@pytest.mark.parametrize("failed", ["note 7 <who>", "sum 7 <who>", "who"])
async def test_a_task_behind_all_rows_is_blocked_by_a_failed_one_and_runs_after_a_resume(
    tmp_path: Path, failed: str
) -> None:
    calls = Calls(failed)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        dag, runner = load_all(tmp_path, calls, store)
        result = await runner.run(dag, "r")
        assert result.status is RunStatus.FAILED
        assert result["report"].status is TaskStatus.PENDING
        assert "report" in result.blocked
        assert len(await store.list_tasks("r")) == (3 + 2 * AT_ONCE if failed == "who" else 123)
        calls.fails = ()
        mended = await runner.resume("r", retry_failed=True)
        assert (mended.status, mended["last"].text[:9]) == (RunStatus.COMPLETED, "<last 60 ")
        assert Counter(calls.prompts).most_common(2)[1][1] == 1


async def test_a_failure_that_is_soft_blocks_nothing_behind_the_rows(tmp_path: Path) -> None:
    calls = Calls("note 7 <who>", "note 60 <who>")
    soft = ALL.replace('{{ intro }}"}', '{{ intro }}", failure_mode: soft}')
    async with SQLiteStore(tmp_path / "runs.db") as store:
        dag, runner = load_all(tmp_path, calls, store, soft)
        result = await runner.run(dag, "r")
        assert result["report"].text == "60 <note 1 <who>>  <sum 60 <who>>"


async def test_a_mistake_in_a_row_blocks_what_is_behind_all_rows(tmp_path: Path) -> None:
    calls = Calls()
    async with SQLiteStore(tmp_path / "runs.db") as store:
        load_all(tmp_path, calls, store)
        path = tmp_path / "people.jsonl"
        path.write_text(path.read_text().replace('{"n": 40}', "{oops"))
        runner = ParallelRunner(calls, backends={"fast": calls, "collect": collect}, store=store)
        result = await runner.run(Plan.load(tmp_path / "plan.yaml").dag, "r")
        assert (result.status, result["report"].status) == (RunStatus.FAILED, TaskStatus.PENDING)
        assert "line 40: this is not JSON" in (result.error or "")


async def test_what_is_behind_all_rows_is_never_taken_over_from_a_pilot(tmp_path: Path) -> None:
    calls = Calls()
    async with SQLiteStore(tmp_path / "runs.db") as store:
        dag, runner = load_all(tmp_path, calls, store, ALL.replace("backend: collect", "weight: 1"))
        await runner.run(Plan.load(tmp_path / "plan.yaml", limit=7).dag, "pilot")
        calls.prompts.clear()
        await runner.run(dag, "whole", like="pilot")
        assert calls.prompts.count("report") == 1
        assert calls.prompts.count("who") == 0


def test_what_needs_all_rows_at_once_is_refused(tmp_path: Path) -> None:
    said = "input 'people' has so many rows that they are read during the run: "
    gathers = ONE + '  - {id: all, depends_on: [note], prompt: "all {{ note }}"}\n'
    assert refused(tmp_path, gathers) == [
        f"tasks[1].prompt: {said}the prompt names 'note', and would hold the results of all rows; let a "
        "function go over them as a parameter, or use `plait export`"
    ]
    gathers = ONE + "  - {id: all, depends_on: [note], prompt: all}\n"
    after = gathers + "  - {id: more, for_each: people, depends_on: [all], prompt: more}\n"
    assert refused(tmp_path, after) == [
        f"tasks[2].depends_on: {said}'all' waits for all rows, and no row can wait for it"
    ]
    goes_on = ONE.replace("prompt", "continues: first, prompt") + "  - {id: first, prompt: first}\n"
    assert refused(tmp_path, goes_on) == [f"tasks[0].continues: {said}only tasks of one row continue each other"]
    over = gathers + "  - {id: each, for_each: all, prompt: each}\n"
    assert refused(tmp_path, over) == [
        f"tasks[2].for_each: {said}no task goes over a list that is not known before the run"
    ]
    names = '  - {id: note, for_each: people, prompt: "{{ item.n }} of {{ people }}"}\n'
    assert refused(tmp_path, names) == [
        f"tasks[0].prompt: {said}the prompt names the whole list; name {{{{ item }}}} instead of 'people'"
    ]
    for key, given in {
        "repeat": "3",
        "cache": "true",
        "output": "tasks",
        "join": "done",
        "files": "[plan.yaml]",
    }.items():
        (problem, *_) = refused(tmp_path, f"  - {{id: note, for_each: people, prompt: p, {key}: {given}}}\n")
        assert problem.startswith(f"tasks[0].{key}: {said}")


def test_max_rows_still_guards_against_a_wrong_file(tmp_path: Path) -> None:
    write_rows(tmp_path, 1_001)
    (tmp_path / "plan.yaml").write_text(PLAN + ONE)
    with pytest.raises(PlanError, match="has 1,001 rows, but max_rows is 1,000"):
        Plan.load(tmp_path / "plan.yaml")


def test_a_pilot_takes_the_first_rows_only(tmp_path: Path) -> None:
    plan = load(tmp_path, limit=7)
    assert (len(plan.dag), plan.dag.rows_file, plan.lengths) == (7, None, {"people": 60})


@pytest.mark.parametrize("name", ["people.csv", "people.tsv", "people.jsonl"])
async def test_rows_of_each_kind_of_file_are_read_in_order(tmp_path: Path, name: str) -> None:
    separator = "\t" if name.endswith("tsv") else ","
    rows = [{"n": str(number), "text": f'a "{number}"\nb'} for number in range(1, 61)]
    if name.endswith("jsonl"):
        text = "\n\n".join(json.dumps(row) for row in rows)
    else:
        quoted = [separator.join((row["n"], '"' + row["text"].replace('"', '""') + '"')) for row in rows]
        text = "\r\n".join([separator.join(rows[0]), *quoted])
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "plan.yaml").write_text(PLAN.replace("people.jsonl", name) + ONE)
    dag, calls = Plan.load(tmp_path / "plan.yaml").dag, Calls()
    assert dag.rows_file is not None
    async with SQLiteStore(tmp_path / "runs.db") as store:
        await ParallelRunner(calls, backends={"fast": calls}, store=store, concurrency=1).run(dag, "r")
        stored = [json.loads(task.spec)["item"] for task in await store.list_tasks("r")]
    assert calls.prompts == [f"note {number}" for number in range(1, 61)]
    assert stored == rows


async def test_a_parquet_file_is_read_by_its_groups_of_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    rows = [{"n": n, "on": date(2026, 1, 9), "cost": Decimal(n) / 4, "text": None} for n in range(1, 61)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "people.parquet", row_group_size=7)
    (tmp_path / "plan.yaml").write_text(PLAN.replace("people.jsonl", "people.parquet") + ONE)
    left = [one[0] for one in plan_inputs.row_entries(tmp_path / "people.parquet", 58) if isinstance(one, tuple)]
    assert left == [59, 60]
    plan, calls = Plan.load(tmp_path / "plan.yaml"), Calls("note 13")
    assert plan.dag.rows_file is not None
    assert plan.lengths == {"people": 60}
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store, concurrency=1)
        assert (await runner.run(plan.dag, "r")).failed == ("note.13",)
        stored = [json.loads(task.spec)["item"] for task in await store.list_tasks("r")]
        calls.fails = ()
        assert (await runner.resume("r", retry_failed=True)).status is RunStatus.COMPLETED
    assert calls.prompts == [*(f"note {number}" for number in range(1, 61)), "note 13"]
    assert stored == [{**row, "on": "2026-01-09", "cost": f"{row['cost']:.2f}"} for row in rows]


def test_a_parquet_file_is_checked_as_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.replace("people.jsonl", "people.parquet") + ONE)
    path = tmp_path / "people.parquet"
    path.write_text("no")

    def mistake() -> str:
        with pytest.raises(PlanError) as caught:
            Plan.load(tmp_path / "plan.yaml", with_functions=True)
        return caught.value.problems[0].message

    with monkeypatch.context() as patch:
        patch.setattr(extras, "find_spec", lambda _name: None)
        assert mistake().startswith("a .parquet file of rows needs the extra `parquet` (pyarrow); run: ")
    pytest.importorskip("pyarrow")
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    assert "this is no parquet file" in mistake()
    for count in (7, 60):
        parquet.write_table(arrow.table({"n": range(count), "raw": [b"x"] * count}), path)
        assert mistake() == "row 1: JSON has no bytes; cast the column to text, or leave it out"
    parquet.write_table(arrow.table({"n": range(1_001)}), path)
    assert "has 1,001 rows, but max_rows is 1,000" in mistake()


async def test_a_list_in_json_is_no_file_to_be_read_as_the_run_goes(tmp_path: Path) -> None:
    (tmp_path / "people.json").write_text(json.dumps([{"n": n} for n in range(60)]))
    (tmp_path / "plan.yaml").write_text(PLAN.replace("people.jsonl", "people.json") + ONE)
    with pytest.raises(PlanError, match="has more than 20 rows, and a list is read as a whole"):
        Plan.load(tmp_path / "plan.yaml")


async def test_such_a_run_needs_a_store_and_adds_no_other_tasks(tmp_path: Path) -> None:
    dag, calls = load(tmp_path).dag, Calls()
    with pytest.raises(StoreRequired, match="keeps its results in a store only"):
        await ParallelRunner(calls, backends={"fast": calls}).run(dag)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        result = await ParallelRunner(Planner(), backends={"fast": Planner()}, store=store).run(dag, "r")
        (record,) = await store.list_tasks("r", "note.30")
    assert result.status is RunStatus.FAILED
    assert record.error is not None
    assert "a run that reads its rows as it goes adds no other tasks" in record.error


async def test_a_run_with_many_rows_is_exported_page_by_page(tmp_path: Path) -> None:
    dag, calls = load(tmp_path, PAIR).dag, Calls()
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store)
        await runner.run(dag, "r")
        with pytest.raises(InvalidRequest, match="has too many rows to be held at once"):
            await runner.runs.export("r")
        pages = [rows async for rows in runner.runs.export_pages("r", "sum.*")]
        assert [len(rows) for rows in pages] == [AT_ONCE] * 12
        exported = [(row["task_id"], row["item"]["n"], row["text"]) for rows in pages for row in rows]
        assert exported == [(f"sum.{n}", n, f"<sum {n} of <note {n}>>") for n in range(1, 61)]
        assert (await runner.runs.get("r")).total == 120


async def test_the_whole_takes_over_what_its_pilot_has_answered(tmp_path: Path) -> None:
    calls = Calls()
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(calls, backends={"fast": calls}, store=store)
        await runner.run(load(tmp_path, PAIR, limit=7).dag, "pilot")
        calls.prompts.clear()
        dag = load(tmp_path, PAIR).dag
        estimate = await runner.runs.estimate(dag)
        assert [(task.task_id, task.calls) for task in estimate.tasks] == [("note", 60), ("sum", 60)]
        result = await runner.run(dag, "whole", like="pilot")
        assert (result.status, len(calls.prompts)) == (RunStatus.COMPLETED, 2 * (60 - 7))
        said = "read its rows as it went, and no other run takes its answers over"
        with pytest.raises(InvalidRequest, match=said):
            await runner.run(load(tmp_path).dag, like="whole")
        with pytest.raises(InvalidRequest, match=said):
            await runner.runs.fork("whole", "note")


WORK = """
async def work(prompt):
    if prompt in {"note 13", "note 57"}:
        raise ValueError("no")
    return prompt
"""


def test_the_commands_show_the_last_tasks_and_export_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_run, "MOST_LISTED", 4)
    monkeypatch.setattr(show_commands, "MOST_LISTED", 4)
    (tmp_path / "work.py").write_text(WORK)
    write_rows(tmp_path, 60)
    backend = '{kind: function, call: "work.py:work"}'
    (tmp_path / "plan.yaml").write_text(PLAN.replace("{kind: openai, model: m}", backend) + ONE)
    checked = plait_here(tmp_path, "check", "plan.yaml")
    assert "rows          people: 60 lines, read during the run" in checked.out
    ran = plait_here(tmp_path, "run", "plan.yaml")
    assert (ran.code, ran.out) == (1, "")
    assert "58 of 60 tasks completed" in ran.err
    assert "2 failed" in ran.err
    shown = plait_here(tmp_path, "show", "last")
    assert "58 of 60 tasks completed, 2 failed" in shown.out
    assert [f"note.{n} " in shown.out for n in (56, 57, 60)] == [False, True, True]
    assert "at most the last 4 tasks of a run with so many rows" in shown.out
    failed = plait_here(tmp_path, "show", "last", "--status", "failed", "--json").value
    assert [task["task_id"] for task in failed["tasks"]] == ["note.13", "note.57"]
    log = plait_here(tmp_path, "log", "last")
    assert log.code == 0
    assert all(f"note.{n}" in log.out for n in range(1, 61))
    assert plait_here(tmp_path, "runs").code == 0
    assert plait_here(tmp_path, "graph", "last").code == 0
    for name in ("out.csv", "out.jsonl"):
        assert plait_here(tmp_path, "export", "last", "--to", name).code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        table = [(row["task_id"], row["item.n"], row["status"]) for row in csv.DictReader(file)]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    statuses = ["failed" if n in {13, 57} else "completed" for n in range(1, 61)]
    assert table == [(f"note.{n}", str(n), statuses[n - 1]) for n in range(1, 61)]
    assert [one["text"] for one in lines if one["text"] is not None] == [
        f"note {n}" for n in range(1, 61) if n not in {13, 57}
    ]
    again = plait_here(tmp_path, "resume", "last", "--retry-failed", "--json")
    assert (again.value["status"], again.value["ran"]) == ("failed", 2)


_CUT = f"""
import asyncio, os, random, signal, sys
from plait import ParallelRunner, SQLiteStore, failpoints
from plait.runner.engine import row_reader
from plait.runner.plan import plan_file, plan_inputs
from plait.runner.plan.plan_file import Plan

plan_file.MAX_MADE = {MOST}
plan_inputs.ROWS_AT_ONCE = row_reader.ROWS_AT_ONCE = 3

class NoDelay(random.Random):
    def random(self):
        return 0.0

async def work(prompt):
    with open("log", "a") as file:
        file.write(prompt + "\\n")
    return "<" + prompt + ">"

async def collect(prompt, note):
    return await work(str(len([one async for one in note])))

async def main():
    how, *cut = sys.argv[1:]
    left = int(cut[1]) if cut else -1

    def die(name):
        nonlocal left
        left -= name == cut[0]
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    async with SQLiteStore("runs.db") as store:
        if cut:
            failpoints.on_reach = die
        backends = {{"fast": work, "collect": collect}}
        runner = ParallelRunner(work, backends=backends, store=store, concurrency=1, rng=NoDelay())
        if how == "first":
            await runner.run(Plan.load("plan.yaml").dag, "r")
        else:
            await runner.resume("r")

asyncio.run(main())
"""


def _go(folder: Path, *words: str) -> int:
    program = "import runpy; runpy.run_path('cut.py', run_name='__main__')"
    return warm.run([sys.executable, "-c", program, *words], cwd=folder, timeout=120).returncode


ROWS = 14
"""Of two tasks each, more than MOST together; so many blocks of three that three processes of one each miss some."""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["txn.before_commit", "txn.after_commit"])
@pytest.mark.parametrize("others", [(), ("intro", "report", "last")])
def test_a_run_killed_at_any_transaction_loses_no_row_and_reads_none_twice(
    tmp_path: Path, place: str, others: Sequence[str]
) -> None:
    (tmp_path / "cut.py").write_text(_CUT)
    write_rows(tmp_path, ROWS)
    (tmp_path / "plan.yaml").write_text(PLAN_OF_ALL + ALL if others else PLAN + PAIR)
    who, more = (" <who>", {"who", f"{ROWS}", f"last <{ROWS}>"}) if others else ("", set[str]())
    answers = {f"note {n}{who}" for n in range(1, ROWS + 1)} | {
        f"sum {n}{who or f' of <note {n}>'}" for n in range(1, ROWS + 1)
    }
    cuts = ended = 0
    for number in range(3, 60, size(4, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("cut.py", "plan.yaml", "people.jsonl"):
            shutil.copy2(tmp_path / name, folder / name)
        if _go(folder, "first", place, str(number)) == 0:
            ended = number
        else:
            cuts += 1
            assert _go(folder, "resume", place, str(number)) in {0, -9}  # a second death, where it goes on so long
            assert _go(folder, "resume") == 0
        with closing(sqlite3.connect(folder / "runs.db")) as connection:
            stored = connection.execute("SELECT task_id, status FROM tasks ORDER BY position").fetchall()
        rows = [f"{name}.{n}" for n in range(1, ROWS + 1) for name in ("note", "sum")]
        assert [row[0] for row in stored] == [*others, *rows]
        assert {row[1] for row in stored} == {"completed"}
        made = Counter((folder / "log").read_text().splitlines())
        assert made.keys() == answers | more
        assert made.total() <= 2 * ROWS + len(more) + 2  # one more for each kill
        if ended:
            break
    assert cuts > size(5, 20)
    assert ended
