"""The list of the options and arguments of all commands, with their types, and which of them go together.

Each command has a tuple: its parameters in the order of its help, then its rules.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import click

from plait.errors import InvalidRequest
from plait.runner.cli.command_line import Parameter, Rule, complete
from plait.runner.domain.run_tuning import MOST_SLOTS
from plait.runner.engine.run_options import (
    CANCEL_GRACE_SECONDS,
    DEFAULT_STORE,
    STORE_VARIABLE,
    ServerAddress,
    StorePlace,
    store_place,
)
from plait.runner.scheduling.slots import DEFAULT_CONCURRENCY
from plait.runner.state.budget import MOST_USD
from plait.safe_text import SCHEMES, is_utf8, masked_address, passwords
from plait.statuses import RunStatus, TaskStatus

KINDS = "openai, anthropic, local, claude-code, codex, gemini, goose, opencode, qwen, claude-agent-acp or codex-acp"
"""The kinds for the help of `--backend`; `backend_specs.KINDS` takes long to import, and a test compares both."""
DEFAULT_PORT = 8377
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


class _Store(click.Path):
    """The path of a SQLite file, or the address of a PostgreSQL database."""

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


class _Amount(click.FloatRange):
    """A number from `least` to `most`, with or without a fraction, and not `nan`. `unit` says what it is a number
    of.
    """

    name = "number"

    def __init__(self, least: float, most: float, unit: str) -> None:
        super().__init__(least, most)
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            amount = float(value)
        except ValueError:
            amount = math.nan
        if math.isnan(amount):
            example = "" if param is None else f": {param.opts[-1]} 5"
            self.fail(f"{value!r} is not {self._unit}{example}", param, ctx)
        converted: float = super().convert(amount, param, ctx)
        return converted


class _TasksAtOnce(click.IntRange):
    """A number of tasks at once, or `auto`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if value == "auto" else super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number of tasks from {self.min} to {self.max:,} nor auto", param, ctx)


class _Text(click.types.StringParamType):
    """Text in UTF-8; `what` says what it is. A blank one is refused if it `has_words`."""

    def __init__(self, what: str, *, has_words: bool = True) -> None:
        self._what = what
        self._has_words = has_words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text: str = super().convert(value, param, ctx)
        if not is_utf8(text):
            self.fail(f"the {self._what} is not text in UTF-8", param, ctx)
        if self._has_words and not text.strip():
            self.fail(f"the {self._what} is empty", param, ctx)
        return text


