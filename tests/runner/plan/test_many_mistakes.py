"""Plans with several mistakes: none hides another."""

import pytest

from plait.runner.plan import PlanError, parse_plan
from tests.support.plans.plan_mistakes import mistakes, tasks


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
        """{id: b, depends_on: a, prompt: '{{ a.b() }} {{ nobody }} {{ a | shout }} {{ a + 1 }} {{ a is odd(2) }}'}""",
        "{id: c, depends_on: a, prompt: '{% for k, v in a %}{{ k }}{{ v }}{{ w }}{{ k + 1 }}{% endfor %}'}",
        "{id: d, depends_on: a, prompt: '{% set x = 1 %}{{ x }}{{ x + 1 }}'}",
    )
    said = [(problem.where, problem.message.partition(";")[0]) for problem in mistakes(text)]
    assert said == [
        ("tasks[1].prompt", "calls are not allowed in a prompt"),
        ("tasks[1].prompt", "the filter 'shout' is not available in prompts"),
        ("tasks[1].prompt", "arithmetic is not allowed in a prompt"),
        ("tasks[1].prompt", "the test 'is odd' is not available in prompts"),
        ("tasks[1].prompt", "the prompt uses {{ nobody }}, which is neither a task nor an input"),
        ("tasks[2].prompt", "a loop has one name: write {% for part in parts %}"),
        ("tasks[2].prompt", "arithmetic is not allowed in a prompt"),
        ("tasks[2].prompt", "the prompt uses {{ w }}, which is neither a task nor an input"),
        ("tasks[3].prompt", "assign is not allowed in a prompt"),
        ("tasks[3].prompt", "arithmetic is not allowed in a prompt"),
    ]


def test_a_prompt_full_of_mistakes_tells_twenty_of_them():
    calls = " ".join(f"{{{{ a | f{number} }}}}" for number in range(1000))
    assert len(mistakes(tasks('{id: a, prompt: "x"}', f"{{id: b, depends_on: a, prompt: '{calls}'}}"))) == 20


def test_a_follow_ups_prompt_tells_every_mistake():
    follow = "workflows: [{after: coder, steps: [{role: tester, prompt: '{{ a + 1 }} {{ b() }}'}]}]\n"
    found = mistakes(follow + tasks("{id: a, role: coder, prompt: x}"))
    assert [problem.where for problem in found] == ["workflows[0].steps[0].prompt"] * 2


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
    listed = [f'{{id: task-{number}, prompt: "", depends_on: fatcs}}' for number in range(1500)]
    found = mistakes(tasks('{id: facts, prompt: ""}', *listed))
    assert found[0].message == "unknown task 'fatcs'; did you mean 'facts'?"
    assert sum("did you mean" in problem.message for problem in found) == 20  # to look for it takes long
    assert (len(found), found[-1].message) == (1500, "unknown task 'fatcs'")


def test_the_message_has_two_thousand_of_them_and_says_how_many_more_there_are():
    with pytest.raises(PlanError) as caught:
        parse_plan(tasks(*(f'{{id: task-{number}, prompt: "", depends_on: nobody}}' for number in range(3001))))
    lines = str(caught.value).splitlines()
    assert (len(caught.value.problems), len(lines), lines[-1]) == (3001, 2001, "and 1,001 more")
