"""`plait runs`, `plait budget`, `plait export` and `plait gc`: the runs of a store listed, their money, a run written
to a file or sent as a trace, and old runs deleted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from plait.clock_and_ids import Clock, iso, parse_time, trace_id
from plait.errors import InvalidRequest
from plait.persistence import Store
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_line import subcommand
from plait.runner.cli.command_options import BUDGET, EXPORT, GC, RUNS
from plait.runner.cli.terminal_output import (
    as_line,
    cells,
    file_to_write,
    print_json,
    print_line,
    print_note,
    print_table,
    write_file,
)
from plait.runner.client.create_run import KEYED
from plait.runner.client.runs import Runs, find_run
from plait.runner.engine.lease import shown_status
from plait.runner.engine.run_options import RunOptions, StorePlace, open_store
from plait.runner.engine.stored_ledger import list_accounts
from plait.runner.scheduling.account_ledger import Row, money_of_day
from plait.runner.state.stored_run import read_settings, rows_file_of
from plait.runner.views.event_sentences import age, counted, size, spent_cells, tokens
from plait.runner.views.read_views import budget_view, find_runs, run_view
from plait.runner.views.result_rows import as_csv, as_json_lines, columns, csv_heading, csv_lines
from plait.runner.views.trace_spans import RunTrace, SpanSender
from plait.runner.views.view_models import RunView, view_json
from plait.statuses import RUN_DONE, RunStatus, TaskStatus
from plait.usage import dollars


@subcommand("runs", RUNS)
async def runs_command(
    limit: int, statuses: tuple[str, ...], long: bool, store_path: StorePlace, as_json: bool
) -> None:
    """List the runs in the store, newest first. A run without a living owner is shown as interrupted."""
    wanted = tuple(map(RunStatus, statuses))
    async with open_store(store_path, "read") as store:
        records = await find_runs(store, min(limit + 1, sys.maxsize), statuses=wanted, searched=sys.maxsize)
        sizes = await store.run_sizes() if long else {}
        runs = records[:limit]
        keys = [] if as_json else [await _key(store, run) for run in runs]
    views = list(map(run_view, runs))
    held = [sizes.get(run.run_id, 0) for run in runs]
    if as_json:
        sized = ({**view_json(one), "size_bytes": size} for one, size in zip(views, held, strict=True))
        print_json(list(sized) if long else views)
        return
    if not runs:
        shown = " or ".join(statuses)
        print_line(f"no run is {shown}; `plait runs` shows all" if shown else "no runs yet; `plait run PLAN` makes one")
        return
    rows = _fitted(list(map(_run_row, runs, views)))
    head = LONG_HEAD if long else HEAD
    if long:
        rows = [
            (*first, tokens(run.usage), size(bytes_held), created, _owner(shown))
            for (*first, created), run, shown, bytes_held in zip(rows, runs, views, held, strict=True)
        ]
    if any(keys):
        head, rows = (*head, "KEY"), [(*row, key) for row, key in zip(rows, keys, strict=True)]
    print_table([head, *rows], 2, [None, *(shown.status for shown in views)], frozenset({4, 5, 6, 7}))
    if len(records) > limit:
        print_note(f"these are the newest {limit}; there are more: --limit N")


HEAD = ("RUN", "NAME", "STATUS", "TASKS", "COST", "AGE")
LONG_HEAD = ("RUN", "NAME", "STATUS", "TASKS", "COST", "TOKENS", "SIZE", "AGE", "OWNER")
_WIDTH = 80
_SHORTEST_NAME = 8


def _fitted(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the columns of the short list, with names cut so that a line has at most 80 columns, if possible."""
    widths = [max(map(cells, column)) for column in zip(HEAD, *rows, strict=True)]
    room = _WIDTH - sum(widths) - 2 * (len(HEAD) - 1) + widths[1]
    return [(run_id, as_line(name, max(room, _SHORTEST_NAME)), *rest) for run_id, name, *rest in rows]


def _owner(run: RunView) -> str:
    if run.owner is None:
        return ""
    return as_line(f"{run.owner.process}{', gone' if run.owner.liveness == 'dead' else ''}")


def _run_row(run: RunRecord, shown: RunView) -> tuple[str, ...]:
    if run.damaged:
        return as_line(run.run_id), "", "damaged", "", "", ""
    completed, failed = (run.counts.get(one, 0) for one in (TaskStatus.COMPLETED, TaskStatus.FAILED))
    return (
        as_line(run.run_id),
        as_line(run.name, 40),
        shown.status_text,
        f"{completed:,} of {shown.total:,}" + (f", {failed:,} failed" if failed else ""),
        spent_cells(run.usage)[1],
        age(time.time() - parse_time(run.created_at)),
    )


