"""`python -m tests.faults.crashtest [PLAN]`: kill runs at every boundary and print a certificate."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import click

from plait.errors import InvalidRequest, StoreUnusable
from plait.failpoints import FAILPOINTS
from plait.runner.cli.command_line import COMPLETED, FAILED, exit_process, read_plan, run_cli
from plait.runner.cli.command_options import json_option, set_option, store_option
from plait.runner.cli.terminal_output import print_json, print_line, print_note
from plait.runner.engine.run_options import StorePlace
from plait.runner.policies.follow_ups import FollowUps
from plait.runner.scheduling.slots import DEFAULT_CONCURRENCY
from tests.faults.crashtest.campaign import Campaign, PlanShape
from tests.faults.crashtest.certificate import as_lines, as_value
from tests.faults.crashtest.tally import Tally
from tests.faults.crashtest.trial import parse_trial

_PATH = click.Path(path_type=Path)


@click.command("python -m tests.faults.crashtest")
@click.argument("plan", type=_PATH, required=False)
@click.option(
    "--kills",
    type=click.IntRange(1),
    default=500,
    show_default=True,
    help="Continue until this many kills have landed.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Number of the first random case.")
@click.option("--case", "word", metavar="CASE", help="Repeat the case of a violation, up to 10 times.")
@set_option
@store_option
@json_option
def crashtest_command(
    plan: Path | None,
    kills: int,
    seed: int,
    word: str | None,
    inputs: dict[str, str],
    store_path: StorePlace,
    as_json: bool,
) -> int:
    """Kill real processes with SIGKILL at every named boundary of every durable step, resume the runs, and check that
    nothing is lost and nothing is done twice.

    Without PLAN, the runs are random DAGs; with PLAN, they have the graph, the retry policies and the concurrency of
    the plan. No backend of the plan is called: a fake backend answers, and sometimes fails. The databases are made in a
    temporary folder beside the store that --store names, on the same disk; the store itself is not touched.

    The exit code is 0 only if every invariant held, a kill landed at every boundary, and all planted bugs were caught.
    """
    if inputs and plan is None:
        raise click.UsageError("--set is for plans; random cases have no inputs")
    words = ["python", "-m", "tests.faults.crashtest", *([] if plan is None else [str(plan)])]
    words += [part for name, text in inputs.items() for part in ("--set", f"{name}={text}")]
    words += ["--store", str(store_path)]
    campaign = Campaign(kills, seed, _nearest_folder(store_path), shlex.join(words), _plan_shape(plan, inputs))
    return run_campaign(campaign, as_json) if word is None else repeat_case(campaign, word, as_json)


def _nearest_folder(store_path: StorePlace) -> Path:
    """Return the nearest existing folder above the store, which is on the same file system."""
    if not isinstance(store_path, Path):
        raise InvalidRequest("crash tests make SQLite files; name a file with --store, whose disk is tested")
    return next(folder for folder in store_path.absolute().parents if folder.is_dir())


def _plan_shape(plan: Path | None, inputs: dict[str, str]) -> PlanShape | None:

    if plan is None:
        return None
    loaded = read_plan(plan, inputs)
    if loaded.policy is not None and loaded.policy.kind != FollowUps.kind:
        raise InvalidRequest(
            f"crash tests are for plans with `tasks`; the tasks of {plan} are planned during the run; without PLAN, "
            "random plans are tested, runs that grow too"
        )
    default = loaded.default_backend or next(iter(loaded.backends), "default")
    return PlanShape(loaded.dag, default, loaded.concurrency or DEFAULT_CONCURRENCY)


_MOST_SHOWN = 20


def run_campaign(campaign: Campaign, as_json: bool) -> int:
    """Run the whole campaign and print the certificate. Return the exit code."""
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
    """Run the case `word` again. Return the exit code."""
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
        if signal.getsignal(signum) is signal.SIG_DFL:  # nohup ignores SIGHUP, and the signal stays ignored
            signal.signal(signum, signal.default_int_handler)  # like Ctrl-C: the folders of the trials are removed
    try:
        return work()
    except OSError as error:
        raise StoreUnusable(f"{error.filename}: {error.strerror}; name another place with --store") from error


def _print_violations(tally: Tally) -> None:
    for violation in tally.violations[:_MOST_SHOWN]:
        print_note(violation)
    if len(tally.violations) > _MOST_SHOWN:
        print_note(f"and {len(tally.violations) - _MOST_SHOWN:,} more")


def main() -> None:
    """Run the command with the arguments of this process, and exit with its exit code."""
    exit_process(run_cli(crashtest_command, sys.argv[1:]))
