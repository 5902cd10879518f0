"""Power losses: a real run over a recorded disk, then what is left after the power went at any moment.

The runner, the store, its schema and its settings are the real ones (support/stores/power_vfs.py says how). After every
operation on the disk, several images of what it may hold are opened by the store and compared with the model
that got the same batches: an image has to hold exactly the first n batches, with n at least as many as the store had
acknowledged by then. Some images are resumed to the end.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import anyio

from plait import DAG, FailureMode, ParallelRunner, Retry, RunStatus, Task
from plait.errors import StoreUnusable
from plait.persistence import Batch, RunRecord, SQLiteStore
from plait.persistence.sql_store import get_run, list_attempts, list_events, list_messages, list_tasks
from plait.persistence.sqlite_file import open_database
from plait.persistence.sqlite_store import read_on
from tests.faults.campaigns.report import Report, Scale
from tests.support.fakes import Talker
from tests.support.stores.model_store import ModelStore
from tests.support.stores.power_images import Disk, Image, Kept
from tests.support.stores.power_vfs import Acknowledged, Begun, Operation, Recording, recorded

RUN = "r"
FILE = "runs.db"
TASKS = 14
RESUMED = 40
"""One image in so many is also resumed to the end."""
IMAGES: dict[Scale, int] = {"quick": 2_000, "nightly": 50_000}
MOST_VIOLATIONS = 10

Sabotage: TypeAlias = Literal["synchronous = OFF", "synchronous = NORMAL", "acknowledged before the commit"]
Snapshot: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run on a recorded disk; `snapshots[n]` is what can be read once the first n batches are stored."""

    seed: int
    operations: list[Operation]
    snapshots: list[Snapshot]


@dataclass(slots=True)
class Found:
    """What the images showed."""

    images: int = 0
    resumed: int = 0
    lost: int = 0
    violations: list[str] = field(default_factory=list[str])


def run(*, scale: Scale, seed: int = 0) -> Report:
    """As many images as `scale` says, of runs from `seed` on, and the planted bugs. Equal images count once."""
    began = time.monotonic()
    found = Found()
    recordings = 0
    for number in itertools.count(seed):
        if found.images >= IMAGES[scale] or len(found.violations) >= MOST_VIOLATIONS:
            break
        check(record(number), found, limit=IMAGES[scale])
        recordings += 1
    return Report(
        method="power loss",
        unit="power losses",
        cases=found.images,
        violations=tuple(found.violations),
        planted={sabotage: is_caught(sabotage, seed) for sabotage in get_args(Sabotage)},
        seconds=time.monotonic() - began,
        figures={"recorded runs": recordings, "images resumed": found.resumed, "acknowledged lost": found.lost},
    )


def is_caught(sabotage: Sabotage, seed: int) -> bool:
    """Whether the checks see the planted bug."""
    found = Found()
    check(record(seed, sabotage), found, limit=IMAGES["quick"], most_violations=1)
    return bool(found.violations)


def record(seed: int, sabotage: Sabotage | None = None) -> Recorded:
    """A run of a random DAG that is stopped half-way, resumed by a second owner and then complete."""
    rng = random.Random(seed)
    recording = Recording()
    # With our own setting a checkpoint comes every 1,000 pages; every other run has it come often instead.
    instead = {"PRAGMA wal_autocheckpoint = 1000": "PRAGMA wal_autocheckpoint = 12"} if rng.random() < 0.5 else {}
    if sabotage is not None and sabotage.startswith("synchronous"):
        instead["PRAGMA synchronous = FULL"] = f"PRAGMA {sabotage}"
    with tempfile.TemporaryDirectory() as folder, recorded(recording, instead):
        anyio.run(_run_in_two, Path(folder) / FILE, recording, rng, sabotage)
    assert recording.replaced == instead.keys(), "the store does not say these any more; bring them up to date here"
    batches = [operation.batch for operation in recording.operations if isinstance(operation, Begun)]
    return Recorded(seed, recording.operations, anyio.run(_snapshots, batches))


