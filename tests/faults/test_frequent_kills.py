"""Real SIGKILLs about every second: no healthy task is convicted, and a task that kills its process is.

See tests/faults/campaigns/frequent.py, which plays 200 seeds.
"""

from __future__ import annotations

import pytest

from tests.faults.campaigns import frequent


@pytest.mark.slow
def test_healthy_runs_complete_and_a_culprit_fails() -> None:
    report = frequent.run(scale="quick", seed=7, planted=False)
    assert report.ok, "\n".join(report.violations)
    assert report.figures["kills"] >= frequent.KILLS["quick"]
    assert 4 <= report.figures["most deaths by a culprit"] <= frequent.MOST_DEATHS
