"""What is told, to whom, how often; and what is kept of it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import ParallelRunner, Retry, RunStatus, SQLiteStore, Task
from plait.backends import ask
from plait.clock_and_ids import Clock, iso
from plait.errors import BackendError, ErrorKind, StoreRequired
from plait.events import RunClaimed, RunCompleted, RunCreated, RunStarted
from plait.persistence import Store
from plait.persistence.store_records import Batch
from plait.runner.domain.notify_target import NotifyTarget
from plait.runner.engine import notices
from plait.runner.engine.lease import claim_for_this_process
from plait.runner.engine.notices import FIRST_WAIT_S, LEAST_TRIES, LONGEST_WAIT_S, send_due, wait_after
from tests.runner.engine.test_budget import Priced, tasks
from tests.support.polling import until
from tests.support.receiver import Receiver, receiving

ONCE = Retry(attempts=1)


class Later(Clock):
    """A clock that is `ahead` seconds ahead."""

    ahead = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with receiving() as found:
        yield found


def to(receiver: Receiver, **keys: Any) -> dict[str, Any]:
    return {"url": receiver.url, **keys}


async def work(prompt: str) -> str:
    if prompt == "fail":
        raise ValueError("broken")
    return str(await ask("Where to?")) if prompt == "ask" else prompt


async def completed_run(store: Store, run_id: str = "r", *, age: float = 0) -> None:
    """Store a completed run of which nothing is sent yet, as a process leaves it that dies right after the end."""
    at = iso(Clock().wall() - age)
    owner = claim_for_this_process(at)
    claim = RunClaimed(at, owner, 0.0)
    created = RunCreated(at, run_id, "plan", '{"format":100,"inputs":{}}', ())
    await store.write(Batch(run_id, 0, 1, (created, RunStarted(at, run_id), claim, RunCompleted(at, run_id))))


async def test_questions_failures_and_ends_are_told_once_with_an_id(store: Store, receiver: Receiver) -> None:
    runner = ParallelRunner(work, store=store, notify=[to(receiver)])
    run = await runner.run([Task("a", "go"), Task("b", "ask")], "r1")
    assert run.status is RunStatus.WAITING_INPUT
    (asked,) = receiver.notices
    assert (asked["on"], asked["task"], asked["attempt"], asked["open"]) == ("question", "b", 1, True)
    assert (asked["question"], asked["answer"]) == ("Where to?", "plait answer r1 b")
    assert asked["text"].endswith("task b asks: Where to?")
    await runner.resume("r1", answers={"b": "Rome"})
    await runner.run([Task("a", "fail", retry=Retry(attempts=2, base_delay=0))], "r2")
    assert receiver.told == [("r1", "question"), ("r1", "done"), ("r2", "failed")]
    assert "broken" in receiver.notices[2]["error"]
    ids = [one["id"] for one in receiver.notices]
    assert len(set(ids)) == 3, "one id for each event"
    for number, run_id in enumerate(("r1", "r1", "r2")):
        seqs = {f"{run_id}:{event.seq}": event.kind for event in await store.list_events(run_id)}
        kinds = {"question": "task_waiting_input", "done": "run_completed", "failed": "run_failed"}
        assert seqs[ids[number]] == kinds[receiver.notices[number]["on"]]
    targets = [NotifyTarget.of(to(receiver))]
    assert await send_due(store, "r1", targets, Clock()) is None
    assert len(receiver.notices) == 3, "nothing is sent again"


async def test_a_higher_budget_is_asked_for_under_its_own_word(store: Store, receiver: Receiver) -> None:
    with receiving() as other:
        both = [to(receiver, on=["budget"]), to(other, on=["question"])]
        runner = ParallelRunner(Priced(), store=store, notify=both, budget=5, concurrency=1)
        assert (await runner.run(tasks(4), "r")).status is RunStatus.WAITING_INPUT
        (notice,) = receiver.notices
        assert (notice["on"], notice["task"], other.notices) == ("budget", "t2", [])
        assert "what is the new limit?" in notice["text"]


async def test_a_parked_run_tells_until_when(store: Store, receiver: Receiver) -> None:
    async def closed(_prompt: str) -> str:
        raise BackendError(ErrorKind.RATE_LIMITED, "usage limit reached", retry_after=18_000)

    result = await ParallelRunner(closed, store=store, notify=[to(receiver)], park=True).run([Task("a", "go")], "r")
    assert result.status is RunStatus.PARKED
    (notice,) = receiver.notices
    assert (notice["on"], notice["until"]) == ("parked", result.due_at)
    assert notice["text"] == f"r waits until {result.due_at}"


async def test_only_what_a_target_asks_for_is_told(store: Store, receiver: Receiver) -> None:
    runner = ParallelRunner(work, store=store, notify=[to(receiver, on=["failed"])])
    await runner.run([Task("a", "go")], "r1")
    await runner.run([Task("a", "fail", retry=ONCE)], "r2")
    assert receiver.told == [("r2", "failed")]


async def test_a_question_is_told_while_its_run_goes_on(store: Store, receiver: Receiver) -> None:
    told = anyio.Event()

    async def slow(prompt: str) -> str:
        if prompt == "slow":
            await told.wait()
            return prompt
        return str(await ask("Where to?"))

    runner = ParallelRunner(slow, store=store, notify=[to(receiver)])
    async with runner.start([Task("a", "slow"), Task("b", "ask")], "r") as run:
        await until(lambda: receiver.notices)
        assert receiver.told == [("r", "question")]
        told.set()
    assert (await run.result()).status is RunStatus.WAITING_INPUT
    assert receiver.told == [("r", "question")], "the wait for a person is no further notice"


async def test_a_receiver_that_is_away_for_an_hour_gets_each_notice_once(store: Store, receiver: Receiver) -> None:
    await completed_run(store)
    clock, targets = Later(), [NotifyTarget.of(to(receiver))]
    receiver.status, times = 503, [0.0]
    began = clock.wall()
    while clock.ahead < 3_600:
        due = await send_due(store, "r", targets, clock)
        assert due is not None
        assert await send_due(store, "r", targets, clock) == due, "nothing is sent before it is due"
        clock.ahead += due - clock.wall()
        times.append(clock.wall() - began)
    assert len(receiver.refused) == len(times) - 1
    waits = [round(after - before) for before, after in pairwise(times)]
    assert waits[0] == FIRST_WAIT_S
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT_S
    receiver.status = 200
    assert await send_due(store, "r", targets, clock) is None
    clock.ahead += 86_400
    assert await send_due(store, "r", targets, clock) is None
    assert [one["id"] for one in receiver.notices] == ["r:4"]
    assert {one["id"] for one in receiver.refused} == {"r:4"}


async def test_a_notice_is_given_up_after_a_day_and_the_log_says_so(
    store: Store, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    await completed_run(store, age=200_000)
    clock, targets = Later(), [NotifyTarget.of(to(receiver))]
    receiver.status = 500
    due: float | None = 0.0
    while due is not None:
        due = await send_due(store, "r", targets, clock)
        clock.ahead += 0 if due is None else max(0.0, due - clock.wall())
    assert len(receiver.refused) == LEAST_TRIES
    assert [one.levelno for one in caplog.records if "notice_given_up" in str(one.msg)] == [logging.ERROR]
    assert "HTTP status 500" in caplog.text
    receiver.status = 200
    assert await send_due(store, "r", targets, clock) is None
    assert receiver.notices == []


async def test_the_notices_of_a_target_keep_their_order_and_hold_up_no_other_target(
    store: Store, receiver: Receiver
) -> None:
    with receiving() as other:
        runner = ParallelRunner(work, store=store, notify=[to(receiver), to(other)])
        receiver.status = 503
        await runner.run([Task("a", "ask")], "r")
        clock = Later()
        targets = list(runner.runs.options.notify)
        await runner.resume("r", answers={"a": "Rome"})
        assert [one["on"] for one in other.notices] == ["question", "done"]
        assert {one["on"] for one in receiver.refused} == {"question"}, "the first one comes first"
        receiver.status, clock.ahead = 200, FIRST_WAIT_S * 3
        assert await send_due(store, "r", targets, clock) is None
        assert [one["on"] for one in receiver.notices] == ["question", "done"]
        assert (receiver.notices[0]["open"], receiver.notices[0]["question"]) == (False, "")
        assert len(other.notices) == 2


async def test_of_several_processes_one_sends(store: Store, receiver: Receiver) -> None:
    await completed_run(store)
    targets = [NotifyTarget.of(to(receiver))]
    due: list[float | None] = []

    async def send() -> None:
        due.append(await send_due(store, "r", targets, Clock()))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(send)
    assert len(receiver.notices) == 1
    assert due.count(None) >= 1


async def test_a_try_of_a_dead_process_is_made_again(store: Store, receiver: Receiver) -> None:
    await completed_run(store)
    clock, targets = Later(), [NotifyTarget.of(to(receiver))]
    receiver.on_notice = lambda _: scope.cancel()  # it has the notice, and nobody hears of that
    with anyio.CancelScope() as scope:
        await send_due(store, "r", targets, clock)
    assert len(receiver.notices) == 1
    receiver.on_notice = lambda _: None
    due = await send_due(store, "r", targets, clock)
    assert due is not None
    clock.ahead = wait_after(1) + 1
    assert await send_due(store, "r", targets, clock) is None
    assert [one["id"] for one in receiver.notices] == ["r:4", "r:4"], "at least once, with one id"


async def test_what_a_model_wrote_calls_nobody_in_slack(store: Store, receiver: Receiver) -> None:
    async def work(_prompt: str) -> str:
        return str(await ask("<!channel> a & b <https://evil.example|here>"))

    await ParallelRunner(work, store=store, notify=[to(receiver, form="slack")]).run([Task("a", "go")], "r")
    wanted = "r: task a asks: &lt;!channel&gt; a &amp; b &lt;https://evil.example|here&gt;"
    assert receiver.notices == [{"text": wanted}]


async def test_a_redirect_is_no_delivery(store: Store, receiver: Receiver) -> None:
    await completed_run(store)
    with receiving() as other:
        receiver.status, receiver.location = 307, other.url
        assert await send_due(store, "r", [NotifyTarget.of(to(receiver))], Clock()) is not None
        assert (len(receiver.refused), other.notices) == (1, [])


async def test_a_command_gets_the_notice_as_its_input(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read() + '\\n')"
    runner = ParallelRunner(work, store=store, notify=[{"run": [sys.executable, "-c", code], "on": ["done"]}])
    await runner.run([Task("a", "go; echo $HOME")], "r")
    (line,) = out.read_text().splitlines()
    assert '"on":"done"' in line
    assert '"run":"r"' in line


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "import time; time.sleep(600)"])
async def test_a_command_that_fails_or_hangs_is_tried_again(
    store: Store, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "TRY_S", 0.5)
    await completed_run(store)
    target = NotifyTarget.of({"run": [sys.executable, "-c", code]})
    due = await send_due(store, "r", [target], Clock())
    assert due is not None
    (tried,) = await store.list_notes("r")
    assert '"try":1' in tried.body


async def test_secrets_are_neither_stored_nor_logged(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HOOK", receiver.url)
    monkeypatch.setenv("HOOK_AUTH", "Bearer abcdefgh")
    path = tmp_path / "runs.db"
    target = {"url_env": "HOOK", "headers_env": {"Authorization": "HOOK_AUTH"}, "form": "slack"}
    async with SQLiteStore(path) as store:
        runner = ParallelRunner(work, store=store, notify=[target])
        await runner.run([Task("a", "go")], "r1")
        receiver.status = 500
        await runner.run([Task("a", "go")], "r2")
        monkeypatch.setenv("HOOK", "http://127.0.0.1:9/secret-path")
        await runner.run([Task("a", "go")], "r3")
        notes = [note.body for run in ("r1", "r2", "r3") for note in await store.list_notes(run)]
        settings = (await store.get_run("r1")).settings  # type: ignore[union-attr]
    assert receiver.headers[0]["authorization"] == "Bearer abcdefgh"
    assert receiver.notices == [{"text": "(r1) is completed".replace("(r1)", "r1")}]
    assert '"url_env":"HOOK"' in settings
    kept = settings + "".join(notes) + caplog.text + "".join(str(one.msg) for one in caplog.records)
    for part in ("of-the-team", "secret-path", "abcdefgh", "127.0.0.1"):
        assert part not in kept
    assert b"abcdefgh" not in path.read_bytes()


async def test_what_the_store_alone_says_runs_no_program_and_sends_no_variable(
    store: Store, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "abcdefgh")
    monkeypatch.setenv("HOOK", receiver.url)
    monkeypatch.setenv("PLAIT_LINK_KEY", "abcdefghijklmnop")
    out = tmp_path / "out"
    targets: list[dict[str, Any]] = [
        {"run": ["/bin/sh", "-c", f"touch {out}"]},
        {"url": receiver.url, "headers_env": {"X": "SECRET_KEY"}},
        {"url_env": "HOOK", "link": "https://plait.example.org"},
        {"url": receiver.url},
    ]
    asks = [Task("a", "ask")]
    maker = ParallelRunner(work, store=store, notify=[{**one, "on": ["done"]} for one in targets])
    await maker.run(asks, "r")
    await ParallelRunner(work, store=store).resume("r", answers={"a": "Rome"})
    assert (receiver.notices, out.exists()) == ([], False)
    await maker.run(asks, "r2")
    again = ParallelRunner(work, store=store, notify=[{**targets[3], "on": ["done"]}])
    await again.resume("r2", answers={"a": "Rome"})
    assert receiver.told == [("r2", "done")]
    assert not out.exists()


async def test_a_run_without_a_store_is_refused() -> None:
    with pytest.raises(StoreRequired, match="give the run a store"):
        await ParallelRunner(work, notify=[{"url_env": "HOOK"}]).run([Task("a", "go")])


async def test_a_stop_does_not_wait_for_a_try_under_way(
    store: Store, receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "TRY_S", 1.0)
    caplog.set_level(logging.INFO)
    answer = threading.Event()

    def hold(_notice: object) -> None:
        answer.wait(60)

    receiver.on_notice = hold

    async def slow(prompt: str) -> str:
        if prompt == "slow":
            await anyio.sleep_forever()
        return str(await ask("Where to?"))

    runner = ParallelRunner(slow, store=store, notify=[to(receiver)])
    async with runner.start([Task("a", "slow"), Task("b", "ask")], "r") as run:
        await until(lambda: receiver.notices)
        run.stop()
    answer.set()
    assert (await run.result()).status is RunStatus.INTERRUPTED
    assert "notice_not_sent" not in caplog.text, "the try was cut, and another process makes it again"
    (tried,) = await store.list_notes("r")
    assert '"try":1' in tried.body


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ({}, "has none of them"),
        ({"url_env": "HOOK", "run": ["x"]}, "has url_env and run"),
        ({"url": "ftp://host/x"}, "has to be like https"),
        ({"url": "https://me:pass@host/x"}, "must not hold a user"),
        ({"url": "https://hooks.slack.com/services/T/B/x"}, "is a secret"),
        ({"url_env": "https://host/secret"}, "names of environment variables"),
        ({"url": "https://host", "headers_env": {"Authorization": "Bearer xyz"}}, "names of environment variables"),
        ({"run": ["./tell.sh"]}, "absolute path"),
        ({"run": ["tell"], "form": "slack"}, "are for a URL"),
        ({"url_env": "HOOK", "link": "https://plait.example.org?x=1"}, "the address of the server alone"),
        ({"url_env": "HOOK", "link": "plait.example.org"}, "the address of the server alone"),
        ({"url_env": "HOOK", "on": ["faild"]}, "did you mean 'failed'"),
        ({"url_env": "HOOK", "on": []}, "name what to send"),
        ({"urlenv": "HOOK"}, "did you mean 'url_env'"),
    ],
)
def test_a_target_with_a_mistake_is_refused(target: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        NotifyTarget.of(target)
    for secret in ("pass@", "services/T", "host/secret", "xyz"):
        assert secret not in str(caught.value)


def test_a_run_without_targets_loads_nothing_for_them(tmp_path: Path) -> None:
    code = f"""
import anyio, sys
from plait import ParallelRunner, Task

async def work(prompt):
    return prompt

result = anyio.run(ParallelRunner(work, store={str(tmp_path / "runs.db")!r}).run, [Task("a", "go")])
assert result.status == "completed"
print([name for name in sys.modules if name.endswith((".notices", ".http_client"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
