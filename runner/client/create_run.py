"""A new run: executed in this process, or stored as queued, at most once per key; also one that begins from a point of
a stored run, as a fork: from a task on, or one task alone beside the run.

The run id is derived from the key, so the store itself refuses a second run with the same key in any race. The settings
contain the key and a digest of the whole request. The digest distinguishes a repeated request from a different request
with the same key.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from plait import events
from plait.clock_and_ids import iso, new_run_id
from plait.errors import Conflict, KeyConflict, PlaitError, RunExists, StoreRequired, nearest
from plait.json_form import JsonInput, as_json, to_json, value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import Batch
from plait.runner.domain.dag import DAG, group_of
from plait.runner.domain.notify_target import NOTIFY
from plait.runner.domain.policy import CheckingPolicy, Policy
from plait.runner.domain.prompt_values import named, names_of
from plait.runner.domain.run_result import RunResult
from plait.runner.domain.task_checks import why_no_json
from plait.runner.engine.lease import claim_for_this_process
from plait.runner.engine.live_run import LiveRun, Run
from plait.runner.engine.run_lifecycle import execute_run
from plait.runner.engine.run_options import (
    RECORDED,
    RunOptions,
    answer_keys,
    backend_names,
    prepared,
    require_policy_backends,
)
from plait.runner.policies import policy_of
from plait.runner.recovery.resume import finish_restarts
from plait.runner.reuse.earlier_answers import (
    ANSWER_KEYS,
    ReuseFrom,
    given_answer,
    load_earlier_answers,
    positions_of,
    require_tasks,
    require_whole,
    unfinished_tasks,
)
from plait.runner.state.budget import BUDGET, budget_setting, new_budget
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import (
    PARK,
    PRIORITY,
    ROWS_FILE,
    SETTINGS_FORMAT,
    StoredPolicy,
    StoredRun,
    read_settings,
    stored_run,
)
from plait.safe_text import clean_text
from plait.statuses import TaskStatus
from plait.task import FailureMode, Task, with_prompt

if TYPE_CHECKING:
    from plait.runner.client.reuse_preview import PreviewBasis, ReusePreview

MOST_KEY_CHARACTERS = 200
KEYED = "key-"
"""The beginning of a run id that is made from a key."""
RESERVED_RUN_IDS = frozenset({"last"})
"""Words with a meaning in place of a run id."""
RESERVED_SETTINGS = (
    "answer_keys",
    BUDGET,
    "concurrency",
    "digest",
    "format",
    "growth",
    "inputs",
    "key",
    NOTIFY,
    PARK,
    "policy",
    PRIORITY,
    "reuse",
    ROWS_FILE,
    "slots",
    "ticket",
)
"""Keys of the stored settings reserved by plait."""
_NOT_COMPARED = frozenset({"answer_keys", "concurrency", "digest", PARK, "plan_sha256", PRIORITY, "slots", "ticket"})
"""Keys of the stored settings that are no part of the digest."""
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def checked_run_id(run_id: str | None) -> str | None:
    """Return `run_id`. Raises ValueError if the id is not allowed."""
    if run_id is not None and (not _RUN_ID.fullmatch(run_id) or run_id in RESERVED_RUN_IDS):
        raise ValueError(
            f"run id {run_id[:80]!r} must have 1 to 128 letters, digits, '.', '_' or '-', and not begin with '.', "
            f"and must not be 'last'"
        )
    return run_id


def slot_settings(config: RunOptions) -> dict[str, JsonInput]:
    """Return the settings that say how many tasks of a run may run at once, for display by other processes, whether
    the run goes on by itself, and before which others it comes.
    """
    slots: dict[str, JsonInput] = {"default": config.default, "limits": dict(config.limits)}
    if config.spares:
        slots["spares"] = {name: list(spares) for name, spares in config.spares.items()}
    parks: dict[str, JsonInput] = {PARK: True} if config.park else {}
    priority: dict[str, JsonInput] = {PRIORITY: config.priority} if config.priority else {}
    return {"concurrency": config.concurrency, "slots": slots, **parks, **priority}


def with_policy(
    config: RunOptions, dag: DAG, settings: Mapping[str, JsonInput] | None, policy: Policy | None
) -> dict[str, JsonInput]:
    """Return `settings` extended by the data `resume` needs to recreate `policy`.

    Raises ValueError for a reserved key and for settings outside JSON, BackendMissing if a backend of the policy is
    missing, DAGError if the tasks that the policy would add to `dag` are invalid.
    """
    stored = dict(settings or {})
    if taken := [key for key in RESERVED_SETTINGS if key in stored]:
        raise ValueError(f"settings cannot have {', '.join(map(repr, taken))}, reserved for plait; use other keys")
    if why := why_no_json(stored):
        raise ValueError(f"settings have to be JSON, to be stored with the run: {why}")
    if policy is not None:
        require_policy_backends(config, policy)
        if isinstance(policy, CheckingPolicy):
            policy.check(dag)
        stored["policy"] = {"kind": policy.kind, "settings": dict(policy.settings())}
        if why := why_no_json(stored["policy"]):
            raise ValueError(f"the settings of policy {policy.kind!r} have to be JSON, to be stored: {why}")
    return stored


def _requested(config: RunOptions, budget: float | None) -> dict[str, JsonInput]:
    """Return the settings about money and notices, which are parts of the request of a run with a key."""
    notices: dict[str, JsonInput] = {NOTIFY: [as_json(one) for one in config.notify]} if config.notify else {}
    return {**budget_setting(budget, unpriced=config.unpriced), **notices}


def new_run(
    config: RunOptions,
    dag: DAG,
    run_id: str | None = None,
    *,
    settings: Mapping[str, JsonInput] | None = None,
    policy: Policy | None = None,
    like: str | ReusePreview | ReuseFrom | None = None,
    fresh: Collection[str] = (),
    keep_answers: bool = False,
) -> Run:
    """Return a new run, to begin. Raises as `ParallelRunner.run`."""
    reuse, basis = _reuse(config, dag, like, fresh, keep_answers)
    if basis is None or any(task.files for task in dag):  # a file may have changed since the preview
        dag = prepared(dag, config)
        names = backend_names(dag, config)
    else:
        dag, names = basis.dag, [*basis.names]
    if dag.rows_file is not None and config.store is None:
        raise StoreRequired("a run that reads its rows as it goes keeps its results in a store only; give it a store")
    run_id = checked_run_id(run_id) or new_run_id(config.clock)
    stored = {**with_policy(config, dag, settings, policy), **slot_settings(config)}
    stored |= _requested(config, config.budget)
    if config.store is None and config.notify:
        raise StoreRequired(
            "a notice reports what is stored, and this run has no store; give the run a store, or leave `notify` out"
        )
    if config.store is not None:
        stored[ANSWER_KEYS] = answer_keys(config)
    if reuse is not None:
        require_tasks(() if reuse.roots is not None else reuse.fresh, dag.tasks)
        stored |= reuse.as_settings()

    async def drive(live: LiveRun) -> RunResult:
        if basis is not None:
            live.answers = basis.answers
        elif reuse is not None or dag.caches:
            now = config.clock.wall()
            live.answers = await load_earlier_answers(config.store, dag, answer_keys(config), reuse, now)
        live.policy, live.notify, live.priority = policy, config.notify, config.priority or 0
        await live.take_budget(new_budget(config.budget, dag), dag, names, unpriced=config.unpriced)
        at = live.created_at = live.stamp()
        live.owner = claim_for_this_process(at)
        claim = events.RunClaimed(at, live.owner, config.clock.wall() + config.lease)
        live.first_events = _run_created(at, run_id, dag, stored), events.RunStarted(at, run_id), claim
        vars(dag).pop("stored", None)  # the events hold it until it is stored
        live.state, live.task_backends = RunState(dag.copy(), keeps_all=config.store is None), names
        return await finish_restarts(live, await execute_run(live))

    return Run(LiveRun(run_id=run_id, options=config, parks=config.park), drive)


def _reuse(
    config: RunOptions,
    dag: DAG,
    like: str | ReusePreview | ReuseFrom | None,
    fresh: Collection[str],
    keep_answers: bool,
) -> tuple[ReuseFrom | None, PreviewBasis | None]:
    """Return which answers are taken over, and the basis of a preview of this run. Raises ValueError for `fresh` or
    `keep_answers` without `like`.
    """
    if isinstance(like, ReuseFrom):
        return like, None
    if isinstance(like, str):
        return ReuseFrom(like, tuple(fresh), keep_answers=keep_answers), None
    if like is not None:
        reuse = ReuseFrom(like.like, tuple(fresh), keep_answers=keep_answers)
        return reuse, like.basis_for(config, dag, reuse)
    if fresh:
        raise ValueError("fresh names tasks that take no answer over; give the earlier run with like=RUN_ID, too")
    if keep_answers:
        raise ValueError("keep_answers keeps the answers of persons in an earlier run; give the run with like=RUN_ID")
    return None, None


def _run_created(at: str, run_id: str, dag: DAG, settings: Mapping[str, JsonInput]) -> events.RunCreated:
    """Return the event that stores the run with its whole DAG."""
    stored: dict[str, Any] = {**settings, "format": SETTINGS_FORMAT}
    if dag.growth is not None:
        stored["growth"] = asdict(dag.growth)
    if dag.rows_file is not None:
        stored[ROWS_FILE] = asdict(dag.rows_file)
    inputs, rows = dag.stored
    return events.RunCreated(at, run_id, dag.name, f'{to_json(stored)[:-1]},"inputs":{inputs}}}', rows)


async def create_run(
    config: RunOptions,
    dag: DAG,
    run_id: str | None,
    key: str | None,
    settings: Mapping[str, JsonInput],
    *,
    budget: float | None = None,
    priority: int | None = None,
) -> tuple[str, bool]:
    """Store a queued run; `settings` come from `with_policy`. Return its id, and whether this call made it: of several
    calls with one key at the same time, one did. See `Runs.create`.
    """
    run_id, store = checked_run_id(run_id), config.store
    if key is not None and run_id is not None:
        raise ValueError("give a run id or a key, not both: the id of a run with a key is made from the key")
    if store is None:
        raise StoreRequired("this runner has no store, so no run can be queued; give the runner a store with store=...")
    dag = prepared(dag, config)
    backend_names(dag, config)
    budget = config.budget if budget is None else budget
    settings = {**settings, **_requested(config, budget)}
    at = iso(config.clock.wall())
    stored_settings = {**settings, **slot_settings(config), ANSWER_KEYS: answer_keys(config)}
    stored_settings |= {} if priority is None else {PRIORITY: priority}
    if key is not None:
        run_id = run_id_of(key)
        compared = {name: value for name, value in settings.items() if name not in _NOT_COMPARED}
        stored_settings |= {"key": key, "digest": _digest(_run_created(at, run_id, dag, compared))}
    if run_id is not None:
        # Writing an identical RunCreated twice is idempotent, so two callers with the same id would not notice each
        # other. A random ticket makes each request distinct.
        stored_settings["ticket"] = secrets.token_hex(8)
    run_id = run_id or new_run_id(config.clock)
    created = _run_created(at, run_id, dag, stored_settings)
    try:
        await store.write(Batch(run_id, 0, 1, (created,)))
    except Conflict as error:
        there = await store.get_run(run_id)
        if there is None:
            raise
        if key is None:
            raise RunExists(f"the store already has a run {run_id!r}; start it, or give another run id") from error
        stored = read_settings(there)
        if stored.get("key") != key or stored.get("digest") != stored_settings["digest"]:
            raise KeyConflict(
                f"key {key!r} was used at {there.created_at} for run {run_id}, with another DAG, other inputs or "
                f"other settings; give a new run a new key"
            ) from error
        return run_id, False
    return run_id, True


def run_id_of(key: str) -> str:
    """Return the run id derived from `key`. Raises ValueError if the key is empty or too long."""
    if not 0 < len(key) <= MOST_KEY_CHARACTERS or key != clean_text(key):
        raise ValueError(f"a key is text of 1 to {MOST_KEY_CHARACTERS} characters, not {key[:80]!r}")
    return f"{KEYED}{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _digest(created: events.RunCreated) -> str:
    """Return a digest of the request, independent of the order of mappings."""
    tasks = [(t.task_id, t.prompt, t.depends_on, t.backend, json.loads(t.spec)) for t in created.tasks]
    content = json.dumps([created.name, json.loads(created.settings), tasks], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


@value
class Fork:
    """A new run to be made from a stored run."""

    dag: DAG
    """The tasks of the new run."""
    policy: Policy | None
    """The policy of the stored run."""
    settings: Mapping[str, Any]
    """The settings that are stored with the new run."""
    reuse: ReuseFrom
    """The stored run, and the point from which the new run goes on."""


async def plan_fork(
    store: Store | None,
    run_id: str,
    start: str,
    *,
    prompts: Mapping[str, str],
    inputs: Mapping[str, JsonInput],
    results: Mapping[str, str],
    only: bool = False,
    backend: str | None = None,
) -> Fork:
    """Return the fork of the run from the task `start` on, or, with `only`, a run of that task alone on its recorded
    inputs: see `Runs.fork`.
    """
    run = await stored_run(store, run_id)
    require_whole(run)
    require_tasks([start, *prompts, *results], run.state.dag.tasks, run_id)
    _require_inputs(run, inputs)
    if only:
        if results or prompts.keys() - {start}:
            raise PlaitError(f"only task {start!r} runs, so no other task takes a prompt or a result")
        return _fork_of_one(run, start, prompts.get(start), inputs, backend)
    if backend is not None:
        raise PlaitError("another backend is for a fork of one task only")
    (created,) = await run.store.list_events(run.record.run_id, 0, 1, events.RunCreated.kind)
    tasks = run.state.dag.tasks[: json.loads(created.detail)["tasks"]]  # without those that were added later
    added = {task.id for task in run.state.dag} - {task.id for task in tasks}
    added -= {group_of(task.id, task.item) for task in tasks}
    for name in prompts:
        if name in added:
            raise PlaitError(f"the prompt of {name!r} was made during the run; change the task that added it")
    for name, text in results.items():
        if name not in run.state.dag or run.state.dag[name].gathers:
            raise PlaitError(
                f"task {name!r} gathers the results of its parts; give the results of parts{_a_part(run, name)}"
            )
        await given_answer(run.state.dag[name], text)
    dag = run.state.dag
    edited = [task if (prompt := edited_prompt(task, prompts)) is None else with_prompt(task, prompt) for task in tasks]
    changed = DAG(edited, name=dag.name, inputs={**dag.inputs, **inputs}, growth=dag.growth)
    unfinished = unfinished_tasks(run.state, positions_of(run.state, results))
    roots = {start, *prompts, *_reading(run, inputs), *(dag.tasks[position].id for position in unfinished)}
    stored = StoredPolicy.of(run.record)
    policy = None if stored is None else policy_of(stored.kind, stored.settings)
    reuse = ReuseFrom(run_id, (start,), roots=tuple(sorted(roots)), results=dict(results))
    return Fork(changed, policy, _settings(run), reuse)


def edited_prompt(task: Task, prompts: Mapping[str, str]) -> str | None:
    """Return the new prompt of the task among `prompts`, by task id; the id of a `for_each` task stands for its parts.
    None without one.
    """
    return prompts.get(task.id, prompts.get(group_of(task.id, task.item) or ""))


def _fork_of_one(
    run: StoredRun, task_id: str, prompt: str | None, inputs: Mapping[str, JsonInput], backend: str | None
) -> Fork:
    dag = run.state.dag
    if task_id not in dag or dag[task_id].gathers:
        raise PlaitError(f"task {task_id!r} has parts; try one of them{_a_part(run, task_id)}")
    task = dag[task_id]
    if prompt is not None:
        task = with_prompt(task, prompt)
    if backend is not None:
        task = replace(task, backend=backend, arguments=())
    task = replace(task, adds_tasks=False, for_each=None)
    names = _read_by(run, task)
    absent = _absent(run, task_id, names)
    recorded = [_as_recorded(run, name, {*names}, task.backend, has_result=name not in absent) for name in names]
    task = replace(task, depends_on=tuple(each.id for each in recorded if each.id != task.continues))
    task = replace(task, join="all", race=False)  # what it started without is absent here, too
    reuse = ReuseFrom(run.record.run_id, (task_id,), roots=(task_id,), only=task_id)
    return Fork(DAG([*recorded, task], name=dag.name, inputs={**dag.inputs, **inputs}), None, _settings(run), reuse)


def _require_inputs(run: StoredRun, inputs: Mapping[str, JsonInput]) -> None:
    declared = run.state.dag.inputs
    for name in inputs:
        if name not in declared:
            there_are = f"; the run has {', '.join(map(repr, declared))}" if declared else "; the run has no inputs"
            raise PlaitError(f"there is no input {name!r}{nearest(name, declared) or there_are}")
        parts = [task.item for task in run.state.dag if group_of(task.id, task.item) is not None]
        value = declared[name]
        if isinstance(value, list) and value and all(item in parts for item in value):
            raise PlaitError(
                f"the plan made a task for each element of input {name!r}, so a fork cannot change the input; run the "
                f"plan with the new value like this run (plait run PLAN --set {name}=... --like {run.record.run_id})"
            )


def _reading(run: StoredRun, inputs: Mapping[str, JsonInput]) -> Iterable[str]:
    """Return the tasks whose prompts name one of the changed inputs."""
    changed = {name for name, value in inputs.items() if run.state.dag.inputs[name] != value}
    for task in run.state.dag if changed else ():
        names = names_of(task).names
        if "inputs" in names or changed & set(names):
            yield task.id


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return the settings of the caller, without those of plait."""
    stored = read_settings(run.record)
    return {name: value for name, value in stored.items() if name not in RESERVED_SETTINGS}


