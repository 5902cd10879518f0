"""What a run would ask and cost, before a call is made: by an earlier run of the same plan, else by an assumption."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path

from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Backend
from plait.backends.command_backend import CommandBackend
from plait.backends.function_backend import FunctionBackend, PersonBackend
from plait.backends.prices import UNBILLED, Prices, billing_of, load
from plait.errors import DAGError, InvalidRequest, PromptError, RunNotFound
from plait.json_form import value
from plait.runner.domain.dag import DAG, RowsFile, group_of
from plait.runner.domain.prompt_values import TaskTexts, named
from plait.runner.engine.answer_check import VERDICT
from plait.runner.engine.call_costs import ATTACHMENT_TOKENS, CallCosts, tokens_in
from plait.runner.engine.growth import elements_of
from plait.runner.engine.run_options import RunOptions, backend_names
from plait.runner.reuse.earlier_answers import ReuseFrom
from plait.runner.state.stored_run import StoredRun, read_settings, stored_record, stored_run
from plait.runner.state.task_files import files_of
from plait.runner.views.view_models import UsageView, usage_fields, view
from plait.task import TEXT, Call, Task
from plait.usage import NO_USAGE, Usage

TOKEN_CHARACTERS = 4
"""The number of characters that are assumed for a token."""
ANSWER_TOKENS = 500
"""The number of tokens that are assumed for an answer, if its backend allows as many."""


@view
class TaskEstimate:
    """The calls of a task or of all parts of a `for_each`, or those that judge their answers."""

    task_id: str
    """The id of the task, or of the parts' whole."""
    is_judge: bool = False
    """True for the calls of the judge in the task's check."""
    backend: str
    calls: int
    """The number of calls, without retries; 1 for a list of unknown length, or each time for a loop."""
    length_is_known: bool = True
    """False for a list or a loop whose length only the run can tell."""
    earlier_calls: int
    """The number of calls in earlier runs whose mean `usage` is; 0 if it is assumed."""
    prompt: str | None = None
    """The prompt of the first call; null if it reads results."""
    most_usd: float | None = None
    """The most that these calls cost without retries, in US dollars, if the answers that they read are as long as
    assumed; null if that cannot be stated.
    """
    most_is_assumed: bool = False
    """True if `most_usd` rests on the length of answers."""
    usage: UsageView | None = None
    """The sum over the calls; null if unknown before a run. That of a judge is in the task's if earlier calls count."""


@view
class RunEstimate:
    """The calls of a run, in the order of the plan."""

    calls: int
    """The number of calls."""
    usage: UsageView
    """The sum over all calls whose usage is known."""
    most_usd: float | None
    """The most that the counted calls cost without retries, in US dollars; null if that cannot be stated."""
    most_assumes: tuple[str, ...]
    """What `most_usd` assumes, in words; empty if no run without retries costs more."""
    budget: float | None
    """What the run may spend, in US dollars; null for no limit."""
    refused: str | None
    """Why a run with this budget is refused; null if it is not."""
    like: str | None
    """The id of the earlier run whose calls count; null without one."""
    like_created_at: str | None
    """The time of the creation of that run."""
    grows: bool
    """Whether the run may add tasks that are not counted."""
    assumed: Mapping[str, int] | None
    """What is assumed of calls without an earlier call: `characters_per_token` and `tokens_per_answer`; null if no
    usage is assumed.
    """
    tasks: tuple[TaskEstimate, ...]


@value
class _Sent:
    """What is sent with a call."""

    characters: int
    tokens: int
    """The most tokens, without the schema."""
    reads_answers: bool
    """Whether answers are a part, each of which is assumed to have `ANSWER_TOKENS`."""


@value
class _Calls:
    """The calls of an estimate that still lacks the usage."""

    estimate: TaskEstimate
    task: Task
    """What is asked: the model and the schema count."""
    sent: Sequence[_Sent]
    """What each call sends, or all of them alike."""
    seen: Sequence[Usage] = ()
    """The earlier calls."""


