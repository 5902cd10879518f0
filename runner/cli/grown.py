"""A run's graph as it grows, from its events."""

from __future__ import annotations

from runner import events
from runner.dag import DAG


class Grown:
    """`dag` with what was added to it. The one that it was made of stays as it is."""

    def __init__(self, dag: DAG) -> None:
        self.dag = dag
        self._own = False

    def take(self, event: events.TasksAdded) -> None:
        """Add what the event tells of."""
        if not self._own:
            self.dag, self._own = self.dag.copy(), True
        start = len(self.dag)
        self.dag.extend(event.tasks)
        if event.added_by is not None and self.dag[event.added_by].for_each is not None:
            self.dag.join(self.dag.position(event.added_by), range(start, len(self.dag)))
