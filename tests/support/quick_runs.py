"""The runs of a runner, read often."""

from __future__ import annotations

from plait import ParallelRunner, Runs


def quick_runs(runner: ParallelRunner, poll: float = 0.01) -> Runs:
    """Return the runs, with the store read every `poll` seconds by `events`."""
    runner.runs.poll = poll
    return runner.runs
