"""Answers that the tasks of a run take over in place of a call. `EarlierAnswers.find` is asked before the first attempt
of each task, and looks in three places:

- a fork keeps some completed tasks of its run as they are, whatever their backends;
- `like`: the same tasks of one earlier run, if everything that determines an answer is as before;
- `cache: true`: the tasks of all runs of the store, by the key of the answer.

A fork runs on from some tasks. These tasks, the tasks that did not complete, and all tasks downstream of both make the
cone of the fork. A completed task outside the cone is kept: with its result, its conversation, and the tasks that it
added. Inside the cone a task takes an answer over only if nothing changed.

The answers of all runs are read once, when a run starts, and prompts are rendered only for tasks with the settings of
one with `cache`. An answer that was itself taken over is no source for the cache, because its age would begin anew; nor
is an answer given by a person.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from plait.backends.large_answers import read_answer
from plait.backends.output_schema import Mismatch, Schema
from plait.clock_and_ids import parse_time
from plait.dialogue import Message
from plait.errors import BackendError, InvalidRequest, PlaitError, RunNotFound, StoreError, TaskNotFound, nearest
from plait.json_form import JsonValue, as_json, from_json, to_json, value
from plait.persistence.store_protocol import Store
from plait.runner.domain.dag import DAG, group_of
from plait.runner.reuse.answer_keys import AnswerKeys, have_same_answer, have_same_identity, settings_of, task_identity
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_conversations import own_messages, sent_prompt
from plait.runner.state.stored_run import StoredRun, read_settings, stored_run, task_not_found
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import Task

ANSWER_KEYS = "answer_keys"
"""The key in a run's settings of the backends' answer keys, by name; "" is the default backend."""
REUSE = "reuse"
"""The key in a run's settings of the answers that it takes over: see `ReuseFrom`."""
REUSED = "reused from "
"""The beginning of the backend name in the events of a task with an answer of an earlier run; the run's id follows."""
KEPT = "kept from "
"""The beginning of that name for the answer of a person in an earlier run; the run's id follows."""
GIVEN = "given by a person"
"""That name for a result that was given with the fork."""
_ALL_RUNS = 10_000_000


@value
class ReuseFrom:
    """The run whose answers a new run takes over, and what runs in any case."""

    like: str
    """The id of the earlier run."""
    fresh: tuple[str, ...] = ()
    """The tasks, and the `for_each` tasks of parts, that run in any case."""
    keep_answers: bool = False
    """Whether tasks that asked a person take their answers over, too."""
    roots: tuple[str, ...] | None = None
    """The tasks, and the `for_each` tasks of parts, from which a fork runs on, those among them that were not completed
    when the fork was made; None for a run of a plan of its own.
    """
    results: Mapping[str, str] = field(default_factory=dict[str, str])
    """Results given with the fork, by task id."""
    only: str | None = None
    """The only task that a fork runs; None for a fork that goes on behind its start."""

    def as_settings(self) -> dict[str, JsonValue]:
        """Return the settings of a run that say the same, for `of_settings` at a resume."""
        return {REUSE: as_json(self)}

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> ReuseFrom | None:
        """Return the value in the settings of a run; None for a run that takes no answers over."""
        stored = settings.get(REUSE)
        return None if stored is None else from_json(cls, stored)

    @property
    def description(self) -> str:
        """The earlier run, and from where on the new one runs, in words."""
        if self.roots is None:
            return f"{self.like} (like)"
        if self.only is not None:
            return f"{self.like} (tries {self.only})"
        return f"{self.like} (fork from {', '.join(self.fresh)})"


def is_try(settings: Mapping[str, Any]) -> bool:
    """Return whether the run with these settings is an attempt at one task beside an earlier run."""
    return (reuse := ReuseFrom.of_settings(settings)) is not None and reuse.only is not None


