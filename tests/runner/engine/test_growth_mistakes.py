"""Replies whose tasks cannot be added: told once, in the same conversation, then that task fails alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import DAG, GrowthLimits, OpenQuestion, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore, Store
from plait.workflows import Decision
from tests.support.fakes import QuickClock, Talker
from tests.support.growth import Scripted, by_end, listed, plan, spec, talker, tasks
from tests.support.sizes import size

PLANNER = Task("plan", prompt="plan", adds_tasks=True)
DAG_OF = DAG(
    [PLANNER, Task("x", prompt="x"), Task("after", prompt="after", depends_on=["plan"]), Task("y", "y", ["x"])]
)
WRONG = {
    "no JSON": ("Here they are!", "not JSON"),
    "no list": ('{"steps": []}', "list of tasks"),
    "no mapping": (plan("do this"), "task 1: must be a mapping, not 'do this'"),
    "no prompt": (plan({"id": "a"}), "task 'a': 'prompt' is missing; add it"),
    "blank prompt": (plan(spec("a", " ")), "task 'a': there is no prompt; write one"),
    "unknown field": (plan(spec("a", colour="red")), "unknown key 'colour'; there are id, prompt, "),
    "id with a space": (plan(spec("a b")), "a b"),
    "id taken": (plan(spec("x")), "'x' is used twice; the run has a task with this id"),
    "id given twice": (plan(spec("a"), spec("a")), "'a' is used twice"),
    "its own id": (plan(spec("plan")), "'plan' is used twice"),
    "name of an input": (plan(spec("who")), "name of an input"),
    "unknown dependency": (plan(spec("a", depends_on=["xx"])), "unknown task 'xx'"),
    "cycle": (plan(spec("a", depends_on=["b"]), spec("b", depends_on=["a"])), "a -> b -> a"),
    "waits for itself": (plan(spec("a", depends_on=["a"])), "a -> a"),
    "unknown backend": (plan(spec("a", backend="gtp")), "no backend named 'gtp'"),
    "another backend's conversation": (plan(spec("a", continues="x", backend="other")), "continues 'x'"),
    "name that is not upstream": (plan(spec("a", "{{ x }}")), "'x' is not upstream"),
    "template language": (
        plan(spec("a", "{% for y in x %}{{ y }}{% endfor %}", depends_on=["x"])),
        "task 'a': the prompt of an added task may hold names and fields, as in {{ name }} and {{ name.field }}, and "
        "no other template syntax, such as {% for y in x %}, {% endfor %}; two braces as they are: {{ '{{' }}",
    ),
    "filter": (
        plan(spec("a", "{{ x | upper }}", depends_on=["x"])),
        "no other template syntax, such as {{ x | upper }};",
    ),
    "folder and variables": (
        plan(spec("a", cwd="/", env={"A": "1"})),
        "an added task has no 'cwd' of its own; leave 'cwd' out",
    ),
    "condition": (
        plan(spec("a", when="{{ x }} == 1", depends_on=["x"])),
        "task 'a': an added task has no 'when' of its own; leave 'when' out",
    ),
    "id with a dash": (plan(spec("a", "{{ my-x }}")), 'write {{ results["my-x"] }} for a task'),
    "field that nothing is called": (plan(spec("a", "{{ y.z }}")), "uses {{ y }}, but 'y' is not upstream"),
    "broken template": (plan(spec("a", "{{ x", depends_on=["x"])), "'a'"),
    "lone surrogate": ('[{"id": "a", "prompt": "\\ud800"}]', "task"),
    "lone surrogate in a key": (
        '[{"id": "a", "prompt": "a", "\\ud800": 1}]',
        "task 'a': must be text without lone surrogates, not '\\ud800'",
    ),
    "too many": (plan(*(spec(f"a{n}") for n in range(20))), "max_tasks"),
}


def runner_of(backend: Talker, store: Store | None = None, **more: object) -> ParallelRunner:
    limits = GrowthLimits(max_tasks=20, max_depth=2)
    return ParallelRunner(
        backends={"main": backend, "other": talker()},
        default="main",
        store=store,
        growth=limits,
        clock=QuickClock(),
        **more,
    )  # type: ignore[arg-type]


def dag_with_input() -> DAG:
    return DAG(DAG_OF.tasks, inputs={"who": "Ada"})


@pytest.mark.parametrize("why", WRONG)
async def test_it_is_told_once_and_a_corrected_plan_is_taken(store: Store, why: str) -> None:
    answer, says = WRONG[why]
    backend = talker({"plan": answer, "These": plan(spec("a", "a {{ plan }}", depends_on=["plan"]))})
    result = await runner_of(backend, store).run(dag_with_input())
    assert result.status is RunStatus.COMPLETED
    assert (result["plan"].attempts, list(result.tasks)[4:]) == (2, ["a"])
    (told,) = [prompt for prompt in backend.prompts if prompt.startswith("These tasks cannot be added")]
    assert says in told
    (again,) = [request for request in backend.requests if request.history]
    assert again.resume
    assert [message.role for message in again.history] == ["user", "assistant"]
    said = [message.content for message in await store.list_messages(result.run_id, "plan") if message.attempt == 2]
    assert said == ["plan", again.history[1].content, told, result.text["plan"]]


@pytest.mark.parametrize("why", [*WRONG][::7])
async def test_a_second_wrong_plan_fails_its_task_alone(store: Store, why: str) -> None:
    answer, says = WRONG[why]
    backend = talker({"plan": answer, "These": answer})
    result = await runner_of(backend, store).run(dag_with_input())
    assert result.status is RunStatus.FAILED
    statuses = {task.id: task.status for task in result.tasks.values()}
    done = TaskStatus.COMPLETED
    assert statuses == {"plan": TaskStatus.FAILED, "x": done, "after": TaskStatus.PENDING, "y": done}
    assert result["plan"].error_kind == "invalid_output"
    assert says in (result["plan"].error or "")
    assert len(backend.prompts) == 4
    stored = {task.task_id: task.status for task in await store.list_tasks(result.run_id)}
    assert stored == {task_id: status.value for task_id, status in statuses.items()}
    assert not result.degraded


async def test_mistakes_of_all_kinds_are_told_at_once_and_none_twice() -> None:
    answer = plan(
        {"prompt": "{{ x }}", "depends_on": "x"},
        spec("b", promt="twice"),
        spec("c", depends_on=["cc"], retry={"attempts": "3"}),
        spec("d", "{{ x }}", depends_on=7),
        spec("x"),
        spec("e", backend="gtp"),
    )
    backend = talker({"plan": answer, "These": "[]"})
    assert (await runner_of(backend).run(dag_with_input())).status is RunStatus.COMPLETED
    (told,) = [prompt for prompt in backend.prompts if prompt.startswith("These")]
    assert told.splitlines()[1:-1] == [
        "- task 1: 'id' is missing; add it",
        "- task 'b': unknown key 'promt'; did you mean 'prompt'?",
        "- task 'c': retry.attempts must be a whole number, not '3'; "
        "write it without quotes and without leading or trailing zeros",
        "- task 'd': depends_on must be a list, not the number 7; write it as [...] or as lines that start with '- '",
        "- task 'e': no backend named 'gtp'; there are: main, other",
        "- task 'x': id 'x' is used twice; the run has a task with this id",
        "- task 'c': unknown task 'cc'; did you mean 'c'?",
    ]


@pytest.mark.parametrize("as_reply", [False, True])
async def test_prompts_of_added_tasks_have_names_and_fields_also_after_a_resume(store: Store, as_reply: bool) -> None:
    prompts = {
        "next": "{{ plan.tasks.0.id }} {{ '{{' }} }} {{ results['e-f'] }}",
        "each": "{{ item.name }} {{ item['n'] }}",
    }
    added = [
        spec("e-f", "fail"),
        spec("next", prompts["next"], depends_on=["plan", "e-f"]),
        spec("list"),
        spec("each", prompts["each"], for_each="list"),
    ]
    answer = {"tasks": added}
    said = Reply("", {"tasks": [{"id": "e-f"}]}, tasks=tuple(added)) if as_reply else listed(answer)
    items = listed([{"name": "{% x %}", "n": "{{ plan }}"}])
    planner = Task("plan", prompt="plan", adds_tasks=not as_reply)
    first = talker({"plan": said, "fail": ValueError("later"), "list": items})
    result = await runner_of(first, store).run(DAG([planner]), "r")
    assert (result.status, result.text["each.1"]) == (RunStatus.FAILED, "<{% x %} {{ plan }}>")
    again = await runner_of(talker({"fail": "{{ done }}"}), store).resume("r", retry_failed=True)
    assert (again.status, again.text["next"]) == (RunStatus.COMPLETED, "<e-f {{ }} {{ done }}>")
    stored = {task.task_id: task.prompt for task in await store.list_tasks("r")}
    assert {task_id: stored[task_id] for task_id in prompts} == prompts


async def test_its_failure_mode_counts() -> None:
    planner = Task("plan", prompt="plan", adds_tasks=True, failure_mode="skip")
    backend = talker({"plan": "no", "These": "no"})
    result = await runner_of(backend).run(DAG([planner, Task("b", "[{{ plan }}]", ["plan"])]))
    assert (result.status, result["plan"].status, result.text["b"]) == (
        RunStatus.COMPLETED,
        TaskStatus.SKIPPED,
        "<[]>",
    )


async def test_at_most_once_planners_are_not_asked_again() -> None:
    backend = talker({"plan": "no"})
    result = await runner_of(backend).run(DAG([Task("plan", prompt="plan", adds_tasks=True, at_most_once=True)]))
    assert (result["plan"].status, backend.prompts) == (TaskStatus.FAILED, ["plan"])


@pytest.mark.parametrize("stored", [False, True])
async def test_a_failure_that_passed_takes_the_word_away_from_nobody(stored: bool) -> None:
    failure = BackendError(ErrorKind.OVERLOADED, "later")
    backend = talker({"plan": [failure, "no"], "These": [failure, "[]"]})
    planner = replace(PLANNER, retry=Retry(attempts=4))
    result = await runner_of(backend, MemoryStore() if stored else None).run(DAG([planner]))
    assert [prompt.partition(" ")[0] for prompt in backend.prompts] == ["plan", "plan", "These", "These"]
    assert [message.content for message in backend.requests[-1].history] == ["plan", "no"]
    assert (result["plan"].status, result.text["plan"]) == (TaskStatus.COMPLETED, "[]")


async def test_of_a_planner_that_asked_and_was_told_of_mistakes_nothing_is_kept_twice(store: Store) -> None:
    async def tea(_question: OpenQuestion) -> str:
        return "tea"

    backend = talker(
        {"plan": Reply("Which?", question=Question("Which?")), "tea": "no", "These": "[]", "next": [ValueError(), ""]}
    )
    runner = runner_of(backend, store, on_question=tea)
    await runner.run(DAG([PLANNER, Task("next", "next", continues="plan")]), "r")
    told = next(prompt for prompt in backend.prompts if prompt.startswith("These"))
    await runner.resume("r", retry_failed=True)
    await runner.runs.continue_task("r", "plan", "And?")
    for request, prompt in zip(backend.requests, backend.prompts, strict=True):
        if prompt in {"next", "And?"}:
            assert [message.content for message in request.history] == ["plan", "Which?", "tea", "no", told, "[]"]
    assert backend.prompts[-3:] == ["next", "next", "And?"]


async def test_after_a_resume_nobody_is_told_a_second_time(store: Store) -> None:
    """What is told lives with the process; that it was told is in the store."""
    run_stopped = []

    def answer(prompt: str, _opening: ConversationRequest) -> str:
        if prompt.startswith("These"):
            run_stopped[0].stop()
        return "no"

    async with runner_of(Talker(answer), store).start(DAG([PLANNER, Task("x", prompt="x")])) as run:
        run_stopped.append(run)
        await run.result()
    backend = talker({"plan": "no"})
    result = await runner_of(backend, store).resume(run.run_id)
    assert backend.prompts.count("plan") <= 1
    assert not [prompt for prompt in backend.prompts if prompt.startswith("These")]
    assert result["plan"].status is TaskStatus.FAILED


async def test_too_deep() -> None:
    """A task that was added by one that was added may not add any more here."""
    answers = {name: plan(spec(then, output="tasks")) for name, then in zip("abc", "bcd", strict=True)}
    result = await runner_of(talker({**answers, "These": plan(spec("d"))})).run(
        DAG([Task("a", prompt="a", adds_tasks=True)])
    )
    assert list(result.tasks) == ["a", "b", "c"]
    assert (result["b"].status, result["c"].status) == (TaskStatus.COMPLETED, TaskStatus.FAILED)
    assert "at depth 3, and max_depth is 2; raise max_depth" in (result["c"].error or "")


async def test_depth_is_counted_through_a_resume(store: Store) -> None:
    answers = {"a": plan(spec("b", output="tasks")), "b": plan(spec("c", output="tasks")), "c": ValueError("not now")}
    first = await runner_of(talker(answers), store).run(DAG([Task("a", prompt="a", adds_tasks=True)]))
    backend = talker({"c": plan(spec("d")), "These": plan(spec("d"))})
    result = await runner_of(backend, store).resume(first.run_id, retry_failed=True)
    assert result["c"].status is TaskStatus.FAILED
    assert "max_depth" in (result["c"].error or "")


async def test_two_planners_that_want_the_same_id() -> None:
    """All of a reply's tasks are added or none, whoever comes first."""
    answers = {"p": plan(spec("a"), spec("b")), "q": plan(spec("c"), spec("a")), "These": plan(spec("c"))}
    dag = DAG([Task("p", prompt="p", adds_tasks=True), Task("q", prompt="q", depends_on=["p"], adds_tasks=True)])
    result = await runner_of(talker(answers)).run(dag)
    assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["p", "q", "a", "b", "c"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=6,
)
FIELDS = ["id", "prompt", "depends_on", "backend", "continues", "for_each", "output", "retry", "weight", "timeout"]
SOUND = st.sampled_from(["plan", "x", "a", "b", "{{ x }}", "{{ item }}", ["x"], "main", "other", "tasks", 1, -1])
SPECS = st.lists(st.dictionaries(st.sampled_from(FIELDS), SOUND | JSON, max_size=5) | JSON, max_size=3)


