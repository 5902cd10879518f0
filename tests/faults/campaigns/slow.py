"""A disk that takes 0.3 s for every sync, fails at one of them or all from one on, or is full, under a real process.

However slow: the event loop stays responsive and nothing counts as degraded. However broken: the run completes, says
that it was degraded, what the store acknowledged is there afterwards, and a resume finds each result once or never.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from plait import ParallelRunner, RunStatus
from plait.persistence import SQLiteStore
from tests.faults.campaigns.report import Report, Scale
from tests.support.stores.slow_disk import FILE, RUN, Sabotage, Shape, acknowledged, answer_to, build, missing, run_on

DELAY_MS = 300
MOST_LAG_MS = 10.0
SLOW: Shape = (40, 5)
BROKEN: Shape = (3, 20)
FOR_EVER = 1_000_000
FIRST_FAILURES: dict[Scale, int] = {"quick": 6, "nightly": 15}
"""The first failing sync is tried at every place from 1 to this."""
FIRST_FULL: dict[Scale, range] = {"quick": range(1, 40, 9), "nightly": range(1, 120, 4)}
"""The writes of a block at which the disk is full first."""
NO_PAGE_LEFT: dict[Scale, range] = {"quick": range(2, 7, 2), "nightly": range(1, 16)}
"""The batches before which the database may not grow any more."""


def run(*, scale: Scale, seed: int = 0) -> Report:
    """Once slow, and broken from every place on. Needs Linux and gcc; without them there are no cases."""
    began = time.monotonic()
    if missing() is not None:
        return Report(method="slow and broken disk", unit="runs", cases=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shim = build(folder)
        seen, violations = slow(shim, folder / "slow")
        places = range(1, FIRST_FAILURES[scale] + 1)
        for place in places:
            for count in (1, FOR_EVER):
                violations += broken(shim, folder / f"broken-{place}-{count}", place, count)
            violations += killed(shim, folder / f"killed-{place}", place)
        full = [{"FULL_FROM": place, "FULL_COUNT": n} for place in FIRST_FULL[scale] for n in (1, FOR_EVER)]
        full += [{"PAGES_FROM": number} for number in NO_PAGE_LEFT[scale]]
        for settings in full:
            violations += without_space(shim, folder / str(settings), settings)
        planted: dict[str, bool] = {
            sabotage: bool(attempt(shim, folder / sabotage)) for sabotage, attempt in PLANTED.items()
        }
    return Report(
        method="slow and broken disk",
        unit="runs",
        cases=1 + 3 * len(places) + len(full),
        violations=tuple(violations),
        planted=planted,
        seconds=time.monotonic() - began,
        figures={f"event-loop lag {key[:-3]} ms": round(seen[key], 2) for key in ("p50_ms", "p99_ms", "max_ms")},
    )


def slow(
    shim: Path,
    folder: Path,
    delay_ms: int = DELAY_MS,
    sabotage: Sabotage | None = None,
    most_lag_ms: float = MOST_LAG_MS,
) -> tuple[dict[str, Any], list[str]]:
    """A run whose syncs take `delay_ms` longer: what it saw, and what is wrong with that."""
    folder.mkdir()
    seen = run_on(shim, folder, SLOW, {"SYNC_DELAY_MS": delay_ms}, sabotage)
    wrong: list[str] = []
    if (seen["status"], seen["wrong"], seen["degraded"]) != ("completed", [], []):
        wrong.append(f"slow disk: {seen}")
    if seen["p99_ms"] > most_lag_ms:
        wrong.append(f"slow disk: the event loop was late by {seen['p99_ms']:.1f} ms at the 99th percentile")
    return seen, wrong + anyio.run(_read_and_resume, folder)


def broken(shim: Path, folder: Path, place: int, count: int, sabotage: Sabotage | None = None) -> list[str]:
    """What is wrong with a run of which `count` syncs fail from number `place` on."""
    seen, wrong = _failing(shim, folder, {"SYNC_FAIL_FROM": place, "SYNC_FAIL_COUNT": count}, sabotage)
    if not seen["degraded"]:
        wrong.append("the run does not say that it was degraded")
    return [f"sync {place} and {count - 1} more fail: {one}" for one in wrong]


def without_space(shim: Path, folder: Path, settings: Mapping[str, int], sabotage: Sabotage | None = None) -> list[str]:
    """What is wrong with a run whose disk is full, as `settings` say, for a while or for ever."""
    _, wrong = _failing(shim, folder, settings, sabotage)
    return [f"full disk, {dict(settings)}: {one}" for one in wrong]


def _failing(
    shim: Path, folder: Path, settings: Mapping[str, int], sabotage: Sabotage | None
) -> tuple[dict[str, Any], list[str]]:
    folder.mkdir()
    seen = run_on(shim, folder, BROKEN, settings, sabotage)
    wrong: list[str] = []
    if (seen["status"], seen["wrong"]) != ("completed", []):
        wrong.append(str(seen))
    for_ever = FOR_EVER in settings.values()
    if seen["degraded"] and (seen["degraded"][-1]["until"] is None) != for_ever:
        wrong.append(f"the run says degraded {seen['degraded']}")
    return seen, wrong + anyio.run(_read_and_resume, folder)


def killed(shim: Path, folder: Path, place: int) -> list[str]:
    """What is wrong with a run whose sync number `place` fails and that is killed while it tries again."""
    folder.mkdir()
    seen = run_on(shim, folder, BROKEN, {"SYNC_FAIL_FROM": place, "SYNC_KILL_AT": place + 1})
    where = f"sync {place} fails, the process is killed at the next: "
    return [where + one for one in ["it was not killed"] * bool(seen) + anyio.run(_read_and_resume, folder)]


PLANTED: dict[Sabotage, Callable[[Path, Path], list[str]]] = {
    "synced on the event loop": lambda shim, folder: slow(shim, folder, 0, "synced on the event loop")[1],
    "acknowledged although the sync failed": lambda shim, folder: broken(
        shim, folder, 4, FOR_EVER, "acknowledged although the sync failed"
    ),
    "going on after SQLITE_FULL": lambda shim, folder: without_space(
        shim, folder, {"FULL_FROM": 30}, "going on after SQLITE_FULL"
    ),
}


async def _read_and_resume(folder: Path) -> list[str]:
    """Compare the file with what was acknowledged, then resume on a sound disk."""
    called: list[str] = []

    async def work(prompt: str) -> str:
        called.append(prompt)
        return answer_to(prompt)

    # The owner may have been killed; then its lease is of no account, for it is provably dead.
    async with SQLiteStore(folder / FILE, mode="existing") as store:
        if await store.get_run(RUN) is None:
            return (
                [f"acknowledged, but there is no run: {sorted(acknowledged(folder))}"] if acknowledged(folder) else []
            )
        stored = {task.task_id: task.text for task in await store.list_tasks(RUN) if task.status == "completed"}
        result = await ParallelRunner(work, store=store).resume(RUN)
    wrong = [f"{task_id} was acknowledged and is not there" for task_id in sorted(acknowledged(folder) - stored.keys())]
    wrong += [
        f"{task_id} is stored with another text" for task_id, text in stored.items() if text != answer_to(task_id)
    ]
    wrong += [f"{task_id} was completed and ran again" for task_id in stored if task_id in called]
    wrong += [f"{task_id} ran more than once" for task_id in set(called) if called.count(task_id) > 1]
    if result.status is not RunStatus.COMPLETED:
        wrong.append(f"resume: {result.status.value}: {result.error}")
    wrong += [f"{one} resumes to another text" for one, task in result.tasks.items() if task.text != answer_to(one)]
    return wrong
