"""What a task is made with."""

from __future__ import annotations

import pytest

from plait.runner import Task


def test_a_task_without_a_prompt_is_refused_when_it_is_made() -> None:
    for made in (lambda: Task("a"), lambda: Task("a", depends_on=["b"]), lambda: Task("a", continues="b")):
        with pytest.raises(ValueError) as caught:
            made()
        assert str(caught.value) == (
            "task 'a' has no prompt; write Task('a', prompt=...), or name the backend of a function or a command that "
            "needs none: backend=..."
        )
    assert Task("a", backend="fetch").prompt == ""
    assert Task("a", files=["report.pdf"]).prompt == ""
    empty = Task("a", "")
    assert (empty, type(empty.prompt), type(Task("a", backend="fetch").prompt)) == (Task("a", ""), str, str)
