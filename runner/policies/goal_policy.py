"""The orchestrator as a policy: plan, execute and reflect until the goal is reached. Pure.

    plan.1 ──► do.* ──► reflect.1 ──► do.* ──► reflect.2 ──► ... ──► answer

Each arrow is a decision, stored with the end of the task before the arrow; the loop has no state outside the store.
Tasks run as soon as possible, also during a reflection. At any time at most one of the loop's own tasks (`plan.N`,
`reflect.N`, `answer`) is outstanding: `asked`. What the reflector is told of the work, and whether the work moves, is
read from the tasks of the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, cast

from plait.errors import nearest
from plait.json_form import JsonInput, JsonValue, as_json, from_json, text_of, value
from plait.runner.domain.dag import DAG, sort_names
from plait.runner.domain.policy import Decision, RecordedRun
from plait.runner.domain.run_result import TaskResult
from plait.safe_text import shorten
from plait.statuses import TASK_DONE, RunStatus, TaskStatus
from plait.task import FailureMode, Task

# Prompts and answer formats of planner, executors and reflector.
#
# Templates contain plain names only. Text from models is inserted through `item` and `aliases` and never parsed as a
# template. `goal` is an input of the run, and so is `registry`, the text about the workers, if there are any. The
# answers of planner and reflector are read into tasks, with all problems described for the model that answered.

PLANNER, EXECUTOR, REFLECTOR = "planner", "executor", "reflector"
ANSWER_ID = "answer"
INPUTS = frozenset({"goal", "registry"})
"""The inputs of a run that the prompts use."""
_FIRST = 1000.0
"""The weight of the loop's own tasks. A reflection scheduled after all pending tasks would come too late."""

_PLAN = """\
You plan how a goal is reached. Others carry your tasks out, several at the same time.

Goal:
{{ goal }}

Split the goal into at most {most} tasks. The one who does a task is told the goal, the task's prompt, and the results \
of the tasks that it depends on, nothing else. Answer with JSON of this form, where depends_on may be left out:
{"tasks": [{"id": "facts", "prompt": "..."}, {"id": "draft", "prompt": "...", "depends_on": ["facts"]}]}
"""
_PLAIN_PLAN = """\
Goal:
{{ goal }}

List the steps that lead to this goal, at most {most}, each as one short sentence. Answer with JSON of this form:
{"tasks": ["...", "..."]}
"""
_WORKERS = """
A task may name the worker that does it, by its name in "backend". There are:
{{ registry }}
A task without "backend" goes to a general worker. A task with a worker has this form:
{"id": "facts", "prompt": "...", "backend": "NAME"}
"""
_PLAN_AGAIN = """
Your plan was:
{{ earlier }}

It cannot be used:
{{ item }}

Give the whole plan again, with that put right.
"""
_WORK = """\
You do one of several tasks that lead to a goal. Do this task, no other.

Goal:
{{ goal }}

Task:
{{ item }}
"""
_PLAIN_WORK = """\
The goal is: {{ goal }}

Do only this, in one or two sentences: {{ item }}
"""
_REFLECT = """\
You judge how far a goal is reached, while others carry out the tasks that lead to it.

Goal:
{{ goal }}

{{ item }}

How is it to go on? If what is done is enough for the goal, "done" is true, and what has not begun is dropped. Else \
"add" holds the tasks that the goal needs beside those above; they may depend on those above and on each other. "drop" \
holds the ids of tasks that have not begun and no longer matter. What waits for a failed task never begins: drop it, \
and add what can take its place. Answer with JSON of this form, where all but "done" may be left out:
{"done": false, "add": [{"id": "check", "prompt": "...", "depends_on": ["do.facts"]}], "drop": ["do.draft"]}
"""
_PLAIN_REFLECT = """\
Goal:
{{ goal }}

{{ item }}

Is this enough for the goal? Then answer {"done": true}. Else answer {"done": false, "add": ["..."]} with what is left \
to be done, each as one short sentence.
"""
_ANSWER = """\
The tasks that lead to a goal have been carried out. Make one answer of their results.

Goal:
{{ goal }}

{{ item }}

Answer with what was asked for, for the one who set the goal, and say what is missing, if anything is.
"""
_PLAIN_ANSWER = """\
{{ goal }}

Use these notes:
{{ item }}

Answer in three sentences at most.
"""

