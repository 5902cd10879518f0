"""The common base of the models of all kinds of backends."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

BASE_URL = r"^https?://[^/@?#]+(/[^@?#]*)?$"
"""A server's URL, without credentials such as user:password@ or ?key=, because specs are stored with the run."""

CALL = r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$"
"""A Python function: a file or a module, and the name in it."""


class RatePart(BaseModel):
    """Limits of rate, kept before the server has to refuse."""

    model_config = ConfigDict(extra="forbid")

    requests_per_minute: float | None = Field(
        default=None, ge=1, allow_inf_nan=False, description="Requests begun per minute."
    )
    tokens_per_minute: float | None = Field(
        default=None, ge=1, allow_inf_nan=False, description="Tokens read and written per minute."
    )


class Spec(BaseModel):
    """A backend as named in a plan file. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid")
    adjustable: ClassVar[frozenset[str]] = frozenset()
    """The settings that a task may have in place of the backend's: see `AdjustableBackend`."""
    takes_files: ClassVar[Literal["contents", "paths"] | None] = None
    """As in `FileBackend`, for the kind on this machine; None for a kind that takes text files alone."""

    concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Limit of parallel tasks of this backend. Default: the run's own limit.",
    )
    on: str | None = Field(
        default=None,
        description="Name under `hosts`: the tasks run on these hosts. Default: on this machine.",
    )
    needs: dict[str, float] | None = Field(
        default=None,
        min_length=1,
        description="Resources of a Dask worker that a task takes, by name. Default: {agents: 1}.",
    )

    @property
    def file_form(self) -> Literal["contents", "paths"] | None:
        """As `takes_files`; None on hosts, which get no files but texts in the prompt."""
        return self.takes_files if self.on is None else None

    @model_validator(mode="after")
    def _needs_belong_to_hosts(self) -> Self:
        if self.needs is not None and self.on is None:
            raise ValueError("needs are resources of a Dask worker; name the hosts with `on`, or leave `needs` out")
        if not all(0 < need < float("inf") for need in (self.needs or {}).values()):
            raise ValueError("needs must be positive numbers, such as {agents: 1}")
        return self
