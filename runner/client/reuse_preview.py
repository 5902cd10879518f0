"""Preview of a run that takes answers over: which tasks do, which run, and for which reason.

The preview is the executor itself, with a handler that settles each task before a backend is called: lists are
expanded, conditions decided and the policy asked as in the run. A task that runs is assumed to give the answer of the
earlier run once more. The tasks behind it are then either sure, or depend on that assumption: `ReuseAction.DEPENDS`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from plait import events
from plait.errors import DAGError, PlaitError
from plait.json_form import JsonValue, value
from plait.persistence.store_records import RunRecord
from plait.runner.client.run_estimate import runs_taken_over
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.domain.prompt_values import named
from plait.runner.domain.run_result import TaskResult
from plait.runner.engine import growth
from plait.runner.engine.checkpointer import UnstoredSink
from plait.runner.engine.executor import Executor
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.outcomes import OutcomeHandler
from plait.runner.engine.run_options import RunOptions, answer_keys, backend_names, prepared
from plait.runner.reuse.answer_keys import describe_change, task_identity
from plait.runner.reuse.earlier_answers import (
    GIVEN,
    KEPT,
    REUSED,
    EarlierAnswer,
    EarlierAnswers,
    ReuseFrom,
    load_earlier_answers,
)
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import SlotPool
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.runner.views.event_sentences import named_tasks
from plait.runner.views.view_models import UsageView, usage_fields, view
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import FailureMode, Task, failed_status
from plait.usage import NO_USAGE, Usage


class ReuseAction(StrEnum):
    """The part of a task in a run that takes answers over."""

    REUSE = "reuse"
    """The task takes its answer over from the earlier run."""
    RUN = "run"
    """The task is executed."""
    DEPENDS = "depends"
    """The task takes its answer over, or is executed, according to the answers of upstream tasks that are executed."""


@view
class ReuseStep(UsageView):
    """The action for one task, with the reason. The usage is that of the task's last attempt that was a call, in the
    earlier run or in a run before.
    """

    task_id: str
    action: ReuseAction
    reason: str
    backend: str
    """The name of the backend in the new run."""
    at_most_once: bool = False
    is_fresh: bool = False
    """Whether the caller asked to run the task again."""
    was_completed: bool = False
    """Whether the task completed in the earlier run."""
    keeps_answer: bool = False
    """Whether the answer that the task takes over, or may take over, is that of a person."""
    depends_on: tuple[str, ...] = ()
    """The upstream tasks whose answers decide, for `depends`."""
    runs_if_same: bool = False
    """For `depends`: whether the task is executed if the upstream tasks give the same answers as before. Otherwise the
    task takes its answer over then, or is skipped.
    """


@value
class PreviewBasis:
    """What a preview was made of."""

    options: RunOptions
    plan: DAG
    """The graph of the plan, as given."""
    dag: DAG
    """The same with the arguments of its functions, as it runs."""
    names: Sequence[str]
    """The name of each task's backend, by position."""
    asked: ReuseFrom
    """The answers that the run takes over, as asked for."""
    answers: EarlierAnswers
    """The answers as read, with the keys of the tasks of the plan that depend on no assumption."""


@view
class ReusePreview:
    """The actions of a run that takes over the answers of the run `like`, without tasks that only gather a list."""

    like: str
    """The id of the earlier run."""
    created_at: str
    """The time of the creation of the earlier run, UTC in ISO 8601."""
    reuse: int
    """The number of tasks that take their answers over."""
    run: int
    """The number of tasks that are executed."""
    depends: int
    """The number of tasks of which answers of other tasks decide."""
    last_time: Mapping[ReuseAction, UsageView]
    """The usage, in the earlier run, of the tasks that are executed and of those that depend."""
    tasks: tuple[ReuseStep, ...]
    """The steps, in the order in which the tasks can start."""
    basis: Any = field(repr=False, compare=False, metadata={"exclude": True})
    """A `PreviewBasis`; not a part of the JSON."""

    def basis_for(self, options: RunOptions, dag: DAG, reuse: ReuseFrom) -> PreviewBasis | None:
        """Return the basis of the preview if that was made with these very options and of this very graph, with these
        answers taken over; else None. Without an answer of a person in the earlier run, the answers are the same
        whether or not such answers are kept.
        """
        basis: PreviewBasis = self.basis
        mine = basis.asked if basis.answers.persons else replace(basis.asked, keep_answers=reuse.keep_answers)
        return basis if basis.options is options and basis.plan is dag and mine == reuse else None

    def steps(self, action: ReuseAction) -> list[ReuseStep]:
        """Return the steps with this action."""
        return [step for step in self.tasks if step.action is action]

    def cost(self, action: ReuseAction) -> Usage:
        """Return the sum of the usage, in the earlier run, of the tasks with this action."""
        return _total(self.steps(action))


