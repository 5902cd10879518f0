"""Bringing a store of an earlier version up to date: killed at every statement of it, and the power lost at any moment.

Whatever is left has to hold all that was there, in the old version or in the new one, and to open again.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import anyio

from plait.persistence import SQLiteStore, StoreError
from plait.persistence.contract.samples import whole
from tests.faults.campaigns.power import FILE, images, put
from tests.faults.campaigns.report import Report, Scale
from tests.support.processes import warm
from tests.support.stores.power_vfs import Recording, recorded

ROOT = Path(__file__).parents[3]
EARLIER = ROOT / "tests" / "fixtures" / "schema_1.db"
STEPS: dict[Scale, int] = {"quick": 4, "nightly": 1}
"""Every so-manieth statement is one to be killed at."""
ROUNDS: dict[Scale, int] = {"quick": 1, "nightly": 100}
"""How often images are drawn of the same recording."""
_LIMIT = 30.0  # seconds for one process

Sabotage: TypeAlias = Literal["executescript in a migration"]

CODE = """
import asyncio, os, signal, sqlite3, sys
from pathlib import Path
from plait.persistence import SQLiteStore
from plait.persistence import failpoints as boundaries
from plait.persistence.sqlite import migrating, opening

path, at, sabotage = sys.argv[1], int(sys.argv[2]), sys.argv[3]
statements = 0

def migrate_by_script(_path, connection):
    connection.execute("PRAGMA foreign_keys = OFF")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    for step in range(version + 1, migrating.SCHEMA_VERSION + 1):
        connection.executescript(Path(migrating.__file__).with_name(f"schema_{step}.sql").read_text())
    boundaries.reached("schema.before_commit")

def count(_statement):
    global statements
    statements += 1
    if statements == at:
        os.kill(os.getpid(), signal.SIGKILL)

def migrate_counted(path, connection):
    connection.set_trace_callback(count)
    migrate(path, connection)
    connection.set_trace_callback(None)

def on_reach(name):
    if name == "schema.before_commit" and at == 0:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with SQLiteStore(path, mode="existing"):
        pass

migrate = migrate_by_script if sabotage else opening.migrate
opening.migrate = migrate_counted
boundaries.on_reach = on_reach
asyncio.run(main())
"""


def run(*, scale: Scale, seed: int = 0) -> Report:
    """Kills at the statements that `scale` says and at the named boundary, and images of power losses."""
    began = time.monotonic()
    kills, violations = killed_everywhere(STEPS[scale])
    power_losses, lost = power_lost(ROUNDS[scale], seed)
    return Report(
        method="upgrades",
        unit="cut upgrades",
        cases=kills + power_losses,
        violations=(*violations, *lost),
        planted={sabotage: bool(killed_everywhere(STEPS["quick"], sabotage)[1]) for sabotage in get_args(Sabotage)},
        seconds=time.monotonic() - began,
        figures={"SIGKILLs": kills, "power losses": power_losses},
    )


def killed_everywhere(step: int, sabotage: Sabotage | None = None) -> tuple[int, list[str]]:
    """Kill an upgrade before its commit, then others at every `step`-th statement of theirs: how many were killed, and
    what is wrong with what they left.
    """
    kills, violations = 0, list[str]()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / FILE
        shutil.copy(EARLIER, path)
        expected = anyio.run(everything, path)
        at = 0
        while _killed(path, at, sabotage):
            kills += 1
            wrong = _difference(path, expected)
            violations += [f"an upgrade killed at its statement {at}: {wrong}"] if wrong else []
            at += 1 if at == 0 else step
    return kills, violations


def _killed(path: Path, at: int, sabotage: Sabotage | None) -> bool:
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    shutil.copy(EARLIER, path)
    done = warm.run(
        [sys.executable, "-c", CODE, path, str(at), sabotage or ""],
        cwd=ROOT,
        timeout=_LIMIT,
    )
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr
    return done.returncode != 0


def power_lost(rounds: int, seed: int) -> tuple[int, list[str]]:
    """Draw images of an upgrade that the power fails: how many different ones there were, and what is wrong there."""
    recording, violations, known = Recording(), list[str](), set[int]()
    with tempfile.TemporaryDirectory() as name:
        path, folder = Path(name) / FILE, Path(name) / "images"
        shutil.copy(EARLIER, path)
        folder.mkdir()
        recording.found(path)
        before = len(recording.operations)
        with recorded(recording, {}):
            expected = anyio.run(everything, path)
        for number in range(seed, seed + rounds):
            for moment, kept, image in images(recording.operations, random.Random(number)):
                key = hash(tuple(image.items()))
                if moment.after >= before and key not in known:
                    known.add(key)
                    wrong = _difference(put(image, folder), expected)
                    where = f"an upgrade that the power failed after operation {moment.after}, kept {kept}"
                    violations += [f"{where}: {wrong}"] if wrong else []
    return len(known), violations


def _difference(path: Path, expected: list[Any]) -> str:
    try:
        found = anyio.run(everything, path)
    except StoreError as error:
        return str(error)
    return "" if found == expected else "it does not hold what it held before"


async def everything(path: Path) -> list[Any]:
    """All that the store at `path` holds, once it is up to date."""
    async with SQLiteStore(path, mode="existing") as store:
        return [await whole(store, run.run_id) for run in await store.list_runs()]
