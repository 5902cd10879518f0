"""Random graphs with `join`, `repeat`, `check`, `when` and soft failures against an oracle: what runs, and how often,
and the same with a process that dies at each call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from plait import DAG, Check, ParallelRunner, RunResult, Task
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore
from plait.task import Join, Mode
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker

SEEDS = 500
CHECKED = Check(passes="{{ answer }} == 'ok'")


def answer(prompt: str, _request: ConversationRequest) -> str | BackendError:
    """What the model says: by the first word of the prompt, and `ok` once it knows what is wrong."""
    word = prompt.partition(" ")[0]
    if word == "bad":
        return BackendError(ErrorKind.INVALID_REQUEST, "bad")
    return "no" if word == "twice" else "ok"


def random_graph(rng: random.Random) -> list[Task]:
    tasks: list[Task] = []
    for number in range(rng.randint(3, 9)):
        before = rng.sample([task.id for task in tasks], rng.randint(0, min(number, 3)))
        join: Join = rng.choice(["all", "any", "done"]) if before else "all"
        mode: Mode = rng.choice(["hard", "soft", "skip"])
        word = rng.choice(["good", "good", "bad", "twice"])
        check = CHECKED if word == "twice" or rng.random() < 0.3 else None
        repeat = rng.choice([1, 1, 1, 2, 3])
        when = rng.choice([None, None, None, "false", "true"])
        names = "".join(f" {{{{ {name} }}}}" for name in before)
        task = Task(f"t{number}", f"{word}{names}", before, join=join, failure_mode=mode, when=when, check=check)
        tasks.append(replace(task, repeat=repeat, vote="majority" if repeat > 1 else None))
    return tasks


def expected(tasks: list[Task]) -> tuple[dict[str, str], int]:
    """The status of each task at the end, and the number of calls."""
    statuses: dict[str, str] = {}
    calls = 0
    passing = {task.id: task.failure_mode != "hard" for task in tasks}
    for task in tasks:
        ends = [statuses[name] for name in task.depends_on]
        good = ends.count("completed")
        dead = sum(
            end == "pending" or (end == "failed" and not passing[name])
            for end, name in zip(ends, task.depends_on, strict=True)
        )
        starts = {"all": not dead, "any": good > 0 or not dead, "done": True}[task.join]
        bad = task.prompt.startswith("bad")
        failed = "skipped" if task.failure_mode == "skip" else "failed"
        one = "pending" if not starts else "skipped" if task.when == "false" else failed if bad else "completed"
        if starts and task.when != "false":
            calls += task.repeat * (2 if task.prompt.startswith("twice") else 1)
        statuses[task.id] = one
        if task.repeat > 1:
            statuses |= {f"{task.id}.{number}": one for number in range(1, task.repeat + 1)}
            # Without an answer of a sample the vote ends as a failure does, behind a hard one it cannot start.
            statuses[task.id] = "pending" if one == "failed" and not passing[task.id] else one
    return statuses, calls


def statuses_of(result: RunResult) -> dict[str, str]:
    return {name: task.status.value for name, task in result.tasks.items()}


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, SEEDS), marks=pytest.mark.slow)])
async def test_what_runs_and_how_often(seeds: range) -> None:
    for seed in seeds:
        tasks = random_graph(random.Random(seed))
        backend = Talker(answer)
        result = await ParallelRunner(backend, clock=QuickClock()).run(DAG(tasks))
        assert (statuses_of(result), len(backend.prompts)) == expected(tasks), f"seed {seed}"


@pytest.mark.parametrize(
    "seed", [0, 16, 32, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(48, SEEDS, 16))]
)
async def test_a_process_that_dies_at_any_call_repeats_nothing_that_is_stored(seed: int) -> None:
    tasks = random_graph(random.Random(seed))
    statuses, calls = expected(tasks)
    for number in range(calls):
        store, first = MemoryStore(), Talker(answer)
        ended = await die(store, Dying(_from(number), answer=first), DAG(tasks))
        assert not ended
        backend = Talker(answer)
        result = await ParallelRunner(backend, store=store, clock=QuickClock()).resume("r")
        assert statuses_of(result) == statuses
        assert len(first.prompts) + len(backend.prompts) == calls, "only calls under way are made again"


def _from(number: int) -> Callable[[str], bool]:
    """Let the calls from this one on hang, the first one being 0."""
    made = 0

    def hangs(_prompt: str) -> bool:
        nonlocal made
        made += 1
        return made > number

    return hangs
