"""`plait check`: check a plan file and print what a run would do; the JSON Schema of plan files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from plait.errors import PlanError
from plait.runner.cli.command_exits import COMPLETED, USAGE
from plait.runner.cli.command_options import json_option, read_plan, set_option
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, print_line
from plait.runner.drawing.dag_layout import layers
from plait.runner.engine.run_options import policy_backends
from plait.runner.plan import plan_schema
from plait.runner.plan.plan_file import Plan
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.runner.policies.step_workflow import Workflow
from plait.runner.views.event_sentences import counted

_LONGEST_GOAL = 100  # characters
_LONGEST_PATH = 12  # tasks of the critical path that are printed


@click.command("check")
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@set_option
@click.option(
    "--schema",
    "prints_schema",
    is_flag=True,
    help="Print the JSON Schema of plan files, for editors that complete and check them; check nothing.",
)
@json_option
def check_command(plan: Path | None, inputs: dict[str, str], prints_schema: bool, as_json: bool) -> int:
    """Check the plan in the file PLAN, or on standard input if PLAN is `-`, and print what a run would do. Every
    mistake is listed with its place in the file.
    """
    if prints_schema:
        print_json(plan_schema())
        return COMPLETED
    if plan is None:
        raise click.UsageError("name a plan file, or - for standard input")
    return check(plan, inputs, as_json)


def check(path: Path, inputs: Mapping[str, str], as_json: bool) -> int:
    """Print what a run of the plan would do. Mistakes are raised as PlanError, or printed if `as_json`."""
    try:
        plan = read_plan(path, inputs, with_functions=True)
    except PlanError as error:
        if not as_json:
            raise
        problems = [
            {"file": one.file, "line": one.line, "column": one.column, "where": one.where, "message": one.message}
            for one in error.problems
        ]
        print_json({"ok": False, "problems": problems})
        return USAGE
    facts = _plan_facts(plan)
    if as_json:
        print_json({"ok": True, **facts})
        return COMPLETED
    print_line(f"{as_line(plan.name)}: {_size(plan, facts)}, no mistakes")
    if isinstance(plan.policy, OrchestratorPolicy):
        print_line(f"  goal          {as_line(plan.policy.goal, _LONGEST_GOAL)}")
    else:
        shown = facts["critical_path"][:_LONGEST_PATH]
        dots = " -> ..." if len(shown) < len(facts["critical_path"]) else ""
        print_line(f"  longest path  {' -> '.join(shown)}{dots}")
    for name, backend in facts["backends"].items():
        kind = backend["kind"] or "chosen when it is run"
        tasks = f", {counted(backend['tasks'], 'task')}" if backend["tasks"] else ""
        print_line(f"  backend       {as_line(name)}: {kind}{tasks}")
    return COMPLETED


def _size(plan: Plan, facts: Mapping[str, Any]) -> str:
    if isinstance(plan.policy, OrchestratorPolicy):
        return f"a goal, at most {counted(plan.policy.limits.max_iterations, 'iteration')}"
    if isinstance(plan.policy, Workflow):
        return counted(len(plan.policy.steps()), "step")
    return f"{counted(facts['tasks'], 'task')} in {counted(facts['levels'], 'level')}"


def _plan_facts(plan: Plan) -> dict[str, Any]:
    dag = plan.dag
    default = plan.default_backend or (next(iter(plan.backends)) if len(plan.backends) == 1 else "default")
    used = Counter(dag.backend_of(task) or default for task in dag)
    later = set[str]() if plan.policy is None else policy_backends(plan.policy, default) - used.keys()
    used.update(dict.fromkeys(sorted(later), 0))
    return {
        "name": plan.name,
        "tasks": len(dag),
        "levels": max(layers(dag)) + 1,
        "critical_path": _longest_path(plan),
        "inputs": sorted(dag.inputs),
        "backends": {
            name: {"kind": plan.backends[name].kind if name in plan.backends else None, "tasks": number}
            for name, number in used.items()
        },
    }


def _longest_path(plan: Plan) -> list[str]:
    steps = plan.policy.steps() if isinstance(plan.policy, Workflow) else ()
    return [step.name for step in steps] or plan.dag.critical_path()
