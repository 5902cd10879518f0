"""Step workflows: an ordered list of steps, each decided from the last completed interaction alone. Pure.

A workflow is a policy. Its run begins with the first step's task; the end of each task decides which step's task is
added next, or that the session is over. It remembers nothing: whoever has the stored run and the steps can go on.

A try whose failure is followed by another task is a task of failure mode `skip`: it does not fail the run, what comes
after may depend on it, and no resume runs it again. The one whose failure ends the session is `hard`: it fails the
run, and `resume(retry_failed=True)` runs that one again, and none of those that were overtaken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

from plait.backends.protocol import JsonInput, JsonValue
from plait.runner.domain.dag import DAG, nearest
from plait.runner.domain.policy import Decision, RunView
from plait.runner.domain.status import RUN_DONE, RunStatus, TaskStatus
from plait.runner.domain.task import DEFAULT_RETRY, FailureMode, Retry, Task
from plait.runner.policies.settings import made_of, settings_of
from plait.runner.policies.workflow_session import (
    ImpossibleState,
    Interaction,
    Session,
    SessionComplete,
    SessionEnded,
    UnknownStep,
    session_of,
    task_id,
)
from plait.runner.prompts.base import RESERVED_NAMES

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,55}")
"""Eight characters fewer than a task's id may have, for the number of the try."""
_PASSED = {TaskStatus.COMPLETED, TaskStatus.SKIPPED}


OnError: TypeAlias = Literal["retry", "go_on", "end"]
"""What follows when a step has failed: the same step again, until it has failed `max_tries` times; the next step,
without its result; or nothing, for the session ends. It also ends where no try or no further step is left, or where a
try is left, but the step's backend cannot be had.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a workflow.

    `name` is 1 to 56 of letters, digits, `.`, `_`, `-`, not starting with a dot. `prompt` is a template: the names of
    earlier steps stand for their results, the empty text where they have none. `on_error` says what follows when it
    has failed: `retry`, at most `max_tries` tries in all, `go_on` or `end`. `continues` goes on with the conversation
    of the step before, on its backend. `retry` and `timeout` (seconds) are those of each try's task: what the runner
    tries again by itself is one try of the step, whatever it takes. `backend` and `output_schema` as in `Task`.
    """

    name: str
    prompt: str = ""
    backend: str | None = None
    on_error: OnError = "end"
    max_tries: int = 3
    output_schema: Mapping[str, object] | None = None
    continues: bool = False
    retry: Retry = DEFAULT_RETRY
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
            raise ValueError(
                f"step name {self.name[:80]!r} must be 1 to 56 of letters, digits, '.', '_', '-', not starting with "
                f"'.', and none of {', '.join(sorted(RESERVED_NAMES))}"
            )
        if self.max_tries < 1:
            raise ValueError(f"step {self.name!r}: max_tries must be at least 1, not {self.max_tries}")
        if self.on_error not in get_args(OnError):
            raise ValueError(
                f"step {self.name!r}: on_error must be one of {', '.join(get_args(OnError))}, not {self.on_error!r}"
            )