def _read_by(run: StoredRun, task: Task) -> list[str]:
    """Return the tasks that determine the prompt and the conversation of `task`, in the order of the run."""
    dag, names = run.state.dag, named(task)
    if "results" in names:
        names |= set(task.upstream)
    before = task.continues
    while before is not None:
        names |= {before, *named(_place_of(dag[before]))}
        before = dag[before].continues
    readers = {name for name in names if name in dag}
    return sorted(readers, key=dag.position)


def _a_part(run: StoredRun, name: str) -> str:
    """Return the end of a message that refuses the task: the id of one of its parts, if it has any yet."""
    if name in run.state.dag and run.state.dag[name].calls:
        parts = run.state.parts.get(run.state.dag.position(name), ())
        return f": {run.state.dag.tasks[parts[0]].id}" if parts else ", once it has begun"
    return f": {name}.1"


def _absent(run: StoredRun, task_id: str, names: Collection[str]) -> set[str]:
    """Return which of the tasks in `names` are read as empty by the task. Raises PlaitError if it has never begun, and
    cannot begin without one of them.
    """
    dag, state = run.state.dag, run.state
    results = state.results_for(dag[task_id])
    there = {result.id for result in results.values() if result.status is TaskStatus.COMPLETED}
    absent = {name for name in names if name not in there}
    for name in absent if state.attempts[dag.position(task_id)] == 0 else ():
        status = state.statuses[dag.position(name)]
        is_soft = status is TaskStatus.FAILED and dag[name].failure_mode is not FailureMode.HARD
        if status is not TaskStatus.SKIPPED and not is_soft:
            raise PlaitError(f"task {name!r} of run {run.record.run_id} has no result yet ({status.value})")
    return absent


