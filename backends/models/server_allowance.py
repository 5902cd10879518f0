"""A server's limits of rate, as its response headers report them.

Anthropic names its headers `anthropic-ratelimit-*`, OpenAI and most compatible servers `x-ratelimit-*`. Both report
limits per minute; a server that reports a longer window only names a number that is too high, which lowers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.backends.backend_protocol import Allowance

_FORMS = ("x-ratelimit-{what}-{unit}", "anthropic-ratelimit-{unit}-{what}")


def reported_allowance(headers: Mapping[str, str], *, accepted: bool = True) -> Allowance:
    """Return the limits in `headers`. Values that are not numbers, and limits that are not positive, are unknown."""
    requests, requests_left = _limit(headers, "requests")
    tokens, tokens_left = _limit(headers, "tokens")
    return Allowance(requests, requests_left, tokens, tokens_left, accepted)


def _limit(headers: Mapping[str, str], unit: str) -> tuple[float | None, float | None]:
    for form in _FORMS:
        limit = _number(headers.get(form.format(what="limit", unit=unit)))
        if limit:  # some servers of Azure send -1 or 0 for both
            return limit, _number(headers.get(form.format(what="remaining", unit=unit)))
    return None, None


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
