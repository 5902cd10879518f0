"""`ParallelRunner`: run a DAG, resume a run, go on with a task's conversation."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from plait.backends.function import as_backend
from plait.backends.protocol import Backend, JsonInput, Reply
from plait.persistence.changes import RunClaimed
from plait.persistence.protocol import Store
from plait.runner.clock import Clock, iso, new_run_id
from plait.runner.domain import events
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.domain.question import OnQuestion, OpenQuestion
from plait.runner.domain.result import RunResult
from plait.runner.domain.status import RunStatus
from plait.runner.domain.task import Limits
from plait.runner.engine.config import DEFAULT_BACKEND, Config, backend_names, default_backend
from plait.runner.engine.feed import Feed
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.engine.lifecycle import Prepared, drive
from plait.runner.engine.run_control import Control
from plait.runner.operations.answer_task import How, Settlement, answer_question, settle, unanswered_questions
from plait.runner.operations.cancel_run import cancel, finish_cancelling
from plait.runner.operations.continue_task import say
from plait.runner.operations.create_run import checked_run_id, create, with_policy
from plait.runner.recovery.answers import question_of
from plait.runner.recovery.lease import wait_until_free
from plait.runner.recovery.preview import Preview, preview
from plait.runner.recovery.resume import Resumption, take_over
from plait.runner.run import Run
from plait.runner.state.owner import LEASE_SECONDS, claim_for_this_process
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import ended_result, needs_no_work, require_unfailed, stored_run
from plait.runner.state.timeouts import PatientStore

CANCEL_GRACE_SECONDS = 5.0
DEFAULT_LIMITS = Limits()

_Settings: TypeAlias = Mapping[str, JsonInput] | None
_Drive: TypeAlias = Callable[[Feed, Control], Awaitable[RunResult]]


class ParallelRunner:
    """Runs DAGs: every task as soon as what it depends on is done and a place is free.

    `backend` is the default one, `backends` further ones by name; an `async def f(prompt) -> str` counts as a backend.
    `default` names the default one among these; if there is only one, it is that. `concurrency` is how many tasks run
    at once in all, `limits` how many on one backend. `store` may be None: then nothing is written down and nothing can
    be resumed. A store that fails never ends a run, unless `strict`; one call to it may take `store_timeout` seconds.
    `lease` is for how many seconds a claim on a run holds without renewal, the same for all who share a store; an owner
    that cannot be seen from here is given that long to show that it lives. `cancel_grace` is for how many seconds what
    is under way may go on to its end once another process has cancelled the run; 0 ends it at once. `growth` bounds
    what tasks and policies may add to a run. `on_question` is asked, beside all else, what tasks ask: what it returns
    is the answer, None leaves it to others. `clock` is where time comes from, `rng` what spreads retries by chance. One
    runner may run several DAGs at the same time: `concurrency` and `limits` hold for each, or, with `shared_limits`,
    for all together, as a backend's rate limit then does. Runs of one event loop get these places in turn, and no task
    may wait for another run, which might wait for that task's place.
    """

    def __init__(  # noqa: PLR0913 - every one is a keyword with a sound default
        self,
        backend: Backend | Callable[[str], Any] | None = None,
        *,
        backends: Mapping[str, Backend | Callable[[str], Any]] | None = None,
        default: str | None = None,
        store: Store | None = None,
        concurrency: int = 8,
        limits: Mapping[str, int] | None = None,
        shared_limits: bool = False,
        strict: bool = False,
        store_timeout: float = 10.0,
        lease: float = LEASE_SECONDS,
        cancel_grace: float = CANCEL_GRACE_SECONDS,
        growth: Limits = DEFAULT_LIMITS,
        on_question: OnQuestion | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not store_timeout > 0:
            raise ValueError(f"store_timeout must be more than 0 seconds, not {store_timeout}")
        named = {name: as_backend(one) for name, one in (backends or {}).items()}
        if backend is not None:
            named[DEFAULT_BACKEND] = as_backend(backend)
        self._config = Config(
            named,
            default_backend(named, default, given=backend is not None),
            None if store is None else PatientStore(store, store_timeout),
            concurrency,
            dict(limits or {}),
            shared_limits,
            strict,
            lease,
            cancel_grace,
            growth,
            on_question,
            clock or Clock(),
            rng or random.SystemRandom(),  # two processes that come from one by a fork have to retry apart
        )

    async def run(
        self,
        dag: DAG,
        run_id: str | None = None,
        *,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> RunResult:
        """Run `dag` to its end.

        A given `run_id` is kept, else a sortable unique one is made. `settings` is kept with the run in the store; what
        is no JSON, or has a key that plait keeps there itself, such as `policy` or `inputs`, raises ValueError.
        `policy` decides, whenever a task has ended, what is added to the run or that it is over. When nothing can go on
        before somebody has answered a task's question, the run is waiting_input and this returns.
        A failing task never raises: see `RunResult.status`. Before anything starts it raises BackendMissing, and
        DAGError where what `policy` would add is wrong; RunExists when the store has a run of that id, OwnershipLost
        when another process took the run over, StoreNotOpen for a store that is not open, and with `strict` any
        StoreError. Cancellation ends all attempts, writes down where the run stands, and leaves it to `resume`.
        """
        return await self._new(dag, run_id, settings, policy)[1](Feed(), Control())

    def start(
        self,
        dag: DAG,
        run_id: str | None = None,
        *,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> Run:
        """Like `run`, beside the caller: `async with runner.start(dag) as run:`. See `Run`."""
        return Run(*self._new(dag, run_id, settings, policy))

    async def create_run(
        self,
        dag: DAG,
        run_id: str | None = None,
        *,
        key: str | None = None,
        settings: _Settings = None,
        policy: Policy | None = None,
    ) -> str:
        """Store a run of `dag` as queued, for `resume` to begin here or in another process; its id.

        There is one run for a `key` (1 to 200 characters, no `run_id`): who comes again with it, also in a race or
        after a crash, gets that run's id; KeyConflict if with another DAG, settings or policy. Raises StoreRequired,
        BackendMissing, DAGError, RunExists for a taken `run_id`, and StoreError: then nobody knows if it was stored.
        """
        return await create(self._config, dag, run_id, key, with_policy(self._config, dag, settings, policy))

    @property
    def config(self) -> Config:
        """What this runner was made with."""
        return self._config

    async def resume(
        self,
        run_id: str,
        *,
        retry_failed: bool = False,
        answers: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> RunResult:
        """Go on with a stored run: what is completed is kept, what was under way or never began is run.

        Needs nothing but the store and the backends. A task that was under way when its process died is followed where
        its agent outlived that, goes on with its conversation where its backend had confirmed one, and starts over
        otherwise, or waits for a person if it is `at_most_once`; `preview_resume` tells beforehand. Failed tasks stay
        failed, unless `retry_failed`, which also runs completed ones again whose stored result is damaged. A run that
        is complete, or has failed with nothing left to run, comes back as it is; one that was being cancelled is
        cancelled, and nothing of it is run.

        `answers` answers the questions of waiting tasks, by task; others are answered by what `answer_question` has
        left for them, or, past their deadline, by their default. `policy` is needed where the run was started with one
        that does not come with plait. Raises AnswerConflict for an answer that comes too late, PolicyMissing, and
        RunNotResumable for answers to a failed run without `retry_failed`.

        An owner that is provably dead is succeeded at once; one that cannot be judged from here is watched for one
        `lease` first. Raises StoreRequired, RunNotFound, RunOwned while another live process runs it, RunNotResumable
        for a cancelled run, BackendMissing, and StoreError when the store cannot be read or claimed; else as `run`.
        """
        return await self._resume(run_id, Resumption(retry_failed, answers, policy))(Feed(), Control())

    def start_resume(
        self,
        run_id: str,
        *,
        retry_failed: bool = False,
        answers: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> Run:
        """Like `resume`, beside the caller: see `start`."""
        return Run(run_id, self._resume(run_id, Resumption(retry_failed, answers, policy)))

    async def preview_resume(self, run_id: str, *, retry_failed: bool = False) -> Preview:
        """What `resume` would do now with each task, and why. Changes nothing and claims nothing.

        Raises StoreRequired, RunNotFound, RunOwned while another live process runs it, RunNotResumable for a cancelled
        run, StoreError.
        """
        return await preview(self._config, await stored_run(self._config.store, run_id), retry_failed)

    async def answer(self, run_id: str, task_id: str, how: How, text: str = "") -> None:
        """Settle a task that waits for a person; `resume` then goes on with the run.

        `done`: it took effect, and `text` is its result, JSON where the task has an output_schema. `again`: it is run
        again. `fail`: it failed, `text` saying why. Raises ValueError for any other `how`, RunNotFound, RunOwned while
        a live process runs the run, TaskNotFound, PlaitError for a task that waits for nobody or a text that does not
        fit, StoreError.
        """
        settlement = Settlement(how, text)
        await settle(self._config, await stored_run(self._config.store, run_id), task_id, settlement)

    async def cancel_run(self, run_id: str, *, wait: float = 0.0) -> RunStatus:
        """Cancel a stored run for good, wherever it runs; the status that it then has.

        A run that has ended stays as it is. One that nobody runs is cancelled at once. A process that runs it is told
        through the store, where it looks every second: it stores the run as cancelling, starts nothing more, gives what
        is under way its own `cancel_grace` to come to an end, and stores the run as cancelled. Up to `wait` seconds are
        spent on waiting for that; before it has happened, the answer is `cancelling`. Should that process die first,
        the next `resume` or `cancel_run` finishes the cancellation. Calling it again does no harm.

        An owner that cannot be judged from here is told, and watched for one `lease`. Raises StoreRequired,
        RunNotFound, StoreError. Cancelling this call takes nothing back.
        """
        return await cancel(self._config, run_id, wait)

    async def continue_task(self, run_id: str, task_id: str, message: str) -> Reply:
        """Go on with a task's conversation after the run: say `message`, store the turn, return the reply.

        The task's result stays as it is. There is a conversation once something was answered in it, or once its backend
        has said that it keeps it, as an agent does; that of a task that waits for an answer takes nothing else. Raises
        RunNotFound, RunOwned while a live process runs the run, TaskNotFound, PlaitError for one without a
        conversation, BackendError when the backend fails, and TurnNotStored (with the reply) when the answer came but
        could not be stored. What the turn cost is told by the reply; the run's usage stays what its attempts used.
        """
        run = await stored_run(self._config.store, run_id)
        return await say(self._config, run, task_id, message)

    async def questions(self, run_id: str) -> list[OpenQuestion]:
        """What the tasks of a stored run ask and nobody has answered yet, in the order of the tasks. Raises
        StoreRequired, RunNotFound, StoreError.
        """
        return await unanswered_questions(self._config, run_id)

    async def answer_question(
        self, run_id: str, task_id: str, value: JsonInput, *, attempt: int | None = None, wait: float = 10.0
    ) -> bool:
        """Answer the question that a task of a stored run waits with, from any process. The first answer counts.

        `attempt` is that of the question as `questions` gave it; the task may ask something else by now. A process that
        runs the run is told through the store, where it looks every second, and its task goes on at once; up to `wait`
        seconds are spent on waiting for that. A run that nobody runs goes on when it is resumed. True once the answer
        is the task's; False if it is left in the store for an owner that has not taken it yet.

        Raises AnswerConflict when the question was answered before, is past its deadline or is not asked any more,
        PlaitError for a value that does not fit, RunNotResumable when the run has failed with the question open (resume
        it with `retry_failed` first), StoreRequired, RunNotFound, TaskNotFound, StoreError.
        """
        return await answer_question(self._config, run_id, task_id, value, attempt, wait)

    def _new(self, dag: DAG, run_id: str | None, settings: _Settings, policy: Policy | None) -> tuple[str, _Drive]:
        config = self._config
        names = backend_names(dag, config)
        run_id = checked_run_id(run_id) or new_run_id(config.clock)
        kept = {**with_policy(config, dag, settings, policy), "concurrency": config.concurrency}

        async def drive_new(feed: Feed, control: Control) -> RunResult:
            at = iso(config.clock.wall())
            created = events.RunCreated(at, run_id, dag, kept)
            owner = claim_for_this_process(at)
            claim = RunClaimed(at, owner, config.clock.wall() + config.lease)
            first = (created, events.RunStarted(at, run_id))
            state = RunState(dag.copy(), keeps_all=config.store is None)
            prepared = Prepared(run_id, state, names, owner, first, (claim,), policy=policy)
            return await drive(prepared, config, feed, control)

        return run_id, drive_new

    def _resume(self, run_id: str, how: Resumption) -> _Drive:
        config = self._config

        async def drive_stored(feed: Feed, control: Control) -> RunResult:
            run = await stored_run(config.store, run_id)
            feed.status = run.status
            for task_id in how.answers or ():
                question_of(run, task_id)
            if needs_no_work(run, how.retry_failed):
                if how.answers:
                    require_unfailed(run)
                return ended_result(run)
            if not await wait_until_free(config, run, feed, control):
                return run.state.result(run_id, RunStatus.INTERRUPTED)
            if await is_to_be_cancelled(run.store, run.record):
                return await finish_cancelling(config, run, feed)
            return await drive(await take_over(config, run, how), config, feed, control)

        return drive_stored
