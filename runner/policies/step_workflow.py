"""Step workflows: an ordered list of steps, each chosen by the last completed interaction alone. Pure.

A workflow is a policy. The run begins with the task of the first step; at the end of each task the policy adds the task
of the next step or ends the run. No state is kept in memory: the stored run and the steps suffice to continue. A task
for a try of a step is marked in its metadata (`step`, `try`); mark and outcome are stored with the task. Other tasks of
the run, such as tasks added by a step, are ignored.

A try whose failure is followed by another task has failure mode `skip`: the run does not fail, later tasks may depend
on the try, and no resume repeats the try. A try whose failure ends the run is `hard`: the run fails, and
`resume(retry_failed=True)` repeats exactly this try.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast, get_args

from plait.errors import ImpossibleState, UnknownStep, WorkflowEnded, nearest
from plait.json_form import JsonInput, JsonValue, as_json, from_json, value
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Decision, RecordedRun
from plait.runner.domain.run_result import TaskResult
from plait.runner.prompts.prompt_names import RESERVED_NAMES
from plait.statuses import RUN_DONE, RunStatus, TaskStatus
from plait.task import (
    DEFAULT_RETRY,
    NEVER_RETRIED,
    NO_PROMPT,
    FailureMode,
    Retry,
    Task,
    lacks_prompt,
)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,55}")
"""Eight characters shorter than a task id, to leave space for the number of the try."""
DEFAULT_TRIES = 3

OnError: TypeAlias = Literal["retry", "go_on", "end"]
"""The reaction to a failed step: `retry` the step until `max_tries` tries failed, `go_on` with the next step without a
result, or `end` the run. The run also ends without a remaining try or step, and if the backend of the step is
unavailable.
"""


@value
class Interaction:
    """A try of a step."""

    step: str
    """The name of the step."""
    status: Literal["ok", "error"] | None = None
    """`ok` or `error` after the end, None before."""
    text: str = ""
    """The text of the result."""
    data: JsonValue = None
    """The structured result."""
    number: int = 1
    """The number of the try of the step, from 1."""
    error: str | None = None
    """The reason for a failure, in one line."""
    unavailable: bool = False
    """True if the backend was unavailable and another try would fail in the same way."""

    @property
    def task_id(self) -> str:
        """The id of the task for the try."""
        return task_id(self.step, self.number)


@value
class WorkflowProgress:
    """How far a run of a workflow is: its interactions."""

    interactions: tuple[Interaction, ...] = ()
    """The interactions, the newest last."""
    status: RunStatus = RunStatus.RUNNING
    """The status of the run."""

    @property
    def last_completed(self) -> Interaction | None:
        """The newest interaction that has ended, successfully or not; None if there is none."""
        ended = (interaction for interaction in reversed(self.interactions) if interaction.status is not None)
        return next(ended, None)


@value
class WorkflowComplete:
    """No step follows."""

    ok: bool
    """False if a failed step is the last."""
    error: str | None = None
    """The reason for a failure."""


_STATUSES: dict[TaskStatus, Literal["ok", "error"]] = {
    TaskStatus.COMPLETED: "ok",
    TaskStatus.FAILED: "error",
    TaskStatus.SKIPPED: "error",
}


def task_id(step: str, number: int) -> str:
    """Return the id of the task for try `number` of `step`."""
    return f"{step}.{number}"


def progress_of(run: RecordedRun, status: RunStatus = RunStatus.RUNNING) -> WorkflowProgress:
    """Return the progress derived from the tasks of `run`."""
    interactions = (_interaction(task, run.result(task.id)) for task in run.tasks if is_interaction(task))
    return WorkflowProgress(tuple(interactions), status)


def is_interaction(task: Task) -> bool:
    """Return whether `task` is a try of a step."""
    step, number = task.metadata.get("step"), task.metadata.get("try")
    return isinstance(step, str) and isinstance(number, int) and task.id == task_id(step, number)


def _interaction(task: Task, result: TaskResult) -> Interaction:
    step, number = task.id.rsplit(".", 1)
    status, unavailable = _STATUSES.get(result.status), result.error_kind in NEVER_RETRIED
    return Interaction(
        step, status, result.text, result.data, number=int(number), error=result.error, unavailable=unavailable
    )


@value
class Step:
    """A step of a workflow."""

    name: str
    """1 to 56 letters, digits, `.`, `_` or `-`, not starting with a dot."""
    prompt: str = ""
    """A template: names of earlier steps stand for their results; a step without a result renders as an empty text."""
    backend: str | None = None
    """The name of a backend of the runner; None for the default backend."""
    on_error: OnError = "end"
    """The reaction to a failure."""
    max_tries: int = DEFAULT_TRIES
    """The maximum number of tries with `retry`."""
    output_schema: Mapping[str, object] | None = None
    """A JSON Schema for the answer."""
    continues: bool = False
    """True to continue the conversation of the previous step, on its backend."""
    retry: Retry = DEFAULT_RETRY
    """The retry policy within a try. Attempts repeated by the runner count as a single try."""
    timeout: float | None = None
    """The time limit of an attempt in seconds; None for no limit."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
            raise ValueError(
                f"step name {self.name[:80]!r} must have 1 to 56 letters, digits, '.', '_' or '-', and not begin with "
                f"'.', and must be none of {', '.join(sorted(RESERVED_NAMES))}"
            )
        if lacks_prompt(self.prompt, self.backend):
            raise ValueError(f"step {self.name!r}: {NO_PROMPT}")
        if self.max_tries < 1:
            raise ValueError(f"step {self.name!r}: max_tries must be at least 1, not {self.max_tries}")
        if self.on_error not in get_args(OnError):
            raise ValueError(
                f"step {self.name!r}: on_error must be one of {', '.join(get_args(OnError))}, not {self.on_error!r}"
            )


