"""Plans that a task calls (`plan`, `loop`): their tasks become tasks of the run, and their results come back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from plait import DAG, ParallelRunner, RunResult, RunStatus, TaskStatus
from plait.backends import Reply
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore, Store
from plait.runner.client.reuse_preview import ReuseAction
from plait.runner.plan.plan_file import parse_plan

REPORT = """
inputs: {row: {required: true}, tone: plain}
tasks:
  - {id: draft, prompt: "draft {{ row.title }} {{ tone }}"}
  - {id: review, prompt: "review {{ draft }} {{ inputs.tone }}", depends_on: draft}
returns: {text: "{{ draft }}", tone: "{{ tone }}", review: "{{ results.review }}!"}
"""
COUNTED = """
inputs: {last: ""}
tasks:
  - {id: write, prompt: "write {{ last }}"}
  - {id: test, prompt: "test {{ write }}", depends_on: write, output_schema: {type: object}}
"""


class Calls:
    """A backend that answers from a table, or with the prompt in brackets; an answer of None fails. `made` are the
    prompts.
    """

    session_id = None

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.made: list[str] = []

    def new_session_id(self) -> None:
        return None

    def answer_key(self) -> str:
        return "calls"

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Calls]:
        yield self

    async def send(self, prompt: str) -> Reply:
        self.made.append(prompt)
        answer: Any = self.answers.get(prompt.partition(" ")[0], f"<{prompt}>")
        if isinstance(answer, list):
            answer = cast("list[Any]", answer).pop(0)
        if answer is None:
            raise BackendError(ErrorKind.REFUSED, "no")
        return Reply(answer) if isinstance(answer, str) else Reply(json.dumps(answer), answer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "report.yaml").write_text(REPORT)
    (tmp_path / "counted.yaml").write_text(COUNTED)
    return tmp_path


def dag(folder: Path, text: str) -> DAG:
    return parse_plan(text, folder=folder).dag


async def run(folder: Path, calls: Calls, text: str, store: Store | None = None) -> RunResult:
    return await ParallelRunner(calls, store=store, concurrency=1).run(dag(folder, text), "r")


async def test_the_tasks_of_a_called_plan_are_tasks_of_the_run_and_its_returns_is_the_result(folder: Path) -> None:
    calls, store = Calls(topic={"title": "tea"}), MemoryStore()
    text = """
    tasks:
      - {id: topic, prompt: topic, output_schema: {type: object}}
      - {id: report, plan: report.yaml, with: {row: "{{ topic }}"}, depends_on: topic}
      - {id: end, prompt: "end {{ report.text }}", depends_on: report}
    """
    result = await run(folder, calls, text, store)
    assert calls.made == ["topic", "draft tea plain", "review <draft tea plain> plain", "end <draft tea plain>"]
    review = "<review <draft tea plain> plain>!"
    assert result["report"].value == {"text": "<draft tea plain>", "tone": "plain", "review": review}
    tasks = {task.task_id: task.added_by for task in await store.list_tasks("r")}
    assert tasks == dict.fromkeys(["topic", "report", "end"]) | dict.fromkeys(
        ["report.draft", "report.review"], "report"
    )


async def test_a_call_for_each_element_has_the_ids_of_its_parts(folder: Path) -> None:
    rows = "inputs: {rows: [{title: a}, {title: b}]}\ntasks: [{id: all, plan: report.yaml, with: {row: '{{ item }}'}, "
    over_input = await run(folder, Calls(), rows + "for_each: rows}]")
    assert list(over_input.tasks) == [
        "all.1",
        "all.2",
        *(f"all.{n}.{name}" for n in (1, 2) for name in ("draft", "review")),
    ]
    later = "tasks: [{id: rows, prompt: rows, output_schema: {type: array}}, {id: all, plan: report.yaml, "
    calls = Calls(rows=[[{"title": "a"}, {"title": "b"}]])
    over_answer = await run(folder, calls, later + "with: {row: '{{ item }}', tone: warm}, for_each: rows}]")
    assert [one["tone"] for one in over_answer["all"].data] == ["warm", "warm"]  # type: ignore[index, union-attr, call-overload]
    assert over_answer["all.2.review"].text == "<review <draft b warm> warm>"


async def test_a_called_plan_goes_over_its_inputs_and_over_its_results(folder: Path) -> None:
    (folder / "each.yaml").write_text(
        "inputs: {words: []}\n"
        "tasks:\n"
        "  - {id: say, prompt: 'say {{ item }}', for_each: words}\n"
        "  - {id: list, prompt: list, output_schema: {type: array}}\n"
        "  - {id: put, prompt: 'put {{ item }} {{ say }}', for_each: list, depends_on: say}\n"
        "  - {id: pair, prompt: 'pair {{ put }}', for_each: list, depends_on: put}\n"
    )
    calls = Calls(list=[["x"]])
    result = await run(folder, calls, "tasks: [{id: c, plan: each.yaml, with: {words: [a, b]}}]")
    said = ["<say a>", "<say b>"]
    assert result["c.put.1"].text == f"<put x {said}>".replace("'", '"')
    assert result["c.pair.1"].text == f"<pair {result['c.put.1'].text}>"
    data = result["c"].data
    assert isinstance(data, dict)
    assert (data["say"], data["list"], list(data)) == (said, ["x"], ["say", "list", "put", "pair"])
    wrong = await run(folder, Calls(), "tasks: [{id: c, plan: each.yaml, with: {words: 3}}]")
    assert (wrong["c"].error_kind, "for_each needs a list" in (wrong["c"].error or "")) == ("invalid_request", True)


async def test_a_condition_of_a_call_decides_before_its_tasks_are_added(folder: Path) -> None:
    text = "tasks: [{id: a, prompt: a}, {id: c, plan: report.yaml, with: {row: {title: t}}, depends_on: a, when: '%s'}]"
    skipped = await run(folder, Calls(), text % '{{ a }} == "no"')
    assert (skipped["c"].status, list(skipped.tasks)) == (TaskStatus.SKIPPED, ["a", "c"])
    wanted = await run(folder, Calls(), text % '{{ a }} != "no"')
    assert (wanted["c"].status, len(wanted.tasks)) == (TaskStatus.COMPLETED, 4)


@pytest.mark.parametrize("fresh", ["all", "all.1", "fix"])
async def test_the_tasks_of_a_called_plan_are_fresh_with_the_task_that_calls_it(folder: Path, fresh: str) -> None:
    text = """
    inputs: {rows: [{title: a}]}
    tasks:
      - {id: all, plan: report.yaml, with: {row: "{{ item }}"}, for_each: rows}
      - {id: fix, loop: {plan: counted.yaml, with: {last: "{{ previous.test }}"}, until: "{{ test.ok }}", max: 2}}
    """
    calls = Calls(test=[{"ok": False}, {"ok": True}, {"ok": False}, {"ok": True}, {"ok": False}, {"ok": True}])
    runner, plan = ParallelRunner(calls, store=MemoryStore(), concurrency=1), dag(folder, text)
    await runner.run(plan, "first")
    of_calls = [made for made in calls.made if ("draft" in made or "review" in made) is (fresh != "fix")]
    assert len(of_calls) == (4 if fresh == "fix" else 2)
    calls.made.clear()
    preview = await runner.runs.preview_like(plan, "first", fresh=[fresh])
    reasons = {step.reason for step in preview.tasks if step.action is ReuseAction.RUN}
    assert (reasons, calls.made) == ({"asked to run again (fresh)"}, [])
    await runner.run(plan, "second", like="first", fresh=[fresh])
    assert calls.made == of_calls
    calls.made.clear()
    async with runner.runs.start_fork(await runner.runs.fork("first", fresh)) as run:
        await run.result()
    assert calls.made == of_calls


LOOP = """
tasks:
  - id: fix
    failure_mode: %s
    loop: {plan: counted.yaml, with: {last: "{{ previous.test.why }}"}, until: "{{ test.ok }}", max: 3}
  - {id: end, prompt: end, depends_on: fix}
