"""Options shared by several commands."""

from __future__ import annotations

import codecs
import math
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import redirect_stdout, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import click
from click.shell_completion import CompletionItem

from plait.errors import InvalidRequest
from plait.json_form import value
from plait.runner.cli.terminal_output import command, print_note
from plait.runner.domain.run_tuning import MOST_SLOTS
from plait.runner.engine.run_options import DEFAULT_STORE, ServerAddress, StorePlace, open_store, store_place
from plait.runner.scheduling.slots import DEFAULT_CONCURRENCY, Concurrency
from plait.runner.state.budget import MOST_USD
from plait.safe_text import SCHEMES, is_utf8, masked_address, passwords

if TYPE_CHECKING:
    from plait.runner.plan.plan_file import Plan

STORE_VARIABLE = "PLAIT_STORE"
KINDS = "openai, anthropic, local, claude-code, codex, gemini, goose, opencode, qwen, claude-agent-acp or codex-acp"
"""The kinds for the help of `--backend`; `backend_specs.KINDS` takes long to import, and a test compares both."""
_COMPLETION_S = 2.0
"""Seconds until a shell gets no values from a slow store."""
_OFFERED_RUNS = 50
PLAN_SUFFIXES = frozenset({".yaml", ".yml", ".json", ".toml"})

F = TypeVar("F", bound=Callable[..., Any])


class _StoreParameter(click.Path):
    """The type of `--store`."""

    def convert(  # type: ignore[override]
        self, value: str | Path | ServerAddress, param: click.Parameter | None, ctx: click.Context | None
    ) -> StorePlace:
        if isinstance(value, ServerAddress):
            return value
        if isinstance(value, str) and value.startswith(SCHEMES):
            return store_place(value)
        if isinstance(value, str) and "://" in value:  # a path such as mysql://... would be made, password and all
            raise InvalidRequest(
                f"{masked_address(value)} is no address of a store; name a PostgreSQL database, such as "
                "postgresql://db/plait, or a file"
            )
        return Path(super().convert(value, param, ctx))  # type: ignore[arg-type]


def _check_store(context: click.Context, parameter: click.Parameter, value: StorePlace) -> StorePlace:
    if str(value) == ":memory:":
        raise InvalidRequest("a store is a file, not :memory:; name one with --store, or store nothing with --no-store")
    is_typed = context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    if isinstance(value, ServerAddress) and is_typed and passwords(value.dsn):
        raise InvalidRequest(
            "every user of this machine can read a password on the command line; put it into the file ~/.pgpass "
            f"(or PGPASSFILE) or into {STORE_VARIABLE}"
        )
    return value


store_option = click.option(
    "--store",
    "store_path",
    type=_StoreParameter(path_type=Path),
    default=DEFAULT_STORE,
    envvar=STORE_VARIABLE,
    show_default=True,
    show_envvar=True,
    callback=_check_store,
    help="The SQLite file of the runs, or the address of a PostgreSQL database: postgresql://...",
)


def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return what a shell offers for an argument: the newest runs of the store, the tasks of the run named before, or
    kinds of backends. Nothing if the store cannot be read in time: a message would stand in the middle of the line.
    """
    if parameter.name == "backend":
        items = [CompletionItem(kind) for kind in KINDS.replace(" or ", ", ").split(", ")]
    else:
        try:
            items = anyio.run(_stored_items, context, parameter.name == "task")
        except Exception:
            items = []
    items = [item for item in items if item.value.startswith(incomplete)]
    return items or ([CompletionItem(incomplete, type="file")] if parameter.name == "what" else [])


async def _stored_items(context: click.Context, of_tasks: bool) -> list[CompletionItem[str]]:
    place = context.params.get("store_path") or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    place = place if isinstance(place, ServerAddress) else store_place(str(place))
    with anyio.move_on_after(_COMPLETION_S):
        async with open_store(place, "read") as store:
            if of_tasks:
                from plait.runner.client.runs import find_run  # noqa: PLC0415 - for completions only
                from plait.runner.state.stored_run import listed_tasks  # noqa: PLC0415

                run = await find_run(store, context.params.get("run") or "last")
                return [CompletionItem(task.task_id, help=task.status) for task in await listed_tasks(store, run)]
            runs = await store.list_runs(_OFFERED_RUNS)
            newest = [CompletionItem("last", help="the last run, but for a try")] if runs else []
            return newest + [CompletionItem(run.run_id, help=f"{run.name} {run.status}".strip()) for run in runs]
    return []


run_argument = click.argument("run", shell_complete=complete)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")


class Amount(click.FloatRange):
    """A number from `least` to `most`, with or without a fraction. `unit` says what it is a number of."""

    name = "number"

    def __init__(self, least: float, most: float, unit: str) -> None:
        super().__init__(least, most)
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Fails with click's BadParameter for anything else, `nan` included."""
        try:
            amount = float(value)
        except ValueError:
            amount = math.nan
        if math.isnan(amount):
            example = "" if param is None else f": {param.opts[-1]} 5"
            self.fail(f"{value!r} is not {self._unit}{example}", param, ctx)
        converted: float = super().convert(amount, param, ctx)
        return converted


