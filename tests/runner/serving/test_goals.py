"""Goals and workflows over HTTP: a real server, an orchestration and a step workflow posted as plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi import Response

from plait import ParallelRunner
from plait.backends.backend_specs import LocalSpec
from plait.errors import PlanError
from plait.orchestration import OrchestratorPolicy
from plait.persistence import MemoryStore
from plait.runner.client.offered_plans import posted_plan
from plait.runner.client.run_backends import BackendSet
from plait.runner.serving.http_routes import NewRun, ServedRuns
from tests.runner.serving.test_lifecycle import created, events, post
from tests.support.processes.served import served
from tests.support.served_backends import specs_of

BACKENDS = """
backends:
  w: {kind: function, call: "work.py:work"}
  wise: {kind: function, call: "work.py:wise"}
  archive: {kind: function, call: "work.py:archive"}
defaults: {backend: w}
"""
WORK = """
from pathlib import Path
import anyio

async def work(prompt):
    task = prompt.split("Task:\\n")[-1].splitlines()[0]
    Path(task[:40].replace("/", "-")).touch()
    while "held" in task and not Path("go").exists():
        await anyio.sleep(0.01)
    if task == "fail" and not Path("go").exists():
        raise ValueError("not today")
    return f"did {task}"

async def archive(prompt):
    return "from the archive"

async def wise(prompt):
    with open("asked", "a") as file:
        file.write(prompt + "\\n=====\\n")
    if prompt.startswith("You plan"):
        return {"tasks": [
            {"id": "a", "prompt": "held"},
            {"id": "b", "prompt": "look", "backend": "archive" if "archive: Searches" in prompt else "wise"},
        ]}
    return {"done": True} if prompt.startswith("You judge") else "the answer: " + "; ".join(
        line.strip() for line in prompt.splitlines() if line.startswith("  "))
