"""`plait hosts`: ask the hosts of a plan for their state."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import click

from plait.backends.hosts.probe import NO_WORKER, HostState, probe_hosts
from plait.backends.hosts.reachable import HostUnreachable
from plait.backends.spec.hosts import DaskHostsPart
from plait.persistence.errors import StoreError
from plait.persistence.records import RunRecord
from plait.runner.cli.backends import HostsInUse, hosts_in_use
from plait.runner.cli.display.report import print_json
from plait.runner.cli.display.sections import print_table
from plait.runner.cli.display.text import as_line
from plait.runner.cli.display.waits import local_time
from plait.runner.cli.exits import COMPLETED, FAILED, print_note
from plait.runner.cli.lookup import MAX_RUNS_SEARCHED, read_only_store
from plait.runner.cli.options import StorePlace, json_option, store_option
from plait.runner.domain.events import HostAway
from plait.runner.operations.inspect import away_hosts


@click.command("hosts")
@click.argument("file", type=click.Path(path_type=Path))
@store_option
@json_option
def hosts_command(file: Path, store_path: StorePlace, as_json: bool) -> int:
    """Ask each host in FILE, a plan or the part under `hosts` alone, and print its slots, the attempts at work there,
    of all runs, and its version of plait. For a host that is away, also print since when a run in the store waits for
    the host; workers of a Dask cluster that are gone are printed only then.

    Exit code 1 if a host is away or has another version.
    """
    return anyio.run(show_hosts, hosts_in_use(file), store_path, as_json)


async def show_hosts(groups: Sequence[HostsInUse], place: StorePlace, as_json: bool) -> int:
    """Print the state of each host. Return the exit code."""
    found = [(group, await _states(group)) for group in groups]
    away = await _away_hosts(place) if any(_may_lack(*one) for one in found) else ()
    states = [
        (group.name, state, _away_since(group.name, state, away))
        for group, known in found
        for state in [*known, *_gone(group, known, away)]
    ]
    if as_json:
        print_json([{"hosts": name, **state.as_json(), "away_since": since} for name, state, since in states])
    else:
        heads = ("hosts", "name", "slots", "at work", "version", "state")
        rows = [heads, *(_row(*one) for one in states)]
        print_table(rows, 5, [None] * len(rows), frozenset({2, 3}))
    return COMPLETED if all(state.is_usable for _, state, _ in states) else FAILED


async def _states(group: HostsInUse) -> list[HostState]:
    try:
        async with group.part.make().reachable(group.needs) as hosts:
            none = HostState(group.part.way, 0, problem=NO_WORKER)
            return await probe_hosts(hosts) or [none]
    except HostUnreachable as error:
        return [HostState(group.part.way, 0, problem=f"away: {error}")]


def _may_lack(group: HostsInUse, states: Iterable[HostState]) -> bool:
    """Return whether runs may wait for a host of the group: one that does not answer, or one that is not listed."""
    return isinstance(group.part, DaskHostsPart) or any(state.version is None for state in states)


async def _away_hosts(place: StorePlace) -> Sequence[tuple[Collection[str], HostAway]]:
    """Return the hosts that running runs in the store wait for, each with the groups of hosts of the run."""
    if isinstance(place, Path) and not place.exists():  # nothing has run yet
        return ()
    found: list[tuple[Collection[str], HostAway]] = []
    try:
        async with read_only_store(place) as store:
            for run in await store.list_runs(MAX_RUNS_SEARCHED):
                if away := await away_hosts(store, run):
                    groups = _groups_of(await store.get_run(run.run_id))
                    found += [(groups, one) for one in away.values()]
    except StoreError as error:
        print_note(f"the store does not say since when hosts are away: {as_line(str(error))}")
    return found


def _groups_of(run: RunRecord | None) -> Collection[str]:
    """Return the names of the groups of hosts that the backends of the run are placed on."""
    if run is None:
        return ()
    backends: Mapping[str, Mapping[str, Any]] = json.loads(run.settings).get("backends", {})
    return {str(spec["on"]) for spec in backends.values() if "on" in spec}


def _gone(
    group: HostsInUse, states: Iterable[HostState], away: Iterable[tuple[Collection[str], HostAway]]
) -> list[HostState]:
    """Return the workers of a Dask cluster that a run waits for, and the scheduler has no longer."""
    if not isinstance(group.part, DaskHostsPart):
        return []
    listed = {state.name for state in states}
    gone = {one.host: one for groups, one in away if group.name in groups and one.host not in listed}
    return [HostState(name, 0, problem=f"away: {one.reason}") for name, one in sorted(gone.items())]


def _away_since(group: str, state: HostState, away: Iterable[tuple[Collection[str], HostAway]]) -> str | None:
    """Return the earliest time since which a run waits for the host of the group; None for a host that answers.

    The run of a Python program names no groups, and counts for each.
    """
    if state.version is not None:
        return None
    found = [one.since for groups, one in away if one.host == state.name and (group in groups or not groups)]
    return min((since for since in found if since is not None), default=None)


def _row(group: str, state: HostState, since: str | None) -> tuple[str, ...]:
    at_work = "" if state.at_work is None else str(state.at_work)
    found = "ready" if state.problem is None else as_line(state.problem)
    if since is not None:
        found = f"away since {local_time(since, time.time())}{found.removeprefix('away')}"
    return group, state.name, str(state.slots), at_work, state.version or "", found