class TasksAtOnce(click.IntRange):
    """A number of tasks at once, or `auto`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or "auto"."""
        try:
            return value if value == "auto" else super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number of tasks from {self.min} to {self.max:,} nor auto", param, ctx)


def concurrency_option(source: str = "") -> Callable[[F], F]:
    """Return the option `-j`. `source` is the place of a number that comes before the default."""
    sum_of = f"the sum of the backends' `concurrency`, and {DEFAULT_CONCURRENCY} for all without one"
    default = f"{source}, else {sum_of}" if source else sum_of
    return click.option(
        "-j",
        "--concurrency",
        type=TasksAtOnce(1, MOST_SLOTS),
        metavar="N|auto",
        help="Run at most this many tasks at once; `auto` finds the number for each backend that states none."
        f"  [default: {default}]",
    )


def budget_options(function: F) -> F:
    """Add `--budget` and `--unpriced`."""
    function = click.option(
        "--unpriced",
        is_flag=True,
        help="With a budget: also make calls of which nobody can say what they cost at most. They count once they have "
        "cost something.",
    )(function)
    return click.option(
        "--budget",
        type=Amount(0, MOST_USD, "an amount in US dollars"),
        metavar="USD",
        help="Ask before the run, with all its attempts and resumes, may have spent more than this.",
    )(function)


park_option = click.option(
    "--park",
    is_flag=True,
    help="End once everything waits for a time more than a minute away, such as the end of a provider's limit; `plait "
    "wake` continues the run then.",
)

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only the result.")

strict_option = click.option(
    "--strict", is_flag=True, help="End the run as soon as the store fails; otherwise the run goes on and catches up."
)

verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Also print each tool that an agent uses, and each wait."
)


def backend_options(function: F) -> F:
    """Add `--backend`, `--model` and `--base-url`."""
    function = click.option("--base-url", metavar="URL", help="Use the OpenAI-compatible server at this URL.")(function)
    function = click.option("--model", metavar="NAME", help="Use this model; for local, the path of a GGUF file.")(
        function
    )
    return click.option(
        "--backend", metavar="KIND", shell_complete=complete, help=f"Use this backend if the plan names none: {KINDS}."
    )(function)


def log_options(function: F) -> F:
    """Add `--log` and `--log-level`."""
    function = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Log messages of at least this level.",
    )(function)
    return click.option(
        "--log", "log_style", type=click.Choice(["console", "json"]), help="Write log lines to standard error."
    )(function)


def output_options(function: F) -> F:
    """Add `--json`, `--quiet`, `--verbose` and the options of the log."""
    return json_option(quiet_option(verbose_option(log_options(function))))


again_option = click.option("--again", is_flag=True, help="Run tasks again that have effects and completed in RUN.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what each task would do, with its reason.")
plan_option = click.option(
    "--plan",
    type=click.Path(path_type=Path),
    help="Take functions from this plan file, if the plan file has moved.",
)
backends_option = click.option(
    "--backends",
    type=click.Path(path_type=Path),
    help="Use the `backends` of this plan file in place of those of the same names; for a run made by a Python "
    "program, the file has to name all backends.",
)