async def estimate_run(config: RunOptions, dag: DAG, earlier: StoredRun | None, *, grows: bool) -> RunEstimate:
    """Return what a run of `dag` would call and cost. A task that called in the run `earlier`, or in a run whose
    answers that run took over, is assumed to use the mean of its calls there. `grows` as in `RunEstimate`. Raises
    BackendMissing, StoreError.
    """
    names = backend_names(dag, config)
    groups: dict[str, list[int]] = {}
    for position, task in enumerate(dag):
        if task.vote is None:  # its samples call
            groups.setdefault(group_of(task.id, task.item) or task.id, []).append(position)
    times = await _times(dag, groups, earlier)
    call_costs = CallCosts(config)
    refused = await _why_refused(config, dag, names, call_costs)
    calls = await _calls(config, dag, groups, times, names, call_costs, earlier)
    tasks = [await _estimated(one, config, call_costs) for one in calls]

    stored_usages = [task.usage.usage for task in tasks if task.usage is not None]
    costs = [task.most_usd for task in tasks]
    grows = grows or any(task.adds_tasks for task in dag)
    has_lists = any(task.for_each is not None or (task.call is not None and task.call.is_loop) for task in dag)
    assumptions = {
        "no list or loop is longer than counted": has_lists,
        f"answers that are read have at most {ANSWER_TOKENS} tokens": any(task.most_is_assumed for task in tasks),
        "no task is added": grows,
        "no task moves to a spare backend": any(name in config.spares for name in names),
    }
    is_assumed = any(
        task.usage is not None and task.usage.usage != NO_USAGE and not task.earlier_calls for task in tasks
    )
    return RunEstimate(
        calls=sum(task.calls for task in tasks),
        usage=UsageView(**usage_fields(sum(stored_usages, NO_USAGE))),
        most_usd=None if None in costs else sum(cost for cost in costs if cost is not None),
        most_assumes=tuple(text for text, is_made in assumptions.items() if is_made),
        budget=config.budget,
        refused=refused,
        like=None if earlier is None else earlier.record.run_id,
        like_created_at=None if earlier is None else earlier.record.created_at,
        grows=grows,
        assumed={"characters_per_token": TOKEN_CHARACTERS, "tokens_per_answer": ANSWER_TOKENS} if is_assumed else None,
        tasks=tuple(tasks),
    )


async def _times(dag: DAG, groups: Mapping[str, Sequence[int]], earlier: StoredRun | None) -> dict[str, int | None]:
    """Return how often each group of tasks calls; None where only the run can tell."""
    rows = None if dag.rows_file is None else await run_sync(_rows_in, dag.rows_file)
    times: dict[str, int | None] = {}
    for group, positions in groups.items():
        first = dag.tasks[positions[0]]
        times[group] = len(positions) if first.for_each is None else _length(first, dag, earlier)
        if rows is not None and first.item is not None:
            times[group] = rows
    return times


async def _why_refused(config: RunOptions, dag: DAG, names: Sequence[str], call_costs: CallCosts) -> str | None:
    """Return why a run with this budget, or on accounts with a limit of money, is refused; None if it is not."""
    has_budget = config.budget is not None
    if not has_budget and not config.limited_by_day:
        return None
    try:
        await call_costs.require(dag, names, has_budget=has_budget, unpriced=config.unpriced)
    except InvalidRequest as error:
        return str(error)
    return None


