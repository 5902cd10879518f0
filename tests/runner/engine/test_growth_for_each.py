"""`for_each` over what a task returned: one task for each element, and the list of their results."""

from __future__ import annotations

import json
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from plait import DAG, FailureMode, GrowthLimits, ParallelRunner, RunStatus, Task, TaskStatus
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.errors import DAGError
from plait.persistence import MemoryStore, Store
from tests.support.fakes import Talker
from tests.support.growth import Recording, listed, plan, spec, talker

SOURCE = Task("source", prompt="source")
MAPPED = Task("mapped", prompt="part {{ item }}", for_each="source")
USER = Task("user", prompt="{{ mapped }}", depends_on=["mapped"])


async def test_one_task_for_each_element(kept: Store | None) -> None:
    backend = talker({"source": listed(["a", {"n": 1}])})
    result = await ParallelRunner(backend, store=kept).run(DAG([MAPPED, SOURCE, USER]))
    assert result.status is RunStatus.COMPLETED
    assert list(result.tasks) == ["mapped", "source", "user", "mapped.1", "mapped.2"]
    assert result["mapped"].data == ["<part a>", '<part {"n": 1}>']
    assert result.text["user"] == "<" + json.dumps(result["mapped"].data) + ">"
    assert len(backend.prompts) == 4  # gathering calls nobody


async def test_twelve_elements_keep_the_order_of_the_list_and_not_that_of_the_ids(kept: Store | None) -> None:
    elements = [f"e{number}" for number in range(12)]
    result = await ParallelRunner(talker({"source": listed(elements)}), store=kept).run(DAG([SOURCE, MAPPED]))
    assert list(result.tasks) == ["source", "mapped", *(f"mapped.{number}" for number in range(1, 13))]
    assert result["mapped"].data == [f"<part {element}>" for element in elements]


async def test_nobody_continues_it_for_its_parts_have_a_conversation_each() -> None:
    with pytest.raises(
        DAGError, match="task 'sum': continues 'mapped', which has for_each: each part of 'mapped' has its own conv"
    ):
        DAG([SOURCE, replace(MAPPED, continues="source"), Task("sum", "sum", continues="mapped")])
    planner = Task("plan", "plan", adds_tasks=True)
    plans = plan(spec("sum", continues="mapped"))
    answers = {"source": listed(["a"]), "plan": plans, "These": plans}
    result = await ParallelRunner(talker(answers)).run(DAG([SOURCE, MAPPED, planner]))
    assert "continues 'mapped', which has for_each" in (result["plan"].error or "")


@pytest.mark.parametrize("found", [[], {"items": []}])
async def test_an_empty_list_gives_an_empty_list(kept: Store | None, found: object) -> None:
    result = await ParallelRunner(talker({"source": listed(found)}), store=kept).run(DAG([SOURCE, MAPPED, USER]))
    assert (result.status, result["mapped"].data, result.text["user"]) == (RunStatus.COMPLETED, [], "<[]>")


async def test_a_mapping_with_one_list_in_it_will_do() -> None:
    answers = {"source": listed({"why": "so", "items": [1, 2]})}
    result = await ParallelRunner(talker(answers)).run(DAG([SOURCE, MAPPED]))
    assert result["mapped"].data == ["<part 1>", "<part 2>"]


NO_LISTS = {
    "text": ("[1, 2]", "needs a list"),
    "a number": (listed(5), "needs a list"),
    "two lists": (listed({"a": [1], "b": [2]}), "needs a list"),
    "no list": (listed({"a": 1}), "needs a list"),
    "a null": (listed([1, None]), "element 2 of 'source' is null"),
    "too many": (listed(list(range(99))), "max_tasks"),
}


