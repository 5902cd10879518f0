"""The contract of every backend, as tests. Subclass `BackendContract` and add a fixture `subject`; see
docs/guides/backends.md.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import anyio
import pytest

from plait.backends import NO_USAGE, Abilities, Backend, ConversationRequest, Message, Output, Reply
from plait.backends.output_schema import Schema
from plait.errors import BackendError, ErrorKind

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


@dataclass
class Subject:
    """The backend under test, in three conditions."""

    working: Backend
    """Answers any prompt with text, and one about a mood, for which SCHEMA is requested, with JSON that fits."""
    hanging: Backend
    """Takes more than a minute to answer."""
    failing: Backend
    """Fails every turn, with an error message that does not contain the prompt."""


_tasks = itertools.count()


def new_request(backend: Backend) -> ConversationRequest:
    """Return a request like the runner's for the first conversation of a new task."""
    return ConversationRequest(session_id=backend.new_session_id(), idempotency_key=f"contract:task-{next(_tasks)}")


async def say(backend: Backend, prompt: str, how: ConversationRequest) -> Reply:
    """Run one turn in a separate conversation and return the reply."""
    async with backend.open(how) as conversation:
        return await conversation.send(prompt)


class BackendContract:
    async def test_is_a_backend(self, subject: Subject) -> None:
        assert isinstance(subject.working, Backend)

    async def test_new_session_ids_differ(self, subject: Subject) -> None:
        ids = {subject.working.new_session_id() for _ in range(100)}
        assert ids == {None} or (len(ids) == 100 and None not in ids)

    async def test_a_reply_is_whole(self, subject: Subject) -> None:
        how = new_request(subject.working)
        async with subject.working.open(how) as conversation:
            reply = await conversation.send("Say hello.")
            assert reply.text
            assert reply.session_id == conversation.session_id
            assert how.session_id is None or reply.session_id == how.session_id
        assert reply.data is None
        if reply.messages:
            assert reply.messages[0].role == "user"
            assert reply.messages[0].content == "Say hello."
            assert (reply.messages[-1].role, reply.messages[-1].content) == ("assistant", reply.text)

    async def test_output_pieces_make_up_the_text(self, subject: Subject) -> None:
        seen: list[Output] = []
        reply = await say(subject.working, "Say hello.", replace(new_request(subject.working), on_output=seen.append))
        pieces = [output.text for output in seen if output.kind == "text"]
        assert not pieces or "".join(pieces) == reply.text

    async def test_usage_covers_the_whole_turn(self, subject: Subject) -> None:
        seen: list[Output] = []
        reply = await say(subject.working, "Say hello.", replace(new_request(subject.working), on_output=seen.append))
        assert reply.usage.input_tokens >= 0
        assert reply.usage.output_tokens >= 0
        parts = sum((message.usage for message in reply.messages), NO_USAGE)
        for so_far in (parts, *(output.usage for output in seen)):
            assert so_far.input_tokens <= reply.usage.input_tokens
            assert so_far.output_tokens <= reply.usage.output_tokens

    async def test_reported_session_id_equals_reply_session_id(self, subject: Subject) -> None:
        told: list[str] = []
        reply = await say(subject.working, "Say hello.", replace(new_request(subject.working), on_session=told.append))
        assert not told or told[-1] == reply.session_id

    async def test_several_turns(self, subject: Subject) -> None:
        async with subject.working.open(new_request(subject.working)) as conversation:
            for prompt in ("One.", "Two.", "Three."):
                reply = await conversation.send(prompt)
                assert reply.text
                assert not reply.messages or reply.messages[0].content == prompt

    async def test_a_session_is_continued(self, subject: Subject) -> None:
        how = new_request(subject.working)
        first = await say(subject.working, "My name is Ada.", how)
        again = replace(how, session_id=first.session_id, resume=True, history=first.turn("My name is Ada."))
        reply = await say(subject.working, "What is my name?", again)
        assert reply.text
        assert reply.session_id == first.session_id
        assert not reply.messages or reply.messages[0].content == "What is my name?"

    async def test_a_history_is_continued(self, subject: Subject) -> None:
        """Resume a session unknown to the backend. A backend that keeps sessions may fail with `session_lost`."""
        history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
        told: list[str] = []
        how = replace(new_request(subject.working), on_session=told.append)
        await say(subject.working, "Say hello.", how)
        unknown = subject.working.new_session_id() or ("unknown-to-it" if told else None)
        how = replace(new_request(subject.working), session_id=unknown, resume=True, history=history)
        try:
            reply = await say(subject.working, "What is my name?", how)
        except BackendError as error:
            # Without a call of on_session the backend keeps no sessions, so none can be lost.
            if not told or error.kind is not ErrorKind.SESSION_LOST:
                raise
        else:
            assert reply.text
            assert not reply.messages or reply.messages[0].content == "What is my name?"

    async def test_a_fork_is_a_session_of_its_own(self, subject: Subject) -> None:
        backend = subject.working
        if not Abilities.of(backend).can_fork:
            return
        parent = await say(backend, "My name is Ada.", new_request(backend))
        assert parent.session_id is not None
        how = replace(new_request(backend), fork_of=parent.session_id, history=parent.turn("My name is Ada."))
        fork = await say(backend, "What is my name?", how)
        assert fork.text
        assert fork.session_id not in {None, parent.session_id}
        for session_id in (parent.session_id, fork.session_id):
            reply = await say(backend, "And now?", ConversationRequest(session_id=session_id, resume=True))
            assert reply.session_id == session_id

    async def test_data_fits_the_schema(self, subject: Subject) -> None:
        how = replace(new_request(subject.working), output_schema=SCHEMA)
        reply = await say(subject.working, "The weather is fine. Which mood is that?", how)
        data = Schema(SCHEMA).read(reply.text) if reply.data is None else reply.data
        assert isinstance(data, dict)
        assert data["mood"] in {"good", "bad"}

    async def test_an_invalid_schema_is_refused_or_left_to_plait(self, subject: Subject) -> None:
        how = replace(new_request(subject.working), output_schema={"type": "nonsense"})
        kinds: list[ErrorKind] = []
        try:
            reply = await say(subject.working, "Say hello.", how)
            assert reply.data is None, "a backend that returns data has checked them"
        except BackendError as error:
            kinds.append(error.kind)
        assert kinds in ([], [ErrorKind.INVALID_REQUEST])

    async def test_many_conversations_at_once(self, subject: Subject) -> None:
        texts: list[str] = []

        async def talk(number: int) -> None:
            async with subject.working.open(new_request(subject.working)) as conversation:
                texts.append((await conversation.send(f"Say {number}.")).text)

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(talk, number)
        assert len(texts) == 8
        assert all(texts)

    async def test_prompts_that_utf8_cannot_hold(self, subject: Subject) -> None:
        async with subject.working.open(new_request(subject.working)) as conversation:
            reply = await conversation.send("Say \ud800 or \x00.")
        reply.text.encode()
        for message in reply.messages:
            message.content.encode()

    async def test_failure_is_a_backend_error_in_one_line(self, subject: Subject) -> None:
        with pytest.raises(BackendError) as caught:
            async with subject.failing.open(new_request(subject.failing)) as conversation:
                await conversation.send("the-prompt-itself")
        assert caught.value.message
        assert "\n" not in caught.value.message
        assert "the-prompt-itself" not in str(caught.value)

    async def test_cancel_ends_a_turn_at_once(self, subject: Subject) -> None:
        async with subject.hanging.open(new_request(subject.hanging)) as conversation:
            with anyio.move_on_after(0.3) as scope:
                await conversation.send("Write a very long story.")
            assert scope.cancelled_caught
        with anyio.fail_after(60):
            async with subject.hanging.open(new_request(subject.hanging)):
                pass

    async def test_cancel_from_outside_leaves_the_context(self, subject: Subject) -> None:
        with anyio.fail_after(60), anyio.move_on_after(0.3) as scope:
            async with subject.hanging.open(new_request(subject.hanging)) as conversation:
                await conversation.send("Write a very long story.")
        assert scope.cancelled_caught
        async with subject.working.open(new_request(subject.working)) as conversation:
            assert (await conversation.send("Say hello.")).text
