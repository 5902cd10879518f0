"""Spare backends (`or_else`): they take tasks over while a limit or the end of its credit closes a backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from plait import DAG, Check, ParallelRunner, RunStatus, Task
from plait.backends import Conversation, ConversationRequest, Reply
from plait.backends.prices import Billing, Price
from plait.errors import BackendError, DAGError, ErrorKind, InvalidRequest
from plait.events import BackendThrottled, Event, RunCompleted, TaskRetried, TaskStarted
from plait.persistence import MemoryStore, Store
from plait.runner.scheduling.own_limits import RateLimits
from plait.usage import Usage
from tests.runner.engine.test_probes import Call, Decided, Still, too_many, wide
from tests.support.fakes import Talker

HOURS = 5 * 3600.0


def no_credit() -> BackendError:
    error = BackendError(ErrorKind.NO_CREDIT, "Your credit balance is too low")
    error.status = 402
    return error


@dataclass
class Scene:
    """A run on the backend `api` with spares, and what the test answers."""

    clock: Still
    backends: dict[str, Decided]
    events: list[Event] = field(default_factory=list[Event])

    def under_way(self) -> dict[str, list[str]]:
        """Return the prompts of the calls under way, by backend."""
        return {name: one.prompts for name, one in self.backends.items() if one.prompts}

    async def reaches(self, **calls: list[str]) -> None:
        """Wait for the store, in its thread, until just these calls are under way."""
        with anyio.fail_after(60):
            while self.under_way() != calls:
                await self.clock.advance(1.0)
                await anyio.sleep(0.001)

    def call(self, name: str, prompt: str) -> Call:
        return next(call for call in self.backends[name].calls if call.prompt == prompt)

    async def end_all(self) -> None:
        while calls := [call for one in self.backends.values() for call in one.calls]:
            await calls[0].end("done")

    def places(self, task_id: str) -> list[tuple[str, str | None]]:
        """Return the backend of each attempt of the task so far, and the one that it moved from."""
        starts = [one for one in self.events if isinstance(one, TaskStarted) and one.task_id == task_id]
        return [(one.backend, one.moved_from) for one in starts]


@asynccontextmanager
async def running(
    dag: DAG,
    or_else: dict[str, list[str]],
    *,
    store: Store | None = None,
    resume: bool = False,
    clock: Still | None = None,
    **options: Any,
) -> AsyncGenerator[Scene]:
    names = dict.fromkeys(["api", *or_else, *(one for spares in or_else.values() for one in spares)])
    scene = Scene(clock or Still(), {name: Decided() for name in names})
    runner = ParallelRunner(
        backends=scene.backends, default="api", or_else=or_else, store=store, clock=scene.clock, **options
    )
    async with runner.start_resume("r") if resume else runner.start(dag, "r") as run:
        reader = run.events()

        async def read() -> None:
            async for event in reader:
                scene.events.append(event)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await settled()
            yield scene
            run.stop()


async def settled() -> None:
    """Wait until nothing moves but a store in its thread."""
    for _ in range(5):
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.002)


async def test_a_spare_takes_over_while_a_limit_lasts_and_the_backend_is_asked_again_by_one_task() -> None:
    async with running(wide(8), {"api": ["second"]}, concurrency=2) as scene:
        assert scene.under_way() == {"api": ["t00", "t01"]}
        await scene.call("api", "t00").end(too_many(HOURS))
        assert scene.under_way() == {"api": ["t01"], "second": ["t00"]}, "at once, and not for the one under way"
        await scene.call("api", "t01").end("done")
        assert scene.under_way() == {"second": ["t00", "t02"]}
        await scene.call("second", "t00").end("done")
        assert scene.under_way() == {"second": ["t02", "t03"]}
        await scene.clock.advance(HOURS + 60)
        await scene.call("second", "t02").end("done")
        assert scene.under_way() == {"second": ["t03"], "api": ["t04"]}, "one looks whether the limit has ended"
        await scene.call("second", "t03").end("done")
        assert scene.under_way() == {"api": ["t04"], "second": ["t05"]}, "meanwhile the others go on with the spare"
        await scene.call("api", "t04").end("done")
        assert scene.under_way() == {"second": ["t05"], "api": ["t06"]}
        await scene.call("second", "t05").end("done")
        assert scene.under_way() == {"api": ["t06", "t07"]}
        await scene.end_all()
        assert scene.places("t00") == [("api", None), ("second", "api")]
        assert scene.places("t07") == [("api", None)]
        retried = [one for one in scene.events if isinstance(one, TaskRetried)]
        assert [(one.task_id, one.error_kind, one.delay_s) for one in retried] == [("t00", "rate_limited", 0.0)]


async def test_a_task_goes_back_for_its_next_attempt() -> None:
    async with running(DAG([Task("a", "a")]), {"api": ["second"]}) as scene:
        await scene.call("api", "a").end(too_many(HOURS))
        await scene.clock.advance(HOURS + 60)
        await scene.call("second", "a").end(BackendError(ErrorKind.TRANSIENT, "broke off"))
        await scene.clock.advance(60)
        assert scene.under_way() == {"api": ["a"]}
        await scene.end_all()
        assert scene.places("a") == [("api", None), ("second", "api"), ("api", None)]


async def test_a_short_wait_moves_nothing() -> None:
    async with running(wide(2), {"api": ["second"]}) as scene:
        await scene.call("api", "t00").end(too_many(30))
        assert scene.under_way() == {"api": ["t01"]}
        await scene.clock.advance(60)
        assert scene.under_way() == {"api": ["t01", "t00"]}, "and is over for the backend as well"
        await scene.end_all()


async def test_the_end_of_a_limit_is_never_moved_earlier() -> None:
    async with running(wide(3), {"api": ["second"]}, concurrency=3) as scene:
        await scene.call("api", "t00").end(too_many(HOURS))
        await scene.call("api", "t01").end(too_many(600))
        assert scene.under_way() == {"api": ["t02"], "second": ["t00", "t01"]}
        await scene.clock.advance(700)
        await scene.call("api", "t02").end(BackendError(ErrorKind.TRANSIENT, "broke off"))
        await scene.clock.advance(60)
        assert scene.under_way() == {"second": ["t00", "t01", "t02"]}
        await scene.end_all()


async def test_a_quota_that_says_nothing_of_its_end_moves_tasks() -> None:
    error = BackendError(ErrorKind.RATE_LIMITED, "You've hit your weekly limit")
    async with running(wide(1), {"api": ["second"]}) as scene:
        await scene.call("api", "t00").end(error)
        assert scene.under_way() == {"second": ["t00"]}
        await scene.end_all()


@pytest.mark.parametrize(
    "kind",
    [ErrorKind.REFUSED, ErrorKind.INVALID_REQUEST, ErrorKind.AUTH, ErrorKind.CONTEXT_OVERFLOW, ErrorKind.UNAVAILABLE],
)
async def test_an_error_of_the_request_moves_nothing(kind: ErrorKind) -> None:
    second = Talker()
    api = Talker(lambda _prompt, _request: BackendError(kind, "no", retry_after=HOURS))
    runner = ParallelRunner(backends={"api": api, "second": second}, default="api", or_else={"api": ["second"]})
    result = await runner.run([Task("a", "a")])
    assert (result.status, result["a"].error_kind, second.prompts) == (RunStatus.FAILED, kind.value, [])


async def test_spares_come_in_order_and_their_own_spares_after_them() -> None:
    async with running(wide(1), {"api": ["second", "other"], "second": ["third"]}) as scene:
        await scene.call("api", "t00").end(too_many(HOURS))
        await scene.call("second", "t00").end(too_many(2 * HOURS))
        await scene.call("third", "t00").end(too_many(3 * HOURS))
        assert scene.under_way() == {"other": ["t00"]}
        await scene.call("other", "t00").end(too_many(HOURS / 2))
        assert scene.under_way() == {}
        last = [one for one in scene.events if isinstance(one, TaskRetried)][-1]
        assert last.delay_s == pytest.approx(HOURS / 2, abs=1.0), "until the first of them is open again"
        await scene.clock.advance(HOURS / 2 + 2)
        assert scene.under_way() == {"other": ["t00"]}
        await scene.end_all()


async def test_a_spare_keeps_its_own_limits_and_its_own_tasks_have_it_too() -> None:
    own = Task("own", "own", backend="second")
    dag = DAG([*wide(3), own])
    async with running(dag, {"api": ["second"]}, concurrency=9, limits={"second": 1}) as scene:
        for prompt in ("t00", "t01", "t02"):
            await scene.call("api", prompt).end(too_many(HOURS))
        assert scene.under_way() == {"second": ["own"]}
        await scene.call("second", "own").end("done")
        assert scene.under_way() == {"second": ["t00"]}
        await scene.end_all()
        assert scene.places("own") == [("second", None)]


async def test_a_spare_keeps_its_limits_of_rate() -> None:
    api, second = Talker(lambda _prompt, _request: too_many(HOURS)), Talker()
    runner = ParallelRunner(
        backends={"api": api, "second": second},
        default="api",
        or_else={"api": ["second"]},
        rates={"second": RateLimits(requests_per_minute=6_000)},
        concurrency=8,
    )
    with anyio.fail_after(60):
        result = await runner.run([*wide(20), Task("own", "own", backend="second")])
    assert (result.status, len(second.prompts)) == (RunStatus.COMPLETED, 21)


async def test_runs_of_one_loop_share_what_closes_a_backend() -> None:
    api, second, clock = Decided(), Decided(), Still()
    api.account = second.account = "one server"  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    runner = ParallelRunner(
        backends={"api": api, "second": second},
        default="api",
        or_else={"api": ["second"]},
        clock=clock,
        shared_limits=True,
        concurrency=4,
    )
    async with runner.start(wide(1, "a"), "a") as one, runner.start(DAG([Task("s", "s", backend="second")]), "s"):
        await settled()
        await api.calls[0].end(too_many(HOURS))
        async with runner.start(wide(2, "b"), "b"):
            await settled()
            assert (api.prompts, sorted(second.prompts)) == ([], ["a00", "b00", "b01", "s"])
            for call in [*second.calls]:
                await call.end("done")
    assert (await one.result()).status is RunStatus.COMPLETED


async def test_a_conversation_that_moves_takes_its_history_along() -> None:
    closed: list[str] = []

    def api(prompt: str, _request: ConversationRequest) -> str | Exception:
        return too_many(HOURS) if prompt in closed else f"api: {prompt}"

    first, second = Talker(api), Talker()
    runner = ParallelRunner(
        backends={"api": first, "second": second}, default="api", or_else={"api": ["second"]}, clock=Still()
    )
    closed.append("and then?")
    dag = DAG([Task("a", "begin"), Task("b", "and then?", continues="a"), Task("c", "and last?", continues="b")])
    result = await runner.run(dag)
    assert result.status is RunStatus.COMPLETED
    assert second.prompts == ["and then?", "and last?"]
    moved, goes_on = second.requests
    assert (moved.resume, moved.session_id, moved.fork_of) == (False, "session-1", None)
    said = [(one.role, one.content) for one in moved.history]
    assert said == [("user", "begin"), ("assistant", "api: begin")]
    assert (goes_on.resume, goes_on.session_id) == (True, "session-1"), "the session of the spare goes on there"
    assert result["b"].session_id == "session-1"


async def test_a_refused_answer_is_corrected_by_the_spare_that_is_told_of_it() -> None:
    said: list[str] = []

    def api(prompt: str, _request: ConversationRequest) -> str | Exception:
        said.append(prompt)
        return too_many(HOURS) if len(said) > 1 else "wrong"

    first, second = Talker(api), Talker(lambda _prompt, _request: "right")
    runner = ParallelRunner(
        backends={"api": first, "second": second}, default="api", or_else={"api": ["second"]}, clock=Still()
    )
    check = Check(passes="{{ answer == 'right' }}")
    result = await runner.run([Task("a", "what?", check=check)])
    assert (result.status, result["a"].text) == (RunStatus.COMPLETED, "right")
    (request,) = second.requests
    assert request.resume is False
    assert [one.content for one in request.history] == ["what?", "wrong"]
    assert second.prompts[0].startswith("The check of the answer failed")


async def test_a_crashed_run_knows_which_backend_is_closed_and_which_one_has_the_session(store: Store) -> None:
    dag, clock = DAG([Task("a", "a"), Task("b", "b", continues="a")]), Still()
    async with running(dag, {"api": ["second"]}, store=store, clock=clock) as scene:
        await scene.reaches(api=["a"])
        await scene.call("api", "a").end(too_many(HOURS))
        await scene.reaches(second=["a"])
        await scene.call("second", "a").end("done")
        await scene.reaches(second=["b"])
    async with running(dag, {"api": ["second"]}, store=store, clock=clock, resume=True) as scene:
        await scene.reaches(second=["b"])
        assert [one.content for one in scene.call("second", "b").request.history] == ["a", "done"]
        await scene.call("second", "b").end("done")
        with anyio.fail_after(60):
            while not isinstance(scene.events[-1], RunCompleted):  # noqa: ASYNC110 - the store is in a thread
                await anyio.sleep(0.001)
        assert all(one.backend == "second" for one in scene.events if isinstance(one, TaskStarted)), "never the closed"
    attempts = [(one.task_id, one.attempt, one.backend) for one in await store.list_attempts("r")]
    assert attempts == [("a", 1, "api"), ("a", 2, "second"), ("b", 1, "second"), ("b", 2, "second")]
    view = await ParallelRunner(Talker(), store=store).runs.task("r", "a")
    assert [(one.backend, one.moved_from) for one in view.history] == [("api", None), ("second", "api")]


async def test_the_worst_case_is_that_of_the_backend_that_is_called() -> None:
    @dataclass(eq=False)
    class Priced:
        usd: float
        closed: bool = False
        calls: int = 0
        new_session_id = staticmethod(lambda: None)

        @property
        def billing(self) -> Billing:
            return Billing(None, "m", price=Price(input=0.0, output=self.usd * 1_000_000), max_output_tokens=1)

        @asynccontextmanager
        async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
            backend = self

            class Talk:
                session_id = None

                async def send(self, prompt: str) -> Reply:
                    backend.calls += 1
                    if backend.closed:
                        raise too_many(HOURS)
                    return Reply(prompt, usage=Usage(1, 1, model="m"))

            yield Talk()

    backends = {"api": Priced(1.0, closed=True), "dear": Priced(10.0)}
    store = MemoryStore()
    async with store:
        runner = ParallelRunner(
            backends=backends, default="api", or_else={"api": ["dear"]}, store=store, budget=5.0, clock=Still()
        )
        result = await runner.run([Task("a", "a")], "r")
        assert (result.status, backends["dear"].calls) == (RunStatus.WAITING_INPUT, 0)
        assert "may cost $10.00" in (result["a"].question or "")
        result = await runner.resume("r", answers={"a": 20.0})
        assert (result.status, backends["dear"].calls, result.usage.cost_usd) == (RunStatus.COMPLETED, 1, 10.0)
    backends["dear"] = Priced(10.0)
    type.__setattr__(Priced, "billing", property(lambda _self: Billing(None, "m")))
    with pytest.raises(InvalidRequest, match="price of model"):
        await ParallelRunner(
            backends=backends, default="api", or_else={"api": ["dear"]}, budget=5.0, clock=Still()
        ).run([Task("a", "a")])


class Sized(Talker):
    adjustable = frozenset({"model", "system"})


async def test_a_task_has_settings_that_all_its_backends_take_and_its_model_is_one_of_its_own_backend() -> None:
    api = Sized(lambda _prompt, _request: too_many(HOURS))
    task = Task("a", "a", model="large", system="be short")
    with pytest.raises(DAGError, match="second"):
        await ParallelRunner(backends={"api": api, "second": Talker()}, default="api", or_else={"api": ["second"]}).run(
            [task]
        )

    class Other(Sized):
        pass

    for spare, model in ((Sized(), "large"), (Other(), None)):
        runner = ParallelRunner(
            backends={"api": api, "second": spare}, default="api", or_else={"api": ["second"]}, clock=Still()
        )
        assert (await runner.run([task])).status is RunStatus.COMPLETED
        assert (spare.requests[0].options.model, spare.requests[0].options.system) == (model, "be short")


@pytest.mark.parametrize(
    ("or_else", "words"),
    [
        ({"api": ["secand"]}, "unknown backend 'secand'; did you mean 'second'"),
        ({"api": ["api"]}, "cannot take over from itself"),
        ({"api": ["second", "second"]}, "named twice"),
        ({"apo": ["second"]}, "no backend of this runner; did you mean 'api'"),
    ],
)
def test_mistakes_are_named(or_else: dict[str, list[str]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelRunner(backends={name: Talker() for name in ("api", "second", "other")}, or_else=or_else)


async def test_two_accounts_are_the_spares_of_each_other() -> None:
    async with running(wide(5), {"api": ["second"], "second": ["api"]}, concurrency=1) as scene:

        async def refuse(name: str, seconds: float) -> None:
            [prompt] = scene.under_way().pop(name)
            await scene.call(name, prompt).end(too_many(seconds))

        await refuse("api", HOURS)
        assert list(scene.under_way()) == ["second"]
        await refuse("second", 2 * HOURS)
        assert scene.under_way() == {}, "each was asked once"
        await scene.clock.advance(HOURS + 60)
        assert list(scene.under_way()) == ["api"]
        await refuse("api", 2 * HOURS)
        assert scene.under_way() == {}
        await scene.clock.advance(HOURS + 60)
        assert list(scene.under_way()) == ["second"]


async def test_without_credit_a_spare_takes_over_and_the_backend_is_asked_once_an_hour() -> None:
    async with running(wide(3), {"api": ["second"]}, concurrency=1) as scene:
        await scene.call("api", "t00").end(no_credit())
        assert scene.under_way() == {"second": ["t00"]}
        await scene.clock.advance(3_601)
        await scene.call("second", "t00").end("done")
        assert scene.under_way() == {"api": ["t01"]}
        await scene.call("api", "t01").end(no_credit())
        assert scene.under_way() == {"second": ["t01"]}
        await scene.end_all()


async def test_without_credit_one_task_asks_and_the_others_of_the_backend_wait_with_it(store: Store) -> None:
    dag = DAG([*wide(4), Task("free", "free", backend="second")])
    closed = [True]

    def api(_prompt: str, _request: ConversationRequest) -> str | Exception:
        return no_credit() if closed[0] else "done"

    first, second = Talker(api), Talker()
    backends = {"api": first, "second": second}
    runner = ParallelRunner(backends=backends, default="api", store=store, concurrency=2, clock=Still())
    result = await runner.run(dag, "r")
    assert result.status is RunStatus.WAITING_INPUT
    assert len(first.prompts) <= 2, "no further call of an account that is known to be empty"
    asking = [name for name, task in result.tasks.items() if task.question]
    assert len(asking) == 1
    (question,) = await runner.runs.questions("r")
    assert "backend 'api' has no credit left (Your credit balance is too low)" in question.question
    assert result["free"].text == "re: free"
    result = await runner.resume("r")
    assert (result.status, len(first.prompts)) == (RunStatus.WAITING_INPUT, 2), "a resume asks nobody anew"
    closed[0] = False
    result = await runner.resume("r", answers={asking[0]: "go on"})
    assert result.status is RunStatus.COMPLETED
    kinds = {one.error_kind for one in await store.list_attempts("r") if one.status == "retried"}
    assert kinds <= {"no_credit"}
    assert not [one for one in result.tasks.values() if one.error_kind]


async def test_an_answer_lets_one_task_look_whether_there_is_credit() -> None:
    async with running(wide(4), {}, concurrency=3) as scene:
        for prompt in ("t00", "t01", "t02"):
            await scene.call("api", prompt).end(no_credit())
        assert scene.under_way() == {}
        throttled = [one for one in scene.events if isinstance(one, BackendThrottled)][-1]
        assert (throttled.cause, throttled.slots, throttled.until) == ("no_credit", 0, None)


async def test_no_credit_is_no_failure_however_often() -> None:
    answers: list[BackendError | str] = [no_credit(), no_credit(), no_credit(), no_credit(), "done"]

    async def api(_prompt: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, BackendError):
            raise answer
        return answer

    async def top_up(_question: object) -> str:
        return "go on"

    result = await ParallelRunner(api, on_question=top_up, clock=Still()).run([Task("a", "a", at_most_once=True)])
    assert (result.status, result["a"].attempts, answers) == (RunStatus.COMPLETED, 5, [])


class Keyed(Talker):
    def __init__(self, key: str, closed: bool = False) -> None:
        super().__init__(lambda prompt, _request: too_many(HOURS) if closed else f"{key}: {prompt}")
        self.key = key

    def answer_key(self) -> str:
        return self.key


@pytest.mark.parametrize("kind", ["like", "cache"])
async def test_an_answer_of_a_spare_is_taken_over_as_long_as_the_spare_is_the_same(store: Store, kind: str) -> None:
    dag = DAG([Task("a", "a", cache=kind == "cache")])

    async def run(api: Keyed, second: Keyed, run_id: str) -> tuple[str | None, int]:
        runner = ParallelRunner(
            backends={"api": api, "second": second},
            default="api",
            or_else={"api": ["second"]},
            store=store,
            clock=Still(),
        )
        result = await runner.run(dag, run_id, like="r" if kind == "like" and run_id != "r" else None)
        return result["a"].text, len(api.prompts) + len(second.prompts)

    assert await run(Keyed("api", closed=True), Keyed("small"), "r") == ("small: a", 2)
    if kind == "like":
        assert await run(Keyed("api"), Keyed("small"), "same") == ("small: a", 0)
        assert await run(Keyed("api"), Keyed("large"), "other") == ("api: a", 1)
        assert await run(Keyed("new"), Keyed("small"), "new") == ("new: a", 1)
    else:
        assert await run(Keyed("api"), Keyed("small"), "own") == ("api: a", 1), "it is no answer of its own backend"
        assert await run(Keyed("small"), Keyed("x"), "spare") == ("small: a", 0), "but of that of the spare"


async def test_a_person_continues_the_conversation_where_it_is(store: Store) -> None:
    first, second = Talker(lambda _prompt, _request: too_many(HOURS)), Talker()
    runner = ParallelRunner(
        backends={"api": first, "second": second},
        default="api",
        or_else={"api": ["second"]},
        store=store,
        clock=Still(),
    )
    await runner.run([Task("a", "a")], "r")
    reply = await runner.runs.continue_task("r", "a", "and now?")
    assert (reply.text, second.prompts, len(first.prompts)) == ("re: and now?", ["a", "and now?"], 1)
    assert (second.requests[1].resume, second.requests[1].session_id) == (True, second.requests[0].session_id)
