"""Agents outlive their runner: that is killed at any moment, now and then they are, and others resume, look and answer.

The runners, the agents and whoever else comes are real processes; the agents' own log is the witness of what was said.
A seed says what is planned and when it is disturbed (adoption_plans.py); what the machine makes of it
differs from time to time. `python -m tests.faults.campaigns.adoptions SEED...` plays single cases.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

from plait.backends.process.process_table import HAS_PROC, start_time
from tests.faults.campaigns import adoption_steps as steps
from tests.faults.campaigns.adoption_bugs import BUGS
from tests.faults.campaigns.adoption_checks import Facts, judged, left_alive, open_to_others
from tests.faults.campaigns.adoption_plans import Round, Script, drawn
from tests.faults.campaigns.adoption_steps import Step, Stock
from tests.faults.campaigns.report import Report, Scale
from tests.support.agents.outliving import World
from tests.support.processes import warm

CASES: dict[Scale, int] = {"quick": 15, "nightly": 300}
AT_ONCE = 2
"""Cases beside one another; they mostly wait."""
_GAVE_UP = "the case gave up"
_LIMIT = 300.0  # seconds for one case
_STEP_S, _LAST_S = 30.0, 40.0  # for a process, and for a runner that nobody disturbs
_TICK = 0.004
_RESUMES = 20
"""After how many undisturbed resumes at most a run has to be over: it stops whenever somebody is asked."""
_TRIES = 12
"""Cases in which a planted bug has to show."""


def run(*, scale: Scale, seed: int = 0) -> Report:
    """The cases from `seed` on, and the planted bugs. Needs procfs; without there are no cases."""
    began = time.monotonic()
    if not HAS_PROC:
        return Report(method="adoptions", unit="killed runs with agents", cases=0)
    violations = play(range(seed, seed + CASES[scale]))
    return Report(
        method="adoptions",
        unit="killed runs with agents",
        cases=CASES[scale],
        violations=tuple(violations),
        planted={bug: is_caught(bug, seed) for bug in BUGS},
        seconds=time.monotonic() - began,
    )


def play(seeds: Iterable[int], bug: str = "") -> list[str]:
    """What is wrong with the cases, each played in a process that may fork."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [line for lines in pool.map(partial(_play, bug), seeds) for line in lines]


def is_caught(bug: str, seed: int = 0) -> bool:
    """Whether some case shows the planted bug, and comes to its end."""
    found = (_play(bug, one) for one in range(seed, seed + _TRIES))
    return any(lines and not any(_GAVE_UP in line for line in lines) for lines in found)


