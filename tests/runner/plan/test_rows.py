"""Inputs that are the rows of a file: what they become, what is refused and where, and what a run keeps of them."""

from __future__ import annotations

import csv
import json
import os
import socket
from pathlib import Path

import pytest
from jsonschema_rs import Validator

from plait.runner.client.offered_plans import posted_plan
from plait.runner.domain.dag import ROWS_AT_ONCE
from plait.runner.plan import PlanError, parse_plan
from tests.support.plans.logged import calls, make
from tests.support.plans.rows import TASKS, mistakes, rows
from tests.support.processes.command import plait, plait_here

VALUES = ["text", 1, 2.5, False, ["a", None], {"name": "Ä", "of": {"x": []}}, "u\u2028v"]
LINES = "\n\n  \r\n".join(json.dumps(value, ensure_ascii=False) for value in VALUES)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("p.jsonl", LINES, VALUES),
        ("p.NDJSON", LINES + "\n", VALUES),
        ("p.json", json.dumps(VALUES, indent=1), VALUES),
        ("p.json", " \n[1 ,\n2]\n", [1, 2]),
        ("p.csv", 'name,age\r\nAda,"3,6"\r\n\r\n"B ""x""\nb",\r\n', [("Ada", "3,6"), ('B "x"\nb', "")]),
        ("p.csv", ',\nname,age\nAda,3\n   \n,,,,\n , \n,4\n"",""\n,\n', [("Ada", "3"), ("", "4")]),
        ("p.tsv", "name\tage\nAda\t3\n  \n\t\n\t\t\t\n", [("Ada", "3")]),
        ("p.tsv", 'name\tage\nAda\t3,6\n Bo \t"a\tb"', [("Ada", "3,6"), (" Bo ", "a\tb")]),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_each_kind_of_file_is_a_list(tmp_path: Path, name: str, data: str, expected: list[object], mark: bytes) -> None:
    table = [{"name": row[0], "age": row[1]} if isinstance(row, tuple) else row for row in expected]
    assert rows(tmp_path, name, mark + data.encode()) == table


def test_rows_are_for_for_each_what_a_list_in_the_plan_is(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(LINES)
    plans = [f"inputs: {{people: {value}}}\n{TASKS}" for value in ("{rows: p.jsonl}", json.dumps(VALUES))]
    read, inline = (parse_plan(plan, folder=tmp_path).dag for plan in plans)
    assert (read.tasks, read.inputs) == (inline.tasks, inline.inputs)
    with pytest.raises(PlanError, match="element 2 of input 'people' is null"):
        parse_plan(f"inputs: {{people: [1, null]}}\n{TASKS}")


def test_values_as_deep_as_in_a_plan_are_taken(tmp_path: Path) -> None:
    deep = "[" * 50 + "]" * 50
    assert rows(tmp_path, "p.jsonl", deep) == rows(tmp_path, "p.json", f"[{deep}]") == [json.loads(deep)]
    assert rows(tmp_path, "p.csv", "a\n" + "x" * 131_072) == [{"a": "x" * 131_072}]
    assert csv.field_size_limit() == 131_072


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("p.jsonl", "\n \n"),
        ("p.json", " [ ] "),
        ("p.csv", ""),
        ("p.csv", "\na,b\n\n"),
        ("p.csv", "a,b\n,\n  \n"),
        ("p.json", ""),
    ],
)
def test_no_rows_are_a_mistake_of_the_plan(tmp_path: Path, name: str, data: str) -> None:
    (problem,) = mistakes(tmp_path, name, data)
    assert problem.where == "inputs.people"
    assert problem.message == f"{name!r} holds no rows"


def test_more_than_max_rows_are_counted_and_refused(tmp_path: Path) -> None:
    too_many = "1\n" * 1_007
    (problem,) = mistakes(tmp_path, "p.jsonl", too_many)
    assert problem.line == 1
    assert problem.message.startswith(
        "'p.jsonl' has 1,007 rows, but max_rows is 1,000; each row makes a task, and each task costs"
    )
    assert rows(tmp_path, "p.jsonl", too_many, more=", max_rows: 1007") == [1] * 1_007
    (problem,) = mistakes(tmp_path, "p.csv", "a\n" + "1\n" * 5, more=", max_rows: 4")
    assert "'p.csv' has 5 rows, but max_rows is 4" in problem.message


def test_more_rows_than_are_held_at_once_are_no_mistake(tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, "p.jsonl", "1\n" * 100_001)
    assert "'p.jsonl' has 100,001 rows, but max_rows is 1,000; each row makes a task" in problem.message
    plan = f"inputs: {{people: {{rows: p.jsonl, max_rows: 100001}}}}\n{TASKS}"
    dag = parse_plan(plan, folder=tmp_path).dag
    assert dag.rows_file is not None
    assert (dag.rows_file.path, len(dag)) == (str(tmp_path / "p.jsonl"), ROWS_AT_ONCE)


