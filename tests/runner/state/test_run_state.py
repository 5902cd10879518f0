"""The verbs of RunState: the event that each returns, the fields that it changes, and the moves that it refuses."""

# The tests look at fields that have no public view.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest

from plait import DAG, FailureMode, Task, TaskResult, TaskStatus, events
from plait.backends.backend_protocol import Reply
from plait.dialogue import Message, Question
from plait.errors import BackendError, DAGError, ErrorKind
from plait.persistence.store_records import AttemptRecord, TaskRecord
from plait.runner.domain.asked_question import AnsweredQuestion, Asking, Way, encode_answers
from plait.runner.domain.continuation import INVALID_TASKS, Continuation, History
from plait.runner.state import run_state
from plait.runner.state.run_state import RunState
from plait.statuses import TASK_TRANSITIONS
from plait.usage import Usage

PENDING, RUNNING, WAITING = TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.WAITING_INPUT
COMPLETED, FAILED, SKIPPED, CANCELLED = (
    TaskStatus.COMPLETED,
    TaskStatus.FAILED,
    TaskStatus.SKIPPED,
    TaskStatus.CANCELLED,
)
AT = "2026-01-02T03:04:05.678Z"
COST, MORE = Usage(3, 4, 0.5, "m"), Usage(10, 20, 1.5, "n")
SAID = (Message("user", "ask"), Message("assistant", "hm"))
ERROR = BackendError(ErrorKind.TRANSIENT, "gone", usage=COST, messages=SAID)
ASKING = Asking(Question("which?"), Way.REPLY)
ANSWERED = AnsweredQuestion(1, Way.CALL, "before?", "yes", "person")
BEGUN = Continuation("s", SAID, interrupted=True)


def at(status: TaskStatus, *, failure_mode: FailureMode = FailureMode.HARD, **more: Any) -> RunState:
    """The state of a stored run of the tasks `a`, which has that status, and `b`, which continues `a`."""
    dag = DAG([Task("a", "ask", failure_mode=failure_mode), Task("b", "go on", continues="a")])
    if status is WAITING:
        more = {"question": "which?", "asked": ASKING.encoded(), **more}
    attempt = 0 if status is PENDING else 2
    first = TaskRecord("a", 0, "ask", (), None, "{}", status.value, attempt, **more)
    return RunState(dag, (first, TaskRecord("b", 1, "go on", ("a",), None, "{}", PENDING.value, 0)), usage=MORE)


class Verb(NamedTuple):
    """A verb as it is called for task 0; the statuses that it starts from, and those that it leads to."""

    call: Callable[[RunState], events.Event]
    event: type[events.Event]
    olds: frozenset[TaskStatus]
    new: TaskStatus


UNDONE = frozenset({PENDING, RUNNING, WAITING})
VERBS = {
    "start": Verb(lambda s: s.start(0, AT, "fake"), events.TaskStarted, frozenset({PENDING}), RUNNING),
    "complete": Verb(
        lambda s: s.complete(0, AT, Reply("yes"), None), events.TaskCompleted, frozenset({RUNNING, WAITING}), COMPLETED
    ),
    "fail": Verb(lambda s: s.fail(0, AT, ERROR), events.TaskFailed, frozenset({RUNNING, WAITING}), FAILED),
    "cancel": Verb(lambda s: s.cancel(0, AT), events.TaskCancelled, UNDONE, CANCELLED),
    "retry": Verb(lambda s: s.retry(0, AT, ERROR, 1.0, 2.0), events.TaskRetried, frozenset({RUNNING}), PENDING),
    "interrupt": Verb(lambda s: s.interrupt(0, AT, "stopped"), events.TaskInterrupted, frozenset({RUNNING}), PENDING),
    "wait_for_answer": Verb(
        lambda s: s.wait_for_answer(0, AT, ASKING, 1.0), events.TaskWaiting, frozenset({RUNNING}), WAITING
    ),
    "wait_for_decision": Verb(
        lambda s: s.wait_for_decision(0, AT, "done?", crashed=False), events.TaskWaiting, frozenset({RUNNING}), WAITING
    ),
    "answer": Verb(lambda s: s.answer(0, AT, 1, "person"), events.TaskAnswered, frozenset({WAITING}), PENDING),
    "reopen": Verb(lambda s: s.reopen(0, AT), events.TaskReopened, frozenset({FAILED}), PENDING),
}
PAIRS = [(name, status) for name in VERBS for status in TaskStatus]
LEGAL = [(name, status) for name, status in PAIRS if status in VERBS[name].olds]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


