"""Put every command of `plait`, with its arguments and options, in place of `<!-- commands -->` in a page.

The table of exit codes stands in place of `<!-- exit codes -->`.

The text comes from click, so that a help text is written once, beside the code.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import click

from plait.runner.cli.command_exits import EXIT_CODES
from plait.runner.cli.command_line import cli

if TYPE_CHECKING:
    from sphinx.application import Sphinx

COMMANDS, CODES = "<!-- commands -->", "<!-- exit codes -->"


def reference() -> str:
    """Return one section of Markdown for each command, in the order of `plait --help`."""
    with click.Context(cli, info_name="plait") as top:
        commands = {name: cli.get_command(top, name) for name in cli.list_commands(top)}
        sections = [_section(name, command, top) for name, command in commands.items() if command is not None]
    if not sections:
        raise RuntimeError("the command `plait` has no subcommands, so its reference would be empty")
    return "\n\n".join(sections)


def exit_codes() -> str:
    """Return a table with a row for each exit code."""
    rows = [f"| {code} | {_escaped(_cell(meaning))} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def _section(name: str, command: click.Command, top: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=top)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    options = [record for one in command.params if (record := one.get_help_record(context))]
    return "\n\n".join(
        [f"## plait {name}", f"```text\n{usage}\n```", _paragraphs(command.help or ""), _table(options)]
        + ([_paragraphs(command.epilog)] if command.epilog else [])
    )


def _paragraphs(text: str) -> str:
    """Return a help text as Markdown; a paragraph behind click's mark for kept line breaks is a block."""
    parts = inspect.cleandoc(text).partition("\f")[0].split("\n\n")
    return "\n\n".join(
        "```text\n" + part.removeprefix("\b\n") + "\n```" if part.startswith("\b") else _escaped(part) for part in parts
    )


def _table(options: list[tuple[str, str]]) -> str:
    rows = [f"| `{_cell(flags)}` | {_escaped(_cell(text))} |" for flags, text in options]
    return "\n".join(["| option | |", "|---|---|", *rows]) if rows else ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*")


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - Sphinx passes both
    for marker, text in ((COMMANDS, reference), (CODES, exit_codes)):
        if marker in source[0]:
            source[0] = source[0].replace(marker, text())


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True}
