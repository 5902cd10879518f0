"""Cases of trials: a DAG with limits, and the behaviour of the fake backend by task. All made from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from plait.errors import ErrorKind
from plait.json_form import JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Decision, RecordedRun
from plait.task import Check, FailureMode, Retry, Task

NEVER = 1_000_000
"""More failures than any retry policy allows."""
GROWING = (2, 3)
"""Remainders of `seed % 4` for cases that grow."""
_BACKENDS = ("one", "two", "three")
_LARGE = 70_000


@dataclass(frozen=True, slots=True)
class TaskBehaviour:
    """The behaviour of the fake backend for one task."""

    failures: int = 0
    """The number of transient failures before the answer, over all processes."""
    refused: bool = False
    """Whether every execution fails for good."""
    seconds: float = 0.0
    """The duration of an execution."""
    padding: int = 0
    """The number of characters added to the answer."""
    structured: bool = False
    """Whether the answer is data instead of text."""
    crashes: bool = False
    """Whether every execution kills the process."""
    adds: tuple[Mapping[str, JsonValue], ...] = ()
    """Tasks added by the reply, in the shape of a plan file."""
    items: int | None = None
    """The length of the list in a structured answer; None without a list."""


@dataclass(frozen=True, slots=True)
class Case:
    """A DAG with all settings of the runner and of the fake backends."""

    dag: DAG
    parts: Mapping[str, TaskBehaviour]
    """Behaviour by task id, for declared and added tasks."""
    backends: tuple[str, ...]
    """The names of the backends; the first name is the default."""
    concurrency: int
    limits: Mapping[str, int]
    """Concurrency limits by backend."""
    reviewed: Collection[str] | None = None
    """Tasks for which the policy adds a review after the end; None for a run without a policy."""

    def part(self, task_id: str) -> TaskBehaviour:
        """Return the behaviour of the task. A part of a `for_each` task behaves like the `for_each` task."""
        found = self.parts.get(task_id)
        return self.part(task_id.rpartition(".")[0]) if found is None else found


def random_case(seed: int) -> Case:
    """Return a random case: failures, retries, every failure mode, continued conversations, slow and instant tasks.

    Some tasks have conditions, joins or checks. Two of every four seeds have tasks that add tasks. Cases of even seeds
    are small enough for a kill at every hit.
    """
    rng = random.Random(f"case {seed}")
    count = rng.randint(5, 14) if seed % 2 else rng.randint(2, 4)
    tasks: list[Task] = []
    parts: dict[str, TaskBehaviour] = {}
    for number in range(count):
        task = _task(rng, number, tasks, parts)
        tasks.append(task)
        parts[task.id] = lasting(task, _part(rng))
    limits = {name: rng.randint(1, 3) for name in _BACKENDS if rng.random() < 0.3}
    case = Case(DAG(tasks, name=f"case {seed}"), parts, _BACKENDS, rng.randint(1, 6), limits)
    return _joined(_conditioned(_grown(case, seed) if seed % 4 in GROWING else case, seed), seed)


def _conditioned(case: Case, seed: int) -> Case:
    """Return `case` with conditions on some tasks, each about a hexadecimal digit in a result. A separate generator of
    random numbers keeps the rest of the case as it is.
    """
    rng = random.Random(f"conditions {seed}")
    lists = {task.id for task in case.dag if task.for_each is not None}
    tasks: list[Task] = []
    for task in case.dag:
        about = [name for name in task.depends_on if name not in lists]
        if about and task.for_each is None and rng.random() < 0.2:
            name = rng.choice(about)
            condition = (
                f"'{rng.choice('0123456789abcdef')}' {rng.choice(['in', 'not in'])} {use_of(name, case.parts[name])}"
            )
            tasks.append(replace(task, when=condition))
        else:
            tasks.append(task)
    return replace(case, dag=DAG(tasks, name=case.dag.name))


def _joined(case: Case, seed: int) -> Case:
    """Return `case` with joins of some tasks, and checks of some answers, which pass. A separate generator as above."""
    rng = random.Random(f"joins {seed}")
    lists = {task.id for task in case.dag if task.for_each is not None}
    tasks: list[Task] = []
    for task in case.dag:
        # A field of a result that is not there could not be used.
        plain = not any(case.parts[name].structured for name in task.depends_on) and not lists & set(task.depends_on)
        is_free = task.for_each is None and task.continues is None and task.when is None
        if plain and is_free and len(task.depends_on) > 1 and rng.random() < 0.5:
            joined = replace(task, join=rng.choice(["any", "done"]))
            tasks.append(replace(joined, prompt=prompt_of(joined, case.parts)))
        elif task.for_each is None and not case.parts[task.id].structured and rng.random() < 0.2:
            tasks.append(replace(task, check=Check(passes="{{ answer }} != ''", tries=1)))
        else:
            tasks.append(task)
    return replace(case, dag=DAG(tasks, name=case.dag.name))


def _grown(case: Case, seed: int) -> Case:

    return grown(case, seed)


def _task(rng: random.Random, number: int, before: list[Task], parts: Mapping[str, TaskBehaviour]) -> Task:
    needed = [task.id for task in rng.sample(before, min(len(before), rng.randrange(4)))]
    continues = rng.choice(before).id if before and rng.random() < 0.25 else None
    mode = rng.choices([FailureMode.HARD, FailureMode.SOFT, FailureMode.SKIP], [6, 2, 2])[0]
    backend = None if continues is not None else rng.choice(_BACKENDS)
    retry = Retry(3, rng.choice([0.0, 1.0, 5.0]), 5.0)
    name = f"t{number}"
    limit = rng.choice([None, 30.0])
    task = Task(name, "x", needed, backend, continues, mode, retry, limit, at_most_once=rng.random() < 0.07)
    return replace(task, prompt=prompt_of(task, parts))


def _part(rng: random.Random) -> TaskBehaviour:
    failures = rng.choices([0, 1, 2, NEVER], [80, 12, 5, 3])[0]
    refused = rng.random() < 0.06
    seconds = rng.choice([0.0, 0.0, 0.001, 0.004, 0.012])
    sound = not failures and not refused
    return TaskBehaviour(failures, refused, seconds, _LARGE if rng.random() < 0.05 else 0, sound and rng.random() < 0.2)


def tries(task: Task, kind: ErrorKind) -> int:
    """Return the number of executions of a task that always fails with an error of `kind`."""
    return task.retry_policy.attempts if kind in task.retry_policy.on and not task.at_most_once else 1


def lasting(task: Task, part: TaskBehaviour) -> TaskBehaviour:
    """Return `part`, with endless failures if the failures exhaust the retries of the task. Otherwise a kill between a
    failure and the record of the failure would change the end of the task.
    """
    return replace(part, failures=NEVER) if part.failures >= tries(task, ErrorKind.TRANSIENT) else part


def prompt_of(task: Task, parts: Mapping[str, TaskBehaviour]) -> str:
    """Return a prompt with the results of all dependencies: a wrong result changes the answer of the task. Which
    results are there for the first of several is a matter of time.
    """
    uses = [use_of(name, parts[name]) for name in task.upstream] if task.join != "any" else []
    return "|".join([task.id, *(["{{ item }}"] if task.for_each else []), *uses])


def use_of(task_id: str, part: TaskBehaviour) -> str:
    """Return the template expression of a task's result. The subscript accepts any id; a bare name would end at `-`."""
    return f'{{{{ results["{task_id}"]{".mark" if part.structured else ""} }}}}'