def fields(state: RunState) -> dict[str, object]:
    """Everything that the state holds, in a form that can be compared."""
    held = {name: deepcopy(value) for name, value in vars(state).items() if name != "dag"}
    return held | {"dag": state.dag.tasks[:]}


@pytest.mark.parametrize(("name", "old"), LEGAL)
def test_a_legal_move_changes_the_status_and_returns_its_event(name: str, old: TaskStatus) -> None:
    state, verb = at(old), VERBS[name]
    event = verb.call(state)
    assert state.statuses[0] is verb.new
    assert type(event) is verb.event
    assert isinstance(event, events.TaskEvent)
    assert (event.at, event.task_id, event.attempt) == (AT, "a", state.attempts[0])
    assert state.statuses[1] is PENDING


@pytest.mark.parametrize(("name", "old"), ILLEGAL)
def test_an_illegal_move_is_refused_and_changes_nothing(name: str, old: TaskStatus) -> None:
    state = at(old)
    before = fields(state)
    with pytest.raises(RuntimeError, match=f"task 'a' is {old.value} and cannot become {VERBS[name].new.value}"):
        VERBS[name].call(state)
    assert fields(state) == before


def test_every_move_of_the_table_has_a_verb() -> None:
    moves = {(verb.event.kind, old, verb.new) for verb in VERBS.values() for old in verb.olds}
    moves |= {("task_skipped", old, SKIPPED) for old in VERBS["fail"].olds}  # by the failure mode of the task
    table = {(kind, old, after) for kind, (before, after) in TASK_TRANSITIONS.items() for old in before}
    assert moves == table


@pytest.mark.parametrize("old", [status for status in TaskStatus if status is not RUNNING])
def test_only_a_running_task_is_adopted(old: TaskStatus) -> None:
    state = at(old)
    before = fields(state)
    with pytest.raises(RuntimeError, match="a bug of plait"):
        state.adopt(0)
    assert fields(state) == before


def test_a_view_shows_each_change() -> None:
    state = at(PENDING)
    views = state.statuses, state.attempts, state.results
    state.start(0, AT, "fake")
    state.complete(0, AT, Reply("yes"), None)
    assert views == ([COMPLETED, PENDING], [1, 0], {0: TaskResult("a", COMPLETED, "yes", attempts=1)})


def test_start_counts_the_attempt_and_takes_up_the_conversation() -> None:
    state = at(PENDING)
    state.continue_with(0, BEGUN)
    assert state.start(0, AT, "fake", "s", confirmed=True) == events.TaskStarted(AT, "a", 1, "fake", "s", True)
    assert state.is_ours(0)
    assert not state.is_ours(1)
    assert not state.continuations


def test_what_the_next_attempt_has_to_say_stays_until_the_task_is_done() -> None:
    state = at(PENDING)
    state.continue_with(0, Continuation("s", SAID, ANSWERED, interrupted=True))
    state.start(0, AT, "fake")
    assert state.continuations == {0: Continuation("s", SAID, ANSWERED)}
    state.complete(0, AT, Reply("yes"), None)
    assert not state.continuations


def test_adopt_takes_the_attempt_over_as_it_is() -> None:
    state = at(RUNNING)
    state.continue_with(0, BEGUN)
    state.adopt(0)
    assert (state.statuses[0], state.attempts[0]) == (RUNNING, 2)
    assert state.is_ours(0)
    assert not state.continuations
    assert state.resume_summary().adopted == 1


def test_complete_keeps_the_result_the_cost_and_a_plain_conversation() -> None:
    state = at(RUNNING)
    reply = Reply("yes", {"x": 1}, usage=COST)
    event = state.complete(0, AT, reply, '{"x":1}', 2.5, "s", turn="ask")
    assert event == events.TaskCompleted(AT, "a", 2, "yes", '{"x":1}', COST, 2.5, "s", "ask")
    result = TaskResult("a", COMPLETED, "yes", {"x": 1}, attempts=2, usage=COST, duration_s=2.5, session_id="s")
    assert state.results == {0: result}
    assert state._usage == MORE + COST
    assert not state.keeps_conversation(0)  # its prompt is enough
    assert state.conversation("a") == History("s", event.messages)


