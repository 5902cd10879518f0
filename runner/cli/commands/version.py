"""`plait version`: print the version."""

from __future__ import annotations

import json
from importlib.metadata import version

import click

from plait.runner.cli.exits import print_line
from plait.runner.cli.options import json_option


@click.command("version")
@json_option
def version_command(as_json: bool) -> int:
    """Print the version of plait."""
    print_line(json.dumps({"version": version("plait")}) if as_json else f"plait {version('plait')}")
    return 0
