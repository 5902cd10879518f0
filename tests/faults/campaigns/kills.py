"""Real SIGKILLs at every named boundary: the harness that `plait crashtest` ships, over random DAGs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from plait.persistence.failpoints import FAILPOINTS
from plait.runner.crashtest.campaign import Campaign
from tests.faults.campaigns.report import Report, Scale

KILLS: dict[Scale, int] = {"quick": 500, "nightly": 10_000}


def run(*, scale: Scale, seed: int = 0) -> Report:
    """As many landed kills as `scale` says, over the cases from `seed` on. Call it in a process without threads."""
    campaign = Campaign(KILLS[scale], seed, Path(tempfile.gettempdir()), "plait crashtest")
    tally = campaign.run()
    unreached = tuple(f"no kill landed at {name}; more kills are needed" for name in tally.never_hit)
    return Report(
        method="kills",
        unit="real SIGKILLs",
        cases=tally.kills,
        violations=(*tally.violations, *unreached),
        planted=tally.planted,
        seconds=tally.seconds,
        figures={
            "boundaries": len(FAILPOINTS) - len(tally.never_hit),
            "runs": tally.trials,
            "acknowledged results": tally.acks,
            "acknowledged results lost": tally.lost,
            "completed tasks executed again": tally.repeated,
            "extra attempts per task in flight": tally.extra,
            "median resume ms": round(tally.median_resume_ms, 1),
            "failure rate below %": round(tally.bound * 100, 4),
        },
    )
