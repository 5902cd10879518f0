"""`plait check`: check a plan file and print what a run would do; the JSON Schema of plans; the checks of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import anyio
import click

from plait.backends.specs.backend_specs import ProgramSpec
from plait.errors import PlanError
from plait.runner.cli.command_line import COMPLETED, FAILED, USAGE
from plait.runner.cli.command_options import complete, json_option, read_plan, set_option, store_option
from plait.runner.cli.terminal_output import as_line, print_json, print_line, visible
from plait.runner.client.named_runs import find_run
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.drawing.dag_layout import layers
from plait.runner.engine.answer_check import play_again
from plait.runner.engine.run_options import DEFAULT_BACKEND, StorePlace, open_store, policy_backends
from plait.runner.plan import plan_schema
from plait.runner.plan.condition_play import Play, as_literal
from plait.runner.plan.plan_file import Plan
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.runner.policies.step_workflow import Workflow
from plait.runner.state.stored_run import stored_run
from plait.runner.views.event_sentences import counted
from plait.statuses import TaskStatus

_LONGEST_GOAL = 100  # characters
_LONGEST_COMMAND = 60  # characters
_MOST_LINES = 10  # of the output of a check that fails
_MOST_BRANCHES = 20  # that are printed
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
@click.option(
    "--run",
    metavar="RUN",
    shell_complete=complete,
    help="Play the commands that checked the answers of this stored run again, and say which no longer pass. PLAN is "
    "its plan file, if moved.",
)
@store_option
@json_option
def check_command(
    plan: Path | None,
    inputs: dict[str, str],
    prints_schema: bool,
    run: str | None,
    store_path: StorePlace,
    as_json: bool,
) -> int:
    """Check the plan in the file PLAN, or on standard input if PLAN is `-`, and print what a run would do. Every
    mistake is listed with its place in the file.
    """
    if prints_schema:
        if plan is not None or run is not None or inputs:
            raise click.UsageError("--schema checks nothing; leave PLAN, --run and --set out")
        print_json(plan_schema())
        return COMPLETED
    if run is not None:
        if inputs:
            raise click.UsageError("--set is for plans; a run has its inputs")
        return anyio.run(check_again, store_path, run, FileOptions(plan), as_json)
    if plan is None:
        raise click.UsageError("name a plan file, - for standard input, or a run with --run")
    return check(plan, inputs, as_json)


async def check_again(path: StorePlace, name: str, files: FileOptions, as_json: bool) -> int:
    """Play the checks of the run `name` again, and print how they end. Return the exit code."""
    async with open_store(path, "read") as store:
        record = await find_run(store, name)
        run = await stored_run(store, record.run_id, record)
        dag, statuses = run.state.dag, run.state.statuses
        done = zip(dag, statuses, strict=True)
        has_checks = any(task.check and task.check.run and status is TaskStatus.COMPLETED for task, status in done)
        checks = await play_again(run.state, TrustedBackends(store, files).of_checks(run)) if has_checks else []
    failed = sum(not check.passes for check in checks)
    if as_json:
        print_json({"run_id": record.run_id, "failed": failed, "checks": [asdict(check) for check in checks]})
        return FAILED if failed else COMPLETED
    for check in checks:
        mark = "passes" if check.passes else "fails "
        end = "" if check.passes else f": {as_line(check.end)}"
        print_line(f"{mark}  {as_line(check.task_id)}  {as_line(check.command, _LONGEST_COMMAND)}{end}")
        if not check.passes and check.output:
            print_line("\n".join(f"        {line}" for line in visible(check.output).splitlines()[-_MOST_LINES:]))
    if not checks:
        print_line(f"no completed task of run {record.run_id} was checked by a command")
    elif failed:
        print_line(f"{failed:,} of {counted(len(checks), 'check')} no longer {'passes' if failed == 1 else 'pass'}")
    else:
        print_line(f"{counted(len(checks), 'check')} pass" + ("es" if len(checks) == 1 else ""))
    return FAILED if failed else COMPLETED


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
    for name, lines in facts.get("rows", {}).items():
        print_line(
            f"  rows          {as_line(name)}: {lines:,} lines, read as the run goes; counted here are the first"
        )
    for name, call in facts["calls"].items():
        rounds, until = call["rounds"], as_line(call["until"] or "", _LONGEST_COMMAND)
        ends = f", {counted(rounds, 'round')} at most, until {until}" if rounds else ""
        print_line(f"  {'loop' if rounds else 'plan'}          {name}: {', '.join(call['tasks'])}{ends}")
    for branch in facts["branches"][:_MOST_BRANCHES]:
        case: str | dict[str, Any] = branch["if"]
        if not isinstance(case, str):
            case = " and ".join(f"{field} is {as_literal(one)}" for field, one in case.items())
        print_line(f"  branch        {as_line(case)}: {', '.join(branch['tasks']) or 'no branch'}")
    if (left := len(facts["branches"]) - _MOST_BRANCHES) > 0:
        print_line(f"  branch        {left:,} more, listed by --json")
    for name, backend in facts["backends"].items():
        kind = backend["kind"] or "chosen when it is run"
        where = f" on {as_line(backend['on'])}" if "on" in backend else ""
        tasks = f", {counted(backend['tasks'], 'task')}" if backend["tasks"] else ""
        locks = "" if backend.get("locks_folders", True) else "; no folder is locked there, so two may write in one"
        print_line(f"  backend       {as_line(name)}: {kind}{where}{tasks}{locks}")
    return COMPLETED


def _size(plan: Plan, facts: Mapping[str, Any]) -> str:
    if isinstance(plan.policy, OrchestratorPolicy):
        return f"a goal, at most {counted(plan.policy.limits.max_iterations, 'iteration')}"
    if isinstance(plan.policy, Workflow):
        return counted(len(plan.policy.steps()), "step")
    return f"{counted(facts['tasks'], 'task')} in {counted(facts['levels'], 'level')}"


def _plan_facts(plan: Plan) -> dict[str, Any]:
    dag = plan.dag
    default = plan.default_backend or DEFAULT_BACKEND
    used = Counter(dag.backend_of(task) or default for task in dag)
    later = set[str]() if plan.policy is None else policy_backends(plan.policy, default) - used.keys()
    used.update(dict.fromkeys(sorted(later), 0))
    steps = plan.policy.steps() if isinstance(plan.policy, Workflow) else ()
    return {
        "name": plan.name,
        "tasks": len(dag),
        "levels": max(layers(dag)) + 1,
        "critical_path": [step.name for step in steps] or dag.critical_path(),
        "inputs": sorted(dag.inputs),
        "calls": {
            task.id: {
                "tasks": [part["id"] for part in cast("list[Any]", task.call.plan["tasks"])],
                "rounds": task.call.max if task.call.is_loop else None,
                "until": task.call.until,
            }
            for task in dag
            if task.call is not None
        },
        "branches": Play().branches(dag),
        "backends": {name: _backend_facts(plan, name, number) for name, number in used.items()},
        **({} if dag.rows_file is None else {"rows": plan.lengths}),
    }


def _backend_facts(plan: Plan, name: str, tasks: int) -> dict[str, Any]:
    spec = plan.backends.get(name)
    facts: dict[str, Any] = {"kind": None if spec is None else spec.kind, "tasks": tasks}
    if spec is not None and spec.on is not None:
        facts["on"] = spec.on
        if isinstance(spec, ProgramSpec):
            facts["locks_folders"] = spec.on not in plan.hosts or plan.hosts[spec.on].kind == "ssh"
    return facts
