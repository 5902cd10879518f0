"""`plait run`, `plait resume`, `plait fork` and `plait try`: run a plan, and go on from what a store has of a run; and
what --dry-run prints before: the first prompts, calls and cost, or task by task which answers are taken over.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from plait.errors import InvalidRequest, RunNotFound
from plait.json_form import JsonValue
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_line import COMPLETED, read_plan, subcommand
from plait.runner.cli.command_options import FORK, RESUME, RUN, TRY
from plait.runner.cli.follow_run import OutputOptions, follow_run
from plait.runner.cli.run_report import Progress, exit_code, print_result, print_result_json, print_watch_notice
from plait.runner.cli.terminal_output import (
    as_line,
    command_line,
    print_json,
    print_line,
    print_next,
    print_note,
    print_section,
    print_table,
)
from plait.runner.client.create_run import new_run
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview, ReuseStep
from plait.runner.client.run_backends import (
    BackendOptions,
    BackendSet,
    FileOptions,
    StoredBackends,
    TrustedBackends,
    backend_set_of_plan,
    backends_of_file_only,
    named_plan,
    plan_has_changed,
    queue_run,
    repaired_prompts,
    result_task,
)
from plait.runner.client.run_estimate import ANSWER_TOKENS, TOKEN_CHARACTERS, RunEstimate
from plait.runner.client.run_worker import start_process
from plait.runner.client.runs import Runs, find_run
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.plan.plan_file import Plan
from plait.runner.plan.plan_inputs import converted
from plait.runner.policies.goal_policy import ANSWER_ID, OrchestratorPolicy, Team
from plait.runner.recovery.resume import find_newest_resumable
from plait.runner.recovery.resume_plan import ResumeAction, ResumeOptions
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import StoredRun, ended_result, needs_no_work, read_settings
from plait.runner.views.event_sentences import counted, named_tasks, tokens
from plait.runner.views.view_models import Preview
from plait.statuses import RunStatus, TaskStatus
from plait.usage import NO_USAGE, cost, dollars


@subcommand("run", RUN)
def run_command(plan: Path | None, goal: str | None, inputs: dict[str, str], **options: Any) -> int:
    """Run the plan in the file PLAN, or on standard input if PLAN is `-`. The results of the final tasks are printed on
    standard output, everything else on standard error.

    With --goal, a model plans the tasks, and the answer that it writes from all results is printed. A plan with
    `orchestrate:` says more: its limits, and a backend for each part.

    Ctrl-C stops the run, and `plait resume` continues the run later; a second Ctrl-C exits at once.
    """
    limit = options["limit"]
    loaded = _plan_or_goal(plan, goal, inputs, limit)
    if limit is not None and not options["quiet"]:
        print_note(_describe_pilot(loaded, limit, None if options["no_store"] else options["store_path"]))
    chosen = BackendOptions(options["backend"], options["model"], options["base_url"])
    backend_set = backend_set_of_plan(loaded, chosen, options["hosts"])
    if goal is not None:
        backend_set = backend_set.with_long_answers()
    if options["queue"] or options["detach"]:
        return anyio.run(_queue, loaded, backend_set, options)
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
    if plan is not None:
        return read_plan(plan, inputs, limit=limit)
    assert goal is not None
    policy = OrchestratorPolicy(goal, team=Team(None, None, None))
    dag = policy.dag()
    return Plan(dag.name, dag, policy=policy)


async def _estimate(plan: Plan, backend_set: BackendSet, output: OutputOptions, options: Mapping[str, Any]) -> int:
    """Print what a run of `plan` would ask and cost, by the last run of the plan if there is one. Needs no key and no
    program. Return the exit code.
    """
    plan, names = backend_set.fit(plan)
    place = output.store
    is_there = place is not None and not (isinstance(place, Path) and not place.exists())
    store = open_store(place, "read") if place is not None and is_there else None
    made = {name: one for name in names if name in backend_set.specs and (one := backend_set.unchecked(name))}
    # Opened are only those of which nothing is known otherwise, which tells the reason.
    async with backend_set.open([name for name in names if name not in made]) as others, store or nullcontext():
        concurrency = output.concurrency or backend_set.concurrency()
        settings = _said_or_planned(plan, options)
        config = backend_set.options(made | others, store=store, concurrency=concurrency, **settings)
        like = None
        if store is not None:
            with suppress(RunNotFound):
                like = (await find_run(store, "last", plan.name, backend_set.plan)).run_id
        estimate = await Runs(config).estimate(plan.dag, like=like, policy=plan.policy)
    return _print_estimate(estimate, output.as_json)


async def _run_plan(plan: Plan, backend_set: BackendSet, output: OutputOptions, options: Mapping[str, Any]) -> int:
    """Run `plan`, with the answers of an earlier run where nothing changed. Return the exit code."""
    like, fresh, keep_answers, dry_run = (options[name] for name in ("like", "fresh", "keep_answers", "dry_run"))
    plan, names = backend_set.fit(plan)
    if isinstance(plan.policy, OrchestratorPolicy):
        output = replace(output, result_of=ANSWER_ID)
    store = None
    if output.store is not None:
        store = open_store(output.store, "create" if like is None else "read" if dry_run else "existing")
    # The store is opened last, so that a missing backend leaves no empty store behind.
    async with backend_set.open(names) as made:
        config = backend_set.options(
            made,
            store=store,
            concurrency=output.concurrency or plan.concurrency or backend_set.concurrency(),
            strict=options["strict"],
            park=options["park"],
            **_said_or_planned(plan, options),
        )
        async with store or nullcontext():
            preview = None
            if like is not None and store is not None:
                earlier = await find_run(store, like, plan.name, backend_set.plan)
                look = partial(
                    Runs(config).preview_like, plan.dag, earlier.run_id, fresh=fresh, policy=plan.policy, record=earlier
                )
                preview = await look(keep_answers=keep_answers is not False)
                if keep_answers is None:
                    keep_answers = not dry_run and not output.quiet and await _keep_or_ask_again(preview)
                    if not keep_answers and any(step.keeps_answer for step in preview.tasks):
                        preview = await look(keep_answers=False)
                effects = [] if options["again"] else backend_set.effects(preview, config.backends)
                if (code := _announce_reuse(preview, effects, output, dry_run=dry_run)) is not None:
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
    settings = {name: options[name] for name in ("budget", "unpriced", "priority")}
    return settings | {name: getattr(plan, name) for name in ("budget", "priority") if settings[name] is None}


async def _queue(plan: Plan, backend_set: BackendSet, options: Mapping[str, Any]) -> int:
    """Store a queued run of `plan`, start its process with `--detach`, and print its id. Return the exit code."""
    concurrency = options["concurrency"] or plan.concurrency or backend_set.concurrency()
    settings = {name: options[name] for name in ("budget", "unpriced", "priority")}
    async with open_store(options["store_path"]) as store:
        run_id = await queue_run(plan, backend_set, store, concurrency, options["key"], **settings)
        if options["detach"] and (
            failed := await start_process(run_id, store, options["store_path"], park=options["park"])
        ):
            code, message = failed
            print_note(message)
            print_note(f"run {run_id} is queued; resume it, or let a worker run it")
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


@subcommand("resume", RESUME)
async def resume_command(run: str | None, retry_failed: bool, **options: Any) -> int:
    """Continue RUN (an id, the beginning of an id, or `last`); without RUN, the newest run that can be resumed.

    Completed tasks are kept; interrupted and pending tasks are run. An interrupted conversation continues if its
    backend has kept the session.
    """
    files = FileOptions(options["plan"], options["backends"], options["hosts"])
    output, is_preview = OutputOptions.of(options), options["dry_run"]
    async with open_store(options["store_path"], "read" if is_preview else "existing") as store:
        of_runner = {name: options[name] for name in ("concurrency", "strict", "park", "budget", "unpriced")}
        trusted = TrustedBackends(store, files, note=print_note, **of_runner)
        runs = trusted.runs()
        record = await (
            find_newest_resumable(store, retry_failed=retry_failed) if run is None else find_run(store, run)
        )
        stored = await runs.read(record.run_id, record)
        if not is_preview and needs_no_work(stored, retry_failed):
            return _print_ended(stored, output)
        backends = None if stored.to_be_cancelled else trusted.of(record)
        if is_preview:
            return await _preview(runs, stored, backends, output, retry_failed=retry_failed)
        return await _resume(runs, stored, backends, output, retry_failed=retry_failed)


async def _preview(
    runs: Runs, run: StoredRun, backends: StoredBackends | None, options: OutputOptions, *, retry_failed: bool
) -> int:
    """Print the action of a resume for each task. Return the exit code."""
    print_watch_notice(run.record)
    preview = await runs.preview_read(run, retry_failed=retry_failed)
    is_repair = backends is not None and retry_failed and not preview.ended
    prompts = repaired_prompts(run, backends) if backends is not None and is_repair else {}
    code = _print_resume(preview, prompts, options.as_json)
    if backends is not None and not preview.ended:
        try:
            backends.needed(run, retry_failed=retry_failed)
            _print_plan_changes(run, backends, prompts)
        except InvalidRequest as fault:
            raise InvalidRequest(f"a resume would be refused: {fault}") from None
    return code


async def _resume(
    runs: Runs, run: StoredRun, backends: StoredBackends | None, options: OutputOptions, *, retry_failed: bool
) -> int:
    """Resume a run. Return the exit code."""
    prompts = repaired_prompts(run, backends) if backends is not None and retry_failed else {}
    async with runs.open(run, ResumeOptions(retry_failed, prompts=prompts)) as (continued, chosen):
        if backends is not None:
            _print_plan_changes(run, backends, prompts)
        output = replace(options, concurrency=chosen.concurrency, result_of=result_task(run.record))
        return await follow_run(continued, run.state, output, run.store)


def _print_ended(run: StoredRun, options: OutputOptions) -> int:
    """Print the result of a run that has ended, and the command that shows the run. Return the exit code."""
    result = ended_result(run)
    if options.as_json:
        print_result_json(result, Progress(run.state, time.monotonic), options.store)
    elif options.quiet:
        print_result(run.state.dag, result, result_task(run.record))
    else:
        hint = "" if result.status is RunStatus.COMPLETED else "; --retry-failed runs what failed again"
        print_note(f"run {result.run_id} is {result.status.value}, nothing is left to do{hint}")
        print_next(options.store, "show", result.run_id)
    return exit_code(result)


def _print_plan_changes(run: StoredRun, stored: StoredBackends, taken: Collection[str] = ()) -> None:
    """Say that a resume ignores a plan file that has changed, because the stored run counts; but the prompts of the
    tasks in `taken` count.
    """
    if taken:
        print_note(f"taking the prompts of {named_tasks([*taken])} from {stored.plan} for this run")
    if stored.replacements:
        print_note(f"using {', '.join(sorted(stored.replacements))} from {stored.files.backends} for this resume")
    if plan_has_changed(run, stored):
        but = ", but for these prompts" if taken else ""
        hint = "" if stored.replacements else " (--backends FILE takes backends from a file)"
        print_note(f"the plan file has changed since this run was stored; a resume runs the stored plan{but}{hint}")


@subcommand("fork", FORK)
async def fork_command(start: str | None, only: str | None, **options: Any) -> int:
    """Start a new run from TASK of RUN (an id, the beginning of an id, or `last`), which may have ended, failed or been
    interrupted. RUN does not change.

    TASK runs. Tasks downstream of TASK or of an edit, and tasks that did not complete, run unless nothing changed for
    them. All other tasks keep their results and conversations.
    """
    return await _run_fork(options, start or only or "", only=start is None)


@subcommand("try", TRY)
async def try_command(task: str, prompt: str | None, **options: Any) -> int:
    """Run TASK of RUN (an id, the beginning of an id, or `last`) alone, on the inputs recorded in RUN, and print the
    result: `plait fork RUN --only TASK`. RUN does not change; the attempt is kept as a run of its own.
    """
    prompts = {} if prompt is None else {task: prompt}
    return await _run_fork({**options, "prompts": prompts, "inputs": {}, "results": {}}, task, only=True)


async def _run_fork(options: Mapping[str, Any], task: str, *, only: bool) -> int:
    """Make a run from a stored run and show it to its end, or print its preview. Return the exit code."""
    output = replace(OutputOptions.of(options), result_of=task if only else None)
    files = FileOptions(options["plan"], options["backends"])
    async with open_store(options["store_path"], "read" if options["dry_run"] else "existing") as store:
        is_last = options["run"] == "last"
        name, file = named_plan(files.plan) if is_last and files.plan is not None else (None, None)
        record = await find_run(store, options["run"], name, file)
        edits = {"prompts": options["prompts"], "results": options["results"]}
        edits["inputs"] = _inputs(record, options["inputs"])
        trusted = TrustedBackends(store, files, note=print_note, concurrency=output.concurrency)
        async with trusted.fork(record, task, backend=options["backend"], only=only, **edits) as (runs, fork, used):
            preview = await runs.preview_fork(fork)
            effects = [] if options["again"] else used.effects(preview, runs.options.backends)
            if (code := _announce_reuse(preview, effects, output, dry_run=options["dry_run"])) is not None:
                return code
            return await follow_run(runs.start_fork(fork), RunState(fork.dag.copy()), output, store)


def _inputs(record: RunRecord, texts: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return the values of inputs, each like the stored value. Raises InvalidRequest."""
    stored, values = read_settings(record).get("inputs", {}), dict[str, JsonValue]()
    for name, text in texts.items():
        try:
            values[name] = converted(text, stored.get(name))
        except ValueError as error:
            raise InvalidRequest(f"--set {name}: {error}") from None
    return values


