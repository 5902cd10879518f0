"""`plait doctor`: check whether this machine, its agents and the store are fit."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import click

from plait.backends.agents.agent_catalog import Installed, look_for_agents
from plait.backends.extras import install_command
from plait.backends.prices import list_version
from plait.backends.process.available_memory import available_memory
from plait.backends.process.child_manifest import AtWork, agents_at_work, left_over_servers
from plait.errors import StoreError
from plait.events import Owner
from plait.persistence import SQLiteStore
from plait.persistence import store_health as health
from plait.persistence.findings import Finding, Fitness, checksums
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_exits import COMPLETED, STORE
from plait.runner.cli.command_options import command_line, json_option, store_option
from plait.runner.cli.doctor_hosts import check_hosts
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, findings_json, print_findings
from plait.runner.client.backend_set import hosts_in_use, stores_backends
from plait.runner.client.store_place import DEFAULT_STORE, ServerAddress, StorePlace, open_server, read_only_store
from plait.runner.engine.lease import Liveness, liveness, seems_free
from plait.runner.state.attempt_files import run_folder
from plait.runner.views.event_sentences import counted, size
from plait.runner.views.read_views import shown_status
from plait.statuses import RUN_DONE, RunStatus, TaskStatus

if TYPE_CHECKING:
    from plait.persistence import PostgresStore

_MOUNTS = Path("/proc/self/mountinfo")
_MIB = 1 << 20
_RUNS = 5
_ALL = 1 << 31
_EVENTS_AT_ONCE = 1000


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
        return anyio.run(check_hosts, hosts_in_use(hosts_file), store_path, as_json)
    agents, memory = anyio.run(look_for_agents), available_memory()
    findings = [*_check_machine(store_path), *_check_agents(agents, memory)]
    findings += [*_check_store(store_path), *_check_children(store_path)]
    if as_json:
        worst = max((one.fitness for one in findings), key=list(Fitness).index)
        checked = {"verdict": worst.value, "store": str(store_path), "checks": findings_json(findings)}
        print_json({**checked, "agents": _agents_json(agents, memory)})
    else:
        print_findings(findings)
    return STORE if any(one.fitness is Fitness.BAD for one in findings) else COMPLETED


def _check_machine(path: StorePlace) -> Iterator[Finding]:
    yield Finding("python", Fitness.OK, f"{platform.python_version()}, plait {version('plait')}")
    yield _agent_library()
    yield health.library()
    yield _check_prices()
    if not isinstance(path, Path):
        return
    folder = next((one for one in path.absolute().parents if _exists(one)), path.absolute())
    mounts = _MOUNTS.read_text(errors="replace") if _MOUNTS.exists() else None
    yield health.file_system(path if _exists(path) else folder, mounts)
    yield health.space(folder)


def _check_prices() -> Finding:
    found = list_version()
    if found is None:
        about = "no list of prices: the cost of a call is known if the server reports it, or from `prices:` in the plan"
        return Finding("prices", Fitness.OK, about, f"to install the list: {install_command('prices')}")
    number, day = found
    return Finding("prices", Fitness.OK, f"genai-prices {number}, installed on {day}; never fetched from the network")


def _agent_library() -> Finding:
    """Return the version of the library of `kind: pydantic-ai`. Without it, plans without that kind run as well."""
    try:
        return Finding("pydantic-ai", Fitness.OK, version("pydantic-ai-slim"))
    except PackageNotFoundError:
        return Finding("pydantic-ai", Fitness.OK, f"not installed; run: {install_command('pydantic-ai')}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # perhaps in a folder that is not readable
        return True


def _check_store(given: StorePlace) -> Iterator[Finding]:
    if not isinstance(given, Path):
        findings = anyio.run(_check_server, given)
        yield from findings
        if not any(one.check == "store" and one.fitness is Fitness.BAD for one in findings):
            yield from _check_runs(given)
        return
    path = given.absolute()
    if _exists(path):
        yield Finding("store", Fitness.OK, str(path))
        yield from health.permissions(path)
    yield from health.leftovers(path)
    if given == DEFAULT_STORE and not _exists(path):
        yield Finding("store", Fitness.OK, f"no store at {DEFAULT_STORE} yet", "`plait run PLAN` makes one")
        return
    readable = True
    for finding in health.file(path):
        readable = readable and finding.check != "file"
        yield finding
    if readable:
        yield from _check_runs(given)


def _check_runs(path: StorePlace) -> Iterator[Finding]:
    try:
        runs, resumable = anyio.run(_list_runs_and_resumable, path)
    except StoreError as error:
        yield Finding("runs", Fitness.BAD, str(error))
        return
    states = [(run, shown_status(run)) for run in runs]
    interrupted = [run for run, status in states if status is RunStatus.INTERRUPTED]
    under_way = [run for run, status in states if run.owner and status not in RUN_DONE | {RunStatus.INTERRUPTED}]
    if not interrupted and not under_way:
        yield Finding("runs", Fitness.OK, f"{counted(len(runs), 'run')}, none running or interrupted")
    yield from map(_active_finding, under_way)
    yield from _interrupted_findings(path, interrupted, resumable)


async def _all_runs(path: StorePlace) -> tuple[RunRecord, ...]:
    async with read_only_store(path) as store:
        return await store.list_runs(_ALL)


async def _list_runs_and_resumable(path: StorePlace) -> tuple[tuple[RunRecord, ...], set[str]]:
    """Return all runs, and the ids of the interrupted runs (those that are printed) that the command can resume."""
    async with read_only_store(path) as store:
        runs = await store.list_runs(_ALL)
        shown = [run.run_id for run in runs if shown_status(run) is RunStatus.INTERRUPTED][:_RUNS]
        whole = [await store.get_run(run_id) for run_id in shown]
        return runs, {run.run_id for run in whole if run is not None and stores_backends(run)}


def _active_finding(run: RunRecord) -> Finding:
    owner = run.owner
    by = f"process {owner.pid} on {owner.host} since {owner.claimed_at}" if owner else "nobody"
    return Finding("runs", Fitness.OK, f"{run.run_id} is being run by {by}")


def _interrupted_findings(path: StorePlace, runs: list[RunRecord], resumable: Collection[str]) -> Iterator[Finding]:
    for run in runs[:_RUNS]:
        owner = run.owner
        whose = f": process {owner.pid} on {owner.host} {_owner_state(owner)}" if owner else ""
        advice = command_line(path, "resume", run.run_id)
        if run.run_id not in resumable:
            advice = f"resume the run from Python, or name its backends: {advice} --backends FILE"
        yield Finding("runs", Fitness.WARNING, f"{run.run_id} is interrupted{whose}", advice)
    if len(runs) > _RUNS:
        left = len(runs) - _RUNS
        more = f"{left:,} more {'is' if left == 1 else 'are'} interrupted"
        yield Finding("runs", Fitness.WARNING, more, command_line(path, "runs", "--limit", "1000"))


def _owner_state(owner: Owner) -> str:
    return "is gone" if liveness(owner) is Liveness.DEAD else "has not renewed its claim"


def _check_children(path: StorePlace) -> Iterator[Finding]:
    left = [*_check_model_servers(), *_check_agents_at_work(path)]
    yield from left or [Finding("children", Fitness.OK, "none left behind")]


def _check_model_servers() -> Iterator[Finding]:
    pids = left_over_servers()
    if pids is None:
        yield Finding("children", Fitness.OK, "cannot tell", "look for processes that run _llama_server.py")
    elif pids:
        shown = " ".join(map(str, pids))
        found = f"{counted(len(pids), 'model server')} left behind by a process that is gone: {shown}"
        yield Finding("children", Fitness.WARNING, found, f"kill {shown}")


def _check_agents_at_work(path: StorePlace) -> Iterator[Finding]:
    root = SQLiteStore(path, mode="read").files_root if isinstance(path, Path) else _files_root(path)
    left = agents_at_work(root) if root is not None and _exists(root) else []
    if root is not None and left:
        try:
            runs = anyio.run(_all_runs, path) if not isinstance(path, Path) or _exists(path) else ()
        except StoreError:  # another finding reports the store; the agents are worth a line all the same
            runs = ()
        yield from _check_left_over(left, root, runs, path)


def _files_root(place: ServerAddress) -> Path | None:
    """Return the folder of the store on this host; None if the server cannot be reached."""
    try:
        return anyio.run(_read_files_root, place)
    except StoreError:  # another finding reports the store
        return None


async def _read_files_root(place: ServerAddress) -> Path | None:
    async with open_server(place, "read") as store:
        return store.files_root


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
    return Fitness.WARNING, "not logged in", f"`{one.agent.login.how}`{key}"


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
        shown = ", ".join(_describe_agent(one, root) for one in those)
        what = f"{counted(len(those), 'agent')} of run {name} still running after the end of the plait process: {shown}"
        yield Finding("children", Fitness.WARNING, as_line(what), _advice_for(run, those, path))


def _describe_agent(one: AtWork, root: Path) -> str:
    task = one.folder.relative_to(root).parts[1:2]
    pids = " ".join(map(str, one.pids))
    return f"{task[0] if task else '?'} ({one.kind}, process {pids})"


def _advice_for(run: RunRecord | None, those: Sequence[AtWork], path: StorePlace) -> str:
    if run is None or RunStatus(run.status) in RUN_DONE:
        return f"kill {' '.join(str(pid) for one in those for pid in one.pids)}"
    return f"{command_line(path, 'resume', run.run_id)} takes over their work"


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
            return [fit, *durability, await _check_rows(store)]
    except StoreError as error:
        return [Finding("store", Fitness.BAD, str(error))]


async def _check_rows(store: PostgresStore) -> Finding:
    results = messages = 0
    damaged: list[str] = []
    for run in await store.list_runs(_ALL):
        try:
            await _read_history(store, run.run_id)
            for task in await store.list_tasks(run.run_id):
                talk = await store.list_messages(run.run_id, task.task_id)
                results += TaskStatus(task.status) is TaskStatus.COMPLETED
                messages += len(talk)
                if task.damaged or any(message.damaged for message in talk):
                    damaged.append(f"{run.run_id}/{task.task_id}")
        except StoreError as error:
            damaged.append(await _damage(store, error))
    try:
        await store.session_ids()
    except StoreError as error:
        damaged.append(await _damage(store, error))
    return checksums(damaged, results, messages)


async def _read_history(store: PostgresStore, run_id: str) -> None:
    """Read everything of the run but tasks and messages. Raises StoreError for a damaged row."""
    await store.get_run(run_id)
    await store.list_notes(run_id)
    await store.list_attempts(run_id)
    last = 0
    while events := await store.list_events(run_id, last, _EVENTS_AT_ONCE):
        last = events[-1].seq


async def _damage(store: PostgresStore, error: StoreError) -> str:
    """Return the name of the damaged part. Raises StoreError if the server does not answer any more."""
    await store.list_runs(1)
    return str(error).split(";", maxsplit=1)[0]
