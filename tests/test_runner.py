"""Running a DAG: results, order, limits, failures, retries, time-outs, conversations."""

from __future__ import annotations

import asyncio
import json
import random

import anyio
import pytest

from backends import BackendError, ErrorKind, Message, Opening, Reply, Usage
from persistence import MemoryStore, SQLiteStore
from runner import (
    DAG,
    BackendMissing,
    FailureMode,
    ParallelRunner,
    Retry,
    RunExists,
    RunStatus,
    Task,
    TaskStatus,
)
from runner.retrying import retry_delay
from tests.support.fakes import QuickClock, Talker, failing

HAIKU = DAG(
    [
        Task("facts", prompt="List three facts."),
        Task("haiku", prompt="Write a haiku from these facts:\n{{ facts }}", depends_on=["facts"]),
    ]
)


async def test_results_flow_into_prompts() -> None:
    backend = Talker()
    result = await ParallelRunner(backend).run(HAIKU)
    assert result.status is RunStatus.COMPLETED
    assert backend.prompts == ["List three facts.", "Write a haiku from these facts:\nre: List three facts."]
    assert result["facts"].text == "re: List three facts."
    assert result.text == {"facts": backend.answer(backend.prompts[0], Opening()), "haiku": result["haiku"].text}
    assert (result.usage.input_tokens, result.usage.cost_usd) == (sum(map(len, backend.prompts)), 1.0)
    assert (result.degraded, result.failed, result.blocked, result.reused) == ((), (), (), 0)
    assert backend.closed == 2


async def test_any_async_function_is_a_backend() -> None:
    async def shout(prompt: str) -> str:
        return prompt.upper()

    result = await ParallelRunner(shout).run(DAG([Task("a", prompt="hello")]))
    assert result["a"].text == "HELLO"


async def test_structured_results_and_inputs_in_prompts() -> None:
    async def review(_prompt: str) -> dict[str, object]:
        return {"label": "good", "score": 3}

    echo = Talker()
    dag = DAG(
        [
            Task("review", backend="review"),
            Task(
                "use",
                prompt="{{ review.label }} {{ review }} {{ who }} {{ results['my-1'] }}|{{ soft }}",
                depends_on=["review", "my-1", "soft"],
            ),
            Task("my-1", prompt="{{ '{{ not a template }}' }}"),
            Task("soft", backend="broken", failure_mode=FailureMode.SOFT),
        ],
        inputs={"who": "Ada"},
    )

    async def broken(_prompt: str) -> str:
        raise ValueError("no luck")

    runner = ParallelRunner(echo, backends={"review": review, "broken": broken})
    result = await runner.run(dag)
    assert echo.prompts[-1] == 'good {"label": "good", "score": 3} Ada re: {{ not a template }}|'
    assert result["review"].data == {"label": "good", "score": 3}
    assert result["soft"].error == "ValueError: no luck"
    assert result.status is RunStatus.FAILED


async def test_backends_by_name_and_a_single_one_is_the_default() -> None:
    fast, deep = Talker(), Talker()
    dag = DAG([Task("a", prompt="a", backend="fast"), Task("b", prompt="b", backend="deep"), Task("c", continues="b")])
    await ParallelRunner(backends={"fast": fast, "deep": deep}).run(dag)
    assert (fast.prompts, deep.prompts) == (["a"], ["b", ""])
    alone = await ParallelRunner(backends={"fast": Talker()}).run(HAIKU)
    assert alone.status is RunStatus.COMPLETED


async def test_a_missing_backend_is_said_before_anything_starts() -> None:
    store = MemoryStore()
    with pytest.raises(BackendMissing, match=r"no backend named 'deep' .* this runner has: default"):
        await ParallelRunner(Talker(), store=store).run(DAG([Task("a"), Task("b", backend="deep")]))
    assert await store.list_runs() == ()


async def test_concurrency_holds_overall_and_per_backend() -> None:
    going = {"one": 0, "two": 0}
    most = {"one": 0, "two": 0, "all": 0}

    def body(name: str):
        async def f(_prompt: str) -> str:
            going[name] += 1
            most[name] = max(most[name], going[name])
            most["all"] = max(most["all"], sum(going.values()))
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            going[name] -= 1
            return ""

        return f

    dag = DAG([Task(f"t{i}", backend="one" if i % 2 else "two") for i in range(60)])
    runner = ParallelRunner(backends={"one": body("one"), "two": body("two")}, concurrency=5, limits={"one": 2})
    assert (await runner.run(dag)).status is RunStatus.COMPLETED
    assert most == {"one": 2, "two": 5, "all": 5} or (most["one"] == 2 and most["all"] == 5)


