"""A network that is cut and healed between a run and its hosts: `python -m tests.faults.campaigns.partitions [ROUNDS]`.

Eight agents work on four hosts, which are network namespaces with a real sshd in each, and two of the hosts are cut
off for longer than the patience. Each of the four lost attempts is followed by exactly one more, nothing is recorded
twice, and what is left of the lost ones is ended when the hosts are back. `--planted` plays the round with planted
bugs (tests/support/hosts/bugs.py). Needs root, `ip` and sshd.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import psutil

from plait import ParallelRunner, RunResult, events
from plait.backends.hosts.host_backend import SSHHost, SSHHosts
from plait.events import TaskCompleted
from plait.persistence import AttemptRecord, EventRecord
from plait.runner.engine.live_run import Run
from tests.faults.campaigns.planted import Shown, try_planted
from tests.faults.campaigns.report import Report, Scale
from tests.support.agents.outliving import RUN
from tests.support.hosts import sshd
from tests.support.hosts.agent import Agent
from tests.support.hosts.bugs import BUGS
from tests.support.hosts.namespaces import CAN_BE_MADE, Namespace, namespaces
from tests.support.hosts.outliving import HostsWorld
from tests.support.hosts.world import PLAIT

ROUNDS = {"quick": 1, "nightly": 10}
SHOWN: Mapping[str, Shown] = {"lost attempts kept": Shown("cut", "8 agents were alive once the hosts were back")}
_COUNT, _EACH = 8, 2
_NAMES: Sequence[str] = ("m1", "m2", "m3", "m4")
_CUT: Sequence[str] = ("m1", "m2")
_PATIENCE_S = 1.0
_LIMIT_S = 120.0
# A silent partition is noticed after about two seconds.
_WATCHFUL = ("ServerAliveInterval=1", "ServerAliveCountMax=2", "ConnectTimeout=1")


class Round:
    """A run whose hosts are cut off once all agents work, and healed once the lost attempts are made again."""

    def __init__(self, folder: Path, net: Mapping[str, Namespace]) -> None:
        self._net = net
        self._world = HostsWorld(folder)
        self._world.plan(
            *({"id": f"t{number}", "prompt": f"work {number} [[until go-t{number}]]"} for number in range(_COUNT))
        )
        ssh = ["ssh", "-F", str(folder / "config"), *(word for option in _WATCHFUL for word in ("-o", option))]
        every = [SSHHost(name, slots=_EACH, plait=PLAIT) for name in _NAMES]
        self._hosts = SSHHosts(every, ssh=ssh, patience=_PATIENCE_S)
        self._backend = self._hosts.placed(Agent(str(folder)))
        self._placed: dict[str, str] = {}
        self._again: set[str] = set()
        self._alive_at_heal = 0

    async def play(self) -> list[str]:
        """Return what is wrong."""
        world = self._world
        async with world.opened_store() as store:
            runner = ParallelRunner(self._backend, store=store, concurrency=_COUNT)
            async with runner.start(world.dag(), RUN) as run:
                result = await self._follow(run)
            attempts = await store.list_attempts(RUN)
            completed = await store.list_events(RUN, kind=TaskCompleted.kind)
        await world.until(lambda: not self._host_processes())
        return [*self._judge(result, attempts, completed)]

    async def _follow(self, run: Run) -> RunResult:
        is_cut = False
        async for event in run.events():
            if isinstance(event, events.TaskPlaced) and event.attempt == 1:
                self._placed[event.task_id] = event.place
            if not is_cut and await self._world.all_told(event, _COUNT):
                is_cut = True
                for name in _CUT:
                    self._net[name].cut()
                self._allow(task for task, place in self._placed.items() if place not in _CUT)
            if isinstance(event, events.SessionOpened) and event.attempt == 2:
                self._again.add(event.task_id)
                if len(self._again) == _EACH * len(_CUT):
                    await self._heal()
        return await run.result()

    async def _heal(self) -> None:
        for name in _CUT:
            self._net[name].heal()
        session = self._hosts.sessions.get(RUN)
        assert session is not None
        # A host ends the attempts that it is not asked to keep before it accepts a connection.
        await self._world.until(lambda: all(session.connections[name].is_connected for name in _CUT))
        self._alive_at_heal = len(self._world.alive())
        self._allow(self._placed)

    def _allow(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            self._world.allow(f"go-{task}")

    def _judge(
        self, result: RunResult, attempts: Sequence[AttemptRecord], completed: Sequence[EventRecord]
    ) -> Iterator[str]:
        lost = {task for task, place in self._placed.items() if place in _CUT}
        if result.status != "completed" or len(lost) != _EACH * len(_CUT):
            yield f"the run is {result.status}, with {len(lost)} lost attempts"
        if self._alive_at_heal != len(lost):
            yield f"{self._alive_at_heal} agents were alive once the hosts were back, and {len(lost)} are followed"
        if len(self._world.turns) != _COUNT + len(lost):
            yield f"{len(self._world.turns) - _COUNT} agents were begun again, for {len(lost)} lost ones"
        for task, count in Counter(one.task_id for one in attempts).items():
            if count != 1 + (task in lost):
                yield f"{task} has {count} attempts"
        for task, count in Counter(one.task_id for one in completed).items():
            if count > 1:
                yield f"the end of {task} is recorded {count} times"
        if left := self._world.alive():
            yield f"{len(left)} agents were left alive"

    def _host_processes(self) -> list[int]:
        found: list[int] = []
        for one in self._net.values():
            for process in one.processes():
                try:
                    found += [process.pid] if process.cmdline()[-1:] == ["host"] else []
                except psutil.NoSuchProcess:
                    continue
        return found


@contextmanager
def _network(folder: Path) -> Generator[Mapping[str, Namespace]]:
    """Hosts with their servers by name, and the configuration of the client in `folder`/config."""
    sshd.make_keys(folder)
    with ExitStack() as stack:
        made = dict(zip(_NAMES, stack.enter_context(namespaces(len(_NAMES))), strict=True))
        for name, one in made.items():
            stack.enter_context(sshd.server(folder, name, one.address, 22, state=f"state-{name}", within=one.within))
        yield made


def play(bug: str = "") -> list[str]:
    """Return what is wrong with a round, with the bug planted, if any."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-partition-")))
        net = stack.enter_context(_network(folder))
        if bug:
            stack.enter_context(BUGS[bug]())
        try:
            return anyio.run(_within_limit, Round(folder, net))
        except TimeoutError:
            return [f"not over after {_LIMIT_S:g} s"]


