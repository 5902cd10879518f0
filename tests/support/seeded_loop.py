"""An event loop with virtual time whose order of doing things is drawn from a seed.

Time passes only when nothing is ready: then it jumps to the next timer, so virtual hours take milliseconds. Each turn
of the loop also costs up to `TURN_S` of virtual time, so that a timer can fall between any two steps.

Drawn from the seed: which of the ready callbacks (steps of tasks, callbacks of futures, timers that are due) run in a
turn and in which order, and the order of timers set for the same moment. Not touched: the order of steps within one
task, the order of timers more than `TICK_S` apart, which waiter of a lock or queue is served first. asyncio itself
promises more than that only to transports (connection_made before the first data); there is no I/O here, so it does not
count. Nothing depends on where objects lie in memory, so the same seed gives the same run in every process.

What cannot be simulated: threads, sockets, child processes. Whoever waits for one is reported as stuck.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any, Self, TypeVar, cast
from unittest import mock

from anyio._backends._asyncio import CancelScope

from plait.clock_and_ids import Clock

TURN_S = 50e-6
"""Virtual seconds that one turn of the loop costs at most."""
TICK_S = 1e-3
"""Timers due within this long are due at the same time."""
EPOCH = 1_800_000_000.0
"""The wall time at which every loop starts."""

T = TypeVar("T")


class Stuck(Exception):  # noqa: N818 - reads as what it is
    """Nothing can run any more, or no end comes. The message lists every task and where it waits."""


class VirtualClock(Clock):
    """The running loop's virtual time. `ahead` is by how many seconds the wall clock is wrong."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.ahead = ahead

    def wall(self) -> float:
        return EPOCH + self.monotonic() + self.ahead

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


def run_seeded(
    main: Callable[[], Coroutine[Any, Any, T]],
    seed: int,
    *,
    limit_s: float = 7 * 86_400.0,
    limit_turns: int = 2_000_000,
) -> T:
    """Like `anyio.run(main)`, on a `SeededLoop`. Raises Stuck at a deadlock, and after `limit_s` virtual seconds or
    `limit_turns` turns of the loop.
    """
    loop = SeededLoop(seed, limit_s, limit_turns)
    runner = asyncio.Runner(loop_factory=lambda: loop)
    with mock.patch.object(CancelScope, "__hash__", _place_of):
        try:
            return runner.run(main())
        except Stuck:
            loop.give_up()
            raise
        finally:
            with suppress(Stuck):
                runner.close()


class SeededLoop(asyncio.SelectorEventLoop):
    """See the head of this file."""

    _ready: deque[asyncio.Handle]

    def __init__(self, seed: int, limit_s: float, limit_turns: int) -> None:
        self._rng = random.Random(seed)
        self._now = 0.0
        self._limit_s = limit_s
        self._turns_left = limit_turns
        numbers = count(1)
        super().__init__(_NoWaiting(self._pass))
        self._clock_resolution = TICK_S
        self.set_task_factory(partial(_Numbered.made, numbers))

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.TimerHandle:
        return super().call_at(when + self._rng.random() * 1e-6, callback, *args, **options)

    def give_up(self) -> None:
        """Let the tasks that are left be cancelled and closed, without limits and without words."""
        self._limit_s, self._turns_left = float("inf"), 10_000
        self.set_exception_handler(lambda _loop, _context: None)

    def _run_once(self) -> None:
        self._now += self._rng.random() * TURN_S
        self._turns_left -= 1
        if self._turns_left < 0 or self._now > self._limit_s:
            raise Stuck(f"no end after {self._now:g} virtual seconds: {waiting(self)}")
        held = self._drawn()
        try:
            super()._run_once()  # type: ignore[misc]  # pyright: ignore
        finally:
            self._ready.extend(held)

    def _drawn(self) -> list[asyncio.Handle]:
        """Leave some of what is ready, in any order, for this turn; the rest comes back after it."""
        ready = self._ready
        if len(ready) < 2:
            return []
        handles = list(ready)
        self._rng.shuffle(handles)
        now = self._rng.randint(1, len(handles))
        ready.clear()
        ready.extend(handles[:now])
        return handles[now:]

    def _pass(self, seconds: float | None) -> None:
        if seconds is None:
            raise Stuck(f"nothing can run any more: {waiting(self)}")
        self._now += seconds


class _NoWaiting(selectors.SelectSelector):
    """Reports how long the loop would wait, and that nothing came."""

    def __init__(self, passes: Callable[[float | None], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._passes(timeout)
        return []


class _Numbered(asyncio.Task[Any]):
    """A task whose place in a set is its number and not its address: anyio keeps its tasks in sets."""

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    @classmethod
    def made(cls, numbers: Iterator[int], loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Self:
        return cls(next(numbers), coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _place_of(scope: Any) -> int:
    """The same for cancel scopes: within one scope, a task has at most one other open."""
    return hash(scope._host_task)


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Every task of `loop` that is not done, and where it waits."""
    tasks = sorted(asyncio.all_tasks(loop), key=hash)
    return "; ".join(f"{task.get_name()} at {_place(task)}" for task in tasks) or "no task is left"


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost of the task's frames that lies in this project, else the innermost of all."""
    frames = _frames(task.get_coro())
    ours = [frame for frame in frames if _is_ours(frame)] or frames[-1:]
    return " < ".join(f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in reversed(ours[-2:])) or "its start"


def _frames(awaited: object) -> list[FrameType]:
    frames: list[FrameType] = []
    while isinstance(awaited, CoroutineType):
        coro = cast("CoroutineType[Any, Any, Any]", awaited)
        if coro.cr_frame is not None:
            frames.append(coro.cr_frame)
        awaited = coro.cr_await
    return frames


def _is_ours(frame: FrameType) -> bool:
    return "site-packages" not in Path(frame.f_code.co_filename).parts and not frame.f_code.co_filename.startswith(
        asyncio.__path__[0]
    )
