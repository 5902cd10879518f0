"""`follow_ups` and `role` in plan files: the policy that they make, and every mistake in them with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait import FailureMode, Retry, RunStatus, TaskStatus
from plait.runner.plan import PlanError, parse_plan
from plait.workflows import FollowUp, FollowUps
from tests.support.growing import grow
from tests.support.processes.command import plait

FULL = """
inputs: {language: Python}
defaults: {backend: fast, failure_mode: soft, timeout: 2m, retry: {attempts: 2, max_delay: 5}}
backends:
  fast: {kind: function, call: "tools.py:fast"}
  deep: {kind: function, call: "tools.py:deep"}
tasks:
  - {id: design, prompt: Design it.}
  - {id: build, role: coder, depends_on: design, prompt: "Build it in {{ language }}.", metadata: {of: us}}
follow_ups:
  - after: coder
    steps:
      - role: reviewer
        backend: deep
        failure_mode: skip
        timeout: 10
        retry: {attempts: 1}
        output_schema: {type: object, properties: {good: {type: boolean}}, required: [good]}
        prompt: "Does {{ work }} fit {{ design }}?"
      - {role: tester, prompt: "Test {{ work }} in {{ language }}, {{ reviewer }}"}
  - {after: reviewer, steps: [{role: judge, prompt: "Is {{ work }} fair to {{ build }}?"}]}
