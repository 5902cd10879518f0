"""Answers of an earlier run that a new run may take over in place of a call (`like=`).

`answer_key` lists everything that determines an answer. Two tasks with equal keys may share an answer. The key holds
the prompt as rendered, so a task behind an upstream task that ran again and gave the same text keeps the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from plait.errors import TaskNotFound, nearest
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.runner.domain.groups import group_of
from plait.runner.reuse.earlier_answers import ForkPoint, asked_persons, load_kept, person_answer
from plait.runner.reuse.reusable_answer import ReusableAnswer
from plait.runner.state.codec import to_json
from plait.runner.state.run_state import ReadableState
from plait.runner.state.stored_conversations import sent_prompt
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.safe_text import clean_text
from plait.statuses import TaskStatus
from plait.task import MODEL_SETTINGS, Task, TaskFile

ANSWER_KEYS = "answer_keys"
"""The key in a run's settings of the backends' answer keys, by name; "" is the default backend."""
REUSED = "reused from "
"""The beginning of the backend name in the events of a task with an answer of an earlier run; the run's id follows."""
LIKE = "like"
"""The key in a run's settings of the id of the run whose answers are taken over."""
FRESH = "fresh"
"""The key in a run's settings of the tasks that take no answer over."""
KEEP_ANSWERS = "keep_answers"
"""The key in a run's settings that is true if answers of persons are taken over, too."""
FORK = "fork"
"""The key in a run's settings of the point from which a fork runs on."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which answers a new run takes over, as stored in the settings of the run."""

    like: str
    """The id of the earlier run."""
    fresh: tuple[str, ...] = ()
    """The tasks, and the `for_each` tasks of parts, that run in any case."""
    fork: ForkPoint | None = None
    """The point from which a fork runs on; None for a run of a plan of its own."""
    keep_answers: bool = False
    """Whether tasks that asked a person take their answers over, too."""

    def as_settings(self) -> dict[str, JsonValue]:
        """Return the settings, for `of_settings` at a resume."""
        kept: dict[str, JsonValue] = {LIKE: self.like}
        if self.fresh:
            kept[FRESH] = list(self.fresh)
        if self.keep_answers:
            kept[KEEP_ANSWERS] = True
        if self.fork is not None:
            kept[FORK] = self.fork.as_settings()
        return kept

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Reuse | None:
        """Return the value in the settings of a run; None for a run that takes no answers over."""
        if (like := settings.get(LIKE)) is None:
            return None
        fork = settings.get(FORK)
        point = None if fork is None else ForkPoint.of_settings(fork)
        return cls(like, tuple(settings.get(FRESH) or ()), point, bool(settings.get(KEEP_ANSWERS)))


def is_try(settings: Mapping[str, Any]) -> bool:
    """Return whether the run with these settings is an attempt at one task beside an earlier run."""
    return (
        (reuse := Reuse.of_settings(settings)) is not None and reuse.fork is not None and reuse.fork.tries is not None
    )


