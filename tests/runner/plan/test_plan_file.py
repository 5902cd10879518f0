"""What a plan becomes: inputs, files, for_each, defaults; the shipped examples, the page and the schema."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest

from plait.backends.backend_specs import FunctionSpec, OpenAISpec
from plait.runner.plan import Plan, PlanError, parse_plan, plan_schema
from plait.runner.plan.plan_positions import read_source
from plait.task import FailureMode, Retry

ROOT = Path(__file__).parent.parent.parent.parent


def mistakes(text, **options):
    with pytest.raises(PlanError) as caught:
        parse_plan(text, **options)
    return list(caught.value.problems)


def tasks(*lines):
    return "tasks:\n" + "".join(f"- {line}\n" for line in lines)


@pytest.fixture
def folder(tmp_path):
    for name, text in {"b.md": "B" * 30, "a.md": "A\0\r\nx", "c.txt": "C", "d.png": "D", "sub/e.rst": "E"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe!")
    return tmp_path


def docs(folder, spec, **overrides):
    text = f"inputs: {{docs: {spec}}}\n" + tasks("{id: t, prompt: x}")
    return parse_plan(text, folder=folder, overrides=overrides).dag.inputs["docs"]


def names(values):
    return [value["name"] for value in values]


def test_files_by_glob_folder_and_name(folder):
    assert names(docs(folder, '{files: "*.md"}')) == ["a.md", "b.md"]
    assert names(docs(folder, "{files: .}")) == ["a.md", "b.md", "bad.txt", "c.txt"]
    assert names(docs(folder, '{files: "**/*.rst"}')) == ["e.rst"]
    assert docs(folder, "{files: sub/e.rst}") == [{"name": "e.rst", "path": "sub/e.rst", "text": "E"}]


def test_text_of_files_is_capped_and_can_be_stored(folder):
    texts = {value["name"]: value["text"] for value in docs(folder, "{files: ., max_chars: 4}")}
    assert texts == {"a.md": "A\ufffd\nx", "b.md": "BBBB", "bad.txt": "\ufffd\ufffd!", "c.txt": "C"}


def test_a_file_is_cut_only_at_max_chars(folder):
    text = "line\n" * 20_000
    (folder / "sub" / "e.rst").write_text(text)
    (whole,) = docs(folder, "{files: sub/e.rst}")
    assert whole["text"] == text
    (begin,) = docs(folder, "{files: sub/e.rst, max_chars: 20000}")
    assert begin["text"] == text[:20_000]


def test_a_file_that_is_too_large_is_a_mistake_with_both_numbers(folder):
    (folder / "sub" / "e.rst").write_text("\u00e4" * 1_000_000)
    (whole,) = docs(folder, "{files: sub/e.rst}")
    assert len(whole["text"]) == 1_000_000
    (folder / "sub" / "e.rst").write_text("\u00e4" * 2_345_678)
    text = "inputs: {docs: {files: sub/*.rst}}\n" + tasks("{id: t, prompt: x}")
    (problem,) = mistakes(text, folder=folder)
    assert problem.message == (
        f"'e.rst' in {folder / 'sub'} has 2,345,678 characters, and a file may have 1,000,000; split the file, or set "
        "max_chars to read only its beginning"
    )
    (begin,) = docs(folder, "{files: sub/e.rst, max_chars: 2000000}")
    assert len(begin["text"]) == 2_000_000


def test_typed_files_are_relative_to_where_one_is(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert names(docs(Path("/nowhere"), "{files: nothing}", docs="sub")) == ["e.rst"]
    assert names(docs(Path("/nowhere"), "{files: nothing}", docs=str(folder / "*.txt"))) == ["bad.txt", "c.txt"]


def test_too_many_files(folder):
    (problem,) = mistakes("inputs: {docs: {files: ., max_files: 3}}\n" + tasks("{id: t, prompt: x}"), folder=folder)
    assert problem.message == "'.' matches 4 files, but max_files is 3; raise it or match fewer"


def test_overrides_are_read_like_the_default():
    text = "inputs: {t: x, n: 1, f: false, l: [a], m: {a: 1}, r: {required: true}, s: {required: true}, e: }\n"
    given = {"t": "5", "n": "2.5", "f": "true", "l": "[no, 012]", "m": "{b: 2}", "r": "[x, y]", "s": "no", "e": "z"}
    plan = parse_plan(text + tasks("{id: a, prompt: x}"), overrides=given)
    assert plan.dag.inputs == {
        "t": "5", "n": 2.5, "f": True, "l": ["no", "012"], "m": {"b": 2}, "r": ["x", "y"], "s": "no", "e": "z",
    }  # fmt: skip


def test_for_each_pairs_up_and_collects():
    text = """\
