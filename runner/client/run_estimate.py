"""What a run would ask and cost, before a call is made: by an earlier run of the same plan, else by an assumption."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Backend
from plait.backends.command_backend import CommandBackend
from plait.backends.function_backend import FunctionBackend, PersonBackend
from plait.backends.prices import UNBILLED, Prices, billing_of, load
from plait.errors import DAGError, InvalidRequest, PromptError, RunNotFound
from plait.runner.domain.dag import DAG, group_of
from plait.runner.domain.prompt_values import named, rendered
from plait.runner.engine.growth import elements_of
from plait.runner.engine.run_options import RunOptions, backend_names
from plait.runner.engine.worst_case import WorstCases, calls_of
from plait.runner.reuse.earlier_answers import ReuseFrom
from plait.runner.state.stored_run import StoredRun, read_settings, stored_run
from plait.runner.state.task_files import files_of
from plait.runner.views.view_models import usage_fields
from plait.task import COMMAND_BACKEND, TEXT, Call, Task
from plait.usage import NO_USAGE, Usage

TOKEN_CHARACTERS = 4
"""The number of characters that are assumed for a token."""
ANSWER_TOKENS = 500
"""The number of tokens that are assumed for an answer."""


@dataclass(frozen=True, slots=True)
class TaskEstimate:
    """The calls of a task, or of all parts of a `for_each`."""

    task_id: str
    """The id of the task, or of the parts' whole."""
    backend: str
    calls: int
    """The number of calls, without retries; 1 for a list of unknown length, or each time for a loop."""
    usage: Usage | None
    """The sum over the calls; None if unknown before a run."""
    earlier_calls: int
    """The number of calls in earlier runs whose mean `usage` is; 0 if it is assumed."""
    prompt: str | None
    """The prompt of the first call; None if it reads results."""
    length_is_known: bool = True
    """False for a list or a loop whose length only the run can tell."""
    most_usd: float | None = None
    """The most that the calls cost without retries, in US dollars; None if that cannot be stated."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The calls of a run, in the order of the plan."""

    tasks: Sequence[TaskEstimate]
    like: str | None
    """The id of the earlier run whose calls count; None without one."""
    like_created_at: str
    """The time of the creation of that run, UTC in ISO 8601; empty without one."""
    grows: bool
    """Whether the run may add tasks that are not counted."""
    budget: float | None = None
    """What the run may spend, in US dollars; None for no limit."""
    refused: str | None = None
    """Why a run with this budget is refused; None if it is not."""

    @property
    def most_usd(self) -> float | None:
        """The most that all calls cost without retries, in US dollars; None if that cannot be stated."""
        each = [task.most_usd for task in self.tasks]
        return None if None in each else sum(one for one in each if one is not None)

    @property
    def calls(self) -> int:
        """The number of calls."""
        return sum(task.calls for task in self.tasks)

    @property
    def usage(self) -> Usage:
        """The sum over all calls whose usage is known."""
        return sum((task.usage for task in self.tasks if task.usage is not None), NO_USAGE)

    @property
    def is_assumed(self) -> bool:
        """Whether a usage is assumed."""
        return any(task.usage not in {None, NO_USAGE} and not task.earlier_calls for task in self.tasks)

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as a JSON object."""
        tasks = [
            {
                "task_id": task.task_id,
                "backend": task.backend,
                "calls": task.calls,
                "length_is_known": task.length_is_known,
                "earlier_calls": task.earlier_calls,
                "prompt": task.prompt,
                "most_usd": task.most_usd,
                "usage": None if task.usage is None else usage_fields(task.usage),
            }
            for task in self.tasks
        ]
        assumed = {"characters_per_token": TOKEN_CHARACTERS, "tokens_per_answer": ANSWER_TOKENS}
        return {
            "calls": self.calls,
            "usage": usage_fields(self.usage),
            "most_usd": self.most_usd,
            "budget": self.budget,
            "refused": self.refused,
            "like": self.like,
            "grows": self.grows,
            "assumed": assumed if self.is_assumed else None,
            "tasks": tasks,
        }


async def estimate_run(config: RunOptions, dag: DAG, earlier: StoredRun | None, *, grows: bool) -> RunEstimate:
    """Return what a run of `dag` would call and cost. A task that called in the run `earlier`, or in a run whose
    answers that run took over, is assumed to use the mean of its calls there. `grows` as in `RunEstimate`. Raises
    BackendMissing, StoreError.
    """
    names = backend_names(dag, config)
    usages = dict[str, list[Usage]]() if earlier is None else await _usages(earlier)
    groups: dict[str, list[int]] = {}
    for position, task in enumerate(dag):
        if task.vote is not None:
            continue  # its samples call
        groups.setdefault(group_of(task.id, task.item) or task.id, []).append(position)
    prompts = _Prompts(dag)
    counts: dict[str, tuple[int, bool]] = {}
    for group, positions in groups.items():
        over = dag.tasks[positions[0]].for_each
        length = len(positions) if over is None else _length(dag.tasks[positions[0]], dag, earlier)
        counts[group] = (1, False) if length is None else (length, True)
        prompts.repeat[group] = counts[group][0]
    prices, now = Prices(config.prices), config.clock.wall()
    worst, refused = WorstCases(config.backends, config.prices, config.clock), None
    if config.budget is not None:
        try:
            asked_of = [
                one for task, name in zip(dag, names, strict=True) for one in calls_of(task, name, config.default)
            ]
            await worst.require(asked_of, unpriced=config.unpriced)
        except InvalidRequest as error:
            refused = str(error)
    asked: list[tuple[TaskEstimate, Task, int, list[Usage]]] = []
    """Each task without its usage, the number of characters sent for it, and its calls in earlier runs."""
    for group, positions in groups.items():
        calls, length_is_known = counts[group]
        task, name = dag.tasks[positions[0]], names[positions[0]]
        if task.call is not None:
            asked += _called(task.call, group, config.default, usages, calls)
            continue
        characters = sum(prompts.characters(position) for position in positions)
        seen, first = usages.get(group, []), prompts.rendered.get(positions[0])
        estimate = TaskEstimate(group, name, calls, None, len(seen), prompt=first, length_is_known=length_is_known)
        asked.append((estimate, task, characters * calls // len(positions), seen))
    tasks: list[TaskEstimate] = []
    for estimate, task, characters, seen in asked:
        backend = config.backends[estimate.backend]
        usage = _mean(seen, estimate.calls) or _assumed(task, backend, characters, estimate.calls)
        if usage is not None and usage.cost_is_unknown:
            billing = billing_of(backend)
            if prices.needs_list(usage, billing):
                await run_sync(load)
            longest = ceil(usage.input_tokens / estimate.calls) if estimate.calls else 0
            usage = prices.priced(usage, billing, longest, at=now)
        sent = ceil(characters / estimate.calls) if estimate.calls else 0
        most = worst.of_call(estimate.backend, task.model, sent, task.output_schema)
        most = None if most is None else most * estimate.calls
        tasks.append(replace(estimate, usage=usage, most_usd=most))
    like, created_at = (None, "") if earlier is None else (earlier.record.run_id, earlier.record.created_at)
    grows = grows or any(task.adds_tasks for task in dag)
    return RunEstimate(tasks, like, created_at, grows, config.budget, refused)


def _called(
    call: Call, group: str, default: str, usages: Mapping[str, list[Usage]], times: int
) -> Iterator[tuple[TaskEstimate, Task, int, list[Usage]]]:
    """Yield the tasks of a plan that is called `times` times. A loop has the rounds of the earlier run, else an unknown
    number.
    """
    for part in call.tasks:
        name = part.get("backend") or (COMMAND_BACKEND if part.get("run") else default)
        is_same = re.compile(rf"{re.escape(group)}\..*(?<=\.){re.escape(part['id'])}")
        seen = [usage for task_id, used in usages.items() if is_same.fullmatch(task_id) for usage in used]
        calls, is_known = (len(seen) or times, bool(seen)) if call.is_loop else (times, True)
        task = Task(part["id"], part.get("prompt") or "", backend=name, model=part.get("model"))
        estimate = TaskEstimate(
            f"{group}.{part['id']}", name, calls, None, len(seen), prompt=None, length_is_known=is_known
        )
        yield estimate, task, len(task.prompt) * calls, seen


async def runs_taken_over(run: StoredRun) -> AsyncIterator[StoredRun]:
    """Yield `run`, the run whose answers it took over, and so on as long as they are stored."""
    while True:
        yield run
        reuse = ReuseFrom.of_settings(read_settings(run.record))
        if reuse is None:
            return
        try:
            run = await stored_run(run.store, reuse.like)
        except RunNotFound:
            return


async def _usages(run: StoredRun) -> dict[str, list[Usage]]:
    """Return the usage of each completed call, by the id of the task or of the parts' whole."""
    usages: dict[str, list[Usage]] = {}
    async for each in runs_taken_over(run):
        for task, record in zip(each.state.dag, each.tasks, strict=True):
            if record.usage != NO_USAGE and each.state.is_completed(task.id):
                usages.setdefault(group_of(task.id, task.item) or task.id, []).append(record.usage)
    return usages


