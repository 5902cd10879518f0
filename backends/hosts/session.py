"""`HostSession`: the lines of one run to its hosts, and the choice of a host for each attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from operator import itemgetter

import anyio

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.hosts.away import AwayReporter
from plait.backends.hosts.frames import Frame
from plait.backends.hosts.line import LOST, Line, Turn
from plait.backends.protocol import AwayHost, Output

_END_S = 20.0
"""Seconds for a host to end an attempt: more than an agent has between SIGTERM and SIGKILL."""


class HostSession:
    """The hosts of one run while this process owns the run."""

    def __init__(self, lines: Sequence[Line], patience: float, on_away: Callable[[AwayHost], None]) -> None:
        self.lines = {line.name: line for line in lines}
        self._away = AwayReporter(self.lines, on_away)
        self._patience = patience
        self._changed = anyio.Event()
        self._named: set[str] = set()
        for line in lines:
            line.on_change = self._wake

    async def run(self) -> None:
        """Keep the hosts connected until `close`."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._away.run)
            for line in self.lines.values():
                group.start_soon(line.run)

    def close(self) -> None:
        """Disconnect all hosts."""
        self._away.close()
        for line in self.lines.values():
            line.close()

    async def unreached(self) -> Sequence[str]:
        """Implement `HostConnections.unreached`."""
        while any(not (line.is_connected or line.tries) for line in self.lines.values()):
            await self._change()
        return [line.name for line in self.lines.values() if not line.is_connected]

    async def more_slots(self, known: int) -> int:
        """Implement `HostConnections.more_slots`."""
        while (slots := self._slots()) <= known:
            await self._change()
        return slots

    def _slots(self) -> int:
        return sum(line.slots for line in self.lines.values())

    def wind_down(self) -> None:
        """Ask the attempts on all hosts to end, because the run is being cancelled."""
        for line in self.lines.values():
            line.send({"op": "wind_down"})

    def forget(self) -> None:
        """Implement `HostConnections.forget`."""
        for line in self.lines.values():
            line.send({"op": "forget"})

    def line(self, name: str) -> Line | None:
        """Return the line to the host `name`; None if the host is none of the hosts."""
        return self.lines.get(name)

    async def place(self, turn: Turn, wanted: str | None, on_output: OnOutput) -> Place:
        """Return a slot on the host `wanted`, or on the least loaded host, for an attempt.

        If the host `wanted` is away for the patience of the hosts, another host is chosen. Raises BackendError
        (transient) if no host can be reached, and (unavailable) if all refuse this version of plait.
        """
        self._name_refused(on_output)
        preferred = None if wanted is None else self.line(wanted)
        if preferred is not None and not await self.is_back(preferred, turn, on_output):
            preferred = None
        while True:
            line = await self._with_room(preferred, turn, on_output)
            line.turns[turn.name] = turn
            place = Place(self, line, turn)
            try:
                line.ask(turn)
                if await self._answer(line, turn, may_move=preferred is None) is not LOST:
                    return place
                place.leave()
            except BaseException:
                line.send({"op": "cancel", "turn": turn.name})
                place.leave()
                raise

    async def _answer(self, line: Line, turn: Turn, *, may_move: bool) -> Frame:  # noqa: ARG002 - for other hosts
        """Return the answer of a host that was asked for room; LOST to choose a host again."""
        return await turn.next()

    def _name_refused(self, on_output: OnOutput) -> None:
        """Report each host that refuses this version of plait, once."""
        for line in self.lines.values():
            if line.refusal == "version" and line.name not in self._named:
                self._named.add(line.name)
                on_output(Output("notice", f"{line.name} is not used: {line.reason}"))

    def follow(self, turn: Turn, host: str) -> Place:
        """Return the place of an attempt that a dead owner placed on `host`. Raises BackendError (unavailable) if
        the host is no longer one of the hosts.
        """
        line = self.line(host)
        if line is None:
            message = (
                f"the attempt was placed on {host}, which is none of the hosts ({', '.join(self.lines)}); name {host} "
                "again and resume, or let the task run anew with --retry-failed"
            )
            raise BackendError(ErrorKind.UNAVAILABLE, message)
        line.turns[turn.name] = turn
        return Place(self, line, turn)

    async def is_back(self, line: Line, turn: Turn, on_output: OnOutput) -> bool:
        """Wait until the host is connected. Return False after the patience, or if the host refuses."""
        while not line.is_connected and not line.tries:  # the first connection is still being made
            await self._change()
        if not line.is_connected and line.refusal is None:
            with self._away.waiting([line], turn), anyio.move_on_after(self._patience):
                await self._connection(line, on_output)
        return line.is_connected

    async def _connection(self, line: Line, on_output: OnOutput) -> None:
        """Wait until the host is connected, or refuses."""
        told = ""
        while not line.is_connected and line.refusal is None:
            if line.reason != told:
                told, since = line.reason, "" if line.away_since is None else f", away since {_time(line.away_since)}"
                on_output(Output("waiting", f"waiting for {line.name}{since}: {told}"))
            await self._change()

    def away_error(self, line: Line) -> BackendError:
        """Return the error of an attempt on a host that refuses this process, or has been away for too long."""
        if line.refusal is not None:
            kind = ErrorKind.CRASHED if line.refusal == "fenced" else ErrorKind.UNAVAILABLE
            return BackendError(kind, f"{line.name}: {line.reason}")
        away = f"{line.name} has been away for {self._patience:g} s ({line.reason})"
        return BackendError(
            ErrorKind.CRASHED, f"{away}; an attempt still under way there is ended when {line.name} is back"
        )

    async def _with_room(self, preferred: Line | None, turn: Turn, on_output: OnOutput) -> Line:
        """Wait for a host with room, and return the least loaded one."""
        while True:
            lines = self.lines.values() if preferred is None or not preferred.is_connected else (preferred,)
            loads = [(load, line.name) for line in lines if (load := line.load(turn.needs)) is not None]
            if loads:
                return self.lines[min(loads, key=itemgetter(0))[1]]
            if any(line.is_connected for line in self.lines.values()):
                await self._change()
            else:
                await self._any_back(turn, on_output)

    async def _any_back(self, turn: Turn, on_output: OnOutput) -> None:
        """Wait until a host is connected. Raise BackendError after the patience, or if no host can be expected: none
        has accepted this process before, and the first attempt to connect to each has failed.
        """
        lines = self.lines.values()
        while any(not line.tries for line in lines) and not any(line.is_connected for line in lines):
            await self._change()
        away = [line for line in lines if line.refusal is None]
        with self._away.waiting(away, turn), anyio.move_on_after(self._patience):
            while not all(line.refusal or (line.tries and not line.was_connected) for line in lines):
                if any(line.is_connected for line in lines):
                    return
                on_output(Output("waiting", f"waiting for {', '.join(self.lines)}"))
                await self._change()
        why = "; ".join(f"{line.name}: {line.reason}" for line in lines)
        refused = all(line.refusal == "version" for line in lines)
        kind = ErrorKind.UNAVAILABLE if refused else ErrorKind.TRANSIENT
        raise BackendError(kind, f"no host can be used: {why}")

    async def _change(self) -> None:
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


OnOutput = Callable[[Output], None]


def _time(when: float) -> str:
    return f"{datetime.fromtimestamp(when, UTC).astimezone():%H:%M:%S}"


class Place:
    """A slot of a host, held by an attempt until `leave`."""

    def __init__(self, session: HostSession, line: Line, turn: Turn) -> None:
        self.session = session
        self.line = line
        self.turn = turn

    def leave(self) -> None:
        """Free the slot. A host that is away ends the attempt when connected again."""
        self.line.leave(self.turn)

    async def end(self) -> bool:
        """End the attempt on the host. Return whether the host has confirmed the end. Not cancelled from outside."""
        with anyio.move_on_after(_END_S, shield=True):
            self.line.send({"op": "cancel", "turn": self.turn.name})
            while self.line.is_connected:
                if (await self.turn.next())["op"] in {"ended", "reply", "error", "asked"}:
                    return True
        return False
