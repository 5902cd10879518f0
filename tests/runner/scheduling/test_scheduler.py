"""What may start, in which order, under which limits: checked against a plain model on random graphs."""

from __future__ import annotations

import random
import time

import pytest

from plait import DAG, FailureMode, Task, TaskStatus
from plait.runner.scheduling.own_limits import RateGate, RateLimiter, RateLimits
from plait.runner.scheduling.scheduler import RunRates, Scheduler
from plait.runner.scheduling.slots import SlotPool

DONE, FAILED = TaskStatus.COMPLETED, TaskStatus.FAILED


def schedule(dag: DAG, concurrency: int = 99, **limits: int) -> Scheduler:
    return schedule_in(SlotPool(concurrency, limits), dag)


def schedule_in(pool: SlotPool, dag: DAG) -> Scheduler:
    return Scheduler(dag, [task.backend or "default" for task in dag], pool)


def taken(dag: DAG, plan: Scheduler) -> list[str]:
    names: list[str] = []
    while (position := plan.take()) is not None:
        names.append(dag.tasks[position].id)
    return names


def test_the_longest_remaining_path_goes_first_and_ties_go_by_declaration() -> None:
    dag = DAG(
        [
            Task("x", "x"),
            Task("y", "y"),
            Task("long", "long"),
            Task("end", "end", depends_on=["long"]),
            Task("heavy", "heavy", weight=9),
        ]
    )
    assert taken(dag, schedule(dag)) == ["heavy", "long", "x", "y"]


def test_a_task_starts_the_moment_its_own_dependencies_are_done() -> None:
    dag = DAG(
        [
            Task("a", "a"),
            Task("slow", "slow"),
            Task("b", "b", depends_on=["a"]),
            Task("c", "c", depends_on=["b", "slow"]),
        ]
    )
    plan = schedule(dag)
    assert taken(dag, plan) == ["a", "slow"]
    plan.finish(0, DONE)
    assert taken(dag, plan) == ["b"]
    plan.finish(2, DONE)
    assert taken(dag, plan) == []
    plan.finish(1, DONE)
    assert taken(dag, plan) == ["c"]
    assert not plan.exhausted
    plan.finish(3, DONE)
    assert plan.exhausted


def test_limits_hold_overall_and_per_backend() -> None:
    dag = DAG([*[Task(f"d{i}", backend="deep", weight=9) for i in range(3)], *[Task(f"f{i}", "x") for i in range(3)]])
    plan = schedule(dag, concurrency=3, deep=2)
    assert taken(dag, plan) == ["d0", "d1", "f0"]
    plan.finish(3, DONE)
    assert taken(dag, plan) == ["f1"], "a full backend does not hold up the others"
    plan.finish(0, DONE)
    assert taken(dag, plan) == ["d2"]


@pytest.mark.parametrize(
    ("mode", "status", "runs"),
    [
        (FailureMode.HARD, TaskStatus.FAILED, []),
        (FailureMode.SOFT, TaskStatus.FAILED, ["after"]),
        (FailureMode.SKIP, TaskStatus.SKIPPED, ["after"]),
        (FailureMode.HARD, TaskStatus.CANCELLED, []),
    ],
)
def test_failure_modes(mode: FailureMode, status: TaskStatus, runs: list[str]) -> None:
    dag = DAG([Task("first", "first", failure_mode=mode), Task("after", "after", depends_on=["first"])])
    plan = schedule(dag)
    taken(dag, plan)
    plan.finish(0, status)
    assert taken(dag, plan) == runs
    resumed = Scheduler(dag, ["default"] * 2, SlotPool(9), statuses=[status, TaskStatus.PENDING])
    assert taken(dag, resumed) == runs, "a resumed run decides alike"


def test_a_task_with_join_starts_with_the_first_success() -> None:
    dag = DAG([Task("a", "a"), Task("b", "b"), Task("end", "end", ["a", "b"], join="any")])
    plan = schedule(dag)
    assert taken(dag, plan) == ["a", "b"]
    plan.finish(1, DONE)
    assert taken(dag, plan) == ["end"]


