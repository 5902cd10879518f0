"""The cost of attempts: the usage of every outcome passes through here once, before the outcome changes the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import anyio
from anyio.to_thread import run_sync

from plait.backends import prices
from plait.backends.backend_protocol import Backend
from plait.backends.prices import UNBILLED, BilledBackend, Billing, Price, Prices
from plait.clock_and_ids import Clock
from plait.dialogue import Message
from plait.runner.engine.backend_call import CallOutcome
from plait.usage import NO_USAGE, Usage


class Pricing:
    """Gives usage of an unknown cost its price. A cost that the backend reports stays, unless it is an estimate."""

    def __init__(self, backends: Mapping[str, Backend], lines: Mapping[str, Price], clock: Clock) -> None:
        self._prices = Prices(lines)
        self._clock = clock
        self._billed = {name: one for name, one in backends.items() if isinstance(one, BilledBackend)}

    async def priced(self, outcome: CallOutcome, name: str, model: str | None) -> CallOutcome:
        """Return `outcome`, of a call of the backend `name`, with its cost. `model` is the model that the task names,
        None for the backend's own. The list of prices is loaded if necessary,
        in a thread; a cancellation waits for the list, because the outcome is paid for.
        """
        reply, error = outcome.reply, outcome.error
        ended = reply or error
        if ended is None or ended.usage is NO_USAGE:
            return outcome
        billing = self._billing(name, model)
        if ended.usage.cost_is_unknown and self._prices.needs_list(ended.usage, billing):
            with anyio.CancelScope(shield=True):
                await run_sync(prices.load)
        usage = self._price(ended.usage, billing, ended.messages)
        if usage is ended.usage:
            return outcome
        if reply is not None:
            return replace(outcome, reply=replace(reply, usage=usage))
        if error is not None:
            error.usage = usage
        return outcome

    def price(self, used: Usage, name: str, model: str | None) -> Usage:
        """Return `used`, by the backend `name`, with its cost, as far as known without loading the list."""
        return self._price(used, self._billing(name, model), ())

    def _price(self, used: Usage, billing: Billing, messages: Sequence[Message]) -> Usage:
        """Return `used` with its cost. The usage of `messages`, if any, is by request."""
        longest = max([one.usage.input_tokens for one in messages], default=0) or None
        return self._prices.priced(used, billing, longest, at=self._clock.wall())

    def _billing(self, name: str, model: str | None) -> Billing:
        backend = self._billed.get(name)
        billing = UNBILLED if backend is None else backend.billing
        return billing if model is None else replace(billing, model=model)