_PROMPTS = 3
"""First prompts that are printed."""
_PROMPT_CHARACTERS = 2_000
_LISTED = 20
"""Tasks that are not called are listed up to this number; a longer list would hide the other tasks."""


def _announce_reuse(
    preview: ReusePreview, effects: Sequence[str], options: OutputOptions, *, dry_run: bool
) -> int | None:
    """Tell what a run that takes over answers of an earlier one does, before it begins. Return the exit code if that is
    all, with `dry_run`. Raises InvalidRequest if the tasks in `effects`, which have effects, would run again.
    """
    if dry_run:
        return _print_reuse(preview, effects, options.as_json)
    if effects:
        raise InvalidRequest(
            f"{named_tasks(effects)} completed in {preview.like} and would run again, with effects; --again allows it, "
            f"--dry-run shows every task"
        )
    notice = _tell_paid_again(preview) if options.quiet else _summarize_reuse(preview)
    if notice is not None:
        print_note(notice)
    return None


def _print_reuse(preview: ReusePreview, effects: Collection[str], as_json: bool) -> int:
    """Print the action for each task, with the reason and the cost in the earlier run. The run would refuse to run the
    tasks in `effects` again. Return the exit code.
    """
    marked = "has effects: run again only with --again"
    steps = (replace(step, reason=marked) if step.task_id in effects else step for step in preview.tasks)
    preview = replace(preview, tasks=tuple(steps))
    lines: list[tuple[StrEnum, str, bool]] = []
    for step in preview.tasks:
        is_kept = step.action is ReuseAction.REUSE
        last = f" ({cost(step.usage)} last time)" if cost(step.usage) and not is_kept else ""
        lines.append((step.action, f"{as_line(step.task_id)}: {as_line(step.reason, 300)}{last}", is_kept))
    return _print_steps(preview, lines, "tasks", _summarize_reuse(preview), as_json)


