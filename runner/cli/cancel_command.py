"""`plait cancel`: cancel a run for good, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_options import (
    async_command,
    hosts_option,
    json_option,
    print_next,
    run_argument,
    store_option,
)
from plait.runner.cli.run_report import print_watch_notice, unreached_line
from plait.runner.cli.terminal_output import print_json, print_note
from plait.runner.client.named_runs import find_run
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.engine.lease import shown_status
from plait.runner.engine.run_options import CANCEL_GRACE_SECONDS, StorePlace, open_store
from plait.statuses import RUN_DONE, RunStatus

_WAIT = CANCEL_GRACE_SECONDS + 3.0
"""Seconds to wait for the end of the run: the grace time of running tasks, and the time until the owner reads the note.
"""


@async_command("cancel")
@run_argument
@hosts_option
@store_option
@json_option
async def cancel_command(run: str, store_path: StorePlace, as_json: bool, hosts: Path | None) -> None:
    """Cancel RUN (an id, the beginning of an id, or `last`) for good, also while another process runs the run.

    Completed tasks keep their results. No further task starts, and running tasks have 5 seconds to end, or as many as
    `serve --cancel-grace` says for a run of a server. A run that has ended stays as it is.

    Hosts of the run that cannot be reached are named. Cancel the run again when they are back, to end what still runs
    there.
    """
    async with open_store(store_path, "existing") as store:
        record = await find_run(store, run)
        had_ended = RunStatus(record.status) in RUN_DONE
        unreached: dict[str, Sequence[str]] = {}
        if not had_ended:
            print_watch_notice(record)
        runs = TrustedBackends(store, FileOptions(hosts=hosts), note=print_note).runs()
        status = await runs.cancel(record.run_id, wait=_WAIT, on_unreached=unreached.update)
        record = await find_run(store, record.run_id)
    if as_json:
        value = {"run_id": record.run_id, "status": status.value, "had_ended": had_ended, "unreached": unreached}
        print_json(value)
        return
    print_note(f"run {record.run_id} {_describe_result(record, status, had_ended)}")
    for host, tasks in unreached.items():
        print_note(unreached_line(host, tasks))
    if unreached:
        print_next(store_path, "cancel", record.run_id, *(() if hosts is None else ("--hosts", str(hosts))))
    print_next(store_path, "show", record.run_id)


def _describe_result(record: RunRecord, status: RunStatus, had_ended: bool) -> str:
    if had_ended and status is RunStatus.CANCELLED:
        return "is cancelled already"
    if had_ended:
        return f"is {status.value} already; nothing was changed"
    if status is RunStatus.CANCELLED:
        return "is cancelled"
    if status in RUN_DONE:
        return f"ended first: its status is {status.value}"
    owner = record.owner.process if record.owner else "its process"
    if shown_status(record) is RunStatus.CANCELLING:
        return f"is being cancelled: {owner} starts no further task, and is still ending running tasks"
    return f"is to be cancelled: {owner} has not yet answered; if the process dies, cancel or resume finishes the run"
