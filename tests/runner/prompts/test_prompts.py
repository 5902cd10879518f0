"""Prompts: constructs, results, mistakes, and the limits of hostile values and of text that a model wrote."""

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PromptError
from plait.runner.prompts.jinja_template import Template
from plait.runner.prompts.prompt_names import PromptNames
from plait.runner.prompts.prompt_template import check_plain, is_plain, names_used, parse_names, render

REVIEW = {"label": "good", "score": 3}
VALUES = {
    "loop": "a loop",
    "facts": "The Moon {{ is }} round",
    "review": REVIEW,
    "parts": [3, 1, 2],
    "nothing": None,
    "yes": True,
    "results": {"my-task": "dashed", "review": REVIEW},
    "inputs": {"topic": "rivers"},
    "item": {"name": "a.md", "items": [{"keys": "of a ring"}]},
}


def error(prompt, values=VALUES, **options):
    with pytest.raises(PromptError) as caught:
        render(prompt, values, **options)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", ""),
        ("no template { at } all", "no template { at } all"),
        ("{{ facts }}", "The Moon {{ is }} round"),
        ("{{facts}}|{{  yes\n}}|{{ nothing }}.", "The Moon {{ is }} round|true|."),
        ("{{ review }} {{ parts }}", '{"label": "good", "score": 3} [3, 1, 2]'),
        ("{{ review.label }}{{ review['score'] }}{{ parts[0] }}{{ parts[-1] }}", "good332"),
        ("{{ parts.0 }}{{ item.items[0].keys }}{{ item['items'].0['keys'] }}", "3of a ringof a ring"),
        ("{{ '{{' }} {{'{%'}} {{ facts }}", "{{ {% The Moon {{ is }} round"),
        ('{{ results["my-task"] }} {{ inputs.topic }} {{ item.name }}', "dashed rivers a.md"),
        ("{% if review.score > 2 and not nothing %}yes{% else %}no{% endif %}", "yes"),
        (
            "{% for p in parts if p != 1 %}{{ loop.index }}:{{ p }}{% if not loop.last %},{% endif %}{% endfor %}",
            "1:3,2:2",
        ),
        ("{% for key in review %}{{ key }}={{ review[key] }};{% endfor %}", "label=good;score=3;"),
        (
            "{{ parts | sort | join(', ') }} {{ parts | length }} {{ parts | first }} {{ parts | last }}",
            "1, 2, 3 3 3 2",
        ),
        ("{{ missing | default('none') }} {{ review.missing | default('none') }}", "none none"),
        ("{{ nothing | default('empty', true) }}", "empty"),
        (
            "{{ 'a b c' | truncate(4) }} {{ facts | truncate(11) }} {{ 'x' | upper | lower | trim }}",
            "a... The... x",
        ),
        (
            "{{ review | truncate(12) }} {{ yes | upper }} {{ [review, none, yes] | join('; ') }}",
            '{"label":... TRUE {"label": "good", "score": 3}; ; true',
        ),
        ("{% for key, value in review | items %}{{ key }}={{ value }};{% endfor %}", "label=good;score=3;"),
        ("{% set two = 2 %}{{ two * review.score + 1 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ parts[1:] }}", "7 3 1024 [1, 2]"),
        ("{% for n in range(2) %}{{ n - 1 }}{% endfor %} {{ loop }}", "-10 a loop"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}", "abab"),
        ("{% set n = namespace(sum=0) %}{% for p in parts %}{% set n.sum = n.sum + p %}{% endfor %}{{ n.sum }}", "6"),
        ("{{ parts | map('string') | list }} {{ parts | select('odd') }}", '["3", "1", "2"] [3, 1]'),
        ("{{ 2.567 | round(1) }} {{ [1, 1, 2] | unique | tojson }} {{ 'aXa' | replace('X', '-') }}", "2.6 [1, 2] a-a"),
        ("{{ review | tojson(indent=1) }}", '{\n "label": "good",\n "score": 3\n}'),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{% raw %}{{ facts }}{% endraw %}{{ '{{' }}", "{{ facts }}{{"),
        ("{# no {{ facts }} #} .a{#b}", f"{{# no {VALUES['facts']} #}} .a{{#b}}"),
        ("{% if facts %}{# yes #}{% endif %} {#", "{# yes #} {#"),
        ("{{ 'x' if yes else 'y' }}{{ missing is defined }}{{ 'a' in 'abc' }}", "xfalsetrue"),
    ],
)
def test_renders(prompt, expected):
    assert render(prompt, VALUES) == expected


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
@pytest.mark.parametrize("start", ["", "\n"])
def test_both_paths_keep_the_same_line_ends(start, end):
    values = {"a": "x\r\ny"}
    plain, long = (render(f"{start}one\r\n{name}{end}", values) for name in ("{{ a }}", "{{ a|default('') }}"))
    assert plain == long == f"{start}one\nx\r\ny{end}"


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(), min_size=3))
def test_values_come_out_as_they_are(values):
    expected = f"{values['a']}|{values['b']}|{values['c']}"
    assert render("{{ a }}|{{ b }}|{{ c }}", values) == expected
    assert render("{{ a }}|{{ b }}|{{ c }}{% if true %}{% endif %}", values) == expected