def test_a_task_set_aside_frees_its_place_and_keeps_the_run_going() -> None:
    dag = DAG([Task("a", "a"), Task("b", "b")])
    plan = schedule(dag, concurrency=1)
    assert taken(dag, plan) == ["a"]
    plan.set_aside(0)
    assert taken(dag, plan) == ["b"]
    plan.finish(1, DONE)
    assert not plan.exhausted
    plan.requeue(0)
    assert taken(dag, plan) == ["a"]


def test_the_run_goes_on_while_another_task_is_set_aside() -> None:
    dag = DAG([Task("a", "a"), Task("b", "b")])
    plan = schedule(dag)
    assert taken(dag, plan) == ["a", "b"]
    plan.set_aside(0)
    plan.set_aside(1)
    plan.requeue(0)
    assert taken(dag, plan) == ["a"]
    plan.finish(0, DONE)
    assert not plan.exhausted
    plan.requeue(1)
    assert taken(dag, plan) == ["b"]
    plan.finish(1, DONE)
    assert plan.exhausted


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_graphs_run_to_the_end_within_limits_and_in_order(first: int) -> None:
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        size, concurrency = rng.randrange(1, 40), rng.randrange(1, 6)
        tasks = [
            Task(
                f"t{i}",
                "x",
                depends_on=[f"t{d}" for d in rng.sample(range(i), min(i, rng.randrange(4)))],
                backend=rng.choice(["one", "two", None]),
                failure_mode=rng.choice(list(FailureMode)),
            )
            for i in range(size)
        ]
        dag = DAG(tasks)
        plan = schedule(dag, concurrency, one=rng.randrange(1, 3))
        ended: dict[str, TaskStatus] = {}
        going: list[int] = []
        while True:
            while (position := plan.take()) is not None:
                task = dag.tasks[position]
                assert task.id not in ended, seed
                assert all(passes(dag[d], ended.get(d)) for d in task.depends_on), seed
                going.append(position)
            assert len(going) <= concurrency, seed
            if not going:
                break
            position = going.pop(rng.randrange(len(going)))
            status = FAILED if rng.random() < 0.2 else DONE
            ended[dag.tasks[position].id] = status
            plan.finish(position, status)
        assert plan.exhausted, seed
    left = [task for task in dag if task.id not in ended]
    assert all(any(not passes(dag[d], ended.get(d)) for d in task.depends_on) for task in left)


def passes(task: Task, status: TaskStatus | None) -> bool:
    return status is DONE or (status is FAILED and task.failure_mode is not FailureMode.HARD)


def test_what_is_dropped_is_never_given_out_and_does_not_keep_the_run_from_its_end() -> None:
    dag = DAG(
        [
            Task("heavy", "heavy", weight=9),
            Task("list", "list"),
            *[Task(name, "x") for name in "abc"],
            Task("each", "each", for_each="list"),
        ]
    )
    plan = schedule(dag, concurrency=1)
    for position in (2, 0, 4):
        plan.drop(position)
    assert taken(dag, plan) == ["list"]
    plan.finish(1, DONE)
    assert taken(dag, plan) == ["b"]
    assert not plan.exhausted
    plan.finish(3, DONE)
    assert not plan.exhausted, "the task with for_each is to be unfolded"
    plan.drop(5)
    assert (plan.take_slotless(), plan.take(), plan.exhausted) == (None, None, True)


def test_what_is_at_work_already_holds_places_even_more_than_there_are() -> None:
    dag = DAG(
        [*(Task(f"old{i}", backend="deep") for i in range(3)), Task("new", backend="deep"), Task("other", "other")]
    )
    names, running = ["deep"] * 4 + ["default"], [TaskStatus.RUNNING] * 3 + [TaskStatus.PENDING] * 2
    plan = Scheduler(dag, names, SlotPool(2, {"deep": 1}), statuses=running, held=[0, 1, 2])
    assert (taken(dag, plan), plan.exhausted) == ([], False)
    plan.finish(0, DONE)
    assert taken(dag, plan) == [], "two are at work, and two may be"
    plan.finish(1, DONE)
    assert taken(dag, plan) == ["other"], "one is at work on deep, and one may be"
    plan.finish(2, DONE)
    assert taken(dag, plan) == ["new"]
    plan.finish(3, DONE)
    plan.finish(4, DONE)
    assert plan.exhausted


