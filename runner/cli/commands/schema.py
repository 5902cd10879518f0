"""`plait schema`: print the JSON Schema of plan files."""

from __future__ import annotations

import click

from plait.runner.cli.display.report import print_json
from plait.runner.plan import plan_schema


@click.command("schema")
def schema_command() -> int:
    """Print the JSON Schema of plan files, for editors that complete and check them."""
    print_json(plan_schema())
    return 0
