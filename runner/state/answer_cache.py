"""Answers of all runs of a store that tasks with `cache` take over in place of a call.

A run reads the earlier runs once, when it starts. A task is looked at only if its settings are those of a task with
`cache`, so prompts are rendered, and texts kept, for such tasks alone. An answer that was itself taken over is no
source, because its age would begin anew; nor is an answer given by a person.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from plait.backends.protocol import JsonValue
from plait.persistence.changes import AttemptId
from plait.persistence.errors import StoreError
from plait.persistence.protocol import Store
from plait.runner.domain.dag import DAG
from plait.runner.domain.question import parse_time
from plait.runner.domain.status import TaskStatus
from plait.runner.domain.task import Task
from plait.runner.errors import RunNotFound
from plait.runner.state.codec import to_json
from plait.runner.state.conversations import sent_prompt
from plait.runner.state.kept_answers import GIVEN, KEPT
from plait.runner.state.readable_state import ReadableState
from plait.runner.state.reusable_answer import ReusableAnswer
from plait.runner.state.reusable_answers import ANSWER_KEYS, REUSED, ReusableAnswers, answer_key, settings_of
from plait.runner.state.stored_run import StoredRun, stored_run

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
    wanted = {_digest(task, backend_keys[dag.backend_of(task) or ""]) for task in tasks}
    oldest = now - max(float("inf") if task.cache is True else task.cache for task in tasks)
    by_key: dict[str, CachedAnswer] = {}
    for record in await store.list_runs(_ALL_RUNS):
        if record.damaged or (record.ended_at is not None and parse_time(record.ended_at) < oldest):
            continue
        try:
            run = await stored_run(store, record.run_id)
            found = await _answers_of(run, wanted)
        except (StoreError, RunNotFound):
            continue
        for key, answer in found.items():
            if answer.at >= oldest and (key not in by_key or by_key[key].at < answer.at):
                by_key[key] = answer
    return AnswerCache(by_key, backend_keys, now)


async def _answers_of(run: StoredRun, wanted: set[str]) -> dict[str, CachedAnswer]:
    """Return the answers of the run by key, those of tasks with the `wanted` settings alone."""
    state, run_id = run.state, run.record.run_id
    backend_keys = cast("Mapping[str, JsonValue]", json.loads(run.record.settings).get(ANSWER_KEYS) or {})
    found: dict[str, CachedAnswer] = {}
    known: dict[int, str | None] = {}
    taken_over: set[str] | None = None
    for position, record in enumerate(run.tasks):
        task, name = state.dag.tasks[position], state.dag.backend_of(state.dag.tasks[position]) or ""
        if state.statuses[position] is not TaskStatus.COMPLETED or record.ended_at is None or task.at_most_once:
            continue
        if name not in backend_keys or _digest(task, backend_keys[name]) not in wanted:
            continue
        if not record.duration_s and taken_over is None:
            attempts = await run.store.list_attempts(run_id)
            taken_over = {one.task_id for one in attempts if one.backend.startswith((REUSED, KEPT, GIVEN))}
        if taken_over is not None and task.id in taken_over:
            continue
        if (key := answer_key(state, position, backend_keys, known, anywhere=True)) is not None:
            result = state.results[position]
            prompt, attempt = await sent_prompt(run, position), AttemptId(run_id, record.task_id, record.attempt)
            answer = ReusableAnswer(result.text, result.data, record.data, prompt, attempt=attempt)
            found[key] = CachedAnswer(run_id, answer, parse_time(record.ended_at))
    return found


def _digest(task: Task, backend_key: JsonValue) -> str:
    return hashlib.sha256(to_json([settings_of(task), backend_key]).encode()).hexdigest()
