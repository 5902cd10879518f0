"""Plans with mistakes: each is reported with its place and what to do, and all of them at once."""

import json
from pathlib import Path

import pytest

from plait.errors import PromptError
from plait.runner.plan import Plan, PlanError, PlanProblem, parse_plan
from plait.runner.prompts.prompt_template import render
from tests.support.plans.plan_mistakes import mistakes, tasks

SCHEMA = (
    "output_schema: {type: object, properties: {ok: {type: boolean}, why: {type: array, items: {properties: "
    "{text: {}}}}}}"
)
TO = "{$ref: '#/$defs/d"
CASES = {
    "a misspelt key of a target of notices": (
        "notify:\n- url_en: HOOK\n" + tasks("{id: a, prompt: x}"),
        2,
        "notify[0].url_en",
        "did you mean 'url_env'?",
    ),
    "a notice of something else": (
        "notify:\n- url_env: HOOK\n  on: [faild]\n" + tasks("{id: a, prompt: x}"),
        3,
        "notify[0].on[0]",
        "must be one of question, budget, parked, failed, done, not 'faild'; did you mean 'failed'?",
    ),
    "a target in two ways": (
        "notify:\n- url_env: HOOK\n  run: [tell]\n" + tasks("{id: a, prompt: x}"),
        3,
        "notify[0].run",
        "a target has one of url, url_env and run, and this one has url_env and run",
    ),
    "a secret in the place of its variable": (
        "notify:\n- url: https://hooks.slack.com/services/T/B/x\n" + tasks("{id: a, prompt: x}"),
        2,
        "notify[0].url",
        "a webhook of Slack is a secret; put it into an environment variable, and name that in url_env",
    ),
    "a link to more than the server": (
        "notify:\n- url_env: HOOK\n  link: https://plait.example.org/ui\n" + tasks("{id: a, prompt: x}"),
        3,
        "notify[0].link",
        "link is the address of the server alone, like https://plait.example.org",
    ),
    "unknown key": (tasks("{id: a, prompt: x, wieght: 2}"), 2, "tasks[0].wieght", "did you mean 'weight'?"),
    "a spare that is unknown": (
        "backends:\n  a: {kind: person, or_else: [b, c]}\n  b: {kind: person}\n"
        + tasks("{id: t, prompt: x, backend: a}"),
        2,
        "backends.a.or_else[1]",
        "unknown backend 'c'",
    ),
    "a spare of itself": (
        "backends: {a: {kind: person, or_else: [a]}}\n" + tasks("{id: t, prompt: x, backend: a}"),
        1,
        "backends.a.or_else[0]",
        "a backend cannot take over from itself",
    ),
    "a spare named twice": (
        "backends: {a: {kind: person, or_else: [b, b]}, b: {kind: person}}\n" + tasks("{id: t, prompt: x, backend: a}"),
        1,
        "backends.a.or_else[1]",
        "'b' is named twice",
    ),
    "a setting that a spare does not take": (
        "backends: {a: {kind: openai, or_else: [b]}, b: {kind: codex}}\n"
        + tasks("{id: t, prompt: x, backend: a, temperature: 0}"),
        3,
        "tasks[0].temperature",
        "backend 'b'",
    ),
    "unknown key without a like": (
        tasks("{id: a, prompt: x, xyzzy: b}"),
        2,
        "tasks[0].xyzzy",
        "there are id, prompt,",
    ),
    "a field that a command has not": (
        tasks("{id: t, run: [ls]}", '{id: a, prompt: "{{ t.cod }}", depends_on: [t]}'),
        3,
        "tasks[1].prompt",
        "the prompt uses {{ t.cod }}, but the answer of 't' has no field 'cod'; did you mean 'code'?",
    ),
    "a field that a schema has not": (
        tasks(f"{{id: s, prompt: x, {SCHEMA}}}", '{id: a, prompt: "{{ s.why.0.txt }}", depends_on: [s]}'),
        3,
        "tasks[1].prompt",
        "but the answer of 's' has no field 'txt'; did you mean 'text'?",
    ),
    "a condition on a field that a schema has not": (
        tasks(f"{{id: s, prompt: x, {SCHEMA}}}", """{id: a, prompt: x, depends_on: [s], when: '{{ s["fine"] }}'}"""),
        3,
        "tasks[1].when",
        """the condition uses {{ s["fine"] }}, but the answer of 's' has no field 'fine'; it has ok, why""",
    ),
    "a check of a field that a schema has not": (
        tasks(f'{{id: s, prompt: x, {SCHEMA}, check: {{passes: "{{{{ answer.okay }}}}"}}}}'),
        2,
        "tasks[0].check",
        "the check uses {{ answer.okay }}, but the answer has no field 'okay'; did you mean 'ok'?",
    ),
    "a field of the same row's answer": (
        "inputs: {rows: [1]}\n"
        + tasks(
            f"{{id: s, prompt: x, for_each: rows, {SCHEMA}}}",
            '{id: a, prompt: "{{ s.okay }}", for_each: rows, depends_on: [s]}',
        ),
        4,
        "tasks[1].prompt",
        "the prompt uses {{ s.okay }}, but the answer of 's' has no field 'okay'; did you mean 'ok'?",
    ),
    "the end of a loop on a field that a command has not": (
        tasks('{id: l, loop: {max: 2, until: "{{ t.kode }} == 0", tasks: [{id: t, run: [ls], codes: any}]}}'),
        2,
        "tasks[0].loop.until",
        "`until` uses {{ t.kode }}, but the answer of 't' has no field 'kode'; did you mean 'code'?",
    ),
    "unknown key on top": ("taks: []\n" + tasks("{id: a, prompt: x}"), 1, "taks", "did you mean 'tasks'?"),
    "unknown retry key": (tasks("{id: a, prompt: x, retry: {tries: 3}}"), 2, "tasks[0].retry.tries", "attempts"),
    "unknown key of a price": (
        "prices: {m: {input: 3, output: 1, xyzzy: 1}}\n" + tasks("{id: a, prompt: x}"),
        1,
        "prices.m.xyzzy",
        "there are input, output, cache_read, cache_write, cache_write_1h, reasoning",
    ),
    "an agent as a kind": (
        "backends: {b: {kind: gemini, system: Be brief., approval_mode: yolo}}\n" + tasks("{id: a, prompt: x}"),
        1,
        "backends.b.kind",
        "'gemini' is an agent of `kind: acp`; write `kind: acp` and `agent: gemini`",
    ),
    "an agent with a command": (
        "backends: {b: {kind: acp, agent: gemini, command: [gemini, --acp]}}\n" + tasks("{id: a, prompt: x}"),
        1,
        "backends.b",
        "needs either `agent: NAME` or `command: [...]`",
    ),
    "unknown key of limits": (
        'backends: {b: {kind: pydantic-ai, model: "a:b", limits: {xyzzy: 1}}}\n' + tasks("{id: a, prompt: x}"),
        1,
        "backends.b.limits.xyzzy",
        "there are requests_per_minute, tokens_per_minute",
    ),
    "unknown key of a host": (
        "hosts: {h: {kind: ssh, hosts: [a], xyzzy: 1}}\n" + tasks("{id: a, prompt: x}"),
        1,
        "hosts.h.xyzzy",
        "unknown key 'xyzzy'; there are kind, hosts, ssh, patience",
    ),
    "hosts without a kind": (
        "hosts: {h: {hosts: [a]}}\n" + tasks("{id: a, prompt: x}"),
        1,
        "hosts.h",
        "'kind' is missing; add one of ssh, dask",
    ),
    "an unknown kind of hosts": (
        "hosts: {h: {kind: sh, hosts: [a]}}\n" + tasks("{id: a, prompt: x}"),
        1,
        "hosts.h.kind",
        "must be one of ssh, dask, not 'sh'; did you mean 'ssh'?",
    ),
    "unknown dependency": (
        tasks("{id: facts, prompt: x}", "{id: b, prompt: x, depends_on: [facts, fatcs]}"),
        3,
        "tasks[1].depends_on[1]",
        "unknown task 'fatcs'; did you mean 'facts'?",
    ),
    "unknown single dependency": (
        tasks("{id: facts, prompt: x}", '{id: b, prompt: "{{ facts }}", depends_on: fatcs}'),
        3,
        "tasks[1].depends_on",
        "unknown task 'fatcs'; did you mean 'facts'?",
    ),
    "unknown continues": (tasks("{id: a, prompt: x, continues: b}"), 2, "tasks[0].continues", "unknown task 'b'"),
    "duplicate id": (
        tasks("{id: a, prompt: x}", "{id: a, prompt: x}"),
        3,
        "tasks[1].id",
        "used twice; the first is in line 2",
    ),
    "duplicate key": (tasks("{id: a, prompt: x, id: b}"), 2, "tasks[0].id", "is given twice"),
    "bad id": (tasks('{id: "a b", prompt: x}'), 2, "tasks[0].id", "letters, digits"),
    "reserved id": (tasks("{id: item, prompt: x}"), 2, "tasks[0].id", "reserved"),
    "constant as id": (tasks("{id: none, prompt: x}", '{id: b, prompt: "{{ none }}"}'), 2, "tasks[0].id", "reserved"),
    "capital constant as id": (tasks('{id: "True", prompt: x}'), 2, "tasks[0].id", "reserved"),
    "constant as input": ('inputs: {"false": 1}\n' + tasks("{id: a, prompt: x}"), 1, "inputs.false", "reserved"),
    "cycle": (
        tasks(*(f"{{id: {a}, prompt: x, depends_on: {b}}}" for a, b in ("ac", "ba", "cb"))),
        2,
        "tasks[0].depends_on",
        "a -> b -> c -> a",
    ),
    "itself": (tasks("{id: a, prompt: x, depends_on: a}"), 2, "tasks[0].depends_on", "a -> a"),
    "unknown task in a condition": (
        tasks("{id: facts, prompt: x}", '{id: b, prompt: x, depends_on: facts, when: "{{ fatcs.ok }}"}'),
        3,
        "tasks[1].when",
        "the condition uses {{ fatcs }}, which is neither a task nor an input; did you mean 'facts'?",
    ),
    "unknown task in a condition of several lines": (
        "tasks:\n- {id: a, prompt: x}\n- id: b\n  prompt: x\n  when: |\n    true\n    and {{ c }} == 1\n",
        7,
        "tasks[1].when",
        "the condition uses {{ c }}",
    ),
    "unreadable condition": (
        tasks('{id: a, prompt: x, when: "1 = 2"}'),
        2,
        "tasks[0].when",
        "the condition cannot be read: '=' follows a whole expression; write a comparison such as",
    ),
    "condition that is no text": (tasks("{id: a, prompt: x, when: true}"), 2, "tasks[0].when", "text"),
    "field of no element in a condition": (
        "inputs: {rows: [{a: 1}]}\n" + tasks('{id: a, prompt: x, for_each: rows, when: "{{ item.b }} == 1"}'),
        3,
        "tasks[0].when",
        "the condition uses {{ item.b }}, but no element of input 'rows' has that field; they have 'a'",
    ),
    "condition over a family that is not upstream": (
        "inputs: {rows: [1, 2]}\n"
        + tasks("{id: f, prompt: x, for_each: rows}", '{id: b, prompt: x, when: "{{ f | length }} > 1"}'),
        4,
        "tasks[1].when",
        "the condition uses {{ f }}, but 'f' is not upstream; add it to depends_on",
    ),
    "command over a family that is not upstream": (
        "inputs: {rows: [1, 2]}\n"
        + tasks("{id: f, prompt: x, for_each: rows}", '{id: b, run: [echo, --, "{{ f | length }}"]}'),
        4,
        "tasks[1].run",
        "the command uses {{ f }}, but 'f' is not upstream; add it to depends_on",
    ),
    "setting that a function does not have": (
        "backends: {f: {kind: function, call: 'os:getcwd'}}\n" + tasks("{id: a, prompt: x, temperature: 0}"),
        3,
        "tasks[0].temperature",
        "backend 'f' takes no temperature from a task (a task cannot set anything there); leave 'temperature' out",
    ),
    "setting that a local model does not have": (
        "backends: {l: {kind: local}, o: {kind: openai}}\n"
        + tasks("{id: a, prompt: x, backend: o, model: m}", "{id: b, prompt: x, backend: l, model: m}"),
        4,
        "tasks[1].model",
        "backend 'l' takes no model from a task (a task may set system, temperature there); leave 'model' out",
    ),
    "slots in another form": (
        "concurrency: {checks: 2}\n" + tasks("{id: a, prompt: x}"),
        1,
        "concurrency",
        "must be auto, or a whole number from 1 to 10,000, not {'checks': 2}",
    ),
    "too hot": (tasks("{id: a, prompt: x, temperature: 3}"), 2, "tasks[0].temperature", "2"),
    "missing file": (
        tasks("{id: a, prompt: x, files: [gone.md]}"),
        2,
        "tasks[0].files[0]",
        "no file matches 'gone.md' in",
    ),
    "result of a task as a file": (
        tasks("{id: a, prompt: x}", '{id: b, prompt: x, depends_on: a, files: "{{ a }}"}'),
        3,
        "tasks[1].files",
        "{{ a }} is no input; files may name inputs, and with for_each over an input {{ item }}",
    ),
    "wrong age of the cache": (
        tasks("{id: a, prompt: x, cache: soon}"),
        2,
        "tasks[0].cache",
        "must be a number of seconds or a text such as '90s', '5m' or '1h', not 'soon'",
    ),
    "no age of the cache": (
        tasks("{id: a, prompt: x, cache: 0}"),
        2,
        "tasks[0].cache",
        "must be true, false, a number",
    ),
    "undefined name": (
        "tasks:\n- id: a\n  prompt: |\n    one\n    {{ tpoic }}\n",
        5,
        "tasks[0].prompt",
        "neither a task nor an input",
    ),
    "not upstream": (
        tasks("{id: a, prompt: x}", '{id: b, prompt: "{{ a }}"}'),
        3,
        "tasks[1].prompt",
        "add it to depends_on",
    ),
    "its own result": (tasks('{id: a, prompt: "{{ a }}"}'), 2, "tasks[0].prompt", "the result of its own task"),
    "the own result of a family": (
        "inputs: {l: [1, 2]}\n" + tasks('{id: a, for_each: l, prompt: "{{ a }}"}'),
        3,
        "tasks[0].prompt",
        "the result of its own task",
    ),
    "a result that comes later": (
        tasks('{id: a, prompt: "{{ b }}"}', "{id: b, prompt: x, depends_on: a}"),
        2,
        "tasks[0].prompt",
        "'b' depends on this task",
    ),
    "dashed input": (
        "inputs: {my-input: 1}\n" + tasks('{id: a, prompt: "{{ my-input }}"}'),
        3,
        "tasks[0].prompt",
        'is read as a subtraction; write {{ results["my-input"] }} for a task, {{ inputs["my-input"] }} for an input',
    ),
    "id that begins with a digit": (
        "tasks:\n- {id: 1a, prompt: x}\n- id: b\n  depends_on: 1a\n  prompt: |\n    one\n    {{ 1a }}\n",
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
    "template of another file": (
        tasks("""{id: a, prompt: "{% include 'b' %}"}"""),
        2,
        "tasks[0].prompt",
        "a prompt cannot use another template",
    ),
    "unknown function": (
        tasks('{id: a, prompt: "{{ rang(9) }}"}'),
        2,
        "tasks[0].prompt",
        "the prompt uses {{ rang }}, which is neither a task nor an input",
    ),
    "text for a list": (
        tasks("{id: a, prompt: x, depends_on: 3}"),
        2,
        "tasks[0].depends_on",
        "a list, not the number 3",
    ),
    "number for text": (tasks("{id: a, prompt: 12}"), 2, "tasks[0].prompt", 'put it in quotes: "12"'),
    "missing prompt": (tasks("{id: a}"), 2, "tasks[0].prompt", "'prompt' is missing"),
    "task is text": (tasks("hello"), 2, "tasks[0]", "must be a mapping, not 'hello'"),
    "bad enum": (
        tasks("{id: a, prompt: x, failure_mode: hrad}"),
        2,
        "tasks[0].failure_mode",
        "must be one of hard, soft, skip, not 'hrad'; did you mean 'hard'?",
    ),
    "bad retry": (
        tasks("{id: a, prompt: x, retry: {attempts: 0}}"),
        2,
        "tasks[0].retry.attempts",
        "at least 1, not 0",
    ),
    "bad retry kind": (
        tasks("{id: a, prompt: x, retry: {on: [transent]}}"),
        2,
        "tasks[0].retry.on[0]",
        "did you mean 'transient'?",
    ),
    "quoted number": (tasks('{id: a, prompt: x, weight: "3"}'), 2, "tasks[0].weight", "write it without quotes"),
    "negative timeout": (tasks("{id: a, prompt: x, timeout: -1}"), 2, "tasks[0].timeout", "more than 0, not -1"),
    "odd timeout": (tasks("{id: a, prompt: x, timeout: 5 minutes}"), 2, "tasks[0].timeout", "'90s', '5m' or '1h'"),
    "bad schema": (
        tasks("{id: a, prompt: x, output_schema: {type: strin}}"),
        2,
        "tasks[0].output_schema.type",
        "not a valid JSON Schema",
    ),
    "costly schema": (
        "tasks:\n- id: a\n  prompt: x\n  output_schema:\n    $ref: '#/$defs/d0'\n    $defs:\n"
        + "".join(
            f"      d{n}: {{anyOf: [{{$ref: '#/$defs/d{n + 1}'}}, {{$ref: '#/$defs/d{n + 1}'}}]}}\n" for n in range(40)
        )
        + "      d40: {type: string}\n",
        29,
        "tasks[0].output_schema.$defs.d22.anyOf[1]",
        "too costly to check",
    ),
    "costly pattern": (
        tasks('{id: a, prompt: x, output_schema: {pattern: "((a{100}){100}){100}"}}'),
        2,
        "tasks[0].output_schema.pattern",
        "patterns are too large",
    ),
    "schema that refers to nothing": (
        tasks('{id: a, prompt: x, output_schema: {$ref: "#/$defs/none"}}'),
        2,
        "tasks[0].output_schema.$ref",
        "points to no schema",
    ),
    "schema elsewhere": (
        tasks('{id: a, prompt: x, output_schema: {$ref: "http://example.org/s"}}'),
        2,
        "tasks[0].output_schema.$ref",
        "leaves the schema",
    ),
    "unknown backend": (
        "backends: {fast: {kind: local}}\n" + tasks("{id: a, prompt: x, backend: fsat}"),
        3,
        "tasks[0].backend",
        "unknown backend 'fsat'; did you mean 'fast'?",
    ),
    "no backends": (tasks("{id: a, prompt: x, backend: deep}"), 2, "tasks[0].backend", "name it under 'backends'"),
    "unknown default backend": (
        "defaults: {backend: x}\n" + tasks("{id: a, prompt: x}"),
        1,
        "defaults.backend",
        "'x'",
    ),
    "unknown kind": (
        "backends:\n  a: {kind: opnai}\n" + tasks("{id: a, prompt: x}"),
        2,
        "backends.a.kind",
        "did you mean 'openai'?",
    ),
    "no kind": ("backends: {a: {model: x}}\n" + tasks("{id: a, prompt: x}"), 1, "backends.a", "'kind' is missing"),
    "unknown backend key": (
        "backends:\n  a: {kind: openai, modle: x}\n" + tasks("{id: a, prompt: x}"),
        2,
        "backends.a.modle",
        "did you mean 'model'?",
    ),
    "extra sets what plait sets": (
        "backends:\n  a: {kind: openai, extra: {stream: false}}\n" + tasks("{id: a, prompt: x}"),
        2,
        "backends.a.extra",
        "extra may not contain stream",
    ),
    "bad call": (
        "backends: {a: {kind: function, call: x}}\n" + tasks("{id: a, prompt: x}"),
        1,
        "backends.a.call",
        "file.py:name",
    ),
    "backend of a continued task": (
        "backends: {x: {kind: local}, y: {kind: local}}\n"
        + tasks("{id: a, prompt: x, backend: x}", "{id: b, prompt: x, continues: a, backend: y}"),
        4,
        "tasks[1].backend",
        "a conversation stays on its backend",
    ),
    "for_each over nothing that is there": (
        tasks("{id: a, prompt: x, for_each: zoo}"),
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
    "blank prompt": (tasks('{id: a, prompt: " "}'), 2, "tasks[0].prompt", "there is no prompt; write one"),
    "blank prompt for a model": (
        "backends: {m: {kind: openai, model: m}, f: {kind: function, call: 'a.py:f'}}\ndefaults: {backend: f}\n"
        + tasks('{id: a, backend: m, prompt: ""}'),
        4,
        "tasks[0].prompt",
        "there is no prompt; write one",
    ),
    "blank prompt for a person": (
        "backends: {p: {kind: person}}\n" + tasks('{id: a, prompt: ""}'),
        3,
        "tasks[0].prompt",
        "there is no prompt; write one",
    ),
    "no tasks": ("name: x\ntasks: []\n", 2, "tasks", "there are no tasks"),
    "tasks missing": ("name: x\n", 1, "tasks", "'tasks' is missing"),
    "a list": ("- a\n- b\n", 1, "", "a plan must be a mapping with the key 'tasks', not a list"),
    "empty": ("", None, "", "with the key 'tasks', not nothing"),
    "anchor": (tasks("{id: &x a, prompt: b}"), 2, "tasks[0].id", "anchors (&x)"),
    "tag": (tasks("{id: a, prompt: !!str b}"), 2, "tasks[0].prompt", "tags ("),
}


@pytest.mark.parametrize(
    ("answer", "use"),
    [
        (f"prompt: x, {SCHEMA}", "{{ s.data.ok }} {{ s.why.0.text }} {{ results['s'].ok }}"),
        (f"prompt: x, {SCHEMA}", "{% if s.fine is defined %}{{ s.fine }}{% endif %}"),
        ("prompt: x, output_schema: {type: object, additionalProperties: true, properties: {}}", "{{ s.fine }}"),
        ("prompt: x, output_schema: {properties: {ok: {}}, anyOf: [{required: [fine]}, {}]}", "{{ s.fine }}"),
        ("prompt: x, output_schema: {type: object}", "{{ s.fine }}"),
        ("prompt: x", "{{ s.fine }}"),
        ("run: [ls]", "{{ s.code }} {{ s.stdout }} {{ s.stderr }} {{ s.data.fine }}"),
        (f"prompt: x, repeat: 2, {SCHEMA}", "{{ s.0.fine }}"),
    ],
)
def test_a_field_that_the_answer_may_have_is_no_mistake(answer: str, use: str) -> None:
    parse_plan(tasks(f"{{id: s, {answer}}}", f'{{id: a, prompt: "{use}", depends_on: [s]}}'))


def test_a_condition_may_ask_whether_there_is_a_field() -> None:
    asks = "{id: a, prompt: x, depends_on: [s], when: '{{ s.fine }} is defined'}"
    parse_plan(tasks(f"{{id: s, prompt: x, {SCHEMA}}}", asks))


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
        Plan.load(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_a_problem_names_the_file(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"tasks:\n- id: \xff\n")
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}:2:1: the file is not UTF-8")


def test_the_value_of_a_misspelt_key_is_checked_too():
    text = 'tasks:\n  - {id: a, promt: "{{ resluts.b }}", depends_on: c}\n'
    assert [(problem.where, problem.message) for problem in mistakes(text)] == [
        (
            "tasks[0].prompt",
            "the prompt uses {{ resluts }}, which is neither a task nor an input; did you mean 'results'?",
        ),
        ("tasks[0].promt", "unknown key 'promt'; did you mean 'prompt'?"),
        ("tasks[0].depends_on", "unknown task 'c'"),
    ]


def test_everything_at_once():
    text = """\
nmae: x
inputs: {dcos: {files: 3}}
defaults: {failure_mode: hrad}
tasks:
  - id: facts
    prompt: "{{ tpoic }}"
    retry: {attempts: 0}
  - id: facts
    prompt: *x
    depend_on: fatcs
  - id: poem
    prompt: "{{ facts }}"
    depends_on: [fatcs, 3]
  - id: end
    backend: deep
    prompt: "{{ poem"
"""
    assert [(problem.line, problem.where) for problem in mistakes(text)] == [
        (1, "nmae"),
        (2, "inputs.dcos.files"),
        (3, "defaults.failure_mode"),
        (6, "tasks[0].prompt"),
        (7, "tasks[0].retry.attempts"),
        (8, "tasks[1].depends_on"),
        (8, "tasks[1].id"),
        (9, "tasks[1].prompt"),
        (10, "tasks[1].depend_on"),
        (13, "tasks[2].depends_on[1]"),
        (15, "tasks[3].backend"),
        (16, "tasks[3].prompt"),
    ]


def test_every_mistake_of_one_prompt():
    text = tasks(
        '{id: a, prompt: "x"}',
        """{id: b, depends_on: a, prompt: '{{ f(a) }} {{ nobody }} {{ a | shout }} {{ a + 1 }} {{ a is od }}'}""",
        "{id: c, depends_on: a, prompt: '{% for k, v in a %}{{ k }}{{ v }}{{ w }}{{ k | ad(1) }}{% endfor %}'}",
        "{id: d, depends_on: a, prompt: '{% set x = 1 %}{{ x }}{{ y - 1 }}{{ z-1 }}'}",
    )
    said = [(problem.where, problem.message.partition(";")[0]) for problem in mistakes(text)]
    assert said == [
        ("tasks[1].prompt", "the filter 'shout' is not available in prompts"),
        ("tasks[1].prompt", "the test 'od' is not available in prompts"),
        ("tasks[1].prompt", "the prompt uses {{ f }}, which is neither a task nor an input"),
        ("tasks[1].prompt", "the prompt uses {{ nobody }}, which is neither a task nor an input"),
        ("tasks[2].prompt", "the filter 'ad' is not available in prompts"),
        ("tasks[2].prompt", "the prompt uses {{ w }}, which is neither a task nor an input"),
        ("tasks[3].prompt", "{{ z-1 }} is read as a subtraction"),
        ("tasks[3].prompt", "the prompt uses {{ y }}, which is neither a task nor an input"),
    ]


def test_a_prompt_full_of_mistakes_tells_twenty_of_them():
    calls = " ".join(f"{{{{ a | f{number} }}}}" for number in range(1000))
    assert len(mistakes(tasks('{id: a, prompt: "x"}', f"{{id: b, depends_on: a, prompt: '{calls}'}}"))) == 20


def test_a_follow_ups_prompt_tells_every_mistake():
    follow = "follow_ups: [{after: coder, steps: [{role: tester, prompt: '{{ a | b }} {{ a is c }}'}]}]\n"
    found = mistakes(follow + tasks("{id: a, role: coder, prompt: x}"))
    assert [problem.where for problem in found] == ["follow_ups[0].steps[0].prompt"] * 2


def test_cycles_hide_neither_each_other_nor_other_mistakes():
    waiting = {"a": "b", "b": "a", "c": "d", "d": "e", "e": "c", "behind": "a"}
    lines = [f'{{id: {one}, prompt: "{{{{ {two} }}}}", depends_on: {two}}}' for one, two in waiting.items()]
    text = tasks(*lines, '{id: z, prompt: "{{ nobody }}"}')
    assert [(problem.where, problem.message.partition(";")[0]) for problem in mistakes(text)] == [
        ("tasks[0].depends_on", "these tasks wait for each other: a -> b -> a"),
        ("tasks[2].depends_on", "these tasks wait for each other: c -> e -> d -> c"),
        ("tasks[6].prompt", "the prompt uses {{ nobody }}, which is neither a task nor an input"),
    ]


def test_the_nearest_name_is_looked_for_a_few_times_only():
    listed = [f"{{id: task-{number}, prompt: x, depends_on: fatcs}}" for number in range(150)]
    found = mistakes(tasks("{id: facts, prompt: x}", *listed))
    assert found[0].message == "unknown task 'fatcs'; did you mean 'facts'?"
    assert sum("did you mean" in problem.message for problem in found) == 20  # to look for it takes long
    assert (len(found), found[-1].message) == (150, "unknown task 'fatcs'")


def test_the_message_has_two_thousand_of_them_and_says_how_many_more_there_are():
    error = PlanError(PlanProblem(f"mistake {number}") for number in range(3001))
    lines = str(error).splitlines()
    assert (len(error.problems), len(lines), lines[-1]) == (3001, 2001, "and 1,001 more")


def test_a_misspelt_key_is_not_missing_as_well() -> None:
    (problem,) = mistakes(tasks("{id: a, promt: x}"))
    assert (problem.where, problem.message) == ("tasks[0].promt", "unknown key 'promt'; did you mean 'prompt'?")
    assert len(mistakes(tasks("{id: a, xyzzy: x}"))) == 2
    assert len(mistakes(tasks("{id: a, promt: x}", "{id: b}"))) == 2


ROWS = "inputs: {rows: [[1, 2], [3]]}\n"
FAMILY = '{id: part, prompt: "{{ item }}", for_each: rows}'


@pytest.mark.parametrize(
    "further",
    [
        ['{id: b, prompt: "{{ item }}", for_each: part}'],
        ['{id: b, prompt: "{{ item }} {{ part }}", for_each: part}'],
        ['{id: b, prompt: "{{ item }}", for_each: part, depends_on: part, continues: part}'],
        [
            '{id: b, prompt: "{{ item }}", for_each: part}',
            '{id: c, prompt: "{{ b }} {{ part }}", depends_on: b, when: "{{ b | length }} > 1"}',
        ],
    ],
)
def test_a_for_each_over_the_tasks_of_another_goes_over_the_list_of_each(further: list[str]) -> None:
    dag = parse_plan(ROWS + tasks(FAMILY, *further)).dag
    parts = [task for task in dag if task.id.startswith("part.")]
    assert [(task.id, task.for_each, task.item) for task in dag if task.id.startswith("b.")] == [
        (f"b.{number}", part.id, part.item) for number, part in enumerate(parts, 1)
    ]
    assert all(dag[f"b.{number}"].upstream == (part.id,) for number, part in enumerate(parts, 1))


def test_a_for_each_over_the_tasks_of_a_broken_one_is_not_reported() -> None:
    (problem,) = mistakes(tasks(FAMILY, '{id: b, prompt: "{{ item }}", for_each: part}'))
    assert "unknown input or task 'rows'" in problem.message


TASK = "tasks:\n  - id: t\n    for_each: people\n    prompt: |\n"


LETTER = TASK + '      To {{ item["name"] }}\n      on {{ item.topic }}\n'


NAMES = [{"name": "Ada", "age": 3}, {"name": "Bo"}]


def of_prompt(prompt: str, people: object) -> list[PlanProblem]:
    plan = {"inputs": {"people": people}, "tasks": [{"id": "t", "for_each": "people", "prompt": prompt}]}
    try:
        parse_plan(json.dumps(plan), format="json")
    except PlanError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    ("header", "have"),
    [
        ("name, topic", "they have 'name', ' topic'; did you mean ' topic'?"),
        ("name,Topic", "they have 'name', 'Topic'; did you mean 'Topic'?"),
        ("name,place", "they have 'name', 'place'"),
    ],
)
def test_a_column_that_is_not_there_is_a_mistake_of_the_plan(tmp_path: Path, header: str, have: str) -> None:
    (tmp_path / "p.csv").write_text(f"{header}\nAda,x\nBo,y\n")
    (tmp_path / "plan.yaml").write_text(f"inputs: {{people: {{rows: p.csv}}}}\n{LETTER}")
    said = "the prompt uses {{ item.topic }}, but no element of input 'people' has that field; "
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "plan.yaml")
    assert str(caught.value) == f"{tmp_path / 'plan.yaml'}:7:1: tasks[0].prompt: {said}{have}"


