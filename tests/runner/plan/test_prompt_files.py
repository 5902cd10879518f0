"""Prompts in files beside the plan, with what they include."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import PlanError, PlanProblem
from plait.runner.plan import Plan, parse_plan
from tests.support.processes.command import plait_here

PLAN = """\
inputs: {topic: rivers}
tasks:
  - id: a
    prompt: {file: prompts/a.md}
  - id: b
    loop: {tasks: [{id: c, prompt: {file: prompts/a.md}}], with: {topic: "{{ topic }}"}, until: "{{ c }} == 1"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.md").write_text('Write about {{ topic }}.\n{% include "prompts/style.md" %}End.\n')
    (tmp_path / "prompts" / "style.md").write_text("Be short.\n")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


def mistakes(folder: Path) -> list[PlanProblem]:
    with pytest.raises(PlanError) as raised:
        Plan.load(folder / "plan.yaml")
    return list(raised.value.problems)


def test_a_prompt_is_the_text_of_its_file_with_what_it_includes(folder: Path) -> None:
    dag = Plan.load(folder / "plan.yaml").dag
    assert dag["a"].prompt == "Write about {{ topic }}.\nBe short.\nEnd.\n"
    assert "Be short." in repr(dag["b"].call)


def test_a_mistake_in_a_prompt_is_told_at_its_line_in_the_file(folder: Path) -> None:
    (folder / "prompts" / "style.md").write_text("Be short.\nAs {{ topics }}.\n")
    problem = mistakes(folder)[0]
    assert (problem.file, problem.line) == (str(folder / "prompts" / "style.md"), 2)
    assert "did you mean 'topic'" in problem.message
    (folder / "prompts" / "style.md").write_text("Be short.\n")
    (folder / "prompts" / "a.md").write_text('{% include "prompts/style.md" %}\n\n{{ topics }}')
    problem = mistakes(folder)[0]
    assert (problem.file, problem.line) == (str(folder / "prompts" / "a.md"), 3)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("../other.md", "the prompt file '../other.md' is outside of the plan's folder; move it beside the plan"),
        ("/etc/hostname", "is outside of the plan's folder"),
        ("link.md", "is outside of the plan's folder"),
        ("none.md", "there is no prompt file "),
        ("prompts", "there is no prompt file "),
        ("circle.md", "the prompt file 'circle.md' includes itself; leave one include out"),
        ("latin.md", "the prompt file 'latin.md' is not UTF-8; save it as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_where_it_is_named(folder: Path, file: str, says: str) -> None:
    (folder / "link.md").symlink_to("/etc/hostname")
    (folder / "circle.md").write_text("{% include 'circle.md' %}")
    (folder / "latin.md").write_bytes(b"\xe9")
    (folder / "plan.yaml").write_text(f"tasks:\n  - {{id: a, prompt: {{file: {file}}}}}\n")
    (problem,) = mistakes(folder)
    assert (problem.where, problem.line, problem.column) == ("tasks[0].prompt.file", 2, 28)
    assert says in problem.message


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("a \n {% include 'i.md' %} \n b", "a \n I\n \n b"),
        ("a \n {%- include 'i.md' %} \n b", "aI\n \n b"),
        ("a \n {% include 'i.md' -%} \n b", "a \n I\nb"),
        ("a \n {%- include 'i.md' -%} \n b", "aI\nb"),
        (
            "{% raw %}{% include 'i.md' %}{% endraw %}{% include 'i.md' %}",
            "{% raw %}{% include 'i.md' %}{% endraw %}I\n",
        ),
        ("{%- raw -%}{% include 'i.md' %}{%- endraw -%}",) * 2,
        ("{# {% include 'i.md' %} #}", "{# I\n #}"),  # a template of plait has no comments: the text is sent
    ],
)
def test_an_include_is_a_statement_of_the_template(folder: Path, text: str, prompt: str) -> None:
    (folder / "i.md").write_text("I\n")
    (folder / "p.md").write_text(text)
    (folder / "plan.yaml").write_text("tasks: [{id: a, prompt: {file: p.md}}]")
    assert Plan.load(folder / "plan.yaml").dag["a"].prompt == prompt


def test_after_white_space_that_an_include_takes_away_lines_are_right(folder: Path) -> None:
    (folder / "prompts" / "a.md").write_text('x\n\n{%- include "prompts/style.md" -%}\n\n{{ topics }}')
    problem = mistakes(folder)[0]
    assert (problem.file, problem.line) == (str(folder / "prompts" / "a.md"), 5)


def test_a_prompt_is_bounded_with_all_that_it_includes(folder: Path) -> None:
    (folder / "plan.yaml").write_text("tasks: [{id: a, prompt: {file: p.md}}]")
    too_long = "has more than 1,000,000 characters; shorten it"
    (folder / "p.md").write_text("x" * 1_000_000)
    assert len(Plan.load(folder / "plan.yaml").dag["a"].prompt) == 1_000_000
    (folder / "p.md").write_text("x" * 1_000_001)
    assert mistakes(folder)[0].message == f"the prompt file 'p.md' {too_long}"
    (folder / "p.md").write_text("{% include 'i.md' %}" * 2)
    (folder / "i.md").write_text("x" * 600_000)
    assert mistakes(folder)[0].message == f"the prompt file 'p.md' with what it includes {too_long}"
    # Each level is small, all together would be a hundred million files without a character of text.
    for number in range(8):
        (folder / f"{number}.md").write_text(f"{{%{' ' * 3_000} include '{number + 1}.md' %}}" * 10)
    (folder / "8.md").write_text("")
    (folder / "p.md").write_text("{% include '0.md' %}")
    assert mistakes(folder)[0].message == f"the prompt file 'p.md' with what it includes {too_long}"


def test_anything_else_in_place_of_a_text_is_a_mistake(folder: Path) -> None:
    (folder / "plan.yaml").write_text("tasks: [{id: a, prompt: {text: x}}]")
    (problem,) = mistakes(folder)
    assert problem.message == "must be a text, or {file: NAME}, the name of a file relative to the plan"


def test_a_plan_from_elsewhere_reads_no_file(folder: Path) -> None:
    with pytest.raises(PlanError, match="a plan from elsewhere reads no files here"):
        parse_plan("tasks: [{id: a, prompt: {file: prompts/a.md}}]", folder=folder, names_default=True)


def test_a_resume_needs_no_file(folder: Path) -> None:
    (folder / "tools.py").write_text("def answer(prompt):\n    return prompt\n")
    (folder / "plan.yaml").write_text(
        'inputs: {topic: rivers}\nbackends: {f: {kind: function, call: "tools.py:answer"}}\n'
        "tasks: [{id: a, prompt: {file: prompts/a.md}}]\n"
    )
    queued = plait_here(folder, "run", "plan.yaml", "--queue")
    for file in (folder / "prompts").iterdir():
        file.unlink()
    assert plait_here(folder, "resume", queued.out.strip()).out == "Write about rivers.\nBe short.\nEnd.\n"
