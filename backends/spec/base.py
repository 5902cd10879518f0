"""What the models of all kinds of backends have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

BASE_URL = r"^https?://[^/@?#]+(/[^@?#]*)?$"
"""A server's URL. Nothing like user:password@ or ?key= in it: specs are stored with the run."""


class Spec(BaseModel):
    """A backend as a plan file names it; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Most tasks of this backend at once. Default: the run's own limit.",
    )
