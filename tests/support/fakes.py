"""Stand-ins with a script: a backend that holds conversations, a clock that does not wait, a store that fails."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal

import anyio
import anyio.lowlevel

from backends.errors import BackendError
from backends.protocol import Opening, Output, Reply, Usage
from persistence import Batch, Note, NoteRecord, Store, StoreError
from persistence.records import AttemptRecord, EventRecord, MessageRecord, RunRecord, TaskRecord
from runner import Clock
from runner.inbox import LOOK_EVERY_S

Answer = Callable[[str, Opening], "str | Reply | Exception"]


def echo(prompt: str, _opening: Opening) -> str:
    return f"re: {prompt}"


class Talker:
    """A backend with sessions and replayed history. `answer` decides; every opening and prompt is kept."""

    def __init__(self, answer: Answer = echo, *, own_ids: bool = False) -> None:
        self.answer = answer
        self.own_ids = own_ids
        self.made = 0
        self.openings: list[Opening] = []
        self.prompts: list[str] = []
        self.closed = 0

    def new_session_id(self) -> str | None:
        if self.own_ids:
            return None
        self.made += 1
        return f"session-{self.made}"

    def open(self, opening: Opening) -> _Talk:
        self.openings.append(opening)
        return _Talk(self, opening)


class _Talk:
    def __init__(self, backend: Talker, opening: Opening) -> None:
        self._backend = backend
        self._opening = opening
        self.session_id = opening.session_id

    async def __aenter__(self) -> _Talk:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.closed += 1

    async def send(self, prompt: str) -> Reply:
        self._backend.prompts.append(prompt)
        await anyio.lowlevel.checkpoint()
        if self._backend.own_ids and self.session_id is None:
            self._backend.made += 1
            self.session_id = f"own-{self._backend.made}"
            self._opening.on_session(self.session_id)
        answer = self._backend.answer(prompt, self._opening)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Reply):
            return answer
        self._opening.on_output(Output("text", answer))
        return Reply(answer, session_id=self.session_id, usage=Usage(len(prompt), len(answer), 0.5))


class QuickClock(Clock):
    """A clock whose sleeps pass at once, adding to the time instead; `slept` lists them."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.slept: list[float] = []

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        # Renewing the lease and looking into the inbox: never, in a test of moments. Others may sleep a second, too.
        if seconds == 10.0 or seconds is LOOK_EVERY_S:
            await anyio.sleep_forever()
        self.slept.append(seconds)
        self.now += seconds
        await anyio.lowlevel.checkpoint()


Fault = Literal["raise", "after", "hang", "bug"]


class FaultyStore:
    """Another store behind a script of faults: `fault(n)` says what happens to the n-th write, counted from 1.

    `raise` fails before any effect, `after` fails after the write took effect, `hang` never returns, `bug` raises
    something that is no StoreError.
    """

    def __init__(self, inner: Store, fault: Callable[[int], Fault | None]) -> None:
        self.inner = inner
        self.fault = fault
        self.writes = 0

    async def write(self, batch: Batch) -> None:
        self.writes += 1
        fault = self.fault(self.writes)
        if fault == "raise":
            raise StoreError("planted fault")
        if fault == "bug":
            raise ZeroDivisionError("planted bug")
        if fault == "hang":
            await anyio.sleep_forever()
        await self.inner.write(batch)
        if fault == "after":
            raise StoreError("planted fault after the effect")

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self.inner.get_run(run_id)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self.inner.list_runs(limit)

    async def list_tasks(self, run_id: str) -> tuple[TaskRecord, ...]:
        return await self.inner.list_tasks(run_id)

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        return await self.inner.list_attempts(run_id, task_id)

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        return await self.inner.list_messages(run_id, task_id)

    async def list_events(self, run_id: str, after: int = 0, limit: int = 1000) -> tuple[EventRecord, ...]:
        return await self.inner.list_events(run_id, after, limit)

    async def send(self, run_id: str, note: Note) -> None:
        await self.inner.send(run_id, note)

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        return await self.inner.list_notes(run_id, after)


def failing(kind_error: BackendError, times: int, then: Answer = echo) -> Answer:
    """An answer that fails `times` times for each prompt."""
    left: dict[str, int] = {}

    def answer(prompt: str, opening: Opening) -> str | Reply | Exception:
        left[prompt] = left.get(prompt, times) - 1
        return kind_error if left[prompt] >= 0 else then(prompt, opening)

    return answer
