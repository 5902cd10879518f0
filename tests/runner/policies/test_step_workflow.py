"""Step workflows: what follows which interaction, and how a run grows by that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import DAG, FailureMode, PlaitError, Retry, RunStatus, Step, Task, TaskStatus, Workflow
from plait.errors import DAGError, ImpossibleState, UnknownStep, WorkflowEnded
from plait.runner.policies import policy_of
from plait.runner.policies.step_workflow import progress_of
from plait.workflows import Interaction, WorkflowComplete, WorkflowProgress
from tests.support.growing import Grown, grow

REVIEW = Workflow(
    [Step("ExecuteReview", "Review {{ design }}.", on_error="retry"), Step("Finalize", "Sum up: {{ ExecuteReview }}")]
)
"""The workflow of the seed: its first step is tried again, its last one ends the session either way."""
EXECUTE_REVIEW, FINALIZE = REVIEW.steps()


def session(*interactions: tuple[str, Any] | Interaction) -> WorkflowProgress:
    return WorkflowProgress(tuple(one if isinstance(one, Interaction) else Interaction(*one) for one in interactions))


# The rows of the seed: the session, what follows, whether it is complete.
ROWS: dict[str, tuple[WorkflowProgress, Step | bool | type[PlaitError], bool]] = {
    "no interaction": (session(), EXECUTE_REVIEW, False),
    "the first is under way": (session(("ExecuteReview", None)), EXECUTE_REVIEW, False),
    "ExecuteReview ok": (session(("ExecuteReview", "ok")), FINALIZE, False),
    "ExecuteReview error": (session(("ExecuteReview", "error")), EXECUTE_REVIEW, False),
    "Finalize ok": (session(("ExecuteReview", "ok"), ("Finalize", "ok")), True, True),
    "Finalize error": (session(("ExecuteReview", "ok"), ("Finalize", "error")), False, False),
    "only the last one counts": (session(("Finalize", "ok"), ("ExecuteReview", "ok")), FINALIZE, False),
    "the newest is under way": (session(("ExecuteReview", "ok"), ("Finalize", None)), FINALIZE, False),
    "unknown step": (session(("Deploy", "ok")), UnknownStep, False),
    "unknown step, failed": (session(("Finalise", "error")), UnknownStep, False),
    "unexpected status": (session(("Finalize", "odd")), ImpossibleState, False),
    "unexpected number": (session(Interaction("Finalize", "ok", number=0)), ImpossibleState, True),
}


@pytest.mark.parametrize(("so_far", "follows", "complete"), ROWS.values(), ids=ROWS)
def test_the_rows_of_the_review_workflow(
    so_far: WorkflowProgress, follows: Step | bool | type[PlaitError], complete: bool
) -> None:
    if isinstance(follows, type):
        with pytest.raises(follows):
            REVIEW.next_step(so_far)
    elif isinstance(follows, bool):
        end = REVIEW.next_step(so_far)
        assert isinstance(end, WorkflowComplete)
        assert end.ok is follows
        assert (end.error is None) is follows
    else:
        assert REVIEW.next_step(so_far) == follows
    assert REVIEW.is_complete(so_far) is complete
    if so_far.interactions:
        assert REVIEW.is_complete(so_far.interactions[-1]) is complete


@pytest.mark.parametrize("status", list(RunStatus))
def test_a_session_that_has_ended_is_refused(status: RunStatus) -> None:
    ended = {RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.CANCELLING}
    so_far = WorkflowProgress((Interaction("ExecuteReview", "ok"),), status)
    if status in ended:
        with pytest.raises(WorkflowEnded, match=f"the run is {status.value}: no step follows"):
            REVIEW.next_step(so_far)
    else:
        assert REVIEW.next_step(so_far) == FINALIZE


def test_errors_say_what_to_do() -> None:
    with pytest.raises(UnknownStep, match=r"'Finalise'; did you mean 'Finalize'\?; the workflow has ExecuteReview, F"):
        REVIEW.next_step(ROWS["unknown step, failed"][0])
    with pytest.raises(ImpossibleState, match="'Finalize' ended as 'odd'; an interaction ends as 'ok' or 'error'"):
        REVIEW.next_step(ROWS["unexpected status"][0])


def answers(*failing: str) -> Callable[[Task, str], str | Exception]:
    """Each task answers with its id, and those in `failing` fail."""
    return lambda task, _: RuntimeError("no luck\nat all") if task.id in failing else f"<{task.id}>"


def review(*failing: str) -> Grown:
    return grow(REVIEW, REVIEW.dag({"design": "a bridge"}), answers(*failing))


def test_the_review_goes_through() -> None:
    run = review()
    assert run.prompts == ["Review a bridge.", "Sum up: <ExecuteReview.1>"]
    assert (run.ran, run.status) == (["ExecuteReview.1", "Finalize.1"], RunStatus.COMPLETED)
    assert REVIEW.is_complete(progress_of(run.view()))


def test_a_failed_review_is_tried_again_and_harms_nothing() -> None:
    run = review("ExecuteReview.1", "ExecuteReview.2")
    assert run.ran == ["ExecuteReview.1", "ExecuteReview.2", "ExecuteReview.3", "Finalize.1"]
    assert run.prompts[-1] == "Sum up: <ExecuteReview.3>"
    assert run.status is RunStatus.COMPLETED
    assert run.result("ExecuteReview.1").status is TaskStatus.SKIPPED
    assert [one.status for one in progress_of(run.view()).interactions] == ["error", "error", "ok", "ok"]


def test_tries_are_limited_and_the_last_one_fails_the_run() -> None:
    run = review("ExecuteReview.1", "ExecuteReview.2", "ExecuteReview.3", "ExecuteReview.4")
    assert run.ran == ["ExecuteReview.1", "ExecuteReview.2", "ExecuteReview.3"]
    assert (run.status, run.error) == (
        RunStatus.FAILED,
        "step 'ExecuteReview' failed 3 times (max_tries): no luck",
    )
    # Of these, `resume(retry_failed=True)` runs the last one alone.
    assert [one for one in run.ran if run.result(one).status is TaskStatus.FAILED] == ["ExecuteReview.3"]


def test_a_failed_last_step_ends_the_session_without_counting_as_complete() -> None:
    run = review("Finalize.1")
    assert (run.ran, run.status) == (["ExecuteReview.1", "Finalize.1"], RunStatus.FAILED)
    assert run.error == "step 'Finalize' failed: no luck"
    assert not REVIEW.is_complete(progress_of(run.view()))


def test_a_step_may_go_on_without_the_one_before() -> None:
    steps = [
        Step("look", "Look.", on_error="go_on"),
        Step("think", "{% if look %}I saw {{ look }}.{% else %}Saw nothing.{% endif %}"),
        Step("say", "{{ look }}{{ think }}", on_error="go_on"),
    ]
    flow = Workflow(steps)
    run = grow(flow, flow.dag(), answers("look.1"))
    assert run.prompts[1:] == ["Saw nothing.", "<think.1>"]
    assert (run.status, run.dag["think.1"].failure_mode) == (RunStatus.COMPLETED, FailureMode.HARD)
    run = grow(flow, flow.dag(), answers("say.1"))
    assert (run.status, run.error) == (RunStatus.FAILED, "step 'say' failed: no luck")


def test_later_steps_see_the_try_that_went_well_and_continue_it() -> None:
    steps = [
        Step("draft", "Draft.", backend="deep", on_error="retry"),
        Step("better", "Better.", continues=True, on_error="retry", max_tries=2),
        Step("check", "{{ draft }} {{ better }}"),
    ]
    flow = Workflow(steps)
    run = grow(flow, flow.dag(), answers("draft.1", "better.1"))
    assert run.ran == ["draft.1", "draft.2", "better.1", "better.2", "check.1"]
    assert run.prompts[-1] == "<draft.2> <better.2>"
    assert [run.dag[name].continues for name in run.ran] == [None, None, "draft.2", "draft.2", None]
    assert run.dag.backend_of(run.dag["better.2"]) == "deep"
    assert list(run.dag["check.1"].depends_on) == ["draft.2", "better.2"]
    assert list(run.dag["better.2"].depends_on) == ["draft.2", "better.1"]


def test_tasks_that_a_step_added_are_seen_through_and_are_no_interactions() -> None:
    run = Grown(REVIEW.dag({"design": "d"}))
    run.run_one(run.dag["ExecuteReview.1"], answers())
    run.apply(REVIEW.decide(run.view("ExecuteReview.1")))
    run.run_one(run.dag["Finalize.1"], answers())
    run.dag = DAG([*run.dag, Task("extra", "extra", metadata={"step": "Finalize", "try": 1})], inputs=run.dag.inputs)
    assert len(progress_of(run.view()).interactions) == 2
    run.apply(REVIEW.decide(run.view("Finalize.1")))
    assert run.status is RunStatus.RUNNING
    run.run_one(run.dag["extra"], answers())
    run.apply(REVIEW.decide(run.view("extra")))
    assert run.status is RunStatus.COMPLETED


def test_nothing_is_decided_while_a_step_is_under_way() -> None:
    run = Grown(REVIEW.dag({"design": "d"}))
    for ended in (None, "something else"):
        decision = REVIEW.decide(run.view(ended))
        assert (decision.add, decision.end) == ((), None)


def test_the_settings_make_the_same_workflow_again() -> None:
    full = Step("b", "p", "deep", "go_on", 7, {"type": "object"}, True, Retry(attempts=1, on=frozenset({"timeout"})), 9)
    flow = Workflow([Step("a", "x"), full], name="both")
    settings = json.loads(json.dumps(flow.settings()))
    again = policy_of(flow.kind, settings)
    assert isinstance(again, Workflow)
    assert (again.steps(), again.name, again.settings()) == (flow.steps(), "both", settings)
    assert settings["steps"][0] == {"name": "a", "prompt": "x"}


RULES = st.tuples(st.sampled_from(["retry", "go_on", "end"]), st.integers(1, 4), st.lists(st.booleans(), max_size=5))


@given(st.lists(RULES, min_size=1, max_size=5))
def test_whatever_fails_a_session_comes_to_the_end_that_its_rules_say(rules: list[tuple[Any, int, list[bool]]]) -> None:
    """Each step has a rule, a limit, and whether its first tries go well; all further ones do."""
    flow = Workflow([Step(f"s{n}", "x", on_error=rule, max_tries=most) for n, (rule, most, _) in enumerate(rules)])
    expected: list[str] = []
    well = True
    for n, (rule, most, tries) in enumerate(rules):
        allowed = most if rule == "retry" else 1
        luck = [*tries, *[True] * allowed][:allowed]
        used = luck.index(True) + 1 if True in luck else allowed
        expected += [f"s{n}.{number}" for number in range(1, used + 1)]
        well = luck[used - 1]
        if not well and rule != "go_on":
            break

    def outcome(task: Task, _: str) -> str | Exception:
        step, number = task.id[1:].split(".")
        tries = rules[int(step)][2]
        return "fine" if int(number) > len(tries) or tries[int(number) - 1] else RuntimeError("no luck")

    run = grow(flow, flow.dag(), outcome)
    assert run.ran == expected
    assert run.status is (RunStatus.COMPLETED if well else RunStatus.FAILED)
    assert flow.is_complete(progress_of(run.view())) is well
    failed = [name for name in run.ran if run.result(name).status is TaskStatus.FAILED]
    assert failed == ([] if well else [expected[-1]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workflow([]), "at least one step"),
        (lambda: Workflow([Step("a", "x"), Step("b", "x"), Step("a", "x")]), "two steps are called 'a'"),
        (lambda: Workflow([Step("a", "x", continues=True)]), "'a' is the first"),
        (lambda: Step("a b", "x"), "1 to 56 letters"),
        (lambda: Step("x" * 57), "1 to 56 letters"),
        (lambda: Step("item", "x"), "none of .*inputs, item, none, results, true"),
        (lambda: Step("a", "x", on_error="forever"), "one of retry, go_on, end, not 'forever'"),
        (lambda: Step("a", "x", max_tries=0), "at least 1, not 0"),
        (lambda: Step("a", " "), "step 'a': there is no prompt; write one"),
    ],
)
def test_what_is_no_workflow_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_mistake_of_every_step_is_found_before_anything_runs() -> None:
    flow = Workflow([Step("a", "{{ b }}"), Step("b", "{{ topic }} {{ a }}"), Step("c", "x", timeout=-1)])
    with pytest.raises(DAGError) as caught:
        flow.dag()
    assert [problem.task_id for problem in caught.value.problems] == ["c", "a", "b"]
    assert [task.id for task in Workflow([Step("x" * 56, "x")]).dag()] == ["x" * 56 + ".1"]


@pytest.mark.parametrize("settings", [{}, {"name": "", "steps": 1}, {"name": "", "steps": [{"nome": "a"}]}])
def test_damaged_settings_are_an_error_of_ours(settings: dict[str, Any]) -> None:
    with pytest.raises(PlaitError, match="stored settings of the workflow policy cannot be read"):
        policy_of("workflow", settings)


def test_an_unknown_policy_is_an_error_of_ours() -> None:
    with pytest.raises(PlaitError, match="no built-in policy 'workflows'; did you mean 'workflow'"):
        policy_of("workflows", {})
    with pytest.raises(PlaitError, match="pass the policy of the run"):
        policy_of("my own", {})
