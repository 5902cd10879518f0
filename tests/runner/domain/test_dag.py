"""The graph's check: every mistake at once, each said so that it can be mended; linear, and networkx only on demand."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import DAG, Check, Retry, Task
from plait.errors import DAGError
from plait.events import NewTask
from plait.json_form import parsed
from tests.support.sizes import size


def problems(*tasks: Task, **inputs: str) -> list[str]:
    with pytest.raises(DAGError) as caught:
        DAG(tasks, inputs=inputs)
    return [str(problem) for problem in caught.value.problems]


def test_a_good_graph_keeps_its_tasks_in_order() -> None:
    dag = DAG([Task("b", "b", depends_on=["a"]), Task("a", "a")], name="two")
    assert [task.id for task in dag] == ["b", "a"]
    assert (len(dag), "a" in dag, "c" in dag, dag["b"].depends_on, dag.name) == (2, True, False, ["a"], "two")


def test_a_schema_that_cannot_be_used_is_a_mistake_of_its_task() -> None:
    fan = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    found = problems(
        Task("bomb", "bomb", output_schema={"$ref": "#/$defs/d0", "$defs": {**fan, "d40": {"type": "string"}}}),
        Task("typo", "typo", output_schema={"properties": {"a": {"type": "strin"}}}),
        Task("elsewhere", "elsewhere", output_schema={"items": {"$ref": "http://127.0.0.1:9/s"}}),
        Task(
            "good",
            "good",
            output_schema={"$defs": {"list": {"items": {"$ref": "#/$defs/list"}}}, "$ref": "#/$defs/list"},
        ),
    )
    assert len(found) == 3
    assert "too costly to check" in found[0]
    assert found[1].startswith("task 'typo': output_schema at $.properties.a.type: this is not a valid JSON Schema")
    assert "leaves the schema" in found[2]


def test_every_mistake_is_reported_at_once() -> None:
    found = problems(
        Task("facts", "facts"),
        Task("facts", "facts"),
        Task("../evil", "../evil"),
        Task("haiku", "haiku", depends_on=["fatcs"], timeout=0),
        Task("more", "more", continues="hiaku", weight=-1),
    )
    assert found == [
        "task 'facts': id 'facts' is used twice; task 1 of the list has the same id",
        "task '../evil': id '../evil' must have 1 to 64 letters, digits, '.', '_' or '-', and not begin with '.'",
        "task 'haiku': unknown task 'fatcs'; did you mean 'facts'?",
        "task 'haiku': timeout must be more than 0 seconds, not 0",
        "task 'more': unknown task 'hiaku'; did you mean 'haiku'?",
        "task 'more': weight must be a number from 0 up, not -1",
    ]


def test_a_cycle_is_spelt_out_from_its_first_task() -> None:
    found = problems(
        Task("start", "start"),
        Task("a", "a", depends_on=["start", "c"]),
        Task("b", "b", depends_on=["a"]),
        Task("c", "c", depends_on=["b"]),
        Task("after", "after", depends_on=["c"]),
    )
    assert found == ["task 'a': these tasks wait for each other: a -> b -> c -> a; remove one of these dependencies"]


def test_the_place_of_a_cycle_counts_from_the_first_of_the_tasks_that_are_added() -> None:
    dag = DAG([Task("x", "x"), Task("y", "y")])
    with pytest.raises(DAGError) as caught:
        dag.extend([Task("z", "z"), Task("a", "a", depends_on=["b"]), Task("b", "b", depends_on=["a"])])
    assert [(one.task_id, one.position) for one in caught.value.problems] == [("a", 1)]


def test_a_task_that_waits_for_itself_is_a_cycle() -> None:
    assert "a -> a" in problems(Task("a", "a", depends_on=["a"]))[0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"timeout": "5m"}, "timeout must be more than 0 seconds, not '5m'"),
        ({"weight": "2"}, "weight must be a number from 0 up, not '2'"),
        ({"retry": -1}, "retry must be a Retry or a number of retries from 0 up, not -1"),
        ({"retry": "3"}, "retry must be a Retry or a number of retries from 0 up, not '3'"),
        ({"aliases": {"x": "frist"}}, "alias 'x' refers to the unknown task 'frist'; did you mean 'first'?"),
        ({"aliases": {"x": ["first", "zz"]}}, "alias 'x' refers to the unknown task 'zz'"),
        ({"aliases": {"x": ["other"]}}, "alias 'x' refers to 'other', which is not upstream; add it to depends_on"),
        ({"aliases": {"x": {"first"}}}, "alias 'x' must be the id of a task or a list of ids, not {'first'}"),
        ({"aliases": {"x": 3}}, "alias 'x' must be the id of a task or a list of ids, not 3"),
    ],
)
def test_values_that_no_run_could_use_are_mistakes_of_the_graph(bad: dict, message: str) -> None:
    task = Task("a", "{{ first }}", depends_on=["first"], **bad)
    assert problems(Task("first", "first"), Task("other", "other"), task) == [f"task 'a': {message}"]


def test_an_alias_may_stand_for_anything_upstream() -> None:
    chain = [Task("first", "first"), Task("second", "second", depends_on=["first"])]
    DAG([*chain, Task("a", "{{ x }} {{ y }}", ["second"], aliases={"x": "first", "y": ("first", "second")})])


def test_of_very_many_mistakes_the_message_shows_twenty() -> None:
    with pytest.raises(DAGError) as caught:
        DAG(Task(f"t {i}", "x") for i in range(1300))
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[19][:11], lines[20]) == (21, "task 't 19'", "and 1,280 more")
    assert len(caught.value.problems) == 1300
    assert "more" not in str(DAGError(caught.value.problems[:20]))


def test_no_tasks_is_a_mistake() -> None:
    assert problems() == ["there are no tasks; add at least one"]


def test_prompts_in_place_of_tasks_are_refused() -> None:
    prompts: list[Any] = [Task("a", "Hi."), "Name a city."]
    with pytest.raises(TypeError, match=r"tasks\[1\] is str 'Name a city\.'; give Task\(ID, PROMPT\)"):
        DAG(prompts)


@pytest.mark.parametrize("bad", ["", ".hidden", "a/b", "a b", "ä", "x" * 65, "a\n", "inputs", "results", "item"])
def test_bad_ids_are_refused(bad: str) -> None:
    assert len(problems(Task(bad, "x"))) == 1


def test_prompts_may_use_inputs_and_what_is_upstream_and_nothing_else() -> None:
    DAG(
        [
            Task("a", "a"),
            Task("b", "b", depends_on=["a"]),
            Task("c", prompt="{{ a }} {{ b }} {{ who }}", depends_on=["b"]),
            Task("my-task", "my-task"),
            Task("d", prompt='{{ results["my-task"] }} {{ inputs.who }}', depends_on=["my-task"]),
        ],
        inputs={"who": "x"},
    )
    found = problems(
        Task("a", "a"),
        Task("b", prompt="{{ a }}"),
        Task("c", prompt="{{ nobody }}", depends_on=["a"]),
        Task("d", prompt="{{ b", depends_on=["a"]),
        Task("e", prompt="{{ item }}"),
        Task("f", prompt="{{ inputs.hwo }}"),
        Task("g", prompt='{{ results["b"] }}'),
        who="x",
    )
    assert "'a' is not upstream; add it to depends_on" in found[0]
    assert "neither a task nor an input" in found[1]
    assert found[2].startswith("task 'd': ")
    assert "for_each" in found[3]
    assert "did you mean 'who'?" in found[4]
    assert "'b' is not upstream" in found[5]
    assert len(found) == 6


def test_an_input_may_not_hide_a_task_or_a_reserved_name() -> None:
    found = problems(Task("a", "a"), a="1", item="2")
    assert "input 'a' is also the id of a task" in found[0]
    assert "input 'item' is also a reserved template name" in found[1]


def test_a_conversation_stays_on_its_backend() -> None:
    assert (
        "a conversation stays on its backend"
        in problems(Task("a", backend="deep"), Task("b", continues="a", backend="fast"))[0]
    )
    dag = DAG([Task("a", backend="deep"), Task("b", "b", continues="a"), Task("c", "c", continues="b"), Task("d", "d")])
    assert [dag.backend_of(task) for task in dag] == ["deep", "deep", "deep", None]
    assert dag["b"].upstream == ("a",)


def test_priorities_are_the_longest_remaining_path() -> None:
    dag = DAG(
        [
            Task("a", "a"),
            Task("b", "b", depends_on=["a"], weight=5),
            Task("c", "c", depends_on=["a"]),
            Task("d", "d", depends_on=["c"]),
        ]
    )
    assert dag.priorities() == [6, 5, 2, 1]
    assert dag.critical_path() == ["a", "b"]


def test_analysis_gives_a_networkx_graph() -> None:
    graph = DAG([Task("a", "a"), Task("b", "b", depends_on=["a"])]).graph()
    assert list(graph.edges) == [("a", "b")]
    assert graph.nodes["b"]["task"].id == "b"


def test_networkx_is_not_imported_to_check_a_graph() -> None:
    code = "import sys; from plait import DAG, Task; DAG([Task('a', 'a')]); sys.exit('networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@st.composite
def edges(draw: st.DrawFn) -> list[set[int]]:
    size = draw(st.integers(1, 12))
    return [draw(st.sets(st.integers(0, size - 1), max_size=3)) for _ in range(size)]


@given(edges())
def test_a_graph_is_refused_exactly_when_it_has_a_cycle(needs: list[set[int]]) -> None:
    def reaches(start: int, goal: int, seen: set[int]) -> bool:
        return any(n == goal or (n not in seen and reaches(n, goal, seen | {n})) for n in needs[start])

    cyclic = any(reaches(i, i, {i}) for i in range(len(needs)))
    tasks = [Task(f"t{i}", "x", depends_on=[f"t{n}" for n in sorted(needs[i])]) for i in range(len(needs))]
    if not cyclic:
        DAG(tasks)
        return
    with pytest.raises(DAGError, match="wait for each other") as caught:
        DAG(tasks)
    spelt = str(caught.value).split(": ")[2].split(";")[0].split(" -> ")
    assert spelt[0] == spelt[-1]
    for earlier, later in pairwise(spelt):
        assert int(earlier[1:]) in needs[int(later[1:])]


@pytest.mark.slow
def test_the_check_is_linear_in_fan_in_and_in_distant_names() -> None:
    """Each of these took minutes when it was quadratic."""
    many = size(30_000, 60_000)
    wide = [Task(f"t{i}", "x", depends_on=["a"]) for i in range(many)]
    DAG([Task("a", "a"), *wide, Task("z", "z", depends_on=[task.id for task in wide])])
    DAG([Task("t0", "t0"), *[Task(f"t{i}", prompt="{{ t0 }}", depends_on=[f"t{i - 1}"]) for i in range(1, 20_000)]])


def chain(length: int, back: int, start: int = 0) -> list[Task]:
    """Tasks in a row, each of which names the one `back` places before it."""
    return [
        Task(f"t{i}", prompt=f"{{{{ t{i - back} }}}}" if i >= back else "x", depends_on=[f"t{i - 1}"] if i else [])
        for i in range(start, start + length)
    ]


def test_the_check_keeps_nothing_of_who_waits_for_whom() -> None:
    """A set for each name took 100 KB a task here."""
    tasks = chain(500, 2)
    tracemalloc.start()
    dag = DAG(tasks)
    grown = dag.copy()
    grown.extend(chain(500, 2, start=500))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_500_000


@pytest.mark.parametrize("back", [1, 2, 40, 60, 300])
def test_names_are_found_however_far_upstream_and_nowhere_else(back: int) -> None:
    DAG(chain(400, back))
    beside = Task("beside", depends_on=["t300"], prompt=f"{{{{ t{300 - back} }}}} {{{{ t{300 + (back % 99)} }}}}")
    dag = DAG(chain(400, back))
    for wrong in (lambda: dag.extend([beside]), lambda: DAG([*chain(400, back), beside])):
        with pytest.raises(DAGError) as caught:
            wrong()
        (problem,) = caught.value.problems
        assert f"'t{300 + (back % 99)}' is not upstream" in str(problem)


def test_only_the_first_mistakes_get_a_hint() -> None:
    tasks = [Task(f"task-{i}", "x", depends_on=[f"tusk-{i}"]) for i in range(300)]
    found = problems(*tasks)
    assert len(found) == 300
    assert sum("did you mean" in one for one in found) == 20


@pytest.mark.parametrize(
    ("name", "is_taken"), [("e.1", True), ("e.20", True), ("e.01", False), ("e.x", False), ("f.1", False)]
)
def test_the_ids_of_parts_are_theirs(name: str, is_taken: bool) -> None:
    tasks = [Task("l", "l"), Task("e", prompt="{{ item }}", for_each="l"), Task("f", "f"), Task(name, "x")]
    if not is_taken:
        assert name in DAG(tasks)
        return
    with pytest.raises(DAGError) as caught:
        DAG(tasks)
    assert [str(problem) for problem in caught.value.problems] == [
        f"task {name!r}: id {name!r} is reserved for a part of 'e', which has for_each; choose another id"
    ]


def test_a_long_conversation_stays_on_its_backend() -> None:
    tasks = [Task("t0", backend="deep"), *(Task(f"t{n}", "x", continues=f"t{n - 1}") for n in range(1, 5_000))]
    dag = DAG(tasks)
    assert {dag.backend_of(task) for task in reversed(dag.tasks)} == {"deep"}
    grown = dag.copy()
    grown.extend([Task("one", backend="w"), Task("two", "two", continues="one")])
    assert [grown.backend_of(grown[name]) for name in ("two", "t4999")] == ["w", "deep"]
    grown.cut(5_000)
    grown.extend([Task("two", "two", continues="t5")])
    assert grown.backend_of(grown["two"]) == "deep"


@pytest.mark.parametrize(
    ("prompt", "further"),
    [("{{ it }}", (0,)), ("{{ results.it }}", (0,)), ("{% for it in results %}{{ it }}{% endfor %}", (0,)), ("x", ())],
)
def test_what_a_prompt_uses_is_needed_however_far_up_it_lies(prompt: str, further: tuple[int, ...]) -> None:
    """And no more: of a plan's families each task has aliases for all that lie before it."""
    last = Task("c", prompt, depends_on=["b"], aliases={"it": "a"})
    dag = DAG([Task("a", "a"), Task("b", "b", depends_on=["a"]), last])
    assert tuple(dag.needed(2)) == (1, *further)
    assert tuple(dag.needed_by(0)) == (1, *(2 for _ in further))


