"""Cancelling a call at its k-th wait, whichever of its tasks it is that waits."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Literal, get_args

import anyio

How = Literal["scope", "native", "native late", "everything"]
"""By an anyio scope around the call; by `task.cancel()`; the same, but when what is waited for has just come; or as at
the end of a program, every task of the call by `task.cancel()`.
"""
HOWS: Final[tuple[How, ...]] = get_args(How)


class Cancelled:
    """What became of a call: how often it waited, whether the cancellation `landed` before its end, what it raised."""

    def __init__(self, at: int, how: How) -> None:
        self.at = at
        self.how: How = how
        self.waits = 0
        self.landed = False
        self.error: BaseException | None = None
        self._scope: anyio.CancelScope | None = None
        self._caller: asyncio.Task[Any] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def call(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Await `function()` in a task of its own, and cancel it at its wait number `at`, counted from 1."""
        loop = asyncio.get_running_loop()
        usual = loop.get_task_factory()
        loop.set_task_factory(self._made)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._guard, function)
        finally:
            loop.set_task_factory(usual)

    async def _guard(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._caller = asyncio.current_task()
        assert self._caller is not None
        try:
            with anyio.CancelScope() as self._scope:
                await function()
        except BaseException as error:  # for the one who asked to look at
            self.error = error
        while self._caller.cancelling():
            self._caller.uncancel()

    def _made(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(self._counted(coro), loop=loop, **options)
        task.add_done_callback(lambda _task: _close(coro))
        self._tasks.append(task)
        return task

    async def _counted(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return await _Counted(coro, self._waits)

    def _waits(self, awaited: asyncio.Future[Any] | None) -> None:
        self.waits += 1
        if self.waits != self.at:
            return
        if self.how != "native late":
            self._cancel()
        elif awaited is None:
            asyncio.get_running_loop().call_soon(self._cancel)
        else:
            awaited.add_done_callback(lambda _done: self._cancel())

    def _cancel(self) -> None:
        assert self._caller is not None and self._scope is not None
        self.landed = not self._caller.done()
        if self.how == "scope":
            self._scope.cancel()
        elif self.how == "everything":
            for task in self._tasks:
                task.cancel()
        else:
            self._caller.cancel()


def _close(coro: Coroutine[Any, Any, Any]) -> None:
    """A task that is cancelled before its first step never begins its coroutine, nor the one that anyio has wrapped in
    it, as is no fault of the call's.
    """
    if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
        held = [one for known in inspect.getcoroutinelocals(coro).values() for one in (known, *gc.get_referents(known))]
        for one in (coro, *filter(inspect.iscoroutine, held)):
            one.close()


class _Counted:
    """A coroutine that says each time it waits, and what for (None: only for the others to have their turn)."""

    def __init__(self, coro: Coroutine[Any, Any, Any], waits: Callable[[asyncio.Future[Any] | None], None]) -> None:
        self._coro = coro
        self._waits = waits

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                awaited = self._coro.send(None) if error is None else self._coro.throw(error)
            except StopIteration as end:
                return end.value
            self._waits(awaited)
            error = None
            try:
                yield awaited
            except GeneratorExit:
                self._coro.close()
                raise
            except BaseException as thrown:
                error = thrown