@pytest.mark.parametrize("why", NO_LISTS)
async def test_what_is_no_list_fails_that_task_alone(kept: Store | None, why: str) -> None:
    answer, says = NO_LISTS[why]
    backend = talker({"source": answer})
    runner = ParallelRunner(backend, store=kept, growth=GrowthLimits(max_tasks=50))
    result = await runner.run(DAG([SOURCE, MAPPED, USER, Task("other", "{{ source }}", ["source"])]))
    statuses = [task.status for task in result.tasks.values()]
    completed = TaskStatus.COMPLETED
    assert statuses == [completed, TaskStatus.FAILED, TaskStatus.PENDING, completed]
    assert result["mapped"].error_kind == "invalid_request"
    error = result["mapped"].error or ""
    assert (says in error, error.startswith("task 'mapped': ")) == (True, why != "too many")
    assert (result.error or "").startswith("1 failed (mapped), 1 blocked")


def test_an_id_that_leaves_its_parts_no_room_is_refused_before_anything_is_paid_for() -> None:
    DAG([SOURCE, Task("m" * 58, "x", for_each="source"), Task("p" * 64, "x")])
    with pytest.raises(DAGError, match=r"has 59 characters; the id of a task with for_each may have 58, to leave room"):
        DAG([SOURCE, Task("m" * 59, "x", for_each="source")])


async def test_the_longest_id_has_room_for_its_parts() -> None:
    long = "m" * 58
    dag = DAG([SOURCE, Task(long, "{{ item }}", for_each="source")])
    result = await ParallelRunner(talker({"source": listed(list(range(1000)))})).run(dag)
    assert (len(result[long].data), result[f"{long}.1000"].text) == (1000, "<999>")  # type: ignore[arg-type]


async def test_an_element_that_looks_like_a_template_is_none() -> None:
    answers = {"source": listed(["{{ source }}", "{% raw %}"])}
    result = await ParallelRunner(talker(answers)).run(DAG([SOURCE, MAPPED]))
    assert result["mapped"].data == ["<part {{ source }}>", "<part {% raw %}>"]


@pytest.mark.parametrize("mode", ["soft", "skip"])
async def test_over_a_task_that_failed_softly_there_is_nothing_to_do(kept: Store | None, mode: str) -> None:
    source = Task("source", prompt="source", failure_mode=mode)  # type: ignore[arg-type]
    result = await ParallelRunner(talker({"source": ValueError("no")}), store=kept).run(DAG([source, MAPPED, USER]))
    assert (result["mapped"].status, result["mapped"].data) == (TaskStatus.COMPLETED, [])
    assert result["user"].status is TaskStatus.COMPLETED


@pytest.mark.parametrize("mode", ["hard", "soft", "skip"])
async def test_a_part_that_fails_counts_by_its_failure_mode(kept: Store | None, mode: str) -> None:
    mapped = Task("mapped", prompt="{{ item }}", for_each="source", failure_mode=mode)  # type: ignore[arg-type]
    backend = talker({"source": listed(["a", "b", "c"]), "b": ValueError("no")})
    result = await ParallelRunner(backend, store=kept).run(DAG([SOURCE, mapped, USER]))
    assert (result.text["mapped.1"], result.text["mapped.3"]) == ("<a>", "<c>")
    if mode == "hard":
        assert (result["mapped"].status, result["user"].status) == (TaskStatus.PENDING, TaskStatus.PENDING)
    else:
        assert result["mapped"].data == ["<a>", "", "<c>"]
        assert result.text["user"] == '<["<a>", "", "<c>"]>'
    assert result.status is (RunStatus.COMPLETED if mode == "skip" else RunStatus.FAILED)


async def test_a_failed_part_that_runs_again_completes_the_list(store: Store) -> None:
    backend = talker({"source": listed([*"abcdefghijkl"]), "b": ValueError("no")})
    first = await ParallelRunner(backend, store=store).run(DAG([SOURCE, Task("m", "{{ item }}", for_each="source")]))
    backend = talker()
    result = await ParallelRunner(backend, store=store).resume(first.run_id, retry_failed=True)
    assert (result["m"].data, backend.prompts) == ([f"<{letter}>" for letter in "abcdefghijkl"], ["b"])