"""


async def test_a_loop_adds_rounds_until_its_condition_is_true_and_carries_results_over(folder: Path) -> None:
    calls = Calls(test=[{"ok": False, "why": "short"}, {"ok": True, "why": "fine"}])
    result = await run(folder, calls, LOOP % "hard")
    assert calls.made == ["write ", "test <write >", "write short", "test <write short>", "end"]
    assert result["fix"].data == {"write": "<write short>", "test": {"ok": True, "why": "fine"}}
    assert list(result.tasks) == ["fix", "end", "fix.1.write", "fix.1.test", "fix.2.write", "fix.2.test"]


async def test_a_loop_fails_after_its_last_round(folder: Path) -> None:
    store, calls = MemoryStore(), Calls(test={"ok": False, "why": "short"})
    result = await run(folder, calls, LOOP % "hard", store)
    failed = result["fix"]
    assert (result.status, failed.error_kind) == (RunStatus.FAILED, "loop_exhausted")
    assert failed.error == "{{ test.ok }} is still false after 3 rounds (max)"
    assert len(calls.made) == 6
    assert result["end"].status is TaskStatus.PENDING
    soft = await run(folder, Calls(test={"ok": False, "why": ""}), LOOP % "soft")
    assert (soft["fix"].status, soft["end"].status) == (TaskStatus.FAILED, TaskStatus.COMPLETED)


@pytest.mark.parametrize("mode", ["hard", "skip"])
async def test_a_call_fails_once_no_task_of_it_can_start_any_more(folder: Path, mode: str) -> None:
    (folder / "three.yaml").write_text(
        "tasks: [{id: bad, prompt: bad}, {id: behind, prompt: behind, depends_on: bad},\n"
        "        {id: beside, prompt: beside}, {id: last, prompt: last, depends_on: [behind, beside]}]"
    )
    text = f"tasks: [{{id: c, plan: three.yaml, failure_mode: {mode}}}, {{id: end, prompt: end, depends_on: c}}]"
    calls = Calls(bad=None)
    result = await run(folder, calls, text)
    assert calls.made == ["bad", "beside", *(["end"] if mode == "skip" else [])]
    assert result["c"].error_kind == "child_failed"
    assert result["c"].error == "not all tasks of the plan are done: c.bad, c.behind, c.last; c.bad: no"
    assert result["c.behind"].status is TaskStatus.PENDING


async def test_a_list_in_a_called_plan_with_a_failed_part_ends_with_its_last_part(folder: Path) -> None:
    (folder / "list.yaml").write_text(
        "tasks: [{id: l, prompt: l, output_schema: {type: array}}, {id: p, prompt: '{{ item }}', for_each: l},\n"
        "        {id: end, prompt: end, depends_on: p}]"
    )
    calls = Calls(l=[["bad", "good", "well"]], bad=None)
    result = await run(folder, calls, "tasks: [{id: c, plan: list.yaml}]")
    assert calls.made == ["l", "bad", "good", "well"]
    assert result["c"].error == "not all tasks of the plan are done: c.p, c.end cannot start"


async def test_a_round_with_a_failed_task_or_without_what_the_condition_names_is_no_success(folder: Path) -> None:
    text = """
    tasks:
      - id: fix
        loop:
          tasks:
            - {id: may, prompt: may, failure_mode: skip}
            - {id: test, prompt: test, when: "{{ may }} != 'no'", depends_on: may}
            - {id: never, prompt: never, when: "false"}
          until: "{{ test }} != 'bad'"
          max: 4
    """
    calls = Calls(may=[None, "no", "yes", "yes"], test=["good", "bad", "good"])
    result = await run(folder, calls, text)
    assert result["fix"].data == {"may": "yes", "test": "good", "never": ""}
    assert calls.made == ["may", "test", "may", "may", "test", "may", "test"]
    assert result["fix.2.test"].status is TaskStatus.SKIPPED


async def test_calls_within_calls(folder: Path) -> None:
    (folder / "outer.yaml").write_text(
        "inputs: {titles: [], tone: cold}\n"
        "tasks: [{id: each, for_each: titles,\n"
        "         plan: report.yaml, with: {row: {title: '{{ item }}'}, tone: '{{ tone }}'}},\n"
        "        {id: all, prompt: 'all {{ each[1].text }}', depends_on: each}]\n"
        "returns: '{{ all }}'"
    )
    text = "tasks: [{id: o, loop: {plan: outer.yaml, with: {titles: [a, b]}, until: '{{ all }} != \"\"'}}]"
    result = await run(folder, Calls(), text)
    assert (result.status, result["o"].text) == (RunStatus.COMPLETED, "<all <draft b cold>>")
    assert "o.1.each.2.review" in result.tasks


async def test_a_view_of_a_call_says_its_tasks_in_place_of_a_prompt(folder: Path) -> None:
    store = MemoryStore()
    await run(folder, Calls(test={"ok": True, "why": ""}), LOOP % "hard", store)
    seen = await ParallelRunner(Calls(), store=store).runs.task("r", "fix")
    assert seen.prompt == "the tasks write, test, at most 3 times, until {{ test.ok }}"


async def test_a_retry_of_failed_tasks_goes_on_with_the_round(folder: Path) -> None:
    store, calls = MemoryStore(), Calls(test=[{"ok": False, "why": "short"}, None, {"ok": True, "why": ""}])
    failed = await run(folder, calls, LOOP % "hard", store)
    assert (failed["fix"].error_kind, failed["fix.2.test"].error) == ("child_failed", "no")
    result = await ParallelRunner(calls, store=store).resume("r", retry_failed=True)
    assert (result.status, list(result.tasks)[-1]) == (RunStatus.COMPLETED, "fix.2.test")
    assert calls.made == ["write ", "test <write >", "write short", *["test <write short>"] * 2, "end"]


async def test_a_run_like_another_takes_the_tasks_of_its_calls_over_as_its_preview_says(folder: Path) -> None:
    rows = "inputs: {rows: [%s]}\ntasks: [{id: all, plan: report.yaml, with: {row: '{{ item }}'}, for_each: rows}]"
    calls = Calls()
    runner = ParallelRunner(calls, store=MemoryStore(), concurrency=1)
    await runner.run(dag(folder, rows % "{title: a}, {title: b}"), "first")
    calls.made.clear()
    later = dag(folder, rows % "{title: new}, {title: a}, {title: b}")
    preview = await runner.runs.preview_like(later, "first")
    actions = {step.task_id: step.action.value for step in preview.tasks}
    reused = [f"all.{n}.{name}" for n in (2, 3) for name in ("draft", "review")]
    assert {name for name, action in actions.items() if action == "reuse"} == {*reused}
    assert actions["all.1.draft"] == "run"
    await runner.run(later, "second", like="first")
    assert calls.made == ["draft new plain", "review <draft new plain> plain"]


async def test_a_preview_plays_the_rounds_of_the_earlier_run(folder: Path) -> None:
    calls = Calls(test=[{"ok": False, "why": "short"}, {"ok": True, "why": ""}, {"ok": True, "why": ""}])
    runner = ParallelRunner(calls, store=MemoryStore(), concurrency=1)
    await runner.run(dag(folder, LOOP % "hard"), "first")
    calls.made.clear()
    same = await runner.runs.preview_like(dag(folder, LOOP % "hard"), "first")
    assert {step.action.value for step in same.tasks} == {"reuse"}
    (folder / "counted.yaml").write_text(COUNTED.replace("write {{", "type {{"))
    changed = await runner.runs.preview_like(dag(folder, LOOP % "hard"), "first")
    steps = {step.task_id: step.action.value for step in changed.tasks}
    assert steps["fix.1.write"] == "run"
    assert steps["fix.2.test"] != "reuse"
    fork = await runner.run(dag(folder, LOOP % "hard"), "second", like="first")
    assert (fork.status, calls.made) == (RunStatus.COMPLETED, ["type ", "test <type >"])


async def test_functions_and_samples_in_a_called_plan(folder: Path) -> None:
    (folder / "work.yaml").write_text(
        "inputs: {row: {}, limit: 2}\n"
        "tasks: [{id: one, prompt: 'one {{ row.n }}', backend: say, repeat: 3, vote: majority},\n"
        "        {id: sum-up, backend: add, depends_on: one}]\n"
        "returns: '{{ results[\"sum-up\"] }}'"
    )
    calls = Calls(one=["a", "b", "b"])

    def add(one: str, row: dict[str, int], limit: int) -> str:
        return f"{one} {row['n']} {limit}"

    plan = dag(
        folder,
        "backends: {say: {kind: function, call: 'x:y'}, add: {kind: function, call: 'x:z'}}\n"
        "tasks: [{id: w, plan: work.yaml, with: {row: {n: 7}}}]",
    )
    result = await ParallelRunner(backends={"say": calls, "add": add}, default="say", concurrency=1).run(plan)
    assert (result.status, result["w"].text) == (RunStatus.COMPLETED, "b 7 2")
    assert [*result.tasks] == ["w", "w.one.1", "w.one.2", "w.one.3", "w.one", "w.sum-up"]