@given(st.text(alphabet="{}%# ab|.[]()'\"-+*\n1,=", max_size=60))
def test_no_template_raises_anything_but_prompt_error(prompt):
    try:
        names = names_used(prompt)
        text = render(prompt, {"a": "A", "b": {"a": [1]}, "ab": None})
    except PromptError:
        return
    assert isinstance(names, PromptNames)
    assert isinstance(text, str)


def test_names():
    used = names_used(
        '{{ a }} {{ results["my-task"] }} {{ results.other }} {{ inputs.topic }} {{ inputs["x-y"] }}'
        "{% for p in parts %}{{ p }}{{ loop.index }}{{ item.x }}{% endfor %}{{ b.c | default(d) }}{{ item.y }}"
        "{% set e = range(3) %}{{ e }}{{ joiner }}"
    )
    assert used.names == {"a", "results", "inputs", "parts", "item", "b", "d", "joiner"}
    assert used.results == {"my-task", "other"}
    assert used.inputs == {"topic", "x-y"}
    assert used.item == {"y"}
    assert names_used("{{ a }}{{ b }}{{ a }}") == PromptNames(frozenset("ab"))
    assert names_used("nothing") == PromptNames()
    # A name that a loop defines is free again after it.
    assert names_used("{% for x in y %}{{ x }}{% endfor %}{{ x }}").names == {"x", "y"}
    assert not names_used("{% for item in y %}{{ item.z }}{% endfor %}").item
    assert not names_used("{% for results in y %}{{ results.z }}{% endfor %}").results


PLAIN = [
    "{{ facts }} {{facts}}",
    "{{ review.label }}{{ review['label'] }}{{ parts[0] }}{{ parts.0 }}{{ parts[-1] }}",
    '{{ results["my-task"] }}{{ results.review.score }}{{ inputs.topic }}{{ item["name"] }}',
    "{{ '{{' }}{{ '{%' }} { facts } }} %} {# facts #} {",
    "{{ range.name }}{{ loop.name }}{{ if.name }}{{ super }}{{ caller }}",
    "{{ if }}{{ for }}{{ in }}{{ and }}{{ or }}{{ is }}{{ else }}{{ loop }}{{ range }}{{ dict }}",
]
WORDS = ["if", "for", "in", "and", "or", "is", "else", "loop", "range", "dict", "super", "caller"]


@pytest.mark.parametrize("prompt", PLAIN)
def test_the_template_language_gives_plain_prompts_the_same_meaning(prompt):
    values = {**VALUES, **{word: {"name": word} for word in WORDS}}
    template = Template(prompt)
    assert is_plain(prompt)
    assert names_used(prompt) == template.names
    assert render(prompt, values) == template.render(values, 1000)


PATHS = st.from_regex(r"[ab](\.a|\.0|\[0\]|\[-1\]|\['a'\]|\[\"a b\"\]){0,3}", fullmatch=True)


