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
from plait.runner.cli.backends import Backing, Wish, asked_for
from plait.runner.cli.display.follow import see_through
from plait.runner.cli.exits import prints_aside
from plait.runner.cli.options import (
    DEFAULT_CONCURRENCY,
    KINDS,
    Manner,
    concurrency_option,
    configure_log,
    is_text,
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
    if not is_text(goal):
        raise click.BadParameter("the goal is not text in UTF-8")
    if not goal.strip():
        raise click.BadParameter("the goal is empty")
    configure_log(options["log_style"], options["log_level"])
    manner = Manner.of(options)
    wish = Wish(options["backend"], options["model"], options["base_url"])
    team = Team(wish, options["planner"], options["executor"], options["reflector"])
    limits = {name: options[name] for name in ("max_iterations", "max_tasks", "reflect_every")}
    with prints_aside():
        return anyio.run(orchestrate, goal, team, limits, manner)


_LOCAL_ANSWER = 512  # tokens; a small model stops late
_CHARACTERS_A_TOKEN = 2  # at least, for what results are cut to


@dataclass(frozen=True, slots=True)
class Team:
    """The backends as they were named on the command line: `KIND` or `KIND:MODEL`, None for what `wish` gives."""

    wish: Wish
    planner: str | None = None
    executor: str | None = None
    reflector: str | None = None

    def backing(self) -> Backing:
        """The three backends. Raises Fault, BackendUnavailable for one that cannot be had."""
        named = {PLANNER: self.planner, EXECUTOR: self.executor, REFLECTOR: self.reflector}
        return Backing({role: self._spec(word) for role, word in named.items()}, EXECUTOR)

    def _spec(self, word: str | None) -> BackendSpec:
        kind, _, model = (word or "").partition(":")
        wish = Wish(kind, model or None, self.wish.base_url) if word else self.wish
        spec = asked_for(wish)
        return spec.model_copy(update={"max_tokens": _LOCAL_ANSWER}) if isinstance(spec, LocalSpec) else spec


async def orchestrate(goal: str, team: Team, limits: Mapping[str, int], manner: Manner) -> int:
    """Reach `goal`; the exit code."""
    backing = team.backing()
    policy = OrchestratorPolicy(goal, _limits(backing, limits))
    dag = policy.dag()
    store = None if manner.store is None else SQLiteStore(manner.store)
    # The store is opened last: a missing backend must not leave an empty store behind.
    async with backing.running(backing.specs) as made, store or nullcontext():
        runner = backing.runner(made, store=store, concurrency=manner.concurrency or DEFAULT_CONCURRENCY)
        run = runner.start(dag, settings=backing.settings(), policy=policy)
        return await see_through(run, dag, replace(manner, result_of=ANSWER_ID), store)


def _limits(backing: Backing, given: Mapping[str, int]) -> LoopLimits:
    """With what the smallest of the models can take in."""
    local = [spec for spec in backing.specs.values() if isinstance(spec, LocalSpec)]
    room = [max(spec.context - spec.max_tokens, 1) * _CHARACTERS_A_TOKEN for spec in local]
    plain = any(spec.gguf is None for spec in local)
    return LoopLimits(**given, plain=plain, **({"shown": min(room)} if room else {}))
