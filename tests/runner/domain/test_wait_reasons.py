"""The reasons for which tasks are not running: one for each state of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from plait import DAG, RunStatus, Task, TaskStatus
from plait.clock_and_ids import iso
from plait.events import BackendThrottled, HostAway
from plait.runner.domain.wait_reasons import Limits, WaitKind, WaitReason, Waits

NOW = 1_800_000_000.0
AT = iso(NOW)
P, R, W, C, F, X = (
    TaskStatus.PENDING,
    TaskStatus.RUNNING,
    TaskStatus.WAITING_INPUT,
    TaskStatus.COMPLETED,
    TaskStatus.FAILED,
    TaskStatus.CANCELLED,
)
FAN = DAG(
    [
        Task("a", "a"),
        Task("b", "b"),
        *(Task(f"t{n}", "x", depends_on=["a", "b"]) for n in range(3)),
        Task("z", "z", depends_on=["t0"]),
    ]
)
PAUSED = BackendThrottled(AT, "api", iso(NOW + 1.2), "429", 4, 8)


def reason(statuses: str, task: str, status: RunStatus = RunStatus.RUNNING, dag: DAG = FAN, **more: Any) -> WaitReason:
    """The reason of `task` when the tasks have these statuses, by their first letters."""
    letters = {one.value[0]: one for one in (P, R, W, C, F)} | {"x": X}
    known = {one.id: letters[letter] for one, letter in zip(dag, statuses, strict=True)}
    limits = more.pop("limits", Limits("api", 8))
    found = Waits(NOW, status, dag, known, limits, **more).reason(task)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("statuses", "task", "kind", "text"),
    [
        ("rppppp", "t0", WaitKind.UPSTREAM, "waits for a, b"),
        ("crpppp", "t0", WaitKind.UPSTREAM, "waits for b"),
        ("fcpppp", "t1", WaitKind.BLOCKED, "blocked by a"),
        ("fcpppp", "z", WaitKind.BLOCKED, "blocked by t0"),
        ("xcpppp", "t1", WaitKind.BLOCKED, "blocked by a"),
        ("ccpppp", "t1", WaitKind.SLOT, "waits for a free slot"),
        ("cwpppp", "b", WaitKind.QUESTION, "asks a person whether to run again"),
    ],
)
def test_a_task_waits_for_what_it_needs(statuses: str, task: str, kind: WaitKind, text: str) -> None:
    found = reason(statuses, task)
    assert (found.kind, found.text) == (kind, text)


def test_a_task_that_could_start_waits_for_the_budget_that_another_asks_for() -> None:
    two = DAG([Task("asks", "x"), Task("b", "b")])
    for status in (RunStatus.RUNNING, RunStatus.WAITING_INPUT):
        found = reason("wp", "b", status, two, asks_for_budget="asks")
        assert (found.kind, found.tasks) == (WaitKind.BUDGET, ("asks",))
        assert found.text == "waits for a higher budget, asked for by asks"
    retry: dict[str, Any] = {"asks_for_budget": "asks", "retries": {"b": NOW + 5}}
    kinds = {
        status: reason("wp", "b", status, two, **retry).kind for status in (RunStatus.RUNNING, RunStatus.WAITING_INPUT)
    }
    assert kinds == {RunStatus.RUNNING: WaitKind.RETRY, RunStatus.WAITING_INPUT: WaitKind.BUDGET}, "a resume needs both"
    assert reason("crpppp", "t0", asks_for_budget="b").kind is WaitKind.UPSTREAM


def test_running_and_ended_tasks_do_not_wait() -> None:
    waits = Waits(NOW, RunStatus.RUNNING, DAG([Task("a", "a"), Task("b", "b")]), {"a": R, "b": F})
    assert (waits.reason("a"), waits.reason("b")) == (None, None)


def test_a_soft_failure_blocks_nothing() -> None:
    dag = DAG([Task("a", "a", failure_mode="soft"), Task("b", "b", depends_on=["a"])])
    assert reason("fp", "b", dag=dag).kind is WaitKind.SLOT


def test_slots_are_counted_in_all_and_for_the_backend() -> None:
    dag = DAG([Task("a", backend="one"), Task("b", backend="two"), Task("c", backend="one")])
    assert reason("rrp", "c", dag=dag, limits=Limits("one", 2)).text == "no free slot (2 of 2)"
    by_backend = reason("rrp", "c", dag=dag, limits=Limits("one", 8, {"one": 1}))
    assert (by_backend.text, by_backend.backend) == ("no free slot of one (1 of 1)", "one")


def test_a_throttled_backend_is_named_with_its_pause_and_its_limit() -> None:
    found = reason("ccpppp", "t0", throttled={"api": PAUSED})
    assert (found.text, found.until) == ("api paused 1.2 s after 429, limit 4 of 8", PAUSED.until)
    slowed = BackendThrottled(AT, "api", None, "429", 1, 8)
    assert reason("ccrppp", "t1", throttled={"api": slowed}).text == "api slowed after 429, limit 1 of 8"
    of_other_runs = reason("ccpppp", "t1", throttled={"api": slowed})
    assert of_other_runs.text == "api slowed after 429, limit 1 of 8", "another run of the process has its one slot"
    assert reason("ccpppp", "t1", throttled={"api": slowed}, limits=Limits("api", 8, {"api": 0})).kind is WaitKind.SLOT
    assert reason("ccpppp", "t1", throttled={"other": PAUSED}).kind is WaitKind.SLOT
    assert reason("ccpppp", "t1", rated=["api"]).kind is WaitKind.RATE


def test_a_task_of_a_closed_backend_waits_for_the_first_open_spare() -> None:
    closed = {name: BackendThrottled(AT, name, iso(NOW + 3600), "429", 1, 8) for name in ("api", "second")}
    limits = Limits("api", 9, {"third": 1}, {"api": ["second", "third"]})
    dag = DAG([Task("own", "x", backend="third"), Task("a", "a")])
    found = reason("rp", "a", dag=dag, throttled=closed, limits=limits)
    assert (found.kind, found.text) == (WaitKind.SLOT, "no free slot of third (1 of 1)")
    short = BackendThrottled(AT, "third", iso(NOW + 1.2), "429", 4, 8)
    found = reason("rp", "a", dag=dag, throttled={**closed, "third": short}, limits=limits)
    assert (found.kind, found.backend) == (WaitKind.THROTTLED, "third"), "a short pause closes nothing"


def test_a_backend_without_credit_is_named() -> None:
    empty = BackendThrottled(AT, "api", None, "no_credit", 0, 8)
    found = reason("ccpppp", "t0", throttled={"api": empty})
    assert (found.kind, found.backend) == (WaitKind.CREDIT, "api")
    assert found.text == "api has no credit left; a task asks to top it up"


def test_a_retry_has_its_time() -> None:
    found = reason("ccpppp", "t0", retries={"t0": NOW + 30})
    assert (found.kind, found.until) == (WaitKind.RETRY, iso(NOW + 30))
    assert found.text.startswith("retry at ")


def test_an_open_question_has_its_deadline() -> None:
    found = reason("cwpppp", "b", deadlines={"b": AT})
    assert (found.text, found.until) == ("asks a person", AT)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (RunStatus.QUEUED, WaitKind.NO_PROCESS),
        (RunStatus.WAITING_INPUT, WaitKind.NO_PROCESS),
        (RunStatus.INTERRUPTED, WaitKind.OWNER_DEAD),
        (RunStatus.CANCELLING, WaitKind.CANCELLING),
        (RunStatus.FAILED, WaitKind.ENDED),
    ],
)
def test_a_run_that_starts_nothing_is_the_reason(status: RunStatus, kind: WaitKind) -> None:
    assert reason("ccpppp", "t0", status, retries={"t0": NOW}, throttled={"api": PAUSED}).kind is kind


def test_a_task_cut_by_the_death_of_its_process_says_so() -> None:
    found = reason("crpppp", "b", RunStatus.INTERRUPTED, owner="process 7 on box")
    assert found.text == "owner dead (process 7 on box); resume the run"
    assert reason("crpppp", "t0", RunStatus.INTERRUPTED).text == "waits for b"


def test_many_tasks_are_counted() -> None:
    dag = DAG([*(Task(f"t{n}", "x") for n in range(9)), Task("all", "all", depends_on=[f"t{n}" for n in range(9)])])
    found = reason("r" * 9 + "p", "all", dag=dag)
    assert (found.text, found.count) == ("waits for t0, t1, t2 and 6 more", 9)
    assert found.tasks == ("t0", "t1", "t2")


def test_paired_lists_do_not_wait_for_each_other_as_wholes() -> None:
    dag = DAG(
        [
            Task("l", "l"),
            Task("m", "m", for_each="l"),
            Task("n", "n", for_each="l", depends_on=["m"]),
            Task("m.1", "m.1", depends_on=["l"], item=1),
        ],
        gathered={"m": ["m.1"]},
    )
    assert reason("cppr", "m", dag=dag).text == "waits for m.1"
    assert reason("cppr", "n", dag=dag).kind is WaitKind.SLOT


def test_a_running_task_may_wait_for_a_host() -> None:
    away = HostAway(AT, "m3", iso(NOW - 60), "timed out", ("a",))
    found = reason("rrpppp", "a", away={"m3": away})
    since = f"{datetime.fromtimestamp(NOW - 60, UTC).astimezone():%H:%M:%S}"
    assert (found.kind, found.text) == (WaitKind.HOST, f"waiting for m3, away since {since}")
    later = HostAway(AT, "m1", iso(NOW - 30), "timed out", ("a", "b"))
    assert reason("rrpppp", "a", away={"m3": away, "m1": later}).text == f"waiting for m3, m1, away since {since}"
    waits = Waits(NOW, RunStatus.RUNNING, DAG([Task("a", "a"), Task("b", "b")]), {"a": C, "b": R}, away={"m3": away})
    assert (waits.reason("a"), waits.reason("b")) == (None, None)