@pytest.mark.parametrize(
    ("mode", "run_status", "task_status", "after"),
    [
        (FailureMode.HARD, RunStatus.FAILED, TaskStatus.FAILED, TaskStatus.PENDING),
        (FailureMode.SOFT, RunStatus.FAILED, TaskStatus.FAILED, TaskStatus.COMPLETED),
        (FailureMode.SKIP, RunStatus.COMPLETED, TaskStatus.SKIPPED, TaskStatus.COMPLETED),
    ],
)
async def test_a_failure_harms_only_its_own_cone(
    mode: FailureMode, run_status: RunStatus, task_status: TaskStatus, after: TaskStatus
) -> None:
    refused = BackendError(ErrorKind.REFUSED, "no")
    backend = Talker(lambda prompt, _: refused if prompt == "bad" else f"<{prompt}>")
    dag = DAG(
        [
            Task("bad", prompt="bad", failure_mode=mode),
            Task("after", prompt="after {{ bad }}", depends_on=["bad"]),
            Task("other", prompt="other"),
        ]
    )
    result = await ParallelRunner(backend).run(dag)
    assert (result.status, result["bad"].status, result["after"].status) == (run_status, task_status, after)
    assert result["other"].text == "<other>"
    assert (result["bad"].error_kind, result["bad"].error) == ("refused", "no")
    assert ("after " in backend.prompts) == (after is TaskStatus.COMPLETED)
    assert result.blocked == (("after",) if mode is FailureMode.HARD else ())
    if mode is FailureMode.HARD:
        assert result.error == "1 failed (bad), 1 blocked; bad: no"


async def test_deserving_errors_are_retried_with_backoff_and_others_are_not() -> None:
    clock = QuickClock()
    flaky = Talker(failing(BackendError(ErrorKind.TRANSIENT, "reset"), 2))
    result = await ParallelRunner(flaky, clock=clock, rng=random.Random(1)).run(DAG([Task("a", prompt="x")]))
    assert (result["a"].status, result["a"].attempts, len(flaky.prompts)) == (TaskStatus.COMPLETED, 3, 3)
    assert len(clock.slept) == 2
    assert 0 <= clock.slept[0] <= 1 and 0 <= clock.slept[1] <= 2
    auth = Talker(failing(BackendError(ErrorKind.AUTH, "bad key"), 9))
    result = await ParallelRunner(auth, clock=clock).run(DAG([Task("a", prompt="x")]))
    assert (result["a"].status, len(auth.prompts)) == (TaskStatus.FAILED, 1)


async def test_a_retry_gives_its_place_to_others_and_honours_retry_after() -> None:
    clock = QuickClock()
    limited = Talker(failing(BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=30.0), 1))
    dag = DAG([Task("a", prompt="a"), Task("b", prompt="b")])
    result = await ParallelRunner(limited, clock=clock, concurrency=1).run(dag)
    assert result.status is RunStatus.COMPLETED
    assert all(30.0 <= slept <= 31.0 for slept in clock.slept)
    assert limited.prompts[:2] == ["a", "b"], "the place was free while a waited"


async def test_retries_end_and_the_last_error_stays() -> None:
    clock = QuickClock()
    flaky = Talker(failing(BackendError(ErrorKind.OVERLOADED, "529"), 99))
    retry = Retry(attempts=4, base_delay=2.0, max_delay=3.0)
    result = await ParallelRunner(flaky, clock=clock).run(DAG([Task("a", prompt="x", retry=retry)]))
    assert (result["a"].attempts, result["a"].error_kind, len(clock.slept)) == (4, "overloaded", 3)


def test_backoff_is_exponential_with_full_jitter_and_never_shortens_a_hint() -> None:
    rng, retry = random.Random(0), Retry(attempts=9, base_delay=1.0, max_delay=5.0)
    for failures, top in [(1, 1), (2, 2), (3, 4), (4, 5), (5000, 5)]:
        delays = [retry_delay(retry, failures, None, rng) for _ in range(300)]
        assert 0 <= min(delays) < top * 0.1 and top * 0.9 < max(delays) <= top
    hinted = [retry_delay(retry, 1, 7.0, rng) for _ in range(300)]
    assert min(hinted) >= 7.0 and max(hinted) <= 8.0


