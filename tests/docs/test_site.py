"""The parts of the site that are generated: every command with its options, every public name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import plait
from plait import backends, errors, hosts, orchestration, persistence, results, workflows
from plait.runner.cli.command_exits import EXIT_CODES
from plait.runner.cli.command_line import cli
from plait.runner.plan.plan_models import plan_schema
from tests.docs.extensions import load_extension

PACKAGES = (plait, errors, results, workflows, orchestration, hosts, backends, persistence)
NAMES = cli.list_commands(click.Context(cli))
DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(request.param, monkeypatch)


@pytest.mark.parametrize("extension", ["command_reference"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_command_is_in_the_reference(extension: Any, name: str) -> None:
    section = extension.reference().partition(f"## plait {name}\n")[2].partition("\n## ")[0]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.help is not None
    shown = [one for one in command.params if not getattr(one, "hidden", False)]  # a former option names the new way
    flags = [flag for one in shown for flag in one.opts if flag.startswith("-")]
    assert [flag for flag in flags if flag not in section] == []


@pytest.mark.parametrize("extension", ["command_reference"], indirect=True)
def test_every_exit_code_is_in_the_reference(extension: Any) -> None:
    assert extension.CODES in page("cli")
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in extension.exit_codes()


def test_the_commands_that_users_know_are_among_them() -> None:
    assert {"run", "resume", "show", "answer", "serve"} <= set(NAMES)


def page(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("extension", ["plan_reference"], indirect=True)
def test_every_key_of_a_plan_is_in_the_reference(extension: Any) -> None:
    schema = plan_schema()
    assert set(extension.PARTS.values()) == {""} | {name for name in schema["$defs"] if not name.endswith("Spec")}
    for marker, part in extension.PARTS.items():
        assert f"<!-- {marker} -->" in page("plan-schema")
        shape = schema["$defs"][part] if part else schema
        wanted = next(one for one in (shape, *shape.get("anyOf", ())) if "properties" in one)["properties"]
        assert [key for key in wanted if f"| `{key}` |" not in extension.keys(part)] == []


@pytest.mark.parametrize("extension", ["plan_reference"], indirect=True)
def test_every_key_of_every_kind_of_backend_is_in_the_reference(extension: Any) -> None:
    assert "<!-- kinds of backends -->" in page("plan-schema")
    text = extension.kinds()
    for spec in (one for name, one in plan_schema()["$defs"].items() if name.endswith("Spec")):
        section = text.partition(f"### kind: {spec['properties']['kind']['const']}\n")[2].partition("\n### ")[0]
        assert [key for key in spec["properties"] if key != "kind" and f"| `{key}` |" not in section] == []


@pytest.mark.parametrize("extension", ["python_reference"], indirect=True)
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(extension: Any, package: ModuleType) -> None:
    text = extension.reference(package.__name__)
    modules = {name for name in package.__all__ if isinstance(getattr(package, name), ModuleType)}
    missing = [
        name for name in package.__all__ if name not in modules and not re.search(rf":: plait\S*\.{name}\n", text)
    ]
    assert missing == []
    assert all(f"<!-- module plait.{name} -->" in page("python-api") for name in modules)
    assert f".{package.__all__[0]}\n" not in extension.reference(package.__name__, without={package.__all__[0]})
    with pytest.raises(ValueError, match="has no further names"):
        extension.reference(package.__name__, without=frozenset(package.__all__))


def test_the_page_has_every_public_name_once() -> None:
    markers = re.findall(r"<!-- names of plait\.?(\w*)( not of plait)? -->", page("python-api"))
    homes = ["errors", "results", "workflows", "orchestration", "hosts", "backends", "persistence"]
    assert markers == [("", ""), *((home, " not of plait") for home in homes)]
    assert [package.__name__.removeprefix("plait.") for package in PACKAGES[1:]] == homes


@pytest.mark.parametrize("extension", ["python_reference"], indirect=True)
def test_a_value_is_shown_with_its_own_docstring(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = extension.reference("plait.backends")
    for name in ("json_form.JsonValue", "json_form.JsonInput", "dialogue.Role", "usage.NO_USAGE"):
        assert f".. autodata:: plait.{name}\n" in text
    monkeypatch.setattr(plait.backends, "__all__", ["UNEXPLAINED"])
    monkeypatch.setattr(plait.backends, "UNEXPLAINED", 7, raising=False)
    with pytest.raises(ValueError, match="UNEXPLAINED has no docstring under its assignment"):
        extension.reference("plait.backends")


@pytest.mark.parametrize("extension", ["python_reference"], indirect=True)
@pytest.mark.parametrize("kind", [backends.AcpBackend, backends.ClaudeCodeBackend, backends.OpenAIBackend])
def test_an_adapter_is_shown_with_its_settings_and_without_its_machinery(extension: Any, kind: type) -> None:
    [entry] = re.findall(rf"autoclass:: plait\.{kind.__name__}\n   :members: (.*)\n", extension.reference("plait"))
    shown = set(entry.split(", "))
    settings = {field.name for field in fields(kind) if not field.name.startswith("_")} - {"now"}
    assert settings <= shown <= settings | {"check", "aclose"}