def _print_estimate(estimate: RunEstimate, as_json: bool) -> int:
    """Print the first prompts of a run, its calls and what they will cost, with what was assumed. Return the exit
    code.
    """
    if as_json:
        print_json(estimate)
        return COMPLETED
    for task in [task for task in estimate.tasks if task.prompt][:_PROMPTS]:
        prompt = task.prompt or ""
        cut = f"\n... {len(prompt):,} characters" if len(prompt) > _PROMPT_CHARACTERS else ""
        head = f"{as_line(task.task_id)}, the first of {task.calls:,} prompts" if task.calls > 1 else task.task_id
        print_section(head, prompt[:_PROMPT_CHARACTERS] + cut)
    rows = [("TASK", "CALLS", "BACKEND", "TOKENS", "COST", "BY")]
    for task in estimate.tasks:
        used_tokens, price, by = "unknown", "unknown", ""
        if task.usage is not None:
            used = task.usage.usage
            used_tokens, price = tokens(used), cost(used)
            by = counted(task.earlier_calls, "earlier call") if task.earlier_calls else "assumption"
            by = by if used_tokens else ""
            if task.is_judge and task.earlier_calls:
                used_tokens, by = "", "in the task's"
        calls = f"{task.calls:,}" if task.length_is_known else "unknown"
        name = f"{as_line(task.task_id)}, judge" if task.is_judge else as_line(task.task_id)
        rows.append((name, calls, as_line(task.backend), used_tokens, price, by))
    print_line("")
    print_table(rows, 0, [None] * len(rows), frozenset({1, 3, 4}))
    for line in _summarize_estimate(estimate):
        print_line(line)
    return COMPLETED


