"""Follow-ups by role: after a task of one role, add tasks of other roles. Pure.

When a task with a role completes, the chain for the role is added. Each follow-up depends on the followed task and on
the earlier follow-ups of the chain; the scheduler does the rest. A follow-up has a role itself and may be followed in
turn. Roles must not form a cycle, so every chain ends.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import cast

from plait.errors import DAGError, Problem
from plait.json_form import JsonValue, as_json, from_json, value
from plait.runner.domain.dag import DAG, sort_names
from plait.runner.domain.policy import Decision, RecordedRun
from plait.runner.domain.task_checks import ADD_IT
from plait.runner.prompts.prompt_names import RESERVED_NAMES
from plait.runner.prompts.prompt_template import names_used
from plait.statuses import TaskStatus
from plait.task import DEFAULT_RETRY, FailureMode, Mode, Retry, Task

WORK = "work"
"""The name of the followed task's result in the prompts of its follow-ups."""
FOLLOWS = "follows"
"""The key in the metadata of a follow-up with the id of the followed task."""
PROMPTS: Mapping[str, str] = {
    "reviewer": "Review this work. Name what is wrong with it or missing in it, the worst first, or say that it is "
    "good.\n\n{{ work }}",
    "tester": "Test this work: say which cases it has to withstand, go through each of them, and name those in which "
    "it fails.\n\n{{ work }}",
}
"""Default prompts by role."""
_ROLE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,31}")
_MOST_ID = 64


@value
class FollowUp:
    """A task that follows another task. Fields not explained here are those of `Task`."""

    role: str
    """The name of the follow-up in ids, in later prompts of the chain, and in further chains."""
    prompt: str = ""
    """A template: `{{ work }}` is the result of the followed task, and earlier roles of the chain stand for their
    results. Defaults to the entry of PROMPTS.
    """
    backend: str | None = None
    failure_mode: Mode = FailureMode.HARD
    output_schema: Mapping[str, object] | None = None
    retry: Retry = DEFAULT_RETRY
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not _ROLE.fullmatch(self.role) or self.role == WORK or self.role in RESERVED_NAMES:
            raise ValueError(
                f"role {self.role[:80]!r} must have 1 to 32 letters, digits, '.', '_' or '-', and not begin with '.', "
                f"and must be none of {', '.join(sorted({WORK, *RESERVED_NAMES}))}"
            )
        if not self.prompt.strip() and self.role not in PROMPTS:
            raise ValueError(
                f"a follow-up of role {self.role!r} needs a prompt; only {', '.join(PROMPTS)} have a built-in prompt"
            )
        names_used(self.prompt)
        object.__setattr__(self, "prompt", self.prompt if self.prompt.strip() else PROMPTS[self.role])
        object.__setattr__(self, "failure_mode", FailureMode(self.failure_mode))


DEFAULT_CHAINS: Mapping[str, Sequence[FollowUp]] = {"coder": (FollowUp("reviewer"), FollowUp("tester"))}