def test_complete_keeps_what_earlier_attempts_said_and_what_the_task_continues() -> None:
    state = at(RUNNING)
    state.complete(0, AT, Reply("yes"), None, 0.0, "s", turn=SAID, earlier_messages=SAID[:1])
    state.start(1, AT, "fake")
    state.complete(1, AT, Reply("on", usage=COST), None, 0.0, "t", turn="go on")
    kept = state.conversation("b")
    assert kept is not None
    assert kept.session_id == "t"
    own = (Message("user", "go on"), Message("assistant", "on", COST))
    assert kept.messages == (*SAID[:1], *SAID, *own)


def test_complete_ends_the_question_of_a_waiting_task() -> None:
    state = at(WAITING)
    state.complete(0, AT, Reply("yes"), None)
    assert (state.questions, state.asking) == ({}, {})


def test_fail_keeps_the_error_and_the_cost() -> None:
    state = at(WAITING)
    state.continue_with(0, BEGUN)
    event = state.fail(0, AT, ERROR, 2.5, SAID)
    assert event == events.TaskFailed(AT, "a", 2, "transient", "gone", 2.5, COST, SAID)
    result = TaskResult("a", FAILED, error_kind="transient", error="gone", attempts=2, usage=COST, duration_s=2.5)
    assert state.results == {0: result}
    assert state._usage == MORE + COST
    assert (state.questions, state.asking, state.continuations) == ({}, {}, {})


@pytest.mark.parametrize(
    ("mode", "status"), [(FailureMode.HARD, FAILED), (FailureMode.SOFT, FAILED), (FailureMode.SKIP, SKIPPED)]
)
def test_fail_follows_the_failure_mode(mode: FailureMode, status: TaskStatus) -> None:
    state = at(RUNNING, failure_mode=mode)
    event = state.fail(0, AT, ERROR)
    assert (event.status, event.duration_s, event.messages) == (status, 0.0, ())
    assert state.statuses[0] is state.results[0].status is status


def test_cancel_costs_what_the_attempt_has_reported() -> None:
    state = at(RUNNING)
    state.spend(0, COST)
    assert state.cancel(0, AT) == events.TaskCancelled(AT, "a", 2, COST)
    assert state.results == {0: TaskResult("a", CANCELLED, attempts=2, usage=COST)}
    assert state._usage == MORE + COST


def test_cancel_counts_no_cost_of_an_attempt_that_has_ended() -> None:
    state = at(RUNNING)
    state.spend(0, COST)
    state.interrupt(0, AT, "stopped")
    assert state.cancel(0, AT) == events.TaskCancelled(AT, "a", 2)
    again = at(RUNNING)
    again.spend(0, COST)
    again.retry(0, AT, ERROR, 0.0, 1.0)
    again.start(0, AT, "fake")
    assert again.cancel(0, AT) == events.TaskCancelled(AT, "a", 3)
    assert again._usage == MORE + COST  # of the attempt that failed, once


def test_cancel_ends_the_question() -> None:
    state = at(WAITING)
    state.cancel(0, AT)
    assert (state.questions, state.asking) == ({}, {})


def test_retry_keeps_the_cost_and_what_the_next_attempt_takes_up() -> None:
    state = at(RUNNING)
    event = state.retry(0, AT, ERROR, 1.5, 2.5, BEGUN)
    assert event == events.TaskRetried(AT, "a", 2, "transient", "gone", 1.5, 2.5, COST, SAID, True)
    assert state.continuations == {0: BEGUN}
    assert state._usage == MORE + COST
    assert state.refusals(0) == 0
    assert not state.results


def test_retry_with_what_was_wrong_corrects_the_task() -> None:
    state = at(RUNNING)
    refusal = BackendError(ErrorKind.INVALID_OUTPUT, f"{INVALID_TASKS}: x")
    assert not state.retry(0, AT, refusal, 0.0, 1.0, Continuation("s", correction="mistakes")).continues_session
    assert state.refusals(0) == 1


def test_retry_alone_leaves_what_is_to_be_said_as_it_is() -> None:
    state = at(RUNNING)
    state.continue_with(0, Continuation("s", SAID, ANSWERED))
    assert not state.retry(0, AT, ERROR, 0.0, 1.0).continues_session
    assert state.continuations == {0: Continuation("s", SAID, ANSWERED)}


