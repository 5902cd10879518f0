"""Creation of a queued run, at most once per key.

The run id is derived from the key, so the store itself refuses a second run with the same key in any race. The settings
contain the key and a digest of the whole request. The digest distinguishes a repeated request from a different request
with the same key.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping

from plait import events
from plait.clock_and_ids import iso, new_run_id
from plait.errors import Conflict, KeyConflict, RunExists, StoreRequired
from plait.json_form import JsonInput
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import Batch, RunRecord
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import CheckingPolicy, Policy
from plait.runner.domain.task_checks import why_no_json
from plait.runner.engine.run_options import RunOptions, answer_keys, backend_names, require_policy_backends
from plait.runner.reuse.earlier_answers import ANSWER_KEYS
from plait.runner.state.codec import run_created
from plait.runner.state.task_files import with_digests
from plait.safe_text import clean_text

MOST_KEY_CHARACTERS = 200
KEYED = "key-"
"""The beginning of a run id that is made from a key."""
RESERVED_RUN_IDS = frozenset({"last"})
"""Words with a meaning in place of a run id."""
RESERVED_SETTINGS = (
    "answer_keys",
    "concurrency",
    "digest",
    "format",
    "growth",
    "inputs",
    "key",
    "policy",
    "reuse",
    "slots",
    "ticket",
)
"""Keys of the stored settings reserved by plait."""
_NOT_COMPARED = frozenset({"answer_keys", "concurrency", "digest", "slots", "ticket"})
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
    """Return the settings that say how many tasks of a run may run at once, for display by other processes."""
    slots: dict[str, JsonInput] = {"default": config.default, "limits": dict(config.limits)}
    return {"concurrency": config.concurrency, "slots": slots}


def with_policy(
    config: RunOptions, dag: DAG, settings: Mapping[str, JsonInput] | None, policy: Policy | None
) -> dict[str, JsonInput]:
    """Return `settings` extended by the data `resume` needs to recreate `policy`.

    Raises ValueError for a reserved key and for settings outside JSON, BackendMissing if a backend of the policy is
    missing, DAGError if the tasks that the policy would add to `dag` are invalid.
    """
    kept = dict(settings or {})
    if taken := [key for key in RESERVED_SETTINGS if key in kept]:
        raise ValueError(f"settings cannot have {', '.join(map(repr, taken))}, reserved for plait; use other keys")
    if why := why_no_json(kept):
        raise ValueError(f"settings have to be JSON, to be stored with the run: {why}")
    if policy is not None:
        require_policy_backends(config, policy)
        if isinstance(policy, CheckingPolicy):
            policy.check(dag)
        kept["policy"] = {"kind": policy.kind, "settings": dict(policy.settings())}
        if why := why_no_json(kept["policy"]):
            raise ValueError(f"the settings of policy {policy.kind!r} have to be JSON, to be stored: {why}")
    return kept


async def create_run(
    config: RunOptions, dag: DAG, run_id: str | None, key: str | None, settings: Mapping[str, JsonInput]
) -> tuple[str, bool]:
    """Store a queued run; `settings` come from `with_policy`. Return its id, and whether this call made it: of several
    calls with one key at the same time, one did. See `Runs.create`.
    """
    run_id, store = checked_run_id(run_id), config.store
    if key is not None and run_id is not None:
        raise ValueError("give a run id or a key, not both: the id of a run with a key is made from the key")
    if store is None:
        raise StoreRequired("this runner has no store, so no run can be queued; give the runner a store with store=...")
    dag = with_digests(dag)
    backend_names(dag, config)
    at, kept = iso(config.clock.wall()), {**settings, **slot_settings(config), ANSWER_KEYS: answer_keys(config)}
    if key is not None:
        run_id = run_id_of(key)
        kept |= {"key": key, "digest": _digest(run_created(at, run_id, dag, settings))}
    if run_id is not None:
        # Writing an identical RunCreated twice is idempotent, so two callers with the same id would not notice each
        # other. A random ticket makes each request distinct.
        kept["ticket"] = secrets.token_hex(8)
    run_id = run_id or new_run_id(config.clock)
    created = run_created(at, run_id, dag, kept)
    try:
        await store.write(Batch(run_id, 0, 1, (created,)))
    except Conflict as error:
        there = await store.get_run(run_id)
        if there is None:
            raise
        if key is None:
            raise RunExists(f"the store already has a run {run_id!r}; start it, or give another run id") from error
        stored = json.loads(there.settings)
        if stored.get("key") != key or stored.get("digest") != kept["digest"]:
            raise KeyConflict(
                f"key {key!r} was used at {there.created_at} for run {run_id}, with another DAG or other settings "
                f"({await _difference(store, created, there)}); give a new run a new key"
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
    asked = json.dumps([created.name, json.loads(created.settings), tasks], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(asked.encode()).hexdigest()


async def _difference(store: Store, asked: events.RunCreated, run: RunRecord) -> str:
    """Return a description of the first difference between the stored run and the request."""
    there = {task.task_id: task for task in await store.list_tasks(run.run_id)}
    for task in asked.tasks:
        stored = there.get(task.task_id)
        if stored is None:
            return f"the stored run has no task {task.task_id!r}"
        if stored.prompt != task.prompt:
            return f"task {task.task_id!r} has another prompt"
        if stored.depends_on != task.depends_on:
            return f"task {task.task_id!r} depends on other tasks"
        if (stored.backend, json.loads(stored.spec)) != (task.backend, json.loads(task.spec)):
            return f"task {task.task_id!r} has other fields"
    stored_settings, settings = json.loads(run.settings), json.loads(asked.settings)
    names = sorted((stored_settings.keys() | settings.keys()) - _NOT_COMPARED)
    different = [name for name in names if stored_settings.get(name) != settings.get(name)]
    said = f"; different are: {', '.join(different)}" if different else ""
    return f"the tasks given here are the same in the stored run{said}"