"""


def plan_policy(text: str) -> FollowUps:
    policy = parse_plan(text).policy
    assert isinstance(policy, FollowUps)
    return policy


def test_workflows_become_the_policy_of_the_plan() -> None:
    reviewer, tester = plan_policy(FULL).chains()["coder"]
    schema = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
    assert (reviewer.backend, reviewer.failure_mode, reviewer.timeout) == ("deep", FailureMode.SKIP, 10)
    assert (reviewer.retry, reviewer.output_schema) == (Retry(attempts=1, max_delay=5), schema)
    assert (tester.backend, tester.failure_mode, tester.timeout) == (None, FailureMode.SOFT, 120)
    assert tester.retry == Retry(attempts=2, max_delay=5)


def test_a_run_of_the_plan_grows_by_them() -> None:
    plan = parse_plan(FULL)
    assert plan.policy is not None
    assert plan.dag["build"].metadata == {"of": "us", "role": "coder"}
    run = grow(plan.policy, plan.dag, lambda task, _: f"<{task.id}>")
    assert run.status is RunStatus.COMPLETED
    assert run.prompts[2:] == [
        "Does <build> fit <design>?",
        "Test <build> in Python, <build.reviewer>",
        "Is <build.reviewer> fair to <build>?",
    ]


def test_each_of_a_family_is_followed() -> None:
    plan = parse_plan(
        "inputs: {parts: [a, b]}\ntasks: [{id: build, for_each: parts, role: coder, prompt: '{{ item }}'}]\n"
        "follow_ups: [{after: coder, steps: [{role: tester}]}]"
    )
    assert plan.policy is not None
    run = grow(plan.policy, plan.dag, lambda task, _: "done")
    assert sorted(run.ran) == ["build.1", "build.1.tester", "build.2", "build.2.tester"]


def test_without_steps_a_reviewer_and_a_tester_follow() -> None:
    text = "tasks: [{id: a, role: coder, prompt: x}]\nfollow_ups: [{after: coder}]\ndefaults: {failure_mode: skip}"
    mode = FailureMode.SKIP
    assert plan_policy(text).chains() == {
        "coder": (FollowUp("reviewer", failure_mode=mode), FollowUp("tester", failure_mode=mode))
    }


@pytest.mark.parametrize("text", ["", "follow_ups: []", "follow_ups:"])
def test_a_plan_without_workflows_has_no_policy(text: str) -> None:
    assert parse_plan("tasks: [{id: a, role: coder, prompt: x}]\n" + text).policy is None


def test_json_is_as_good() -> None:
    plan = {"tasks": [{"id": "a", "role": "coder", "prompt": "x"}], "follow_ups": [{"after": "coder"}]}
    assert parse_plan(json.dumps(plan), format="json").policy is not None


def mistakes(text: str) -> list[tuple[int | None, str, str]]:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    return [(problem.line, problem.where, problem.message) for problem in caught.value.problems]


TASKS = "tasks: [{id: a, prompt: x}, {id: b, role: coder, prompt: x}, {id: c, role: coder, prompt: x}]\n"


def steps(*lines: str, after: str = "coder") -> str:
    return TASKS + f"follow_ups:\n- after: {after}\n  steps:\n" + "".join(f"  - {line}\n" for line in lines)


MISTAKES = {
    "unknown key": (steps("{role: tester, promt: ''}"), 5, "follow_ups[0].steps[0].promt", "did you mean 'prompt'?"),
    "unknown key of a chain": (
        TASKS + "follow_ups:\n- {after: coder, step: []}",
        3,
        "follow_ups[0].step",
        "'steps'",
    ),
    "two kinds of tasks": (TASKS + "workflow: []", 2, "workflow", "this plan has 'tasks' already"),
    "no list": (TASKS + "follow_ups: {coder: tester}", 2, "follow_ups", "must be a list, not a mapping"),
    "no role": (steps("{prompt: x}"), 5, "follow_ups[0].steps[0].role", "is missing"),
    "no after": (TASKS + "follow_ups:\n- {steps: []}", 3, "follow_ups[0].after", "is missing"),
    "bad role": (
        steps("{role: a b, prompt: p}"),
        5,
        "follow_ups[0].steps[0].role",
        "does not fit. The role of the follow-up: 1 to",
    ),
    "bad role of a task": (
        "tasks:\n- {id: a, role: a b, prompt: x}",
        2,
        "tasks[0].role",
        "does not fit. The role for",
    ),
    "reserved role": (steps("{role: work, prompt: p}"), 5, "follow_ups[0].steps[0].role", "false, inputs, item, none"),
    "no prompt": (steps("{role: critic}"), 5, "follow_ups[0].steps[0].role", "needs a prompt; only reviewer, tester"),
    "wrong value": (
        steps("{role: tester, retry: {attempts: 0}}"),
        5,
        "follow_ups[0].steps[0].retry.attempts",
        "least 1",
    ),
    "no template": (steps("{role: tester, prompt: '{{ work'}"), 5, "follow_ups[0].steps[0].prompt", "template"),
    "unknown name": (
        steps("{role: tester, prompt: '{{ wrok }}'}"),
        5,
        "follow_ups[0].steps[0].prompt",
        "{{ wrok }}, which is neither a task nor an input; did you mean 'work'?",
    ),
    "later role": (
        steps("{role: reviewer, prompt: '{{ tester }}'}", "{role: tester}"),
        5,
        "follow_ups[0].steps[0].prompt",
        "{{ tester }}, which is neither a task nor an input",
    ),
    "unknown name after a role that no task has": (
        steps("{role: critic, prompt: '{{ a }} {{ wrok }}'}", after="painter"),
        5,
        "follow_ups[0].steps[0].prompt",
        "{{ wrok }}, which is neither a task nor an input; did you mean 'work'?",
    ),
    "task not upstream": (
        steps("{role: tester, prompt: '{{ a }}'}"),
        5,
        "follow_ups[0].steps[0].prompt",
        "{{ a }}, but 'a' is not upstream; let 'b' depend on it",
    ),
    "unknown backend": (steps("{role: tester, backend: deep}"), 5, "follow_ups[0].steps[0].backend", "'deep'"),
    "bad schema": (
        steps("{role: tester, output_schema: {type: thing}}"),
        5,
        "follow_ups[0].steps[0].output_schema.type",
        "not a valid JSON Schema",
    ),
    "no steps": (
        TASKS + "follow_ups:\n- {after: coder, steps: []}",
        3,
        "follow_ups[0].steps",
        "the chain after 'coder' has no step",
    ),
    "same role twice": (steps("{role: tester}", "{role: tester}"), 6, "follow_ups[0].steps[1].role", "in this chain"),
    "same after twice": (
        TASKS + "follow_ups:\n- {after: coder}\n- {after: coder}",
        4,
        "follow_ups[1].after",
        "a chain after 'coder' already",
    ),
    "slip of the pen": (steps("{role: tester}", after="codr"), 3, "follow_ups[0].after", "did you mean 'coder'?"),
    "a circle": (
        TASKS + "follow_ups:\n- {after: coder}\n- {after: tester, steps: [{role: coder, prompt: p}]}",
        3,
        "follow_ups[0].after",
        "these roles form a cycle",
    ),
    "two roles": (
        "tasks:\n- {id: a, role: coder, prompt: x, metadata: {role: tester}}",
        2,
        "tasks[0].metadata.role",
        "the task's role is 'coder' already",
    ),
}


@pytest.mark.parametrize(("text", "line", "where", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported_once_with_its_place(text: str, line: int, where: str, message: str) -> None:
    [(found_line, found_where, found)] = mistakes(text)
    assert (found_line, found_where) == (line, where)
    assert message in found


def test_mistakes_of_tasks_and_workflows_are_reported_together() -> None:
    found = mistakes(steps("{role: tester, prompt: '{{ wrok }}'}").replace("id: a,", "id: a, retires: 1,"))
    assert [where for _, where, _ in found] == ["tasks[0].retires", "follow_ups[0].steps[0].prompt"]


def test_a_line_within_a_prompt_is_found() -> None:
    text = steps("role: tester\n    prompt: |\n      {{ work }}\n      {{ tset }}")
    assert [(line, where) for line, where, _ in mistakes(text)] == [(8, "follow_ups[0].steps[0].prompt")]


def test_a_role_that_no_task_has_yet_may_come_later() -> None:
    text = TASKS + "follow_ups: [{after: painter, steps: [{role: critic, prompt: '{{ work }}'}]}]"
    assert plan_policy(text).chains()["painter"][0].role == "critic"


def test_an_input_called_like_a_follow_up_is_a_mistake() -> None:
    text = TASKS + "follow_ups: [{after: coder}]\ninputs: {b.tester: 1}"
    assert [where for _, where, _ in mistakes(text)] == ["inputs"]


PLAN = """
backends:
  code: {kind: function, call: "work.py:code"}
  judge: {kind: function, call: "work.py:judge"}
