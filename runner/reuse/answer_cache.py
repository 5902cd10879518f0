"""Answers of all runs of a store that tasks with `cache` take over in place of a call.

A run reads the earlier runs once, when it starts. A task is looked at only if its settings are those of a task with
`cache`, so prompts are rendered, and texts kept, for such tasks alone. An answer that was itself taken over is no
source, because its age would begin anew; nor is an answer given by a person.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from plait.errors import RunNotFound, StoreError
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.runner.domain.asked_question import parse_time
from plait.runner.domain.dag import DAG
from plait.runner.reuse.answer_keys import (
    REUSED,
    ReusableAnswers,
    answer_key,
    find_keys,
    settings_of,
    stored_answer,
    stored_answer_keys,
)
from plait.runner.reuse.earlier_answers import GIVEN, KEPT
from plait.runner.reuse.reusable_answer import ReusableAnswer
from plait.runner.state.codec import to_json
from plait.runner.state.run_state import ReadableState
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.statuses import TaskStatus
from plait.task import Task

_ALL_RUNS = 10_000_000


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer in the cache."""

    run_id: str
    answer: ReusableAnswer
    at: float
    """The time of the answer, a Unix time."""


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """The answers for the tasks of one run that have `cache`."""

    by_key: Mapping[str, CachedAnswer]
    backend_keys: Mapping[str, JsonValue]
    """The answer keys of the backends of the run."""
    now: float
    """The time at which ages are measured, a Unix time."""
    _known: dict[int, str | None] = field(default_factory=dict[int, "str | None"], repr=False)

    def find(self, state: ReadableState, position: int) -> CachedAnswer | None:
        """Return the answer for the first attempt of the task; None if the task has to run."""
        task = state.dag.tasks[position]
        if task.cache is False or task.at_most_once or state.attempts[position]:
            return None
        key = answer_key(state, position, self.backend_keys, self._known, anywhere=True)
        found = None if key is None else self.by_key.get(key)
        return found if found is not None and (task.cache is True or self.now - found.at <= task.cache) else None


def earlier_answer(
    state: ReadableState, position: int, answers: ReusableAnswers | None, cache: AnswerCache | None
) -> tuple[str, ReusableAnswer] | None:
    """Return the answer for the task's first attempt, with the id of its run; None if the task has to run."""
    if answers is not None:
        if (found := answers.find(state, position)) is not None:
            return answers.run_id, found
        if answers.is_fresh(state.dag.tasks[position]):
            return None
    cached = None if cache is None else cache.find(state, position)
    return None if cached is None else (cached.run_id, cached.answer)


async def load_cache(
    store: Store | None, dag: DAG, backend_keys: Mapping[str, JsonValue], now: float
) -> AnswerCache | None:
    """Return the answers in `store` for the tasks of `dag` with `cache`; None if there is no such task. Runs that
    cannot be read are left out.
    """
    tasks = [task for task in dag if task.cache is not False and (dag.backend_of(task) or "") in backend_keys]
    if store is None or not tasks:
        return None
    wanted = {_settings(task, backend_keys[dag.backend_of(task) or ""]) for task in tasks}
    oldest = now - max(float("inf") if task.cache is True else task.cache for task in tasks)
    by_key: dict[str, CachedAnswer] = {}
    for record in await store.list_runs(_ALL_RUNS):
        if record.damaged or (record.ended_at is not None and parse_time(record.ended_at) < oldest):
            continue
        try:
            await _add_answers(by_key, await stored_run(store, record.run_id), wanted, oldest)
        except (StoreError, RunNotFound):
            continue
    return AnswerCache(by_key, backend_keys, now)


async def _add_answers(by_key: dict[str, CachedAnswer], run: StoredRun, wanted: set[str], oldest: float) -> None:
    """Add the answers of the run since `oldest` to `by_key`, those of tasks with the `wanted` settings alone. Of two
    answers with one key the later counts.
    """
    state, keys = run.state, stored_answer_keys(run)
    positions: list[int] = []
    for position, task in enumerate(state.dag.tasks):
        name = state.dag.backend_of(task) or ""
        is_done = state.statuses[position] is TaskStatus.COMPLETED and run.tasks[position].ended_at is not None
        if is_done and name in keys and _settings(task, keys[name]) in wanted:
            positions.append(position)
    taken_over = await _taken_over(run, positions)
    for position, key, prompt in find_keys(run, positions, anywhere=True):
        at = parse_time(run.tasks[position].ended_at or "")
        known = by_key.get(key)
        if at >= oldest and (known is None or known.at < at) and run.tasks[position].task_id not in taken_over:
            by_key[key] = CachedAnswer(run.record.run_id, await stored_answer(run, position, prompt), at)


async def _taken_over(run: StoredRun, positions: Collection[int]) -> set[str]:
    """Return the tasks whose answers were taken over, or given by a person; empty if all tasks at `positions` took time
    to answer.
    """
    if all(run.tasks[position].duration_s for position in positions):
        return set()
    attempts = await run.store.list_attempts(run.record.run_id)
    return {one.task_id for one in attempts if one.backend.startswith((REUSED, KEPT, GIVEN))}


def _settings(task: Task, backend_key: JsonValue) -> str:
    return to_json([settings_of(task), backend_key])
