"""Events page by page: what a page costs, however large the run is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plait.events import Event, NewTask, TaskCompleted, TaskRetried, TaskStarted
from plait.persistence import Batch
from plait.persistence.sql_store import list_events
from plait.persistence.sqlite_file import open_database
from plait.persistence.sqlite_store import read_on, write_batch
from tests.contracts.store.samples import CLAIMED, CREATED, RUN, at
from tests.support.stores.database import steps


def filled(path: Path, tasks: int) -> sqlite3.Connection:
    """A store with two runs of many tasks, of which every third was tried again."""
    connection = open_database(path, "create")
    ids = [f"t{number}" for number in range(tasks)]
    created = replace(CREATED, tasks=tuple(NewTask(task_id, "p") for task_id in ids))
    changes: list[Event] = [created, CLAIMED]
    for number, task_id in enumerate(ids):
        tries = 2 if number % 3 == 0 else 1
        changes.append(TaskStarted(at(3), task_id, 1, "fast"))
        if tries == 2:
            changes.append(TaskRetried(at(4), task_id, 1, "transient", "reset", 0.0))
            changes.append(TaskStarted(at(5), task_id, 2, "fast"))
        changes.append(TaskCompleted(at(6), task_id, tries, "result"))
    for run_id in ("before", RUN):
        write_batch(connection, Batch(run_id, 0, 1, tuple(changes)), {})
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("where", [0.0, 0.5, 0.9])
def test_a_page_costs_the_same_in_a_large_run(tmp_path: Path, where: float) -> None:
    cost = list[int]()
    for tasks in (500, 4000):
        with closing(filled(tmp_path / f"{tasks}.db", tasks)) as connection:
            after = int(tasks * 8 / 3 * where)
            cost.append(steps(connection, lambda: read_on(connection, list_events, RUN, after, 10, None)))  # noqa: B023
    assert 0 < cost[1] < 1.2 * cost[0] + 50


def test_who_waits_for_events_asks_for_nothing_but_the_last_number(tmp_path: Path) -> None:
    with closing(filled(tmp_path / "runs.db", 500)) as connection:
        last = read_on(connection, list_events, RUN, 0, 10_000, None)[-1].seq
        assert steps(connection, lambda: read_on(connection, list_events, RUN, last, 1000, None)) < 50
        assert [event.seq for event in read_on(connection, list_events, RUN, last - 1, 1000, None)] == [last]


def test_pages_together_are_the_table(tmp_path: Path) -> None:
    with closing(filled(tmp_path / "runs.db", 100)) as connection:
        pages, after = list[tuple[int, str, str | None]](), 0
        while page := read_on(connection, list_events, RUN, after, 7, None):
            pages += [(event.seq, event.kind, event.task_id) for event in page]
            after = page[-1].seq
        table = connection.execute("SELECT seq, kind, task_id FROM events WHERE run_id = ? ORDER BY seq", (RUN,))
        assert pages == table.fetchall()
