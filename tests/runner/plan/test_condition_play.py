"""Conditions tried before the run: what can never be true is a mistake, and nothing else is."""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Any

import anyio
import pytest

from plait.errors import PlanError
from plait.runner.parallel_runner import ParallelRunner
from plait.runner.plan import parse_plan
from plait.runner.plan.condition_play import MOST_TRIES, Play
from plait.statuses import TaskStatus
from plait.task import Task
from plait.testing import FakeBackend
from tests.support.sizes import size

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "k": {"enum": ["bug", "idea"]},
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 1, "maximum": 3},
        "part": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "percent": {"type": "integer", "minimum": 0, "maximum": 100},
        "digit": {"enum": ["1", "2"]},
        "own": {"anyOf": [{"const": "a"}, {"type": "null"}]},
        "s": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["x"]}},
    },
    "required": ["k", "ok", "n", "s"],
}
KIND: dict[str, Any] = {"id": "kind", "prompt": "x", "output_schema": SCHEMA}
NONE = "none of that fulfils it: correct the condition, or leave it out"


def told(*tasks: dict[str, Any], **keys: Any) -> list[str]:
    """Return the messages about the plan, each with its place in the plan."""
    try:
        parse_plan(json.dumps({"tasks": tasks, **keys}), format="json")
    except PlanError as error:
        return [f"{one.where}: {one.message}" for one in error.problems]
    return []


def when(condition: str, *others: dict[str, Any], **first: Any) -> list[str]:
    """Return the messages about a task with the condition, which reads `kind`."""
    task: dict[str, Any] = {"id": "a", "prompt": "x", "when": condition}
    return told(KIND | first, *others, task | {"depends_on": ["kind", *(one["id"] for one in others)]})


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("{{ kind.k }} == 'bugg'", "kind.k is 'bug' or 'idea'; did you mean 'bug'?"),
        ("{{ kind.k }} in ['x', 'ideas']", "kind.k is 'bug' or 'idea'; did you mean 'idea'?"),
        ("{{ results['kind'].data.k }} == 'other'", f"kind.k is 'bug' or 'idea'; {NONE}"),
        ("{{ kind.k }} == 'bug' and {{ kind.k }} == 'idea'", f"kind.k is 'bug' or 'idea'; {NONE}"),
        ("{{ kind.k }} not in ['bug', 'idea']", f"kind.k is 'bug' or 'idea'; {NONE}"),
        ("{{ kind.ok }} == 'true'", "kind.ok is true or false; write true without quotes"),
        ("{{ kind.digit }} == 1", "kind.digit is '1' or '2'; write '1' in quotes"),
        ("{{ kind.n }} > 3", f"kind.n is 1, 2 or 3; {NONE}"),
        ("1 < {{ kind.n }} and {{ kind.n }} < 2", f"kind.n is 1, 2 or 3; {NONE}"),
        ("{{ kind.percent }} < 0", f"kind.percent is 0, 1, 2, 3, 4, 5 or 95 others; {NONE}"),
        ("{{ kind.own }} == 'b'", f"kind.own is 'a' or none; {NONE}"),
        ("{{ kind.k }} == 'bugg' and {{ kind.s }} == 'x'", "kind.k is 'bug' or 'idea'; did you mean 'bug'?"),
        ("{{ kind.k }}", "it fails with every answer: its value is 'bug', neither true nor false; compare the value"),
        ("{{ kind.k }} > 3", "it fails with every answer: '>' needs two numbers or two texts"),
    ],
)
def test_a_condition_that_is_true_of_no_answer_is_a_mistake(condition: str, message: str) -> None:
    (mistake,) = when(condition)
    assert mistake.startswith(f"tasks[1].when: this condition is never true: {message}")


@pytest.mark.parametrize(
    "condition",
    [
        "{{ kind.k }} == 'bug'",
        "{{ kind.n }} > 1 and {{ kind.n }} < 3",
        "{{ kind.part }} > 0.3 and {{ kind.part }} < 0.6",
        "{{ kind.k }} == 'bugg' or {{ kind.s }} == 'x'",
        "{{ kind.s }} == 'x' and {{ kind.s }} != 'y'",
        "not ({{ kind.s }} in ['a', 'b', 'c']) and {{ kind.s }} and {{ kind.ok }}",
        "{{ kind.k }} != 'bug' and 1 < {{ kind.s }} < 5",
        "{{ kind.own }} == none",
        "{{ kind.tags[0].part }} == 'y' and {{ kind.k }} == 'bug'",
        "{{ kind.k }} == {{ mode }}",
        "{{ kind.n }} > {{ other.n }} and {{ kind.ok }}",
        "{{ kind.k }} == 'bug' and false",
        "{{ kind.k | upper }} == 'BUGG'",
        "{{ kind.n + 5 }} > 3",
        "false",
    ],
)
def test_no_other_condition_is(condition: str) -> None:
    other = {"id": "other", "prompt": "x", "output_schema": {"properties": {"n": {"type": "integer", "minimum": 3}}}}
    tasks = [KIND, other, {"id": "a", "prompt": "x", "when": condition, "depends_on": ["kind", "other"]}]
    assert not told(*tasks, inputs={"mode": "bugg"})