def _as_recorded(run: StoredRun, name: str, names: Set[str], backend: str | None, *, has_result: bool) -> Task:
    """Return the task as a mere holder of its recorded result, in a conversation of tasks in `names`; without a result
    it is skipped. That of a command or a called plan names the `backend` that is needed anyway.
    """
    task = run.state.dag[name]
    if not (task.run or task.call):
        backend = run.state.dag.backend_of(task)
    schema, when = (task.output_schema, None) if has_result else (None, "false")
    continues = task.continues if task.continues in names else None
    holder = Task(name, RECORDED, (), backend, continues=continues, output_schema=schema, when=when)
    place = _place_of(task)
    upstream = [other for other in named(place) if other in run.state.dag]
    if task.cwd is None or task.run or not names >= {*upstream}:
        return holder
    # The tried task works where the one does whose conversation it continues.
    return replace(
        holder, depends_on=upstream, cwd=place.cwd, item=place.item, inputs=place.inputs, aliases=place.aliases
    )


def _place_of(task: Task) -> Task:
    """Return the task as far as it determines its folder."""
    place = Task(task.id, RECORDED, cwd=task.cwd, item=task.item, inputs=task.inputs)
    names = names_of(place).names
    return replace(place, aliases={name: ids for name, ids in task.aliases.items() if name in names})
