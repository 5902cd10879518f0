"""`plait export`: write the results of a run to a file, or send the run as a trace."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plait.clock_and_ids import Clock, trace_id
from plait.runner.cli.command_line import subcommand
from plait.runner.cli.command_options import EXPORT
from plait.runner.cli.terminal_output import as_line, file_to_write, print_json, print_note, write_file
from plait.runner.client.runs import Runs, RunsOfPlan, find_run
from plait.runner.engine.lease import shown_status
from plait.runner.engine.run_options import RunOptions, StorePlace, open_store
from plait.runner.state.stored_run import rows_file_of
from plait.runner.views.event_sentences import counted
from plait.runner.views.result_rows import as_csv, as_json_lines, columns, csv_heading, csv_lines
from plait.runner.views.trace_spans import RunTrace, SpanSender

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
    of = None
    if run == "last" and options["plan"] is not None:
        from plait.runner.client.run_backends import runs_of_plan  # noqa: PLC0415 - the reader of plans is slow to load

        of = runs_of_plan(options["plan"])
    if options["as_trace"]:
        await _send_trace(store_path, run, of, is_followed=is_followed, has_content=has_content, as_json=as_json)
        return
    async with open_store(store_path, "read") as store:
        found = await find_run(store, run, of)
        runs, wanted = Runs(RunOptions(store=store)), pattern or "*"
        if rows_file_of(found) is None:
            rows = await runs.export(found.run_id, wanted)
            is_table, count = file.suffix.lower() == ".csv", len(rows)
            write_file(file, as_csv(rows, raw=options["raw"]) if is_table else as_json_lines(rows), private=True)
        else:
            count = await _write_pages(partial(runs.export_pages, found.run_id, wanted), file, raw=options["raw"])
    if as_json:
        print_json({"run_id": found.run_id, "file": str(file), "rows": count})
    else:
        status = shown_status(found).value
        named = as_line(f"{found.name}, {status}" if found.name else status)
        print_note(f"{counted(count, 'row')} of run {found.run_id} ({named}) in {file}")


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


async def _send_trace(
    path: StorePlace, word: str, of: RunsOfPlan | None, *, is_followed: bool, has_content: bool, as_json: bool
) -> None:
    """Send the spans of the run that `word` names."""
    clock, sent = Clock(), 0
    sender = SpanSender.of_environment(os.environ, clock)
    async with open_store(path, "read") as store:
        run = await find_run(store, word, of)
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