def test_it_is_the_same_for_files_and_for_a_list_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    (problem,) = of_prompt("{{ item.nam }}", NAMES)
    assert problem.message.endswith("; they have 'name', 'age'; did you mean 'name'?")
    with pytest.raises(PlanError, match=r"they have 'name', 'path', 'text'; did you mean 'text'"):
        parse_plan(f"inputs: {{people: {{files: '*.md'}}}}\n{LETTER.replace('topic', 'texts')}", folder=tmp_path)
    (problem,) = of_prompt("{{ item['first name'] }}", ["Ada", 1])
    assert problem.message == (
        "the prompt uses {{ item['first name'] }}, but no element of input 'people' has that field; they have no fields"
    )
    (problem,) = of_prompt("{{ item.x }}", [{f"column {number}": 1 for number in range(30)}])
    assert problem.message.endswith("'column 18', 'column 19', ...")


def test_fields_that_one_element_has_or_that_nobody_knows_are_left_to_the_run() -> None:
    assert not of_prompt("{{ item.age }}", NAMES)
    tasks = [{"id": "p", "prompt": "x"}, {"id": "t", "for_each": "p", "prompt": "{{ item.x }}"}]
    parse_plan(json.dumps({"tasks": tasks}), format="json")


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ item.q | default('x') | upper }}{{ item.q.r | default(item.q) | default('x') }}",
        "{% if item.q is defined %}{{ item.q }}{% endif %}",
        "{% if item.q is undefined or item.q == 'x' %}{% endif %}",
        "{% if item.name == 'Eve' %}{{ item.q }}{% elif item.name == 'Fay' %}{{ item.q }}{% endif %}",
        "{{ item.q if item.name == 'Eve' else item.name }}",
        "{% if item.name == 'Eve' and item.q %}{% endif %}{% if item.name or item.q %}{% endif %}",
        "{% for part in none_here %}{{ item.q }}{% endfor %}",
        "{% for item in others %}{{ item.q }}{% endfor %}",
        "{% if item.q in none_here %}{% endif %}",
        "{{ others[0].q }}",
    ],
)
def test_a_prompt_that_does_without_the_field_is_right(prompt: str) -> None:
    inputs = {"people": NAMES, "none_here": [], "others": [{"q": 1}]}
    plan = {"inputs": inputs, "tasks": [{"id": "t", "for_each": "people", "prompt": prompt}]}
    dag = parse_plan(json.dumps(plan), format="json").dag
    assert all(render(task.prompt, {**inputs, "item": task.item}) is not None for task in dag.tasks)


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ item.q.r | upper | truncate(3) }}",
        "{{ item['q'][0] }}",
        "{% if item.q %}x{% endif %}",
        "{% if not item.q %}x{% else %}y{% endif %}",
        "{% if item.q or true %}x{% endif %}",
        "{% if 1 == item.q %}x{% endif %}",
        "{% if 'a' in item.q %}x{% endif %}",
        "{{ 1 if item.q == 2 else 3 }}",
        "{% for part in item.q | sort %}x{% endfor %}",
    ],
)
def test_what_is_a_mistake_could_not_be_rendered(prompt: str) -> None:
    (problem,) = of_prompt(prompt, NAMES)
    assert "the prompt uses {{ item.q }}, but" in problem.message
    with pytest.raises(PromptError, match="has no field 'q'"):
        render(prompt, {"item": NAMES[0]})


@pytest.mark.parametrize("kind", ["openai, model: m", "anthropic, model: m", "claude-code", "codex"])
def test_a_password_in_a_url_is_not_repeated(kind: str) -> None:
    text = f"backends:\n  o: {{kind: {kind}, base_url: 'http://me:hunter2@127.0.0.1/v1'}}\n" + tasks(
        "{id: a, prompt: x}"
    )
    with pytest.raises(PlanError, match=r"o\.base_url: a URL with a user or password does not fit") as caught:
        parse_plan(text)
    assert "hunter2" not in str(caught.value)


def test_a_mistake_in_spares_is_reported_at_its_place() -> None:
    plan = "backends:\n  a: {kind: person, or_else: [a]}\n  b: {kind: person, or_else: [c]}\n"
    plan += "  c:\n    kind: person\n    or_else:\n      - b\n      - b\n" + tasks("{id: t, prompt: x, backend: b}")
    found = [(one.line, one.column, one.where) for one in mistakes(plan)]
    assert found == [(2, 31, "backends.a.or_else[0]"), (8, 9, "backends.c.or_else[1]")]
