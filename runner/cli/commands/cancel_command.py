"""`plait cancel`: a run is given up for good, wherever it runs."""

from __future__ import annotations

from pathlib import Path

import click

from plait.runner.cli.options import json_option, store_option


@click.command("cancel", short_help="Cancel a run for good.")
@click.argument("run")
@store_option
@json_option
def cancel_command(run: str, store_path: Path, as_json: bool) -> int:
    """Cancel RUN (an id, its beginning, or `last`) for good, also while another process runs it.

    What is completed stays; nothing more starts, and what is under way has a few seconds to come to its end. A run that
    has ended already stays as it is.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.cancel import cancel_run  # noqa: PLC0415

    return anyio.run(cancel_run, run, store_path, as_json)
