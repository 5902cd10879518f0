"""What a task is made with."""

from __future__ import annotations

import pytest

from plait import Task


@pytest.mark.parametrize("prompt", ["", " \n\t", None])
def test_a_task_without_a_prompt_is_refused_when_it_is_made(prompt: str) -> None:
    for made in (
        lambda: Task("a"),
        lambda: Task("a", prompt),
        lambda: Task("a", prompt, depends_on=["b"]),
        lambda: Task("a", prompt, continues="b"),
    ):
        with pytest.raises(ValueError) as caught:
            made()
        assert str(caught.value) == (
            "task 'a': there is no prompt; write one, or name a function that needs none as the `backend`"
        )


def test_a_task_with_a_backend_of_its_own_or_files_needs_no_prompt() -> None:
    assert Task("a", backend="fetch").prompt == ""
    assert Task("a", files=["report.pdf"]).prompt == ""
