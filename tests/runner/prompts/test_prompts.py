"""Prompts: what they may hold, what they give, and what a hostile one cannot do."""

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runner.errors import PromptError
from plait.runner.prompts.render import PromptNames, names_used, render

REVIEW = {"label": "good", "score": 3}
VALUES = {
    "facts": "The Moon {{ is }} round",
    "review": REVIEW,
    "parts": [3, 1, 2],
    "nothing": None,
    "yes": True,
    "results": {"my-task": "dashed", "review": REVIEW},
    "inputs": {"topic": "rivers"},
    "item": {"name": "a.md"},
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
            "a... The Moon... x",
        ),
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


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(), min_size=3))
def test_values_come_out_as_they_are(values):
    expected = f"{values['a']}|{values['b']}|{values['c']}"
    assert render("{{ a }}|{{ b }}|{{ c }}", values) == expected
    assert render("{{ a }}|{{ b }}|{{ c }}{% if true %}{% endif %}", values) == expected


@settings(deadline=None)
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
        "{% for p in parts %}{{ p }}{{ loop.index }}{{ item.x }}{% endfor %}{{ b.c | default(d) }}"
    )
    assert used.names == {"a", "results", "inputs", "parts", "item", "b", "d"}
    assert used.results == {"my-task", "other"}
    assert used.inputs == {"topic", "x-y"}
    assert names_used("{{ a }}{{ b }}{{ a }}") == PromptNames(frozenset("ab"))
    assert names_used("nothing") == PromptNames()
    # A name that a loop defines is free again after it.
    assert names_used("{% for x in y %}{{ x }}{% endfor %}{{ x }}").names == {"x", "y"}


@pytest.mark.parametrize(
    ("prompt", "line", "words"),
    [
        ("\n{{ review.lable }}", 2, "review has no field 'lable'; it has label, score"),
        ("{{ review['lable'] }}", 1, "it has label, score"),
        ("\n\n{{ fcts }}", 3, "nothing is called 'fcts' here; the prompt may use facts"),
        ("{% if 1 %}{% endif %}\n{{ fcts }}", 2, "nothing is called 'fcts'"),
        ("{{ parts[7] }}", 1, "parts is a list of 3, so it has no 7"),
        ("{{ facts.upper }}", 1, "facts is a text, so it has no field 'upper'"),
        ("{{ my-task }}", 1, 'write {{ results["my-task"] }}'),
        ("{{ a-b-1.field }}", 1, 'write {{ results["a-b-1"] }}'),
        ("\n{{ a", 2, "cannot be read"),
        ("{{{ facts }}}", 1, "to write two braces as they are"),
        ("{{ 1 < 'a' }}", 1, "not supported"),
        ("{% for x in facts %}{% endfor %}", 1, "a for loop goes over a list or a mapping, not a text"),
        ("{{ self }}", 1, "'self' means something else"),
        ("{% for x in parts %}{{ loop }}{% endfor %}", 1, "write for example loop.index"),
    ],
)
def test_mistakes_say_where_and_what(prompt, line, words):
    caught = error(prompt)
    assert words in str(caught)
    assert caught.line == line


