"""`Runs`: everything that one can do to the runs of a store, for the command, HTTP, MCP and programs alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    get_args,
    runtime_checkable,
)

import anyio
import anyio.abc
import anyio.to_thread

from plait import events
from plait.backends.backend_protocol import Reply
from plait.clock_and_ids import iso, parse_time
from plait.errors import (
    Conflict,
    Fenced,
    InvalidRequest,
    PlaitError,
    RunNotFound,
    RunNotResumable,
    RunOwned,
    StoreError,
    StoreRequired,
    nearest,
)
from plait.json_form import JsonInput, value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import Batch, Purged, RunRecord
from plait.program_log import logger
from plait.runner.client.answer_task import (
    How,
    answer_question,
    apply_decision,
)
from plait.runner.client.continue_task import continue_task
from plait.runner.client.create_run import Fork, create_run, new_run, plan_fork, with_policy
from plait.runner.domain import policy as policies
from plait.runner.domain.dag import DAG, as_dag
from plait.runner.domain.policy import Policy
from plait.runner.domain.run_tuning import checked_change, retry_note, tune_note, why_not_again
from plait.runner.domain.wait_reasons import stored_limits
from plait.runner.engine.inbox import LOOK_EVERY_S, wake
from plait.runner.engine.lease import (
    Liveness,
    due_at,
    is_live,
    liveness,
    owner_is_gone,
    seems_free,
    shown_status,
    wait_for_expiry,
)
from plait.runner.engine.live_run import Feed, LiveText, Run, TextPiece
from plait.runner.engine.run_options import RunOptions, unbounded
from plait.runner.recovery.resume import OnUnreached, continued_run, end_run_on_hosts, finish_cancelling
from plait.runner.recovery.resume_plan import ResumeAction, ResumeOptions
from plait.runner.reuse.earlier_answers import ReuseFrom, is_try, require_tasks
from plait.runner.state.attempt_files import delete_files, has_sessions, kill_orphans
from plait.runner.state.stored_run import (
    MOST_RUNS_SEARCHED,
    PARK,
    POSTED,
    StoredPolicy,
    StoredRun,
    asks_for_cancel,
    cancel_note,
    listed_tasks,
    pages_of_tasks,
    read_settings,
    rows_file_of,
    stored_record,
    stored_run,
)
from plait.safe_text import is_utf8
from plait.statuses import RESUMABLE, RUN_DONE, RunStatus, TaskStatus
from plait.task import Task

if TYPE_CHECKING:
    from plait.runner.client.reuse_preview import ReusePreview
    from plait.runner.client.run_estimate import RunEstimate
    from plait.runner.policies.step_workflow import WorkflowProgress
    from plait.runner.views.live_view import LiveView
    from plait.runner.views.view_models import EventView, Preview, QuestionView, RunDetail, RunView, TaskDetail

# What shows a run (views, pictures, previews, estimates) takes as long to load as what runs it. Each is loaded by the
# method that shows: a run and a resume begin that much sooner.

_P = ParamSpec("_P")
_T = TypeVar("_T")
POLL_SECONDS = 0.2
MOST_WOKEN = 8
"""The runs that `Runs.wake` lets go on at once."""
WAKE_EVERY_S = 10.0
"""Seconds between two looks of `keep_waking` for runs that are due."""
_AGAIN_S = 60.0
"""Seconds before a run that could not be woken is tried again."""
AS_STORED = ResumeOptions()
_LOOK_AGAIN_S = 0.2


class Need(Enum):
    """What the backends of a stored run are needed for."""

    RESUME = auto()
    """To run the tasks that are left."""
    RETRY = auto()
    """To run the tasks that are left, and those that failed."""
    INSPECT = auto()
    """To ask whether agents still work. Starts no backend."""
    CANCEL = auto()
    """To end what is under way on other hosts."""
    CONTINUE = auto()
    """To continue the conversation of one task."""


BackendSource: TypeAlias = Callable[[StoredRun, Need, str | None], AbstractAsyncContextManager[RunOptions]]
"""Opens the backends of a stored run, and returns them with the options of the run. It is called with the run, what the
backends are needed for, and the task to be continued. Raises PlaitError.
"""


@dataclass(slots=True)
class _Driven:
    """A run executed here in the background."""

    run: Run | None = None
    """The run; None while its backends are opened."""
    opening: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    began: anyio.Event = field(default_factory=anyio.Event)
    """Set once this process owns the run, or once acquiring the run has failed."""
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


def _with_open_store(
    method: Callable[Concatenate[Runs, _P], Awaitable[_T]],
) -> Callable[Concatenate[Runs, _P], Awaitable[_T]]:
    """Keep the store of the object open during each call of `method`."""

    @wraps(method)
    async def call(self: Runs, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        async with self.options.own_store.opened():
            return await method(self, *args, **kwargs)

    return call


class Runs:
    """The runs of a store, as `ParallelRunner(...).runs`.

    All answers are read from the store, so runs of other processes are listed, followed and cancelled in the same way,
    and `start` takes over runs of dead processes. Calls that a client may have to repeat are idempotent.

    `async with runner.runs as runs:` manages many runs in one process: `start` executes runs in the background, and a
    run that waits for a person continues here once the answer is stored, or at the deadline of its question. An exit
    from the block stops the runs executing here and waits until their state is stored; `start` continues them later.

    `source` opens the backends of stored runs; without it, those in `options` serve every run. All methods must be
    called from the event loop's thread. Every method may raise StoreError, and StoreRequired without a store.
    """

    def __init__(self, options: RunOptions, source: BackendSource | None = None) -> None:
        self.options = options
        """The options of new runs."""
        self.poll = POLL_SECONDS
        """The interval in seconds at which `events` reads the store."""
        self._source = source
        self._driven: dict[str, _Driven] = {}
        self._one_gone = anyio.Event()
        """Set, and replaced, when a run is no longer executed here."""
        self._waiting: dict[str, Policy | None] = {}
        """The runs that were executed here and wait for a person, each with its policy."""
        self._watching: anyio.CancelScope | None = None
        """The scope of `_watch` while runs wait."""
        self._parks: dict[tuple[str, int], bool] = {}
        """Whether a run parks, by its id and epoch: its settings are read once."""
        self._woken: set[str] = set()
        self._not_woken: dict[str, float] = {}
        """The runs that could not be woken, with the monotonic time of the next try."""
        self._group: anyio.abc.TaskGroup | None = None
        self._left = False
        self._block = AsyncExitStack()

    @property
    def _store(self) -> Store:
        if self.options.store is None:
            raise StoreRequired("runs are read from a store and written to it; give the runner one with store=...")
        return self.options.store

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError("the runs of a runner can be entered only once; create another ParallelRunner")
        assert self._store is not None
        await self._block.enter_async_context(self.options.own_store.opened())
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        self._left = True
        for driven in self._driven.values():
            driven.stop()
        if self._watching is not None:
            self._watching.cancel()
        async with self._block:
            if isinstance(error, Exception):
                # The error of the block is raised unchanged, not inside a group.
                await self._group.__aexit__(None, None, None)
                return None
            return await self._group.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def open(self, run: StoredRun, how: ResumeOptions = AS_STORED) -> AsyncGenerator[tuple[Run, RunOptions]]:
        """Open the backends of a run that has been read. Yield the run, to be continued in its own `async with`, and
        the options with its backends. Raises PlaitError.
        """
        need = Need.CANCEL if run.to_be_cancelled else Need.RETRY if how.retry_failed else Need.RESUME
        async with self._backends_of(run, need) as options:
            yield continued_run(options, run.record.run_id, how, run), options

    async def start(
        self,
        run_id: str,
        answers: Mapping[str, JsonInput] | None = None,
        *,
        retry_failed: bool = False,
        policy: Policy | None = None,
    ) -> None:
        """Begin or continue the run in the background, inside `async with runner.runs`. Return once the store records
        this process as the owner.

        The options are those of `ParallelRunner.resume`. A run that already executes here, or has ended, is not
        changed; each answer is passed to its task. Cancelling this call does not affect the run.

        Raises RunNotFound, RunOwned if another live process executes the run, RunNotResumable if the run is cancelled,
        BackendMissing, PolicyMissing if the run needs a `policy`, AnswerConflict if an answer comes too late,
        PlaitError if an answer does not fit its question, or outside of the block.
        """
        await self._start(run_id, ResumeOptions(retry_failed, answers, policy))

    async def create(
        self,
        dag: DAG | Iterable[Task],
        run_id: str | None = None,
        *,
        key: str | None = None,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
    ) -> str:
        """Store a run of `dag` as queued and return its id. `start` or a resume begins it, here or in another process.

        `key` (1 to 200 characters, excludes `run_id`) makes the call idempotent: a repeated call with the same key,
        also in a race or after a crash, returns the id of the existing run. Raises KeyConflict if the existing run has
        another DAG, other settings or another policy. Raises StoreRequired, BackendMissing, DAGError, RunExists if
        `run_id` is taken, and StoreError. After a StoreError the run may or may not be stored.
        """
        return (await self.find_or_create(dag, run_id, key=key, settings=settings, policy=policy))[0]

    @_with_open_store
    async def find_or_create(
        self,
        dag: DAG | Iterable[Task],
        run_id: str | None = None,
        *,
        key: str | None = None,
        settings: Mapping[str, JsonInput] | None = None,
        policy: Policy | None = None,
        budget: float | None = None,
        priority: int | None = None,
    ) -> tuple[str, bool]:
        """Do as `create`. Return the id, and whether this call stored the run: False if the key had a run already, and
        for all but one of several calls with the key at the same time.
        """
        dag = as_dag(dag)
        settings = with_policy(self.options, dag, settings, policy)
        return await create_run(self.options, dag, run_id, key, settings, budget=budget, priority=priority)

    @_with_open_store
    async def preview_like(
        self,
        dag: DAG | Iterable[Task],
        like: str,
        *,
        fresh: Collection[str] = (),
        keep_answers: bool = False,
        policy: Policy | None = None,
        record: RunRecord | None = None,
    ) -> ReusePreview:
        """Return which tasks of a `run` with the same arguments would take an answer over and which would run, each
        with the reason. Call and store nothing. `record` is the record of the earlier run if it has been read already.

        The run does as is said here, unless a task fails. DEPENDS names the tasks that run and whose answers decide.

        Raises StoreRequired, RunNotFound, TaskNotFound for an unknown task in `fresh`, BackendMissing, DAGError for
        files that cannot be used, StoreError.
        """
        from plait.runner.client.reuse_preview import preview_reuse  # noqa: PLC0415 - see above

        dag = as_dag(dag)
        require_tasks(fresh, dag.tasks)
        reuse = ReuseFrom(like, tuple(fresh), keep_answers=keep_answers)
        return await preview_reuse(self.options, dag, reuse, policy, record)

    @_with_open_store
    async def estimate(
        self, dag: DAG | Iterable[Task], *, like: str | None = None, policy: Policy | None = None
    ) -> RunEstimate:
        """Return what a `run` with the same arguments would call and cost: by the calls of the run `like` and of those
        whose answers that run took over, else by an assumption. Call and store nothing.

        Raises RunNotFound, BackendMissing, StoreError.
        """
        from plait.runner.client.run_estimate import estimate_run  # noqa: PLC0415 - see above

        earlier = None if like is None else await self.read(like)
        return await estimate_run(self.options, as_dag(dag), earlier, grows=policy is not None)

    @_with_open_store
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
        stored run does not change.

        The task `start` runs, with its parts if it has `for_each`. Tasks downstream of `start` or of an edit, and tasks
        that did not complete, run unless nothing changed for them. All other tasks keep their results and
        conversations, whatever their backends.

        `prompts` maps ids of tasks to new prompts, `inputs` names of inputs to new values, `results` ids of tasks to
        results that they take in place of a call (JSON for a task with an `output_schema`); the id of a `for_each` task
        stands for its parts. With `only` the task runs alone, on the inputs recorded in the stored run, with another
        `backend` if given.

        Raises StoreRequired, RunNotFound, TaskNotFound, DAGError for an invalid prompt, PlaitError for an edit that
        does not fit the run and, with `only`, if a task that the prompt names has no result, PolicyMissing, StoreError.
        """
        edits = {"prompts": prompts or {}, "results": results or {}}
        return await plan_fork(
            self.options.store, run_id, start, **edits, inputs=inputs or {}, only=only, backend=backend
        )

    @_with_open_store
    async def preview_fork(self, fork: Fork) -> ReusePreview:
        """Return what each task of the fork would do: see `preview_like`."""
        from plait.runner.client.reuse_preview import preview_reuse  # noqa: PLC0415 - see above

        return await preview_reuse(self.options, fork.dag, fork.reuse, fork.policy)

    def start_fork(self, fork: Fork) -> Run:
        """Start the fork in the background: `async with runs.start_fork(fork) as run:`. Raises as `run`."""
        return new_run(self.options, fork.dag, settings=fork.settings, policy=fork.policy, like=fork.reuse)

    @_with_open_store
    async def preview(self, run_id: str, *, retry_failed: bool = False) -> Preview:
        """Return the action of a resume for each task, and the tasks that may be billed twice. Change nothing.

        Raises StoreRequired, RunNotFound, RunOwned if another live process executes the run, RunNotResumable if the run
        is cancelled, StoreError.
        """
        return await self.preview_read(await self.read(run_id), retry_failed=retry_failed)

    async def preview_read(self, run: StoredRun, *, retry_failed: bool) -> Preview:
        """Do as `preview` for a run that has been read."""
        from plait.runner.views.read_views import preview_resume  # noqa: PLC0415 - see above

        async with self._backends_of(run, Need.INSPECT) as options:
            return await preview_resume(options, run, retry_failed)

    @_with_open_store
    async def export(self, run_id: str, tasks: str = "*") -> Sequence[dict[str, Any]]:
        """Return a row for each task whose id matches the pattern `tasks`, as `plait export` writes it, in the order of
        the plan; the parts of a `for_each` stand in the place of their whole. Raises RunNotFound, and InvalidRequest
        for a run that reads its rows as it goes: see `export_pages`.
        """
        from plait.runner.views.result_rows import result_rows  # noqa: PLC0415 - see above

        _, record = await stored_record(self._store, run_id)
        if rows_file_of(record) is not None:
            raise InvalidRequest(
                f"run {run_id} has too many rows to be held at once; write a file with `plait export`, or use "
                "`runs.export_pages`"
            )
        run = await self.get(run_id)
        chosen = [task for task in run.tasks.values() if fnmatchcase(task.task_id, tasks)]
        return await anyio.to_thread.run_sync(result_rows, chosen)

    async def export_pages(self, run_id: str, tasks: str = "*") -> AsyncGenerator[Sequence[dict[str, Any]]]:
        """Yield the rows of `export`, some thousands at a time for a run that reads its rows as it goes: row by row, as
        in its file. Raises RunNotFound.
        """
        from plait.runner.views.read_views import task_view  # noqa: PLC0415 - see above
        from plait.runner.views.result_rows import export_rows  # noqa: PLC0415

        async with self.options.own_store.opened():
            _, record = await stored_record(self._store, run_id)
            if (file := rows_file_of(record)) is None:
                yield await self.export(run_id, tasks)
                return
            async for page in pages_of_tasks(self._store, record, file):
                chosen = [task_view(task) for task in page if fnmatchcase(task.task_id, tasks)]
                yield await anyio.to_thread.run_sync(export_rows, chosen)

    @_with_open_store
    async def delete(
        self, *, keep: int | None = None, older_than: float | None = None, dry_run: bool = False
    ) -> Deletion:
        """Delete ended runs for good, with everything stored of each and all files, and shrink the file of the store.

        A run goes if it is not among the `keep` newest ended ones and ended more than `older_than` seconds ago; without
        both, none goes. A run that has not ended, that a process works on, or whose answers an unfinished run takes
        over, stays. With `dry_run` only say which. Has no time limit. Raises PlaitError for a store that deletes no
        runs, StoreError.
        """
        store, now = unbounded(self._store), self.options.clock.wall()
        if not isinstance(store, PurgingStore):
            raise PlaitError(f"a {type(store).__name__} deletes no runs; use a SQLiteStore or a PostgresStore")
        runs = [await _released(store, run, now, dry_run) for run in await store.list_runs(_ALL)]
        needed = await earlier_runs_needed(store, runs)
        old = [run for run in expired(runs, now, keep, older_than) if run.run_id not in needed]
        sizes = await store.run_sizes()
        deletion = Deletion(old, sizes, len(runs) - len(old))
        if dry_run:
            return deletion
        # Also without expired runs: an earlier purge may have left pages to wipe.
        purged = await store.purge([run.run_id for run in old])
        sessions = await store.session_ids() if has_sessions(store.files_root) else None
        stored = {run.run_id for run in runs}.difference(purged.run_ids)
        files = await delete_files(store.files_root, purged.run_ids, stored, sessions)
        remains = "; ".join(filter(None, (purged.remains, files))) or None
        return replace(deletion, freed_bytes=purged.freed_bytes, remains=remains)

    @_with_open_store
    async def settle(self, run_id: str, task_id: str, how: How, text: str = "") -> None:
        """Settle a task that waits for a person; a following `resume` continues the run.

        `how` is `done` if the task took effect, with `text` as its result (JSON if the task has an `output_schema`);
        `again` to run the task again; `fail` to fail the task, with `text` as the reason.

        Raises ValueError for another `how`, RunNotFound, RunOwned if a live process executes the run, TaskNotFound,
        PlaitError if the task is not waiting or the text does not fit, StoreError.
        """
        if how not in get_args(How):
            raise ValueError(f"how must be 'done', 'again' or 'fail', not {how!r}")
        async with self._backends_of(run_id, Need.INSPECT) as options:
            await apply_decision(options, run_id, task_id, how, text)

    @_with_open_store
    async def cancel(
        self, run_id: str, *, wait: float = 0.0, on_unreached: OnUnreached = lambda _hosts: None
    ) -> RunStatus:
        """Cancel a stored run permanently, whichever process executes it, and return its status.

        An ended run is not changed, and a run without an owner is cancelled at once. Otherwise the owner reads the
        request from the store, within a second (5 seconds if a server's notification is lost), starts no further task,
        asks the running attempts to end (`cancel_requested`), and lets them continue for its own `cancel_grace`
        seconds. This call waits up to `wait` seconds for that and returns `cancelling` if the end is still outstanding.
        If the owner dies first, the next resume or `cancel` completes the cancellation. Repeated calls are harmless.

        An owner with unknown state, such as one on another host, has `wait` seconds to answer, and is then watched for
        one `lease`. `on_unreached` is called with the hosts that cannot be reached, and the ids of the tasks that may
        be under way on each: call again when the hosts are back.

        Raises StoreRequired, RunNotFound, StoreError. Cancelling this call does not withdraw the request.
        """
        async with self._backends_of(run_id, Need.CANCEL) as options:
            return await _cancel_run(options, run_id, wait, on_unreached)

    @_with_open_store
    async def pause(self, run_id: str, *, backend: str | None = None, off: bool = False) -> bool:
        """Pause a run, or one `backend` of it, from any process: no further task starts, and calls under way end
        normally. With `off` let it go on.

        The owner reads the request within a second (5 seconds if a server's notification is lost). The pause holds for
        later owners, too: after a crash or a resume the run is still paused. An answer that is still to be checked by a
        judge waits for the end of the pause. Returns whether a process works on the run now.

        Raises RunNotResumable for a run that has ended, InvalidRequest for an unknown backend, StoreRequired,
        RunNotFound, StoreError.
        """
        return await self._tune(run_id, [events.RunTuned(self._now(), backend, paused=not off)])

    @_with_open_store
    async def tune(
        self, run_id: str, *, concurrency: int | None = None, limits: Mapping[str, int] | None = None
    ) -> bool:
        """Change how many tasks of a run are under way at once: in all, and per backend by its name. Calls under way
        end normally.

        The numbers reach the owner, and hold for later owners, as a pause does. They count for this run alone: where
        runs share their slots (`shared_limits`, `plait serve`), a number above theirs gives no more slots. Returns
        whether a process works on the run now. Raises as `pause`, and InvalidRequest without a number or for a wrong
        one.
        """
        numbers: dict[str | None, int] = {} if concurrency is None else {None: concurrency}
        numbers.update((limits or {}).items())
        if not numbers:
            raise InvalidRequest("say how many tasks run at once, of the run (-j N) or on a backend (--backend NAME=N)")
        return await self._tune(
            run_id, [events.RunTuned(self._now(), name, slots=slots) for name, slots in numbers.items()]
        )

    @_with_open_store
    async def retry(self, run_id: str, task_id: str) -> None:
        """Run a failed task again while its run goes on, or at once one that waits for its next attempt.

        The owner reads the request within a second, and ignores it if the task has begun again meanwhile. Earlier
        failures count no more for the task's `retry`, and tasks that wait for the task continue after it.

        Raises InvalidRequest for a task that cannot run again now, such as one without which others went on, and if no
        process works on the run: a resume with `retry_failed` runs all failed tasks of a run again. Raises
        StoreRequired, RunNotFound, TaskNotFound, StoreError.
        """
        run = await self.read(run_id)
        run.require_task(task_id)
        position = run.state.dag.position(task_id)
        if (why := _why_not_again_now(run, position)) is not None:
            raise InvalidRequest(f"task {task_id!r} of run {run_id} cannot run again now: {why}")
        await run.store.send(run_id, retry_note(task_id, run.state.attempts[position], self._now()))
        wake(run.record.owner)

    def _now(self) -> str:
        return iso(self.options.clock.wall())

    async def _tune(self, run_id: str, changes: Sequence[events.RunTuned]) -> bool:
        """Send a note for each of `changes`. Return whether a process works on the run, which reads them."""
        store, record = await stored_record(self.options.store, run_id)
        if (status := RunStatus(record.status)) in RUN_DONE or status is RunStatus.CANCELLING:
            raise RunNotResumable(
                f"run {run_id} is {status.value}; only a run that has not ended can be paused or tuned"
            )
        for change in changes:
            if (name := checked_change(change).backend) is not None:
                await _require_backend(store, record, name)
        for change in changes:
            await store.send(run_id, tune_note(change))
        wake(record.owner)
        return not owner_is_gone(record)

    @_with_open_store
    async def continue_task(self, run_id: str, task_id: str, message: str) -> Reply:
        """Continue the conversation of a task after the run: send `message`, store the turn, return the reply.

        The task's result and the run's usage do not change; the reply carries the cost of the turn. A conversation
        exists once a prompt was answered, or once the backend confirmed the session (as an agent does). A conversation
        waiting for an answer accepts no other message.

        Raises StoreRequired, RunNotFound, RunOwned if a live process executes the run, TaskNotFound, PlaitError if the
        task has no usable conversation, BackendError if the backend fails, StoreError, and TurnNotStored (with the
        reply) if the turn could not be stored.
        """
        run = await self.read(run_id)
        run.require_task(task_id)
        async with self._backends_of(run, Need.CONTINUE, task_id) as options:
            return await continue_task(options, run, task_id, message)

    @_with_open_store
    async def answer(
        self, run_id: str, task_id: str, value: JsonInput, *, attempt: int | None = None, wait: float = 10.0
    ) -> bool:
        """Answer the question of a waiting task, from any process. The first answer counts.

        `attempt` is the attempt number from `questions`: it prevents an answer to a later question of the same task. An
        owner reads the answer from the store within a second (5 seconds if a server's notification is lost); this call
        waits up to `wait` seconds. A run without an owner continues at the next resume, or at once if it waits in this
        `async with`. Returns True once the task has the answer, False if the answer is only stored.

        Raises AnswerConflict if the question was already answered, is past its deadline or is no longer open;
        PlaitError if the value does not fit; RunNotResumable if the run has failed with the question open;
        StoreRequired, RunNotFound, TaskNotFound, StoreError.
        """
        taken = await answer_question(self.options, run_id, task_id, value, attempt, wait)
        if taken and run_id in self._waiting:
            await self._continue(run_id, ResumeOptions(policy=self._waiting.pop(run_id)), _log_left)
        return taken

    async def read(self, run_id: str, record: RunRecord | None = None) -> StoredRun:
        """Return the stored run with its tasks, as a resume reads it; `record` is its record if it has been read
        already. Raises RunNotFound.
        """
        return await stored_run(self.options.store, run_id, record)

    @_with_open_store
    async def get(self, run_id: str, *, tasks: bool = True) -> RunDetail:
        """Return the stored state of the run, with its tasks unless `tasks` is False. Raises RunNotFound."""
        from plait.runner.views.read_views import look_up  # noqa: PLC0415 - see above

        return await look_up(self._store, run_id, self.options.clock.wall(), tasks)

    @property
    def driven(self) -> tuple[str, ...]:
        """The ids of the runs executing here now."""
        return tuple(self._driven)

    @_with_open_store
    async def list(
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
        from plait.runner.views.read_views import find_runs, run_view  # noqa: PLC0415 - see above

        records = await find_runs(self._store, limit, offset=offset, statuses=statuses, name=name, search=search)
        return tuple(map(run_view, records))

    @_with_open_store
    async def task(self, run_id: str, task_id: str) -> TaskDetail:
        """Return a task with its conversation and attempts. Raises RunNotFound, TaskNotFound."""
        from plait.runner.views.read_views import task_detail  # noqa: PLC0415 - see above

        _, run = await stored_record(self._store, run_id)
        return await task_detail(self._store, run, task_id, self.options.clock.wall())

    @_with_open_store
    async def questions(self, run_id: str | None = None, *, interrupted: bool = False) -> Sequence[QuestionView]:
        """Return the tasks that wait for a person, in the run or in all runs, those of the newest run first. A question
        is left out once it is answered, also before a process has read the answer.

        With `interrupted` also the tasks that wait since the process of their run died, as the next resume stores:
        those marked at_most_once, and those during which a process died often. Asks the hosts of such runs.

        Raises RunNotFound, StoreError. Of all runs, one that cannot be read is left out.
        """
        from plait.runner.views.read_views import waiting_tasks  # noqa: PLC0415 - see above

        if run_id is not None:
            run = await self.read(run_id)
            return [*waiting_tasks(run), *(await self._interrupted_tasks(run) if interrupted else ())]
        questions: list[QuestionView] = []
        for record in await self._store.list_runs(MOST_RUNS_SEARCHED):
            is_cut = interrupted and _process_is_dead(record)
            if (is_cut or record.counts.get(TaskStatus.WAITING_INPUT)) and RunStatus(record.status) not in RUN_DONE:
                with suppress(PlaitError):  # a damaged run, or a run that was deleted just now: the others are found
                    run = await self.read(record.run_id)
                    questions += waiting_tasks(run)
                    questions += await self._interrupted_tasks(run) if is_cut else ()
        return questions

    async def _interrupted_tasks(self, run: StoredRun) -> Sequence[QuestionView]:
        from plait.runner.views.read_views import question_view  # noqa: PLC0415 - see above

        running = [task for task in run.tasks if TaskStatus(task.status) is TaskStatus.RUNNING]
        cut = [task for task in running if task.crashes or run.state.dag[task.task_id].at_most_once]
        if not cut or not _process_is_dead(run.record):
            return ()
        steps = (await self.preview_read(run, retry_failed=False)).tasks
        return [
            question_view(run.record, task, steps[task.task_id].reason)
            for task in cut
            if steps[task.task_id].action is ResumeAction.ASK
        ]

    @_with_open_store
    async def graph(self, run_id: str) -> dict[str, Any]:
        """Return the picture of the run's graph: see `drawing.coordinates`. Raises RunNotFound."""
        from plait.runner.drawing.dag_picture import coordinates  # noqa: PLC0415 - see above

        run = await self.read(run_id)
        return await anyio.to_thread.run_sync(coordinates, run.state.dag)

    def view(self, run_id: str, task_id: str | None = None) -> LiveView:
        """Return the view of a run, with one task in full if `task_id` is given, to be read again and again."""
        from plait.runner.views.live_view import LiveView  # noqa: PLC0415 - see above

        return LiveView(self._store, self.options.clock, run_id, task_id)

    def events(self, run_id: str, after: int = 0) -> AsyncGenerator[EventView]:
        """Return an iterator over the run's stored events numbered above `after`, oldest first, from any process.

        Iteration waits while the run is queued, waiting, interrupted, parked or running, and ends after the event that
        ends the run (run_completed, run_failed, run_cancelled); only session events of a conversation continued later
        may follow. The first step of the iteration raises RunNotFound if the run does not exist. A reader may stop or
        be cancelled at any time and continue with the number of the last event read.
        """
        from plait.runner.views.read_views import history  # noqa: PLC0415 - see above

        return history(self._store, run_id, after, self.options.clock, self.poll)

    async def texts(self, run_id: str) -> AsyncGenerator[TextPiece]:
        """Yield the texts of answers while they are written, of attempts that execute here. The texts are not stored.

        The first pieces are the texts up to now. Iteration never ends by itself: a run may continue here later.
        """
        while True:
            if (driven := self._driven.get(run_id)) is not None:
                async with aclosing(driven.text.pieces()) as pieces:
                    async for piece in pieces:
                        yield piece
            await self.options.clock.sleep(self.poll)

    @asynccontextmanager
    async def _backends_of(
        self, run: StoredRun | str, need: Need, task_id: str | None = None
    ) -> AsyncGenerator[RunOptions]:
        """Open the backends of a run that has been read, or of the run with an id."""
        if self._source is None:
            yield self.options
            return
        run = await self.read(run) if isinstance(run, str) else run
        async with self._source(run, need, task_id) as options:
            yield options

    async def _start(self, run_id: str, how: ResumeOptions) -> None:
        self._inside(run_id)
        answers = how.answers
        while driven := self._driven.get(run_id):
            await driven.began.wait()
            # The store may release a run before this process removes it.
            record = None if driven.error is not None else await self._store.get_run(run_id)
            if record is None or record.owner is None:
                # The run will make no further progress here, and `driven.error` belongs to the caller that began the
                # run. A new start is possible only once the run is gone.
                while self._driven.get(run_id) is driven:
                    await self._one_gone.wait()
            elif not answers:
                return
            else:
                for task_id, value in answers.items():
                    await self.answer(run_id, task_id, value)
                answers = None
        group = self._inside(run_id)
        self._waiting.pop(run_id, None)
        driven = self._driven[run_id] = _Driven()
        group.start_soon(self._see_through, run_id, replace(how, answers=answers), driven)
        await driven.began.wait()
        if driven.error is not None:
            raise driven.error

    async def take_up(self, report: Callable[[str, PlaitError | None], None]) -> None:
        """Start the posted runs of the store that are queued or interrupted, or that wait for a person, inside `async
        with runner.runs`: other runs have backends of their own. `report` is called with the id of each, and the error
        with which one is left as it is; a run that another process takes up is none of them. Raises StoreError.
        """
        stored = await self._store.list_runs(MOST_RUNS_SEARCHED)
        async with anyio.create_task_group() as group:
            for run in stored:
                if not run.damaged and shown_status(run) in RESUMABLE - {RunStatus.PARKED}:
                    group.start_soon(self._continue, run.run_id, AS_STORED, report, self.is_posted)

    async def is_posted(self, run_id: str) -> bool:
        """Return whether the run was posted to a server."""
        record = await self._store.get_run(run_id)
        return record is not None and bool(read_settings(record).get(POSTED))

    async def wake(
        self,
        report: Callable[[str, PlaitError | None], None] = lambda _run, _error: None,
        *,
        fits: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """Start the runs of the store that park and are due, inside `async with runner.runs`: their time has come, or
        the deadline of a question, a person has answered, or their process has died. They park again once everything
        waits for a time.

        `report` is called with the id of each run that goes on, and with the error that keeps one from it; such a run
        is left alone for a minute. A run that another process takes is none of them. With `fits` only the runs for
        which it returns True. At most MOST_WOKEN go on at once; the others with later calls. Raises StoreError.
        """
        now = self.options.clock.monotonic()
        for record in await self.due(self.options.clock.wall()):
            run_id = record.run_id
            self._woken &= self._driven.keys()
            if len(self._woken) >= MOST_WOKEN:
                return
            if run_id in self._driven or self._not_woken.get(run_id, 0.0) > now:
                continue
            how = ResumeOptions(policy=self._waiting.get(run_id), wakes=True)
            if not await self._continue(run_id, how, report, fits):
                self._not_woken[run_id] = now + _AGAIN_S
            elif run_id in self._driven:
                self._woken.add(run_id)

    async def due(self, now: float) -> Sequence[RunRecord]:
        """Return the runs that are due at Unix time `now`, the first created first: of those that park, each whose time
        has come, which is the time until which it is parked or the deadline of a question; at once after an answer; and
        after the death of its process. All other runs wait for a person, or for a worker. Raises StoreError.
        """
        records = await self._store.list_claimable(MOST_RUNS_SEARCHED)
        return [run for run in records if await self._is_due(run, now)]

    async def _is_due(self, run: RunRecord, now: float) -> bool:
        if run.owner is None and ((due := due_at(run)) is None or due > now):
            return False  # not begun, stopped by a person, or due by the store's clock alone
        key = run.run_id, run.epoch
        if key not in self._parks:
            whole = await self._store.get_run(run.run_id)
            self._parks[key] = whole is not None and bool(
                read_settings(whole).get(PARK) or await self._store.list_events(run.run_id, 0, 1, events.RunParked.kind)
            )
        return self._parks[key]

    async def _continue(
        self,
        run_id: str,
        how: ResumeOptions,
        report: Callable[[str, PlaitError | None], None],
        fits: Callable[[str], Awaitable[bool]] | None = None,
    ) -> bool:
        """Start a stored run, if it `fits`, and call `report` with the outcome. Return whether no error keeps the run
        from going on; that another process was faster is none.
        """
        try:
            if fits is None or await fits(run_id):
                await self._start(run_id, how)
                report(run_id, None)
        except RunOwned:
            pass
        except PlaitError as error:
            report(run_id, error)
            return False
        return True

    async def keep_waking(
        self,
        report: Callable[[str, PlaitError | None], None],
        *,
        fits: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """Call `wake` every WAKE_EVERY_S seconds until cancelled, also while the store does not answer."""
        while True:
            with suppress(StoreError):
                await self.wake(report, fits=fits)
            await self.options.clock.sleep(WAKE_EVERY_S)

    async def driven_to_end(self) -> None:
        """Wait until no run executes here."""
        while self._driven:
            await self.one_gone()

    async def one_gone(self) -> None:
        """Wait until one of the runs that execute here, if any, no longer does."""
        if self._driven:
            await self._one_gone.wait()

    def _inside(self, run_id: str) -> anyio.abc.TaskGroup:
        if self._group is None or self._left:
            raise PlaitError(f"run {run_id} cannot be started: runs are started only inside its `async with`")
        return self._group

    async def _see_through(self, run_id: str, how: ResumeOptions, driven: _Driven) -> None:
        """Execute a run to its end, or until it waits for a person."""
        status: RunStatus | None = None
        driven.error = PlaitError(f"run {run_id} was not started: the `async with` was left first")
        try:
            with driven.opening:
                async with self.open(await self.read(run_id), how) as (run, _):
                    driven.run, driven.error = run, None
                    async with run:
                        async for event in run.events():
                            driven.text.take(event)
                            if isinstance(event, events.RunStarted | events.RunResumed | events.RunEnded):
                                driven.began.set()
                    status = (await run.result()).status
        except Exception as error:
            # An error of one run must not end the others. Before the run began, its caller receives the error.
            if driven.began.is_set():
                _log_left(run_id, error)
            driven.error = error
        finally:
            del self._driven[run_id]
            driven.text.close()
            driven.began.set()
            self._one_gone.set()
            self._one_gone = anyio.Event()
        if status is RunStatus.WAITING_INPUT and self._group is not None and not self._left:
            self._waiting[run_id] = how.policy
            if self._watching is None:
                self._watching = anyio.CancelScope()
                self._group.start_soon(self._watch, self._group, self._watching)

    async def _watch(self, group: anyio.abc.TaskGroup, watching: anyio.CancelScope) -> None:
        """Continue each of the runs that wait once a person has answered, or at the deadline of its question, unless
        another process does.
        """
        with watching:
            while self._waiting:
                await self.options.clock.sleep(max(self.poll, LOOK_EVERY_S))
                for run_id in list(self._waiting):
                    with suppress(StoreError):  # the run is read again later
                        record = await self._store.get_run(run_id)
                        if record is None or RunStatus(record.status) is not RunStatus.WAITING_INPUT:
                            self._waiting.pop(run_id, None)
                            continue
                        due = due_at(record)
                        if run_id in self._waiting and due is not None and due <= self.options.clock.wall():
                            how = ResumeOptions(policy=self._waiting.pop(run_id))
                            group.start_soon(self._continue, run_id, how, _log_left)
        self._watching = None


def _log_left(run_id: str, error: Exception | None) -> None:
    """Log that a run goes on no further here: `start` continues it."""
    if error is not None:
        logger(run=run_id).error("run_left", error=f"{type(error).__name__}: {error}")


def _why_not_again_now(run: StoredRun, position: int) -> str | None:
    """Return why the task cannot run again while its run goes on; None if it can."""
    status, dag, run_id = run.state.statuses[position], run.state.dag, run.record.run_id
    if status is TaskStatus.PENDING and not run.state.attempts[position]:
        return "it has not begun"
    if status is not TaskStatus.FAILED and status is not TaskStatus.PENDING:
        return f"it is {status.value}"
    if owner_is_gone(run.record):
        retries = " --retry-failed" if status is TaskStatus.FAILED else ""
        return f"no process works on the run; continue it: plait resume {run_id}{retries}"
    if status is TaskStatus.FAILED:
        has_policy = StoredPolicy.of(run.record) is not None
        return "the policy of the run knows that it failed" if has_policy else why_not_again(dag, dag.tasks[position])
    return None


async def _require_backend(store: Store, record: RunRecord, name: str) -> None:
    """Raise InvalidRequest unless the run may call the backend `name`."""
    settings = read_settings(record)
    limits = stored_limits(settings)
    answer_keys: Mapping[str, object] = settings.get("answer_keys") or {}  # "" is the default backend
    names = {limits.default, *limits.backends, *filter(None, answer_keys)}
    names |= {one.backend for one in await listed_tasks(store, record) if one.backend is not None}
    if name not in names:
        raise InvalidRequest(f"run {record.run_id} has no backend {name!r}{nearest(name, names)}")


async def _cancel_run(config: RunOptions, run_id: str, wait: float, on_unreached: OnUnreached) -> RunStatus:
    """Cancel the run, by its live owner or else by this process. See `Runs.cancel`."""
    ends = config.clock.monotonic() + wait
    is_noted, watched = False, None
    while True:
        store, record = await stored_record(config.store, run_id)
        if RunStatus(record.status) in RUN_DONE:
            if record.owner is None and RunStatus(record.status) is RunStatus.CANCELLED:
                await kill_orphans(store, run_id)  # the cancelling process may have died before
                await end_run_on_hosts(config, record, record.epoch, on_unreached)
            return RunStatus(record.status)
        if not (is_noted or owner_is_gone(record)):
            is_cancelling = RunStatus(record.status) is RunStatus.CANCELLING
            if not (is_cancelling or await asks_for_cancel(store, run_id, await store.list_notes(run_id))):
                await store.send(run_id, cancel_note(record, iso(config.clock.wall())))
            wake(record.owner)
            is_noted = True
        is_late = config.clock.monotonic() >= ends
        may_answer = is_live(record, config.clock.wall()) or not (is_late or seems_free(record))
        if not may_answer and (record.owner is None or record.owner != watched):
            try:
                run = await stored_run(store, run_id)
                if run.status in RUN_DONE:
                    return run.status
                await wait_for_expiry(config, run)
                return (await finish_cancelling(config, run, Feed(), on_unreached)).status
            except RunOwned:  # another process claimed the run first, or the owner has written meanwhile
                watched = record.owner if is_noted else None
                continue
        if is_late:
            return RunStatus.CANCELLING
        await config.clock.sleep(_LOOK_AGAIN_S)


def _process_is_dead(run: RunRecord) -> bool:
    """Return whether the run is interrupted, and not by a process on another host that may be alive."""
    is_interrupted = shown_status(run) is RunStatus.INTERRUPTED
    return is_interrupted and (run.owner is None or liveness(run.owner) is Liveness.DEAD)


async def load_progress(store: Store, run_id: str) -> WorkflowProgress:
    """Return the progress of a workflow's run: its interactions up to now, including running ones, and its status.

    Reads without a claim, so a live process may continue the run at the same time. Raises RunNotFound, StoreError.
    """
    from plait.runner.policies.step_workflow import progress_of  # noqa: PLC0415 - see above

    run = await stored_run(store, run_id)
    results = run.state.all_results()
    return progress_of(policies.RecordedRun(run.state.dag.tasks, results.__getitem__), run.status)


async def find_run(store: Store, word: str, plan: str | None = None, file: Path | None = None) -> RunRecord:
    """Return the run with the id `word`, the only run whose id begins with `word`, or for `last` the newest run.

    With the name of a `plan`, `last` is the newest run of that plan: of the same `file`, an absolute path, else, for a
    plan that moved or came from a pipe, of the same name. A `try`, which runs one task, is never `last`, and of a plan
    only then a run that was interrupted, cancelled or never begun, if no other has run to its end.
    """
    if not is_utf8(word):
        raise RunNotFound(f"the store has no run {word!r}; `plait runs` lists all runs")
    if word == "last":
        return await (_last_run(store) if plan is None else _last_run_of(store, plan, file))
    record = await store.get_run(word)
    if record is None:
        record = await store.get_run(await _id_by_prefix(store, word))
    if record is None:
        raise RunNotFound(f"run {word} is gone from the store")
    return record


async def _last_run(store: Store) -> RunRecord:
    for most in (1, MOST_RUNS_SEARCHED):
        for listed in await store.list_runs(most):
            if (run := await store.get_run(listed.run_id)) is not None and not is_try(read_settings(run)):
                return run
    raise RunNotFound("the store has no runs yet; `plait run PLAN` makes one")


async def _last_run_of(store: Store, plan: str, file: Path | None) -> RunRecord:
    runs = [run for run in await store.list_runs(MOST_RUNS_SEARCHED) if not run.damaged]
    same_name = None
    # Those of the name first, then those that are whole, then those that began (a queued run holds no answers), each
    # kind newest first.
    whole = {RunStatus.COMPLETED, RunStatus.FAILED}
    for listed in sorted(runs, key=lambda run: (run.name != plan, run.status not in whole, run.started_at is None)):
        if listed.name != plan and (same_name is not None or file is None):
            break
        run = await store.get_run(listed.run_id)
        if run is None:
            continue
        settings = read_settings(run)
        if is_try(settings):
            continue
        if settings.get("plan") == str(file) and not settings.get(POSTED):
            return run
        if listed.name == plan:
            same_name = same_name or run
    if same_name is None:
        named = repr(plan) if file is None else file.name
        hint = "; name the run by its id (`plait runs` lists all runs)" if runs else ""
        raise RunNotFound(f"the store has no run of {named} yet{hint}")
    return same_name


async def _id_by_prefix(store: Store, prefix: str) -> str:
    runs = await store.list_runs(MOST_RUNS_SEARCHED)
    run_ids = [run.run_id for run in runs if run.run_id.startswith(prefix)] if prefix else []
    if len(run_ids) == 1:
        return run_ids[0]
    if run_ids:
        shown = ", ".join(run_ids[:5]) + (", ..." if len(run_ids) > 5 else "")
        raise InvalidRequest(f"{len(run_ids)} runs begin with {prefix!r}: {shown}; give more of the id")
    raise RunNotFound(f"the store has no run {prefix!r}; `plait runs` lists all runs")


_ALL = 1 << 31


@runtime_checkable
class PurgingStore(Store, Protocol):
    """A store that deletes runs, as `SQLiteStore` and `PostgresStore`."""

    @property
    def files_root(self) -> Path | None: ...
    async def run_sizes(self) -> dict[str, int]: ...
    async def purge(self, run_ids: Collection[str]) -> Purged: ...
    async def session_ids(self) -> set[str]: ...


@value
class Deletion:
    """The runs that `Runs.delete` has deleted, or would delete."""

    runs: Sequence[RunRecord]
    sizes: Mapping[str, int]
    """The bytes of text of each run of the store, by run id."""
    kept: int
    """The number of runs that stay."""
    freed_bytes: int = 0
    """The reduction of the file's size; 0 for a server."""
    remains: str | None = None
    """Why something of the deleted runs is left in the store or beside it, in one line; another call removes it."""


async def _released(store: Store, run: RunRecord, now: float, dry_run: bool) -> RunRecord:
    """Return an ended run without its owner if the owner died, as after a killed `plait continue`. A dry run changes
    the returned value alone, not the store.
    """
    if RunStatus(run.status) not in RUN_DONE or run.owner is None or not owner_is_gone(run):
        return run
    if not dry_run:
        try:
            leaving = (events.RunReleased(iso(now)),)
            await store.write(Batch(run.run_id, run.epoch, run.last_seq + 1, leaving, run.owner.owner_id))
        except (Conflict, Fenced):  # another process has just claimed the run
            return run
    return replace(run, owner=None)


def expired(
    runs: Iterable[RunRecord], now: float, keep: int | None = None, older_than: float | None = None
) -> list[RunRecord]:
    """Return the runs to delete at Unix time `now`, from `runs` sorted newest first: see `Runs.delete`.

    Never selects an unfinished run, a damaged run, or a run with an owner, for example during the continuation of a
    conversation.
    """
    if keep is None and older_than is None:
        return []
    ended = [run for run in runs if RunStatus(run.status) in RUN_DONE and not run.damaged]
    free = [run for run in ended[keep or 0 :] if run.owner is None]
    if older_than is None:
        return free
    return [run for run in free if now - parse_time(run.ended_at or run.created_at) >= older_than]


async def earlier_runs_needed(store: Store, runs: Iterable[RunRecord]) -> set[str]:
    """Return the runs whose answers an unfinished run among `runs` may still take over. Raises StoreError."""
    needed: set[str] = set()
    for run in runs:
        if RunStatus(run.status) not in RUN_DONE and (whole := await store.get_run(run.run_id)) is not None:
            reuse = ReuseFrom.of_settings(read_settings(whole))
            needed |= set() if reuse is None else {reuse.like}
    return needed
