"""`plait serve`, `plait ui`, `plait mcp`, `plait worker` and `plait wake`: the runs of a store served to programs, to a
browser and to agents, and executed for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import webbrowser
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from plait import events
from plait.backends.backend_protocol import Backend
from plait.backends.command_backend import CommandBackend
from plait.backends.extras import missing_extra
from plait.clock_and_ids import Clock
from plait.errors import InvalidRequest, PlaitError, StoreError
from plait.persistence.store_protocol import Store
from plait.runner.cli.command_line import CANCELLED, COMPLETED, subcommand
from plait.runner.cli.command_options import DEFAULT_PORT, MCP, SERVE, UI, WAKE, WORKER
from plait.runner.cli.ctrl_c import stop_on_signal
from plait.runner.cli.run_report import PlainDisplay
from plait.runner.cli.terminal_output import as_line, command, output, print_json, print_line, print_note, visible
from plait.runner.client.offered_plans import LocalPlans, named_plans
from plait.runner.client.run_backends import (
    BackendOptions,
    BackendSet,
    FileOptions,
    TrustedBackends,
    backend_set_of_file,
)
from plait.runner.client.run_worker import Worker
from plait.runner.client.runs import Runs
from plait.runner.client.unsent_notices import UnsentNotices
from plait.runner.engine.run_options import LEASE_SECONDS, StorePlace, open_store
from plait.runner.serving.http_guard import (
    listen,
    page_address,
    page_of_running_server,
    server_access,
    url_of,
)
from plait.runner.state.attempt_files import files_root
from plait.runner.state.stored_run import MOST_RUNS_SEARCHED
from plait.runner.views.event_sentences import counted, seconds
from plait.statuses import RunStatus

if TYPE_CHECKING:
    import socket

    from plait.runner.serving.http_guard import SignIn
    from plait.runner.serving.http_routes import ServedRuns

SERVER = ("server", "fastapi", "uvicorn")
"""The extra of a server, and its packages."""


@subcommand("serve", SERVE)
async def serve_command(file: Path | None, **options: Any) -> int:
    """Create, start, follow, answer and cancel runs over HTTP. Only programs on this machine that send the token are
    served; the token is in a file beside the store, and the path is printed.

    Ctrl-C stops the runs, and `plait resume` continues each later; a second Ctrl-C exits at once.
    """
    if lack := missing_extra("plait serve", *SERVER):
        raise InvalidRequest(lack)
    backend_set = backend_set_of_file(file, BackendOptions(options["backend"], options["model"], options["base_url"]))
    from plait.runner.serving.http_routes import ServedRuns  # noqa: PLC0415 - the extra `server` may be missing

    host, queues = options["host"], options["queues"]

    async def announce(url: str, _sign_in: SignIn, token_path: Path) -> None:
        if options["as_json"]:
            # One line, for the program that waits.
            print_line(json.dumps({"url": url, "token_file": str(token_path)}))
        doing = "queueing runs for workers" if queues else "serving runs"
        print_note(f"{doing} on {url}; `plait ui` opens the web page; Ctrl-C stops")
        print_note(f"  {'token':<9} {token_path}")

    with listen(host, options["port"]) as listening:
        async with (
            backend_set.open(() if queues else backend_set.specs) as made,
            open_store(options["store_path"]) as store,
            _make_runs(backend_set, made, store, options) as runs,
        ):
            for backend in made.values():
                if isinstance(backend, CommandBackend):
                    backend.only_allowed = True
            served = ServedRuns(runs, backend_set, starts=not queues)
            take_up = partial(runs.take_up, _print_taken_up) if options["takes_up"] else None
            wakes = None if queues else partial(runs.keep_waking, _print_woken, fits=runs.is_posted)
            return await _serve(served, listening, host, options["store_path"], announce, take_up, wakes)


def _make_runs(backend_set: BackendSet, made: Mapping[str, Backend], store: Store, options: Mapping[str, Any]) -> Runs:
    """Return the runs: on the open backends `made`, or on none if the workers execute the runs."""
    concurrency = options["concurrency"] or backend_set.concurrency()
    if options["queues"]:
        unopened = backend_set.unopened(backend_set.specs)
        queueing = backend_set.options(unopened, store=store, concurrency=concurrency)
        return Runs(queueing, source=TrustedBackends(store).for_run)
    return Runs(
        backend_set.options(
            made, store=store, concurrency=concurrency, shared_limits=True, cancel_grace=options["cancel_grace"]
        )
    )


async def _serve(
    served: ServedRuns,
    listening: socket.socket,
    host: str,
    place: StorePlace,
    announce: Callable[[str, SignIn, Path], Coroutine[Any, Any, None]],
    *at_start: Callable[[], Coroutine[Any, Any, None]] | None,
) -> int:
    """Serve until the first signal. Once signals are handled, `announce` is called with the address, the sign-in and
    the file of the token, then `at_start`. Return the exit code.
    """
    from plait.runner.serving.http_server import ApiServer  # noqa: PLC0415 - the extra `server` may be missing

    runs, url = served.runs, url_of(host, listening.getsockname()[1])
    store = runs.options.store
    assert store is not None

    def note(text: str) -> None:
        print_note(text if runs.driven else "stopping")

    with server_access(place, url, files_root(store)) as (sign_in, token_path):
        server = ApiServer(served, listening, sign_in, host)
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, server.stop, note)
            beside.start_soon(announce, url, sign_in, token_path)
            for start in filter(None, at_start):
                beside.start_soon(start)
            beside.start_soon(UnsentNotices(store).send_for_ever)
            await server.serve()
            beside.cancel_scope.cancel()
    return CANCELLED if runs.driven else COMPLETED


_EVERYWHERE = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - refused
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
_PROOF_S = 10.0


@subcommand("ui", UI)
async def ui_command(host: str, port: int | None, no_browser: bool, store_path: StorePlace, **options: Any) -> int:
    """Open the web page: runs with their tasks, conversations and costs, live; questions are answered there, and runs
    are resumed and cancelled.

    The address holds a code that can be used once, within a minute; the browser is then signed in until the server
    ends. Ctrl-C stops the runs that the page has resumed, and ends the page; other processes and their runs go on.
    """
    if lack := missing_extra("plait ui", *SERVER):
        raise InvalidRequest(lack)
    if host in _EVERYWHERE:
        raise InvalidRequest(
            f"--host {host!r} names every address; name the one address under which browsers open the page"
        )
    if host == "localhost":
        host = "127.0.0.1"  # a browser may look for localhost at ::1, where another user's server may listen
    from plait.runner.serving.http_routes import ServedRuns  # noqa: PLC0415 - the extra `server` may be missing

    announce = partial(_announce, options["as_json"], not no_browser)

    async def announce_page(url: str, sign_in: SignIn, token_path: Path) -> None:
        print_note("the page, until Ctrl-C:")
        await announce({"url": url, "page": page_address(url, sign_in), "token_file": str(token_path)})

    async with open_store(store_path) as store:
        with ExitStack() as stack:
            wanted = DEFAULT_PORT if port is None else port
            try:
                listening = stack.enter_context(listen(host, wanted))
            except InvalidRequest:
                url = url_of(host, wanted)
                page = None
                with anyio.move_on_after(_PROOF_S):
                    page = await anyio.to_thread.run_sync(
                        page_of_running_server, store_path, url, store.files_root, abandon_on_cancel=True
                    )
                if page is not None:
                    print_note("a server runs on this store already; its page:")
                    await announce({"url": url, "page": page})
                    return COMPLETED
                if port is not None:
                    raise
                listening = stack.enter_context(listen(host, 0))
            if host not in _LOOPBACK:
                print_note(
                    f"connections to {host} are not encrypted: others in the network can read them, sign-in "
                    "included; a tunnel by ssh is safer"
                )
            async with TrustedBackends(store).runs() as runs:
                wakes = partial(runs.keep_waking, _print_woken)
                return await _serve(ServedRuns(runs), listening, host, store_path, announce_page, wakes)


async def _announce(as_json: bool, opens_browser: bool, facts: Mapping[str, str]) -> None:
    """Print the address on a line of its own, and for a program that waits; open the browser of the desktop, if there
    is one.
    """
    print_note(facts["page"])
    if as_json:
        print_line(json.dumps(dict(facts)))
    has_desktop = sys.platform in {"darwin", "win32"} or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if opens_browser and has_desktop:
        await anyio.to_thread.run_sync(webbrowser.open, facts["page"], abandon_on_cancel=True)


@subcommand("mcp", MCP)
async def mcp_command(plans: tuple[Path, ...], **options: Any) -> None:
    """Serve the Model Context Protocol on standard input and output: an agent may start runs of the plans in the files
    PLAN, each under the name of its file, wait for a run, read results, answer questions and cancel.

    The runs stop when the agent closes the connection. A start with the same key, or `plait resume`, continues a run.
    """
    if lack := missing_extra("plait mcp", "mcp", "mcp"):
        raise InvalidRequest(lack)
    named_plans(plans)
    backend = BackendOptions(options["backend"], options["model"], options["base_url"])
    from plait.runner.serving.mcp_server import RunTools, serve  # noqa: PLC0415 - the extra `mcp` may be missing

    ended, signalled = anyio.Event(), anyio.Event()

    def end_at_signal() -> None:
        signalled.set()
        ended.set()

    async def serve_until_closed(tools: RunTools) -> None:
        with redirect_stdout(output()):  # the server reads the names of the streams, and redirects `print` itself
            await serve(tools)
        ended.set()

    async with open_store(options["store_path"]) as store, anyio.create_task_group() as beside:
        async with TrustedBackends(store).runs() as runs:
            await beside.start(stop_on_signal, end_at_signal, print_note)
            tools = RunTools(runs, LocalPlans(plans, backend, store, runs), Clock())
            beside.start_soon(serve_until_closed, tools)
            await ended.wait()
        if signalled.is_set():
            # A thread still waits for a line of standard input, and nothing ends that wait. The runs are stored.
            os._exit(CANCELLED)
        beside.cancel_scope.cancel()


@subcommand("worker", WORKER)
async def worker_command(store_path: StorePlace, concurrency: int, **options: Any) -> None:
    """Execute queued runs, and runs whose process has died, until a signal. Several workers may share a store.

    Ctrl-C or SIGTERM stops the runs and frees them for other workers; a second signal exits at once.
    """
    plans = tuple(folder.resolve() for folder in options["plans"])
    files = FileOptions(backends=options["backends"], hosts=options["hosts"], plans=plans)
    await work(store_path, concurrency, files)


async def work(place: StorePlace, concurrency: int, files: FileOptions, lease: float = LEASE_SECONDS) -> None:
    """Work until a signal."""
    async with open_store(place) as store:
        is_empty = False
        with suppress(StoreError):  # a store that is away is waited for
            is_empty = not await store.list_runs(1)
        print_note(f"working on the runs of {place}, {concurrency} at once; Ctrl-C stops")
        if is_empty:
            print_note(f"{place} has no run yet; if runs were queued elsewhere, name their store with --store")
        worker = Worker(store, concurrency, files, lease, show=_print_event, note=print_note)
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, worker.stop, print_note)
            beside.start_soon(UnsentNotices(store, files).send_for_ever)
            await worker.work()
            beside.cancel_scope.cancel()


@subcommand("wake", WAKE)
async def wake_command(store_path: StorePlace, install: bool, as_json: bool, **_options: Any) -> int:
    """Continue the parked runs that are due, until each ends or is parked again; for cron or a timer.

    Runs that were started with --park, or parked once, are due at their time, once a person has answered, and after
    their process has died. A run that a person has stopped stays stopped. Prints which runs continue, and which
    are not due yet, and sends the notices that other processes have left. Ctrl-C or SIGTERM leaves the runs to the next
    call.
    """
    if install:
        print_line(timer_text(store_path))
        return COMPLETED
    woken: dict[str, PlaitError | None] = {}
    failure: PlaitError | None = None
    async with open_store(store_path, "existing") as store:
        runs = TrustedBackends(store, note=print_note).runs()
        waiting = anyio.CancelScope()
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, waiting.cancel, print_note)
            try:
                async with runs:
                    with waiting:
                        await _wake_all(runs, woken)
                        await UnsentNotices(store).send()
            except PlaitError as error:  # raised in here it would be part of a group
                failure = error
            beside.cancel_scope.cancel()
        if failure is not None:
            raise failure
        with suppress(StoreError):  # what dead processes have left, since no other one may be there
            await UnsentNotices(store).send()
        ended = [await runs.get(run_id, tasks=False) for run_id in woken]
        parked = await runs.list(MOST_RUNS_SEARCHED, statuses=[RunStatus.PARKED])
    if as_json:
        reasons = {run_id: str(error) for run_id, error in woken.items() if error is not None}
        gone_on = [{"run_id": one.run_id, "status": one.status, "error": reasons.get(one.run_id)} for one in ended]
        print_json({"woken": gone_on, "parked": [{"run_id": one.run_id, "due_at": one.due_at} for one in parked]})
    else:
        lines = [f"run {as_line(one.run_id)} is {one.status_text}" for one in ended if woken[one.run_id] is None]
        lines += [f"run {as_line(one.run_id)} is {one.status_text}" for one in parked if one.run_id not in woken]
        for line in lines or ([] if woken else ["no run is due, and none is parked"]):
            print_line(line)
    return CANCELLED if waiting.cancel_called else COMPLETED


async def _wake_all(runs: Runs, woken: dict[str, PlaitError | None]) -> None:
    """Continue the runs that are due, and those that become due meanwhile, each once. Note them in `woken`, each with
    what keeps it from continuing.
    """

    def on_woken(run_id: str, error: PlaitError | None) -> None:
        woken[run_id] = error
        _print_woken(run_id, error)

    async def is_new(run_id: str) -> bool:
        return run_id not in woken

    await runs.wake(on_woken)
    while runs.driven:
        await runs.one_gone()
        await runs.wake(on_woken, fits=is_new)


def _print_taken(taken: str, stays: str, run_id: str, error: PlaitError | None) -> None:
    """Say that a run goes on, or what keeps it from it."""
    outcome = taken if error is None else f"{stays}: {as_line(str(error), 300)}"
    print_note(outcome.replace("RUN", f"run {as_line(run_id)}", 1))


_print_taken_up = partial(_print_taken, "took up RUN", "RUN is left as it is")
_print_woken = partial(_print_taken, "RUN continues", "RUN is left parked")


def timer_text(place: StorePlace) -> str:
    """Return the unit files of a timer that wakes the runs of the store, and a line for cron."""
    program = str(Path(shutil.which(sys.argv[0]) or sys.argv[0]).absolute())
    words = [program, "wake", "--store", str(place.absolute() if isinstance(place, Path) else place)]
    name = f"plait-wake-{hashlib.sha256(words[-1].encode()).hexdigest()[:6]}"
    cron = command(*words).replace("%", r"\%")
    return _TIMER.format(name=name, unit=" ".join(map(_unit_word, words)), cron=cron)


def _unit_word(word: str) -> str:
    """Return the word as a command line of systemd writes it."""
    escaped = visible(word).replace("\\", r"\\").replace('"', r"\"").replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


_TIMER = """\
# ~/.config/systemd/user/{name}.service
[Unit]
Description=Continue the plait runs that are due

[Service]
Type=oneshot
ExecStart={unit}
# The keys of the backends, NAME=VALUE in each line, in a file for your eyes only:
#EnvironmentFile=%h/.config/plait/keys

# ~/.config/systemd/user/{name}.timer
[Unit]
Description=Continue the plait runs that are due, every five minutes

[Timer]
OnCalendar=*:0/5
Persistent=true

[Install]
WantedBy=timers.target

# systemctl --user daemon-reload && systemctl --user enable --now {name}.timer

# Or a line for `crontab -e`, below lines NAME=VALUE with the keys of the backends:
*/5 * * * * {cron}"""


def _print_event(run_id: str, event: events.Event) -> None:
    """Print a line for each event of a run but those of its tasks."""
    if isinstance(event, events.StoreAwaited):
        print_note(
            f"run {as_line(run_id)} has ended; waiting up to {seconds(event.seconds)} for the store to take the "
            f"last {counted(event.changes, 'change')}; a second signal ends the wait"
        )
    elif not isinstance(event, events.TaskEvent | events.TasksAdded):
        PlainDisplay().handle(event)
