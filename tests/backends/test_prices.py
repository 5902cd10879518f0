"""Prices: the user's lines, the list, and tokens counted apart."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

from plait import AnthropicBackend, OpenAIBackend
from plait.backends import prices
from plait.backends.prices import FREE, UNBILLED, Billing, Price, Prices
from plait.json_form import JsonValue
from plait.usage import Usage
from tests.support.sizes import size

NOW = 1_800_000_000.0
OPENAI = Billing("https://api.openai.com/v1")
NONE = Prices({})


def test_each_kind_of_tokens_has_its_price() -> None:
    price = Price(3, 15, 0.3, 3.75, 20)
    used = Usage(1_000_000, 100_000, None, "m", 600_000, 100_000, 40_000)
    assert price.cost(used) == pytest.approx(0.3 * 3 + 0.06 * 15 + 0.6 * 0.3 + 0.1 * 3.75 + 0.04 * 20)


def test_kinds_without_a_price_cost_as_much_as_the_rest() -> None:
    used = Usage(1_000_000, 100_000, None, "m", 600_000, 100_000, 40_000)
    assert Price(3, 15).cost(used) == pytest.approx(3 + 1.5)


@pytest.mark.parametrize(
    ("price", "dollars"),
    [
        (Price(3, 15, cache_write=3.75, cache_write_1h=6), 1.875 + 3),
        (Price(3, 15, cache_write=3.75), 3.75),
        (Price(3, 15), 3),
    ],
)
def test_what_the_cache_keeps_for_an_hour_has_a_price_of_its_own(price: Price, dollars: float) -> None:
    used = Usage(1_000_000, 0, cache_write_tokens=1_000_000, cache_write_1h_tokens=500_000)
    assert price.cost(used) == pytest.approx(dollars)


def test_two_requests_of_a_turn_cost_what_each_of_them_costs() -> None:
    price = Price(3, 15, cache_read=0.3, cache_write=3.75, cache_write_1h=6, reasoning=20)
    first = Usage(900_000, 10_000, None, "m", 100_000, 400_000, 1_000, cache_write_1h_tokens=300_000)
    second = Usage(500_000, 20_000, None, "m", 200_000, 200_000, 2_000, cache_write_1h_tokens=100_000)
    assert price.cost(first + second) == pytest.approx(price.cost(first) + price.cost(second))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt-5", 1.0),
        ("gpt-5-2025-08-07", 1.0),
        ("gpt-5@20250807", 1.0),
        ("gpt-5-latest", 1.0),
        ("gpt-5-mini", None),
        ("gpt-5-2025-08-07-x", None),
        ("GPT-5", None),
        (None, None),
    ],
)
def test_a_line_holds_for_its_model_with_any_date(model: str | None, expected: float | None) -> None:
    lines = Prices({"gpt-5": Price(1, 1)})
    assert lines.priced(Usage(500_000, 500_000, model=model), UNBILLED, at=NOW).cost_usd == expected


def test_a_server_that_names_no_model_is_priced_by_the_requested_model() -> None:
    lines = Prices({"mine": Price(1, 1)})
    assert lines.priced(Usage(500_000, 500_000), Billing(model="mine"), at=NOW).cost_usd == 1.0


def test_the_list_prices_a_model_of_a_known_provider_with_its_tiers() -> None:
    prices.load()
    short, long = Usage(100_000, 1_000, model="gpt-5.4"), Usage(300_000, 1_000, model="gpt-5.4")
    base = NONE.priced(short, OPENAI, at=NOW).cost_usd
    assert base == pytest.approx(listed("openai", short))
    assert NONE.priced(long, OPENAI, at=NOW).cost_usd == pytest.approx(listed("openai", long))
    per_token = base / 101_000
    # Requests of 100,000 tokens, and sums over requests of unknown lengths, have the price of short requests.
    for known in (
        NONE.priced(long, OPENAI, 100_000, at=NOW),
        NONE.priced(long, Billing("openai", sums_requests=True), at=NOW),
    ):
        assert known.cost_usd is not None
        assert per_token * 301_000 * 0.8 < known.cost_usd < listed("openai", long) * 0.7


def listed(provider: str, used: Usage, **terms: str) -> float:
    """Return the price by the list's own function."""
    from genai_prices import Usage as Counts
    from genai_prices import calc_price

    counts = Counts(
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        cache_read_tokens=used.cache_read_tokens,
        cache_write_tokens=used.cache_write_tokens,
        cache_write_1h_tokens=used.cache_write_1h_tokens,
    )
    at = datetime.fromtimestamp(NOW, UTC)
    assert used.model is not None
    found = calc_price(counts, used.model, provider_id=provider, genai_request_timestamp=at, price_context=terms)
    return float(found.total_price)


