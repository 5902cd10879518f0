"""Files that the command writes for a person: what a power loss leaves of one, at any moment of its being written.

A real process writes it under strace; the calls that it made are done to a simulated disk (power_images.py). Whatever
is left has to be the old file or the new one, whole, and the new one once the process has said that it is done.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from tests.faults.campaigns.report import Report, Scale
from tests.support.stores.power_images import Disk, Kept
from tests.support.stores.power_vfs import Acknowledged, Operation, Recording
from tests.support.stores.system_calls import missing, record_calls

NAME = "picture.svg"
SIZES: dict[Scale, tuple[int, ...]] = {"quick": (300, 40_000), "nightly": (0, 1, 300, 4_096, 40_000, 1_000_000)}
"""Characters of the new file."""
OLD_SIZES = (None, 0, 9_000)
"""Of the one before; None where there is none."""
IMAGES: dict[Scale, int] = {"quick": 20, "nightly": 500}
"""Of each kind that random choices make, after each operation."""

Sabotage: TypeAlias = Literal["renamed before it is synced", "a name that is not synced", "written in place"]

CODE = """
import os, stat, sys
from pathlib import Path
from plait.runner.cli import terminal_output as files

path, size, sabotage = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
fsync, skipped = os.fsync, {"renamed before it is synced": stat.S_ISREG, "a name that is not synced": stat.S_ISDIR}
if sabotage in skipped:
    files.os.fsync = lambda file: None if skipped[sabotage](os.fstat(file).st_mode) else fsync(file)
if sabotage == "written in place":
    files.write_file = lambda path, text, private: path.write_text(text)
files.write_file(path, "n" * size, private=True)
os.write(1, b"done\\n")
"""


def run(*, scale: Scale, seed: int = 0) -> Report:
    """Files of several sizes, new ones and over old ones. Needs strace; without it there are no cases."""
    began = time.monotonic()
    if missing() is not None:
        return Report(method="files", unit="power losses under a file", cases=0)
    cases, violations = 0, list[str]()
    for size, old in itertools.product(SIZES[scale], OLD_SIZES):
        for wrong in images_of(size, old, scale, seed):
            cases += 1
            violations += [wrong] if wrong else []
    return Report(
        method="files",
        unit="power losses under a file",
        cases=cases,
        violations=tuple(dict.fromkeys(violations)),
        planted={sabotage: is_caught(sabotage, seed) for sabotage in get_args(Sabotage)},
        seconds=time.monotonic() - began,
    )


def is_caught(sabotage: Sabotage, seed: int = 0) -> bool:
    """Whether some image shows the planted bug."""
    return any(images_of(300, 9_000, "quick", seed, sabotage))


def images_of(size: int, old: int | None, scale: Scale, seed: int, sabotage: Sabotage | None = None) -> Iterator[str]:
    """What is wrong with each image of one write, "" where nothing is."""
    before, after = None if old is None else b"o" * old, b"n" * size
    where = f"a file of {size:,} bytes, {'none' if old is None else f'{old:,}'} before"
    rng, disk = random.Random(seed), Disk()
    found, done = _recorded(before, size, sabotage)
    for operation in found:
        disk.do(operation)
    allowed = {before, after}
    for operation in done:
        disk.do(operation)
        if isinstance(operation, Acknowledged):
            allowed = {after}
        for kept in get_args(Kept):
            for _ in range(1 if kept in {"none", "all"} else IMAGES[scale]):
                left = disk.after_power_loss(kept, rng).get(NAME)
                yield "" if left in allowed else f"{where}: {_shown(left)} (kept {kept})"


def _recorded(before: bytes | None, size: int, sabotage: Sabotage | None) -> tuple[list[Operation], list[Operation]]:
    """What was on the disk before, and what was done to it."""
    recording = Recording()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        if before is not None:
            (folder / NAME).write_bytes(before)
            recording.found(folder / NAME)
        already = len(recording.operations)
        record_calls(recording, CODE, folder, str(folder / NAME), str(size), sabotage or "")
    return recording.operations[:already], recording.operations[already:]


def _shown(content: bytes | None) -> str:
    return "nothing is left" if content is None else f"{len(content):,} bytes are left, and not the right ones"
