"""Whatever a backend does, it harms its own task alone, and what was paid for is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.backends import ConversationRequest, Message, Output, Question, Reply, Usage
from plait.errors import BackendError, ErrorKind
from plait.events import TaskOutput
from plait.persistence import MemoryStore, SQLiteStore, Store
from tests.support.fakes import Talker


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


async def test_the_error_of_a_raising_backend_holds_no_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAR_TOKEN", "tk-very-secret")
    result = await ParallelRunner(Talker(lambda *_: ValueError("no tk-very-secret"))).run(DAG([Task("a", prompt="a")]))
    assert result["a"].error == "ValueError: no ***"


async def test_an_attempt_sees_the_context_variables_of_the_caller_and_of_no_other_attempt() -> None:
    variable = ContextVar("variable", default="default")
    variable.set("caller")

    async def work(prompt: str) -> str:
        seen = variable.get()
        variable.set(prompt)
        await anyio.lowlevel.checkpoint()
        assert variable.get() == prompt
        if prompt == "fails":
            raise ValueError(seen)
        return seen

    dag = DAG([Task(name, name, retry=0) for name in ("one", "fails", "two", "three")])
    result = await ParallelRunner(work, concurrency=1).run(dag)
    assert result.text == {"one": "caller", "two": "caller", "three": "caller"}
    assert (result["fails"].error or "").startswith("ValueError: caller")


async def test_the_usage_of_an_output_is_told_only_if_it_is_possible() -> None:
    def chatty(_prompt: str, request: ConversationRequest) -> str:
        for usage in (Usage(3, 1, 0.5), Usage(-1, 1), Usage("1", 1)):  # type: ignore[arg-type]
            request.on_output(Output("tool", "x", usage))
        return "done"

    async with ParallelRunner(Talker(chatty)).start(DAG([Task("a", prompt="p")])) as run:
        told = [event.usage async for event in run.events() if isinstance(event, TaskOutput) and event.output == "tool"]
    assert told == [Usage(3, 1, 0.5), Usage(cost_is_partial=True), Usage(cost_is_partial=True)]


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
        def open(self, request: ConversationRequest):
            talk = super().open(request)

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
        Reply(b"bytes"),  # type: ignore[arg-type]
        Reply("x", messages=("no message",)),  # type: ignore[arg-type]
        BackendError("strange", "kind"),  # type: ignore[arg-type]
        BackendError(ErrorKind.AUTH, ["no", "text"]),  # type: ignore[arg-type]
        BackendError(ErrorKind.TRANSIENT, "x", retry_after="3"),  # type: ignore[arg-type]
        BackendError(ErrorKind.RATE_LIMITED, "x", retry_after=1e7),
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


@pytest.mark.parametrize("stored", [False, True])
async def test_one_that_cancelled_its_own_task_and_caught_that_has_no_later_task_taken_for_the_runs_end(
    stored: bool,
) -> None:
    async def backend(prompt: str) -> str:
        loop, own = asyncio.get_running_loop(), asyncio.current_task()
        assert own is not None
        if prompt == "home-made":
            loop.call_soon(own.cancel)
            try:
                await loop.create_future()
            except asyncio.CancelledError:
                return "gave up waiting"
        inner = asyncio.ensure_future(loop.create_future())
        loop.call_soon(inner.cancel)
        return await inner

    runner = ParallelRunner(backend, store=MemoryStore() if stored else None)
    result = await runner.run(DAG([Task("x", "home-made"), Task("y", "inner", ["x"])]))
    assert (result.status, result.text["x"]) == (RunStatus.FAILED, "gave up waiting")
    assert "but plait had not cancelled the call" in (result["y"].error or "")


async def test_a_backend_without_session_ids_to_give_fails_nothing() -> None:
    class Raising(Talker):
        def new_session_id(self) -> str | None:
            raise RuntimeError("no ids today")

    result = await ParallelRunner(Raising(), store=MemoryStore()).run(DAG([Task("a", prompt="x")]))
    assert (result.status, result.degraded) == (RunStatus.COMPLETED, ())


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
        def open(self, request: ConversationRequest):
            talk = super().open(request)

            class Slam:
                async def __aenter__(self):
                    return talk

                async def __aexit__(self, *error):
                    if request.metadata:
                        await anyio.sleep_forever()
                    raise RuntimeError("the door is stuck")

            return Slam()

    dag = DAG([Task("a", prompt="x"), Task("b", prompt="y", timeout=0.5, metadata={"slow": True})])
    backend = Slamming()
    result = await ParallelRunner(backend).run(dag)
    assert result.text == {"a": "re: x", "b": "re: y"}
    assert sorted(backend.prompts) == ["x", "y"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_what_a_failed_turn_cost_is_counted(kind: str, sqlite_store: SQLiteStore) -> None:
    store = MemoryStore() if kind == "memory" else sqlite_store
    costly = BackendError(ErrorKind.INVALID_OUTPUT, "no JSON", usage=Usage(10, 5, 0.25))
    dag = DAG([Task("a", prompt="x", retry=Retry(attempts=2, base_delay=0))])
    result = await ParallelRunner(Talker(lambda *_: costly), store=store).run(dag)
    assert result["a"].usage == Usage(10, 5, 0.25)
    attempts = await store.list_attempts(result.run_id)
    assert [(a.status, a.usage) for a in attempts] == [("retried", Usage(10, 5, 0.25)), ("failed", Usage(10, 5, 0.25))]
    record = await store.get_run(result.run_id)
    assert record is not None
    assert record.usage == Usage(20, 10, 0.5)


@pytest.mark.parametrize(
    "odd",
    [
        Usage(2**70, 0),
        Usage(1.5, 1),  # type: ignore[arg-type]
        Usage(0, 10**12 + 1),
        Usage(1, 1, float("inf")),
        Usage(1, 1, float("nan")),
        Usage(-5, 1),
        Usage(float("nan"), 1),  # type: ignore[arg-type]
        Usage(1, 1, -0.5),
        Usage(1, 1, cache_read_tokens=2),
    ],
)
async def test_an_answer_is_kept_though_its_usage_is_impossible(odd: Usage, tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "plait.db") as store:
        said = (Message("user", "p"), Message("assistant", "first", odd), Message("assistant", "x", odd))
        runner = ParallelRunner(Talker(lambda _p, _o: Reply("x", usage=odd, messages=said)), store=store)
        result = await runner.run(DAG([Task("a", "a"), Task("b", "b")]))
        assert result.text == {"a": "x", "b": "x"}
        assert result["a"].usage == Usage(cost_is_partial=True)
        assert result["a"].usage.cost_is_unknown
        assert [run.status for run in await store.list_runs()] == ["completed"]


async def test_data_are_the_same_now_and_after_a_resume(store: Store) -> None:
    def answer(prompt: str, _opening: ConversationRequest) -> Reply | Exception:
        if prompt == "make":
            return Reply("x", data={"rows": ({1: "one"},)})  # type: ignore[dict-item]
        return Reply(prompt) if failing else BackendError(ErrorKind.REFUSED, "no")

    dag = DAG([Task("a", "make"), Task("b", "{{ a.rows[0]['1'] }}", depends_on=["a"])])
    runner = ParallelRunner(Talker(answer), store=store)
    failing: list[bool] = []
    first = await runner.run(dag)
    failing.append(False)
    again = await runner.resume(first.run_id, retry_failed=True)
    assert first["a"].data == again["a"].data == {"rows": [{"1": "one"}]}
    assert (first["b"].error, again["b"].text) == ("no", "one")


class _Hides(Talker):
    """Its conversation ends its turn by itself, and says nothing of it."""

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[object]:  # type: ignore[override]
        with anyio.CancelScope() as scope:
            scope.cancel()
            yield super().open(request)


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_a_conversation_that_hides_what_ended_its_turn_is_no_time_out(timeout: float | None) -> None:
    result = await ParallelRunner(_Hides()).run(DAG([Task("a", "x", timeout=timeout)]))
    assert (result["a"].error_kind, result["a"].error) == (
        "unexpected",
        "the backend's conversation suppressed the exception that ended the turn",
    )


async def test_a_backend_that_leaves_the_schema_to_plait_completes_no_task_with_an_answer_that_does_not_fit() -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    answers: dict[str, str | Reply] = {
        "fits": 'It is {"mood": "good"}',
        "other": Reply('{"mood": "odd"}', usage=Usage(3, 1)),
        "prose": "good",
        "large": '{"mood": "bad", "why": "%s"}' % ("x" * 100_000),
    }
    dag = DAG([Task(name, prompt=name, output_schema=schema, retry=0) for name in answers])
    result = await ParallelRunner(Talker(lambda prompt, _: answers[prompt])).run(dag)
    assert result["fits"].data == {"mood": "good"}
    assert result["large"].data == {"mood": "bad", "why": "x" * 100_000}
    assert (result["other"].error_kind, result["prose"].error_kind) == ("invalid_output", "invalid_output")
    assert '"odd" is not one of' in (result["other"].error or "")
    assert result["other"].usage == Usage(3, 1)


async def test_a_question_of_a_backend_need_not_fit_the_schema() -> None:
    backend = Talker(lambda _prompt, _request: Reply("?", question=Question("Which mood?")))
    result = await ParallelRunner(backend).run([Task("a", "a", output_schema={"type": "object"})])
    assert (result["a"].status, result["a"].question) == (TaskStatus.WAITING_INPUT, "Which mood?")
