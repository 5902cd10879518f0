"""The problems of tasks that cannot be added: each names the task, the field and the place in the list."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plait import DAG, GrowthLimits, ParallelRunner, Task, TaskStatus
from plait.errors import DAGError, Problem
from plait.events import NewTask
from plait.runner.engine import growth
from plait.runner.engine.live_run import LiveRun
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import SlotPool
from plait.runner.state.run_state import RunState
from tests.support.fakes import Talker

Place = tuple[str | None, str | None, int | None]
GIVEN = [
    Task("x", "x"),
    Task("gone", "gone"),
    Task("m.x.1", "m.x.1"),
    Task("list", "list"),
    Task("many", "{{ item }}", for_each="list"),
]
FINE = Task("fine", "fine")


NOW = "2026-01-01T00:00:00.000Z"


def live_run(runner: ParallelRunner) -> LiveRun:
    run = LiveRun(run_id="r", options=runner.runs.options)
    run.state, run.task_backends = RunState(DAG(GIVEN)), ["fast"] * len(GIVEN)
    run.scheduler = Scheduler(run.state.dag, run.task_backends, SlotPool(9))
    run.stamp = lambda: NOW
    return run


def grow(
    tasks: Sequence[Task],
    *,
    default: str | None = "fast",
    limits: GrowthLimits | None = None,
    added_by: str | None = None,
) -> Sequence[str]:
    """Return the backends of all tasks after `tasks` are added. A refusal leaves everything as it was."""
    backends = dict.fromkeys(("fast", "faster", "deep"), Talker())
    run = live_run(ParallelRunner(backends=backends, default=default, growth=limits or GrowthLimits()))
    dag, names = run.state.dag, run.task_backends
    run.state.cancel(1, "now")
    run.scheduler = Scheduler(dag, names, SlotPool(9), statuses=run.state.statuses)
    try:
        event = growth.add(run, tasks, added_by)
    except DAGError:
        assert (len(dag), names) == (len(GIVEN), ["fast"] * len(GIVEN))
        raise
    assert (event.tasks, event.added_by, event.at) == (tuple(map(NewTask.of, tasks)), added_by, NOW)
    assert len(dag) == len(GIVEN) + len(tasks)
    return names


PROBLEMS: dict[str, tuple[Task, Place, str]] = {
    "unknown backend": (
        Task("a", "a", backend="faast"),
        ("a", "backend", 1),
        "no backend named 'faast'; there are: deep",
    ),
    "another backend than the conversation": (
        Task("a", "a", continues="x", backend="deep"),
        ("a", "backend", 1),
        "continues 'x', which runs on backend 'fast'",
    ),
    "a backend that begins like that of the conversation": (
        Task("a", "a", continues="x", backend="faster"),
        ("a", "backend", 1),
        "continues 'x', which runs on backend 'fast'",
    ),
    "nothing to ask a model": (Task("a", " ", backend="deep"), ("a", "prompt", 1), "there is no prompt; write one"),
    "a cancelled dependency": (
        Task("a", "a", depends_on=["gone"]),
        ("a", "depends_on", 1),
        "depends on 'gone', which was",
    ),
    "a cancelled conversation": (
        Task("a", "a", continues="gone"),
        ("a", "depends_on", 1),
        "depends on 'gone', which was",
    ),
    "the id of a part": (Task("many.2", "many.2"), ("many.2", "id", 1), "reserved for a part of 'many'"),
    "parts with the id of a task": (
        Task("m.x", "{{ item }}", for_each="list"),
        ("m.x", "for_each", None),
        "the run has a task 'm.x.1'",
    ),
    "many conversations": (
        Task("a", "a", continues="many"),
        ("a", "continues", 1),
        "continues 'many', which has for_each",
    ),
}


@pytest.mark.parametrize("why", PROBLEMS)
def test_a_problem_names_its_place(why: str) -> None:
    task, place, message = PROBLEMS[why]
    with pytest.raises(DAGError) as caught:
        grow([FINE, task])
    (problem,) = caught.value.problems
    assert (problem.task_id, problem.field, problem.position) == place
    assert message in problem.message


def test_a_conversation_among_the_added_tasks_stays_on_its_backend() -> None:
    talk = Task("talk", "talk", backend="deep")
    assert grow([talk, Task("on", "on", continues="talk")])[-2:] == ["deep", "deep"]
    with pytest.raises(DAGError, match="continues 'talk', which runs on backend 'deep'"):
        grow([talk, Task("on", "on", continues="talk", backend="fast")])


def test_a_default_that_does_not_exist_is_a_problem_of_each_task() -> None:
    with pytest.raises(DAGError) as caught:
        grow([FINE, Task("a", "a", backend="deep"), Task("b", "b")], default=None)
    assert [(one.task_id, one.field, one.position) for one in caught.value.problems] == [
        ("fine", "backend", 0),
        ("b", "backend", 2),
    ]


def test_the_limits_are_met_exactly() -> None:
    size = len(GIVEN)
    assert len(grow([FINE], limits=GrowthLimits(max_tasks=size + 1))) == size + 1
    assert len(grow([FINE], limits=GrowthLimits(max_depth=1), added_by="x")) == size + 1
    assert len(grow([FINE], limits=GrowthLimits(max_depth=0))) == size + 1
    for limits, says in (
        (GrowthLimits(max_tasks=size), f"1 more tasks would make {size + 1}, and max_tasks is {size}"),
        (GrowthLimits(max_depth=0), "these tasks would be at depth 1, and max_depth is 0"),
    ):
        with pytest.raises(DAGError, match=says) as caught:
            grow([FINE], limits=limits, added_by="x")
        assert [(one.task_id, one.field) for one in caught.value.problems] == [(None, "tasks")]


def test_all_problems_are_told_at_once_after_those_already_found() -> None:
    run = live_run(ParallelRunner(backends={"fast": Talker()}))
    with pytest.raises(DAGError) as caught:
        growth.add(run, [Task("a", backend="b"), Task("c", "c", depends_on=["d"])], None, [Problem("earlier")])
    assert [one.task_id for one in caught.value.problems] == [None, "a", "c"]
    assert run.state.statuses == [TaskStatus.PENDING] * len(GIVEN)