@pytest.mark.slow
@settings(max_examples=size(50, 150))
@given(SPECS, SPECS)
async def test_no_plan_whatever_breaks_the_run(first: list, second: list) -> None:
    store = MemoryStore()
    answers = {"plan": Reply(plan(*first)), "These": Reply(plan(*second), tasks=tuple(first))}
    result = await runner_of(talker(answers), store).run(DAG([PLANNER, Task("x", prompt="x")]))
    assert result.status in {RunStatus.COMPLETED, RunStatus.FAILED}
    assert result["x"].status is TaskStatus.COMPLETED
    assert not result.degraded
    stored = await store.list_tasks(result.run_id)
    assert [(task.task_id, task.status) for task in stored] == [(t.id, t.status.value) for t in result.tasks.values()]


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (plan(spec("new", "x", for_each="list"), spec("new.2")), "id 'new.2' is reserved for a part of 'new', which"),
        (plan(spec("each.3")), "id 'each.3' is reserved for a part of 'each', which has for_each"),
        (plan(spec("old", "{{ item }}", for_each="list")), "its parts, and the run has a task 'old.1'"),
    ],
)
async def test_ids_of_parts_are_taken_also_before_there_are_any(store: Store, added: str, says: str) -> None:
    """Once the list is there, which may have been paid for, it would be too late."""
    each = Task("each", prompt="{{ item }}", for_each="list", depends_on=["plan"])
    backend = talker({"plan": added, "These": plan(spec("each-3")), "list": listed(["p", "q"])})
    dag = DAG([PLANNER, Task("list", prompt="list", output_schema={"type": "array"}), each, Task("old.1", prompt="x")])
    result = await runner_of(backend, store).run(dag, "r")
    assert result.status is RunStatus.COMPLETED
    assert says in str([prompt for prompt in backend.prompts if prompt.startswith("These")])
    assert {"each.1", "each.2", "each-3"} <= result.tasks.keys()
    assert (await runner_of(backend, store).resume("r")).status is RunStatus.COMPLETED