def step_problems(steps: Sequence[tuple[str, bool]]) -> Iterator[tuple[int, str, str]]:
    """Yield the mistakes in the names of `steps` and in whether they continue the step before: the index of the step,
    the field, and the message.
    """
    names = [name for name, _ in steps]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield index, "name", f"two steps are called {name!r}; give each a name of its own"
    if steps[0][1]:
        yield 0, "continues", f"step {names[0]!r} is the first, so there is no step before it to continue; leave it out"


class Workflow:
    """A sequence of steps: `runner.run(workflow.dag(), policy=workflow)`.

    `name` is the name of the runs. A workflow has no state. Raises ValueError for invalid steps.
    """

    kind = "workflow"

    def __init__(self, steps: Sequence[Step], *, name: str = "") -> None:
        self.name = name
        self._steps = tuple(steps)
        self._index = {step.name: index for index, step in enumerate(self._steps)}
        if not self._steps:
            raise ValueError("a workflow needs at least one step")
        for _, _, message in step_problems([(step.name, step.continues) for step in self._steps]):
            raise ValueError(message)

    def steps(self) -> tuple[Step, ...]:
        """Return the steps in order."""
        return self._steps

    def next_step(self, progress: WorkflowProgress) -> Step | WorkflowComplete:
        """Return the step after the last completed interaction, or the first step of a new run.

        Raises WorkflowEnded if the run is over, UnknownStep or ImpossibleState if no run of this workflow can get
        there.
        """
        if progress.status in RUN_DONE or progress.status is RunStatus.CANCELLING:
            raise WorkflowEnded(f"the run is {progress.status.value}: no step follows; start a new run")
        last = progress.last_completed
        if last is None:
            return self._steps[0]
        index = self._index_of(last)
        if last.status == "ok":
            return self._steps[index + 1] if self._steps[index + 1 :] else WorkflowComplete(ok=True)
        if last.status == "error":
            return self._after_error(index, last)
        raise ImpossibleState(
            f"step {last.step!r} ended as {last.status!r}; an interaction ends as 'ok' or 'error', so the "
            "stored progress is damaged"
        )

    def is_complete(self, of: WorkflowProgress | Interaction) -> bool:
        """Return whether the interaction, or the newest interaction of the run, is a success of the last step.

        A run ended by a failure of the last step is not complete.
        """
        if isinstance(of, WorkflowProgress):
            return bool(of.interactions) and self.is_complete(of.interactions[-1])
        return of.step == self._steps[-1].name and of.status == "ok"

    def dag(self, inputs: Mapping[str, JsonInput] | None = None) -> DAG:
        """Return the initial DAG of a run: the task of the first step.

        `inputs` are values available to the prompts of all steps. Raises DAGError with all mistakes in all steps.
        """
        DAG(self._once(), inputs=inputs)
        return DAG([self._task(self._steps[0], ())], name=self.name, inputs=inputs)

    def outline(self, inputs: Mapping[str, JsonInput] | None = None) -> DAG:
        """Return all steps as a chain, each once, to be drawn. Raises DAGError with all mistakes in all steps."""
        chain: list[Task] = []
        for task in self._once():
            chain.append(replace(task, depends_on=[earlier.id for earlier in chain[-1:]]))
        return DAG(chain, name=self.name, inputs=inputs)

    def backends(self) -> frozenset[str | None]:
        """Return the names of the steps' backends, with None for the default backend of the runner."""
        before: str | None = None
        names: set[str | None] = set()
        for step in self._steps:
            before = before if step.continues and step.backend is None else step.backend
            names.add(before)
        return frozenset(names)

    def settings(self) -> dict[str, JsonValue]:
        """Return the settings for `from_settings`."""
        return {"name": self.name, "steps": [as_json(step) for step in self._steps]}

    @classmethod
    def from_settings(cls, settings: Mapping[str, JsonValue]) -> Workflow:
        """Return the workflow with the given stored `settings`."""
        steps = cast("list[dict[str, JsonValue]]", settings["steps"])
        return cls([from_json(Step, step) for step in steps], name=cast("str", settings["name"]))

    def decide(self, run: RecordedRun) -> Decision:
        """Return a decision that adds the next step's task or ends the run: completed after the last step, otherwise
        failed.
        """
        progress = progress_of(run)
        if any(interaction.status is None for interaction in progress.interactions):
            return Decision()
        if run.ended is None:
            # After the end of the run, only a resume calls the policy again: a missing backend may be available by
            # now.
            interactions = tuple(replace(interaction, unavailable=False) for interaction in progress.interactions)
            progress = replace(progress, interactions=interactions)
        follows = self.next_step(progress)
        if isinstance(follows, Step):
            return Decision(add=(self._task(follows, progress.interactions),))
        if not follows.ok:
            return Decision(end=RunStatus.FAILED, error=follows.error)
        # Tasks added by a step must end first, and count like all tasks.
        passed = {TaskStatus.COMPLETED, TaskStatus.SKIPPED}
        done = all(run.result(task.id).status in passed for task in run.tasks)
        return Decision(end=RunStatus.COMPLETED if done else None)

    def _index_of(self, last: Interaction) -> int:
        if last.step not in self._index:
            steps = ", ".join(self._index)
            raise UnknownStep(
                f"the last interaction is of step {last.step!r}{nearest(last.step, self._index)}; the workflow has "
                f"{steps}: resume with the steps that the run was started with"
            )
        if last.number < 1:
            raise ImpossibleState(f"step {last.step!r} has a try {last.number}; tries count from 1")
        return self._index[last.step]

    def _after_error(self, index: int, last: Interaction) -> Step | WorkflowComplete:
        step = self._steps[index]
        is_left = step.on_error == "retry" and last.number < step.max_tries
        if is_left and not last.unavailable:
            return step
        if step.on_error == "go_on" and self._steps[index + 1 :]:
            return self._steps[index + 1]
        times = f" {last.number} times (max_tries)" if step.on_error == "retry" and not is_left else ""
        reason = (last.error or "no reason given").partition("\n")[0]
        return WorkflowComplete(ok=False, error=f"step {step.name!r} failed{times}: {reason}")

    def _task(self, step: Step, interactions: Sequence[Interaction]) -> Task:
        """Return the task for the next try of `step`. Names of earlier steps stand for their last successful try."""
        index = self._index[step.name]
        number = 1 + max((entry.number for entry in interactions if entry.step == step.name), default=0)
        tries = {entry.step: entry.task_id for entry in sorted(interactions, key=lambda entry: entry.status == "ok")}
        earlier = {step.name: tries[step.name] for step in self._steps[:index] if step.name in tries}
        before = [entry.task_id for entry in interactions[-1:] if entry.task_id not in earlier.values()]
        ends = isinstance(self._after_error(index, Interaction(step.name, "error", number=number)), WorkflowComplete)
        return replace(
            self._once()[index],
            id=task_id(step.name, number),
            depends_on=(*earlier.values(), *before),
            continues=earlier[self._steps[index - 1].name] if step.continues else None,
            failure_mode=FailureMode.HARD if ends else FailureMode.SKIP,
            aliases=earlier,
            metadata={"step": step.name, "try": number},
        )

    def _once(self) -> list[Task]:
        """Return the steps as tasks, each once under its own name."""
        names = [step.name for step in self._steps]
        return [
            Task(
                step.name,
                step.prompt,
                names[:index],
                step.backend,
                names[index - 1] if step.continues else None,
                retry=step.retry,
                timeout=step.timeout,
                output_schema=step.output_schema,
            )
            for index, step in enumerate(self._steps)
        ]
