"""plait has one import name: a user's own `runner`, `backends` and `persistence` are the user's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parent.parent
PROGRAM = """
import anyio
import backends.mine, persistence, runner
from plait import DAG, ParallelRunner, SQLiteStore, Task

async def main():
    async with SQLiteStore("runs.db") as store:
        mine = ParallelRunner(runner.shout, store=store)
        print((await mine.run(DAG([Task("a", prompt="hello")])))["a"].text, persistence.NAME, backends.mine.NAME)

anyio.run(main)
"""
TOOLS = """
import backends.mine, persistence, runner

def shout(prompt):
    return " ".join([runner.shout(prompt), persistence.NAME, backends.mine.NAME])
"""
PLAN = """
backends: {shout: {kind: function, call: "tools.py:shout"}}
tasks: [{id: a, prompt: hello}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user with modules that have the names of our packages."""
    (tmp_path / "runner.py").write_text("def shout(prompt):\n    return prompt.upper() + '!'\n")
    (tmp_path / "persistence.py").write_text("NAME = 'my persistence'\n")
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text("")
    (tmp_path / "backends" / "mine.py").write_text("NAME = 'my backends'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("words", [["program.py"], ["-m", "plait", "run", "plan.yaml", "-q"]], ids=["program", "plan"])
def test_a_users_modules_of_the_same_names_are_the_users(folder: Path, words: list[str]) -> None:
    # As installed: the checkout is not on the path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *words]
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("HELLO! my persistence my backends\n", 0), done.stderr


def test_a_script_beside_a_clone_finds_the_package(tmp_path: Path) -> None:
    """Python takes the folder `plait` for a package without contents, unless a whole one is on its path."""
    (tmp_path / "plait").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("from plait import DAG, Task\nprint(len(DAG([Task('a', prompt='hello')])))\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_only_plait_is_installed() -> None:
    """`make release-check` looks into the wheel itself."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert setuptools["packages"] == {"find": {"where": ["src"]}}
    for package in ("runner", "backends", "persistence"):
        assert (ROOT / "src" / "plait" / package).readlink() == Path("..", "..", package)
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("package", ["backends", "persistence"])
def test_in_a_checkout_the_folders_give_the_same_objects(package: str) -> None:
    """`from backends import OpenAIBackend`."""
    folder, installed = importlib.import_module(package), importlib.import_module(f"plait.{package}")
    assert folder.__all__ == installed.__all__
    for name in folder.__all__:
        assert getattr(folder, name) is getattr(installed, name)


def test_each_public_name_is_there() -> None:
    assert len(set(plait.__all__)) == len(plait.__all__)
    for name in plait.__all__:
        assert getattr(plait, name) is not None
    assert len(plait.__all__) <= 50
    with pytest.raises(AttributeError, match="module 'plait' has no attribute 'Nothing'"):
        plait.Nothing  # noqa: B018


PLAIN_INSTALL = """
import pydoc, sys
for name in %r:
    sys.modules[name] = None
import anyio
import plait
from plait import backends, errors, hosts, orchestration, persistence, results, workflows

for package in (plait, backends, errors, hosts, orchestration, persistence, results, workflows):
    assert all(hasattr(package, name) for name in package.__all__)
    exec("from " + package.__name__ + " import *", {})
    assert "NAME" in pydoc.render_doc(package, renderer=pydoc.plaintext)

async def main():
    try:
        async with plait.PostgresStore("postgresql://nobody@127.0.0.1/none"):
            pass
    except errors.StoreUnusable as error:
        print(error)

anyio.run(main)
"""


@pytest.mark.slow
def test_each_name_is_there_without_the_packages_of_extras() -> None:
    extras = [
        "asyncpg",
        "dask",
        "distributed",
        "fastapi",
        "genai_prices",
        "langgraph",
        "mcp",
        "pydantic_ai",
        "uvicorn",
        "xllamacpp",
    ]
    command = [sys.executable, "-W", "error", "-c", PLAIN_INSTALL % extras]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PostgresStore needs the package asyncpg: pip install 'plait[postgres]'" in done.stdout