def _length(task: Task, dag: DAG, earlier: StoredRun | None) -> int | None:
    """Return the number of parts of a task with `for_each` over the answer of a task; None if unknown."""
    over = task.for_each or ""
    if earlier is None or over not in earlier.state.dag:
        return None
    result = earlier.state.results.get(earlier.state.dag.position(over))
    try:
        elements = elements_of(task, result)
    except DAGError:
        return None
    return len(elements if dag.growth is None else elements[: dag.growth.pilot]) or None


def _mean(usages: Sequence[Usage], calls: int) -> Usage | None:
    """Return the sum over `calls` that use as much as those in `usages`; None without any."""
    if not usages:
        return None
    total, factor = sum(usages, NO_USAGE), calls / len(usages)
    cost = None if total.cost_usd is None else total.cost_usd * factor
    tokens = {name: round(count * factor) for name, count in asdict(total).items() if name.endswith("_tokens")}
    return replace(total, cost_usd=cost, **tokens)


def _assumed(task: Task, backend: Backend, characters: int, calls: int) -> Usage | None:
    """Return the assumed usage of calls with this number of characters in all; None if nothing can be assumed."""
    if isinstance(backend, FunctionBackend | CommandBackend | PersonBackend):
        return NO_USAGE
    billing = billing_of(backend)
    if billing == UNBILLED or billing.sums_requests:
        return None
    return Usage(ceil(characters / TOKEN_CHARACTERS), calls * ANSWER_TOKENS, model=task.model or billing.model)


