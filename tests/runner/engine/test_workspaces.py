"""`cwd` and `env` of a task: where its command, its agent and its check work, and what no value may leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, Check, CommandBackend, ParallelRunner, RunStatus, SQLiteStore, Task
from plait.errors import DAGError
from plait.runner.domain.run_result import RunResult
from plait.testing import FakeBackend
from tests.support.agents.homes import make_home


async def run(folder: Path, *tasks: Task, **backends: Any) -> RunResult:
    backends = {"command": CommandBackend(cwd=folder), **backends}
    return await ParallelRunner(backends=backends).run(DAG(tasks))


def printer(text: str) -> Task:
    return Task("say", run=["sh", "-c", 'printf %s "$1"', "--", "{{ item }}"], item=text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("plan/repos/a", "plan/repos/b", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "plan"


async def test_each_part_works_in_its_own_folder_with_its_own_variables(folder: Path) -> None:
    words, env = ["sh", "-c", 'pwd; echo "$COLOUR"'], {"COLOUR": "of {{ item }}"}
    parts = [Task(name, run=words, item=name, cwd="repos/{{ item }}", env=env) for name in ("a", "b")]
    result = await run(folder, *parts)
    assert result.text == {name: f"{folder}/repos/{name}\nof {name}\n" for name in ("a", "b")}


@pytest.mark.parametrize(
    ("cwd", "value", "leads_to"),
    [
        ("repos/{{ say.stdout }}", "a", "repos/a"),
        ("repos/{{ say.stdout }}", "b/../a", "repos/a"),
        ("{{ say.stdout }}", "repos", "repos"),
        ("{{ say.stdout }}", "", "."),
        ("../{{ say.stdout }}", "elsewhere", "../elsewhere"),  # the author has written the dots
        ("repos/{{ say.stdout }}", "..", None),
        ("repos/{{ say.stdout }}", "../../elsewhere", None),
        ("repos/{{ say.stdout }}", "/tmp", None),
        ("{{ say.stdout }}", "/tmp", None),
        ("{{ say.stdout }}", "~", None),
        ("repos/{{ say.stdout }}", "link", None),
    ],
)
async def test_a_value_stays_below_the_folder_that_is_written_out(
    folder: Path, cwd: str, value: str, leads_to: str | None
) -> None:
    (folder / "repos" / "link").symlink_to(folder.parent / "elsewhere")
    result = await run(folder, printer(value), Task("work", run=["pwd"], cwd=cwd, depends_on=["say"]))
    if leads_to is not None:
        assert result.text["work"] == f"{(folder / leads_to).resolve()}\n"
    elif value == "~":
        assert (result["work"].error_kind, "no folder" in str(result["work"].error)) == ("unavailable", True)
    else:
        assert result["work"].error_kind == "invalid_request"
        assert f"leads out of {(folder / cwd.partition('{')[0]).resolve()}" in str(result["work"].error)


async def test_a_folder_that_is_written_out_may_be_anywhere(folder: Path) -> None:
    result = await run(folder, Task("work", run=["pwd"], cwd=str(folder.parent / "elsewhere")))
    assert result.text["work"] == f"{folder.parent}/elsewhere\n"


async def test_an_agent_works_there_and_so_does_its_check_and_what_continues_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(folder / "home", monkeypatch)
    check = Check(["sh", "-c", 'pwd > checked; test "$COLOUR" = red'])
    first = Task("first", "one", item="a", cwd="repos/{{ item }}", env={"COLOUR": "red"}, backend="coder", check=check)
    then = Task("then", "two", continues="first", backend="coder")
    result = await run(folder, first, then, coder=replace(home.claude(), cwd=folder))
    assert result.status is RunStatus.COMPLETED
    assert (folder / "repos/a/checked").read_text() == f"{folder}/repos/a\n"
    assert [call["cwd"] for call in home.calls] == [f"{folder}/repos/a"] * 2
    assert [call["colour"] for call in home.calls] == ["red", None]


async def test_a_tried_task_works_where_the_one_does_that_it_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(folder / "home", monkeypatch)
    say = Task("say", run=["printf", "a"])
    first = Task("first", "one", ["say"], item="repos", cwd="{{ item }}/{{ say.stdout }}", backend="coder")
    then = Task("then", "two", continues="first", backend="coder")
    coder = replace(home.claude(), cwd=folder)
    async with SQLiteStore(folder / "runs.db") as store:
        runner = ParallelRunner(backends={"command": CommandBackend(cwd=folder), "coder": coder}, store=store)
        await runner.run(DAG([say, first, then]), "first")
        fork = await runner.runs.fork("first", "then", only=True)
        async with runner.runs.start_fork(fork) as run:
            pass
        assert (await run.result()).status is RunStatus.COMPLETED
    assert [call["cwd"] for call in home.calls] == [f"{folder}/repos/a"] * 3


async def test_a_file_that_a_check_names_lies_where_the_task_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there before the turn, and has not changed since."""
    home = make_home(folder / "home", monkeypatch)
    (folder / "repos/a/notes").write_text("as before")
    work = Task("work", "one", cwd="repos/a", backend="coder", check=Check(["false", "notes"], tries=1))
    result = await run(folder, work, coder=replace(home.claude(), cwd=folder))
    assert result["work"].error == "the check of the answer failed: false notes: false ended with exit code 1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cwd": "{{ nobody }}"}, "the cwd uses {{ nobody }}, which is neither a task nor an input"),
        ({"env": {"X": "{{ nobody }}"}}, "the environment uses {{ nobody }}"),
        ({"cwd": ""}, "cwd must be the path of a folder, not ''"),
        ({"env": {"A=B": "1"}}, "env must have texts by the names of variables"),
        ({"env": {"PLAIT_TURN_1": "1"}}, "env must have texts by the names of variables"),
        ({"env": {"A": 1}}, "env must have texts by the names of variables"),
    ],
)
def test_what_is_refused_is_said(options: Any, said: str) -> None:
    with pytest.raises(DAGError) as caught:
        DAG([Task("work", run=["pwd"], **options)])
    assert said in str(caught.value)


async def test_a_model_takes_no_folder() -> None:
    async def answer(prompt: str) -> str:
        return prompt

    settings: list[dict[str, Any]] = [{"cwd": "here"}, {"env": {"A": "1"}}]
    for options in settings:
        with pytest.raises(DAGError, match=r"takes no (cwd|env) from a task"):
            await ParallelRunner(answer).run(DAG([Task("work", "p", **options)]))


@pytest.mark.parametrize(("now", "calls"), [("a", 0), ("b", 1)])
async def test_an_answer_is_taken_over_only_from_the_same_folder(tmp_path: Path, now: str, calls: int) -> None:
    class Keyed(FakeBackend):
        def answer_key(self) -> str:
            return "fake"

    def dag(value: str, *, cache: bool) -> DAG:
        return DAG([Task("work", "p", cwd="repos/{{ repo }}", cache=cache)], inputs={"repo": value})

    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(fake := Keyed({"work": "done"}), store=store)
        before = await runner.run(dag("a", cache=True))
        for cache, like in ((True, None), (False, before.run_id)):
            fake.calls.clear()
            await runner.run(dag(now, cache=cache), like=like)
            assert len(fake.calls) == calls
