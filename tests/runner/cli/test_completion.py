"""`plait --completion`: real shells complete the lines of a person."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait.runner.cli.command_line import cli
from tests.support.processes.command import environment, plait, plait_here

pytestmark = pytest.mark.slow

WORK = "async def work(prompt):\n    return prompt.upper()\n"
PLAN = """
name: hello
backends: {w: {kind: function, call: "work.py:work"}}
tasks: [{id: first, prompt: one}, {id: second, prompt: two}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("there")
    (folder / "work.py").write_text(WORK)
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "home" / "bin").mkdir(parents=True)
    program = folder / "home" / "bin" / "plait"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m plait "$@"\n')
    program.chmod(0o755)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    return folder


@pytest.fixture(scope="module")
def run_id(folder: Path) -> str:
    return plait_here(folder, "runs", "--json").value[0]["run_id"]


def here(folder: Path) -> dict[str, str]:
    given = environment()
    home = folder / "home"
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        given.pop(name, None)
    return {**given, "HOME": str(home), "PATH": f"{home / 'bin'}:{given['PATH']}"}


def installed(folder: Path, shell: str) -> None:
    """Follow the guide of the command line."""
    home = folder / "home"
    if shell == "fish":
        (home / ".config" / "fish" / "completions").mkdir(parents=True, exist_ok=True)
        script = plait_here(folder, "--completion", "fish").out
        (home / ".config" / "fish" / "completions" / "plait.fish").write_text(script)
        return
    first = "autoload -Uz compinit && compinit\n" if shell == "zsh" else ""
    (home / f".{shell}rc").write_text(f'{first}eval "$(plait --completion {shell})"\n')


def said(folder: Path, *words: str) -> list[str]:
    done = subprocess.run(words, check=False, cwd=folder, env=here(folder), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextmanager
def keyboard(folder: Path, shell: str) -> Generator[tuple[Callable[[bytes], object], Callable[[bytes], None]]]:
    """An interactive shell on a terminal: what writes to it, and what reads on until a word was seen."""
    prompt = {"fish": ("-C", "function fish_prompt; echo READY; end")}.get(shell, ())
    if not prompt:
        with (folder / "home" / f".{shell}rc").open("a") as settings:
            settings.write("PS1='READY '\n")
    master, slave = pty.openpty()
    words = ["setsid", "--ctty", shell, "-i", *prompt]
    process = subprocess.Popen(words, cwd=folder, env=here(folder), stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    seen = bytearray()

    def until(marker: bytes) -> None:
        while marker not in re.sub(rb"\x1b(\[[0-9;?]*[a-zA-Z]|\(B)|\s", b"", seen):
            ready, _, _ = select.select([master], [], [], 60)
            assert ready, f"no {marker!r} in {bytes(seen)!r}"
            seen.extend(os.read(master, 65536))
        seen.clear()

    try:
        yield lambda data: os.write(master, data), until
    finally:
        process.kill()
        process.wait()
        os.close(master)


def in_bash(folder: Path, *words: str) -> list[str]:
    line = " ".join(f"'{word}'" for word in words)
    script = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _plait_completion plait; "
    return said(folder, "bash", "-i", "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"')


def offered(folder: Path, *words: str) -> list[str]:
    """The values that the scripts of the shells receive, which start `plait` so."""
    asked = {"_PLAIT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), contextlib.redirect_stdout(out):
        for name, value in {**here(folder), **asked}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit):
            cli.main(list(words[1:]), prog_name="plait", standalone_mode=False)
    return [line.partition(",")[2] for line in out.buffer.getvalue().decode().splitlines()]


def test_bash(folder: Path, run_id: str) -> None:
    installed(folder, "bash")
    assert said(folder, "bash", "-i", "-c", "complete -p plait")[0].endswith("-F _plait_completion plait")
    assert in_bash(folder, "plait", "sh") == offered(folder, "plait", "sh") == ["show"]
    assert in_bash(folder, "plait", "show", "last", "") == ["first", "second"]


def test_values(folder: Path, run_id: str) -> None:
    assert offered(folder, "plait", "show", "") == ["last", run_id]
    assert offered(folder, "plait", "show", run_id[:8]) == [run_id]
    assert offered(folder, "plait", "show", "last", "") == ["first", "second"]
    assert offered(folder, "plait", "answer", run_id, "s") == ["second"]
    assert offered(folder, "plait", "run", "--backend", "c") == [
        "claude-code",
        "codex",
        "claude-agent-acp",
        "codex-acp",
    ]
    assert offered(folder, "plait", "run", "--like", "l") == ["last"]
    assert offered(folder, "plait", "cancel", "--st") == ["--store"]


def test_another_store_and_none(folder: Path, run_id: str, tmp_path: Path) -> None:
    store = str(folder / ".plait" / "plait.db")
    assert offered(tmp_path, "plait", "show", "--store", store, "l") == ["last"]
    assert offered(tmp_path, "plait", "show", "") == [""]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(folder: Path) -> None:
    installed(folder, "zsh")
    assert said(folder, "zsh", "-i", "-c", "print $_comps[plait]") == ["_plait_completion"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(folder: Path, run_id: str) -> None:
    installed(folder, "fish")
    assert said(folder, "fish", "-c", "complete -C 'plait sh'") == ["show\tShow a run or one of its tasks."]
    assert f"{run_id}\thello completed" in said(folder, "fish", "-c", "complete -C 'plait show '")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_tab_key_completes_a_line(folder: Path, tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    own = shutil.copytree(folder, tmp_path / "own", ignore=shutil.ignore_patterns(".*rc"))
    installed(own, shell)
    with keyboard(own, shell) as (write, until):
        until(b"READY")
        write(b"plait show las\t")
        until(b"plaitshowlast")
        write(b"sec\t")
        until(b"second")
        write(b"\n")
        until(b"--assistant--")


@pytest.mark.parametrize(
    ("shell", "shows"), [("zsh", "compdef _plait_completion plait"), ("fish", "complete --no-files")]
)
def test_the_script_alone(tmp_path: Path, shell: str, shows: str) -> None:
    done = plait(tmp_path, "--completion", shell, HOME=str(tmp_path))
    assert (done.code, shows in done.out) == (0, True)
    assert list(tmp_path.iterdir()) == []


def test_a_shell_without_completion(tmp_path: Path) -> None:
    done = plait(tmp_path, "--completion", "tcsh")
    assert (done.code, done.out) == (2, "")
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in done.err