@pytest.mark.parametrize(
    ("kind", "model", "extra"),
    [
        (OpenAIBackend, "gpt-5-mini", {"service_tier": "flex"}),
        (OpenAIBackend, "gpt-5-mini", {"service_tier": "priority", "reasoning_effort": "low"}),
        (AnthropicBackend, "claude-opus-5", {"speed": "fast"}),
    ],
)
def test_a_tier_that_a_request_asks_for_has_its_price(
    kind: type[OpenAIBackend] | type[AnthropicBackend], model: str, extra: dict[str, JsonValue]
) -> None:
    prices.load()
    used = Usage(1_000, 1_000, model=model)
    terms = {name: str(value) for name, value in extra.items() if name != "reasoning_effort"}
    provider = "openai" if kind is OpenAIBackend else "anthropic"
    assert listed(provider, used, **terms) != listed(provider, used)
    found = NONE.priced(used, kind(model, extra=extra).billing, at=NOW).cost_usd
    assert found == pytest.approx(listed(provider, used, **terms))
    usual = NONE.priced(used, kind(model, extra={"service_tier": "auto"}).billing, at=NOW).cost_usd
    assert usual == pytest.approx(listed(provider, used))


def test_prices_agree_with_the_lists_own_function_for_every_model() -> None:
    from genai_prices.data_snapshot import get_snapshot

    prices.load()
    compared = 0
    for provider in get_snapshot().providers:
        for model in provider.models[:: size(5, 1)]:
            for length in (1_000, 300_000):
                kept = length // 10
                used = Usage(length, 5_000, None, model.id, length // 2, kept, cache_write_1h_tokens=kept // 2)
                found = NONE.priced(used, Billing(provider.id), at=NOW).cost_usd
                if found is not None:
                    assert found == pytest.approx(listed(provider.id, used), abs=1e-12), (provider.id, model.id)
                    compared += 1
    assert compared > 1_000 / size(5, 1)


@pytest.mark.parametrize(
    ("billing", "model"),
    [
        (Billing("http://127.0.0.1:8000/v1"), "gpt-5.4"),
        (UNBILLED, "gpt-5.4"),
        (OPENAI, "a-model-that-nobody-knows"),
        (OPENAI, None),
        (Billing("perplexity"), "sonar"),  # each request costs something beside its tokens
    ],
)
def test_what_the_list_does_not_know_stays_unknown(billing: Billing, model: str | None) -> None:
    prices.load()
    used = Usage(10, 10, model=model)
    assert NONE.priced(used, billing, at=NOW) is used


def test_the_list_is_not_loaded_for_a_server_of_ones_own() -> None:
    others = ["https://api.openai.com/v1", "anthropic", "https://10.0.0.1.example.org/v1"]
    own = ["http://127.0.0.1:8000/v1", "https://[::1]:8000/v1", "http://localhost:11434/v1", "http://gpu1/v1"]
    code = (
        "import sys; from plait.backends.prices import Billing, Prices; from plait.usage import Usage\n"
        "used = Usage(10, 10, model='gpt-5.4')\n"
        "print(*(one for one in sys.argv[1:] if Prices({}).needs_list(used, Billing(one))))"
    )
    command = [sys.executable, "-c", code, *own, *others]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == others
    prices.load()
    used = Usage(10, 10, model="gpt-5.4")
    for provider in own:  # nor would the list have a price
        assert NONE.priced(used, Billing(provider), at=NOW) is used


def test_a_reported_cost_comes_first_then_the_users_line_then_the_backends_own_then_the_list() -> None:
    prices.load()
    lines, used = Prices({"gpt-5.4": Price(1, 1)}), Usage(500_000, 500_000, model="gpt-5.4")
    reported = Usage(10, 10, 0.5, "gpt-5.4")
    assert lines.priced(reported, OPENAI, at=NOW) is reported
    assert lines.priced(used, OPENAI, at=NOW).cost_usd == 1.0
    assert lines.priced(used, Billing(price=FREE), at=NOW).cost_usd == 1.0
    assert NONE.priced(used, Billing("openai", price=FREE), at=NOW).cost_usd == 0.0


def test_the_price_of_a_call_takes_no_more_than_some_microseconds_once_known(monkeypatch: pytest.MonkeyPatch) -> None:
    prices.load()
    used = Usage(10, 10, model="gpt-5.4")
    first = NONE.priced(used, OPENAI, at=NOW)
    monkeypatch.setattr(prices, "_list", None)  # a second look into the list would fail
    monkeypatch.setattr(prices, "is_loaded", lambda: True)
    assert NONE.priced(used, OPENAI, at=NOW + 60) == first


def test_importing_plait_does_not_load_the_list() -> None:
    code = "import sys, plait; plait.OpenAIBackend, plait.ParallelRunner; print('genai_prices' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "False\n"


@pytest.mark.parametrize(
    "price", [Price(-1, 1), Price(1, float("inf")), Price(1, 1, cache_read=float("nan")), Price("1", 1)]
)  # type: ignore[arg-type]
def test_a_price_that_is_no_amount_is_refused(price: Price) -> None:
    with pytest.raises(ValueError, match=r"the price of 'm' has .* give dollars for a million tokens"):
        price.check("m")
