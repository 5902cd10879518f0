"""What a disk may hold after the power went: everything up to each file's last sync, and any of what came after.

Of the writes that were not synced, a disk may have kept none, all, the first ones, any of them in any combination, or
single sectors of 512 bytes. The same goes for names that were given or taken since the folder was synced.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, TypeAlias

from tests.support.stores.power_vfs import Entry, Operation, Sync, SyncFolder, Truncate, Write

SECTOR = 512
Kept: TypeAlias = Literal["none", "all", "first", "some", "torn"]
"""How much of what was not synced is still there."""
Image: TypeAlias = dict[str, bytes]
"""The files of the folder by name."""


class Disk:
    """A disk that operations are done to, and what may be left of them."""

    def __init__(self) -> None:
        self._safe: dict[int, bytearray] = {}
        self._cached: dict[int, list[Write | Truncate]] = {}
        self._safe_names: dict[str, int] = {}
        self._names: dict[str, int] = {}

    def do(self, operation: Operation) -> None:
        """Operations that are not the disk's change nothing."""
        match operation:
            case Write(file) | Truncate(file):
                self._cached.setdefault(file, []).append(operation)
            case Sync(file):
                _apply(self._safe.setdefault(file, bytearray()), self._cached.pop(file, ()))
            case Entry(name, None):
                self._names.pop(name, None)
            case Entry(name, int(file)):
                self._names[name] = file
            case SyncFolder():
                self._safe_names = dict(self._names)
            case _:
                pass

    def after_power_loss(self, kept: Kept, rng: random.Random) -> Image:
        """What is found when the power is back."""
        image: Image = {}
        for name in sorted(self._names.keys() | self._safe_names.keys()):
            file = self._pick(kept, rng, name)
            if file is not None:
                content = bytearray(self._safe.get(file, b""))
                _apply(content, _left(self._cached.get(file, []), kept, rng))
                image[name] = bytes(content)
        return image

    def _pick(self, kept: Kept, rng: random.Random, name: str) -> int | None:
        safe, now = self._safe_names.get(name), self._names.get(name)
        if kept == "none":
            return safe
        return now if kept == "all" else rng.choice((safe, now))


def _left(cached: list[Write | Truncate], kept: Kept, rng: random.Random) -> Iterable[Write | Truncate]:
    match kept:
        case "none":
            return ()
        case "all":
            return cached
        case "first":
            return cached[: rng.randrange(len(cached) + 1)]
        case "some":
            return [operation for operation in cached if rng.random() < 0.5]
        case "torn":
            return [piece for operation in cached if rng.random() < 0.8 for piece in _torn(operation, rng)]


def _torn(operation: Write | Truncate, rng: random.Random) -> Iterator[Write | Truncate]:
    """The operation, or some of its sectors."""
    if isinstance(operation, Truncate) or rng.random() < 0.5:
        yield operation
        return
    first, end = operation.offset, operation.offset + len(operation.data)
    cuts = [first, *range((first // SECTOR + 1) * SECTOR, end, SECTOR), end]
    for start, stop in pairwise(cuts):
        if rng.random() < 0.5:
            yield Write(operation.file, start, operation.data[start - first : stop - first])


def _apply(content: bytearray, operations: Iterable[Write | Truncate]) -> None:
    for operation in operations:
        if isinstance(operation, Truncate):
            del content[operation.size :]
            content.extend(bytes(operation.size - len(content)))
        else:
            content.extend(bytes(max(0, operation.offset - len(content))))
            content[operation.offset : operation.offset + len(operation.data)] = operation.data
