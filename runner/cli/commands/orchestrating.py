"""`orchestrate`, once its options are read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from plait.backends.spec.build import BackendSpec, LocalSpec
from plait.persistence import SQLiteStore
from plait.runner.cli.backends import Backing, Wish, asked_for
from plait.runner.cli.commands.run import DEFAULT_CONCURRENCY, Manner, see_through
from plait.runner.policies.orchestrator.policy import LoopLimits, OrchestratorPolicy
from plait.runner.policies.orchestrator.prompts import ANSWER_ID, EXECUTOR, PLANNER, REFLECTOR

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
