"""The store contract: completions that come with their prompt."""

from __future__ import annotations

from dataclasses import replace

from plait.persistence import MessageRecord, Store, TaskReopened, TurnAppended
from plait.persistence.contract.opened import OpenedStore
from plait.persistence.contract.samples import ASK, AT_START, DONE_A, RUN, START_A, Writer, at


class PromptsContract(OpenedStore):
    """Prompt and text are messages of the task, as if they had been told by themselves."""

    async def test_a_prompt_and_its_answer_are_messages(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, *AT_START["retried"][1:], replace(START_A, attempt=2))
        await writer.write(replace(ASK, attempt=2, content="Wait."), replace(DONE_A, attempt=2, prompt="First?"))
        await writer.write(TurnAppended(at(6), "a", 0, "user", "and now?"), replace(START_A, task_id="c"))
        await writer.write(replace(DONE_A, task_id="c", prompt="", data=None))
        assert await store.list_messages(RUN, "a") == (
            MessageRecord("a", 0, 1, "user", "First.", 3, 0, at(3)),
            MessageRecord("a", 1, 2, "user", "Wait.", 3, 0, at(3)),
            MessageRecord("a", 2, 2, "user", "First?", 0, 0, at(4)),
            MessageRecord("a", 3, 2, "assistant", "The Moon.", 3, 2, at(4)),
            MessageRecord("a", 4, 0, "user", "and now?", 0, 0, at(6)),
        )
        assert [m.content for m in await store.list_messages(RUN, "c")] == ["", "The Moon."]

    async def test_an_answer_that_was_damaged_goes_with_its_result(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, replace(DONE_A, prompt="First?"), TurnAppended(at(6), "a", 0, "user", "And?"))
        await writer.write(TaskReopened(at(7), "a", damaged=True), replace(START_A, attempt=2))
        messages = await store.list_messages(RUN, "a")
        assert [(m.position, m.content, m.damaged) for m in messages] == [
            (0, "First.", False),
            (1, "First?", False),
            (2, "And?", False),
        ]
        await writer.write(replace(DONE_A, attempt=2, prompt="Once more?"))
        messages = await store.list_messages(RUN, "a")
        assert [m.content for m in messages if m.attempt == 2] == ["Once more?", "The Moon."]
        assert not any(m.damaged for m in messages)
