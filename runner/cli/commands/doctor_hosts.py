"""The part of `plait doctor` about other machines: each is asked by `plait doctor` there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import anyio

from plait.backends.agents.catalog import AGENTS
from plait.backends.hosts.look import HostState, look_at_hosts
from plait.backends.hosts.ssh import SSHHost, SSHHosts
from plait.backends.spec.hosts import SSHHostsPart
from plait.persistence.sqlite.health import Finding, Fitness

_ANSWER_S = 120.0
"""Seconds for `plait doctor` on a host, which starts each agent for its version."""
_AGENTS = frozenset(agent.name for agent in AGENTS)
"""The checks that are printed even if all is well there; the others would fill the page."""
_SUCCEEDED = frozenset({0, 3})
"""The exit codes with findings: no check is bad, or some are."""


async def check_hosts(groups: Mapping[str, SSHHostsPart]) -> list[Finding]:
    """Return the findings about each host, and those of `plait doctor` there. All hosts are asked at once."""
    found: dict[tuple[str, str], list[Finding]] = {}

    async def check(group: str, hosts: SSHHosts, host: SSHHost, state: HostState) -> None:
        found[group, host.name] = [_state(state), *(await _doctor(hosts, host) if state.is_usable else ())]

    async with anyio.create_task_group() as beside:
        for group, spec in groups.items():
            hosts = spec.make()
            for host, state in zip(hosts.all, await look_at_hosts(hosts), strict=True):
                found[group, host.name] = []  # keeps the order
                beside.start_soon(check, group, hosts, host, state)
    return [finding for findings in found.values() for finding in findings]


def _state(state: HostState) -> Finding:
    if state.problem is not None:
        return Finding(f"{state.name}: host", Fitness.BAD, state.problem)
    about = f"plait {state.version}, {state.slots} slots, {state.at_work} at work"
    return Finding(f"{state.name}: host", Fitness.OK, about)


async def _doctor(hosts: SSHHosts, host: SSHHost) -> list[Finding]:
    command = hosts.command(host, "doctor", "--json")
    with anyio.move_on_after(_ANSWER_S):
        answer = await anyio.run_process(command, check=False, start_new_session=True)
        if answer.returncode in _SUCCEEDED:
            checks = cast("list[dict[str, Any]]", json.loads(answer.stdout)["checks"])
            return [
                Finding(f"{host.name}: {one['check']}", Fitness(one["verdict"]), one["found"], one["advice"])
                for one in checks
                if one["verdict"] != Fitness.OK.value or one["check"] in _AGENTS
            ]
        return [Finding(f"{host.name}: doctor", Fitness.BAD, f"plait doctor exited with {answer.returncode} there")]
    return [Finding(f"{host.name}: doctor", Fitness.BAD, f"plait doctor did not end within {_ANSWER_S:g} s there")]
