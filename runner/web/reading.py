"""Bodies of requests, read as strictly as plan files are."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute


class ReadOnce(APIRoute):
    """A route that refuses JSON in which a key is given twice: either value could be meant."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given requests of ours."""
        handle = super().get_route_handler()

        async def handle_ours(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handle_ours


class _Request(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise HTTPException(400, f"the key {twice[:80]!r} is given twice in one object; keep one")
    return values
