"""`RunService`: runs made, started, watched and cancelled by a process that serves many of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import anyio
import anyio.abc

from plait.backends.protocol import JsonInput
from plait.persistence.protocol import Store
from plait.runner.domain import events
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.domain.status import RunStatus
from plait.runner.errors import PlaitError, StoreRequired
from plait.runner.log import logger
from plait.runner.operations.inspect import RunInfo, StoredEvent, history, look_up, run_info
from plait.runner.parallel import ParallelRunner
from plait.runner.recovery.resume import Resumption
from plait.runner.run import Run

POLL_SECONDS = 0.2


@dataclass(slots=True)
class _Driven:
    """A run that this service drives. `began` is set once it is ours, or once it is known that it will not be, `gone`
    once the service drives it no more.
    """

    run: Run
    began: anyio.Event = field(default_factory=anyio.Event)
    gone: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None

    async def begin(self) -> None:
        """Wait until it began. Raises what kept it from that."""
        await self.began.wait()
        if self.error is not None:
            raise self.error


class RunService:
    """The life of runs, in one process that serves many: `async with RunService(runner) as service:`.

    The store is what counts, not this object: every answer is read from it, so runs of other processes are listed,
    followed and cancelled just the same, and `start_run` and `resume_run` take over what a dead process left. What a
    caller may have to repeat can be repeated. Leaving the block stops the runs that go on here, so that `resume_run`
    goes on with them, and waits until that is written down. `events` looks into the store every `poll` seconds.

    Raises StoreRequired for a `runner` without a store. All methods belong to the event loop's thread; all but reads
    raise PlaitError outside the block. Any of them may raise StoreError.
    """

    def __init__(self, runner: ParallelRunner, *, poll: float = POLL_SECONDS) -> None:
        if runner.config.store is None:
            raise StoreRequired("a RunService reads and writes runs; give its runner a store with store=...")
        if not poll > 0:
            raise ValueError(f"poll must be more than 0 seconds, not {poll}")
        self._runner = runner
        self._store: Store = runner.config.store
        self._clock = runner.config.clock
        self._poll = poll
        self._driven: dict[str, _Driven] = {}
        self._group: anyio.abc.TaskGroup | None = None
        self._left = False

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError("a RunService can be entered only once; make another one")
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        self._left = True
        for driven in self._driven.values():
            driven.run.stop()
        if isinstance(error, Exception):
            # The block's own error goes on as it is, not inside a group.
            await self._group.__aexit__(None, None, None)
            return None
        return await self._group.__aexit__(kind, error, trace)

    async def create_run(
        self,
        dag: DAG,
        *,
        key: str | None = None,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> str:
        """Store a run of `dag` as queued; its id. See `ParallelRunner.create_run`."""
        return await self._runner.create_run(dag, key=key, settings=settings, policy=policy)

    async def start_run(self, run_id: str, *, policy: Policy | None = None) -> None:
        """Begin the run here, or go on with it, and return once it is this process's, durably.

        Changes nothing when it goes on here already or has come to its end. Raises RunNotFound, RunOwned while another
        live process runs it, RunNotResumable for a cancelled run, BackendMissing, and PolicyMissing where `policy`, as
        in `ParallelRunner.resume`, is needed. Cancelling this call leaves the run going. What becomes of the run
        afterwards is in the store: see `events` and `get_run`.
        """
        await self._go_on(run_id, Resumption(policy=policy))

    async def resume_run(
        self,
        run_id: str,
        answers: Mapping[str, JsonInput] | None = None,
        *,
        retry_failed: bool = False,
        policy: Policy | None = None,
    ) -> None:
        """As `start_run`, for a run that stopped; `answers`, `retry_failed` and `policy` as in `ParallelRunner.resume`.

        Where the run goes on here already, its tasks get the answers one by one, as from `answer_question`. Raises
        AnswerConflict for an answer that comes too late, PlaitError for one that does not fit.
        """
        await self._go_on(run_id, Resumption(retry_failed, answers, policy))

    async def answer_question(
        self, run_id: str, task_id: str, value: JsonInput, *, attempt: int | None = None, wait: float = 10.0
    ) -> bool:
        """Answer what a task asks, whoever runs the run. See `ParallelRunner.answer_question`."""
        return await self._runner.answer_question(run_id, task_id, value, attempt=attempt, wait=wait)

    async def cancel_run(self, run_id: str, *, wait: float = 0.0) -> RunStatus:
        """Cancel the run for good, wherever it runs; the status that it then has. See `ParallelRunner.cancel_run`."""
        return await self._runner.cancel_run(run_id, wait=wait)

    async def get_run(self, run_id: str, *, tasks: bool = True) -> RunInfo:
        """The run as it is stored now, and its tasks unless they are not wanted. Raises RunNotFound."""
        return await look_up(self._store, run_id, self._clock.wall(), tasks)

    @property
    def driven(self) -> tuple[str, ...]:
        """The ids of the runs that go on here at this moment."""
        return tuple(self._driven)

    async def list_runs(self, limit: int = 50) -> tuple[RunInfo, ...]:
        """The last created runs, newest first, without their tasks."""
        now = self._clock.wall()
        return tuple(run_info(record, now) for record in await self._store.list_runs(limit))

    def events(self, run_id: str, after: int = 0) -> AsyncGenerator[StoredEvent]:
        """The run's stored events with a number above `after`, oldest first, whichever process makes them.

        Goes on while the run has not ended; the event that ends it (run_completed, run_failed, run_cancelled) is the
        last, but for the sessions of whoever goes on with a conversation later. A run that is waiting, interrupted or
        queued is waited for. The first step of reading raises RunNotFound. It may be given up or cancelled at any time,
        and gone on with from the number of the last event seen.
        """
        return history(self._store, run_id, after, self._clock, self._poll)

    async def _go_on(self, run_id: str, how: Resumption) -> None:
        self._inside(run_id)
        answers = how.answers
        while driven := self._driven.get(run_id):
            await driven.began.wait()
            if driven.error is not None or await self._is_left(run_id):
                # Nothing more will come of it here, and an error is that of whoever began it: only after it can the
                # run go on.
                await driven.gone.wait()
            elif not answers:
                return
            else:
                for task_id, value in answers.items():
                    await self.answer_question(run_id, task_id, value)
                answers = None
        group = self._inside(run_id)
        run = self._runner.start_resume(run_id, retry_failed=how.retry_failed, answers=answers, policy=how.policy)
        driven = self._driven[run_id] = _Driven(run)
        group.start_soon(self._see_through, driven)
        await driven.begin()

    def _inside(self, run_id: str) -> anyio.abc.TaskGroup:
        if self._group is None or self._left:
            raise PlaitError(f"run {run_id} cannot be started: a RunService starts runs inside its `async with` alone")
        return self._group

    async def _is_left(self, run_id: str) -> bool:
        """Whether the run is nobody's in the store, where it stopped being this service's before it is so here."""
        record = await self._store.get_run(run_id)
        return record is None or record.owner is None

    async def _see_through(self, driven: _Driven) -> None:
        run_id = driven.run.run_id
        try:
            async with driven.run as run:
                async for event in run.events():
                    if isinstance(event, events.RunStarted | events.RunResumed | events.RunEnded):
                        driven.began.set()
            await run.result()
        except Exception as error:
            # One run's error must not end the others. Before it began it is its caller's.
            if driven.began.is_set():
                logger(run=run_id).error("run_left", error=f"{type(error).__name__}: {error}")
            driven.error = error
        finally:
            del self._driven[run_id]
            driven.began.set()
            driven.gone.set()
