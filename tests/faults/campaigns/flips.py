"""One bit flipped anywhere in a stored database or its log: the damage changes nothing, or is reported.

A case reads and resumes a copy with one flipped bit, and compares with the intact file. Wrong is other work, and every
other text, status, edge or id that is returned as if it were stored.

`python -m tests.faults.campaigns.flips [COUNT] [SEED] [--case NUMBER...]` runs the cases alone.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio

from plait.persistence import SQLiteStore, StoreError
from plait.persistence.findings import Fitness
from plait.persistence.old_tables import decode, rows
from plait.persistence.sqlite import connection, health
from plait.persistence.sqlite.wal_frames import DOUBT, LogState
from plait.runner import ParallelRunner, PlaitError, RunStatus
from plait.runner.operations.inspect import look_up
from tests.faults.campaigns.report import Report, Scale
from tests.support.stores.killed_runs import RESUMED, RUNS, Model, build
from tests.support.team import Team

COUNTS: dict[Scale, int] = {"quick": 200, "nightly": 10_000}
"""The numbers of flipped bits."""
FILE = "runs.db"
IMAGES = ("closed", "killed")
"""The file after a clean close, and the file with its log after a SIGKILL."""
TOLD = "reported as damaged"
_ALL = 1 << 20

Shown = dict[str, Any]


class _Warnings(logging.Handler):
    """Keeps whether the store has warned."""

    _warned = False

    def emit(self, record: logging.LogRecord) -> None:
        self._warned = True

    def pop(self) -> bool:
        warned, self._warned = self._warned, False
        return warned


WARNINGS = _Warnings(logging.WARNING)
logging.getLogger("plait.persistence").addHandler(WARNINGS)


def run(*, scale: Scale, seed: int = 0) -> Report:
    """Flip as many bits as `scale` says."""
    began = time.monotonic()
    violations, outcomes = play(range(seed, seed + COUNTS[scale]))
    with tempfile.TemporaryDirectory(prefix="flips-") as name:
        images = Images.made(Path(name))
        planted = {bug: is_caught(bug, images) for bug in BUGS}
    return Report(
        method="flipped bits",
        unit="flipped bits",
        cases=COUNTS[scale],
        violations=tuple(violations),
        planted=planted,
        seconds=time.monotonic() - began,
        figures=dict(outcomes),
    )


def play(cases: Sequence[int], processes: int | None = None) -> tuple[list[str], Counter[str]]:
    """Play the cases. Return what broke, and how often each outcome occurred."""
    violations: list[str] = []
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="flips-") as name:
        images = Images.made(Path(name))
        with multiprocessing.get_context("spawn").Pool(processes or os.cpu_count()) as pool:
            for wrong, outcome in pool.imap(partial(play_case, images), cases, chunksize=8):
                violations += wrong
                outcomes[outcome] += 1
    return violations, outcomes


@dataclass(frozen=True, slots=True)
class Images:
    """The intact files, with the records that they show and the work that a resume does."""

    folder: Path
    shown: Mapping[str, Shown]
    work: Mapping[str, Any]

    @classmethod
    def made(cls, folder: Path) -> Images:
        """Build the files in `folder`, and read and resume a copy of each."""
        build(folder / "killed" / FILE)
        shutil.copytree(folder / "killed", folder / "closed")
        for shm in folder.glob("*/*-shm"):
            shm.unlink()
        anyio.run(_close, folder / "closed" / FILE)
        shown: dict[str, Shown] = {}
        work: dict[str, Any] = {}
        for image in IMAGES:
            shutil.copytree(folder / image, folder / "read")
            shown[image] = anyio.run(read, folder / "read" / FILE)
            work[image] = anyio.run(resume, folder / "read" / FILE)
            shutil.rmtree(folder / "read")
        assert not any(TOLD in (*shown[image].values(), *(one[0] for one in work[image].values())) for image in IMAGES)
        return cls(folder, shown, work)


async def _close(path: Path) -> None:
    async with SQLiteStore(path, mode="existing"):
        pass


def play_case(images: Images, case: int) -> tuple[list[str], str]:
    """Flip the bit of `case` in a copy. Return what is wrong, and the kind of outcome."""
    rng = random.Random(case)
    image = IMAGES[case % len(IMAGES)]
    files = sorted((images.folder / image).iterdir())
    offset = rng.randrange(sum(file.stat().st_size for file in files))
    for file in files:
        if offset < (size := file.stat().st_size):
            break
        offset -= size
    wrong, outcome = play_flip(images, file, offset, 1 << rng.randrange(8))
    where = f"case {case}, {image}, {file.name} byte {offset}: "
    return [f"{where}{one} (python -m tests.faults.campaigns.flips --case {case})" for one in wrong[:2]], outcome


def play_flip(images: Images, file: Path, offset: int, bit: int) -> tuple[list[str], str]:
    """Flip a bit of `file`, a file of an image, in a copy. Return what is wrong, and the kind of outcome."""
    image = file.parent.name
    with tempfile.TemporaryDirectory(prefix="flip-", dir=images.folder) as name:
        copy = shutil.copytree(images.folder / image, Path(name) / "read")
        flip(copy / file.name, offset, bit)
        resumed = shutil.copytree(copy, Path(name) / "resumed")
        shown = anyio.run(read, copy / FILE)
        bad, wrong = doctor(copy / FILE)
        work = anyio.run(resume, resumed / FILE)
    wrong += [*_misread(images.shown[image], shown), *_misdone(images.work[image], work)]
    is_told = any(value == TOLD for value in shown.values()) or any(one[0] == TOLD for one in work.values())
    if is_told and not bad:
        wrong.append("doctor finds nothing")
    return wrong, "wrong" if wrong else "reported" if is_told or bad else "without effect"


def flip(file: Path, offset: int, bit: int) -> None:
    """Flip a bit of the file."""
    content = bytearray(file.read_bytes())
    content[offset] ^= bit
    file.write_bytes(content)


class _Equal:
    """Equal to every checksum."""

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Bug:
    """A check that is left out, and a byte whose damage only this check finds."""

    image: str
    file: str
    text: bytes
    """The byte is the first of this text in the file."""
    left_out: tuple[tuple[object, str, object], ...]


def _equal(*_row: object) -> object:
    return _Equal()


def _whole(_log: Path) -> LogState:
    return LogState.WHOLE


def _unchecked(*_: object) -> None:
    pass


BUGS = {
    "prompts not checked": Bug(
        "closed", FILE, b"Transfer 300 EUR", ((decode, "task_checksum", _equal), (rows, "task_checksum", _equal))
    ),
    "inputs not checked": Bug("closed", FILE, b"Bob in Bonn", ((decode, "content_checksum", _equal),)),
    "answers in the inbox not checked": Bug(
        "closed", FILE, b"from the current account", ((decode, "message_checksum", _equal),)
    ),
    "the log not checked": Bug(
        "killed",
        f"{FILE}-wal",
        b"Transfer 100 EUR",
        ((connection, "state_of_log", _whole), (health, "state_of_log", _whole)),
    ),
    "tables not compared": Bug(
        "closed",
        FILE,
        b"1)\n    LEFT JOIN ends AS e ON e.id = s.id",
        tuple((one, "check_tables", _unchecked) for one in (connection, health)),
    ),
}


def is_caught(bug: str, images: Images) -> bool:
    """Return whether the planted bug is found, and the same flip without the bug is reported."""
    planted = BUGS[bug]
    file = images.folder / planted.image / planted.file
    offset = file.read_bytes().index(planted.text)
    if play_flip(images, file, offset, 1)[1] != "reported":
        return False
    with ExitStack() as patches:
        for owner, name, instead in planted.left_out:
            patches.enter_context(mock.patch.object(owner, name, instead))
        return bool(play_flip(images, file, offset, 1)[0])


def doctor(path: Path) -> tuple[list[str], list[str]]:
    """Return the damage that `plait doctor` reports, and what is wrong with the report."""
    try:
        findings = list(health.file(path))
        return [one.found for one in findings if one.fitness is Fitness.BAD or DOUBT in one.found], []
    except Exception as error:
        return [], [f"doctor: traceback: {type(error).__name__}: {error}"]


async def read(path: Path) -> Shown:
    """Return everything that the commands show of the file, by the reading."""
    shown: Shown = {}

    async def note(key: str, reading: Callable[[], Awaitable[Any]]) -> None:
        try:
            shown[key] = plain(await reading())
        except (StoreError, PlaitError):
            shown[key] = TOLD
        except Exception as error:
            shown[key] = f"traceback: {type(error).__name__}: {error}"

    WARNINGS.pop()
    try:
        async with SQLiteStore(path, mode="read") as store:
            if WARNINGS.pop():
                return {"file": TOLD}
            await note("runs", store.list_runs)
            for run_id in RUNS:
                await note(f"{run_id} run", partial(store.get_run, run_id))
                await note(f"{run_id} tasks", partial(store.list_tasks, run_id))
                await note(f"{run_id} attempts", partial(store.list_attempts, run_id))
                await note(f"{run_id} events", partial(store.list_events, run_id, 0, _ALL))
                await note(f"{run_id} notes", partial(store.list_notes, run_id))
                await note(f"{run_id} info", partial(look_up, store, run_id, 0.0, True))
                for task in await _task_ids(store, run_id):
                    await note(f"{run_id}/{task} messages", partial(store.list_messages, run_id, task))
                    await note(f"{run_id}/{task} attempts", partial(store.list_attempts, run_id, task))
    except StoreError:
        shown["file"] = TOLD
    except Exception as error:
        shown["file"] = f"traceback: {type(error).__name__}: {error}"
    return shown


async def _task_ids(store: SQLiteStore, run_id: str) -> list[str]:
    try:
        return [task.task_id for task in await store.list_tasks(run_id)]
    except StoreError:
        return []


def plain(value: Any) -> Any:
    """Return records as plain data; a record that is marked as damaged is replaced by `TOLD`."""
    if is_dataclass(value) and not isinstance(value, type):
        if getattr(value, "damaged", False):
            return TOLD
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return value


async def resume(path: Path) -> dict[str, tuple[str, Any]]:
    """Resume every run with work left. Return the work and the results by run, or `TOLD` with the report."""
    done: dict[str, tuple[str, Any]] = {}
    WARNINGS.pop()
    try:
        async with SQLiteStore(path, mode="existing") as store:
            if WARNINGS.pop():
                return {"file": (TOLD, DOUBT)}
            for run_id in RESUMED:
                done[run_id] = await _resumed(store, run_id)
    except StoreError as error:
        done["file"] = TOLD, str(error)
    except Exception as error:
        done["file"] = f"traceback: {type(error).__name__}: {error}", []
    return done


async def _resumed(store: SQLiteStore, run_id: str) -> tuple[str, Any]:
    calls: list[str] = []
    model = Model()
    runner = ParallelRunner(model, store=store)
    if run_id == "team":
        runner = ParallelRunner(backends=Team(calls.append).backends, default="executor", store=store)
    try:
        with anyio.fail_after(20):
            result = await runner.resume(run_id)
    except (StoreError, PlaitError) as error:
        return TOLD, [str(error), *calls, *model.prompts]
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}", []
    texts = {
        name: TOLD if task.error_kind == "damaged" else (task.status, task.text, plain(task.data))
        for name, task in result.tasks.items()
    }
    opened = [f"{one.session_id if one.resume else ''} {list(one.history)}" for one in model.requests]
    calls += [f"{how} {prompt}" for how, prompt in zip(opened, model.prompts, strict=False)]
    if result.status is not RunStatus.COMPLETED and result.error:
        return TOLD, [result.error, *sorted(calls)]
    return result.status.value, [sorted(calls), texts]


def _misread(written: Shown, shown: Shown) -> list[str]:
    """Return the differences between the records before and after the damage, without those that are reported."""
    if shown.get("file") == TOLD:
        return []
    wrong: list[str] = [f"open: {shown['file']}"] if "file" in shown else []
    for key, was in written.items():
        if key.endswith(("messages", "attempts")) and "/" in key and shown.get(key.split("/")[0] + " tasks") == TOLD:
            continue
        now = shown.get(key, "nothing")
        if key == "runs":
            wrong += _mislisted(was, now)
        else:
            wrong += [f"{key}{one}" for one in _differences(was, now)][:1]
    return wrong


def _mislisted(was: list[Any], now: Any) -> list[str]:
    """Return the runs that are missing or changed in the list. Damaged runs are marked, and may stand anywhere."""
    if not isinstance(now, list) or TOLD not in now:
        return [f"runs{one}" for one in _differences(was, now)][:1]
    whole = [one for one in now if one != TOLD]
    missing = [one for one in was if one in whole] != whole or len(now) != len(was)
    return [f"runs: {_short(now)}"] if missing else []


def _differences(was: Any, now: Any, where: str = "") -> list[str]:
    """Return the differences between plain data; data that are reported as damaged do not differ."""
    if now in (was, TOLD):
        return []
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        return [one for key in was for one in _differences(was[key], now[key], f"{where}.{key}")]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [one for n, old in enumerate(was) for one in _differences(old, now[n], f"{where}[{n}]")]
    return [f"{where}: {_short(was)} became {_short(now)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:60]}... ({len(text)} characters)"


def _misdone(expected: Mapping[str, Any], work: Mapping[str, Any]) -> list[str]:
    if "file" in work:
        return [] if work["file"][0] == TOLD else [f"resume: {work['file'][0]}"]
    wrong: list[str] = []
    for run_id, was in expected.items():
        now = work[run_id]
        if now[0] == TOLD:
            mine = set(was[1][0])
            extra = [call for call in now[1][1:] if call not in mine and not any(call in one for one in mine)]
            wrong += [f"resume of {run_id} reports, but does other work: {_short(extra)}"] if extra else []
        elif now != was:
            wrong += [f"resume of {run_id}{one}" for one in _differences(list(was), list(now))][:1]
    return wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaigns.flips", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=COUNTS["quick"], help="the number of flipped bits")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the first case")
    parser.add_argument("--case", type=int, nargs="+", help="play these cases only")
    options = parser.parse_args(arguments)
    cases: Sequence[int] = options.case or range(options.seed, options.seed + options.count)
    began = time.monotonic()
    violations, outcomes = play(cases)
    for line in violations:
        print(line)
    print(f"{len(cases):,} flipped bits in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