def plan_case(dag: DAG, default: str, concurrency: int, seed: int) -> Case:
    """Return a case with the shape and the retry policies of a user's DAG, with generated prompts and answers, and with
    failures from `seed`.

    Seed 0 has no failures. Requirements for a real model, such as an output schema, are removed, and conditions,
    checks, joins, votes and commands: each task is a call.
    """
    rng = random.Random(f"plan {seed}")
    parts = {task.id: TaskBehaviour(seconds=rng.choice([0.0, 0.001, 0.004])) for task in dag}
    if seed:
        for task in dag:
            failures = rng.choices([0, 1, NEVER], [90, 8, 2])[0]
            part = replace(parts[task.id], failures=failures, refused=rng.random() < 0.02)
            parts[task.id] = lasting(task, part)
    for task in dag:
        if task.adds_tasks:
            spec: Mapping[str, JsonValue] = {"id": f"{task.id[:60]}-new", "prompt": "new", "depends_on": [task.id]}
            parts[task.id] = replace(parts[task.id], adds=(spec,))
            parts[f"{task.id[:60]}-new"] = TaskBehaviour()
        if task.for_each is not None:
            sound = replace(parts[task.for_each], failures=0, refused=False)
            parts[task.for_each] = replace(sound, structured=True, items=rng.randrange(4))
    plain: dict[str, JsonValue] = {}
    tasks = [
        replace(
            task,
            prompt=prompt_of(task, parts),
            adds_tasks=False,  # the reply adds the tasks itself
            output_schema=None,
            item=None,
            aliases={},
            metadata=plain,
            when=None,
            check=None,
            join="all",
            race=False,
            vote=None,
            run=(),
            model=None,
            system=None,
            temperature=None,
            files=(),
        )
        for task in dag
    ]
    names = tuple(dict.fromkeys(dag.backend_of(task) or default for task in dag)) or (default,)
    return Case(DAG(tasks, name=dag.name), parts, names if default in names else (default, *names), concurrency, {})


