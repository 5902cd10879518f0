"""Keep the context variables of one attempt apart from those of the next, within one asyncio task."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextvars import copy_context
from types import coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


@coroutine
def in_own_context(inner: Coroutine[Any, Any, _T]) -> Generator[Any, Any, _T]:
    """Await `inner` in a copy of the current context, and return the result.

    A worker runs many attempts in one asyncio task, and the next attempt must not see a context variable that the code
    of this attempt sets. Exceptions, cancellation included, pass in both directions.
    """
    run = copy_context().run
    try:
        awaited = run(inner.send, None)
        while True:
            try:
                value = yield awaited
            except BaseException as error:
                awaited = run(inner.throw, error)
            else:
                awaited = run(inner.send, value)
    except StopIteration as end:
        result: _T = end.value
        return result
