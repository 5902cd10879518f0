"""A wide DAG, run over a store that may fail, and what has to be stored of it in the end."""

from __future__ import annotations

from plait import DAG, ParallelRunner, Task
from plait.persistence import MemoryStore
from tests.support.fakes import Talker
from tests.support.stores.faulty_store import FaultyStore

WIDE = DAG(
    [
        Task("a", prompt="a"),
        *[Task(f"b{i}", prompt="b {{ a }}", depends_on=["a"]) for i in range(20)],
        Task("z", prompt="z", depends_on=[f"b{i}" for i in range(20)]),
    ]
)


def run(store: FaultyStore, **options):
    return ParallelRunner(Talker(), store=store, concurrency=4, **options)


async def everything_is_stored(store: MemoryStore, run_id: str) -> None:
    record = await store.get_run(run_id)
    assert record is not None
    assert (record.status, record.counts, record.owner) == ("completed", {"completed": 22}, None)
    for task in await store.list_tasks(run_id):
        assert task.text is not None
        assert [m.role for m in await store.list_messages(run_id, task.task_id)] == ["user", "assistant"]
    seqs = [event.seq for event in await store.list_events(run_id)]
    assert seqs == sorted(set(seqs))