HOSTILE = [
    "{{ facts.__class__ }}",
    "{{ facts['__class__'] }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ parts.append }}",
    "{{ review.items }}",
    "{{ review.keys() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum }}",
    "{{ self._TemplateReference__context }}",
    "{{ namespace() }}",
    "{{ joiner }}",
    "{{ dict(a=1) }}",
    "{{ loop }}",
    "{{ super() }}",
    "{{ caller() }}",
    "{{ ' budget' | _field(1) }}",
    "{{ facts | _loop(0) }}",
    "{{ facts | attr('__class__') }}",
    "{{ '%s' | format(1) }}",
    "{{ parts | map(attribute='real') | list }}",
    "{{ parts | sort(attribute='real') }}",
    "{{ parts | pprint }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ facts ~ facts }}",
    "{{ range(10**9) }}",
    "{{ -parts }}",
    "{{ facts[1:2] }}",
    "{{ {'a': 1} }}",
    "{{ 'x' | indent(10000000) }}",
    "{% set x = 1 %}",
    "{% macro m() %}{% endmacro %}",
    "{% import 'x' as x %}",
    "{% include '/etc/passwd' %}",
    "{% extends 'x' %}",
    "{% block b %}{% endblock %}",
    "{% call x() %}{% endcall %}",
    "{% filter upper %}x{% endfilter %}",
    "{% autoescape true %}{% endautoescape %}",
    "{% for a in parts recursive %}{{ loop(parts) }}{% endfor %}",
    "{% for a, b in parts %}{% endfor %}",
    "{% for loop in parts %}{% endfor %}",
    "{% for x in parts %}{{ loop.__init__ }}{% endfor %}",
    "{% for x in parts %}{{ loop['index'] }}{% endfor %}",
    "{% for x in parts %}{{ loop.cycle(1) }}{% endfor %}",
    "{{ facts is callable }}",
    "{{ facts is sameas(facts) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ " + " and ".join(["facts"] * 5000) + " }}",
    "{{ " + " if 1 else ".join(["1"] * 2000) + " }}",
    "{{ facts" + ".a" * 5000 + " }}",
    "{{ facts" + "|upper" * 5000 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{% for x in parts %}" * 4 + "{% endfor %}" * 4,
    "{{ " + "9" * 5000 + " }}",
    "{% if 1 %}" + "x" * 300_000 + "{% endif %}",
    "{{ 1 }}" * 28_000,
    "{{ 'a'" + "|replace('a','aaaaaaaaaa')" * 20 + " }}",
]


@pytest.mark.parametrize("prompt", HOSTILE, ids=lambda prompt: prompt[:40])
def test_hostile_templates_are_refused_at_once(prompt):
    start = time.perf_counter()
    message = str(error(prompt))
    assert time.perf_counter() - start < 5
    assert "\n" not in message
    assert len(message) < 600
    assert "object at 0x" not in message


BIG = {"parts": list(range(2000)), "text": "x" * 1_000_000, "deep": {"a": "y" * 1_000_000}}


@pytest.mark.parametrize(
    "prompt",
    [
        "{% for a in parts %}{% for b in parts %}{% for c in parts %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in parts %}{% for b in parts %}{{ 'x' if 'y' in text }}{% endfor %}{% endfor %}",
        "{% for a in parts %}{% for b in parts %}{{ 'x' if text == text }}{% endfor %}{% endfor %}",
        "{% for a in parts %}{% for b in parts %}{% if (deep | tojson) == '' %}{% endif %}{% endfor %}{% endfor %}",
        "{% for a in parts %}{% for b in parts %}{% if (text | upper) == '' %}{% endif %}{% endfor %}{% endfor %}",
        "{{ text }}" * 10_000,
        "{% for a in parts %}{{ text }}{% endfor %}",
        "{{ parts | join(text) }}",
        "{{ text | replace('x', text) }}",
    ],
    ids=lambda prompt: prompt[:60],
)
def test_bombs_are_cut_off(prompt):
    start = time.perf_counter()
    message = str(error(prompt, BIG))
    assert "more than 1,000,000 characters" in message or "too much work" in message
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("prompt", ["x" * 11, "{{ a }}", "x{{ a }}", "{% if true %}{{ a }}{% endif %}"])
def test_limit(prompt):
    assert "more than 10 characters" in str(error(prompt, {"a": "y" * 11}, limit=10))
    assert render("{{ a }}", {"a": "y" * 10}, limit=10) == "y" * 10


def test_values_nested_too_deep_are_an_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for prompt in ("{{ a }}", "{{ a | tojson }}", "{% if a == a %}{% endif %}"):
        assert "\n" not in str(error(prompt, {"a": deep}))


def test_plain_prompts_import_no_template_engine():
    code = (
        "import sys; from plait.runner.prompts.render import render; "
        "render('{{ a }}', {'a': 1}); sys.exit('jinja2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
