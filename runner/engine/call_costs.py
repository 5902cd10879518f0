"""What a call costs: the price of its usage, and the most that it can cost, stated before it is made: what a run with a
budget reserves, and a preview shows.

The most counts one token of input for each byte of UTF-8. The tokenizers in use (byte-level BPE, as tiktoken of OpenAI,
or with a fall-back to bytes, as SentencePiece) make no token of less than a byte, so that no text has more; English has
about a quarter. Output counts as far as the backend lets a request write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import anyio
from anyio.to_thread import run_sync

from plait.backends import prices
from plait.backends.command_backend import CommandBackend
from plait.backends.function_backend import FunctionBackend, PersonBackend
from plait.backends.prices import Billing, Prices, billing_of
from plait.dialogue import Message
from plait.errors import InvalidRequest
from plait.runner.engine.backend_call import CallOutcome
from plait.runner.engine.run_options import RunOptions
from plait.task import Task
from plait.usage import NO_USAGE, Usage

FRAMING_TOKENS = 1_000
"""Input of a request beside its texts: the roles, and the instructions of the server for a schema."""
ATTACHMENT_TOKENS = 10_000
"""The least that an image or a PDF counts."""
_REPAIR_BYTES = 2_000
"""The longest list of mistakes with which an answer is asked for once more."""


def tokens_in(*texts: str) -> int:
    """Return the most tokens that `texts` can have."""
    return sum(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts)


class CallCosts:
    """The costs of calls on the backends of a runner, by the prices of the user and the list, if that is loaded."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._backends = options.backends
        self._prices = Prices(options.prices)
        self._clock = options.clock

    async def priced(self, outcome: CallOutcome, name: str, model: str | None) -> CallOutcome:
        """Return `outcome`, of a call of the backend `name`, with its cost. `model` is the model that the task names,
        None for the backend's own. The list of prices is loaded if necessary, in a thread; a cancellation waits for the
        list, because the outcome is paid for.
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
        longest = max([message.usage.input_tokens for message in messages], default=0) or None
        return self._prices.priced(used, billing, longest, at=self._clock.wall())

    @cached_property
    def _free(self) -> set[str]:
        unpaid = FunctionBackend, CommandBackend, PersonBackend
        every = self._backends.items()
        return {name for name, one in every if isinstance(one, unpaid) or billing_of(one).price == prices.FREE}

    def is_free(self, name: str) -> bool:
        """Return whether calls of the backend cost nothing: commands, functions, people and local models."""
        return name in self._free

    def most(
        self, name: str, model: str | None, input_tokens: int, schema: Mapping[str, object] | None = None
    ) -> float | None:
        """Return the most that a turn of the backend costs, in US dollars; None if it cannot be stated. `model` is the
        one that the task names. With a `schema` an answer that does not fit is asked for once more.
        """
        if self.is_free(name):
            return 0.0
        billing = self._billing(name, model)
        if billing.max_turn_usd is not None:
            return billing.max_turn_usd
        answer, at = billing.max_output_tokens, self._clock.wall()
        if self._prices.most(1_000_000, 1_000_000, billing, at=at) == 0:
            return 0.0
        if answer is None or billing.sums_requests:
            return None
        form = 0 if schema is None else tokens_in(json.dumps(schema))
        system = getattr(self._backends[name], "system", None)
        sent = FRAMING_TOKENS + input_tokens + form + (tokens_in(system) if isinstance(system, str) else 0)
        most = self._prices.most(sent, answer, billing, at=at)
        if most is None or schema is None:
            return most
        again = self._prices.most(sent + answer + form + _REPAIR_BYTES, answer, billing, at=at)
        return None if again is None else most + again

    def answer_tokens(self, name: str) -> int:
        """Return the most tokens of an answer, as far as known."""
        return billing_of(self._backends.get(name)).max_output_tokens or 0

    def unknown(self, name: str, model: str | None) -> str | None:
        """Return why the worst case of calls cannot be stated, and what to write; None if it can."""
        if self.most(name, model, 0) is not None:
            return None
        billing = self._billing(name, model)
        if billing.sums_requests:
            remedy = "give it max_budget_usd, in US dollars" if hasattr(self._backends[name], "max_budget_usd") else ""
            return f"a turn of backend {name!r} has no limit of its cost" + (f"; {remedy}" if remedy else "")
        if self._prices.most(1, 1, billing, at=self._clock.wall()) is None:
            if billing.model is None:
                return f"backend {name!r} names no model, so its price is unknown; give it a `model`"
            line = f"prices: {{{json.dumps(billing.model)}: {{input: 1, output: 2}}}}"
            return (
                f"the price of model {billing.model!r} of backend {name!r} is unknown; add it to the plan: {line}, in "
                f"US dollars for a million tokens"
            )
        return f"an answer of backend {name!r} has no limit; write one: max_tokens: 4096"

    def _billing(self, name: str, model: str | None) -> Billing:
        billing = billing_of(self._backends.get(name))
        return billing if model is None else replace(billing, model=model)

    async def require(
        self,
        tasks: Iterable[Task],
        names: Sequence[str],
        further: Iterable[str] = (),
        *,
        has_budget: bool,
        unpriced: bool,
    ) -> None:
        """Load the list of prices if it may be needed for a call of `tasks`, which are on the backends `names`, or of a
        backend in `further`. Raise InvalidRequest if the worst case of a call that is counted cannot be stated, unless
        `unpriced`. All are counted if the run `has_budget`, otherwise those on accounts with a limit by day.
        """
        options = self._options
        backends = self._backends.keys() if has_budget else self._backends.keys() & options.limited_by_day
        calls = [call for one, name in zip(tasks, names, strict=True) for call in _calls_of(one, name, options.default)]
        calls += [(spare, None) for name in dict.fromkeys(names) for spare in options.spares.get(name, ())]
        calls += [(name, None) for name in further]
        paid = [call for call in dict.fromkeys(calls) if call[0] in backends and not self.is_free(call[0])]
        used = Usage(1, 1)
        if any(self._prices.needs_list(used, self._billing(*call)) for call in paid):
            await run_sync(prices.load)
        reasons = () if unpriced else filter(None, (self.unknown(*call) for call in paid))
        if (reason := next(iter(reasons), None)) is not None:
            limit = "the run has a budget" if has_budget else "the account has a usd_per_day"
            raise InvalidRequest(
                f"{limit}, and {reason}; or let such calls count only once they have cost something: --unpriced"
            )


def _calls_of(task: Task, name: str, default: str) -> Iterator[tuple[str, str | None]]:
    """Yield the backends that the task, on the backend `name`, calls, each with the model asked for: also those of the
    plan that it calls. `default` is the default backend.
    """
    if task.check is not None and task.check.judge is not None:
        yield task.check.backend or name, None
    if task.call is not None:
        for part in task.call.tasks:
            yield from _calls_of(part, part.backend or default, default)
    elif not task.run:
        yield name, task.model
