"""`Budget`: what a run may spend, has spent and has reserved, in US dollars, over all its attempts and processes.

The owner of a run decides in memory: a run has one owner, so that nobody else spends from its budget. What it decides
by is stored, and `stored_budget` reads it again after a crash:

    the budget                 the settings of the run, then its last `BudgetRaised`
    reserved for an attempt    `TaskStarted.reserved_usd`, in the transaction before the call
    what it cost               the usage of the attempt, in the transaction of its end

An attempt whose cost is not known counts at what was reserved for it: so does one that a crash or a stop has cut. A
reservation thus never outlives its attempt, and nothing has to be given back. Pure but for `stored_budget`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from plait.errors import ErrorKind
from plait.events import BudgetRaised, TaskStarted
from plait.persistence.store_protocol import Store
from plait.runner.domain.asked_question import Asking, Way
from plait.runner.state.stored_run import stored_events
from plait.statuses import AttemptStatus
from plait.task import Task
from plait.usage import Usage, dollars

BUDGET = "budget"
"""The key of the budget in the settings of a run; also the backend of an attempt that ended with its question."""
MOST_USD = 1e9
_ROUNDING = 1e-9
"""Dollars. Sums of floats differ in the last digits."""
_CUT = frozenset({AttemptStatus.RUNNING, AttemptStatus.INTERRUPTED, AttemptStatus.CANCELLED})
_REFUSALS = frozenset(
    kind.value
    for kind in (
        ErrorKind.TRANSIENT,
        ErrorKind.RATE_LIMITED,
        ErrorKind.OVERLOADED,
        ErrorKind.AUTH,
        ErrorKind.NO_CREDIT,
        ErrorKind.INVALID_REQUEST,
        ErrorKind.CONTEXT_OVERFLOW,
        ErrorKind.SESSION_LOST,
        ErrorKind.UNAVAILABLE,
    )
)
"""Errors that cost nothing unless a usage is reported: of a request that broke off, backends report a usage with
`cost_is_partial`.
"""


def may_have_cost(usage: Usage, error_kind: str) -> bool:
    """Return whether a call that ended with the error, and this `usage`, may have cost something."""
    return bool(usage.cost_usd) or usage.cost_is_unknown or (usage.cost_usd is None and error_kind not in _REFUSALS)


def counted_cost(
    usage: Usage, reserved_usd: float, *, error_kind: str | None = None, is_cut: bool = False
) -> tuple[float, bool]:
    """Return what an attempt counts in the budget of its run, in US dollars, and whether this is what it cost.

    `is_cut`: the attempt was ended from outside, or with its process, so that its `usage` may lack a part.
    """
    cost = usage.cost_usd or 0.0
    is_known = usage.cost_usd is not None and not usage.cost_is_partial
    if usage.cost_usd is None and not usage.cost_is_unknown:  # no usage was reported
        is_known = error_kind in _REFUSALS
    if (is_known and not is_cut) or not reserved_usd:
        return cost, True
    return max(cost, reserved_usd), False


@dataclass(slots=True, eq=False)
class Budget:
    """The money of a run. Sums are US dollars."""

    usd: float = inf
    """What the run may spend; infinite for a run in which only tasks have a `max_cost`."""
    spent: float = 0.0
    """What the ended attempts cost, or count."""
    unsure: float = 0.0
    """The part of `spent` that counts for attempts whose cost is not known: at most so much."""
    reserved: dict[str, float] = field(default_factory=dict[str, float])
    """What is reserved for the attempts under way, by task id."""
    spent_by: dict[str, float] = field(default_factory=dict[str, float])
    """`spent` by task id."""
    raised: dict[str, float] = field(default_factory=dict[str, float])
    """The `max_cost` of each task that was given a higher one, by task id."""

    @property
    def room(self) -> float:
        """What is left for further calls."""
        return self.usd - self.spent - sum(self.reserved.values())

    @property
    def is_reserved(self) -> bool:
        """Whether calls under way may leave a part of what is reserved for them."""
        return any(self.reserved.values())

    def limits(self, task: Task) -> bool:
        """Return whether there is a limit for what a call of `task` costs."""
        return self.usd != inf or self.max_cost(task) != inf

    def room_for(self, task: Task) -> float:
        """Return what is left for a call of `task`."""
        return min(self.room, self.task_room(task))

    def task_room(self, task: Task) -> float:
        """Return what its `max_cost` leaves for a call of `task`."""
        return self.max_cost(task) - self.spent_by.get(task.id, 0.0)

    def max_cost(self, task: Task) -> float:
        """Return what the task may cost in all."""
        return self.raised.get(task.id, inf if task.max_cost is None else task.max_cost)

    @staticmethod
    def covers(worst: float, room: float) -> bool:
        """Return whether `room` is enough for a call that costs at most `worst`."""
        return worst <= room + _ROUNDING

    def settle(
        self, task_id: str, usage: Usage, *, error_kind: str | None = None, is_cut: bool = False, called: bool = True
    ) -> None:
        """Replace what is reserved for the task's attempt, which has ended, by what it cost."""
        reserved = self.reserved.pop(task_id, 0.0)
        if called:
            self.count(task_id, *counted_cost(usage, reserved, error_kind=error_kind, is_cut=is_cut))

    def count(self, task_id: str, cost: float, is_known: bool) -> None:
        """Add what an attempt of the task cost, or counts."""
        self.spent += cost
        self.unsure += 0.0 if is_known else cost
        self.spent_by[task_id] = self.spent_by.get(task_id, 0.0) + cost

    def set_limit(self, raised: BudgetRaised) -> None:
        """Take over a new limit."""
        if raised.only is None:
            self.usd = raised.usd
        else:
            self.raised[raised.only] = raised.usd

    def question(self, way: Way, task: Task, worst: float) -> tuple[str, dict[str, object]]:
        """Return the question about a call that does not fit, and the schema of its answer."""
        limit, spent, whose = self.usd, self.spent, "the budget"
        if way is Way.MAX_COST:
            limit, spent, whose = self.max_cost(task), self.spent_by.get(task.id, 0.0), "the max_cost"
        text = f"{dollars(spent)} of {whose} of {dollars(limit)} is spent, and this call may cost {dollars(worst)}"
        return f"{text}: what is the new limit?", {"type": "number", "exclusiveMinimum": limit, "maximum": MOST_USD}


