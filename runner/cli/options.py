"""Options that several commands share, and what their values mean."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plait.runner.cli.display.text import command
from plait.runner.cli.exits import CliError

if TYPE_CHECKING:
    from plait.runner import Plan

DEFAULT_STORE = Path(".plait") / "plait.db"
STORE_VARIABLE = "PLAIT_STORE"
KINDS = "openai, anthropic, local, claude-code, codex or gemini"
"""What `--backend` may be, for its help: `plait.backends.spec.KINDS`, which takes a while to import."""
DEFAULT_CONCURRENCY = 8
PLAN_SUFFIXES = frozenset({".yaml", ".yml", ".json", ".toml"})

F = TypeVar("F", bound=Callable[..., Any])


def _refuse_memory_store(_context: click.Context, _parameter: click.Parameter, value: Path) -> Path:
    if str(value) == ":memory:":
        raise CliError("a store is a file, not :memory:; name one with --store, or write nothing down with --no-store")
    return value


store_option = click.option(
    "--store",
    "store_path",
    type=click.Path(path_type=Path),
    default=DEFAULT_STORE,
    envvar=STORE_VARIABLE,
    show_default=True,
    show_envvar=True,
    callback=_refuse_memory_store,
    help="Where runs are written down.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
concurrency_option = click.option(
    "-j", "--concurrency", type=click.IntRange(1, 10_000), help="How many tasks run at once."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only the result.")

verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Print also each tool that an agent uses, and what it waits for."
)


def backend_options(function: F) -> F:
    """`--backend`, `--model` and `--base-url`."""
    function = click.option("--base-url", metavar="URL", help="An OpenAI-compatible server.")(function)
    function = click.option("--model", metavar="NAME", help="The model; for local, the path of a GGUF file.")(function)
    return click.option("--backend", metavar="KIND", help=f"{KINDS}, for a plan that leaves the choice open.")(function)


def log_options(function: F) -> F:
    """`--log` and `--log-level`."""
    function = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="The least that is logged.",
    )(function)
    return click.option(
        "--log", "log_style", type=click.Choice(["console", "json"]), help="Write log lines to standard error."
    )(function)


plan_option = click.option(
    "--plan",
    type=click.Path(path_type=Path),
    help="The plan file, if it is not where it was: for its functions.",
)
backends_option = click.option(
    "--backends",
    type=click.Path(path_type=Path),
    help="A plan file whose `backends` are used in place of the run's, by their names; for a run that a Python program "
    "made, it has to name them all.",
)


def is_utf8(value: str) -> bool:
    """Whether `value`, from the command line, can be stored: bytes that are not UTF-8 come as halves of characters."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _parse_assignments(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    given: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is not name=value")
        if not is_utf8(value):
            raise click.BadParameter(f"the value of {name} is not text in UTF-8")
        if name in given:
            raise click.BadParameter(f"{name} is given twice")
        given[name] = text
    return given


set_option = click.option(
    "--set",
    "inputs",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parse_assignments,
    help="Replace an input of the plan; may be given more than once.",
)


def configure_logging(style: str | None, level: str) -> None:
    """Quiet unless `--log` was given."""
    if style is None:
        # Without a handler of ours Python would print warnings bare, in the middle of the display.
        logging.getLogger("plait").addHandler(logging.NullHandler())
        return
    from plait.runner.log import configure  # noqa: PLC0415 - structlog

    configure("json" if style == "json" else "console", level)


def command_line(store_path: Path | None, *words: str) -> str:
    """The command line that does `words` on the same store, to be copied."""
    stated = os.environ.get(STORE_VARIABLE) or str(DEFAULT_STORE)
    store = () if store_path is None or str(store_path) == stated else ("--store", str(store_path))
    return command(_program_name(), *words, *store)


def _program_name() -> str:
    """How this command is called: by its path where the shell would not find it, as after `make demo`."""
    called = Path(sys.argv[0])
    if called.name == "plait" and shutil.which("plait") is None:
        return os.path.relpath(called)
    return "plait"


def read_plan(path: Path, inputs: Mapping[str, str], *, with_functions: bool = False) -> Plan:
    """The plan in the file at `path`. `with_functions`: those that it calls have to be there as well. Raises
    PlanError with every mistake.
    """
    from plait.runner.plan.loader import load_plan, load_plan_with_functions  # noqa: PLC0415 - `plait version` needs neither

    if not is_utf8(str(path)):
        raise CliError(
            f"the name of the plan file {str(path)!r} is not text in UTF-8, so it cannot be stored; rename it"
        )
    return load_plan_with_functions(path, inputs) if with_functions else load_plan(path, overrides=inputs)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a person wants it: where it is stored (None: nowhere), how much is said, how much runs at once, and the task
    whose result is that of the run (None: the final ones).
    """

    store: Path | None
    quiet: bool = False
    verbose: bool = False
    as_json: bool = False
    logs: bool = False
    concurrency: int | None = None
    result_of: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> OutputOptions:
        """From the options of a command, by the names of its parameters."""
        return cls(
            store=None if options.get("no_store") else options["store_path"],
            quiet=options.get("quiet", False),
            verbose=options.get("verbose", False),
            as_json=options["as_json"],
            logs=options["log_style"] is not None,
            concurrency=options.get("concurrency"),
        )
