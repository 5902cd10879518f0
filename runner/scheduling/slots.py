"""`Places`: how many tasks may be under way at once, in all and on each backend. Pure: no await, no clock, no I/O.

One run has them for itself, or several runs of one event loop share them: then a place that comes free, and a backend
that may be asked again, is offered to the runs that stand in line for it, who has waited longest first, before the run
that had it may take it again. So a wide run does not keep the others out. There is a line for each backend: who gets a
place on one keeps its turn for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count

_MORE = 0.25
"""How many more tasks run at once on a backend that throttles, with each that completes: enough to come back soon
after a passing word, little enough to be throttled seldom where the limit stays.
"""


@dataclass(slots=True, eq=False)
class Gate:
    """One backend's places: at most `ceiling`, and `limit` of them for now. A backend that throttles is closed while
    a task that it sent away is out, and finds its limit again by what it then lets through.
    """

    ceiling: float
    limit: float
    taken: int = 0
    away: int = 0
    """Tasks that the backend has asked to come back later: until all of them are back, nothing starts on it."""
    at_once: int = 0
    """How many tasks were under way on it when the first of those was."""
    closings: int = 0
    """How often it has begun to throttle."""
    closings_before: int = 0
    """How often it had when a task was last completed on it."""
    line: dict[object, tuple[int, Callable[[], None]]] = field(
        default_factory=dict[object, tuple[int, Callable[[], None]]], repr=False
    )
    """Who waits for a place on it, who has waited longest first: a number that grows with time, and what to call."""

    @property
    def is_open(self) -> bool:
        """Whether one more task may start on the backend."""
        return not self.away and self.taken + 1 <= self.limit

    def completed(self) -> None:
        """The backend has completed a task."""
        self.closings_before = self.closings
        if self.limit < self.ceiling:
            self.limit = min(self.ceiling, self.limit + _MORE)


class Places:
    """`concurrency` places in all, `limits` of them at most on the backends named there; `shared` by several runs, or
    one run's own.
    """

    def __init__(self, concurrency: int, limits: Mapping[str, int] | None = None, *, shared: bool = False) -> None:
        self.most = concurrency
        """How many may be taken now."""
        self.shared = shared
        self._limits = limits or {}
        self._gates: dict[str, Gate] = {}
        self.taken = 0
        self.only: Gate | None = None
        """The one backend on which a place may be taken now, if there is one."""
        self._numbers = count()

    def gate(self, backend: str) -> Gate:
        """The backend's own."""
        gate = self._gates.get(backend)
        if gate is None:
            limit = self._limits.get(backend, float("inf"))
            gate = self._gates[backend] = Gate(limit, limit)
        return gate

    def stand_in_line(self, who: object, gate: Gate, take: Callable[[], None]) -> None:
        """`take` is called whenever `who` might have a place on that backend, in the context variables of this call,
        not in those of who sets it free. Who has had it takes itself out of `gate.line`, and may come again.
        """
        if who not in gate.line:
            gate.line[who] = (next(self._numbers), partial(copy_context().run, take))

    def leave_lines(self, who: object) -> None:
        """`who` stands in no line any more."""
        for gate in self._gates.values():
            gate.line.pop(who, None)

    def offer(self, but: object) -> None:
        """Something came free: let all who stand in line take what they can, one place at a time, except the one who
        set it free.
        """
        passed: set[tuple[Gate, object]] = set()
        while self.taken < self.most and (first := self._first_in_line(but, passed)) is not None:
            before = self.taken
            self._let_take_one(*first)
            if self.taken == before:
                passed.add(first)

    def _first_in_line(self, but: object, passed: Set[tuple[Gate, object]]) -> tuple[Gate, object] | None:
        """Who has waited longest of those whom an open backend could give a place."""
        first: tuple[int, Gate, object] | None = None
        for gate in self._gates.values():
            if not gate.line or not gate.is_open:
                continue
            for who, (number, _) in gate.line.items():
                if who is not but and (gate, who) not in passed:
                    first = (number, gate, who) if first is None or number < first[0] else first
                    break
        return None if first is None else first[1:]

    def _let_take_one(self, gate: Gate, who: object) -> None:
        most, only = self.most, self.only
        self.most, self.only = self.taken + 1, gate
        try:
            gate.line[who][1]()
        finally:
            self.most, self.only = most, only


@dataclass(slots=True)
class Lane:
    """One run's tasks on one backend: the eligible ones, how many hold a place, and which were sent away by it."""

    gate: Gate
    places: Places
    heap: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    taken: int = 0
    away: set[int] = field(default_factory=set[int])
    closings_before: int = field(init=False)
    """How often the backend had asked to be left alone when the run came to it."""

    def __post_init__(self) -> None:
        self.closings_before = self.gate.closings

    @property
    def closings(self) -> int:
        """How often the backend has asked to be left alone since a task was last completed on it, in the run's time."""
        return self.gate.closings - max(self.gate.closings_before, self.closings_before)

    @property
    def may_take(self) -> bool:
        """Whether a task may start on the backend, if there is a place."""
        return self.gate.is_open and self.places.only in (None, self.gate)

    def take(self) -> None:
        """A task holds a place from now on."""
        self.taken += 1
        self.gate.taken += 1
        self.places.taken += 1

    def free(self) -> None:
        """A task holds its place no more."""
        self.taken -= 1
        self.gate.taken -= 1
        self.places.taken -= 1

    def throttle(self, position: int) -> None:
        """The backend sends away a task that is under way. From then on half as many run there at once as did, or
        fewer if it let fewer through, and one more with every four that complete.
        """
        gate = self.gate
        if not gate.away:
            gate.closings += 1
        self.send_away(position)
        gate.limit = max(1.0, min(gate.ceiling, gate.at_once // 2, gate.at_once - gate.away))

    def send_away(self, position: int) -> None:
        """The task may not come back before its time, and until then nothing starts on the backend."""
        if not self.gate.away:
            self.gate.at_once = self.gate.taken
        self.away.add(position)
        self.gate.away += 1

    def come_back(self, position: int) -> bool:
        """The task's time has come, if it was sent away; whether that opens the backend again."""
        if position not in self.away:
            return False
        self.away.remove(position)
        self.gate.away -= 1
        return not self.gate.away

    def give_back(self) -> None:
        """The run has nothing to do with its places any more."""
        self.gate.taken -= self.taken
        self.places.taken -= self.taken
        self.gate.away -= len(self.away)
        self.taken = 0
        self.away.clear()
