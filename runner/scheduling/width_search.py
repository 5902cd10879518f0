"""`WidthSearch`: how many calls at once a backend takes well, found while the calls are made. Pure.

The width begins at FIRST_WIDTH. Each completed call raises it by one, which doubles it with each round of calls, until
the backend is paused for refusals, or its calls take twice as long as they did: it then queues them. Either halves the
width. From then on a round raises it by an eighth, the next one by twice as much, and so on.

A random refusal delays its own call and changes nothing here: `Account` pauses a backend only if it refuses its probes
too. Calls may also take longer because they ask for more. If fewer calls end in a second after the width was halved for
their time, the halving is taken back, and the time that they take now is the new measure.

A round is as many calls as the width, begun and ended in it. A width of which less than half is in use is not raised.
"""

from __future__ import annotations

FIRST_WIDTH = 8
MOST_AT_ONCE = 256
"""The width is never raised beyond."""
_SLOWER = 2.0
"""How many times as long calls take when the width is halved."""
_AS_MANY = 0.75
"""The part of the calls in a second that still end, at least, after a halving that stays."""


class WidthSearch:
    """The search for the width of one backend. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._doubling = True
        self._step = 1.0
        """How much a round of calls adds to the width, once it doubles no more."""
        self._least: float | None = None
        """The mean time of the calls of the fastest round."""
        self._halved: tuple[float, float, bool] | None = None
        """The width before it was halved because calls took long, the calls that ended in a second, and whether it was
        doubling.
        """
        self._began: float | None = 0.0
        """The begin of the round; None before."""
        self._calls = FIRST_WIDTH
        """The calls of the round."""
        self._ended = self._all_ended = 0
        """The calls that ended in the round: those that also began in it, and all."""
        self._took = 0.0
        """The sum of the times of the former."""

    def call_ended(self, width: float, in_use: int, took: float, now: float) -> float:
        """Return the width after a successful call that took `took` seconds, while `in_use` calls were under way."""
        if self._began is None:
            if in_use <= width:  # the calls of the time before have ended
                self._begin_round(width, now)
            return width
        if 2 * in_use >= width:
            most = max(width, min(MOST_AT_ONCE, 2 * self._calls))
            width = min(most, width + (1.0 if self._doubling else self._step / width))
        self._all_ended += 1
        if now - took >= self._began:
            self._ended += 1
            self._took += took
            if self._ended >= self._calls:
                return self._judge_round(width, self._took / self._ended, now)
        return width

    def paused(self) -> None:
        """Take into account that the backend was paused for refusals, and its width halved."""
        self._doubling, self._step, self._halved, self._began = False, max(1.0, self._calls / 8), None, None

    def _begin_round(self, width: float, now: float) -> None:
        self._began, self._calls, self._ended, self._all_ended, self._took = now, int(width), 0, 0, 0.0

    def _judge_round(self, width: float, took: float, now: float) -> float:
        assert self._began is not None
        rate = self._all_ended / max(now - self._began, 1e-9)
        if self._halved is not None:
            before, rate_before, was_doubling = self._halved
            self._halved = None
            if rate < rate_before * _AS_MANY:
                self._doubling, self._least, width = was_doubling, took, max(width, before)
        elif self._least is not None and took >= _SLOWER * self._least:
            self._halved = width, rate, self._doubling
            self._doubling, self._step, self._began = False, max(1.0, width / 16), None
            return max(1.0, width / 2)
        else:
            self._least = took if self._least is None else min(took, self._least)
            self._step *= 1 if self._doubling else 2
        self._begin_round(width, now)
        return width
