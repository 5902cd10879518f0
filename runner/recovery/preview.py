"""Preview of a resume: the actions by task, without any change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.clock_and_ids import iso
from plait.errors import PlaitError, StoreError
from plait.runner.domain.html_table import html_table
from plait.runner.engine.event_feed import Feed
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.engine.lease import wait_for_expiry
from plait.runner.engine.run_options import Config
from plait.runner.recovery.adoption import with_detached_turns
from plait.runner.recovery.given_answers import ReceivedAnswers, given_answers
from plait.runner.recovery.resume import (
    evidence_of,
    later_tries,
    owner_died,
    policy_state_of,
    require_no_damaged_dependency,
)
from plait.runner.recovery.resume_plan import (
    ANSWERED,
    RUNS,
    ResumeAction,
    ResumeStep,
    deaths_with,
    longest_delay,
    plan_resume,
    steps_of_cancelled,
    steps_of_decided,
)
from plait.runner.state.stored_conversations import load_history
from plait.runner.state.stored_run import StoredPolicy, StoredRun, needs_no_work
from plait.statuses import TASK_STATUSES, UNDER_WAY, RunStatus, TaskStatus

DEFAULTED = "no answer by the deadline, so the default answer is used"
_CHARACTERS_A_TOKEN = 4
"""The usual rate of tokenizers for English text. An estimate: exact counts need a call of the model."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The actions that `resume` would take."""

    run_id: str
    status: RunStatus
    """The status of the run as in `RunInfo`: interrupted for a run stored as under way without a living owner."""
    tasks: Mapping[str, ResumeStep]
    """The step of each task, by task id, in the order of the DAG."""
    ended: bool = False
    """Whether the run is over, so that `resume` would only return the stored result."""
    damaged: tuple[str, ...] = ()
    """The ids of the tasks whose stored result does not fit its checksum, and that would not run again: `resume`
    counts these tasks as failed.
    """

    def count(self, *actions: ResumeAction) -> int:
        """Return the number of tasks with any of the `actions`."""
        return sum(step.action in actions for step in self.tasks.values())

    @property
    def runs(self) -> int:
        """The number of tasks that would be executed if no task failed."""
        return self.count(*RUNS)

    @property
    def repeats(self) -> tuple[ResumeStep, ...]:
        """The steps of tasks that may be paid for twice."""
        return tuple(step for step in self.tasks.values() if step.repeats and step.action in RUNS)

    @property
    def repeated_input_tokens(self) -> int:
        """The estimated number of input tokens of `repeats`. Lost output tokens are not included: no count exists."""
        return sum(step.input_tokens for step in self.repeats)

    def _repr_html_(self) -> str:
        """Return the preview as a table for a notebook."""
        caption = f"resume of run {self.run_id}, {self.status.value}: {self.runs} tasks to run"
        rows = [(task_id, step.action.value, step.reason) for task_id, step in self.tasks.items()]
        return html_table(caption, ("task", "action", "reason"), rows)

    def as_json(self) -> dict[str, Any]:
        """Return the preview as the JSON object of `plait resume --dry-run --json`."""
        return {
            "run_id": self.run_id,
            "status": self.status.value,
            "ended": self.ended,
            "damaged": list(self.damaged),
            "runs": self.runs,
            "adopted": self.count(ResumeAction.ADOPT),
            "possibly_billed_twice": len(self.repeats),
            "repeated_input_tokens": self.repeated_input_tokens,
            "tasks": [_step_as_json(step) for step in self.tasks.values()],
        }


def _step_as_json(step: ResumeStep) -> dict[str, Any]:
    return {
        "task_id": step.task_id,
        "action": step.action.value,
        "reason": step.reason,
        "possibly_billed_twice": step.repeats,
        "input_tokens": step.input_tokens,
    }


async def preview(config: Config, run: StoredRun, retry_failed: bool) -> Preview:
    """Return the preview of a resume: see `ParallelRunner.preview_resume`. Raises as `wait_for_expiry` and
    `require_no_damaged_dependency`.
    """
    ended = needs_no_work(run, retry_failed)
    if not ended:
        await wait_for_expiry(config, run, Feed())
    steps = await _steps(config, run, ended, retry_failed)
    later = await later_tries(run, steps, config.clock.wall())
    for position, until in later.items():
        steps[position] = replace(steps[position], reason=f"{steps[position].reason}; not before {iso(until)}")
    for position, record in enumerate(run.tasks):
        is_cut = TASK_STATUSES[record.status] is TaskStatus.RUNNING and steps[position].action in RUNS
        if is_cut and owner_died(run):
            within = f"starts within {longest_delay(deaths_with(record)):g} s"
            steps[position] = replace(steps[position], reason=f"{steps[position].reason}; {within}")
    weighed = [await _with_input_tokens(run, step) if step.repeats else step for step in steps]
    status = RunStatus.INTERRUPTED if run.status in UNDER_WAY else run.status
    kept = zip(run.tasks, weighed, strict=True)
    damaged = tuple(task.task_id for task, step in kept if task.damaged and step.action not in RUNS)
    return Preview(run.record.run_id, status, {step.task_id: step for step in weighed}, ended, damaged)


async def _steps(config: Config, run: StoredRun, ended: bool, retry_failed: bool) -> list[ResumeStep]:
    if await is_to_be_cancelled(run.store, run.record):
        return steps_of_cancelled(run.tasks)
    retry_failed = retry_failed and not ended
    given = await given_answers(run, config.clock.wall())
    end = policy_state_of(run, retry_failed).end
    if end is None:
        run = await with_detached_turns(config, run)
    steps = plan_resume(run.state.dag, run.tasks, retry_failed=retry_failed, evidence=evidence_of(run, given))
    if not ended:
        require_no_damaged_dependency(run, steps, decides=StoredPolicy.of(run.record) is not None and end is None)
    if end is not None:
        steps = steps_of_decided(steps, fails=end is RunStatus.FAILED)
    return [_by_default(step, run, given) for step in steps]


def _by_default(step: ResumeStep, run: StoredRun, given: ReceivedAnswers) -> ResumeStep:
    """Return the step, with DEFAULTED as the reason if the question is answered by the default."""
    answer = given.answers.get(step.task_id)
    before = run.state.answers.get(run.state.dag.position(step.task_id), ())
    by = answer.by if answer is not None else before[-1].by if before else None
    if by != "default":
        return step
    return replace(step, reason=step.reason.replace(ANSWERED, DEFAULTED))


async def _with_input_tokens(run: StoredRun, step: ResumeStep) -> ResumeStep:
    task = run.state.dag[step.task_id]
    try:
        characters = len(run.state.prompt(task))
        if task.continues is not None and run.state.is_completed(task.continues):
            history = await load_history(run.store, run.record.run_id, run.state, task.continues)
            characters += sum(len(message.content) for message in history.messages)
    except StoreError:
        raise
    except PlaitError:  # an unreadable prompt or conversation costs nothing
        return step
    return replace(step, input_tokens=-(-characters // _CHARACTERS_A_TOKEN))