inputs: {xs: [p, q], ys: [1, 2]}
tasks:
  - {id: a, for_each: xs, prompt: "{{ item }}"}
  - {id: b, for_each: xs, depends_on: a, prompt: "{{ a }}", continues: a}
  - {id: c, for_each: ys, depends_on: b, prompt: "{{ a }} {{ b }} {{ item }}"}
  - {id: d, depends_on: [b], prompt: "{{ a }} {{ b }}"}
  - {id: e, for_each: xs, depends_on: d, prompt: "{{ a }} {{ results.b }}"}
"""
    dag = parse_plan(text).dag
    assert [task.id for task in dag.tasks] == ["a.1", "a.2", "b.1", "b.2", "c.1", "c.2", "d", "e.1", "e.2"]
    assert [dag[name].item for name in ("a.1", "a.2", "c.2", "d")] == ["p", "q", 2, None]
    assert (dag["b.2"].depends_on, dag["b.2"].continues, dag["b.2"].aliases) == (("a.2",), "a.2", {"a": "a.2"})
    assert dag["c.1"].depends_on == dag["d"].depends_on == ("b.1", "b.2")
    assert dag["c.1"].aliases == dag["d"].aliases == {"a": ("a.1", "a.2"), "b": ("b.1", "b.2")}
    # Through d, e waits for every a and b, but the name means its partner.
    assert dag["e.2"].aliases == {"a": "a.2", "b": "b.2"}
    assert dag["e.2"].depends_on == ("d",)


def test_defaults_and_what_a_task_says_itself():
    text = """\
name: n
concurrency: 3
defaults: {backend: fast, failure_mode: soft, timeout: 1.5m, retry: {attempts: 5, base_delay: 2}}
backends:
  fast: {kind: openai, model: m, concurrency: 2}
  tool: {kind: function, call: "x.py:f"}
tasks:
  - {id: a, prompt: x}
  - id: b
    prompt: x
    depends_on: a
    backend: tool
    failure_mode: hard
    timeout: 3
    retry: {attempts: 1, on: [timeout]}
    output_schema: {type: string}
    weight: 2
    metadata: {owner: me}