def test_a_task_may_end_without_a_result() -> None:
    for condition in ("{{ kind.k }} == ''", "{{ kind.k }} not in ['bug', 'idea']", "not {{ kind.k }}"):
        assert when(condition)
        assert not when(condition, failure_mode="soft")
        assert not when(condition, when="{{ 1 == 1 }}")
        assert not told(KIND, {"id": "a", "prompt": "x", "when": condition, "depends_on": "kind", "join": "done"})
    assert when("{{ kind.k }} == 'bugg'", failure_mode="soft")


def test_the_code_of_a_command() -> None:
    def told_of(condition: str, **command: Any) -> list[str]:
        return told(
            {"id": "test", "run": ["ls"], **command},
            {"id": "a", "run": ["ls"], "depends_on": "test", "when": condition},
        )

    (mistake,) = told_of("{{ test.code }} != 0")
    assert mistake.endswith("test.code is 0; a code other than 0 fails 'test': add `codes: any` to it")
    assert not told_of("{{ test.code }} != 0", codes="any")
    assert not told_of("{{ test.code }} < 0", codes="any")
    assert not told_of("{{ test.code }} == 1", codes=[0, 1])
    (mistake,) = told_of("{{ test.code }} == 2", codes=[0, 1])
    assert f"test.code is 0 or 1; {NONE}" in mistake


def test_the_vote_of_samples_and_a_part_of_a_list() -> None:
    assert when("{{ kind.k }} == 'bugg'", repeat=3, vote="majority")
    assert not when("{{ kind.k }} == 'bugg'", repeat=3, vote="all")
    rows = {"inputs": {"rows": [1, 2, 3]}}
    part = {"id": "a", "prompt": "x", "when": "{{ kind.k }} == 'bugg'", "depends_on": "kind"}
    assert len(told(KIND | {"for_each": "rows"}, part | {"for_each": "rows"}, **rows)) == 1
    assert not told(KIND | {"for_each": "rows"}, part, **rows)  # the name is that of a list


def test_a_loop_that_cannot_end_and_a_branch_in_it() -> None:
    test: dict[str, Any] = {"id": "test", "run": ["ls"], "codes": [0, 1]}
    loop: dict[str, Any] = {"tasks": [test], "until": "{{ test.code }} == 2", "max": 4}
    (mistake,) = told({"id": "fix", "loop": loop})
    assert mistake.startswith("tasks[0].loop.until: this condition is never true, so the loop fails after round 4: ")
    assert not told({"id": "fix", "loop": loop | {"until": "{{ test.code }} == 1"}})
    (mistake,) = told({"id": "fix", "loop": loop | {"until": "{{ test.code }} = 2"}})
    assert "'=' follows a whole expression" in mistake
    inner = {"id": "b", "run": ["ls"], "depends_on": "test", "when": "{{ test.code }} == 2"}
    (mistake,) = told({"id": "fix", "loop": loop | {"tasks": [test, inner], "until": "true"}})
    assert mistake.startswith("tasks[0].loop.tasks[1].when: this condition is never true: test.code is 0 or 1")


def test_a_check_that_no_answer_passes() -> None:
    (mistake,) = told(KIND | {"check": {"passes": "{{ answer.ok }} == 'yes'"}})
    assert mistake.startswith("tasks[0].check.passes: no answer passes: answer.ok is true or false; none of that")
    assert not told(KIND | {"check": {"passes": "{{ answer.ok }} == true"}})
    own = {"output_schema": {"enum": ["a", "b"]}, "passes": "{{ answer }} == 'c'"}
    assert "answer is 'a' or 'b'" in told({"id": "t", "prompt": "x", "check": own})[0]


def test_tries_have_a_bound() -> None:
    properties = {f"f{number}": {"type": "boolean"} for number in range(40)}
    wide: dict[str, Any] = {"output_schema": {"type": "object", "properties": properties}}
    few, many = (" and ".join(f"{{{{ kind.{name} }}}} == 1.5" for name in list(properties)[:n]) for n in (8, 9))
    assert MOST_TRIES == 500
    assert when(few, **wide)
    assert not when(many, **wide)
    play = Play()
    assert sum(play.of(few, {"kind": Task("kind", "x", **wide)}.get) is not None for _ in range(100)) == 78


