"""Real SIGKILLs at every named boundary: the harness of `make crashtest`, over random DAGs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.faults.campaigns.report import Report, Scale
from tests.faults.crashtest.campaign import Campaign
from tests.faults.crashtest.tally import Tally

KILLS: dict[Scale, int] = {"quick": 500, "nightly": 10_000}


def run(*, scale: Scale, seed: int = 0) -> Report:
    """As many landed kills as `scale` says, over the cases from `seed` on. Call it in a process without threads."""
    campaign = Campaign(KILLS[scale], seed, Path(tempfile.gettempdir()), "python -m tests.faults.crashtest")
    return report("kills", "real SIGKILLs", campaign.run())


def report(method: str, unit: str, tally: Tally) -> Report:
    """Return the report of a campaign."""
    unreached = tuple(f"no kill landed at {name}; more kills are needed" for name in tally.never_hit)
    return Report(
        method=method,
        unit=unit,
        cases=tally.kills,
        violations=(*tally.violations, *unreached),
        planted=tally.planted,
        seconds=tally.seconds,
        figures={
            "boundaries": len(tally.boundaries) - len(tally.never_hit),
            "runs": tally.trials,
            "acknowledged results": tally.acks,
            "acknowledged results lost": tally.lost,
            "completed tasks executed again": tally.repeated,
            "extra attempts per task in flight": tally.extra,
            "median resume ms": round(tally.median_resume_ms, 1),
            "failure rate below %": round(tally.bound * 100, 4),
        },
    )
