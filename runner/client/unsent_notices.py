"""Sends the notices that the processes of runs have left unsent: they have died, or a receiver was away."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import anyio.to_thread

from plait.clock_and_ids import Clock
from plait.errors import PlaitError, StoreError
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.program_log import logger
from plait.runner.client.run_backends import FileOptions, StoredBackends, user_targets
from plait.runner.domain.notify_target import NOTIFY, NotifyTarget, usable_targets
from plait.runner.engine.run_options import bounded
from plait.runner.state.stored_run import read_settings, stored_targets

LOOK_AGAIN_S = 60.0
"""Seconds after which a run that could not be read is read again."""
EVERY_S = 10.0
"""Seconds between two looks at the runs of a store."""
STORE_S = 10.0
"""The limit of a call of the store, in seconds."""
MOST_RUNS = 1_000
"""The number of runs whose notices are looked for first, the newest ones."""
LATEST_RUNS = 100
"""The number of runs that are looked at from then on, beside those with notices left."""


class UnsentNotices:
    """The notices of the runs of a store, whichever processes execute them.

    `files` name files in place of those stored with the runs, and the folders of plan files that a worker trusts.
    Targets that the store alone does not make trusted, and those whose variables are not set here, are left to others.
    """

    def __init__(self, store: Store, files: FileOptions | None = None, clock: Clock | None = None) -> None:
        self._store = bounded(store, STORE_S)
        self._files, self._clock = files or FileOptions(plans=()), clock or Clock()
        self._targets: dict[str, Sequence[NotifyTarget | None]] = {}
        """The usable targets of each run; none for most runs."""
        self._seen: dict[str, tuple[int, float | None]] = {}
        """The last change of each run when its notices were sent, and the time of the next try, if any."""

    async def send(self) -> float | None:
        """Send what is due, and return the Unix time of the next try; None if nothing is left. Raises StoreError."""
        number = LATEST_RUNS if self._seen else MOST_RUNS
        listed = {run.run_id: run.last_seq for run in await self._store.list_runs(number) if not run.damaged}
        for run_id, (last_seq, due) in list(self._seen.items()):
            if due is not None:
                listed.setdefault(run_id, last_seq)
            elif run_id not in listed:
                del self._seen[run_id]
                self._targets.pop(run_id, None)
        for run_id, last_seq in listed.items():
            seen, due = self._seen.get(run_id, (0, None))
            if seen != last_seq or (due is not None and due <= self._clock.wall()):
                self._seen[run_id] = last_seq, await self._send_of(run_id)
        return min((due for _, due in self._seen.values() if due is not None), default=None)

    async def _send_of(self, run_id: str) -> float | None:
        """Do as `send` for one run, which keeps back no notice of another one, whatever is wrong with it."""
        try:
            if run_id not in self._targets:
                self._targets[run_id] = await self._read_targets(run_id)
            if not (targets := self._targets[run_id]):
                return None
            from plait.runner.engine.notices import send_due  # noqa: PLC0415 - few runs need the HTTP client

            return await send_due(self._store, run_id, targets, self._clock)
        except Exception as error:
            why = str(error) if isinstance(error, PlaitError) else type(error).__name__
            logger(run=run_id).warning("notices_not_read", error=why)
            return self._clock.wall() + LOOK_AGAIN_S

    async def send_for_ever(self) -> None:
        """Look at the runs every EVERY_S seconds, until cancelled. A store that is away is waited for."""
        is_away = False
        while True:
            try:
                await self.send()
                is_away = False
            except StoreError as error:
                if not is_away:
                    logger().warning("notices_not_read", error=str(error))
                is_away = True
            await self._clock.sleep(EVERY_S)

    async def _read_targets(self, run_id: str) -> Sequence[NotifyTarget | None]:
        run = await self._store.get_run(run_id)
        if run is None or run.damaged or NOTIFY not in read_settings(run):
            return ()
        stored = stored_targets(run)
        trusted = await anyio.to_thread.run_sync(self._trusted, run)
        targets, refused = usable_targets(stored, trusted, os.environ)
        for target, why in refused:
            logger(run=run_id).warning("notices_left_to_others", to=str(target or "unknown"), why=why)
        return targets if any(targets) else ()

    def _trusted(self, run: RunRecord) -> Sequence[NotifyTarget]:
        """Return the targets in the plan file of the run, and in the user's own file."""
        targets: list[NotifyTarget] = []
        with suppress(PlaitError):  # a program made the run
            targets += StoredBackends.of(run, self._files).notify()
        with suppress(PlaitError):  # reported by the commands that begin runs
            targets += user_targets()
        return targets
