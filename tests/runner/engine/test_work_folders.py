"""One writer in a folder at a time: within a run, across runs and processes, and for as long as a program lives."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, CommandBackend, ParallelRunner, RunStatus, SQLiteStore, Task, events
from plait.backends import ConversationRequest
from plait.backends.process.child_process import own_variables
from plait.backends.process.files_and_locks import lock_folder
from plait.runner.client.runs import Runs
from plait.runner.engine.run_options import RunOptions
from tests.support.agents.homes import make_home
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm

ALONE = ["sh", "-c", 'test ! -e busy && mkdir busy && sleep 0.02 && echo >> "$0" && rmdir busy', "{log}"]
"""Fails if another one works in the folder."""
TOGETHER = ["sh", "-c", "echo >> met; until [ $(wc -l < met) -ge 2 ]; do sleep 0.01; done"]
"""Ends only once another one works in the folder."""


def alone(folder: Path) -> Sequence[str]:
    return [word.replace("{log}", str(folder / "log")) for word in ALONE]


def begun(folder: Path) -> int:
    return len((folder / "log").read_text().splitlines())


async def run(folder: Path, *tasks: Task, **options: Any) -> Any:
    backends = {"command": CommandBackend(cwd=folder), **options.pop("backends", {})}
    return await ParallelRunner(backends=backends, **options).run(DAG(tasks))


async def test_commands_of_a_run_write_in_a_folder_one_after_the_other(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "plait.db") as store:
        tasks = [Task(f"t{number}", run=alone(tmp_path)) for number in range(6)]
        result = await run(tmp_path, *tasks, store=store)
        assert (result.status, begun(tmp_path)) == (RunStatus.COMPLETED, 6)
        waits = [one.task_id for one in await store.list_events(result.run_id, kind=events.FolderAwaited.kind)]
        assert sorted(map(str, waits)) == [f"t{number}" for number in range(1, 6)], "each wait is told once"


async def test_runs_of_a_process_and_of_others_take_turns(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        f"tasks: [{{id: a, run: {alone(tmp_path)!r}}}, {{id: b, run: {alone(tmp_path)!r}}}]"
    )
    results = list[Any]()

    async def one() -> None:
        results.append(await run(tmp_path, Task("a", run=alone(tmp_path)), Task("b", run=alone(tmp_path))))

    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as other:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(one)
        assert other.wait() == 0
    assert [result.status for result in results] == [RunStatus.COMPLETED] * 3
    assert begun(tmp_path) == 8


async def test_those_that_share_and_those_in_other_folders_work_at_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    shared = [Task(name, run=TOGETHER, shared=True) for name in "ab"]
    assert (await run(tmp_path, *shared)).status is RunStatus.COMPLETED
    apart = ["sh", "-c", "echo >> ../both; until [ $(wc -l < ../both) -ge 2 ]; do sleep 0.01; done"]
    result = await run(tmp_path, Task("a", run=apart, cwd="one"), Task("b", run=apart, cwd="two"))
    assert result.status is RunStatus.COMPLETED


async def test_inside_a_checkout_a_folder_counts_with_those_around_and_within_it(tmp_path: Path) -> None:
    for name in ("repo/.git", "repo/src/deep", "repo/docs", "plain/inner"):
        (tmp_path / name).mkdir(parents=True)

    def may_lock(first: str, second: str) -> bool:
        one = lock_folder(tmp_path / first)
        assert one is not None
        two = lock_folder(tmp_path / second)
        one.close()
        if two is not None:
            two.close()
        return two is not None

    pairs = {
        ("repo", "repo"): False,
        ("repo", "repo/src/deep"): False,
        ("repo/src/deep", "repo"): False,
        ("repo/src", "repo/src/deep"): False,
        ("repo/src/deep", "repo/docs"): True,
        ("plain", "plain/inner"): True,
        ("plain", "repo"): True,
    }
    assert {pair: may_lock(*pair) for pair in pairs} == pairs
    (tmp_path / "link").symlink_to(tmp_path / "repo")
    assert not may_lock("link", "repo")


async def test_a_wait_holds_no_slot_and_says_why(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    assert lock is not None

    async def answer(prompt: str) -> str:
        return prompt

    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(answer, backends={"command": CommandBackend(cwd=tmp_path)}, store=store, concurrency=1)
        async with runner.start(DAG([Task("write", run=["true"], weight=9), Task("model", "p")])) as run:
            async for event in run.events():
                if isinstance(event, events.TaskCompleted) and event.task_id == "model":
                    break
            detail = await Runs(RunOptions(answer, store=store)).get(run.run_id)
            waits = detail.tasks["write"].waits
            assert waits is not None
            assert (waits.kind, waits.text) == (
                "folder",
                f"waits for the folder {tmp_path}, in which another run works",
            )
            lock.close()
            assert (await run.result()).status is RunStatus.COMPLETED


async def test_agents_that_may_write_take_turns_and_the_others_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path / "home", monkeypatch)
    reads, writes = home.claude(), home.claude(permission_mode="acceptEdits")
    assert not reads.writes
    assert writes.writes
    assert not replace(reads, permission_mode="plan", allowed_tools=("Edit",)).writes
    async with SQLiteStore(tmp_path / "plait.db") as store:
        tasks = [Task("r1", "p"), Task("r2", "p"), *(Task(name, "p", backend="writer") for name in ("w1", "w2"))]
        runner = ParallelRunner(reads, backends={"writer": writes}, store=store)
        result = await runner.run(DAG(tasks))
        waits = [one.task_id for one in await store.list_events(result.run_id, kind=events.FolderAwaited.kind)]
        assert (result.status, waits) == (RunStatus.COMPLETED, ["w2"])


async def test_a_task_that_is_cancelled_or_fails_gives_its_folder_back(tmp_path: Path) -> None:
    late = ["sh", "-c", "while :; do sleep 0.01; done"]
    tasks = (
        Task("lost", run=late, failure_mode="skip", weight=9),
        Task("won", run=["true"], shared=True),
        Task("race", run=["true"], depends_on=["lost", "won"], join="any", race=True),
        Task("fails", run=["false"], failure_mode="skip"),
        Task("slow", run=late, timeout=0.1, retry=0, failure_mode="skip"),
        Task("last", run=["true"], depends_on=["fails", "slow"]),
    )
    with anyio.fail_after(60):
        result = await run(tmp_path, *tasks)
    assert result["last"].status == "completed"
    lock = lock_folder(tmp_path)
    assert lock is not None
    lock.close()


async def test_a_task_that_loses_its_race_while_it_waits_ends_the_wait(tmp_path: Path) -> None:
    tasks = (
        Task("writer", run=["sh", "-c", "until [ -e go ]; do sleep 0.01; done"], weight=9),
        Task("lost", run=["true"], failure_mode="skip"),
        Task("won", run=["true"], shared=True),
        Task("race", run=["touch", "go"], depends_on=["lost", "won"], join="any", race=True, shared=True),
    )
    with anyio.fail_after(60):
        result = await run(tmp_path, *tasks)
    assert (result["lost"].status, result["writer"].status) == ("cancelled", "completed")


async def test_a_plait_within_a_command_does_not_wait_for_the_command(tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(
        f"tasks: [{{id: a, run: {alone(tmp_path)!r}}}, {{id: b, run: {alone(tmp_path)!r}}}]"
    )
    words = [sys.executable, "-c", "import sys; from plait.runner.cli import main; main()", "run", "inner.yaml", "-q"]
    with anyio.fail_after(120):
        result = await run(tmp_path, Task("outer", run=words))
    assert (result.status, begun(tmp_path)) == (RunStatus.COMPLETED, 2), result["outer"].error


def test_a_plait_within_a_command_has_the_folder_of_the_command_and_none_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".git", "src/deep", "docs"):
        (tmp_path / name).mkdir(parents=True)
    outer = lock_folder(tmp_path / "src")
    assert outer is not None
    for name, text in own_variables(ConversationRequest(keeps=outer.descriptors)).items():
        monkeypatch.setenv(name, text)
    may_lock = dict[str, bool]()
    for name in ("src", "src/deep", "docs", "."):
        lock = lock_folder(tmp_path / name)
        may_lock[name] = lock is not None
        if lock is not None:
            lock.close()
    outer.close()
    assert may_lock == {"src": True, "src/deep": True, "docs": True, ".": False}


HELD = """
tasks:
  - {id: build, run: [sh, -c, "echo >> begun; while [ ! -e go ]; do sleep 0.01; done; echo built >> done"]}
"""


def test_the_folder_is_taken_as_long_as_a_command_outlives_its_runner(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(HELD)
    (tmp_path / "other.yaml").write_text("tasks: [{id: other, run: [sh, -c, 'echo other >> done']}]")
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as running:
        until_there(tmp_path / "begun", running)
        running.kill()
    assert lock_folder(tmp_path) is None, "the kernel gives it back with the end of the command alone"
    with Warm([*PLAIT, "run", "other.yaml", "-q"], cwd=tmp_path, env=environment()) as other:
        while "folder_awaited" not in plait_here(tmp_path, "log", "last", "--json").out:
            assert other.poll() is None
        assert "waits for the folder" in plait_here(tmp_path, "show", "last").out
        (tmp_path / "go").touch()
        assert other.wait() == 0
    assert (tmp_path / "done").read_text() == "built\nother\n"
    first = json.loads(plait_here(tmp_path, "runs", "--json").out)[-1]["run_id"]
    assert plait(tmp_path, "resume", first).code == 0
    assert len((tmp_path / "begun").read_text().splitlines()) == 1


def until_there(path: Path, running: subprocess.Popen[bytes] | Any) -> None:
    ends = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < ends and running.poll() is None
        time.sleep(0.01)
