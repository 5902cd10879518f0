"""The one place that decides whether an answer is whole, for every backend.

An adapter hands over what came and how it ended, and judges neither. A wire with reasons for the end of an answer:

    answer = whole_answer(
        "".join(texts),  # the text of the turn's last message, thoughts in the text included
        reasons,  # every finish or stop reason that came, in order
        missing="the answer broke off after 3 events",  # said if `reasons` is empty
        usage=usage,
        max_tokens=self.max_tokens,
    )

An agent that says only that its turn succeeded passes no reason and nothing that is missing:

    answer = whole_answer(last_message, (), needs_text=data is None and question is None)

`answer.content` is the clean text without thoughts, and `answer.thoughts` the thoughts that the text held. A Python
function may return what it likes: its values do not pass through here. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.safe_text import clean_text, one_line
from plait.usage import NO_USAGE, Usage

FULL_CONTEXT = "model_context_window_exceeded"
"""Reason for the end of an answer, as servers name it: prompt and answer fill the model's context."""

# The reasons of all wires, in lower case. An answer is whole only with known good reasons: servers keep inventing
# reasons, and one that is not listed counts as cut off.
_WHOLE = frozenset({"stop", "eos", "eos_token", "stop_sequence", "stop_token", "end_turn", "complete", "completed"})
_TOO_LONG = {"length", "max_tokens", "max_output_tokens", "max_length", "model_length", "error_limit", FULL_CONTEXT}
_DECLINED = {"refusal", "safety", "recitation", "prohibited_content", "blocklist", "spii", "sensitive", "language",
             "image_safety", "guardrail_intervened", "error_toxic"}  # fmt: skip
_CALLS = frozenset({"tool_calls", "tool_call", "tool_use", "tool_deferred", "function_call"})
_TOOLS = {*_CALLS, "unexpected_tool_call", "too_many_tool_calls", "malformed_function_call", "malformed_tool_use",
          "malformed_response", "malformed_model_output"}  # fmt: skip
_KINDS: Mapping[str, ErrorKind] = {
    **dict.fromkeys(_TOO_LONG, ErrorKind.TRUNCATED),
    **dict.fromkeys(_DECLINED, ErrorKind.REFUSED),
    **dict.fromkeys(_TOOLS, ErrorKind.INVALID_OUTPUT),
    "max_turn_requests": ErrorKind.LIMIT_REACHED,
}
_CALLED = "the model called a tool, and none was offered to it"
_NO_REASONS = frozenset({"", "null", "none", "unspecified"})
"""Values that some servers send with each piece before the end."""
_BLANK = re.compile(r"[\s\u200b-\u200f\u2060\ufeff]*+")
"""White space, and characters that nobody sees."""
_ENUMERATION = re.compile(r"\A\w*reason[._]")
"""The name of the enumeration before its member, such as `FinishReason.`."""
_JOINED = re.compile(r"(.{3,30}?)\1+")
"""A reason that a library has joined from several pieces of a stream, such as `stopstop`."""


def whole_answer(
    text: str,
    reasons: Iterable[str],
    *,
    missing: str = "",
    refusal: str = "",
    usage: Usage = NO_USAGE,
    max_tokens: int | None = None,
    raise_limit: str = "set a higher `max_tokens` of the backend",
    calls_tool: bool = False,
    needs_text: bool = True,
    has_thought: bool = False,
) -> Message:
    """Return the assistant's message, with its thoughts kept apart from its text.

    `text` is the text of the turn's last message. `reasons` are all reasons for its end, in the order in which they
    came, and the first one that does not stand for a whole answer decides. Without any, the answer is whole unless
    `missing` says what is missing. `refusal` holds the words with which the model declined. `max_tokens` is the limit
    of the request, None if the request has none, and `raise_limit` tells a person how to raise it. `calls_tool` says
    that a call of a tool came last, which the text announces and nobody answers, whatever the reason. `needs_text` is
    false for a turn that may end without text: in a question, or in data that were checked. `has_thought` says that
    thoughts came beside the text, for the message about an answer without text.

    Raises BackendError: `truncated` for an answer that reached a limit of its length, with the text that arrived,
    `refused`, `limit_reached` for an agent's limit, `invalid_output` for an answer without text and for a call of a
    tool that nobody offered, and `transient` for an answer that broke off or ended for a reason that is not known.
    """
    pairs = [(reason, _plain(reason)) for reason in reasons]
    original, reason = next(
        ((original, word) for original, word in pairs if word not in _WHOLE | _NO_REASONS), ("", "")
    )
    kind = kind_of_reason(reason)
    finish = f"finish reason {one_line(original, 60)!r}"
    if refusal.strip():
        raise BackendError(ErrorKind.REFUSED, f"the model declined to answer: {one_line(refusal, 200)}", usage=usage)
    if kind is ErrorKind.REFUSED:
        raise BackendError(kind, f"the model or a filter declined to answer ({finish})", usage=usage)
    if kind is ErrorKind.TRUNCATED:
        raise _truncated(clean_text(text), usage, max_tokens, reason, raise_limit)
    if kind is ErrorKind.INVALID_OUTPUT:
        raise BackendError(kind, f"{_CALLED} ({finish})", usage=usage)
    if kind is ErrorKind.LIMIT_REACHED:
        raise BackendError(kind, f"the limit of model requests in one turn is reached ({finish})", usage=usage)
    if reason:
        what = f"the answer ended with {finish}, which is not known to end a whole answer"
        raise BackendError(ErrorKind.TRANSIENT, what, usage=usage)
    if missing and all(word in _NO_REASONS for _, word in pairs):
        raise BackendError(ErrorKind.TRANSIENT, missing, usage=usage)
    if calls_tool:
        raise BackendError(ErrorKind.INVALID_OUTPUT, _CALLED, usage=usage)
    answer, thoughts = split_thoughts(clean_text(text))
    if needs_text and _BLANK.fullmatch(answer):
        what = "the model's answer is empty" + (": it holds nothing but thoughts" if thoughts or has_thought else "")
        raise BackendError(ErrorKind.INVALID_OUTPUT, what, usage=usage)
    return Message("assistant", answer, usage, thoughts)