@dataclass(frozen=True, slots=True)
class ReusableAnswers:
    """The answers of the run `run_id`, by answer key."""

    run_id: str
    by_key: Mapping[str, ReusableAnswer]
    backend_keys: Mapping[str, JsonValue]
    """The answer keys of the backends of the new run."""
    fresh: Collection[str] = ()
    """The tasks, and the `for_each` tasks of parts, that run in any case."""
    kept: Mapping[str, ReusableAnswer] = field(default_factory=dict[str, ReusableAnswer])
    """The answers that a fork keeps in any case, by task id."""
    asked: Collection[int] = ()
    """The positions of the tasks of the earlier run with an answer of a person."""
    _known: dict[int, str | None] = field(default_factory=dict[int, "str | None"], repr=False)

    def find(self, state: ReadableState, position: int) -> ReusableAnswer | None:
        """Return the answer for the next attempt of the task; None if the task has to run."""
        task = state.dag.tasks[position]
        if state.attempts[position]:
            return None
        if (kept := self.kept.get(task.id)) is not None:
            return kept
        if task.at_most_once or self.is_fresh(task):
            return None
        key = answer_key(state, position, self.backend_keys, self._known)
        return None if key is None else self.by_key.get(key)

    def sure(self, positions: Collection[int]) -> ReusableAnswers:
        """Return the answers for another state of the same plan, with the keys found so far of the tasks at
        `positions`, whose prompts and conversations are the same there.
        """
        return replace(self, _known={one: key for one, key in self._known.items() if one in positions})

    def is_fresh(self, task: Task) -> bool:
        """Return whether the task runs in any case, at the request of the caller."""
        return bool(self.fresh) and (task.id in self.fresh or group_of(task.id, task.item) in self.fresh)

    @classmethod
    async def of(cls, run: StoredRun, backend_keys: Mapping[str, JsonValue], reuse: Reuse) -> ReusableAnswers:
        """Return the answers of `run` for a run with backends of these keys. Raises StoreError."""
        asked = await asked_persons(run)
        never = frozenset[int]() if reuse.keep_answers else asked
        by_key: dict[str, ReusableAnswer] = {}
        for position, key, prompt in find_keys(run, range(len(run.tasks)), never=never):
            if key not in by_key:
                given = position in asked
                by_key[key] = await (person_answer(run, position) if given else stored_answer(run, position, prompt))
        return cls(run.record.run_id, by_key, backend_keys, reuse.fresh, asked=asked)


def find_keys(
    run: StoredRun, positions: Iterable[int], *, anywhere: bool = False, never: Collection[int] | None = None
) -> Iterator[tuple[int, str, str]]:
    """Yield the position, the answer key and the prompt of each completed task at `positions` whose answer may be taken
    over. `anywhere` and `never` are as in `answer_key`.
    """
    state, stored = run.state, stored_answer_keys(run)
    known, prompts = dict[int, str | None](), dict[int, str]()
    for position in positions:
        if state.statuses[position] is not TaskStatus.COMPLETED or state.dag.tasks[position].at_most_once:
            continue
        key = answer_key(state, position, stored, known, anywhere=anywhere, never=never, prompts=prompts)
        if key is not None:
            yield position, key, prompts.pop(position)


async def stored_answer(run: StoredRun, position: int, prompt: str) -> ReusableAnswer:
    """Return the answer of the completed task to `prompt`. The prompt of a task with files is read from the store.
    Raises StoreError.
    """
    record, result = run.tasks[position], run.state.results[position]
    if run.state.dag.tasks[position].files:
        prompt = await sent_prompt(run, position)
    return ReusableAnswer(result.text, result.data, record.data, prompt)


def stored_answer_keys(run: StoredRun) -> Mapping[str, JsonValue]:
    """Return the answer keys of the backends of a stored run, by name."""
    return cast("Mapping[str, JsonValue]", json.loads(run.record.settings).get(ANSWER_KEYS) or {})


def answer_key(
    state: ReadableState,
    position: int,
    backend_keys: Mapping[str, JsonValue],
    known: dict[int, str | None],
    *,
    anywhere: bool = False,
    never: Collection[int] | None = None,
    prompts: dict[int, str] | None = None,
) -> str | None:
    """Return the key of the task's answer, once all dependencies are done; None if the answer is never taken over.
    `known` keeps the keys found so far, by position, for the tasks that continue a conversation. With `anywhere` the
    key has no part of the plan: neither the id, nor the condition, nor the name of the backend. Answers of the tasks in
    `never` are not taken over; None stands for the tasks that asked a person. `prompts` receives the rendered prompts
    behind the keys, by position.
    """
    excluded = state.answers if never is None else never
    links = [] if position in known else [position]
    while links and (before := _continued(state, links[-1])) is not None and before not in known:
        links.append(before)  # a conversation may be long, so no recursion
    for link in reversed(links):
        known[link] = None
        if not _may_be_taken(state, link, backend_keys, excluded):
            continue
        prefix: JsonValue = None
        if (before := _continued(state, link)) is not None:
            earlier = known[before] if _may_be_taken(state, before, backend_keys, excluded) else None
            if earlier is None:
                continue
            prefix = [earlier, state.results[before].text]
        if (prompt := _prompt(state, link)) is None:
            continue
        if prompts is not None:
            prompts[link] = prompt
        known[link] = _key_behind(state, link, backend_keys, prefix, prompt, anywhere=anywhere)
    return known[position]


