"""`plait serve`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from plait.runner.cli.exits import prints_aside
from plait.runner.cli.options import (
    backend_options,
    concurrency_option,
    configure_log,
    json_option,
    log_options,
    store_option,
)

DEFAULT_PORT = 8377


@click.command("serve", short_help="Serve runs over HTTP, to programs on this machine.")
@click.option(
    "--backends",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A plan file whose `backends` (and `defaults.backend`) are what plans run on.",
)
@backend_options
@click.option(
    "--host",
    type=click.Choice(["127.0.0.1", "::1"]),
    default="127.0.0.1",
    show_default=True,
    help="Where to listen: this machine alone.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Where to listen; 0 takes any that is free.",
)
@concurrency_option
@store_option
@json_option
@log_options
def serve_command(file: Path | None, **options: Any) -> int:
    """Make, start, follow, answer and cancel runs over HTTP. Only programs on this machine that know the token are
    answered; it is in a file beside the store, whose path is printed.

    Ctrl-C stops the runs so that they can be resumed; once more leaves at once.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.backends import Wish, backing_of_file  # noqa: PLC0415
    from plait.runner.cli.commands.serve import Listening, serve  # noqa: PLC0415

    configure_log(options["log_style"], options["log_level"])
    backing = backing_of_file(file, Wish(options["backend"], options["model"], options["base_url"]))
    where = Listening(options["host"], options["port"], options["store_path"], options["as_json"])
    with prints_aside():
        return anyio.run(serve, backing, where, options["concurrency"])