def short(folder: Path) -> Path:
    (folder / "short.jsonl").write_text("1\n2\n")
    return folder / "short.jsonl"


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    with (tmp_path / "p.csv").open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    with pytest.raises(PlanError, match=r"'p\.csv' has more than 64 MiB; split the file"):
        parse_plan(f"inputs: {{people: {{rows: p.csv}}}}\n{TASKS}", folder=tmp_path)


@pytest.mark.parametrize(
    ("spec", "where", "words"),
    [
        ("{rows: no.csv}", "inputs.people", "cannot read 'no.csv' in "),
        ("{rows: no.csv}", "inputs.people", "No such file or directory; check the path"),
        ("{rows: sub.json}", "inputs.people", "Is a directory; check the path"),
        ("{rows: short.txt}", "inputs.people", "must end with .jsonl, .ndjson, .json, .csv, .tsv, .parquet"),
        ("{rows: short}", "inputs.people", "the name of a file of rows must end with .jsonl"),
        ("{rows: short.jsonl, max_row: 3}", "inputs.people.max_row", "did you mean 'max_rows'?"),
        ("{rows: short.jsonl, max_rows: 0}", "inputs.people.max_rows", "must be at least 1, not 0"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_mistake_of_the_plan(tmp_path: Path, spec: str, where: str, words: str) -> None:
    short(tmp_path)
    (tmp_path / "sub.json").mkdir()
    with pytest.raises(PlanError) as caught:
        parse_plan(f"inputs:\n  people: {spec}\n{TASKS}", folder=tmp_path)
    (problem,) = caught.value.problems
    assert (problem.line, problem.where) == (2, where)
    assert words in problem.message


def test_a_mapping_whose_rows_are_no_text_is_a_value_like_any_other(tmp_path: Path, schema: Validator) -> None:
    for value in ({"columns": ["a", "b"], "rows": [[1, 2], [3, 4]]}, {"rows": None}, {"rows": 3}, {"rows": {"x": 1}}):
        plan: dict[str, object] = {"inputs": {"t": value}, "tasks": [{"id": "t1", "prompt": "{{ t.rows }}"}]}
        assert parse_plan(json.dumps(plan), format="json", folder=tmp_path).dag.inputs == {"t": value}
        assert posted_plan(plan, {}, {}).dag.inputs == posted_plan(plan, {"t": value}, {}).dag.inputs == {"t": value}
        schema.validate(plan)


def test_names_that_no_file_can_have_are_mistakes(tmp_path: Path) -> None:
    for name in ("\0.csv", "\ud800.csv", "x" * 5_000 + ".csv"):
        plan = {"inputs": {"people": {"rows": name}}, "tasks": [{"id": "t", "for_each": "people", "prompt": "x"}]}
        with pytest.raises(PlanError):
            parse_plan(json.dumps(plan), format="json", folder=tmp_path)


def test_a_file_named_at_the_command_is_relative_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = f"inputs: {{people: {{rows: gone.json, max_rows: 2}}}}\n{TASKS}"
    short(tmp_path)
    (tmp_path / "bad.csv").write_text("a,b\n1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("short.jsonl", "~/short.jsonl", str(tmp_path / "short.jsonl")):
        dag = parse_plan(plan, folder=Path("/nowhere"), overrides={"people": name}).dag
        assert dag.inputs["people"] == [1, 2]
    for name, said in {
        "bad.csv": "bad.csv:2: --set people: this row has 1 field",
        "no.csv": f"plan: --set people: cannot read 'no.csv' in {tmp_path}",
        "/nowhere/x.csv": "plan: --set people: cannot read '/nowhere/x.csv': No such file or directory; check the path",
        "[1, 2]": "plan: --set people: the name of a file of rows must end with",
        "~nobody-here/x.csv": "plan: --set people: the home folder '~nobody-here' is not known",
    }.items():
        with pytest.raises(PlanError) as caught:
            parse_plan(plan, folder=Path("/nowhere"), overrides={"people": name})
        assert str(caught.value).startswith(said)


def test_one_rows_mistake_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("1\nx\n")
    plan = "inputs:\n  people: {rows: p.jsonl}\n  more: {rows: no.csv}\n" + TASKS + '  - {id: u, prompt: "{{ v }}"}\n'
    with pytest.raises(PlanError) as caught:
        parse_plan(plan, folder=tmp_path)
    assert {problem.where for problem in caught.value.problems} == {"inputs.people", "inputs.more", "tasks[1].prompt"}


def at_command(folder: Path, spec: str) -> Path:
    """A plan on functions, whose tasks say `a` and `b` of each row."""
    plan = make(folder, '  - {id: t, for_each: people, prompt: "{{ item.a }} {{ item.b }}"}\n')
    plan.write_text(plan.read_text() + f"inputs: {{people: {spec}}}\n")
    return plan


def test_the_command_runs_each_row_once(tmp_path: Path) -> None:
    at_command(tmp_path / "plans", "{rows: people.csv}")
    (tmp_path / "plans" / "people.csv").write_text("a,b\n1,x\n2,y\n")
    (tmp_path / "other.jsonl").write_text('{"a": 3, "b": [1]}\n')
    checked = plait(tmp_path, "check", "plans/plan.yaml")
    assert (checked.code, checked.out.splitlines()[0]) == (0, "trial: 2 tasks in 1 level, no mistakes")
    assert plait_here(tmp_path, "run", "plans/plan.yaml", "-q").out == "== t.1 ==\nre: 1 x\n== t.2 ==\nre: 2 y\n"
    assert plait_here(tmp_path, "run", "plans/plan.yaml", "-q", "--set", "people=other.jsonl").out == "re: 3 [1]\n"
    assert sorted(calls(tmp_path)) == ["1 x", "2 y", "3 [1]"]


def test_the_command_tells_a_wrong_row_in_one_line_and_runs_none(tmp_path: Path) -> None:
    at_command(tmp_path, "{rows: people.csv}")
    (tmp_path / "people.csv").write_text("a,b\n1,x\n2\n")
    for command in ("check", "run"):
        done = plait(tmp_path, command, "plan.yaml")
        assert (done.code, done.out) == (2, "")
        assert "people.csv:3: inputs.people: this row has 1 field, and the header 2" in done.err
        assert len(done.err.splitlines()) == 1
    (problem,) = plait_here(tmp_path, "check", "plan.yaml", "--json").value["problems"]
    assert (problem["file"], problem["line"], problem["where"]) == ("people.csv", 3, "inputs.people")
    assert calls(tmp_path) == []


@pytest.mark.parametrize("then", ["gone", "other", "wrong"])
def test_a_resume_runs_the_rows_that_were_stored(tmp_path: Path, then: str) -> None:
    plan = make(tmp_path, '  - {id: t, for_each: people, prompt: "{{ item.a }}", backend: fail}\n', fail="fail")
    plan.write_text(plan.read_text() + "inputs: {people: {rows: people.csv}}\n")
    people = tmp_path / "people.csv"
    people.write_text("a\n1\n2\n")
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    (tmp_path / "log").unlink()
    (tmp_path / "go").touch()
    {"gone": people.unlink, "other": lambda: people.write_text("a\n7\n8\n9\n"), "wrong": lambda: people.write_text("")}[
        then
    ]()
    done = plait_here(tmp_path, "resume", "--retry-failed")
    assert (done.code, done.out) == (0, "== t.1 ==\nin: 1\n== t.2 ==\nin: 2\n")
    assert "plan file" not in done.err
    assert sorted(calls(tmp_path)) == ["1", "2"]


def test_what_is_no_plain_file_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "shut.csv").write_text("a\n1\n")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    (tmp_path / "shut.csv").chmod(0)
    names = ["loop.csv", *(["shut.csv"] if os.geteuid() else [])]
    for name in names:
        with pytest.raises(PlanError, match=f"cannot read '{name}' in "):
            parse_plan(f"inputs: {{people: {{rows: {name}}}}}\n{TASKS}", folder=tmp_path)


def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    os.mkfifo("pipe.csv")
    (tmp_path / "device.csv").symlink_to(os.devnull)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.csv")
        for what in ("device", "socket", "pipe"):
            words = f"'{what}.csv' is a {what}, not a regular file; write the rows to a regular file"
            with pytest.raises(PlanError, match=words):
                parse_plan(f"inputs: {{people: {{rows: {what}.csv}}}}\n{TASKS}", folder=tmp_path)
    (tmp_path / "linked.jsonl").symlink_to(short(tmp_path))
    assert parse_plan(f"inputs: {{people: {{rows: linked.jsonl}}}}\n{TASKS}", folder=tmp_path).dag.inputs == {
        "people": [1, 2]
    }


def test_what_the_shell_hands_over_is_asked_for_as_a_file(tmp_path: Path) -> None:
    for name in ("/dev/stdin", "/dev/fd/63", "-"):
        with pytest.raises(PlanError, match=r"the name of a file of rows must end with .*; convert the file"):
            parse_plan(f"inputs: {{people: {{rows: x.csv}}}}\n{TASKS}", folder=tmp_path, overrides={"people": name})
