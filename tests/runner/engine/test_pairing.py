"""Two tasks with the same `for_each` over what a task returned: their parts pair up, element by element."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait import DAG, GrowthLimits, ParallelRunner, RunStatus, Task, TaskStatus
from plait.errors import DAGError
from plait.persistence import MemoryStore, Store
from plait.runner.plan import Plan
from tests.support.growth import listed, plan, spec, talker

SOURCE = Task("source", prompt="source")
DRAFT = Task("draft", prompt="write {{ item }}", for_each="source")
REVIEW = Task("review", prompt="judge {{ draft }} of {{ item }}", depends_on=["draft"], for_each="source")
LIST = {"source": listed(["a", "b", "c"])}


async def test_a_part_gets_its_partners_result_and_the_list_is_all_of_them(kept: Store | None) -> None:
    dag = DAG([REVIEW, DRAFT, SOURCE, Task("end", prompt="{{ draft }} {{ review }}", depends_on=["draft", "review"])])
    result = await ParallelRunner(talker(LIST), store=kept).run(dag)
    assert result.status is RunStatus.COMPLETED
    reviews = [f"<judge <write {one}> of {one}>" for one in "abc"]
    assert (result["draft"].data, result["review"].data) == (["<write a>", "<write b>", "<write c>"], reviews)
    assert result.text["end"] == f"<{json.dumps(result['draft'].data)} {json.dumps(reviews)}>"


async def test_twelve_parts_pair_up_in_the_order_of_the_list(kept: Store | None) -> None:
    elements = [f"e{number}" for number in range(12)]
    result = await ParallelRunner(talker({"source": listed(elements)}), store=kept).run(DAG([SOURCE, DRAFT, REVIEW]))
    assert result["review"].data == [f"<judge <write {one}> of {one}>" for one in elements]


async def test_a_list_whose_name_begins_alike_is_another_list(kept: Store | None) -> None:
    other = Task("drafts", prompt="write {{ item }}", for_each="source2")
    dag = DAG([SOURCE, Task("source2", "source2"), other, Task("r", "{{ drafts }}", ["drafts"], for_each="source")])
    answers = {"source": listed(["a", "b"]), "source2": listed(["c", "d"])}
    result = await ParallelRunner(talker(answers), store=kept).run(dag)
    assert result["r"].data == ['<["<write c>", "<write d>"]>'] * 2


async def test_a_part_waits_for_its_partner_alone(kept: Store | None) -> None:
    judged = anyio.Event()

    async def answer(prompt: str) -> object:
        if prompt == "source":
            return ["a", "b"]
        if prompt == "write b":
            await judged.wait()  # the first one's review must not wait for the second one's draft
        if prompt.startswith("judge") and prompt.endswith("of a"):
            judged.set()
        return f"<{prompt}>"

    with anyio.fail_after(60):
        result = await ParallelRunner(answer, store=kept).run(DAG([SOURCE, DRAFT, REVIEW]))
    assert result.status is RunStatus.COMPLETED


async def test_a_third_names_the_first_through_the_second() -> None:
    last = Task("last", prompt='{{ review }}, {{ results["draft"] }}', depends_on=["review"], for_each="source")
    result = await ParallelRunner(talker({"source": listed(["a", "b"])})).run(DAG([SOURCE, DRAFT, REVIEW, last]))
    assert result.text["last.2"] == "<<judge <write b> of b>, <write b>>"


async def test_each_part_goes_on_with_its_partners_conversation(kept: Store | None) -> None:
    backend = talker({"source": listed(["a", "b"])})
    polish = Task("polish", prompt="better", continues="draft", for_each="source")
    result = await ParallelRunner(backend, store=kept).run(DAG([SOURCE, DRAFT, polish]))
    assert result.status is RunStatus.COMPLETED
    later = [one.history for one, prompt in zip(backend.requests, backend.prompts, strict=True) if prompt == "better"]
    said = [[message.content for message in history] for history in later]
    assert sorted(said) == [["write a", "<write a>"], ["write b", "<write b>"]]


@pytest.mark.parametrize("mode", ["hard", "soft", "skip"])
async def test_a_part_that_fails_harms_its_partner_alone(kept: Store | None, mode: str) -> None:
    draft = replace(DRAFT, prompt="{{ item }}", failure_mode=mode)  # type: ignore[arg-type]
    backend = talker({**LIST, "b": ValueError("no")})
    result = await ParallelRunner(backend, store=kept).run(DAG([SOURCE, draft, REVIEW]))
    hard = mode == "hard"
    assert result.text["review.1"] == "<judge <a> of a>"
    assert result["review.3"].status is TaskStatus.COMPLETED
    assert result["review.2"].status is (TaskStatus.PENDING if hard else TaskStatus.COMPLETED)
    assert result["review"].status is (TaskStatus.PENDING if hard else TaskStatus.COMPLETED)
    if not hard:
        assert result.text["review.2"] == "<judge  of b>"


@pytest.mark.parametrize("found", [[], None])
async def test_where_there_is_nothing_to_do_all_are_empty(kept: Store | None, found: list[str] | None) -> None:
    source = replace(SOURCE, failure_mode="soft")
    backend = talker({"source": ValueError("no") if found is None else listed(found)})
    polish = Task("polish", prompt="better", continues="draft", for_each="source", depends_on=["review"])
    end = Task("end", prompt="{{ draft }} {{ review }} {{ polish }}", depends_on=["polish", "review"])
    result = await ParallelRunner(backend, store=kept).run(DAG([source, DRAFT, REVIEW, polish, end]))
    assert (result.text["end"], result.status is RunStatus.COMPLETED) == ("<[] [] []>", found is not None)


async def test_the_second_of_them_may_be_one_too_many(kept: Store | None) -> None:
    runner = ParallelRunner(talker({"source": listed(["a", "b"])}), store=kept, growth=GrowthLimits(max_tasks=5))
    result = await runner.run(DAG([SOURCE, DRAFT, REVIEW]))
    assert result["draft"].data == ["<write a>", "<write b>"]
    assert result["review"].error_kind == "invalid_request"
    assert "max_tasks" in (result["review"].error or "")


async def test_a_planner_adds_one_that_pairs_up_with_what_is_there(kept: Store | None) -> None:
    specs = plan(spec("more", prompt="{{ draft }}!", depends_on=["draft"], for_each="source"))
    planner = Task("plan", prompt="plan", depends_on=["draft"], adds_tasks=True)
    result = await ParallelRunner(talker({**LIST, "plan": specs}), store=kept).run(DAG([SOURCE, DRAFT, planner]))
    assert result["more"].data == ["<<write a>!>", "<<write b>!>", "<<write c>!>"]


@pytest.mark.parametrize("stop_at", ["write b", "judge <write a> of a"])
async def test_it_is_resumed_as_it_was_begun(store: Store, stop_at: str) -> None:
    """Stopped amid the parts of the first or of the second; a third is not unfolded yet, since it waits for more."""
    prompts: list[str] = []

    async def answer(prompt: str) -> object:
        prompts.append(prompt)
        if prompt == stop_at and runs:
            runs.pop().stop()
            await anyio.sleep_forever()
        return ["a", "b", "c"] if prompt == "source" else f"<{prompt}>"

    late = Task("late", prompt="{{ draft }} {{ other }}", depends_on=["draft", "other"], for_each="source")
    dag = DAG([SOURCE, DRAFT, REVIEW, Task("other", prompt="other", depends_on=["review"]), late])
    async with ParallelRunner(answer, store=store, concurrency=1).start(dag, "r") as run:
        runs = [run]
    before = prompts.copy()
    assert before == ["source", "write a", "write b", "write c", "judge <write a> of a"][: before.index(stop_at) + 1]
    result = await ParallelRunner(answer, store=store).resume("r")
    assert result.status is RunStatus.COMPLETED
    assert result["review"].data == [f"<judge <write {one}> of {one}>" for one in "abc"]
    assert result["late"].data == [f"<<write {one}> <other>>" for one in "abc"]
    assert sorted(prompts) == sorted([*set(prompts), stop_at])  # nothing twice but the one that was under way


def test_only_the_same_for_each_goes_on_with_its_parts() -> None:
    other = Task("other", prompt="other")
    with pytest.raises(
        DAGError, match="; give this task the same for_each, so that each part continues one conversation"
    ):
        DAG([SOURCE, other, DRAFT, Task("polish", prompt="better", continues="draft", for_each="other")])


PLAN = """
tasks:
  - {id: source, prompt: source}
  - {id: draft, prompt: "write {{ item }}", for_each: source}
  - {id: review, prompt: "judge {{ draft }}", for_each: source, depends_on: [draft]}
  - {id: polish, prompt: "better", for_each: source, continues: draft, depends_on: [review]}
"""


async def test_in_a_plan_file_as_over_an_input(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    loaded = Plan.load(path)
    backend = talker({"source": listed(["a", "b"])})
    result = await ParallelRunner(backend, store=MemoryStore()).run(loaded.dag)
    assert result["review"].data == ["<judge <write a>>", "<judge <write b>>"]
    later = [one.history for one, prompt in zip(backend.requests, backend.prompts, strict=True) if prompt == "better"]
    assert sorted(history[0].content for history in later) == ["write a", "write b"]
