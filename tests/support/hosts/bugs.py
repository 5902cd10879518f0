"""Bugs that the campaigns over hosts have to show, each planted by changing one thing in the process of a runner."""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from plait.backends.hosts import host_connection
from plait.backends.hosts.host_connection import AttemptChannel, HostConnection, frame_line
from plait.backends.hosts.host_session import HostSession, OnOutput
from plait.events import TaskPlaced
from plait.persistence import Store
from plait.runner.recovery import resume_plan


def _none_named() -> AbstractContextManager[object]:
    """The first frame of a connection names no attempt to keep."""

    def changed(frame: Mapping[str, Any]) -> bytes:
        return frame_line({**frame, "keep": []} if frame["op"] == "hello" else frame)

    return mock.patch.object(host_connection, "frame_line", changed)


def _unfenced() -> AbstractContextManager[object]:
    return mock.patch.dict(os.environ, HOST_MODULE="tests.support.hosts.unfenced")


def _none_adopted() -> AbstractContextManager[object]:
    async def no_places(_store: Store, _run_id: str) -> dict[tuple[str, int], TaskPlaced]:
        return {}

    return mock.patch.object(resume_plan, "placed_attempts", no_places)


def _no_patience() -> AbstractContextManager[object]:
    async def is_connected(
        self: HostSession, host: HostConnection, _attempt: AttemptChannel, _on_output: OnOutput
    ) -> bool:
        while not host.is_connected and not host.tries:
            await self._change()
        return host.is_connected

    return mock.patch.object(HostSession, "wait_until_back", is_connected)


def _lost_kept() -> AbstractContextManager[object]:
    """A host that comes back is asked to keep the attempts that were given up in the meantime."""

    def release(self: HostConnection, attempt: AttemptChannel) -> None:
        self.attempts.pop(attempt.name, None)
        self.on_change()

    return mock.patch.object(HostConnection, "release", release)


BUGS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "no attempt kept": _none_named,
    "a former owner's host process left alive": _unfenced,
    "placed attempts begun anew": _none_adopted,
    "a broken connection taken for the end": _no_patience,
    "lost attempts kept": _lost_kept,
}
