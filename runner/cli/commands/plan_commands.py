"""`plait check`, `plait graph`, `plait schema` and `plait version`: their options."""

from __future__ import annotations

from pathlib import Path

import click

from plait.runner.cli.options import json_option, set_option, store_option

_PATH = click.Path(path_type=Path)


@click.command("check", short_help="Check a plan; run nothing.")
@click.argument("plan", type=_PATH)
@set_option
@json_option
def check_command(plan: Path, inputs: dict[str, str], as_json: bool) -> int:
    """Check the plan in the file PLAN and say what it would run. Every mistake is listed with its place."""
    from plait.runner.cli.commands.plan import check  # noqa: PLC0415

    return check(plan, inputs, as_json)


@click.command("graph", short_help="Draw a plan or a run.")
@click.argument("what", metavar="PLAN|RUN")
@click.option("-o", "--output", type=_PATH, help="Write a picture to this .html or .svg file.")
@set_option
@store_option
@json_option
def graph_command(what: str, output: Path | None, inputs: dict[str, str], store_path: Path, as_json: bool) -> int:
    """Print the graph of a plan file or of a run as Mermaid, or write it as a picture coloured by status."""
    from plait.runner.cli.commands.plan import Delivery, draw  # noqa: PLC0415

    return draw(what, Delivery(output, as_json), inputs, store_path)


@click.command("schema", short_help="Print the JSON Schema of plan files.")
def schema_command() -> int:
    """Print the JSON Schema of plan files, for editors that complete and check them."""
    from plait.runner.cli.display.report import tell_value  # noqa: PLC0415
    from plait.runner.plan import plan_schema  # noqa: PLC0415

    tell_value(plan_schema())
    return 0


@click.command("version", short_help="Print the version.")
@json_option
def version_command(as_json: bool) -> int:
    """Print plait's version."""
    import json  # noqa: PLC0415
    from importlib.metadata import version  # noqa: PLC0415

    from plait.runner.cli.exits import tell  # noqa: PLC0415

    tell(json.dumps({"version": version("plait")}) if as_json else f"plait {version('plait')}")
    return 0
