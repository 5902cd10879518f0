"""Several real processes about one run: only one may own it, and nothing of another's is ever recorded.

Three kinds of rounds (contest_rounds.py): `race`, twenty processes resume a dead owner's run at the same
moment; `pause`, an owner stops for longer than its lease, is succeeded, and wakes up; `jump`, a live owner's run is
wanted by somebody whose clock is a day ahead.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from tests.faults.campaigns.report import Report, Scale
from tests.support.processes import warm
from tests.support.processes.contest import TASKS, Facts, Sabotage

Kind: TypeAlias = Literal["race", "pause", "jump"]
ROUNDS: dict[Scale, dict[Kind, int]] = {
    "quick": {"race": 3, "pause": 3, "jump": 1},
    "nightly": {"race": 50, "pause": 20, "jump": 5},
}
AT_ONCE: dict[Kind, int] = {"race": 1, "pause": 4, "jump": 4}
"""Rounds beside one another; those of the last two kinds mostly wait for a lease to end."""
PLANTED: dict[Sabotage, tuple[Kind, str]] = {
    "no epoch check": ("pause", "the owner that was succeeded ended as: never left"),
    "epoch checked outside the transaction": ("pause", "told as completed and not stored"),
    "lease by the wall clock": ("jump", "who came from tomorrow ended as ['completed']"),
}
"""Where each planted bug is to show, and as what."""
_LIMIT = 60.0  # seconds for one round


def run(*, scale: Scale, seed: int = 0) -> Report:
    """The rounds that `scale` says, and the planted bugs."""
    began = time.monotonic()
    violations: list[str] = []
    cases = 0
    at_once: list[int] = []
    for kind, count in ROUNDS[scale].items():
        for facts in play(kind, range(seed, seed + count)):
            cases += 1
            violations += judged(kind, facts)
            at_once += [len(facts.others)] if kind == "race" else []
    return Report(
        method="several processes",
        unit="rounds",
        cases=cases,
        violations=tuple(violations),
        planted={sabotage: is_caught(sabotage, seed) for sabotage in PLANTED},
        seconds=time.monotonic() - began,
        figures={f"rounds of {kind}": count for kind, count in ROUNDS[scale].items()}
        | {"processes that resume at once": min(at_once)},
    )


def play(kind: Kind, seeds: Iterable[int], sabotage: Sabotage | None = None) -> list[Facts]:
    """One round for each seed, each in a process that may fork."""
    with ThreadPoolExecutor(AT_ONCE[kind]) as pool:
        return list(pool.map(partial(_play, kind, sabotage), seeds))


def _play(kind: Kind, sabotage: Sabotage | None, seed: int) -> Facts:
    done = warm.run(
        [sys.executable, "-m", "tests.support.processes.contest_rounds", kind, sabotage or "", str(seed)],
        cwd=Path(__file__).parents[3],
        timeout=_LIMIT,
    )
    assert done.returncode == 0, f"{kind}, seed {seed}: {done.stderr}"
    return Facts(**json.loads(done.stdout))


def is_caught(sabotage: Sabotage, seed: int) -> bool:
    """Whether a round shows the planted bug as what it is."""
    kind, expected = PLANTED[sabotage]
    return any(expected in wrong for facts in play(kind, [seed], sabotage) for wrong in judged(kind, facts))


def judged(kind: Kind, facts: Facts) -> list[str]:
    """What is wrong with the round, one line each."""
    again = f"python -m tests.support.processes.contest_rounds {kind} '' {facts.seed}"
    return [f"{wrong} ({again})" for wrong in (*_CHECKS[kind](facts), *_recorded_wrongly(facts))]


def _race(facts: Facts) -> list[str]:
    refused = sum(one.startswith("RunOwned: ") for one in facts.others)
    owners = {pid for pid, _ in facts.executions} - {facts.first_pid}
    wrong: list[str] = []
    if refused != len(facts.others) - 1 or facts.others.count("completed") != 1:
        wrong.append(f"the processes ended as {Counter(facts.others)}")
    if len(owners) != 1 or facts.epoch != 2:
        wrong.append(f"it was run by {len(owners)} processes besides the dead one, and is at epoch {facts.epoch}")
    times = Counter(task_id for pid, task_id in facts.executions if pid != facts.first_pid)
    return wrong + [f"{task_id} was executed {count} times" for task_id, count in times.items() if count > 1]


def _pause(facts: Facts) -> list[str]:
    wrong: list[str] = []
    if not facts.first.startswith("OwnershipLost: "):
        wrong.append(f"the owner that was succeeded ended as: {facts.first}")
    if facts.others != ["completed"] or facts.epoch != 2:
        wrong.append(f"the second owner ended as {facts.others}, at epoch {facts.epoch}")
    if facts.children_left:
        wrong.append("a child process of the first owner's backend is still alive")
    return wrong


def _jump(facts: Facts) -> list[str]:
    wrong: list[str] = []
    if facts.first != "completed":
        wrong.append(f"the owner, alive all the time, ended as: {facts.first}")
    if not all(one.startswith("RunOwned: ") and "is being run by process" in one for one in facts.others):
        wrong.append(f"who came from tomorrow ended as {facts.others}")
    return wrong


def _recorded_wrongly(facts: Facts) -> list[str]:
    """What holds in every round: each task is completed once, and by the first owner only what it had stored."""
    wrong: list[str] = []
    if facts.status != "completed" or len(facts.after) != TASKS + 1 or facts.completions != TASKS + 1:
        wrong.append(f"the run is {facts.status} with {len(facts.after)} results, {facts.completions} completions")
    if any(facts.after.get(task_id) != text for task_id, text in facts.before.items()):
        wrong.append("a stored result was replaced")
    if facts.epoch > 1:
        late = {task_id for task_id, text in facts.after.items() if text.endswith(f" {facts.first_pid}")}
        again = {task_id for pid, task_id in facts.executions if pid != facts.first_pid} & facts.before.keys()
        lists = {
            "recorded by the first owner after it was succeeded": late - facts.before.keys(),
            "executed again though they were completed": again,
            "told as completed and not stored": set(facts.told) - facts.before.keys(),
        }
        wrong += [f"{what}: {sorted(task_ids)}" for what, task_ids in lists.items() if task_ids]
    return wrong


_CHECKS: dict[Kind, Callable[[Facts], list[str]]] = {"race": _race, "pause": _pause, "jump": _jump}
