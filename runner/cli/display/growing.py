"""A run's DAG as those who watch the run see it: it grows with the events."""

from __future__ import annotations

from plait.runner.domain import events
from plait.runner.domain.dag import DAG


def grow(dag: DAG, event: events.TasksAdded) -> None:
    """Add the event's tasks to `dag`, a copy that nobody else holds."""
    start = len(dag)
    dag.extend(event.tasks)
    # A task with `for_each` waits for what it was unfolded into.
    if event.added_by is not None and dag[event.added_by].for_each is not None:
        dag.join(dag.position(event.added_by), range(start, len(dag)))
