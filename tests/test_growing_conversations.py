"""Tasks that are added to go on with a conversation which nobody knew would be continued when it ended."""

from __future__ import annotations

import pytest

from persistence import MemoryStore
from runner import DAG, Decision, ParallelRunner, RunStatus, Task
from tests.support.fakes import QuickClock
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.growth import Scripted, by_end, talker

MORE = Decision(add=(Task("more", "more", continues="a"),))


@pytest.mark.parametrize("reads", [True, False])
async def test_one_that_the_store_was_too_far_away_to_take_is_kept(reads: bool) -> None:
    """The completion of `a` is the first thing that cannot be written down."""

    def faults(method: str, _number: int) -> Fault | None:
        away = "a" in backend.prompts
        return Fault.BEFORE if away and (method == "write" or not reads) else None

    backend = talker()
    runner = ParallelRunner(backend, store=FaultyStore(MemoryStore(), faults), clock=QuickClock())
    dag = DAG([Task("a", "a"), Task("b", "b", ["a"])])
    result = await runner.run(dag, policy=Scripted(by_end({"b": MORE})))
    assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["a", "b", "more"])
    assert [message.content for message in backend.openings[-1].history] == ["a", "<a>"]
    assert backend.openings[-1].session_id == "session-1"
    assert result.degraded[0].lost
