"""What must hold after each round of a story, and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plait import PlaitError, RunResult, RunStatus, TaskStatus, events
from plait.errors import OwnershipLost, RunOwned, StoreError
from plait.persistence.store_records import TaskRecord
from plait.statuses import TASK_DONE
from tests.support.stores.faulty_store import at_once
from tests.support.story import Ending
from tests.support.world import RUN, World

ENDS = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.WAITING_INPUT})
"""How a run that nobody disturbs may end."""


@dataclass(slots=True)
class Outcome:
    """How a round ended: with a result, an error, or neither, when it was cancelled. `how` says what disturbed it.

    `rival_ran`: somebody else resumed the run at the same time, and was let.
    """

    how: str
    resumed: bool
    result: RunResult | None = None
    error: Exception | None = None
    rival_ran: bool = False


def was_cancelled(world: World, status: RunStatus) -> bool:
    """Whether the run ended so because it had been cancelled by somebody else, or in an earlier round."""
    return world.is_cancelled and status is RunStatus.CANCELLED


def check_round(world: World, outcome: Outcome) -> None:
    """What must hold once a round is over and nothing of it is left."""
    away = _times_away(world)
    for at, what in world.round.unstored:
        if not any(since <= at <= (until or "~") for since, until in away):
            world.wrong(f"{what}, though the store was there")
    _check_error(world, outcome)
    if outcome.result is not None:
        _check_last_word(world, outcome.result, outcome.resumed)
        if world.store is not None and [(d.since, d.until) for d in outcome.result.degraded] != away:
            world.wrong(f"told to be degraded {away}, found {outcome.result.degraded}")
    if world.store is not None:
        _check_left(world, outcome.result, away)


def _times_away(world: World) -> list[tuple[str, str | None]]:
    """From when to when the run said that the store was away."""
    away: list[tuple[str, str | None]] = []
    for event in world.round.told:
        if isinstance(event, events.StoreDegraded):
            away.append((event.at, None))
        elif isinstance(event, events.StoreRecovered):
            away[-1] = (away[-1][0], event.at)
    return away


def _check_error(world: World, outcome: Outcome) -> None:
    story, how, result, error = world.story, outcome.how, outcome.result, outcome.error
    if isinstance(error, RunOwned) and outcome.rival_ran:
        return
    if isinstance(error, OwnershipLost | RunOwned) or (
        isinstance(error, PlaitError)
        and not isinstance(error, StoreError)
        and how in {"nothing", "rival"}
        and not world.is_cancelled
    ):
        world.wrong(f"nobody else ran it, but {type(error).__name__}: {error}")
    if isinstance(error, StoreError) and not (story.faults and (outcome.resumed or story.strict)):
        world.wrong(f"a failing store ended the run: {error}")
    left_alone = how == "nothing" and error is None
    if left_alone and (result is None or not (result.status in ENDS or was_cancelled(world, result.status))):
        world.wrong(f"I9: left alone, the run ended with {result and result.status}")


def _check_last_word(world: World, result: RunResult, resumed: bool) -> None:
    told = world.round.told
    if resumed and all(isinstance(event, events.RunWatched) for event in told):
        return  # it had ended already, or a rival ended it while this process watched for a lease: it was only read
    if not told or not isinstance(told[-1], events.RunEnded) or told[-1].status is not result.status:
        world.wrong(f"the result is {result.status}, the last event {told[-1:]}")


def _check_left(world: World, result: RunResult | None, away: list[tuple[str, str | None]]) -> None:
    """What the store holds afterwards."""
    assert world.store is not None
    record, stored = at_once(world.store.get_run(RUN)), world.stored()
    for task_id, text in world.acknowledged.items():
        if stored[task_id].text != text:
            world.wrong(f"I1: the result of {task_id} was acknowledged, stored is {stored[task_id]}")
    cut = bool(away) and away[-1][1] is None
    if cut or (result is None and world.story.faults):
        return
    if record is None:
        if result is not None:
            world.wrong("the run is not stored")
        return
    if record.owner is not None:
        world.wrong(f"the run has an owner after its end, {record.status}")
    for task_id, task in stored.items():
        if TaskStatus(task.status) is TaskStatus.RUNNING:
            world.wrong(f"{task_id} is stored as running after the end")
        if task.crashes and not world.story.faults:
            world.wrong(f"{task_id} counts {task.crashes} crashes, there was none")
    if result is not None:
        _check_same(world, result, record.status, stored)


def _check_same(world: World, result: RunResult, status: str, stored: Mapping[str, TaskRecord]) -> None:
    expected = RunStatus.RUNNING if result.status is RunStatus.INTERRUPTED else result.status
    if result.status is not RunStatus.CANCELLED and was_cancelled(world, RunStatus(status)):
        return  # after this process had left it
    if status != expected.value:
        world.wrong(f"the result is {result.status}, stored is {status}")
    for task_id, task in result.tasks.items():
        record = stored[task_id]
        seen = (task.status.value, task.attempts, task.text)
        if seen != (record.status, record.attempt, record.text or ""):
            world.wrong(f"the result of {task_id} is {seen}, stored is {record.status, record.attempt, record.text}")
        if task.status in TASK_DONE - {TaskStatus.CANCELLED} and (task.error_kind, task.usage.input_tokens) != (
            record.error_kind,
            record.usage.input_tokens,
        ):
            world.wrong(f"the result of {task_id} is {task}, stored is {record}")


def check_ended(world: World, result: RunResult | None, ends: Mapping[str, Ending]) -> None:
    """I5: everything came out as it had to; of a cancelled run (no `result`), what came out at all."""
    if result is not None:
        for task_id, end in ends.items():
            task = result.tasks[task_id]
            if (task.status, task.text, task.error_kind) != (end.status, end.text, end.error_kind):
                world.wrong(f"I5: {task_id} came out as {task}, not {end}")
    if world.store is None:
        return
    for task_id, record in world.stored().items():
        status, end = TaskStatus(record.status), ends[task_id]
        if status not in TASK_DONE - {TaskStatus.CANCELLED} and result is not None and status is not end.status:
            world.wrong(f"I5: {task_id} is stored as {status}")
        if status is TaskStatus.COMPLETED and record.text != end.text:
            world.wrong(f"I5: {task_id} is stored as {record.text}, not {end.text}")
        _check_history(world, record)


def _check_history(world: World, record: TaskRecord) -> None:
    """Nothing is recorded twice, nothing is missing."""
    assert world.store is not None
    task_id = record.task_id
    numbers = [attempt.attempt for attempt in at_once(world.store.list_attempts(RUN, task_id))]
    if numbers != list(range(1, record.attempt + 1)):
        world.wrong(f"{task_id} has attempts {numbers}, the last is {record.attempt}")
    kinds = Counter(event.kind for event in at_once(world.store.list_events(RUN)) if event.task_id == task_id)
    if kinds["task_completed"] != (record.text is not None) or kinds["task_started"] != record.attempt:
        world.wrong(f"{task_id} has events {dict(kinds)} and {record.attempt} attempts")
    messages = [m for m in at_once(world.store.list_messages(RUN, task_id)) if m.attempt == record.attempt]
    answers = [m.content for m in messages if m.role == "assistant"]
    if record.text is not None and answers != [record.text]:
        world.wrong(f"{task_id} has the answers {answers}, its text is {record.text}")
