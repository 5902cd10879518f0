"""Read the progress of a turn from `session/update`: text, tools, usage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.backends.agents.acp_permissions import describe
from plait.backends.backend_protocol import Output
from plait.backends.json_fields import at, count, number, tables, text
from plait.json_form import JsonValue
from plait.usage import NO_USAGE, Usage

_UNNUMBERED = "\0"
_TELLING = 500
"""Number of characters that identify a prompt."""


class Updates:
    """All updates of one turn. Earlier messages, sent by an agent that loads a session, are kept separately."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        """Pieces of the user's earlier prompts."""
        self.used_tools = False
        self.is_silent = True
        """Whether the agent wrote no text since the start of the turn, or since the last refusal."""
        self._messages: dict[str, str] = {}
        """Messages by id, the most recently extended message last."""
        self._notes = 0
        self._ends_in_text = False
        """Whether no tool was called since the last piece of text."""
        self._shown: dict[str, str] = {}
        self._counted = NO_USAGE
        self._cost: float | None = None

    @property
    def text(self) -> str:
        """The last message. Agents that number their messages insert notes without a number, which count only where
        there is nothing else.
        """
        last = [*reversed(self._messages.items())]
        numbered = (message for known, message in last if not known.startswith(_UNNUMBERED))
        return next(numbered, last[0][1] if last else "")

    @property
    def answer(self) -> str:
        """The last message, unless a tool was called after its last piece: text before a tool is no answer."""
        return self.text if self._ends_in_text else ""

    @property
    def usage(self) -> Usage:
        """Usage counted during the turn."""
        return replace(self._counted, cost_usd=self._cost)

    def past(self, update: JsonValue) -> None:
        """Read an update about an earlier turn."""
        if text(update, "sessionUpdate") == "user_message_chunk":
            self.heard.append(text(update, "content", "text"))

    def holds(self, prompts: Sequence[str]) -> bool:
        """Return whether one of `prompts` was sent earlier, or `prompts` is empty."""
        heard = " ".join("".join(self.heard).split())
        return not prompts or any(" ".join(prompt.split())[:_TELLING] in heard for prompt in prompts)

    def read(self, update: JsonValue) -> Sequence[Output]:
        """Read an update, and return its outputs."""
        match text(update, "sessionUpdate"):
            case "agent_message_chunk":
                return self._piece(update)
            case "tool_call" | "tool_call_update":
                return self.tool(update)
            case "usage_update":
                if text(update, "cost", "currency") in {"", "USD"}:
                    self._cost = number(update, "cost", "amount") if at(update, "cost") else self._cost
            case "user_message_chunk":
                self._notes += 1
            case _:
                pass
        return []

    def total(self, result: JsonValue) -> Usage:
        """Return the turn's usage from its `result`, or the usage counted during the turn if `result` has no counts."""
        usage = _tokens(at(result, "usage"))
        if usage == NO_USAGE:
            quota = at(result, "_meta", "quota", "token_count")
            usage = Usage(count(quota, "input_tokens"), count(quota, "output_tokens"))
        return replace(self._counted if usage == NO_USAGE else usage, cost_usd=self._cost)

    def _piece(self, update: JsonValue) -> Sequence[Output]:
        self._counted += _tokens(at(update, "_meta", "usage"))
        piece = text(update, "content", "text")
        if not piece:
            return []
        self.is_silent, self._ends_in_text = False, True
        known = text(update, "messageId") or f"{_UNNUMBERED}{self._notes}"
        self._messages[known] = self._messages.pop(known, "") + piece
        return [Output("text", piece, self.usage)]

    def tool(self, update: JsonValue) -> Sequence[Output]:
        """Read a tool call, or an update of a tool call, and return an output if the description is new."""
        self.used_tools = True
        self._notes += 1
        if not (text(update, "title") or at(update, "rawInput")):
            return []
        identity, words = text(update, "toolCallId"), describe(update)
        if identity not in self._shown:
            self._ends_in_text = False
        if self._shown.get(identity) == words:
            return []
        self._shown[identity] = words
        return [Output("tool", words, self.usage)]


def answering(result: JsonValue) -> str:
    """Return the answering model named in the turn's `result`; empty unless exactly one model is named."""
    used = tables(result, "_meta", "quota", "model_usage")
    return text(used[0], "model") if len(used) == 1 else ""


def _tokens(usage: JsonValue | Mapping[str, JsonValue]) -> Usage:
    """Return the tokens in `usage`. Agents count cached and thought tokens inside or beside the rest; the total shows
    which.
    """
    read, written, total = (count(usage, f"{name}Tokens") for name in ("input", "output", "total"))
    cache_read, cache_write = count(usage, "cachedReadTokens"), count(usage, "cachedWriteTokens")
    if read + written != total:
        read += cache_read + cache_write
        written = max(written, total - read)
    cache_read = min(read, cache_read)
    return Usage(
        read,
        written,
        cache_read_tokens=cache_read,
        cache_write_tokens=min(read - cache_read, cache_write),
        reasoning_tokens=min(written, count(usage, "thoughtTokens")),
    )
