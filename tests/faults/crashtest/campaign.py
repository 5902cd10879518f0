"""A campaign: choose kills and cases, and play trials on several workers until the requested number of kills landed.

A small case has a trial for every hit of every boundary; a larger case has a sample. A first run without a kill counts
the hits of each boundary. Up to four more kills follow each first kill, so that resumes are killed too.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count, islice, zip_longest
from pathlib import Path

from plait.errors import DAGError, PlaitError
from plait.failpoints import FAILPOINTS, SERVER_FAILPOINTS
from plait.runner.domain.dag import DAG
from tests.faults.campaigns.planted import shows
from tests.faults.crashtest.cases import Case, plan_case, random_case
from tests.faults.crashtest.fork_server import get_ready
from tests.faults.crashtest.mutants import MUTANTS, Mutant
from tests.faults.crashtest.tally import Tally
from tests.faults.crashtest.trial import Kind, Point, Trial
from tests.faults.crashtest.trial_runner import Shown, Stage

SMALL, SAMPLE = 130, 12
"""A case with at most SMALL hits of boundaries is killed at each hit; a case with more hits, at SAMPLE hits."""
MOST_VIOLATIONS = 100
"""A worker stops after this number of violations."""
PATIENCE = 60
"""The maximum number of trials to catch a planted bug."""
TRIES = 10
"""The maximum number of repetitions of a single trial until a failure, since timing differs between runs; and of trials
aimed at a boundary without a kill.
"""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """The parts of a user's plan that a campaign certifies."""

    dag: DAG
    default: str
    """The name of the default backend."""
    concurrency: int


