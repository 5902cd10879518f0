"""`RunService`: create, start, watch and cancel runs in a process that serves many runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import anyio.abc
import anyio.to_thread

from plait import events
from plait.backends.backend_protocol import Reply
from plait.errors import PlaitError, RunOwned, StoreRequired
from plait.json_form import JsonInput
from plait.persistence.store_protocol import Store
from plait.program_log import logger
from plait.runner.client.answer_task import How
from plait.runner.client.await_answer import wait_for_answer
from plait.runner.client.create_run import create_run, with_policy
from plait.runner.domain.dag import DAG, as_dag
from plait.runner.domain.policy import Policy
from plait.runner.drawing.dag_picture import coordinates
from plait.runner.engine.event_feed import LiveText, TextPiece
from plait.runner.engine.inbox import LOOK_EVERY_S
from plait.runner.engine.run_handle import Run
from plait.runner.parallel_runner import ParallelRunner
from plait.runner.recovery.resume import Preview, ResumeOptions
from plait.runner.state.stored_run import stored_run
from plait.runner.views.live_view import LiveView
from plait.runner.views.read_views import RunFilter, find_runs, history, list_questions, look_up, task_detail
from plait.runner.views.view_models import EventView, QuestionView, RunDetail, RunView, TaskDetail
from plait.statuses import RunStatus
from plait.task import Task

POLL_SECONDS = 0.2


@dataclass(slots=True)
class _Driven:
    """A run executed by this service."""

    run: Run | None = None
    """The run; None while its backends are opened."""
    opening: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    began: anyio.Event = field(default_factory=anyio.Event)
    """Set once this process owns the run, or once acquiring the run has failed."""
    gone: anyio.Event = field(default_factory=anyio.Event)
    """Set once the service no longer executes the run."""
    error: Exception | None = None
    text: LiveText = field(default_factory=LiveText)

    def stop(self) -> None:
        """Stop the run, or the opening of its backends. A run that has ended is not stopped: that would end its wait
        for the store.
        """
        if self.run is None:
            self.opening.cancel()
        elif not self.run.is_storing:
            self.run.stop()

    async def begin(self) -> None:
        """Wait until the run has begun. Raises the error that prevented the start."""
        await self.began.wait()
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class _Waiting:
    """A run that was executed by this service and waits for a person."""

    policy: Policy | None
    watching: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Runners(Protocol):
    """Where a RunService takes the runner of a stored run from, if the service's own runner lacks the backends."""

    def open(
        self, run_id: str, *, retry_failed: bool = False, task_id: str | None = None
    ) -> AbstractAsyncContextManager[ParallelRunner]:
        """Open a runner that can resume the run, or with `task_id` continue the conversation of the task. Raises
        PlaitError.
        """
        ...

    def inspect(self, run_id: str) -> AbstractAsyncContextManager[ParallelRunner]:
        """Open a runner that can preview a resume of the run and settle its tasks. Starts no backend."""
        ...


