"""Plans received over HTTP: like plan files, but without settings of the machine.

A client may spend the money that the server's backends cost, and no more: a posted plan names no server, no key, no
function and no file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from plait.runner.plan import Plan, PlanError, PlanProblem, parse_plan
from plait.runner.plan.plan_file import NAME_IT
from plait.runner.plan.plan_inputs import no_input
from plait.runner.plan.plan_models import input_kind
from plait.runner.plan.plan_positions import MAX_BYTES

_SERVER_KEYS = {
    "backends": "the backends of the server are set at its start; name one of them, or leave `backend` out",
    "hosts": "the hosts of the server are set at its start, in its file of backends",
    "prices": "the prices of models are set at the start of the server, in its file of backends",
    "concurrency": "the server sets how many tasks run at once (plait serve -j)",
}
_TASK_KEYS = {
    "model": "the models of the server are set at its start; leave `model` out, or name another backend",
    "files": "a posted plan reads no files; put the texts into the prompt",
}
_SPECIAL = {
    "files": "a posted plan reads no files; give the texts themselves, as values of the input",
    "rows": "a posted plan reads no files; give the rows themselves, as a list",
    "required": "this input has no default; give it a value in `inputs`",
}


def posted_plan(plan: Mapping[str, Any], inputs: Mapping[str, Any], backends: Collection[str]) -> Plan:
    """Return the plan, with `inputs` in place of its defaults, for the server's `backends`, which are not part of the
    plan. Raises PlanError with every mistake.
    """
    if (size := len(_dump(plan).encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        why = f"a plan may have 1 MiB, this one has {size:,} bytes; give large values in `inputs`"
        raise PlanError([PlanProblem(why, file="")])
    problems = [PlanProblem(why, key, file="") for key, why in _SERVER_KEYS.items() if key in plan]
    if isinstance(plan.get("inputs") or {}, dict):  # otherwise the reader reports the wrong type
        declared = cast("dict[str, Any]", plan.get("inputs") or {})
        problems += _check_inputs(declared, inputs)
        plan = {**plan, "inputs": {**declared, **inputs}}
    problems += _check_tasks(plan.get("tasks"))
    if problems:
        raise PlanError(problems)
    # The plan needs only the names of the backends.
    named = {name: {"kind": "function", "call": "server:backend"} for name in backends}
    text = _dump({**plan, "backends": named})
    try:
        return replace(parse_plan(text, format="json", most=None, names_default=True), backends={})
    except PlanError as error:
        there_are = f"; the server has {', '.join(map(repr, sorted(backends)))}, or leave 'backend' out"
        raise PlanError([_adapt_problem(problem, there_are) for problem in error.problems]) from None


def _check_tasks(tasks: object) -> Iterator[PlanProblem]:
    """Yield a problem for each key that names a file or a model of the server."""
    for n, task in enumerate(cast("list[object]", tasks) if isinstance(tasks, list) else []):
        for key, why in _TASK_KEYS.items():
            if isinstance(task, dict) and cast("dict[str, object]", task).get(key) is not None:
                yield PlanProblem(why, f"tasks[{n}].{key}", file="")


def _dump(plan: Mapping[str, Any]) -> str:
    try:
        return json.dumps(plan, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise PlanError([PlanProblem(f"the plan holds a value that JSON does not have: {error}", file="")]) from None
    except RecursionError:
        raise PlanError([PlanProblem("the plan is nested too deeply", file="")]) from None


def _adapt_problem(problem: PlanProblem, there_are: str) -> PlanProblem:
    """Return the problem in words for a client that has no file and no backends."""
    # Line and column belong to a text that exists only here.
    return replace(problem, message=problem.message.replace(NAME_IT, there_are), line=None, column=None, file="")


def _check_inputs(declared: Mapping[str, Any], given: Mapping[str, Any]) -> list[PlanProblem]:
    unknown = given.keys() - declared.keys()
    problems = [PlanProblem(no_input(name, declared), f"inputs.{name}", file="") for name in unknown]
    for name, value in {**declared, **given}.items():
        # A plan file would read a file for such a value.
        if special := _SPECIAL.get(input_kind(value)):
            problems.append(PlanProblem(special, f"inputs.{name}", file=""))
    return problems