@value
class EarlierAnswer:
    """An answer of a completed task of an earlier run, or given by a person."""

    text: str
    data: JsonValue
    data_json: str | None
    source: str
    """The backend name in the events of the task that takes the answer over."""
    run_id: str
    """The run of the answer."""
    prompt: str | None = None
    """The prompt as sent; None to render the prompt of the task that takes the answer over."""
    at: float = 0.0
    """The time of an answer for the cache, a Unix time."""
    messages: tuple[Message, ...] = ()
    """The conversation, if longer than the prompt and the answer."""
    adds: tuple[Task, ...] = ()
    """The tasks that the task added to the run."""
    session_id: str | None = None
    """The backend's id of the conversation, for a backend that can fork the session."""
    position: int | None = None
    """The position of the task in the run of `like`, for an answer with nothing but the text and the data."""


class EarlierAnswers:
    """The answers that one run may take over. `backend_keys` are the answer keys of the backends of the run."""

    def __init__(self, backend_keys: Mapping[str, JsonValue], reuse: ReuseFrom | None, now: float) -> None:
        self.backend_keys = backend_keys
        self.fork_keeps: Mapping[str, EarlierAnswer] = {}
        """The answers that a fork keeps in any case, by task id."""
        self.before: AnswerKeys | None = None
        """What determines the answers of the earlier run."""
        self.persons: Collection[int] = ()
        """The positions of the tasks of the earlier run with an answer of a person."""
        self._reuse = reuse
        self._now = now
        self._run: StoredRun | None = None
        self._read: dict[int, EarlierAnswer] = {}
        """The answers of the earlier run that were read from the store, by position there."""
        self._of_plan: dict[str, tuple[Task, EarlierAnswer]] = {}
        """The answers of the earlier run for tasks of the plan that read no others, by id: also for another state."""
        self._cache: dict[str, EarlierAnswer] = {}
        self._after: AnswerKeys | None = None

    def find(self, state: RunState, position: int) -> EarlierAnswer | None:
        """Return the answer for the next attempt of the task; None if the task has to run."""
        task = state.dag.tasks[position]
        if state.attempts[position]:
            return None
        if (answer := self.fork_keeps.get(task.id)) is not None:
            return answer
        if task.at_most_once or self.is_fresh(state, position):
            return None
        if self.before is not None and (answer := self._of_earlier_run(self.before, state, position)) is not None:
            return answer
        if task.cache is False or not self._cache or (key := self.keys_of(state).key(position)) is None:
            return None
        answer = self._cache.get(key)
        is_young = answer is not None and (task.cache is True or self._now - answer.at <= task.cache)
        return answer if is_young else None

    def _of_earlier_run(self, before: AnswerKeys, state: RunState, position: int) -> EarlierAnswer | None:
        task = state.dag.tasks[position]
        match = self._of_plan.get(task.id)
        if match is not None and match[0] is task:
            return match[1]
        run, after = self._run, self.keys_of(state)
        assert run is not None
        results, tasks = before.state.results, before.state.dag.tasks
        run_id = run.record.run_id
        for earlier in self.earlier_tasks(state, position):
            result = results.get(earlier)
            if result is None or result.status is not TaskStatus.COMPLETED or tasks[earlier].at_most_once:
                continue
            if have_same_answer(before, earlier, after, position):
                answer = self._read.get(earlier) or EarlierAnswer(
                    result.text, result.data, run.tasks[earlier].data, f"{REUSED}{run_id}", run_id, position=earlier
                )
                if not (task.depends_on or task.continues or task.files):
                    self._of_plan[task.id] = task, answer
                return answer
        return None

    def earlier_tasks(self, state: RunState, position: int) -> Iterator[int]:
        """Yield the positions in the earlier run of the tasks that are the same as the task, that with its id first."""
        assert self.before is not None
        task, before = state.dag.tasks[position], self.before.state
        of_id = before.dag.position(task.id) if task.id in before.dag else None
        if of_id is not None and have_same_identity(before, of_id, state, position):
            yield of_id
        yield from [each for each in self.before.with_identity(task_identity(state, position)) if each != of_id]

    def keys_of(self, state: RunState) -> AnswerKeys:
        """Return what determines the answers of a run of this plan."""
        if self._after is None or self._after.state is not state:
            self._after = AnswerKeys(state, self.backend_keys)
        return self._after

    def is_fresh(self, state: RunState, position: int) -> bool:
        """Return whether the task runs in any case, at the request of the caller."""
        if self._reuse is None or not self._reuse.fresh:
            return False
        return not _names_of(state, position).isdisjoint(self._reuse.fresh)

    async def read_run(self, run: StoredRun) -> None:
        """Read the answers of the earlier run. Raises StoreError, and PlaitError if a given result does not fit, or the
        run has too many rows.
        """
        assert self._reuse is not None
        require_whole(run)
        self.persons = await _asked_persons(run)
        excluded = frozenset[int]() if self._reuse.keep_answers else self.persons
        self._run, self.before = run, AnswerKeys(run.state, stored_answer_keys(run), excluded=excluded)
        for position in _shared_positions(run):
            if position in self.persons:
                self._read[position] = await _whole_answer(run, position, of_person=True)
            elif run.state.dag.tasks[position].files:  # their texts are part of what was sent
                self._read[position] = await _bare_answer(run, position)
        if self._reuse.roots is not None:
            self.fork_keeps = await _kept_by_fork(run, self._reuse, self.persons)

    async def read_cache(self, store: Store | None, dag: DAG) -> None:
        """Read the answers in `store` for the tasks of `dag` with `cache`. Runs that cannot be read are left out.
        Raises StoreError.
        """
        tasks = [task for task in dag if task.cache is not False and (dag.backend_of(task) or "") in self.backend_keys]
        if store is None or not tasks:
            return
        wanted = {_without_prompt(task, self.backend_keys[dag.backend_of(task) or ""]) for task in tasks}
        oldest = self._now - max(float("inf") if task.cache is True else task.cache for task in tasks)
        for record in await store.list_runs(_ALL_RUNS):
            if record.damaged or (record.ended_at is not None and parse_time(record.ended_at) < oldest):
                continue
            try:
                await self._add_to_cache(await stored_run(store, record.run_id), wanted, oldest)
            except (StoreError, RunNotFound):
                continue

    async def _add_to_cache(self, run: StoredRun, wanted: Collection[str], oldest: float) -> None:
        """Add the answers of the run since `oldest`, those of tasks with the `wanted` settings alone. Of two answers
        with one key the later counts.
        """
        backend_keys, positions = stored_answer_keys(run), list[int]()
        for position in _shared_positions(run):
            task = run.state.dag.tasks[position]
            name = run.state.moved.get(position) or run.state.dag.backend_of(task) or ""
            if name in backend_keys and _without_prompt(task, backend_keys[name]) in wanted:
                positions.append(position)
        no_source = set[str]()  # only answers that took no time may be taken over, or given by a person
        if not all(run.tasks[position].duration_s for position in positions):
            attempts = await run.store.list_attempts(run.record.run_id)
            no_source = {each.task_id for each in attempts if each.backend.startswith((REUSED, KEPT, GIVEN))}
        keys = AnswerKeys(run.state, backend_keys)
        for position in positions:
            record = run.tasks[position]
            if record.ended_at is None or record.task_id in no_source or (key := keys.key(position)) is None:
                continue
            at, other = parse_time(record.ended_at), self._cache.get(key)
            if at >= oldest and (other is None or other.at < at):
                self._cache[key] = replace(await _bare_answer(run, position), at=at)


