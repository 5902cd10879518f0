"""The part of `plait doctor` about other machines: each is asked by `plait doctor` there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import anyio

from plait.backends.agents.catalog import AGENTS
from plait.backends.hosts.probe import NO_WORKER, HostState, probe_hosts
from plait.backends.hosts.reachable import HostUnreachable, ReachableHost
from plait.persistence.findings import Finding, Fitness
from plait.runner.cli.backends import HostsInUse

_ANSWER_S = 120.0
"""Seconds for `plait doctor` on a host, which starts each agent for its version."""
_AGENTS = frozenset(agent.name for agent in AGENTS)
"""The checks that are printed even if all is well there; the others would fill the page."""
_SUCCEEDED = frozenset({0, 3})
"""The exit codes with findings: no check is bad, or some are."""


async def check_hosts(groups: Sequence[HostsInUse]) -> list[Finding]:
    """Return the findings about each host, and those of `plait doctor` there, asked of all hosts of a group at once."""
    findings: list[Finding] = []
    for group in groups:
        try:
            async with group.part.make().reachable(group.needs) as hosts:
                none = Finding(f"{group.part.way}: host", Fitness.BAD, NO_WORKER, "start workers, with --resources")
                findings += await _check_group(hosts) or [none]
        except HostUnreachable as error:
            findings.append(Finding(f"{group.part.way}: host", Fitness.BAD, f"away: {error}"))
    return findings


async def _check_group(hosts: Sequence[ReachableHost]) -> list[Finding]:
    found: dict[int, list[Finding]] = {}

    async def check(index: int, host: ReachableHost, state: HostState) -> None:
        found[index] = [_state(state), *(await _doctor(host) if state.is_usable else ())]

    async with anyio.create_task_group() as beside:
        for index, (host, state) in enumerate(zip(hosts, await probe_hosts(hosts), strict=True)):
            beside.start_soon(check, index, host, state)
    return [finding for index in range(len(hosts)) for finding in found[index]]


def _state(state: HostState) -> Finding:
    if state.problem is not None:
        return Finding(f"{state.name}: host", Fitness.BAD, state.problem)
    about = f"plait {state.version}, {state.slots} slots, {state.at_work} at work"
    return Finding(f"{state.name}: host", Fitness.OK, about)


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
