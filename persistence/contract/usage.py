"""The store contract: the model of each attempt."""

from __future__ import annotations

from dataclasses import replace

from plait.persistence import (
    Spent,
    Store,
    TaskAnswered,
    TaskCancelled,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence.contract.opened import OpenedStore
from plait.persistence.contract.samples import ASKING, DONE_A, RUN, START_A, Writer, at


class UsageContract(OpenedStore):
    """An attempt has the model that its end names."""

    async def test_each_attempt_keeps_the_model_that_answered(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, TaskRetried(at(4), "a", 1, "transient", "reset", 0.5, spent=Spent(model="one")))
        await writer.write(TaskStarted(at(5), "a", 2, "fast"), TaskInterrupted(at(6), "a", 2, "stopped"))
        await writer.write(
            TaskStarted(at(7), "a", 3, "fast"), TaskWaiting(at(8), "a", 3, "?", asked="{}", spent=Spent(model="two"))
        )
        await writer.write(TaskAnswered(at(9), "a"), TaskStarted(at(9), "a", 4, "fast"))
        await writer.write(TaskFailed(at(10), "a", 4, "failed", "auth", "no key", spent=Spent(model="three")))
        await writer.write(TaskStarted(at(10), "c", 1, "fast"), TaskCancelled(at(11), "c", Spent(1, 1, model="four")))
        attempts = await store.list_attempts(RUN)
        assert [(a.task_id, a.attempt, a.spent.model) for a in attempts] == [
            ("a", 1, "one"),
            ("a", 2, None),
            ("a", 3, "two"),
            ("a", 4, "three"),
            ("c", 1, "four"),
        ]
        assert [task.spent.model for task in await store.list_tasks(RUN)] == ["three", None, "four"]
        assert attempts[:4] == await store.list_attempts(RUN, "a")

    async def test_the_model_of_a_question_stays_if_the_end_names_none(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKING, replace(DONE_A, spent=replace(DONE_A.spent, model=None)))
        assert [attempt.spent.model for attempt in await store.list_attempts(RUN)] == ["sample-1"]
        await writer.write(TaskReopened(at(5), "a", damaged=True), TaskStarted(at(6), "a", 2, "fast"))
        assert [
            (await store.list_tasks(RUN))[0].spent.model,
            *(a.spent.model for a in await store.list_attempts(RUN)),
        ] == [
            None,
            "sample-1",
            None,
        ]
