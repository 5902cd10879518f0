"""The oracle: the expected outcome of a run, computed from the DAG without scheduler, store or state machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.errors import ErrorKind
from plait.json_form import JsonInput
from plait.runner.domain.dag import DAG
from plait.runner.plan.plan_tasks import AddedTasks
from plait.runner.recovery.resume_plan import MOST_DEATHS
from plait.statuses import TASK_DONE, RunStatus, TaskStatus
from plait.task import FailureMode, Task
from tests.faults.crashtest.cases import LAST, Case, answer, digest, follows, last_task, tries

_USE = re.compile(r'\{\{ (?:results\["([^"]+)"\](?:\.mark)?|item) \}\}')
"""A template expression made by `use_of`; without a matched group, the item of a `for_each` part."""

_CONDITION = re.compile(r"""'(.)' (in|not in) \{\{ results\["([^"]+)"\](?:\.mark)? \}\}""")
"""A condition of a random case."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected end of a task."""

    status: TaskStatus
    """The status."""
    executions: int
    """The number of executions without kills."""
    result: str = ""
    """The hash of the result (`digest`)."""
    value: str = ""
    """The text of the result in prompts of other tasks."""
    history: tuple[str, ...] = ()
    """The whole conversation: prompts and answers in turn, the last answer included."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected outcome of a run."""

    dag: DAG
    """The whole graph, including added tasks."""
    ends: Mapping[str, Expected]
    """The expected ends by task id."""
    adders: frozenset[str]
    """Tasks that add tasks."""


def expected(case: Case) -> dict[str, Expected]:
    """Return the expected ends by task id."""
    return dict(forecast(case).ends)


def forecast(case: Case) -> Forecast:
    """Return the expected outcome of a run of the case."""
    telling = _Prediction(case)
    while telling.step():
        pass
    names = telling.tasks
    dag = DAG(names.values(), name=case.dag.name, gathered=telling.parts)
    return Forecast(dag, {name: telling.ends[name] for name in names}, frozenset(telling.adders))


def run_status(ends: Mapping[str, Expected]) -> RunStatus:
    """Return the expected status of the run: failed if a task failed; skipped tasks do not count."""
    failed = any(end.status is TaskStatus.FAILED for end in ends.values())
    return RunStatus.FAILED if failed else RunStatus.COMPLETED


def passes(task: Task, status: TaskStatus) -> bool:
    """Return whether dependents of `task` may start after an end with `status`."""
    soft = status is TaskStatus.FAILED and task.failure_mode is FailureMode.SOFT
    return soft or status in {TaskStatus.COMPLETED, TaskStatus.SKIPPED}


def may_follow(task: Task, ends: Sequence[tuple[Task, TaskStatus]]) -> bool:
    """Return whether `task` may start after these ends of its dependencies; a pending one never starts."""
    if task.join == "done" or (task.join == "any" and any(status is TaskStatus.COMPLETED for _, status in ends)):
        return True
    return all(passes(one, status) for one, status in ends)


