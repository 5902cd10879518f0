"""The tokens and the cost of an attempt, of a task or of a run, in words. Pure."""

from __future__ import annotations

from typing import Protocol


class Spending(Protocol):
    """The tokens and the cost of an attempt, or a sum of such."""

    @property
    def cache_read_tokens(self) -> int: ...
    @property
    def cache_write_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...
    @property
    def cost_usd(self) -> float | None: ...
    @property
    def cost_is_partial(self) -> bool: ...
    @property
    def cost_is_unknown(self) -> bool: ...


def dollars(value: float | None) -> str:
    """Format a cost in dollars; empty for None."""
    if value is None:
        return ""
    if value >= 1:
        return f"${value:,.2f}"
    return f"${value:.6f}" if 0 < value < 0.0001 else f"${value:.4f}"


def cost(used: Spending) -> str:
    """Format a cost: `$0.0123`, `at least $0.0123` for a sum without some unknown costs, `cost unknown`; empty if
    nothing was used.
    """
    if used.cost_usd is None:
        return "cost unknown" if used.cost_is_unknown else ""
    return f"at least {dollars(used.cost_usd)}" if used.cost_is_partial else dollars(used.cost_usd)


def lacks_price(used: Spending) -> bool:
    """Return whether a price would make the cost of `used` known."""
    return used.cost_is_unknown and not used.cost_is_partial


def token_parts(used: Spending) -> str:
    """Format tokens counted apart: `1,024 read from the cache, 64 reasoning`; empty if there are none."""
    parts = {
        "read from the cache": used.cache_read_tokens,
        "written to the cache": used.cache_write_tokens,
        "reasoning": used.reasoning_tokens,
    }
    return ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
