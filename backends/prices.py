"""The price of a model: a line of the user, or of the list in the package `genai-prices` (extra `prices`).

The list is loaded when a call first needs it, which takes some tenths of a second. Nothing is fetched from the network.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any, Final
from urllib.parse import urlsplit

from plait.json_form import value
from plait.safe_text import one_line
from plait.usage import NO_USAGE, Usage

_LOG: Final = logging.getLogger(__name__)
_PACKAGE = "genai_prices"
_LOADING = Lock()
_PERIOD_S = 1800
"""Some prices depend on the time of day, and change at a full or a half hour."""
_DATE = re.compile(r"[-@:](\d{4}-?\d{2}-?\d{2}|latest)")
"""The end of a model's name that a server adds to the name in the request."""


@value
class Price:
    """The price of a model, in US dollars for a million tokens."""

    input: float
    output: float
    cache_read: float | None = None
    """For input read from the provider's cache; None for the price of other input."""
    cache_write: float | None = None
    """For input written to the provider's cache; None for the price of other input."""
    reasoning: float | None = None
    """For reasoning; None for the price of other output."""
    cache_write_1h: float | None = None
    """For input that the provider's cache keeps for an hour; None for the price of other input written to the cache."""

    def cost(self, used: Usage) -> float:
        """Return the cost of `used` in US dollars."""
        read, written, thought = used.cache_read_tokens, used.cache_write_tokens, used.reasoning_tokens
        dollars = (used.input_tokens - read - written) * self.input + (used.output_tokens - thought) * self.output
        dollars += read * (self.input if self.cache_read is None else self.cache_read)
        write = self.input if self.cache_write is None else self.cache_write
        long = used.cache_write_1h_tokens
        dollars += (written - long) * write + long * (write if self.cache_write_1h is None else self.cache_write_1h)
        return (dollars + thought * (self.output if self.reasoning is None else self.reasoning)) / 1_000_000

    def most(self, input_tokens: int, output_tokens: int) -> float:
        """Return the highest cost of a call of at most these tokens in US dollars, written to the cache or not."""
        read = max(one for one in (self.input, self.cache_read, self.cache_write) if one is not None)
        written = max(self.output, self.reasoning or 0.0)
        return (input_tokens * read + output_tokens * written) / 1_000_000

    def check(self, model: str) -> None:
        """Raise ValueError unless all numbers are finite and not negative; `model` is named in the message."""
        for name in ("input", "output", "cache_read", "cache_write", "reasoning", "cache_write_1h"):
            amount = getattr(self, name)
            if amount is not None and not (isinstance(amount, int | float) and isfinite(amount) and amount >= 0):
                raise ValueError(f"the price of {model!r} has {name}={amount!r}; give dollars for a million tokens")


FREE = Price(0.0, 0.0)
"""The price of a model that costs no money."""


@value
class Billing:
    """The facts that decide the price of a backend's calls."""

    provider: str | None = None
    """The provider that bills the calls: the URL of the API, or the name of the provider in genai-prices. None: the
    list is not asked.
    """
    model: str | None = None
    """The requested model, for servers that do not name the answering model."""
    sums_requests: bool = False
    """Whether the usage of a turn is a sum over an unknown number of requests. A price that depends on the length of
    the input is then the price of a short input.
    """
    price: Price | None = None
    """The price of every model of the backend; None to look the price up."""
    terms: tuple[tuple[str, str], ...] = ()
    """Options of the requests on which the price in the list depends, such as `("service_tier", "flex")`."""
    estimates: bool = False
    """Whether a cost that the backend reports may come from a list: a line of the user then replaces the cost."""
    max_output_tokens: int | None = None
    """The most tokens that the backend lets a request write; None without a bound."""
    max_turn_usd: float | None = None
    """The most that a turn costs, in US dollars, whatever the price; None without a bound."""


UNBILLED = Billing()
"""The billing of a backend without `billing`: only the user's prices count."""


def billing_of(backend: object) -> Billing:
    """Return the property `billing` of a backend that reports tokens without their cost, and knows the provider."""
    billing: Billing = getattr(backend, "billing", UNBILLED)
    return billing


