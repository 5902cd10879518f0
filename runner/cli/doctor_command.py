"""`plait doctor`: check whether this machine, its agents and the store are fit; with `--hosts`, the hosts of a plan."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote
from typing import Any, cast

import anyio
import click

from plait.backends.agents.agent_catalog import AGENTS, Installed, look_for_agents
from plait.backends.extras import install_command
from plait.backends.hosts.host_connection import HostState, HostUnreachable, ReachableHost, probe_hosts
from plait.backends.prices import list_version
from plait.backends.process.available_memory import available_memory
from plait.backends.process.child_manifest import AtWork, agents_at_work, left_over_servers
from plait.backends.specs.backend_specs import DaskHostsPart
from plait.clock_and_ids import parse_time
from plait.errors import StoreError
from plait.events import HostAway
from plait.persistence import SQLiteStore
from plait.persistence import store_health as health
from plait.persistence.sqlite_file import unfinished_files
from plait.persistence.store_health import MOST_NAMED, Finding, Fitness, checksums
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_line import COMPLETED, STORE
from plait.runner.cli.command_options import command_line, json_option, store_option
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, columns, print_line, print_note, print_table
from plait.runner.client.run_backends import HostsInUse, hosts_in_use
from plait.runner.domain.wait_reasons import clock_time
from plait.runner.engine.lease import Liveness, liveness, seems_free, shown_status
from plait.runner.engine.run_options import DEFAULT_STORE, ServerAddress, StorePlace, open_server, open_store
from plait.runner.state.attempt_files import files_root, run_folder
from plait.runner.state.stored_run import MOST_RUNS_SEARCHED, read_settings, stores_backends
from plait.runner.views.event_sentences import counted, size
from plait.runner.views.read_views import away_hosts
from plait.statuses import RUN_DONE, RunStatus

_MOUNTS = Path("/proc/self/mountinfo")
_MIB = 1 << 20
_LITTLE_SPACE = 100_000_000  # bytes
_RUNS = 5
_ALL = 1 << 31


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
        return anyio.run(_check_hosts, hosts_in_use(hosts_file), store_path, as_json)
    agents, memory = anyio.run(look_for_agents), available_memory()
    findings = [*_check_machine(store_path), *_check_agents(agents, memory)]
    findings += _check_store(store_path)
    if as_json:
        worst = max((one.fitness for one in findings), key=list(Fitness).index)
        checked = {"verdict": worst.value, "store": str(store_path), "checks": _findings_json(findings)}
        print_json({**checked, "agents": _agents_json(agents, memory)})
    else:
        _print_findings(findings)
    return STORE if any(one.fitness is Fitness.BAD for one in findings) else COMPLETED


def _check_machine(path: StorePlace) -> Iterator[Finding]:
    yield Finding("python", Fitness.OK, f"{platform.python_version()}, plait {version('plait')}")
    try:  # without the library of `kind: pydantic-ai`, plans without that kind run as well
        yield Finding("pydantic-ai", Fitness.OK, version("pydantic-ai-slim"))
    except PackageNotFoundError:
        yield Finding("pydantic-ai", Fitness.OK, f"not installed; run: {install_command('pydantic-ai')}")
    yield health.library()
    yield _check_prices()
    if not isinstance(path, Path):
        return
    folder = next((one for one in path.absolute().parents if _exists(one)), path.absolute())
    mounts = _MOUNTS.read_text(errors="replace") if _MOUNTS.exists() else None
    yield file_system(path if _exists(path) else folder, mounts)
    yield space(folder)


_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
     "orangefs", "pvfs2", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs",
     "fuse.rclone", "fuse.gcsfuse", "fuse.davfs", "fuse.cifs", "fuse.juicefs", "fuse.goofys", "fuse.mountpoint-s3"}
)  # fmt: skip
# A folder of the host, shared by a hypervisor: no shared memory between host and guest.
_SHARED = frozenset({"9p", "virtiofs", "vboxsf", "vmhgfs", "fuse.vmhgfs-fuse", "prl_fs", "drvfs"})
_UNFIT = (
    (_NETWORK, Fitness.BAD, "is a network file system; it lacks the memory that WAL shares"),
    (_SHARED, Fitness.BAD, "is a folder shared with another system; WAL is unsafe there"),
    ({"tmpfs", "ramfs"}, Fitness.WARNING, "is gone when this machine stops"),
)
_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system(path: Path, mountinfo: str | None) -> Finding:
    """Check that a store at `path` lies on a local disk, because all users of a store in WAL mode share memory.

    `mountinfo` is the text of /proc/self/mountinfo, or None on other systems than Linux.
    """
    kind = _file_system_type(path.resolve(), mountinfo or "")
    for kinds, fitness, what in _UNFIT:
        if kind in kinds:
            return Finding("file system", fitness, f"{kind} {what}", "put the store on a local disk with --store")
    if not kind or kind.startswith("fuse"):
        found = f"unknown file system {kind}" if kind else "cannot tell"
        return Finding("file system", Fitness.OK, found, "make sure that the store is on a local disk")
    return Finding("file system", Fitness.OK, kind)


def _file_system_type(path: Path, mountinfo: str) -> str:
    """Return the type of the file system of `path`, or an empty text if unknown.

    `path` is absolute and without links; `mountinfo` is the text of /proc/self/mountinfo.
    """
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not rest:
            continue
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), columns[4])
        # A later line hides an earlier line with the same mount point.
        if len(point) >= best and path.is_relative_to(point):
            best, kind = len(point), rest.split(" ")[0]
    return kind


def space(folder: Path) -> Finding:
    """Check that the existing `folder` has free space."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("space", Fitness.WARNING, f"cannot tell: {error.strerror}")
    shown = f"{free / 1e6:,.0f} MB free"
    if free < _LITTLE_SPACE:
        return Finding("space", Fitness.WARNING, shown, "free some; with a full store a run continues unrecorded")
    return Finding("space", Fitness.OK, shown)


