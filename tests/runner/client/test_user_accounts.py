"""The accounts of a user or a team: limits in a file that the environment names, for all backends of a key."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from plait.backends.backend_specs import OpenAISpec, RatePart
from plait.errors import InvalidRequest
from plait.persistence import SQLiteStore
from plait.runner.client.run_backends import BackendSet
from plait.runner.engine.run_options import RunOptions
from plait.runner.scheduling.own_limits import RateLimits

KEY = "sk-of-the-team"
DIGEST = sha256(KEY.encode()).hexdigest()[:16]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("PLAIT_CONFIG", str(tmp_path / "accounts.yaml"))
    return tmp_path / "accounts.yaml"


def say(file: Path, text: str) -> None:
    file.write_text(text)


async def rates_of(**specs: OpenAISpec) -> dict[str, RateLimits]:
    backends = BackendSet(specs)
    async with backends.open(specs) as made:
        return dict(backends.options(made).rates)


@pytest.mark.parametrize("name", ["openai", f'"{DIGEST}"'], ids=["a kind", "a key"])
async def test_the_limits_hold_for_the_backends_without_limits_of_their_own(file: Path, name: str) -> None:
    say(file, f"accounts: {{{name}: {{requests_per_minute: 600, tokens_per_minute: 20000}}}}")
    own = RatePart(requests_per_minute=60)
    found = await rates_of(
        fast=OpenAISpec(kind="openai", model="a"), slow=OpenAISpec(kind="openai", model="b", limits=own)
    )
    assert found == {"fast": RateLimits(600, 20_000, account=name.strip('"')), "slow": RateLimits(60)}


async def test_a_digest_counts_before_the_kind_and_others_are_left_alone(file: Path) -> None:
    say(file, f'accounts: {{openai: {{requests_per_minute: 600}}, "{DIGEST}": {{requests_per_minute: 60}}}}')
    assert (await rates_of(api=OpenAISpec(kind="openai", model="a")))["api"].requests_per_minute == 60
    say(file, "accounts: {anthropic: {requests_per_minute: 600}}")
    assert await rates_of(api=OpenAISpec(kind="openai", model="a")) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acounts: {openai: {requests_per_minute: 6}}", "no key 'acounts'; did you mean 'accounts'"),
        ("accounts: {opnai: {requests_per_minute: 6}}", "accounts.opnai: .*did you mean 'openai'"),
        ("accounts: {openai: {requests: 6}}", "accounts.openai.requests: "),
        ("accounts: {openai: {requests_per_minute: 0}}", "accounts.openai.requests_per_minute: "),
    ],
)
async def test_a_mistake_is_named_with_its_place(file: Path, text: str, said: str) -> None:
    say(file, text)
    with pytest.raises(InvalidRequest, match=said):
        await rates_of(api=OpenAISpec(kind="openai", model="a"))


async def test_all_backends_of_a_key_share_one_account(tmp_path: Path, file: Path) -> None:
    say(file, "accounts: {}")
    specs = {name: OpenAISpec(kind="openai", model=name) for name in ("fast", "slow")}
    backends, limits = BackendSet(specs), RateLimits(600, account="openai")
    async with backends.open(specs) as made, SQLiteStore(tmp_path / "runs.db") as store:
        shared = RunOptions(backends=made, rates={"fast": limits, "slow": limits}, store=store)
        fast, slow = shared.account("fast").gate, shared.account("slow").gate
        apart = RunOptions(backends=made, rates=dict.fromkeys(made, RateLimits(600)), store=store)
        one, other = apart.account("fast").gate, apart.account("slow").gate
    assert fast is not None and slow is not None and one is not None and other is not None
    assert fast.limiter is slow.limiter
    assert one.limiter is not other.limiter
