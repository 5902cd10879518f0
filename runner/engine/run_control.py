"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from plait.backends.protocol import JsonValue

Answer: TypeAlias = "Callable[[str, int, JsonValue, str], bool]"


class Control:
    """How a handle reaches its execution, from before there is one until after it ended."""

    def __init__(self) -> None:
        self.ended_by: Literal["stop", "cancel"] | None = None
        self._end: Callable[[Literal["stop", "cancel"]], None] | None = None
        self._wind_down: Callable[[], None] | None = None
        self._answer: Answer | None = None

    def attach(
        self,
        end: Callable[[Literal["stop", "cancel"]], None],
        wind_down: Callable[[], None] | None = None,
        answer: Answer | None = None,
    ) -> None:
        """What can be ended begins; pass on what was asked for before."""
        self._end, self._wind_down, self._answer = end, wind_down, answer
        if self.ended_by is not None:
            end(self.ended_by)

    def end(self, how: Literal["stop", "cancel"]) -> None:
        """End the run before its time. The first word stands."""
        if self.ended_by is None:
            self.ended_by = how
            if self._end is not None:
                self._end(how)

    def wind_down(self) -> None:
        """Cancel the run, whose execution has begun, and let what is under way come to its end, until `end`."""
        if self._wind_down is not None:
            self._wind_down()

    def answer(self, task_id: str, attempt: int, value: JsonValue, by: str) -> bool:
        """See `Executor.answer`; False where nothing is under way."""
        return self._answer is not None and self._answer(task_id, attempt, value, by)
