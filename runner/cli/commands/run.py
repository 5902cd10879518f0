"""`plait run`: run a plan file."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import click

from plait.runner import Plan
from plait.runner.cli.backends import BackendOptions, BackendSet, backend_set_of_plan, required_backends
from plait.runner.cli.display.follow import follow_run
from plait.runner.cli.display.reuse import print_reuse, summarize_reuse, tell_paid_again, with_effects_marked
from plait.runner.cli.exits import CliError, print_note, redirect_prints
from plait.runner.cli.like import NOT_LIKE, LikeOptions, keep_or_ask_again, like_options, list_effects, require_again
from plait.runner.cli.lookup import RunsOfPlan, find_run, open_store
from plait.runner.cli.options import (
    OutputOptions,
    apply_log_options,
    backend_options,
    concurrency_option,
    hosts_option,
    json_option,
    log_options,
    quiet_option,
    read_plan,
    set_option,
    store_option,
    strict_option,
    verbose_option,
)
from plait.runner.operations.preview_reuse import ReusePreview
from plait.runner.parallel import ParallelRunner
from plait.runner.policies.orchestrator.policy import OrchestratorPolicy
from plait.runner.policies.orchestrator.prompts import ANSWER_ID


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@set_option
@concurrency_option("as the plan says")
@backend_options
@hosts_option
@store_option
@like_options
@click.option("--no-store", is_flag=True, help="Store nothing; the run cannot be resumed.")
@strict_option
@json_option
@quiet_option
@verbose_option
@log_options
def run_command(plan: Path, inputs: dict[str, str], **options: Any) -> int:
    """Run the plan in the file PLAN, or on standard input if PLAN is `-`. The results of the final tasks are printed on
    standard output, everything else on standard error.

    Ctrl-C stops the run, and `plait resume` continues the run later; a second Ctrl-C exits at once.
    """
    apply_log_options(options["log_style"], options["log_level"])
    if options["strict"] and options["no_store"]:
        raise CliError("--strict ends the run if the store fails, and --no-store uses none; leave one of them out")
    loaded = read_plan(plan, inputs)
    chosen = BackendOptions(options["backend"], options["model"], options["base_url"])
    backend_set = backend_set_of_plan(loaded, chosen, options["hosts"])
    like = LikeOptions.of(options)
    with redirect_prints():
        return anyio.run(run_plan, loaded, backend_set, OutputOptions.of(options), like)


async def run_plan(plan: Plan, backend_set: BackendSet, options: OutputOptions, like: LikeOptions = NOT_LIKE) -> int:
    """Run `plan`, with the answers of an earlier run where nothing changed. Return the exit code."""
    plan = plan.fitted_to(backend_set.specs, backend_set.default)
    if isinstance(plan.policy, OrchestratorPolicy):
        options = replace(options, result_of=ANSWER_ID)
    names = required_backends(plan.dag, backend_set.default, policy=plan.policy, known=backend_set.specs)
    store = None
    if options.store is not None:
        store = open_store(options.store, like.store_mode)
    # The store is opened last, so that a missing backend leaves no empty store behind.
    async with backend_set.open(names) as made, store or nullcontext():
        concurrency = options.concurrency or plan.concurrency or backend_set.concurrency()
        runner = backend_set.make_runner(made, store=store, concurrency=concurrency, strict=options.strict)
        preview, keep = None, False
        if like.run is not None and store is not None:
            earlier = (await find_run(store, like.run, RunsOfPlan(plan.name, backend_set.plan))).run_id
            preview, keep = await _preview(runner, plan, earlier, like, is_interactive=not options.quiet)
            effects = [] if like.again else list_effects(preview, backend_set, made)
            if like.dry_run:
                return print_reuse(with_effects_marked(preview, effects), options.as_json)
            require_again(preview, effects)
            told = tell_paid_again(preview) if options.quiet else summarize_reuse(preview)
            if told is not None:
                print_note(told)
        run = runner.start(
            plan.dag,
            settings=backend_set.settings(),
            policy=plan.policy,
            like=preview,
            fresh=like.fresh,
            keep_answers=keep,
        )
        return await follow_run(run, plan.dag, options, store)


async def _preview(
    runner: ParallelRunner, plan: Plan, earlier: str, like: LikeOptions, *, is_interactive: bool
) -> tuple[ReusePreview, bool]:
    """Return the preview of the run, and whether the run keeps the answers of persons."""
    look = partial(runner.preview_like, plan.dag, earlier, fresh=like.fresh, policy=plan.policy)
    preview = await look(keep_answers=like.keep_answers is not False)
    keep = like.keep_answers
    if keep is None:
        keep = await keep_or_ask_again(preview, is_interactive=is_interactive and not like.dry_run)
    if not keep and any(step.keeps_answer for step in preview.tasks):
        preview = await look(keep_answers=False)
    return preview, keep
