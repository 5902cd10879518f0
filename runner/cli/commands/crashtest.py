"""`plait crashtest`: its options, and what it prints."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plait.persistence.failpoints import FAILPOINTS
from plait.runner.cli.display.report import print_json
from plait.runner.cli.exits import COMPLETED, FAILED, STORE, CliError, print_line, print_note
from plait.runner.cli.options import command_line, json_option, read_plan, set_option, store_option
from plait.runner.crashtest.campaign import Campaign, PlanShape
from plait.runner.crashtest.certificate import as_lines, as_value
from plait.runner.crashtest.tally import Tally
from plait.runner.crashtest.trial import parse_trial

if TYPE_CHECKING:
    from plait.runner.crashtest.campaign import PlanShape


_PATH = click.Path(path_type=Path)
_DEFAULT_CONCURRENCY = 8


@click.command("crashtest")
@click.argument("plan", type=_PATH, required=False)
@click.option(
    "--kills", type=click.IntRange(1), default=500, show_default=True, help="How many kills have to land at least."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The first case; others follow.")
@click.option("--case", "word", metavar="CASE", help="Try one case again, up to ten times, as a violation names it.")
@set_option
@store_option
@json_option
def crashtest_command(  # noqa: PLR0913, PLR0917 - one for each option
    plan: Path | None, kills: int, seed: int, word: str | None, inputs: dict[str, str], store_path: Path, as_json: bool
) -> int:
    """Kill real processes with SIGKILL at every named boundary of every durable step, resume them, and check that
    nothing is lost and nothing is done twice.

    Without PLAN, over random DAGs; with it, over the shape, policies and concurrency of that plan. No backend of the
    plan is ever called: a stand-in answers, and sometimes fails, for each. The databases are made in a temporary folder
    beside the store that --store names, so that its disk is what is tried; the store itself is not touched.

    Exit code 0 only when every invariant held, a kill landed at every boundary, and all planted bugs were caught.
    """
    if inputs and plan is None:
        raise click.UsageError("--set is for plans; random cases have no inputs")
    words = ["crashtest", *([] if plan is None else [str(plan)])]
    words += [part for name, text in inputs.items() for part in ("--set", f"{name}={text}")]
    campaign = Campaign(
        kills, seed, _nearest_folder(store_path), command_line(store_path, *words), _plan_shape(plan, inputs)
    )
    return run_campaign(campaign, as_json) if word is None else repeat_case(campaign, word, as_json)


def _nearest_folder(store_path: Path) -> Path:
    """The folder nearest to the store that exists: on the same file system, or on that where it would be made."""
    return next(folder for folder in store_path.absolute().parents if folder.is_dir())


def _plan_shape(plan: Path | None, inputs: dict[str, str]) -> PlanShape | None:

    if plan is None:
        return None
    loaded = read_plan(plan, inputs)
    default = loaded.default_backend or next(iter(loaded.backends), "default")
    return PlanShape(loaded.dag, default, loaded.concurrency or _DEFAULT_CONCURRENCY)


_MOST_SHOWN = 20


def run_campaign(campaign: Campaign, as_json: bool) -> int:
    """The whole campaign and its certificate; the command's exit code."""
    print_note(f"plait: landing {campaign.kills:,} kills at {len(FAILPOINTS)} boundaries, in {campaign.folder}")
    tally = _run_interruptible(campaign.run)
    if as_json:
        print_json(as_value(tally))
    else:
        _print_violations(tally)
        print_line(f"{'passed' if tally.ok else 'FAILED'} in {tally.seconds:.1f} s")
        for line in as_lines(tally):
            print_line(line)
    return COMPLETED if tally.ok else FAILED


def repeat_case(campaign: Campaign, word: str, as_json: bool) -> int:
    """One case once more."""
    try:
        trial = parse_trial(word)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--case") from None
    tally = _run_interruptible(lambda: campaign.once(trial))
    if as_json:
        print_json({"ok": not tally.violations, "kills_landed": tally.kills, "violations": tally.violations})
    else:
        _print_violations(tally)
        print_line(f"{trial}: {'FAILED' if tally.violations else 'all invariants held'}, {tally.kills} kills landed")
    return FAILED if tally.violations else COMPLETED


def _run_interruptible(work: Callable[[], Tally]) -> Tally:
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # under nohup a hangup is ignored, and stays so
            signal.signal(signum, signal.default_int_handler)  # as Ctrl-C: what was made for the trials is removed
    try:
        return work()
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}; name another place with --store", STORE) from error


def _print_violations(tally: Tally) -> None:
    for violation in tally.violations[:_MOST_SHOWN]:
        print_note(violation)
    if len(tally.violations) > _MOST_SHOWN:
        print_note(f"and {len(tally.violations) - _MOST_SHOWN:,} more")
