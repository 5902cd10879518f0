"""`Task(when=...)`: a task with a false condition is skipped, and its dependents go on as after a skip."""

from __future__ import annotations

import pytest

from plait import DAG, ParallelRunner, RunResult, RunStatus, Task
from plait.errors import DAGError
from plait.persistence import MemoryStore, SQLiteStore, Store
from tests.support.fakes import Calls
from tests.support.sizes import size

OBJECT = {"type": "object"}


async def run(calls: Calls, *tasks: Task, store: Store | None = None) -> RunResult:
    return await ParallelRunner(calls, store=store).run(DAG(tasks), "r")


REVIEW = Task("review", "review", output_schema=OBJECT)


async def test_a_task_runs_if_its_condition_is_true_and_is_skipped_otherwise() -> None:
    calls, store = Calls(review={"ok": False}), MemoryStore()
    fix = Task("fix", "fix", ["review"], when="{{ review.data.ok }} == false")
    ship = Task("ship", "ship", ["review"], when="{{ review.data.ok }}")
    result = await run(calls, REVIEW, fix, ship, store=store)
    assert calls.made == ["review", "fix"]
    assert (result.status, result["fix"].text) == (RunStatus.COMPLETED, "<fix>")
    skipped = result["ship"]
    assert (skipped.status, skipped.error_kind, skipped.text) == ("skipped", "condition", "")
    assert skipped.error == "{{ review.data.ok }} is false"
    (attempt,) = await store.list_attempts("r", "ship")
    assert (attempt.backend, attempt.status, attempt.error) == ("when", "skipped", skipped.error)


@pytest.mark.parametrize("mode", ["hard", "soft", "skip"])
async def test_dependents_of_a_skipped_task_run_whatever_its_failure_mode(mode: str) -> None:
    calls = Calls()
    a = Task("a", "a", when="false", failure_mode=mode)  # type: ignore[arg-type]
    last = Task("c", "after {{ a }}{{ b }}.", ["b"])
    result = await run(calls, a, Task("b", "b {{ a }}", ["a"]), last)
    assert calls.made == ["b ", "after <b >."]
    assert result.status is RunStatus.COMPLETED


async def test_a_condition_over_a_skipped_task_is_false_and_a_whole_branch_is_skipped() -> None:
    calls = Calls(review={"ok": True})
    fix = Task("fix", "fix", ["review"], when="not {{ review.ok }}", output_schema=OBJECT)
    again = Task("again", "again", ["fix"], when="{{ fix.data.score }} < 3 or {{ fix.ok }} == true")
    result = await run(calls, REVIEW, fix, again, Task("end", "end", ["again"]))
    assert calls.made == ["review", "end"]
    assert [result[name].status for name in ("fix", "again")] == ["skipped", "skipped"]


@pytest.mark.parametrize(
    "prompt",
    [
        "after {{ fix.note }}{{ fix.data.score }}.",
        'after {{ results["fix"].note }}.',
        "after {% for one in fix.notes %}- {{ one }}{% endfor %}.",
        "after {{ fix.note | upper }}.",
    ],
)
async def test_a_field_of_a_skipped_task_renders_as_an_empty_text(prompt: str) -> None:
    calls = Calls()
    fix = Task("fix", "fix", when="false", output_schema=OBJECT)
    assert (await run(calls, fix, Task("end", prompt, ["fix"]))).status is RunStatus.COMPLETED
    assert calls.made == ["after ."]


async def test_a_condition_that_cannot_be_evaluated_fails_the_task() -> None:
    calls = Calls(review={"okay": False})
    hard = Task("hard", "hard", ["review"], when="{{ review.ok }}")
    soft = Task("soft", "soft", ["review"], when="{{ review }}", failure_mode="soft")
    result = await run(calls, REVIEW, hard, soft, Task("x", "x", ["hard"]), Task("y", "y", ["soft"]))
    assert calls.made == ["review", "y"]
    assert (result["hard"].status, result["hard"].error_kind) == ("failed", "invalid_request")
    assert result["hard"].error == (
        "the condition {{ review.ok }} cannot be evaluated: review has no field 'ok'; it has okay"
    )
    assert "neither true nor false" in (result["soft"].error or "")
    assert result["x"].status == "pending"


async def test_each_part_of_a_for_each_has_its_condition() -> None:
    calls = Calls(list=[1, 2, 3])
    tasks = [
        Task("list", "list", output_schema={"type": "array"}),
        Task("part", "part {{ item }}", for_each="list", when="{{ item }} != 2"),
        Task("next", "next {{ item }} {{ part }}", ["part"], for_each="list", when="{{ part }} != ''"),
        Task("end", "{{ next }}", ["next"]),
    ]
    result = await run(calls, *tasks)
    assert sorted(calls.made[1:-1]) == ["next 1 <part 1>", "next 3 <part 3>", "part 1", "part 3"]
    assert calls.made[-1] == '["<next 1 <part 1>>", "", "<next 3 <part 3>>"]'
    assert result["part.2"].error == "{{ item }} != 2 is false"
    assert result["part"].status == "completed"