class FollowUps:
    """Policy that adds follow-ups after completed tasks, by role: `run(dag, policy=FollowUps())`.

    The role of a task is `role` in its metadata; `chains` maps roles to follow-ups. Failed, skipped and cancelled tasks
    are not followed. Dependents of a task do not wait for its follow-ups. Of a `for_each` task, each part is followed.
    Raises ValueError for invalid chains, and PromptError. The names available to the prompts depend on the followed
    task, so `run` raises DAGError for unknown names: see `check`.
    """

    kind = "follow_ups"

    def __init__(self, chains: Mapping[str, Sequence[FollowUp]] = DEFAULT_CHAINS) -> None:
        self._chains = {role: tuple(chain) for role, chain in chains.items()}
        roles = {after: [step.role for step in chain] for after, chain in self._chains.items()}
        for _, _, message in chain_problems(roles):
            raise ValueError(message)

    def chains(self) -> Mapping[str, tuple[FollowUp, ...]]:
        """Return the follow-ups by role."""
        return self._chains

    def backends(self) -> frozenset[str | None]:
        """Return the names of the follow-ups' backends, with None for the default backend of the runner."""
        return frozenset(step.backend for chain in self._chains.values() for step in chain)

    def settings(self) -> dict[str, JsonValue]:
        """Return the settings for `from_settings`."""
        return {role: [as_json(step) for step in chain] for role, chain in self._chains.items()}

    @classmethod
    def from_settings(cls, settings: Mapping[str, JsonValue]) -> FollowUps:
        """Return the policy with the given stored `settings`."""
        chains = cast("Mapping[str, list[dict[str, JsonValue]]]", settings)
        return cls({role: [from_json(FollowUp, step) for step in chain] for role, chain in chains.items()})

    def decide(self, run: RecordedRun) -> Decision:
        """Return a decision with the follow-ups of the ended task, unless they were already added."""
        if run.ended is None or run.result(run.ended).status is not TaskStatus.COMPLETED:
            return Decision()
        task = run.task(run.ended)
        # Of a task that gathers, the parts are followed, not their gathered results.
        chain = self._chains.get(role_of(task) or "", ())
        if not chain or task.gathers or _is_followed(task, chain, run):
            return Decision()
        return Decision(add=tuple(self._after(task, lambda name: _find(run, name) is not None)))

    def check(self, dag: DAG) -> None:
        """Raise DAGError with all mistakes in the follow-ups of the tasks of `dag`, assuming all tasks complete."""
        if problems := [problem for *_, problem in self.mistakes(dag)]:
            raise DAGError(problems)

    def mistakes(self, dag: DAG) -> Iterator[tuple[Task, str, int, Problem]]:
        """Yield each mistake found by `check` once, however many tasks of `dag` have the follow-up: the follow-up, the
        role that it follows, its index in the chain, and the problem.
        """
        stand_ins = self._stand_ins(dag)
        tasks = (*dag, *stand_ins)
        origins = {origin[0].id: origin for origin in self._foreseen(tasks, {task.id for task in tasks})}
        try:
            dag.copy().extend([*stand_ins, *(task for task, _, _ in origins.values())])
        except DAGError as error:
            reported: set[tuple[str, int, str]] = set()
            for problem in error.problems:
                task, after, index = origins[problem.task_id or ""]
                if (after, index, problem.message) not in reported:
                    reported.add((after, index, problem.message))
                    message = problem.message
                    if problem.lacks_dependency:
                        message = f"{message.removesuffix(ADD_IT)}; let {task.metadata[FOLLOWS]!r} depend on it"
                    yield task, after, index, replace(problem, message=message, position=None)

    def _after(self, task: Task, is_used: Callable[[str], bool]) -> Iterator[Task]:
        """Yield the follow-ups of `task`. `is_used` returns whether the run already uses an id."""
        earlier, role = {WORK: task.id}, role_of(task)
        for step in () if role is None else self._chains.get(role, ()):
            free = (new for new in _ids(task.id, step.role) if new not in earlier.values() and not is_used(new))
            follow_up = _follow_up(step, task, earlier, next(free))
            earlier[step.role] = follow_up.id
            yield follow_up

    def _foreseen(self, tasks: Iterable[Task], ids: set[str]) -> Iterator[tuple[Task, str, int]]:
        """Yield all direct and indirect follow-ups of `tasks`, each with the preceding role and the index in the
        chain.
        """
        for task in tasks:
            added = list(self._after(task, ids.__contains__))
            ids |= {follow_up.id for follow_up in added}
            yield from ((follow_up, role_of(task) or "", index) for index, follow_up in enumerate(added))
            yield from self._foreseen(added, ids)

    def _stand_ins(self, dag: DAG) -> list[Task]:
        """Return a placeholder task for each role with a chain but without a task: such tasks may be added to the run
        later, after all present tasks.
        """
        roles = {step.role for chain in self._chains.values() for step in chain}
        roles |= {role for task in dag if (role := role_of(task)) is not None}
        stand_ins: dict[str, Task] = {}
        for role in sorted(self._chains.keys() - roles):
            name = re.sub(r"[^A-Za-z0-9_-]", "-", role)[: _MOST_ID // 2]
            while not name or name in dag or name in dag.inputs or name in stand_ins:
                name += "-"
            stand_ins[name] = Task(name, name, depends_on=[task.id for task in dag], metadata={"role": role})
        return list(stand_ins.values())


def role_of(task: Task) -> str | None:
    """Return the role of `task`; None without a role."""
    role = task.metadata.get("role")
    return role if isinstance(role, str) else None


def chain_problems(chains: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, tuple[str | int, ...], str]]:
    """Yield the mistakes in the roles of `chains`: the followed role, the place in its chain, and the message."""
    for after, roles in chains.items():
        if not roles:
            yield after, ("steps",), f"the chain after {after!r} has no step; add at least one"
        for index, role in enumerate(roles):
            if role in roles[:index]:
                message = f"role {role!r} is in this chain, after {after!r}, already; rename the role"
                yield after, ("steps", index, "role"), message
    for cycle in sort_names(chains)[1]:
        message = f"these roles form a cycle: {' -> '.join(cycle)}; remove one of these steps"
        yield cycle[0], ("after",), message


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
        metadata={"role": step.role, FOLLOWS: task.id},
    )


def _is_followed(task: Task, chain: Sequence[FollowUp], run: RecordedRun) -> bool:
    """Return whether the follow-ups were already added: a task completes twice if its result was damaged in between."""
    for step in chain:
        for task_id in _ids(task.id, step.role):  # an id free at that time is in use now
            if (task_there := _find(run, task_id)) is None:
                break
            if task_there.metadata.get(FOLLOWS) == task.id and task.id in task_there.depends_on:
                return True
    return False


def _find(run: RecordedRun, task_id: str) -> Task | None:
    """Return the task with the id `task_id`, if any."""
    try:
        return run.task(task_id)
    except KeyError:
        return None


def _ids(task_id: str, role: str) -> Iterator[str]:
    """Yield candidate ids: `task_id.role`, shortened if too long, then numbered."""
    if len(task_id) > (limit := _MOST_ID - len(role) - 5):  # room for a number
        task_id = f"{task_id[: limit - 9]}-{hashlib.sha256(task_id.encode()).hexdigest()[:8]}"
    yield f"{task_id}.{role}"
    yield from (f"{task_id}.{role}.{number}" for number in count(2))