def test_a_number_of_retries_and_a_single_dependency_mean_the_same_as_their_long_forms() -> None:
    short = Task("b", "{{ ab }}", retry=3, depends_on="ab")
    assert short == Task("b", "{{ ab }}", retry=Retry(attempts=4), depends_on=("ab",))
    assert Task("a", "a", retry=0).retry == Retry(attempts=1)
    assert DAG([Task("ab", "ab"), short]).dependencies == [(), (0,)]


def test_the_rows_of_parts_share_their_texts_and_say_what_each_row_alone_would() -> None:
    """With items of all types, as 1, True and 1.0 are one key to Python; other settings within a list; two lists."""
    items: list[Any] = [{"a": 'é"'}, 1, True, 1.0, 0, False, "", "\ud800", [None], {"item": 0}, {}]
    settings: list[dict[str, Any]] = [
        {},
        {"timeout": 3.0, "metadata": {"item": 0}, "cache": True, "failure_mode": "soft", "max_cost": 0.5},
        {"retry": Retry(attempts=2), "check": Check(run=("true",)), "system": "item", "weight": 2},
    ]
    tasks = [Task(f"a{n}.{k}", "{{ item }}", item=item, **more) for n, more in enumerate(settings)
             for k, item in enumerate(items, 1)]  # fmt: skip
    behind = [Task(f"b.{k}", "{{ a0 }}", depends_on=[f"a0.{k}"], item=item, aliases={"a0": f"a0.{k}"})
              for k, item in enumerate(items, 1)]  # fmt: skip
    mixed = [
        Task(f"c.{k}", "{{ item }}", item=item, metadata={"k": (1, True)[k % 2]}) for k, item in enumerate(items, 1)
    ]
    dag = DAG([Task("first", "p"), *tasks, *behind, *mixed], inputs={"list": items, "no": [], "one": {"a": [1.0]}})
    inputs, rows = dag.stored
    assert rows == tuple(map(NewTask.of, dag))
    assert repr(parsed(inputs)) == repr(dag.inputs)
    assert DAG([Task("a", "a")]).stored[0] == "{}"


@pytest.mark.parametrize("wrong", [{"a": {1}}, {("a",): "x"}, {"a": "x", "b": float("nan")}, {1, 2}])
def test_a_wrong_element_is_found_among_rows_of_texts(wrong: Any) -> None:
    rows: list[Any] = [{"a": "x"}, {"a": "x", "b": "y"}, {}, {"a": 1.5}, ["x"], "x"]
    assert DAG([Task("a", "a")], inputs={"rows": rows}).inputs == {"rows": rows}
    with pytest.raises(DAGError, match="inputs have to be JSON, to be stored with the run: "):
        DAG([Task("a", "a")], inputs={"rows": [*rows, wrong]})


@pytest.mark.parametrize("field", ["prompt", "when", "run", "cwd", "env"])
def test_a_text_that_cannot_be_stored_is_one_mistake_whatever_it_names(field: str) -> None:
    text = "\ud800{{ x }}"
    wrong: dict[str, Any] = {field: {"run": ["p", "--", text], "env": {"A": text}}.get(field, text)}
    assert len(problems(Task(**{"id": "a", "prompt": "p", **wrong}))) == 1
