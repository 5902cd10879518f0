"""`workflows`: what follows tasks of a role, as the policy that the plan's run has.

Where a chain's prompts are wrong cannot be seen in them alone: what they may use depends on the task that they follow.
So the graph is built once more, as it would be if every task had been completed and followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner.dag import DAG, nearest
from runner.errors import DAGError, PromptError
from runner.plan.errors import Path
from runner.plan.graph import check_schema, line_in, retry_of
from runner.plan.model import FollowUpPart, PlanPart
from runner.plan.source import Source
from runner.policies.follow_ups import FollowUp, FollowUps, circle_of, role_of
from runner.task import FailureMode, Task


def follow_ups_of(part: PlanPart, source: Source) -> FollowUps | None:
    """The plan's follow-ups, None where it has none. What is wrong with them goes to `source.problems`."""
    before = len(source.problems)
    chains: dict[str, list[FollowUp]] = {}
    for index, workflow in enumerate(part.workflows):
        path: Path = ("workflows", index)
        if workflow.after in chains:
            _complain(source, (*path, "after"), f"there is a workflow after {workflow.after!r} already; make it one")
        if not workflow.steps:
            _complain(source, (*path, "steps"), "nothing follows; add a step, or leave `steps` out for the usual two")
        _check_roles(source, (*path, "steps"), workflow.steps)
        made = (_made(step, (*path, "steps", n), part, source) for n, step in enumerate(workflow.steps))
        chains[workflow.after] = [step for step in made if step is not None]
    _check_after(part, source)
    return FollowUps(chains) if chains and len(source.problems) == before else None


def check_follow_ups(follow_ups: FollowUps, dag: DAG, source: Source) -> None:
    """Report what would be wrong with the graph once all of its tasks have been followed."""
    origins = dict(_followed(follow_ups, dag.tasks, {task.id for task in dag}))
    try:
        DAG([*dag.tasks, *(task for task, _ in origins.values())], inputs=dag.inputs)
    except DAGError as error:
        seen: set[tuple[Path, str]] = set()
        for problem in error.problems:
            if problem.task_id not in origins:  # an input is called like a follow-up
                source.problems.append(source.problem(("inputs",), problem.message))
                continue
            task, step = origins[problem.task_id]
            path = (*_step_path(follow_ups, *step), *((problem.field,) if problem.field else ()))
            hint = f"; let {task.metadata['follows']!r} depend on it"
            if (path, problem.message) not in seen:
                seen.add((path, problem.message))
                message = problem.message.replace("; add it to depends_on", hint)
                line = problem.line or line_in(task.prompt, problem.message)
                source.problems.append(source.problem(path, message, line=line))


def _followed(
    follow_ups: FollowUps, tasks: Iterable[Task], taken: set[str]
) -> Iterator[tuple[str, tuple[Task, tuple[str, int]]]]:
    """Every follow-up of `tasks`, and theirs, by id, with the role that it is after and its place in the chain."""
    for task in tasks:
        added = list(follow_ups.after(task, taken))
        taken |= {one.id for one in added}
        yield from ((one.id, (one, (role_of(task) or "", place))) for place, one in enumerate(added))
        yield from _followed(follow_ups, added, taken)


def _step_path(follow_ups: FollowUps, after: str, place: int) -> Path:
    return ("workflows", list(follow_ups.chains()).index(after), "steps", place)


def _made(step: FollowUpPart, path: Path, part: PlanPart, source: Source) -> FollowUp | None:
    check_schema(step.output_schema, (*path, "output_schema"), source)
    defaults = part.defaults
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
    except PromptError as error:
        source.problems.append(source.problem((*path, "prompt"), str(error), line=error.line))
    except ValueError as error:
        _complain(source, (*path, "role"), str(error))
    return None


def _check_roles(source: Source, path: Path, steps: list[FollowUpPart]) -> None:
    roles = [step.role for step in steps]
    for place, role in enumerate(roles):
        if role in roles[:place]:
            _complain(source, (*path, place, "role"), f"role {role!r} stands in this chain already; call it otherwise")


def _check_after(part: PlanPart, source: Source) -> None:
    """Roles that go round in a circle, and roles that look like a slip of the pen."""
    after = {workflow.after: [step.role for step in workflow.steps] for workflow in part.workflows}
    if circle := circle_of(after):
        place = next(n for n, workflow in enumerate(part.workflows) if workflow.after in circle)
        message = f"these roles follow each other for ever: {' -> '.join(circle)}; take one of these steps out"
        _complain(source, ("workflows", place, "after"), message)
    known = {str(task.role or task.metadata.get("role") or "") for task in part.tasks}
    known |= {role for roles in after.values() for role in roles}
    for index, workflow in enumerate(part.workflows):
        # Tasks that are added later may have roles that no task has now.
        if workflow.after not in known and (hint := nearest(workflow.after, known)):
            _complain(source, ("workflows", index, "after"), f"no task has the role {workflow.after!r}{hint}")


def _complain(source: Source, path: Path, message: str) -> None:
    source.problems.append(source.problem(path, message))