_TASK: Mapping[str, JsonValue] = {
    "id": {"type": "string"},
    "prompt": {"type": "string"},
    "depends_on": {"type": "array", "items": {"type": "string"}},
}
_MOST_PLAIN = 5
# Bounded, because small models may not find an end.
_PLAIN_TASKS: Mapping[str, JsonValue] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 120},
    "maxItems": _MOST_PLAIN,
}


@value
class Team:
    """The backends of an orchestration, by name; None for the default backend of the runner."""

    planner: str | None = PLANNER
    """Plans the tasks and writes the answer."""
    executor: str | None = EXECUTOR
    """Runs the tasks that name no worker."""
    reflector: str | None = REFLECTOR
    """Judges the results."""
    registry: Mapping[str, str] = field(default_factory=dict[str, str])
    """The workers that a planned task may name as its backend: name and description, both presented to the planner and
    to the reflector. No other backend can be named.
    """

    def backends(self) -> frozenset[str | None]:
        """Return the names of all backends."""
        return frozenset({self.planner, self.executor, self.reflector, *self.registry})

    def inputs(self) -> dict[str, str]:
        """Return the inputs of a run for the prompts about workers; none without a registry."""
        workers = (f"- {name}: {' '.join(about.split())}" for name, about in self.registry.items())
        return {"registry": "\n".join(workers)} if self.registry else {}


PREFIX = "do."
_LONGEST_SLUG = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@value
class ParsedReply:
    """A parsed answer. With `problems`, there are no tasks."""

    tasks: tuple[Task, ...] = ()
    """The tasks to be added, each after its dependencies."""
    problems: tuple[str, ...] = ()
    done: bool = False
    drop: tuple[str, ...] = ()


@value
class PlannedTask:
    """A task as an answer gives it."""

    id: str
    """The name of the task, with or without the prefix `do.`; its number in a list of plain sentences."""
    prompt: str
    depends_on: tuple[str, ...] = ()
    """The names of tasks of the same answer, or of the run."""
    backend: str | None = None
    """The name of the worker that does it; None for the executor."""

    @property
    def name(self) -> str:
        """The id without the prefix."""
        return self.id.removeprefix(PREFIX)


def _entries(answer: JsonValue) -> list[PlannedTask] | None:
    """Return the tasks of an answer; None if the answer has another form. Backends may return unvalidated answers."""
    if not isinstance(answer, list):
        return None
    entries = (entry if isinstance(entry, dict) else {"prompt": entry} for entry in answer)
    try:
        return [from_json(PlannedTask, {"id": str(number), **entry}) for number, entry in enumerate(entries, 1)]
    except ValueError:
        return None


def _texts(value: JsonValue) -> list[str] | None:
    fits = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return [*dict.fromkeys(cast("list[str]", value))] if fits else None


def _named(name: str, ids: Collection[str]) -> str | None:
    """Return which of `ids` is named `name`, with or without the prefix `do.`; None if there is none."""
    return next((one for one in (name, PREFIX + name) if one in ids), None)


def _safe_id(name: str, ids: Collection[str]) -> str:
    """Return an id not used by any other task or by the loop itself."""
    slug = _UNSAFE.sub("-", name).strip("-")[:_LONGEST_SLUG] or "task"
    number = 1
    while (safe := PREFIX + slug + (f"-{number}" if number > 1 else "")) in ids:
        number += 1
    return safe


_MOST_REASONS = 10
_LONGEST_NAME = 40


class Phase(StrEnum):
    """The phase of the loop. EXECUTING includes writing the answer; DONE begins once the answer is stored."""

    PLANNING = "planning"
    EXECUTING = "executing"
    REFLECTING = "reflecting"
    DONE = "done"


class Stop(StrEnum):
    """The reason for ending the loop before the reflector declared the goal reached."""

    MAX_ITERATIONS = "max_iterations"
    MAX_TASKS = "max_tasks"
    NO_PROGRESS = "no_progress"


GOAL_REACHED = "goal_reached"
"""`Loop.ended_by` if the reflector declared the goal reached."""


@value
class LoopLimits:
    """Limits of the orchestrator. Raises ValueError for a number below 1."""

    max_iterations: int = 10
    """The number of tasks begun at most; the last ones beyond it are cancelled at once. Parts of a `for_each` task
    added by an executor's reply are unknown beforehand and may exceed the limit.
    """
    reflect_every: int = 3
    """The number of executed tasks between reflections. A reflection also takes place when no task is left."""
    max_tasks: int = 100
    """The number of planned tasks at most."""
    shown: int = 40_000
    """The approximate number of result characters presented to the reflector and for the answer."""
    plain: bool = False
    """True to request plain sentences and short answers in place of tasks with ids and dependencies, for small
    models.
    """

    def __post_init__(self) -> None:
        for name in ("max_iterations", "reflect_every", "max_tasks", "shown"):
            number = getattr(self, name)
            if number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")


