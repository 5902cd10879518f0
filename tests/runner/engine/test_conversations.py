"""Conversations within a run: sessions, history, and tasks that continue one another."""

from __future__ import annotations

import tracemalloc

import pytest

from plait import DAG, ParallelRunner, PlaitError, Retry, RunStatus, Task
from plait.backends import ConversationRequest, Message, Reply, Usage
from plait.errors import BackendError, BackendMissing, ErrorKind
from plait.persistence import MemoryStore, Store
from tests.support.fakes import Talker


async def test_conversations_continue_by_session_and_history() -> None:
    backend, store = Talker(), MemoryStore()
    dag = DAG(
        [
            Task("first", prompt="one"),
            Task("second", prompt="two", continues="first"),
            Task("third", prompt="three", continues="second"),
            Task("fork", prompt="four", continues="first"),
        ]
    )
    result = await ParallelRunner(backend, store=store).run(dag)
    by_prompt = dict(zip(backend.prompts, backend.requests, strict=True))
    assert by_prompt["one"].history == () and not by_prompt["one"].resume
    assert [m.content for m in by_prompt["two"].history] == ["one", "re: one"]
    assert [m.content for m in by_prompt["three"].history] == ["one", "re: one", "two", "re: two"]
    assert [m.content for m in by_prompt["four"].history] == ["one", "re: one"]
    sessions = [by_prompt[prompt].session_id for prompt in ("one", "two", "three", "four")]
    assert (sessions[0], sessions[2], len(set(sessions))) == ("session-1", sessions[1], 3)
    assert [by_prompt[prompt].resume for prompt in ("two", "three", "four")] == [False, True, False]
    own = await store.list_messages(result.run_id, "third")
    assert [(m.role, m.content, m.input_tokens, m.output_tokens) for m in own] == [
        ("user", "three", 0, 0),
        ("assistant", "re: three", 5, 9),
    ], "a task's own turns only: nothing is stored twice"


async def test_the_session_is_stored_before_the_call_or_as_soon_as_it_is_known() -> None:
    store, seen = MemoryStore(), []

    class Watching(Talker):
        def __init__(self, *, own_ids: bool) -> None:
            super().__init__(own_ids=own_ids)
            self.before: list[tuple[str, str | None]] = []

        def open(self, request: ConversationRequest):
            run_id = request.idempotency_key.split(":")[0]
            talk, send = (made := super().open(request)), made.send

            async def watched(prompt: str) -> Reply:
                task = (await store.list_tasks(run_id))[0]
                self.before.append((task.status, task.session_id))
                return await send(prompt)

            talk.send = watched  # type: ignore[method-assign]
            return talk

    for own_ids, before in [(False, ("running", "session-1")), (True, ("running", None))]:
        backend = Watching(own_ids=own_ids)
        result = await ParallelRunner(backend, store=store).run(DAG([Task("a", prompt="x")]))
        assert backend.before == [before]
        stored = (await store.list_tasks(result.run_id))[0]
        assert stored.session_id == ("own-1" if own_ids else "session-1") == result["a"].session_id
        seen.append([event.kind for event in await store.list_events(result.run_id)])
    assert "session_opened" in seen[1]


async def test_a_session_id_that_only_the_reply_names_is_stored_and_continued() -> None:
    store = MemoryStore()
    backend = Talker(lambda prompt, _: Reply(f"<{prompt}>", session_id="from-reply"))
    dag = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a")])
    result = await ParallelRunner(backend, store=store).run(dag)
    assert (backend.requests[1].session_id, backend.requests[1].resume) == ("from-reply", True)
    assert [task.session_id for task in await store.list_tasks(result.run_id)] == ["from-reply"] * 2


async def test_an_id_that_the_reply_does_not_repeat_is_kept() -> None:
    backend = Talker(lambda prompt, _: Reply(f"<{prompt}>"), own_ids=True)
    dag = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a")])
    result = await ParallelRunner(backend, store=MemoryStore()).run(dag)
    assert result["a"].session_id == "own-1"
    assert (backend.requests[1].session_id, backend.requests[1].resume) == ("own-1", True)


