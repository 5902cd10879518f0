"""The checks of `plait doctor`: this machine, its agents, the store with its runs and what they have left behind, and
the hosts of a plan. Each check is a finding, and changes nothing.

`command` is the function that gives the command line for words on the store that is checked.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote
from typing import TypeAlias

import anyio

from plait.backends.agents.agent_catalog import AGENTS, Installed
from plait.backends.backend_specs import HostsPart
from plait.backends.extras import install_command
from plait.backends.hosts.host_connection import HostState, HostUnreachable, ReachableHost
from plait.backends.prices import list_version
from plait.backends.process.child_manifest import AtWork, agents_at_work
from plait.errors import StoreError
from plait.persistence import SQLiteStore
from plait.persistence import store_health as health
from plait.persistence.store_health import Finding, Verdict, checksums
from plait.persistence.store_records import RunRecord
from plait.runner.client.run_backends import hosts_in_use
from plait.runner.engine.lease import Liveness, liveness, seems_free, shown_status
from plait.runner.engine.run_options import DEFAULT_STORE, ServerAddress, StorePlace, open_server, open_store
from plait.runner.state.attempt_files import files_root, run_folder
from plait.runner.state.stored_run import stores_backends
from plait.runner.views.event_sentences import counted, size
from plait.statuses import RUN_DONE, RunStatus

_MOUNTS = Path("/proc/self/mountinfo")
_LITTLE_SPACE = 100_000_000  # bytes
_RUNS = 5
_ALL = 1 << 31

Command: TypeAlias = Callable[..., str]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of the verdicts."""
    return max(verdicts, key=list(Verdict).index)


def check_machine(path: StorePlace) -> Iterator[Finding]:
    """Check the versions, the list of prices, and where the store at `path` lies."""
    yield Finding("python", Verdict.OK, f"{platform.python_version()}, plait {version('plait')}")
    try:  # without the library of `kind: pydantic-ai`, plans without that kind run as well
        yield Finding("pydantic-ai", Verdict.OK, version("pydantic-ai-slim"))
    except PackageNotFoundError:
        yield Finding("pydantic-ai", Verdict.OK, f"not installed; run: {install_command('pydantic-ai')}")
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
    (_NETWORK, Verdict.BAD, "is a network file system; it lacks the memory that WAL shares"),
    (_SHARED, Verdict.BAD, "is a folder shared with another system; WAL is unsafe there"),
    ({"tmpfs", "ramfs"}, Verdict.WARNING, "is gone when this machine stops"),
)
_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system(path: Path, mountinfo: str | None) -> Finding:
    """Check that a store at `path` lies on a local disk, because all users of a store in WAL mode share memory.

    `mountinfo` is the text of /proc/self/mountinfo, or None on other systems than Linux.
    """
    kind = _file_system_type(path.resolve(), mountinfo or "")
    for kinds, verdict, what in _UNFIT:
        if kind in kinds:
            return Finding("file system", verdict, f"{kind} {what}", "put the store on a local disk with --store")
    if not kind or kind.startswith("fuse"):
        state = f"unknown file system {kind}" if kind else "cannot tell"
        return Finding("file system", Verdict.OK, state, "make sure that the store is on a local disk")
    return Finding("file system", Verdict.OK, kind)


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
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), columns[4])
        # A later line hides an earlier line with the same mount point.
        if len(point) >= best and path.is_relative_to(point):
            best, kind = len(point), rest.split(" ")[0]
    return kind


