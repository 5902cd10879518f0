"""Bugs of runs that take answers over, each planted by changing one thing while it is looked for."""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from plait.json_form import JsonValue
from plait.runner.client import create_run, reuse_preview
from plait.runner.engine.run_options import RunOptions
from plait.runner.reuse import answer_keys, earlier_answers
from plait.runner.reuse.earlier_answers import EarlierAnswer, EarlierAnswers
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import StoredRun
from plait.task import Task

Plant = Callable[[], AbstractContextManager[object]]


def _in(owner: object, name: str, bug: object) -> Plant:
    return lambda: mock.patch.object(owner, name, bug)


def _identity_by_position() -> AbstractContextManager[object]:
    """Use the number of a part in its list, in place of the element, in keys alone."""

    def by_number(state: RunState, position: int) -> str:
        return state.dag.tasks[position].id

    return mock.patch.object(answer_keys, "task_identity", by_number)


def _identity_without_the_element() -> AbstractContextManager[object]:
    def whole(state: RunState, position: int) -> str:
        task = state.dag.tasks[position]
        return answer_keys.group_of(task.id, task.item) or task.id

    return mock.patch.object(answer_keys, "task_identity", whole)


def _effects_taken_over() -> AbstractContextManager[object]:
    """Take the answers of agents over, too."""

    def all_keys(config: RunOptions) -> dict[str, JsonValue]:
        return {**dict.fromkeys(config.backends, "any"), "": "any"}

    stack = ExitStack()
    for module in (create_run, reuse_preview):
        stack.enter_context(mock.patch.object(module, "answer_keys", all_keys))
    return stack


def older_run_preferred() -> AbstractContextManager[object]:
    """Let the cache prefer older answers. Random plans show the bug too rarely."""
    parse_time = earlier_answers.parse_time

    def backwards(at: str) -> float:
        return -parse_time(at)

    return mock.patch.object(earlier_answers, "parse_time", backwards)


async def _nobody_asked(_run: StoredRun) -> set[int]:
    return set()


async def _rendered_prompt(run: StoredRun, position: int) -> str:
    return run.state.texts(run.state.dag.tasks[position]).prompt()


def _cache_before_fresh() -> AbstractContextManager[object]:
    find = EarlierAnswers.find

    def found_anyway(answers: EarlierAnswers, state: RunState, position: int) -> EarlierAnswer | None:
        if not answers.is_fresh(state, position):
            return find(answers, state, position)
        with mock.patch.object(answers, "_reuse", None), mock.patch.object(answers, "before", None):
            return find(answers, state, position)

    return mock.patch.object(EarlierAnswers, "find", found_anyway)


def _always(*_: object) -> bool:
    return True


def _same_settings(_task: Task) -> list[Any]:
    return []


def _start_alone(_state: RunState, roots: Collection[int]) -> set[int]:
    return set(roots)


def _no_gates(_self: Any, _position: int) -> set[int]:
    return set()


@dataclass(frozen=True)
class Bug:
    """A bug, and the first seed to try: seeds that show the rarer bugs are known."""

    plant: Plant
    seed: int = 0


BUGS: Mapping[str, Bug] = {
    "a `when` left out of the key": Bug(_in(answer_keys, "_same_condition", _always), 16),
    "a position used as key": Bug(_identity_by_position, 74),
    "a list item left out of the key": Bug(_identity_without_the_element, 422),
    "the prefix of a conversation left out of the key": Bug(_in(answer_keys, "_same_conversation", _always), 56),
    "the prompt as rendered left out of the key": Bug(_in(answer_keys, "_same_prompt", _always)),
    "the settings of a task left out of the key": Bug(_in(answer_keys, "settings_of", _same_settings)),
    "effects taken over": Bug(_effects_taken_over, 4),
    "answers of persons taken over silently": Bug(_in(earlier_answers, "_asked_persons", _nobody_asked)),
    "a prompt kept without the text of its file": Bug(_in(earlier_answers, "sent_prompt", _rendered_prompt), 20),
    "a fresh task given an answer of the cache": Bug(_cache_before_fresh, 9),
    "a fork without what lies behind its start": Bug(
        lambda: mock.patch.object(earlier_answers, "fork_cone", _start_alone), 2
    ),
    "a preview that reads no upstream": Bug(_in(reuse_preview._Foresight, "_reads", _no_gates)),
    "a preview that looks at no condition": Bug(
        lambda: mock.patch.object(reuse_preview._Foresight, "_gates", _no_gates)
    ),
}
"""The bugs by name."""
