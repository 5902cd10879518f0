"""What the SDKs read from the environment by themselves, and whom it reaches."""

from __future__ import annotations

import pytest

from plait.backends import AnthropicBackend, ConversationRequest, OpenAIBackend, Reply
from plait.errors import BackendError, BackendUnavailable
from tests.support.wire import ChatCompletions, Dialect, Messages, events, plain, serve

PRIVATE = ("gateway-secret-1", "other-secret-1", "org-private", "proj-private", "oauth-private")


@pytest.fixture(params=["openai", "anthropic"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Dialect:
    for kind in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(
            f"{kind}_CUSTOM_HEADERS", "X-Gateway-Key: gateway-secret-1\nauthorization: Bearer other-secret-1"
        )
        monkeypatch.delenv(f"{kind}_BASE_URL", raising=False)
        monkeypatch.setenv(f"{kind}_API_KEY", "the-usual-key")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-private")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-private")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "oauth-private")
    return ChatCompletions() if request.param == "openai" else Messages()


async def ask(dialect: Dialect, **options: str) -> Reply:
    kind = OpenAIBackend if dialect.name == "openai" else AnthropicBackend
    async with kind("m", **options).open(ConversationRequest()) as conversation:  # type: ignore[arg-type]
        return await conversation.send("hello")


async def test_headers_of_the_environment_reach_no_other_server(dialect: Dialect) -> None:
    async with serve(events(dialect.parts("fine"))) as server:
        await ask(dialect, base_url=server.url + dialect.prefix, api_key_env="NOT_SET_ANYWHERE")
        await ask(dialect, base_url=server.url + dialect.prefix)
    keyless, usual = (request.headers for request in server.requests)
    assert not [word for word in (*PRIVATE, "the-usual-key") if word in str(keyless)]
    assert not [word for word in PRIVATE if word in str(usual)]
    assert {"Bearer the-usual-key", "the-usual-key"} & {usual.get("authorization"), usual.get("x-api-key")}


async def test_headers_of_the_environment_go_where_it_points(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(events(dialect.parts("fine"))) as server:
        url = server.url + dialect.prefix
        monkeypatch.setenv(f"{dialect.name.upper()}_BASE_URL", url)
        await ask(dialect)
        await ask(dialect, base_url=f"{url}/")
    for request in server.requests:
        assert request.headers["x-gateway-key"] == "gateway-secret-1"
        assert (request.headers.get("openai-organization") == "org-private") is (dialect.name == "openai")


async def test_values_of_such_headers_are_not_shown(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"error": {"message": "neither gateway-secret-1 nor Bearer other-secret-1, that is other-secret-1, will do"}}
    async with serve(plain(401, body)) as server:
        monkeypatch.setenv(f"{dialect.name.upper()}_BASE_URL", server.url + dialect.prefix)
        with pytest.raises(BackendError, match=r"neither \*\*\* nor \*\*\*, that is \*\*\*, will do"):
            await ask(dialect)


@pytest.mark.parametrize("user", ["me:hunter2", "me:hun/ter2", "hunter2"])
async def test_a_url_with_a_password_is_refused_and_not_shown(
    dialect: Dialect, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = OpenAIBackend if dialect.name == "openai" else AnthropicBackend
    key = f"put the key in the environment variable {kind.__name__[:-7].upper()}_API_KEY"
    with pytest.raises(ValueError, match=key) as refused:
        kind("m", base_url=f"http://{user}@127.0.0.1:9/v1")
    monkeypatch.setenv(f"{dialect.name.upper()}_BASE_URL", f"http://{user}@127.0.0.1:9/v1")
    with pytest.raises(BackendUnavailable, match=key) as unavailable:
        await ask(dialect)
    assert "hun" not in f"{refused.value} {unavailable.value}"
