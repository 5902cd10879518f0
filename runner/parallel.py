"""`ParallelRunner`: run a DAG, resume a run, go on with a task's conversation."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

from backends.function import as_backend
from backends.protocol import Backend, Reply
from persistence.changes import RunClaimed
from persistence.protocol import Store
from runner import events
from runner.answering import Settlement, settle
from runner.cancellation import cancel, finish_cancelling
from runner.clock import Clock, iso, new_run_id
from runner.continuing import say
from runner.dag import DAG, nearest
from runner.drive import Config, Prepared, backend_names, drive
from runner.feed import Feed
from runner.inbox import is_to_be_cancelled
from runner.owner import LEASE_SECONDS, claim_for_this_process
from runner.ownership import ended_result, needs_no_work, stored_run, take_over, wait_until_free
from runner.patient import PatientStore
from runner.preview import Preview, preview
from runner.queued import create
from runner.result import RunResult
from runner.run import Control, Run
from runner.state import RunState
from runner.status import RunStatus
from runner.task import JsonValue

DEFAULT_BACKEND = "default"
CANCEL_GRACE_SECONDS = 5.0
RESERVED_RUN_IDS = frozenset({"last"})
"""Words that stand for a run where one is named."""
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")

_Drive: TypeAlias = Callable[[Feed, Control], Awaitable[RunResult]]


class ParallelRunner:
    """Runs DAGs: every task as soon as what it depends on is done and a place is free.

    `backend` is the default one, `backends` further ones by name; an `async def f(prompt) -> str` counts as a backend.
    `default` names the default one among these; if there is only one, it is that. `concurrency` is how many tasks run
    at once in all, `limits` how many on one backend. `store` may be None: then nothing is written down and nothing can
    be resumed. A store that fails never ends a run, unless `strict`; one call to it may take `store_timeout` seconds.
    `lease` is for how many seconds a claim on a run holds without renewal, the same for all who share a store; an owner
    that cannot be seen from here is given that long to show that it lives. `cancel_grace` is for how many seconds what
    is under way may go on to its end once another process has cancelled the run; 0 ends it at once.
    `clock` and `rng` are where time and chance come from. One runner may run several DAGs at the same time, each with
    its own limits.
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
        strict: bool = False,
        store_timeout: float = 10.0,
        lease: float = LEASE_SECONDS,
        cancel_grace: float = CANCEL_GRACE_SECONDS,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        for name, limit in (limits or {}).items():
            if limit < 1:
                raise ValueError(f"the limit of backend {name!r} must be at least 1, not {limit}")
        for option, seconds in (("store_timeout", store_timeout), ("lease", lease)):
            if not seconds > 0:
                raise ValueError(f"{option} must be more than 0 seconds, not {seconds}")
        if not 0 <= cancel_grace < float("inf"):
            raise ValueError(f"cancel_grace must be 0 seconds or more, not {cancel_grace}")
        named = {name: as_backend(one) for name, one in (backends or {}).items()}
        if backend is not None:
            named[DEFAULT_BACKEND] = as_backend(backend)
        for option, names in (("limits", limits or {}), ("default", [] if default is None else [default])):
            for name in names:
                if name not in named:
                    raise ValueError(
                        f"{option} names {name!r}, which is no backend of this runner{nearest(name, named)}"
                    )
        if default is None:
            default = next(iter(named)) if backend is None and len(named) == 1 else DEFAULT_BACKEND
        self._config = Config(
            named,
            default,
            None if store is None else PatientStore(store, store_timeout),
            concurrency,
            dict(limits or {}),
            strict,
            lease,
            cancel_grace,
            clock or Clock(),
            rng or random.Random(),  # noqa: S311 - jitter and readable ids, no secrets
        )

    async def run(
        self, dag: DAG, run_id: str | None = None, *, settings: Mapping[str, JsonValue] | None = None
    ) -> RunResult:
        """Run `dag` to its end.

        A given `run_id` is kept, else a sortable unique one is made. `settings` is kept with the run in the store.
        A failing task never raises: see `RunResult.status`. Raises BackendMissing before anything starts, RunExists
        when the store has a run of that id, OwnershipLost when another process took the run over, and with `strict`
        StoreError. Cancellation ends all attempts, writes down where the run stands, and leaves it to `resume`.
        """
        return await self._new(dag, run_id, settings)[1](Feed(), Control())

    def start(self, dag: DAG, run_id: str | None = None, *, settings: Mapping[str, JsonValue] | None = None) -> Run:
        """Like `run`, beside the caller: `async with runner.start(dag) as run:`. See `Run`."""
        return Run(*self._new(dag, run_id, settings))

    async def create_run(
        self,
        dag: DAG,
        run_id: str | None = None,
        *,
        key: str | None = None,
        settings: Mapping[str, JsonValue] | None = None,
    ) -> str:
        """Store a run of `dag` as queued, for `resume` to begin here or in another process; its id.

        With a `key` (1 to 200 characters, and no `run_id`) there is one run for it: whoever comes again with the key,
        at the same time or after a crash, gets the id of that run, in whatever state it is, and nothing is stored. One
        that comes with another DAG or other settings is refused: KeyConflict. Raises StoreRequired, BackendMissing,
        RunExists for a `run_id` that is taken, and StoreError; then it is not known whether the run was stored.
        """
        if key is not None and run_id is not None:
            raise ValueError("give a run id or a key, not both: the id of a run with a key is made from the key")
        return await create(self._config, dag, _checked(run_id), key, settings or {})

    @property
    def config(self) -> Config:
        """What this runner was made with."""
        return self._config

    async def resume(self, run_id: str, *, retry_failed: bool = False) -> RunResult:
        """Go on with a stored run: what is completed is kept, what was under way or never began is run.

        Needs nothing but the store and the backends. A task that was under way when its process died goes on with its
        conversation where its backend had confirmed one, and starts over otherwise, or waits for a person if it is
        `at_most_once`; `preview_resume` tells beforehand. Failed tasks stay failed, unless `retry_failed`, which also
        runs completed ones again whose stored result is damaged. A run that is complete, or has failed with nothing
        left to run, comes back as it is; one that was being cancelled is cancelled, and nothing of it is run.

        An owner that is provably dead is succeeded at once; one that cannot be judged from here is watched for one
        `lease` first. Raises StoreRequired, RunNotFound, RunOwned while another live process runs it, RunNotResumable
        for a cancelled run, BackendMissing, and StoreError when the store cannot be read or claimed; else as `run`.
        """
        return await self._resume(run_id, retry_failed)(Feed(), Control())

    def start_resume(self, run_id: str, *, retry_failed: bool = False) -> Run:
        """Like `resume`, beside the caller: see `start`."""
        return Run(run_id, self._resume(run_id, retry_failed))

    async def preview_resume(self, run_id: str, *, retry_failed: bool = False) -> Preview:
        """What `resume` would do now with each task, and why. Changes nothing and claims nothing.

        Raises StoreRequired, RunNotFound, RunOwned while another live process runs it, RunNotResumable for a cancelled
        run, StoreError.
        """
        return await preview(self._config, await stored_run(self._config, run_id), retry_failed)

    async def answer(self, run_id: str, task_id: str, how: Literal["done", "again", "fail"], text: str = "") -> None:
        """Settle a task that waits for a person; `resume` then goes on with the run.

        `done`: it took effect, and `text` is its result, JSON where the task has an output_schema. `again`: it is run
        again. `fail`: it failed, `text` saying why. Raises RunNotFound, RunOwned while a live process runs the run,
        PlaitError for an unknown task, one that waits for nobody or a text that does not fit, StoreError.
        """
        await settle(self._config, await stored_run(self._config, run_id), task_id, Settlement(how, text))

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

        The task's result stays as it is. Raises RunNotFound, RunOwned while a live process runs the run, PlaitError for
        an unknown task or one without a conversation, BackendError when the backend fails, and TurnNotStored (with the
        reply) when the answer came but could not be stored.
        """
        run = await stored_run(self._config, run_id)
        return await say(self._config, run, task_id, message)

    def _new(self, dag: DAG, run_id: str | None, settings: Mapping[str, JsonValue] | None) -> tuple[str, _Drive]:
        config = self._config
        names = backend_names(dag, config)
        run_id = _checked(run_id) or new_run_id(config.clock, config.rng)

        async def drive_new(feed: Feed, control: Control) -> RunResult:
            at = iso(config.clock.wall())
            created = events.RunCreated(at, run_id, dag, {**(settings or {}), "concurrency": config.concurrency})
            owner = claim_for_this_process(config.rng, at)
            claim = RunClaimed(at, owner, config.clock.wall() + config.lease)
            first = (created, events.RunStarted(at, run_id))
            return await drive(Prepared(run_id, RunState(dag), names, owner, first, (claim,)), config, feed, control)

        return run_id, drive_new

    def _resume(self, run_id: str, retry_failed: bool) -> _Drive:
        config = self._config

        async def drive_stored(feed: Feed, control: Control) -> RunResult:
            run = await stored_run(config, run_id)
            if needs_no_work(run, retry_failed):
                return ended_result(run)
            if not await wait_until_free(config, run, feed, control):
                return RunResult(run_id, RunStatus.INTERRUPTED, run.state.all_results())
            if await is_to_be_cancelled(run.store, run.record):
                return await finish_cancelling(config, run, feed)
            return await drive(await take_over(config, run, retry_failed), config, feed, control)

        return drive_stored


def _checked(run_id: str | None) -> str | None:
    if run_id is not None and (not _RUN_ID.fullmatch(run_id) or run_id in RESERVED_RUN_IDS):
        raise ValueError(
            f"run id {run_id[:80]!r} must be 1 to 128 of letters, digits, '.', '_', '-', not starting with '.', "
            f"and not 'last'"
        )
    return run_id