def _total(steps: Iterable[ReuseStep]) -> Usage:
    return sum((step.usage for step in steps), NO_USAGE)


async def preview_reuse(
    config: RunOptions, dag: DAG, reuse: ReuseFrom, policy: Policy | None = None, record: RunRecord | None = None
) -> ReusePreview:
    """Return the preview of a run of `dag`; `record` is that of the earlier run if it has been read already. Raises
    StoreRequired, RunNotFound, TaskNotFound, BackendMissing, StoreError.
    """
    plan, dag = dag, prepared(dag, config)
    names = backend_names(dag, config)
    run = await stored_run(config.store, reuse.like, record, plan=dag)
    now = config.clock.wall()
    answers = await load_earlier_answers(config.store, dag, answer_keys(config), reuse, now, run)
    live = LiveRun(run_id="preview", options=config, policy=policy, answers=answers)
    live.state, live.task_backends = RunState(dag.copy(), keeps_all=True), [*names]
    live.scheduler = Scheduler(live.state.dag, names, SlotPool(1, {}), looks_first=True)
    live.sink = UnstoredSink(live.feed.publish)
    executor = Executor(live, partial(_Foresight, earlier=run, usages=await _usages(run)))
    await executor.run()
    foresight = executor.outcomes
    assert isinstance(foresight, _Foresight)
    steps = {action: [one for one in foresight.steps if one.action is action] for action in ReuseAction}
    return ReusePreview(
        like=reuse.like,
        created_at=run.record.created_at,
        reuse=len(steps[ReuseAction.REUSE]),
        run=len(steps[ReuseAction.RUN]),
        depends=len(steps[ReuseAction.DEPENDS]),
        last_time={
            action: UsageView(**usage_fields(_total(steps[action])))
            for action in (ReuseAction.RUN, ReuseAction.DEPENDS)
        },
        tasks=tuple(foresight.steps),
        basis=PreviewBasis(config, plan, dag, names, reuse, answers),
    )


async def _usages(run: StoredRun) -> dict[int, Usage]:
    """Return the usage of the last call of each task of the run, by position: in the run, or in the run whose answer
    the run took over, and so on.
    """
    usages = {position: record.usage for position, record in enumerate(run.tasks) if record.usage != NO_USAGE}
    places: dict[Hashable, int] = {}
    async for older in runs_taken_over(run):
        if older is run:
            continue
        places = places or {task_identity(run.state, place): place for place in reversed(range(len(run.tasks)))}
        for position, record in enumerate(older.tasks):
            if record.usage != NO_USAGE and (place := places.get(task_identity(older.state, position))) is not None:
                usages.setdefault(place, record.usage)
    return usages


_CALLED = EarlierAnswer("", None, None, "", "")
"""Stands for the answer of a task that is called."""


