"""The tokens and the cost of a turn, of an attempt, or of a sum of such, and their words. Pure."""

from __future__ import annotations

from plait.json_form import value


@value
class Usage:
    """The cost of a turn and the model that answered."""

    input_tokens: int = 0
    """Tokens read, as counted by the backend, tokens of the provider's cache included."""
    output_tokens: int = 0
    """Tokens written, as counted by the backend, reasoning included."""
    cost_usd: float | None = None
    """Cost in US dollars; None if unknown."""
    model: str | None = None
    """Printable model name reported by the server or agent; None if not reported. A sum keeps the name of the last
    addend that has a name.
    """
    cache_read_tokens: int = 0
    """The part of `input_tokens` that the provider read from its cache."""
    cache_write_tokens: int = 0
    """The part of `input_tokens` that the provider wrote to its cache."""
    reasoning_tokens: int = 0
    """The part of `output_tokens` that the model spent on reasoning."""
    cost_is_partial: bool = False
    """Whether a part of the cost is unknown: `cost_usd` is then the cost of the other parts."""
    cache_write_1h_tokens: int = 0
    """The part of `cache_write_tokens` that the provider keeps for an hour, at a higher price."""

    @property
    def cost_is_unknown(self) -> bool:
        """Whether nothing is known of a cost: of used tokens, or of a request whose usage was never reported."""
        return self.cost_usd is None and (self.input_tokens > 0 or self.output_tokens > 0 or self.cost_is_partial)

    def __add__(self, other: Usage) -> Usage:
        if other is NO_USAGE:
            return self
        if self is NO_USAGE:
            return other
        costs = [cost for cost in (self.cost_usd, other.cost_usd) if cost is not None]
        is_partial = self.cost_is_partial or other.cost_is_partial
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            cost_usd=sum(costs) if costs else None,
            model=other.model or self.model,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cost_is_partial=is_partial or (bool(costs) and (self.cost_is_unknown or other.cost_is_unknown)),
            cache_write_1h_tokens=self.cache_write_1h_tokens + other.cache_write_1h_tokens,
        )


NO_USAGE = Usage()
"""The usage of a turn without any: no tokens, no known cost, no model."""


def dollars(value: float | None) -> str:
    """Format a cost in dollars; empty for None."""
    if value is None:
        return ""
    if value >= 1:
        return f"${value:,.2f}"
    return f"${value:.6f}" if 0 < value < 0.0001 else f"${value:.4f}"


def cost(used: Usage) -> str:
    """Format a cost: `$0.0123`, `at least $0.0123` for a sum without some unknown costs, `cost unknown`; empty if
    nothing was used.
    """
    if used.cost_usd is None:
        return "cost unknown" if used.cost_is_unknown else ""
    return f"at least {dollars(used.cost_usd)}" if used.cost_is_partial else dollars(used.cost_usd)


def lacks_price(used: Usage) -> bool:
    """Return whether a price would make the cost of `used` known."""
    return used.cost_is_unknown and not used.cost_is_partial


def token_parts(used: Usage) -> str:
    """Format tokens counted apart: `1,024 read from the cache, 64 reasoning`; empty if there are none."""
    parts = {
        "read from the cache": used.cache_read_tokens,
        "written to the cache": used.cache_write_tokens,
        "reasoning": used.reasoning_tokens,
    }
    return ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
