"""A run's history as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
import anyio.lowlevel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.persistence.errors import StoreError
from plait.runner.errors import RunNotFound
from plait.runner.operations.inspect import StoredEvent
from plait.runner.web import schemas

HEARTBEAT_SECONDS = 15.0
_COME_BACK_MS = 1000
PUBLISHED = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "The event's number, for `Last-Event-ID`."},
        "event": {"type": "string", "description": "Its kind."},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": schemas.EventShape.model_json_schema(),
        },
    },
    "required": ["id", "event", "data"],
}
"""Each event of the stream, as it stands in /openapi.json."""


class EventStream(Response):
    """Sends `events` as they come, and a comment every `HEARTBEAT_SECONDS`, by which both sides see that the other is
    there. Ends after the last event, when the client leaves, and once `leaving` is set, as the server's end is near.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[StoredEvent], leaving: anyio.Event) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await self._leaving.wait()
                group.cancel_scope.cancel()

            async def end_with_the_client() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(end)
            group.start_soon(end_with_the_client)
            group.start_soon(_beat, send)
            await self._tell(send)
            group.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(self, send: Send) -> None:
        await _send(send, f"retry: {_COME_BACK_MS}\n\n")
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await _send(send, as_text(event))
        except (StoreError, RunNotFound) as error:
            # Too late for another status: the client comes back for the rest, and is told then if it goes on.
            await _send(send, f": {json.dumps(str(error))}\n\n")


async def _beat(send: Send) -> None:
    while True:
        await anyio.sleep(HEARTBEAT_SECONDS)
        await _send(send, ":\n\n")


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
    # The server's `send` need not pause: a long history would hold everybody else up, and go on to who has left.
    await anyio.lowlevel.checkpoint()


def as_text(event: StoredEvent) -> str:
    """The event as it goes over the wire."""
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {schemas.event_shape(event).model_dump_json()}\n\n"