async def _within_limit(this: Round) -> list[str]:
    with anyio.fail_after(_LIMIT_S):
        return await this.play()


def is_caught(bug: str) -> bool:
    """Whether a round shows the planted bug as what it is."""
    return SHOWN[bug].within(play(bug))


def run(*, scale: Scale, seed: int = 0) -> Report:
    """Play the rounds and the planted bug; no cases where hosts cannot be cut off."""
    began, rounds = time.monotonic(), ROUNDS[scale] if sshd.CAN_BE_STARTED and CAN_BE_MADE else 0
    return Report(
        method="partitions",
        unit="partitions",
        cases=rounds,
        violations=tuple(line for _ in range(rounds) for line in play()),
        planted={bug: is_caught(bug) for bug in SHOWN} if rounds else {},
        seconds=time.monotonic() - began,
    )


def main(words: Sequence[str]) -> int:
    """Play the rounds. 1 if anything was wrong, else 0."""
    if words == ["--planted"]:
        return try_planted(SHOWN, play)
    rounds, began = int(words[0]) if words else ROUNDS["nightly"], time.monotonic()
    wrong = [f"    {number}: {line}" for number in range(rounds) for line in play()]
    print(f"{rounds} partitions of 2 of 4 hosts, {len(wrong)} violations, {time.monotonic() - began:.0f} s")
    print(*wrong, sep="\n", end="", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
