"""A runner for commands that foretell or settle: it has the backends that know what is left of turns under way."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from plait.backends.errors import BackendUnavailable
from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.cli.backends import Backing
from plait.runner.cli.exits import Fault, say
from plait.runner.cli.stored_backends import Files, Kept
from plait.runner.domain.status import TaskStatus
from plait.runner.parallel import ParallelRunner
from plait.runner.state.codec import dag_of

_AS_STORED = Files()


@asynccontextmanager
async def knowing_runner(
    store: Store, record: RunRecord, tasks: tuple[TaskRecord, ...], files: Files = _AS_STORED
) -> AsyncGenerator[ParallelRunner]:
    """A runner on `store` that can tell whether the run's turns have outlived their process. Where a backend cannot be
    had here it says so, and knows what is stored.
    """
    async with AsyncExitStack() as stack:
        yield await _runner(stack, store, record, tasks, files)


async def _runner(
    stack: AsyncExitStack, store: Store, record: RunRecord, tasks: tuple[TaskRecord, ...], files: Files
) -> ParallelRunner:
    dag = dag_of(record, tasks)
    under_way = [dag[task.task_id] for task in tasks if TaskStatus(task.status) is TaskStatus.RUNNING]
    if under_way:
        try:
            kept = Kept.of(record, files)
            made = kept.outliving()
            names = list(dict.fromkeys(dag.backend_of(task) or kept.default for task in under_way))
            others = [name for name in names if name not in made]
            if others:
                made |= await stack.enter_async_context(kept.backing(others).running(others))
            return Backing({}, kept.default).runner(made, store=store)
        except (Fault, BackendUnavailable) as error:
            why = error.message if isinstance(error, Fault) else error
            say(f"plait: whether anything of it is still at work cannot be told: {why}")
    return Backing({}).runner({}, store=store)