class _Foresight(OutcomeHandler):
    """Settles each task of a run without a call, by the answer that it takes over or by an assumption, and notes the
    step. `usages` are those of the last calls of the tasks in the `earlier` run, by position there.
    """

    def __init__(
        self,
        live: LiveRun,
        *,
        earlier: StoredRun,
        usages: Mapping[int, Usage],
    ) -> None:
        super().__init__(live)
        state, answers = live.state, live.answers
        assert answers is not None
        assert answers.before is not None
        self.steps: list[ReuseStep] = []
        self._like = earlier
        self._answers = answers
        self._usages = usages
        self._before = answers.before
        self._after = answers.keys_of(state)
        self._open: set[int] = set()
        """Tasks whose result may differ from the result that is assumed."""
        self._unknown: set[int] = set()
        """The open tasks of which no result is known that could be assumed."""

    def find(self, position: int) -> EarlierAnswer:
        """Return the answer that the task takes over, or `_CALLED`."""
        return self._answers.find(self._state, position) or _CALLED

    def take_over(self, position: int, answer: EarlierAnswer) -> list[events.Event]:
        """Complete the task, and note its step."""
        task, reusable = self._state.dag.tasks[position], None if answer is _CALLED else answer
        depends_on: list[int] = []
        if self._open:
            reads = self._reads(position)
            # A task with `cache` may find an answer for any other prompt.
            decisive = self._gates(position) if reusable is None and task.cache is False else reads
            depends_on = [] if task.id in self._answers.fork_keeps else sorted(decisive & self._open)
        action = ReuseAction.DEPENDS if depends_on else ReuseAction.RUN if reusable is None else ReuseAction.REUSE
        self._note(position, action, self._reason(position, depends_on, reusable), depends_on, reusable)
        if action is not ReuseAction.REUSE:
            self._open.add(position)
        if reusable is None:
            return self._assume(position)
        self._end(position, TaskStatus.COMPLETED, reusable.text, reusable.data)
        return [] if not reusable.adds else [growth.add(self._run, reusable.adds, task.id)]

    def _end(self, position: int, status: TaskStatus, text: str = "", data: JsonValue = None) -> None:
        result = TaskResult(self._state.dag.tasks[position].id, status, text, data)
        self._state.assume(position, result)
        self._scheduler.finish_without_slot(position, status)

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
            self._end(position, failed)
            return []
        else:
            self._unknown.add(position)
        self._end(position, TaskStatus.COMPLETED, text, data)
        return []

    def _add_again(self, position: int, earlier: int) -> None:
        """Add the tasks that the task added in the earlier run."""
        state = self._like.state
        name = state.dag.tasks[earlier].id
        added = [task for place, task in enumerate(state.dag.tasks) if state.added_by(place) == name]
        try:
            growth.add(self._run, added, self._state.dag.tasks[position].id)
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

    def vote(self, position: int) -> list[events.Event]:
        """Decide the vote by the answers that are assumed, if any."""
        samples = {self._state.dag.position(name) for name in self._state.dag.tasks[position].depends_on}
        for kind in (self._open, self._unknown):
            if not kind.isdisjoint(samples):
                kind.add(position)
        return self._end_for_each(position, "") if position in self._unknown else super().vote(position)

    def expand_or_gather(self, position: int) -> list[events.Event]:
        """Expand a list or a called plan, or gather. Note a step only if the tasks are not known yet."""
        task = self._state.dag.tasks[position]
        if task.calls:
            return self._foresee_call(position)
        over = self._state.dag.position(task.for_each or "")
        if position in self._state.parts:
            for kind in (self._open, self._unknown):
                if over in kind or not kind.isdisjoint(self._state.parts[position]):
                    kind.add(position)
            return super().expand_or_gather(position)
        if over not in self._unknown:
            try:
                return growth.expand(self._run, position)
            except DAGError:
                pass
        self._open.add(position)
        self._unknown.add(position)
        self._note(position, ReuseAction.RUN, f"a part for each element of {task.for_each}, which runs first")
        return self._end_for_each(position, "")

    def _foresee_call(self, position: int) -> list[events.Event]:
        """Add the tasks of the called plan, or gather. Whether a loop has another round is not known if a task of the
        last one has no result that could be assumed.
        """
        task, parts = self._state.dag.tasks[position], self._state.parts.get(position)
        reads = self._reads(position) if parts is None else set(parts)
        if not self._open.isdisjoint(reads):
            self._open.add(position)
        if self._unknown.isdisjoint(reads):
            return super().expand_or_gather(position)
        self._unknown.add(position)
        if parts is None:
            try:
                return growth.add_round(self._run, position)
            except PlaitError:
                what = "the tasks of its plan, with values that are not known yet"
                self._note(position, ReuseAction.RUN, what)
        elif task.call is not None and task.call.is_loop and growth.rounds(self._run, position) < task.call.max:
            self._note(
                position, ReuseAction.RUN, f"further rounds, {task.call.max} at most, until its condition is true"
            )
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
            whole = dag.position(dag[by].for_each or by)
            gates |= self._reads(whole) if dag[by].calls else {whole}
        return gates

    def _positions(self, task: Task, names: set[str]) -> set[int]:
        if "results" in names:
            names |= set(task.upstream)
        return {self._state.dag.position(name) for name in names if name in self._state.dag}

    def _earlier_position(self, position: int) -> int | None:
        return next(self._answers.earlier_tasks(self._state, position), None)

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
        task, earlier = self._state.dag.tasks[position], None if answer is None else answer.position
        if earlier is None:
            earlier = self._earlier_position(position)
        used = None if earlier is None else self._usages.get(earlier)
        step = ReuseStep(
            task_id=task.id,
            action=action,
            reason=reason,
            backend=self._run.task_backends[position],
            at_most_once=task.at_most_once,
            is_fresh=self._answers.is_fresh(self._state, position),
            was_completed=earlier is not None and self._like.state.statuses[earlier] is TaskStatus.COMPLETED,
            keeps_answer=answer is not None and answer.source.startswith(KEPT),
            depends_on=tuple(self._state.dag.tasks[place].id for place in depends_on) if depends_on else (),
            runs_if_same=answer is None and bool(depends_on) if runs_if_same is None else runs_if_same,
            **({} if used is None else usage_fields(used)),
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
        return named_tasks([self._state.dag.tasks[place].id for place in positions])

    def _causes(self, position: int, earlier: int | None) -> Iterator[str]:
        """Yield the reasons for which the task runs, the clearest first."""
        task, run_id = self._state.dag.tasks[position], self._like.record.run_id
        if self._answers.is_fresh(self._state, position):
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
