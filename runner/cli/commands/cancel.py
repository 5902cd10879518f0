"""`plait cancel`: a run is given up for good, wherever it runs."""

from __future__ import annotations

from pathlib import Path

import anyio
import click

from plait.persistence.records import RunRecord
from plait.runner.cli.backends import Backing
from plait.runner.cli.display import report
from plait.runner.cli.exits import COMPLETED, say
from plait.runner.cli.lookup import find_run, say_if_watched, shown_status, store_for_going_on
from plait.runner.cli.options import json_option, plait, store_option
from plait.runner.domain.status import RUN_DONE, RunStatus
from plait.runner.parallel import CANCEL_GRACE_SECONDS


@click.command("cancel")
@click.argument("run")
@store_option
@json_option
def cancel_command(run: str, store_path: Path, as_json: bool) -> int:
    """Cancel RUN (an id, its beginning, or `last`) for good, also while another process runs it.

    What is completed stays; nothing more starts, and what is under way has a few seconds to come to its end. A run that
    has ended already stays as it is.
    """
    return anyio.run(cancel_run, run, store_path, as_json)


_WAIT = CANCEL_GRACE_SECONDS + 3.0
"""How many seconds are spent on waiting for the end: until its process looks, for the usual grace time, and some."""


async def cancel_run(word: str, path: Path, as_json: bool) -> int:
    """Cancel the run that `word` names; the exit code."""
    async with store_for_going_on(path) as store:
        record = await find_run(store, word)
        had_ended = RunStatus(record.status) in RUN_DONE
        if not had_ended:
            say_if_watched(record)
        status = await Backing({}).runner({}, store=store).cancel_run(record.run_id, wait=_WAIT)
        record = await find_run(store, record.run_id)
    if as_json:
        report.tell_value({"run_id": record.run_id, "status": status.value, "had_ended": had_ended})
    else:
        say(f"run {record.run_id} {_what_became(record, status, had_ended)}")
        say(f"  {'show':<9} {plait(path, 'show', record.run_id)}")
    return COMPLETED


def _what_became(record: RunRecord, status: RunStatus, had_ended: bool) -> str:
    if had_ended:
        return f"is {status.value} already; nothing was changed"
    if status is RunStatus.CANCELLED:
        return "is cancelled"
    if status in RUN_DONE:
        return f"came to its end first: it is {status.value}"
    owner = f"process {record.owner.pid} on {record.owner.host}" if record.owner else "its process"
    if shown_status(record) is RunStatus.CANCELLING:
        return f"is being cancelled: {owner} starts nothing more, and is still ending what is under way"
    return f"is to be cancelled: {owner} was told, and has not answered; should it die, cancel or resume finishes it"
