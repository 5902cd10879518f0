"""The command that a message names installs the extra where plait is installed, whatever it was installed from."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.backends import extras
from plait.errors import BackendUnavailable

ROOT = Path(__file__).parent.parent.parent
PIP = [sys.executable, "-m", "pip", "install"]


def test_in_a_checkout_the_command_names_the_checkout() -> None:
    assert shlex.split(extras.install_command("server")) == [*PIP, "-e", f"{ROOT}[server]"]


COMMIT = "1" * 40
REPOSITORY = {"url": "https://example.org/plait.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}


@pytest.mark.parametrize(
    ("origin", "argument"),
    [
        ({"url": "file:///home/me/my%20plait", "dir_info": {}}, "/home/me/my plait[server]"),
        ({"url": "file:///tmp/p.whl", "archive_info": {}}, "plait[server] @ file:///tmp/p.whl"),
        (REPOSITORY, f"plait[server] @ git+https://example.org/plait.git@{COMMIT}"),
        ({}, "plait[server]"),
    ],
    ids=["folder", "wheel", "repository", "index"],
)
def test_elsewhere_the_command_names_where_pip_took_plait_from(
    origin: dict[str, Any], argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    monkeypatch.setattr(extras, "_origin", lambda: origin)
    assert shlex.split(extras.install_command("server")) == [*PIP, argument]


class Installed:
    """An installation of plait with this record of its origin."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def read_text(self, filename: str) -> str | None:
        assert filename == "direct_url.json"
        return self._text


@pytest.mark.parametrize(
    ("record", "argument"),
    [
        ('{"url": "file:///p", "dir_info": {}}', "'/p[local]'"),
        (None, "'plait[local]'"),
        ("{", "'plait[local]'"),
    ],
    ids=["recorded", "no record", "a damaged record"],
)
def test_the_record_of_pip_is_read(
    record: str | None, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed(record))
    assert extras.install_command("local") == f"{shlex.join(PIP)} {argument}"


def test_the_command_uses_the_pip_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my tools/python")
    assert extras.pip_install("--no-deps", "x") == "'/my tools/python' -m pip install --no-deps x"


def test_a_missing_package_is_an_error_with_the_command() -> None:
    extras.require("json", "server")
    with pytest.raises(BackendUnavailable) as caught:
        extras.require("no_such_package", "server")
    assert str(caught.value) == (
        f"the no_such_package package is not installed; run: {extras.install_command('server')}"
    )