async def _key(store: Store, run: RunRecord) -> str:
    """Return the key from which the id of the run was made; empty without one. It is read for such runs alone: with the
    settings come all inputs.
    """
    whole = await store.get_run(run.run_id) if run.run_id.startswith(KEYED) and not run.damaged else None
    key = None if whole is None or whole.damaged else read_settings(whole).get("key")
    return as_line(key, 40) if isinstance(key, str) else ""


@subcommand("budget", BUDGET)
async def budget_command(limit: int, store_path: StorePlace, as_json: bool) -> None:
    """Show what the runs that have not ended may spend and have spent, and the limits of each account.

    An account is a backend with its server and key. All processes on the store keep its limits together: `limits` of
    the backend, or `rates` in Python.
    """
    now = Clock().wall()
    runs: list[dict[str, Any]] = []
    async with open_store(store_path, "existing") as store:
        going_on = tuple(status for status in RunStatus if status not in RUN_DONE)
        for listed in await find_runs(store, limit, statuses=going_on, searched=limit):
            run = await store.get_run(listed.run_id)  # with its settings
            budget = None if run is None else await budget_view(store, run, await store.list_tasks(run.run_id))
            if run is not None and budget is not None:
                runs.append({"run_id": run.run_id, **view_json(budget)})
        rows = await store.transact(list_accounts())
    accounts = [_account(name, row, now) for name, row in rows.items()]
    if as_json:
        print_json({"runs": runs, "accounts": accounts})
        return
    if not runs and not accounts:
        print_line("no run has a budget, and no backend a rate limit; see `limits` and `budget` of a plan")
    if runs:
        print_table([("RUN", "BUDGET", "SPENT", "RESERVED"), *map(_money_row, runs)], 0, [None] * (len(runs) + 1))
    if accounts:
        if runs:
            print_line("")
        lines = [("ACCOUNT", "A MINUTE", "TODAY", "IN LINE", "CLOSED UNTIL", "USED BY"), *map(_account_row, accounts)]
        print_table(lines, 0, [None] * len(lines), frozenset({3}))


def _money_row(run: dict[str, Any]) -> tuple[str, ...]:
    whole = "max_cost of tasks" if run["usd"] is None else dollars(run["usd"])
    return run["run_id"], whole, dollars(run["spent_usd"]), dollars(run["reserved_usd"])


def _account(name: str, row: Row, now: float) -> dict[str, Any]:
    """Return an account as JSON. Raises InvalidRequest if its row is damaged."""
    try:
        limits: dict[str, float] = row.get("limits", {})
        requests = row.get("requests")
        in_line = 0 if requests is None else max(0, round((requests[2] - now) * limits["requests"] / 60))
        closed = row.get("closed_until", 0.0)
        money = money_of_day(row, now)
        users = {user: {"requests": part[0], "tokens": part[1]} for user, part in row.get("users", {}).items()}
        return {
            "account": name,
            "requests_per_minute": limits.get("requests"),
            "tokens_per_minute": limits.get("tokens"),
            "server_requests_per_minute": row["requests"][0] if "requests" in row else None,
            "server_tokens_per_minute": row["tokens"][0] if "tokens" in row else None,
            "usd_per_day": limits.get("usd"),
            "spent_usd": money["total"] - money["reserved"],
            "reserved_usd": money["reserved"],
            "calls_in_line": 0 if closed > now else in_line,
            "closed_until": iso(closed) if closed > now else None,
            "used_by": users,
        }
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidRequest(f"the row of account {name!r} is damaged ({error!r}); delete it from accounts") from error


def _account_row(account: dict[str, Any]) -> tuple[str, ...]:
    limits = [
        f"{min(limit, account[f'server_{what}_per_minute'] or limit):,.0f} {what}"
        for what in ("requests", "tokens")
        if (limit := account[f"{what}_per_minute"]) is not None
    ]
    closed, day = account["closed_until"], ""
    if account["usd_per_day"] is not None:
        day = f"{dollars(account['spent_usd'])} of {dollars(account['usd_per_day'])}"
        day += f" + {dollars(account['reserved_usd'])} reserved" if account["reserved_usd"] else ""
    shown = "" if closed is None else f"{datetime.fromtimestamp(parse_time(closed)).astimezone():%d %b %H:%M:%S}"
    used = [f"{user} ({part['requests']:,.0f} calls)" for user, part in account["used_by"].items()]
    return account["account"], ", ".join(limits), day, str(account["calls_in_line"]), shown, ", ".join(used)


_FOLLOW_S = 1.0