def test_a_crash_delays_the_next_attempt() -> None:
    assert at(RUNNING).interrupt(0, AT, "stopped") == events.TaskInterrupted(AT, "a", 2, "stopped")
    died = at(RUNNING).interrupt(0, AT, "died", crashed=True, delay_s=3.5)
    assert died == events.TaskInterrupted(AT, "a", 2, "died", crashed=True, delay_s=3.5)


def test_waiting_for_an_answer_keeps_the_question_and_the_conversation() -> None:
    state = at(RUNNING)
    event = state.wait_for_answer(0, AT, ASKING, 2.5, COST, SAID, continuation=Continuation("s", SAID))
    assert event == events.TaskWaiting(AT, "a", 2, "which?", False, ASKING.encoded(), 2.5, COST, SAID)
    assert (state.questions, state.asking) == ({0: "which?"}, {0: ASKING})
    assert state.continuations == {0: Continuation("s", SAID)}
    assert state._usage == MORE + COST
    assert state.all_results()["a"].question == "which?"


@pytest.mark.parametrize("crashed", [False, True])
def test_waiting_for_a_decision_keeps_the_question(crashed: bool) -> None:
    state = at(RUNNING)
    event = state.wait_for_decision(0, AT, "done?", crashed=crashed)
    assert event == events.TaskWaiting(AT, "a", 2, "done?", crashed=crashed)
    assert (state.questions, state.asking) == ({0: "done?"}, {})


def test_a_decision_is_no_answer_to_a_question() -> None:
    state = at(RUNNING)
    state.wait_for_decision(0, AT, "done?", crashed=False)
    before = fields(state)
    with pytest.raises(RuntimeError, match="a bug of plait"):
        state.answer(0, AT, "yes", "person")
    assert fields(state) == before


def test_answer_adds_to_the_answers_and_goes_into_the_conversation() -> None:
    state = at(WAITING, answers=encode_answers((ANSWERED,)))
    state.continue_with(0, Continuation("s", SAID))
    event, given = state.answer(0, AT, {"x": 1}, "person"), AnsweredQuestion(2, Way.REPLY, "which?", {"x": 1}, "person")
    assert event == events.TaskAnswered(AT, "a", 2, encode_answers((ANSWERED, given)))
    assert state.answers == {0: (ANSWERED, given)}
    assert (state.questions, state.asking) == ({}, {})
    assert state.continuations == {0: Continuation("s", SAID, given)}
    assert state.answer_to_send(0) == given


@pytest.mark.parametrize("damaged", [False, True])
def test_reopen_removes_the_result_and_the_answers(damaged: bool) -> None:
    state = at(COMPLETED if damaged else FAILED, damaged=damaged, answers=encode_answers((ANSWERED,)))
    assert state.statuses[0] is FAILED
    assert state.reopen(0, AT) == events.TaskReopened(AT, "a", 2, damaged=damaged)
    assert (state.results, state.answers) == ({}, {})


def test_added_tasks_are_pending_and_know_who_added_them() -> None:
    state = at(RUNNING)
    more = [Task("c", "x", continues="a"), Task("d", "x")]
    assert state.add_tasks(more, "b", AT) == events.TasksAdded(AT, tuple(map(events.NewTask.of, more)), "b")
    assert state.statuses[2:] == [PENDING, PENDING]
    assert state.attempts[2:] == [0, 0]
    assert state.depths == {2: 1, 3: 1}
    assert state.has_added(1)
    assert state.times_continued(0) == 2
    assert state.add_tasks([Task("e", "x")], "d", AT).added_by == "d"
    assert state.depths[4] == 2


def test_tasks_that_cannot_be_added_change_nothing() -> None:
    state = at(RUNNING)
    before = fields(state)
    with pytest.raises(DAGError):
        state.add_tasks([Task("c", "x", depends_on=["nobody"])], "b", AT)
    assert fields(state) == before


def test_tasks_are_withdrawn_without_a_trace() -> None:
    state = at(RUNNING)
    before = fields(state)
    state.add_tasks([Task("c", "x", continues="a"), Task("d", "x")], "b", AT)
    state.withdraw_tasks(2)
    after = fields(state)
    assert after.pop("_continued") == before.pop("_continued")
    assert after == before


