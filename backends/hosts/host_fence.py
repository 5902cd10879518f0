"""What host processes share on a host: the fence of each run, and the slots of the machine.

    <state>/<run>/<host>/fence.json      the highest epoch, and the host process that serves it
    <state>/<run>/<host>/.over           the run is over
    <state>/<run>/<host>/TASK/ATTEMPT/   the files of an attempt
    <state>/sessions/                    shared by all attempts
    <state>/slots/MACHINE/NUMBER         a lock for each slot; machines with one home folder have slots of their own

One host process serves a run at a time. A host process that takes the fence kills the previous one, which may belong to
an owner whose connection broke without notice, or to a suspended owner whose lease expired. Agents have sessions of
their own and continue. So a frame that an earlier owner sends afterwards is refused or never read.

The system frees the slots of a process that is killed. An attempt that outlives its host process then holds no slot
until it is followed again.

The files of the attempts are removed only after the runner has reported the end of the run, because a later owner may
collect the answer of an attempt that ended unobserved. Any host process that serves the end of a run removes the fences
of runs that ended 30 days ago.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.backends.process.files_and_locks import is_locked, lock_file, private_file, private_folder, replace_file
from plait.backends.process.process_table import boot_id, send_signal, start_time
from plait.json_form import as_json, from_json, value

_NAME, _OVER = "fence.json", ".over"
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_ATTEMPT = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?")
_KEY = re.compile(r"[0-9a-f]{16,64}")
_END_LIMIT = 5.0
"""Seconds for a killed host process to be gone."""
_FENCE_S = 30 * 86400.0
"""Seconds after the end of a run for which its fence is kept."""


class LowEpoch(Exception):  # noqa: N818 - reads as what it is
    """Another owner has claimed the run at a higher epoch."""


@value
class _Holder:
    epoch: int
    boot: str
    pid: int
    started: str


def state_folder() -> Path:
    """Return the folder for the files of attempts on this host: below XDG_STATE_HOME, else below ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "plait" / "hosts"


def run_folder(state: Path, key: str, host: str) -> Path:
    """Return the folder of a run on the host named `host`. Raise ValueError if a name could lead elsewhere."""
    if not _KEY.fullmatch(key) or not _ID.fullmatch(host):
        raise ValueError(f"the run {key!r} or the host {host!r} is no name of plait")
    return state / key / host


def attempt_folder(run: Path, name: str) -> Path:
    """Return the folder of the attempt `task/attempt`. Raise ValueError if the name could lead elsewhere."""
    task, _, attempt = name.rpartition("/")
    if not _ID.fullmatch(task) or not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"{name!r} is no attempt of plait")
    return run.joinpath(task, attempt)


def take_fence(folder: Path, epoch: int) -> None:
    """Make this process the host process of the run, and end the one before. Raise LowEpoch if the epoch is too low."""
    private_folder(folder)
    with _locked(folder):
        before = None
        with suppress(OSError, ValueError):
            before = from_json(_Holder, json.loads((folder / _NAME).read_bytes()))
        if before is not None and before.epoch > epoch:
            raise LowEpoch(f"the run was claimed by another process: epoch {before.epoch}, and this is epoch {epoch}")
        if before is not None and before.boot == boot_id() and before.pid != os.getpid():
            _end(before)
        holder = _Holder(epoch, boot_id(), os.getpid(), start_time(os.getpid()) or "")
        replace_file(folder / _NAME, json.dumps(as_json(holder)))
        (folder / _OVER).unlink(missing_ok=True)


def remove_attempts(state: Path, folder: Path) -> None:
    """Remove the attempts of the run in `folder`, which is over and has no processes, and all that earlier calls have
    left below `state`. Errors are ignored: a later call tries again.
    """
    with _locked(folder):
        private_file(folder / _OVER, "")
    oldest = time.time() - _FENCE_S
    for over in state.glob(f"*/*/{_OVER}"):
        with suppress(OSError), _locked(over.parent):
            ended = over.stat().st_mtime  # raises if the run goes on
            for path in over.parent.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            if ended < oldest:
                shutil.rmtree(over.parent, ignore_errors=True)
                over.parent.parent.rmdir()


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    descriptor = lock_file(folder / "fence.lock", wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


def _end(holder: _Holder) -> None:
    if not holder.started.isdecimal():
        return
    until = time.monotonic() + _END_LIMIT
    while start_time(holder.pid) == holder.started and time.monotonic() < until:
        with suppress(OSError):
            send_signal(holder.pid, int(holder.started), signal.SIGKILL)
        time.sleep(0.005)


def slots_taken(state: Path) -> int:
    """Return the number of slots of this machine that any process holds."""
    return Slots(state, len(list(_slots_folder(state).iterdir()))).taken()


def _slots_folder(state: Path) -> Path:
    return private_folder(state / "slots" / platform.node())


class Slots:
    """The slots that this process holds on its host, of `count` slots with files below `state`."""

    def __init__(self, state: Path, count: int) -> None:
        folder = _slots_folder(state)
        self._unheld = [folder / str(number) for number in range(count)]
        """The files of the slots that this process does not hold."""
        self._locks: dict[str, tuple[Path, int]] = {}
        """The file and the descriptor of the slot, by attempt."""

    def take(self, attempt: str) -> bool:
        """Take a slot for the attempt. Return False if all slots of the host are taken, also by other processes."""
        if attempt in self._locks:
            return True
        for file in self._unheld:
            if (descriptor := lock_file(file)) is not None:
                self._unheld.remove(file)
                self._locks[attempt] = file, descriptor
                return True
        return False

    def free(self, attempt: str) -> None:
        """Free the slot of the attempt, if any."""
        lock = self._locks.pop(attempt, None)
        if lock is not None:
            file, descriptor = lock
            os.close(descriptor)
            self._unheld.insert(0, file)

    def taken(self) -> int:
        """Return the number of slots that any process holds."""
        return len(self._locks) + sum(map(is_locked, self._unheld))
