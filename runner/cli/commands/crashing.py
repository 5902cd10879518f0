"""What `plait crashtest` does: run the campaign, print the certificate."""

from __future__ import annotations

import signal
from collections.abc import Callable

import click

from plait.persistence.failpoints import BOUNDARIES
from plait.runner.cli.display.report import tell_value
from plait.runner.cli.exits import COMPLETED, FAILED, STORE, Fault, say, tell
from plait.runner.crashtest.campaign import Campaign
from plait.runner.crashtest.certificate import as_lines, as_value
from plait.runner.crashtest.tally import Tally
from plait.runner.crashtest.trial import parse_trial

_MOST_SHOWN = 20


def certify(campaign: Campaign, as_json: bool) -> int:
    """The whole campaign and its certificate; the command's exit code."""
    say(f"plait: landing {campaign.kills:,} kills at {len(BOUNDARIES)} boundaries, in {campaign.folder}")
    tally = _done(campaign.run)
    if as_json:
        tell_value(as_value(tally))
    else:
        _say_violations(tally)
        tell(f"{'passed' if tally.ok else 'FAILED'} in {tally.seconds:.1f} s")
        for line in as_lines(tally):
            tell(line)
    return COMPLETED if tally.ok else FAILED


def repeat(campaign: Campaign, word: str, as_json: bool) -> int:
    """One case once more."""
    try:
        trial = parse_trial(word)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--case") from None
    tally = _done(lambda: campaign.once(trial))
    if as_json:
        tell_value({"ok": not tally.violations, "kills_landed": tally.kills, "violations": tally.violations})
    else:
        _say_violations(tally)
        tell(f"{trial}: {'FAILED' if tally.violations else 'all invariants held'}, {tally.kills} kills landed")
    return FAILED if tally.violations else COMPLETED


def _done(work: Callable[[], Tally]) -> Tally:
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # under nohup a hangup is ignored, and stays so
            signal.signal(signum, signal.default_int_handler)  # as Ctrl-C: what was made for the trials is removed
    try:
        return work()
    except OSError as error:
        raise Fault(f"{error.filename}: {error.strerror}; name another place with --store", STORE) from error


def _say_violations(tally: Tally) -> None:
    for violation in tally.violations[:_MOST_SHOWN]:
        say(violation)
    if len(tally.violations) > _MOST_SHOWN:
        say(f"and {len(tally.violations) - _MOST_SHOWN:,} more")
