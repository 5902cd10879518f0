"""What a case of the adoptions does, drawn from its seed before anything runs: a plan, and whom it disturbs when."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEND = "mend"
"""What a planner waits for that was told of its mistakes."""
SAYS = "person says"
LAST = "last"
"""What comes only once nobody disturbs the run any more."""
_KINDS = {"plain": 3, "until": 5, "asks": 3, "fails": 2, "kept": 2, "continues": 3, "plans": 1, "once": 2}
_OPENING_S, _KILL_S = 0.13, 0.4  # between two of them, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """From the start of a runner to its end by SIGKILL, and what is done before the next one starts.

    Times are in seconds from the start. At the `requests` something that turns wait for is there; at the `kills` an
    agent dies, each with a number below 1 that says which. `contested`: somebody else resumes the run as well.
    """

    lasts: float
    concurrency: int
    requests: tuple[float, ...]
    kills: tuple[tuple[float, float], ...]
    dies: float | None
    """Once no runner lives an agent dies as well; a number below 1 says which."""
    contested: bool
    previewed: bool
    answered: bool
    talked_to: float | None
    """A person goes on with a task that is completed; a number below 1 says with which."""


@dataclass(frozen=True, slots=True)
class Script:
    seed: int
    tasks: Mapping[str, Mapping[str, Any]]
    rounds: Sequence[Round]
    names: tuple[str, ...]
    """The files that turns wait for, the first to come last."""

    def said_at_most(self, prompt: str) -> int:
        """How often `prompt` may be said where no agent dies."""
        task = self.tasks.get(f"t{prompt[1:].partition(' ')[0]}") if prompt.startswith("p") else None
        if task is not None:
            return task["retry_attempts"] if "[[error" in prompt else 1
        if prompt.startswith("These tasks cannot be added"):
            return sum("adds_tasks" in one for one in self.tasks.values())
        return 1


def drawn(seed: int) -> Script:
    """The case of that seed. In every third one agents die as well."""
    rng = random.Random(seed)
    kills_agents = seed % 3 == 2
    tasks: dict[str, dict[str, Any]] = {}
    for number in range(rng.randint(1, 6)):
        tasks[f"t{number}"] = _task(rng, number, tasks)
    names = [MEND, *(f"{gate}{number}" for number in range(len(tasks)) for gate in "gh")]
    rng.shuffle(names)
    names.insert(0, LAST)
    rounds = tuple(_round(rng, kills_agents=kills_agents) for _ in range(rng.randint(1, 6)))
    return Script(seed, tasks, rounds, tuple(names))


def _task(rng: random.Random, number: int, earlier: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    until, hush = f" [[until g{number}]]", f" [[hush h{number}]]"
    words = until if kind == "until" else rng.choice(["", "", until, hush, hush + until])
    stray = " [[stray]]" if rng.random() < 0.3 else ""
    task: dict[str, Any] = {"id": f"t{number}", "prompt": f"p{number}{words}{stray}", "retry_attempts": 1}
    if earlier and rng.random() < 0.5:
        task["depends_on"] = rng.sample(list(earlier), min(len(earlier), rng.randint(1, 2)))
    if kind == "asks":
        task["prompt"] += f" [[ask Q{number}?]]"
    elif kind == "fails":
        task["prompt"] += " [[error transient]]"
        task |= {"retry_attempts": rng.randint(1, 3), "failure_mode": rng.choice(["soft", "skip"])}
    elif kind == "kept":
        task["prompt"] += " [[kept transient]]"
        task["retry_attempts"] = 4
    elif kind == "plans":
        task["adds_tasks"] = True
    elif kind == "once":
        task["at_most_once"] = True
    talks = [task_id for task_id, one in earlier.items() if "failure_mode" not in one]
    if kind == "continues" and talks:
        task["continues"] = rng.choice(talks)
    return task


def _round(rng: random.Random, *, kills_agents: bool) -> Round:
    lasts = rng.choice([rng.uniform(0, 0.08), rng.uniform(0.03, 0.3), rng.uniform(0.1, 0.8)])
    kills = _moments(rng, _KILL_S, lasts) if kills_agents else ()
    return Round(
        lasts=lasts,
        concurrency=rng.randint(1, 5),
        requests=_moments(rng, _OPENING_S, lasts),
        kills=tuple((moment, rng.random()) for moment in kills),
        dies=rng.random() if kills_agents and rng.random() < 0.4 else None,
        contested=rng.random() < 0.25,
        previewed=rng.random() < 0.3,
        answered=rng.random() < 0.6,
        talked_to=rng.random() if rng.random() < 0.15 else None,
    )


def _moments(rng: random.Random, between: float, until: float) -> tuple[float, ...]:
    moments: list[float] = []
    moment = rng.expovariate(1 / between)
    while moment < until:
        moments.append(moment)
        moment += rng.expovariate(1 / between)
    return tuple(moments)