def test_added_tasks_keep_to_the_limits_of_their_backends() -> None:
    dag = DAG([Task("first", "first")])
    plan = schedule(dag, deep=1)
    dag.extend([Task("d1", "d1"), Task("f1", "f1"), Task("d2", "d2"), Task("f2", "f2", depends_on=["first"])])
    plan.extend(["deep", "default", "deep", "default"], [TaskStatus.PENDING] * 5)
    assert taken(dag, plan) == ["first", "d1", "f1"]
    plan.finish(1, DONE)
    assert taken(dag, plan) == ["d2"]
    plan.finish(0, DONE)
    assert taken(dag, plan) == ["f2"]


def test_what_is_tried_again_later_is_set_aside_unless_it_has_to_wait_anyway() -> None:
    dag = DAG(
        [
            Task("later", "later"),
            Task("after", "after", depends_on=["first"]),
            Task("first", "first"),
            Task("done", "done"),
        ]
    )
    statuses = [TaskStatus.PENDING] * 3 + [DONE]
    plan = Scheduler(dag, ["default"] * 4, SlotPool(9), statuses=statuses, later=[0, 1, 3])
    assert (plan.later, taken(dag, plan)) == ([0], ["first"])
    plan.finish(2, DONE)
    assert taken(dag, plan) == ["after"]
    plan.finish(1, DONE)
    assert not plan.exhausted
    plan.requeue(0)
    assert taken(dag, plan) == ["later"]
    plan.finish(0, DONE)
    assert plan.exhausted


def test_dropping_takes_no_longer_where_much_is_eligible() -> None:
    """Ten times as many take ten times as long, not a hundred times."""

    def dropped(count: int) -> float:
        dag = DAG([Task(f"t{number}", "x") for number in range(count)])
        plan = schedule(dag)
        began = time.process_time()
        for position in reversed(range(count)):
            plan.drop(position)
        assert plan.exhausted
        return time.process_time() - began

    assert min(dropped(8_000) for _ in range(3)) < 40 * max(min(dropped(800) for _ in range(3)), 1e-3)


def test_each_attempt_takes_the_share_of_its_own_prompt() -> None:
    gate = RateGate(RateLimiter(RateLimits(tokens_per_minute=6e9), 0.0), lambda: 0.0)
    rates, sizes = RunRates("run", dict), [10, 1000]
    rates.size_of = lambda _position: sizes.pop(0)
    shares: list[int] = []
    for _ in range(2):
        assert rates.admitted(gate, 0)
        rates.reserve(gate, 0)
        shares.append(rates.reserved[0][1].characters)
        rates.settle(0, 5, 5)
    assert shares == [10, 1000]


def test_a_conversation_that_goes_on_comes_before_new_ones() -> None:
    tasks = [
        Task("talk", "p"),
        Task("long", "p", weight=9),
        Task("asks", "p", weight=0.1),
        Task("more", "p", continues="talk", weight=0.1),
        Task("last", "p"),
    ]
    scheduler = Scheduler(DAG(tasks), ["x"] * 5, SlotPool(1))
    order: list[int | None] = [scheduler.take()]
    scheduler.finish(1, TaskStatus.COMPLETED)
    order.append(scheduler.take())
    scheduler.finish(0, TaskStatus.COMPLETED)
    order.append(scheduler.take())
    assert order == [1, 0, 3], "before the longer path of the last one"
    scheduler.finish(3, TaskStatus.COMPLETED)
    assert scheduler.take() == 4
    scheduler.finish(4, TaskStatus.COMPLETED)
    assert scheduler.take() == 2


def test_a_task_whose_question_was_answered_goes_on_before_new_ones() -> None:
    tasks = [Task("asks", "p"), Task("first", "p"), Task("new", "p", "first", weight=9)]
    scheduler = Scheduler(DAG(tasks), ["x"] * 3, SlotPool(2))
    assert (scheduler.take(), scheduler.take()) == (1, 0)
    scheduler.park(0)
    scheduler.finish(1, TaskStatus.COMPLETED)
    scheduler.unpark(0, [TaskStatus.PENDING] * 3)
    assert (scheduler.take(), scheduler.take()) == (0, 2)