def raise_of(asking: Asking, task_id: str, value: object, at: str) -> list[BudgetRaised]:
    """Return the event of the raise that `value` is, the answer to a question about money; none for other questions."""
    if asking.way not in {Way.BUDGET, Way.MAX_COST} or not isinstance(value, int | float):
        return []
    return [BudgetRaised(at, float(value), None if asking.way is Way.BUDGET else task_id)]


def check_budget(budget: float | None) -> None:
    """Raise ValueError unless `budget` is None or a sum of money."""
    if budget is not None and not (isfinite(budget) and 0 <= budget <= MOST_USD):
        raise ValueError(f"budget must be US dollars from 0 to {MOST_USD:,.0f}, not {budget}")


def new_budget(usd: float | None, tasks: Iterable[Task]) -> Budget | None:
    """Return the budget of a new run of `tasks`; None if neither the run nor a task has a limit."""
    if usd is None and all(task.max_cost is None for task in tasks):
        return None
    return Budget(inf if usd is None else usd)


def budget_setting(usd: float | None, *, unpriced: bool) -> Mapping[str, Any]:
    """Return the settings that are stored with a run."""
    return {} if usd is None and not unpriced else {BUDGET: {"usd": usd, "unpriced": unpriced}}


async def stored_budget(
    store: Store, run_id: str, settings: Mapping[str, Any], tasks: Iterable[Task], *, is_limited: bool = False
) -> Budget | None:
    """Return the budget of a stored run with what it has spent, and what is reserved for attempts without an end. None
    if neither the run nor a task has a limit, unless `is_limited`: it is about to get one. Raises StoreError.
    """
    raises = [one async for one in stored_events(store, run_id, BudgetRaised)]
    usd: float | None = settings.get(BUDGET, {}).get("usd")
    for raised in raises:
        usd = raised.usd if raised.only is None else usd
    budget = new_budget(inf if usd is None and is_limited else usd, tasks)
    if budget is None:
        return None
    budget.raised = {raised.only: raised.usd for raised in raises if raised.only is not None}
    starts = stored_events(store, run_id, TaskStarted)
    reserved = {(one.task_id, one.attempt): usd async for one in starts if (usd := one.reserved_usd) is not None}
    for attempt in await store.list_attempts(run_id):
        held = reserved.get((attempt.task_id, attempt.attempt), 0.0)
        if attempt.status == AttemptStatus.RUNNING:
            budget.reserved[attempt.task_id] = held
        else:
            is_cut = AttemptStatus(attempt.status) in _CUT
            cost = counted_cost(attempt.usage, held, error_kind=attempt.error_kind, is_cut=is_cut)
            budget.count(attempt.task_id, *cost)
    return budget
