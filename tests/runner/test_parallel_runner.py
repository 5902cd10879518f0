"""Running a DAG: results, order, limits, failures, retries, time-outs."""

from __future__ import annotations

import random

import anyio
import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.backends import ConversationRequest
from plait.errors import BackendError, BackendMissing, BackendUnavailable, DAGError, ErrorKind
from plait.persistence import MemoryStore
from plait.runner.engine.retries import retry_delay
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
    assert result.text == {
        "facts": backend.answer(backend.prompts[0], ConversationRequest()),
        "haiku": result["haiku"].text,
    }
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
    line = broken.__code__.co_firstlineno + 1
    assert result["soft"].error == f"ValueError: no luck (at test_parallel_runner.py:{line} in broken)"
    assert result.status is RunStatus.FAILED


async def test_backends_by_name_and_a_single_one_is_the_default() -> None:
    fast, deep = Talker(), Talker()
    dag = DAG(
        [Task("a", prompt="a", backend="fast"), Task("b", prompt="b", backend="deep"), Task("c", "c", continues="b")]
    )
    await ParallelRunner(backends={"fast": fast, "deep": deep}).run(dag)
    assert (fast.prompts, deep.prompts) == (["a"], ["b", "c"])
    alone = await ParallelRunner(backends={"fast": Talker()}).run(HAIKU)
    assert alone.status is RunStatus.COMPLETED


async def test_a_blank_prompt_is_refused_before_anything_starts_unless_a_function_takes_it() -> None:
    model, store = Talker(), MemoryStore()
    dag = DAG([Task("a", backend="fetch"), Task("b", prompt="{{ a }}", depends_on=["a"], backend="model")])
    runner = ParallelRunner(backends={"fetch": lambda prompt: f"<{prompt}>", "model": model}, store=store)
    assert (await runner.run(dag)).text["a"] == "<>"
    assert model.prompts == ["<>"]
    for call in (runner.run, runner.runs.create):
        with pytest.raises(DAGError, match="task 'c': there is no prompt; write one"):
            await call(DAG([Task("b", "b", backend="model"), Task("c", " ", backend="model")]))
    assert (model.prompts, len(await store.list_runs())) == (["<>"], 1)


async def test_a_missing_backend_is_said_before_anything_starts() -> None:
    store = MemoryStore()
    with pytest.raises(BackendMissing, match=r"no backend named 'deep' .* this runner has: default"):
        await ParallelRunner(Talker(), store=store).run(DAG([Task("a", "a"), Task("b", backend="deep")]))
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
    down = Talker(failing(BackendError(ErrorKind.TRANSIENT, "maintenance", retry_after=30.0), 1))
    dag = DAG([Task("a", prompt="a"), Task("b", prompt="b")])
    result = await ParallelRunner(down, clock=clock, concurrency=1).run(dag)
    assert result.status is RunStatus.COMPLETED
    assert all(30.0 <= slept <= 31.0 for slept in clock.slept)
    assert down.prompts[:2] == ["a", "b"], "the place was free while a waited"


async def test_retries_end_and_the_last_error_stays() -> None:
    clock = QuickClock()
    flaky = Talker(failing(BackendError(ErrorKind.TRANSIENT, "500"), 99))
    retry = Retry(attempts=4, base_delay=2.0, max_delay=3.0)
    result = await ParallelRunner(flaky, clock=clock).run(DAG([Task("a", prompt="x", retry=retry)]))
    assert (result["a"].attempts, result["a"].error_kind, len(clock.slept)) == (4, "transient", 3)


def test_backoff_is_exponential_with_full_jitter_and_never_shortens_a_hint() -> None:
    rng, retry = random.Random(0), Retry(attempts=9, base_delay=1.0, max_delay=5.0)
    for failures, top in [(1, 1), (2, 2), (3, 4), (4, 5), (5000, 5)]:
        delays = [retry_delay(retry, failures, None, rng) for _ in range(300)]
        assert 0 <= min(delays) < top * 0.1 and top * 0.9 < max(delays) <= top
    for failures in (1, 20):
        hinted = [retry_delay(retry, failures, 7.0, rng) for _ in range(300)]
        assert min(hinted) >= 7.0 and max(hinted) <= 8.0
    for failures, top in [(1, 1), (3, 4), (20, 5)]:  # a hint that was too short is stretched further the next time
        hinted = [retry_delay(retry, failures, 0.5, rng) for _ in range(300)]
        assert min(hinted) >= 0.5 and 0.5 + top * 0.9 < max(hinted) <= 0.5 + top


async def test_a_timeout_ends_the_attempt_and_is_retried() -> None:
    started = 0

    async def hang_once(_prompt: str) -> str:
        nonlocal started
        started += 1
        if started == 1:
            await anyio.sleep_forever()
        return "at last"

    dag = DAG([Task("a", "a", timeout=0.3, retry=Retry(base_delay=0))])
    result = await ParallelRunner(hang_once).run(dag)
    assert (result["a"].text, result["a"].attempts) == ("at last", 2)
    dag = DAG([Task("a", "a", timeout=0.05, retry=Retry(attempts=1))])
    started = 0
    result = await ParallelRunner(hang_once).run(dag)
    assert (result["a"].error_kind, result["a"].error) == ("timeout", "no answer within the task's timeout of 0.05 s")


async def test_a_task_fails_at_once_whose_backend_cannot_be_had() -> None:
    missing = Talker(lambda *_: BackendUnavailable("it is not installed"))
    dag = DAG([Task("a", "a", retry=Retry(attempts=5, on=frozenset(ErrorKind)))])
    done = (await ParallelRunner(missing).run(dag))["a"]
    assert (done.status, done.attempts) == (TaskStatus.FAILED, 1)
    assert (done.error_kind, done.error) == ("unavailable", "it is not installed")


async def test_a_prompt_that_cannot_be_rendered_fails_its_task() -> None:
    dag = DAG([Task("a", prompt="x"), Task("b", prompt="{{ a.label }}", depends_on=["a"])])
    result = await ParallelRunner(Talker()).run(dag)
    assert (result["b"].error_kind, result.status) == ("invalid_request", RunStatus.FAILED)
