"""`ParallelRunner`: run a DAG, resume a run, continue the conversation of a task."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from types import EllipsisType, TracebackType
from typing import Any, Self, TypeAlias

from plait import events
from plait.backends.backend_protocol import Backend, Reply
from plait.backends.function_backend import as_backend
from plait.backends.prices import Price
from plait.clock_and_ids import Clock, new_run_id
from plait.errors import RunOwned, StoreError
from plait.events import RunClaimed
from plait.json_form import JsonInput
from plait.runner.client.answer_task import (
    How,
    PersonDecision,
    answer_question,
    apply_decision,
    unanswered_questions,
)
from plait.runner.client.cancel_run import OnUnreached, cancel_run, finish_cancelling
from plait.runner.client.continue_task import continue_task
from plait.runner.client.create_run import checked_run_id, create_run, slot_settings, with_policy
from plait.runner.client.fork_run import Fork, plan_fork
from plait.runner.client.reuse_preview import ReusePreview, preview_reuse
from plait.runner.domain.asked_question import OnQuestion, OpenQuestion
from plait.runner.domain.dag import DAG, as_dag
from plait.runner.domain.policy import Policy
from plait.runner.domain.run_result import Degradation, RunResult
from plait.runner.engine.lease import LEASE_SECONDS, claim_for_this_process, short_claim_ends, wait_for_expiry
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_handle import Run
from plait.runner.engine.run_lifecycle import Diverged, execute_run
from plait.runner.engine.run_options import DEFAULT_BACKEND, RunOptions, answer_keys, backend_names, default_backend
from plait.runner.recovery.given_answers import question_of
from plait.runner.recovery.resume import Preview, ResumeOptions, decide, earlier_answers, prepare_resume, preview
from plait.runner.reuse.earlier_answers import (
    ANSWER_KEYS,
    EarlierAnswers,
    ReuseFrom,
    load_earlier_answers,
    require_tasks,
)
from plait.runner.scheduling.rate_limits import RateLimits
from plait.runner.scheduling.slots import default_concurrency
from plait.runner.state.codec import run_created
from plait.runner.state.own_store import OwnStore, StorePlace, with_open_store
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import ended_result, needs_no_work, require_unfailed, stored_run, with_prompts
from plait.runner.state.task_files import with_digests
from plait.runner.state.timeouts import TimeoutStore
from plait.statuses import RunStatus
from plait.task import GrowthLimits, Task

CANCEL_GRACE_SECONDS = 5.0
_MOST_CLAIMS = 10
"""How often a resume claims a run that other processes claim at the same time."""
DEFAULT_LIMITS = GrowthLimits()

_Settings: TypeAlias = Mapping[str, JsonInput] | None
_Drive: TypeAlias = Callable[[LiveRun], Awaitable[RunResult]]


class ParallelRunner:
    """Executes DAGs: each task starts once its dependencies are done and a slot is free.

    A runner may execute several DAGs at the same time. Parameters:

    - `backend`: the default backend. An `async def f(prompt) -> str` counts as a backend.
    - `backends`: further backends, by name.
    - `default`: the name of the default backend among `backends`. A single backend is the default by itself.
    - `store`: the place for checkpoints: a store, the path of a SQLite file, or the address of a PostgreSQL database. A
      path or an address is opened for each call, and with `async with runner:` for the whole block. With None, nothing
      is stored and nothing can be resumed.
    - `concurrency`: the number of tasks running at once. By default the sum of `limits`, and 8 for all backends without
      a limit together. With None it is the number of slots of the hosts on which the backends are placed, and grows
      when hosts join.
    - `limits`: the number of tasks running at once per backend, by backend name.
    - `rates`: the requests and tokens per minute per backend, by backend name. They are kept before the server has to
      refuse, and hold for all runs of this process that use the same backend name, server and key.
    - `shared_limits`: if True, `concurrency` and `limits` apply to all runs of an event loop together, as a provider's
      rate limit does; otherwise to each run. Runs with shared limits receive slots in turn. Tasks must then never wait
      for another run: the other run may need the waiting task's slot.
    - `strict`: if True, a failure of the store ends the run. By default a failing store never ends a run.
    - `store_timeout`: the time limit of one store call, in seconds.
    - `lease`: the number of seconds for which a claim on a run holds without renewal. All users of a store need the
      same value. An owner with unknown state is watched for `lease` seconds before a takeover.
    - `cancel_grace`: the number of seconds for which running attempts may continue after the run was cancelled; 0 ends
      the attempts at once.
    - `growth`: limits on the tasks added to a run by tasks and policies.
    - `on_question`: a callback for questions of tasks, in addition to all other ways of answering. The returned value
      is the answer; None defers to the other ways.
    - `prices`: the prices of models, by the name of the model. A backend's own report of a cost comes first, then these
      prices, then the list of the extra `prices`.
    - `clock`: the source of time.
    - `rng`: the source of random retry delays.
    """

    def __init__(
        self,
        backend: Backend | Callable[[str], Any] | None = None,
        *,
        backends: Mapping[str, Backend | Callable[[str], Any]] | None = None,
        default: str | None = None,
        store: StorePlace | None = None,
        concurrency: int | EllipsisType | None = ...,
        limits: Mapping[str, int] | None = None,
        rates: Mapping[str, RateLimits] | None = None,
        shared_limits: bool = False,
        strict: bool = False,
        store_timeout: float = 10.0,
        lease: float = LEASE_SECONDS,
        cancel_grace: float = CANCEL_GRACE_SECONDS,
        growth: GrowthLimits = DEFAULT_LIMITS,
        on_question: OnQuestion | None = None,
        prices: Mapping[str, Price] | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not store_timeout > 0:
            raise ValueError(f"store_timeout must be more than 0 seconds, not {store_timeout}")
        named = {name: as_backend(one) for name, one in (backends or {}).items()}
        if backend is not None:
            named[DEFAULT_BACKEND] = as_backend(backend)
        if concurrency is ...:
            concurrency = default_concurrency((limits or {}).get(name) for name in named)
        self.own_store = OwnStore(store)
        opened = self.own_store.store
        self._config = RunOptions(
            backends=named,
            default=default_backend(named, default, given=backend is not None),
            store=None if opened is None else TimeoutStore(opened, store_timeout),
            concurrency=concurrency,
            limits=dict(limits or {}),
            rates=dict(rates or {}),
            shared_limits=shared_limits,
            strict=strict,
            lease=lease,
            cancel_grace=cancel_grace,
            growth=growth,
            on_question=on_question,
            prices=dict(prices or {}),
            clock=clock or Clock(),
            rng=rng or random.SystemRandom(),  # forked processes need different retry delays
        )
        self._block = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._block.enter_async_context(self.own_store.opened())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._block.aclose()

    async def run(
        self,
        dag: DAG | Iterable[Task],
        run_id: str | None = None,
        *,
        key: str | None = None,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
        like: str | None = None,
        fresh: Collection[str] = (),
        keep_answers: bool = False,
    ) -> RunResult:
        """Run `dag`, a DAG or a list of tasks, to its end and return the result.

        With `key` (see `create_run`) the call may be repeated, also by another process and after a crash: it begins the
        run, continues a run that has not ended, as `resume` does, or returns the stored result without a call. Raises
        KeyConflict, RunOwned and RunNotResumable as these do, and StoreRequired.

        `run_id` defaults to a new unique id that sorts by creation time. `settings` are stored with the run. After each
        task's end, `policy` decides which tasks to add, or ends the run. Once all remaining tasks wait for the answer
        of a person, the run is `waiting_input` and the call returns.

        `like` is the id of a stored run: a task whose rendered prompt, schema, backend and conversation are those of a
        completed task there is completed with the answer from there, without a call and at no cost. Backends without
        an `answer_key`, tasks marked `at_most_once` or `adds_tasks`, and tasks in `fresh` always run; in `fresh` the id
        of a `for_each` task stands for its parts. A task that asked a person asks again, unless `keep_answers` is true.
        See `preview_like`.

        A failing task never raises: see `RunResult.status`. Raises before the first task starts: ValueError if
        `settings` is not JSON or contains a key reserved by plait, such as `policy` or `inputs`; BackendMissing;
        TaskNotFound for an unknown task in `fresh`; DAGError if the tasks to be added by `policy` are invalid;
        RunExists if the store already holds `run_id`; StoreNotOpen if the store is not open. Raises OwnershipLost if
        another process takes the run over, and with `strict` any StoreError.

        Cancellation ends all attempts and stores the state of the run; `resume` continues it.
        """
        reuse = _reuse(like, fresh, keep_answers)
        if key is None:
            live, drive = self._new(dag, run_id, settings, policy, reuse)
            return await drive(live)
        if reuse is not None:
            raise ValueError("a run with a key takes no answers of another run over; leave key or like out")
        async with self.own_store.opened():
            run_id = await self.create_run(dag, run_id, key=key, settings=settings, policy=policy)
            return await self.resume(run_id, policy=policy)

    def start(
        self,
        dag: DAG | Iterable[Task],
        run_id: str | None = None,
        *,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
        like: str | ReusePreview | None = None,
        fresh: Collection[str] = (),
        keep_answers: bool = False,
    ) -> Run:
        """Start `dag` in the background: `async with runner.start(dag) as run:`. Parameters as in `run`; see `Run`.

        `like` may be the preview of a run of the same `dag`: the answers that the preview has read are not read again.
        """
        dag = as_dag(dag)
        reuse = _reuse(like.like if isinstance(like, ReusePreview) else like, fresh, keep_answers)
        known = like.answers if isinstance(like, ReusePreview) and like.is_of(dag, reuse) else None
        return Run(*self._new(dag, run_id, settings, policy, reuse, known))

    @with_open_store
    async def preview_like(
        self,
        dag: DAG | Iterable[Task],
        like: str,
        *,
        fresh: Collection[str] = (),
        keep_answers: bool = False,
        policy: Policy | None = None,
    ) -> ReusePreview:
        """Return which tasks of a `run` with the same arguments take an answer over and which run, each with the
        reason. Call and store nothing.

        A task that is said to take its answer over takes it over, and a task that is said to run runs, unless a task
        before fails. DEPENDS names the tasks that run and whose answers decide.

        Raises StoreRequired, RunNotFound, TaskNotFound for an unknown task in `fresh`, BackendMissing, DAGError for
        files that cannot be used, StoreError.
        """
        dag = as_dag(dag)
        require_tasks(fresh, dag.tasks)
        reuse = ReuseFrom(like, tuple(fresh), keep_answers=keep_answers)
        return replace(await preview_reuse(self._config, with_digests(dag), reuse, policy), dag=dag)

    @with_open_store
    async def fork(
        self,
        run_id: str,
        start: str,
        *,
        prompts: Mapping[str, str] | None = None,
        inputs: Mapping[str, JsonInput] | None = None,
        results: Mapping[str, str] | None = None,
        only: bool = False,
        backend: str | None = None,
    ) -> Fork:
        """Return a new run that begins from the task `start` of a stored run, for `start_fork` or `preview_fork`. The
        stored run may have ended, failed or been interrupted, and does not change.

        The task `start` runs, with its parts if it has `for_each`. Tasks downstream of `start` or of an edit, and tasks
        that did not complete, run unless nothing changed for them, as with `like` in `run`. All other tasks keep their
        results and conversations, whatever their backends. The id of the stored run is kept with the new run.

        `prompts` maps ids of tasks to new prompts (the id of a `for_each` task stands for its parts), `inputs` names of
        inputs to new values, `results` ids of tasks to results that they take in place of a call (JSON for a task with
        an `output_schema`). With `only` the task runs alone, on the inputs recorded in the stored run, with another
        `backend` if given; tasks that it would add are not added.

        Raises StoreRequired, RunNotFound, TaskNotFound, DAGError for an invalid prompt, PlaitError for an edit that
        does not fit the run and, with `only`, if a task that the prompt names has no result, PolicyMissing, StoreError.
        """
        edits = {"prompts": prompts or {}, "results": results or {}}
        return await plan_fork(
            self._config.store, run_id, start, **edits, inputs=inputs or {}, only=only, backend=backend
        )

    @with_open_store
    async def preview_fork(self, fork: Fork) -> ReusePreview:
        """Return what each task of the fork would do: see `preview_like`."""
        return await preview_reuse(self._config, fork.dag, fork.reuse, fork.policy)

    def start_fork(self, fork: Fork) -> Run:
        """Start the fork in the background: `async with runner.start_fork(fork) as run:`. Raises as `run`."""
        return Run(*self._new(fork.dag, None, fork.settings, fork.policy, fork.reuse))

    @with_open_store
    async def create_run(
        self,
        dag: DAG | Iterable[Task],
        run_id: str | None = None,
        *,
        key: str | None = None,
        settings: _Settings = None,
        policy: Policy | None = None,
    ) -> str:
        """Store a run of `dag` as queued and return its id. `resume` begins the run, here or in another process.

        `key` (1 to 200 characters, excludes `run_id`) makes the call idempotent: a repeated call with the same key,
        also in a race or after a crash, returns the id of the existing run. Raises KeyConflict if the existing run has
        another DAG, other settings or another policy. Raises StoreRequired, BackendMissing, DAGError, RunExists if
        `run_id` is taken, and StoreError. After a StoreError the run may or may not be stored.
        """
        dag = as_dag(dag)
        kept = with_policy(self._config, dag, settings, policy)
        return (await create_run(self._config, dag, run_id, key, kept))[0]

    @property
    def config(self) -> RunOptions:
        """The options of this runner."""
        return self._config

    async def resume(
        self,
        run_id: str,
        *,
        retry_failed: bool = False,
        answers: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
        prompts: Mapping[str, str] | None = None,
    ) -> RunResult:
        """Continue a stored run, or begin a queued run: keep completed tasks, run interrupted and pending tasks.

        Only the store and the backends are needed. A task interrupted by the death of its process is handled as
        follows: a turn still alive in its agent is followed; otherwise a conversation confirmed by the backend is
        continued; otherwise the task starts over, or waits for a person if it is `at_most_once`. `preview_resume`
        returns the decision for each task beforehand. Failed tasks stay failed. `retry_failed` reopens failed tasks,
        and completed tasks with a damaged stored result. A completed run, or a failed run without remaining work, is
        returned unchanged. If the run was being cancelled, the cancellation is completed and no task runs.

        With `retry_failed`, `prompts` maps the ids of failed tasks to new prompts, stored in place of the old ones.

        `answers` maps the ids of waiting tasks to answers. Other questions receive the answers stored by
        `answer_question`, or, past their deadline, their defaults. `policy` is required for a run started with a policy
        that does not come with plait.

        A provably dead owner is replaced at once. An owner with unknown state is watched for one `lease` first. The
        short claim of a process that only stores an answer is waited for, 2 seconds at most.

        Raises StoreRequired, RunNotFound, RunOwned if another live process executes the run, RunNotResumable if the run
        is cancelled, or if it has failed and `answers` are given without `retry_failed`, AnswerConflict if an answer
        comes too late, PlaitError for a prompt of a task that has not failed, DAGError for an invalid prompt,
        PolicyMissing, BackendMissing, StoreError if the store cannot be read or claimed, and the errors of `run`.
        """
        how = _resume_options(retry_failed, answers, policy, prompts)
        live, drive = self._resume(run_id, how)
        return await drive(live)

    def start_resume(
        self,
        run_id: str,
        *,
        retry_failed: bool = False,
        answers: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
        prompts: Mapping[str, str] | None = None,
    ) -> Run:
        """Resume a run in the background. Parameters as in `resume`; see `start`."""
        return Run(*self._resume(run_id, _resume_options(retry_failed, answers, policy, prompts)))

    @with_open_store
    async def preview_resume(self, run_id: str, *, retry_failed: bool = False) -> Preview:
        """Return the action of `resume` for each task, and the tasks that may be billed twice. Change nothing.

        Raises StoreRequired, RunNotFound, RunOwned if another live process executes the run, RunNotResumable if the run
        is cancelled, StoreError.
        """
        return await preview(self._config, await stored_run(self._config.store, run_id), retry_failed)

    @with_open_store
    async def answer(self, run_id: str, task_id: str, how: How, text: str = "") -> None:
        """Resolve a task that waits for a person; a following `resume` continues the run.

        `how` is `done` if the task took effect, with `text` as its result (JSON if the task has an `output_schema`);
        `again` to run the task again; `fail` to fail the task, with `text` as the reason.

        If another process owns the run, wait up to 2 seconds for the release: a worker may claim a waiting run only to
        check whether stored answers let it continue.

        Raises ValueError for another `how`, RunNotFound, RunOwned if a live process executes the run, TaskNotFound,
        PlaitError if the task is not waiting or the text does not fit, StoreError.
        """
        await apply_decision(self._config, run_id, task_id, PersonDecision(how, text))

    @with_open_store
    async def cancel_run(
        self, run_id: str, *, wait: float = 0.0, on_unreached: OnUnreached = lambda _hosts: None
    ) -> RunStatus:
        """Cancel a stored run permanently, whichever process executes it, and return its status.

        An ended run is not changed. A run without an owner is cancelled at once. Otherwise the owner reads the request
        from the store, at once in this process, else within a second, or within 5 seconds if a server's notification
        is lost: the owner stores the run as cancelling, starts no further task, asks the running attempts to end
        (`cancel_requested`), lets them continue for its own `cancel_grace` seconds, and stores the run as cancelled.
        This call waits up to `wait` seconds for the end and returns `cancelling` if the end is still outstanding. If
        the owner dies first, the next `resume` or `cancel_run` completes the cancellation. Repeated calls are harmless.

        Of a cancelled run, each call ends the attempts that are still under way on the hosts of the backends.
        `on_unreached` is called with the hosts that cannot be reached, and the ids of the tasks that may be under way
        on each: call again when the hosts are back.

        An owner with unknown state, such as one on another host, receives the request, has `wait` seconds to answer,
        and is then watched for one `lease`. Raises StoreRequired, RunNotFound, StoreError. Cancelling this call does
        not withdraw the request.
        """
        return await cancel_run(self._config, run_id, wait, on_unreached)

    @with_open_store
    async def continue_task(self, run_id: str, task_id: str, message: str) -> Reply:
        """Continue the conversation of a task after the run: send `message`, store the turn, return the reply.

        The task's result and the run's usage do not change; the reply carries the cost of the turn. A conversation
        exists once a prompt was answered, or once the backend confirmed the session (as an agent does). A conversation
        waiting for an answer accepts no other message.

        Raises StoreRequired, RunNotFound, RunOwned if a live process executes the run, TaskNotFound, PlaitError if the
        task has no usable conversation, BackendError if the backend fails, StoreError, and TurnNotStored (with the
        reply) if the turn could not be stored.
        """
        run = await stored_run(self._config.store, run_id)
        return await continue_task(self._config, run, task_id, message)

    @with_open_store
    async def questions(self, run_id: str) -> list[OpenQuestion]:
        """Return the unanswered questions of a stored run, in the order of the tasks.

        Raises StoreRequired, RunNotFound, StoreError.
        """
        return await unanswered_questions(self._config, run_id)

    @with_open_store
    async def answer_question(
        self, run_id: str, task_id: str, value: JsonInput, *, attempt: int | None = None, wait: float = 10.0
    ) -> bool:
        """Answer the question of a waiting task, from any process. The first answer counts.

        `attempt` is the attempt number from `questions`; the check prevents an answer to a later question of the same
        task. An owner of the run reads the answer from the store within a second, or within 5 seconds if a server's
        notification is lost, and the task continues at once; this call waits up to `wait` seconds. A run without an
        owner continues at the next resume. Returns True once the task has the answer, False if the answer is stored but
        not yet read by the owner.

        Raises AnswerConflict if the question was already answered, is past its deadline or is no longer open;
        PlaitError if the value does not fit; RunNotResumable if the run has failed with the question open (resume with
        `retry_failed` first); StoreRequired, RunNotFound, TaskNotFound, StoreError.
        """
        return await answer_question(self._config, run_id, task_id, value, attempt, wait)

    def _new(
        self,
        dag: DAG | Iterable[Task],
        run_id: str | None,
        settings: _Settings,
        policy: Policy | None,
        reuse: ReuseFrom | None,
        known: EarlierAnswers | None = None,
    ) -> tuple[LiveRun, _Drive]:
        config, dag = self._config, with_digests(as_dag(dag))
        names = backend_names(dag, config)
        run_id = checked_run_id(run_id) or new_run_id(config.clock)
        kept = {**with_policy(config, dag, settings, policy), **slot_settings(config)}
        if config.store is not None:
            kept[ANSWER_KEYS] = answer_keys(config)
        if reuse is not None:
            require_tasks(() if reuse.roots is not None else reuse.fresh, dag.tasks)
            kept |= reuse.as_settings()

        async def drive_new(live: LiveRun) -> RunResult:
            live.answers = known
            if known is None:
                now = config.clock.wall()
                live.answers = await load_earlier_answers(config.store, dag, answer_keys(config), reuse, now)
            at = live.created_at = live.stamp()
            live.owner = claim_for_this_process(at)
            claim = RunClaimed(at, live.owner, config.clock.wall() + config.lease)
            live.first_events = run_created(at, run_id, dag, kept), events.RunStarted(at, run_id), claim
            live.state, live.task_backends = RunState(dag.copy(), keeps_all=config.store is None), names
            live.policy = policy
            return await self._go_on(live, await execute_run(live))

        return LiveRun(run_id=run_id, options=config), self._with_store(drive_new)

    def _resume(self, run_id: str, how: ResumeOptions) -> tuple[LiveRun, _Drive]:
        async def drive_stored(live: LiveRun) -> RunResult:
            return await self._go_on(live, await self._resume_once(live, how))

        return LiveRun(run_id=run_id, options=self._config), self._with_store(drive_stored)

    async def _go_on(self, live: LiveRun, outcome: RunResult | Diverged) -> RunResult:
        """Return the result of a run. If the store has refused a part of it, first continue with what is stored."""
        while isinstance(outcome, Diverged):
            interrupted = outcome.result
            try:
                outcome = await self._resume_once(live, ResumeOptions(policy=live.policy))
            except StoreError as error:
                at = live.stamp()
                live.feed.publish(events.RunInterrupted(at, live.run_id, str(error)))
                degraded = (*interrupted.degraded, Degradation(at, None, str(error)))
                return replace(interrupted, degraded=degraded, error=str(error))
            if isinstance(outcome, Diverged):
                outcome = Diverged(_joined(interrupted, outcome.result))
            else:
                outcome = _joined(interrupted, outcome)
        return outcome

    async def _resume_once(self, live: LiveRun, how: ResumeOptions) -> RunResult | Diverged:
        config, run_id = self._config, live.run_id

        async def prepared_or_result() -> RunResult | None:
            run = await stored_run(config.store, run_id)
            live.feed.status = run.status
            for task_id in how.answers or ():
                question_of(run, task_id)
            if needs_no_work(run, how.retry_failed):
                if how.answers:
                    require_unfailed(run)
                return ended_result(run)
            run = with_prompts(run, how.prompts)
            if not await wait_for_expiry(config, run, live):
                return run.state.result(run_id, RunStatus.INTERRUPTED)
            plan = await decide(config, run, how)
            if plan.cancelled:
                return await finish_cancelling(config, run, live.feed)
            live.answers = await earlier_answers(config, run)
            if await prepare_resume(live, plan):
                return None
            return run.state.result(run_id, run.status, resume_summary=run.state.resume_summary())

        tries = 0
        while True:
            try:
                result = await prepared_or_result()
                break
            except RunOwned:
                tries += 1
                store = config.store
                if store is None or tries == _MOST_CLAIMS or not await short_claim_ends(config, store, run_id):
                    raise
        return await execute_run(live) if result is None else result

    def _with_store(self, drive: _Drive) -> _Drive:
        async def drive_opened(live: LiveRun) -> RunResult:
            async with self.own_store.opened():
                return await drive(live)

        return drive_opened


def _joined(before: RunResult, after: RunResult) -> RunResult:
    """Return the result of a run that went on in one process, which did what was done `before`."""
    reused = {one.id for one in before.tasks.values() if one.reused}
    summary = before.resume_summary
    if summary is not None and (more := after.resume_summary) is not None:
        ran, repeated = summary.ran + more.ran, summary.repeated + more.repeated
        summary = replace(summary, ran=ran, repeated=repeated, adopted=summary.adopted + more.adopted)
    return replace(
        after,
        tasks={name: replace(task, reused=name in reused) for name, task in after.tasks.items()},
        degraded=(*before.degraded, *after.degraded),
        resume_summary=summary,
    )


def _resume_options(
    retry_failed: bool,
    answers: Mapping[str, JsonInput] | None,
    policy: Policy | None,
    prompts: Mapping[str, str] | None,
) -> ResumeOptions:
    """Return the options of a resume. Raises ValueError for `prompts` without `retry_failed`."""
    if prompts and not retry_failed:
        raise ValueError("prompts are for failed tasks, which run again with retry_failed=True only")
    return ResumeOptions(retry_failed, answers, policy, prompts or {})


def _reuse(like: str | None, fresh: Collection[str], keep_answers: bool) -> ReuseFrom | None:
    """Return which answers are taken over. Raises ValueError for `fresh` or `keep_answers` without `like`."""
    if like is not None:
        return ReuseFrom(like, tuple(fresh), keep_answers=keep_answers)
    if fresh:
        raise ValueError("fresh names tasks that take no answer over; give the earlier run with like=RUN_ID, too")
    if keep_answers:
        raise ValueError("keep_answers keeps the answers of persons in an earlier run; give the run with like=RUN_ID")
    return None
