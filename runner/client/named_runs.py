"""The run that a person names."""

from __future__ import annotations

from pathlib import Path

from plait.errors import InvalidRequest, RunNotFound
from plait.json_form import value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.reuse.earlier_answers import is_try
from plait.runner.state.stored_run import MOST_RUNS_SEARCHED, POSTED, read_settings
from plait.safe_text import is_utf8
from plait.statuses import RunStatus


@value
class RunsOfPlan:
    """The runs of a plan: those of the same file, else, for a plan that moved or came from a pipe, of the same name."""

    name: str
    path: Path | None
    """The file, absolute; None for a plan from a pipe."""


def runs_of_plan(path: Path | None) -> RunsOfPlan | None:
    """Return the runs of the plan file that a person names. Raises InvalidRequest, PlanError."""
    if path is None:
        return None
    from plait.runner.client.run_backends import read_plan_data  # noqa: PLC0415 - the reader of plans is slow to load

    return RunsOfPlan(str(read_plan_data(path).get("name") or path.stem), path.resolve())


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


async def _last_run(store: Store) -> RunRecord:
    for most in (1, MOST_RUNS_SEARCHED):
        for listed in await store.list_runs(most):
            if (run := await store.get_run(listed.run_id)) is not None and not is_try(read_settings(run)):
                return run
    raise RunNotFound("the store has no runs yet; `plait run PLAN` makes one")


async def _last_run_of(store: Store, plan: RunsOfPlan) -> RunRecord:
    runs = [run for run in await store.list_runs(MOST_RUNS_SEARCHED) if not run.damaged]
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
        settings = read_settings(run)
        if is_try(settings):
            continue
        if settings.get("plan") == path and not settings.get(POSTED):
            return run
        if listed.name == plan.name:
            same_name = same_name or run
    if same_name is None:
        named = repr(plan.name) if plan.path is None else plan.path.name
        hint = "; name the run by its id (`plait runs` lists all runs)" if runs else ""
        raise RunNotFound(f"the store has no run of {named} yet{hint}")
    return same_name


async def _id_by_prefix(store: Store, prefix: str) -> str:
    runs = await store.list_runs(MOST_RUNS_SEARCHED)
    found = [run.run_id for run in runs if run.run_id.startswith(prefix)] if prefix else []
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        raise InvalidRequest(f"{len(found)} runs begin with {prefix!r}: {shown}; give more of the id")
    raise RunNotFound(f"the store has no run {prefix!r}; `plait runs` lists all runs")
