"""Bugs that the campaign of the servers has to show, each planted by changing one thing while it is looked for."""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from plait.runner.engine import checkpointer
from plait.runner.engine.checkpointer import Checkpointer, KeptEvents
from tests.faults.campaigns.planted import Shown


def _failed_write_forgotten() -> AbstractContextManager[object]:
    """The changes of a write that fails are not written again."""
    record_failure = Checkpointer._record_failure

    def forget(self: Any, error: Any) -> None:
        record_failure(self, error)
        self._unstored.clear()

    return mock.patch.object(Checkpointer, "_record_failure", forget)


def _nothing_kept() -> AbstractContextManager[object]:
    """A store that has fallen behind is not written again from where it stands."""
    return mock.patch.object(KeptEvents, "take_from", return_value=None)


def _no_patience_at_the_end() -> AbstractContextManager[object]:
    return mock.patch.object(checkpointer, "SERVER_PATIENCE_S", 0.0)


BUGS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "a failed write forgotten": _failed_write_forgotten,
    "nothing kept for a store that is behind": _nothing_kept,
    "no patience at the end": _no_patience_at_the_end,
}
SHOWN: Mapping[str, Shown] = {
    "a failed write forgotten": Shown("killed", "stored attempts"),
    "nothing kept for a store that is behind": Shown("failed over", "changes lost"),
    "no patience at the end": Shown("away at the end", "changes lost"),
}
