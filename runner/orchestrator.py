"""`Orchestrator`: a goal, reached by tasks that are planned, executed and reflected on, and one answer in the end.

It has no loop of its own: it runs `OrchestratorPolicy` on a `ParallelRunner`, and watches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, cast

from plait.backends.protocol import Backend, JsonInput, JsonValue, Usage
from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.domain import events
from plait.runner.domain.dag import nearest
from plait.runner.domain.question import OnQuestion
from plait.runner.domain.result import RunResult
from plait.runner.domain.status import RunStatus, TaskStatus
from plait.runner.engine.policy_driver import decided_of
from plait.runner.errors import RunNotFound
from plait.runner.parallel import ParallelRunner
from plait.runner.policies.orchestrator.evidence import is_work
from plait.runner.policies.orchestrator.policy import Loop, LoopLimits, OrchestratorPolicy, Phase, Stop
from plait.runner.policies.orchestrator.prompts import ANSWER_ID, EXECUTOR, PLANNER, REFLECTOR
from plait.runner.run import Run
from plait.runner.state.stored_run import StoredPolicy

ROLES = (PLANNER, EXECUTOR, REFLECTOR)
OneBackend: TypeAlias = Backend | Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class OrchestratorResult:
    """What an orchestration came to.

    `answer` is empty unless `status` is completed. `stopped` says what ended the loop before its reflector called it
    done, None where nothing did. `context` has the results of all executed tasks by id; `iteration` counts those tasks,
    failed ones too. `error` says in a line why it failed.
    """

    answer: str
    status: RunStatus
    phase: Phase
    iteration: int
    stopped: Stop | None
    context: Mapping[str, JsonValue]
    run_id: str
    usage: Usage
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where the loop of a stored run stands: its phase, how many tasks were executed, and which are under way."""

    phase: Phase
    iteration: int
    current_task_ids: tuple[str, ...]


class Orchestrator:
    """Reaches `goal` with three backends: one plans tasks, one executes them, in parallel where they do not depend on
    each other, and one reflects on what has come of them; see docs/guides/orchestrator.md.

    `backends` has them by the names `planner`, `executor` and `reflector`, or is one for all three; functions count as
    backends. At most `max_iterations` tasks are executed, and then the answer is made of what is there. With
    a `store` every step is written down, under `run_id` if given, and `resume` goes on after a crash. `reflect_every`
    executed tasks a reflection follows; at most `max_tasks` tasks are planned in all. `concurrency` is how many tasks
    run at once. What the executor's tasks ask is put to `on_question`, as in `ParallelRunner`; where that leaves it
    open, the run waits (`status`). Raises ValueError for an empty goal, a limit below 1, a missing backend, a `run_id`
    without a store.
    """

    def __init__(  # noqa: PLR0913 - every one but the goal and the backends has a sound default
        self,
        goal: str,
        max_iterations: int = 10,
        backends: Mapping[str, OneBackend] | OneBackend | None = None,
        *,
        store: Store | None = None,
        run_id: str | None = None,
        reflect_every: int = 3,
        max_tasks: int = 100,
        concurrency: int = 8,
        on_question: OnQuestion | None = None,
    ) -> None:
        if run_id is not None and store is None:
            raise ValueError(f"run_id {run_id!r} names a stored run, and there is no store; give one, or no run_id")
        self._policy = OrchestratorPolicy(goal, LoopLimits(max_iterations, reflect_every, max_tasks))
        self._runner = ParallelRunner(
            backends=_by_role(backends),
            default=EXECUTOR,
            store=store,
            concurrency=concurrency,
            on_question=on_question,
        )
        self._run_id = run_id
        self._stored = False
        self._retry_failed = False
        self._answers: Mapping[str, JsonInput] | None = None
        self._loop = Loop()
        self._context: dict[str, JsonValue] = {}

    @classmethod
    async def resume(  # noqa: PLR0913 - every one but the store and the backends has a sound default
        cls,
        run_id: str,
        *,
        store: Store,
        backends: Mapping[str, OneBackend] | OneBackend,
        concurrency: int = 8,
        retry_failed: bool = False,
        answers: Mapping[str, JsonInput] | None = None,
        on_question: OnQuestion | None = None,
    ) -> Self:
        """The stored orchestration as it stands, whose `run()` goes on with it: with the same goal and limits, from
        where it was, and at once where it is over. `retry_failed` and `answers` as in
        `ParallelRunner.resume`.

        Raises ValueError for an unknown run, one that is no orchestration, and a missing backend; StoreError.
        """
        record = await store.get_run(run_id)
        if record is None:
            raise ValueError(f"the store has no run {run_id!r}")
        led_by = StoredPolicy.of(record)
        if led_by is None or led_by.kind != OrchestratorPolicy.kind:
            raise ValueError(f"run {run_id!r} is no orchestration; resume it with ParallelRunner(...).resume(run_id)")
        policy = OrchestratorPolicy.from_settings(led_by.settings)
        limits = policy.limits
        this = cls(
            policy.goal,
            limits.max_iterations,
            backends,
            store=store,
            run_id=run_id,
            concurrency=concurrency,
            on_question=on_question,
        )
        this._policy, this._stored, this._retry_failed, this._answers = policy, True, retry_failed, answers
        this._loop = _loop_of(record)
        this._context = {task.task_id: _value(task) for task in await store.list_tasks(run_id) if _is_context(task)}
        return this

    @property
    def goal(self) -> str:
        """What is to be reached."""
        return self._policy.goal

    @property
    def limits(self) -> LoopLimits:
        """How far it goes."""
        return self._policy.limits

    @property
    def run_id(self) -> str | None:
        """The run's id; None before there is one."""
        return self._run_id

    @property
    def phase(self) -> Phase:
        """Where the loop stands now, as it is stored."""
        return self._loop.phase

    @property
    def iteration(self) -> int:
        """How many tasks have been executed by now, failed ones too."""
        return self._loop.iteration

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """The results of the executed tasks by now, by task id."""
        return dict(self._context)

    async def run(self) -> OrchestratorResult:
        """Run it to its end, or go on with it. Call it once.

        Failures of tasks never raise: see `OrchestratorResult.status`. Else it raises what `ParallelRunner.run` and
        `resume` raise. Cancelling it writes down where it stands and leaves it to `resume`.
        """
        async with self._start() as run:
            self._run_id = run.run_id
            async for event in run.events():
                self._take(event)
            return self._result(await run.result())

    def _start(self) -> Run:
        if self._stored and self._run_id is not None:
            return self._runner.start_resume(
                self._run_id, retry_failed=self._retry_failed, answers=self._answers, policy=self._policy
            )
        return self._runner.start(self._policy.dag(), self._run_id, policy=self._policy)

    def _take(self, event: events.Event) -> None:
        """Keep what is shown in step with what happens."""
        if isinstance(event, events.PolicyDecided):
            self._loop = Loop.of(event.state)
        elif isinstance(event, events.TaskCompleted) and is_work(event.task_id):
            self._context[event.task_id] = event.text if event.data is None else event.data

    def _result(self, result: RunResult) -> OrchestratorResult:
        done = [task for task in result.tasks.values() if task.status is TaskStatus.COMPLETED]
        return OrchestratorResult(
            answer=result.text.get(ANSWER_ID, ""),
            status=result.status,
            phase=self._loop.phase,
            iteration=self._loop.iteration,
            stopped=self._loop.stopped,
            context={task.id: task.value for task in done if is_work(task.id)},
            run_id=result.run_id,
            usage=result.usage,
            error=result.error,
        )


