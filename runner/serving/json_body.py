"""Strict reading of request bodies, as of plan files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute


class StrictJsonRoute(APIRoute):
    """A route that refuses JSON objects with a repeated key, because either value could be meant."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, called with a strict request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return json.loads(await self.body(), object_pairs_hook=_refuse_duplicates)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise HTTPException(400, f"the body is not JSON: {error.msg} in {where}") from None
        except UnicodeDecodeError as error:
            raise HTTPException(400, f"the body is not UTF-8: {error.reason} at byte {error.start + 1:,}") from None
        except RecursionError:
            raise HTTPException(400, "the body is nested too deeply to be read; make it flatter") from None
        except ValueError:  # the limit of Python, which keeps one number from taking minutes
            raise HTTPException(400, "the body holds a number of too many digits; send it as text") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise HTTPException(400, f"the key {twice[:80]!r} is given twice in one object; keep one")
    return values
