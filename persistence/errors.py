"""What a store may raise. Everything else that escapes from a store is a bug, and is treated like StoreError."""

from __future__ import annotations


class StoreError(Exception):
    """A store call failed. After a failed `write` it is unknown whether the batch was applied: writing the very same
    batch again is always safe.
    """


class StoreNotOpen(StoreError):  # noqa: N818 - reads as what it is
    """The store has to be opened first, is closed, or is only read from: a mistake of the program, so a run does not
    begin with such a store. Nothing was changed.
    """


class StoreBusy(StoreError):  # noqa: N818 - reads as what it is
    """Another process has been writing to the store for longer than a write waits. Nothing of the batch was applied,
    and once that process is done it can be: at a run's end it is waited for up to a minute.
    """


class StoreUnusable(StoreError):  # noqa: N818 - reads as what it is
    """The store cannot be opened: missing, empty, foreign, damaged, in another format, or not permitted.
    The message names the path, the reason, and what to do. Nothing was changed.
    """


class Fenced(StoreError):  # noqa: N818
    """The batch's epoch is not the run's: somebody else owns the run now. Nothing was applied, and nothing will be."""


class Conflict(StoreError):  # noqa: N818
    """A change cannot be applied: it does not follow from what is stored (an unknown run or task, a run that exists
    already, a transition out of a terminal status), or holds a value that the store cannot keep. Nothing of the batch
    was applied, and trying again is useless.
    """
