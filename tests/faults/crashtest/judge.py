"""The judge: reads the ledger of a trial and lists broken invariants. Uses only the promises of the runner.

I1   Every reported result is in the store with the same bytes.
I2   No task with a reported or stored end is executed again.
I3   Each crash during an execution of a task costs at most one more execution.
I4   No task is executed before the ends of the dependencies and the start of the task are stored.
I5   The end of the run is the end implied by the DAG.
I6   Concurrency limits hold.
I8   A process that lost the run exits with an error; a living owner keeps the run.
I9   Every run ends.
I10  The run has grown by exactly the planned tasks, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.runner.domain.continuation import EVIDENCE
from plait.runner.engine.attempt import INTERRUPTED
from plait.statuses import TASK_DONE, TaskStatus
from tests.faults.crashtest import ledger as words
from tests.faults.crashtest.cases import Case
from tests.faults.crashtest.ledger import Line
from tests.faults.crashtest.oracle import Expected, forecast, may_follow, passes, run_status
from tests.faults.crashtest.snapshot import mark

Held = Mapping[str, Any]


@dataclass(slots=True)
class Verdict:
    """The result of one trial."""

    broken: list[str] = field(default_factory=list[str])
    """Broken invariants, each with an explanation."""
    acks: int = 0
    """The number of reported results."""
    lost: int = 0
    """Reported results missing in the store."""
    repeated: int = 0
    """Executions of tasks with a reported or stored end."""
    extra: int = 0
    """The maximum over all tasks of surplus executions per kill during an execution of the task, rounded up."""
    resumes_ms: list[float] = field(default_factory=list[float])
    """Milliseconds from the fork of each resuming process to the first execution; see `resume_times`."""


class Judge:
    """Reader of a ledger, line by line."""

    def __init__(self, case: Case, leaving: Mapping[str, int] | None = None) -> None:
        self._case = case
        self._leaving = Counter(leaving or {})
        """Expected errors at the end of processes, with the number of processes."""
        self._forecast = forecast(case)
        self._dag = self._forecast.dag
        self._ends = self._forecast.ends
        self._acked: dict[str, tuple[str, str]] = {}
        self._settled: set[str] = set()
        self._executed: Counter[str] = Counter()
        self._process: Counter[str] = Counter()
        """Executions by the current process, by task."""
        self._in_flight: Counter[str] = Counter()
        self._open: set[str] = set()
        self._pid = 0
        self._handed: set[str] = set()
        """Tasks with a stored start that the last owner had not executed when another process took over."""
        self._rerun: set[str] = set()
        """Tasks that run again because of a damaged stored result."""
        self._unanswered: set[str] = set()
        """Executed at-most-once tasks without an answer that allows another execution."""
        self._end: tuple[str, Held] | None = None
        self.verdict = Verdict()

    def judge(self, lines: Iterable[Line]) -> Verdict:
        """Read all lines of the ledger, and return the verdict."""
        steps: dict[str, Callable[..., None]] = {
            words.BEGIN: self._begin,
            words.FOUND: self._found,
            words.EXEC: self._exec,
            words.DONE: self._left,
            words.FAIL: self._left,
            words.ACK: self._ack,
            words.ANSWER: self._unanswered.discard,
            words.END: self._ends_as,
            words.DIED: self._death,
            words.RAISED: self._raised,
            words.NOTE: self._note,
        }
        for word, *rest in lines:
            step = steps.get(word)
            if step is not None:
                step(*rest)
        if self._end is None:
            self._report("I9", "the run never came to its end")
        else:
            self._check_end(*self._end)
        for error, missing in self._leaving.items():
            if missing > 0:
                self._report("I8", f"{missing} processes should have left with {error}, and went on")
        return self.verdict

    def _report(self, invariant: str, what: str) -> None:
        self.verdict.broken.append(f"{invariant}: {what}")

    def _begin(self, pid: int, _verb: str) -> None:
        self._pid = pid
        self._open.clear()

    def _death(self, pid: int, how: str) -> None:
        if how == "hung":
            self._report("I9", f"process {pid} hung and was ended by force")

    def _raised(self, _pid: int, error: str, text: str) -> None:
        self._leaving[error] -= 1
        if self._leaving[error] < 0:
            self._report("I9", f"a process ended with {error}: {text}")

    def _note(self, text: str) -> None:
        self._report("I5", text)

    def _found(self, held: Held | None) -> None:
        """Compare the store at the start of a process with the ledger. After a crash only the stored state counts."""
        tasks: Mapping[str, Any] = held["tasks"] if held is not None else {}
        damaged = {name for name in tasks if tasks[name]["damaged"]}
        for name in damaged - self._rerun:
            self._acked.pop(name, None)
            self._in_flight[name] += 1
        self._rerun |= damaged
        self._acks_are_in(tasks)
        for name, executions in self._executed.items():
            attempts = len(tasks[name]["attempts"]) if name in tasks else 0
            if attempts < executions:
                self._report("I4", f"{name} was executed {executions} times, and {attempts} starts are stored")
            for before in self._awaited(name, tasks):
                self._report("I4", f"{name} was executed before the end of {before} was stored")
        self._in_flight.update(name for name in self._process if not _is_done(tasks, name))
        self._settled = {name for name in tasks if _is_done(tasks, name)} - damaged
        self._handed = {name for name in tasks if _is_under_way(tasks, name) and not self._process[name]}
        self._process.clear()

    def _awaited(self, name: str, tasks: Mapping[str, Any]) -> list[str]:
        """Return the dependencies for whose ends the task has to wait: none if what is stored lets it start."""
        task = self._dag[name]
        stored = {
            one: TaskStatus(tasks[one]["status"]) if one in tasks else TaskStatus.PENDING for one in task.upstream
        }
        if task.join == "done":
            never = {one for one in stored if self._ends[one].status is TaskStatus.PENDING}
            return [one for one, status in stored.items() if status not in TASK_DONE and one not in never]
        if may_follow(task, [(self._dag[one], status) for one, status in stored.items()]):
            return []
        return [one for one, status in stored.items() if not passes(self._dag[one], status)]

    def _acks_are_in(self, tasks: Mapping[str, Any]) -> None:
        for name, told in self._acked.items():
            stored = tasks.get(name)
            if stored is None or (stored["status"], stored["result"]) != told:
                self.verdict.lost += 1
                now = "nothing" if stored is None else f"{stored['status']} {stored['result']}"
                self._report("I1", f"{name} was told as {' '.join(told)}, the store has {now}")

    def _exec(self, name: str, pid: int, _at: float) -> None:
        if pid != self._pid and name in self._handed:
            # The old owner was stopped between the stored start and the call: no check can prevent the execution.
            self._handed.discard(name)
            self._in_flight[name] += 1
            self._executed[name] += 1
            return
        if name in self._unanswered:
            self._report("I2", f"{name} is at_most_once, and was executed again without an answer")
        if self._dag[name].at_most_once:
            self._unanswered.add(name)
        if name in self._acked or name in self._settled:
            self.verdict.repeated += 1
            self._report("I2", f"{name} was executed again after it had ended")
        self._executed[name] += 1
        self._process[name] += 1
        self._open.add(name)
        self._limits_hold()

    def _limits_hold(self) -> None:
        case = self._case
        if len(self._open) > case.concurrency:
            self._report("I6", f"{len(self._open)} tasks at once, {case.concurrency} are allowed")
        per_backend = Counter(self._dag.backend_of(self._dag[name]) or case.backends[0] for name in self._open)
        for backend, limit in case.limits.items():
            if per_backend[backend] > limit:
                self._report("I6", f"{per_backend[backend]} tasks at once on {backend}, {limit} are allowed")

    def _left(self, name: str, _pid: int) -> None:
        self._open.discard(name)

    def _ack(self, name: str, status: str, result: str) -> None:
        self.verdict.acks += 1
        told, end = (status, result), self._ends[name]
        if told != (end.status.value, end.result):
            self._report("I5", f"{name} was told as {' '.join(told)}, not {end.status.value} {end.result}")
        if self._acked.setdefault(name, told) != told:
            self._report("I1", f"{name} was told as {' '.join(self._acked[name])} and then as {' '.join(told)}")

    def _ends_as(self, status: str, held: Held) -> None:
        self._end = (status, held)

    def _check_end(self, status: str, held: Held) -> None:
        wanted = run_status(self._ends)
        if {status, held["status"]} != {wanted.value}:
            self._report("I5", f"the run is told as {status} and stored as {held['status']}, not {wanted.value}")
        if held["owned"]:
            self._report("I5", "the run has ended and still has an owner")
        self._acks_are_in(held["tasks"])
        if held["tasks"].keys() != self._ends.keys():
            missing, more = self._ends.keys() - held["tasks"].keys(), held["tasks"].keys() - self._ends.keys()
            self._report("I10", f"the run lacks the tasks {sorted(missing)} and has {sorted(more)} instead")
        twice = sorted(name for name, times in held["growths"].items() if times != (name in self._forecast.adders))
        if twice:
            self._report("I10", f"tasks were added more than once, or by who adds none: {', '.join(twice)}")
        for name in self._ends.keys() & held["tasks"].keys():
            self._task_ended(name, self._ends[name], held)

    def _task_ended(self, name: str, end: Expected, held: Held) -> None:
        task = held["tasks"][name]
        if (task["status"], task["result"]) != (end.status.value, end.result):
            self._report("I5", f"{name} is {task['status']} {task['result']}, not {end.status.value} {end.result}")
        extra = self._executed[name] - end.executions
        if extra > self._in_flight[name]:
            self._report("I3", f"{name}: {extra} executions too many, in flight at {self._in_flight[name]} kills")
        if self._in_flight[name] and extra > 0:
            self.verdict.extra = max(self.verdict.extra, -(-extra // self._in_flight[name]))
        numbers = [number for number, _ in task["attempts"]]
        if numbers != list(range(1, len(numbers) + 1)) or len(numbers) < self._executed[name]:
            self._report("I5", f"{name} was executed {self._executed[name]} times, its attempts are {numbers}")
        completed = end.status is TaskStatus.COMPLETED
        if held["completions"].get(name, 0) != completed + (name in self._rerun):
            self._report("I5", f"{name} is told to have completed {held['completions'].get(name, 0)} times")
        gathers = self._dag[name].for_each is not None
        if completed and not gathers and name not in self._rerun and not self._was_said(name, end, task["said"]):
            self._report("I5", f"{name} has {len(task['said'])} messages, which are not its prompt and its answer")

    def _was_said(self, name: str, end: Expected, said: list[str]) -> bool:
        """Return whether the messages are the prompt and the answer, with an optional note about an interruption in
        between, and behind them the evidence of a check.
        """
        prompt, answer = (mark(text) for text in end.history[-2:])
        answered = [answer] if self._dag[name].check is None else [answer, mark(EVIDENCE)]
        told = self._in_flight[name] > 0 and said == [prompt, mark(INTERRUPTED), *answered]
        return said == [prompt, *answered] or told


def _is_done(tasks: Mapping[str, Any], name: str) -> bool:
    return name in tasks and TaskStatus(tasks[name]["status"]) in TASK_DONE


def _is_under_way(tasks: Mapping[str, Any], name: str) -> bool:
    return TaskStatus(tasks[name]["status"]) is TaskStatus.RUNNING


def resume_times(lines: list[Line], forked: Mapping[int, float]) -> list[float]:
    """Return the milliseconds from the fork to the first execution for each resuming process that executed a task."""
    first: dict[int, float] = {}
    for line in lines:
        if line[0] == words.EXEC:
            first.setdefault(line[2], line[3])
    resuming = [line[1] for line in lines if line[0] == words.BEGIN and line[2] == "resume"]
    return [(first[pid] - forked[pid]) * 1000 for pid in resuming if pid in first and pid in forked]
