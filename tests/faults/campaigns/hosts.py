"""Agents on hosts, with the death or the sleep of those that follow them: none is begun twice, none is left.

    woken    an owner is stopped past its lease, another one takes over, and the first one wakes
    runner   the runner is killed, and another one resumes the run
    hosts    all host processes are killed, and the runner lives
    all      all host processes and the runner are killed, and another one resumes the run

In every second round of the last three kinds they die while agents are still being started. The agents' own log is the
witness. `python -m tests.faults.campaigns.hosts ROUNDS [AGENTS [KIND ...]]` plays so many rounds of each kind, and
`--planted` the rounds with planted bugs (tests/support/hosts/bugs.py).
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import anyio

from plait.backends.process.process_table import HAS_PROC
from tests.faults.campaigns.adoption_checks import left_alive
from tests.faults.campaigns.planted import Shown, try_planted
from tests.faults.campaigns.report import Report, Scale
from tests.support.agents.outliving import RUN
from tests.support.hosts.outliving import HostsWorld

Kind: TypeAlias = Literal["woken", "runner", "hosts", "all"]
ROUNDS: dict[Scale, int] = {"quick": 1, "nightly": 10}
AGENTS: dict[Scale, int] = {"quick": 8, "nightly": 100}
"""The agents of a round of the kind `all`; the other kinds have eight."""
SHOWN: Mapping[str, Shown] = {
    "a former owner's host process left alive": Shown("woken", "was said"),
    "placed attempts begun anew": Shown("runner", "is completed after 2 attempts"),
    "a broken connection taken for the end": Shown("hosts", "was said"),
    "no attempt kept": Shown("all", "was said"),
}
_FEW = 8
_MOST_PER_HOST = 25
_LIMIT = 90.0
"""Seconds for a step of a round."""


def run(*, scale: Scale, seed: int = 0) -> Report:
    """The rounds of `scale`, and the planted bugs. Needs procfs; without there are no cases."""
    began = time.monotonic()
    rounds = ROUNDS[scale] if HAS_PROC else 0
    violations: list[str] = []
    adopted = 0
    for kind in get_args(Kind):
        for number in range(seed, seed + rounds):
            wrong, count = play(kind, number, AGENTS[scale] if kind == "all" else _FEW)
            violations += wrong
            adopted += count
    return Report(
        method="hosts",
        unit="rounds",
        cases=rounds * len(get_args(Kind)),
        violations=tuple(violations),
        planted={bug: is_caught(bug, seed) for bug in SHOWN} if rounds else {},
        seconds=time.monotonic() - began,
        figures={"agents adopted": adopted},
    )


def is_caught(bug: str, seed: int = 0) -> bool:
    """Whether a round shows the planted bug as what it is."""
    return SHOWN[bug].within(_play_with(bug, seed))


def _play_with(bug: str, seed: int = 0) -> list[str]:
    """Return what is wrong with a round in which the bug is planted."""
    return play(SHOWN[bug].case, 2 * seed, _FEW, bug)[0]


def play(kind: str, seed: int, agents: int, bug: str = "") -> tuple[list[str], int]:
    """Return what is wrong with a round, and the number of adopted attempts. Nothing of the round is left."""
    with tempfile.TemporaryDirectory(prefix="plait-hosts-") as folder:
        this = Round(Path(folder), kind, seed, agents, bug)
        try:
            wrong = anyio.run(this.play)
        except TimeoutError:
            wrong = [f"not over after {_LIMIT:g} s: {this.last_error}"]
        finally:
            this.end_all()
        return [f"{kind} {seed}: {line}" for line in wrong], this.adopted


class Round:
    """A run with agents on two hosts, on four for a hundred agents, from its beginning to its end."""

    def __init__(self, folder: Path, kind: str, seed: int, agents: int, bug: str) -> None:
        self._world = HostsWorld(folder)
        self._kind = kind
        self._agents = agents
        self._bug = [bug] if bug else []
        self._prompts = [f"work {number} [[until go]]" for number in range(agents)]
        self._runners: list[subprocess.Popen[bytes]] = []
        tasks = ({"id": f"t{number}", "prompt": prompt} for number, prompt in enumerate(self._prompts))
        names = [f"m{number}" for number in range(1, 1 + max(2, -(-agents // _MOST_PER_HOST)))]
        self._world.plan(*tasks, concurrency=agents, names=names, slots=-(-agents // len(names)))
        self._is_early = seed % 2 == 1 and kind != "woken"
        self._enough = random.Random(seed).randrange(1, agents) if self._is_early else agents
        self.adopted = 0

    async def play(self) -> list[str]:
        """Return what is wrong."""
        world, enough = self._world, self._enough
        first = self._begin()
        await _until(lambda: len(world.turns if self._is_early else world.told) >= enough)
        last = await self._disturb(first)
        await _until(lambda: len(world.turns) >= self._agents)
        await self._followed(1 if last is first else 2)
        alive = len(world.alive())
        world.allow("go")
        await _until(lambda: last.poll() is not None)
        wrong = [] if last.returncode == 0 else [f"the last runner ended with {last.returncode}: {self.last_error}"]
        if alive != self._agents:
            wrong.append(f"{alive} of {self._agents} agents were alive while they were followed")
        return [*wrong, *self._twice(), *self._stored(), *self._left()]

    async def _disturb(self, first: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Let die what the kind says. Return the runner that is to complete the run."""
        if self._kind == "woken":
            await self._world.suspend(first.pid)
            second = self._begin()
            await self._followed(2)
            os.kill(first.pid, signal.SIGCONT)
            await _until(lambda: first.poll() is not None)
            return second
        if self._kind in {"runner", "all"}:
            first.kill()
        if self._kind in {"hosts", "all"}:
            self._world.kill_hosts()
        if self._kind == "hosts":
            return first
        first.wait()
        return self._begin()

    async def _followed(self, epoch: int) -> None:
        """Return once all agents are followed, or one has ended."""
        world, count = self._world, self._agents
        await _until(lambda: len(world.alive()) < count or world.is_followed(count, epoch))

    def _begin(self) -> subprocess.Popen[bytes]:
        with (self._world.folder / "stderr").open("ab") as stderr:
            words = [sys.executable, "-m", self._world.module, str(self._world.folder), *self._bug]
            runner = subprocess.Popen(words, stdout=stderr, stderr=stderr, cwd=Path(__file__).parents[3])
        self._runners.append(runner)
        return runner

    @property
    def last_error(self) -> str:
        """The last line that a runner has written."""
        lines = (self._world.folder / "stderr").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "nothing said"

    def _twice(self) -> Iterator[str]:
        said = Counter(self._world.said)
        for prompt in self._prompts:
            if said[prompt] != 1:
                yield f"{prompt!r} was said {said[prompt]} times"
        for prompt in said.keys() - set(self._prompts):
            yield f"{prompt!r} was said"

    def _stored(self) -> Iterator[str]:
        database = sqlite3.connect(f"file:{self._world.folder}/runs.db?mode=ro", uri=True)
        try:
            tasks = database.execute("SELECT task_id, status, attempt FROM tasks WHERE run_id = ?", [RUN]).fetchall()
            errors = database.execute("SELECT error_kind, error FROM attempts WHERE error IS NOT NULL").fetchall()
            kinds = Counter(kind for (kind,) in database.execute("SELECT kind FROM events WHERE run_id = ?", [RUN]))
        finally:
            database.close()
        self.adopted = kinds["task_adopted"]
        for task_id, status, attempt in tasks:
            if status != "completed" or (attempt > 1 and not self._is_early):
                yield f"{task_id} is {status} after {attempt} attempts"
        if errors and not self._is_early:
            yield f"attempts ended with {Counter(errors)}"
        if kinds["task_completed"] != self._agents:
            yield f"{kinds['task_completed']} ends are recorded, of {self._agents} tasks"

    def _left(self) -> Iterator[str]:
        for pid in left_alive(self._world):
            yield f"agent {pid} was left alive"
        for name in self._world.names:
            for pid in self._world.hosts.processes(name):
                yield f"host process {pid} was left alive"

    def end_all(self) -> None:
        """End all processes of the round."""
        for runner in self._runners:
            runner.kill()
            runner.wait()
        self._world.kill_hosts()
        for pid in left_alive(self._world):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _until(what: Callable[[], bool]) -> None:
    with anyio.fail_after(_LIMIT):
        while not what():  # noqa: ASYNC110 - it is another process's doing
            await anyio.sleep(0.02)


def main(words: Sequence[str]) -> int:
    """Play the rounds. 1 if anything was wrong, else 0."""
    if words == ["--planted"]:
        return try_planted(SHOWN, _play_with)
    rounds, agents = int(words[0]), int(words[1]) if len(words) > 1 else _FEW
    broken = False
    for kind in words[2:] or get_args(Kind):
        wrong, adopted, began = list[str](), 0, time.monotonic()
        for seed in range(rounds):
            found, count = play(kind, seed, agents)
            wrong += found
            adopted += count
        took = time.monotonic() - began
        print(f"{kind}: {rounds} rounds of {agents} agents, {adopted} adopted, {len(wrong)} violations, {took:.0f} s")
        print(*(f"    {line}" for line in wrong), sep="\n", end="", flush=True)
        broken = broken or bool(wrong)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