def _play(bug: str, seed: int) -> list[str]:
    words = [sys.executable, "-m", "tests.faults.campaigns.adoptions", "--bug", bug, str(seed)]
    try:
        done = warm.run(words, cwd=Path(__file__).parents[3], timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return [
            f"seed {seed}: {_GAVE_UP}: not over after {_LIMIT:.0f} s "
            f"(python -m tests.faults.campaigns.adoptions {seed})"
        ]
    if done.returncode not in {0, 1}:
        return [f"seed {seed}: {_GAVE_UP}: {done.stderr}"]
    return done.stdout.splitlines()


class Case:
    """One run in `folder`, from its beginning to its end."""

    def __init__(self, folder: Path, script: Script) -> None:
        self._folder, self._script = folder, script
        self._world = World(folder)
        self._world.plan(*script.tasks.values())
        self._names = list(script.names)
        self._facts = Facts([], Stock([], [], 0.0, ""))
        self._wrong: list[str] = []

    def play(self) -> list[str]:
        """What is wrong with it. Nothing of it is left."""
        bystander = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            for one in self._script.rounds:
                self._play(one)
            self._finish()
            self._facts.turns, self._facts.told = self._world.turns, self._world.told
            self._wrong += judged(self._script, self._facts)
            self._wrong += [f"process {pid} was left alive" for pid in left_alive(self._world)]
            self._wrong += ["a process that is not plait's was ended"] if bystander.poll() is not None else []
            self._wrong += open_to_others(self._folder / "runs.db.files")
        finally:
            bystander.kill()
            bystander.wait()
            for pid in left_alive(self._world):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self._wrong

    def _play(self, this: Round) -> None:
        runner = Step(self._folder, steps.work(this.concurrency))
        self._disturb(this, runner)
        if this.contested and not runner.has_ended and self._look() is not None:
            runner = self._contest(this, runner)
        if runner.has_ended:
            self._ended(runner)
        else:
            runner.kill()
        if this.dies is not None:
            self._kill_agent(this.dies)
        stock = self._look()
        if stock is None:
            return
        if this.previewed:
            self._step("a dry-run", steps.preview)
            if (after := self._look()) is None or after.sha256 != stock.sha256:
                self._wrong.append("a dry-run changed what is stored")
        if this.answered:
            self._step("an answer", steps.answer)
        if this.talked_to is not None and self._step("a talk", steps.talk(this.talked_to)):
            self._facts.talks += 1

    def _disturb(self, this: Round, runner: Step) -> None:
        """Open and kill what the round says, for as long as it says."""
        requests, kills, began = list(this.requests), list(this.kills), time.monotonic()
        while (now := time.monotonic() - began) < this.lasts and not runner.has_ended:
            while requests and requests[0] <= now:
                requests.pop(0)
                self._open(min(1, len(self._names) - 1))
            while kills and kills[0][0] <= now:
                self._kill_agent(kills.pop(0)[1])
            time.sleep(_TICK)

    def _open(self, count: int) -> None:
        """Let the next so many things come that turns wait for."""
        for _ in range(count):
            self._world.allow(self._names.pop())

    def _kill_agent(self, which: float) -> None:
        alive = [turn["pid"] for turn in self._world.turns if start_time(turn["pid"]) is not None]
        if alive:
            pid = alive[int(which * len(alive))]
            self._facts.killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _contest(self, this: Round, first: Step) -> Step:
        """Another runner wants the run while the `first` one lives: who is left of the two. Which of them has claimed
        it by then is open; the other one is refused, unless it finds that all is over.
        """
        second = Step(self._folder, steps.work(this.concurrency))
        limit = time.monotonic() + _STEP_S
        while not first.has_ended and not second.has_ended:
            if time.monotonic() > limit:
                self._wrong.append("two runners have the run at the same time")
                second.kill()
                return first
            time.sleep(_TICK)
        loser, winner = (second, first) if second.has_ended else (first, second)
        self._ended(loser)
        return winner

    def _ended(self, runner: Step, *, alone: bool = False) -> str | None:
        how = runner.outcome(_LAST_S)
        if how not in {"completed", "failed", "waiting_input"} and (alone or how != steps.OWNED):
            self._wrong.append(f"a runner ended with {how or self._last_error()}")
        return how

    def _step(self, name: str, what: steps.What) -> str:
        outcome = Step(self._folder, what).outcome(_STEP_S)
        if outcome is None:
            self._wrong.append(f"{name} failed with {self._last_error()}")
        return outcome or ""

    def _last_error(self) -> str:
        lines = (self._folder / "stderr").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "nothing said"

    def _look(self) -> Stock | None:
        """What is stored; results that were are still the same."""
        if not (self._folder / "runs.db").exists():
            return None
        text = self._step("looking", steps.look)
        before = self._facts.stock
        if not text:
            self._wrong += ["what was stored is gone"] if before.tasks else []
            return None
        stock = Stock(*json.loads(text))
        for task_id, result in before.results.items():
            if stock.results.get(task_id) != result:
                self._wrong.append(f"the result of {task_id} was {result} and is {stock.results.get(task_id)}")
        self._facts.stock = stock
        return stock

    def _finish(self) -> None:
        """Nothing is in the way any more: resume, and answer, until the run has ended."""
        self._open(len(self._names))
        for _ in range(_RESUMES):
            how = self._ended(Step(self._folder, steps.work(5)), alone=True)
            self._look()
            if how != "waiting_input":
                return
            self._facts.settled |= set(json.loads(self._step("settling", steps.settle) or "[]"))
            self._step("an answer", steps.answer)
        self._wrong.append(f"it waits for answers after {_RESUMES} resumes")


def tell(seed: int, folder: Path, bug: str = "") -> list[str]:
    """What is wrong with the case, with that bug planted, one line each."""
    script: Script = drawn(seed)
    planted: AbstractContextManager[object] = nullcontext()
    if bug:
        script, planted = BUGS[bug].occasion(script), BUGS[bug].planted()
    try:
        with planted:
            wrong = Case(folder, script).play()
    except Exception as error:
        wrong = [f"{_GAVE_UP}: {type(error).__name__}: {error}"]
    return [
        f"seed {seed}: {' '.join(one.split())} (python -m tests.faults.campaigns.adoptions {seed})" for one in wrong
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.campaigns.adoptions", description="Play the cases of seeds."
    )
    parser.add_argument("seeds", nargs="+", type=int)
    parser.add_argument("--bug", choices=["", *BUGS], default="", help="with that one planted")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the files of the cases stay")
    options = parser.parse_args(arguments)
    lines: list[str] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) if options.keep is None else options.keep.absolute() / str(seed)
            folder.mkdir(parents=True, exist_ok=options.keep is None)
            lines += tell(seed, folder, options.bug)
    print("\n".join(lines), end="\n" if lines else "", flush=True)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
