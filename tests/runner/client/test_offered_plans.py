"""Plan files offered by name: what an agent is told of them, and what it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait import ParallelRunner
from plait.errors import PlaitError
from plait.persistence import MemoryStore
from plait.runner.client.offered_plans import LocalPlans
from plait.runner.client.run_backends import BackendOptions

PLAN = """\
inputs:
  topic: tea
  items: [1, 2]
  author: {required: true}
tasks:
  - id: whole
    run: [echo, "{{ topic }}"]
"""


def offered(folder: Path) -> LocalPlans:
    path = folder / "story.yaml"
    path.write_text(PLAN)
    store = MemoryStore()
    return LocalPlans([path], BackendOptions(), store, ParallelRunner(store=store).runs)


def test_each_plan_is_described_with_its_inputs_and_their_defaults(tmp_path: Path) -> None:
    inputs = {"topic": "tea", "items": [1, 2], "author": {"required": True}}
    assert offered(tmp_path).describe() == [{"plan": "story", "inputs": inputs}]


@pytest.mark.parametrize(
    ("plan", "inputs", "why"),
    [
        ("stori", {}, "^there is no plan 'stori'; did you mean 'story'"),
        ("other", {}, "^there is no plan 'other'; there are 'story'$"),
        ("story", {"topics": "tea"}, "'topics'.*did you mean 'topic'"),
        ("story", {"topic": "jam"}, "^the input 'author' of plan 'story' has no default; give it a value in `inputs`$"),
    ],
)
async def test_a_start_that_does_not_fit_the_plan_says_what_to_give(
    tmp_path: Path, plan: str, inputs: dict[str, str], why: str
) -> None:
    with pytest.raises(PlaitError, match=why):
        await offered(tmp_path).create(plan, inputs, None)
