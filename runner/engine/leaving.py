"""How a run's time in a process ends: what was under way is settled, and the run's last event says what it came to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from plait.runner.domain import events
from plait.runner.domain.status import TASK_DONE, RunStatus, TaskStatus
from plait.runner.engine.policy_driver import Decided
from plait.runner.recovery.resume_plan import at_most_once_question
from plait.runner.state.run_state import RunState


@dataclass(frozen=True, slots=True)
class Ending:
    """Who ended the run before its time, if anybody did, and how it stands: whether the schedule is `exhausted`, which
    tasks marked at_most_once have been `called`, and what the run's policy has `decided`, if it has one.
    """

    by: Literal["stop", "cancel", "policy"] | None
    exhausted: bool
    called: Collection[int]
    decided: Decided | None


def leave(run_id: str, state: RunState, ending: Ending, at: str) -> list[events.Event]:
    """Settle what is not done, and say how the run ended."""
    happened: list[events.Event] = []
    for_good = ending.by == "cancel" or (ending.by == "policy" and not _fails(ending))
    for position, status in enumerate(state.statuses):
        task_id, number = state.dag.tasks[position].id, state.attempts[position]
        if for_good and status not in TASK_DONE:
            happened.append(state.cancel(position, at))
        elif status is TaskStatus.RUNNING and position in ending.called:
            question = at_most_once_question(number)
            state.ask(position, question)
            happened.append(events.TaskWaiting(at, task_id, number, question))
        elif status is TaskStatus.RUNNING:
            state.statuses[position] = TaskStatus.PENDING
            happened.append(events.TaskInterrupted(at, task_id, number, "the run was stopped"))
    happened.append(_last_event(run_id, state, ending, at))
    return happened


def _fails(ending: Ending) -> bool:
    """Whether the run's policy has it fail: then what is not done is left, for a resume that retries what failed."""
    return ending.decided is not None and ending.decided.end is RunStatus.FAILED


def _last_event(run_id: str, state: RunState, ending: Ending, at: str) -> events.RunEnded:
    if ending.by == "cancel":
        return events.RunCancelled(at, run_id, RunStatus.CANCELLED)
    if ending.by == "policy" and ending.decided is not None:
        if _fails(ending):
            return events.RunFailed(at, run_id, RunStatus.FAILED, ending.decided.error)
        return events.RunCompleted(at, run_id, RunStatus.COMPLETED)
    if not ending.exhausted:
        return events.RunInterrupted(at, run_id, RunStatus.INTERRUPTED)
    if TaskStatus.WAITING_INPUT in state.statuses:
        return events.RunWaitingInput(at, run_id, RunStatus.WAITING_INPUT)
    return _by_itself(run_id, state, at)


def _by_itself(run_id: str, state: RunState, at: str) -> events.RunEnded:
    """The end of a run that nobody ended: there was nothing left that could run."""
    failed = [result for result in state.results.values() if result.status is TaskStatus.FAILED]
    if not failed:
        return events.RunCompleted(at, run_id, RunStatus.COMPLETED)
    blocked = sum(status not in TASK_DONE for status in state.statuses)
    names = ", ".join(result.id for result in failed[:5])
    error = f"{len(failed)} failed ({names}{', ...' if len(failed) > 5 else ''})"
    error += f", {blocked} blocked" if blocked else ""
    return events.RunFailed(at, run_id, RunStatus.FAILED, f"{error}; {failed[0].id}: {failed[0].error}")