async def _calls(
    config: RunOptions,
    dag: DAG,
    groups: Mapping[str, Sequence[int]],
    times: Mapping[str, int | None],
    names: Sequence[str],
    call_costs: CallCosts,
    earlier: StoredRun | None,
) -> list[_Calls]:
    """Return the calls of each group of tasks, each before those of the judge of its answers. Raises StoreError."""
    is_known = earlier is not None and earlier.state.dag.rows_file is None
    usages = await _usages(earlier) if earlier is not None and is_known else dict[str, dict[str, Usage]]()
    prompts = _Prompts(dag, {group: 1 if number is None else number for group, number in times.items()})
    calls: list[_Calls] = []
    for group, positions in groups.items():
        task, name, number = dag.tasks[positions[0]], names[positions[0]], times[group]
        if task.call is not None:
            calls += _called(task.call, group, config.default, usages, 1 if number is None else number, earlier)
            continue
        seen = list(usages.get(group, {}).values())
        sent = [prompts.sent(position) for position in positions]
        estimate = TaskEstimate(
            task_id=group,
            backend=name,
            calls=1 if number is None else number,
            length_is_known=number is not None,
            earlier_calls=len(seen),
            prompt=prompts.rendered.get(positions[0]),
        )
        calls.append(_Calls(estimate, task, sent, seen))
    return [each for one in calls for each in (one, *_judged(one, call_costs))]


def _rows_in(file: RowsFile) -> int:
    from plait.runner.plan.plan_inputs import row_entries  # noqa: PLC0415 - pydantic, for such runs only

    return sum(1 for _ in row_entries(Path(file.path)))


async def _estimated(calls: _Calls, config: RunOptions, call_costs: CallCosts) -> TaskEstimate:
    """Return the estimate with the usage and the most that the calls cost."""
    estimate, task, number = calls.estimate, calls.task, calls.estimate.calls
    backend, prices = config.backends[estimate.backend], Prices(config.prices)
    characters = sum(one.characters for one in calls.sent) * number // len(calls.sent)
    if estimate.is_judge and calls.seen:
        usage: Usage | None = NO_USAGE  # a part of the task's
    else:
        answer = min(ANSWER_TOKENS, billing_of(backend).max_output_tokens or ANSWER_TOKENS)
        usage = _mean(calls.seen, number) or _assumed(task, backend, characters, number * answer)
    if usage is not None and usage.cost_is_unknown:
        billing = billing_of(backend)
        if prices.needs_list(usage, billing):
            await run_sync(load)
        usage = prices.priced(usage, billing, ceil(usage.input_tokens / number), at=config.clock.wall())

    costs = [call_costs.most(estimate.backend, task.model, one.tokens, task.output_schema) for one in calls.sent]
    most_usd = None if None in costs else sum(cost for cost in costs if cost is not None) * number / len(costs)
    return replace(
        estimate,
        usage=None if usage is None else UsageView(**usage_fields(usage)),
        most_usd=most_usd,
        most_is_assumed=most_usd is not None and any(one.reads_answers for one in calls.sent),
    )


def _judged(calls: _Calls, call_costs: CallCosts) -> Iterator[_Calls]:
    """Yield the calls of the judge of the answers of `calls`, if there is one. It may be shown all that was sent."""
    backend, check = calls.estimate.backend, calls.task.check
    if check is None or (prompt := check.judge) is None:
        return
    answer = call_costs.answer_tokens(backend)  # 0 if unknown
    estimate = replace(calls.estimate, backend=check.backend or backend, is_judge=True, prompt=None)
    sent = [
        _Sent(
            len(prompt) + TOKEN_CHARACTERS * ANSWER_TOKENS,
            one.tokens + (answer or ANSWER_TOKENS) + tokens_in(prompt),
            one.reads_answers or not answer,
        )
        for one in calls.sent
    ]
    yield _Calls(estimate, Task(estimate.task_id, prompt, output_schema=VERDICT), sent, calls.seen)


def _called(
    call: Call,
    group: str,
    default: str,
    usages: Mapping[str, Mapping[str, Usage]],
    times: int,
    earlier: StoredRun | None,
) -> Iterator[_Calls]:
    """Yield the calls of a plan that is called `times` times. A loop has the rounds of the earlier run, else an unknown
    number.
    """
    for part in call.leaves:
        name = part.backend or default
        is_same = re.compile(rf"{re.escape(group)}\..*(?<=\.){re.escape(part.id)}").fullmatch
        seen = [usage for used in usages.values() for task_id, usage in used.items() if is_same(task_id)]
        state = None if earlier is None else earlier.state
        rounds = 0 if state is None else sum(bool(is_same(one.id)) and state.is_completed(one.id) for one in state.dag)
        number, is_known = (rounds or times, rounds > 0) if call.is_loop else (times, True)
        estimate = TaskEstimate(
            task_id=f"{group}.{part.id}",
            backend=name,
            calls=number,
            length_is_known=is_known,
            earlier_calls=len(seen),
        )
        sent = _Sent(len(part.prompt), tokens_in(part.prompt), reads_answers=True)
        yield _Calls(estimate, part, [sent], seen)