async def test_a_timeout_ends_the_attempt_and_is_retried() -> None:
    started = 0

    async def hang_once(_prompt: str) -> str:
        nonlocal started
        started += 1
        if started == 1:
            await anyio.sleep_forever()
        return "at last"

    dag = DAG([Task("a", timeout=0.05, retry=Retry(base_delay=0))])
    result = await ParallelRunner(hang_once).run(dag)
    assert (result["a"].text, result["a"].attempts) == ("at last", 2)
    dag = DAG([Task("a", timeout=0.05, retry=Retry(attempts=1))])
    started = 0
    result = await ParallelRunner(hang_once).run(dag)
    assert (result["a"].error_kind, result["a"].error) == ("timeout", "no answer within the task's timeout of 0.05 s")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (TimeoutError(), "TimeoutError"),
        (ExceptionGroup("g", [BackendError(ErrorKind.UNEXPECTED, "inner")]), "inner"),
        (KeyError("k"), "KeyError: 'k'"),
    ],
)
async def test_a_raising_backend_fails_its_task_alone(answer: Exception, error: str) -> None:
    result = await ParallelRunner(Talker(lambda p, _: answer if p == "bad" else "ok")).run(
        DAG([Task("bad", prompt="bad"), Task("good", prompt="good")])
    )
    assert (result["bad"].error_kind, result["bad"].error) == ("unexpected", error)
    assert result["good"].text == "ok"


async def test_odd_replies_are_failures_or_stored_whole(tmp_path) -> None:
    answers: dict[str, object] = {
        "nothing": None,
        "no reply": "text where a Reply belongs",
        "nan": Reply("nan", data={"x": float("nan")}),
        "object": Reply("object", data=object()),  # type: ignore[arg-type]
        "big": Reply("x" * 10_000_000),
        "surrogate": Reply("a\udc80b", messages=(Message("user", "\ud800"), Message("assistant", "a\udc80b"))),
        "nul": Reply("a\0b"),
    }

    class Odd(Talker):
        def open(self, opening: Opening):
            talk = super().open(opening)

            async def send(prompt: str) -> Reply:
                return answers[prompt]  # type: ignore[return-value]

            talk.send = send  # type: ignore[method-assign]
            return talk

    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(Odd(), store=store)
        dag = DAG([Task(name.replace(" ", "-"), prompt=name) for name in answers])
        result = await runner.run(dag)
        assert {task.id for task in result.tasks.values() if task.status is TaskStatus.FAILED} == {
            "nothing",
            "no-reply",
            "nan",
            "object",
        }
        assert (result["nan"].error_kind, result["nothing"].error_kind) == ("invalid_output", "unexpected")
        again = await runner.resume(result.run_id)
        assert not result.degraded
        for name, text in [("big", "x" * 10_000_000), ("surrogate", "a\ufffdb"), ("nul", "a\0b")]:
            assert again[name].text == result[name].text == text


async def test_a_prompt_that_cannot_be_rendered_fails_its_task() -> None:
    dag = DAG([Task("a", prompt="x"), Task("b", prompt="{{ a.label }}", depends_on=["a"])])
    result = await ParallelRunner(Talker()).run(dag)
    assert (result["b"].error_kind, result.status) == ("invalid_request", RunStatus.FAILED)


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
    by_prompt = dict(zip(backend.prompts, backend.openings, strict=True))
    assert by_prompt["one"].history == () and not by_prompt["one"].resume
    assert [m.content for m in by_prompt["two"].history] == ["one", "re: one"]
    assert [m.content for m in by_prompt["three"].history] == ["one", "re: one", "two", "re: two"]
    assert [m.content for m in by_prompt["four"].history] == ["one", "re: one"]
    assert {opening.session_id for opening in backend.openings} == {"session-1"}
    assert by_prompt["two"].resume
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

        def open(self, opening: Opening):
            run_id = opening.idempotency_key.split(":")[0]
            talk, send = (made := super().open(opening)), made.send

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


async def test_a_given_run_id_is_kept_and_may_not_be_used_twice() -> None:
    runner = ParallelRunner(Talker(), store=MemoryStore())
    assert (await runner.run(HAIKU, run_id="mine")).run_id == "mine"
    with pytest.raises(RunExists, match="already has a run 'mine'; resume it, or give another run id"):
        await runner.run(HAIKU, run_id="mine")


