"""`plait run --goal` and `orchestrate:`, in a process of its own, against a server that plays all three parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.support.processes import warm
from tests.support.processes.command import PLAIT, Done, environment, plait_here
from tests.support.processes.warm import Warm
from tests.support.team import ANSWER, CALLS, GOAL, Team
from tests.support.wire import ChatCompletions, Exchange, Script, events, serve


class Cast:
    """Answers over the wire as `Team` does; `hangs` names calls that are never answered."""

    def __init__(self, team: Callable[[Callable[[str], None]], Team] = Team) -> None:
        self.calls: list[str] = []
        self.models: dict[str, set[str]] = {}
        self.hangs: set[str] = set()
        self.hanging = anyio.Event()
        self._team = team(self.calls.append)

    async def __call__(self, exchange: Exchange) -> None:
        prompt = exchange.request.body["messages"][-1]["content"]
        begins = prompt.split()[1]
        answers = {"do": self._team.execute, "judge": self._team.reflect}
        answer = await answers.get(begins, self._team.plan)(prompt)
        self.models.setdefault(self.calls[-1].split()[0], set()).add(exchange.request.body["model"])
        if self.calls[-1] in self.hangs:
            self.hanging.set()
            await exchange.until_gone()
            return
        text = answer if isinstance(answer, str) else json.dumps(answer)
        await events(ChatCompletions().parts(text))(exchange)


async def plait(folder: Path, server: Script, *words: str) -> Done:
    variables = environment(OPENAI_BASE_URL=f"{server.url}/v1", OPENAI_API_KEY="test")
    command = partial(warm.run, [*PLAIT, *words], cwd=folder, env=variables, timeout=60)
    done = await anyio.to_thread.run_sync(command)
    return Done(done.returncode, done.stdout, done.stderr)


def goal_plan(folder: Path, **settings: object) -> tuple[str, ...]:
    """Write a plan with the goal, and return the words that run the plan."""
    plan = {
        "backends": {"m": {"kind": "openai", "model": "m"}, "wise": {"kind": "openai", "model": "wise"}},
        "defaults": {"backend": "m"},
        "orchestrate": {"goal": GOAL, "reflect_every": 2, **settings},
    }
    (folder / "goal.json").write_text(json.dumps(plan))
    return ("run", "goal.json", "-j", "1")


async def test_the_answer_goes_to_standard_output_and_the_way_there_to_standard_error(tmp_path: Path) -> None:
    cast = Cast()
    async with serve(cast) as server:
        done = await plait(tmp_path, server, *goal_plan(tmp_path))
        assert (done.code, done.out) == (0, f"{ANSWER}\n"), done.err
        assert cast.calls == CALLS
        assert "3 tasks added: do.a, do.c, do.b\n" in done.err
        assert "8 of 8 tasks completed" in done.err
        assert "  goal      goal reached, 4 tasks executed\n" in done.err
        assert "stopped" not in done.err
        shown = await plait(tmp_path, server, "show", "last", "--json")
        assert shown.value["loop"] == {"phase": "done", "iteration": 4, "ended_by": "goal_reached"}
        assert shown.value["reason"] == "goal reached, 4 tasks executed"
        assert len(shown.value["tasks"]) == 8
        assert "do.d" in (await plait(tmp_path, server, "graph", "last")).out


async def test_each_part_may_have_a_backend_of_its_own(tmp_path: Path) -> None:
    cast = Cast()
    async with serve(cast) as server:
        done = await plait(tmp_path, server, *goal_plan(tmp_path, planner="wise"), "-q")
    assert (done.out, done.err) == (f"{ANSWER}\n", "")
    assert cast.models == {"plan": {"wise"}, "answer": {"wise"}, "find": {"m"}, "reflect": {"m"}}


async def test_a_goal_alone_runs_on_the_backend_of_the_command_line(tmp_path: Path) -> None:
    cast = Cast()
    words = ("run", "--goal", GOAL, "--backend", "openai", "--model", "m")
    async with serve(cast) as server:
        queued = await plait(tmp_path, server, *words, "--queue", "--json")
        assert (queued.code, cast.calls) == (0, [])
        done = await plait(tmp_path, server, "resume", queued.value["run_id"], "-q")
        again = await plait(tmp_path, server, *words, "-q")
    assert (done.code, done.out) == (again.code, again.out) == (0, f"{ANSWER}\n"), done.err
    assert set.union(*cast.models.values()) == {"m"}


async def test_it_says_at_which_limit_it_stopped(tmp_path: Path) -> None:
    async with serve(Cast()) as server:
        done = await plait(tmp_path, server, *goal_plan(tmp_path, max_iterations=2))
        assert done.code == 0
        assert done.out == "found a; found c\n"
        assert "  stopped   no further task was started: max_iterations is reached\n" in done.err
        shown = (await plait(tmp_path, server, "show", "last")).out
        assert "stopped   no further task was started: max_iterations is reached\n" in shown
        value = (await plait(tmp_path, server, "show", "last", "--json")).value
        assert value["loop"] == {"phase": "done", "iteration": 2, "ended_by": "max_iterations"}
        assert value["reason"] == "goal not reached (max_iterations), 2 tasks executed"
        done = await plait(tmp_path, server, *goal_plan(tmp_path, max_tasks=3), "--json", "--no-store")
    assert done.value["policy_state"]["stopped"] == "max_tasks"
    assert done.value["policy_state"]["phase"] == "done"


@pytest.mark.parametrize("call", ["plan", "find b", "reflect", "answer"])
async def test_killed_it_is_resumed_where_it_was(tmp_path: Path, call: str) -> None:
    cast = Cast()
    cast.hangs.add(call)
    async with serve(cast) as server:
        variables = environment(OPENAI_BASE_URL=f"{server.url}/v1", OPENAI_API_KEY="test")
        with Warm([*PLAIT, *goal_plan(tmp_path)], cwd=tmp_path, env=variables) as process:
            with anyio.fail_after(60):
                await cast.hanging.wait()
            process.kill()
        cast.hangs.clear()
        cast.calls.clear()
        done = await plait(tmp_path, server, "resume", "last", "-j", "1")
    assert (done.code, done.out) == (0, f"{ANSWER}\n"), done.err
    assert sorted(cast.calls) == sorted(CALLS[CALLS.index(call) :])  # others go ahead of the call that was cut


async def test_a_planner_that_only_plans_circles_fails_the_run(tmp_path: Path) -> None:
    class Circling(Team):
        async def plan(self, prompt: str) -> Any:
            await super().plan(prompt)
            return {"tasks": [{"id": "a", "prompt": "p", "depends_on": ["a"]}]}

    async with serve(Cast(Circling)) as server:
        done = await plait(tmp_path, server, *goal_plan(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert "second plan cannot be used either: these tasks wait for each other: a -> a" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("",), "the goal is empty"),
        (("goal", "plan.yaml"), "give either a plan file (- for standard input) or --goal TEXT"),
        (("goal", "--set", "a=b"), "--goal has none"),
        (("goal",), "no backend is configured"),
        (("goal", "--backend", "oracle"), "'oracle' is not an available backend"),
        (("goal", "--backend", "antropic"), "plait: there is no backend 'antropic'; did you mean 'anthropic'?\n"),
        (("goal", "--backend", "openai", "--model", "m", "--key", "a"), "--key goes with --queue"),
        (
            ("goal", "--backend", "openai", "--model", "m", "--queue", "--no-store"),
            "with --queue another process executes the run",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_stored(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = plait_here(tmp_path, "run", "--goal", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not (tmp_path / ".plait").exists()
