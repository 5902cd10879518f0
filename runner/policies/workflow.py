"""Step workflows: an ordered list of steps, each chosen by the last completed interaction alone. Pure.

A workflow is a policy. The run begins with the task of the first step; at the end of each task the policy adds the task
of the next step or ends the session. No state is kept in memory: the stored run and the steps suffice to continue.

A try whose failure is followed by another task has failure mode `skip`: the run does not fail, later tasks may depend
on the try, and no resume repeats the try. A try whose failure ends the session is `hard`: the run fails, and
`resume(retry_failed=True)` repeats exactly this try.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

from plait.errors import ImpossibleState, SessionEnded, UnknownStep
from plait.json_form import JsonInput, JsonValue
from plait.runner.domain.dag import DAG, nearest
from plait.runner.domain.policy import Decision, RunView
from plait.runner.domain.task import DEFAULT_RETRY, NO_PROMPT, FailureMode, Retry, Task, lacks_prompt
from plait.runner.policies.settings import made_of, settings_of
from plait.runner.policies.workflow_session import (
    Interaction,
    Session,
    SessionComplete,
    session_of,
    task_id,
)
from plait.runner.prompts.base import RESERVED_NAMES
from plait.statuses import RUN_DONE, RunStatus, TaskStatus

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,55}")
"""Eight characters shorter than a task id, to leave space for the number of the try."""
DEFAULT_TRIES = 3
_PASSED = {TaskStatus.COMPLETED, TaskStatus.SKIPPED}


OnError: TypeAlias = Literal["retry", "go_on", "end"]
"""The reaction to a failed step: `retry` the step until `max_tries` tries failed, `go_on` with the next step without a
result, or `end` the session. The session also ends without a remaining try or step, and if the backend of the step is
unavailable.
"""


@dataclass(frozen=True, slots=True)
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
        if len(self._index) < len(self._steps):
            names = [step.name for step in self._steps]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two steps are called {twice!r}; give each a name of its own")
        if self._steps[0].continues:
            raise ValueError(f"step {self._steps[0].name!r} is the first, so there is no step before it to continue")

    def steps(self) -> tuple[Step, ...]:
        """Return the steps in order."""
        return self._steps

    def next_step(self, session: Session) -> Step | SessionComplete:
        """Return the step after the session's last completed interaction, or the first step of a new session.

        Raises SessionEnded if the session is over, UnknownStep or ImpossibleState if no run of this workflow can
        produce the session.
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
            f"step {last.step!r} ended as {last.status!r}; an interaction ends as 'ok' or 'error', so the "
            "stored session is damaged"
        )

    def is_complete(self, of: Session | Interaction) -> bool:
        """Return whether the interaction, or the newest interaction of the session, is a success of the last step.

        A session ended by a failure of the last step is not complete.
        """
        if isinstance(of, Session):
            return bool(of.interactions) and self.is_complete(of.interactions[-1])
        return of.step == self._steps[-1].name and of.status == "ok"

    def dag(self, inputs: Mapping[str, JsonInput] | None = None) -> DAG:
        """Return the initial DAG of a run: the task of the first step.

        `inputs` are values available to the prompts of all steps. Raises DAGError with all mistakes in all steps.
        """
        DAG(self._once(), inputs=inputs)
        return DAG([self._task(0, 1, Session())], name=self.name, inputs=inputs)

    def outline(self, inputs: Mapping[str, JsonInput] | None = None) -> DAG:
        """Return all steps as a chain, each once, to be drawn. Raises DAGError with all mistakes in all steps."""
        chain: list[Task] = []
        for task in self._once():
            chain.append(replace(task, depends_on=[one.id for one in chain[-1:]]))
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
        return {"name": self.name, "steps": [settings_of(step) for step in self._steps]}

    @classmethod
    def from_settings(cls, settings: Mapping[str, JsonValue]) -> Workflow:
        """Return the workflow with the given stored `settings`."""
        steps = cast("list[dict[str, JsonValue]]", settings["steps"])
        return cls([made_of(Step, step) for step in steps], name=cast("str", settings["name"]))

    def decide(self, run: RunView) -> Decision:
        """Return a decision that adds the next step's task or ends the run: completed after the last step, otherwise
        failed.
        """
        session = session_of(run)
        if any(one.status is None for one in session.interactions):
            return Decision()
        if run.ended is None:
            # After the end of a session, only a resume calls the policy again: a missing backend may be available by
            # now.
            had = tuple(replace(one, unavailable=False) for one in session.interactions)
            session = replace(session, interactions=had)
        follows = self.next_step(session)
        if isinstance(follows, Step):
            return Decision(add=(self._next_task(follows, session),))
        if not follows.ok:
            return Decision(end=RunStatus.FAILED, error=follows.error)
        # Tasks added by a step must end first, and count like all tasks.
        done = all(run.result(task.id).status in _PASSED for task in run.tasks)
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

    def _is_last(self, index: int) -> bool:
        return index == len(self._steps) - 1

    def _after_error(self, index: int, last: Interaction) -> Step | SessionComplete:
        step = self._steps[index]
        is_left = step.on_error == "retry" and last.number < step.max_tries
        if is_left and not last.unavailable:
            return step
        if step.on_error == "go_on" and not self._is_last(index):
            return self._steps[index + 1]
        times = f" {last.number} times (max_tries)" if step.on_error == "retry" and not is_left else ""
        why = (last.error or "no reason given").partition("\n")[0]
        return SessionComplete(ok=False, error=f"step {step.name!r} failed{times}: {why}")

    def _next_task(self, step: Step, session: Session) -> Task:
        index = self._index[step.name]
        number = max((one.number for one in session.interactions if one.step == step.name), default=0) + 1
        return self._task(index, number, session)

    def _task(self, index: int, number: int, session: Session) -> Task:
        """Return the task for try `number` of the step at `index`. The names of earlier steps stand for their last
        successful try.
        """
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
        """Return the steps as tasks, each once under its own name, for validation."""
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
