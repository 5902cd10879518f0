"""A run without an engine: a policy's decisions applied to tasks whose outcomes are scripted, one step at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from plait.json_form import JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Decision, Policy, RecordedRun
from plait.runner.domain.run_result import TaskResult
from plait.statuses import TASK_DONE, RunStatus, TaskStatus
from plait.task import Task

Script = Callable[[Task], "JsonValue | Exception"]
"""What a task comes to: a value, or an error that fails it."""


class Simulation:
    """`concurrency` tasks are under way at a time; `end` ends one, `run` all there are, the oldest first."""

    def __init__(self, policy: Policy, dag: DAG, script: Script, concurrency: int = 1) -> None:
        self.policy, self.script, self.concurrency = policy, script, concurrency
        self.inputs = dag.inputs
        self.tasks = list(dag.tasks)
        self.results = {task.id: TaskResult(task.id) for task in dag.tasks}
        self.state: JsonValue = None
        self.decisions: list[Decision] = []
        self.status = RunStatus.RUNNING
        self.error: str | None = None
        self.begun: list[str] = []
        self._start()

    def run(self) -> Simulation:
        while self.status is RunStatus.RUNNING:
            self.end(self.running[0]) if self.running else self.rest()
        return self

    @property
    def running(self) -> list[str]:
        return [task_id for task_id, result in self.results.items() if result.status is TaskStatus.RUNNING]

    def status_of(self, task_id: str) -> TaskStatus:
        return self.results[task_id].status

    def task(self, task_id: str) -> Task:
        return next(task for task in self.tasks if task.id == task_id)

    def end(self, task_id: str, how: TaskStatus | None = None) -> Decision:
        """The task under way comes to its scripted outcome, or to `how`; what the policy decides on it."""
        assert self.status_of(task_id) is TaskStatus.RUNNING
        outcome = self.script(self.task(task_id))
        if how is not None:
            result = TaskResult(task_id, how, attempts=1)
        elif isinstance(outcome, Exception):
            result = TaskResult(task_id, TaskStatus.FAILED, error=str(outcome), attempts=1)
        elif isinstance(outcome, str):
            result = TaskResult(task_id, TaskStatus.COMPLETED, outcome, attempts=1)
        else:
            result = TaskResult(task_id, TaskStatus.COMPLETED, json.dumps(outcome), outcome, attempts=1)
        self.results[task_id] = result
        return self._ask(task_id)

    def rest(self) -> None:
        """Nothing is under way: ask once more, and end the run if nothing follows."""
        self._ask(None)
        if self.status is RunStatus.RUNNING and not self.running:
            statuses = {result.status for result in self.results.values()}
            if TaskStatus.WAITING_INPUT in statuses:
                self.status = RunStatus.WAITING_INPUT
            else:
                self.status = RunStatus.FAILED if TaskStatus.FAILED in statuses else RunStatus.COMPLETED

    def _ask(self, ended: str | None) -> Decision:
        # Through JSON, as it comes back from a store.
        state = json.loads(json.dumps(self.state))
        view = RecordedRun(tuple(self.tasks), self.results.__getitem__, state, ended)
        decision = self.policy.decide(view)
        assert decision == self.policy.decide(view), "the same view gives the same decision"
        self.decisions.append(decision)
        self.state = decision.state
        self._add(decision.add)
        self._cancel(decision.cancel)
        if decision.end is not None:
            self.status, self.error = decision.end, decision.error
            self._cancel(task_id for task_id, one in self.results.items() if one.status not in TASK_DONE)
        self._start()
        return decision

    def _add(self, tasks: Iterable[Task]) -> None:
        self.tasks += tasks
        DAG(self.tasks, inputs=self.inputs)  # refuses what the engine would
        self.results.update({task.id: TaskResult(task.id) for task in tasks})

    def _cancel(self, named: Iterable[str]) -> None:
        gone = set(named)
        for task in self.tasks:
            status = self.status_of(task.id)
            if self.status is RunStatus.RUNNING and task.id in gone:
                assert status in {TaskStatus.PENDING, TaskStatus.WAITING_INPUT}, f"{task.id} has begun"
            if status not in TASK_DONE and (task.id in gone or gone.intersection(task.upstream)):
                gone.add(task.id)
                self.results[task.id] = TaskResult(task.id, TaskStatus.CANCELLED)

    def _start(self) -> None:
        for task in sorted(self.tasks, key=lambda task: -task.weight):
            free = len(self.running) < self.concurrency and self.status is RunStatus.RUNNING
            ready = all(self.status_of(name) in {TaskStatus.COMPLETED, TaskStatus.SKIPPED} for name in task.upstream)
            if free and ready and self.status_of(task.id) is TaskStatus.PENDING:
                self.results[task.id] = replace(self.results[task.id], status=TaskStatus.RUNNING, attempts=1)
                self.begun.append(task.id)
