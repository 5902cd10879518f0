"""An agent for hosts, in a module that they can import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.agents.outliving import Outliver


@dataclass(eq=False)
class Agent(Outliver):
    """The Outliver of the world in `world`, made anew on each host."""

    world: str

    def __post_init__(self) -> None:
        super().__init__(Path(self.world))