async def load_loop_state(store: Store, run_id: str) -> LoopState:
    """Where the loop of the stored run `run_id` stands. Raises RunNotFound, StoreError."""
    record = await store.get_run(run_id)
    if record is None:
        raise RunNotFound(f"the store has no run {run_id!r}")
    loop = _loop_of(record)
    running = [task.task_id for task in await store.list_tasks(run_id) if _is(task, TaskStatus.RUNNING)]
    return LoopState(loop.phase, loop.iteration, tuple(running))


def _by_role(backends: Mapping[str, OneBackend] | OneBackend | None) -> dict[str, OneBackend]:
    if backends is None:
        raise ValueError(f"give backends=..., one for all or one for each of {', '.join(ROLES)}")
    if not isinstance(backends, Mapping):
        return dict.fromkeys(ROLES, backends)
    named: dict[str, OneBackend] = {**backends}
    if missing := [role for role in ROLES if role not in named]:
        # Other names are no mistake in themselves: tasks that an executor's reply brings in may run on them.
        misspelt = ((name, nearest(name, missing)) for name in named if name not in ROLES)
        slip = next((f"backends has {name!r}{hint}" for name, hint in misspelt if hint), None)
        what_to_do = slip or f"give one for each of {', '.join(ROLES)}"
        raise ValueError(f"there is no backend for {', '.join(missing)}; {what_to_do}")
    return named


def _loop_of(record: RunRecord) -> Loop:
    return Loop.of(decided_of(record.policy_state).state)


def _is(task: TaskRecord, status: TaskStatus) -> bool:
    return TaskStatus(task.status) is status


def _is_context(task: TaskRecord) -> bool:
    return is_work(task.task_id) and _is(task, TaskStatus.COMPLETED) and not task.damaged


def _value(task: TaskRecord) -> JsonValue:
    return (task.text or "") if task.data is None else cast("JsonValue", json.loads(task.data))