async def test_a_continuing_task_may_name_the_default_backend_outright() -> None:
    dag = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a", backend="small")])
    small, other = Talker(), Talker()
    result = await ParallelRunner(backends={"small": small, "other": other}, default="small").run(dag)
    assert result.status is RunStatus.COMPLETED
    with pytest.raises(BackendMissing, match="that conversation is on 'other', and cannot move"):
        await ParallelRunner(backends={"small": small, "other": other}, default="other").run(dag)


async def test_what_was_said_in_a_failed_turn_is_kept_and_not_taken_for_a_turn(store: Store) -> None:
    asked = (Message("user", "count"), Message("assistant", "many"), Message("user", "no, a number"))
    poor = (*asked, Message("assistant", "several", Usage(1, 2)))
    errors = [
        BackendError(ErrorKind.INVALID_OUTPUT, "no number", messages=poor),
        BackendError(ErrorKind.TRANSIENT, "reset"),
    ]
    backend = Talker(lambda prompt, _: errors.pop(0) if errors else f"re: {prompt}")
    dag = DAG(
        [
            Task("a", prompt="count", retry=Retry(attempts=3, base_delay=0)),
            Task("b", prompt="go on", continues="a"),
        ]
    )
    await ParallelRunner(backend, store=store).run(dag, "r")
    stored = [(m.attempt, m.content) for m in await store.list_messages("r", "a")]
    assert stored == [*((1, message.content) for message in poor), (3, "count"), (3, "re: count")]
    assert [m.content for m in backend.requests[-1].history] == ["count", "re: count"]


USED = Usage(3, 7, cache_read_tokens=2)
ASKED, SAID = Message("user", "count"), Message("assistant", "seven", USED)


@pytest.mark.parametrize(
    "messages",
    [
        (ASKED, SAID),
        (Message("user", "count!"), SAID),
        (Message("system", "count"), SAID),
        (Message("user", "count", Usage(1)), SAID),
        (ASKED, Message("assistant", "seven!", USED)),
        (ASKED, Message("assistant", "seven", Usage(3, 6))),
        (ASKED, Message("assistant", "many"), Message("user", "a number"), SAID),
        (SAID,),
    ],
)
async def test_the_messages_of_a_turn_are_stored_as_they_were(store: Store, messages: tuple[Message, ...]) -> None:
    backend = Talker(lambda *_: Reply("seven", usage=USED, messages=messages))
    await ParallelRunner(backend, store=store).run(DAG([Task("a", "count"), Task("b", "go on", continues="a")]), "r")
    kept = [(m.role, m.content, m.input_tokens, m.output_tokens) for m in await store.list_messages("r", "a")]
    assert kept == [(m.role, m.content, m.usage.input_tokens, m.usage.output_tokens) for m in messages]
    assert backend.requests[1].history == messages


async def test_a_task_that_failed_for_good_keeps_its_prompt(store: Store) -> None:
    refused = BackendError(ErrorKind.REFUSED, "no")
    dag = DAG([Task("a", prompt="say {{ word }}")], inputs={"word": "it"})
    runner = ParallelRunner(Talker(lambda *_: refused), store=store)
    await runner.run(dag, "r")
    assert [(m.role, m.content) for m in await store.list_messages("r", "a")] == [("user", "say it")]
    backend = Talker()
    with pytest.raises(PlaitError, match="task 'a' of run r is failed, with no conversation to continue"):
        await ParallelRunner(backend, store=store).runs.continue_task("r", "a", "why not?")
    assert backend.prompts == []  # a prompt that nobody answered is no turn


async def same(prompt: str) -> str:
    return prompt


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
async def test_a_long_chain_of_conversations_is_kept_once_and_not_in_each_of_its_tasks(stored: bool) -> None:
    async def most(*chain: Task) -> int:
        runner = ParallelRunner(same, store=MemoryStore() if stored else None)
        tracemalloc.start()
        assert (await runner.run(DAG(chain))).status is RunStatus.COMPLETED
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    alone = await most(*(Task(f"t{i}", "x", [f"t{i - 1}"] if i else []) for i in range(1_000)))
    continued = await most(*(Task(f"t{i}", "x", continues=f"t{i - 1}" if i else None) for i in range(1_000)))
    assert continued - alone < 2_000_000
