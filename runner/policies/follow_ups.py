"""Follow-ups by role: after a task of one role, tasks of others. Pure.

When a task of a role that has a chain is completed, the whole chain is added behind it: each follow-up depends on the
task that it follows and on those before it in the chain, so everything else is the schedule's business. A follow-up
has a role too, and is followed in its turn where that role has a chain; since roles may not go round in a circle, every
chain comes to its end.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import count
from typing import cast

from plait.backends.protocol import JsonInput, JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Decision, RunView
from plait.runner.domain.status import TaskStatus
from plait.runner.domain.task import DEFAULT_RETRY, FailureMode, Mode, Retry, Task
from plait.runner.errors import DAGError, Problem
from plait.runner.policies.settings import made_of, settings_of
from plait.runner.prompts.base import RESERVED_NAMES
from plait.runner.prompts.render import names_used

WORK = "work"
"""What the result of the task that is followed is called in the prompts of its follow-ups."""
PROMPTS: Mapping[str, str] = {
    "reviewer": "Review this work. Name what is wrong with it or missing in it, the worst first, or say that it is "
    "good.\n\n{{ work }}",
    "tester": "Test this work: say which cases it has to withstand, go through each of them, and name those in which "
    "it fails.\n\n{{ work }}",
}
"""What follow-ups of these roles are asked, unless they have prompts of their own."""
_ROLE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,31}")
_MOST_ID = 64


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A task that follows another. `role` names it, in ids, in the prompts of those behind it and for further chains.

    `prompt` is a template: `{{ work }}` is the result of the task that it follows, and the roles before it in the chain
    stand for theirs; without one, that of PROMPTS is taken. The other fields as in `Task`.
    """

    role: str
    prompt: str = ""
    backend: str | None = None
    failure_mode: Mode = FailureMode.HARD
    output_schema: Mapping[str, object] | None = None
    retry: Retry = DEFAULT_RETRY
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not _ROLE.fullmatch(self.role) or self.role == WORK or self.role in RESERVED_NAMES:
            raise ValueError(
                f"role {self.role[:80]!r} must be 1 to 32 of letters, digits, '.', '_', '-', not starting with '.', "
                f"and none of {', '.join(sorted({WORK, *RESERVED_NAMES}))}"
            )
        if not self.prompt and self.role not in PROMPTS:
            raise ValueError(
                f"a follow-up of role {self.role!r} needs a prompt; only {', '.join(PROMPTS)} have one of their own"
            )
        names_used(self.prompt)
        object.__setattr__(self, "prompt", self.prompt or PROMPTS[self.role])
        object.__setattr__(self, "failure_mode", FailureMode(self.failure_mode))


@dataclass(frozen=True, slots=True)
class Mistake:
    """What would be wrong with `task`, the follow-up at `place` in the chain after the role `after`."""

    task: Task
    after: str
    place: int
    problem: Problem


DEFAULT_CHAINS: Mapping[str, Sequence[FollowUp]] = {"coder": (FollowUp("reviewer"), FollowUp("tester"))}


