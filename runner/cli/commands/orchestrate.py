"""`plait orchestrate`: reach a goal by tasks that a model plans on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import click

from plait.backends.spec.build import BackendSpec, LocalSpec
from plait.runner import Plan
from plait.runner.cli.backends import BackendOptions, BackendSet, requested_spec
from plait.runner.cli.commands.run import run_plan
from plait.runner.cli.exits import redirect_prints
from plait.runner.cli.options import (
    KINDS,
    OutputOptions,
    apply_log_options,
    concurrency_option,
    is_utf8,
    json_option,
    log_options,
    quiet_option,
    store_option,
    verbose_option,
)
from plait.runner.policies.orchestrator.policy import DEFAULT_LIMITS, LoopLimits, OrchestratorPolicy
from plait.runner.policies.orchestrator.prompts import EXECUTOR, PLANNER, REFLECTOR


@click.command("orchestrate")
@click.argument("goal")
@click.option("--planner", metavar="KIND[:MODEL]", help="Plan the tasks and write the answer with this backend.")
@click.option("--executor", metavar="KIND[:MODEL]", help="Run the tasks with this backend.")
@click.option("--reflector", metavar="KIND[:MODEL]", help="Judge with this backend how far the goal is reached.")
@click.option("--backend", metavar="KIND", help=f"Use this backend for each role not named above: {KINDS}.")
@click.option("--model", metavar="NAME", help="Use this model for --backend; for local, the path of a GGUF file.")
@click.option("--base-url", metavar="URL", help="Use the OpenAI-compatible server at this URL.")
@click.option(
    "--max-iterations",
    type=click.IntRange(1),
    default=DEFAULT_LIMITS.max_iterations,
    show_default=True,
    help="Start no further task after this many executed tasks; running tasks end normally.",
)
@click.option(
    "--max-tasks",
    type=click.IntRange(1),
    default=DEFAULT_LIMITS.max_tasks,
    show_default=True,
    help="Plan at most this many tasks.",
)
@click.option(
    "--reflect-every",
    type=click.IntRange(1),
    default=DEFAULT_LIMITS.reflect_every,
    show_default=True,
    help="Reflect after this many tasks.",
)
@concurrency_option()
@store_option
@click.option("--no-store", is_flag=True, help="Store nothing; the run cannot be resumed.")
@json_option
@quiet_option
@verbose_option
@log_options
def orchestrate_command(goal: str, **options: Any) -> int:
    """Reach GOAL: plan tasks, run the tasks, reflect on the results, and repeat; then write one answer from the
    results.

    The answer is printed on standard output, everything else on standard error. If a limit stops the loop, the run
    still completes with an answer, and the summary names the limit. Ctrl-C stops the run; `plait resume` continues it.
    """
    if not is_utf8(goal):
        raise click.BadParameter("the goal is not text in UTF-8")
    if not goal.strip():
        raise click.BadParameter("the goal is empty")
    apply_log_options(options["log_style"], options["log_level"])
    output = OutputOptions.of(options)
    default = BackendOptions(options["backend"], options["model"], options["base_url"])
    roles = RoleOptions(default, options["planner"], options["executor"], options["reflector"])
    backend_set = roles.backend_set()
    limits = LoopLimits(options["max_iterations"], options["reflect_every"], options["max_tasks"])
    policy = OrchestratorPolicy(goal, limits)
    dag = policy.dag()
    with redirect_prints():
        return anyio.run(run_plan, Plan(dag.name, dag, policy=policy), backend_set, output)


_LOCAL_ANSWER = 512  # tokens; a small model stops late


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """The backends of the three roles, as named on the command line: `KIND` or `KIND:MODEL`."""

    default: BackendOptions
    """The backend of each role that is not named."""
    planner: str | None = None
    executor: str | None = None
    reflector: str | None = None

    def backend_set(self) -> BackendSet:
        """Return the backends of the three roles. Raises CliError, BackendUnavailable."""
        named = {PLANNER: self.planner, EXECUTOR: self.executor, REFLECTOR: self.reflector}
        return BackendSet({role: self._spec(word) for role, word in named.items()}, EXECUTOR)

    def _spec(self, word: str | None) -> BackendSpec:
        kind, _, model = (word or "").partition(":")
        default = BackendOptions(kind, model or None, self.default.base_url) if word else self.default
        spec = requested_spec(default)
        return spec.model_copy(update={"max_tokens": _LOCAL_ANSWER}) if isinstance(spec, LocalSpec) else spec