def _summarize_estimate(estimate: RunEstimate) -> Iterator[str]:
    is_floor = estimate.grows or any(task.usage is None or not task.length_is_known for task in estimate.tasks)
    used = estimate.usage.usage
    parts = (counted(estimate.calls, "call"), tokens(used, " tokens"), cost(used))
    yield f"{'at least' if is_floor else 'about'} {', '.join(filter(None, parts))}"
    if estimate.refused is not None:
        yield f"would be refused: {estimate.refused}"
    elif estimate.budget is not None:
        most = "an unknown sum" if estimate.most_usd is None else f"at most {dollars(estimate.most_usd)}"
        assumptions = "" if estimate.most_usd is None else " and ".join(estimate.most_assumes)
        condition = f", if {assumptions}" if assumptions else ""
        yield f"{most} of the budget of {dollars(estimate.budget)}, without retries{condition}"
    if estimate.like is not None and any(task.earlier_calls for task in estimate.tasks):
        yield f"by earlier calls: the mean of those of run {estimate.like} of {(estimate.like_created_at or '')[:10]}"
    if estimate.assumed is not None:
        yield (
            f"by assumption: {TOKEN_CHARACTERS} characters for a token, {ANSWER_TOKENS} tokens for an answer, "
            "or max_tokens if that is less, no retries, nothing from a provider's cache; a pilot (--limit 5) shows more"
        )
    if any(task.usage is None for task in estimate.tasks):
        yield "unknown: what agents and backends without a price use, until a run of the plan shows it"
    if not all(task.length_is_known for task in estimate.tasks):
        yield "unknown: the length of a list that a task answers, or the rounds of a loop, counted as one"
    if estimate.grows:
        yield "not counted: tasks that are added during the run"


