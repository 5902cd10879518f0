"""`Plan`: a plan file as a Python program loads and runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

from plait.backends.backend_protocol import Backend
from plait.backends.backend_specs import CommandSpec
from plait.backends.function_backend import as_backend
from plait.errors import PlanError, PlanProblem
from plait.json_form import JsonValue
from plait.runner.client.create_run import new_run
from plait.runner.client.run_backends import BackendOptions, BackendSet, backend_set_of_plan
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.run_options import DEFAULT_BACKEND, StoreOrPlace
from plait.runner.plan import plan_file
from plait.runner.plan.plan_inputs import no_input
from plait.runner.scheduling.slots import Concurrency


class Plan(plan_file.Plan):
    """A plan that runs itself: `await Plan.load("plan.yaml").run(store="runs.db")`."""

    async def run(
        self,
        *,
        store: StoreOrPlace | None = None,
        inputs: Mapping[str, JsonValue] | None = None,
        backends: Backend | Mapping[str, Backend | Callable[..., Any]] | None = None,
        concurrency: Concurrency | None = None,
        budget: float | None = None,
        unpriced: bool = False,
        strict: bool = False,
        run_id: str | None = None,
        like: str | None = None,
        fresh: Collection[str] = (),
        keep_answers: bool = False,
    ) -> RunResult:
        """Run the plan to its end and return the result, as `plait run` does.

        `inputs` replace values of the plan's inputs; the file is then read again. `backends` stand in for backends of
        the plan, by name, or one for all but those of commands; the others are opened, and closed at the end. The other
        parameters, and what is raised, are those of `ParallelRunner` and its `run`. Raises PlanError for inputs that
        the plan lacks or cannot use, and BackendUnavailable.
        """
        plan = self if inputs is None else self._with_inputs(inputs)
        if backends is None:
            backend_set = backend_set_of_plan(plan, BackendOptions())
        else:
            default = plan.default_backend or DEFAULT_BACKEND
            backend_set = BackendSet(
                plan.backends,
                default,
                plan.folder.resolve(),
                prices=plan.prices,
                hosts=plan.hosts,
                notify=plan.notify,
            )
        fitted, names = backend_set.fit(plan)
        own_backends = dict(backends) if isinstance(backends, Mapping) else {}
        if backends is not None and not isinstance(backends, Mapping):
            own_backends = {name: backends for name in names if not isinstance(plan.backends.get(name), CommandSpec)}
        async with backend_set.open(name for name in names if name not in own_backends) as made:
            made |= {name: as_backend(backend) for name, backend in own_backends.items()}
            at_once = concurrency or plan.concurrency or backend_set.concurrency()
            limit = plan.budget if budget is None else budget
            options = backend_set.options(
                made,
                store=store,
                concurrency=at_once,
                strict=strict,
                budget=limit,
                unpriced=unpriced,
                priority=plan.priority,
            )
            run = new_run(
                options,
                fitted.dag,
                run_id,
                # The stand-ins are known to this program alone, which resumes the run with a ParallelRunner.
                settings=backend_set.settings() if backends is None else None,
                policy=fitted.policy,
                like=like,
                fresh=fresh,
                keep_answers=keep_answers,
            )
            return await run.to_end()

    def _with_inputs(self, inputs: Mapping[str, JsonValue]) -> Self:
        declared: dict[str, Any] = dict(self.dag.inputs)
        if unknown := [name for name in inputs if name not in declared]:
            raise PlanError(PlanProblem(no_input(name, declared), file=str(self.path)) for name in unknown)
        limit = None if self.dag.growth is None else self.dag.growth.pilot
        return self.load(self.path, inputs={**declared, **inputs}, limit=limit)