def require_whole(run: StoredRun) -> None:
    """Raise InvalidRequest for a run that read its rows as it went: its answers are not held at once."""
    if run.state.dag.rows_file is not None:
        raise InvalidRequest(
            f"run {run.record.run_id} read its rows as it went, and no other run takes its answers over; `plait "
            "resume` continues it, also with --retry-failed"
        )


async def load_earlier_answers(
    store: Store | None,
    dag: DAG,
    backend_keys: Mapping[str, JsonValue],
    reuse: ReuseFrom | None,
    now: float,
    run: StoredRun | None = None,
) -> EarlierAnswers:
    """Return the answers that a run of `dag` may take over at the Unix time `now`. `run` is the earlier run, if read
    already. Raises StoreRequired, RunNotFound, StoreError.
    """
    answers = EarlierAnswers(backend_keys, reuse, now)
    if reuse is not None:
        await answers.read_run(run or await stored_run(store, reuse.like))
    await answers.read_cache(store, dag)
    return answers


def stored_answer_keys(run: StoredRun) -> Mapping[str, JsonValue]:
    """Return the answer keys of the backends of a stored run, by name."""
    keys: Mapping[str, JsonValue] | None = read_settings(run.record).get(ANSWER_KEYS)
    return keys or {}


def positions_of(state: RunState, names: Collection[str]) -> set[int]:
    """Return the tasks with an id in `names`, and the parts of the `for_each` tasks in `names`."""
    return {
        position
        for position, task in enumerate(state.dag.tasks)
        if task.id in names or group_of(task.id, task.item) in names
    }


