"""Cancellation as a request: a turn reads it at its safe points, such as between two calls of a model.

The runner makes one `Cancellation` for each run. A task's code reads it with `cancel_requested`; a backend passes it on
in its own protocol (`when_cancelled`). A turn that goes on regardless is cut when the grace time of its run is over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token


def cancel_requested() -> bool:
    """Return whether the task in which the caller runs is to end: its run is being cancelled, or the attempt has ended.

    For code that runs for long: functions, nodes of a graph, and the threads and tasks that they start with a copy of
    their context. The attempt of a plain function has ended when the time limit is over or the run was stopped: nobody
    reads the result. False outside of a task. Cheap, and callable from any thread.
    """
    turn = _turn.get()
    return turn is not None and (turn.over or turn.cancellation.requested)


class Cancellation:
    """The request to end the turns of one run. Used from the event loop's thread; `requested` is read by any thread."""

    __slots__ = ("_callbacks", "requested")

    def __init__(self) -> None:
        self.requested = False
        """Whether `request` was called."""
        self._callbacks: dict[object, Callable[[], object]] = {}

    def request(self) -> None:
        """Set `requested` and call the registered callbacks. A second call does nothing."""
        if not self.requested:
            self.requested = True
            for callback in list(self._callbacks.values()):
                callback()

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Generator[None]:
        """Call `callback` once when the request is made inside the block, or at once if it was made before."""
        key = object()
        self._callbacks[key] = callback
        try:
            if self.requested:
                callback()
            yield
        finally:
            del self._callbacks[key]


class CancellableTurn:
    """A turn whose code can read the request. The end of the `with` block is the end of the attempt."""

    __slots__ = ("_token", "cancellation", "over")

    def __init__(self, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.over = False

    def __enter__(self) -> None:
        self._token: Token[CancellableTurn | None] = _turn.set(self)

    def __exit__(self, *_: object) -> None:
        self.over = True
        _turn.reset(self._token)


_turn: ContextVar[CancellableTurn | None] = ContextVar("turn", default=None)


@contextmanager
def when_cancelled(callback: Callable[[], object]) -> Generator[None]:
    """Call `callback` in the event loop's thread when the cancellation of the current turn's run is requested inside
    the block, or at once if it was requested before. Never called outside of a run. The callback must not raise.
    """
    turn = _turn.get()
    if turn is None:
        yield
        return
    with turn.cancellation.calling(callback):
        yield
