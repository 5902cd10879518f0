"""`plait check` and `plait doctor`: is a plan, the answers of a run, this machine, the store, or another host sound?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from plait.backends.agents.agent_catalog import Installed, look_for_agents
from plait.backends.backend_specs import ProgramSpec
from plait.backends.hosts.host_connection import HostState
from plait.backends.process.available_memory import available_memory
from plait.errors import PlanError
from plait.persistence.store_health import Finding, Verdict
from plait.runner.cli.command_line import COMPLETED, FAILED, STORE, USAGE, read_plan, subcommand
from plait.runner.cli.command_options import CHECK, DOCTOR
from plait.runner.cli.terminal_output import (
    as_line,
    columns,
    command_line,
    print_json,
    print_line,
    print_table,
    visible,
)
from plait.runner.client.doctor import check_agents, check_hosts, check_machine, check_store, worst
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.client.runs import find_run
from plait.runner.drawing.dag_picture import layers
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


@subcommand("check", CHECK)
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
        print_json(plan_schema())
        return COMPLETED
    if run is not None:
        return anyio.run(check_again, store_path, run, FileOptions(plan), as_json)
    assert plan is not None
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
        print_line(f"  rows          {as_line(name)}: {lines:,} lines, read during the run; counted here are the first")
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
                "tasks": [part.id for part in task.call.tasks],
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


@subcommand("doctor", DOCTOR)
def doctor_command(store_path: StorePlace, as_json: bool, hosts_file: Path | None) -> int:
    """Check this machine, its SQLite and the store, and print how to fix each problem.

    Checks the versions, the coding agents (each is started for its version; the login is checked without reading a
    secret), the file system, the permissions, every page and checksum of the store, runs without an owner, and
    processes left behind. Changes nothing. The exit code is 3 if a check is bad; warnings alone give 0.

    With --hosts, ask each host for its slots, the attempts at work there, of all runs, and its version of plait, and
    run `plait doctor` there. A host that cannot be used is bad. `plait show` says which task waits for which host.
    """
    if hosts_file is not None:
        hosts, findings = anyio.run(check_hosts, hosts_file)
        is_bad = any(state.problem is not None for _, state in hosts)
        if as_json:
            listed = [{"hosts": name, **asdict(state)} for name, state in hosts]
            print_json({"hosts": listed, "checks": list(map(asdict, findings))})
        else:
            _print_hosts(hosts, findings)
    else:
        agents, memory = anyio.run(look_for_agents), available_memory()
        findings = [*check_machine(store_path), *check_agents(agents, memory)]
        findings += anyio.run(check_store, store_path, partial(command_line, store_path))
        is_bad = False
        if as_json:
            checked = {"verdict": worst(one.verdict for one in findings), "store": str(store_path)}
            listed = [_agent_json(one, memory) for one in agents]
            print_json({**checked, "checks": list(map(asdict, findings)), "agents": listed})
        else:
            _print_findings(findings)
    return STORE if is_bad or any(one.verdict is Verdict.BAD for one in findings) else COMPLETED


def _agent_json(one: Installed, memory: int | None) -> dict[str, object]:
    return {
        "name": one.agent.name,
        "program": one.agent.program,
        "path": one.path,
        "version": one.version,
        "tested": list(one.agent.tested),
        "install": one.agent.install,
        "logged_in": one.is_logged_in,
        "logged_in_by": one.by or None,
        "fit_into_memory": one.turns_that_fit(memory),
    }


def _print_hosts(hosts: Sequence[tuple[str, HostState]], findings: Sequence[Finding]) -> None:
    rows = [("hosts", "name", "slots", "at work", "version", "state")]
    for group, state in hosts:
        at_work = "" if state.at_work is None else str(state.at_work)
        text = "ready" if state.problem is None else as_line(state.problem)
        rows.append((group, state.name, str(state.slots), at_work, state.version or "", text))
    print_table(rows, 5, [None] * len(rows), frozenset({2, 3}))
    if findings:
        print_line("")
        _print_findings(findings)


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings, a line each."""
    rows = columns((one.verdict.value, one.check) for one in findings)
    for one, (verdict, check) in zip(findings, rows, strict=True):
        advice = f"; {as_line(one.advice)}" if one.advice else ""
        print_line(f"{verdict}  {check}  {as_line(one.found)}{advice}")