def _summarize_reuse(preview: ReusePreview) -> str:
    """Return how many tasks take answers over, how many run, and the cost of these tasks in the earlier run."""
    parts = [f"{preview.reuse:,} reused", _counted(preview.steps(ReuseAction.RUN), "run")]
    depends = preview.steps(ReuseAction.DEPENDS)
    for steps, word in (
        ([step for step in depends if not step.runs_if_same], "unless"),
        ([step for step in depends if step.runs_if_same], "if"),
    ):
        if steps:
            parts.append(_counted(steps, f"run {word} the tasks before give the same answers"))
    return f"like {as_line(preview.like)} of {preview.created_at[:10]}: {', '.join(parts)}"


def _tell_paid_again(preview: ReusePreview) -> str | None:
    """Return how many tasks run again although they completed in the earlier run and the caller did not ask for them,
    and why the first does; None without such tasks.
    """
    again = [step for step in preview.steps(ReuseAction.RUN) if step.was_completed and not step.is_fresh]
    if not again:
        return None
    first, like = as_line(again[0].task_id), as_line(preview.like)
    which = f"{first} completed in {like} and runs again"
    if len(again) > 1:
        which = f"{len(again):,} tasks completed in {like} and run again, first {first}"
    return f"{which}: {as_line(again[0].reason, 300)}"


