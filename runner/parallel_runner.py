"""`ParallelRunner`: run a DAG, resume a run, continue the conversation of a task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self

from plait.json_form import JsonInput
from plait.runner.client.create_run import new_run
from plait.runner.client.runs import Runs
from plait.runner.domain.dag import DAG, as_dag
from plait.runner.domain.policy import Policy
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.live_run import Run
from plait.runner.engine.run_options import RunOptions
from plait.runner.recovery.resume import continued_run
from plait.runner.recovery.resume_plan import ResumeOptions
from plait.task import Task

if TYPE_CHECKING:
    from plait.runner.client.reuse_preview import ReusePreview

_P = ParamSpec("_P")


def _with_parameters_of(
    options: Callable[_P, RunOptions],
) -> Callable[[Callable[[ParallelRunner, RunOptions], None]], Callable[Concatenate[ParallelRunner, _P], None]]:
    """Let an `__init__` take the parameters of `options`, which stand in one place."""

    def decorate(init: Callable[[ParallelRunner, RunOptions], None]) -> Callable[Concatenate[ParallelRunner, _P], None]:
        @wraps(RunOptions.__init__)
        def call(self: ParallelRunner, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            init(self, options(*args, **kwargs))

        return call

    return decorate


class ParallelRunner:
    """Executes DAGs: each task starts once its dependencies are done and a slot is free.

    A runner may execute several DAGs at the same time. Parameters:

    - `backend`: the default backend. An `async def f(prompt) -> str` counts as a backend.
    - `backends`: further backends, by name.
    - `default`: the name of the default backend among `backends`. A single backend is the default by itself.
    - `store`: a store, the path of a SQLite file, or the address of a PostgreSQL database. A path or an address is
      opened for each call, or with `async with runner:` for the block. With None nothing is stored, and nothing can be
      resumed.
    - `concurrency`: the number of tasks running at once. By default the sum of `limits`, and 8 for all backends without
      a limit. "auto" finds the number for each backend without a limit, except those that run programs. None: as many
      as the hosts have slots on which the backends are placed, also hosts that join later.
    - `limits`: the number of tasks running at once on each backend, by its name.
    - `rates`: the requests and tokens per minute of each backend, by its name: a call waits before the server has to
      refuse it. They hold for all runs and processes on the store whose backend has the same name, server and key,
      without a store for the runs of this process.
    - `or_else`: the spares of each backend, by its name: while a limit of a minute or more, or the end of its credit,
      closes the backend, they take its tasks over, in this order. A task goes back with its next attempt.
    - `shared_limits`: whether `concurrency` and `limits` apply to all runs of an event loop together, which then
      receive slots in turn, and not to each run. A task must then not wait for another run, which may need its slot.
    - `strict`: whether a failure of the store ends the run.
    - `store_timeout`: the limit of one store call, in seconds.
    - `lease`: the seconds for which a claim on a run holds without renewal; the same for all users of a store.
    - `cancel_grace`: the seconds for which running attempts may continue after the run was cancelled.
    - `growth`: limits on the tasks that tasks and policies add.
    - `on_question`: a callback for questions of tasks. It returns the answer, or None to leave the question open.
    - `prices`: the prices of models, by name. A cost that the backend reports comes first, the list of the extra
      `prices` last.
    - `budget`: what a run may spend over all its attempts and resumes, in US dollars. A call that might cost more than
      what is left is not made: the task asks for a higher budget. For a resumed run it counts if it is higher than the
      run's own.
    - `unpriced`: whether a run with a budget also makes calls that have no known highest cost. They count once they
      have cost something. Otherwise such a run is refused (InvalidRequest).
    - `notify`: where a run tells people of its questions and its end, each as under `notify` of a plan, such as
      `{"url_env": "SLACK_WEBHOOK", "form": "slack", "on": ["question", "failed"]}`. It is stored with a new run. Give
      it again to resume the run, unless it is a `url_env` alone.
    - `park`: whether a run ends as `parked` once everything that is left waits for a time that is more than a minute
      away, such as the end of a provider's limit. `Runs.wake`, `plait wake` and the workers of the store continue it
      then, and also if its process dies.
    - `priority`: of the runs that share slots in this process, or an account on the store, those of a higher number
      come first; runs of the same one take turns. It is stored with a new run, and 0 by default.
    - `clock`, `rng`: the sources of time and of random retry delays.
    """

    @_with_parameters_of(RunOptions)
    def __init__(self, options: RunOptions) -> None:
        self.runs = Runs(options)
        """Everything else that one can do to the runs of the store."""
        self._block = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._block.enter_async_context(self.runs.options.own_store.opened())
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

        With `key` (see `Runs.create`) the call may be repeated, also by another process and after a crash: it begins
        the run, continues it as `resume` does, or returns the stored result without a call.

        `run_id` defaults to a new id that sorts by creation time. `settings` are stored with the run. After each task's
        end `policy` decides which tasks to add, or ends the run. Once all remaining tasks wait for a person, the run is
        `waiting_input` and the call returns.

        `like` is the id of a stored run, from which unchanged tasks take their answers over without a call: those with
        the rendered prompt, schema, backend and conversation of a completed task there. Tasks in `fresh` (the id of a
        `for_each` stands for its parts), tasks with effects and backends without an `answer_key` always run, and a task
        that asked a person asks again unless `keep_answers` is true. See `Runs.preview_like`.

        A failing task never raises: see `RunResult.status`. Raises before the first task starts: ValueError if
        `settings` is not JSON or contains a key reserved by plait; BackendMissing; TaskNotFound for an unknown task in
        `fresh`; DAGError; RunExists; StoreNotOpen; with `key` KeyConflict, RunOwned, RunNotResumable and StoreRequired.
        Raises OwnershipLost if another process takes the run over, and with `strict` any StoreError.

        Cancellation ends all attempts and stores the state of the run; `resume` continues it.
        """
        if key is None:
            run = self.start(
                dag, run_id, settings=settings, policy=policy, like=like, fresh=fresh, keep_answers=keep_answers
            )
            return await run.to_end()
        if like is not None:
            raise ValueError("a run with a key takes no answers of another run over; leave key or like out")
        async with self.runs.options.own_store.opened():
            run_id = await self.runs.create(dag, run_id, key=key, settings=settings, policy=policy)
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
        return new_run(
            self.runs.options,
            as_dag(dag),
            run_id,
            settings=settings,
            policy=policy,
            like=like,
            fresh=fresh,
            keep_answers=keep_answers,
        )

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

        Only the store and the backends are needed. What a task does that was under way when its process died: if its
        agent still works, it follows the agent; if the backend confirmed the conversation, it continues the
        conversation; otherwise it starts over, or waits for a person if it is `at_most_once`. `runs.preview` returns
        the decision for each task beforehand. `retry_failed` reopens failed tasks, and completed tasks with a damaged
        result; `prompts` then maps the ids of failed tasks to new prompts. A run without remaining work is returned
        unchanged, and a cancellation is completed.

        `answers` maps the ids of waiting tasks to answers. Other questions receive the answers stored by `Runs.answer`,
        or, past their deadline, their defaults. `policy` is required for a run started with a policy that does not come
        with plait.

        A dead owner is replaced at once. An owner with unknown state is watched for one `lease` first.

        Raises StoreRequired, RunNotFound, RunOwned if another live process executes the run, RunNotResumable if the run
        is cancelled, or has failed and `answers` are given without `retry_failed`, AnswerConflict if an answer comes
        too late, PlaitError for a prompt of a task that has not failed, DAGError for an invalid prompt, PolicyMissing,
        BackendMissing, StoreError, and the errors of `run`.
        """
        run = self.start_resume(run_id, retry_failed=retry_failed, answers=answers, policy=policy, prompts=prompts)
        return await run.to_end()

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
        how = ResumeOptions(retry_failed, answers, policy, prompts or {})
        return continued_run(self.runs.options, run_id, how)
