"""A plan file that a Python program loads and runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from anyio.to_thread import run_sync

from plait import CommandBackend, ParallelRunner, Plan, RunStatus, SQLiteStore
from plait.errors import PlanError
from plait.testing import FakeBackend
from tests.support.processes.command import plait

PLAN = """
inputs: {rows: [a, b], word: hello}
backends:
  model: {kind: openai, model: m, base_url: "http://127.0.0.1:9", api_key_env: NO_KEY}
  shout: {kind: function, call: "tools.py:shout"}
defaults: {backend: model}
tasks:
  - {id: each, for_each: rows, prompt: "{{ word }} {{ item }}", model: large}
  - {id: all, depends_on: each, prompt: "{{ each }}"}
  - {id: loud, depends_on: all, backend: shout, prompt: "{{ all }}"}
  - {id: said, depends_on: loud, run: [cat], prompt: "{{ loud }}"}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text("def shout(prompt):\n    return prompt.upper()\n")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path / "plan.yaml"


async def test_a_plan_runs_with_its_own_backends_and_the_command_resumes_it(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def shout(prompt):\n    return prompt.upper()\n")
    path = tmp_path / "plan.yaml"
    path.write_text(
        'inputs: {word: {required: true}}\nbackends: {f: {kind: function, call: "tools.py:shout"}}\n'
        'tasks: [{id: a, prompt: "{{ word }}"}]'
    )
    result = await Plan.load(path, inputs={"word": "hi"}).run(store=tmp_path / "runs.db")
    assert (result.status, result["a"].text) == (RunStatus.COMPLETED, "HI")
    done = await run_sync(partial(plait, tmp_path, "resume", result.run_id, "--store", "runs.db"))
    assert done.code == 0, done.err
    async with SQLiteStore(tmp_path / "runs.db") as store:
        like = await Plan.load(path, inputs={"word": "hi"}).run(store=store, like=result.run_id)
    assert like["a"].reused is False
    assert like["a"].text == "HI"


async def test_inputs_of_the_call_replace_those_of_the_file(plan: Path) -> None:
    fake = FakeBackend(rule=lambda prompt: f"<{prompt}>")
    loaded = Plan.load(plan)
    result = await loaded.run(inputs={"rows": ["x"]}, backends={"model": fake})
    assert result.error is None
    assert [call.prompt for call in fake.calls] == ["hello x", '["<hello x>"]']
    assert result["said"].value == {"code": 0, "stdout": '<["<HELLO X>"]>', "stderr": ""}
    assert sorted(loaded.dag.inputs) == ["rows", "word"]
    with pytest.raises(PlanError, match="there is no input 'row'; did you mean 'rows'"):
        await loaded.run(inputs={"row": ["x"]}, backends=fake)


async def test_a_pilot_stays_one_with_other_inputs(plan: Path) -> None:
    fake = FakeBackend(rule=lambda prompt: prompt)
    await Plan.load(plan, limit=1).run(inputs={"rows": ["x", "y"]}, backends=fake)
    assert [call.task_id for call in fake.calls] == ["each.1", "all", "loud"]


async def test_a_run_with_stand_ins_is_resumed_with_a_runner(plan: Path, tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        fake = FakeBackend({"each": "e", "all": ValueError("no")}, rule=str.upper)
        first = await Plan.load(plan).run(store=store, backends=fake)
        assert first["all"].error is not None
        assert "ValueError: no" in first["all"].error
        names = {"model": FakeBackend({"all": "a"}), "shout": FakeBackend({"loud": "L"})}

        runner = ParallelRunner(backends={**names, "command": CommandBackend()}, default="model", store=store)
        result = await runner.resume(first.run_id, retry_failed=True)
    assert result["said"].data == {"code": 0, "stdout": "L", "stderr": ""}
