"""`plait hosts`: ask the hosts of a plan for their state."""

from __future__ import annotations

from pathlib import Path

import anyio
import click

from plait.backends.hosts.look import HostState, look_at_hosts
from plait.backends.hosts.reachable import HostAway
from plait.backends.spec.hosts import HostsPart
from plait.runner.cli.backends import hosts_of_file
from plait.runner.cli.display.report import print_json
from plait.runner.cli.display.sections import print_table
from plait.runner.cli.display.text import one_line
from plait.runner.cli.exits import COMPLETED, FAILED
from plait.runner.cli.options import json_option


@click.command("hosts")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def hosts_command(file: Path, as_json: bool) -> int:
    """Ask each host in FILE, a plan or the part under `hosts` alone, and print its slots, the attempts at work there,
    of all runs, and its version of plait.

    Exit code 1 if a host is away or has another version.
    """
    return anyio.run(show_hosts, hosts_of_file(file), as_json)


async def show_hosts(groups: dict[str, HostsPart], as_json: bool) -> int:
    """Print the state of each host. Return the exit code."""
    states = [(name, state) for name, spec in groups.items() for state in await _states(spec)]
    if as_json:
        print_json([{"hosts": name, **state.as_json()} for name, state in states])
    else:
        heads = ("hosts", "name", "slots", "at work", "version", "state")
        rows = [heads, *(_row(name, state) for name, state in states)]
        print_table(rows, 5, [None] * len(rows), frozenset({2, 3}))
    return COMPLETED if all(state.is_usable for _, state in states) else FAILED


async def _states(spec: HostsPart) -> list[HostState]:
    try:
        async with spec.make().reachable() as hosts:
            return await look_at_hosts(hosts)
    except HostAway as error:
        return [HostState(spec.way, 0, problem=f"away: {error}")]


def _row(group: str, state: HostState) -> tuple[str, ...]:
    at_work = "" if state.at_work is None else str(state.at_work)
    found = "ready" if state.problem is None else one_line(state.problem)
    return group, state.name, str(state.slots), at_work, state.version or "", found
