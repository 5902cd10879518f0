"""`plait run`: run a plan file or reach a goal, now or, with `--queue`, by a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import anyio
import click

from plait.errors import InvalidRequest, RunNotFound
from plait.runner.cli.command_line import COMPLETED
from plait.runner.cli.command_options import (
    STORE_VARIABLE,
    OutputOptions,
    apply_log_options,
    backend_options,
    budget_options,
    command_line,
    complete,
    concurrency_option,
    hosts_option,
    output_options,
    park_option,
    read_plan,
    set_option,
    store_option,
    strict_option,
)
from plait.runner.cli.follow_run import follow_run
from plait.runner.cli.preview_report import announce_reuse, keep_or_ask_again, print_estimate
from plait.runner.cli.terminal_output import as_line, print_json, print_line, print_note
from plait.runner.client.create_run import new_run
from plait.runner.client.named_runs import RunsOfPlan, find_run
from plait.runner.client.run_backends import (
    BackendOptions,
    BackendSet,
    backend_set_of_plan,
    backends_of_file_only,
    queue_run,
    required_backends,
)
from plait.runner.client.runs import Runs
from plait.runner.engine.run_options import AnyStore, ServerAddress, StorePlace, open_store
from plait.runner.plan.plan_file import Plan
from plait.runner.policies.goal_policy import ANSWER_ID, OrchestratorPolicy, Team
from plait.runner.state.run_state import RunState
from plait.runner.views.event_sentences import counted
from plait.safe_text import is_utf8
from plait.statuses import RunStatus

_LOOK_S: Final = 0.05
"""Seconds between two looks whether a process has the run."""


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.option(
    "--goal",
    metavar="TEXT",
    help="In place of PLAN: plan tasks, run the tasks, reflect on the results, and repeat until the goal is reached.",
)
@set_option
@concurrency_option("as the plan says")
@budget_options
@backend_options
@hosts_option
@store_option
@click.option(
    "--like",
    metavar="RUN",
    shell_complete=complete,
    help="Take the answers of unchanged tasks from RUN (an id, the beginning of an id, or `last`), without a call.",
)
@click.option(
    "--fresh",
    metavar="TASK",
    multiple=True,
    help="With --like: run TASK, with its parts and the tasks of a plan that it calls, in any case; may be given more "
    "than once.",
)
@click.option("--again", is_flag=True, help="With --like: run tasks again that have effects and completed in RUN.")
@click.option(
    "--keep-answers/--ask-again",
    default=None,
    help="With --like: keep the answers that persons gave to unchanged questions, or ask again. Default: the "
    "command asks at a terminal; without a terminal the questions are asked again.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only print the first prompts, the number of calls and what they will cost; with --like what each task would "
    "do, with its reason.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="A pilot: go over the first N rows of each list only. --like takes the answers over into the whole run.",
)
@park_option
@click.option(
    "--priority",
    type=int,
    metavar="N",
    help="Of the runs that share the slots of a worker, or an account on the store, let those of a higher number come "
    "first. Default: as the plan says, else 0.",
)
@click.option("--queue", is_flag=True, help="Only store the run, and print its id: `plait worker` runs it.")
@click.option(
    "--key", metavar="TEXT", help="With --queue: store one run only, however often the same plan is stored with TEXT."
)
@click.option(
    "--detach",
    is_flag=True,
    help="Only start the run, and print its id: a process of its own, which outlives the terminal, executes it.",
)
@click.option("--no-store", is_flag=True, help="Store nothing; the run cannot be resumed.")
@strict_option
@output_options
def run_command(plan: Path | None, goal: str | None, inputs: dict[str, str], **options: Any) -> int:
    """Run the plan in the file PLAN, or on standard input if PLAN is `-`. The results of the final tasks are printed on
    standard output, everything else on standard error.

    With --goal, a model plans the tasks, and the answer that it writes from all results is printed. A plan with
    `orchestrate:` says more: its limits, and a backend for each part.

    Ctrl-C stops the run, and `plait resume` continues the run later; a second Ctrl-C exits at once.
    """
    apply_log_options(options["log_style"], options["log_level"])
    if options["park"] and (options["no_store"] or options["queue"]):
        raise InvalidRequest(
            "--park leaves a stored run until a time; leave --no-store out, and --queue, whose workers park runs anyway"
        )
    if options["strict"] and options["no_store"]:
        raise InvalidRequest(
            "--strict ends the run if the store fails, and --no-store uses none; leave one of them out"
        )
    limit = options["limit"]
    loaded = _plan_or_goal(plan, goal, inputs, limit)
    if limit is not None and not options["quiet"]:
        print_note(_describe_pilot(loaded, limit, None if options["no_store"] else options["store_path"]))
    chosen = BackendOptions(options["backend"], options["model"], options["base_url"])
    backend_set = backend_set_of_plan(loaded, chosen, options["hosts"])
    if goal is not None:
        backend_set = backend_set.with_long_answers()
    with_like = options["fresh"] or options["again"] or options["keep_answers"] is not None
    if options["like"] is None and with_like:
        raise click.UsageError("--fresh, --again, --keep-answers and --ask-again go with --like RUN")
    if options["like"] is not None and options["no_store"]:
        raise InvalidRequest("--like takes answers from the store; leave --no-store out")
    if options["queue"] and options["detach"]:
        raise click.UsageError("give --queue or --detach, not both: a queued run is for a worker")
    if flag := "--queue" if options["queue"] else "--detach" if options["detach"] else "":
        if options["dry_run"]:
            raise click.UsageError(f"--dry-run stores nothing; leave {flag} out")
        if options["like"] is not None or options["no_store"] or options["strict"] or options["hosts"] is not None:
            raise click.UsageError(
                f"with {flag} another process executes the run; leave --like, --no-store, --strict and --hosts out"
            )
        return anyio.run(_queue, loaded, backend_set, options)
    if options["key"] is not None:
        raise click.UsageError("--key goes with --queue")
    output = OutputOptions.of(options)
    if options["no_store"] and loaded.notify and not options["quiet"]:
        print_note("nothing is stored, so nobody is notified")
    for target in () if options["no_store"] or options["dry_run"] else backend_set.notify:
        if missing := target.missing_variables(os.environ):
            print_note(f"no value in {', '.join(missing)}, so this process notifies nobody at {as_line(str(target))}")
    with redirect_stdout(sys.stderr):
        if options["dry_run"] and options["like"] is None:
            return anyio.run(_estimate, loaded, backend_set, output, options)
        return anyio.run(_run_plan, loaded, backend_set, output, options)


def _describe_pilot(plan: Plan, limit: int, store: StorePlace | None) -> str:
    """Return which rows a pilot takes, and how the whole run takes its answers over from the store."""
    parts = [f"{limit:,} of the {length:,} rows of {as_line(name)}" for name, length in plan.lengths.items()]
    if any(task.for_each is not None for task in plan.dag):
        parts.append(f"the first {limit:,} elements of each list that a task answers")
    if not parts:
        return f"pilot: no list of the plan has more than {counted(limit, 'row')}, so this is the whole run"
    whole = command_line(store, "run", str(plan.path) if plan.path.is_file() else "-", "--like", "last")
    then = "" if store is None else f"; then {whole} takes these answers over into the whole run"
    return f"pilot: {', '.join(parts)}{then}"


def _plan_or_goal(plan: Path | None, goal: str | None, inputs: dict[str, str], limit: int | None) -> Plan:
    """Return the plan in the file, or the plan whose only contents are the goal. Raises PlanError."""
    if (plan is None) == (goal is None):
        raise click.UsageError("give either a plan file (- for standard input) or --goal TEXT")
    if plan is not None:
        return read_plan(plan, inputs, limit=limit)
    assert goal is not None
    if inputs or limit is not None:
        raise click.UsageError("--set and --limit are for the inputs of a plan; --goal has none")
    if not is_utf8(goal):
        raise click.BadParameter("the goal is not text in UTF-8")
    if not goal.strip():
        raise click.BadParameter("the goal is empty")
    policy = OrchestratorPolicy(goal, team=Team(None, None, None))
    dag = policy.dag()
    return Plan(dag.name, dag, policy=policy)


async def _estimate(plan: Plan, backend_set: BackendSet, output: OutputOptions, options: Mapping[str, Any]) -> int:
    """Print what a run of `plan` would ask and cost, by the last run of the plan if there is one. Needs no key and no
    program. Return the exit code.
    """
    plan = plan.fitted_to(backend_set.specs, backend_set.default)
    place = output.store
    is_there = place is not None and not (isinstance(place, Path) and not place.exists())
    store = open_store(place, "read") if place is not None and is_there else None
    names = required_backends(plan.dag, backend_set.default, policy=plan.policy, known=backend_set.specs)
    made = {name: one for name in names if name in backend_set.specs and (one := backend_set.unchecked(name))}
    # Opened are only those of which nothing is known otherwise, which tells the reason.
    async with backend_set.open([name for name in names if name not in made]) as others, store or nullcontext():
        concurrency = output.concurrency or backend_set.concurrency()
        said = _said_or_planned(plan, options)
        config = backend_set.options(made | others, store=store, concurrency=concurrency, **said)
        like = None
        if store is not None:
            with suppress(RunNotFound):
                like = (await find_run(store, "last", RunsOfPlan(plan.name, backend_set.plan))).run_id
        estimate = await Runs(config).estimate(plan.dag, like=like, policy=plan.policy)
    return print_estimate(estimate, output.as_json)


async def _run_plan(plan: Plan, backend_set: BackendSet, output: OutputOptions, options: Mapping[str, Any]) -> int:
    """Run `plan`, with the answers of an earlier run where nothing changed. Return the exit code."""
    like, fresh, keep_answers, dry_run = (options[name] for name in ("like", "fresh", "keep_answers", "dry_run"))
    plan = plan.fitted_to(backend_set.specs, backend_set.default)
    if isinstance(plan.policy, OrchestratorPolicy):
        output = replace(output, result_of=ANSWER_ID)
    store = None
    if output.store is not None:
        store = open_store(output.store, "create" if like is None else "read" if dry_run else "existing")
    # The store is opened last, so that a missing backend leaves no empty store behind.
    async with (
        backend_set.options_for(
            plan.dag,
            plan.policy,
            store,
            concurrency=output.concurrency or plan.concurrency,
            strict=options["strict"],
            park=options["park"],
            **_said_or_planned(plan, options),
        ) as config,
        store or nullcontext(),
    ):
        preview = None
        if like is not None and store is not None:
            earlier = await find_run(store, like, RunsOfPlan(plan.name, backend_set.plan))
            look = partial(
                Runs(config).preview_like, plan.dag, earlier.run_id, fresh=fresh, policy=plan.policy, record=earlier
            )
            preview = await look(keep_answers=keep_answers is not False)
            if keep_answers is None:
                keep_answers = not dry_run and not output.quiet and await keep_or_ask_again(preview)
                if not keep_answers and any(step.keeps_answer for step in preview.tasks):
                    preview = await look(keep_answers=False)
            effects = [] if options["again"] else backend_set.effects(preview, config.backends)
            if (code := announce_reuse(preview, effects, output, dry_run=dry_run)) is not None:
                return code
        run = new_run(
            config,
            plan.dag,
            settings=backend_set.settings(),
            policy=plan.policy,
            like=preview,
            fresh=fresh,
            keep_answers=bool(keep_answers),
        )
        return await follow_run(run, RunState(plan.dag.copy()), output, store)


def _said_or_planned(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run about its budget and priority."""
    said = {name: options[name] for name in ("budget", "unpriced", "priority")}
    return said | {name: getattr(plan, name) for name in ("budget", "priority") if said[name] is None}


