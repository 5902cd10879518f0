"""What every backend has to keep. Subclass `BackendContract` and give it a fixture `subject`; see docs/backends.md."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

try:
    import pytest
except ImportError as error:
    raise ImportError("backends.contract needs pytest: pip install 'plait[test]'") from error

from backends import Backend, BackendError, ErrorKind, ForkingBackend, JsonValue, Message, Opening, Output

SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


@dataclass
class Subject:
    """The backend under test, in three states of its world."""

    working: Backend
    """Answers any prompt with text, and with JSON that fits when SCHEMA is asked for."""
    hanging: Backend
    """Does not end its answer within a minute."""
    failing: Backend
    """Fails every turn."""


class BackendContract:
    async def test_is_a_backend(self, subject: Subject) -> None:
        assert isinstance(subject.working, Backend)

    async def test_new_session_ids_differ(self, subject: Subject) -> None:
        ids = {subject.working.new_session_id() for _ in range(100)}
        assert ids == {None} or (len(ids) == 100 and None not in ids)

    async def test_a_reply_is_whole(self, subject: Subject) -> None:
        session_id = subject.working.new_session_id()
        async with subject.working.open(Opening(session_id=session_id)) as conversation:
            reply = await conversation.send("Say hello.")
            assert reply.text
            assert reply.session_id == conversation.session_id
            assert session_id is None or reply.session_id == session_id
        assert reply.data is None
        assert reply.usage.input_tokens >= 0
        assert reply.usage.output_tokens >= 0
        if reply.messages:
            assert reply.messages[0].role == "user"
            assert reply.messages[0].content == "Say hello."
            assert reply.messages[-1] == Message("assistant", reply.text, reply.messages[-1].usage)

    async def test_output_pieces_make_up_the_text(self, subject: Subject) -> None:
        seen: list[Output] = []
        async with subject.working.open(Opening(on_output=seen.append)) as conversation:
            reply = await conversation.send("Say hello.")
        pieces = [output.text for output in seen if output.kind == "text"]
        assert not pieces or "".join(pieces) == reply.text

    async def test_several_turns(self, subject: Subject) -> None:
        async with subject.working.open(Opening()) as conversation:
            for prompt in ("One.", "Two.", "Three."):
                reply = await conversation.send(prompt)
                assert reply.text
                assert not reply.messages or reply.messages[0].content == prompt

    async def test_goes_on_from_a_history(self, subject: Subject) -> None:
        history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
        session_id = subject.working.new_session_id()
        opening = Opening(session_id=session_id, resume=True, history=history)
        async with subject.working.open(opening) as conversation:
            reply = await conversation.send("What is my name?")
        assert reply.text
        assert not reply.messages or reply.messages[0].content == "What is my name?"

    async def test_a_fork_is_a_session_of_its_own(self, subject: Subject) -> None:
        backend = subject.working
        if not (isinstance(backend, ForkingBackend) and backend.can_fork):
            return
        async with backend.open(Opening(session_id=backend.new_session_id(), idempotency_key="r:a")) as conversation:
            parent = await conversation.send("My name is Ada.")
        assert parent.session_id is not None
        opening = Opening(
            session_id=backend.new_session_id(),
            idempotency_key="r:b",
            forks=parent.session_id,
            history=parent.turn("My name is Ada."),
        )
        async with backend.open(opening) as conversation:
            fork = await conversation.send("What is my name?")
        assert fork.text
        assert fork.session_id not in {None, parent.session_id}
        for session_id in (parent.session_id, fork.session_id):
            async with backend.open(Opening(session_id=session_id, resume=True)) as conversation:
                assert (await conversation.send("And now?")).session_id == session_id

    async def test_data_fits_the_schema(self, subject: Subject) -> None:
        async with subject.working.open(Opening(output_schema=SCHEMA)) as conversation:
            reply = await conversation.send("The weather is fine. Which mood is that?")
        assert isinstance(reply.data, dict)
        assert reply.data["mood"] in {"good", "bad"}

    async def test_a_schema_that_is_none_is_refused(self, subject: Subject) -> None:
        with pytest.raises(BackendError) as caught:
            async with subject.working.open(Opening(output_schema={"type": "nonsense"})) as conversation:
                await conversation.send("Say hello.")
        assert caught.value.kind is ErrorKind.INVALID_REQUEST

    async def test_many_conversations_at_once(self, subject: Subject) -> None:
        texts: list[str] = []

        async def talk(number: int) -> None:
            async with subject.working.open(Opening()) as conversation:
                texts.append((await conversation.send(f"Say {number}.")).text)

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(talk, number)
        assert len(texts) == 8
        assert all(texts)

    async def test_prompts_that_utf8_cannot_hold(self, subject: Subject) -> None:
        async with subject.working.open(Opening()) as conversation:
            reply = await conversation.send("Say \ud800 or \x00.")
        reply.text.encode()
        for message in reply.messages:
            message.content.encode()

    async def test_failure_is_a_backend_error_in_one_line(self, subject: Subject) -> None:
        with pytest.raises(BackendError) as caught:
            async with subject.failing.open(Opening()) as conversation:
                await conversation.send("the-prompt-itself")
        assert caught.value.message
        assert "\n" not in caught.value.message
        assert "the-prompt-itself" not in str(caught.value)

    async def test_cancel_ends_a_turn_at_once(self, subject: Subject) -> None:
        async with subject.hanging.open(Opening()) as conversation:
            with anyio.move_on_after(0.3) as scope:
                await conversation.send("Write a very long story.")
            assert scope.cancelled_caught
        with anyio.fail_after(2):
            async with subject.hanging.open(Opening()):
                pass

    async def test_cancel_from_outside_leaves_the_context(self, subject: Subject) -> None:
        with anyio.fail_after(5), anyio.move_on_after(0.3) as scope:
            async with subject.hanging.open(Opening()) as conversation:
                await conversation.send("Write a very long story.")
        assert scope.cancelled_caught
        async with subject.working.open(Opening()) as conversation:
            assert (await conversation.send("Say hello.")).text
