"""One word for each kind of error that a person or a program can mend: the same over HTTP and under `--json`."""

from __future__ import annotations

from collections.abc import Mapping

from plait.backends.errors import BackendError, BackendUnavailable
from plait.persistence.errors import StoreError
from plait.runner.errors import (
    AnswerConflict,
    BackendMissing,
    KeyConflict,
    OwnershipLost,
    PlaitError,
    RunNotFound,
    RunNotResumable,
    RunOwned,
    TaskNotFound,
    TurnNotStored,
)
from plait.runner.plan.errors import PlanError

ERROR_KINDS: Mapping[type[Exception], str] = {
    RunNotFound: "run_not_found",
    TaskNotFound: "not_found",
    RunOwned: "run_owned",
    OwnershipLost: "ownership_lost",
    RunNotResumable: "run_not_resumable",
    KeyConflict: "key_conflict",
    PlanError: "plan_invalid",
    AnswerConflict: "answer_conflict",
    BackendMissing: "backend_missing",
    BackendUnavailable: "backend_unavailable",
    BackendError: "backend_failed",
    TurnNotStored: "store_failed",
    StoreError: "store_failed",
    PlaitError: "refused",
}
"""A class stands before its base classes."""


def kind_of(error: Exception) -> str | None:
    """Return the kind of `error`; None for a bug."""
    return next((kind for cls, kind in ERROR_KINDS.items() if isinstance(error, cls)), None)
