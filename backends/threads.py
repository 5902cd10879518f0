"""Threads for work that the event loop must not wait for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from anyio import CapacityLimiter
    from anyio.lowlevel import RunVar

LARGE = 64 * 1024
"""Characters of a text that is parsed in a thread. Parsing takes 15 ms for a million characters."""
_Result = TypeVar("_Result")


async def in_thread(function: Callable[..., _Result], *args: Any) -> _Result:
    """Return the result of a function that holds the interpreter for long, such as parsing.

    One such function runs at a time: they would compete for the interpreter, and the event loop would wait for each of
    them in turn. Cancellation abandons the call.
    """

    from anyio import CapacityLimiter  # noqa: PLC0415 - small answers do without anyio
    from anyio.to_thread import run_sync  # noqa: PLC0415

    kept = _limiter_of_loop()
    limiter = kept.get(None)
    if limiter is None:
        limiter = CapacityLimiter(1)
        kept.set(limiter)
    return await run_sync(partial(function, *args), abandon_on_cancel=True, limiter=limiter)


def is_large(value: object) -> bool:
    """Return whether `value`, as JSON, may have more than `LARGE` characters. Looks at a few thousand parts at most."""
    if value is None:
        return False
    left = LARGE // 8
    rest: list[object] = [value]
    while rest:
        one = rest.pop()
        left -= 1
        if isinstance(one, str):
            left -= len(one) // 8
        elif isinstance(one, dict):
            rest += cast("dict[str, object]", one).values()
        elif isinstance(one, list | tuple):
            rest += cast("list[object]", one)
        if left < len(rest):
            return True
    return False


@cache
def _limiter_of_loop() -> RunVar[CapacityLimiter | None]:
    from anyio.lowlevel import RunVar  # noqa: PLC0415

    return RunVar("plait_parsing")
