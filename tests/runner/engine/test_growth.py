"""Replies that add tasks: what is added runs like what was there, with any store and with none."""

from __future__ import annotations

from pathlib import Path

from plait import DAG, ParallelRunner, RunStatus, Task, TaskStatus, events
from plait.backends.backend_protocol import Reply
from plait.persistence import MemoryStore, SQLiteStore, Store
from tests.support.growth import Recording, listed, plan, spec, talker


async def test_a_planner_function_adds_tasks_that_depend_on_old_and_new_ones(kept: Store | None) -> None:
    async def work(prompt: str) -> object:
        if prompt == "plan":
            return [
                spec("c", "c {{ b }} {{ old }}", depends_on=["b", "old"]),
                spec("b", "b {{ plan }}", depends_on="plan"),
                spec("a"),
            ]
        return f"<{prompt[:8]}>" if prompt.startswith("b") else f"<{prompt}>"

    dag = DAG([Task("old", prompt="old"), Task("plan", prompt="plan", depends_on=["old"], adds_tasks=True)])
    result = await ParallelRunner(work, store=kept).run(dag)
    assert result.status is RunStatus.COMPLETED
    assert list(result.tasks) == ["old", "plan", "c", "b", "a"]
    assert result.text["c"] == "<c <b [{" + '"id"> <old>>'
    assert result.text["a"] == "<a>"


async def test_a_planner_with_a_schema_answers_with_a_mapping(kept: Store | None) -> None:
    schema = {"type": "object", "properties": {"tasks": {"type": "array"}, "why": {"type": "string"}}}

    async def work(prompt: str) -> object:
        return {"why": "so", "tasks": [spec("a")]} if prompt == "plan" else prompt.upper()

    planner = Task("plan", prompt="plan", adds_tasks=True, output_schema=schema)
    after = Task("after", prompt="{{ plan.why }}", depends_on=["plan"])
    result = await ParallelRunner(work, store=kept).run(DAG([planner, after]))
    assert result.status is RunStatus.COMPLETED
    assert (result.text["a"], result.text["after"]) == ("A", "SO")


async def test_a_reply_of_any_backend_adds_tasks(kept: Store | None) -> None:
    more = (spec("d", "d {{ a }}", depends_on=["a"], failure_mode="soft", weight=2), spec("e"))
    backend = talker({"a": Reply("planned", tasks=more)})
    result = await ParallelRunner(backend, store=kept).run(DAG([Task("a", prompt="a")]))
    assert result.text == {"a": "planned", "d": "<d planned>", "e": "<e>"}


async def test_tasks_of_an_answer_and_of_a_reply_come_together() -> None:
    backend = talker({"a": Reply(plan(spec("c")), tasks=(spec("b"),))})
    result = await ParallelRunner(backend).run(DAG([Task("a", prompt="a", adds_tasks=True)]))
    assert list(result.tasks) == ["a", "b", "c"]


async def test_added_tasks_add_tasks_in_turn(kept: Store | None) -> None:
    backend = talker(
        {"one": plan(spec("two", output="tasks")), "two": plan(spec("three", output="tasks")), "three": "[]"}
    )
    result = await ParallelRunner(backend, store=kept).run(DAG([Task("one", prompt="one", adds_tasks=True)]))
    assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["one", "two", "three"])


async def test_an_answer_without_tasks_adds_none(kept: Store | None) -> None:
    result = await ParallelRunner(talker({"a": '{"tasks": []}'}), store=kept).run(
        DAG([Task("a", prompt="a", adds_tasks=True)])
    )
    assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["a"])


async def test_added_tasks_have_all_that_a_plan_file_gives_a_task() -> None:
    flaky = spec("b", retry={"attempts": 1}, failure_mode="skip", backend="other")
    after = spec("c", "[{{ b }}]", depends_on=["b"], metadata={"role": "x"})
    main, other = talker({"a": plan(flaky, after)}), talker({"b": ValueError("no")})
    runner = ParallelRunner(main, backends={"other": other})
    result = await runner.run(DAG([Task("a", prompt="a", adds_tasks=True)]))
    assert result["b"].status is TaskStatus.SKIPPED
    assert (result.text["c"], len(other.prompts)) == ("<[]>", 1)
    assert main.requests[-1].metadata == {"role": "x"}


