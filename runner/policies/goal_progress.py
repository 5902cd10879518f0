"""The state of an orchestrated run: read from its tasks, reported to the reflector, and compared between reflections.
Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property

from plait.json_form import text_of
from plait.runner.domain.policy import RecordedRun
from plait.runner.domain.run_result import TaskResult
from plait.runner.policies.goal_messages import ANSWER_ID, PREFIX, KnownTasks
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import FailureMode, Task

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

    def waits_for_a_person(self) -> bool:
        """Return whether any task waits for a person."""
        return any(self._run.result(task.id).status is TaskStatus.WAITING_INPUT for task in self.work)

    def not_begun(self) -> tuple[str, ...]:
        """Return the ids of the tasks that can still be cancelled: never started, or waiting for a person."""
        return tuple(task.id for task in self.work if _can_be_cancelled(self._run.result(task.id)))

    def under_way(self) -> int:
        """Return the number of tasks begun and not ended."""
        return sum(
            result.status not in TASK_DONE and not _is_unbegun(result)
            for result in (self._run.result(task.id) for task in self.work)
        )

    def ready(self, added: Sequence[Task], dropped: Collection[str]) -> list[str]:
        """Return the ids of the tasks free to begin after adding `added` and cancelling `dropped`."""
        new = {task.id for task in added}
        unbegun = [task for task in self.work if _is_unbegun(self._run.result(task.id))]
        return [
            task.id
            for task in (*unbegun, *added)
            if is_work(task.id)
            and task.id not in dropped
            and not task.gathers  # only its parts begin
            and not any(name in new or self._holds_up(name) for name in task.upstream)
        ]

    def _holds_up(self, task_id: str) -> bool:
        """Return whether dependents of the task cannot start yet, or ever."""
        result = self._run.result(task_id)
        return result.status not in TASK_DONE or _blocks(self._run.task(task_id), result)

    def can_go_on(self, dropped: Collection[str] = ()) -> bool:
        """Return whether any task is running or may start, apart from `dropped` and its dependents."""
        dead: set[str] = set(dropped)
        for task in self.work:
            result = self._run.result(task.id)
            if task.id in dead or result.status in TASK_DONE:
                if _blocks(task, result):
                    dead.add(task.id)
            elif any(name in dead for name in task.upstream):
                dead.add(task.id)
            else:
                return True
        return False

    def run_tasks(self) -> KnownTasks:
        """Return the tasks of the run that a further plan may refer to."""
        dead: dict[str, str] = {}
        for task in self.work:
            result = self._run.result(task.id)
            if _blocks(task, result):
                dead[task.id] = _WORDS[result.status]
            elif any(name in dead for name in task.upstream):
                dead[task.id] = "waiting for one that failed or was dropped"
        return KnownTasks(frozenset(task.id for task in self._run.tasks), dead)

    def unseen(self) -> list[str]:
        """Return the last completed reflection, followed by the completed tasks not yet covered by a reflection."""
        own = [task for task in self._own if self._completed(task)]
        reflections = [task for task in own if task.id.startswith("reflect.")]
        seen = {name for task in reflections for name in task.depends_on}
        last = [task.id for task in reflections[-1:] or own[-1:]]
        return [*last, *(task.id for task in self.work if task.id not in seen and self._completed(task))]

    def as_text(self, limit: int) -> str:
        """Return the state as text. Results are shortened to about `most` characters in all; if there are too many, the
        oldest are only counted.
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
    """Return `text`, shortened to `most` characters with a note on the omitted length."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def _is_unbegun(result: TaskResult) -> bool:
    return result.status is TaskStatus.PENDING and result.attempts == 0


def _can_be_cancelled(result: TaskResult) -> bool:
    return _is_unbegun(result) or result.status is TaskStatus.WAITING_INPUT


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
    """Return the section for the newest `most` tasks; empty if nothing was found."""
    limit = max(limit, 1)
    earlier = [f"- {len(entries) - limit:,} earlier ones"] if len(entries) > limit else []
    lines = [line(task, result) for task, result in entries[-limit:]]
    return "\n".join([head, *earlier, *lines]) if lines else ""