ONE = DAG([Task("a", "a")])


async def test_what_does_two_things_at_once_is_refused() -> None:
    both = Reply("?", question=Question("which?"), tasks=(spec("more"),))
    result = await ParallelRunner(talker({"a": both})).run(ONE)
    assert (
        result["a"].error
        == "the backend's reply cannot be stored: the reply has both a question and tasks; return one of the two"
    )
    policy = Scripted(by_end({"a": Decision(add=tasks("more"), end=RunStatus.COMPLETED)}))
    result = await ParallelRunner(talker()).run(ONE, policy=policy)
    assert result.status is RunStatus.FAILED
    assert "the decision both ends the run and adds tasks" in (result.error or "")


async def test_a_planner_that_was_told_of_mistakes_and_then_asks_says_nothing_twice() -> None:
    backend = talker(
        {"p": [plan({"id": "p"})], "These": [Reply("which?", question=Question("which?"))], "red": [plan(spec("n"))]}
    )
    store = MemoryStore()
    runner = ParallelRunner(backend, store=store)
    first = await runner.run(DAG([Task("p", "p", adds_tasks=True)]), "x")
    assert first.waiting == ("p",)
    await runner.resume("x", answers={"p": "red"})
    history = [message.content[:5] for message in backend.requests[2].history]
    assert history == ["p", '[{"id', "These", "which"]
