"""Plays one trial: starts the processes in a separate folder, and judges the ledger at the end."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.faults.crashtest import ledger as words
from tests.faults.crashtest.cases import Case, chain_case, with_a_crasher, without_at_most_once
from tests.faults.crashtest.child import LEASE_SECONDS, ProcessStart
from tests.faults.crashtest.fork_server import Ended, ForkedProcess
from tests.faults.crashtest.judge import Judge, Verdict, resume_times
from tests.faults.crashtest.ledger import Ledger, Line
from tests.faults.crashtest.oracle import expected
from tests.faults.crashtest.trial import Kind, Point, Trial

LAST_WORDS = 2000
"""The maximum number of characters of output kept."""
MOST_CRASHES = 12
"""More than the crashes after which a person is asked about a crasher."""


@dataclass(slots=True)
class Shown:
    """The results of a trial."""

    verdict: Verdict
    landed: Counter[str] = field(default_factory=Counter[str])
    """The number of landed kills by boundary."""
    hits: Counter[str] = field(default_factory=Counter[str])
    """The number of hits by boundary in undisturbed processes."""
    scheduled: int = 0
    """The number of planned kills."""
    output: str = ""
    """The end of the output of the processes."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A place for trials."""

    folder: Path
    """The parent of the folders of the trials."""
    plant: Callable[[], None] | None = None
    """Plants a bug in every process; None for no bug."""
    server: str | None = None
    """See `ProcessStart.server`."""

    def play(self, trial: Trial, case: Case) -> Shown:
        """Play and judge the trial, and remove the folder of the trial. Return the results."""
        folder = self.folder / str(trial)
        folder.mkdir(parents=True)
        try:
            scene = _SCENES[trial.kind]
            start = ProcessStart(folder, _fitted(trial, case), plant=self.plant)
            if self.server is not None:  # the trials share a database
                start = replace(start, server=self.server, run_id=secrets.token_hex(8))
            played = scene(trial, start)
            lines = _lines(start.ledger)
            verdict = Judge(start.case, played.leaving).judge(lines)
            verdict.resumes_ms = resume_times(lines, played.forked)
            return Shown(verdict, _landed(lines), _hits(lines), played.scheduled, _output(folder / "output"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class Played:
    """The course of a trial, for the judge."""

    scheduled: int = 0
    """The number of planned kills."""
    forked: dict[int, float] = field(default_factory=dict[int, float])
    """The time of the fork, in monotonic seconds, by pid."""
    leaving: dict[str, int] = field(default_factory=dict[str, int])
    """Expected errors at the end of processes, with the number of processes."""


def _fitted(trial: Trial, case: Case) -> Case:
    if trial.kind is Kind.CRASHER:
        return with_a_crasher(case, trial.seed)
    if trial.kind is Kind.UNSURE:
        return without_at_most_once(case)
    return chain_case() if trial.kind is Kind.ROT else case


def _kills(trial: Trial, start: ProcessStart) -> Played:
    played = Played()
    for point in (*trial.points, None):
        ended = _run(replace(start, point=point))
        played.forked[ended.pid] = ended.forked_at
        played.scheduled += point is not None
        if ended.how != "killed":
            break
    return played


def _crasher(_trial: Trial, start: ProcessStart) -> Played:
    for _ in range(MOST_CRASHES):
        if _run(start).how != "killed":
            break
    return Played()


def _unsure(trial: Trial, start: ProcessStart) -> Played:
    _run(replace(start, point=trial.points[0], fate="lose"))
    return Played()


def _rival(trial: Trial, start: ProcessStart) -> Played:
    owner = ForkedProcess(replace(start, point=trial.points[0], fate="stop"))
    try:
        if not owner.wait_until_stopped():
            _over(start, owner)
            return Played()
        _run(start)
        _run(replace(start, ahead=LEASE_SECONDS * 2))
        owner.wake()
        _over(start, owner)
    finally:
        owner.end()
    return Played(leaving={"RunOwned": 1, "OwnershipLost": 1})


def _rot(_trial: Trial, start: ProcessStart) -> Played:
    _run(replace(start, point=Point("attempt.before_call", 2)))
    _run(replace(start, only_open=True))  # the last close moves the whole log into the database
    whole = start.store.read_bytes()
    result = expected(start.case)["a"].value.encode()
    start.store.write_bytes(whole.replace(result, result[:-1] + b"?"))
    _run(start)
    _run(replace(start, retry_failed=True))
    return Played(scheduled=1)


def _run(start: ProcessStart) -> Ended:
    return _over(start, ForkedProcess(start))


def _over(start: ProcessStart, child: ForkedProcess) -> Ended:
    ended = child.wait()
    ledger = Ledger(start.ledger)
    ledger.write(words.DIED, ended.pid, ended.how)
    ledger.close()
    return ended


_SCENES: dict[Kind, Callable[[Trial, ProcessStart], Played]] = {
    Kind.KILLS: _kills,
    Kind.CRASHER: _crasher,
    Kind.UNSURE: _unsure,
    Kind.RIVAL: _rival,
    Kind.ROT: _rot,
}


def _lines(path: Path) -> list[Line]:
    ledger = Ledger(path)
    try:
        return ledger.lines()
    finally:
        ledger.close()


def _landed(lines: list[Line]) -> Counter[str]:
    """Return the landed kills by boundary. A kill has landed if the process recorded the point and was then killed."""
    landed: Counter[str] = Counter()
    last: str | None = None
    for word, *rest in lines:
        if word == words.REACH:
            last = rest[0]
        elif word == words.DIED:
            if last is not None and rest[1] == "killed":
                landed[last] += 1
            last = None
    return landed


def _hits(lines: list[Line]) -> Counter[str]:
    hits: Counter[str] = Counter()
    for word, *rest in lines:
        if word == words.COUNT:
            hits.update(rest[0])
    return hits


def _output(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:] if path.exists() else ""
