"""Preview of a run that takes answers over: which tasks do, which run, and for which reason.

The preview is the executor itself, with a handler that settles each task before a backend is called: lists are
expanded, conditions decided and the policy asked as in the run. A task that runs is assumed to give the answer of the
earlier run once more. The tasks behind it are then either sure, or depend on that assumption: `ReuseAction.DEPENDS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from plait import events
from plait.errors import BackendError, DAGError, ErrorKind, RunNotFound
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.domain.prompt_values import named
from plait.runner.engine.checkpointer import UnstoredSink
from plait.runner.engine.executor import Executor
from plait.runner.engine.growth import Growth
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.outcomes import OutcomeHandler
from plait.runner.engine.run_options import RunOptions, answer_keys, backend_names
from plait.runner.reuse.answer_keys import AnswerKeys, describe_change, task_identity
from plait.runner.reuse.earlier_answers import (
    GIVEN,
    KEPT,
    REUSED,
    EarlierAnswer,
    EarlierAnswers,
    ReuseFrom,
    load_earlier_answers,
    stored_answer_keys,
)
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import SlotPool
from plait.runner.state.codec import to_json
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.runner.state.task_files import files_of
from plait.runner.views.view_models import usage_fields
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import FailureMode, Task, failed_status
from plait.usage import NO_USAGE, Usage

_NAMED = 3


class ReuseAction(StrEnum):
    """The part of a task in a run that takes answers over."""

    REUSE = "reuse"
    """The task takes its answer over from the earlier run."""
    RUN = "run"
    """The task is executed."""
    DEPENDS = "depends"
    """The task takes its answer over, or is executed, according to the answers of upstream tasks that are executed."""


@dataclass(frozen=True, slots=True)
class ReuseStep:
    """The action for one task, with the reason."""

    task_id: str
    action: ReuseAction
    reason: str
    backend: str
    """The name of the backend in the new run."""
    at_most_once: bool = False
    was_completed: bool = False
    """Whether the task completed in the earlier run."""
    keeps_answer: bool = False
    """Whether the answer that the task takes over, or may take over, is that of a person."""
    depends_on: tuple[str, ...] = ()
    """The upstream tasks whose answers decide, for `DEPENDS`."""
    runs_if_same: bool = False
    """For `DEPENDS`: whether the task is executed if the upstream tasks give the same answers as before. Otherwise the
    task takes its answer over then, or is skipped.
    """
    usage: Usage = NO_USAGE
    """The usage of the task's last attempt that was a call, in the earlier run or in a run before."""

    def as_json(self) -> dict[str, Any]:
        """Return the step as a JSON object; usage is that of the earlier run."""
        return {
            "task_id": self.task_id,
            "action": self.action.value,
            "reason": self.reason,
            "depends_on": list(self.depends_on),
            **usage_fields(self.usage),
        }


@dataclass(frozen=True, slots=True)
class ReusePreview:
    """The actions of a run that takes over the answers of the run `like`, without tasks that only gather a list."""

    like: str
    """The id of the earlier run."""
    created_at: str
    """The time of the creation of the earlier run, UTC in ISO 8601."""
    tasks: Sequence[ReuseStep]
    """The steps, in the order in which the tasks can start."""
    reuse: ReuseFrom | None = field(default=None, repr=False)
    """The answers that the run takes over, as asked for."""
    answers: EarlierAnswers | None = field(default=None, repr=False, compare=False)
    """The answers as read for the preview, with the keys of the tasks of the plan that depend on no assumption."""
    dag: DAG | None = field(default=None, repr=False, compare=False)
    """The graph of the plan."""

    def is_of(self, dag: DAG, reuse: ReuseFrom | None) -> bool:
        """Return whether the preview was made of this very graph, with these answers taken over. Without an answer of a
        person in the earlier run, the answers are the same whether or not such answers are kept.
        """
        mine = self.reuse
        if mine is not None and reuse is not None and self.answers is not None and not self.answers.persons:
            mine = replace(mine, keep_answers=reuse.keep_answers)
        return self.dag is dag and mine == reuse

    def steps(self, action: ReuseAction) -> list[ReuseStep]:
        """Return the steps with this action."""
        return [step for step in self.tasks if step.action is action]

    def cost(self, action: ReuseAction) -> Usage:
        """Return the sum of the usage, in the earlier run, of the tasks with this action."""
        return sum((step.usage for step in self.steps(action)), NO_USAGE)

    def as_json(self) -> dict[str, Any]:
        """Return the preview as a JSON object."""
        counts = {action.value: len(self.steps(action)) for action in ReuseAction}
        usages = {action.value: usage_fields(self.cost(action)) for action in (ReuseAction.RUN, ReuseAction.DEPENDS)}
        tasks = [step.as_json() for step in self.tasks]
        return {"like": self.like, "created_at": self.created_at, **counts, "last_time": usages, "tasks": tasks}


