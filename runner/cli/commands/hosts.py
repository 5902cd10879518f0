"""`plait hosts`: ask the hosts of a plan for their state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import click

from plait.backends.hosts.look import HostState, look_at_hosts
from plait.backends.hosts.reachable import HostUnreachable
from plait.persistence.errors import StoreError
from plait.runner.cli.backends import HostsInUse, hosts_in_use
from plait.runner.cli.display.report import print_json
from plait.runner.cli.display.sections import print_table
from plait.runner.cli.display.text import one_line
from plait.runner.cli.display.waits import local_time
from plait.runner.cli.exits import COMPLETED, FAILED, print_note
from plait.runner.cli.lookup import MAX_RUNS_SEARCHED, read_only_store
from plait.runner.cli.options import DEFAULT_STORE, StorePlace, json_option, store_option
from plait.runner.operations.inspect import away_hosts


@click.command("hosts")
@click.argument("file", type=click.Path(path_type=Path))
@store_option
@json_option
def hosts_command(file: Path, store_path: StorePlace, as_json: bool) -> int:
    """Ask each host in FILE, a plan or the part under `hosts` alone, and print its slots, the attempts at work there,
    of all runs, and its version of plait. For a host that is away, also print since when a run in the store waits for
    the host.

    Exit code 1 if a host is away or has another version.
    """
    return anyio.run(show_hosts, hosts_in_use(file), store_path, as_json)


async def show_hosts(groups: Sequence[HostsInUse], place: StorePlace, as_json: bool) -> int:
    """Print the state of each host. Return the exit code."""
    states = [(group.name, state) for group in groups for state in await _states(group)]
    since: Mapping[str, str] = await _away_since(place) if any(state.version is None for _, state in states) else {}
    if as_json:
        print_json([{"hosts": name, **state.as_json(), "away_since": _since(state, since)} for name, state in states])
    else:
        heads = ("hosts", "name", "slots", "at work", "version", "state")
        rows = [heads, *(_row(name, state, _since(state, since)) for name, state in states)]
        print_table(rows, 5, [None] * len(rows), frozenset({2, 3}))
    return COMPLETED if all(state.is_usable for _, state in states) else FAILED


async def _states(group: HostsInUse) -> list[HostState]:
    try:
        async with group.part.make().reachable(group.needs) as hosts:
            return await look_at_hosts(hosts)
    except HostUnreachable as error:
        return [HostState(group.part.way, 0, problem=f"away: {error}")]


async def _away_since(place: StorePlace) -> Mapping[str, str]:
    """Return the earliest time since which a running run in the store waits for a host that is away, by host."""
    if place == DEFAULT_STORE and not DEFAULT_STORE.exists():
        return {}
    found: dict[str, str] = {}
    try:
        async with read_only_store(place) as store:
            for run in await store.list_runs(MAX_RUNS_SEARCHED):
                for name, away in (await away_hosts(store, run, time.time())).items():
                    if away.since is not None:
                        found[name] = min(away.since, found.get(name, away.since))
    except StoreError as error:
        print_note(f"the store does not say since when hosts are away: {one_line(str(error))}")
    return found


def _since(state: HostState, since: Mapping[str, str]) -> str | None:
    """Return the time since which a run waits for the host; None for a host that answers."""
    return since.get(state.name) if state.version is None else None


def _row(group: str, state: HostState, since: str | None) -> tuple[str, ...]:
    at_work = "" if state.at_work is None else str(state.at_work)
    found = "ready" if state.problem is None else one_line(state.problem)
    if since is not None:
        found = f"away since {local_time(since, time.time())}{found.removeprefix('away')}"
    return group, state.name, str(state.slots), at_work, state.version or "", found
