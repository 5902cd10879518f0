"""What is wrong with a plan's text."""

import pytest

from plait.errors import PlaitError
from plait.runner.plan import PlanError, parse_plan


def mistakes(text, **options):
    with pytest.raises(PlanError) as caught:
        parse_plan(text, **options)
    assert isinstance(caught.value, PlaitError)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return list(caught.value.problems)


def tasks(*lines):
    return "tasks:\n" + "".join(f"- {line}\n" for line in lines)
