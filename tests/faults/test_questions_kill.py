"""Real processes: one that asks is killed, and one that goes on is answered from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait import ParallelRunner, RunStatus
from plait.errors import AnswerConflict
from plait.persistence import SQLiteStore
from plait.results import ResumeAction
from plait.runner.engine.attempt import INTERRUPTED
from tests.support.processes.asking import RUN, Keeper, turns
from tests.support.processes.command import environment
from tests.support.processes.warm import Warm

WHOLE = ["order", "Where to?", "Rome", "re: Rome"]


def start(folder: Path, moment: str) -> Warm:
    return Warm(
        [sys.executable, "-m", "tests.support.processes.asking", str(folder), moment],
        env=environment(),
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("moment", "action", "last"),
    [
        ("asked", ResumeAction.ASK, ["Rome"]),
        ("answered", ResumeAction.CONTINUE, ["Rome"]),
        ("begun", ResumeAction.START_OVER, ["Rome", "Rome"]),
        ("confirmed", ResumeAction.CONTINUE, ["Rome", INTERRUPTED]),
    ],
)
async def test_a_conversation_goes_on_once_after_a_kill(
    tmp_path: Path, moment: str, action: ResumeAction, last: list[str]
) -> None:
    with start(tmp_path, moment) as owner:
        assert owner.wait(60) == -signal.SIGKILL
    before = len(turns(tmp_path))
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(Keeper(tmp_path), store=store)
        preview = await runner.runs.preview(RUN)
        assert (preview.tasks["a"].action, [one.question for one in await runner.runs.questions(RUN)]) == (
            action,
            ["Where to?"] if moment == "asked" else [],
        )
        if moment == "begun":
            assert (
                preview.tasks["a"].reason
                == "the process died during attempt 2; the answer to the question is sent again; starts within 2 s"
            )
        if moment != "asked":
            with pytest.raises(AnswerConflict):
                await runner.runs.answer(RUN, "a", "Oslo")
        answers = {"a": "Rome"} if moment == "asked" else None
        result = await runner.resume(RUN, answers=answers)
        assert result.status is RunStatus.COMPLETED
        said = [one.content for one in await store.list_messages(RUN, "a")]
    begun = turns(tmp_path)
    assert [turn["prompt"] for turn in begun] == ["order", *last, "later"], "asked once, answered once"
    assert len({turn["session"] for turn in begun}) == 1, "one conversation"
    assert begun[before]["history"] == ["order", "Where to?"], "what was said before is there once"
    cut = [INTERRUPTED] if moment == "confirmed" else []
    assert said == [*WHOLE[:3], *cut, f"re: {last[-1]}"]
    assert begun[-1]["history"] == said
    spoken = begun[before]
    assert (spoken["answer"], spoken["goes_on"]) == (None, True) if cut else ("Rome", False)


async def test_a_live_run_in_another_process_is_answered(tmp_path: Path) -> None:
    with start(tmp_path, "live") as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "asked\n"
        async with SQLiteStore(tmp_path / "runs.db", mode="existing") as store:
            runner = ParallelRunner(store=store)
            assert [one.task_id for one in await runner.runs.questions(RUN)] == ["a"]
            assert await runner.runs.answer(RUN, "a", "Rome") is True
            with pytest.raises(AnswerConflict):
                await runner.runs.answer(RUN, "a", "Oslo")
        assert owner.communicate(timeout=60)[0] == "completed\n"
    assert [turn["prompt"] for turn in turns(tmp_path)] == ["order", "Rome", "later"]


async def test_an_owner_that_does_not_look_is_told_and_the_answer_stays(tmp_path: Path) -> None:
    """It is stopped as by Ctrl-Z, then killed: whoever resumes has the answer, the first one."""
    with start(tmp_path, "live") as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "asked\n"
        owner.send_signal(signal.SIGSTOP)
        async with SQLiteStore(tmp_path / "runs.db", mode="existing") as store:
            runner = ParallelRunner(store=store)
            assert await runner.runs.answer(RUN, "a", "Rome", wait=0) is False
            assert await runner.runs.questions(RUN) == []
            with pytest.raises(AnswerConflict, match="has an earlier answer"):
                await runner.runs.answer(RUN, "a", "Oslo", wait=0)
            owner.kill()
            owner.wait()
            with pytest.raises(AnswerConflict, match="has an earlier answer"):
                await runner.runs.answer(RUN, "a", "Oslo", wait=0)
            result = await ParallelRunner(Keeper(tmp_path), store=store).resume(RUN)
    assert (result.status, result.text["a"]) == (RunStatus.COMPLETED, "re: Rome")
