"""The common base of the models of all kinds of backends."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

BASE_URL = r"^https?://[^/@?#]+(/[^@?#]*)?$"
"""A server's URL, without credentials such as user:password@ or ?key=, because specs are stored with the run."""

CALL = r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$"
"""A Python function: a file or a module, and the name in it."""


class Spec(BaseModel):
    """A backend as named in a plan file. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid")
    adjustable: ClassVar[frozenset[str]] = frozenset()
    """The settings that a task may have in place of the backend's: see `AdjustableBackend`."""
    takes_files: ClassVar[Literal["contents", "paths"] | None] = None
    """See `FileBackend`; None for a kind that takes text files alone."""

    concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Limit of parallel tasks of this backend. Default: the run's own limit.",
    )
    on: str | None = Field(
        default=None,
        description="Name under `hosts`: the tasks run on these hosts. Default: on this machine.",
    )