async def _run_in_two(path: Path, recording: Recording, rng: random.Random, sabotage: Sabotage | None) -> None:
    dag, places, stop_after = _dag(rng), rng.randrange(1, 7), rng.randrange(1, TASKS)
    async with _Noting(path, recording, sabotage) as store:
        backend = _backend()
        async with _runner(backend, store, places).start(dag, RUN) as run:
            async for event in run.events():
                if len(backend.prompts) >= stop_after and event.at:
                    run.stop()
    async with _Noting(path, recording, sabotage) as store:
        result = await _runner(_backend(), store, places).resume(RUN)
        assert result.status is RunStatus.COMPLETED, result.error


def _dag(rng: random.Random) -> DAG:
    tasks: list[Task] = []
    for number in range(TASKS):
        upstream = [f"t{n}" for n in rng.sample(range(number), min(number, rng.randrange(3)))]
        used = " ".join(f"{{{{ {name} }}}}" for name in upstream)
        tasks.append(Task(f"t{number}", prompt=f"<t{number}> {used}"[:200], depends_on=upstream, retry=RETRY))
    tasks.append(Task("vain", prompt="<vain>", failure_mode=FailureMode.SKIP))
    tasks.append(Task("more", prompt="<more>", continues="t0"))
    return DAG(tasks, name="power")


RETRY = Retry(attempts=9, base_delay=0, on=frozenset({"unexpected"}))


def _backend() -> Talker:
    def answer(prompt: str, _opening: object) -> str | Exception:
        once = prompt.startswith("<t3>") and backend.prompts.count(prompt) == 1
        if once or prompt.startswith("<vain>"):
            return RuntimeError("as planned")
        return f"re: {prompt[:40]} " + "x" * (len(prompt) % 7 * 300)

    backend = Talker(answer)
    return backend


def _runner(backend: Talker, store: SQLiteStore, places: int) -> ParallelRunner:
    return ParallelRunner(backend, store=store, concurrency=places)


class _Noting(SQLiteStore):
    """The store, with a note in the recording before and after each write."""

    def __init__(self, path: Path, recording: Recording, sabotage: Sabotage | None) -> None:
        super().__init__(path)
        self._recording = recording
        self._too_early = sabotage == "acknowledged before the commit"

    async def write(self, batch: Batch) -> None:
        self._recording.add(Begun(batch))
        if self._too_early:
            self._recording.add(Acknowledged())
        await super().write(batch)
        if not self._too_early:
            self._recording.add(Acknowledged())


async def _snapshots(batches: list[Batch]) -> list[Snapshot]:
    memory = ModelStore()
    snapshots = [await _read_memory(memory)]
    for batch in batches:
        await memory.write(batch)
        snapshots.append(await _read_memory(memory))
    return snapshots


async def _read_memory(store: ModelStore) -> Snapshot:
    tasks = await store.list_tasks(RUN)
    messages = [await store.list_messages(RUN, task.task_id) for task in tasks]
    run, attempts = await store.get_run(RUN), await store.list_attempts(RUN)
    return _whenever(run), tasks, attempts, messages, await store.list_events(RUN)


def _read_file(path: Path) -> Snapshot:
    """The same of a file that the store opens; anything that it would not open is an error."""
    with closing(open_database(path, "existing")) as connection:
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        tasks = read_on(connection, list_tasks, RUN, None)
        messages = [read_on(connection, list_messages, RUN, task.task_id) for task in tasks]
        run, attempts = read_on(connection, get_run, RUN), read_on(connection, list_attempts, RUN, None)
        return _whenever(run), tasks, attempts, messages, read_on(connection, list_events, RUN, 0, 1000, None)


def _whenever(run: RunRecord | None) -> RunRecord | None:
    """The run without what depends on when it is read: a lease may end while the images are looked at."""
    return None if run is None else replace(run, lease_has_expired=False)


@dataclass(frozen=True, slots=True)
class _Moment:
    """After operation `after`: how many batches were acknowledged, and how many begun."""

    after: int
    acknowledged: int
    begun: int


