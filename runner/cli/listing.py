"""What `plait runs` prints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from persistence.records import RunRecord
from runner.cli.exits import COMPLETED, say, tell
from runner.cli.lookup import shown_status, store_for_reading
from runner.cli.report import tell_value
from runner.cli.sections import tell_table
from runner.cli.text import age, dollars, one_line, size, tokens
from runner.looking import run_info, run_value
from runner.owner import Liveness, liveness


async def list_runs(path: Path, limit: int, as_json: bool) -> int:
    """The runs in the store, newest first."""
    async with store_for_reading(path) as store:
        found = await store.list_runs(limit + 1)
    runs = found[:limit]
    if as_json:
        tell_value([_value(run) for run in runs])
        return COMPLETED
    if not runs:
        return _tell_no_runs()
    rows = [("RUN", "NAME", "STATUS", "TASKS", "TOKENS", "AGE"), *map(_run_row, runs)]
    tell_table(rows, 2, [None, *(shown_status(run) for run in runs)], frozenset({3, 4, 5}))
    _say_if_more(runs, found)
    return COMPLETED


async def list_runs_at_length(path: Path, limit: int, as_json: bool) -> int:
    """The same with what they cost, the bytes that they take in the store, and the process that runs or ran them."""
    async with store_for_reading(path) as store:
        found = await store.list_runs(limit + 1)
        sizes = await store.run_sizes()
    runs = found[:limit]
    if as_json:
        tell_value([{**_value(run), **_long_value(run, sizes.get(run.run_id, 0))} for run in runs])
        return COMPLETED
    if not runs:
        return _tell_no_runs()
    head = ("RUN", "NAME", "STATUS", "TASKS", "TOKENS", "COST", "SIZE", "AGE", "OWNER")
    rows = [head, *(_long_row(run, sizes.get(run.run_id, 0)) for run in runs)]
    tell_table(rows, 2, [None, *(shown_status(run) for run in runs)], frozenset({3, 4, 5, 6, 7}))
    _say_if_more(runs, found)
    return COMPLETED


def _say_if_more(runs: Sequence[RunRecord], found: Sequence[RunRecord]) -> None:
    if len(found) > len(runs):
        say(f"these are the newest {len(runs)}; there are more: --limit N")


def _long_row(run: RunRecord, held: int) -> tuple[str, ...]:
    *row, created = _run_row(run)
    return (*row, dollars(run.cost_usd), size(held), created, _owner(run))


def _long_value(run: RunRecord, held: int) -> dict[str, Any]:
    owner = None if run.owner is None else {**asdict(run.owner), "liveness": liveness(run.owner).value}
    return {"size_bytes": held, "owner": owner}


def _owner(run: RunRecord) -> str:
    if run.owner is None:
        return ""
    gone = ", gone" if liveness(run.owner) is Liveness.DEAD else ""
    return one_line(f"process {run.owner.pid} on {run.owner.host}{gone}")


def _tell_no_runs() -> int:
    tell("no runs yet; `plait run PLAN` makes one")
    return COMPLETED


def _run_row(run: RunRecord) -> tuple[str, ...]:
    info = run_info(run, time.time())
    created = datetime.fromisoformat(run.created_at).timestamp()
    return (
        one_line(run.run_id),
        one_line(run.name, 40),
        info.status.value,
        f"{info.done:,}/{sum(run.counts.values()):,}",
        tokens(run.input_tokens, run.output_tokens),
        age(time.time() - created),
    )


def _value(run: RunRecord) -> dict[str, Any]:
    return run_value(run_info(run, time.time()))