async def test_two_in_a_row(kept: Store | None) -> None:
    then = Task("then", prompt="then {{ item }}", for_each="mapped")
    last = Task("last", prompt="{{ then }} {{ mapped[0] }}", depends_on=["then", "mapped"])
    result = await ParallelRunner(talker({"source": listed([1, 2])}), store=kept).run(DAG([SOURCE, MAPPED, then, last]))
    assert result["then"].data == ["<then <part 1>>", "<then <part 2>>"]
    assert result.text["last"] == f"<{json.dumps(result['then'].data)} <part 1>>"


CHUNKS = Task("chunks", "source")
FILES = Task("files", "chunk-{{ item }}", for_each="chunks")
LINES = Task("lines", "file-{{ item }} of {{ files | length }}", for_each="files")
LAST = Task("last", "line {{ item }} after {{ lines }}", for_each="files", depends_on=["lines"])
ALL = Task("all", "all {{ last }}", depends_on=["last"])
NESTED = {"source": listed(["a", "b", "c"]), "chunk-a": listed(["1", "2"]), "chunk-b": listed([]), "chunk-c": "one"}


async def test_parts_of_parts_are_gathered_level_by_level(kept: Store | None) -> None:
    backend = talker(NESTED)
    result = await ParallelRunner(backend, store=kept).run(DAG([CHUNKS, FILES, LINES, LAST, ALL]))
    assert result.status is RunStatus.COMPLETED, result
    of_a, of_c = ["<file-1 of 2>", "<file-2 of 2>"], "<file-one of 3>"
    assert result["lines"].data == [of_a, [], of_c], "what is no list counts as one element"
    assert result["lines.1"].data == of_a
    assert result["last"].data == [[f"<line {n} after <file-{n} of 2>>" for n in "12"], [], f"<line one after {of_c}>"]
    assert result["lines.1.2"].text == "<file-2 of 2>"
    assert result.text["all"] == f"<all {json.dumps(result['last'].data)}>"
    if kept is not None:
        again = await ParallelRunner(talker({}), store=kept).resume(result.run_id)
        assert again.text == result.text


async def test_a_part_of_a_part_starts_as_soon_as_its_list_is_there() -> None:
    is_asked = anyio.Event()

    async def answer(prompt: str) -> object:
        if prompt == "file-1 of 2":
            is_asked.set()
        if prompt == "chunk-c":  # answers only once a line of the first chunk was asked for
            with anyio.fail_after(30):
                await is_asked.wait()
        return {"source": ["a", "c"], "chunk-a": [1, 2]}.get(prompt, "x")

    result = await ParallelRunner(answer).run(DAG([CHUNKS, FILES, LINES]))
    assert result.status is RunStatus.COMPLETED


@pytest.mark.parametrize("mode", ["soft", "skip", "hard"])
async def test_a_failed_part_of_the_outer_level_fails_its_inner_level_alone(kept: Store | None, mode: str) -> None:
    backend = talker({**NESTED, "chunk-b": ValueError("no")})
    files = replace(FILES, failure_mode=FailureMode(mode))
    result = await ParallelRunner(backend, store=kept).run(DAG([CHUNKS, files, LINES]))
    assert result["lines.1"].data == ["<file-1 of 2>", "<file-2 of 2>"]
    assert result["lines.3"].status is TaskStatus.COMPLETED
    blocked = {name: result[name].status for name in ("lines", "lines.2")}
    if mode == "hard":
        assert set(blocked.values()) == {TaskStatus.PENDING}
    else:
        assert set(blocked.values()) == {TaskStatus.COMPLETED}
        assert result["lines.2"].data == []


async def test_three_levels_and_an_outer_list_that_is_empty(kept: Store | None) -> None:
    deep = Task("deep", "deep {{ item }}", for_each="lines")
    answers = {**NESTED, "file-1": listed(["x", "y"]), "file-2": listed([])}
    result = await ParallelRunner(talker(answers), store=kept).run(DAG([CHUNKS, FILES, LINES, deep]))
    assert result["deep"].data == [[["<deep x>", "<deep y>"], []], [], "<deep <file-one of 3>>"]
    result = await ParallelRunner(talker({"source": listed([])}), store=kept).run(DAG([CHUNKS, FILES, LINES, deep]))
    assert result["deep"].data == []