def _check_permissions(path: Path) -> Iterator[Finding]:
    """Check that only this user can read the store at `path`, its WAL and its directory."""
    real, elsewhere = path.resolve(), "keep the store in a directory of its own"
    troubles = [*_trouble(path.parent, "700", f", or {elsewhere}", elsewhere)]
    for end in ("", "-wal", "-shm"):
        troubles += _trouble(Path(f"{real}{end}"), "600", "", "use the store as its owner")
    yield from troubles or [Finding("permissions", Fitness.OK, "no other user may read the store")]


def _trouble(file: Path, right: str, remedy: str, of_another: str) -> Iterator[Finding]:
    """Check a file or a folder, which may be missing: its owner and its mode."""
    try:
        found = file.stat()
    except OSError:
        return
    mode = stat.S_IMODE(found.st_mode)
    what, advice = "", f"chmod {right} {quote(str(file))}{remedy}"
    if found.st_uid != os.geteuid():
        what, advice = f"belongs to user {found.st_uid}, this is user {os.geteuid()}", of_another
    elif mode & 0o077:
        what = f"is open to others (mode {mode:04o})"
    elif not os.access(file, os.R_OK | os.W_OK):
        what = "may not be read and written"
    if what:
        yield Finding("permissions", Fitness.WARNING, f"{file} {what}", advice)


def _check_prices() -> Finding:
    found = list_version()
    if found is None:
        about = "no list of prices: the cost of a call is known if the server reports it, or from `prices:` in the plan"
        return Finding("prices", Fitness.OK, about, f"to install the list: {install_command('prices')}")
    number, day = found
    return Finding("prices", Fitness.OK, f"genai-prices {number}, installed on {day}; never fetched from the network")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # perhaps in a folder that is not readable
        return True


def _check_store(place: StorePlace) -> Iterator[Finding]:
    """Check the store, its runs, and what its runs have left behind on this machine."""
    runs: Sequence[RunRecord] = ()
    root = None
    findings = list(_check_file(place) if isinstance(place, Path) else anyio.run(_check_server, place))
    yield from findings
    is_readable = all(one.fitness is not Fitness.BAD for one in findings if one.check in {"store", "file"})
    if isinstance(place, Path):
        root = SQLiteStore(place, mode="read").files_root
        is_readable = is_readable and (_exists(place) or place != DEFAULT_STORE)
    if is_readable:
        try:
            runs, resumable, root = anyio.run(_read_store, place)
        except StoreError as error:
            yield Finding("runs", Fitness.BAD, str(error))
        else:
            yield from _check_runs(place, runs, resumable)
    left = list(_check_model_servers())
    if root is not None and _exists(root) and (at_work := agents_at_work(root)):
        left += _check_left_over(at_work, root, runs, place)
    yield from left or [Finding("children", Fitness.OK, "none left behind")]


