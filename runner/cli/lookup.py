"""Lookup of the store, run, or task that a person names, and of the tasks that wait for a person."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from plait.backends.extras import install_command
from plait.errors import InvalidRequest, RunNotFound, StoreUnusable, TaskNotFound
from plait.events import RunCreated, TasksAdded
from plait.json_form import JsonValue
from plait.persistence import SQLiteStore
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli.backends import read_plan_data
from plait.runner.cli.command_exits import print_note
from plait.runner.cli.command_options import DEFAULT_STORE, ServerAddress, StorePlace, command_line, is_utf8
from plait.runner.cli.terminal_output import age, as_line
from plait.runner.domain.asked_question import OpenQuestion, parse_time
from plait.runner.domain.dag import nearest
from plait.runner.engine.lease import LEASE_SECONDS, Liveness, liveness
from plait.runner.reuse.earlier_answers import is_try
from plait.runner.state.stored_run import stored_run
from plait.runner.views.list_questions import waiting_tasks
from plait.runner.views.read_views import shown_status
from plait.statuses import RunStatus

if TYPE_CHECKING:
    from plait.persistence import PostgresStore

AnyStore: TypeAlias = "SQLiteStore | PostgresStore"

MAX_RUNS_SEARCHED = 10_000
"""Number of runs searched for the beginning of an id."""


def read_only_store(place: StorePlace) -> AnyStore:
    """Return the store at `place`, to be read only."""
    return open_store(place, "read")


def existing_store(place: StorePlace) -> AnyStore:
    """Return the store at `place`, which has to exist."""
    return open_store(place, "existing")


def open_store(place: StorePlace, mode: Literal["create", "existing", "read"] = "create") -> AnyStore:
    """Return the store at `place`, a SQLite file or a PostgreSQL database, which `async with` opens."""
    if isinstance(place, Path):
        if mode != "create":
            _check_default_store(place)
        return SQLiteStore(place, mode=mode)
    return open_server(place, mode)


def open_server(place: ServerAddress, mode: Literal["create", "existing", "read"] = "create") -> PostgresStore:
    """Return the store on the server. Raises InvalidRequest without the driver."""
    if find_spec("asyncpg") is None:
        raise InvalidRequest(
            f"a store on a PostgreSQL server needs the extra `postgres`; run: {install_command('postgres')}"
        )
    from plait.persistence.postgres_store import PostgresStore  # noqa: PLC0415 - of an extra

    try:
        return PostgresStore(place.dsn, mode=mode)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _check_default_store(path: Path) -> None:
    if path == DEFAULT_STORE and not path.exists():
        raise StoreUnusable(
            f"there is no store {path} in {Path.cwd()}; `plait run PLAN` makes one, --store PATH names another"
        )


@dataclass(frozen=True, slots=True)
class RunsOfPlan:
    """The runs of a plan: those of the same file, else, for a plan that moved or came from a pipe, of the same name."""

    name: str
    path: Path | None
    """The file, absolute; None for a plan from a pipe."""


def runs_of_plan(path: Path | None) -> RunsOfPlan | None:
    """Return the runs of the plan file that a person names. Raises InvalidRequest, PlanError."""
    if path is None:
        return None
    try:
        name = read_plan_data(path).get("name")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); check --plan") from None
    return RunsOfPlan(str(name or path.stem), path.resolve())


async def find_run(store: Store, word: str, of: RunsOfPlan | None = None) -> RunRecord:
    """Return the run with the id `word`, the only run whose id begins with `word`, or for `last` the newest run: `of` a
    plan, or of any. A `try`, which runs one task, is never `last`, and of a plan only then a run that was interrupted,
    cancelled or never begun, if no other has run to its end.
    """
    if not is_utf8(word):
        raise RunNotFound(f"the store has no run {word!r}; `plait runs` lists all runs")
    if word == "last":
        return await (_last_run(store) if of is None else _last_run_of(store, of))
    record = await store.get_run(word)
    if record is None:
        record = await store.get_run(await _id_by_prefix(store, word))
    if record is None:
        raise RunNotFound(f"run {word} is gone from the store")
    return record


def print_watch_notice(run: RunRecord) -> None:
    """Print why the command takes half a minute, if the owner of the run cannot be judged from this machine."""
    owner = run.owner
    if owner is not None and liveness(owner) is Liveness.UNKNOWN:
        print_note(
            f"process {owner.pid} on {as_line(owner.host)} owns run {run.run_id} and cannot be checked from this "
            f"machine; waiting up to {LEASE_SECONDS:g} s for a renewal of the lease"
        )


async def _last_run(store: Store) -> RunRecord:
    for most in (1, MAX_RUNS_SEARCHED):
        for listed in await store.list_runs(most):
            if (run := await store.get_run(listed.run_id)) is not None and not is_try(json.loads(run.settings)):
                return run
    raise RunNotFound("the store has no runs yet; `plait run PLAN` makes one")


async def _last_run_of(store: Store, plan: RunsOfPlan) -> RunRecord:
    runs = [run for run in await store.list_runs(MAX_RUNS_SEARCHED) if not run.damaged]
    path, same_name = str(plan.path), None
    # Those of the name first, then those that are whole, then those that began (a queued run holds no answers), each
    # kind newest first.
    whole = {RunStatus.COMPLETED, RunStatus.FAILED}
    for listed in sorted(
        runs, key=lambda run: (run.name != plan.name, run.status not in whole, run.started_at is None)
    ):
        if listed.name != plan.name and (same_name is not None or plan.path is None):
            break
        run = await store.get_run(listed.run_id)
        if run is None:
            continue
        settings: dict[str, Any] = json.loads(run.settings)
        if is_try(settings):
            continue
        if settings.get("plan") == path and not settings.get("posted"):
            return run
        if listed.name == plan.name:
            same_name = same_name or run
    if same_name is None:
        named = repr(plan.name) if plan.path is None else plan.path.name
        hint = "; name the run by its id (`plait runs` lists all runs)" if runs else ""
        raise RunNotFound(f"the store has no run of {named} yet{hint}")
    return same_name


async def _id_by_prefix(store: Store, prefix: str) -> str:
    runs = await store.list_runs(MAX_RUNS_SEARCHED)
    found = [run.run_id for run in runs if run.run_id.startswith(prefix)] if prefix else []
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(as_line(run_id) for run_id in found[:5]) + (", ..." if len(found) > 5 else "")
        raise InvalidRequest(f"{len(found)} runs begin with {prefix!r}: {shown}; give more of the id")
    raise RunNotFound(f"the store has no run {prefix!r}; `plait runs` lists all runs")


async def find_newest_resumable(store: Store, retry_failed: bool) -> RunRecord:
    """Return the newest run that `resume` can continue."""
    wanted = {RunStatus.QUEUED, RunStatus.INTERRUPTED, RunStatus.WAITING_INPUT}
    if retry_failed:
        wanted.add(RunStatus.FAILED)
    refused: RunRecord | None = None
    for run in await store.list_runs(MAX_RUNS_SEARCHED):
        if not run.damaged and shown_status(run) in wanted:
            found = await find_run(store, run.run_id)
            if stores_backends(found):
                return found
            refused = refused or found
    if refused is not None:  # `resume` prints the reason
        return refused
    kinds = "queued, interrupted, waiting" + (" or failed" if retry_failed else " for a person")
    hint = "" if retry_failed else " (--retry-failed includes failed runs)"
    raise InvalidRequest(f"nothing to resume: no run in the store is {kinds}{hint}; `plait runs` lists all runs")


def stores_backends(run: RunRecord) -> bool:
    """Return whether the stored settings name the backends of the run, as for every run made by the command. Only such
    runs can be resumed by the command. `run` includes its settings.
    """
    settings = json.loads(run.settings)
    kinds = {"backends": dict, "default_backend": str, "folder": str}
    return all(isinstance(settings.get(name), kind) for name, kind in kinds.items())


async def find_task(store: Store, run: RunRecord, task_id: str) -> TaskRecord:
    """Return the task of the run with the id `task_id`."""
    for task in await store.list_tasks(run.run_id, task_id) if is_utf8(task_id) else ():
        return task
    hint = nearest(task_id, [task.task_id for task in await store.list_tasks(run.run_id)])
    raise TaskNotFound(f"run {run.run_id} has no task {task_id!r}{hint or f'; `plait show {run.run_id}` lists them'}")


_LONGEST_VALUE = 120


@dataclass(frozen=True, slots=True)
class WaitingQuestion:
    """A task that waits for a person, for display."""

    run_id: str
    task_id: str
    attempt: int
    text: str
    """The question, or why a task marked at_most_once waits."""
    question: OpenQuestion | None
    """The question of the task; None if the process of the task died, and a person decides."""

    def answer_command(self, path: StorePlace) -> str:
        """Return the command that answers, with a placeholder for the answer."""
        if self.question is None:
            return command_line(path, "answer", self.run_id, self.task_id, "--done", "TEXT")
        schema = self.question.schema
        wanted = "TEXT" if schema is None else "JSON" if schema else "VALUE"
        return command_line(path, "answer", self.run_id, self.task_id, wanted)

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield further facts about the question, each with its name."""
        question = self.question
        if question is None:
            return
        if question.schema is not None:
            yield (
                "wants",
                as_line(describe_schema(cast("Mapping[str, JsonValue]", question.schema)), _LONGEST_VALUE),
            )
        if question.default is not None:
            yield "default", as_line(_dump(question.default), _LONGEST_VALUE)
        if question.deadline_at is not None:
            yield "deadline", _format_deadline(question, question.deadline_at)


