"""The connection between the handle of a run and the executor of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import anyio

from plait.json_form import JsonValue

AnswerHandler: TypeAlias = Callable[[str, int, JsonValue, str], bool]
"""A function of the task id, the attempt that asked, the answer, and the origin of the answer. Returns True if the
answer is used.
"""


class Control:
    """The controls of a run, usable before the executor exists and after the executor has ended."""

    def __init__(self) -> None:
        self.ended_by: Literal["stop", "cancel"] | None = None
        self._end: Callable[[Literal["stop", "cancel"]], None] | None = None
        self._wind_down: Callable[[], None] | None = None
        self._answer: AnswerHandler | None = None
        self._cancelled = anyio.Event()
        self.requires_record = False
        """Whether a new run must not begin unless its creation is stored."""
        self.on_late_end: Callable[[], None] | None = None
        """Called by `end` once the execution has ended and only the writing of the last changes is left."""

    def attach(
        self,
        end: Callable[[Literal["stop", "cancel"]], None],
        wind_down: Callable[[], None] | None = None,
        answer: AnswerHandler | None = None,
    ) -> None:
        """Connect the functions of an executor. Call `end` at once if the end of the run was requested before."""
        self._end, self._wind_down, self._answer = end, wind_down, answer
        if self.ended_by is not None:
            end(self.ended_by)

    def end(self, how: Literal["stop", "cancel"]) -> None:
        """End the run early, or, after its end, the wait for its store. Only the first call has an effect on the
        run.
        """
        if self.on_late_end is not None:
            self.on_late_end()
        if self.ended_by is None:
            self.ended_by = how
            if self._end is not None:
                self._end(how)

    def cancel(self) -> None:
        """Cancel the run, but let the attempts under way finish until `end` is called. A run with nothing under way yet
        ends at once. Do nothing if the run is ending already.
        """
        if self._wind_down is None:
            self.end("cancel")
        elif self.ended_by is None:
            self._wind_down()
            self._cancelled.set()

    async def cancelled(self) -> None:
        """Wait for `cancel` of a run under way."""
        await self._cancelled.wait()

    def answer(self, task_id: str, attempt: int, value: JsonValue, by: str) -> bool:
        """Pass the answer to `Executor.answer` and return the result; False before `attach`."""
        return self._answer is not None and self._answer(task_id, attempt, value, by)