def _check_file(place: Path) -> Iterator[Finding]:
    path = place.absolute()
    if _exists(path):
        yield Finding("store", Fitness.OK, str(path))
        yield from _check_permissions(path)
    yield from _check_unfinished(path)
    if place == DEFAULT_STORE and not _exists(path):
        yield Finding("store", Fitness.OK, f"no store at {DEFAULT_STORE} yet", "`plait run PLAN` makes one")
    else:
        yield from health.file(path)


async def _read_store(place: StorePlace) -> tuple[Sequence[RunRecord], set[str], Path | None]:
    """Return all runs, the ids of the interrupted runs (those that are printed) that the command can resume, and the
    folder of the files of runs.
    """
    async with open_store(place, "read") as store:
        runs = await store.list_runs(_ALL)
        shown = [run.run_id for run in runs if shown_status(run) is RunStatus.INTERRUPTED][:_RUNS]
        whole = [await store.get_run(run_id) for run_id in shown]
        resumable = {run.run_id for run in whole if run is not None and stores_backends(run)}
        return runs, resumable, files_root(store)


def _check_unfinished(path: Path) -> Iterator[Finding]:
    """Report unfinished files that a crash at the first start has left beside `path`."""
    try:
        names = [one.name for one in unfinished_files(path)]
    except OSError:  # the folder is missing or not readable, which other checks report
        return
    if names:
        what = f"{len(names)} unfinished by an interrupted start: {', '.join(names[:MOST_NAMED])}"
        yield Finding("left over", Fitness.WARNING, what, "a run that starts an hour later removes them")


def _check_runs(path: StorePlace, runs: Sequence[RunRecord], resumable: Collection[str]) -> Iterator[Finding]:
    states = [(run, shown_status(run)) for run in runs]
    interrupted = [run for run, status in states if status is RunStatus.INTERRUPTED]
    under_way = [run for run, status in states if run.owner and status not in RUN_DONE | {RunStatus.INTERRUPTED}]
    if not interrupted and not under_way:
        yield Finding("runs", Fitness.OK, f"{counted(len(runs), 'run')}, none running or interrupted")
    for run in under_way:
        by = f"{run.owner.process} since {run.owner.claimed_at}" if run.owner else "nobody"
        yield Finding("runs", Fitness.OK, f"{run.run_id} is being run by {by}")
    yield from _interrupted_findings(path, interrupted, resumable)


def _interrupted_findings(path: StorePlace, runs: list[RunRecord], resumable: Collection[str]) -> Iterator[Finding]:
    for run in runs[:_RUNS]:
        owner = run.owner
        gone = owner is not None and liveness(owner) is Liveness.DEAD
        whose = f": {owner.process} {'is gone' if gone else 'has not renewed its claim'}" if owner else ""
        advice = command_line(path, "resume", run.run_id)
        if run.run_id not in resumable:
            advice = f"resume the run from Python, or name its backends: {advice} --backends FILE"
        yield Finding("runs", Fitness.WARNING, f"{run.run_id} is interrupted{whose}", advice)
    if len(runs) > _RUNS:
        left = len(runs) - _RUNS
        more = f"{left:,} more {'is' if left == 1 else 'are'} interrupted"
        yield Finding("runs", Fitness.WARNING, more, command_line(path, "runs", "--limit", "1000"))


def _check_model_servers() -> Iterator[Finding]:
    pids = left_over_servers()
    if pids is None:
        yield Finding("children", Fitness.OK, "cannot tell", "look for processes that run _llama_server.py")
    elif pids:
        shown = " ".join(map(str, pids))
        found = f"{counted(len(pids), 'model server')} left behind by a process that is gone: {shown}"
        yield Finding("children", Fitness.WARNING, found, f"kill {shown}")


def _check_agents(agents: Sequence[Installed], memory: int | None) -> Iterator[Finding]:
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


def _agents_json(agents: Sequence[Installed], memory: int | None) -> list[dict[str, object]]:
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
            "fit_into_memory": _turns_that_fit(one, memory),
        }
        for one in agents
    ]


def _turns_that_fit(one: Installed, memory: int | None) -> int | None:
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
    return Fitness.WARNING, "not logged in", f"`{one.agent.login.command}`{key}"


def _check_memory(one: Installed, memory: int | None) -> tuple[Fitness, str, str]:
    number = _turns_that_fit(one, memory)
    if number is None:
        return Fitness.OK, "", ""
    fit = f"{number:,} at once fit into memory"
    return (Fitness.OK, fit, "") if number else (Fitness.WARNING, fit, "free some memory before running the agent")