async def test_a_condition_is_decided_once_for_all_attempts_of_a_task() -> None:
    class Fails(Calls):
        async def __call__(self, prompt: str) -> object:
            await super().__call__(prompt)
            if self.made.count("b") < 3 and prompt == "b":
                raise ConnectionError("away")
            return "done"

    calls, store = Fails(), MemoryStore()
    b = Task("b", "b", ["a"], when="{{ a }} == 'done'", retry=2)
    with_delay = ParallelRunner(calls, store=store)
    result = await with_delay.run(DAG([Task("a", "a"), b]), "r")
    assert (result["b"].text, result["b"].attempts) == ("done", 3)
    assert [one.backend for one in await store.list_attempts("r", "b")] == ["default"] * 3


LONG = size(1100, 2000)
"""More than Python calls functions within each other."""


@pytest.mark.slow
async def test_conditions_need_no_slot_and_long_chains_of_skips_end() -> None:
    first = [Task("t0", "t0", when="false")]
    more = [Task(f"t{n}", "t", [f"t{n - 1}"], when=f"{{{{ t{n - 1} }}}} == 'x'") for n in range(1, LONG)]
    calls = Calls()
    result = await ParallelRunner(calls, concurrency=1).run(DAG([*first, *more, Task("end", "end", [f"t{LONG - 1}"])]))
    assert (calls.made, result.status) == (["end"], RunStatus.COMPLETED)


async def test_a_conversation_of_a_skipped_task_is_not_continued() -> None:
    calls = Calls()
    result = await run(calls, Task("a", "a", when="false"), Task("b", "b", continues="a"))
    assert (calls.made, result["b"].text) == (["b"], "<b>")


async def test_a_condition_is_part_of_the_key_of_an_answer() -> None:
    calls, store = Calls(), MemoryStore()
    runner = ParallelRunner(calls, store=store)
    await runner.run(DAG([Task("a", "a"), Task("b", "b", ["a"], when="{{ a }} == '<a>'")]), "first")
    calls.made.clear()
    same = DAG([Task("a", "a"), Task("b", "b", ["a"], when="{{ a }} == '<a>'")])
    await runner.run(same, "same", like="first")
    assert calls.made == []
    await runner.run(DAG([Task("a", "a"), Task("b", "b", ["a"], when="{{ a }} != ''")]), "other", like="first")
    assert calls.made == ["b"]
    calls.made.clear()
    off = await runner.run(DAG([Task("a", "a"), Task("b", "b", ["a"], when="false")]), "off", like="first")
    assert (calls.made, off["b"].status) == ([], "skipped")


async def test_a_failed_condition_is_decided_again_with_retry_failed(tmp_path: object) -> None:
    class Later(Calls):
        async def __call__(self, prompt: str) -> object:
            await super().__call__(prompt)
            if prompt != "a":
                return "x"
            if self.made.count("a") == 1:
                raise ValueError("no")
            return {"ok": True}

    calls, store = Later(), MemoryStore()
    a = Task("a", "a", failure_mode="soft", output_schema=OBJECT)
    runner = ParallelRunner(calls, store=store)
    first = await runner.run(DAG([a, Task("b", "b", ["a"], when="{{ a | length }} == 1 and {{ a.ok }} or 3")]), "r")
    assert first["b"].status == "failed"
    again = await runner.resume("r", retry_failed=True)
    assert (calls.made, again["b"].text) == (["a", "a", "b"], "x")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("b", "b", ["a"], when="{{ aa }} == 1"), "the condition uses {{ aa }}, which is neither a task nor an"),
        (Task("b", "b", when="{{ a }} == 1"), "the condition uses {{ a }}, but 'a' is not upstream; add it to depends"),
        (Task("b", "b", when="{{ b }} == 1"), "the condition uses {{ b }}, the result of its own task"),
        (Task("b", "b", when="{{ c }} == 1"), "the condition uses {{ c }}, but 'c' depends on this task; reverse one"),
        (Task("b", "b", when="{{ item }} == 1"), "{{ item }} has a value only in a task with for_each"),
        (Task("b", "b", when=True), "when must be a condition in text, not True"),  # type: ignore[arg-type]
        (Task("b", "b", when="{{ inputs.x }}"), "unknown input 'x'"),
    ],
)
def test_a_wrong_condition_is_refused_by_the_graph(task: Task, message: str) -> None:
    with pytest.raises(DAGError) as caught:
        DAG([Task("a", "a"), task, Task("c", "c", ["b"])])
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.field == "when"


async def test_the_graph_of_a_stored_run_has_its_conditions(tmp_path: object) -> None:
    store = SQLiteStore(f"{tmp_path}/plait.db")
    async with store:
        await run(Calls(), Task("a", "a", when="false"), store=store)
        (record,) = await store.list_tasks("r")
        assert (record.spec, record.status) == ('{"when":"false"}', "skipped")