@subcommand("export", EXPORT)
async def export_command(run: str, store_path: StorePlace, as_json: bool, **options: Any) -> None:
    """Write a row for each task of RUN, and for each part of a `for_each`, with its item, result, error and usage; or
    send RUN as a trace, with a span for the run, each task and each attempt that has ended.

    In a .csv file each field of an item or of a structured result has a column, such as `item.name`, and a cell that
    begins with =, +, @ or a tab, and would be a formula in a spreadsheet, begins with an apostrophe. The ids of spans
    are made from run, task and attempt: a trace that is sent again is the same.
    """
    file, pattern, is_followed, has_content = (options[name] for name in ("file", "pattern", "follow", "content"))
    plan_name: str | None = None
    plan_file: Path | None = None
    if run == "last" and options["plan"] is not None:
        from plait.runner.client.run_backends import named_plan  # noqa: PLC0415 - the reader of plans is slow to load

        plan_name, plan_file = named_plan(options["plan"])
    async with open_store(store_path, "read") as store:
        record = await find_run(store, run, plan_name, plan_file)
        if options["as_trace"]:
            await _send_trace(store, record, is_followed=is_followed, has_content=has_content, as_json=as_json)
            return
        runs, wanted = Runs(RunOptions(store=store)), pattern or "*"
        if rows_file_of(record) is None:
            rows = await runs.export(record.run_id, wanted)
            is_table, count = file.suffix.lower() == ".csv", len(rows)
            write_file(file, as_csv(rows, raw=options["raw"]) if is_table else as_json_lines(rows), private=True)
        else:
            count = await _write_pages(partial(runs.export_pages, record.run_id, wanted), file, raw=options["raw"])
    if as_json:
        print_json({"run_id": record.run_id, "file": str(file), "rows": count})
    else:
        status = shown_status(record).value
        named = as_line(f"{record.name}, {status}" if record.name else status)
        print_note(f"{counted(count, 'row')} of run {record.run_id} ({named}) in {file}")


async def _write_pages(read: Callable[[], AsyncIterator[Sequence[Mapping[str, Any]]]], file: Path, *, raw: bool) -> int:
    """Write what each call of `read` yields, and return the number of rows. A table is read twice: for its columns,
    and for its lines.
    """
    count, names, is_table = 0, list[str](), file.suffix.lower() == ".csv"
    if is_table:
        async for rows in read():
            names = columns(rows, names)
    with file_to_write(file, private=True) as written:
        written.write(csv_heading(names, raw=raw) if is_table else "")
        async for rows in read():
            count += len(rows)
            written.write(csv_lines(rows, names, raw=raw) if is_table else as_json_lines(rows))
    return count


async def _send_trace(store: Store, run: RunRecord, *, is_followed: bool, has_content: bool, as_json: bool) -> None:
    """Send the spans of the run."""
    clock, sent = Clock(), 0
    sender = SpanSender.of_environment(os.environ, clock)
    trace = RunTrace(store, run.run_id, content=has_content)
    try:
        while True:
            spans = await trace.ended()
            await sender.send(spans)
            sent += len(spans)
            if trace.is_over or not is_followed:
                break
            await clock.sleep(_FOLLOW_S)
    finally:
        await sender.aclose()
    if as_json:
        print_json({"run_id": run.run_id, "trace_id": trace_id(run.run_id), "spans": sent, "url": sender.url})
    else:
        print_note(f"{counted(sent, 'span')} of run {run.run_id} sent to {sender.url}")


@subcommand("gc", GC)
async def gc_command(
    keep: int | None, older_than: float | None, dry_run: bool, store_path: StorePlace, as_json: bool
) -> None:
    """Delete ended runs (completed, failed or cancelled) for good, with everything stored of each run, and shrink the
    file.

    Give --keep, --older-than, or both; with both, a run is deleted only if both hold. A run that has not ended, that a
    process works on, or that an unfinished run was made from, is never deleted.
    """
    async with open_store(store_path, "read") if dry_run else open_store(store_path, "existing") as store:
        runs = Runs(RunOptions(store=store))
        deletion = await runs.delete(keep=keep, older_than=older_than, dry_run=dry_run)
    if as_json:
        fields = ("run_id", "name", "status", "ended_at")
        each = [
            {**{name: getattr(run, name) for name in fields}, "size_bytes": deletion.sizes.get(run.run_id, 0)}
            for run in deletion.runs
        ]
        counts = {"kept": deletion.kept, "freed_bytes": deletion.freed_bytes, "remains": deletion.remains}
        print_json({"dry_run": dry_run, "runs": each, **counts})
    else:
        for run in deletion.runs:
            held = size(deletion.sizes.get(run.run_id, 0))
            print_line(f"{as_line(run.run_id)}  {as_line(run.name, 40)}  {run.status}, {held}")
        done = "would delete" if dry_run else "deleted"
        freed = "" if dry_run else f", {size(deletion.freed_bytes)} freed"
        print_line(f"{done} {counted(len(deletion.runs), 'run')}{freed}; {deletion.kept:,} kept")
    if deletion.remains is not None:
        print_note(f"plait: {deletion.remains}")
