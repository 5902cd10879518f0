"""`plait export`: write the results of a run to a file."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from pathlib import Path

import anyio
import click

from plait.runner.cli.display.report import print_json
from plait.runner.cli.display.text import counted
from plait.runner.cli.exits import COMPLETED, print_note
from plait.runner.cli.lookup import find_run, read_only_store
from plait.runner.cli.options import StorePlace, json_option, store_option
from plait.runner.cli.output_files import write_file
from plait.runner.operations.export import as_csv, as_json_lines, result_rows
from plait.runner.operations.inspect import task_infos

_FORMATS = {".csv": as_csv, ".jsonl": as_json_lines}


@click.command("export")
@click.argument("run")
@click.option(
    "--to",
    "file",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write this .csv or .jsonl file; an existing file is replaced.",
)
@click.option("--task", "pattern", metavar="PATTERN", default="*", help="Write only tasks whose id matches: 'part.*'.")
@store_option
@json_option
def export_command(run: str, file: Path, pattern: str, store_path: StorePlace, as_json: bool) -> int:
    """Write a row for each task of RUN, and for each part of a `for_each`, with its item, result, error and usage.

    In a .csv file each field of an item or of a structured result has a column, such as `item.name`, and a cell that a
    spreadsheet would take for a formula begins with an apostrophe.
    """
    if file.suffix.lower() not in _FORMATS:
        raise click.UsageError(f"--to writes .csv or .jsonl, not {file.name!r}")
    return anyio.run(export, store_path, run, pattern, file, as_json)


async def export(path: StorePlace, word: str, pattern: str, file: Path, as_json: bool) -> int:
    """Write the tasks of the run that `word` names. Return the exit code."""
    async with read_only_store(path) as store:
        run = await find_run(store, word)
        infos = await task_infos(store, run, await store.list_tasks(run.run_id), time.time())
    rows = result_rows(task for task in infos.values() if fnmatchcase(task.task_id, pattern))
    write_file(file, _FORMATS[file.suffix.lower()](rows), private=True)
    if as_json:
        print_json({"run_id": run.run_id, "file": str(file), "rows": len(rows)})
    else:
        print_note(f"{counted(len(rows), 'row')} in {file}")
    return COMPLETED