async def test_made_run_ids_sort_by_time_and_differ() -> None:
    runner = ParallelRunner(Talker())
    ids = [(await runner.run(DAG([Task("a")]))).run_id for _ in range(20)]
    assert len(set(ids)) == 20
    clock = QuickClock()
    runner = ParallelRunner(Talker(), clock=clock)
    timed = []
    for _ in range(5):
        timed.append((await runner.run(DAG([Task("a")]))).run_id)
        clock.now += 1.0
    assert timed == sorted(timed)


async def test_one_runner_runs_several_dags_at_once() -> None:
    store = MemoryStore()
    runner = ParallelRunner(Talker(), store=store)
    ids: list[str] = []

    async def one() -> None:
        ids.append((await runner.run(HAIKU)).run_id)

    async with anyio.create_task_group() as tg:
        for _ in range(5):
            tg.start_soon(one)
    assert {run.run_id for run in await store.list_runs()} == set(ids)
    assert {run.status for run in await store.list_runs()} == {"completed"}


@pytest.mark.parametrize("bad", [{"concurrency": 0}, {"limits": {"x": 0}}])
def test_bad_options_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        ParallelRunner(Talker(), **bad)


def test_a_failure_mode_may_be_given_as_a_word() -> None:
    assert Task("a", failure_mode="soft").failure_mode is FailureMode.SOFT  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'sotf' is not a valid FailureMode"):
        Task("a", failure_mode="sotf")  # type: ignore[arg-type]


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def deep(levels: int):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "odd",
    [
        Reply("x", usage=None),  # type: ignore[arg-type]
        Reply("x", usage=Usage(2**70, 1)),
        Reply("x", usage=Usage(1, -1)),
        Reply(b"bytes"),  # type: ignore[arg-type]
        Reply("x", session_id=7),  # type: ignore[arg-type]
        Reply("x", messages=("no message",)),  # type: ignore[arg-type]
        BackendError("strange", "kind"),  # type: ignore[arg-type]
        BackendError(ErrorKind.AUTH, ["no", "text"]),  # type: ignore[arg-type]
        BackendError(ErrorKind.TRANSIENT, "x", retry_after="3"),  # type: ignore[arg-type]
        BackendError(ErrorKind.RATE_LIMITED, "x", retry_after=1e7),
        Reply("x", usage=Usage(1.5, 1)),  # type: ignore[arg-type]
        Reply("x", messages=(Message(None, "x"),)),  # type: ignore[arg-type]
        Reply("x", data=deep(300)),
        asyncio.CancelledError(),
        SystemExit(0),
        MuteError(),
    ],
)
async def test_a_broken_backend_fails_its_own_task_and_nothing_else(odd: Reply | Exception) -> None:
    store = MemoryStore()
    backend = Talker(lambda prompt, _: odd if prompt == "bad" else "ok")
    dag = DAG([Task("bad", prompt="bad", retry=Retry(attempts=1)), Task("good", prompt="good")])
    result = await ParallelRunner(backend, store=store).run(dag)
    assert (result["bad"].status, result["good"].text, result.degraded) == (TaskStatus.FAILED, "ok", ())
    record = await store.get_run(result.run_id)
    assert record is not None
    assert record.counts == {"failed": 1, "completed": 1}


async def test_a_backend_without_session_ids_to_give_fails_nothing() -> None:
    class Raising(Talker):
        def new_session_id(self) -> str | None:
            raise RuntimeError("no ids today")

    result = await ParallelRunner(Raising(), store=MemoryStore()).run(DAG([Task("a", prompt="x")]))
    assert (result.status, result.degraded) == (RunStatus.COMPLETED, ())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"limits": {"nope": 1}}, "limits names 'nope', which is no backend of this runner"),
        ({"default": "nope"}, "default names 'nope', which is no backend of this runner"),
        ({"store_timeout": -1}, "store_timeout must be more than 0 seconds, not -1"),
    ],
)
def test_misspelt_options_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelRunner(backends={"one": Talker(), "two": Talker()}, **bad)


@pytest.mark.parametrize("bad", ["last", "", "a b", "\ud800", "x" * 200, ".hidden"])
def test_run_ids_that_could_not_be_typed_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        ParallelRunner(Talker()).start(DAG([Task("a")]), bad)


