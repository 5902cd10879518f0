"""`plait orchestrate`: its options."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import anyio
import click

from plait.backends.spec.build import BackendSpec, LocalSpec
from plait.persistence import SQLiteStore
from plait.runner.cli.backends import BackendOptions, BackendSet, requested_spec
from plait.runner.cli.display.follow import follow_run
from plait.runner.cli.exits import redirect_prints
from plait.runner.cli.options import (
    DEFAULT_CONCURRENCY,
    KINDS,
    OutputOptions,
    concurrency_option,
    configure_logging,
    is_utf8,
    json_option,
    log_options,
    quiet_option,
    store_option,
    verbose_option,
)
from plait.runner.policies.orchestrator.policy import LoopLimits, OrchestratorPolicy
from plait.runner.policies.orchestrator.prompts import ANSWER_ID, EXECUTOR, PLANNER, REFLECTOR


@click.command("orchestrate")
@click.argument("goal")
@click.option("--planner", metavar="KIND[:MODEL]", help="What plans, and writes the answer in the end.")
@click.option("--executor", metavar="KIND[:MODEL]", help="What does the tasks.")
@click.option("--reflector", metavar="KIND[:MODEL]", help="What judges how far the goal is reached.")
@click.option("--backend", metavar="KIND", help=f"{KINDS}, for those of the three not named.")
@click.option("--model", metavar="NAME", help="Their model; for local, the path of a GGUF file.")
@click.option("--base-url", metavar="URL", help="An OpenAI-compatible server.")
@click.option(
    "--max-iterations",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="After how many executed tasks no other one is begun; those under way come to their end.",
)
@click.option("--max-tasks", type=click.IntRange(1), default=100, show_default=True, help="How many may be planned.")
@click.option(
    "--reflect-every", type=click.IntRange(1), default=3, show_default=True, help="After how many tasks to reflect."
)
@concurrency_option
@store_option
@click.option("--no-store", is_flag=True, help="Write nothing down; the run cannot be resumed.")
@json_option
@quiet_option
@verbose_option
@log_options
def orchestrate_command(goal: str, **options: Any) -> int:
    """Reach GOAL: plan tasks for it, do them, reflect on what came of them, and so on; then make one answer of it all.

    The answer goes to standard output, all else to standard error. It ends as completed, with an answer, also where it
    was stopped by a limit; which one, it says. Ctrl-C stops the run so that `plait resume` can go on with it.
    """
    if not is_utf8(goal):
        raise click.BadParameter("the goal is not text in UTF-8")
    if not goal.strip():
        raise click.BadParameter("the goal is empty")
    configure_logging(options["log_style"], options["log_level"])
    output = OutputOptions.of(options)
    default = BackendOptions(options["backend"], options["model"], options["base_url"])
    team = Team(default, options["planner"], options["executor"], options["reflector"])
    limits = {name: options[name] for name in ("max_iterations", "max_tasks", "reflect_every")}
    with redirect_prints():
        return anyio.run(orchestrate, goal, team, limits, output)


_LOCAL_ANSWER = 512  # tokens; a small model stops late
_CHARACTERS_A_TOKEN = 2  # at least, for what results are cut to


@dataclass(frozen=True, slots=True)
class Team:
    """The backends as they were named on the command line: `KIND` or `KIND:MODEL`, None for what `default` gives."""

    default: BackendOptions
    planner: str | None = None
    executor: str | None = None
    reflector: str | None = None

    def backend_set(self) -> BackendSet:
        """The three backends. Raises Fault, BackendUnavailable for one that cannot be had."""
        named = {PLANNER: self.planner, EXECUTOR: self.executor, REFLECTOR: self.reflector}
        return BackendSet({role: self._spec(word) for role, word in named.items()}, EXECUTOR)

    def _spec(self, word: str | None) -> BackendSpec:
        kind, _, model = (word or "").partition(":")
        default = BackendOptions(kind, model or None, self.default.base_url) if word else self.default
        spec = requested_spec(default)
        return spec.model_copy(update={"max_tokens": _LOCAL_ANSWER}) if isinstance(spec, LocalSpec) else spec


async def orchestrate(goal: str, team: Team, limits: Mapping[str, int], options: OutputOptions) -> int:
    """Reach `goal`; the exit code."""
    backend_set = team.backend_set()
    policy = OrchestratorPolicy(goal, _limits(backend_set, limits))
    dag = policy.dag()
    store = None if options.store is None else SQLiteStore(options.store)
    # The store is opened last: a missing backend must not leave an empty store behind.
    async with backend_set.open(backend_set.specs) as made, store or nullcontext():
        runner = backend_set.runner(made, store=store, concurrency=options.concurrency or DEFAULT_CONCURRENCY)
        run = runner.start(dag, settings=backend_set.settings(), policy=policy)
        return await follow_run(run, dag, replace(options, result_of=ANSWER_ID), store)


def _limits(backend_set: BackendSet, given: Mapping[str, int]) -> LoopLimits:
    """With what the smallest of the models can take in."""
    local = [spec for spec in backend_set.specs.values() if isinstance(spec, LocalSpec)]
    room = [max(spec.context - spec.max_tokens, 1) * _CHARACTERS_A_TOKEN for spec in local]
    plain = any(spec.gguf is None for spec in local)
    return LoopLimits(**given, plain=plain, **({"shown": min(room)} if room else {}))