DEFAULT_LIMITS = LoopLimits()


@value
class Loop:
    """The state of the loop, stored with each decision."""

    phase: Phase = Phase.PLANNING
    iteration: int = 0
    """The number of executed tasks."""
    reflected_at: int = 0
    """The value of `iteration` at the last reflection."""
    asked: str | None = "plan.1"
    """The id of the outstanding task of the loop itself."""
    refused: bool = False
    """True if the last plan or reflection was unusable and was requested again."""
    stopped: Stop | None = None
    evidence: str = ""
    """The digest of the results at the last reflection that added tasks."""
    plans: tuple[str, ...] = ()
    """The digests of the tasks added on the basis of `evidence`."""
    cut: bool = False
    """True if tasks were cancelled because of `max_iterations`."""

    @property
    def ended_by(self) -> str | None:
        """Why no further task is planned: GOAL_REACHED or the value of `stopped`; None while the loop goes on."""
        if self.stopped is not None:
            return self.stopped.value
        return GOAL_REACHED if self.phase is Phase.DONE or self.asked == ANSWER_ID else None

    @classmethod
    def of(cls, state: JsonInput) -> Loop:
        """Return the loop stored as `state`; a new loop without a state. Raises ValueError for any other state."""
        return cls() if state is None else from_json(cls, state)

    @classmethod
    def found_in(cls, state: JsonInput) -> Loop | None:
        """Return the loop if `state` is that of an OrchestratorPolicy; None for the state of any other policy."""
        try:
            return cls.of(state) if state else None
        except ValueError:
            return None


_OWN = re.compile(r"(plan|reflect)\.[0-9]+")
_LEAST_SHOWN = 200
_LONGEST_PROMPT = 300
_MOST_LISTED = 100
EXECUTED = frozenset({TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.SKIPPED})
_WORDS = {TaskStatus.FAILED: "failed", TaskStatus.SKIPPED: "skipped", TaskStatus.CANCELLED: "dropped"}


def is_work(task_id: str) -> bool:
    """Return whether the task leads to the goal, in contrast to the loop's own tasks."""
    return task_id.startswith(PREFIX) or (task_id != ANSWER_ID and not _OWN.fullmatch(task_id))