def space(folder: Path) -> Finding:
    """Check that the existing `folder` has free space."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("space", Verdict.WARNING, f"cannot tell: {error.strerror}")
    shown = f"{free / 1e6:,.0f} MB free"
    if free < _LITTLE_SPACE:
        return Finding("space", Verdict.WARNING, shown, "free some; with a full store a run continues unrecorded")
    return Finding("space", Verdict.OK, shown)


def _check_permissions(path: Path) -> Iterator[Finding]:
    """Check that only this user can read the store at `path`, its WAL and its directory."""
    real, elsewhere = path.resolve(), "keep the store in a directory of its own"
    troubles = [*_trouble(path.parent, "700", f", or {elsewhere}", elsewhere)]
    for end in ("", "-wal", "-shm"):
        troubles += _trouble(Path(f"{real}{end}"), "600", "", "use the store as its owner")
    yield from troubles or [Finding("permissions", Verdict.OK, "no other user may read the store")]


def _trouble(file: Path, right: str, remedy: str, of_another: str) -> Iterator[Finding]:
    """Check a file or a folder, which may be missing: its owner and its mode."""
    try:
        file_stat = file.stat()
    except OSError:
        return
    mode = stat.S_IMODE(file_stat.st_mode)
    what, advice = "", f"chmod {right} {quote(str(file))}{remedy}"
    if file_stat.st_uid != os.geteuid():
        what, advice = f"belongs to user {file_stat.st_uid}, this is user {os.geteuid()}", of_another
    elif mode & 0o077:
        what = f"is open to others (mode {mode:04o})"
    elif not os.access(file, os.R_OK | os.W_OK):
        what = "may not be read and written"
    if what:
        yield Finding("permissions", Verdict.WARNING, f"{file} {what}", advice)


def _check_prices() -> Finding:
    version = list_version()
    if version is None:
        about = "no list of prices: the cost of a call is known if the server reports it, or from `prices:` in the plan"
        return Finding("prices", Verdict.OK, about, f"to install the list: {install_command('prices')}")
    number, day = version
    return Finding("prices", Verdict.OK, f"genai-prices {number}, installed on {day}; never fetched from the network")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # perhaps in a folder that is not readable
        return True


async def check_store(place: StorePlace, command: Command) -> list[Finding]:
    """Check the store, its runs, and what its runs have left behind on this machine. A file is read in this thread."""
    runs: Sequence[RunRecord] = ()
    root = None
    findings = list(_check_file(place)) if isinstance(place, Path) else await _check_server(place)
    is_readable = all(one.verdict is not Verdict.BAD for one in findings if one.check in {"store", "file"})
    if isinstance(place, Path):
        root = SQLiteStore(place, mode="read").files_root
        is_readable = is_readable and (_exists(place) or place != DEFAULT_STORE)
    if is_readable:
        try:
            runs, resumable, root = await _read_store(place)
        except StoreError as error:
            findings.append(Finding("runs", Verdict.BAD, str(error)))
        else:
            findings += _check_runs(runs, resumable, command)
    left: list[Finding] = []
    if root is not None and _exists(root) and (at_work := agents_at_work(root)):
        left = list(_check_left_over(at_work, root, runs, command))
    return findings + (left or [Finding("children", Verdict.OK, "none left behind")])


def _check_file(place: Path) -> Iterator[Finding]:
    path = place.absolute()
    if _exists(path):
        yield Finding("store", Verdict.OK, str(path))
        yield from _check_permissions(path)
    if place == DEFAULT_STORE and not _exists(path):
        yield Finding("store", Verdict.OK, f"no store at {DEFAULT_STORE} yet", "`plait run PLAN` makes one")
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


def _check_runs(runs: Sequence[RunRecord], resumable: Collection[str], command: Command) -> Iterator[Finding]:
    states = [(run, shown_status(run)) for run in runs]
    interrupted = [run for run, status in states if status is RunStatus.INTERRUPTED]
    under_way = [run for run, status in states if run.owner and status not in RUN_DONE | {RunStatus.INTERRUPTED}]
    if not interrupted and not under_way:
        yield Finding("runs", Verdict.OK, f"{counted(len(runs), 'run')}, none running or interrupted")
    for run in under_way:
        by = f"{run.owner.process} since {run.owner.claimed_at}" if run.owner else "nobody"
        yield Finding("runs", Verdict.OK, f"{run.run_id} is being run by {by}")
    for run in interrupted[:_RUNS]:
        owner = run.owner
        gone = owner is not None and liveness(owner) is Liveness.DEAD
        whose = f": {owner.process} {'is gone' if gone else 'has not renewed its claim'}" if owner else ""
        advice = command("resume", run.run_id)
        if run.run_id not in resumable:
            advice = f"resume the run from Python, or name its backends: {advice} --backends FILE"
        yield Finding("runs", Verdict.WARNING, f"{run.run_id} is interrupted{whose}", advice)
    if (left := len(interrupted) - _RUNS) > 0:
        more = f"{left:,} more {'is' if left == 1 else 'are'} interrupted"
        yield Finding("runs", Verdict.WARNING, more, command("runs", "--limit", "1000"))


def check_agents(agents: Sequence[Installed], memory: int | None) -> Iterator[Finding]:
    """Yield the free `memory` (bytes) and one finding for each agent. Agents driven by ACP are listed only if
    installed.
    """
    if memory is not None:
        yield Finding("memory", Verdict.OK, f"{size(memory)} free")
    for one in agents:
        if one.path is None:
            if one.agent.backend:
                yield Finding(one.agent.name, Verdict.OK, "not installed", one.agent.install)
            continue
        parts = [_check_version(one), (Verdict.OK, one.path, ""), _check_login(one), _check_memory(one, memory)]
        states, advice = ([text for text in texts if text] for texts in list(zip(*parts, strict=True))[1:])
        yield Finding(one.agent.name, worst(part[0] for part in parts), ", ".join(states), "; ".join(advice))


def _check_version(one: Installed) -> tuple[Verdict, str, str]:
    tested = " and ".join(one.agent.tested)
    if one.version is None:
        return Verdict.WARNING, "reports no version", f"`{one.agent.program} --version` has to work"
    if one.is_tested:
        return Verdict.OK, f"{one.version} (tested)", ""
    if one.is_newer:
        return Verdict.OK, f"{one.version} (newer than tested: {tested})", ""
    return Verdict.WARNING, f"{one.version} (tested: {tested})", one.agent.install


def _check_login(one: Installed) -> tuple[Verdict, str, str]:
    if one.is_logged_in is None:
        return Verdict.OK, f"login unknown{f' ({one.by})' if one.by else ''}", ""
    if one.is_logged_in:
        return Verdict.OK, f"key in {one.by}" if one.by in one.agent.login.keys else "logged in", ""
    key = f", or set {one.agent.login.keys[0]}" if one.agent.login.keys else ""
    return Verdict.WARNING, "not logged in", f"`{one.agent.login.command}`{key}"


def _check_memory(one: Installed, memory: int | None) -> tuple[Verdict, str, str]:
    number = one.turns_that_fit(memory)
    if number is None:
        return Verdict.OK, "", ""
    fit = f"{number:,} at once fit into memory"
    return (Verdict.OK, fit, "") if number else (Verdict.WARNING, fit, "free some memory before running the agent")


def _check_left_over(
    left: Sequence[AtWork], root: Path, runs: Sequence[RunRecord], command: Command
) -> Iterator[Finding]:
    """Yield a finding for each run whose agents work without plait. Their files are below `root`, the folder beside the
    store.
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
            advice = f"{command('resume', run.run_id)} takes over their work"
        yield Finding("children", Verdict.WARNING, what, advice)