class _FileToWrite(click.Path):
    """The path of a file with one of two suffixes."""

    def __init__(self, suffix: str, other: str) -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self._suffixes = suffix, other

    def convert(  # type: ignore[override]
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        path = Path(super().convert(value, param, ctx))  # type: ignore[arg-type]
        if path.suffix.lower() not in self._suffixes:
            option = "" if param is None else param.opts[0]
            raise click.UsageError(f"{option} writes {' or '.join(self._suffixes)}, not {path.name!r}", ctx)
        return path


_PATH = click.Path(path_type=Path)
_ANSWER = _Text("answer", has_words=False)


def _assignments(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the values of an option NAME=VALUE, by name. Raises BadParameter."""
    values_by_name: dict[str, str] = {}
    for option in values:
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{option!r} is not name=value")
        if not is_utf8(option):
            raise click.BadParameter(f"the value of {name} is not text in UTF-8")
        if name in values_by_name:
            raise click.BadParameter(f"{name} is given twice")
        values_by_name[name] = text
    return values_by_name


def _slots_by_name(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    numbers = _assignments(context, parameter, values)
    if wrong := next((one for one in numbers.items() if not (one[1].isdecimal() and one[1].isascii())), None):
        raise click.BadParameter(f"{wrong[1]!r} is no number of tasks at once for {wrong[0]}")
    return {name: int(number[:9]) for name, number in numbers.items()}


def _texts_of_files(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the text of the file of each `TASK=FILE`, by task. Raises BadParameter."""
    texts: dict[str, str] = {}
    for value in values:
        name, equals, file = value.partition("=")
        if not equals or not name or not file:
            raise click.BadParameter(f"{value!r} is not TASK=FILE")
        if name in texts:
            raise click.BadParameter(f"{name} is given twice")
        texts[name] = _text_of_file(Path(file))
    return texts


def _prompt_of_file(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> str | None:
    return None if value is None else _text_of_file(value)


def _text_of_file(path: Path) -> str:
    """Return the text of a file without the line break at its end. Raises BadParameter."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise click.BadParameter(f"{path} is not text in UTF-8") from None
    if not is_utf8(text):
        raise click.BadParameter(f"{path} is not text in UTF-8")
    return text.removesuffix("\n")


def _complete_kind(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return [kind for kind in KINDS.replace(" or ", ", ").split(", ") if kind.startswith(begun)]


def _age(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of an age such as 30d. Raises BadParameter."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not an age such as 30d, 12h or 45m")
    return int(match[1]) * _UNITS[match[2]]


# Options of several commands.

run_argument = click.argument("run", shell_complete=complete)
optional_run_argument = click.argument("run", required=False, shell_complete=complete)
task_argument = click.argument("task", shell_complete=complete)
optional_task_argument = click.argument("task", required=False, shell_complete=complete)
plan_argument = click.argument("plan", type=_PATH, required=False)
store_option = click.option(
    "--store",
    "store_path",
    type=_Store(path_type=Path),
    default=DEFAULT_STORE,
    envvar=STORE_VARIABLE,
    show_default=True,
    show_envvar=True,
    callback=_check_store,
    help="The SQLite file of the runs, or the address of a PostgreSQL database: postgresql://...",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
_COMMON = (store_option, json_option)
set_option = click.option(
    "--set",
    "inputs",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_assignments,
    help="Replace an input of the plan; may be given more than once.",
)
_LOG = (
    click.option(
        "--log", "log_style", type=click.Choice(["console", "json"]), help="Write log lines to standard error."
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Log messages of at least this level.",
    ),
)
_OUTPUT = (
    json_option,
    click.option("-q", "--quiet", is_flag=True, help="Print only the result."),
    click.option("-v", "--verbose", is_flag=True, help="Also print each tool that an agent uses, and each wait."),
    *_LOG,
)
_BACKEND = (
    click.option(
        "--backend",
        metavar="KIND",
        shell_complete=_complete_kind,
        help=f"Use this backend if the plan names none: {KINDS}.",
    ),
    click.option("--model", metavar="NAME", help="Use this model; for local, the path of a GGUF file."),
    click.option("--base-url", metavar="URL", help="Use the OpenAI-compatible server at this URL."),
)
_BUDGET = (
    click.option(
        "--budget",
        type=_Amount(0, MOST_USD, "an amount in US dollars"),
        metavar="USD",
        help="Ask before the run, with all its attempts and resumes, may have spent more than this.",
    ),
    click.option(
        "--unpriced",
        is_flag=True,
        help="With a budget: also make calls whose highest cost is unknown. They count once they have cost something.",
    ),
)


def _concurrency(source: str = "") -> Parameter:
    """Return the option `-j`. `source` is the place of a number that comes before the default."""
    sum_of = f"the sum of the backends' `concurrency`, and {DEFAULT_CONCURRENCY} for all without one"
    default = f"{source}, else {sum_of}" if source else sum_of
    return click.option(
        "-j",
        "--concurrency",
        type=_TasksAtOnce(1, MOST_SLOTS),
        metavar="N|auto",
        help="Run at most this many tasks at once; `auto` finds the number for each backend that states none."
        f"  [default: {default}]",
    )


_stored_concurrency_option = _concurrency("as stored with the run")
_park_option = click.option(
    "--park",
    is_flag=True,
    help="End once everything waits for a time more than a minute away, such as the end of a provider's limit; `plait "
    "wake` continues the run then.",
)
_strict_option = click.option(
    "--strict",
    is_flag=True,
    help="End the run as soon as the store fails; otherwise the run continues, and the store catches up.",
)
_again_option = click.option("--again", is_flag=True, help="Run tasks again that have effects and completed in RUN.")
_dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what each task would do, with its reason.")
_plan_option = click.option(
    "--plan", type=_PATH, help="Take functions from this plan file, if the plan file has moved."
)
_backends_option = click.option(
    "--backends",
    type=_PATH,
    help="Use the `backends` of this plan file in place of those of the same names; for a run made by a Python "
    "program, the file has to name all backends.",
)
_hosts_option = click.option(
    "--hosts",
    type=_PATH,
    help="Use the `hosts` of this file, a plan or only its `hosts`, in place of those of the same names.",
)
_fork_backend_option = click.option(
    "--backend", metavar="NAME", help=f"Run the one task on this backend of RUN, or {KINDS}."
)

# Run.

RUN: tuple[Parameter | Rule, ...] = (
    plan_argument,
    click.option(
        "--goal",
        type=_Text("goal"),
        metavar="TEXT",
        help="In place of PLAN: plan tasks, run the tasks, reflect on the results, and repeat until the goal is "
        "reached.",
    ),
    set_option,
    _concurrency("as the plan says"),
    *_BUDGET,
    *_BACKEND,
    _hosts_option,
    store_option,
    click.option(
        "--like",
        metavar="RUN",
        shell_complete=complete,
        help="Take the answers of unchanged tasks from RUN (an id, the beginning of an id, or `last`), without a call.",
    ),
    click.option(
        "--fresh",
        metavar="TASK",
        multiple=True,
        help="With --like: always run TASK, with its parts and the tasks of a plan that it calls; may be given "
        "more than once.",
    ),
    click.option("--again", is_flag=True, help="With --like: run tasks again that have effects and completed in RUN."),
    click.option(
        "--keep-answers/--ask-again",
        default=None,
        help="With --like: keep the answers that persons gave to unchanged questions, or ask again. Default: the "
        "command asks at a terminal; without a terminal the questions are asked again.",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Only print the first prompts, the number of calls and what they will cost; with --like what each task "
        "would do, with its reason.",
    ),
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        metavar="N",
        help="A pilot: use only the first N rows of each list. The whole run reuses the answers with --like.",
    ),
    _park_option,
    click.option(
        "--priority",
        type=int,
        metavar="N",
        help="Of the runs that share the slots of a worker, or an account on the store, let those of a higher number "
        "come first. Default: as the plan says, else 0.",
    ),
    click.option("--queue", is_flag=True, help="Only store the run, and print its id: `plait worker` runs it."),
    click.option(
        "--key",
        metavar="TEXT",
        help="With --queue: store one run only, however often the same plan is stored with TEXT.",
    ),
    click.option(
        "--detach",
        is_flag=True,
        help="Only start the run, and print its id: a process of its own, which outlives the terminal, executes it.",
    ),
    click.option("--no-store", is_flag=True, help="Store nothing; the run cannot be resumed."),
    _strict_option,
    *_OUTPUT,
    Rule("give either a plan file (- for standard input) or --goal TEXT", one_of="plan goal"),
    Rule("--set and --limit are for the inputs of a plan; --goal has none", given="goal", excludes="inputs limit"),
    Rule(
        "--park leaves a stored run until a time; leave --no-store out, and --queue, whose workers park runs anyway",
        given="park",
        excludes="no_store queue",
    ),
    Rule(
        "--strict ends the run if the store fails, and --no-store uses none; leave one of them out",
        given="strict",
        excludes="no_store",
    ),
    Rule(
        "--fresh, --again, --keep-answers and --ask-again go with --like RUN",
        given="fresh again keep_answers",
        needs="like",
    ),
    Rule("--like takes answers from the store; leave --no-store out", given="like", excludes="no_store"),
    Rule("give --queue or --detach, not both: a queued run is for a worker", given="queue", excludes="detach"),
    *(
        rule
        for flag in ("queue", "detach")
        for rule in (
            Rule(f"--dry-run stores nothing; leave --{flag} out", given=flag, excludes="dry_run"),
            Rule(
                f"with --{flag} another process executes the run; leave --like, --no-store, --strict and --hosts out",
                given=flag,
                excludes="like no_store strict hosts",
            ),
        )
    ),
    Rule("--key goes with --queue", given="key", needs="queue detach"),
)
RESUME = (
    optional_run_argument,
    click.option(
        "--retry-failed",
        is_flag=True,
        help="Also run failed tasks, with --plan by the prompts in that file, and tasks with a damaged result.",
    ),
    click.option("--dry-run", is_flag=True, help="Only print the action for each task, with its reason."),
    _plan_option,
    _backends_option,
    _hosts_option,
    _stored_concurrency_option,
    *_BUDGET,
    _park_option,
    store_option,
    _strict_option,
    *_OUTPUT,
)
FORK = (
    run_argument,
    click.option("--from", "start", metavar="TASK", help="Start at TASK, with everything downstream of it."),
    click.option(
        "--only", metavar="TASK", help="Run TASK alone, and print its result: the same as `plait try RUN TASK`."
    ),
    click.option(
        "--prompt",
        "prompts",
        metavar="TASK=FILE",
        multiple=True,
        callback=_texts_of_files,
        help="Give TASK the prompt in FILE; may be given more than once.",
    ),
    set_option,
    click.option(
        "--result",
        "results",
        metavar="TASK=FILE",
        multiple=True,
        callback=_texts_of_files,
        help="Give TASK the result in FILE, without a call; may be given more than once.",
    ),
    _fork_backend_option,
    _again_option,
    _dry_run_option,
    _plan_option,
    _backends_option,
    _stored_concurrency_option,
    store_option,
    *_OUTPUT,
    Rule("give either --from TASK or --only TASK", one_of="start only"),
)
TRY = (
    run_argument,
    task_argument,
    click.option(
        "--prompt-file",
        "prompt",
        metavar="FILE",
        type=_PATH,
        callback=_prompt_of_file,
        help="Use the prompt in FILE.",
    ),
    _fork_backend_option,
    _again_option,
    _dry_run_option,
    _plan_option,
    _backends_option,
    store_option,
    *_OUTPUT,
)
CHECK = (
    plan_argument,
    set_option,
    click.option(
        "--schema",
        "prints_schema",
        is_flag=True,
        help="Print the JSON Schema of plan files, for editors that complete and check them; check nothing.",
    ),
    click.option(
        "--run",
        metavar="RUN",
        shell_complete=complete,
        help="Repeat the commands that checked the answers of this stored run, and print which no longer pass. PLAN "
        "is its plan file, if moved.",
    ),
    *_COMMON,
    Rule("--schema checks nothing; leave PLAN, --run and --set out", given="prints_schema", excludes="plan run inputs"),
    Rule("--set is for plans; a run has its inputs", given="run", excludes="inputs"),
    Rule("name a plan file, - for standard input, or a run with --run", needs="plan run prints_schema"),
)

# Look.

RUNS = (
    click.option(
        "-n",
        "--limit",
        type=click.IntRange(1),
        default=20,
        show_default=True,
        help="List at most this many runs, newest first.",
    ),
    click.option(
        "--status",
        "statuses",
        type=click.Choice([status.value for status in RunStatus]),
        multiple=True,
        help="List only runs shown with this status; may be given more than once.",
    ),
    click.option("--long", is_flag=True, help="Also print tokens, size in the store, and owner."),
    *_COMMON,
)
BUDGET = (
    click.option(
        "-n", "--limit", type=click.IntRange(1), default=20, show_default=True, help="Look at this many runs at most."
    ),
    *_COMMON,
)
SHOW = (
    run_argument,
    optional_task_argument,
    click.option(
        "--status",
        "statuses",
        type=click.Choice([status.value for status in TaskStatus]),
        multiple=True,
        help="Show only tasks with this status, each in a line; may be given more than once.",
    ),
    click.option(
        "--task",
        "pattern",
        metavar="PATTERN",
        help="Show only tasks whose id matches, each in a line, such as 'parts.*'.",
    ),
    *_COMMON,
    Rule("--status and --task choose tasks of a whole run; leave TASK out", given="task", excludes="statuses pattern"),
)
LOG = (
    run_argument,
    optional_task_argument,
    click.option(
        "-f", "--follow", is_flag=True, help="Print events as they happen, until the run (or TASK) has ended."
    ),
    click.option("-n", "--lines", metavar="N", type=click.IntRange(min=0), help="Print only the last N lines."),
    *_COMMON,
)
GRAPH = (
    click.argument("what", metavar="PLAN|RUN", shell_complete=complete),
    click.option(
        "-o",
        "--output",
        metavar="PATH",
        type=_FileToWrite(".html", ".svg"),
        help="Write a picture to this .html or .svg file.",
    ),
    set_option,
    *_COMMON,
)
DIFF = (
    click.argument("a", metavar="RUN", shell_complete=complete),
    click.argument("b", metavar="OTHER", shell_complete=complete),
    *_COMMON,
)
UI = (
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="Serve on this address. Any other than 127.0.0.1 and ::1 lets other machines in, without encryption.",
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        help=f"Serve on this port; 0 takes a free port.  [default: {DEFAULT_PORT}, or a free port if it is taken]",
    ),
    click.option("--no-browser", is_flag=True, help="Only print the address; open no browser."),
    *_COMMON,
    *_LOG,
)

# Steer.

ANSWER = (
    optional_run_argument,
    optional_task_argument,
    click.argument("value", type=_ANSWER, required=False),
    click.option(
        "--done",
        type=_ANSWER,
        metavar="TEXT",
        help="Complete the task with TEXT as its result (JSON if it has an output_schema).",
    ),
    click.option(
        "--again",
        is_flag=True,
        help="Run the task again: the cut attempt had no effect. Only for a task marked at_most_once.",
    ),
    click.option("--fail", type=_ANSWER, metavar="REASON", help="Fail the task for this REASON."),
    *_COMMON,
    Rule("name the run and the task that the answer is for", given="done again fail", needs="task"),
    Rule(
        "give one of VALUE, --done TEXT, --again and --fail REASON; without TASK, the open questions are printed",
        given="task",
        one_of="value done again fail",
    ),
)
CONTINUE = (
    run_argument,
    task_argument,
    click.argument("message", type=_Text("message")),
    _plan_option,
    _backends_option,
    _hosts_option,
    *_COMMON,
    *_LOG,
)
PAUSE = (
    run_argument,
    click.option("--backend", metavar="NAME", help="Pause this backend of the plan alone."),
    click.option("--off", is_flag=True, help="Lift the pause."),
    *_COMMON,
)
TUNE = (
    run_argument,
    click.option(
        "-j", "--concurrency", type=click.IntRange(1, MOST_SLOTS), help="Run at most this many tasks at once."
    ),
    click.option(
        "--backend",
        "limits",
        multiple=True,
        metavar="NAME=N",
        callback=_slots_by_name,
        help="Run at most N tasks at once on this backend; may be given more than once.",
    ),
    *_COMMON,
)
RETRY = (run_argument, task_argument, *_COMMON)
CANCEL = (run_argument, _hosts_option, *_COMMON)

# Share.

SERVE = (
    click.option(
        "--backends",
        "file",
        metavar="FILE",
        type=_PATH,
        help="Run plans on the `backends` (and `defaults.backend`) of this plan file.",
    ),
    *_BACKEND,
    click.option(
        "--host",
        type=click.Choice(["127.0.0.1", "::1"]),
        default="127.0.0.1",
        show_default=True,
        help="Listen on this address of the loopback.",
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=DEFAULT_PORT,
        show_default=True,
        help="Listen on this port; 0 takes a free port.",
    ),
    click.option(
        "--cancel-grace",
        metavar="SECONDS",
        type=_Amount(0, 86_400, "a number of seconds"),
        default=CANCEL_GRACE_SECONDS,
        show_default=True,
        help="Give the running tasks of a cancelled run this long to end; 0 ends them at once.",
    ),
    click.option(
        "--resume",
        "takes_up",
        is_flag=True,
        help="Also take up the posted runs that were queued or interrupted, or that wait for a person, at the start.",
    ),
    click.option(
        "--queue",
        "queues",
        is_flag=True,
        help="Store posted runs as queued, for the workers of the store (plait worker), and execute none here.",
    ),
    _concurrency(),
    *_COMMON,
    *_LOG,
    Rule(
        "give --queue or --resume, not both: with --queue, the workers take up the runs",
        given="queues",
        excludes="takes_up",
    ),
)
MCP = (
    click.argument("plans", nargs=-1, required=True, type=_PATH, metavar="PLAN..."),
    *_BACKEND,
    store_option,
    *_LOG,
)
WORKER = (
    click.option(
        "--concurrency",
        type=click.IntRange(1, 1000),
        default=1,
        show_default=True,
        help="Execute at most this many runs at once, each with as many tasks at once as stored with the run.",
    ),
    click.option(
        "--plans",
        metavar="FOLDER",
        multiple=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Take functions, commands and permissions also from the plan files in this folder. Others are used only "
        "if nobody but this user and root may change them. May be repeated.",
    ),
    _backends_option,
    _hosts_option,
    store_option,
    *_LOG,
)
WAKE = (
    click.option(
        "--install",
        is_flag=True,
        help="Only print a systemd timer with its service, and a line for cron, to copy: each calls `plait wake` every "
        "five minutes.",
    ),
    *_COMMON,
    *_LOG,
)

# Keep.

EXPORT = (
    run_argument,
    click.option(
        "--to",
        "file",
        metavar="FILE",
        type=_FileToWrite(".csv", ".jsonl"),
        help="Write this .csv or .jsonl file; an existing file is replaced.",
    ),
    click.option("--task", "pattern", metavar="PATTERN", help="Write only tasks whose id matches: 'part.*'."),
    click.option("--plan", metavar="PLAN", type=_PATH, help="Take `last` for the last run of this plan file."),
    click.option(
        "--raw", is_flag=True, help="Write each cell as it is, also one that a spreadsheet takes for a formula."
    ),
    click.option(
        "--otlp",
        "as_trace",
        is_flag=True,
        help="Send spans to the OpenTelemetry collector in OTEL_EXPORTER_OTLP_ENDPOINT, else on http://localhost:4318.",
    ),
    click.option("--follow", is_flag=True, help="With --otlp, send each span as it ends, until the run has ended."),
    click.option("--content", is_flag=True, help="With --otlp, also send the prompts and answers."),
    *_COMMON,
    Rule("--otlp sends the whole run; leave --to, --task and --raw out", given="as_trace", excludes="file pattern raw"),
    Rule("name a file with --to results.csv, or send a trace with --otlp", needs="file as_trace"),
    Rule("--follow and --content belong to --otlp", given="follow content", needs="as_trace"),
)
GC = (
    click.option("--keep", type=click.IntRange(0), metavar="N", help="Keep the N newest ended runs."),
    click.option(
        "--older-than",
        callback=_age,
        metavar="AGE",
        help="Delete only runs that ended longer ago than AGE: 30d, 12h or 45m.",
    ),
    click.option("--dry-run", is_flag=True, help="Only print the runs that would be deleted."),
    *_COMMON,
    Rule("choose the runs to delete: --keep N, --older-than AGE, or both", needs="keep older_than"),
)
DOCTOR = (
    click.option(
        "--hosts",
        "hosts_file",
        type=_PATH,
        help="Check the hosts in this file, a plan or only its `hosts`, in place of this machine.",
    ),
    *_COMMON,
)
