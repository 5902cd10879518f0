"""The certificate of a campaign: trials and results, as text and as JSON."""

from __future__ import annotations

from typing import Any

from tests.faults.crashtest.tally import Tally


def as_value(tally: Tally) -> dict[str, Any]:
    """Return the certificate as a JSON object."""
    return {
        "ok": tally.ok,
        "kills_landed": tally.kills,
        "kills_scheduled": tally.scheduled,
        "boundaries": {name: tally.landed[name] for name in tally.boundaries},
        "never_hit": tally.never_hit,
        "runs": tally.trials,
        "results_acknowledged": tally.acks,
        "acknowledged_results_lost": tally.lost,
        "completed_tasks_executed_again": tally.repeated,
        "extra_attempts_per_task_in_flight": tally.extra,
        "median_resume_ms": round(tally.median_resume_ms, 1),
        "failure_rate_below": tally.bound if not tally.violations else None,
        "planted_bugs": tally.planted,
        "violations": tally.violations,
        "duration_s": round(tally.seconds, 1),
    }


def as_lines(tally: Tally) -> list[str]:
    """Return the certificate as lines of text."""
    covered = len(tally.boundaries) - len(tally.never_hit)
    caught = [name for name, seen in tally.planted.items() if seen]
    missed = [name for name, seen in tally.planted.items() if not seen]
    rows = [
        ("kills", f"{tally.kills:,} landed of {tally.scheduled:,} scheduled, in {tally.trials:,} runs"),
        ("boundaries", f"{covered} of {len(tally.boundaries)} covered" + _named("never hit", tally.never_hit)),
        ("acknowledged results", f"{tally.acks:,}, of which {tally.lost:,} lost"),
        ("completed tasks", f"{tally.repeated:,} executed again"),
        ("tasks in flight", f"at most {tally.extra} more execution for each kill that met them"),
        ("resume", f"{tally.median_resume_ms:.0f} ms in the median, from fork to first call: without Python's start"),
        ("invariants", _invariants(tally)),
        ("planted bugs", f"{len(caught)} of {len(tally.planted)} caught" + _named("missed", missed)),
    ]
    return [f"  {what:<21} {text}" for what, text in rows]


def _named(what: str, names: list[str]) -> str:
    return f"; {what}: {', '.join(names)}" if names else ""


def _invariants(tally: Tally) -> str:
    if tally.violations:
        return f"broken {len(tally.violations):,} times"
    return f"all held; failure rate below {tally.bound * 100:.2g} % (3/N, 95 % confidence)"