async def _check_server(place: ServerAddress) -> list[Finding]:
    """Check the server, the settings under which the server keeps every acknowledged batch, and the checksums. The
    check `store` is bad if the server does not answer, or lets this role store no run.
    """
    try:
        async with open_server(place, "read") as store:
            fit = Finding("store", Verdict.OK, f"{place}, PostgreSQL {store.server_version}")
            if (reason := await store.obstacle()) is not None:
                fit = Finding("store", Verdict.BAD, reason)
            durability = [Finding("durability", Verdict.WARNING, warning) for warning in await store.warnings()]
            return [fit, *durability, checksums(*await store.check_rows())]
    except StoreError as error:
        return [Finding("store", Verdict.BAD, str(error))]


_ANSWER_S = 120.0
"""Seconds for `plait doctor` on a host, which starts each agent for its version."""
_AGENTS = frozenset(agent.name for agent in AGENTS)
"""The checks that are printed even if all is well there; the others would fill the page."""
_SUCCEEDED = frozenset({0, 3})
"""The exit codes with findings: no check is bad, or some are."""


async def check_hosts(path: Path) -> tuple[list[tuple[str, HostState]], list[Finding]]:
    """Return the state of each host in the file at `path`, behind the name of its group, and the findings about those
    that answer. Raises InvalidRequest, PlanError.
    """
    visited = [(name, *await _visit(part, needs)) for name, (part, needs) in hosts_in_use(path).items()]
    hosts = [(name, state) for name, states, _ in visited for state in states]
    return hosts, [one for *_, there in visited for one in there]


async def _visit(
    part: HostsPart, needs: Collection[Mapping[str, float] | None]
) -> tuple[list[HostState], list[Finding]]:
    """Return the states of the hosts of the group, and the findings of `plait doctor` on each that can be used, all
    asked at once.
    """
    states: dict[int, HostState] = {}
    findings: dict[int, list[Finding]] = {}

    async def visit(index: int, host: ReachableHost) -> None:
        states[index] = await host.probe()
        if states[index].problem is None:
            findings[index] = await _doctor(host)

    try:
        async with part.make().reachable(needs) as hosts, anyio.create_task_group() as beside:
            for index, host in enumerate(hosts):
                beside.start_soon(visit, index, host)
    except HostUnreachable as error:
        return [HostState(part.names[0], 0, problem=f"away: {error}")], []
    if not states:
        none = "no worker that offers resources; start workers, with --resources"
        return [HostState(part.names[0], 0, problem=none)], []
    return [states[index] for index in sorted(states)], [one for index in sorted(findings) for one in findings[index]]


async def _doctor(host: ReachableHost) -> list[Finding]:
    with anyio.move_on_after(_ANSWER_S):
        output, ended = await host.run(("doctor", "--json"))
        if ended.code in _SUCCEEDED:
            checks: list[dict[str, str]] = json.loads(output)["checks"]
            return [
                Finding(f"{host.name}: {one['check']}", Verdict(one["verdict"]), one["found"], one["advice"])
                for one in checks
                if one["verdict"] != Verdict.OK or one["check"] in _AGENTS
            ]
        return [Finding(f"{host.name}: doctor", Verdict.BAD, f"plait doctor exited with {ended.code} there")]
    return [Finding(f"{host.name}: doctor", Verdict.BAD, f"plait doctor did not end within {_ANSWER_S:g} s there")]
