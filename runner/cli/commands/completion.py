"""`plait completion`: install the completion of command lines in a shell."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from plait.runner.cli.exits import COMPLETED, CliError, output, print_note, write
from plait.runner.cli.output_files import write_file

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_PLAIT_COMPLETE"


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@click.option("--print", "only_prints", is_flag=True, help="Print the script; write no file.")
@click.pass_context
def completion_command(context: click.Context, shell: str | None, only_prints: bool) -> int:
    """Install completion for SHELL, by default the shell in the variable SHELL: commands, options, files, runs, tasks
    and backends.

    The script is written beside the shell's own files, and for bash and zsh a line that reads the script is added to
    ~/.bashrc or ~/.zshrc.
    """
    shell = shell or _usual_shell()
    script = _script(context.find_root().command, shell)
    if only_prints:
        write(output(), script)
        return COMPLETED
    _install(shell, script)
    print_note(f"completion is in place for {shell}; open a new shell to use it")
    return COMPLETED


def _usual_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise CliError(
            f"the shell {name or 'in the variable SHELL'!r} has no completion; name one of {', '.join(SHELLS)}"
        )
    return name


def _script(cli: click.Command, shell: str) -> str:
    completion = get_completion_class(shell)
    assert completion is not None
    return completion(cli, {}, "plait", _VARIABLE).source()


def _install(shell: str, script: str) -> None:
    if shell == "fish":
        _write(_folder("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "plait.fish", script)
        return
    path = _folder("XDG_DATA_HOME", ".local/share") / "plait" / f"completion.{shell}"
    _write(path, script)
    line = f". {shlex.quote(str(path))}"
    if shell == "zsh":  # the script needs a function that only compinit defines
        line = f"(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}; {line}"
    _add_line(_start_file(shell), f"[ -r {shlex.quote(str(path))} ] && {{ {line}; }}")


def _start_file(shell: str) -> Path:
    if shell == "zsh":
        return Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
    return Path.home() / ".bashrc"


def _folder(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual)


def _write(path: Path, script: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"the folder {path.parent} cannot be made: {error.strerror}") from None
    write_file(path, script, private=False)
    print_note(f"wrote {path}")


def _add_line(path: Path, line: str) -> None:
    """Add the line to the end of the file, unless the file has the line."""
    try:
        before = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
        if line in before.splitlines():
            return
        gap = "" if not before or before.endswith("\n") else "\n"
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{gap}{line}\n")
    except OSError as error:
        raise CliError(f"{path} cannot be changed: {error.strerror}; add this line to it: {line}") from None
    print_note(f"added a line to {path}")