class RunService:
    """Management of many runs in one process: `async with RunService(runner) as service:`.

    All answers are read from the store. Runs of other processes are therefore listed, followed and cancelled in the
    same way, and `start_run` and `resume_run` take over runs of dead processes. Calls that a client may have to repeat
    are idempotent. A run that waits for a person continues here once the answer is stored, by whatever process, and at
    the deadline of its question; a run that was executed elsewhere continues at the next `resume_run`.

    An exit from the block stops the runs executing here, waits until their state is stored, and lets `resume_run`
    continue them later. A run that has ended while a server store is away goes on waiting for the store. `poll` is the
    interval in seconds at which `events` reads the store. `runners` opens the runners of stored runs; without
    `runners`, `runner` resumes every run.

    Raises StoreRequired if `runner` has no store. All methods must be called from the event loop's thread. Methods
    other than reads raise PlaitError outside the block. Every method may raise StoreError.
    """

    def __init__(self, runner: ParallelRunner, *, poll: float = POLL_SECONDS, runners: Runners | None = None) -> None:
        if runner.config.store is None:
            raise StoreRequired("a RunService reads and writes runs; give its runner a store with store=...")
        if not poll > 0:
            raise ValueError(f"poll must be more than 0 seconds, not {poll}")
        self._runner = runner
        self._runners = runners or _OneRunner(runner)
        self._store: Store = runner.config.store
        self._clock = runner.config.clock
        self._poll = poll
        self._driven: dict[str, _Driven] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._group: anyio.abc.TaskGroup | None = None
        self._left = False
        self._block = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError("a RunService can be entered only once; create another RunService")
        await self._block.enter_async_context(self._runner)
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        self._left = True
        for driven in self._driven.values():
            driven.stop()
        for waiting in self._waiting.values():
            waiting.watching.cancel()
        async with self._block:
            if isinstance(error, Exception):
                # The error of the block is raised unchanged, not inside a group.
                await self._group.__aexit__(None, None, None)
                return None
            return await self._group.__aexit__(kind, error, trace)

    async def create_run(
        self,
        dag: DAG | Iterable[Task],
        *,
        key: str | None = None,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> str:
        """Store a run of `dag` as queued and return its id. See `ParallelRunner.create_run`."""
        return (await self.find_or_create_run(dag, key=key, settings=settings, policy=policy))[0]

    async def find_or_create_run(
        self,
        dag: DAG | Iterable[Task],
        *,
        key: str | None = None,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> tuple[str, bool]:
        """Do as `create_run`. Return the id, and whether this call stored the run: False if the key had a run already,
        and for all but one of several calls with the key at the same time.
        """
        config, dag = self._runner.config, as_dag(dag)
        return await create_run(config, dag, None, key, with_policy(config, dag, settings, policy))

    async def start_run(self, run_id: str, *, policy: Policy | None = None) -> None:
        """Begin or continue the run here. Return once the store records this process as the owner.

        A run that already executes here, or has ended, is not changed. Later progress is read from the store: see
        `events` and `get_run`. Cancelling this call does not affect the run.

        Raises RunNotFound, RunOwned if another live process executes the run, RunNotResumable if the run is cancelled,
        BackendMissing, and PolicyMissing if the run needs a `policy` (see `ParallelRunner.resume`).
        """
        await self._resume(run_id, ResumeOptions(retry_failed=False, policy=policy))

    async def resume_run(
        self,
        run_id: str,
        answers: Mapping[str, JsonInput] | None = None,
        *,
        retry_failed: bool = False,
        policy: Policy | None = None,
    ) -> None:
        """Continue a stopped run, as `start_run` does. The options are those of `ParallelRunner.resume`.

        If the run already executes here, each answer is passed to its task, as by `answer_question`. Raises
        AnswerConflict if an answer comes too late, PlaitError if an answer does not fit its question.
        """
        await self._resume(run_id, ResumeOptions(retry_failed, answers, policy))

    async def answer_question(
        self, run_id: str, task_id: str, value: JsonInput, *, attempt: int | None = None, wait: float = 10.0
    ) -> bool:
        """Answer the question of a task, whichever process executes the run. See `ParallelRunner.answer_question`."""
        taken = await self._runner.answer_question(run_id, task_id, value, attempt=attempt, wait=wait)
        if taken and (waiting := self._waiting.get(run_id)) is not None:
            await self._continue(run_id, waiting)
        return taken

    async def cancel_run(self, run_id: str, *, wait: float = 0.0) -> RunStatus:
        """Cancel the run permanently, whichever process executes it, and return its status. See
        `ParallelRunner.cancel_run`.
        """
        return await self._runner.cancel_run(run_id, wait=wait)

    async def get_run(self, run_id: str, *, tasks: bool = True) -> RunDetail:
        """Return the stored state of the run, with its tasks unless `tasks` is False. Raises RunNotFound."""
        return await look_up(self._store, run_id, self._clock.wall(), tasks)

    @property
    def driven(self) -> tuple[str, ...]:
        """The ids of the runs executing here now."""
        return tuple(self._driven)

    async def list_runs(
        self,
        limit: int = 50,
        *,
        offset: int = 0,
        statuses: Collection[RunStatus] = (),
        name: str | None = None,
        search: str = "",
    ) -> tuple[RunView, ...]:
        """Return the most recently created runs, newest first, without their tasks: at most `limit`, after the first
        `offset`. With `statuses` only runs in one of them, with `name` only runs of exactly this name, with `search`
        only runs with this text in their id or name, in any case.
        """
        return await find_runs(self._store, RunFilter(limit, offset, statuses, name, search))

    async def get_task(self, run_id: str, task_id: str) -> TaskDetail:
        """Return a task with its conversation and attempts. Raises RunNotFound, TaskNotFound."""
        return await task_detail(self._store, run_id, task_id, self._clock.wall())

    async def list_questions(self) -> list[QuestionView]:
        """Return the tasks of all runs that wait for a person."""
        return await list_questions(self._store)

    async def preview_resume(self, run_id: str, *, retry_failed: bool = False) -> Preview:
        """Return the action of `resume_run` for each task. See `ParallelRunner.preview_resume`."""
        async with self._runners.inspect(run_id) as runner:
            return await runner.preview_resume(run_id, retry_failed=retry_failed)

    async def settle_task(self, run_id: str, task_id: str, how: How, text: str = "") -> None:
        """Settle a task that waits for a person. See `ParallelRunner.answer`."""
        async with self._runners.inspect(run_id) as runner:
            await runner.answer(run_id, task_id, how, text)

    async def continue_task(self, run_id: str, task_id: str, message: str) -> Reply:
        """Send one more message in the conversation of a task. See `ParallelRunner.continue_task`."""
        async with self._runners.open(run_id, task_id=task_id) as runner:
            return await runner.continue_task(run_id, task_id, message)

    async def graph(self, run_id: str) -> dict[str, Any]:
        """Return the picture of the run's graph: see `drawing.coordinates`. Raises RunNotFound."""
        run = await stored_run(self._store, run_id)
        return await anyio.to_thread.run_sync(coordinates, run.state.dag)

    def view(self, run_id: str, task_id: str | None = None) -> LiveView:
        """Return the view of a run, with one task in full if `task_id` is given, to be read again and again."""
        return LiveView(self._store, self._clock, run_id, task_id)

    def events(self, run_id: str, after: int = 0) -> AsyncGenerator[EventView]:
        """Return an iterator over the run's stored events numbered above `after`, oldest first, from any process.

        Iteration waits while the run is queued, waiting, interrupted or running, and ends after the event that ends the
        run (run_completed, run_failed, run_cancelled); only session events of a conversation continued later may
        follow. The first step of the iteration raises RunNotFound if the run does not exist. A reader may stop or be
        cancelled at any time and continue with the number of the last event read.
        """
        return history(self._store, run_id, after, self._clock, self._poll)

    async def texts(self, run_id: str) -> AsyncGenerator[TextPiece]:
        """Yield the texts of answers while they are written, of attempts that execute here. The texts are not stored.

        The first pieces are the texts up to now. Iteration never ends by itself: a run may continue here later.
        """
        while True:
            if (driven := self._driven.get(run_id)) is not None:
                async with aclosing(driven.text.pieces()) as pieces:
                    async for piece in pieces:
                        yield piece
            await self._clock.sleep(self._poll)

    async def _resume(self, run_id: str, how: ResumeOptions) -> None:
        self._inside(run_id)
        answers = how.answers
        while driven := self._driven.get(run_id):
            await driven.began.wait()
            if driven.error is not None or await self._is_left(run_id):
                # The run will make no further progress here, and `driven.error` belongs to the caller that began the
                # run. A new start is possible only after `gone`.
                await driven.gone.wait()
            elif not answers:
                return
            else:
                for task_id, value in answers.items():
                    await self.answer_question(run_id, task_id, value)
                answers = None
        group = self._inside(run_id)
        if (waiting := self._waiting.pop(run_id, None)) is not None:
            waiting.watching.cancel()
        driven = self._driven[run_id] = _Driven()
        group.start_soon(self._see_through, run_id, replace(how, answers=answers), driven)
        await driven.begin()

    def _inside(self, run_id: str) -> anyio.abc.TaskGroup:
        if self._group is None or self._left:
            raise PlaitError(f"run {run_id} cannot be started: a RunService starts runs only inside its `async with`")
        return self._group

    async def _is_left(self, run_id: str) -> bool:
        """Return whether the store records no owner. The store may release a run before this service removes it."""
        record = await self._store.get_run(run_id)
        return record is None or record.owner is None

    async def _see_through(self, run_id: str, how: ResumeOptions, driven: _Driven) -> None:
        status: RunStatus | None = None
        driven.error = PlaitError(f"run {run_id} was not started: the RunService was left first")
        try:
            with driven.opening:
                async with self._runners.open(run_id, retry_failed=how.retry_failed) as runner:
                    status = await _execute(driven, runner, run_id, how)
        except Exception as error:
            # An error of one run must not end the others. Before the run began, its caller receives the error.
            if driven.began.is_set():
                logger(run=run_id).error("run_left", error=f"{type(error).__name__}: {error}")
            driven.error = error
        finally:
            del self._driven[run_id]
            driven.text.close()
            driven.began.set()
            driven.gone.set()
        if status is RunStatus.WAITING_INPUT and self._group is not None and not self._left:
            waiting = self._waiting[run_id] = _Waiting(how.policy)
            self._group.start_soon(self._watch, run_id, waiting)

    async def _watch(self, run_id: str, waiting: _Waiting) -> None:
        """Continue the run once a person has answered, unless another process does."""
        answered = False
        with waiting.watching:
            try:
                answered = await wait_for_answer(self._store, run_id, self._clock, max(self._poll, LOOK_EVERY_S))
            except PlaitError as error:
                logger(run=run_id).error("run_left", error=f"{type(error).__name__}: {error}")
        if self._waiting.get(run_id) is waiting:
            if answered:
                await self._continue(run_id, waiting)
            else:
                del self._waiting[run_id]

    async def _continue(self, run_id: str, waiting: _Waiting) -> None:
        """Continue a run that waited. An error is logged: the answer is stored, and `resume_run` continues the run."""
        try:
            await self._resume(run_id, ResumeOptions(policy=waiting.policy))
        except RunOwned:
            pass  # another process continues the run
        except PlaitError as error:
            logger(run=run_id).error("run_left", error=f"{type(error).__name__}: {error}")


async def _execute(driven: _Driven, runner: ParallelRunner, run_id: str, how: ResumeOptions) -> RunStatus:
    """Execute the run to its end, and return its status. Raises as `Run.result`."""
    driven.run = runner.start_resume(run_id, retry_failed=how.retry_failed, answers=how.answers, policy=how.policy)
    driven.error = None
    async with driven.run as run:
        async for event in run.events():
            driven.text.take(event)
            if isinstance(event, events.RunStarted | events.RunResumed | events.RunEnded):
                driven.began.set()
    return (await run.result()).status


class _OneRunner:
    """The runner of the service, for every run."""

    def __init__(self, runner: ParallelRunner) -> None:
        self._runner = runner

    def open(self, run_id: str, **_how: Any) -> AbstractAsyncContextManager[ParallelRunner]:  # noqa: ARG002
        return nullcontext(self._runner)

    def inspect(self, run_id: str) -> AbstractAsyncContextManager[ParallelRunner]:  # noqa: ARG002
        return nullcontext(self._runner)