hosts_option = click.option(
    "--hosts",
    type=click.Path(path_type=Path),
    help="Take the `hosts` of this file, a plan or the part under `hosts` alone, in place of those of the same names.",
)


def parse_assignments(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the values of an option NAME=VALUE, by name. Raises BadParameter."""
    given: dict[str, str] = {}
    for option in values:
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{option!r} is not name=value")
        if not is_utf8(option):
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
    callback=parse_assignments,
    help="Replace an input of the plan; may be given more than once.",
)


def async_command(name: str) -> Callable[[Callable[..., Coroutine[Any, Any, int | None]]], click.Command]:
    """Make an async function the command `name`: its arguments are the options, its docstring is the help, and it
    returns the exit code, None for 0. Meanwhile `print` of a user's function goes to standard error.
    """

    def make(function: Callable[..., Coroutine[Any, Any, int | None]]) -> click.Command:
        @wraps(function)
        def call(**options: Any) -> int | None:
            apply_log_options(options.get("log_style"), options.pop("log_level", ""))
            with redirect_stdout(sys.stderr):
                return anyio.run(partial(function, **options))

        return click.command(name)(call)

    return make


def apply_log_options(style: str | None, level: str) -> None:
    """Write log lines to standard error if `--log` was given."""
    if style is None:
        return
    from plait.program_log import configure_logging  # noqa: PLC0415 - imports structlog

    configure_logging("json" if style == "json" else "console", level)


def command_line(store_path: StorePlace | None, *words: str) -> str:
    """Return the command line for `words` on the same store, for copying."""
    stated = masked_address(os.environ.get(STORE_VARIABLE) or str(DEFAULT_STORE))
    store = () if store_path is None or str(store_path) == stated else ("--store", str(store_path))
    return command(_program_name(), *words, *store)


def print_next(place: StorePlace | None, *words: str) -> None:
    """Print a command line that a person may want next, behind its name, on standard error."""
    print_note(f"  {words[0]:<9} {command_line(place, *words)}")


def _program_name() -> str:
    """Return the name of this command; its path if a shell would not find the name, as after `make demo`."""
    called = Path(sys.argv[0])
    if called.name == "plait" and shutil.which("plait") is None:
        with suppress(FileNotFoundError):  # the working directory has been removed
            return os.path.relpath(called)
        return str(called)
    return "plait"


def read_plan(path: Path, inputs: Mapping[str, str], *, with_functions: bool = False, limit: int | None = None) -> Plan:
    """Return the plan in the file at `path`, or on standard input for the path `-`. `with_functions` checks that its
    functions can be imported; for `limit` see `Plan.load`. Raises PlanError with every mistake.
    """
    from plait.runner.plan import Plan, parse_plan  # noqa: PLC0415 - `plait --help` needs no plan
    from plait.runner.plan.plan_positions import MAX_BYTES  # noqa: PLC0415 - as above

    if str(path) == "-":
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
        form = "json" if data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") else "yaml"
        read = partial(parse_plan, data, format=form, file="standard input")
        return read(overrides=inputs, with_functions=with_functions, limit=limit)
    if not is_utf8(str(path)):
        raise InvalidRequest(
            f"the name of the plan file {str(path)!r} is not text in UTF-8, so it cannot be stored; rename it"
        )
    return Plan.load(path, overrides=inputs, with_functions=with_functions, limit=limit)


@value
class OutputOptions:
    """Where a run is stored, and how its progress and result are shown."""

    store: StorePlace | None
    """The store; None to store nothing."""
    quiet: bool = False
    verbose: bool = False
    as_json: bool = False
    logs: bool = False
    """Log lines are written, so no live display is shown."""
    concurrency: Concurrency | None = None
    """Number of tasks at once; None for the default."""
    result_of: str | None = None
    """Id of the task whose result is printed; None for the final tasks."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> OutputOptions:
        """Return the options of a command, given by the names of its parameters."""
        return cls(
            store=None if options.get("no_store") else options["store_path"],
            quiet=options.get("quiet", False),
            verbose=options.get("verbose", False),
            as_json=options["as_json"],
            logs=options["log_style"] is not None,
            concurrency=options.get("concurrency"),
        )
