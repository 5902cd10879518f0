"""Conversion of `workflow` to the policy of the plan's run."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import DAGError, Problem
from plait.json_form import JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.plan.plan_models import PlanPart, StepPart
from plait.runner.plan.plan_positions import Source
from plait.runner.plan.plan_tasks import check_schema, function_of, line_in, retry_of, used_name
from plait.runner.plan.values import Path
from plait.runner.policies.step_workflow import Step, Workflow
from plait.task import NO_PROMPT, GrowthLimits

_FIELDS = {"id": "name"}
"""Fields of a task, with their names in a step."""


def workflow_of(plan: PlanPart, name: str, source: Source) -> Workflow | None:
    """Return the policy of the plan; None with mistakes. Problems are added to `source.problems`."""
    before, parts = len(source.problems), plan.workflow
    if "failure_mode" in plan.defaults.model_fields_set:
        message = "applies to `tasks`; a step of `workflow` has on_error, so leave it out"
        source.problems.append(source.problem(("defaults", "failure_mode"), message))
    steps = [_step(part, ("workflow", index), plan, source) for index, part in enumerate(parts)]
    names = [part.name for part in parts]
    for index, step_name in enumerate(names):
        if step_name in names[:index]:
            message = f"two steps are called {step_name!r}; give each a name of its own"
            source.problems.append(source.problem(("workflow", index, "name"), message))
    if parts[0].continues:
        message = "there is no step before the first to continue; leave it out"
        source.problems.append(source.problem(("workflow", 0, "continues"), message))
    if len(source.problems) > before:
        return None
    return Workflow([step for step in steps if step is not None], name=name)


def workflow_dag(
    workflow: Workflow, inputs: Mapping[str, JsonValue], growth: GrowthLimits | None, source: Source
) -> DAG | None:
    """Return the initial DAG of a run: the first step. Problems of all steps are added to `source.problems`."""
    try:
        first = workflow.dag(inputs)
    except DAGError as error:
        for problem in error.problems:
            _report(problem, workflow, inputs, source)
        return None
    return DAG(first.tasks, name=first.name, inputs=inputs, growth=growth)


def _step(part: StepPart, path: Path, plan: PlanPart, source: Source) -> Step | None:
    check_schema(part.output_schema, (*path, "output_schema"), source)
    backend = part.backend
    if not part.prompt.strip():
        backend = None if part.continues else function_of(part, plan)
        if backend is None:
            source.problems.append(source.problem((*path, "prompt"), NO_PROMPT))
            return None
    try:
        return Step(
            part.name,
            part.prompt,
            backend,
            part.on_error,
            part.max_tries,
            part.output_schema,
            part.continues,
            retry_of(part, plan.defaults),
            plan.defaults.timeout if part.timeout is None else part.timeout,
        )
    except ValueError as error:
        source.problems.append(source.problem((*path, "name"), str(error)))
        return None


def _report(problem: Problem, workflow: Workflow, inputs: Mapping[str, JsonValue], source: Source) -> None:
    if problem.position is None:
        named = next((name for name in inputs if problem.field == "inputs" and repr(name) in problem.message), None)
        path: Path = ("inputs", named) if named is not None else ()
        source.problems.append(source.problem(path, problem.message))
        return
    field = _FIELDS.get(problem.field or "", problem.field)
    path = ("workflow", problem.position, *((field,) if field else ()))
    message = problem.message
    if (used := used_name(message)) in {step.name for step in workflow.steps()[problem.position + 1 :]}:
        message = f"the prompt uses {{{{ {used} }}}}, which is a later step; a step can use inputs and earlier steps"
    line = problem.line or line_in(workflow.steps()[problem.position].prompt, problem.message)
    source.problems.append(source.problem(path, message, line=line))
