"""Tasks that continue another one: in its session, or in one of their own that branches off from it."""

from __future__ import annotations

import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, Task
from plait.backends import FunctionBackend
from plait.errors import BackendError, ErrorKind
from plait.persistence import Store
from plait.runner.engine.attempt import INTERRUPTED
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker

CHAIN = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a"), Task("c", prompt="three", continues="b")])
FAN = DAG([Task("a", prompt="one"), *(Task(name, prompt=name, continues="a") for name in "bcd")])


class Forker(Talker):
    """A backend that can fork, unless told otherwise."""

    can_fork = True


def seen(backend: Talker) -> dict[str, tuple[str | None, str | None, bool, int]]:
    """Of each prompt the session, what it forks, whether that is resumed, and how long its history is."""
    return {
        prompt: (one.session_id, one.fork_of, one.resume, len(one.history))
        for prompt, one in zip(backend.prompts, backend.requests, strict=True)
    }


async def test_a_chain_stays_in_one_session_where_the_backend_cannot_fork(store: Store) -> None:
    backend, odd = Talker(), Forker()
    odd.can_fork = False
    for one in (backend, odd):
        await ParallelRunner(one, store=store).run(CHAIN)
        assert seen(one) == {
            "one": ("session-1", None, False, 0),
            "two": ("session-1", None, True, 2),
            "three": ("session-1", None, True, 4),
        }


async def test_each_task_forks_where_the_backend_can(store: Store) -> None:
    backend = Forker()
    await ParallelRunner(backend, store=store).run(CHAIN, "r")
    assert seen(backend) == {
        "one": ("session-1", None, False, 0),
        "two": ("session-2", "session-1", False, 2),
        "three": ("session-3", "session-2", False, 4),
    }
    assert [task.session_id for task in await store.list_tasks("r")] == ["session-1", "session-2", "session-3"]
    again = Forker()
    await ParallelRunner(again, store=store).runs.continue_task("r", "b", "and now?")
    assert seen(again) == {"and now?": ("session-2", None, True, 4)}


async def test_an_id_that_the_backend_makes_comes_with_the_fork(store: Store) -> None:
    backend = Forker(own_ids=True)
    await ParallelRunner(backend, store=store).run(CHAIN, "r")
    assert seen(backend)["three"] == (None, "own-2", False, 4)
    assert [task.session_id for task in await store.list_tasks("r")] == ["own-1", "own-2", "own-3"]


@pytest.mark.parametrize("kind", [Talker, Forker])
async def test_tasks_that_continue_one_never_share_its_session(kind: type[Talker], store: Store) -> None:
    backend = kind()
    await ParallelRunner(backend, store=store).run(FAN)
    known = seen(backend)
    assert len({session_id for session_id, *_ in known.values()}) == 4
    assert {known[name][1:] for name in "bcd"} == {("session-1", False, 2)}


async def test_functions_have_nothing_to_fork(store: Store) -> None:
    async def answer(prompt: str) -> str:
        return prompt

    result = await ParallelRunner(FunctionBackend(answer), store=store).run(FAN)
    assert {task.session_id for task in result.tasks.values()} == {None}


async def test_a_fork_that_fails_is_made_anew_from_the_parent(store: Store) -> None:
    reset = [BackendError(ErrorKind.TRANSIENT, "reset")]
    backend = Forker(lambda prompt, _: reset.pop() if reset and prompt == "two" else f"re: {prompt}")
    dag = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a", retry=Retry(attempts=2))])
    await ParallelRunner(backend, store=store, clock=QuickClock()).run(dag)
    forks = [(one.session_id, one.fork_of, one.resume) for one in backend.requests[1:]]
    assert forks == [("session-2", "session-1", False), ("session-3", "session-1", False)]


@pytest.mark.parametrize("confirmed", [True, False])
async def test_a_fork_that_was_cut_goes_on_in_itself_once_it_is_known(confirmed: bool, store: Store) -> None:
    class DyingForker(Dying):
        can_fork = True

    hangs = DyingForker(lambda prompt: prompt == "two", lambda _: confirmed, Forker())
    await die(store, hangs, CHAIN)
    assert (await store.list_tasks("r"))[1].session_id == "session-2"
    backend = Forker()
    backend.made = 100
    await ParallelRunner(backend, store=store).resume("r")
    expected = (INTERRUPTED, ("session-2", None, True)) if confirmed else ("two", ("session-101", "session-1", False))
    first = backend.requests[0]
    assert (backend.prompts[0], (first.session_id, first.fork_of, first.resume)) == expected
    assert [message.content for message in first.history] == ["one", "re: one"]


async def test_a_forked_conversation_is_whole_though_the_clock_runs_backwards(store: Store) -> None:
    class Backwards(QuickClock):
        def wall(self) -> float:
            self.now -= 1.0
            return self.now

    refused = BackendError(ErrorKind.REFUSED, "no")
    dag = DAG([*FAN.tasks, Task("e", prompt="last", continues="b")])
    refusing = Talker(lambda prompt, _: refused if prompt == "last" else f"re: {prompt}")
    result = await ParallelRunner(refusing, store=store, clock=Backwards()).run(dag, "r")
    tasks = {task.task_id: task for task in await store.list_tasks("r")}
    assert (tasks["a"].ended_at or "") > (tasks["b"].started_at or ""), "or this shows nothing"
    backend = Talker()
    await ParallelRunner(backend, store=store, clock=QuickClock()).resume(result.run_id, retry_failed=True)
    assert [message.content for message in backend.requests[0].history] == ["one", "re: one", "b", "re: b"]


async def test_a_conversation_that_began_without_the_other_task_stays_without_it(store: Store) -> None:
    refused = BackendError(ErrorKind.REFUSED, "no")
    dag = DAG(
        [Task("a", prompt="one", failure_mode=FailureMode.SOFT), *FAN.tasks[1:], Task("e", "last", continues="b")]
    )
    clock = QuickClock()
    refuses = ["one", "last"]
    refusing = Forker(lambda prompt, _: refused if prompt in refuses else f"re: {prompt}")
    await ParallelRunner(refusing, store=store, clock=clock).run(dag, "r")
    refuses.remove("one")
    clock.now += 60
    await ParallelRunner(refusing, store=store, clock=clock).resume("r", retry_failed=True)
    backend = Forker()
    await ParallelRunner(backend, store=store, clock=clock).resume("r", retry_failed=True)
    assert [message.content for message in backend.requests[0].history] == ["b", "re: b"]
