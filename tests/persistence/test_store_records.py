"""Every field of a record is read as it was written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.events import (
    LeaseRenewed,
    NewTask,
    PolicyDecided,
    TaskAnswered,
    TaskCompleted,
    TaskFailed,
    TasksAdded,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import AttemptRecord, MemoryStore, Note, RunRecord
from plait.persistence.store_records import Claim, NoteRecord, TaskRecord
from plait.usage import Usage
from tests.contracts.store.samples import CREATED, DONE_A, OPENING, RUN, START_A, Writer, at, run_becomes


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def writer(store: MemoryStore) -> Writer:
    writer = Writer(store)
    await writer.write(*OPENING)
    return writer


async def test_every_field_of_an_attempt_is_kept(store: MemoryStore, writer: Writer) -> None:
    usage = Usage(3, 2, 0.25, "sample-1", 1, 1, 1, True, 1)
    failed = TaskFailed(at(4), "a", 1, "auth", "no key", 1.5, usage, (), "Traceback: ...")
    await writer.write(START_A, failed)
    [attempt] = await store.list_attempts(RUN, "a")
    assert attempt == AttemptRecord(
        "a", 1, "failed", "fast", "session-a", at(3), at(4), "auth", "no key", usage, 1.5, "Traceback: ..."
    )


async def test_every_field_of_a_task_is_kept(store: MemoryStore, writer: Writer) -> None:
    usage = Usage(3, 2, 0.25, "sample-1", 1, 1, 1, True, 1)
    new = NewTask("d", "Ask {{ a }}", ("a", "c"), "deep", '{"weight":2}')
    await writer.write(TasksAdded(at(3), (new,), "a"), TaskStarted(at(3), "d", 1, "fast"))
    await writer.write(TaskWaiting(at(4), "d", 1, "Which?", crashed=True), TaskAnswered(at(5), "d", 1, '["this"]'))
    await writer.write(TaskStarted(at(6), "d", 2, "fast", "session-d", confirmed=True))
    await writer.write(TaskCompleted(at(7), "d", 2, "This.", '{"this":1}', usage, 1.5))
    given = "d", 3, new.prompt, new.depends_on, "deep", new.spec
    assert await store.list_tasks(RUN, "d") == (
        TaskRecord(
            *given, "completed", 2, "This.", '{"this":1}', session_id="session-d", usage=usage, duration_s=1.5,
            started_at=at(6), ended_at=at(7), crashes=1, session_confirmed=True, answers='["this"]', added_by="a",
        ),
    )  # fmt: skip
    asking = TaskWaiting(at(4), "c", 1, "Which?", asked='{"kind":"choice"}', usage=usage, duration_s=1.5)
    await writer.write(TaskStarted(at(3), "c", 1, "fast"), asking)
    await writer.write(TaskStarted(at(3), "a", 1, "fast"), TaskFailed(at(4), "a", 1, "auth", "no key", 2.5))
    assert await store.list_tasks(RUN, "c") == (
        TaskRecord(
            "c", 2, "Last.", (), None, "{}", "waiting_input", 1, usage=usage, duration_s=1.5, started_at=at(3),
            ended_at=at(4), question="Which?", asked='{"kind":"choice"}',
        ),
    )  # fmt: skip
    assert await store.list_tasks(RUN, "b") == (
        TaskRecord("b", 1, "Then {{ a }}", ("a",), "fast", '{"weight": 2}', "pending", 0),
    )
    assert await store.list_tasks(RUN, "a") == (
        TaskRecord(
            "a", 0, "First.", (), None, "{}", "failed", 1, error_kind="auth", error="no key", duration_s=2.5,
            started_at=at(3), ended_at=at(4),
        ),
    )  # fmt: skip


async def test_a_note_about_a_run_needs_no_task_and_no_body(store: MemoryStore, writer: Writer) -> None:
    await store.send(RUN, Note("cancel", at(5)))
    assert await store.list_notes(RUN) == (NoteRecord(1, "cancel", at(5), None, "{}"),)


async def test_every_field_of_a_run_is_kept(store: MemoryStore, writer: Writer) -> None:
    usage = Usage(3, 2, 0.25, None, 1, 1, 1, True, 1)
    await writer.write(START_A, replace(DONE_A, usage=usage), PolicyDecided(at(5), '{"tries":2}'))
    await writer.write(run_becomes(at(6), "failed", "no"), LeaseRenewed(at(6), 4e10))
    assert await store.get_run(RUN) == RunRecord(
        RUN, CREATED.name, "failed", at(0), at(2), at(6), "no", CREATED.settings, (Claim(2, "owner-1"),), 8, None, 4e10,
        {"completed": 1, "pending": 2}, usage, '{"tries":2}', 6,
    )  # fmt: skip
