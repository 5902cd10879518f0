"""The options of a run that takes answers over from an earlier run, and the check of tasks with effects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import click
from anyio import to_thread

from plait.backends.backend_protocol import Backend, ReusableBackend
from plait.backends.specs.agent_specs import AgentSpec, PydanticAISpec
from plait.backends.specs.build_backend import PersonSpec
from plait.errors import InvalidRequest
from plait.runner.cli.command_exits import print_note
from plait.runner.cli.terminal_output import as_line
from plait.runner.client.backend_set import BackendSet
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview

F = TypeVar("F", bound=Callable[..., Any])
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class LikeOptions:
    """Which answers a run takes over."""

    run: str | None = None
    """Name of the earlier run; None for a run of its own."""
    fresh: tuple[str, ...] = ()
    """Tasks that run in any case."""
    again: bool = False
    """Tasks with effects may run again."""
    dry_run: bool = False
    keep_answers: bool | None = None
    """Whether the answers of persons are kept; None to ask at a terminal, and without a terminal to keep none."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LikeOptions:
        """Return the options of a command, given by the names of its parameters. Raises UsageError."""
        like = cls(options["like"], options["fresh"], options["again"], options["dry_run"], options["keep_answers"])
        if like.run is None and like != NOT_LIKE:
            raise click.UsageError("--fresh, --again, --keep-answers, --ask-again and --dry-run go with --like RUN")
        if like.run is not None and options["no_store"]:
            raise InvalidRequest("--like takes answers from the store; leave --no-store out")
        return like

    @property
    def store_mode(self) -> Literal["create", "existing", "read"]:
        """The way in which the store is opened."""
        if self.run is None:
            return "create"
        return "read" if self.dry_run else "existing"


NOT_LIKE = LikeOptions()


def like_options(function: F) -> F:
    """Add --like and the options that go with --like."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS = (
    click.option(
        "--like",
        metavar="RUN",
        help="Take the answers of unchanged tasks from RUN (an id, the beginning of an id, or `last`), without a call.",
    ),
    click.option(
        "--fresh",
        metavar="TASK",
        multiple=True,
        help="With --like: run TASK, or all parts of TASK, in any case; may be given more than once.",
    ),
    click.option("--again", is_flag=True, help="With --like: run tasks again that have effects and completed in RUN."),
    click.option(
        "--keep-answers/--ask-again",
        default=None,
        help="With --like: keep the answers that persons gave to unchanged questions, or ask again. Default: the "
        "command asks at a terminal; without a terminal the questions are asked again.",
    ),
    click.option("--dry-run", is_flag=True, help="With --like: only print what each task would do, with its reason."),
)
again_option = click.option("--again", is_flag=True, help="Run tasks again that have effects and completed in RUN.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what each task would do, with its reason.")


async def keep_or_ask_again(preview: ReusePreview, *, is_interactive: bool) -> bool:
    """Return whether the answers of persons in `preview`, of a run that keeps the answers, are to be kept. Ask at the
    terminal if `is_interactive`, otherwise keep none.
    """
    names = [as_line(step.task_id) for step in preview.tasks if step.keeps_answer]
    if not names or not is_interactive or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    named = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    counted = f"{len(names):,} answers" if len(names) > 1 else "1 answer"
    print_note(f"{counted} of a person in {as_line(preview.like)} to questions that did not change: {named}")
    # In a thread that is abandoned, so that Ctrl-C ends the command while the thread reads.
    return await to_thread.run_sync(_ask_to_keep, abandon_on_cancel=True)


def _ask_to_keep() -> bool:
    while True:
        print_note("keep, or ask again? [keep/ask]")
        line = sys.stdin.readline()
        if (word := line.strip().lower()) in {"keep", "k"}:
            return True
        if not line or word in {"ask", "a", "ask again"}:
            return False


def list_effects(preview: ReusePreview, backend_set: BackendSet, made: Mapping[str, Backend]) -> list[str]:
    """Return the tasks that would run again although they have effects and completed in the earlier run."""
    return [
        step.task_id
        for step in preview.tasks
        if (step.action is ReuseAction.RUN or step.runs_if_same)
        and step.was_completed
        and (step.at_most_once or _has_effects(step.backend, backend_set, made))
    ]


def _has_effects(name: str, backend_set: BackendSet, made: Mapping[str, Backend]) -> bool:
    """Return whether a call of the backend may change more than its answer: an agent that may write, a tool."""
    spec = backend_set.specs.get(name)
    if isinstance(spec, AgentSpec | PydanticAISpec):
        return not spec.is_harmless
    return not isinstance(spec, PersonSpec) and not isinstance(made.get(name), ReusableBackend)


def require_again(preview: ReusePreview, effects: Sequence[str]) -> None:
    """Raise InvalidRequest if there are tasks with `effects`: a person has to allow that they run again."""
    if effects:
        named = ", ".join(effects[:_MOST_NAMED]) + (", ..." if len(effects) > _MOST_NAMED else "")
        raise InvalidRequest(
            f"{named} completed in {preview.like} and would run again, with effects; --again allows it, "
            f"--dry-run shows every task"
        )
