"""The parts of the site that are generated: every command with its options, every public name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import plait
from plait import backends, persistence, runner
from plait.runner.cli.app import cli
from plait.runner.cli.exits import EXIT_CODES
from plait.runner.plan.schema import plan_schema

NAMES = cli.list_commands(click.Context(cli))
DOCS = Path(__file__).parent.parent.parent / "docs"
EXTENSIONS = DOCS / "_ext"


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXTENSIONS))
    sys.modules.pop(request.param, None)
    return import_module(request.param)


@pytest.mark.parametrize("extension", ["command_reference"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_command_is_in_the_reference(extension: Any, name: str) -> None:
    section = extension.reference().partition(f"## plait {name}\n")[2].partition("\n## ")[0]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.help is not None
    flags = [flag for one in command.params for flag in one.opts if flag.startswith("-")]
    assert [flag for flag in flags if flag not in section] == []


@pytest.mark.parametrize("extension", ["command_reference"], indirect=True)
def test_every_exit_code_is_in_the_reference(extension: Any) -> None:
    assert extension.CODES in (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in extension.exit_codes()


def test_the_commands_that_users_know_are_among_them() -> None:
    assert {"run", "resume", "show", "answer", "serve"} <= set(NAMES)


@pytest.mark.parametrize("extension", ["plan_reference"], indirect=True)
def test_every_key_of_every_kind_of_backend_is_in_the_reference(extension: Any) -> None:
    text = extension.reference()
    for spec in (one for name, one in plan_schema()["$defs"].items() if name.endswith("Spec")):
        section = text.partition(f"### kind: {spec['properties']['kind']['const']}\n")[2].partition("\n### ")[0]
        assert [key for key in spec["properties"] if key != "kind" and f"| `{key}` |" not in section] == []


@pytest.mark.parametrize("extension", ["python_reference"], indirect=True)
@pytest.mark.parametrize("package", [plait, runner, backends, persistence], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(extension: Any, package: ModuleType) -> None:
    text = extension.reference(package.__name__)
    missing = [
        name
        for name in package.__all__
        if f":: {package.__name__}.{name}\n" not in text
        and f":: {getattr(getattr(package, name), '__name__', '')}\n" not in text
    ]
    assert missing == []
    assert f"{package.__name__}.{package.__all__[0]}" not in extension.reference(
        package.__name__, without=frozenset(package.__all__)
    )