def _names_of(state: RunState, position: int) -> set[str]:
    """Return the id of the task, that of its `for_each` task, and those of the tasks that call the task."""
    task = state.dag.tasks[position]
    names = {task.id, group_of(task.id, task.item) or task.id}
    by = state.added_by(position)
    if by is None or not (state.dag[by].calls or state.dag[by].gathers):
        return names
    return names | _names_of(state, state.dag.position(by))


def require_tasks(names: Iterable[str], tasks: Collection[Task], run_id: str | None = None) -> None:
    """Raise TaskNotFound if one of `names` is neither a task nor the `for_each` task of a part among `tasks`, which are
    those of the run, or of the plan without a run.
    """
    there = {task.id for task in tasks} | {group_of(task.id, task.item) or task.id for task in tasks}
    for name in names:
        if name not in there:
            if run_id is not None:
                raise task_not_found(run_id, name, there)
            raise TaskNotFound(f"the plan has no task {name!r}{nearest(name, there)}")


def fork_cone(state: RunState, roots: Collection[int]) -> set[int]:
    """Return `roots` and all tasks downstream: behind a dependency, a name in a prompt, or added by such a task.

    A `for_each` task behind one of its own parts only gathers anew: its other parts are not downstream.
    """
    added: dict[str, list[int]] = {}
    for position in range(len(state.dag)):
        if (by := state.added_by(position)) is not None:
            added.setdefault(by, []).append(position)
    cone, waiting, gathering = set(roots), list(roots), set[int]()
    while waiting:
        position = waiting.pop()
        further = [] if position in gathering else list(added.get(state.dag.tasks[position].id, ()))
        for dependent in state.dag.needed_by(position):
            # The whole of a `for_each` needs its parts, and a pair its partner, only part by part.
            gathers = state.added_by(position) == state.dag.tasks[dependent].id
            gathers = gathers or state.dag.pairs_up(dependent, position)
            if gathers and dependent not in cone:
                gathering.add(dependent)
            if not gathers and dependent in gathering:
                gathering.discard(dependent)  # the list itself may change: all parts are downstream
                cone.discard(dependent)
            further.append(dependent)
        waiting += [each for each in further if each not in cone]
        cone.update(further)
    return cone


def unfinished_tasks(state: RunState, with_results: Collection[int]) -> set[int]:
    """Return the tasks of an earlier run that a fork has to run because they are not completed; `with_results` are the
    tasks with a given result. A `for_each` task that waits for its parts only gathers: its completed parts are kept.
    """
    return {
        position
        for position, task in enumerate(state.dag.tasks)
        if state.statuses[position] is not TaskStatus.COMPLETED
        and position not in with_results
        and not (task.gathers and state.has_added(position))
    }


def has_taken_all(state: RunState, reuse: ReuseFrom) -> bool:
    """Return whether a fork with this state has taken over everything that it keeps, so that the fork can do without
    the earlier run: each task outside the cone is done. Unknown for a run with a policy, which may add further tasks.
    """
    with_results = positions_of(state, reuse.results)
    roots = positions_of(state, reuse.roots or ()) - with_results
    cone = fork_cone(state, roots) | (fork_cone(state, with_results) - with_results)
    return all(status in TASK_DONE or position in cone for position, status in enumerate(state.statuses))


