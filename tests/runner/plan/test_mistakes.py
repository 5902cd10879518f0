"""Plans with mistakes: each is reported with its place and what to do, and all of them at once."""

import pytest

from plait.runner.plan import PlanError, load_plan
from tests.support.plans.plan_mistakes import mistakes, tasks

CASES = {
    "unknown key": (tasks('{id: a, prompt: "", wieght: 2}'), 2, "tasks[0].wieght", "did you mean 'weight'?"),
    "unknown key without a like": (
        tasks('{id: a, prompt: "", xyzzy: b}'),
        2,
        "tasks[0].xyzzy",
        "there are id, prompt,",
    ),
    "unknown key on top": ("taks: []\n" + tasks('{id: a, prompt: ""}'), 1, "taks", "did you mean 'tasks'?"),
    "unknown retry key": (tasks('{id: a, prompt: "", retry: {tries: 3}}'), 2, "tasks[0].retry.tries", "attempts"),
    "unknown dependency": (
        tasks('{id: facts, prompt: ""}', '{id: b, prompt: "", depends_on: [facts, fatcs]}'),
        3,
        "tasks[1].depends_on[1]",
        "unknown task 'fatcs'; did you mean 'facts'?",
    ),
    "unknown single dependency": (
        tasks('{id: facts, prompt: ""}', '{id: b, prompt: "{{ facts }}", depends_on: fatcs}'),
        3,
        "tasks[1].depends_on",
        "unknown task 'fatcs'; did you mean 'facts'?",
    ),
    "unknown continues": (tasks('{id: a, prompt: "", continues: b}'), 2, "tasks[0].continues", "unknown task 'b'"),
    "duplicate id": (
        tasks('{id: a, prompt: ""}', '{id: a, prompt: ""}'),
        3,
        "tasks[1].id",
        "used twice; the first is in line 2",
    ),
    "duplicate key": (tasks('{id: a, prompt: "", id: b}'), 2, "tasks[0].id", "stands here twice"),
    "bad id": (tasks('{id: "a b", prompt: ""}'), 2, "tasks[0].id", "letters, digits"),
    "reserved id": (tasks('{id: item, prompt: ""}'), 2, "tasks[0].id", "reserved"),
    "constant as id": (tasks('{id: none, prompt: ""}', '{id: b, prompt: "{{ none }}"}'), 2, "tasks[0].id", "reserved"),
    "capital constant as id": (tasks('{id: "True", prompt: ""}'), 2, "tasks[0].id", "reserved"),
    "constant as input": ('inputs: {"false": 1}\n' + tasks('{id: a, prompt: ""}'), 1, "inputs.false", "reserved"),
    "cycle": (
        tasks(*(f'{{id: {a}, prompt: "", depends_on: {b}}}' for a, b in ("ac", "ba", "cb"))),
        2,
        "tasks[0].depends_on",
        "a -> b -> c -> a",
    ),
    "itself": (tasks('{id: a, prompt: "", depends_on: a}'), 2, "tasks[0].depends_on", "a -> a"),
    "undefined name": (
        "tasks:\n- id: a\n  prompt: |\n    one\n    {{ tpoic }}\n",
        5,
        "tasks[0].prompt",
        "neither a task nor an input",
    ),
    "not upstream": (
        tasks('{id: a, prompt: ""}', '{id: b, prompt: "{{ a }}"}'),
        3,
        "tasks[1].prompt",
        "add it to depends_on",
    ),
    "its own result": (tasks('{id: a, prompt: "{{ a }}"}'), 2, "tasks[0].prompt", "its own task's result"),
    "the own result of a family": (
        "inputs: {l: [1, 2]}\n" + tasks('{id: a, for_each: l, prompt: "{{ a }}"}'),
        3,
        "tasks[0].prompt",
        "its own task's result",
    ),
    "a result that comes later": (
        tasks('{id: a, prompt: "{{ b }}"}', '{id: b, prompt: "", depends_on: a}'),
        2,
        "tasks[0].prompt",
        "'b' waits for this very task",
    ),
    "dashed input": (
        "inputs: {my-input: 1}\n" + tasks('{id: a, prompt: "{{ my-input }}"}'),
        3,
        "tasks[0].prompt",
        'means a subtraction; write {{ results["my-input"] }} for a task, {{ inputs["my-input"] }} for an input',
    ),
    "id that begins with a digit": (
        "tasks:\n- {id: 1a, prompt: ''}\n- id: b\n  depends_on: 1a\n  prompt: |\n    one\n    {{ 1a }}\n",
        7,
        "tasks[1].prompt",
        'begins with a digit, so it is no plain name; write {{ results["1a"] }} for a task',
    ),
    "unknown input": (
        "inputs: {topic: x}\n" + tasks('{id: a, prompt: "{{ inputs.tpoic }}"}'),
        3,
        "tasks[0].prompt",
        "did you mean 'topic'?",
    ),
    "broken template": (
        "tasks:\n- id: a\n  prompt: |\n    one\n    {% if %}\n",
        5,
        "tasks[0].prompt",
        "cannot be read",
    ),
    "forbidden template": (tasks('{id: a, prompt: "{{ range(9) }}"}'), 2, "tasks[0].prompt", "calls are not allowed"),
    "text for a list": (
        tasks('{id: a, prompt: "", depends_on: 3}'),
        2,
        "tasks[0].depends_on",
        "a list, not the number 3",
    ),
    "number for text": (tasks("{id: a, prompt: 12}"), 2, "tasks[0].prompt", 'put it in quotes: "12"'),
    "missing prompt": (tasks("{id: a}"), 2, "tasks[0].prompt", "'prompt' is missing"),
    "task is text": (tasks("hello"), 2, "tasks[0]", "must be a mapping, not 'hello'"),
    "bad enum": (
        tasks('{id: a, prompt: "", failure_mode: hrad}'),
        2,
        "tasks[0].failure_mode",
        "must be one of hard, soft, skip, not 'hrad'; did you mean 'hard'?",
    ),
    "bad retry": (
        tasks('{id: a, prompt: "", retry: {attempts: 0}}'),
        2,
        "tasks[0].retry.attempts",
        "at least 1, not 0",
    ),
    "bad retry kind": (
        tasks('{id: a, prompt: "", retry: {on: [transent]}}'),
        2,
        "tasks[0].retry.on[0]",
        "did you mean 'transient'?",
    ),
    "quoted number": (tasks('{id: a, prompt: "", weight: "3"}'), 2, "tasks[0].weight", "write it without quotes"),
    "negative timeout": (tasks('{id: a, prompt: "", timeout: -1}'), 2, "tasks[0].timeout", "more than 0, not -1"),
    "odd timeout": (tasks('{id: a, prompt: "", timeout: 5 minutes}'), 2, "tasks[0].timeout", "'90s', '5m' or '1h'"),
    "bad schema": (
        tasks('{id: a, prompt: "", output_schema: {type: strin}}'),
        2,
        "tasks[0].output_schema.type",
        "not a valid JSON Schema",
    ),
    "schema elsewhere": (
        tasks('{id: a, prompt: "", output_schema: {$ref: "http://example.org/s"}}'),
        2,
        "tasks[0].output_schema.$ref",
        "leaves the schema",
    ),
    "unknown backend": (
        "backends: {fast: {kind: local}}\n" + tasks('{id: a, prompt: "", backend: fsat}'),
        3,
        "tasks[0].backend",
        "unknown backend 'fsat'; did you mean 'fast'?",
    ),
    "no backends": (tasks('{id: a, prompt: "", backend: deep}'), 2, "tasks[0].backend", "name it under 'backends'"),
    "unknown default backend": (
        "defaults: {backend: x}\n" + tasks('{id: a, prompt: ""}'),
        1,
        "defaults.backend",
        "'x'",
    ),
    "unknown kind": (
        "backends:\n  a: {kind: opnai}\n" + tasks('{id: a, prompt: ""}'),
        2,
        "backends.a.kind",
        "did you mean 'openai'?",
    ),
    "no kind": ("backends: {a: {model: x}}\n" + tasks('{id: a, prompt: ""}'), 1, "backends.a", "'kind' is missing"),
    "unknown backend key": (
        "backends:\n  a: {kind: openai, modle: x}\n" + tasks('{id: a, prompt: ""}'),
        2,
        "backends.a.modle",
        "did you mean 'model'?",
    ),
    "extra sets what plait sets": (
        "backends:\n  a: {kind: openai, extra: {stream: false}}\n" + tasks('{id: a, prompt: ""}'),
        2,
        "backends.a.extra",
        "extra may not hold stream",
    ),
    "bad call": (
        "backends: {a: {kind: function, call: x}}\n" + tasks('{id: a, prompt: ""}'),
        1,
        "backends.a.call",
        "file.py:name",
    ),
    "backend of a continued task": (
        "backends: {x: {kind: local}, y: {kind: local}}\n"
        + tasks('{id: a, prompt: "", backend: x}', '{id: b, prompt: "", continues: a, backend: y}'),
        4,
        "tasks[1].backend",
        "a conversation stays on its backend",
    ),
    "for_each over nothing that is there": (
        tasks('{id: a, prompt: "", for_each: zoo}'),
        2,
        "tasks[0].for_each",
        "unknown input or task 'zoo'; name an input that is a list, or a task that answers one",
    ),
    "item without for_each": (
        tasks('{id: a, prompt: "{{ item }}"}'),
        2,
        "tasks[0].prompt",
        "only in a task with for_each",
    ),
    "no tasks": ("name: x\ntasks: []\n", 2, "tasks", "there are no tasks"),
    "tasks missing": ("name: x\n", 1, "tasks", "'tasks' is missing"),
    "a list": ("- a\n- b\n", 1, "", "a plan is a mapping with the key 'tasks'; this holds a list"),
    "empty": ("", None, "", "this holds nothing"),
    "anchor": (tasks("{id: &x a, prompt: b}"), 2, "tasks[0].id", "anchors (&x)"),
    "tag": (tasks("{id: a, prompt: !!str b}"), 2, "tasks[0].prompt", "tags ("),
}


@pytest.mark.parametrize("case", CASES)
def test_one_mistake_gives_one_problem(case):
    text, line, where, words = CASES[case]
    (problem,) = mistakes(text)
    assert (problem.line, problem.where) == (line, where)
    assert words in problem.message
    place = "plan" if line is None else f"plan:{line}:{problem.column}"
    assert str(problem) == ": ".join(part for part in (place, where, problem.message) if part)


def test_members_of_a_family_report_a_mistake_once():
    text = "inputs: {l: [1, 2, 3]}\n" + tasks('{id: a, prompt: "{{ nope }}", for_each: l}')
    assert len(mistakes(text)) == 1


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(PlanError, match="cannot read the plan") as caught:
        load_plan(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_a_problem_names_the_file(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"tasks:\n- id: \xff\n")
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}:2:1: the file is not UTF-8")