async def test_parts_see_what_their_task_depends_on_and_hold_data() -> None:
    def answer(prompt: str, _opening: ConversationRequest) -> str | Reply:
        return listed([1, 2]) if prompt == "source" else listed({"said": prompt}) if prompt.startswith("p") else prompt

    mapped = Task("m", "p{{ item }} {{ old }} {{ source }}", ["old"], for_each="source")
    user = Task("user", "say {{ m[1].said }}", ["m"])
    result = await ParallelRunner(Talker(answer)).run(DAG([Task("old", "old"), SOURCE, mapped, user]))
    assert result.text["user"] == "say p2 old [1, 2]"


async def test_parts_go_on_with_one_conversation_each_for_itself(kept: Store | None) -> None:
    backend = talker({"source": listed([1, 2])})
    mapped = Task("m", "m {{ item }}", continues="talk", for_each="source")
    await ParallelRunner(backend, store=kept).run(DAG([Task("talk", "talk"), SOURCE, mapped]))
    parts = [request for request in backend.requests if request.fork_of is not None]
    assert [[message.content for message in request.history] for request in parts] == [["talk", "<talk>"]] * 2
    assert len({request.session_id for request in parts}) == 2


async def test_a_planner_may_add_one_and_a_part_may_add_tasks(kept: Store | None) -> None:
    backend = talker(
        {
            "plan": plan(spec("m", "m{{ item }}", for_each="list")),
            "list": listed([1]),
            "m1": Reply("done", tasks=(spec("more"),)),
        }
    )
    dag = DAG([Task("list", "list"), Task("plan", "plan", adds_tasks=True)])
    result = await ParallelRunner(backend, store=kept).run(dag)
    assert (result["m"].data, result.text["more"]) == (["done"], "<more>")


async def test_what_waits_for_the_list_starts_after_its_last_part() -> None:
    store = Recording(MemoryStore())
    await ParallelRunner(talker({"source": listed([1, 2])}), store=store, concurrency=1).run(
        DAG([SOURCE, MAPPED, USER])
    )
    gathered = ["TaskStarted", "TaskCompleted", "TaskStarted"]
    assert store.batch_of("TasksAdded")[:2] == ["TaskCompleted", "TasksAdded"]
    assert [kinds for kinds in store.kinds() if kinds[-4:] == ["TaskCompleted", *gathered]]


def test_a_task_with_for_each_has_no_element_and_plans_nothing() -> None:
    for more in ({"item": 1}, {"adds_tasks": True}):
        with pytest.raises(DAGError, match="a task with for_each cannot have"):
            DAG([SOURCE, Task("m", "m", for_each="source", **more)])  # type: ignore[arg-type]


async def test_a_part_may_wait_for_a_person(store: Store) -> None:
    from plait.dialogue import Question

    def answer(prompt: str, request: ConversationRequest) -> str | Reply:
        if prompt == "source":
            return listed([1, 2])
        if prompt == "part 2" and request.answer is None:
            return Reply("?", question=Question("which?"))
        return f"<{prompt}>"

    first = await ParallelRunner(Talker(answer), store=store).run(DAG([SOURCE, MAPPED, USER]))
    assert (first.status, first["mapped"].status) == (RunStatus.WAITING_INPUT, TaskStatus.PENDING)
    result = await ParallelRunner(Talker(answer), store=store).resume(first.run_id, answers={"mapped.2": "this"})
    assert (result.status, result["mapped"].data) == (RunStatus.COMPLETED, ["<part 1>", "<this>"])


async def test_a_part_has_the_path_of_what_its_list_is_for(kept: Store | None) -> None:
    """Four tasks long from the part on; the other path, which is open at the same time, is two long."""
    path = [Task("sum", "sum", ["mapped"]), Task("end", "end", ["sum"])]
    other = [Task("other", "other", ["source"]), Task("last", "last", ["other"])]
    backend = talker({"source": listed(["a", "b"])})
    await ParallelRunner(backend, store=kept, concurrency=1).run(DAG([SOURCE, *other, MAPPED, *path]))
    assert backend.prompts == ["source", "part a", "part b", "other", "sum", "last", "end"]
