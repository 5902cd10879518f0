"""An agent for hosts, in a module that they can import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.support.agents.detached_backend import Outliver


@dataclass(eq=False)
class Agent(Outliver):
    """The Outliver of the world in `world`, made anew on each host."""

    limit: ClassVar[float] = 300.0
    world: str

    def __post_init__(self) -> None:
        super().__init__(Path(self.world))