def answer(task_id: str, prompt: str, history: tuple[str, ...], part: TaskBehaviour) -> tuple[str, JsonValue]:
    """Return the text and the data of an answer. The answer holds a hash of the prompt and of the whole history."""
    mark = sha256("\n".join([*history, prompt]).encode()).hexdigest()[:24]
    text = f"{task_id}={mark}" + "." * part.padding
    data: dict[str, JsonValue] = {"mark": mark}
    if part.items is not None:
        data["items"] = [f"{mark[:6]}-{number}" for number in range(part.items)]
    return (text, data) if part.structured else (text, None)


def digest(text: str, data: JsonValue) -> str:
    """Return a short hash of a result, for the ledger."""
    mark = data.get("mark") if isinstance(data, dict) else data
    return sha256(f"{text}\0{mark}".encode()).hexdigest()[:24]


def with_a_crasher(case: Case, seed: int) -> Case:
    """Return the case with a random crashing task among the tasks without dependencies."""
    rng = random.Random(f"crasher {seed}")
    chosen = rng.choice([task.id for task in case.dag if not task.upstream])
    parts = {**case.parts, chosen: TaskBehaviour(crashes=True)}
    tasks = [replace(task, prompt=prompt_of(task, parts)) for task in case.dag]
    for i, task in enumerate(tasks):
        if task.id == chosen:
            tasks[i] = replace(task, at_most_once=False)
    return replace(case, dag=DAG(tasks, name=case.dag.name), parts=parts)


def without_at_most_once(case: Case) -> Case:
    """Return the case without at-most-once tasks. While the store fails, an at-most-once task would fail unstarted."""
    tasks = [replace(task, at_most_once=False) for task in case.dag]
    return replace(case, dag=DAG(tasks, name=case.dag.name))


def chain_case() -> Case:
    """Return a chain of three tasks; each prompt holds the results of all earlier tasks."""
    before = [[], ["a"], ["a", "b"]]
    parts = {name: TaskBehaviour(seconds=0.001) for name in "abc"}
    plain = [Task(name, "x", needed) for name, needed in zip("abc", before, strict=True)]
    tasks = [replace(task, prompt=prompt_of(task, parts)) for task in plain]
    return Case(DAG(tasks, name="chain"), parts, _BACKENDS, 1, {})


LAST = "last"
"""The id of the task added by the policy when no task is left. The prompt lists all tasks reported to the policy."""


_SPEC_RETRY: JsonValue = {"attempts": 3, "base_delay": 1.0, "max_delay": 5.0}


class CasePolicy:
    """The policy of a case: adds reviews and the LAST task. The state is the list of ended tasks in order of report."""

    kind = "crashtest"

    def __init__(self, case: Case) -> None:
        self._case = case

    def settings(self) -> Mapping[str, JsonValue]:
        """Return no settings: a resume receives the policy with the case."""
        return {}

    def backends(self) -> Collection[str | None]:
        """Return the default backend, used by all added tasks."""
        return (None,)

    def decide(self, run: RecordedRun) -> Decision:
        """Add the tasks of `follows` after an ended task, and the LAST task when no task is left."""
        asked = list(run.state) if isinstance(run.state, list) else []
        if run.ended is not None:
            asked.append(run.ended)
            return Decision(tuple(follows(self._case, run.ended)), state=asked)
        done = any(task.id == LAST for task in run.tasks)
        return Decision(() if done else (last_task(map(str, asked)),), state=asked)


def follows(case: Case, ended: str) -> list[Task]:
    """Return the tasks that the policy of the case adds after the end of a task."""
    return [own_task(f"r_{ended}", f"r_{ended}")] if ended in (case.reviewed or ()) else []


def last_task(asked: Iterable[str]) -> Task:
    """Return the task added when no task is left; `asked` lists the tasks reported to the policy before."""
    return own_task(LAST, "|".join([LAST, *sorted(asked)]))


