"""Random DAGs whose end can be told beforehand: what each task does follows from a seed, and so does what it gives."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plait import DAG, FailureMode, Retry, RunStatus, Task, TaskStatus

Behaviour = Literal["answers", "stumbles", "refuses", "breaks", "dawdles"]
"""What a task's backend does: `stumbles` fails twice, `breaks` always; `dawdles` is never in time."""

FAILS_AS: Mapping[Behaviour, str] = {"refuses": "refused", "breaks": "transient", "dawdles": "timeout"}
TALKERS = ("choosing", "naming", "replaying")
"""The backends: one whose session ids we choose, one that makes them itself, one that has no sessions."""


@dataclass(frozen=True, slots=True)
class Story:
    """A DAG, what its tasks do, and the circumstances. `pace` is how many seconds a usual answer takes.

    `hasty`: backends and store answer at once. `faults` is the share of calls of the store that go wrong; without a
    store nothing is written down at all.
    """

    seed: int
    dag: DAG
    behaviours: Mapping[str, Behaviour]
    concurrency: int
    limits: Mapping[str, int]
    pace: float
    hasty: bool
    faults: float
    stored: bool
    strict: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """What must come of a task. `said` are all answers of its conversation, its own included."""

    status: TaskStatus
    text: str = ""
    error_kind: str | None = None
    said: tuple[str, ...] = ()


def story(seed: int) -> Story:
    """The story of a seed."""
    rng = random.Random(seed)
    pace = rng.choice((0.1, 1.0, 60.0))
    faults = rng.choice((0.0, 0.0, 0.1, 0.4))
    behaviours: dict[str, Behaviour] = {}
    tasks: list[Task] = []
    for number in range(rng.randint(1, 14)):
        task_id = f"t{number}"
        once = not faults and rng.random() < 0.15
        behaviours[task_id] = _behaviour(rng, once)
        tasks.append(_task(rng, number, behaviours[task_id], pace, once, faults))
    return Story(
        seed=seed,
        dag=DAG(tasks, name=f"story {seed}"),
        behaviours=behaviours,
        concurrency=rng.randint(1, 6),
        limits={name: rng.randint(1, 3) for name in TALKERS if rng.random() < 0.5},
        pace=pace,
        hasty=rng.random() < 0.3,
        faults=faults,
        stored=rng.random() < 0.9,
        strict=rng.random() < 0.05,
    )


def _behaviour(rng: random.Random, once: bool) -> Behaviour:
    if once:  # never tried twice, so that stumbling would be the end
        return rng.choices(("answers", "refuses"), (5, 1))[0]
    return rng.choices(("answers", "stumbles", "refuses", "breaks", "dawdles"), (6, 2, 1, 1, 0.7))[0]


def _task(rng: random.Random, number: int, behaviour: Behaviour, pace: float, once: bool, faults: float) -> Task:
    upstream = [f"t{n}" for n in range(number) if rng.random() < 0.25]
    continues = f"t{rng.randrange(number)}" if number and rng.random() < 0.2 else None
    return Task(
        f"t{number}",
        prompt=" ".join([f"t{number}", *(f"{{{{ {name} }}}}" for name in upstream)]),
        depends_on=upstream,
        continues=continues,
        backend=None if continues else rng.choice(TALKERS),
        failure_mode=rng.choice(list(FailureMode)),
        retry=Retry(3, pace, 4 * pace),
        timeout={"dawdles": 5 * pace}.get(behaviour) or rng.choice((None, None, 20 * pace)),
        weight=rng.choice((1.0, 1.0, 5.0)),
        at_most_once=once,
    )


def endings(told: Story) -> dict[str, Ending]:
    """What must come of every task, whatever happens on the way."""
    ends: dict[str, Ending] = {}
    for task in told.dag:
        behaviour = told.behaviours[task.id]
        if any(_blocks(told.dag[name], ends[name]) for name in task.upstream):
            ends[task.id] = Ending(TaskStatus.PENDING)
        elif behaviour in FAILS_AS:
            skipped = task.failure_mode is FailureMode.SKIP
            status = TaskStatus.SKIPPED if skipped else TaskStatus.FAILED
            ends[task.id] = Ending(status, error_kind=FAILS_AS[behaviour])
        else:
            prompt = " ".join([task.id, *(ends[name].text for name in task.depends_on)])
            before = ends[task.continues].said if task.continues else ()
            text = answer(task.id, prompt, before)
            ends[task.id] = Ending(TaskStatus.COMPLETED, text, None, (*before, text))
    return ends


def _blocks(task: Task, ending: Ending) -> bool:
    failed = ending.status is TaskStatus.FAILED and task.failure_mode is FailureMode.HARD
    return failed or ending.status is TaskStatus.PENDING


def answer(task_id: str, prompt: str, before: Sequence[str]) -> str:
    """What the backend says: another prompt, or another conversation before it, gives another answer."""
    return f"{task_id}={zlib.crc32('|'.join([prompt, *before]).encode()):08x}"


def last_status(ends: Mapping[str, Ending]) -> RunStatus:
    """What must come of the run."""
    failed = any(end.status is TaskStatus.FAILED for end in ends.values())
    return RunStatus.FAILED if failed else RunStatus.COMPLETED