"""
    plan = parse_plan(text)
    assert (plan.name, plan.concurrency, plan.default_backend) == ("n", 3, "fast")
    assert plan.backends == {
        "fast": OpenAISpec(kind="openai", model="m", concurrency=2),
        "tool": FunctionSpec(kind="function", call="x.py:f"),
    }
    a, b = plan.dag.tasks
    assert (a.backend, a.failure_mode, a.timeout, a.retry) == (None, FailureMode.SOFT, 90.0, Retry(5, 2.0))
    assert (b.depends_on, b.backend, b.failure_mode, b.timeout) == (("a",), "tool", FailureMode.HARD, 3)
    assert b.retry == Retry(1, 2.0, on=frozenset({"timeout"}))
    assert (b.output_schema, b.weight, b.metadata) == ({"type": "string"}, 2, {"owner": "me"})


def test_the_same_plan_in_three_formats(tmp_path):
    value = {"name": "x", "tasks": [{"id": "a", "prompt": "1"}, {"id": "b", "prompt": "{{ a }}", "depends_on": ["a"]}]}
    toml = (
        'name = "x"\n[[tasks]]\nid = "a"\nprompt = "1"\n[[tasks]]\nid = "b"\nprompt = "{{ a }}"\ndepends_on = ["a"]\n'
    )
    yaml = 'name: x\ntasks:\n- {id: a, prompt: "1"}\n- {id: b, prompt: "{{ a }}", depends_on: a}\n'
    plans = []
    for ending, text in {"json": json.dumps(value, indent="\t"), "toml": toml, "yml": yaml}.items():
        (tmp_path / f"p.{ending}").write_text(text)
        plans.append(Plan.load(tmp_path / f"p.{ending}"))
    assert [task.prompt for task in plans[0].dag.tasks] == ["1", "{{ a }}"]
    assert plans[0].dag["b"].depends_on == ("a",)
    assert plans[0].dag.tasks == plans[1].dag.tasks == plans[2].dag.tasks


def test_an_unnamed_plan_is_called_like_its_file(tmp_path):
    (tmp_path / "weekly.yaml").write_text(tasks("{id: a, prompt: x}"))
    plan = Plan.load(tmp_path / "weekly.yaml")
    assert (plan.name, plan.folder) == ("weekly", tmp_path)


CASES = {
    "for_each over nothing": (
        "inputs: {l: []}\n" + tasks("{id: a, prompt: x, for_each: l}"),
        3,
        "tasks[0].for_each",
        "empty",
    ),
    "for_each over a hole": (
        "inputs: {l: [1, null]}\n" + tasks("{id: a, prompt: x, for_each: l}"),
        3,
        "tasks[0].for_each",
        "element 2",
    ),
    "for_each over text": (
        "inputs: {l: abc}\n" + tasks("{id: a, prompt: x, for_each: l}"),
        3,
        "tasks[0].for_each",
        "input 'l' is 'abc'",
    ),
    "for_each over the unknown": (
        "inputs: {docs: [1]}\n" + tasks("{id: a, prompt: x, for_each: dcos}"),
        3,
        "tasks[0].for_each",
        "unknown input or task 'dcos'; did you mean 'docs'?",
    ),
    "for_each not upstream": (
        "inputs: {l: [1, 2]}\n" + tasks("{id: a, prompt: x, for_each: l}", '{id: b, prompt: "{{ a }}"}'),
        4,
        "tasks[1].prompt",
        "but 'a' is not upstream; add it to depends_on",
    ),
    "for_each too large": (
        f"inputs: {{l: {list(range(1500))}, m: {list(range(1500))}}}\n"
        + tasks("{id: a, prompt: x, for_each: l}", "{id: b, prompt: x, for_each: m, depends_on: a}"),
        3,
        "tasks",
        "3,000 tasks with 2,250,000 dependencies",
    ),
    "continues a family": (
        "inputs: {l: [1, 2]}\n" + tasks("{id: a, prompt: x, for_each: l}", "{id: b, prompt: x, continues: a}"),
        4,
        "tasks[1].continues",
        "one conversation for each element",
    ),
    "input called like a task": (
        "inputs: {a: x}\n" + tasks("{id: a, prompt: x}"),
        1,
        "inputs.a",
        "also the id of a task",
    ),
    "input without files": (
        "inputs:\n  docs: {files: nowhere/*.md}\n" + tasks("{id: a, prompt: x}"),
        2,
        "inputs.docs",
        "no file matches",
    ),
    "unknown key of files": (
        'inputs:\n  docs: {files: "*", max_char: 3}\n' + tasks("{id: a, prompt: x}"),
        2,
        "inputs.docs.max_char",
        "did you mean 'max_chars'?",
    ),
    "required input": (
        "inputs:\n  topic: {required: true}\n" + tasks("{id: a, prompt: x}"),
        2,
        "inputs.topic",
        "--set topic=VALUE",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mistakes_with_inputs_and_for_each(case):
    text, line, where, words = CASES[case]
    (problem,) = mistakes(text)
    assert (problem.line, problem.where) == (line, where)
    assert words in problem.message


def test_overrides(tmp_path):
    text = "inputs: {n: 3, flag: true, l: [a], t: x, docs: {files: '*.md'}}\n" + tasks("{id: a, prompt: x}")
    found = mistakes(
        text,
        folder=tmp_path,
        overrides={"n": "many", "flag": "maybe", "l": "a, b", "t": "fine", "docs": str(tmp_path / "no"), "nn": "1"},
    )
    assert {problem.where: problem.message.split(";")[0] for problem in found} == {
        "--set n": "must be like the default, which is the number 3: write it as 3",
        "--set flag": "must be like the default, which is true: write it as true or false",
        "--set l": "must be like the default, which is a list: write it as [a, b]",
        "--set docs": f"no file matches {str(tmp_path / 'no')!r}",
        "--set nn": "there is no input 'nn'",
    }


@pytest.mark.parametrize("text", ["[draft] hello", "{{ x }}", '[a] "b" it\'s', "plain", ' "quoted"', "[1, 2"])
def test_any_text_can_be_given_for_a_required_input_as_the_message_says(text):
    plan = "inputs: {r: {required: true}}\n" + tasks('{id: a, prompt: "{{ r }}"}')
    given = text
    if text.startswith(("[", "{")):
        (wrong,) = mistakes(plan, overrides={"r": text})
        (typed,) = shlex.split(wrong.message.partition("to pass text, write --set ")[2])
        given = typed.removeprefix("r=")
    assert parse_plan(plan, overrides={"r": given}).dag.inputs["r"] == text


def test_the_published_schema_is_the_model():
    published = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    assert published == plan_schema()
    jsonschema_rs.meta.validate(published)


@pytest.mark.parametrize("head", ["", 'name: "   "\n'])
def test_a_plan_without_a_name_or_a_suffix_is_called_like_its_file(tmp_path, head):
    (tmp_path / "night").write_text(head + tasks("{id: a, prompt: x}"))
    assert Plan.load(tmp_path / "night").name == "night"


@pytest.mark.parametrize("name", ["hello", "feedback", "letters"])
def test_examples(schema, name):
    path = ROOT / "examples" / f"{name}.yaml"
    schema.validate(read_source(path.read_text()).value)
    plan = Plan.load(path)
    assert len(plan.dag) == {"hello": 2, "feedback": 37, "letters": 3}[name]
    assert len(plan.dag.critical_path()) == {"hello": 2, "feedback": 3, "letters": 1}[name]


def test_blocks_of_the_page(schema):
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "guides" / "plan-files.md").read_text(), re.DOTALL)
    assert len(blocks) > 5
    for block in blocks:
        schema.validate(read_source(block).value)
        parse_plan(block, folder=ROOT)


def test_importing_the_package_reads_no_yaml():
    late = ("yaml", "pydantic", "jsonschema_rs", "jinja2")
    code = f"import sys, runner; sys.exit(any(name in sys.modules for name in {late}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_number_stands_for_the_retries_of_a_task_and_of_the_defaults(schema):
    text = tasks("{id: a, prompt: x, retry: 3}", "{id: b, prompt: x, depends_on: a, retry: {max_delay: 5}}")
    a, b = parse_plan("defaults: {retry: 0}\n" + text).dag
    assert (a.retry, b.retry) == (Retry(attempts=4), Retry(attempts=1, max_delay=5))
    plan = {"tasks": [{"id": "a", "prompt": "x", "retry": 3}]}
    assert schema.is_valid(plan)
    for wrong in (-1, 1000, True, "3"):
        plan["tasks"][0]["retry"] = wrong
        assert not schema.is_valid(plan)
        assert [one.where for one in mistakes(json.dumps(plan))] == ["tasks[0].retry"]


@pytest.mark.parametrize(
    ("written", "expected"), [("true", True), ("false", False), ("24h", 86_400.0), ("90", 90.0), (None, 3600.0)]
)
def test_the_cache_of_a_task_and_its_default(written, expected):
    own = "" if written is None else f", cache: {written}"
    (task,) = parse_plan(f"defaults: {{cache: 1h}}\ntasks: [{{id: a, prompt: x{own}}}]").dag
    assert task.cache == expected
    assert type(task.cache) is type(expected)


FUNCTION = "{f: {kind: function, call: 'work.py:f'}}"
OTHERS = "{f: {kind: function, call: 'work.py:f'}, m: {kind: openai, model: m}}"


@pytest.mark.parametrize(
    "text",
    [
        f"backends: {OTHERS}\n" + tasks('{id: a, backend: f, prompt: ""}'),
        f"backends: {OTHERS}\ndefaults: {{backend: f}}\n" + tasks('{id: a, prompt: ""}'),
        f"backends: {FUNCTION}\n" + tasks('{id: a, prompt: " "}'),
        f"backends: {FUNCTION}\nworkflow: [{{name: a, prompt: ''}}]",
    ],
)
def test_a_function_needs_no_prompt(text):
    (task,) = parse_plan(text).dag
    assert (task.prompt.strip(), task.backend) == ("", "f")


def test_files_may_stand_for_a_prompt(tmp_path):
    (tmp_path / "a.txt").write_text("Say hello.")
    (task,) = parse_plan(tasks('{id: a, files: a.txt, prompt: ""}'), folder=tmp_path).dag
    assert len(task.files) == 1
