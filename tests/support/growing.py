"""A policy's run without an engine: made-up outcomes, and what the policy decides about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from plait import DAG, FailureMode, RunStatus, Task, TaskResult, TaskStatus
from plait.runner.domain.policy import Decision, Policy, RecordedRun
from plait.runner.domain.prompt_values import TaskTexts
from plait.runner.policies import policy_of

Outcome = Callable[[Task, str], "str | Exception"]
"""What a task comes to, given its rendered prompt."""

PASSED = {TaskStatus.COMPLETED, TaskStatus.SKIPPED}


@dataclass
class Grown:
    """What a run came to: its tasks in the order in which they came in, and what was asked, in order."""

    dag: DAG
    results: dict[str, TaskResult] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    status: RunStatus = RunStatus.RUNNING
    error: str | None = None

    def result(self, task_id: str) -> TaskResult:
        return self.results.get(task_id) or TaskResult(task_id)

    def view(self, ended: str | None = None) -> RecordedRun:
        return RecordedRun(self.dag.tasks, self.result, None, ended)

    def passes(self, task_id: str) -> bool:
        status = self.result(task_id).status
        soft = self.dag[task_id].failure_mode is not FailureMode.HARD
        return status in PASSED or (status is TaskStatus.FAILED and soft)

    def eligible(self) -> Task | None:
        free = (task for task in self.dag if self.result(task.id).status is TaskStatus.PENDING)
        return next((task for task in free if all(map(self.passes, task.upstream))), None)

    def run_one(self, task: Task, outcome: Outcome) -> None:
        results = {self.dag.position(name): one for name, one in self.results.items()}
        prompt = TaskTexts(task, self.dag, results).prompt()
        self.ran.append(task.id)
        self.prompts.append(prompt)
        came = outcome(task, prompt)
        if isinstance(came, str):
            result = TaskResult(task.id, TaskStatus.COMPLETED, came)
        else:
            status = TaskStatus.SKIPPED if task.failure_mode is FailureMode.SKIP else TaskStatus.FAILED
            result = TaskResult(task.id, status, error_kind="crashed", error=str(came))
        self.results[task.id] = result

    def apply(self, decision: Decision) -> None:
        # A graph with a mistake in it is refused here as the engine would refuse it.
        self.dag = DAG([*self.dag, *decision.add], inputs=self.dag.inputs)
        if decision.end is not None:
            self.status, self.error = decision.end, decision.error

    def come_to_rest(self) -> None:
        statuses = {self.result(task.id).status for task in self.dag}
        self.status = RunStatus.COMPLETED if statuses <= PASSED else RunStatus.FAILED


def grow(policy: Policy, dag: DAG, outcome: Outcome) -> Grown:
    """Run `dag` with `policy` to its end. For each question the policy is made again from what a store would hold."""
    run = Grown(dag)
    stored = json.dumps(policy.settings())
    while run.status is RunStatus.RUNNING:
        task = run.eligible()
        if task is not None:
            run.run_one(task, outcome)
        decision = policy_of(policy.kind, json.loads(stored)).decide(run.view(task and task.id))
        run.apply(decision)
        if task is None and not decision.add and run.status is RunStatus.RUNNING:
            run.come_to_rest()
    return run
