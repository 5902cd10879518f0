"""`Task(join=..., race=...)`: tasks that start with the first success, or once everything has ended somehow."""

from __future__ import annotations

import random
from dataclasses import replace

import anyio
import pytest

from plait import DAG, ParallelRunner, RunResult, RunStatus, Task, TaskStatus
from plait.errors import DAGError, PlaitError
from plait.persistence import MemoryStore, Store
from plait.results import ResumeAction
from plait.runner.domain.wait_reasons import WaitKind, Waits
from plait.runner.recovery.resume_plan import plan_resume
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import SlotPool
from plait.task import Call, Join, Mode, may_start
from tests.support.crashed import Dying, die
from tests.support.fakes import Talker


class Answers:
    """A backend that answers with the prompt in brackets; fails for `bad ...`, and never ends for `slow ...`."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.cancelled: list[str] = []

    async def __call__(self, prompt: str) -> str:
        self.made.append(prompt)
        if prompt.startswith("bad"):
            raise PlaitError("bad")
        if prompt.startswith("slow"):
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled.append(prompt)
        return f"<{prompt}>"


async def run(answers: Answers, *tasks: Task, store: Store | None = None, concurrency: int = 8) -> RunResult:
    with anyio.fail_after(60):
        return await ParallelRunner(answers, store=store, concurrency=concurrency).run(DAG(tasks), "r")


def statuses(result: RunResult) -> str:
    """The first letters of the statuses; x for cancelled."""
    return "".join("x" if each.status == "cancelled" else each.status[0] for each in result.tasks.values())


async def test_the_first_success_starts_the_task_and_the_others_go_on() -> None:
    answers, go = Answers(), anyio.Event()

    async def backend(prompt: str) -> str:
        if prompt == "b":
            await go.wait()
        if prompt.startswith("t"):
            go.set()
        return await answers(prompt)

    tasks = Task("a", "a"), Task("b", "b"), Task("t", "t {{ a }}|{{ b }}", ["a", "b"], join="any")
    with anyio.fail_after(60):
        result = await ParallelRunner(backend).run(DAG(tasks))
    assert answers.made == ["a", "t <a>|", "b"]
    assert result.status is RunStatus.COMPLETED


async def test_a_failure_is_no_success_and_the_task_waits_for_the_next() -> None:
    answers = Answers()
    a, b = Task("a", "bad", failure_mode="skip"), Task("b", "b", ["a"])
    result = await run(answers, a, b, Task("t", "t {{ a }}|{{ b }}", ["a", "b"], join="any"))
    assert answers.made == ["bad", "b", "t |<b>"]
    assert statuses(result) == "scc"


@pytest.mark.parametrize(("mode", "ends"), [("soft", "ffc"), ("skip", "ssc"), ("hard", "ffp")])
async def test_without_any_success_it_is_as_with_all(mode: str, ends: str) -> None:
    tasks = [Task(name, "bad", failure_mode=mode) for name in "ab"]  # type: ignore[arg-type]
    result = await run(Answers(), *tasks, Task("t", "t{{ a }}", ["a", "b"], join="any"))
    assert statuses(result) == ends


async def test_a_race_cancels_the_others_and_what_only_serves_them() -> None:
    answers, store = Answers(), MemoryStore()
    tasks = [
        Task("shared", "shared"),
        Task("slow", "slow", ["shared"]),
        Task("up", "slow up"),
        Task("behind", "behind {{ up }}", ["up"]),
        Task("quick", "quick", ["shared"]),
        Task("t", "t {{ slow }}{{ behind }}{{ quick }}", ["slow", "behind", "quick"], join="any", race=True),
        Task("other", "other", ["shared"]),
    ]
    result = await run(answers, *tasks, store=store)
    assert statuses(result) == "cxxxccc"
    assert sorted(answers.cancelled) == ["slow", "slow up"]
    assert "t <quick>" in answers.made
    assert result.status is RunStatus.COMPLETED
    (attempt,) = await store.list_attempts("r", "slow")
    assert attempt.status == "cancelled"


@pytest.mark.parametrize("until", [None, "{{ t }} != ''"])
async def test_a_race_in_a_called_plan_or_a_round_cancels_its_losers(until: str | None) -> None:
    answers = Answers()
    tasks = [
        Task("up", "slow up"),
        Task("slow", "slow", depends_on="up"),
        Task("quick", "quick"),
        Task("t", "t", depends_on=["slow", "quick"], join="any", race=True),
    ]
    result = await run(answers, Task("c", call=Call(tasks, until=until)), Task("end", "end {{ c.t }}", ["c"]))
    assert statuses(result) == "ccxxcc"
    assert answers.made[-1] == "end <t>"
    assert result.status is RunStatus.COMPLETED


async def test_samples_of_a_race_and_other_races_that_are_won_cancel_its_losers() -> None:
    answers, before = Answers(), ["slow", "quick"]
    tasks = [
        Task("slow", "slow"),
        Task("quick", "quick"),
        Task("t", "t", before, join="any", race=True, repeat=2),
        Task("u", "u", before, join="any", race=True),
    ]
    result = await run(answers, *tasks)
    assert result["slow"].status is TaskStatus.CANCELLED
    assert result.status is RunStatus.COMPLETED


async def test_a_race_leaves_what_others_need() -> None:
    answers, go = Answers(), anyio.Event()

    async def backend(prompt: str) -> str:
        if prompt == "a":
            await go.wait()
        if prompt == "t":
            go.set()
        return await answers(prompt)

    tasks = [Task("a", "a"), Task("b", "b"), Task("t", "t", ["a", "b"], join="any", race=True), Task("z", "z", ["a"])]
    with anyio.fail_after(60):
        result = await ParallelRunner(backend).run(DAG(tasks))
    assert statuses(result) == "cccc"


async def test_a_race_cancels_a_retry_a_question_and_a_list() -> None:
    answers = Answers()
    items = Task("items", "items", output_schema={"type": "array"})

    async def backend(prompt: str) -> object:
        if prompt == "items":
            return ["slow 1", "slow 2"]
        if prompt == "last":
            await anyio.wait_all_tasks_blocked()
        if prompt == "flaky":
            raise ConnectionError
        return await answers(prompt)

    tasks = [
        items,
        Task("each", "{{ item }}", for_each="items"),
        Task("flaky", "flaky", retry=5),
        Task("last", "last", ["items"]),
        Task("t", "t", ["each", "flaky", "last"], join="any", race=True),
    ]
    with anyio.fail_after(60):
        result = await ParallelRunner(backend).run(DAG(tasks))
    assert {name: result[name].status.value for name in ("each", "each.1", "flaky", "last", "t")} == {
        "each": "cancelled", "each.1": "cancelled", "flaky": "cancelled", "last": "completed", "t": "completed",
    }  # fmt: skip


async def test_with_done_the_task_starts_once_all_have_ended_or_can_never_start() -> None:
    answers = Answers()
    tasks = [
        Task("a", "bad", retry=0),
        Task("b", "b {{ a }}", ["a"]),
        Task("c", "c"),
        Task("clean", "clean {{ b }}|{{ c }}", ["b", "c"], join="done"),
    ]
    result = await run(answers, *tasks)
    assert answers.made == ["bad", "c", "clean |<c>"]
    assert (statuses(result), result.status) == ("fpcc", RunStatus.FAILED)


async def test_a_resume_goes_on_with_the_results_of_the_start() -> None:
    store = MemoryStore()
    tasks = [Task("a", "a"), Task("slow", "wait"), Task("t", "t {{ a }}|{{ slow }}", ["a", "slow"], join="any")]
    assert not await die(store, Dying(lambda prompt: prompt != "a", lambda prompt: prompt != "a"), DAG(tasks))
    dag, records = DAG(tasks), await store.list_tasks("r")
    actions = [step.action for step in plan_resume(dag, records)]
    assert actions == [ResumeAction.KEEP, ResumeAction.CONTINUE, ResumeAction.CONTINUE]
    result = await ParallelRunner(Talker(), store=store).resume("r")
    assert statuses(result) == "ccc"
    (prompt, *_) = await store.list_messages("r", "t")
    assert prompt.content == f"t {result['a'].text}|"


@pytest.mark.parametrize(("race", "made"), [(False, ["t"]), (True, [])])
async def test_like_takes_an_answer_only_where_time_decided_nothing(race: bool, made: list[str]) -> None:
    store, answers = MemoryStore(), Answers()
    tasks = [Task("a", "a"), Task("b", "b"), Task("t", "t", ["a", "b"], join="any", race=race)]
    for run_id, like in (("r", None), ("again", "r")):
        answers.made.clear()
        with anyio.fail_after(60):
            await ParallelRunner(answers, store=store, concurrency=1).run(DAG(tasks), run_id, like=like)
    assert answers.made == made


async def test_behind_a_join_a_name_further_upstream_may_have_no_result() -> None:
    answers, store = Answers(), MemoryStore()
    tasks = [
        Task("a", "bad", retry=0),
        Task("clean", "clean", ["a"], join="done"),
        Task("end", "end {{ a }}|{{ clean }}", ["clean"]),
    ]
    result = await run(answers, *tasks, store=store)
    assert (statuses(result), answers.made[-1]) == ("fcc", "end |<clean>")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("t", "t", ["a"], join="some"), "join must be all, any or done, not 'some'"),  # type: ignore[arg-type]
        (Task("t", "t", ["a"], race=True), "write `join: any` beside it"),
        (Task("t", "t", ["a"], join="done", race=True), "write `join: any` beside it"),
        (Task("t", "t", join="any"), "name tasks in depends_on"),
        (Task("t", "t", ["b"], for_each="a", join="done"), "leave `join` out"),
        (Task("t", "t", ["b"], continues="a", join="any"), "in place of continues"),
    ],
)
def test_mistakes(task: Task, message: str) -> None:
    with pytest.raises(DAGError, match=message):
        DAG([Task("a", "a"), Task("b", "b"), task])


def random_joins(rng: random.Random) -> list[Task]:
    tasks: list[Task] = []
    for number in range(rng.randint(3, 12)):
        before = rng.sample([task.id for task in tasks], rng.randint(0, min(number, 4)))
        join: Join = rng.choice(["all", "all", "any", "done"]) if before else "all"
        mode: Mode = rng.choice(["hard", "hard", "soft", "skip"])
        race = join == "any" and rng.random() < 0.4
        tasks.append(Task(f"t{number}", "x", before, join=join, race=race, failure_mode=mode))
    return tasks


class Oracle:
    """What may run in a graph without races, by the ends of its tasks: worked out anew from nothing at each look."""

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = {task.id: task for task in tasks}
        self.ends: dict[str, TaskStatus] = {}

    def outlook(self, name: str) -> str:
        task, end = self.tasks[name], self.ends.get(name)
        if end is TaskStatus.COMPLETED:
            return "good"
        if end is TaskStatus.SKIPPED or (end is TaskStatus.FAILED and task.failure_mode == "soft"):
            return "passes"
        if end is not None:
            return "dead"
        return "dead" if self.starts(name) is False else "open"

    def starts(self, name: str) -> bool | None:
        task = self.tasks[name]
        outlooks = [self.outlook(each) for each in task.depends_on]
        if task.join == "any" and "good" in outlooks:
            return True
        if task.join == "all" and "dead" in outlooks:
            return False
        if "open" in outlooks:
            return None
        return task.join == "done" or "dead" not in outlooks


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_scheduler_agrees_with_an_oracle_on_random_graphs(first: int) -> None:
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        tasks = [replace(task, race=False) for task in random_joins(rng)]
        dag, oracle, started = DAG(tasks), Oracle(tasks), set[str]()
        scheduler = Scheduler(dag, ["default"] * len(dag), SlotPool(99, {}))
        while True:
            taken = set[str]()
            while (position := scheduler.take()) is not None:
                taken.add(dag.tasks[position].id)
            assert taken == {task.id for task in tasks if oracle.starts(task.id)} - started, seed
            started |= taken
            if not (under_way := sorted(started - oracle.ends.keys())):
                break
            name = rng.choice(under_way)
            failed = TaskStatus.SKIPPED if oracle.tasks[name].failure_mode == "skip" else TaskStatus.FAILED
            end = rng.choice([TaskStatus.COMPLETED, TaskStatus.COMPLETED, failed, TaskStatus.CANCELLED])
            oracle.ends[name] = end
            scheduler.finish(dag.position(name), end)
            known = {task.id: oracle.ends.get(task.id, TaskStatus.PENDING) for task in tasks}
            waits = Waits(0.0, RunStatus.RUNNING, dag, known)
            for task in tasks:
                if known[task.id] is TaskStatus.PENDING:
                    reason = waits.reason(task.id)
                    assert reason is not None, seed
                    kind = {True: WaitKind.SLOT, False: WaitKind.BLOCKED, None: WaitKind.UPSTREAM}[
                        oracle.starts(task.id)
                    ]
                    assert reason.kind is kind, (seed, task.id, reason)
            if rng.random() < 0.3:  # another process goes on from what is stored
                held = [dag.position(each) for each in started - oracle.ends.keys()]
                stored = [TaskStatus.RUNNING if p in held else known[task.id] for p, task in enumerate(tasks)]
                scheduler = Scheduler(dag, ["default"] * len(dag), SlotPool(99, {}), statuses=stored, held=held)
        assert scheduler.exhausted, seed


def test_may_start() -> None:
    assert may_start("all", completed=1, unended=0, dead=0) is True
    assert may_start("any", completed=0, unended=0, dead=1) is False
    assert may_start("done", completed=0, unended=1, dead=1) is None
