"""The store contract: the model, the tokens and the cost of each attempt."""

from __future__ import annotations

import json
from dataclasses import replace

from plait.events import (
    TaskAnswered,
    TaskCancelled,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import Store
from plait.usage import Usage
from tests.contracts.store.opened import OpenedStore
from tests.contracts.store.samples import ASKING, DONE_A, OPENING, RUN, START_A, Writer, at


class UsageContract(OpenedStore):
    """An attempt has the model, the tokens and the cost that its end names."""

    async def test_each_attempt_keeps_the_model_that_answered(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, TaskRetried(at(4), "a", 1, "transient", "reset", 0.5, usage=Usage(model="one")))
        await writer.write(TaskStarted(at(5), "a", 2, "fast"), TaskInterrupted(at(6), "a", 2, "stopped"))
        await writer.write(
            TaskStarted(at(7), "a", 3, "fast"), TaskWaiting(at(8), "a", 3, "?", asked="{}", usage=Usage(model="two"))
        )
        await writer.write(TaskAnswered(at(9), "a", 1), TaskStarted(at(9), "a", 4, "fast"))
        await writer.write(TaskFailed(at(10), "a", 4, "auth", "no key", usage=Usage(model="three")))
        await writer.write(
            TaskStarted(at(10), "c", 1, "fast"), TaskCancelled(at(11), "c", 1, Usage(1, 1, model="four"))
        )
        attempts = await store.list_attempts(RUN)
        assert [(a.task_id, a.attempt, a.usage.model) for a in attempts] == [
            ("a", 1, "one"),
            ("a", 2, None),
            ("a", 3, "two"),
            ("a", 4, "three"),
            ("c", 1, "four"),
        ]
        assert [task.usage.model for task in await store.list_tasks(RUN)] == ["three", None, "four"]
        assert attempts[:4] == await store.list_attempts(RUN, "a")

    async def test_tokens_counted_apart_are_kept_and_added_up(self, store: Store, writer: Writer) -> None:
        retried = Usage(100, 20, 0.5, "one", 60, 30, 12)
        completed = Usage(50, 9, None, "one", 7, 0, 4)
        await writer.write(START_A, TaskRetried(at(4), "a", 1, "transient", "reset", 0.5, usage=retried))
        await writer.write(TaskStarted(at(5), "a", 2, "fast"), replace(DONE_A, attempt=2, usage=completed))
        assert [attempt.usage for attempt in await store.list_attempts(RUN)] == [retried, completed]
        assert (await store.list_tasks(RUN))[0].usage == completed
        run = await store.get_run(RUN)
        assert run is not None
        assert run.usage == Usage(150, 29, 0.5, None, 67, 30, 16, cost_is_partial=True)
        last = (await store.list_events(RUN))[-1]
        assert json.loads(last.detail)["usage"] == {
            "input_tokens": 50,
            "output_tokens": 9,
            "model": "one",
            "cache_read_tokens": 7,
            "reasoning_tokens": 4,
        }

    async def test_a_single_token_counted_apart_is_kept(self, store: Store) -> None:
        apart = {
            "read": Usage(cache_read_tokens=1),
            "written": Usage(cache_write_tokens=1),
            "reasoning": Usage(reasoning_tokens=1),
            "kept for an hour": Usage(cache_write_tokens=1, cache_write_1h_tokens=1),
        }
        for run_id, one in apart.items():
            usage = replace(one, input_tokens=2, output_tokens=2, cost_usd=0.5, model="one")
            await Writer(store, run_id).write(*OPENING, START_A, replace(DONE_A, usage=usage))
            assert (await store.list_tasks(run_id))[0].usage == usage

    async def test_an_unknown_cost_makes_a_sum_partial(self, store: Store, writer: Writer) -> None:
        known, unknown = Usage(1, 1, 0.25), Usage(1, 1)
        free = Usage()  # nothing was used, so nothing is unknown
        for spents, partial in (((known, unknown), True), ((unknown, known), True), ((known, free), False)):
            total = sum(spents, Usage())
            assert (total.cost_usd, total.cost_is_partial) == (0.25, partial)
        assert (sum((unknown, unknown), Usage()).cost_is_unknown, sum((free, free), Usage()).cost_is_unknown) == (
            True,
            False,
        )
        await writer.write(START_A, replace(DONE_A, usage=replace(known, cost_is_partial=True)))
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.usage, (await store.list_tasks(RUN))[0].usage) == (replace(known, cost_is_partial=True),) * 2
        assert json.loads((await store.list_events(RUN))[-1].detail)["usage"]["cost_is_partial"] is True

    async def test_each_failed_attempt_keeps_its_traceback(self, store: Store, writer: Writer) -> None:
        retried = TaskRetried(at(4), "a", 1, "transient", "reset", 0.5, traceback="Traceback one")
        failed = TaskFailed(at(6), "a", 2, "unexpected", "KeyError", traceback="Traceback two\n  \u00e9")
        await writer.write(START_A, retried, TaskStarted(at(5), "a", 2, "fast"), failed)
        await writer.write(TaskReopened(at(7), "a", 1), TaskStarted(at(8), "a", 3, "fast"))
        expected = ["Traceback one", "Traceback two\n  \u00e9", None]
        assert [attempt.traceback for attempt in await store.list_attempts(RUN, "a")] == expected
        assert [attempt.traceback for attempt in await store.list_attempts(RUN)] == expected

    async def test_the_model_of_a_question_stays_if_the_end_names_none(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKING, replace(DONE_A, usage=replace(DONE_A.usage, model=None)))
        assert [attempt.usage.model for attempt in await store.list_attempts(RUN)] == ["sample-1"]
        await writer.write(TaskReopened(at(5), "a", 1, damaged=True), TaskStarted(at(6), "a", 2, "fast"))
        assert [
            (await store.list_tasks(RUN))[0].usage.model,
            *(a.usage.model for a in await store.list_attempts(RUN)),
        ] == [
            None,
            "sample-1",
            None,
        ]