def _check_left_over(
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
        pids = [" ".join(map(str, one.pids)) for one in those]
        tasks = [(one.folder.relative_to(root).parts[1:2] or ["?"])[0] for one in those]
        each = zip(tasks, those, pids, strict=True)
        shown = ", ".join(f"{task} ({one.kind}, process {processes})" for task, one, processes in each)
        what = f"{counted(len(those), 'agent')} of run {name} still running after the end of the plait process: {shown}"
        if run is None or RunStatus(run.status) in RUN_DONE:
            advice = f"kill {' '.join(pids)}"
        else:
            advice = f"{command_line(path, 'resume', run.run_id)} takes over their work"
        yield Finding("children", Fitness.WARNING, as_line(what), advice)


async def _check_server(place: ServerAddress) -> list[Finding]:
    """Check the server, the settings under which the server keeps every acknowledged batch, and the checksums. The
    check `store` is bad if the server does not answer, or lets this role store no run.
    """
    try:
        async with open_server(place, "read") as store:
            fit = Finding("store", Fitness.OK, f"{place}, PostgreSQL {store.server_version}")
            if (reason := await store.obstacle()) is not None:
                fit = Finding("store", Fitness.BAD, reason)
            durability = [Finding("durability", Fitness.WARNING, warning) for warning in await store.warnings()]
            return [fit, *durability, checksums(*await store.check_rows())]
    except StoreError as error:
        return [Finding("store", Fitness.BAD, str(error))]


_ANSWER_S = 120.0
"""Seconds for `plait doctor` on a host, which starts each agent for its version."""
_AGENTS = frozenset(agent.name for agent in AGENTS)
"""The checks that are printed even if all is well there; the others would fill the page."""
_SUCCEEDED = frozenset({0, 3})
"""The exit codes with findings: no check is bad, or some are."""


async def _check_hosts(groups: Sequence[HostsInUse], place: StorePlace, as_json: bool) -> int:
    """Print the state of each host, and the findings about those that answer. Return the exit code."""
    states: list[tuple[HostsInUse, list[HostState]]] = []
    findings: list[Finding] = []
    for group in groups:
        known, there = await _visit(group)
        states.append((group, known))
        findings += there
    # Runs may wait for a host that does not answer, or that is not listed.
    lacks = any(
        isinstance(group.part, DaskHostsPart) or any(state.version is None for state in known)
        for group, known in states
    )
    away = await _away_hosts(place) if lacks else ()
    hosts = [
        (group.name, state, _away_since(group.name, state, away))
        for group, known in states
        for state in [*known, *_gone(group, known, away)]
    ]
    is_bad = not all(state.is_usable for _, state, _ in hosts) or any(one.fitness is Fitness.BAD for one in findings)
    if as_json:
        listed = [{"hosts": name, **asdict(state), "away_since": since} for name, state, since in hosts]
        print_json({"hosts": listed, "checks": _findings_json(findings)})
    else:
        heads = ("hosts", "name", "slots", "at work", "version", "state")
        rows = [heads, *(_row(*one) for one in hosts)]
        print_table(rows, 5, [None] * len(rows), frozenset({2, 3}))
        if findings:
            print_line("")
            _print_findings(findings)
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
                group.part.names[0], 0, problem="no worker that offers resources; start workers, with --resources"
            )
            return states or [none], [one for index in sorted(found) for one in found[index]]
    except HostUnreachable as error:
        return [HostState(group.part.names[0], 0, problem=f"away: {error}")], []


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


async def _away_hosts(place: StorePlace) -> Sequence[tuple[Collection[str], HostAway]]:
    """Return the hosts that running runs in the store wait for, each with the groups of hosts of the run."""
    if isinstance(place, Path) and not place.exists():  # nothing has run yet
        return ()
    found: list[tuple[Collection[str], HostAway]] = []
    try:
        async with open_store(place, "read") as store:
            for run in await store.list_runs(MOST_RUNS_SEARCHED):
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
    backends: Mapping[str, Mapping[str, Any]] = read_settings(run).get("backends", {})
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


def _findings_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Return the findings of `plait doctor` for JSON."""
    return [
        {"check": one.check, "verdict": one.fitness.value, "found": one.found, "advice": one.advice} for one in findings
    ]


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings of `plait doctor`, a line each."""
    rows = columns((one.fitness.value, one.check) for one in findings)
    for one, (verdict, check) in zip(findings, rows, strict=True):
        advice = f"; {as_line(one.advice)}" if one.advice else ""
        print_line(f"{verdict}  {check}  {as_line(one.found)}{advice}")