def kind_of_reason(reason: str) -> ErrorKind | None:
    """Return the kind of the error of an answer that ended for `reason`; None for a whole answer, or if not known."""
    word = _plain(reason)
    return ErrorKind.REFUSED if word.startswith("content_filter") else _KINDS.get(word)


def is_whole(reasons: Iterable[str]) -> bool:
    """Return whether `reasons`, at least one, end a whole answer: what comes after it is no part of it."""
    words = {_plain(reason) for reason in reasons} - _NO_REASONS
    return bool(words) and words <= _WHOLE


def without_calls(reasons: Iterable[str]) -> list[str]:
    """Return `reasons` without those of a message that ends in a call of a tool, which somebody answers."""
    return [reason for reason in reasons if _plain(reason) not in _CALLS]


def _plain(reason: str) -> str:
    word = _ENUMERATION.sub("", reason.strip().lower())
    joined = _JOINED.fullmatch(word)
    return joined[1] if joined else word


def _truncated(text: str, usage: Usage, max_tokens: int | None, reason: str, raise_limit: str) -> BackendError:
    paid = f"the answer was cut after {usage.output_tokens} tokens" if usage.output_tokens else "the answer was cut"
    answer, thoughts = split_thoughts(text)
    if reason == FULL_CONTEXT:
        advice = "the model's context is full; shorten the prompt, or ask for a shorter answer"
    elif max_tokens is None:
        reached = "the server's own limit, or the model's context, is reached"
        advice = f"{reached}; {raise_limit}, shorten the prompt, or ask for a shorter answer"
    elif usage.output_tokens in {0, max_tokens}:
        advice = f"the backend's `max_tokens: {max_tokens}` is reached; raise it, or ask for a shorter answer"
    else:
        advice = "the model's context or its own limit is reached; shorten the prompt, or ask for a shorter answer"
    messages = (Message("assistant", answer, usage, thoughts),) if text else ()
    return BackendError(ErrorKind.TRUNCATED, f"{paid}: {advice}", usage=usage, messages=messages)


