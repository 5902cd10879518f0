"""`files` of a task in a plan: paths and globs from the folder of the plan, inputs, and elements of inputs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from plait.runner.plan import Plan
from plait.task import Task
from tests.support.plans.logged import calls, make
from tests.support.processes.command import plait


def plan_of(folder: Path, text: str) -> Path:
    (folder / "docs").mkdir()
    for name in ("b.md", "a.md", "c.txt"):
        (folder / "docs" / name).write_text(name)
    (folder / "chart.png").write_bytes(b"\x89PNG")
    (folder / "plan.yaml").write_text(text)
    return folder / "plan.yaml"


def names(task: Task) -> list[str]:
    return [Path(file if isinstance(file, str) else file.path).name for file in task.files]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("docs/a.md", ["a.md"]),
        ("[docs/c.txt, chart.png]", ["c.txt", "chart.png"]),
        ("docs/*.md", ["a.md", "b.md"]),
        ("[docs/b.md, docs/*.md]", ["b.md", "a.md"]),
        ("'**/*.txt'", ["c.txt"]),
        ("'docs/{{ which }}.md'", ["b.md"]),
        ("'docs/{{ inputs.which }}*'", ["b.md"]),
    ],
)
def test_files_are_found_in_their_order(tmp_path: Path, written: str, expected: list[str]) -> None:
    path = plan_of(tmp_path, f"inputs: {{which: b}}\ntasks: [{{id: a, prompt: x, files: {written}}}]")
    (task,) = Plan.load(path).dag
    assert names(task) == expected
    first = tmp_path / "docs" / expected[0]
    assert task.files[0].sha256 == hashlib.sha256(first.read_bytes()).hexdigest()  # type: ignore[union-attr]


def test_each_element_of_an_input_names_its_files(tmp_path: Path) -> None:
    text = "inputs: {all: [{file: a}, {file: b}]}\n"
    text += 'tasks: [{id: t, for_each: all, prompt: x, files: "docs/{{ item.file }}.md"}]'
    assert [names(task) for task in Plan.load(plan_of(tmp_path, text)).dag] == [["a.md"], ["b.md"]]


def test_an_input_of_files_is_a_list_of_files_to_go_over(tmp_path: Path) -> None:
    text = "inputs: {notes: {files: docs/*.md}}\n"
    text += 'tasks: [{id: t, for_each: notes, prompt: x, files: "{{ item.path }}"}]'
    assert [names(task) for task in Plan.load(plan_of(tmp_path, text)).dag] == [["a.md"], ["b.md"]]


def test_a_plan_with_files_runs_and_shows_them(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: Sum up., files: [notes.md]}\n")
    (tmp_path / "notes.md").write_text("One.")
    assert plait(tmp_path, "run", "plan.yaml").code == 0
    assert calls(tmp_path) == ['<file name="notes.md"> One. </file>  Sum up.']
    shown = plait(tmp_path, "show", "last", "a").out
    assert f"files     {tmp_path}/notes.md" in shown.replace("\n          ", "")


def test_a_run_with_images_is_submitted_without_its_backend(tmp_path: Path) -> None:
    path = plan_of(tmp_path, "backends: {o: {kind: openai}}\ntasks: [{id: a, prompt: x, files: chart.png}]")
    assert plait(tmp_path, "run", path.name, "--queue").code == 0
    path.write_text(path.read_text().replace("openai", "person"))
    refused = plait(tmp_path, "run", path.name, "--queue")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "backend 'o' takes text files only, not chart.png (image/png)" in refused.err


@pytest.mark.parametrize("kind", ["openai", "claude-code"])
@pytest.mark.parametrize("command", ["check", "run", "run --queue"])
def test_an_image_for_a_backend_on_hosts_is_refused_before_the_run(tmp_path: Path, kind: str, command: str) -> None:
    text = f"hosts: {{fleet: {{kind: ssh, hosts: [gpu1]}}}}\nbackends: {{o: {{kind: {kind}, on: fleet}}}}\n"
    plan = plan_of(tmp_path, f"{text}tasks: [{{id: a, prompt: x, files: chart.png}}]")
    refused = plait(tmp_path, *command.split(), plan.name)
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "backend 'o' takes text files only, not chart.png (image/png)" in refused.err
