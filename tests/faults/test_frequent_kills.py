"""Real SIGKILLs about every second, and tasks that kill their process: no task fails, and a person is asked about a
crasher alone.

See tests/faults/campaigns/frequent.py, which plays 200 seeds, and crashers beside a task of 25 seconds.
"""

from __future__ import annotations

import pytest

from tests.faults.campaigns import frequent


# The test below plays all of them.
@pytest.mark.parametrize("how", [how for how in frequent.ARRANGEMENTS if how != "two runs"])
def test_a_task_beside_a_crasher_completes_and_a_person_is_asked_about_the_crasher(how: str) -> None:
    played = frequent.play_crasher(7, how=how, pace=frequent.PACE["quick"])
    assert frequent.judged_crasher(played) == []


@pytest.mark.slow
def test_healthy_runs_complete_and_a_person_is_asked_about_a_crasher() -> None:
    report = frequent.run(scale="quick", seed=7, planted=False)
    assert report.ok, "\n".join(report.violations)
    assert report.figures["kills"] >= frequent.KILLS["quick"]
