"""Texts of running attempts: whole for a reader that comes late, and new with each attempt."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from plait import events
from plait.runner.engine.live_run import LiveText, TextPiece

AT = "2026-01-01T00:00:00.000Z"


def output(text: str, attempt: int = 1, task: str = "a", kind: str = "text") -> events.TaskOutput:
    return events.TaskOutput(AT, task, attempt, kind, text)  # type: ignore[arg-type]


async def read(live: LiveText) -> list[TextPiece]:
    """What a reader receives that comes now, up to the end."""
    return [piece async for piece in live.pieces()]


async def test_a_late_reader_receives_the_text_up_to_now() -> None:
    live = LiveText()
    for text in ("Al", "pha"):
        live.take(output(text))
    live.take(output("tool", kind="tool"))
    live.take(output("Beta", task="b"))
    live.close()
    assert await read(live) == [TextPiece("a", 1, 0, "Alpha"), TextPiece("b", 1, 0, "Beta")]


async def test_each_reader_receives_what_is_new() -> None:
    live, seen = LiveText(), list[TextPiece]()

    async def follow() -> None:
        seen.extend([piece async for piece in live.pieces()])

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        for event in (
            output("one"),
            output(" two"),
            events.TaskRetried(AT, "a", 1, error_kind="transient", error="cut", delay_s=0.0, duration_s=0.0),
            output("again", attempt=2),
        ):
            live.take(event)
            await anyio.wait_all_tasks_blocked()
        live.close()
    assert seen == [TextPiece("a", 1, 0, "one"), TextPiece("a", 1, 3, " two"), TextPiece("a", 2, 0, "again")]


async def test_a_slow_reader_receives_longer_pieces_and_nothing_of_an_ended_attempt() -> None:
    live = LiveText()
    pieces = live.pieces()
    live.take(output("a"))
    assert await anext(pieces) == TextPiece("a", 1, 0, "a")
    for _ in range(1000):
        live.take(output("b"))
    live.take(output("gone", task="c"))
    live.take(events.TaskCompleted(AT, "c", 1, text="gone"))
    assert await anext(pieces) == TextPiece("a", 1, 1, "b" * 1000)
    live.close()
    assert [piece async for piece in pieces] == []