class _Prediction:
    """Computes the ends of the tasks one after the other, in any order allowed by the dependencies."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tasks = {task.id: task for task in case.dag}
        self.ends: dict[str, Expected] = {}
        self.parts: dict[str, Sequence[str]] = {}
        self.adders: set[str] = set()
        self._lists: dict[str, Sequence[JsonInput]] = {}

    def step(self) -> bool:
        """Compute the next end, or add the LAST task if all ends are computed. Return False if neither is left."""
        for task in self.tasks.values():
            needed = (*self._waits_for(task), *self.parts.get(task.id, ()))
            if task.id not in self.ends and all(name in self.ends for name in needed):
                self._predict(task, needed)
                return True
        if self.case.reviewed is None or LAST in self.tasks:
            return False
        self._add([last_task(name for name, end in self.ends.items() if end.status in TASK_DONE)])
        return True

    def _partners(self, task: Task) -> list[str]:
        """Return the expanded `for_each` tasks with parts paired with the parts of `task`."""
        over = task.for_each
        return [name for name in task.upstream if name in self.parts and over in {self.tasks[name].for_each, name}]

    def _waits_for(self, task: Task) -> list[str]:
        partners = self._partners(task)
        return [name for name in task.upstream if name not in partners]

    def _predict(self, task: Task, needed: Sequence[str]) -> None:
        if not may_follow(task, [(self.tasks[name], self.ends[name].status) for name in needed]):
            self.ends[task.id] = Expected(TaskStatus.PENDING, 0)
        elif task.for_each is None:
            self._ended(task, self._end(task) if self._is_wanted(task) else Expected(TaskStatus.SKIPPED, 0))
        elif task.id in self.parts:
            self._ended(task, self._gathered(task, task.for_each))
        else:
            outer = self.parts[task.for_each] if self.tasks[task.for_each].for_each is not None else None
            if outer is None:
                parts = [self._part(task, number, item) for number, item in enumerate(self._items(task.for_each), 1)]
            else:
                each = enumerate((self.tasks[name] for name in outer), 1)
                parts = [replace(self._part(task, number, one.item), for_each=one.id) for number, one in each]
            self.parts[task.id] = [part.id for part in parts]
            self._add(parts, task.id)

    def _items(self, over: str) -> Sequence[JsonInput]:
        """Return the list of a task, or its one result in place of a list, as of a part of a `for_each`."""
        if over in self._lists or self.ends[over].status is not TaskStatus.COMPLETED:
            return self._lists.get(over, [])
        return [self.ends[over].value]

    def _gathered(self, task: Task, over: str) -> Expected:
        """Return the end of a `for_each` task with the results of its parts: a list, or for a part over a result that
        is no list the one result.
        """
        values = [self._lists.get(name, self.ends[name].value) for name in self.parts[task.id]]
        if over not in self._lists and over not in self.parts and self.ends[over].status is TaskStatus.COMPLETED:
            return Expected(TaskStatus.COMPLETED, 0, digest(str(values[0]), None), str(values[0]))
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        self._lists[task.id] = values
        return Expected(TaskStatus.COMPLETED, 0, digest(text, values), json.dumps(values, ensure_ascii=False))

    def _part(self, task: Task, number: int, item: JsonInput) -> Task:
        own = {name: f"{name}.{number}" for name in self._partners(task)}
        depends_on = [own.get(name, name) for name in task.upstream if name != task.continues]
        continues = own.get(task.continues or "", task.continues)
        part = replace(task, id=f"{task.id}.{number}", item=item, for_each=None, aliases={**own, **task.aliases})
        return replace(part, depends_on=depends_on, continues=continues)

    def _ended(self, task: Task, end: Expected) -> None:
        self.ends[task.id] = end
        if end.status is TaskStatus.COMPLETED and task.for_each is None:
            self._add(AddedTasks(self.case.part(task.id).adds).tasks, task.id)
        if self.case.reviewed is not None:
            self._add(follows(self.case, task.id))

    def _add(self, tasks: Sequence[Task], added_by: str | None = None) -> None:
        self.tasks |= {task.id: task for task in tasks}
        if tasks and added_by is not None:
            self.adders.add(added_by)

    def _end(self, task: Task) -> Expected:
        part = self.case.part(task.id)
        most = tries(task, ErrorKind.REFUSED if part.refused else ErrorKind.TRANSIENT)
        if part.crashes:
            most = MOST_DEATHS
        if part.crashes or part.refused or part.failures >= most:
            skipped = task.failure_mode is FailureMode.SKIP
            return Expected(TaskStatus.SKIPPED if skipped else TaskStatus.FAILED, most)
        prompt = _USE.sub(lambda use: self._value(task, use[1]) if use[1] else str(task.item), task.prompt)
        past = self.ends[task.continues].history if task.continues is not None else ()
        text, data = answer(task.id, prompt, past, part)
        value = str(data["mark"]) if isinstance(data, dict) else text
        if isinstance(data, dict) and isinstance(data.get("items"), list):
            self._lists[task.id] = data["items"]
        return Expected(TaskStatus.COMPLETED, part.failures + 1, digest(text, data), value, (*past, prompt, text))

    def _is_wanted(self, task: Task) -> bool:
        """Return whether the condition of the task, if any, is true: a digit is, or is not, in a result."""
        found = None if task.when is None else _CONDITION.fullmatch(task.when)
        return found is None or (found[1] in self._value(task, found[3])) is (found[2] == "in")

    def _value(self, task: Task, name: str) -> str:
        return self.ends[str(task.aliases.get(name, name))].value
