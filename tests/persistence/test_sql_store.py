"""What does not fit its checksum is called damaged, whichever part of it was changed, and is never handed out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import StoreError
from plait.events import NewTask, NodeStarted
from plait.persistence import MemoryStore, Note, RunRecord
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    CREATED,
    DONE_A,
    OPENING,
    RUN,
    START_A,
    Writer,
    at,
)

ASKED = {
    "a prompt": "UPDATE tasks SET prompt = 'other' WHERE task_id = 'a'",
    "a prompt that is gone": "UPDATE tasks SET prompt = NULL WHERE task_id = 'a'",
    "a dependency": "UPDATE tasks SET depends_on = '[]' WHERE task_id = 'b'",
    "an option": "UPDATE tasks SET spec = '{\"retry\":9}' WHERE task_id = 'a'",
    "a name": "UPDATE tasks SET task_id = 'other' WHERE task_id = 'a'",
    "an answer of a person": "UPDATE tasks SET answers = '{}', answers_checksum = 1 WHERE task_id = 'a'",
    "an answer without a checksum": "UPDATE tasks SET answers = '{}' WHERE task_id = 'a'",
    "a status": "UPDATE tasks SET status = 'lost' WHERE task_id = 'a'",
}
RESULTS = {
    "its text": "UPDATE attempts SET text = 'other'",
    "its text, which is gone": "UPDATE attempts SET text = NULL",
    "its data": "UPDATE attempts SET data = '[]'",
    "its checksum": "UPDATE attempts SET result_checksum = result_checksum + 1",
}
RUNS = {
    "UPDATE runs SET claims = 'none'": "its row",
    "UPDATE runs SET claims = '[[2]]'": "its row",
    "UPDATE runs SET created_at = 'never'": "its row",
    "UPDATE runs SET status = 'lost'": "its status",
    "UPDATE tasks SET status = 'lost' WHERE task_id = 'a'": "the status of a task",
}
NOTES = {
    "its kind": "UPDATE notes SET kind = 'other'",
    "its task": "UPDATE notes SET task_id = 'b'",
    "its body": "UPDATE notes SET body = '{\"answer\":2}'",
}


async def a_store() -> MemoryStore:
    store = MemoryStore()
    writer = Writer(store)
    tasks = (NewTask("a", "p"), NewTask("b", "p {{ a }}", ("a",)))
    await writer.write(replace(CREATED, tasks=tasks), *OPENING[1:], START_A, ASK, ANSWER, DONE_A)
    await store.send(RUN, Note("answer", at(9), "a", '{"answer":1}'))
    return store


def change(store: MemoryStore, statement: str) -> None:
    connection = store._connection
    connection.execute("PRAGMA ignore_check_constraints = ON")
    assert connection.execute(statement).rowcount > 0


@pytest.mark.parametrize("part", ASKED)
async def test_a_task_of_which_what_was_asked_is_damaged_is_not_read(part: str) -> None:
    store = await a_store()
    change(store, ASKED[part])
    with pytest.raises(StoreError, match=f"^run '{RUN}' is damaged: task '(a|b|other)' .* restore a copy"):
        await store.list_tasks(RUN)


@pytest.mark.parametrize("part", RESULTS)
async def test_a_damaged_result_is_marked_and_left_out(part: str) -> None:
    store = await a_store()
    [before] = await store.list_tasks(RUN, "a")
    change(store, RESULTS[part])
    [task] = await store.list_tasks(RUN, "a")
    assert task == replace(before, text=None, data=None, damaged=True)


@pytest.mark.parametrize(("statement", "part"), RUNS.items())
async def test_a_damaged_run_is_not_read_and_is_listed_as_damaged(statement: str, part: str) -> None:
    store = await a_store()
    change(store, statement)
    with pytest.raises(StoreError, match=f"^run '{RUN}' is damaged: {part} does not fit its checksum; "):
        await store.get_run(RUN)
    [run] = await store.list_runs()
    assert run == RunRecord(RUN, "", "failed", "", error=run.error, counts={}, damaged=True)
    assert str(run.error).startswith(f"run '{RUN}' is damaged: ")
    assert await store.list_claimable() == ()


async def test_damaged_settings_are_found_by_whoever_reads_them() -> None:
    store = await a_store()
    change(store, "UPDATE runs SET settings = '{}'")
    with pytest.raises(StoreError, match="damaged: the text of its settings and inputs"):
        await store.get_run(RUN)
    [run] = await store.list_runs()
    assert not run.damaged


@pytest.mark.parametrize("part", NOTES)
async def test_a_damaged_note_is_not_read(part: str) -> None:
    store = await a_store()
    change(store, NOTES[part])
    with pytest.raises(StoreError, match=f"^run '{RUN}' is damaged: note 1 "):
        await store.list_notes(RUN)


@pytest.mark.parametrize("column", ["content", "role"])
async def test_a_damaged_message_is_marked_and_empty(column: str) -> None:
    store = await a_store()
    before = await store.list_messages(RUN, "a")
    change(store, f"UPDATE messages SET {column} = 'other' WHERE role = 'assistant'")
    after = await store.list_messages(RUN, "a")
    assert [message.damaged for message in after] == [message.role == "assistant" for message in before]
    assert [message.content for message in after if message.damaged] == [""]


async def test_a_list_without_a_limit_is_of_the_last_fifty_runs_and_the_first_thousand_events() -> None:
    store = await a_store()
    for number in range(50):
        await Writer(store, f"later-{number}").write(CREATED)
    assert len(await store.list_runs()) == len(await store.list_claimable()) == 50
    assert len(await store.list_runs(99)) == 51
    store._connection.executemany(
        "INSERT INTO events (run_id, seq, at, kind, detail) VALUES (?, ?, ?, 'run_started', '{}')",
        [(RUN, seq, at(9)) for seq in range(100, 1100)],
    )
    assert len(await store.list_events(RUN)) == 1000


@pytest.mark.parametrize(("limit", "found"), [(2**80, 3), (2, 2), (0, 0), (-1, 0)])
async def test_a_limit_may_be_any_number(limit: int, found: int) -> None:
    store = await a_store()
    for run_id in ("second", "third"):
        await Writer(store, run_id).write(CREATED)
    assert len(await store.list_runs(limit)) == found
    assert len(await store.list_events(RUN, 1, limit)) == found


@pytest.mark.parametrize(("until", "expired"), [(1000.0, True), (4e10, False)])
async def test_a_lease_that_has_expired_is_told(until: float, expired: bool) -> None:
    store = await a_store()
    change(store, f"UPDATE runs SET lease_expires_at = {until}")
    run = await store.get_run(RUN)
    assert run is not None
    assert (run.lease_has_expired, len(await store.list_claimable())) == (expired, int(expired))


async def test_the_check_of_rows_counts_results_and_messages_of_every_run() -> None:
    store = await a_store()
    assert await store.check_rows() == ([], 1, 2)
    writer = Writer(store, "later")
    await writer.write(CREATED, *OPENING[1:], *(NodeStarted(at(3), "a", 0, "n") for _ in range(1000)))
    assert await store.check_rows() == ([], 1, 2)


DAMAGED = {
    "a result": (RESULTS["its text"], f"{RUN}/a"),
    "a message": ("UPDATE messages SET content = 'other'", f"{RUN}/a"),
    "a task": (ASKED["a dependency"], f"run '{RUN}' is damaged: task 'b' (prompt, dependencies, options, answers)"),
    "a note": (NOTES["its body"], f"run '{RUN}' is damaged: note 1"),
    "the run": (
        "UPDATE runs SET settings = '{}' WHERE run_id = 'run-1'",
        f"run '{RUN}' is damaged: the text of its settings and inputs",
    ),
    "the first event": (
        "UPDATE events SET kind = 'other' WHERE run_id = 'run-1' AND seq = 1",
        f"run '{RUN}': a value has the wrong type ('other')",
    ),
    "an event": (
        "UPDATE events SET kind = 'other' WHERE seq = 4",
        f"run '{RUN}': a value has the wrong type ('other')",
    ),
}


@pytest.mark.parametrize("part", DAMAGED)
async def test_the_check_of_rows_names_what_is_damaged_and_goes_on(part: str) -> None:
    store = await a_store()
    await Writer(store, "later").write(CREATED)
    statement, name = DAMAGED[part]
    change(store, statement)
    change(store, "UPDATE tasks SET prompt = 'other' WHERE run_id = 'later' AND task_id = 'a'")
    [found, other], *_ = await store.check_rows()
    assert found.startswith(name)
    assert other.startswith("run 'later' is damaged: task 'a'")


async def test_the_check_of_rows_names_the_whole_task() -> None:
    store = MemoryStore()
    await Writer(store).write(replace(CREATED, tasks=(NewTask("a; b", "p"),)))
    change(store, "UPDATE tasks SET prompt = 'other'")
    [found], *_ = await store.check_rows()
    assert found.startswith(f"run '{RUN}' is damaged: task 'a; b' (prompt, ")
    assert found.endswith(" does not fit its checksum")