async def runs_taken_over(run: StoredRun) -> AsyncIterator[StoredRun]:
    """Yield `run`, the run whose answers it took over, and so on as long as they are stored. Of a run in which nothing
    was used, the record alone is read.
    """
    yield run
    store, record = run.store, run.record
    while (reuse := ReuseFrom.of_settings(read_settings(record))) is not None:
        try:
            store, record = await stored_record(store, reuse.like)
            older = None if record.usage == NO_USAGE else await stored_run(store, reuse.like, record)
        except RunNotFound:
            return
        if older is not None:
            yield older


async def _usages(run: StoredRun) -> dict[str, dict[str, Usage]]:
    """Return the usage of the newest completed call of each task, by the id of the task or of the parts' whole, and by
    the id of the task.
    """
    usages: dict[str, dict[str, Usage]] = {}
    async for each in runs_taken_over(run):
        for task, record in zip(each.state.dag, each.tasks, strict=True):
            if record.usage != NO_USAGE and each.state.is_completed(task.id):
                usages.setdefault(group_of(task.id, task.item) or task.id, {}).setdefault(task.id, record.usage)
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


def _assumed(task: Task, backend: Backend, characters: int, output_tokens: int) -> Usage | None:
    """Return the assumed usage of calls with this number of characters in all; None if nothing can be assumed."""
    if isinstance(backend, FunctionBackend | CommandBackend | PersonBackend):
        return NO_USAGE
    billing = billing_of(backend)
    if billing == UNBILLED or billing.sums_requests:
        return None
    return Usage(ceil(characters / TOKEN_CHARACTERS), output_tokens, model=task.model or billing.model)


class _Prompts:
    """The prompts of a DAG, rendered where they read no result, and what is sent with them."""

    def __init__(self, dag: DAG, results: Mapping[str, int]) -> None:
        self.rendered: dict[int, str] = {}
        self._results = results
        """The number of results of each task, or of all parts of a `for_each`."""
        self._dag = dag
        self._known: dict[int, _Sent] = {}

    def sent(self, position: int) -> _Sent:
        """Return what is sent for the task, the conversation that it continues included."""
        if position not in self._known:
            self._known[position] = self._count(position)
        return self._known[position]

    def _count(self, position: int) -> _Sent:
        dag, task = self._dag, self._dag.tasks[position]
        texts, answers = [task.system or ""], 0
        names = named(replace(task, when=None))
        names |= set(task.upstream if "results" in names else ())
        results = sum(self._results.get(name, 1) for name in names if name in dag)
        if results or task.for_each is not None:
            texts.append(task.prompt)
            answers = results + ("item" in names)
        else:
            try:
                text = TaskTexts(task, dag, {}).prompt()
            except PromptError as error:
                text = f"this prompt cannot be rendered: {error}"
            self.rendered[position] = text
            texts.append(text)
        characters, tokens = sum(map(len, texts)), tokens_in(*texts)
        characters += len(json.dumps(task.output_schema)) if task.output_schema else 0
        for file in files_of(task):
            size = Path(file.path).stat().st_size
            characters += size if file.media_type == TEXT else 0
            tokens += size if file.media_type == TEXT else max(size, ATTACHMENT_TOKENS)
        if task.continues is not None:
            before = self.sent(dag.position(task.continues))
            characters, tokens, answers = characters + before.characters, tokens + before.tokens, answers + 1
        return _Sent(
            characters + answers * ANSWER_TOKENS * TOKEN_CHARACTERS, tokens + answers * ANSWER_TOKENS, answers > 0
        )