async def preview_reuse(config: RunOptions, dag: DAG, reuse: ReuseFrom, policy: Policy | None = None) -> ReusePreview:
    """Return the preview of a run of `dag`. Raises StoreRequired, RunNotFound, TaskNotFound, BackendMissing,
    StoreError.
    """
    names = backend_names(dag, config)
    run = await stored_run(config.store, reuse.like)
    now = config.clock.wall()
    answers = await load_earlier_answers(config.store, dag, answer_keys(config), reuse, now, run)
    assert answers is not None
    live = LiveRun(run_id="preview", options=config, policy=policy, answers=answers)
    live.state, live.task_backends = RunState(dag.copy(), keeps_all=True), names
    live.scheduler, live.sink = Scheduler(live.state.dag, names, SlotPool(1, {})), UnstoredSink(live.feed)
    places = _places(run)
    executor = Executor(live, partial(_Foresight, earlier=run, places=places, usages=await _usages(run, places)))
    await executor.run()
    foresight = executor.outcomes
    assert isinstance(foresight, _Foresight)
    answers.keep_keys(foresight.sure)
    return ReusePreview(reuse.like, run.record.created_at, foresight.steps, reuse, answers)


def _places(run: StoredRun) -> dict[str, int]:
    """Return the position of each task by its identity; of two with one identity the first."""
    last_first = reversed(range(len(run.tasks)))
    return {to_json(task_identity(run.state, position)): position for position in last_first}


async def _usages(run: StoredRun, places: Mapping[str, int]) -> dict[int, Usage]:
    """Return the usage of the last call of each task in `places`, by position there: in the run, or in the run of which
    the run took the answer over, and so on.
    """
    usages: dict[int, Usage] = {}
    while True:
        for position, record in enumerate(run.tasks):
            if record.usage == NO_USAGE:
                continue
            if (place := places.get(to_json(task_identity(run.state, position)))) is not None:
                usages.setdefault(place, record.usage)
        reuse = ReuseFrom.of_settings(json.loads(run.record.settings))
        if reuse is None:
            return usages
        try:
            run = await stored_run(run.store, reuse.like)
        except RunNotFound:
            return usages