@given(PATHS, st.sampled_from([{"a": [{"a": 1, "a b": [2]}]}, [[{"a": "x"}], {}], "text", 1.5, None]))
def test_the_template_language_looks_up_the_same_fields(path, value):
    prompt, values = f"x\n{{{{ {path} }}}}", {"a": value, "b": value}
    results = []
    for rendered in (lambda: render(prompt, values), lambda: Template(prompt).render(values, 1000)):
        try:
            results.append(rendered())
        except PromptError as mistake:
            results.append((mistake.line, str(mistake).partition(" ")[2]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("prompt", "line", "words"),
    [
        ("\n{{ review.lable }}", 2, "review has no field 'lable'; it has label, score"),
        ("{{ review['lable'] }}", 1, "review has no field 'lable'; it has label, score"),
        ("{% if 1 %}\n{{ results.review.lable }}{% endif %}", 2, "results.review has no field 'lable'; it has label"),
        ("{% if 1 %}\n{{ review['lable'] | upper }}{% endif %}", 2, "review has no field 'lable'; it has label, score"),
        ("{{ review.lable * 2 }}", 1, "review has no field 'lable'"),
        ("\n\n{{ fcts }}", 3, "unknown name 'fcts'; the prompt may use facts"),
        ("{% if 1 %}{% endif %}\n{{ fcts }}", 2, "unknown name 'fcts'"),
        ("{{ parts[7] }}", 1, "parts is a list of 3, so it has no 7"),
        ("{{ parts[7] | upper }}", 1, "parts is a list of 3, so it has no 7"),
        ("{{ facts.upper }}", 1, "facts is a text, so it has no field 'upper'"),
        ("{{ nothing.a }}", 1, "nothing is an empty value, so it has no field 'a'"),
        ("{{ my-task }}", 1, 'write {{ results["my-task"] }}'),
        ("{{ a-b-1.field }}", 1, 'write {{ results["a-b-1"] }}'),
        ("{{ 1a }}", 1, 'write {{ results["1a"] }}'),
        ("\n{{ a", 2, "cannot be read"),
        ("{{{ facts }}}", 1, "to write two braces as they are"),
        ("{{ 1 < 'a' }}", 1, "not supported"),
        ("\n{{ facts | uper }}", 2, "the filter 'uper' is not available in prompts; did you mean 'upper'?"),
        (
            "{% if facts is sting %}{% endif %}",
            1,
            "the test 'sting' is not available in prompts; did you mean 'string'?",
        ),
        ("{% include '/etc/passwd' %}", 1, "a prompt cannot use another template"),
        ("{% import 'x' as x %}{{ x }}", 1, "a prompt cannot use another template"),
        ("{% extends 'x' %}", 1, "a prompt cannot use another template"),
        ("{% for x in parts %}{{ loop }}{% endfor %}", 1, "a LoopContext is not JSON"),
        ("{{ range }}", 1, "unknown name 'range'"),
        ("a\n{{ self }}", 2, "'self' means something else in templates; write {{ results[\"self\"] }}"),
        ("{{ self.facts }}", 1, "'self' means something else in templates"),
        ("{{ lipsum(1) }}", 1, "unknown name 'lipsum'"),
        ("{{ facts | random }}", 1, "the filter 'random' is not available in prompts"),
    ],
)
def test_mistakes_say_where_and_what(prompt, line, words):
    caught = error(prompt)
    assert words in str(caught)
    assert caught.line == line


@pytest.mark.parametrize(
    ("prompt", "names"),
    [("{{ range(2) }}", set()), ("{{ range }}", {"range"}), ("{{ range(2) }}{{ range }}", {"range"})],
)
def test_a_function_used_as_a_value_is_a_name(prompt: str, names: set[str]):
    assert parse_names(prompt)[0].names == names


def test_every_mistake_of_a_prompt_is_found_at_once():
    names, mistakes = parse_names("{{ a | f }}\n{% if a is g %}{{ b }}{% endif %}\n{% include c %}{{ d-e }}{{ a | f }}")
    assert names.names == {"a", "b", "c"}
    assert [(mistake.line, str(mistake).partition("'")[0].partition(";")[0]) for mistake in mistakes] == [
        (1, "the filter "),
        (2, "the test "),
        (3, "a prompt cannot use another template: there is no include, import or extends"),
        (3, "the filter "),
        (3, "{{ d-e }} is read as a subtraction"),
    ]
    assert not parse_names("{{ a - b }}{{ review.score-1 }}{% for n in parts %}{{ n-1 }}{% endfor %}")[1]


ATTRIBUTES = [
    "{{ facts.__class__ }}",
    "{{ facts['__class__'] }}",
    "{{ parts.append }}",
    "{{ review.items }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ range.__class__ }}",
    "{{ lipsum }}",
    "{{ joiner }}",
]
REACHING_OUT = [
    "{{ ''.__class__.__mro__ }}",
    "{{ parts.append(1) }}",
    "{{ review.keys() }}",
    "{{ facts.format(1) }}",
    "{{ namespace().__class__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{{ super() }}",
    "{{ caller() }}",
    "{{ facts | attr('__class__') }}",
    "{{ parts | map(attribute='real') | list }}",
    "{{ parts | sort(attribute='__class__') }}",
    "{% for x in parts %}{{ loop.__init__ }}{% endfor %}",
    "{% for x in parts %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__class__ }}{{ m._func.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{{ '%s' % facts }}",
    "{{ facts % 1 }}",
    "{{ facts * parts[0] }}",
    "{{ 10 ** 10 ** 10 ** 10 ** 10 ** 10 }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ facts" + ".a" * 5000 + "() }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{{ 1" + "9" * 5000 + " }}",
    "{{ 1 / 0 }}",
]


@pytest.mark.parametrize("prompt", [*ATTRIBUTES, *REACHING_OUT], ids=lambda prompt: prompt[:40])
def test_templates_reach_nothing_but_values(prompt):
    start = time.thread_time()
    message = str(error(prompt))
    assert time.thread_time() - start < 5
    assert "\n" not in message
    assert len(message) < 600
    assert "object at 0x" not in message


TRAP = "{{ facts }}{% for x in parts %}{{ 10 ** 10 ** 10 }}{% endfor %}{{ facts.__class__ }}"


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ a }}",
        "{{ b.a }}",
        "{{ a | trim }}",
        "{{ [a] | join }}",
        "{% for x in [a] %}{{ x }}{% endfor %}",
        "{{ a ~ '' }}",
    ],
)
def test_a_value_is_never_read_as_a_template(prompt):
    assert render(prompt, {"a": TRAP, "b": {"a": TRAP}}) == TRAP


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ("{{ 'a' * value }}", 10**10),
        ("{{ value * 10000000000 }}", "a"),
        ("{{ 3 * value * 3000000000 }}", [1]),
        ("{{ 7 ** value }}", 10**9),
        ("{{ value ** 1000 }}", 10**4000),
        ("{{ value % 2 }}", "%0999999999d"),
        ("{% for n in range(value) %}{% endfor %}", 10**12),
        ("{{ value }}" * 1000, "x" * 1_000_000),
        ("{% for n in range(1000) %}{{ value }}{% endfor %}", "x" * 1_000_000),
    ],
)
def test_a_hostile_value_wastes_neither_time_nor_memory(prompt, value):
    start = time.thread_time()
    error(prompt, {"value": value})
    assert time.thread_time() - start < 5