def _counted(steps: Sequence[ReuseStep], verb: str) -> str:
    last = cost(sum((step.usage for step in steps), NO_USAGE))
    return f"{len(steps):,} {verb}{f' ({last} last time)' if last else ''}"


async def _keep_or_ask_again(preview: ReusePreview) -> bool:
    """Return whether the answers of persons in `preview`, of a run that keeps the answers, are to be kept. Ask at the
    terminal; without one keep none.
    """
    names = [as_line(step.task_id) for step in preview.tasks if step.keeps_answer]
    if not names or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    answers = f"{counted(len(names), 'answer')} of a person in {as_line(preview.like)}"
    print_note(f"{answers} to questions that did not change: {named_tasks(names)}")
    # In a thread that is abandoned, so that Ctrl-C ends the command while the thread reads.
    return await anyio.to_thread.run_sync(_ask_to_keep, abandon_on_cancel=True)


def _ask_to_keep() -> bool:
    while True:
        print_note("keep, or ask again? [keep/ask]")
        line = sys.stdin.readline()
        if (word := line.strip().lower()) in {"keep", "k"}:
            return True
        if not line or word in {"ask", "a", "ask again"}:
            return False


def _print_resume(preview: Preview, repaired: Collection[str], as_json: bool) -> int:
    """Print the action of a resume for each task; those in `repaired` take new prompts. Return the exit code."""
    by_plan = "with the prompt of the plan"
    steps = {
        name: replace(step, reason=f"{step.reason}; {by_plan}") if name in repaired else step
        for name, step in preview.tasks.items()
    }
    preview = replace(preview, tasks=steps)
    done = TaskStatus.COMPLETED.value
    lines: list[tuple[StrEnum, str, bool]] = []
    for step in preview.tasks.values():
        is_kept = step.action is ResumeAction.KEEP and step.reason == done
        lines.append((step.action, f"{as_line(step.task_id)}: {as_line(step.reason, 300)}", is_kept))
    return _print_steps(preview, lines, f"tasks: {done}", _summarize_resume(preview), as_json)


def _print_steps(
    preview: Preview | ReusePreview,
    lines: Sequence[tuple[StrEnum, str, bool]],
    those: str,
    summary: str,
    as_json: bool,
) -> int:
    """Print the preview: a line behind the action of each task, the tasks that are kept in one line if they are many,
    then the summary. Return the exit code.
    """
    if as_json:
        print_json(preview)
        return COMPLETED
    actions = [action for action, _, is_kept in lines if is_kept]
    folded = len(actions) > _LISTED
    widest = max((len(one) for action, _, _ in lines[:1] for one in type(action)), default=0)
    if folded:
        print_line(f"{actions[0].value:<{widest}}  {len(actions):,} {those} (--json names them)")
    for action, line, is_kept in lines:
        if not (folded and is_kept):
            print_line(f"{action.value:<{widest}}  {line}")
    print_line(summary)
    return COMPLETED


def _summarize_resume(preview: Preview) -> str:
    run = f"run {preview.run_id}"
    if preview.ended:
        hint = "; --retry-failed runs what failed again" if preview.status is RunStatus.FAILED else ""
        left = _summarize_damage(preview) or "nothing is left to do"
        return f"{run} is {preview.status.value}; {left}{hint}"
    counts = Counter(step.action for step in preview.tasks.values())
    parts = [f"{counts[action]:,} {action.value}" for action in ResumeAction if counts[action]]
    again = preview.possibly_billed_twice
    bill = f"{counted(again, 'task')} possibly billed twice" if again else "nothing billed twice"
    if again:
        bill += f", about {preview.repeated_input_tokens:,} input tokens and the output before the interruption"
    return "; ".join(filter(None, (f"{run}: {', '.join(parts)}", bill, _summarize_damage(preview))))


def _summarize_damage(preview: Preview) -> str:
    """Return the damage to results of tasks that would not run again; empty without damage."""
    damaged = [as_line(name) for name in preview.damaged]
    return f"{counted(len(damaged), 'damaged result')}, counted as failed: {named_tasks(damaged)}" if damaged else ""
