"""Cases that grow: planners, tasks for each element of a result, and a policy whose every question leaves a trace."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from plait.runner.crashtest.cases import MANY, NEVER, Case, Part, lasting, prompt_of, use_of
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Decision, RunView
from plait.runner.domain.task import FailureMode, JsonValue, Retry, Task

LAST = "last"
"""What the policy of a case adds when nothing is left: its prompt holds all that the policy was asked about."""
_SPEC_RETRY: JsonValue = {"attempts": 3, "base_delay": 1.0, "max_delay": 5.0, "max_crashes": 1000}


class CasePolicy:
    """The policy of `case`: what it was asked about is its state, and it adds `review`s and the `LAST` task."""

    kind = "crashtest"

    def __init__(self, case: Case) -> None:
        self._case = case

    def settings(self) -> Mapping[str, JsonValue]:
        """None: the case is given again."""
        return {}

    def backends(self) -> Collection[str | None]:
        """The default one, for all that it adds."""
        return (None,)

    def decide(self, run: RunView) -> Decision:
        """As `follows`."""
        asked = list(run.state) if isinstance(run.state, list) else []
        if run.ended is not None:
            asked.append(run.ended)
            return Decision(tuple(follows(self._case, run.ended)), state=asked)
        done = any(task.id == LAST for task in run.tasks)
        return Decision(() if done else (last_task(map(str, asked)),), state=asked)


def follows(case: Case, ended: str) -> list[Task]:
    """What the case's policy adds after the end of a task."""
    return [own_task(f"r_{ended}", f"r_{ended}")] if ended in (case.reviewed or ()) else []


def last_task(asked: Iterable[str]) -> Task:
    """The task that is added when nothing is left; `asked` is all that was asked about before."""
    return own_task(LAST, "|".join([LAST, *sorted(asked)]))


def own_task(name: str, prompt: str) -> Task:
    """A task that depends on nothing."""
    return Task(name, prompt, retry=Retry(3, 1.0, 5.0, max_crashes=MANY))


def grown(case: Case, seed: int) -> Case:
    """`case`, with tasks that bring in others; a few only, so that small cases stay small."""
    rng = random.Random(f"growth {seed}")  # noqa: S311 - no secrets
    small = not seed % 2
    parts, tasks = dict(case.parts), list(case.dag.tasks)
    before = [task.id for task in tasks]
    for name in rng.sample(before, 1 if small else min(3, len(before))):
        adds = _specs(rng, name, [task.id for task in tasks], parts, deep=not small)
        parts[name] = replace(parts[name], adds=adds)
    for number in range(1 if small else 2):
        over = rng.choice(before)
        # It never fails: of a task that failed softly, prompts could use no field.
        items = rng.randrange(3 if small else 5)
        parts[over] = replace(parts[over], items=items, structured=True, failures=0, refused=False)
        name = f"m{number}"
        needed = rng.sample(before, rng.randrange(2))
        tasks.append(Task(name, "", needed, for_each=over, retry=Retry(max_crashes=MANY)))
        parts[name] = Part(seconds=rng.choice([0.0, 0.002]), failures=rng.choice([0, 0, 0, 1]))
        if rng.random() < 0.4:
            parts[name] = lasting(tasks[-1], replace(parts[name], failures=NEVER))
            tasks[-1] = replace(tasks[-1], failure_mode=rng.choice(list(FailureMode)))
    if seed % 8 < 4:
        tasks.append(_paired(seed, tasks, parts))
    tasks.append(Task("u", "", ["m0"], retry=Retry(max_crashes=MANY)))
    parts["u"] = Part()
    if not small:
        tasks.append(Task("mm", "", for_each="m0", retry=Retry(max_crashes=MANY)))
        parts["mm"] = Part()
    reviewed = tuple(rng.sample([*before, "m0"], 1 if small else 3))
    parts |= {f"r_{name}": Part() for name in reviewed} | {LAST: Part()}
    policy = None if rng.random() < 0.3 else reviewed
    with_prompts = [replace(task, prompt=prompt_of(task, parts)) for task in tasks]
    return replace(case, dag=DAG(with_prompts, name=case.dag.name), parts=parts, reviewed=policy)


def _paired(seed: int, tasks: Sequence[Task], parts: dict[str, Part]) -> Task:
    """A task that pairs up with m0; with a generator of its own, so that all else of the case is as it would be."""
    rng = random.Random(f"pairs {seed}")  # noqa: S311 - no secrets
    over = next(task.for_each for task in tasks if task.id == "m0")
    parts["p"] = Part(seconds=rng.choice([0.0, 0.002]))
    goes_on, others = rng.random() < 0.5, [task.id for task in tasks if task.for_each is None]
    needed = [*([] if goes_on else ["m0"]), *rng.sample(others, rng.randrange(2))]  # so that it may be unfolded late
    return Task("p", "", needed, continues="m0" if goes_on else None, for_each=over, retry=Retry(max_crashes=MANY))


def _specs(
    rng: random.Random, planner: str, before: list[str], parts: dict[str, Part], *, deep: bool
) -> tuple[Mapping[str, JsonValue], ...]:
    """Tasks in the shape of a plan file's, and what the stand-in makes of them. They use each other's text alone."""
    specs: list[Mapping[str, JsonValue]] = []
    for number in range(rng.randint(1, 2)):
        name = f"{planner}_{number}"
        needed: list[JsonValue] = [spec["id"] for spec in specs if rng.random() < 0.5]
        uses = [use_of(str(one), parts[str(one)]) for one in needed]
        spec: dict[str, JsonValue] = {"id": name, "prompt": "|".join([name, *uses]), "retry": _SPEC_RETRY}
        if rng.random() < 0.3:
            # What it goes on with is done, or fails, or is never run; nobody knew that it would be gone on with.
            spec["continues"] = rng.choice([planner, rng.choice(before)])
        if rng.random() < 0.3:
            needed.append(rng.choice(before))
        specs.append({**spec, "depends_on": needed})
        parts[name] = Part(failures=rng.choice([0, 0, 1]), seconds=rng.choice([0.0, 0.002]))
    if deep and rng.random() < 0.5:
        last = f"{planner}_{len(specs) - 1}"
        parts[last] = replace(parts[last], adds=_specs(rng, last, before, parts, deep=False))
    return tuple(specs)