async def test_half_characters_in_results_reach_dependents_as_whole_ones(tmp_path) -> None:
    """A model that is cut inside an emoji leaves half of a surrogate pair."""
    dag = DAG(
        [
            Task("a", prompt="a", backend="half"),
            Task("b", prompt="{{ a.emoji }} {{ who }}", depends_on=["a"]),
            Task("c", prompt="{{ b }}", depends_on=["b"]),
        ],
        inputs={"who": "\ud83d"},
    )

    async def half(_prompt: str) -> dict[str, str]:
        return {"emoji": "\ud83d"}

    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(Talker(), backends={"half": half}, store=store)
        result = await runner.run(dag)
        assert (result.status, result.degraded) == (RunStatus.COMPLETED, ())
        assert result["c"].text == "re: re: \ufffd \ufffd"
        again = await runner.resume(result.run_id)
        assert again.text == result.text


async def test_a_reply_is_kept_when_closing_its_conversation_fails() -> None:
    class Slamming(Talker):
        def open(self, opening: Opening):
            talk = super().open(opening)

            class Slam:
                async def __aenter__(self):
                    return talk

                async def __aexit__(self, *error):
                    if opening.metadata:
                        await anyio.sleep_forever()
                    raise RuntimeError("the door is stuck")

            return Slam()

    dag = DAG([Task("a", prompt="x"), Task("b", prompt="y", timeout=0.05, metadata={"slow": True})])
    backend = Slamming()
    result = await ParallelRunner(backend).run(dag)
    assert result.text == {"a": "re: x", "b": "re: y"}
    assert sorted(backend.prompts) == ["x", "y"]


async def test_a_session_id_that_only_the_reply_names_is_stored_and_continued() -> None:
    store = MemoryStore()
    backend = Talker(lambda prompt, _: Reply(f"<{prompt}>", session_id="from-reply"))
    dag = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a")])
    result = await ParallelRunner(backend, store=store).run(dag)
    assert (backend.openings[1].session_id, backend.openings[1].resume) == ("from-reply", True)
    assert [task.session_id for task in await store.list_tasks(result.run_id)] == ["from-reply"] * 2


async def test_an_id_that_the_reply_does_not_repeat_is_kept() -> None:
    backend = Talker(lambda prompt, _: Reply(f"<{prompt}>"), own_ids=True)
    dag = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a")])
    result = await ParallelRunner(backend, store=MemoryStore()).run(dag)
    assert result["a"].session_id == "own-1"
    assert (backend.openings[1].session_id, backend.openings[1].resume) == ("own-1", True)


async def test_settings_never_hide_the_inputs() -> None:
    store = MemoryStore()
    dag = DAG([Task("a", prompt="{{ who }}")], inputs={"who": "Ada"})
    await ParallelRunner(Talker(), store=store).run(dag, "r", settings={"inputs": {"who": "Eve"}})
    record = await store.get_run("r")
    assert record is not None
    assert json.loads(record.settings)["inputs"] == {"who": "Ada"}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_what_a_failed_turn_cost_is_counted(kind: str, sqlite_store: SQLiteStore) -> None:
    store = MemoryStore() if kind == "memory" else sqlite_store
    costly = BackendError(ErrorKind.INVALID_OUTPUT, "no JSON", usage=Usage(10, 5, 0.25))
    dag = DAG([Task("a", prompt="x", retry=Retry(attempts=2, base_delay=0))])
    result = await ParallelRunner(Talker(lambda *_: costly), store=store).run(dag)
    assert result["a"].usage == Usage(10, 5, 0.25)
    attempts = await store.list_attempts(result.run_id)
    assert [(a.status, a.input_tokens, a.output_tokens, a.cost_usd) for a in attempts] == [
        ("retried", 10, 5, 0.25),
        ("failed", 10, 5, 0.25),
    ]
    record = await store.get_run(result.run_id)
    assert record is not None
    assert (record.input_tokens, record.output_tokens, record.cost_usd) == (20, 10, 0.5)


async def test_a_continuing_task_may_name_the_default_backend_outright() -> None:
    dag = DAG([Task("a", prompt="one"), Task("b", prompt="two", continues="a", backend="small")])
    small, other = Talker(), Talker()
    result = await ParallelRunner(backends={"small": small, "other": other}, default="small").run(dag)
    assert result.status is RunStatus.COMPLETED
    with pytest.raises(BackendMissing, match="that conversation is on 'other', and stays there"):
        await ParallelRunner(backends={"small": small, "other": other}, default="other").run(dag)