async def given_answer(task: Task, text: str) -> EarlierAnswer:
    """Return the answer with the given text. Raises PlaitError if the text does not fit the output schema."""
    if task.output_schema is None:
        return EarlierAnswer(text, None, None, GIVEN, "")
    try:
        data = await read_answer(Schema(task.output_schema), text)
    except (Mismatch, BackendError) as error:
        raise PlaitError(f"the result given for task {task.id!r} does not fit its output_schema: {error}") from None
    return EarlierAnswer(text, data, to_json(data), GIVEN, "")


def _shared_positions(run: StoredRun) -> list[int]:
    """Return the completed tasks whose answers may be taken over."""
    statuses, tasks = run.state.statuses, run.state.dag.tasks
    return [i for i, task in enumerate(tasks) if statuses[i] is TaskStatus.COMPLETED and not task.at_most_once]


def _without_prompt(task: Task, backend_key: JsonValue) -> str:
    """Return the part of an answer key without place that is known before the prompt is rendered."""
    return to_json([settings_of(task), backend_key])


async def _kept_by_fork(run: StoredRun, reuse: ReuseFrom, persons: Collection[int]) -> dict[str, EarlierAnswer]:
    """Return the answers that a fork of `run` keeps, by task id. Raises StoreError; PlaitError if a given result does
    not fit.
    """
    state = run.state
    with_results = positions_of(state, reuse.results)
    cone = fork_cone(state, positions_of(state, reuse.roots or ()) - with_results) | fork_cone(state, with_results)
    if reuse.only is None:
        cone |= fork_cone(state, unfinished_tasks(state, with_results))
    answers: dict[str, EarlierAnswer] = {}
    for position, task in enumerate(state.dag):
        if task.id in reuse.results:
            answers[task.id] = await given_answer(task, reuse.results[task.id])
        elif state.statuses[position] is TaskStatus.COMPLETED and position not in cone:
            answer = await _whole_answer(run, position, of_person=position in persons)
            if reuse.only is None and not task.gathers and state.has_added(position):
                added = tuple(each for place, each in enumerate(state.dag) if state.added_by(place) == task.id)
                answer = replace(answer, adds=added)
            answers[task.id] = answer
    return answers


async def _asked_persons(run: StoredRun) -> set[int]:
    """Return the completed tasks with an answer of a person, in this run or kept from an earlier run. Raises
    StoreError.
    """
    state, reuse = run.state, ReuseFrom.of_settings(read_settings(run.record))
    persons = {position for position in state.answers if state.statuses[position] is TaskStatus.COMPLETED}
    if reuse is not None and (reuse.roots is not None or reuse.keep_answers):
        attempts = await run.store.list_attempts(run.record.run_id)
        task_ids = [each.task_id for each in attempts if each.backend == GIVEN or each.backend.startswith(KEPT)]
        persons.update(map(state.dag.position, task_ids))
    return persons


async def _bare_answer(run: StoredRun, position: int) -> EarlierAnswer:
    """Return the answer of a completed task, without its conversation."""
    result, run_id = run.state.results[position], run.record.run_id
    prompt = await sent_prompt(run, position) if run.state.dag.tasks[position].files else None
    return EarlierAnswer(result.text, result.data, run.tasks[position].data, f"{REUSED}{run_id}", run_id, prompt)


async def _whole_answer(run: StoredRun, position: int, *, of_person: bool) -> EarlierAnswer:
    """Return the answer of a completed task with the questions, the answers and the conversation, and its session."""
    state, task, record, run_id = run.state, run.state.dag.tasks[position], run.tasks[position], run.record.run_id
    result, prompt, messages = state.results[position], None, tuple[Message, ...]()
    if not task.gathers:
        prompt = await sent_prompt(run, position)
        if state.times_continued(position) or of_person:
            stored = await own_messages(run.store, run_id, state, task.id)
            messages = tuple(Message(each.role, each.content) for each in stored)  # the tokens were paid for there
    return EarlierAnswer(
        result.text,
        result.data,
        record.data,
        f"{KEPT if of_person else REUSED}{run_id}",
        run_id,
        prompt,
        messages=messages,
        session_id=None if position in state.moved else record.session_id,
    )
