"""docs/guides/workflows.md says what the code does: its tables are read and tried."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from plait import DAG, FailureMode, Step, Workflow
from plait.runner.domain.policy import RecordedRun
from plait.runner.domain.run_result import TaskResult
from plait.runner.policies import step_workflow
from plait.runner.policies.step_workflow import OnError
from plait.statuses import TaskStatus
from plait.workflows import Interaction, WorkflowComplete, WorkflowProgress

PAGE = (Path(__file__).parent.parent.parent / "docs" / "guides" / "workflows.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The rows of the table whose first column is called `heading`."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


GONE = "its backend is not available here, such as an extra that is not installed"
CASES = {  # the step's place among two, the number of its failed try
    "it has tries left": [(0, 2), (1, 1)],
    "that was its last try (`max_tries`, 3)": [(0, 3), (1, 3)],
    GONE: [(0, 1), (1, 1)],
    "it is not the last step": [(0, 1)],
    "it is the last step": [(1, 1)],
    "": [(0, 1), (1, 1)],
}


@pytest.mark.parametrize("row", rows("`on_error`"), ids=lambda row: f"{row[0]}: {row[1]}")
def test_the_rules_on_error_are_those_of_the_code(row: list[str]) -> None:
    rule, when, follows, status = row
    on_error = rule.split("`")[1]
    flow = Workflow([Step("a", "x", on_error=on_error), Step("b", "x", on_error=on_error)])
    for place, number in CASES[when]:
        failed = Interaction("ab"[place], "error", number=number, unavailable=when == GONE)
        after = flow.next_step(WorkflowProgress((failed,)))
        expected = {"the same step": flow.steps()[place], "the next step": flow.steps()[-1]}.get(follows)
        assert after == expected if expected else isinstance(after, WorkflowComplete) and not after.ok
        mode = FailureMode.SKIP if status == "`skipped`" else FailureMode.HARD
        assert mode_of_try(flow, place, number) is mode


def mode_of_try(flow: Workflow, place: int, number: int) -> FailureMode:
    """The failure mode of the task for try `number` of the step at `place`, after all tries before it have failed."""
    dag, name = flow.dag(), "ab"[place]
    results: dict[str, TaskResult] = {}
    while f"{name}.{number}" not in dag:
        last = dag.tasks[-1].id
        results[last] = TaskResult(last, TaskStatus.SKIPPED if last.startswith(name) else TaskStatus.COMPLETED)
        [added] = flow.decide(RecordedRun(dag.tasks, results.__getitem__)).add
        dag = DAG([*dag, added])
    return dag[f"{name}.{number}"].failure_mode


def test_every_rule_is_in_the_table() -> None:
    assert {row[0].split("`")[1] for row in rows("`on_error`")} == set(get_args(OnError))


def test_every_typed_error_is_in_the_table() -> None:
    named = {row[0].strip("`") for row in rows("raised by `next_step`")}
    errors = {name for name, one in vars(step_workflow).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert named == errors


def test_the_defaults_are_those_of_the_code() -> None:
    assert "`end` (the default)" in PAGE and Step("a", "x").on_error == "end"
    assert "`max_tries`, 3" in PAGE and Step("a", "x").max_tries == 3
