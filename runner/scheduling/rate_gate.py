"""`RateGate`: the turns of the runs that wait for a backend's limit of rate. Pure: clock and timers are arguments.

The runs wait in a queue; the first has a timer for the moment of its turn, so nothing polls. A served run leaves the
queue and may join again at its end, so each run gets one call in turn. A run joins only while the limit of rate is the
only obstacle to its next task: a run without a free slot leaves the queue and delays no other run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import TypeAlias

from plait.backends.backend_protocol import Allowance
from plait.runner.scheduling.rate_limits import RateLimiter, RateLimits, Reservation

Timer: TypeAlias = Callable[[float, Callable[[], None]], Callable[[], object] | None]
"""Calls a function after a number of seconds. Returns a function that prevents the call; None, without a call, if the
run of the timer ends.
"""


class RateGate:
    """The queue of runs of an event loop before `limiter`."""

    def __init__(self, limiter: RateLimiter, now: Callable[[], float]) -> None:
        self.limiter = limiter
        self._now = now
        self._queue: dict[object, tuple[int, Callable[[], None], Timer]] = {}
        """The waiting runs, each with the size of its next call, its callback and its timer."""
        self._timed: object = None
        """The run that the timer is for."""
        self._cancel: Callable[[], object] | None = None

    def admits(self, run: object, characters: int) -> bool:
        """Return whether `run` may begin a call now."""
        return next(iter(self._queue), run) is run and self.limiter.wait(characters, self._now()) <= 0

    def reserve(self, run: object, characters: int) -> Reservation:
        """Take the share of an admitted call of `run`, whose turn ends."""
        reservation = self.limiter.reserve(characters, self._now())
        self.leave(run)
        return reservation

    def settle(self, reservation: Reservation, input_tokens: int, output_tokens: int) -> None:
        """Replace the estimate of a call by its real usage."""
        self.limiter.settle(reservation, input_tokens, output_tokens, self._now())
        self._restart()

    def give_back(self, reservation: Reservation) -> None:
        """Return the share of a call that was never made."""
        self.limiter.give_back(reservation, self._now())
        self._restart()

    def change(self, limits: RateLimits) -> None:
        """Set other limits, for the waiting runs as well."""
        self.limiter.change(limits, self._now())
        self._restart()

    def lower(self, allowance: Allowance) -> None:
        """Take the server's own limits into account."""
        self.limiter.lower(allowance, self._now())

    def makes_wait(self, run: object) -> bool:
        """Return whether `run` waits in the line."""
        return run in self._queue

    def join(self, run: object, characters: int, take: Callable[[], None], timer: Timer) -> None:
        """Call `take`, in the context variables of this call, at the turn of `run`. `timer` belongs to the run."""
        self._queue[run] = (characters, partial(copy_context().run, take), timer)
        self._start()

    def leave(self, run: object) -> None:
        """Remove `run` from the line, if it waits there."""
        if self._queue.pop(run, None) is not None:
            self._start()

    def _start(self) -> None:
        """Start the timer of the first run, unless it has one. Runs that end leave the line."""
        if next(iter(self._queue), None) is self._timed:
            return
        if self._cancel is not None:
            self._cancel()
        self._timed = self._cancel = None
        while self._cancel is None and self._queue:
            first, (characters, _, timer) = next(iter(self._queue.items()))
            self._cancel = timer(self.limiter.wait(characters, self._now()), self._call_first)
            if self._cancel is None:
                del self._queue[first]
            else:
                self._timed = first

    def _restart(self) -> None:
        if self._timed is not None:
            self._timed = None
            self._start()

    def _call_first(self) -> None:
        run, self._timed, self._cancel = self._timed, None, None
        self._queue[run][1]()
        if self._timed is None and next(iter(self._queue), None) is run:
            self.leave(run)  # it did not take its turn: it ends


class RunRates:
    """The calls of `run` on backends with limits of rate. `gates` returns the gates of the run's backends, by name."""

    def __init__(self, run: object, gates: Callable[[], Mapping[str, RateGate]]) -> None:
        self._run = run
        self.gates = gates
        self.size_of: Callable[[int], int] = lambda _position: 0
        """Returns the length in characters of a task's prompt and history, by position."""
        self.timer: Timer | None = None
        """The run's timer. None in a preview, which calls no backend."""
        self._sizes: dict[int, int] = {}
        self.reserved: dict[int, tuple[RateGate, Reservation]] = {}
        """The shares of the calls under way, by position."""

    def admitted(self, gate: RateGate, position: int) -> bool:
        """Return whether the task at `position` may begin its call now."""
        return gate.admits(self._run, self._size(gate, position))

    def reserve(self, gate: RateGate, position: int) -> None:
        """Take the share of the call of the admitted task at `position`."""
        self.reserved[position] = gate, gate.reserve(self._run, self._size(gate, position))
        self._sizes.pop(position, None)

    def join(self, gate: RateGate, position: int, take: Callable[[], None]) -> None:
        """Call `take` when the task at `position` may begin its call."""
        assert self.timer is not None
        gate.join(self._run, self._size(gate, position), take, self.timer)

    def settle(self, position: int, input_tokens: int, output_tokens: int) -> None:
        """Replace the estimate of the call that ended by its real usage."""
        gate, reservation = self.reserved.pop(position)
        gate.settle(reservation, input_tokens, output_tokens)

    def give_back(self, position: int) -> None:
        """Return the share of a call that was never made."""
        gate, reservation = self.reserved.pop(position)
        gate.give_back(reservation)

    def leave(self) -> None:
        """Leave all lines."""
        for gate in self.gates().values():
            gate.leave(self._run)

    def waiting(self) -> list[str]:
        """Return the backends at whose limits of rate tasks of the run wait."""
        return [name for name, gate in self.gates().items() if gate.makes_wait(self._run)]

    def _size(self, gate: RateGate, position: int) -> int:
        if not gate.limiter.counts_tokens:
            return 0
        if position not in self._sizes:
            self._sizes[position] = self.size_of(position)
        return self._sizes[position]
