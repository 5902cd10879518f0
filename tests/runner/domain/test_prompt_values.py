"""The parameters of a function are looked up among the names of a run, without a look at all of its tasks."""

from __future__ import annotations

from collections.abc import Iterator

from plait import Task
from plait.runner.domain.prompt_values import with_arguments


class Names(dict[str, str]):
    """The ids of the tasks of a large run, which nobody goes through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all tasks of the run are gone through, once for each of them")


def test_a_parameter_that_takes_the_prompt_is_not_compared_with_every_task() -> None:
    task = Task("a", "Say something.")
    assert with_arguments(task, [("question", True)], (), Names(b="b")) is task


def test_a_task_that_a_parameter_names_is_an_argument() -> None:
    task = with_arguments(Task("a", "Sum up."), [("question", True), ("b", True)], (), Names(b="b"))
    assert task.arguments == ("b",)


def test_a_part_takes_its_prompt_where_the_parameter_has_the_name_of_its_list() -> None:
    part = Task("order.1", "101", item={"order": "101"})
    assert with_arguments(part, [("order", True)], (), {"order": "order"}) is part
