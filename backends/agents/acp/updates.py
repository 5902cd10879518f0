"""What an agent shows of its work in a turn, by `session/update`: its words, its tools, what it costs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.backends.agents.acp.permissions import about
from plait.backends.json_fields import at, count, number, tables, text
from plait.backends.protocol import NO_USAGE, JsonValue, Output, Usage

_UNNUMBERED = "\0"
_TELLING = 500
"""Characters of a prompt that tell it from others."""


class Updates:
    """All updates of one turn. What was said before it, which an agent tells when it loads a session, counts apart."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        """What the user had said before, in pieces."""
        self.used_tools = False
        self.is_silent = True
        """Whether nothing was said since the beginning, or since it was denied something."""
        self._messages: dict[str, str] = {}
        """By what they are known by, the one that grew last at the end."""
        self._notes = 0
        self._shown: dict[str, str] = {}
        self._counted = NO_USAGE
        self._cost: float | None = None

    @property
    def last_words(self) -> str:
        """The last message of any kind."""
        return next(reversed(self._messages.values()), "")

    @property
    def text(self) -> str:
        """The last message. Agents that number theirs put notes of other kinds, without a number, between them."""
        numbered = (said for known, said in reversed(self._messages.items()) if not known.startswith(_UNNUMBERED))
        return next(numbered, self.last_words)

    @property
    def usage(self) -> Usage:
        """What was counted while it went on."""
        return replace(self._counted, cost_usd=self._cost)

    def past(self, update: JsonValue) -> None:
        """One update of what was before this turn."""
        if text(update, "sessionUpdate") == "user_message_chunk":
            self.heard.append(text(update, "content", "text"))

    def holds(self, prompts: Sequence[str]) -> bool:
        """Whether one of `prompts` was said before, if there are any."""
        heard = " ".join("".join(self.heard).split())
        return not prompts or any(" ".join(prompt.split())[:_TELLING] in heard for prompt in prompts)

    def read(self, update: JsonValue) -> Sequence[Output]:
        """One update; what it shows."""
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
        """What the turn has cost by its last word, or by what was counted before where that says nothing."""
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
        self.is_silent = False
        known = text(update, "messageId") or f"{_UNNUMBERED}{self._notes}"
        self._messages[known] = self._messages.pop(known, "") + piece
        return [Output("text", piece, self.usage)]

    def tool(self, update: JsonValue) -> Sequence[Output]:
        """What a tool is used for, or more about it; what is new of that."""
        self.used_tools = True
        self._notes += 1
        if not (text(update, "title") or at(update, "rawInput")):
            return []
        identity, words = text(update, "toolCallId"), about(update)
        if self._shown.get(identity) == words:
            return []
        self._shown[identity] = words
        return [Output("tool", words, self.usage)]


def answering(result: JsonValue) -> str:
    """The model that answered by the turn's last word, where that names one and no more."""
    used = tables(result, "_meta", "quota", "model_usage")
    return text(used[0], "model") if len(used) == 1 else ""


def _tokens(usage: JsonValue | Mapping[str, JsonValue]) -> Usage:
    """Agents count what came from a cache, and what was thought, with the rest or beside it; the total tells which."""
    read, written, total = (count(usage, f"{name}Tokens") for name in ("input", "output", "total"))
    cached = count(usage, "cachedReadTokens") + count(usage, "cachedWriteTokens")
    if read + written == total:
        return Usage(read, written)
    return Usage(read + cached, max(written, total - read - cached))
