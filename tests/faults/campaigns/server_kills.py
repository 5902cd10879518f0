"""SIGKILLs at every named boundary of a run in PostgreSQL, with the harness and the oracle of `make crashtest`.

Beside its boundaries, a process is killed while the statement that commits is on its way to the server.
`python -m tests.faults.campaigns.server_kills [--kills N] [--seed SEED] [--case CASE] [--no-bugs] [--database ADDRESS]`
starts a server of its own, or takes a database with plait's tables.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.campaigns.kills import report
from tests.faults.campaigns.report import Report, Scale
from tests.faults.campaigns.server_kill_bugs import BUGS
from tests.faults.crashtest.campaign import Campaign
from tests.faults.crashtest.certificate import as_lines
from tests.faults.crashtest.mutants import Mutant
from tests.faults.crashtest.trial import parse_trial
from tests.support.stores.postgres import worker_dsn

KILLS: dict[Scale, int] = {"quick": 100, "nightly": 2_000}


def campaign(kills: int, seed: int = 0, bugs: Sequence[Mutant] = BUGS, database: str | None = None) -> Campaign:
    """Return a campaign in `database`; without one, on the server of the tests, which is started here."""
    command = "python -m tests.faults.campaigns.server_kills"
    return Campaign(kills, seed, Path(tempfile.gettempdir()), command, server=database or worker_dsn(), bugs=bugs)


def run(*, scale: Scale, seed: int = 0) -> Report:
    """As many landed kills as `scale` says, and the planted bugs. Call it in a process without threads."""
    return report("server kills", "real SIGKILLs of runs in PostgreSQL", campaign(KILLS[scale], seed).run())


def main(arguments: Sequence[str]) -> int:
    """Play the campaign, or one case again, and print what was found. Return 0 if nothing broke, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaigns.server_kills")
    parser.add_argument("--kills", type=int, default=KILLS["nightly"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", metavar="CASE", help="play the case of a violation again")
    parser.add_argument("--no-bugs", action="store_true", help="plant no bugs")
    parser.add_argument("--database", metavar="ADDRESS", help="play in this database, which has plait's tables")
    options = parser.parse_args(arguments)
    chosen = campaign(options.kills, options.seed, () if options.no_bugs else BUGS, options.database)
    tally = chosen.run() if options.case is None else chosen.once(parse_trial(options.case))
    print(*tally.violations, *as_lines(tally), sep="\n")
    return int(bool(tally.violations) if options.case is not None else not tally.ok)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