class _Prompts:
    """The prompts of a DAG, rendered where they read no result, and the number of their characters."""

    def __init__(self, dag: DAG) -> None:
        self.rendered: dict[int, str] = {}
        self.repeat: dict[str, int] = {}
        """The number of results of a task with `for_each` over the answer of a task."""
        self._dag = dag
        self._known: dict[int, int] = {}

    def characters(self, position: int) -> int:
        """Return the number of characters that are sent for the task, the conversation that it continues included."""
        if position not in self._known:
            self._known[position] = self._count(position)
        return self._known[position]

    def _count(self, position: int) -> int:
        dag, answer = self._dag, ANSWER_TOKENS * TOKEN_CHARACTERS
        task = dag.tasks[position]
        texts = (task.system or "", json.dumps(task.output_schema) if task.output_schema else "")
        count = sum(map(len, texts))
        count += sum(Path(file.path).stat().st_size for file in files_of(task) if file.media_type == TEXT)
        if task.continues is not None:
            count += self.characters(dag.position(task.continues)) + answer
        names = named(replace(task, when=None))
        names |= set(task.upstream if "results" in names else ())
        results = sum(self.repeat.get(name, 1) for name in names if name in dag)
        if results or task.for_each is not None:
            return count + len(task.prompt) + answer * (results + ("item" in names))
        try:
            self.rendered[position] = text = rendered(task, dag, {})
        except PromptError as error:
            self.rendered[position] = text = f"this prompt cannot be rendered: {error}"
        return count + len(text)
