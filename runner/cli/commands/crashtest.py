"""`plait crashtest`: its options, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from plait.runner.cli.options import json_option, set_option, store_option

if TYPE_CHECKING:
    from plait.runner.crashtest.campaign import PlanShape

_PATH = click.Path(path_type=Path)
_DEFAULT_CONCURRENCY = 8


@click.command("crashtest", short_help="Kill runs at every boundary; certify that nothing is lost.")
@click.argument("plan", type=_PATH, required=False)
@click.option(
    "--kills", type=click.IntRange(1), default=500, show_default=True, help="How many kills have to land at least."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The first case; others follow.")
@click.option("--case", "word", metavar="CASE", help="Try one case again, up to ten times, as a violation names it.")
@set_option
@store_option
@json_option
def crash_command(  # noqa: PLR0913, PLR0917 - one for each option
    plan: Path | None, kills: int, seed: int, word: str | None, inputs: dict[str, str], store_path: Path, as_json: bool
) -> int:
    """Kill real processes with SIGKILL at every named boundary of every durable step, resume them, and check that
    nothing is lost and nothing is done twice.

    Without PLAN, over random DAGs; with it, over the shape, policies and concurrency of that plan. No backend of the
    plan is ever called: a stand-in answers, and sometimes fails, for each. The databases are made in a temporary folder
    beside the store that --store names, so that its disk is what is tried; the store itself is not touched.

    Exit code 0 only when every invariant held, a kill landed at every boundary, and all planted bugs were caught.
    """
    from plait.runner.cli.commands.crashing import certify, repeat  # noqa: PLC0415
    from plait.runner.cli.options import plait  # noqa: PLC0415
    from plait.runner.crashtest.campaign import Campaign  # noqa: PLC0415

    if inputs and plan is None:
        raise click.UsageError("--set is for plans; random cases have no inputs")
    words = ["crashtest", *([] if plan is None else [str(plan)])]
    words += [part for name, text in inputs.items() for part in ("--set", f"{name}={text}")]
    campaign = Campaign(kills, seed, _folder(store_path), plait(store_path, *words), _shape(plan, inputs))
    return certify(campaign, as_json) if word is None else repeat(campaign, word, as_json)


def _folder(store_path: Path) -> Path:
    """The folder nearest to the store that exists: on the same file system, or on that where it would be made."""
    return next(folder for folder in store_path.absolute().parents if folder.is_dir())


def _shape(plan: Path | None, inputs: dict[str, str]) -> PlanShape | None:
    from plait.runner.cli.plans import read_plan  # noqa: PLC0415
    from plait.runner.crashtest.campaign import PlanShape  # noqa: PLC0415

    if plan is None:
        return None
    loaded = read_plan(plan, inputs)
    default = loaded.default_backend or next(iter(loaded.backends), "default")
    return PlanShape(loaded.dag, default, loaded.concurrency or _DEFAULT_CONCURRENCY)