tasks:
  - {id: list, backend: code, prompt: "", output_schema: {type: array}}
  - {id: build, role: coder, for_each: list, depends_on: list, backend: code, prompt: "build {{ item }}"}
follow_ups:
  - after: coder
    steps:
      - {role: reviewer, backend: judge, prompt: "review {{ work }}"}
      - {role: tester, backend: judge, prompt: "test {{ work }} {{ reviewer }}"}
"""
WORK = """
from pathlib import Path

def code(prompt):
    return prompt or ["a", "b"]

def judge(prompt):
    if prompt == "test build b (review build b)" and not Path("mended").exists():
        raise RuntimeError("not today")
    return f"({prompt})"
"""


def test_the_command_runs_and_resumes_a_plan_with_follow_ups(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "work.py").write_text(WORK)
    done = plait(tmp_path, "run", "plan.yaml", "--json")
    assert done.code == 1, done.err
    tasks = {task["task_id"]: task for task in done.value["tasks"]}
    followed = {f"build.{n}.{role}" for n in (1, 2) for role in ("reviewer", "tester")}
    assert tasks.keys() == {"list", "build", "build.1", "build.2", *followed}
    assert [name for name, task in tasks.items() if task["status"] == TaskStatus.FAILED] == ["build.2.tester"]
    (tmp_path / "mended").touch()
    done = plait(tmp_path, "resume", "last", "--retry-failed", "--json")
    assert done.code == 0, done.err
    tasks = {task["task_id"]: task for task in done.value["tasks"]}
    assert tasks["build.2.tester"]["text"] == "(test build b (review build b))"
    assert len(tasks) == 8
