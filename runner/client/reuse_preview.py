"""Preview of a run with `like=`: which tasks take an answer over, which run, and for which reason.

`Rehearsal` drives the state and the scheduler of the new run without a call, so lists are expanded and names are
resolved as in the run itself. A task that runs is assumed to give the answer of the earlier run once more. The tasks
behind it are then either sure, or depend on that assumption: `ReuseAction.DEPENDS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from plait.backends.backend_protocol import Reply
from plait.clock_and_ids import iso
from plait.errors import BackendError, DAGError, ErrorKind, PromptError, RunNotFound
from plait.json_form import JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.domain.prompt_values import named
from plait.runner.engine.growth import ForEachExpander, Growth
from plait.runner.engine.outcomes import CONDITION
from plait.runner.engine.policy_driver import PolicyDriver, PolicyState
from plait.runner.engine.run_options import Config, answer_keys, backend_names
from plait.runner.reuse.answer_cache import AnswerCache, earlier_answer, load_cache
from plait.runner.reuse.answer_changes import RunSide, describe_change
from plait.runner.reuse.answer_keys import ReusableAnswers, Reuse, answers_of, stored_answer_keys, task_identity
from plait.runner.reuse.earlier_answers import GIVEN, KEPT
from plait.runner.reuse.reusable_answer import ReusableAnswer
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import SlotPool
from plait.runner.state.codec import to_json
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.runner.state.task_files import files_of
from plait.runner.views.read_views import usage_as_json
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import FailureMode, Task, failed_status
from plait.usage import NO_USAGE, Usage

_MOST_NAMED = 3


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
            **usage_as_json(self.usage),
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
    reuse: Reuse | None = field(default=None, repr=False)
    """The answers that the run takes over, as asked for."""
    answers: ReusableAnswers | None = field(default=None, repr=False, compare=False)
    """The answers as read for the preview, with the keys of the tasks of the plan that depend on no assumption."""
    dag: DAG | None = field(default=None, repr=False, compare=False)
    """The graph of the plan."""

    def is_of(self, dag: DAG, reuse: Reuse | None) -> bool:
        """Return whether the preview was made of this very graph, with these answers taken over. Without an answer of a
        person in the earlier run, the answers are the same whether or not such answers are kept.
        """
        mine = self.reuse
        if mine is not None and reuse is not None and self.answers is not None and not self.answers.asked:
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
        usages = {action.value: usage_as_json(self.cost(action)) for action in (ReuseAction.RUN, ReuseAction.DEPENDS)}
        tasks = [step.as_json() for step in self.tasks]
        return {"like": self.like, "created_at": self.created_at, **counts, "last_time": usages, "tasks": tasks}


async def preview_reuse(config: Config, dag: DAG, reuse: Reuse, policy: Policy | None = None) -> ReusePreview:
    """Return the preview of a run of `dag`. Raises StoreRequired, RunNotFound, TaskNotFound, BackendMissing,
    StoreError.
    """
    names = backend_names(dag, config)
    run = await stored_run(config.store, reuse.like)
    answers = await answers_of(run, reuse, answer_keys(config))
    rehearsal = Rehearsal(config, dag, names, run, answers, policy)
    rehearsal.cache = await load_cache(config.store, dag, answer_keys(config), config.clock.wall())
    rehearsal.usages = await _usages(run)
    steps = list(rehearsal.steps())
    return ReusePreview(reuse.like, run.record.created_at, steps, reuse, answers.sure(rehearsal.sure))


async def _usages(run: StoredRun) -> dict[str, Usage]:
    """Return the usage of the last call of each task by identity: in the run, or in the run of which the run took the
    answer over, and so on.
    """
    usages: dict[str, Usage] = {}
    while True:
        for position, record in enumerate(run.tasks):
            if record.usage != NO_USAGE:
                usages.setdefault(to_json(task_identity(run.state, position)), record.usage)
        reuse = Reuse.of_settings(json.loads(run.record.settings))
        if reuse is None:
            return usages
        try:
            run = await stored_run(run.store, reuse.like)
        except RunNotFound:
            return usages


class Rehearsal:
    """Goes through a run without a call: each task takes an answer over, or is assumed to answer as before."""

    def __init__(
        self,
        config: Config,
        dag: DAG,
        names: list[str],
        run: StoredRun,
        answers: ReusableAnswers,
        policy: Policy | None,
    ) -> None:
        at = iso(config.clock.wall())

        def stamp() -> str:
            return at

        self._stamp = stamp
        self._run = run
        self._answers = answers
        self._names = names
        self._state = RunState(dag.copy(), keeps_all=True)
        self._scheduler = Scheduler(self._state.dag, names, SlotPool(1, {}))
        limits = config.growth.within(dag.growth)
        default = config.default
        parts = (self._state, self._scheduler)
        self._growth = Growth(*parts, names, backends=config.backends, default=default, limits=limits, stamp=stamp)
        self._for_each = ForEachExpander(*parts, self._growth)
        self._policy = None
        if policy is not None:
            self._policy = PolicyDriver(
                policy, PolicyState(), state=self._state, scheduler=self._scheduler, growth=self._growth, stamp=stamp
            )
        self._before = RunSide(run.state, stored_answer_keys(run))
        self._after = RunSide(self._state, answers.backend_keys)
        self._earlier: dict[str, int] = {}
        for position in range(len(run.tasks)):
            self._earlier.setdefault(to_json(task_identity(run.state, position)), position)
        self.usages: Mapping[str, Usage] = {}
        """The usage of the last call of each task, by identity."""
        self.cache: AnswerCache | None = None
        """The answers of all runs of the store, for the tasks with `cache`."""
        self._open: set[int] = set()
        """Tasks whose result may differ from the result that is assumed."""
        self._unknown: set[int] = set()
        """The open tasks of which no result is known that could be assumed."""
        self.sure = {place for place, task in enumerate(dag) if len(files_of(task)) == len(task.files)}
        """The tasks of the plan that read no open task, and no file that is read again at the start."""

    def steps(self) -> Iterator[ReuseStep]:
        """Yield the step of each task that calls a backend, in the order in which the tasks can start."""
        while True:
            position = self._scheduler.take_slotless()
            if position is not None:
                is_list = self._state.dag.tasks[position].for_each is not None
                yield from (self._expand_or_gather if is_list else self._decide_condition)(position)
            elif (position := self._scheduler.take()) is not None:
                yield self._settle(position)
                self._decide(self._state.dag.tasks[position].id)
            elif not self._decide(None):
                return

    def _decide(self, ended: str | None) -> bool:
        """Ask the policy. Return whether more tasks may follow."""
        if self._policy is None or self._policy.decided.end is not None:
            return False
        return bool(self._policy.decide(ended)) and self._policy.decided.end is None

    def _settle(self, position: int) -> ReuseStep:
        """Complete the task, and return the step."""
        task = self._state.dag.tasks[position]
        taken = earlier_answer(self._state, position, self._answers, self.cache)
        found = None if taken is None else taken[1]
        depends_on: list[int] = []
        if self._open:
            reads = self._reads(position)
            if not reads.isdisjoint(self._open):
                self.sure.discard(position)
            # A task with `cache` may find an answer for any other prompt.
            decisive = self._gates(position) if found is None and task.cache is False else reads
            depends_on = [] if task.id in self._answers.kept else sorted(decisive & self._open)
        action = ReuseAction.DEPENDS if depends_on else ReuseAction.RUN if found is None else ReuseAction.REUSE
        reason = self._reason(position, depends_on, taken)
        step = self._step(position, action, reason, depends_on, found, runs_if_same=found is None and bool(depends_on))
        if action is not ReuseAction.REUSE:
            self._open.add(position)
        self._state.start(position, self._stamp(), "")
        if found is not None:
            self._complete(position, Reply(found.text, found.data))
            if found.adds:
                self._growth.add(found.adds, task.id)
        else:
            self._assume(position)
        return step

    def _assume(self, position: int) -> None:
        """Let the task end as in the earlier run."""
        earlier = self._place(position)
        status = None if earlier is None else self._run.state.statuses[earlier]
        task = self._state.dag.tasks[position]
        if earlier is not None and status is TaskStatus.COMPLETED:
            result = self._run.state.results[earlier]
            reply = Reply(result.text, result.data)
            if self._run.state.has_added(earlier):
                self._add(position, earlier)
            self._complete(position, reply)
        elif (
            status is not None
            and task.failure_mode is not FailureMode.HARD
            and status is failed_status(task.failure_mode)
        ):
            self._state.fail(position, self._stamp(), BackendError(ErrorKind.UNEXPECTED, ""))
            self._scheduler.finish(position, status)
        else:
            self._complete_unknown(position)

    def _add(self, position: int, earlier: int) -> None:
        """Add the tasks that the task added in the earlier run."""
        name = self._run.state.dag.tasks[earlier].id
        added = [
            task for place, task in enumerate(self._run.state.dag.tasks) if self._run.state.added_by(place) == name
        ]
        try:
            self._growth.add(added, self._state.dag.tasks[position].id)
        except DAGError:  # the new plan has no room for the tasks; the task itself decides anew
            self._unknown.add(position)

    def _complete_unknown(self, position: int) -> None:
        self._unknown.add(position)
        self._complete(position, Reply(""))

    def _complete(self, position: int, reply: Reply) -> None:
        self._state.complete(position, self._stamp(), reply, None)
        self._scheduler.finish(position, TaskStatus.COMPLETED)

    def _decide_condition(self, position: int) -> Iterator[ReuseStep]:
        """Decide the condition of the task by the results that are assumed. Yield a step only for a task that is
        skipped by an assumption.
        """
        task = self._state.dag.tasks[position]
        open_reads = sorted(self._gates(position) & self._open)
        fails = False
        try:
            is_wanted = self._state.is_wanted(task)
        except PromptError:  # the task fails without a call
            is_wanted, fails = False, not open_reads
        if is_wanted or not self._unknown.isdisjoint(open_reads):
            self._scheduler.admit(position)
            return
        if open_reads:
            reason = f"skipped, unless {self._named(open_reads)} changes its condition"
            yield self._step(position, ReuseAction.DEPENDS, reason, open_reads)
            self._open.add(position)
        self._state.start(position, self._stamp(), "")
        if fails:
            status = self._state.fail(position, self._stamp(), BackendError(ErrorKind.INVALID_REQUEST, "")).status
        else:
            status = self._state.skip(position, self._stamp(), CONDITION, "").status
        self._scheduler.finish_without_slot(position, status)
        self._decide(task.id)

    def _expand_or_gather(self, position: int) -> Iterator[ReuseStep]:
        """Expand the task with `for_each`, or gather. Yield a step only if the list is not known yet."""
        task = self._state.dag.tasks[position]
        if position in self._state.parts:
            self._gather(position)
            return
        over = self._state.dag.position(task.for_each or "")
        if over not in self._unknown:
            try:
                self._for_each.expand(position)
            except DAGError:
                pass
            else:
                return
        self._open.add(position)
        self._unknown.add(position)
        yield self._step(position, ReuseAction.RUN, f"a part for each element of {task.for_each}, which runs first")
        self._state.start(position, self._stamp(), "")
        self._state.complete(position, self._stamp(), Reply(""), None)
        self._scheduler.finish_without_slot(position, TaskStatus.COMPLETED)
        self._decide(task.id)

    def _gather(self, position: int) -> None:
        data: JsonValue = self._for_each.collect(position)
        over = self._state.dag.position(self._state.dag.tasks[position].for_each or "")
        for kind in (self._open, self._unknown):
            if over in kind or not kind.isdisjoint(self._state.parts[position]):
                kind.add(position)
        self._state.start(position, self._stamp(), "")
        self._state.complete(position, self._stamp(), Reply(to_json(data), data), None)
        self._scheduler.finish_without_slot(position, TaskStatus.COMPLETED)
        self._decide(self._state.dag.tasks[position].id)

    def _reads(self, position: int) -> set[int]:
        """Return the tasks that determine whether the task exists, and the task's prompt and conversation."""
        task = self._state.dag.tasks[position]
        found = self._positions(task, named(task)) | self._gates(position)
        if task.continues is not None:
            found.add(self._state.dag.position(task.continues))
        return found

    def _positions(self, task: Task, names: set[str]) -> set[int]:
        if "results" in names:
            names |= set(task.upstream)
        return {self._state.dag.position(name) for name in names if name in self._state.dag}

    def _gates(self, position: int) -> set[int]:
        """Return the tasks that determine whether the task exists, and whether its condition is true."""
        dag, task = self._state.dag, self._state.dag.tasks[position]
        found = set[int]() if task.when is None else self._positions(task, named(replace(task, prompt="?")))
        by = self._state.added_by(position)
        if by is not None:
            over = dag[by].for_each
            found.add(dag.position(by if over is None else over))
        return found

    def _place(self, position: int) -> int | None:
        return self._earlier.get(to_json(task_identity(self._state, position)))

    def _step(
        self,
        position: int,
        action: ReuseAction,
        reason: str,
        depends_on: Sequence[int] = (),
        found: ReusableAnswer | None = None,
        *,
        runs_if_same: bool = False,
    ) -> ReuseStep:
        """Return the step; `found` is the answer that the task takes over if upstream answers are as assumed."""
        task, identity = self._state.dag.tasks[position], to_json(task_identity(self._state, position))
        earlier = self._earlier.get(identity)
        usage, was_completed = NO_USAGE, False
        if earlier is not None:
            usage = self.usages.get(identity, NO_USAGE)
            was_completed = self._run.state.statuses[earlier] is TaskStatus.COMPLETED
        return ReuseStep(
            task.id,
            action,
            reason,
            self._names[position],
            at_most_once=task.at_most_once,
            was_completed=was_completed,
            keeps_answer=found is not None and (found.source or "").startswith(KEPT),
            depends_on=tuple(self._state.dag.tasks[one].id for one in depends_on),
            runs_if_same=runs_if_same,
            usage=usage,
        )

    def _reason(self, position: int, depends_on: Sequence[int], taken: tuple[str, ReusableAnswer] | None) -> str:
        if taken is None:
            cause = next(self._causes(position, self._place(position)))
            return f"{cause}, if {self._same(depends_on)}" if depends_on else cause
        if depends_on:
            return f"runs unless {self._same(depends_on)}"
        run_id, found = taken
        if found.source == GIVEN:
            return GIVEN
        if run_id != self._answers.run_id:
            return f"reused from {run_id} (cache)"
        source = f"from {run_id} of {self._run.record.created_at[:10]}"
        return f"reused {source}" if found.source is None else f"answer of a person, kept {source}"

    def _same(self, positions: Sequence[int]) -> str:
        gives = "gives the same answer" if len(positions) == 1 else "give the same answers"
        return f"{self._named(positions)} {gives}"

    def _named(self, positions: Sequence[int]) -> str:
        names = [self._state.dag.tasks[one].id for one in positions]
        return f"{', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}"

    def _causes(self, position: int, earlier: int | None) -> Iterator[str]:
        """Yield the reasons for which the task runs, the clearest first."""
        task = self._state.dag.tasks[position]
        if self._answers.is_fresh(task):
            yield "asked to run again (fresh)"
        if earlier is None:
            yield "new task"
            return
        status = self._run.state.statuses[earlier]
        if status is not TaskStatus.COMPLETED:
            yield f"{status.value if status in TASK_DONE else 'not completed'} in {self._answers.run_id}"
        if (changed := describe_change(self._before, earlier, self._after, position)) is not None:
            yield changed
        if task.at_most_once:
            yield "has effects: at_most_once"
        if task.adds_tasks or self._run.state.has_added(earlier):
            yield "adds tasks"
        if (self._state.dag.backend_of(task) or "") not in self._answers.backend_keys:
            yield f"backend {self._names[position]} always runs"
        if earlier in self._answers.asked:
            yield f"a person answered in {self._answers.run_id}, and is asked again (keep_answers)"
        yield "the conversation that the task continues runs again"