def own_task(name: str, prompt: str) -> Task:
    """Return a task without dependencies."""
    return Task(name, prompt, retry=Retry(3, 1.0, 5.0))


def grown(case: Case, seed: int) -> Case:
    """Return `case` with planners and `for_each` tasks, fewer in a small case."""
    rng = random.Random(f"growth {seed}")
    small = not seed % 2
    parts, tasks = dict(case.parts), list(case.dag.tasks)
    before = [task.id for task in tasks]
    for name in rng.sample(before, 1 if small else min(3, len(before))):
        adds = _specs(rng, name, [task.id for task in tasks], parts, deep=not small)
        parts[name] = replace(parts[name], adds=adds)
    for number in range(1 if small else 2):
        over = rng.choice(before)
        # No failures: prompts could not use a field of a softly failed task.
        items = rng.randrange(3 if small else 5)
        parts[over] = replace(parts[over], items=items, structured=True, failures=0, refused=False)
        name = f"m{number}"
        needed = rng.sample(before, rng.randrange(2))
        tasks.append(Task(name, "x", needed, for_each=over))
        parts[name] = TaskBehaviour(seconds=rng.choice([0.0, 0.002]), failures=rng.choice([0, 0, 0, 1]))
        if rng.random() < 0.4:
            parts[name] = lasting(tasks[-1], replace(parts[name], failures=NEVER))
            tasks[-1] = replace(tasks[-1], failure_mode=rng.choice(list(FailureMode)))
    if seed % 8 < 4:
        tasks.append(_paired(seed, tasks, parts))
    tasks.append(Task("u", "u", ["m0"]))
    parts["u"] = TaskBehaviour()
    if not small:
        tasks.append(Task("mm", "mm", for_each="m0"))
        parts["mm"] = TaskBehaviour()
    reviewed = tuple(rng.sample([*before, "m0"], 1 if small else 3))
    parts |= {f"r_{name}": TaskBehaviour() for name in reviewed} | {LAST: TaskBehaviour()}
    policy = None if rng.random() < 0.3 else reviewed
    with_prompts = [replace(task, prompt=prompt_of(task, parts)) for task in tasks]
    return replace(case, dag=DAG(with_prompts, name=case.dag.name), parts=parts, reviewed=policy)


def _paired(seed: int, tasks: Sequence[Task], parts: dict[str, TaskBehaviour]) -> Task:
    """Return a `for_each` task with parts paired with the parts of m0. A separate generator of random numbers keeps the
    rest of the case unchanged.
    """
    rng = random.Random(f"pairs {seed}")
    over = next(task.for_each for task in tasks if task.id == "m0")
    parts["p"] = TaskBehaviour(seconds=rng.choice([0.0, 0.002]))
    goes_on, others = rng.random() < 0.5, [task.id for task in tasks if task.for_each is None]
    needed = [*([] if goes_on else ["m0"]), *rng.sample(others, rng.randrange(2))]  # others delay the expansion
    return Task("p", "p", needed, continues="m0" if goes_on else None, for_each=over)


def _specs(
    rng: random.Random, planner: str, before: list[str], parts: dict[str, TaskBehaviour], *, deep: bool
) -> tuple[Mapping[str, JsonValue], ...]:
    """Return tasks in the shape of a plan file, and add their behaviour to `parts`. Prompts of these tasks use results
    of each other only.
    """
    specs: list[Mapping[str, JsonValue]] = []
    for number in range(rng.randint(1, 2)):
        name = f"{planner}_{number}"
        needed: list[JsonValue] = [spec["id"] for spec in specs if rng.random() < 0.5]
        uses = [use_of(str(one), parts[str(one)]) for one in needed]
        spec: dict[str, JsonValue] = {"id": name, "prompt": "|".join([name, *uses]), "retry": _SPEC_RETRY}
        if rng.random() < 0.3:
            # The continued task may complete, fail or never run, and did not expect a continuation.
            spec["continues"] = rng.choice([planner, rng.choice(before)])
        if rng.random() < 0.3:
            needed.append(rng.choice(before))
        specs.append({**spec, "depends_on": needed})
        parts[name] = TaskBehaviour(failures=rng.choice([0, 0, 1]), seconds=rng.choice([0.0, 0.002]))
    if deep and rng.random() < 0.5:
        last = f"{planner}_{len(specs) - 1}"
        parts[last] = replace(parts[last], adds=_specs(rng, last, before, parts, deep=False))
    return tuple(specs)