VALID = ["{{ kind.k }} == 'bug'", "{{ kind.ok }}", "{{ kind.n }} >= 2"]
TERMS = [
    *VALID,
    *("{{ kind.k }} == 'bugg'", "{{ kind.k }} not in ['bug', 'idea']", "{{ kind.ok }} == 'true'", "{{ kind.n }} > 3"),
    *("{{ kind.n }} < 2", "1 < {{ kind.n }} < 3", "{{ kind.k }} > 2", "not {{ kind.ok }}", "{{ kind.s }} == 'x'"),
]
MIDDLE = ["{{ mid.ok }} == true", "{{ mid.ok }} == false", "{{ mid.ok }} == ''", "not {{ mid.ok }}"]


def some_condition(rng: random.Random) -> str:
    terms = rng.sample([*TERMS, *MIDDLE], rng.choice([1, 1, 2, 3]))
    words = [f"not ({term})" if rng.random() < 0.2 else term for term in terms]
    return f" {rng.choice(['and', 'or'])} ".join(words)


@pytest.mark.parametrize("seed", range(size(2, 4)))
def test_a_branch_is_taken_in_some_run_if_and_only_if_it_is_no_mistake(seed: int) -> None:
    rng = random.Random(seed)
    mid: dict[str, Any] = {"id": "mid", "prompt": "x", "depends_on": ["kind"], "output_schema": {"type": "object"}}
    mid["output_schema"] |= {"properties": {"ok": {"type": "boolean"}}}
    if seed % 3 == 0:
        mid["when"] = rng.choice(VALID)
    after = ["kind", "mid"]
    ends: list[dict[str, Any]] = [
        {"id": f"b{n}", "prompt": "x", "depends_on": after, "when": some_condition(rng)} for n in range(8)
    ]
    reported = {line.partition(".")[0] for line in told(KIND, mid, *ends)}
    impossible = {end["id"] for place, end in enumerate(ends, 2) if f"tasks[{place}]" in reported}
    tasks = [Task(**task) for task in (KIND, mid, *ends)]

    async def taken() -> set[str]:
        found: set[str] = set()
        for k, ok, n, s, mid_ok in product(["bug", "idea"], [True, False], [1, 2, 3], ["x", "y"], [True, False]):
            fake = FakeBackend(
                {"kind": {"k": k, "ok": ok, "n": n, "s": s}, "mid": {"ok": mid_ok}}, rule=lambda _: "done"
            )
            result = await ParallelRunner(fake).run([*tasks])
            found |= {task_id for task_id, one in result.tasks.items() if one.status is TaskStatus.COMPLETED}
        return found & {end["id"] for end in ends}

    found = anyio.run(taken)
    assert not found & impossible
    if "when" not in mid:  # what `mid` answers does not depend on what `kind` does
        assert found | impossible == {end["id"] for end in ends}


def test_which_values_lead_to_which_tasks() -> None:
    t, u = {"id": "t", "run": ["ls"], "codes": [0, 1]}, {"id": "u", "run": ["ls"], "depends_on": "t"}
    loop = {"tasks": [t, u | {"when": "{{ t.code }} == 1"}], "until": "{{ t.code }} == 0"}
    plan: dict[str, Any] = {
        "inputs": {"rows": [1, 2]},
        "tasks": [
            KIND | {"output_schema": {"properties": {"k": {"enum": ["bug", "idea", "other"]}, "ok": SCHEMA}}},
            {"id": "fix", "run": ["ls"], "depends_on": "kind", "when": "{{ kind.k }} == 'bug'"},
            {
                "id": "tell",
                "for_each": "rows",
                "run": ["ls"],
                "depends_on": "kind",
                "when": "{{ kind.data.k }} != 'other'",
            },
            {"id": "long", "prompt": "x", "when": "{{ rows | length }} > 1"},
            {"id": "work", "loop": loop},
        ],
    }
    assert Play().branches(parse_plan(json.dumps(plan), format="json").dag) == [
        {"if": {"kind.k": "bug"}, "tasks": ["fix", "tell"]},
        {"if": {"kind.k": "idea"}, "tasks": ["tell"]},
        {"if": {"kind.k": "other"}, "tasks": []},
        {"if": "{{ rows | length }} > 1", "tasks": ["long"]},
        {"if": {"work.t.code": 1}, "tasks": ["work.u"]},
    ]
