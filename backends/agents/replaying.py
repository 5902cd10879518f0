"""A conversation told as text to a session that does not know it."""

from __future__ import annotations

from collections.abc import Sequence

from plait.backends.protocol import Message


def replayed(history: Sequence[Message], prompt: str) -> str:
    """`prompt`, with what was said before in front of it."""
    said = "\n\n".join(
        f"<{message.role}>\n{message.content}\n</{message.role}>" for message in history if message.role != "system"
    )
    return (
        "You are going on with a conversation from another session. This is what was said in it, oldest first:\n\n"
        f"{said}\n\nWhat you did in it is done; look at the files if you need to know more. The next message is:\n\n"
        f"{prompt}"
    )
