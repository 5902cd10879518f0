"""The harness's own parts: what it expects, what it believes, and the words by which a case is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from plait import DAG, FailureMode, Retry, RunStatus, Task, TaskStatus
from plait.task import Check, Join
from tests.faults.campaigns.bugs import TO_BE_SEEN, unseen
from tests.faults.campaigns.report import Report
from tests.faults.crashtest.cases import NEVER, Case, TaskBehaviour, chain_case, plan_case, random_case
from tests.faults.crashtest.judge import Judge, Verdict
from tests.faults.crashtest.mutants import MUTANTS
from tests.faults.crashtest.oracle import Expected, expected, forecast, run_status
from tests.faults.crashtest.snapshot import mark
from tests.faults.crashtest.trial import Kind, Point, Trial, parse_trial

CASE = chain_case()
ENDS = expected(CASE)
"""Of a chain: a, then b, then c, one at a time."""


def test_the_end_of_every_failure_mode() -> None:
    modes = {"hard": FailureMode.HARD, "soft": FailureMode.SOFT, "skip": FailureMode.SKIP}
    first = [Task(name, "x", failure_mode=mode, retry=Retry(2)) for name, mode in modes.items()]
    then = [Task(f"after-{name}", f'after-{name}|{{{{ results["{name}"] }}}}', [name]) for name in modes]
    parts = {
        "hard": TaskBehaviour(refused=True),
        "soft": TaskBehaviour(failures=NEVER),
        "skip": TaskBehaviour(failures=NEVER),
    }
    parts |= {task.id: TaskBehaviour() for task in then}
    ends = expected(Case(DAG([*first, *then]), parts, ("x",), 1, {}))
    assert {name: (end.status, end.executions) for name, end in ends.items()} == {
        "hard": (TaskStatus.FAILED, 1),
        "soft": (TaskStatus.FAILED, 2),
        "skip": (TaskStatus.SKIPPED, 2),
        "after-hard": (TaskStatus.PENDING, 0),
        "after-soft": (TaskStatus.COMPLETED, 1),
        "after-skip": (TaskStatus.COMPLETED, 1),
    }
    assert ends["after-soft"].history[0] == "after-soft|"
    assert run_status(ends) is RunStatus.FAILED
    assert run_status({"a": Expected(TaskStatus.SKIPPED, 1)}) is RunStatus.COMPLETED


def test_the_end_of_every_join() -> None:
    dag = DAG(
        [
            Task("bad", "bad"),
            Task("good", "good"),
            Task("blocked", "blocked", ["bad"]),
            Task("first", "first", ["bad", "good"], join="any"),
            Task("nobody", "nobody", ["bad", "blocked"], join="any"),
            Task("end", 'end|{{ results["blocked"] }}|{{ results["good"] }}', ["blocked", "good"], join="done"),
        ]
    )
    parts = {task.id: TaskBehaviour(refused=task.id == "bad") for task in dag}
    ends = expected(Case(dag, parts, ("x",), 1, {}))
    assert [ends[name].status.value for name in ("first", "nobody", "end")] == ["completed", "pending", "completed"]
    assert ends["end"].history[0] == f"end||{ends['good'].value}"


@pytest.mark.parametrize(("join", "is_early"), [("all", True), ("any", False), ("done", True)])
def test_a_joined_task_may_start_before_some_ends_are_stored(join: Join, is_early: bool) -> None:
    dag = DAG([Task("a", "a"), Task("b", "b"), Task("j", "j", ["a", "b"], join=join)])
    case = Case(dag, {task.id: TaskBehaviour() for task in dag}, ("x",), 3, {})
    statuses = {"a": "completed", "b": "running", "j": "running"}
    stored = {
        name: {"status": status, "result": "", "attempts": [[1, status]], "damaged": False}
        for name, status in statuses.items()
    }
    lines = [BEGIN, ["exec", "j", 1, 0.0], ["begin", 2, "resume"], ["found", {"tasks": stored}]]
    told = [line for line in Judge(case).judge(lines).broken if line.startswith("I4")]
    assert bool(told) is is_early


@pytest.mark.parametrize("is_there", [True, False])
def test_the_evidence_of_a_check_is_looked_for(is_there: bool) -> None:
    checked = Task("a", "a", check=Check(passes="{{ answer }} != ''"))
    case = Case(DAG([checked]), {"a": TaskBehaviour()}, ("x",), 1, {})
    [end] = expected(case).values()
    said = [mark(text) for text in (*end.history, *["check: condition"] * is_there)]
    stored = {"status": "completed", "result": end.result, "attempts": [[1, "completed"]], "damaged": False}
    whole = {"status": "completed", "owned": False, "completions": {"a": 1}, "growths": {}}
    lines = [BEGIN, ["exec", "a", 1, 0.0], ["end", "completed", {**whole, "tasks": {"a": {**stored, "said": said}}}]]
    assert (Judge(case).judge(lines).broken == []) is is_there


def test_a_case_is_all_in_its_seed() -> None:
    for seed in range(20):
        one, other = random_case(seed), random_case(seed)
        assert (one.dag.tasks, one.parts, one.limits) == (other.dag.tasks, other.parts, other.limits)
    assert len({str(random_case(seed).dag.tasks) for seed in range(20)}) == 20


def test_a_plan_keeps_its_shape_and_loses_what_only_a_model_can_do() -> None:
    task = Task("b", "Say {{ a }}", ["a"], "mine", output_schema={"type": "object"}, metadata={"x": 1}, timeout=9)
    case = plan_case(DAG([Task("a", "a"), task], name="yours"), "default", 3, seed=0)
    kept = case.dag["b"]
    assert (kept.depends_on, kept.backend, kept.timeout) == (["a"], "mine", 9)
    assert (kept.output_schema, kept.metadata) == (None, {})
    assert (case.backends, case.concurrency, case.dag.name) == (("default", "mine"), 3, "yours")
    assert all(not part.failures and not part.refused for part in case.parts.values())


def test_what_a_case_grows_to() -> None:
    last = Task("u", 'u|{{ results["m"] }}', ["m"])
    dag = DAG([Task("p", "p"), Task("l", "l"), Task("m", "m|{{ item }}", for_each="l"), last])
    parts = {"p": TaskBehaviour(adds=({"id": "new", "prompt": 'new|{{ results["p"] }}', "depends_on": ["p"]},))}
    parts |= {"l": TaskBehaviour(structured=True, items=2)} | {
        name: TaskBehaviour() for name in ("m", "u", "new", "r_p", "last")
    }
    told = forecast(Case(dag, parts, ("x",), 1, {}, reviewed=("p",)))
    assert set(told.ends) == {"p", "l", "m", "u", "new", "m.1", "m.2", "r_p", "last"}
    assert told.adders == {"p", "m"}
    assert {end.status for end in told.ends.values()} == {TaskStatus.COMPLETED}
    assert told.ends["last"].history[0] == "last|l|m|m.1|m.2|new|p|r_p|u"
    assert told.dag.dependencies[told.dag.position("m")] == (1, told.dag.position("m.1"), told.dag.position("m.2"))


def test_growing_plans_keep_growing() -> None:
    dag = DAG([Task("p", "p", adds_tasks=True), Task("l", "l"), Task("m", "{{ item }}", for_each="l")])
    told = forecast(plan_case(dag, "default", 3, seed=0))
    assert "p-new" in told.ends
    assert told.adders >= {"p"}


def task(name: str, status: str = "completed", attempts: int = 1) -> dict[str, Any]:
    end = ENDS[name]
    numbered = [[number, "interrupted"] for number in range(1, attempts)] + [[attempts, status]] * (attempts > 0)
    return {
        "status": status,
        "result": end.result if status == "completed" else "",
        "attempts": numbered,
        "damaged": False,
        "said": [mark(text) for text in end.history[-2:]] if status == "completed" else [],
    }


def held(**tasks: dict[str, Any]) -> dict[str, Any]:
    whole = {name: task(name, "pending", 0) for name in ENDS} | tasks
    completed = {name: 1 for name, one in whole.items() if one["status"] == "completed"}
    return {"status": "completed", "owned": False, "tasks": whole, "completions": completed, "growths": {}}


DONE = held(a=task("a"), b=task("b"), c=task("c"))
BEGIN: list[Any] = ["begin", 1, "run"]


def run_of(*names: str, pid: int = 1) -> list[list[Any]]:
    lines: list[list[Any]] = []
    for name in names:
        lines += [["exec", name, pid, 0.0], ["done", name, pid], ["ack", name, "completed", ENDS[name].result]]
    return lines


def judged(*lines: Sequence[Any], leaving: dict[str, int] | None = None) -> Verdict:
    return Judge(CASE, leaving).judge([list(line) for line in lines])


WHOLE = [BEGIN, ["found", None], *run_of("a", "b", "c"), ["end", "completed", DONE]]


def test_nothing_is_wrong_with_a_run_that_ends_well() -> None:
    step = judged(*WHOLE)
    assert step.broken == []
    assert (step.acks, step.lost, step.repeated, step.extra) == (3, 0, 0, 0)


def test_a_task_that_was_in_flight_may_run_once_more() -> None:
    crash = [["exec", "b", 1, 0.0], ["died", 1, "killed"], ["begin", 2, "resume"]]
    found = ["found", held(a=task("a"), b=task("b", "running"))]
    end = ["end", "completed", held(a=task("a"), b=task("b", attempts=2), c=task("c"))]
    step = judged(BEGIN, *run_of("a"), *crash, found, *run_of("b", "c", pid=2), end)
    assert (step.broken, step.extra) == ([], 1)


RESUME = [["died", 1, "killed"], ["begin", 2, "resume"]]


@pytest.mark.parametrize(
    ("lines", "broken"),
    [
        (WHOLE[:-1], "I9: the run never came to its end"),
        ([*WHOLE, ["died", 1, "hung"]], "I9: process 1 hung and was ended by force"),
        ([*WHOLE, ["raised", 1, "ValueError", "no"]], "I9: a process ended with ValueError: no"),
        ([*WHOLE, ["note", "the roof is gone"]], "I5: the roof is gone"),
        ([*WHOLE[:-1], *run_of("c"), WHOLE[-1]], "I2: c was executed again after it had ended"),
        (
            [BEGIN, *run_of("a"), *RESUME, ["found", held(a=task("a", "running"))]],
            f"I1: a was told as completed {ENDS['a'].result}, the store has running ",
        ),
        ([BEGIN, *run_of("a"), *RESUME, ["found", None]], f"I1: a was told as completed {ENDS['a'].result}, the store"),
        (
            [BEGIN, ["exec", "a", 1, 0.0], *RESUME, ["found", held()]],
            "I4: a was executed 1 times, and 0 starts are stored",
        ),
        (
            [BEGIN, ["exec", "b", 1, 0.0], *RESUME, ["found", held(a=task("a", "running"), b=task("b", "running"))]],
            "I4: b was executed before the end of a was stored",
        ),
        ([BEGIN, ["exec", "a", 1, 0.0], ["exec", "b", 1, 0.0]], "I6: 2 tasks at once, 1 are allowed"),
        ([BEGIN, ["ack", "a", "failed", ""]], f"I5: a was told as failed , not completed {ENDS['a'].result}"),
        ([*WHOLE[:-1], ["end", "failed", DONE]], "I5: the run is told as failed and stored as completed"),
        ([*WHOLE[:-1], ["end", "completed", {**DONE, "owned": True}]], "I5: the run has ended and still has an owner"),
        (
            [*WHOLE[:-1], ["end", "completed", {**DONE, "completions": {"a": 2, "b": 1, "c": 1}}]],
            "I5: a is told to have completed 2 times",
        ),
        (
            [*WHOLE[:-1], ["end", "completed", held(a={**task("a"), "said": ["x"]}, b=task("b"), c=task("c"))]],
            "I5: a has 1 messages, which are not its prompt and its answer",
        ),
        (
            [BEGIN, ["exec", "a", 1, 0.0], ["fail", "a", 1], *WHOLE[2:-1], ["end", "completed", DONE]],
            "I3: a: 1 executions too many, in flight at 0 kills",
        ),
    ],
)
def test_each_broken_promise_is_seen(lines: list[list[Any]], broken: str) -> None:
    assert any(one.startswith(broken) for one in judged(*lines).broken), judged(*lines).broken


def test_who_has_to_leave_has_to_leave() -> None:
    must = {"RunOwned": 1}
    assert judged(*WHOLE, ["raised", 2, "RunOwned", "by 1"], leaving=must).broken == []
    assert judged(*WHOLE, leaving=must).broken == ["I8: 1 processes should have left with RunOwned, and went on"]


@pytest.mark.parametrize(
    ("word", "trial"),
    [
        ("rot-0", Trial(Kind.ROT, 0)),
        ("kills-17-events.published:2", Trial(Kind.KILLS, 17, (Point("events.published", 2),))),
        (
            "kills-3-txn.begun:1-events.published:20",
            Trial(Kind.KILLS, 3, (Point("txn.begun", 1), Point("events.published", 20))),
        ),
    ],
)
def test_a_trial_and_its_word(word: str, trial: Trial) -> None:
    assert (str(trial), parse_trial(word)) == (word, trial)


@pytest.mark.parametrize(
    "word",
    ["", "kills", "kills-", "kills-x", "kills-1-", "kills-1-events.published", "kills-1-events.published:0", "-1"],
)
def test_a_word_that_names_no_trial(word: str) -> None:
    with pytest.raises(ValueError, match=r"names no case|is no failpoint"):
        parse_trial(word)


@pytest.mark.parametrize("word", ["rival-1", "unsure-1"])
def test_a_trial_that_needs_a_place_says_so(word: str) -> None:
    with pytest.raises(ValueError, match=f"'{word}' names no failpoint, and a trial of that kind needs one"):
        parse_trial(word)


def test_every_planted_bug_has_a_name_of_its_own_and_every_known_mistake_a_bug() -> None:
    names = [bug.name for bug in MUTANTS]
    assert len(set(names)) == len(names)
    assert [bug.name for bug in MUTANTS if not hasattr(bug.owner, bug.attribute)] == []
    assert {name for module, name in TO_BE_SEEN.values() if module == "kills"} <= set(names)
    seen = Report(method="kills", unit="kills", cases=1, planted=dict.fromkeys(names, True))
    assert unseen({"kills": seen}) == []
    missed = Report(method="kills", unit="kills", cases=1, planted={**seen.planted, "crashes not counted": False})
    assert unseen({"kills": missed}) == ["crashes not counted"]