class WorkState:
    """The state of the work of a run. `registry` holds the workers that a task may name as its backend."""

    def __init__(self, run: RecordedRun, registry: Mapping[str, str]) -> None:
        self._run = run
        self._registry = registry

    @cached_property
    def work(self) -> list[Task]:
        """The tasks that lead to the goal, including tasks added by an executor's reply."""
        return [task for task in self._run.tasks if is_work(task.id)]

    @cached_property
    def _own(self) -> list[Task]:
        """The loop's own tasks."""
        return [task for task in self._run.tasks if not is_work(task.id)]

    @property
    def reflections(self) -> int:
        """The number of reflections up to now."""
        return sum(task.id.startswith("reflect.") for task in self._own)

    def is_open(self, leaving_out: Collection[str] = ()) -> bool:
        """Return whether any task outside `leaving_out` has not ended."""
        # Newest first: most likely open, and a single open task decides.
        return any(
            self._run.result(task.id).status not in TASK_DONE
            for task in reversed(self._run.tasks)
            if is_work(task.id) and task.id not in leaving_out
        )

    def not_begun(self) -> tuple[str, ...]:
        """Return the ids of the tasks that can still be cancelled: never started, or waiting for a person."""
        results = [self._run.result(task.id) for task in self.work]
        return tuple(one.id for one in results if _is_unbegun(one) or one.status is TaskStatus.WAITING_INPUT)

    def under_way(self) -> int:
        """Return the number of tasks begun and not ended."""
        return sum(
            result.status not in TASK_DONE and not _is_unbegun(result)
            for result in (self._run.result(task.id) for task in self.work)
        )

    def waiting(self, added: Sequence[Task], dropped: Collection[str]) -> list[str]:
        """Return the ids of the tasks that may still begin, in order, after adding `added` and cancelling `dropped`."""
        dead = self.dead(dropped)
        unbegun = (task for task in self.work if _is_unbegun(self._run.result(task.id)))
        return [task.id for task in (*unbegun, *added) if is_work(task.id) and task.id not in dead]

    def can_go_on(self, dropped: Collection[str] = ()) -> bool:
        """Return whether any task is running or may start, apart from `dropped` and its dependents."""
        dead = self.dead(dropped)
        return any(task.id not in dead and self._run.result(task.id).status not in TASK_DONE for task in self.work)

    def ids(self) -> list[str]:
        """Return the ids of all tasks of the run."""
        return [task.id for task in self._run.tasks]

    def dead(self, dropped: Collection[str] = ()) -> dict[str, str]:
        """Return the tasks that can no longer be waited for, with the reason, if `dropped` are cancelled now."""
        dead = dict.fromkeys(dropped, "dropped by the same answer")
        for task in self.work:
            result = self._run.result(task.id)
            if _blocks(task, result):
                dead[task.id] = _WORDS[result.status]
            elif task.id not in dead and any(name in dead for name in task.upstream):
                dead[task.id] = "waiting for one that failed or was dropped"
        return dead

    def unseen(self) -> list[str]:
        """Return the last completed reflection, followed by the completed tasks not yet covered by a reflection."""
        own = [task for task in self._own if self._completed(task)]
        reflections = [task for task in own if task.id.startswith("reflect.")]
        seen = {name for task in reflections for name in task.depends_on}
        last = [task.id for task in reflections[-1:] or own[-1:]]
        return [*last, *(task.id for task in self.work if task.id not in seen and self._completed(task))]

    def as_text(self, limit: int) -> str:
        """Return the state as text. Results are shortened to about `limit` characters in all; if there are too many,
        the oldest are only counted.
        """
        of: dict[TaskStatus, list[tuple[Task, TaskResult]]] = {status: [] for status in TaskStatus}
        for task in self.work:
            result = self._run.result(task.id)
            of[result.status].append((task, result))
        done, failed = of[TaskStatus.COMPLETED], [*of[TaskStatus.FAILED], *of[TaskStatus.SKIPPED]]
        share = max(limit // max(len(done), 1), _LEAST_SHOWN)
        sections = (
            _section("Done, with results:", done, limit // _LEAST_SHOWN, lambda t, r: self._done(t, r, share)),
            _section("Failed:", failed, _MOST_LISTED, self._failed),
            _section("Under way:", [*of[TaskStatus.RUNNING], *of[TaskStatus.WAITING_INPUT]], _MOST_LISTED, self._line),
            _section("Not begun:", of[TaskStatus.PENDING], _MOST_LISTED, self._pending),
            _section("Dropped:", of[TaskStatus.CANCELLED], _MOST_LISTED, self._line),
        )
        return "\n\n".join(filter(None, sections)) or "Nothing has been done yet."

    def digest(self) -> str:
        """Return a digest of the findings. Repeated work without new findings leaves the digest unchanged."""
        results = ((task, self._run.result(task.id)) for task in self.work)
        return digest(
            f"{identity(task)}\0{result.status.value}\0{text_of(result.value)}\0{result.error or ''}"
            for task, result in results
            if result.status in EXECUTED
        )

    def _completed(self, task: Task) -> bool:
        return self._run.result(task.id).status is TaskStatus.COMPLETED

    def _line(self, task: Task, _result: TaskResult) -> str:
        worker = f" ({task.backend})" if task.backend in self._registry else ""
        return f"- {task.id}{worker}: {cut(assignment(task), _LONGEST_PROMPT)}"

    def _done(self, task: Task, result: TaskResult, limit: int) -> str:
        # Indented, to keep the lines of a result apart from lines of the report.
        text = cut(text_of(result.value).strip(), limit).replace("\n", "\n  ")
        return f"{self._line(task, result)}\n  {text}"

    def _failed(self, task: Task, result: TaskResult) -> str:
        return f"{self._line(task, result)}\n  {cut(result.error or 'no reason given', _LONGEST_PROMPT)}"

    def _pending(self, task: Task, result: TaskResult) -> str:
        needs = [name for name in task.upstream if name.startswith(PREFIX)]
        return self._line(task, result) + (f" (waits for {', '.join(needs)})" if needs else "")


def digest(texts: Iterable[str]) -> str:
    """Return a short digest of a set of texts, independent of order and repetition."""
    both = json.dumps(sorted(set(texts)))
    return hashlib.sha256(both.encode()).hexdigest()[:16]


def assignment(task: Task) -> str:
    """Return the assignment of the task, in the planner's words."""
    return " ".join((task.item if isinstance(task.item, str) else task.prompt).split())


def identity(task: Task) -> str:
    """Return the assignment of the task with its worker: the same assignment for another worker is another task."""
    return f"{task.backend}\0{assignment(task)}"


def cut(text: str, limit: int) -> str:
    """Return `text`, shortened to `limit` characters with a note on the omitted length."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def _is_unbegun(result: TaskResult) -> bool:
    return result.status is TaskStatus.PENDING and result.attempts == 0


def _blocks(task: Task, result: TaskResult) -> bool:
    """Return whether dependents of `task` can never start."""
    if result.status is TaskStatus.FAILED:
        return task.failure_mode is FailureMode.HARD
    return result.status is TaskStatus.CANCELLED


def _section(
    head: str,
    entries: Sequence[tuple[Task, TaskResult]],
    limit: int,
    line: Callable[[Task, TaskResult], str],
) -> str:
    """Return the section for the newest `limit` tasks; empty if nothing was found."""
    limit = max(limit, 1)
    earlier = [f"- {len(entries) - limit:,} earlier ones"] if len(entries) > limit else []
    lines = [line(task, result) for task, result in entries[-limit:]]
    return "\n".join([head, *earlier, *lines]) if lines else ""


class OrchestratorPolicy:
    """Policy that plans tasks for `goal`, reflects on the results, and ends with the task `answer`.

    The tasks run on the backends of `team`: `planner`, `executor` and `reflector`, unless the team has other names, and
    the workers of its registry. The run must begin with `dag()`. Raises ValueError for an empty goal.
    """

    kind = "orchestrator"

    def __init__(self, goal: str, limits: LoopLimits | None = None, team: Team | None = None) -> None:
        if not goal.strip():
            raise ValueError("the goal is empty; state the goal in a sentence")
        self.goal = goal
        self.limits = limits or DEFAULT_LIMITS
        self.team = team or Team()

    def settings(self) -> dict[str, JsonValue]:
        """Return the settings for `from_settings`."""
        return {"goal": self.goal, "team": asdict(self.team), **asdict(self.limits)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, JsonValue]) -> OrchestratorPolicy:
        """Return the policy with the given stored `settings`."""
        limits = dict(cast("Mapping[str, Any]", settings))
        goal, team = limits.pop("goal"), Team(**limits.pop("team"))
        return cls(goal, LoopLimits(**limits), team)

    def dag(self) -> DAG:
        """Return the initial DAG of a run: the task `plan.1`, with the goal as an input, and the registry if any."""
        first = self._plan_task()
        name = shorten(" ".join(self.goal.split()), _LONGEST_NAME)
        return DAG([first], name=name, inputs={"goal": self.goal, **self.team.inputs()})

    def backends(self) -> frozenset[str | None]:
        """Return the names of the tasks' backends."""
        return self.team.backends()

    def decide(self, run: RecordedRun) -> Decision:
        """Return the decision that follows the end of the task `run.ended`."""
        evidence = WorkState(run, self.team.registry)
        decision = self._following(run, Loop.of(run.state), evidence)
        # Each task begins at most once: fewer tasks than the limit cannot exceed the limit.
        few = len(run.tasks) + len(decision.add) <= self.limits.max_iterations
        return decision if few or decision.end is not None else self._cut(evidence, decision)

    def _cut(self, evidence: WorkState, decision: Decision) -> Decision:
        """Cancel the tasks beyond `max_iterations`. The policy is called at each end, so none of them has begun yet."""
        loop = Loop.of(decision.state)
        remaining = max(0, self.limits.max_iterations - loop.iteration - evidence.under_way())
        excess = evidence.waiting(decision.add, decision.cancel)[remaining:]
        if not excess:
            return decision
        return replace(decision, cancel=(*decision.cancel, *excess), state=as_json(replace(loop, cut=True)))

    def _following(self, run: RecordedRun, loop: Loop, evidence: WorkState) -> Decision:
        if run.ended is not None and is_work(run.ended):
            return self._executed(loop, evidence, run.result(run.ended).status)
        if run.ended is None and loop.asked is None and loop.phase is not Phase.DONE:
            # Tasks waiting for a person keep the run waiting.
            waits = any(run.result(task.id).status is TaskStatus.WAITING_INPUT for task in evidence.work)
            return _only(loop) if waits else self._with_nothing_left(loop, evidence)
        # Without an ended task, the run failed on this unusable answer and was resumed.
        if loop.asked is not None and run.ended in {loop.asked, None}:
            result = run.result(loop.asked)
            if result.status is TaskStatus.COMPLETED:
                return self._answered(loop, evidence, loop.asked, result.value)
        return _only(loop)  # a failed task of the loop fails the run once all running tasks have ended

    def _answered(self, loop: Loop, evidence: WorkState, task_id: str, answer: JsonValue) -> Decision:
        """Return the decision after the completion of the loop's own task `task_id`."""
        if task_id == ANSWER_ID:
            return Decision(state=as_json(replace(loop, phase=Phase.DONE, asked=None)), end=RunStatus.COMPLETED)
        if loop.phase is Phase.PLANNING:
            return self._planned(loop, evidence, task_id, answer)
        if loop.stopped is not None:  # stopped meanwhile: the reflector's wishes no longer matter
            return self._unless_open(replace(loop, phase=Phase.EXECUTING, asked=None), evidence)
        read = self._read_reflection(answer, task_id, evidence)
        if not read.problems:
            return self._reflected(replace(loop, phase=Phase.EXECUTING, asked=None, refused=False), evidence, read)
        if loop.refused:
            return _failed(loop, "the reflector's second answer cannot be used either", read)
        return self._reflect(replace(loop, refused=True), evidence, _reasons(read))

    def _planned(self, loop: Loop, evidence: WorkState, task_id: str, answer: JsonValue) -> Decision:
        read = self._read_plan(answer, task_id, evidence)
        if not read.problems:
            return _only(replace(loop, phase=Phase.EXECUTING, asked=None, refused=False), add=read.tasks)
        if loop.refused:
            return _failed(loop, "the planner's second plan cannot be used either", read)
        again = self._plan_task(task_id, _reasons(read))
        return _only(replace(loop, asked=again.id, refused=True), add=(again,))

    def _executed(self, loop: Loop, evidence: WorkState, status: TaskStatus) -> Decision:
        loop = replace(loop, iteration=loop.iteration + (status in EXECUTED))
        cancel: tuple[str, ...] = ()
        is_last = loop.iteration >= self.limits.max_iterations
        if is_last and ((cancel := evidence.not_begun()) or loop.cut) and loop.ended_by is None:
            loop = replace(loop, stopped=Stop.MAX_ITERATIONS)
        if loop.asked is not None:
            return _only(loop, cancel=cancel)
        if not evidence.is_open(cancel):
            return self._with_nothing_left(loop, evidence, cancel)
        if loop.stopped is None and loop.iteration - loop.reflected_at >= self.limits.reflect_every:
            return self._reflect(loop, evidence)
        return _only(loop, cancel=cancel)

    def _reflected(self, loop: Loop, evidence: WorkState, read: ParsedReply) -> Decision:
        if read.done:
            return self._answer(loop, evidence)
        if read.tasks:
            return self._add(loop, evidence, read.tasks, read.drop)
        if evidence.can_go_on(read.drop):
            return _only(loop, cancel=read.drop)
        return self._with_nothing_left(loop, evidence, read.drop)

    def _add(self, loop: Loop, evidence: WorkState, tasks: tuple[Task, ...], drop: tuple[str, ...]) -> Decision:
        """Add the reflector's tasks, unless the limits are exceeded or the same tasks were added before without new
        results.
        """
        if loop.iteration >= self.limits.max_iterations:
            return self._unless_open(replace(loop, stopped=Stop.MAX_ITERATIONS), evidence, evidence.not_begun())
        if len(evidence.work) + len(tasks) > self.limits.max_tasks:
            return self._unless_open(replace(loop, stopped=Stop.MAX_TASKS), evidence, drop)
        evidence_digest, plan = evidence.digest(), digest(map(identity, tasks))
        tried = loop.plans if evidence_digest == loop.evidence else ()
        if plan in tried and not evidence.can_go_on(drop):
            return self._answer(replace(loop, stopped=Stop.NO_PROGRESS), evidence)
        return _only(replace(loop, evidence=evidence_digest, plans=(*tried, plan)), add=tasks, cancel=drop)

    def _unless_open(self, loop: Loop, evidence: WorkState, drop: tuple[str, ...] = ()) -> Decision:
        """Return the decision of a stopped loop: write the answer, unless tasks are still to end."""
        return _only(loop, cancel=drop) if evidence.can_go_on(drop) else self._answer(loop, evidence)

    def _with_nothing_left(self, loop: Loop, evidence: WorkState, drop: tuple[str, ...] = ()) -> Decision:
        """Return the decision when no task is running or ready: reflect on new results, or end the loop."""
        if loop.stopped is None and loop.iteration > loop.reflected_at:
            decision = self._reflect(loop, evidence)
            return replace(decision, cancel=drop)
        return self._answer(replace(loop, stopped=loop.stopped or Stop.NO_PROGRESS), evidence)

    def _reflect(self, loop: Loop, evidence: WorkState, reasons: str = "") -> Decision:
        number = evidence.reflections + 1
        text = evidence.as_text(self.limits.shown)
        if reasons:
            text += f"\n\nYour last answer could not be used:\n{reasons}"
        task = self._reflect_task(f"reflect.{number}", text, evidence.unseen())
        loop = replace(loop, phase=Phase.REFLECTING, asked=task.id, reflected_at=loop.iteration)
        return _only(loop, add=(task,))

    def _answer(self, loop: Loop, evidence: WorkState) -> Decision:
        """Request the answer from the results at hand: cancel all tasks not begun, and wait for none. The planner
        writes it, the role that works with the whole goal elsewhere too.
        """
        prompt = _PLAIN_ANSWER if self.limits.plain else _ANSWER
        text, after = evidence.as_text(self.limits.shown), tuple(evidence.unseen())
        task = Task(ANSWER_ID, prompt, depends_on=after, backend=self.team.planner, item=text, weight=_FIRST)
        loop = replace(loop, phase=Phase.EXECUTING, asked=task.id)
        return _only(loop, add=(task,), cancel=evidence.not_begun())

    # The tasks of the loop, with their prompts.

    def _plan_task(self, earlier: str | None = None, reasons: str = "") -> Task:
        """Return the first task of the run; with `earlier`, the task of an unusable plan, the second request."""
        plain, limit = self.limits.plain, self.limits.max_tasks
        prompt = _PLAIN_PLAN if plain else _PLAN + self._workers
        prompt = prompt.replace("{most}", str(min(limit, _MOST_PLAIN) if plain else limit))
        schema: dict[str, JsonValue] = {
            "type": "object",
            "properties": {"tasks": self._tasks_schema()},
            "required": ["tasks"],
            "additionalProperties": False,
        }
        first = Task("plan.1", prompt, backend=self.team.planner, output_schema=schema)
        if earlier is None:
            return first
        prompt += _PLAN_AGAIN
        return replace(
            first, id="plan.2", prompt=prompt, depends_on=(earlier,), item=reasons, aliases={"earlier": earlier}
        )

    def _work_task(self, task_id: str, entry: PlannedTask, needs: Sequence[str], after: str) -> Task:
        """Return the task for its worker, or for the executor, with the results of `needs`. `after` is the task that
        added it.
        """
        names = {f"r{number}": name for number, name in enumerate(needs, 1)}
        results = "".join(f"\nResult of {name}:\n{{{{ {alias} }}}}\n" for alias, name in names.items())
        return Task(
            task_id,
            (_PLAIN_WORK if self.limits.plain else _WORK) + results,
            depends_on=tuple(needs) or (after,),
            backend=self.team.executor if entry.backend is None else entry.backend,
            item=entry.prompt,
            aliases=names,
        )

    def _reflect_task(self, task_id: str, evidence: str, after: Sequence[str]) -> Task:
        """Return a reflection on `evidence`. `after` are the tasks under review."""
        properties: dict[str, JsonValue] = {"done": {"type": "boolean"}, "add": self._tasks_schema()}
        if not self.limits.plain:
            properties["drop"] = {"type": "array", "items": {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": ["done"], "additionalProperties": False}
        return Task(
            task_id,
            _PLAIN_REFLECT if self.limits.plain else _REFLECT + self._workers,
            depends_on=tuple(after),
            backend=self.team.reflector,
            output_schema=schema,
            weight=_FIRST,
            item=evidence,
        )

    @property
    def _workers(self) -> str:
        return _WORKERS if self.team.registry else ""

    def _tasks_schema(self) -> JsonValue:
        """Return the schema of the tasks in an answer. A name outside the registry is reported with the other mistakes
        of the answer, so the schema accepts any name.
        """
        if self.limits.plain:
            return dict(_PLAIN_TASKS)
        fields = {**_TASK, "backend": {"type": "string"}} if self.team.registry else dict(_TASK)
        shape = {"type": "object", "properties": fields, "required": ["id", "prompt"], "additionalProperties": False}
        return {"type": "array", "items": cast("JsonValue", shape)}

    # The answers of planner and reflector, with all problems.

    def _read_plan(self, answer: JsonValue, task_id: str, evidence: WorkState) -> ParsedReply:
        """Return the planner's answer, the result of the task `task_id`."""
        entries = _entries(answer.get("tasks")) if isinstance(answer, dict) else None
        if entries is None:
            return ParsedReply(problems=('it is not of the form {"tasks": [{"id": ..., "prompt": ...}]}',))
        if not entries:
            return ParsedReply(problems=("it has no tasks",))
        if len(entries) > (limit := self.limits.max_tasks):
            return ParsedReply(problems=(f"it has {len(entries)} tasks, and at most {limit} are allowed",))
        return self._read_tasks(entries, task_id, evidence.ids(), {})

    def _read_reflection(self, answer: JsonValue, task_id: str, evidence: WorkState) -> ParsedReply:
        """Return the reflector's answer, the result of the task `task_id`. Requests to drop tasks that have begun are
        ignored.
        """
        entries = _entries(answer.get("add", [])) if isinstance(answer, dict) else None
        drop = _texts(answer.get("drop", [])) if isinstance(answer, dict) else None
        if entries is None or drop is None or not isinstance(answer, dict) or not isinstance(answer.get("done"), bool):
            return ParsedReply(problems=('it is not of the form {"done": ..., "add": [...], "drop": [...]}',))
        if answer["done"]:
            return ParsedReply(done=True)
        ids = evidence.ids()
        named = {_named(name, ids) for name in drop}
        dropped = tuple(name for name in evidence.not_begun() if name in named)
        return replace(self._read_tasks(entries, task_id, ids, evidence.dead(dropped)), drop=dropped)

    def _read_tasks(
        self, entries: Sequence[PlannedTask], task_id: str, run_ids: Sequence[str], dead: Mapping[str, str]
    ) -> ParsedReply:
        """Return the tasks of an answer. `dead` are the tasks of the run that none may wait for, with the reason."""
        names, registry = Counter(entry.name for entry in entries), self.team.registry
        problems = [f"{count} tasks have the id {name!r}" for name, count in names.items() if count > 1]
        problems += [f"task {entry.name!r} has no prompt" for entry in entries if not entry.prompt.strip()]
        allowed = f"the registry has {', '.join(registry)}" if registry else "no task may name one; leave it out"
        problems += [
            f"task {entry.name!r} names backend {entry.backend!r}, and {allowed}{nearest(entry.backend, registry)}"
            for entry in entries
            if entry.backend is not None and entry.backend not in registry
        ]
        ids: dict[str, str] = {}
        for name in names:
            ids[name] = _safe_id(name, {*run_ids, *ids.values()})
        needs: dict[str, list[str]] = {name: [] for name in names}
        after: dict[str, list[str]] = {name: [] for name in names}
        for entry in entries:
            for other in dict.fromkeys(entry.depends_on):
                own = next((one for one in (other, other.removeprefix(PREFIX)) if one in ids), None)
                earlier = _named(other, run_ids)
                if own is not None:
                    needs[entry.name].append(ids[own])
                    after[own].append(entry.name)
                elif earlier is None:
                    problems.append(f"task {entry.name!r} depends on {other!r}, and there is no such task")
                elif earlier in dead:
                    problems.append(f"task {entry.name!r} depends on {earlier!r}, which is {dead[earlier]}")
                else:
                    needs[entry.name].append(earlier)
        order, cycles = sort_names(after)
        problems += (f"these tasks wait for each other: {' -> '.join(cycle)}" for cycle in cycles)
        if problems:
            return ParsedReply(problems=tuple(problems))
        by_name = {entry.name: entry for entry in entries}
        return ParsedReply(tuple(self._work_task(ids[name], by_name[name], needs[name], task_id) for name in order))


def _only(loop: Loop, *, add: tuple[Task, ...] = (), cancel: tuple[str, ...] = ()) -> Decision:
    return Decision(add, cancel, as_json(loop))


def _failed(loop: Loop, what: str, read: ParsedReply) -> Decision:
    return Decision(state=as_json(loop), end=RunStatus.FAILED, error=f"{what}: {'; '.join(read.problems[:3])}")


def _reasons(read: ParsedReply) -> str:
    more = len(read.problems) - _MOST_REASONS
    return "\n".join(
        [*(f"- {problem}" for problem in read.problems[:_MOST_REASONS]), *([f"- and {more} more"] if more > 0 else [])]
    )