async def _queue(plan: Plan, backend_set: BackendSet, options: Mapping[str, Any]) -> int:
    """Store a queued run of `plan`, start its process with `--detach`, and print its id. Return the exit code."""
    concurrency = options["concurrency"] or plan.concurrency or backend_set.concurrency()
    said = {name: options[name] for name in ("budget", "unpriced", "priority")}
    async with open_store(options["store_path"]) as store:
        run_id = await queue_run(plan, backend_set, store, concurrency, options["key"], **said)
        if options["detach"] and (code := await _start_process(run_id, store, options)) != COMPLETED:
            return code
    if options["as_json"]:
        print_json({"run_id": run_id})
    else:
        print_line(run_id)
    if options["queue"] and backend_set.plan is None and (names := backends_of_file_only(backend_set)):
        print_note(
            f"the plan is in no file, and workers take backend {', '.join(names)} from a file only: start them with "
            "--backends FILE, a plan file that has the backend as submitted"
        )
    return COMPLETED


async def _start_process(run_id: str, store: AnyStore, options: Mapping[str, Any]) -> int:
    """Start a process in a session of its own that executes the queued run, and return once a process has the run. One
    that ends before says why, and its exit code is returned.
    """
    place = options["store_path"]
    environment = {**os.environ, STORE_VARIABLE: place.dsn if isinstance(place, ServerAddress) else str(place)}
    words = [sys.executable, "-m", "plait", "resume", run_id, "-q", *(["--park"] if options["park"] else [])]
    with TemporaryFile() as said:
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, said.fileno(), 2),
        ]
        pid = os.posix_spawn(sys.executable, words, environment, file_actions=files, setsid=True)  # noqa: ASYNC221 - asyncio would end it with the loop
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait
            record = await store.get_run(run_id)
            if record is None or RunStatus(record.status) is not RunStatus.QUEUED:
                return COMPLETED
            if ended:
                said.seek(0)
                print_note(said.read().decode(errors="replace").strip())
                print_note(f"run {run_id} is queued; resume it, or let a worker run it")
                return os.waitstatus_to_exitcode(status)
            await anyio.sleep(_LOOK_S)
