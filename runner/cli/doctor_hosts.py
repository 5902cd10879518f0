"""`plait doctor --hosts`: the state of each host of a plan, and the findings of `plait doctor` there."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import anyio

from plait.backends.agents.agent_catalog import AGENTS
from plait.backends.hosts.host_connection import HostState, HostUnreachable, ReachableHost, probe_hosts
from plait.backends.specs.host_specs import DaskHostsPart
from plait.errors import StoreError
from plait.events import HostAway
from plait.persistence.store_health import Finding, Fitness
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_line import COMPLETED, STORE
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, findings_json, print_findings, print_line, print_note, print_table
from plait.runner.client.backend_set import HostsInUse
from plait.runner.client.store_place import MAX_RUNS_SEARCHED, StorePlace, read_only_store
from plait.runner.domain.asked_question import parse_time
from plait.runner.domain.wait_reasons import clock_time
from plait.runner.views.read_views import away_hosts

_ANSWER_S = 120.0
"""Seconds for `plait doctor` on a host, which starts each agent for its version."""
_AGENTS = frozenset(agent.name for agent in AGENTS)
"""The checks that are printed even if all is well there; the others would fill the page."""
_SUCCEEDED = frozenset({0, 3})
"""The exit codes with findings: no check is bad, or some are."""


async def check_hosts(groups: Sequence[HostsInUse], place: StorePlace, as_json: bool) -> int:
    """Print the state of each host, and the findings about those that answer. Return the exit code."""
    states: list[tuple[HostsInUse, list[HostState]]] = []
    findings: list[Finding] = []
    for group in groups:
        known, there = await _visit(group)
        states.append((group, known))
        findings += there
    away = await _away_hosts(place) if any(_may_lack(*one) for one in states) else ()
    hosts = [
        (group.name, state, _away_since(group.name, state, away))
        for group, known in states
        for state in [*known, *_gone(group, known, away)]
    ]
    is_bad = not all(state.is_usable for _, state, _ in hosts) or any(one.fitness is Fitness.BAD for one in findings)
    if as_json:
        listed = [{"hosts": name, **asdict(state), "away_since": since} for name, state, since in hosts]
        print_json({"hosts": listed, "checks": findings_json(findings)})
    else:
        heads = ("hosts", "name", "slots", "at work", "version", "state")
        rows = [heads, *(_row(*one) for one in hosts)]
        print_table(rows, 5, [None] * len(rows), frozenset({2, 3}))
        if findings:
            print_line("")
            print_findings(findings)
    return STORE if is_bad else COMPLETED


async def _visit(group: HostsInUse) -> tuple[list[HostState], list[Finding]]:
    """Return the states of the hosts of the group, and the findings of `plait doctor` on each that can be used, all
    asked at once.
    """
    found: dict[int, list[Finding]] = {}

    async def check(index: int, host: ReachableHost) -> None:
        found[index] = await _doctor(host)

    try:
        async with group.part.make().reachable(group.needs) as hosts:
            states = await probe_hosts(hosts)
            async with anyio.create_task_group() as beside:
                for index, (host, state) in enumerate(zip(hosts, states, strict=True)):
                    if state.is_usable:
                        beside.start_soon(check, index, host)
            none = HostState(
                group.part.way, 0, problem="no worker that offers resources; start workers, with --resources"
            )
            return states or [none], [one for index in sorted(found) for one in found[index]]
    except HostUnreachable as error:
        return [HostState(group.part.way, 0, problem=f"away: {error}")], []


async def _doctor(host: ReachableHost) -> list[Finding]:
    with anyio.move_on_after(_ANSWER_S):
        answer = await host.run(("doctor", "--json"))
        if answer.code in _SUCCEEDED:
            checks = cast("list[dict[str, Any]]", json.loads(answer.output)["checks"])
            return [
                Finding(f"{host.name}: {one['check']}", Fitness(one["verdict"]), one["found"], one["advice"])
                for one in checks
                if one["verdict"] != Fitness.OK.value or one["check"] in _AGENTS
            ]
        return [Finding(f"{host.name}: doctor", Fitness.BAD, f"plait doctor exited with {answer.code} there")]
    return [Finding(f"{host.name}: doctor", Fitness.BAD, f"plait doctor did not end within {_ANSWER_S:g} s there")]


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
        found = f"away since {clock_time(parse_time(since), time.time())}{found.removeprefix('away')}"
    return group, state.name, str(state.slots), at_work, state.version or "", found