@dataclass(frozen=True, slots=True)
class Campaign:
    """Trials over random cases, or over cases of a plan."""

    kills: int
    """The number of kills to land."""
    seed: int
    """The seed of the first case."""
    folder: Path
    """The parent of the temporary folders with the databases. The file system of the folder is tested."""
    command: str
    """The command quoted in violations; `--case` and the name of the trial repeat a trial."""
    plan: PlanShape | None = None
    """The plan of all cases; None for random cases."""
    workers: int = 0
    """The number of worker processes; 0 for one worker per core."""
    server: str | None = None
    """The address of a PostgreSQL database with tables, which keeps the runs of the trials; None for SQLite files."""
    bugs: Sequence[Mutant] | None = None
    """The bugs to plant; None for MUTANTS."""

    def run(self) -> Tally:
        """Play the whole campaign. Return the sum of all workers.

        Raises RuntimeError in a process with threads, OSError for an unusable folder, and PlaitError for a case without
        a valid DAG. Ends the workers if interrupted by KeyboardInterrupt.
        """
        get_ready()
        workers = self.workers or os.cpu_count() or 1
        began = time.monotonic()
        tally = self._tally()
        with self._place() as place:
            pids: list[int] = []
            try:
                for number in range(workers):
                    with _interrupts_deferred():  # until the pid is recorded
                        pids.append(self._fork(place, number, workers))
                for number, pid in enumerate(pids):
                    os.waitpid(pid, 0)
                    tally.add(_worker_tally(place, number))
            except (KeyboardInterrupt, PlaitError):
                _end(pids)
                raise
        tally.planted = {bug.name: tally.planted.get(bug.name, False) for bug in self._bugs()}
        tally.seconds = time.monotonic() - began
        return tally

    def once(self, trial: Trial) -> Tally:
        """Repeat one trial until the trial fails, at most TRIES times. Return the tally. Raises as `run`."""
        get_ready()
        tally, began = self._tally(), time.monotonic()
        with self._place() as place:
            for _ in range(TRIES):
                self._merge(tally, trial, Stage(place, server=self.server).play(trial, self.case(trial.seed)))
                if tally.violations:
                    break
        tally.seconds = time.monotonic() - began
        return tally

    def _tally(self) -> Tally:
        return Tally() if self.server is None else Tally(boundaries=SERVER_FAILPOINTS)

    def _bugs(self) -> Sequence[Mutant]:
        return MUTANTS if self.bugs is None else self.bugs

    @contextmanager
    def _place(self) -> Generator[Path]:
        prefix = ".plait-crashtest-"
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=prefix, ignore_cleanup_errors=True) as place:
            yield Path(place)

    def case(self, seed: int) -> Case:
        """Return the case of `seed`. Raises PlaitError without a valid DAG."""
        plan = self.plan
        return random_case(seed) if plan is None else plan_case(plan.dag, plan.default, plan.concurrency, seed)

    def _fork(self, place: Path, number: int, workers: int) -> int:
        pid = os.fork()
        with suppress(OSError):  # fails in the later of the two processes
            os.setpgid(pid, 0)
        if pid:
            return pid
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
            tally = self._work(Stage(place / f"worker-{number}", server=self.server), number, workers)
            _outbox(place, number).write_text(tally.to_json(), encoding="utf-8")
            code = 0
        except DAGError as error:
            # A case without a valid DAG is an error of the plan, not a broken invariant.
            _fault_file(place, number).write_text(str(error), encoding="utf-8")
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _work(self, stage: Stage, number: int, workers: int) -> Tally:
        tally, parent = self._tally(), os.getppid()
        wanted = self.kills // workers + (number < self.kills % workers)
        seeds = count(self.seed + number, workers)
        enough = chain.from_iterable(self._trials(stage, seed, tally) for seed in seeds)
        for trial in enough:
            if tally.kills >= wanted or len(tally.violations) >= MOST_VIOLATIONS or os.getppid() != parent:
                break
            self._merge(tally, trial, stage.play(trial, self.case(trial.seed)))
        for name in tally.never_hit:
            for trial in islice(_trials_at(name, seeds), TRIES):
                if not tally.landed[name]:
                    self._merge(tally, trial, stage.play(trial, self.case(trial.seed)))
        for bug in self._bugs()[number::workers]:
            tally.planted[bug.name] = is_caught(bug, stage.folder, self.server)
        return tally

    def _trials(self, stage: Stage, seed: int, tally: Tally) -> Iterator[Trial]:
        undisturbed = Trial(Kind.KILLS, seed)
        shown = stage.play(undisturbed, self.case(seed))
        self._merge(tally, undisturbed, shown)
        rng = random.Random(f"trials {seed}")
        first = _first_points(shown.hits, rng)
        for point in first if len(first) <= SMALL else first[:SAMPLE]:
            yield Trial(Kind.KILLS, seed, (point, *_more_points(shown.hits, rng)))
        yield Trial(Kind.CRASHER, seed)
        writes = max(2, shown.hits["batch.before_write"])
        yield Trial(Kind.UNSURE, seed, (Point("txn.after_commit", rng.randint(2, writes)),))
        yield Trial(Kind.RIVAL, seed, (Point("batch.before_write", rng.randint(2, max(2, writes // 2))),))
        if self.server is None:  # the rot is in a file
            yield Trial(Kind.ROT, seed)

    def _merge(self, tally: Tally, trial: Trial, shown: Shown) -> None:
        verdict = shown.verdict
        tally.trials += 1
        tally.scheduled += shown.scheduled
        tally.landed.update(shown.landed)
        tally.acks += verdict.acks
        tally.lost += verdict.lost
        tally.repeated += verdict.repeated
        tally.extra = max(tally.extra, verdict.extra)
        tally.resumes_ms += verdict.resumes_ms
        for broken in verdict.broken:
            said = shown.output.strip().rpartition("\n")[2]
            tally.violations.append(f"{broken}{said and f' ({said})'}; again: {self.command} --case {trial}")


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _interrupts_deferred() -> Generator[None]:
    """Defer interrupts to the end of the block. Python discards exceptions of the hooks that run after a fork, the
    KeyboardInterrupt of a signal handler too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)


def _trials_at(name: str, seeds: Iterable[int]) -> Iterator[Trial]:
    """Yield trials with a kill at one boundary, in turn in the first process and in the second process."""
    for number, seed in enumerate(seeds):
        before = (Point("events.published", 2),) if number % 2 else ()
        yield Trial(Kind.KILLS, seed, (*before, Point(name, 1)))


def _first_points(hits: Counter[str], rng: random.Random) -> list[Point]:
    """Return all points: the boundaries in turn, and the hits of each boundary in random order."""
    rows = [[Point(name, hit) for hit in rng.sample(range(1, n + 1), n)] for name, n in hits.items()]
    rng.shuffle(rows)
    turns = chain.from_iterable(zip_longest(*rows))
    return [point for point in turns if point is not None]


def _more_points(hits: Counter[str], rng: random.Random) -> list[Point]:
    """Return kills of the following resumes: mostly early hits, since each resume has fewer tasks left."""
    points: list[Point] = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        name = rng.choice(FAILPOINTS[3:])
        points.append(Point(name, rng.randint(1, max(1, hits[name] // 3))))
    return points


def _end(pids: Sequence[int]) -> None:
    """Kill the workers and their processes under test with SIGKILL. Python drops a gentler signal that arrives during a
    fork; the files of the workers are removed with the temporary folder.
    """
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _outbox(place: Path, number: int) -> Path:
    return place / f"tally-{number}.json"


def _fault_file(place: Path, number: int) -> Path:
    return place / f"fault-{number}.txt"


def _worker_tally(place: Path, number: int) -> Tally:
    """Return the tally of a worker. Raises PlaitError if the worker could not make a case."""
    path, fault = _outbox(place, number), _fault_file(place, number)
    if path.exists():
        return Tally.from_json(path.read_text(encoding="utf-8"))
    if fault.exists():
        raise PlaitError(f"nothing was tried, since no case could be made: {fault.read_text(encoding='utf-8')}")
    return Tally(violations=["a worker of the harness itself ended before its time"])


def is_caught(bug: Mutant, folder: Path, server: str | None = None) -> bool:
    """Return whether the judge catches `bug`: a trial breaks an invariant with the bug in every process, and the same
    trial breaks none without the bug.
    """
    stage, honest = Stage(folder / "planted", bug.plant, server), Stage(folder / "honest", server=server)
    fitting = filter(lambda seed: bug.fits(random_case(seed)), chain([bug.seed] * 3, count()))
    for seed in islice(fitting, PATIENCE):
        rng = random.Random(f"{bug.name} {seed}")
        points = [Point(rng.choice(bug.names), rng.choice(bug.hits)) for _ in range(rng.randint(1, 2))]
        trial, case = Trial(bug.kind, seed, tuple(points)), random_case(seed)
        if broken := stage.play(trial, case).verdict.broken:
            return shows(broken) and not honest.play(trial, case).verdict.broken
    return False