class Workflow:
    """An ordered list of steps, one after the other: `runner.run(workflow.dag(), policy=workflow)`.

    `name` is shown as the run's. Holds no state: every answer comes from what it is asked about. Raises ValueError for
    steps that make no workflow.
    """

    kind = "workflow"

    def __init__(self, steps: Sequence[Step], *, name: str = "") -> None:
        self.name = name
        self._steps = tuple(steps)
        self._index = {step.name: index for index, step in enumerate(self._steps)}
        if not self._steps:
            raise ValueError("a workflow needs at least one step")
        if len(self._index) < len(self._steps):
            names = [step.name for step in self._steps]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two steps are called {twice!r}; give each a name of its own")
        if self._steps[0].continues:
            raise ValueError(f"step {self._steps[0].name!r} is the first, so there is no step before it to continue")

    def steps(self) -> tuple[Step, ...]:
        """The steps, in the order in which they are taken."""
        return self._steps

    def next_step(self, session: Session) -> Step | SessionComplete:
        """What follows, decided from the session's last completed interaction alone: the first step where there is
        none. Raises SessionEnded for a session that is over, UnknownStep and ImpossibleState for one that no run of
        this workflow can come to.
        """
        if session.status in RUN_DONE or session.status is RunStatus.CANCELLING:
            raise SessionEnded(f"the session is {session.status.value}: no step follows; start a new run")
        last = session.last_completed
        if last is None:
            return self._steps[0]
        index = self._index_of(last)
        if last.status == "ok":
            return SessionComplete(ok=True) if self._is_last(index) else self._steps[index + 1]
        if last.status == "error":
            return self._after_error(index, last)
        raise ImpossibleState(
            f"step {last.step!r} ended as {last.status!r}; an interaction ends as 'ok' or 'error', so what is stored "
            "of this session is damaged"
        )

    def is_complete(self, of: Session | Interaction) -> bool:
        """Whether the newest interaction, or this one, is the last step's and went well. A session whose last step
        failed has ended, and is not complete.
        """
        if isinstance(of, Session):
            return bool(of.interactions) and self.is_complete(of.interactions[-1])
        return of.step == self._steps[-1].name and of.status == "ok"

    def dag(self, inputs: Mapping[str, JsonInput] | None = None) -> DAG:
        """What a run of this workflow begins with: the first step's task. `inputs` are values that the prompts of all
        steps may use by name. Raises DAGError listing every mistake in any of the steps.
        """
        DAG(self._once(), inputs=inputs)
        return DAG([self._task(0, 1, Session())], name=self.name, inputs=inputs)

    def backends(self) -> frozenset[str | None]:
        """The names of the backends that steps run on; None stands for the runner's default one."""
        before: str | None = None
        names: set[str | None] = set()
        for step in self._steps:
            before = before if step.continues and step.backend is None else step.backend
            names.add(before)
        return frozenset(names)

    def settings(self) -> dict[str, JsonValue]:
        """What `from_settings` makes the same workflow of."""
        return {"name": self.name, "steps": [settings_of(step) for step in self._steps]}

    @classmethod
    def from_settings(cls, settings: Mapping[str, JsonValue]) -> Workflow:
        """The workflow whose `settings` these are."""
        steps = cast("list[dict[str, JsonValue]]", settings["steps"])
        return cls([made_of(Step, step) for step in steps], name=cast("str", settings["name"]))

    def decide(self, run: RunView) -> Decision:
        """Adds the next step's task, or ends the run: as completed when the last step went well, else as failed."""
        session = session_of(run)
        if any(one.status is None for one in session.interactions):
            return Decision()
        if run.ended is None:
            # Once a session is over, only a resume asks again: what could not be had may be there by now.
            had = tuple(replace(one, unavailable=False) for one in session.interactions)
            session = replace(session, interactions=had)
        follows = self.next_step(session)
        if isinstance(follows, Step):
            return Decision(add=(self._next_task(follows, session),))
        if not follows.ok:
            return Decision(end=RunStatus.FAILED, error=follows.error)
        # A step may have added tasks of its own. They are seen through, and then count like all tasks.
        done = all(run.result(task.id).status in _PASSED for task in run.tasks)
        return Decision(end=RunStatus.COMPLETED if done else None)

    def _index_of(self, last: Interaction) -> int:
        if last.step not in self._index:
            steps = ", ".join(self._index)
            raise UnknownStep(
                f"the last interaction is of step {last.step!r}{nearest(last.step, self._index)}; the workflow has "
                f"{steps}: go on with the steps that the run was started with"
            )
        if last.number < 1:
            raise ImpossibleState(f"step {last.step!r} has a try {last.number}; tries count from 1")
        return self._index[last.step]

    def _is_last(self, index: int) -> bool:
        return index == len(self._steps) - 1

    def _after_error(self, index: int, last: Interaction) -> Step | SessionComplete:
        step = self._steps[index]
        is_left = step.on_error == "retry" and last.number < step.max_tries
        if is_left and not last.unavailable:
            return step
        if step.on_error == "go_on" and not self._is_last(index):
            return self._steps[index + 1]
        times = f" {last.number} times, its max_tries" if step.on_error == "retry" and not is_left else ""
        why = (last.error or "it does not say why").partition("\n")[0]
        return SessionComplete(ok=False, error=f"step {step.name!r} failed{times}: {why}")

    def _next_task(self, step: Step, session: Session) -> Task:
        index = self._index[step.name]
        number = max((one.number for one in session.interactions if one.step == step.name), default=0) + 1
        return self._task(index, number, session)

    def _task(self, index: int, number: int, session: Session) -> Task:
        """Try `number` of the step at `index`. Each earlier step's name stands for its last try that went well."""
        step = self._steps[index]
        best = {one.step: one.task_id for one in sorted(session.interactions, key=lambda one: one.status == "ok")}
        earlier = {one.name: best[one.name] for one in self._steps[:index] if one.name in best}
        before = [one.task_id for one in session.interactions[-1:] if one.task_id not in earlier.values()]
        ends = isinstance(self._after_error(index, Interaction(step.name, "error", number=number)), SessionComplete)
        return Task(
            id=task_id(step.name, number),
            prompt=step.prompt,
            depends_on=(*earlier.values(), *before),
            backend=step.backend,
            continues=earlier[self._steps[index - 1].name] if step.continues else None,
            failure_mode=FailureMode.HARD if ends else FailureMode.SKIP,
            retry=step.retry,
            timeout=step.timeout,
            output_schema=step.output_schema,
            aliases=earlier,
            metadata={"step": step.name, "try": number},
        )

    def _once(self) -> list[Task]:
        """The steps as if each were taken once, under its own name: with the mistakes that their tasks would have."""
        names = [step.name for step in self._steps]
        return [
            Task(
                step.name,
                step.prompt,
                names[:index],
                step.backend,
                names[index - 1] if step.continues else None,
                timeout=step.timeout,
                output_schema=step.output_schema,
            )
            for index, step in enumerate(self._steps)
        ]
