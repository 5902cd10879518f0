"""Turns that outlived their process, and when they are not taken over after all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends.backend_protocol import DetachedTurn, Files
from plait.events import PolicyDecided
from plait.persistence import Batch, MemoryStore
from plait.persistence.store_records import TaskRecord
from plait.results import ResumeAction
from plait.runner.domain.asked_question import AnsweredQuestion, Way, encode_answers
from plait.runner.recovery.resume_plan import (
    ResumeStep,
    longest_delay,
    plan_resume,
    steps_of_cancelled,
    steps_of_decided,
)
from plait.workflows import Decision
from tests.support.fakes import QuickClock, Talker
from tests.support.growth import Scripted, by_end
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

DAG_OF_TWO = DAG([Task("a", "a"), Task("b", "b", ["a"], at_most_once=True)])
ALIVE = DetachedTurn("alive", "s", about="agent, pid 7")


def records(*statuses: str) -> list[TaskRecord]:
    return [
        TaskRecord(task.id, position, task.prompt, task.upstream, None, "{}", status, int(status != "pending"))
        for position, (task, status) in enumerate(zip(DAG_OF_TWO, statuses, strict=True))
    ]


def test_the_words_of_the_actions_are_those_of_the_dry_run() -> None:
    words = ["keep", "continue", "adopt", "start over", "start", "ask", "fail", "blocked", "cancel"]
    assert [action.value for action in ResumeAction] == words
    assert steps_of_cancelled(records("completed", "running")) == [
        ResumeStep("a", ResumeAction("keep"), "completed"),
        ResumeStep("b", ResumeAction("cancel"), "the run is to be cancelled"),
    ]


ONE = TaskRecord("t", 0, "t", (), None, "{}", "pending", 2, session_id="s")
KNOWN = replace(ONE, session_confirmed=True)
SENT = replace(ONE, answers=encode_answers((AnsweredQuestion(1, Way.REPLY, "which?", "this", "person"),)))
TOLD = replace(ONE, answers=encode_answers((AnsweredQuestion(2, Way.REPLY, "which?", "this", "person"),)))
CALLED = replace(ONE, answers=encode_answers((AnsweredQuestion(2, Way.CALL, "which?", "this", "person"),)))
DIED, CUT = "the process died during attempt 2", "attempt 2 was interrupted"
OVER, ON, KEPT = ResumeAction.START_OVER, ResumeAction.CONTINUE, ResumeAction.KEEP
STEPS: dict[str, tuple[TaskRecord, ResumeAction, str, bool]] = {
    "never started": (replace(ONE, attempt=0), ResumeAction.START, "never started", False),
    "died": (replace(ONE, status="running"), OVER, DIED, True),
    "died in a known session": (replace(KNOWN, status="running"), ON, f"{DIED}; session s is known", True),
    "died after the answer": (
        replace(SENT, status="running"), OVER, f"{DIED}; the answer to the question is sent again", True,
    ),
    "cut": (ONE, OVER, CUT, True),
    "cut in a known session": (KNOWN, ON, f"{CUT}; session s is known", True),
    "cut after the answer": (SENT, OVER, f"{CUT}; the answer to the question is sent again", True),
    "answered in the reply": (TOLD, ON, "the question is answered", False),
    "answered in the code": (
        CALLED, OVER, "the question is answered, and the task's code runs again from the start", False,
    ),
    "failed before": (replace(ONE, error_kind="timeout"), OVER, "attempt 2 failed (timeout)", False),
    "failed before in a known session": (
        replace(KNOWN, error_kind="timeout"), ON,
        "attempt 2 failed (timeout); session s has kept the conversation", False,
    ),
    "failed": (replace(ONE, status="failed", error_kind="refused"), KEPT, "failed (refused)", False),
    "completed": (replace(ONE, status="completed"), KEPT, "completed", False),
    "damaged": (
        replace(ONE, status="completed", damaged=True), KEPT,
        "the stored result does not fit its checksum, so the task counts as failed; --retry-failed runs the task again",
        False,
    ),
    "asking": (replace(ONE, status="waiting_input", question="which?", asked="{}"), ResumeAction.ASK, "which?", False),
    "waiting": (replace(ONE, status="waiting_input", question="done?"), ResumeAction.ASK, "done?", False),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_the_step_of_a_task_by_its_record(name: str) -> None:
    record, action, reason, repeats = STEPS[name]
    assert plan_resume(DAG([Task("t", "t")]), [record]) == [ResumeStep("t", action, reason, repeats)]


def test_a_damaged_result_runs_again_if_asked_for_unless_it_took_effect() -> None:
    damaged, reason = replace(ONE, status="completed", damaged=True), "the stored result does not fit its checksum"
    assert plan_resume(DAG([Task("t", "t")]), [damaged], retry_failed=True) == [ResumeStep("t", OVER, reason, True)]
    reason += "; the task took effect, and must not take effect twice"
    for retry_failed in (False, True):
        steps = plan_resume(DAG([Task("t", "t", at_most_once=True)]), [damaged], retry_failed=retry_failed)
        assert steps == [ResumeStep("t", KEPT, reason)]


def test_a_task_that_pairs_up_with_another_does_not_wait_for_all_of_the_other() -> None:
    """Both are made from the same list, so `after.1` waits for `each.1`, and `after` for neither."""
    each = Task("each", "{{ item }}", for_each="list")
    after, part = Task("after", "{{ each }}", ["each"], for_each="list"), Task("each.1", "x", ["list"], item="x")
    dag = DAG([Task("list", "list"), each, after, part], gathered={"each": ["each.1"]})
    statuses = zip(dag, ("completed", "pending", "pending", "failed"), strict=True)
    task_records = [
        TaskRecord(task.id, place, task.prompt, task.upstream, None, "{}", status, int(status != "pending"))
        for place, (task, status) in enumerate(statuses)
    ]
    steps = [(step.action, step.reason) for step in plan_resume(dag, task_records)]
    assert steps[1:3] == [(ResumeAction.BLOCKED, "waits for each.1"), (ResumeAction.START, "never started")]


@pytest.mark.parametrize(
    ("left", "action", "reason"),
    [
        (ALIVE, ResumeAction.ADOPT, "the agent is still running (agent, pid 7)"),
        (DetachedTurn("ended"), ResumeAction.ADOPT, "the agent has finished, and its answer can be read"),
        (DetachedTurn("dead", "s"), ResumeAction.ASK, "the process ended during attempt 1"),
        (None, ResumeAction.ASK, "the process ended during attempt 1"),
    ],
)
def test_what_lives_is_not_asked_about(left: DetachedTurn | None, action: ResumeAction, reason: str) -> None:
    detached = {} if left is None else {"b": left}
    step = plan_resume(DAG_OF_TWO, records("completed", "running"), detached=detached)[1]
    assert (step.action, step.possibly_billed_twice) == (action, False)
    assert step.reason.startswith(reason)


@pytest.mark.parametrize("times", range(1, 31))
def test_a_person_is_asked_at_each_tenth_death_of_the_process_and_at_no_other_end(times: int) -> None:
    task = replace(ONE, status="running", crashes=times - 1)

    def action(**known: Any) -> ResumeAction:
        return plan_resume(DAG([Task("t", "t")]), [task], **known)[0].action

    assert (action() is ResumeAction.ASK) == (times in {10, 20, 30})
    assert action(detached={"t": ALIVE}) is ResumeAction.ADOPT  # the agent outlived the death
    assert action(died=False) is ResumeAction.START_OVER  # only the lease was lost


@pytest.mark.parametrize(
    ("retry_failed", "action", "reason"),
    [
        (True, ResumeAction.START_OVER, "a dependency runs again"),
        (False, ResumeAction.BLOCKED, "waits for a"),
    ],
)
def test_what_lives_by_a_result_that_is_damaged_is_not_taken_over(
    retry_failed: bool, action: ResumeAction, reason: str
) -> None:
    a, b = records("completed", "running")
    dag = DAG([Task("a", "a"), Task("b", "b", ["a"])])
    detached = {"b": ALIVE}
    steps = plan_resume(dag, [replace(a, damaged=True), b], retry_failed=retry_failed, detached=detached)
    assert (steps[1].action, steps[1].reason) == (action, reason)
    # What must not happen twice is not ended, which would only have it happen again.
    steps = plan_resume(DAG_OF_TWO, [replace(a, damaged=True), b], retry_failed=retry_failed, detached=detached)
    assert steps[1].action is ResumeAction.ADOPT


def test_what_waits_for_it_is_foretold_to_start() -> None:
    steps = plan_resume(DAG_OF_TWO, records("running", "pending"), detached={"a": ALIVE})
    assert [step.action for step in steps] == [ResumeAction.ADOPT, ResumeAction.START]


@pytest.mark.parametrize(("fails", "action"), [(True, ResumeAction.BLOCKED), (False, ResumeAction.CANCEL)])
def test_where_the_policy_has_ended_the_run_nothing_is_taken_over(fails: bool, action: ResumeAction) -> None:
    steps = plan_resume(DAG_OF_TWO, records("running", "pending"), detached={"a": ALIVE})
    assert [step.action for step in steps_of_decided(steps, fails=fails)] == [action] * 2


class Filed(MemoryStore):
    files_root = Path("/nowhere/files")


class Cut(FaultyStore):
    """Nothing is stored any more once the policy has ended the run: its process died then."""

    async def write(self, batch: Batch) -> None:
        await super().write(batch)
        if any(isinstance(one, PolicyDecided) and '"end"' in one.state_json for one in batch.events):
            self.faults = on_write(lambda _: Fault.BEFORE)


@pytest.mark.parametrize("end", [RunStatus.COMPLETED, RunStatus.FAILED])
async def test_a_resume_after_such_an_end_asks_nobody(end: Any) -> None:
    class Alive(Talker):
        def inspect(self, files: Files) -> DetachedTurn | None:
            return ALIVE

    async def work(prompt: str) -> str:
        if prompt == "slow":
            await anyio.sleep_forever()
        return prompt

    store, backend = Filed(), Alive()
    dag = DAG([Task("a", "a", weight=0.5), Task("slow", "slow")])
    policy = Scripted(by_end({"a": Decision(end=end)}))
    await ParallelRunner(work, store=Cut(store), clock=QuickClock()).run(dag, "r", policy=policy)
    assert [task.status for task in await store.list_tasks("r")] == ["completed", "running"]
    runner = ParallelRunner(backend, store=store, clock=QuickClock())
    preview = await runner.runs.preview("r")
    result = await runner.resume("r", policy=Scripted())
    assert preview.tasks["slow"].action is (ResumeAction.CANCEL if end is RunStatus.COMPLETED else ResumeAction.BLOCKED)
    assert (result.status, backend.requests) == (end, [])


def test_a_person_is_asked_at_every_tenth_death_and_the_delays_grow_to_a_minute_between() -> None:
    dag = DAG([Task("t", "t")])
    asked = []
    for deaths in range(1, 31):
        (step,) = plan_resume(dag, [replace(ONE, status="running", crashes=deaths - 1)])
        asked += [deaths] if step.action is ResumeAction.ASK else []
    assert asked == [10, 20, 30]
    growing = [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0]
    assert [longest_delay(deaths) for deaths in range(1, 21)] == growing * 2