@pytest.mark.parametrize("count", [0, 2])
def test_an_expanded_task_waits_for_its_parts(count: int) -> None:
    dag = DAG([Task("list", "x"), Task("each", "{{ item }}", for_each="list")])
    state = RunState(dag)
    parts = [Task(f"each.{number}", "x", item=number, depends_on=["list"]) for number in range(1, count + 1)]
    if parts:
        state.add_tasks(parts, "each", AT)
    state.expand(1)
    assert state.parts == {1: list(range(2, 2 + count))}
    assert set(dag.dependencies[1]) == {0, *range(2, 2 + count)}


def test_a_task_with_join_keeps_the_results_that_it_started_with() -> None:
    """The task started in an earlier process, between the ends of the two that it names."""
    tasks = [Task("a", "a"), Task("b", "b"), Task("end", "{{ a }}|{{ b }}", ["a", "b"], join="any")]
    earlier, later = "2026-01-02T03:04:01.000Z", "2026-01-02T03:04:09.000Z"
    records = (
        TaskRecord("a", 0, "a", (), None, "{}", COMPLETED.value, 1, text="A", ended_at=earlier),
        TaskRecord("b", 1, "b", (), None, "{}", COMPLETED.value, 1, text="B", ended_at=later),
        TaskRecord("end", 2, tasks[2].prompt, ("a", "b"), None, "{}", RUNNING.value, 1, started_at=AT),
    )
    state = RunState(DAG(tasks), records)
    assert state.texts(tasks[2]).prompt() == "A|"


def test_failures_of_earlier_processes_count_until_a_person_reopened_the_task() -> None:
    def attempt(number: int, status: str, kind: ErrorKind | None = None, error: str | None = None) -> AttemptRecord:
        name = None if kind is None else kind.value
        return AttemptRecord("a", number, status, "fake", None, AT, AT, name, error, Usage(), None)

    failed = [
        attempt(1, "retried", ErrorKind.TRANSIENT, "gone"),
        attempt(2, "retried", ErrorKind.INVALID_OUTPUT, f"{INVALID_TASKS}: x"),
        attempt(3, "retried", ErrorKind.SESSION_LOST, "lost"),  # no fault of the task
    ]
    state = at(RUNNING)
    state.count_stored_failures(0, failed)
    assert state.failures(0) == 2
    assert state.refusals(0) == 1
    assert state.count_failure(0, ErrorKind.TRANSIENT) == 0
    assert state.failures(0) == 3
    assert [state.count_failure(0, ErrorKind.RATE_LIMITED, 15, pauses) for pauses in (0, 5, 0)] == [1, 5, 3]
    assert state.failures(0) == 3
    state.count_stored_failures(0, [attempt(4, "failed", ErrorKind.TRANSIENT, "gone")])
    assert state.failures(0) == 0
    assert state.refusals(0) == 0


def test_a_stored_conversation_is_freed_unless_others_continue_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MOST_STORED_IN_MEMORY", 0)
    state = at(RUNNING)
    state.complete(0, AT, Reply("yes"), None, turn="ask")
    state.start(1, AT, "fake")
    state.complete(1, AT, Reply("yes"), None, turn="go on")
    for position in (0, 1):
        state.settle_conversation(position)
    assert state.conversation("a") is not None
    assert state.conversation("b") is None


def test_a_stored_conversation_stays_if_a_task_added_since_continues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState(DAG([Task("a", "ask"), Task("b", "ask")]))
    for position in (0, 1):
        state.start(position, AT, "fake")
        state.complete(position, AT, Reply("yes"), None, turn="ask")
        state.settle_conversation(position)
    state.add_tasks([Task("c", "go on", continues="a")], None, AT)
    monkeypatch.setattr(run_state, "MOST_STORED_IN_MEMORY", 0)
    state.start(2, AT, "fake")
    state.complete(2, AT, Reply("yes"), None, turn="go on")
    state.settle_conversation(2)
    kept = {task_id: state.conversation(task_id) is not None for task_id in ("a", "b", "c")}
    assert kept == {"a": True, "b": False, "c": False}


def test_a_run_without_a_store_keeps_every_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MOST_STORED_IN_MEMORY", 0)
    state = RunState(DAG([Task("a", "ask")]), keeps_all=True)
    state.start(0, AT, "fake")
    state.complete(0, AT, Reply("yes"), None, turn="ask")
    state.settle_conversation(0)
    assert state.conversation("a") is not None


def test_repeats_count_once_they_are_begun() -> None:
    state = at(PENDING)
    state.mark_repeats([0, 1])
    state.start(0, AT, "fake")
    assert state.resume_summary().repeated == 1