def check(recorded_run: Recorded, found: Found, *, limit: int, most_violations: int = MOST_VIOLATIONS) -> None:
    """Look at images of the recorded run until `found` has `limit` of them or `most_violations` violations."""
    rng = random.Random(recorded_run.seed)
    known: dict[int, int | str] = {}
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        for moment, kept, image in images(recorded_run.operations, rng):
            if found.images >= limit or len(found.violations) >= most_violations:
                return
            key = hash(tuple(image.items()))
            if key not in known:
                known[key] = _batches_in(image, recorded_run.snapshots, Path(folder))
                found.images += 1
                if found.images % RESUMED == 0 and isinstance(known[key], int) and FILE in image:
                    found.resumed += 1
                    _resume(image, recorded_run, Path(folder), found)
            _judge(known[key], moment, f"{_again(recorded_run)}, kept {kept}", found)


def _memory_folder() -> str | None:
    """Images are read once, so they need no disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def images(operations: list[Operation], rng: random.Random) -> Iterator[tuple[_Moment, Kept, Image]]:
    """What the disk may hold after each operation, were the power lost then."""
    disk = Disk()
    acknowledged = begun = 0
    for number, operation in enumerate(operations):
        disk.do(operation)
        acknowledged += isinstance(operation, Acknowledged)
        begun += isinstance(operation, Begun)
        for kept in get_args(Kept):
            yield _Moment(number, acknowledged, begun), kept, disk.after_power_loss(kept, rng)


def put(image: Image, folder: Path) -> Path:
    """Have `folder` hold the image and nothing else; the database's path."""
    for left in folder.iterdir():
        left.unlink()
    for name, content in image.items():
        (folder / name).write_bytes(content)
    return folder / FILE


def _batches_in(image: Image, snapshots: list[Snapshot], folder: Path) -> int | str:
    """How many whole batches the image holds, or what is wrong with it."""
    path = put(image, folder)
    if FILE not in image:
        return 0
    try:
        found = _read_file(path)
    except (sqlite3.Error, StoreUnusable) as error:
        return f"cannot be opened: {error}"
    last_seq = 0 if found[0] is None else found[0].last_seq
    for number, snapshot in enumerate(snapshots):
        if (0 if snapshot[0] is None else snapshot[0].last_seq) == last_seq:
            return number if snapshot == found else f"is not what {number} batches make of it"
    return f"ends within a batch, at change {last_seq}"


def _judge(held: int | str, moment: _Moment, where: str, found: Found) -> None:
    where = f"{where}, after operation {moment.after}"
    if isinstance(held, str):
        found.violations.append(f"{where}: the image {held}")
    elif held < moment.acknowledged:
        found.lost += 1
        found.violations.append(f"{where}: {moment.acknowledged} batches acknowledged, {held} there")
    elif held > moment.begun:
        found.violations.append(f"{where}: {held} batches there, only {moment.begun} begun")


def _resume(image: Image, recorded_run: Recorded, folder: Path, found: Found) -> None:
    """Run the rest of what the image holds: it has to complete, and nothing that is completed is run again."""
    path = put(image, folder)
    backend = _backend()

    async def resume() -> str:
        async with SQLiteStore(path, mode="existing") as store:
            if await store.get_run(RUN) is None:
                return ""
            done = {task.task_id for task in await store.list_tasks(RUN) if task.status == "completed"}
            result = await _runner(backend, store, 4).resume(RUN)
        again = sorted(done & {prompt[1 : prompt.index(">")] for prompt in backend.prompts})
        if again:
            return f"runs {again} again, completed as they are"
        return "" if result.status is RunStatus.COMPLETED else f"resumes to {result.status.value}: {result.error}"

    wrong = anyio.run(resume)
    if wrong:
        found.violations.append(f"{_again(recorded_run)}: an image {wrong}")


def _again(recorded_run: Recorded) -> str:
    """How to see it again. Which changes share a transaction depends on the moment, so it may take a few tries."""
    return f"seed {recorded_run.seed} (python -m tests.faults.campaigns --seed {recorded_run.seed})"