async def list_waiting(store: Store, run_id: str) -> list[WaitingQuestion]:
    """Return the waiting tasks of the run, in the order of the DAG, except those whose answer is stored already. Raises
    StoreError, RunNotFound.
    """
    found = await waiting_tasks(await stored_run(store, run_id))
    return [WaitingQuestion(run_id, one.task_id, one.attempt, one.text, one.asks) for one in found]


def _format_deadline(question: OpenQuestion, at: str) -> str:
    left = parse_time(at) - time.time()
    if left > 0:
        return f"{at}, in {age(left)}"
    return f"{at}, passed: `plait resume` " + ("fails the task" if question.default is None else "takes the default")


def describe_schema(schema: Mapping[str, JsonValue]) -> str:
    """Describe the values that a JSON Schema allows, in a few words."""
    allowed, kind, fields = schema.get("enum"), schema.get("type"), schema.get("properties")
    if isinstance(allowed, list) and allowed:
        return "one of " + ", ".join(map(_dump, allowed))
    if kind == "object" and isinstance(fields, dict) and fields:
        return f"an object with {', '.join(fields)}"
    if kind == "array" and isinstance(items := schema.get("items"), dict):
        return f"a list, each {describe_schema(items)}"
    if isinstance(kind, str) and schema.keys() <= {"type", "title", "description"}:
        return kind
    return "JSON that matches " + _dump(dict(schema)) if schema else "any JSON, or text"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


POLICY = "the policy"


async def find_adders(store: Store, run: RunRecord, tasks: Sequence[TaskRecord]) -> dict[str, str]:
    """Return the origin of each added task by id: the id of the task that added it, or `POLICY`."""
    by_policy = await _added_by_policy(store, run) if run.policy_state is not None else set[int]()
    found = {task.task_id: POLICY if task.position in by_policy else task.added_by for task in tasks}
    return {task_id: by for task_id, by in found.items() if by is not None}


async def _added_by_policy(store: Store, run: RunRecord) -> set[int]:
    """Return the positions of tasks that the policy added. Only the events of the run record this."""
    positions: set[int] = set()
    end = after = 0
    while page := await store.list_events(run.run_id, after):
        for event in page:
            if event.kind in {RunCreated.kind, TasksAdded.kind}:
                start, end = end, end + json.loads(event.detail)["tasks"]
                if event.kind == TasksAdded.kind and event.task_id is None:
                    positions.update(range(start, end))
        after = page[-1].seq
    return positions
