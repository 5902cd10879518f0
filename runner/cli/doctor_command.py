"""`plait doctor`: check whether this machine, its agents and the store are fit; with `--hosts`, the hosts of a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import anyio
import click

from plait.backends.agents.agent_catalog import Installed, look_for_agents
from plait.backends.process.available_memory import available_memory
from plait.clock_and_ids import parse_time
from plait.persistence.store_health import Finding, Verdict
from plait.runner.cli.command_line import COMPLETED, STORE
from plait.runner.cli.command_options import command_line, json_option, store_option
from plait.runner.cli.terminal_output import as_line, columns, print_json, print_line, print_table
from plait.runner.client.doctor import HostRow, check_agents, check_hosts, check_machine, check_store, worst
from plait.runner.domain.wait_reasons import clock_time
from plait.runner.engine.run_options import StorePlace


@click.command("doctor")
@click.option(
    "--hosts",
    "hosts_file",
    type=click.Path(path_type=Path),
    help="Check the hosts in this file, a plan or the part under `hosts` alone, in place of this machine.",
)
@store_option
@json_option
def doctor_command(store_path: StorePlace, as_json: bool, hosts_file: Path | None) -> int:
    """Check whether this machine, this SQLite and the store are fit, and print how to mend each problem.

    Checks the versions, the coding agents (each is started for its version; the login is checked without reading a
    secret), the file system, the permissions, every page and checksum of the store, runs without an owner, and
    processes left behind. Changes nothing. The exit code is 3 if a check is bad; warnings alone give 0.

    With --hosts, ask each host for its slots, the attempts at work there, of all runs, and its version of plait, and
    run `plait doctor` there. For a host that is away, also print since when a run in the store waits for the host;
    workers of a Dask cluster that are gone are printed only then. A host that cannot be used is bad.
    """
    if hosts_file is not None:
        hosts, findings = anyio.run(check_hosts, hosts_file, store_path)
        is_bad = not all(state.is_usable for _, state, _ in hosts)
        if as_json:
            listed = [{"hosts": name, **asdict(state), "away_since": since} for name, state, since in hosts]
            print_json({"hosts": listed, "checks": list(map(asdict, findings))})
        else:
            _print_hosts(hosts, findings)
    else:
        agents, memory = anyio.run(look_for_agents), available_memory()
        findings = [*check_machine(store_path), *check_agents(agents, memory)]
        findings += anyio.run(check_store, store_path, partial(command_line, store_path))
        is_bad = False
        if as_json:
            checked = {"verdict": worst(one.verdict for one in findings), "store": str(store_path)}
            listed = [_agent_json(one, memory) for one in agents]
            print_json({**checked, "checks": list(map(asdict, findings)), "agents": listed})
        else:
            _print_findings(findings)
    return STORE if is_bad or any(one.verdict is Verdict.BAD for one in findings) else COMPLETED


def _agent_json(one: Installed, memory: int | None) -> dict[str, object]:
    return {
        "name": one.agent.name,
        "program": one.agent.program,
        "path": one.path,
        "version": one.version,
        "tested": list(one.agent.tested),
        "install": one.agent.install,
        "logged_in": one.is_logged_in,
        "logged_in_by": one.by or None,
        "fit_into_memory": one.turns_that_fit(memory),
    }


def _print_hosts(hosts: Sequence[HostRow], findings: Sequence[Finding]) -> None:
    rows = [("hosts", "name", "slots", "at work", "version", "state"), *map(_host_cells, hosts)]
    print_table(rows, 5, [None] * len(rows), frozenset({2, 3}))
    if findings:
        print_line("")
        _print_findings(findings)


def _host_cells(host: HostRow) -> tuple[str, ...]:
    group, state, since = host
    at_work = "" if state.at_work is None else str(state.at_work)
    text = "ready" if state.problem is None else as_line(state.problem)
    if since is not None:
        text = f"away since {clock_time(parse_time(since), time.time())}{text.removeprefix('away')}"
    return group, state.name, str(state.slots), at_work, state.version or "", text


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings, a line each."""
    rows = columns((one.verdict.value, one.check) for one in findings)
    for one, (verdict, check) in zip(findings, rows, strict=True):
        advice = f"; {as_line(one.advice)}" if one.advice else ""
        print_line(f"{verdict}  {check}  {as_line(one.found)}{advice}")
