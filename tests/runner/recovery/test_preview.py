"""What `resume --dry-run` says, and what a resume then does: the same, in 250 random cases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.backends.backend_protocol import ConversationRequest, DetachedTurn, Files
from plait.errors import BackendError, ErrorKind, RunOwned
from plait.persistence import MemoryStore, Store
from plait.persistence.store_records import TaskRecord
from plait.results import ResumeAction
from plait.runner.engine.attempt import INTERRUPTED
from plait.runner.state.attempt_files import attempt_files
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker
from tests.support.sizes import size

pytestmark = pytest.mark.slow

CASES = size(60, 250)


@dataclass
class Seen:
    """How a resume opened a task's conversation first."""

    resumed: bool
    prompt: str


def random_dag(rng: random.Random) -> DAG:
    tasks: list[Task] = []
    for i in range(rng.randint(1, 8)):
        needs = [f"t{n}" for n in range(i) if rng.random() < 0.3]
        tasks.append(
            Task(
                f"t{i}",
                prompt=" ".join([f"t{i}", *(f"{{{{ {n} }}}}" for n in needs)]),
                depends_on=needs,
                continues=rng.choice(needs) if needs and rng.random() < 0.2 else None,
                failure_mode=rng.choice(list(FailureMode)),
                retry=Retry(attempts=1),
                at_most_once=rng.random() < 0.15,
            )
        )
    return DAG(tasks)


class Filed(MemoryStore):
    """A store with a place for files, in which nobody ever makes one."""

    files_root = Path("/nowhere/files")


class Noting(Talker):
    """Notes how conversations were opened first, and says what is left of those that died, by folder."""

    def __init__(self, remains: Mapping[Path, DetachedTurn | None]) -> None:
        super().__init__()
        self.remains = remains
        self.seen: dict[str, Seen] = {}
        self.adopted: Counter[str] = Counter()

    def inspect(self, files: Files) -> DetachedTurn | None:
        return self.remains[files.turn]

    def open(self, request: ConversationRequest):
        task_id = request.idempotency_key.partition(":")[2]
        if request.attaches:
            assert request.files is not None
            self.adopted[task_id] += 1
            assert self.remains[request.files.turn] is not None
        else:
            self.seen.setdefault(task_id, Seen(request.resume and request.session_id is not None, ""))
        return super().open(request)


def remains_of(
    rng: random.Random, tasks: Sequence[TaskRecord], took_up: Collection[str]
) -> dict[Path, DetachedTurn | None]:
    """What may be left of each attempt that was under way; those of `took_up` took up another one."""
    remains: dict[Path, DetachedTurn | None] = {}
    for task in tasks:
        goes_on, session = task.task_id in took_up, rng.choice([task.session_id, "in its files"])
        left = [
            DetachedTurn("alive", session, goes_on, "a, pid 1"),
            DetachedTurn("ended", session, goes_on),
            DetachedTurn("dead", session, goes_on),
            DetachedTurn("dead", None, goes_on),
        ]
        files = attempt_files(Filed.files_root, "r", task.task_id, task.attempt)
        remains[files.turn] = rng.choice([None, None, *left])
    return remains


async def crashed_somewhere(rng: random.Random, store: Store, took_up: set[str]) -> bool:
    """Leave run "r" as one to six deaths of its process left it; False if it came to its end before. The tasks whose
    last attempt took up another one are added to `took_up`.
    """
    dag: DAG | None = random_dag(rng)
    fails = {f"t{i}" for i in range(8) if rng.random() < 0.15}
    gone = BackendError(ErrorKind.REFUSED, "no")
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4, 6])):
        hangs = {f"t{i}" for i in range(8) if rng.random() < 0.5}
        answers = Talker(lambda prompt, _: gone if prompt.split()[0] in fails else f"re: {prompt.split()[0]}")
        confirmed = {name for name in hangs if rng.random() < 0.5}
        backend = Dying(
            lambda prompt, hangs=hangs: prompt == INTERRUPTED or prompt.split()[0] in hangs,
            lambda prompt, confirmed=confirmed: prompt.split()[0] in confirmed,
            answers,
        )
        took_up.clear()
        if await die(store, backend, dag):
            return False
        took_up.update(backend.took_up)
        dag = None
    return True