async def test_an_added_task_goes_on_with_the_conversation_of_one_that_is_done(kept: Store | None) -> None:
    """Nobody knew that `old` would be continued when it completed: it is read back from the store."""
    backend = talker({"plan": plan(spec("next", continues="old"), spec("again", continues="plan"))})
    dag = DAG([Task("old", prompt="old"), Task("plan", prompt="plan", depends_on=["old"], adds_tasks=True)])
    await ParallelRunner(backend, store=kept).run(dag)
    by_task = {request.idempotency_key.partition(":")[2]: request for request in backend.requests}
    assert by_task["next"].resume
    assert by_task["next"].session_id == "session-1"
    assert [message.content for message in by_task["next"].history] == ["old", "<old>"]
    assert [message.content for message in by_task["again"].history][:1] == ["plan"]


async def test_the_same_after_a_resume(store: Store) -> None:
    backend = talker({"plan": plan(spec("next", continues="old")), "next": ValueError("not now")})
    dag = DAG([Task("old", prompt="old"), Task("plan", prompt="plan", depends_on=["old"], adds_tasks=True)])
    first = await ParallelRunner(backend, store=store).run(dag)
    assert first.status is RunStatus.FAILED
    backend = talker()
    result = await ParallelRunner(backend, store=store).resume(first.run_id, retry_failed=True)
    assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["next"])
    assert [message.content for message in backend.requests[0].history] == ["old", "<old>"]


async def test_the_dag_that_somebody_holds_never_changes() -> None:
    dag = DAG(
        [
            Task("a", prompt="a", adds_tasks=True),
            Task("m", prompt="m {{ item }}", for_each="list"),
            Task("list", prompt="list"),
        ]
    )
    answers = {"a": plan(spec("b", depends_on=["list"])), "list": listed([1, 2])}
    for _ in range(2):
        result = await ParallelRunner(talker(answers)).run(dag)
        assert (result.status, len(result.tasks)) == (RunStatus.COMPLETED, 6)
    assert [task.id for task in dag] == ["a", "m", "list"]
    assert "b" not in dag
    assert (dag.dependencies, dag.dependents, dag.order) == ([(), (2,), ()], [(), (), (1,)], [0, 2, 1])
    assert dag.critical_path() == ["list", "m"]


async def test_tasks_are_stored_with_the_completion_that_brought_them() -> None:
    store = Recording(MemoryStore())
    await ParallelRunner(talker({"a": plan(spec("b"))}), store=store).run(DAG([Task("a", prompt="a", adds_tasks=True)]))
    wanted = ["TaskCompleted", "TasksAdded", "TaskStarted"]
    assert store.batch_of("TasksAdded") == wanted
    assert [(task.task_id, task.added_by) for task in await store.list_tasks(store.batches[0].run_id)] == [
        ("a", None),
        ("b", "a"),
    ]


async def test_listeners_are_told_what_was_added_by_whom() -> None:
    runner = ParallelRunner(talker({"a": plan(spec("b"))}))
    async with runner.start(DAG([Task("a", prompt="a", adds_tasks=True)])) as run:
        told = [event async for event in run.events()]
    (added,) = [event for event in told if isinstance(event, events.TasksAdded)]
    assert ([task.task_id for task in added.tasks], added.added_by) == (["b"], "a")
    kinds = [event.kind for event in told if not isinstance(event, events.TaskOutput)]
    assert kinds.index("tasks_added") == kinds.index("task_completed") + 1


async def test_what_a_damaged_planner_adds_when_it_runs_again_is_there_already(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    dag = DAG([Task("a", prompt="a", adds_tasks=True)])
    async with SQLiteStore(path) as store:
        first = await ParallelRunner(talker({"a": plan(spec("b"))}), store=store).run(dag)
    path.write_bytes(path.read_bytes().replace(b'[{"id": "b", "prompt": "b"}]', b'[{"id": "b", "prompt": "?"}]'))
    async with SQLiteStore(path) as store:
        runner = ParallelRunner(talker({"a": plan(spec("b"), spec("c"))}), store=store)
        result = await runner.resume(first.run_id, retry_failed=True)
        assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["a", "b"])
        assert not [task for task in await store.list_tasks(first.run_id) if task.damaged]