# Thoughts are cut at the beginning of a text, and later where a block of them has lines of its own outside of a code
# block. Anywhere else an answer may speak of the marks, so the text stays as it is. Each pattern takes linear time.
_NAMES = r"(?:\w+[:_])?(?:think(?:ing)?|thoughts?|reasoning)"
_OPENING = re.compile(
    rf"<{_NAMES}>|\[think\]|◁think▷|<\|start_thinking\|>|<\|begin_of_thought\|>|<\|channel>thought|<unused94>thought",
    re.IGNORECASE,
)
_FIRST = re.compile(rf"\s*(?:{_OPENING.pattern})", re.IGNORECASE)
_CLOSINGS = {
    "<|start_thinking|>": "<|end_thinking|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel>thought": "<channel|>",
    "<unused94>thought": "<unused95>",
}
"""The ends of thoughts whose closing mark is not the opening mark with a slash."""
_CLOSING = rf"(?:</{_NAMES}>|\[/think\]|◁/think▷)"
_UNOPENED = re.compile(
    rf"(?:^[ \t]*|(?<=[^\s`'\"(\[{{<>/|])){_CLOSING}(?=\S|[ \t]*[\r\n]\s*\S)"
    rf"|(?<=[.!?…)]) +{_CLOSING}(?=[ \t]*[\r\n]\s*\S)",
    re.IGNORECASE | re.MULTILINE,
)
"""The end of thoughts whose opening mark was a part of the prompt, with an answer behind it."""
_MARKED = re.compile(rf"{_OPENING.pattern}|{_CLOSING}|<\||\A\s*(?:analysis|Here is my thought)", re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_SOLUTION = re.compile(
    r"\s*<\|(?:START_RESPONSE|begin_of_solution)\|>(.*?)(?:<\|(?:END_RESPONSE|end_of_solution)\|>\s*)?\Z", re.DOTALL
)
_WORDS = re.compile(
    r"\s*(?:analysis(?=[A-Z'\"\n])(?P<gpt>.*?)assistantfinal"
    r"|Here is my thought process:(?P<granite>.*?)Here is my response:)",
    re.DOTALL,
)
"""Thoughts between words: the channels of gpt-oss after a server has dropped their brackets, and Granite's."""
_BEGINS_CHANNEL = re.compile(r"\s*(?:<\|start\|>assistant)?<\|channel\|>")
_FINAL_CHANNEL = re.compile(r"(?<![`'\"\w])(?:<\|start\|>assistant)?<\|channel\|>\s*final\b[^<]*<\|message\|>")
_CHANNEL = re.compile(r"(?:<\|start\|>[^<]*+)?<\|channel\|>\s*(\w++)[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>")
_CHANNELS_END = re.compile(r"<\|(?:end|return|call|start)\|>")


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the answer in `text`, and the thoughts of the model that the text holds in a known form."""
    if not _MARKED.search(text):
        return text, ""
    final = _FINAL_CHANNEL.search(text)
    if _BEGINS_CHANNEL.match(text) or (final is not None and not _is_in_code(text[: final.start()])):
        return _by_channel(text)
    thoughts = list[str]()
    start = 1 if text.startswith("\ufeff") else 0
    if (words := _WORDS.match(text, start)) is not None:
        thoughts.append(words["gpt"] or words["granite"] or "")
        start = words.end()
    while True:
        if (opening := _FIRST.match(text, start)) is not None:
            end, after = _closing(text, opening)
            thoughts.append(text[opening.end() : end])
            start = after
        elif (unopened := _UNOPENED.search(text, start)) is not None and not _is_quoted(text[start : unopened.start()]):
            thoughts.append(text[start : unopened.start()])
            start = unopened.end()
        else:
            break
    solution = _SOLUTION.match(text, start) if thoughts else None
    answer = _without_late_blocks(text[start:] if solution is None else solution[1], thoughts)
    return (answer.strip() if thoughts else text), "\n\n".join(one.strip() for one in thoughts if one.strip())


def _closing(text: str, opening: re.Match[str]) -> tuple[int, int]:
    """Return where the thoughts that `opening` begins end, and where the text goes on. Unclosed thoughts take all."""
    mark = opening[0].strip().lower()
    closing = _CLOSINGS.get(mark) or f"{mark[0]}/{mark[1:]}"
    closing = re.escape(closing)
    match = re.compile(rf"(?<![`'\"]){closing}", re.IGNORECASE).search(text, opening.end())  # thoughts may speak of it
    match = match or re.compile(closing, re.IGNORECASE).search(text, opening.end())
    return (len(text), len(text)) if match is None else match.span()


def _is_in_code(before: str) -> bool:
    """Return whether `before` ends within a code block."""
    return len(_FENCE.findall(before)) % 2 == 1


def _is_quoted(before: str) -> bool:
    """Return whether a closing mark after `before` belongs to an opening mark or to a code block."""
    return _OPENING.search(before) is not None or _is_in_code(before)


def _without_late_blocks(text: str, thoughts: list[str]) -> str:
    """Return `text` without the blocks of thoughts on lines of their own, which are added to `thoughts`."""
    pieces, closings = list[str](), dict[str, tuple[int, int]]()
    start = seen = fences = 0
    for opening in _OPENING.finditer(text):
        if opening.start() < start:
            continue
        end, after = closings.get(opening[0], (0, 0))
        if end < opening.end():
            end, after = closings[opening[0]] = _closing(text, opening)
        if end == after:  # never closed: thoughts only if the mark has a line of its own
            if not _is_alone(text, opening):
                continue
            end = after = len(text)
        fences += len(_FENCE.findall(text[seen : opening.start()]))
        seen = opening.start()
        if fences % 2 == 0 and (end == after or _has_own_lines(text, opening.start(), end, after)):
            pieces.append(text[start : opening.start()])
            thoughts.append(text[opening.end() : end])
            start = seen = after
    return "".join(pieces) + text[start:]


def _is_alone(text: str, opening: re.Match[str]) -> bool:
    before, behind = text[max(0, opening.start() - 80) : opening.start()], text[opening.end() : opening.end() + 80]
    return before.rpartition("\n")[2] == "" and behind[:1] in {"\r", "\n"}


def _has_own_lines(text: str, start: int, end: int, after: int) -> bool:
    opens_line, closing_opens_line = (
        not text[max(0, place - 80) : place].rpartition("\n")[2].strip() for place in (start, end)
    )
    ends_line = not text[after : after + 80].partition("\n")[0].strip()
    if opens_line:
        return closing_opens_line or ends_line
    return closing_opens_line and ends_line and text[start - 1] not in "`'\""


def _by_channel(text: str) -> tuple[str, str]:
    """Return the last message of the channel `final`, and the others, which are thoughts."""
    parts = _CHANNEL.split(text)  # text, channel, text, channel, ...
    sections = [("analysis", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
    messages = [(name, _CHANNELS_END.split(words)[0].strip()) for name, words in sections]
    last = max((index for index, (name, _) in enumerate(messages) if name == "final"), default=None)
    thoughts = "\n\n".join(words for index, (_, words) in enumerate(messages) if index != last and words)
    return ("" if last is None else messages[last][1]), thoughts
