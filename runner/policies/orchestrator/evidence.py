"""What a run of the orchestrator has come to so far: read from its tasks, told to the reflector, and compared with what
it was before. Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property

from plait.runner.domain.policy import RunView
from plait.runner.domain.result import TaskResult
from plait.runner.domain.status import TASK_DONE, TaskStatus
from plait.runner.domain.task import FailureMode, Task
from plait.runner.policies.orchestrator.prompts import ANSWER_ID
from plait.runner.policies.orchestrator.replies import PREFIX, Known
from plait.runner.prompts.base import text_of

_OWN = re.compile(r"(plan|reflect)\.[0-9]+")
_LEAST_SHOWN = 200
_LONGEST_PROMPT = 300
_MOST_LISTED = 100
EXECUTED = frozenset({TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.SKIPPED})
_WORDS = {TaskStatus.FAILED: "failed", TaskStatus.SKIPPED: "skipped", TaskStatus.CANCELLED: "dropped"}


def is_work(task_id: str) -> bool:
    """Whether the task is one that leads to the goal, and none that the loop itself needs."""
    return task_id.startswith(PREFIX) or (task_id != ANSWER_ID and not _OWN.fullmatch(task_id))


class Evidence:
    """Where the work of a run stands."""

    def __init__(self, run: RunView) -> None:
        self._run = run

    @cached_property
    def work(self) -> list[Task]:
        """The tasks that lead to the goal. Those that an executor's reply added are among them."""
        return [task for task in self._run.tasks if is_work(task.id)]

    @cached_property
    def _own(self) -> list[Task]:
        """The tasks that the loop itself needs."""
        return [task for task in self._run.tasks if not is_work(task.id)]

    @property
    def reflections(self) -> int:
        """How many reflections there were."""
        return sum(task.id.startswith("reflect.") for task in self._own)

    def is_open(self, leaving_out: Collection[str] = ()) -> bool:
        """Whether a task has not ended yet, other than those to be left out."""
        # The newest first: they are the likeliest to be open, and one is enough.
        return any(
            self._run.result(task.id).status not in TASK_DONE
            for task in reversed(self._run.tasks)
            if is_work(task.id) and task.id not in leaving_out
        )

    def waits_for_a_person(self) -> bool:
        """Whether a task can only go on once a person has answered."""
        return any(self._run.result(task.id).status is TaskStatus.WAITING_INPUT for task in self.work)

    def not_begun(self) -> tuple[str, ...]:
        """The tasks that can still be cancelled: those never started, and those that wait for a person."""
        return tuple(task.id for task in self.work if _can_be_cancelled(self._run.result(task.id)))

    def under_way(self) -> int:
        """How many tasks have begun and not ended."""
        return sum(_is_under_way(self._run.result(task.id)) for task in self.work)

    def ready(self, added: Sequence[Task], dropped: Collection[str]) -> list[str]:
        """The tasks that nothing keeps from beginning, once `added` are there and `dropped` are gone."""
        new = {task.id for task in added}
        unbegun = [task for task in self.work if _is_unbegun(self._run.result(task.id))]
        return [
            task.id
            for task in (*unbegun, *added)
            if is_work(task.id)
            and task.id not in dropped
            and task.for_each is None  # its parts are what begins
            and not any(name in new or self._holds_up(name) for name in task.upstream)
        ]

    def _holds_up(self, task_id: str) -> bool:
        """Whether what waits for the task cannot start yet, or ever."""
        result = self._run.result(task_id)
        return result.status not in TASK_DONE or _blocks(self._run.task(task_id), result)

    def can_go_on(self, dropped: Collection[str] = ()) -> bool:
        """Whether, with `dropped` and what waits for it gone, a task is under way or may still start."""
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

    def known(self) -> Known:
        """The run's tasks, as a further plan may speak of them."""
        dead: dict[str, str] = {}
        for task in self.work:
            result = self._run.result(task.id)
            if _blocks(task, result):
                dead[task.id] = _WORDS[result.status]
            elif any(name in dead for name in task.upstream):
                dead[task.id] = "waiting for one that failed or was dropped"
        return Known(frozenset(task.id for task in self._run.tasks), dead)

    def unseen(self) -> list[str]:
        """Completed tasks that no reflection was about, behind the last reflection that was completed."""
        own = [task for task in self._own if self._completed(task)]
        reflections = [task for task in own if task.id.startswith("reflect.")]
        seen = {name for task in reflections for name in task.depends_on}
        last = [task.id for task in reflections[-1:] or own[-1:]]
        return [*last, *(task.id for task in self.work if task.id not in seen and self._completed(task))]

    def told(self, most: int) -> str:
        """All of it as text. The results are cut so that they come to about `most` characters; where there are too many
        for that, the oldest are only counted.
        """
        of: dict[TaskStatus, list[tuple[Task, TaskResult]]] = {status: [] for status in TaskStatus}
        for task in self.work:
            result = self._run.result(task.id)
            of[result.status].append((task, result))
        done, failed = of[TaskStatus.COMPLETED], [*of[TaskStatus.FAILED], *of[TaskStatus.SKIPPED]]
        share = max(most // max(len(done), 1), _LEAST_SHOWN)
        sections = (
            _section("Done, with results:", done, most // _LEAST_SHOWN, lambda t, r: _done(t, r, share)),
            _section("Failed:", failed, _MOST_LISTED, _failed),
            _section("Under way:", [*of[TaskStatus.RUNNING], *of[TaskStatus.WAITING_INPUT]], _MOST_LISTED, _line),
            _section("Not begun:", of[TaskStatus.PENDING], _MOST_LISTED, _pending),
            _section("Dropped:", of[TaskStatus.CANCELLED], _MOST_LISTED, _line),
        )
        return "\n\n".join(filter(None, sections)) or "Nothing has been done yet."

    def digest(self) -> str:
        """A name for what has been found out: the same if nothing new came of what was done since."""
        results = ((task, self._run.result(task.id)) for task in self.work)
        return digest(
            f"{said(task)}\0{result.status.value}\0{text_of(result.value)}\0{result.error or ''}"
            for task, result in results
            if result.status in EXECUTED
        )

    def _completed(self, task: Task) -> bool:
        return self._run.result(task.id).status is TaskStatus.COMPLETED


def digest(texts: Iterable[str]) -> str:
    """A short name for a set of texts, in whatever order and however often they come."""
    both = json.dumps(sorted(set(texts)))
    return hashlib.sha256(both.encode()).hexdigest()[:16]


def said(task: Task) -> str:
    """What the task is to do, in its planner's words."""
    return " ".join((task.item if isinstance(task.item, str) else task.prompt).split())


def cut(text: str, most: int) -> str:
    """`text`, or its beginning, and how much was left out."""
    return text if len(text) <= most else f"{text[:most]} [... {len(text) - most:,} more characters]"


def _is_unbegun(result: TaskResult) -> bool:
    return result.status is TaskStatus.PENDING and result.attempts == 0


def _is_under_way(result: TaskResult) -> bool:
    return result.status not in TASK_DONE and not _is_unbegun(result)


def _can_be_cancelled(result: TaskResult) -> bool:
    return _is_unbegun(result) or result.status is TaskStatus.WAITING_INPUT


def _blocks(task: Task, result: TaskResult) -> bool:
    """Whether what depends on `task` can never start."""
    if result.status is TaskStatus.FAILED:
        return task.failure_mode is FailureMode.HARD
    return result.status is TaskStatus.CANCELLED


def _section(
    head: str,
    found: Sequence[tuple[Task, TaskResult]],
    most: int,
    line: Callable[[Task, TaskResult], str],
) -> str:
    """The newest `most` of what was found; nothing where nothing was."""
    most = max(most, 1)
    earlier = [f"- {len(found) - most:,} earlier ones"] if len(found) > most else []
    lines = [line(task, result) for task, result in found[-most:]]
    return "\n".join([head, *earlier, *lines]) if lines else ""


def _line(task: Task, _result: TaskResult) -> str:
    return f"- {task.id}: {cut(said(task), _LONGEST_PROMPT)}"


def _done(task: Task, result: TaskResult, most: int) -> str:
    # Indented, so that no line of a result passes for one of ours.
    text = cut(text_of(result.value).strip(), most).replace("\n", "\n  ")
    return f"{_line(task, result)}\n  {text}"


def _failed(task: Task, result: TaskResult) -> str:
    return f"{_line(task, result)}\n  {cut(result.error or 'no reason given', _LONGEST_PROMPT)}"


def _pending(task: Task, result: TaskResult) -> str:
    needs = [name for name in task.upstream if name.startswith(PREFIX)]
    return _line(task, result) + (f" (waits for {', '.join(needs)})" if needs else "")
