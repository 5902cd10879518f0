"""The budget of a turn of Claude Code: once the budget is spent, a person raises the budget or ends the task."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from plait.backends.agents.agent_protocol import Call, Program
from plait.backends.agents.agent_transcript import earlier, exchanges
from plait.backends.agents.conversation import CliConversation
from plait.backends.backend_protocol import ConversationRequest, Files, Reply
from plait.backends.process.child_manifest import read_manifest
from plait.dialogue import Message, Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, value

STOP = "stop"
_NOTE = "budget"
_MARKED = re.compile(r"(.*)\?spent-(\d+\.\d+)-of-(\d+\.\d+)", re.DOTALL)
_RAISED = (
    "You were stopped because the budget for this work was spent. It has been raised. Go on where you were stopped: "
    "look at what you have done already, do what is missing, and give your whole answer."
)
"""The message that continues the session. The session holds the prompt and the work done."""


class BudgetReached(BackendError):  # noqa: N818 - reads as what it is
    """A call has spent its budget. The session holds the work done."""


@value
class Budget:
    """The US dollars for a turn, which may consist of several calls."""

    limit: float
    spent: float = 0.0
    """Dollars spent by the calls before."""

    @property
    def left(self) -> float:
        """Dollars left for the next call."""
        return self.limit - self.spent

    @property
    def reached(self) -> str:
        """The words for a person once the budget is spent."""
        return f"Claude Code reached its budget of {_dollars(self.limit)} (spent {_dollars(self.spent)})"

    @property
    def question(self) -> Question:
        """The question to a person once the budget is spent."""
        schema: dict[str, JsonValue] = {"anyOf": [{"type": "number", "exclusiveMinimum": self.spent}, {"enum": [STOP]}]}
        return Question(f'{self.reached}. Raise it to? Answer with the new budget in dollars, or "{STOP}"', schema)

    def after(self, cost: float | None) -> Budget:
        """Return the budget after a call that has spent the rest and cost `cost` dollars; None if unknown."""
        return replace(self, spent=round(self.spent + (self.left if cost is None else cost), 6))

    def marks(self, session_id: str) -> str:
        """Return the session id, extended by the budget, so that the answer can be matched to the question."""
        return f"{session_id}?spent-{self.spent:.6f}-of-{self.limit:.6f}"


def unmarked(session_id: str | None) -> tuple[str | None, Budget | None]:
    """Return the plain session id, and the spent budget if `session_id` is marked."""
    found = _MARKED.fullmatch(session_id or "")
    return (found[1], Budget(float(found[3]), float(found[2]))) if found else (session_id, None)


class ClaudeConversation(CliConversation):
    """A conversation with Claude Code, one process per turn, with `limit` US dollars for a turn; None for no limit."""

    def __init__(self, program: Program, limit: float | None, request: ConversationRequest, files: Files) -> None:
        session_id, reached = unmarked(request.session_id)
        answer = None if reached is None or request.answer is None else request.answer.value
        self._stopped = reached if answer == STOP else None
        """The spent budget, if the answer was to stop."""
        self._raised = _noted_before(request, files)
        """The raised budget, if any."""
        self._begins = _RAISED if answer is not None and self._raised is None else None
        """The message to send instead of the answer."""
        if reached is not None and isinstance(answer, int | float) and self._raised is None:
            self._raised = replace(reached, limit=float(answer))
        self._budget = self._raised or (None if limit is None else Budget(limit))
        if self._raised is not None:  # no hook waits for the answer
            request = replace(request, answer=None)
        super().__init__(program, replace(request, session_id=session_id), files)

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`. With an open question about the budget, the session id ends in `?` and the
        budget.
        """
        if self._stopped is not None:
            message = f"{self._stopped.reached}, and the answer was to stop"
            raise BackendError(ErrorKind.LIMIT_REACHED, message)
        sent = self._begins or prompt
        try:
            return await super().send(sent)
        except BudgetReached as error:
            if self._budget is None or self._session_id is None:
                raise
            spent = self._budget.after(error.usage.cost_usd)
            question = spent.question
            asked = Message("assistant", f"({question.text})", error.usage)
            messages = (*(error.messages or (Message("user", sent),)), asked)
            session_id = spent.marks(self._session_id)
            return Reply(asked.content, None, session_id, error.usage, messages, question)

    def _call(self, folder: Path) -> Call:
        call = super()._call(folder)
        return call if self._raised is None else replace(call, max_budget_usd=self._raised.left)

    def _notes(self) -> Mapping[str, str]:
        if self._raised is None:
            return {}
        return {_NOTE: json.dumps([self._raised.limit, self._raised.spent])}


def _noted_before(request: ConversationRequest, files: Files) -> Budget | None:
    """Return the raised budget of the interrupted or adopted turn that this turn continues, if any."""
    before: Sequence[Path] = ()
    if request.attaches:
        before = [files.turn]
    elif request.resumes_interrupted:
        before = list(earlier(files.turn))[:1]
    for call in (call for attempt in before for call in exchanges(attempt)):
        known = read_manifest(call)
        with suppress(ValueError, TypeError, KeyError):
            limit, spent = json.loads(known.note[_NOTE] if known is not None else "")
            return Budget(float(limit), float(spent))
    return None


def _dollars(amount: float) -> str:
    return f"${amount:.2f}" if amount >= 0.1 else f"${amount:.6f}".rstrip("0")