class _Foresight(OutcomeHandler):
    """Settles each task of a run without a call, by the answer that it takes over or by an assumption, and notes the
    step. `places` are the positions of the tasks in the `earlier` run by identity, `usages` those of their last calls.
    """

    def __init__(
        self,
        live: LiveRun,
        growth: Growth,
        *,
        earlier: StoredRun,
        places: Mapping[str, int],
        usages: Mapping[int, Usage],
    ) -> None:
        super().__init__(live, growth)
        state, answers = live.state, live.answers
        assert answers is not None
        self.steps: list[ReuseStep] = []
        self.sure = {place for place, task in enumerate(state.dag) if len(files_of(task)) == len(task.files)}
        """The tasks of the plan that read no open task, and no file that is read again at the start."""
        self._like = earlier
        self._answers = answers
        self._usages = usages
        self._before = AnswerKeys(earlier.state, stored_answer_keys(earlier))
        self._after = AnswerKeys(state, answers.backend_keys)
        self._places = places
        self._earlier: dict[int, int | None] = {}
        """The position in the earlier run of each task that was looked for."""
        self._open: set[int] = set()
        """Tasks whose result may differ from the result that is assumed."""
        self._unknown: set[int] = set()
        """The open tasks of which no result is known that could be assumed."""

    def reuse(self, position: int) -> list[events.Event]:
        """Complete the task, and note its step."""
        task, answer = self._state.dag.tasks[position], self._answers.find(self._state, position)
        depends_on: list[int] = []
        if self._open:
            reads = self._reads(position)
            if not reads.isdisjoint(self._open):
                self.sure.discard(position)
            # A task with `cache` may find an answer for any other prompt.
            decisive = self._gates(position) if answer is None and task.cache is False else reads
            depends_on = [] if task.id in self._answers.fork_keeps else sorted(decisive & self._open)
        action = ReuseAction.DEPENDS if depends_on else ReuseAction.RUN if answer is None else ReuseAction.REUSE
        self._note(position, action, self._reason(position, depends_on, answer), depends_on, answer)
        if action is not ReuseAction.REUSE:
            self._open.add(position)
        return self._assume(position) if answer is None else self.take_over(position, answer)

    def _assume(self, position: int) -> list[events.Event]:
        """Let the task end as in the earlier run."""
        task, earlier = self._state.dag.tasks[position], self._earlier_position(position)
        status = None if earlier is None else self._like.state.statuses[earlier]
        text, data = "", None
        if earlier is not None and status is TaskStatus.COMPLETED:
            result = self._like.state.results[earlier]
            text, data = result.text, result.data
            if self._like.state.has_added(earlier):
                self._add_again(position, earlier)
        elif task.failure_mode is not FailureMode.HARD and status is (failed := failed_status(task.failure_mode)):
            started = self._state.start(position, self._stamp(), "")
            self._scheduler.finish(position, failed)
            return [started, self._state.fail(position, self._stamp(), BackendError(ErrorKind.UNEXPECTED, ""))]
        else:
            self._unknown.add(position)
        return self.take_over(position, EarlierAnswer(text, data, None, "", "", ""))

    def _add_again(self, position: int, earlier: int) -> None:
        """Add the tasks that the task added in the earlier run."""
        state = self._like.state
        name = state.dag.tasks[earlier].id
        added = [task for place, task in enumerate(state.dag.tasks) if state.added_by(place) == name]
        try:
            self._growth.add(added, self._state.dag.tasks[position].id)
        except DAGError:  # the new plan has no room for the tasks; the task itself decides anew
            self._unknown.add(position)

    def decide(self, position: int) -> list[events.Event]:
        """Decide the condition of the task by the results that are assumed. Note a step only for a task that is skipped
        by an assumption.
        """
        open_gates = sorted(self._gates(position) & self._open)
        if not self._unknown.isdisjoint(open_gates):
            self._scheduler.admit(position)
            return []
        new_events = super().decide(position)
        if new_events and open_gates:
            reason = f"skipped, unless {self._named(open_gates)} changes its condition"
            self._note(position, ReuseAction.DEPENDS, reason, open_gates, runs_if_same=False)
            self._open.add(position)
        return new_events

    def expand_or_gather(self, position: int) -> list[events.Event]:
        """Expand the task with `for_each`, or gather. Note a step only if the list is not known yet."""
        task = self._state.dag.tasks[position]
        over = self._state.dag.position(task.for_each or "")
        if position in self._state.parts:
            for kind in (self._open, self._unknown):
                if over in kind or not kind.isdisjoint(self._state.parts[position]):
                    kind.add(position)
            return super().expand_or_gather(position)
        if over not in self._unknown:
            try:
                return self._growth.expand(position)
            except DAGError:
                pass
        self._open.add(position)
        self._unknown.add(position)
        self._note(position, ReuseAction.RUN, f"a part for each element of {task.for_each}, which runs first")
        return self._end_for_each(position, "")

    def _reads(self, position: int) -> set[int]:
        """Return the tasks that determine whether the task exists, and the task's prompt and conversation."""
        task = self._state.dag.tasks[position]
        positions = self._positions(task, named(task)) | self._gates(position)
        return positions if task.continues is None else positions | {self._state.dag.position(task.continues)}

    def _gates(self, position: int) -> set[int]:
        """Return the tasks that determine whether the task exists, and whether its condition is true."""
        dag, task = self._state.dag, self._state.dag.tasks[position]
        gates = set[int]() if task.when is None else self._positions(task, named(replace(task, prompt="?")))
        if (by := self._state.added_by(position)) is not None:
            gates.add(dag.position(dag[by].for_each or by))
        return gates

    def _positions(self, task: Task, names: set[str]) -> set[int]:
        if "results" in names:
            names |= set(task.upstream)
        return {self._state.dag.position(name) for name in names if name in self._state.dag}

    def _earlier_position(self, position: int) -> int | None:
        if position not in self._earlier:
            self._earlier[position] = self._places.get(to_json(task_identity(self._state, position)))
        return self._earlier[position]

    def _note(
        self,
        position: int,
        action: ReuseAction,
        reason: str,
        depends_on: Sequence[int] = (),
        answer: EarlierAnswer | None = None,
        *,
        runs_if_same: bool | None = None,
    ) -> None:
        """Note a step; `answer` is taken over if upstream answers are as assumed."""
        task, earlier = self._state.dag.tasks[position], self._earlier_position(position)
        step = ReuseStep(
            task.id,
            action,
            reason,
            self._run.task_backends[position],
            at_most_once=task.at_most_once,
            was_completed=earlier is not None and self._like.state.statuses[earlier] is TaskStatus.COMPLETED,
            keeps_answer=answer is not None and answer.source.startswith(KEPT),
            depends_on=tuple(self._state.dag.tasks[place].id for place in depends_on),
            runs_if_same=answer is None and bool(depends_on) if runs_if_same is None else runs_if_same,
            usage=NO_USAGE if earlier is None else self._usages.get(earlier, NO_USAGE),
        )
        self.steps.append(step)

    def _reason(self, position: int, depends_on: Sequence[int], answer: EarlierAnswer | None) -> str:
        gives = "gives the same answer" if len(depends_on) == 1 else "give the same answers"
        if answer is None:
            cause = next(self._causes(position, self._earlier_position(position)))
            return f"{cause}, if {self._named(depends_on)} {gives}" if depends_on else cause
        if depends_on:
            return f"runs unless {self._named(depends_on)} {gives}"
        if answer.source == GIVEN:
            return GIVEN
        if answer.run_id != self._like.record.run_id:
            return f"reused from {answer.run_id} (cache)"
        what = "reused" if answer.source.startswith(REUSED) else "answer of a person, kept"
        return f"{what} from {answer.run_id} of {self._like.record.created_at[:10]}"

    def _named(self, positions: Iterable[int]) -> str:
        names = [self._state.dag.tasks[place].id for place in positions]
        return f"{', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"

    def _causes(self, position: int, earlier: int | None) -> Iterator[str]:
        """Yield the reasons for which the task runs, the clearest first."""
        task, run_id = self._state.dag.tasks[position], self._like.record.run_id
        if self._answers.is_fresh(task):
            yield "asked to run again (fresh)"
        if earlier is None:
            yield "new task"
            return
        status = self._like.state.statuses[earlier]
        if status is not TaskStatus.COMPLETED:
            yield f"{status.value if status in TASK_DONE else 'not completed'} in {run_id}"
        if (changed := describe_change(self._before, earlier, self._after, position)) is not None:
            yield changed
        if task.at_most_once:
            yield "has effects: at_most_once"
        if task.adds_tasks or self._like.state.has_added(earlier):
            yield "adds tasks"
        backend = self._run.task_backends[position]
        if (self._state.dag.backend_of(task) or "") not in self._answers.backend_keys:
            yield f"backend {backend} always runs"
        if earlier in self._answers.persons:
            yield f"a person answered in {run_id}, and is asked again (keep_answers)"
        yield "the conversation that the task continues runs again"