class Prices:
    """The prices of a run: the user's `own` prices by model, then the list."""

    def __init__(self, own: Mapping[str, Price]) -> None:
        self._own_prices = own

    def needs_list(self, used: Usage, billing: Billing) -> bool:
        """Return whether only the list, not loaded so far, can hold the price of `used`."""
        if billing.provider is None or is_loaded() or _is_local(billing.provider):
            return False
        return self._own(used, billing) is None

    def priced(self, used: Usage, billing: Billing, longest: int | None = None, *, at: float) -> Usage:
        """Return `used` with its cost, if the cost is unknown, or an estimate and the user has a price, and there is a
        price at the Unix time `at`.

        `longest` is the input of the longest request in `used`; None if `used` is a single request. The list counts
        only if loaded.
        """
        is_estimate = billing.estimates and used.cost_usd is not None
        if not (used.cost_is_unknown or is_estimate):
            return used
        price = self._own(used, billing)
        if price is None and not is_estimate and billing.provider is not None and is_loaded():
            model = used.model or billing.model
            tiers = () if model is None else _listed(billing.provider, model, int(at // _PERIOD_S), billing.terms)
            length = 0 if billing.sums_requests else used.input_tokens if longest is None else longest
            price = next((one for start, one in reversed(tiers) if not start or length > start), None)
        if price is None:
            return used
        is_partial = used.cost_is_partial and price != FREE
        if is_partial and not (used.input_tokens or used.output_tokens):
            return used
        return replace(used, cost_usd=price.cost(used), cost_is_partial=is_partial)

    def most(self, input_tokens: int, output_tokens: int, billing: Billing, *, at: float) -> float | None:
        """Return the highest cost of a request of at most these tokens at the Unix time `at`, in US dollars; None
        without a price. The list counts only if loaded.
        """
        price = self._own(NO_USAGE, billing)
        candidates: Sequence[Price] = () if price is None else (price,)
        if price is None and billing.provider is not None and billing.model is not None and is_loaded():
            tiers = _listed(billing.provider, billing.model, int(at // _PERIOD_S), billing.terms)
            candidates = [one for start, one in tiers if not start or input_tokens > start]
        return max((one.most(input_tokens, output_tokens) for one in candidates), default=None)

    def _own(self, used: Usage, billing: Billing) -> Price | None:
        """Return the user's price, else that of the backend."""
        if self._own_prices:
            for model in (used.model, billing.model):
                price = None if model is None else self._own_price(model)
                if price is not None:
                    return price
        return billing.price

    def _own_price(self, model: str) -> Price | None:
        """Return the user's price of `model`. It also holds for the name with a date at the end, as servers report."""
        price = self._own_prices.get(model)
        if price is None and (date := _DATE.search(model)) is not None and date.end() == len(model):
            price = self._own_prices.get(model[: date.start()])
        return price


def is_loaded() -> bool:
    """Return whether the list is loaded, or cannot be loaded because the package is missing or of an unknown form."""
    return _list.cache_info().currsize > 0


def load() -> None:
    """Load the list, if the package is installed. Takes some tenths of a second the first time; call in a thread."""
    with _LOADING:
        _list()


def list_version() -> tuple[str, str] | None:
    """Return the version of the installed list and the day of its installation; None if the list is not installed.

    Loads nothing.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - brings the whole of email

    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    try:
        number = version(_PACKAGE.replace("_", "-"))
    except PackageNotFoundError:
        return None
    return number, datetime.fromtimestamp(Path(spec.origin).stat().st_mtime, UTC).date().isoformat()


@lru_cache(maxsize=256)
def _is_local(provider: str) -> bool:
    """Return whether `provider` is the URL of a server of one's own, named by an IP address or by a name without a dot.
    No provider in the list has such a URL, so the list need not be loaded.
    """
    if "://" not in provider:
        return False
    try:
        host = urlsplit(provider).hostname or ""
    except ValueError:
        return False
    return ":" in host or "." not in host or host.replace(".", "").isdigit()


@cache
def _list() -> Any:
    """Return the list; None if the package is missing or of an unknown form.

    Another package may have brought any version with it, and the calls are paid for, so no error of the list may
    end a run.
    """
    try:
        if find_spec(_PACKAGE) is None:
            return None
        return import_module("genai_prices.data_snapshot").get_snapshot()
    except Exception as error:
        _warn_unreadable(f"{type(error).__name__}: {one_line(str(error), 120)}")
        return None


@lru_cache(maxsize=1024)
def _listed(provider: str, model: str, period: int, terms: Sequence[tuple[str, str]]) -> tuple[tuple[int, Price], ...]:
    """Return the prices in the list, each behind the length of input above which the price holds, in rising order;
    none if the list has no price by tokens. A call of the list's own function takes 0.4 ms, so the numbers are kept.
    """
    snapshot = _list()
    if snapshot is None:
        return ()
    at = datetime.fromtimestamp(period * _PERIOD_S, UTC)
    is_url = "://" in provider
    try:
        try:
            names = (None, provider) if is_url else (provider, None)
            _, listed_model = snapshot.find_provider_model(model, None, *names)
        except LookupError:  # an unknown name
            return ()
        amounts = listed_model.get_prices(at, dict(terms)) if terms else listed_model.get_prices(at)
        if amounts.requests_kcount or (amounts.input_mtok is None and amounts.output_mtok is None):
            return ()
        columns = [
            amounts.input_mtok,
            amounts.output_mtok,
            amounts.cache_read_mtok,
            amounts.cache_write_mtok,
            amounts.output_reasoning_mtok,
            amounts.cache_write_1h_mtok,
        ]
        starts = {0, *(tier.start for column in columns for tier in getattr(column, "tiers", ()))}
        return tuple((start, _price_above(start, columns)) for start in sorted(starts))
    except Exception as error:  # as of `_list`
        _warn_unreadable(f"{type(error).__name__}: {one_line(str(error), 120)}")
        return ()


@cache
def _warn_unreadable(reason: str) -> None:
    """Log, once for each reason, that the list cannot be read."""
    _LOG.warning(
        "the list of prices in the installed genai-prices cannot be read (%s), so costs from it are unknown; "
        "to upgrade: pip install --upgrade genai-prices",
        reason,
    )


def _price_above(start: int, columns: list[Any]) -> Price:
    """Return the price for an input longer than `start`."""
    amounts: list[float | None] = []
    for column in columns:
        amount = getattr(column, "base", column)
        for tier in getattr(column, "tiers", ()):
            amount = tier.price if tier.start <= start and start else amount
        amounts.append(None if amount is None else float(amount))
    into, out, *parts = amounts
    return Price(into or 0.0, out or 0.0, *parts)
