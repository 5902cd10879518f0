"""Conversion of `follow_ups` to the policy of the plan's run.

The prompts of a chain cannot be checked in isolation, because the available names depend on the followed task. The
check therefore assumes that every task of the plan has completed and validates the resulting follow-ups.
"""

from __future__ import annotations

from plait.errors import PromptError
from plait.runner.domain.dag import DAG, nearest, sort_names
from plait.runner.plan.plan_models import FollowUpPart, PlanPart
from plait.runner.plan.plan_positions import Source
from plait.runner.plan.plan_tasks import check_schema, line_in, retry_of
from plait.runner.plan.values import Path
from plait.runner.policies.follow_ups import FollowUp, FollowUps
from plait.runner.prompts.prompt_template import parse_names
from plait.task import FailureMode


def follow_ups_of(part: PlanPart, source: Source) -> FollowUps | None:
    """Return the policy of the plan; None without follow-ups. Problems are added to `source.problems`."""
    before = len(source.problems)
    chains: dict[str, list[FollowUp]] = {}
    for index, chain in enumerate(part.follow_ups):
        path: Path = ("follow_ups", index)
        if chain.after in chains:
            _complain(source, (*path, "after"), f"there is a chain after {chain.after!r} already; merge the two")
        if not chain.steps:
            _complain(
                source, (*path, "steps"), "the chain has no step; add one, or leave `steps` out for the default two"
            )
        _check_roles(source, (*path, "steps"), chain.steps)
        made = (_made(step, (*path, "steps", n), part, source) for n, step in enumerate(chain.steps))
        chains[chain.after] = [step for step in made if step is not None]
    _check_after(part, source)
    return FollowUps(chains) if chains and len(source.problems) == before else None


def check_follow_ups(follow_ups: FollowUps, dag: DAG, source: Source) -> None:
    """Report the problems of the graph after the addition of all follow-ups."""
    for mistake in follow_ups.mistakes(dag):
        problem, task = mistake.problem, mistake.task
        if task.id in dag.inputs:
            message = f"input {task.id!r} is also the id of a follow-up; rename the input"
            source.problems.append(source.problem(("inputs",), message))
            continue
        step = _step_path(follow_ups, mistake.after, mistake.place)
        path = (*step, *((problem.field,) if problem.field else ()))
        line = problem.line or line_in(task.prompt, problem.message)
        source.problems.append(source.problem(path, problem.message, line=line))


def _step_path(follow_ups: FollowUps, after: str, place: int) -> Path:
    return ("follow_ups", list(follow_ups.chains()).index(after), "steps", place)


def _made(step: FollowUpPart, path: Path, part: PlanPart, source: Source) -> FollowUp | None:
    check_schema(step.output_schema, (*path, "output_schema"), source)
    defaults = part.defaults
    for mistake in parse_names(step.prompt or "")[1]:
        source.problems.append(source.problem((*path, "prompt"), str(mistake), line=mistake.line))
    try:
        return FollowUp(
            step.role,
            step.prompt or "",
            step.backend,
            FailureMode(step.failure_mode or defaults.failure_mode),
            step.output_schema,
            retry_of(step, defaults),
            defaults.timeout if step.timeout is None else step.timeout,
        )
    except PromptError:  # reported above
        return None
    except ValueError as error:
        _complain(source, (*path, "role"), str(error))
    return None


def _check_roles(source: Source, path: Path, steps: list[FollowUpPart]) -> None:
    roles = [step.role for step in steps]
    for place, role in enumerate(roles):
        if role in roles[:place]:
            _complain(source, (*path, place, "role"), f"role {role!r} is in this chain already; rename the role")


def _check_after(part: PlanPart, source: Source) -> None:
    """Report cycles of roles, and roles that look like misspellings."""
    after = {chain.after: [step.role for step in chain.steps] for chain in part.follow_ups}
    for circle in sort_names(after)[1]:
        place = next(n for n, chain in enumerate(part.follow_ups) if chain.after in circle)
        message = f"these roles form a cycle: {' -> '.join(circle)}; remove one of these steps"
        _complain(source, ("follow_ups", place, "after"), message)
    known = {str(task.role or task.metadata.get("role") or "") for task in part.tasks}
    known |= {role for roles in after.values() for role in roles}
    for index, chain in enumerate(part.follow_ups):
        # Tasks added later may have roles not present now.
        if chain.after not in known and (hint := nearest(chain.after, known)):
            _complain(source, ("follow_ups", index, "after"), f"no task has the role {chain.after!r}{hint}")


def _complain(source: Source, path: Path, message: str) -> None:
    source.problems.append(source.problem(path, message))