class FollowUps:
    """After each completed task of a role that is a key of `chains`, its follow-ups: `run(dag, policy=FollowUps())`.

    A task's role is `role` in its metadata. Nothing follows a task that failed, was skipped or was cancelled. Tasks
    that depend on a task do not wait for its follow-ups. Of a task with `for_each` each part is followed. Raises
    ValueError for chains that cannot be, and PromptError. What their prompts may use depends on the task that is
    followed, so `run` and its like raise DAGError for names that are none: see `check`.
    """

    kind = "follow_ups"

    def __init__(self, chains: Mapping[str, Sequence[FollowUp]] = DEFAULT_CHAINS) -> None:
        self._chains = {role: tuple(chain) for role, chain in chains.items()}
        for role, chain in self._chains.items():
            _check(role, [step.role for step in chain])
        if circle := circle_of({role: [step.role for step in chain] for role, chain in self._chains.items()}):
            raise ValueError(f"these roles follow each other for ever: {' -> '.join(circle)}")

    def chains(self) -> Mapping[str, tuple[FollowUp, ...]]:
        """What follows which role."""
        return self._chains

    def backends(self) -> frozenset[str | None]:
        """The names of the backends that follow-ups run on; None stands for the runner's default one."""
        return frozenset(step.backend for chain in self._chains.values() for step in chain)

    def settings(self) -> dict[str, JsonValue]:
        """What `from_settings` makes the same policy of."""
        return {role: [settings_of(step) for step in chain] for role, chain in self._chains.items()}

    @classmethod
    def from_settings(cls, settings: Mapping[str, JsonValue]) -> FollowUps:
        """The policy whose `settings` these are."""
        chains = cast("Mapping[str, list[dict[str, JsonValue]]]", settings)
        return cls({role: [made_of(FollowUp, step) for step in chain] for role, chain in chains.items()})

    def decide(self, run: RunView) -> Decision:
        """Adds the follow-ups of the task that has ended, once."""
        if run.ended is None or run.result(run.ended).status is not TaskStatus.COMPLETED:
            return Decision()
        task = run.task(run.ended)
        # Of a task that was one for each element of a list, the parts are followed, and not the list of their results.
        chain = self._chains.get(role_of(task) or "", ())
        if not chain or task.for_each is not None or _is_followed(task, chain, run):
            return Decision()
        return Decision(add=tuple(self._after(task, lambda name: _find(run, name) is not None)))

    def check(self, dag: DAG) -> None:
        """Raises DAGError with every mistake in what would follow if all tasks of `dag` were completed."""
        if found := [mistake.problem for mistake in self.mistakes(dag)]:
            raise DAGError(found)

    def mistakes(self, dag: DAG) -> Iterator[Mistake]:
        """The same one by one, each once, however many tasks of `dag` it would follow."""
        stand_ins = self._stand_ins(dag)
        there = (*dag, *stand_ins)
        origins = {one[0].id: one for one in self._foreseen(there, {task.id for task in there})}
        try:
            dag.copy().extend([*stand_ins, *(task for task, _, _ in origins.values())])
        except DAGError as error:
            seen: set[tuple[str, int, str]] = set()
            for problem in error.problems:
                task, after, place = origins[problem.task_id or ""]
                if (after, place, problem.message) not in seen:
                    seen.add((after, place, problem.message))
                    hint = f"; let {_followed(task)!r} depend on it"
                    message = problem.message.replace("; add it to depends_on", hint)
                    yield Mistake(task, after, place, replace(problem, message=message, position=None))

    def _after(self, task: Task, is_taken: Callable[[str], bool]) -> Iterator[Task]:
        """What follows `task` in a run where ids may be in use."""
        earlier, role = {WORK: task.id}, role_of(task)
        for step in () if role is None else self._chains.get(role, ()):
            free = (one for one in _ids(task.id, step.role) if one not in earlier.values() and not is_taken(one))
            follow_up = _follow_up(step, task, earlier, next(free))
            earlier[step.role] = follow_up.id
            yield follow_up

    def _foreseen(self, tasks: Iterable[Task], taken: set[str]) -> Iterator[tuple[Task, str, int]]:
        """Every follow-up of `tasks`, and theirs, with the role that it is after and its place in the chain."""
        for task in tasks:
            added = list(self._after(task, taken.__contains__))
            taken |= {one.id for one in added}
            yield from ((one, role_of(task) or "", place) for place, one in enumerate(added))
            yield from self._foreseen(added, taken)

    def _stand_ins(self, dag: DAG) -> list[Task]:
        """A task for each role that none has yet and that follows none: whoever has it is added later, behind whatever
        is there.
        """
        known = {step.role for chain in self._chains.values() for step in chain}
        known |= {role for task in dag if (role := role_of(task)) is not None}
        made: dict[str, Task] = {}
        for role in sorted(self._chains.keys() - known):
            name = re.sub(r"[^A-Za-z0-9_-]", "-", role)[: _MOST_ID // 2]
            while not name or name in dag or name in dag.inputs or name in made:
                name += "-"
            made[name] = Task(name, depends_on=[task.id for task in dag], metadata={"role": role})
        return list(made.values())


def role_of(task: Task) -> str | None:
    """The role of `task`, None where it has none."""
    role = task.metadata.get("role")
    return role if isinstance(role, str) else None


def circle_of(roles: Mapping[str, Iterable[str]]) -> list[str]:
    """Roles that follow each other in a circle, beginning and ending with the same one; empty where there is none."""
    try:
        TopologicalSorter({role: list(after) for role, after in roles.items()}).prepare()
    except CycleError as error:
        return list(reversed(cast("list[str]", error.args[1])))
    return []


def _check(after: str, roles: Sequence[str]) -> None:
    if not roles:
        raise ValueError(f"nothing follows role {after!r}; give its chain at least one follow-up")
    for role in roles:
        if roles.count(role) > 1:
            raise ValueError(f"role {role!r} stands twice in the chain after {after!r}; call one of them otherwise")
        if role == WORK or role in RESERVED_NAMES:
            raise ValueError(
                f"a follow-up of {after!r} cannot have the role {role!r}, which means something in prompts"
            )


def _follow_up(step: FollowUp, task: Task, earlier: Mapping[str, str], task_id: str) -> Task:
    return Task(
        id=task_id,
        prompt=step.prompt,
        depends_on=tuple(earlier.values()),
        backend=step.backend,
        failure_mode=step.failure_mode,
        retry=step.retry,
        timeout=step.timeout,
        output_schema=step.output_schema,
        aliases=dict(earlier),
        metadata={"role": step.role, "follows": task.id},
    )


def _followed(follow_up: Task) -> JsonInput:
    """The id of the task that `follow_up` follows."""
    return follow_up.metadata["follows"]


def _is_followed(task: Task, chain: Sequence[FollowUp], run: RunView) -> bool:
    """Whether it has its follow-ups already: it was completed before, and done again because its result was damaged."""
    for step in chain:
        for task_id in _ids(task.id, step.role):  # the first that was free then is one of those that are taken now
            if (one := _find(run, task_id)) is None:
                break
            if one.metadata.get("follows") == task.id and task.id in one.depends_on:
                return True
    return False


def _find(run: RunView, task_id: str) -> Task | None:
    """The run's task of that id."""
    try:
        return run.task(task_id)
    except KeyError:
        return None


def _ids(task_id: str, role: str) -> Iterator[str]:
    """`task_id.role`, or something like it where that is too long; then numbered, for where that is taken."""
    if len(task_id) > (most := _MOST_ID - len(role) - 5):  # room for a number
        task_id = f"{task_id[: most - 9]}-{hashlib.sha256(task_id.encode()).hexdigest()[:8]}"
    yield f"{task_id}.{role}"
    yield from (f"{task_id}.{role}.{number}" for number in count(2))
