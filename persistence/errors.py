"""The errors of a store. Any other exception from a store is a bug; the runner treats the exception as StoreError."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of `persistence`: a call of the store failed.

    A batch is unknown after a failed `write`: applied or not. Writing the same batch again is always safe.
    """


class StoreNotOpen(StoreError):  # noqa: N818 - the name states the condition
    """The store is not open yet, is closed, or was opened for reading only. Nothing was changed.

    The program is wrong, so a run does not begin with the store.
    """


class StoreBusy(StoreError):  # noqa: N818 - the name states the condition
    """Another process wrote to the store for longer than a write waits. Nothing of the batch was applied.

    The batch can be applied once the other process is done. A run that ends repeats the write for up to a minute.
    """


class StoreRefused(StoreError):  # noqa: N818 - the name states the condition
    """The store lets this process write nothing until a person changes something: a right, a password, a database that
    is gone or read-only, a full disk. Nothing of the batch was applied.

    The batch can be applied afterwards. A run goes on, but does not wait for the store at its end.
    """


class StoreUnusable(StoreError):  # noqa: N818 - the name states the condition
    """The store cannot be opened: missing, empty, foreign, damaged, in another format, or not permitted.

    The message names the path, the reason and the remedy. Nothing was changed.
    """


class Fenced(StoreError):  # noqa: N818
    """The epoch of the batch is not the epoch of the run: another process owns the run.

    Nothing was applied, and writing the batch again fails again.
    """


class Conflict(StoreError):  # noqa: N818
    """A change cannot be applied. Nothing of the batch was applied, and writing the batch again fails again.

    Either the change does not follow from the stored state (unknown run or task, existing run, transition out of a
    terminal status), or a value cannot be stored.
    """


class Gap(Conflict):
    """The batch starts beyond the stored changes: changes before the batch are missing. Nothing was applied.

    Raised if the caller skipped changes, and if the store has lost changes, as a standby that was promoted before it
    had received the last ones. Writing the missing changes first, from `next_seq` on, closes the gap.
    """

    def __init__(self, message: str, next_seq: int) -> None:
        super().__init__(message)
        self.next_seq = next_seq
        """The number of the first missing change."""