MODELS_TEXTS = [
    *REACHING_OUT,
    "{% for a in parts %}{% for b in parts %}{% for c in parts %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 'a'" + "|replace('a','aaaaaaaaaa')" * 20 + " }}",
    "{{ 'a' * 10**9 }}",
    "{{ facts | upper }}",
    "{{ facts, parts }}",
    "{{ facts }}{{- facts }}",
    "{% raw %}{{ facts }}{% endraw %}",
    "{{{ facts }}}",
    "{{ facts",
    "a {% b",
    "{{ '{{ facts }}' }}",
    "{{ not }}",
    "{{ self }}",
    "{{ true }}",
    "{{ parts[01] }}",
    "{{ parts[99999999999999999999] }}",
    "{{ a['b\\'] }}",
    "{{ größe }}",
]


@pytest.mark.parametrize("prompt", MODELS_TEXTS, ids=lambda prompt: prompt[:40])
def test_text_of_a_model_gets_names_and_fields_alone(prompt):
    caught = check_plain(f"\n{prompt}")
    assert not is_plain(prompt)
    assert caught is not None
    assert caught.line == 2
    assert "may hold names and fields, as in {{ name }} and {{ name.field }}, and no other template" in str(caught)
    assert len(str(caught)) < 600
    assert all(check_plain(plain) is None for plain in (*PLAIN, "", "a { b } c", "{# {{ facts }} #}"))


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("{{ my-task }}", 'such as {{ my-task }}; write {{ results["my-task"] }} for a task'),
        ("{{ a | upper }}{{ 1a.b }}", 'such as {{ a | upper }}, {{ 1a.b }}; write {{ results["1a"] }} for a task'),
        ("{{ self }}", 'write {{ results["self"] }} for a task'),
        ("{% if a %}{% if b %}{% if c %}{% if d %}{{ true }}", "such as {% if a %}, {% if b %}, {% if c %}, ...; two"),
    ],
)
def test_a_model_reads_which_construct_is_wrong(prompt, shown):
    assert shown in str(check_plain(prompt))


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "{{",
            "{{ a",
            "{{ a.",
            "{{a.a",
            '{{ a["',
            "{{ a['x",
            "{{ a[0]",
            "{{ '{{",
            "{{ " + " " * 50,
            ".a",
            "a",
            " ",
            "[0]",
        ),
        *('["a"]', "{%", "{{ a }", "}}", "{{ a }}"),
    ],
)
def test_text_of_a_model_takes_no_time_whatever_it_holds(piece):
    prompt = "{{ a" + piece * (500_000 // len(piece))
    start = time.thread_time()
    check_plain(prompt)
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("prompt", ["x" * 11, "{{ a }}", "x{{ a }}", "{% if true %}{{ a }}{% endif %}"])
def test_limit(prompt):
    assert "more than 10 characters" in str(error(prompt, {"a": "y" * 11}, limit=10))
    assert render("{{ a }}", {"a": "y" * 10}, limit=10) == "y" * 10


def test_values_nested_too_deep_are_an_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for prompt in ("{{ a }}", "{{ a | tojson }}", "{% if a != b %}{% endif %}"):
        assert "\n" not in str(error(prompt, {"a": deep, "b": [deep]}))


def test_plain_prompts_and_the_text_of_models_import_no_template_engine():
    code = (
        "import sys; from plait.runner.prompts.prompt_template import check_plain, render; "
        "render('{{ a }}{{ b[0].c }}', {'a': 1, 'b': [{'c': 2}]}); check_plain('{% if a %}'); "
        "sys.exit('jinja2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