def _continued(state: ReadableState, position: int) -> int | None:
    """Return the completed task whose conversation the task continues; None without."""
    before = state.dag.tasks[position].continues
    return None if before is None or not state.is_completed(before) else state.dag.position(before)


def _may_be_taken(
    state: ReadableState, position: int, backend_keys: Mapping[str, JsonValue], excluded: Collection[int]
) -> bool:
    task = state.dag.tasks[position]
    if task.adds_tasks or task.for_each is not None or state.has_added(position) or position in excluded:
        return False
    return (state.dag.backend_of(task) or "") in backend_keys


def _prompt(state: ReadableState, position: int) -> str | None:
    """Return the prompt of the task; None if the prompt cannot be rendered."""
    try:
        return clean_text(state.prompt(state.dag.tasks[position]))
    except Exception:  # reported by the attempt
        return None


def _key_behind(
    state: ReadableState,
    position: int,
    backend_keys: Mapping[str, JsonValue],
    prefix: JsonValue,
    prompt: str,
    *,
    anywhere: bool,
) -> str:
    """Return the key of the task's answer to `prompt` in the conversation `prefix`."""
    task = state.dag.tasks[position]
    name = state.dag.backend_of(task) or ""
    place: list[Any] = [] if anywhere else [task_identity(state, position), task.when, name]
    determines = [1, place, prompt, settings_of(task), backend_keys[name], prefix]
    return hashlib.sha256(to_json(determines).encode()).hexdigest()


def settings_of(task: Task) -> list[Any]:
    """Return the settings of the task that determine an answer, beside the prompt and the backend."""
    files = [[file.name, file.sha256] for file in task.files if isinstance(file, TaskFile)]
    return [task.output_schema, task.metadata, [getattr(task, name) for name in MODEL_SETTINGS], files]


def task_identity(state: ReadableState, position: int) -> list[Any]:
    """Return the id of the task; for a part of a `for_each` the id of the whole and the element, never the number."""
    task = state.dag.tasks[position]
    whole = group_of(task.id, task.item)
    return [task.id] if whole is None else [whole, task.item]


async def load_answers(store: Store | None, reuse: Reuse, backend_keys: Mapping[str, JsonValue]) -> ReusableAnswers:
    """Return the answers that a run may take over. Raises StoreRequired, RunNotFound, StoreError."""
    return await answers_of(await stored_run(store, reuse.like), reuse, backend_keys)


async def answers_of(run: StoredRun, reuse: Reuse, backend_keys: Mapping[str, JsonValue]) -> ReusableAnswers:
    """Return the answers of `run` that a run with backends of these keys may take over. Raises StoreError."""
    answers = await ReusableAnswers.of(run, backend_keys, reuse)
    return answers if reuse.fork is None else replace(answers, kept=await load_kept(run, reuse.fork))


def require_tasks(names: Collection[str], tasks: Collection[Task]) -> None:
    """Raise TaskNotFound if one of `names` is neither a task nor the `for_each` task of a part among `tasks`."""
    known = {task.id for task in tasks} | {group_of(task.id, task.item) or task.id for task in tasks}
    for name in names:
        if name not in known:
            raise TaskNotFound(f"the plan has no task {name!r}{nearest(name, known)}")