async def check(seed: int) -> bool:
    rng = random.Random(seed)
    store, took_up = Filed(), set[str]()
    if not await crashed_somewhere(rng, store, took_up):
        return False
    before = {task.task_id: task for task in await store.list_tasks("r")}
    retry_failed = rng.random() < 0.3
    remains = remains_of(rng, list(before.values()), took_up)
    backend = Noting(remains)
    runner = ParallelRunner(backend, store=store, concurrency=1, clock=QuickClock())
    preview = await runner.runs.preview("r", retry_failed=retry_failed)
    assert [task.status for task in await store.list_tasks("r")] == [task.status for task in before.values()]
    result = await runner.resume("r", retry_failed=retry_failed)
    for task_id, step in preview.tasks.items():
        where = f"seed {seed}, {task_id}: {step}"
        now = result[task_id]
        ran = task_id in backend.seen
        assert ran == (step.action in {ResumeAction.START, ResumeAction.START_OVER, ResumeAction.CONTINUE}), where
        assert backend.adopted[task_id] == (step.action is ResumeAction.ADOPT), where
        said = [m.content for m in await store.list_messages("r", task_id) if m.attempt == now.attempts]
        left = remains[attempt_files(Filed.files_root, "r", task_id, before[task_id].attempt).turn]
        if step.action is ResumeAction.KEEP:
            assert now.status.value == before[task_id].status, where
        elif step.action is ResumeAction.ASK:
            assert now.status is TaskStatus.WAITING_INPUT, where
        elif step.action is ResumeAction.BLOCKED:
            assert now.status is TaskStatus.PENDING, where
        elif step.action is ResumeAction.FAIL:
            assert now.error_kind == "crashed", where
        elif step.action is ResumeAction.ADOPT:
            assert left is not None and left.state != "dead", where
            assert (now.status, now.attempts) == (TaskStatus.COMPLETED, before[task_id].attempt), where
            assert (INTERRUPTED in said) == left.resumes_interrupted, where
        else:
            assert now.status is TaskStatus.COMPLETED, where
            # A first attempt begins nothing anew; a continued one is in the very same session.
            under_way = before[task_id].status == TaskStatus.RUNNING and left is not None
            known = left.session_id if under_way and left is not None else None
            same_session = now.session_id == (known or before[task_id].session_id)
            assert (step.action is not ResumeAction.CONTINUE) or same_session, where
            assert (INTERRUPTED in said) == (step.action is ResumeAction.CONTINUE), where
    if result.resume_summary is None:
        assert preview.ended
        return True
    assert result.resume_summary.ran == preview.runs, seed
    assert result.resume_summary.repeated == preview.possibly_billed_twice, seed
    assert result.resume_summary.adopted == preview.adopted == backend.adopted.total(), seed
    return True


async def test_what_is_foretold_is_what_happens() -> None:
    checked = seed = 0
    while checked < CASES:
        checked += await check(seed)
        seed += 1


async def test_the_estimate_counts_prompt_and_history(store: Store) -> None:
    dag = DAG([Task("a", prompt="x" * 36), Task("b", prompt="y" * 60, continues="a")])
    await die(store, Dying(lambda prompt: prompt.startswith("y")), dag)
    preview = await ParallelRunner(Talker(), store=store).runs.preview("r")
    assert [name for name, step in preview.tasks.items() if step.possibly_billed_twice] == ["b"]
    assert preview.repeated_input_tokens == (60 + 36 + len("re: ") + 36) // 4


async def test_a_preview_of_a_run_that_is_over_or_owned(store: Store) -> None:
    runner = ParallelRunner(Talker(), store=store)
    await runner.run(DAG([Task("a", prompt="a")]), "done")
    preview = await runner.runs.preview("done")
    assert (preview.ended, preview.status, preview.runs) == (True, RunStatus.COMPLETED, 0)
    backend = Dying(lambda _: True)
    async with ParallelRunner(backend, store=store).start(DAG([Task("a", prompt="a")]), "live") as run:
        async for event in run.events():
            if event.kind == "task_started":
                with pytest.raises(RunOwned, match="is being run by process"):
                    await runner.runs.preview("live")
                run.stop()
    left = await runner.runs.preview("live")
    seen = await runner.runs.get("live")
    assert (left.ended, left.status, left.runs) == (False, RunStatus.INTERRUPTED, 1)
    assert seen.status is left.status