"""
GOAL = {
    "inputs": {"what": "a bicycle"},
    "orchestrate": {
        "goal": "Find {{ what }}",
        "planner": "wise",
        "reflector": "wise",
        "registry": {"archive": "Searches the archive."},
    },
}
ANSWER = "the answer: did held; from the archive"


def texts(run: Any) -> dict[str, tuple[str | None, str | None]]:
    return {task["task_id"]: (task["backend"], task["text"]) for task in run["tasks"]}


def test_a_posted_goal_is_reached_after_the_server_was_killed(tmp_path: Path) -> None:
    with served(tmp_path, backends=BACKENDS, work=WORK) as server, server.client() as client:
        run_id = created(client, GOAL, inputs={"what": "a {{ lamp }}"}, key="k")
        again = post(client, "/api/runs", {"plan": GOAL, "inputs": {"what": "a {{ lamp }}"}, "key": "k"})
        assert (again.status_code, again.json()["run_id"]) == (200, run_id)
        events(client, run_id, until_="task_completed do.b")
        loop = {"phase": "executing", "iteration": 1, "ended_by": None}
        (listed,) = client.get("/api/runs").json()["runs"]
        assert client.get(f"/api/runs/{run_id}").json()["loop"] == listed["loop"] == loop
        server.kill()
    (tmp_path / "go").touch()
    with served(tmp_path, backends=BACKENDS, work=WORK) as server, server.client() as client:
        assert post(client, f"/api/runs/{run_id}/resume").status_code == 200
        assert events(client, run_id)[-1].event == "run_completed"
        assert client.get(f"/api/runs/{run_id}").json()["loop"]["ended_by"] == "goal_reached"
        run = client.get(f"/api/runs/{run_id}").json()
        assert (run["status"], run["name"]) == ("completed", "Find a {{ lamp }}")
        done = texts(run)
        assert (done["do.a"], done["do.b"]) == ((None, "did held"), ("archive", "from the archive"))
        assert done["answer"] == ("wise", ANSWER)
    asked = (tmp_path / "asked").read_text()
    assert asked.count("You plan") == 1, "the stored plan counts"
    assert asked.count("Goal:\nFind a {{ lamp }}\n") == 3


def test_a_posted_workflow_goes_from_step_to_step(tmp_path: Path) -> None:
    steps = [
        {"name": "try", "prompt": "fail", "on_error": "go_on", "retry": {"attempts": 1}},
        {"name": "next", "prompt": "after {{ try }} {{ who }}"},
        {"name": "last", "prompt": "{{ next }} again", "backend": "archive"},
    ]
    with served(tmp_path, backends=BACKENDS, work=WORK) as server, server.client() as client:
        run_id = created(client, {"inputs": {"who": "Ada"}, "workflow": steps})
        assert events(client, run_id)[-1].event == "run_completed"
        run = client.get(f"/api/runs/{run_id}").json()
        assert {task["task_id"]: (task["status"], task["text"] or "") for task in run["tasks"]} == {
            "try.1": ("skipped", ""),
            "next.1": ("completed", "did after  Ada"),
            "last.1": ("completed", "from the archive"),
        }


def test_a_posted_default_is_the_backend_of_tasks_steps_and_roles(tmp_path: Path) -> None:
    plans: list[dict[str, Any]] = [
        {"tasks": [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "continues": "a"}]},
        {"workflow": [{"name": "a", "prompt": "x"}]},
        {
            "tasks": [{"id": "a", "prompt": "x", "role": "coder"}],
            "follow_ups": [{"after": "coder", "steps": [{"role": "reviewer"}]}],
        },
    ]
    with served(tmp_path, backends=BACKENDS, work=WORK) as server, server.client() as client:
        for plan in plans:
            run_id = created(client, {"defaults": {"backend": "archive"}, **plan})
            assert events(client, run_id)[-1].event == "run_completed"
            found = texts(client.get(f"/api/runs/{run_id}").json())
            assert {text for _, text in found.values()} == {"from the archive"}
    tasks = [{"id": "a", "prompt": "x", "backend": "x"}, {"id": "b", "prompt": "x", "continues": "a"}]
    dag = posted_plan({"defaults": {"backend": "w"}, "tasks": tasks}, {}, specs_of("w", "x")).dag
    assert [dag.backend_of(task) for task in dag] == ["x", "x"], "a conversation stays on its backend"
    policy = posted_plan({"defaults": {"backend": "w"}, "orchestrate": {"goal": "g"}}, {}, specs_of("w", "x")).policy
    assert isinstance(policy, OrchestratorPolicy) and policy.backends() == {"w"}


@pytest.mark.parametrize(
    ("plan", "inputs", "said"),
    [
        ({"goal": "g", "registry": {"v": "x"}}, {}, "orchestrate.registry.v: unknown backend 'v'; the server has 'w'"),
        ({"goal": "g", "planner": "v"}, {}, "orchestrate.planner: unknown backend 'v'; the server has 'w'"),
        ({"goal": "x" * 20_001}, {}, "orchestrate.goal: string should have at most 20000 characters"),
        ({"goal": "{{ a }}" * 20}, {"a": "x" * 10_000}, "orchestrate.goal: the goal has 200,000 characters with"),
        ({"goal": "{% for a in range(10**9) %}{% endfor %}"}, {}, "orchestrate.goal: a goal may hold names of inputs"),
        ({"goal": "g", "max_iterations": 1_001}, {}, "orchestrate.max_iterations: must be at most 1000, not 1001"),
        ({"goal": "g", "max_tasks": 10**9}, {}, "orchestrate.max_tasks: must be at most 1000"),
        ({"goal": "g", "registry": {"w": "x" * 1_001}}, {}, "orchestrate.registry.w: string should have at most 1000"),
        ({"goal": "{{ a }}"}, {"a": {"files": "/etc/passwd"}}, "inputs.a: a posted plan reads no files"),
    ],
)
def test_what_a_posted_goal_may_not_say(plan: dict[str, Any], inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        posted_plan({"inputs": {"a": ""}, "orchestrate": plan}, inputs, specs_of("w"))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"name": "s", "prompt": "p", "backend": "v"}, "workflow[0].backend: unknown backend 'v'; the server has 'w'"),
        ({"name": "s", "prompt": "{% include '/etc/passwd' %}"}, "workflow[0].prompt"),
    ],
)
def test_what_a_posted_step_may_not_say(step: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        posted_plan({"workflow": [step]}, {}, specs_of("w"))
    assert said in str(refused.value)


async def test_a_goal_for_the_servers_small_model_asks_for_short_answers() -> None:
    store = MemoryStore()
    async with ParallelRunner(lambda _: "x", store=store).runs as service:
        specs = {"default": LocalSpec(kind="local")}
        api = ServedRuns(service, BackendSet(specs))
        shape = await api.create(NewRun(plan={"orchestrate": {"goal": "g"}}), Response())
        [first, *_] = await store.list_tasks(shape.run_id)
        assert first.prompt.startswith("Goal:") and "List the steps" in first.prompt
