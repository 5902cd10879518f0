"""The calls of a run's policy, after each end of a task and when nothing is left to run. The decisions become events of
the same transaction.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

from plait import events
from plait.errors import DAGError, PlaitError
from plait.json_form import JsonValue
from plait.program_log import logger
from plait.runner.domain.policy import Decision, Policy, RecordedRun
from plait.runner.domain.run_result import TaskResult
from plait.runner.engine import growth
from plait.runner.engine.live_run import LiveRun
from plait.runner.state.stored_run import PolicyState
from plait.safe_text import clean_text
from plait.statuses import TASK_DONE, RunStatus, TaskStatus

MAX_STATE = 64 * 1024
"""Largest size of a policy's state, in characters of JSON. The state is stored with every end of a task."""


def decide(run: LiveRun, policy: Policy, ended: str | None) -> list[events.Event]:
    """Call the policy after the end of the task `ended`, or, if None, when nothing is left to run.

    Returns the events of the decision; none if the end of the run is decided already. If the policy raises or returns
    an invalid decision, the run fails.
    """
    decided, dag = run.policy_state, run.state.dag
    if decided.end is not None or (ended is None and decided.idle):
        return []
    view = RecordedRun(dag.tasks, partial(_result, run), decided.state, ended, dag.position)
    try:
        decision = _checked(policy.decide(view))
        state = PolicyState(cast("JsonValue", decision.state), decision.end, decision.error)
        encoded = state.encoded()
        if len(encoded) > MAX_STATE:
            raise PlaitError(f"the state has {len(encoded)} characters of JSON, and the limit is {MAX_STATE}")
        new_events = _carried_out(run, decision)
        if ended is None and not new_events:
            state = replace(state, idle=True)
            encoded = state.encoded()
        run.policy_state = state
    except Exception as error:
        new_events = []
        run.policy_state = _failed(policy, error, ended, decided)
        encoded = run.policy_state.encoded()
    return [*new_events, events.PolicyDecided(run.stamp(), encoded)]


def _failed(policy: Policy, error: Exception, ended: str | None, decided: PolicyState) -> PolicyState:
    when = "nothing was left to run" if ended is None else f"task {ended!r} had ended"
    what = str(error) if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
    message = f"the run's policy {policy.kind!r} failed when {when}: {what}"[:2000]
    logger().error("policy_failed", kind=policy.kind, error=type(error).__name__)
    if not isinstance(error, PlaitError):
        logger().debug("policy_failed", error, kind=policy.kind)
    return PolicyState(decided.state, RunStatus.FAILED, clean_text(message), failed_on=ended)


def _carried_out(run: LiveRun, decision: Decision) -> list[events.Event]:
    new_events: list[events.Event] = []
    new = {task.id for task in decision.add}
    for task_id in decision.cancel:
        if task_id not in run.state.dag and task_id not in new:
            raise PlaitError(f"the decision cancels task {task_id!r}, which is not in the run")
    if decision.add:
        try:
            new_events.append(growth.add(run, decision.add, None))
        except DAGError as error:
            raise PlaitError(f"the decision adds tasks that cannot be added: {error}") from error
    for task_id in decision.cancel:
        new_events += _cancel(run, run.state.dag.position(task_id))
    return new_events


def _cancel(run: LiveRun, position: int) -> list[events.Event]:
    """Cancel the pending or waiting task, all tasks that depend on the task, and the parts of the task."""
    state, at, new_events = run.state, run.stamp(), list[events.Event]()
    waiting = [position]
    while waiting:
        position = waiting.pop()
        if state.statuses[position] not in {TaskStatus.PENDING, TaskStatus.WAITING_INPUT}:
            continue
        new_events.append(state.cancel(position, at))
        run.scheduler.drop(position)
        waiting += [after for after in state.dag.dependents[position] if _is_lost(run, after)]
        waiting += state.parts.get(position, ())
    return new_events


def _is_lost(run: LiveRun, position: int) -> bool:
    """Return whether the task, a dependency of which was just cancelled, can never start."""
    dag, statuses = run.state.dag, run.state.statuses
    cancelled = [statuses[each] is TaskStatus.CANCELLED for each in dag.dependencies[position]]
    return dag.tasks[position].join == "all" or (dag.tasks[position].join == "any" and all(cancelled))


def _result(run: LiveRun, task_id: str) -> TaskResult:
    """Return the current result of the task. Raises KeyError."""
    state, position = run.state, run.state.dag.position(task_id)
    if (status := state.statuses[position]) in TASK_DONE:
        return state.results[position]
    return TaskResult(task_id, status, attempts=state.attempts[position])


def _checked(decision: object) -> Decision:
    """Return `decision` with a storable error text. Raises PlaitError if invalid: third-party policies may lack type
    checks.
    """
    if not isinstance(decision, Decision):
        raise PlaitError(f"decide() returned {type(decision).__name__}, not a Decision")
    if not (decision.end is None or decision.end is RunStatus.COMPLETED or decision.end is RunStatus.FAILED):
        raise PlaitError(f"Decision.end is {decision.end!r}; give RunStatus.COMPLETED or RunStatus.FAILED")
    if decision.end is not None and decision.add:
        raise PlaitError("the decision both ends the run and adds tasks; do one of the two")
    return decision if decision.error is None else replace(decision, error=clean_text(str(decision.error))[:2000])
