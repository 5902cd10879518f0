"""Checks of `plait doctor` for coding agents: the installed ones, and those that outlived their plait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from plait.backends.agents.discovery import Installed
from plait.backends.process.child_manifest import AtWork
from plait.persistence.findings import Finding, Fitness
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_options import command_line
from plait.runner.cli.terminal_output import as_line, counted, size
from plait.runner.client.store_place import StorePlace
from plait.runner.engine.lease import seems_free
from plait.runner.state.attempt_files import run_folder
from plait.statuses import RUN_DONE, RunStatus

_MIB = 1 << 20


def check_agents(agents: Sequence[Installed], memory: int | None) -> Iterator[Finding]:
    """Yield the free `memory` (bytes) and one finding for each agent. Agents driven by ACP are listed only if
    installed.
    """
    if memory is not None:
        yield Finding("memory", Fitness.OK, f"{size(memory)} free")
    for one in agents:
        if one.path is None:
            if one.agent.backend:
                yield Finding(one.agent.name, Fitness.OK, "not installed", one.agent.install)
            continue
        parts = [_check_version(one), (Fitness.OK, one.path, ""), _check_login(one), _check_memory(one, memory)]
        worst = max((fitness for fitness, _, _ in parts), key=list(Fitness).index)
        found, advice = ([text for text in texts if text] for texts in list(zip(*parts, strict=True))[1:])
        yield Finding(one.agent.name, worst, ", ".join(found), "; ".join(advice))


def agents_json(agents: Sequence[Installed], memory: int | None) -> list[dict[str, object]]:
    """Return the installed agents as JSON objects."""
    return [
        {
            "name": one.agent.name,
            "program": one.agent.program,
            "path": one.path,
            "version": one.version,
            "tested": list(one.agent.tested),
            "install": one.agent.install,
            "logged_in": one.is_logged_in,
            "logged_in_by": one.by or None,
            "fit_into_memory": turns_that_fit(one, memory),
        }
        for one in agents
    ]


def turns_that_fit(one: Installed, memory: int | None) -> int | None:
    """Return how many turns of the agent fit into `memory` bytes at once; None if `memory` is unknown."""
    return None if memory is None else memory // (one.agent.memory * _MIB)


def _check_version(one: Installed) -> tuple[Fitness, str, str]:
    tested = " and ".join(one.agent.tested)
    if one.version is None:
        return Fitness.WARNING, "reports no version", f"`{one.agent.program} --version` has to work"
    if one.is_tested:
        return Fitness.OK, f"{one.version} (tested)", ""
    if one.is_newer:
        return Fitness.OK, f"{one.version} (newer than tested: {tested})", ""
    return Fitness.WARNING, f"{one.version} (tested: {tested})", one.agent.install


def _check_login(one: Installed) -> tuple[Fitness, str, str]:
    if one.is_logged_in is None:
        return Fitness.OK, f"login unknown{f' ({one.by})' if one.by else ''}", ""
    if one.is_logged_in:
        return Fitness.OK, f"key in {one.by}" if one.by in one.agent.login.keys else "logged in", ""
    key = f", or set {one.agent.login.keys[0]}" if one.agent.login.keys else ""
    return Fitness.WARNING, "not logged in", f"`{one.agent.login.how}`{key}"


def _check_memory(one: Installed, memory: int | None) -> tuple[Fitness, str, str]:
    number = turns_that_fit(one, memory)
    if number is None:
        return Fitness.OK, "", ""
    fit = f"{number:,} at once fit into memory"
    return (Fitness.OK, fit, "") if number else (Fitness.WARNING, fit, "free some memory before running the agent")


def check_left_over(
    left: Sequence[AtWork], root: Path, runs: Sequence[RunRecord], path: StorePlace
) -> Iterator[Finding]:
    """Yield a finding for each run whose agents work without plait. Their files are below `root`, the folder beside the
    store at `path`.
    """
    by_folder = {run_folder(root, run.run_id).name: run for run in runs}
    by_run: dict[str, list[AtWork]] = {}
    for one in left:
        by_run.setdefault(one.folder.relative_to(root).parts[0], []).append(one)
    for name, those in by_run.items():
        run = by_folder.get(name)
        if run is not None and not seems_free(run):
            continue
        shown = ", ".join(_describe_agent(one, root) for one in those)
        what = f"{counted(len(those), 'agent')} of run {name} still running after the end of the plait process: {shown}"
        yield Finding("children", Fitness.WARNING, as_line(what), _advise(run, those, path))


def _describe_agent(one: AtWork, root: Path) -> str:
    task = one.folder.relative_to(root).parts[1:2]
    pids = " ".join(map(str, one.pids))
    return f"{task[0] if task else '?'} ({one.kind}, process {pids})"


def _advise(run: RunRecord | None, those: Sequence[AtWork], path: StorePlace) -> str:
    if run is None or RunStatus(run.status) in RUN_DONE:
        return f"kill {' '.join(str(pid) for one in those for pid in one.pids)}"
    return f"{command_line(path, 'resume', run.run_id)} takes over their work"
