"""Hypothesis drives a PostgreSQL store through any changes, lost connections and cut writes, beside a model."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from plait import failpoints
from plait.errors import Conflict, Gap, StoreError
from plait.persistence import Batch, PostgresStore
from tests.persistence.test_state_machine import ENDED, NAMES, RUNS, STEPS, StoreMachine
from tests.support.sizes import size
from tests.support.stores.model_store import ModelStore
from tests.support.stores.postgres import empty, worker_dsn

pytestmark = pytest.mark.slow


class PostgresMachine(StoreMachine):
    """One database, and what it has to say."""

    store: PostgresStore

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        dsn = worker_dsn()
        self.loop = asyncio.Runner()
        self.do(empty(dsn))
        self.store = PostgresStore(dsn)
        self.model = ModelStore()
        self.written: list[Batch] = []
        self.do(self.store.__aenter__())

    def teardown(self) -> None:
        failpoints.on_reach = None
        self.do(self.store.close())
        self.loop.close()

    def outcome(self, store: PostgresStore | ModelStore, batch: Batch) -> type | None:  # type: ignore[override]
        """What a write says. A store on a server says Gap where another store says Conflict."""
        found = super().outcome(store, batch)  # type: ignore[arg-type]
        return Conflict if found is Gap else found

    @rule()
    def crash(self) -> None:
        """The process dies: its connections break, and another process opens the store."""
        for connection in (self.store._writer, self.store._reader):
            if connection is not None:
                connection.drop()
        self.do(self.store.close())
        self.do(self.store.__aenter__())

    @rule(run_id=st.sampled_from(RUNS), steps=STEPS, name=NAMES)
    def fail_inside_a_transaction(self, run_id: str, steps: Any, name: str) -> None:  # type: ignore[override]
        """A write raises at a boundary; then the batch is written again."""
        batch = self.next_batch(run_id, steps)

        def on_reach(reached: str) -> None:
            if reached == name:
                raise ConnectionError("planted")

        failpoints.on_reach = on_reach
        with suppress(StoreError):
            self.do(self.store.write(batch))
        failpoints.on_reach = None
        self.write(batch)

    @rule(run_id=st.sampled_from(RUNS), steps=STEPS, turns=st.integers(1, 4))
    def cut_a_write(self, run_id: str, steps: Any, turns: int) -> None:
        """A write is cancelled after some turns of the loop, whole or not at all; then the batch is written again."""
        batch = self.next_batch(run_id, steps)
        self.do(self._cut(batch, turns))
        self.write(batch)

    async def _cut(self, batch: Batch, turns: int) -> None:
        task = asyncio.ensure_future(self.store.write(batch))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError, Conflict):
            await task

    @rule(run_id=st.sampled_from(RUNS))
    def purge(self, run_id: str) -> None:
        run = self.do(self.model.get_run(run_id))
        if run is not None and (run.status not in ENDED or run.owner is not None):
            try:
                self.do(self.store.purge([run_id]))
            except Conflict:
                return
            raise AssertionError("a run that goes on was deleted")
        purged = self.do(self.store.purge([run_id]))
        assert len(purged.run_ids) == (run is not None)
        self.model.runs.pop(run_id, None)
        self.written = [batch for batch in self.written if batch.run_id != run_id]

    def no_transaction_is_open(self) -> None:
        """Of SQLite alone: a connection of the server in doubt is dropped."""


TestPostgresMachine = PostgresMachine.TestCase
TestPostgresMachine.settings = settings(
    max_examples=size(6, 12),
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],  # to shrink a failure on a server takes longer than a test may
    suppress_health_check=[HealthCheck.too_slow],
)
