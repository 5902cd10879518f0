"""Conditions: which values they compare, which outcomes they have, and how they fail."""

import pytest

from plait.errors import PromptError
from plait.runner.prompts.prompt_names import NoResult, structured
from plait.runner.prompts.prompt_template import condition_names, is_true

VALUES = {
    "review": structured({"ok": False, "score": 3, "label": "good"}),
    "own": structured({"data": {"ok": True}}),
    "parts": structured([1, 2]),
    "text": "yes",
    "nothing": None,
    "skipped": NoResult(),
    "item": {"size": 4},
    "results": {"my-task": {"ok": True}},
}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("{{ review.ok }} == false", True),
        ("{{ review.data.ok }} == false", True),
        ("{{ review['data']['ok'] }}", False),
        ("{{ own.data.ok }}", True),
        ("{{ parts.data[1] }} == 2 and {{ parts | length }} == 2", True),
        ("{{ review.score }} >= 3", True),
        ("{{ review.score }} < 3 or {{ review.label }} == 'good'", True),
        ('{{ review.label }} != "good"', False),
        ("not {{ review.ok }}", True),
        ("not ({{ review.score }} > 1 and {{ review.ok }})", True),
        ("review.score == 3", True),
        ("{{- text -}} == 'yes'", True),
        ("{{ text | upper }} == 'YES'", True),
        ("{{ text }} in ['yes', 'no']", True),
        ("'{{ text }}' == '{{ text }}'", True),
        ("{{ item.size }} > 3", True),
        ('{{ results["my-task"].ok }}', True),
        ("{{ nothing }}", False),
        ("true", True),
        ("{{ text }} == 'yes'\nand\n{{ review.ok }}", False),
        ("{{ skipped }}", False),
        ("{{ skipped }} == ''", True),
        ("{{ skipped.ok }} == true", False),
        ("{{ skipped.ok }} == false", False),
        ("{{ skipped.data.score }} > 3", False),
        ("{{ skipped.data.score }} <= 3", False),
        ("not {{ skipped.ok }}", True),
    ],
)
def test_a_condition_is_true_or_false(condition: str, expected: bool) -> None:
    assert condition_names(condition)[1] == ()
    assert is_true(condition, VALUES) is expected


def test_the_names_of_a_condition_are_those_of_its_braces() -> None:
    names, mistakes = condition_names("{{ item.size }} > 1 or {{ a.ok }} == '{{ b }}' and {{ results['my-task'] }}")
    assert (names.names, names.results, names.item) == ({"a", "results", "item"}, {"my-task"}, {"size"})
    assert not mistakes


@pytest.mark.parametrize(
    ("condition", "message", "line"),
    [
        ("{{ text }}", "its value is 'yes', neither true nor false; compare the value", None),
        ("{{ review.score }}", "its value is '3', neither true nor false", None),
        ("{{ text }} > 3", "'>' needs two numbers or two texts; fields that are numbers come with an output_schema", 1),
        ("{{ text }} == 'a' or\n{{ review.okay }}", "review has no field 'okay'; it has ok, score, label", 1),
        ("{{ text.ok }}", "text is a text, so it has no field 'ok'; fields come with an output_schema", 1),
    ],
)
def test_a_condition_without_an_outcome_is_an_error(condition: str, message: str, line: int | None) -> None:
    with pytest.raises(PromptError) as caught:
        is_true(condition, VALUES)
    assert message in str(caught.value)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "the condition cannot be read: unexpected end; write a comparison such as {{ review.ok }} == false"),
        ("{{ a }} = 1", "the condition cannot be read: '=' follows a whole expression"),
        ("{{ a }} ==", "the condition cannot be read: unexpected end"),
        ("{{ a", "the condition cannot be read: "),
        ("true %}{% if true", "the condition cannot be read: "),
        ("{{ a | foo }}", "the filter 'foo' is not available"),
        ("{{ a-b }}", '{{ a-b }} is read as a subtraction; write {{ results["a-b"] }} for a task'),
        ("(" * 500, "the condition is nested too deep"),
    ],
)
def test_a_condition_that_cannot_be_read_is_a_mistake(condition: str, message: str) -> None:
    _, mistakes = condition_names(condition)
    assert message in str(mistakes[0])


@pytest.mark.parametrize("condition", ["{{ text.__class__ }}", "{{ text }}.upper() == 'YES'", "{{ ().__class__ }}"])
def test_a_value_has_no_python_attributes(condition: str) -> None:
    with pytest.raises(PromptError):
        is_true(condition, VALUES)
