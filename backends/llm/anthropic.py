"""Anthropic, and servers with its messages API, on the official SDK. Always streamed: see openai.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.llm.base import RemoteBackend, StreamUsage, in_words
from plait.backends.llm.openai import length_message
from plait.backends.llm.sdk import expect_events
from plait.backends.protocol import ConversationRequest, Message, Output
from plait.backends.text import clean_text, one_line

DEFAULT_MODEL = "claude-haiku-4-5"
"""Model used if no model is named."""
# Tokens read from or written to the prompt cache are counted separately.
_READ = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@dataclass(eq=False)
class AnthropicBackend(RemoteBackend):
    """The messages API through the `anthropic` SDK (extra `anthropic`), which the first conversation imports.

    To continue a conversation, earlier messages are sent again; the server keeps no history. An output schema is passed
    to the server as far as the API can express the schema, and described to the model otherwise. The answer is checked,
    and requested once more if it does not fit. The SDK's own retries are off. Cancelling a turn closes its connection.

    `aclose` and `async with` free the client; not freeing the client before the program's end is harmless.
    """

    model: str | None = None
    """Model; None for DEFAULT_MODEL."""
    _: KW_ONLY
    api_key_env: str = "ANTHROPIC_API_KEY"
    """Environment variable with the key, read at the first conversation. The key is required for Anthropic itself only.
    """
    system: str | None = field(default=None, repr=False)
    """System prompt."""
    temperature: float | None = None
    """Sampling temperature; None for the server's default. Newer models do not accept a temperature."""
    max_tokens: int = 16_384
    """Limit of one answer, in tokens."""

    package: ClassVar[str] = "anthropic"
    client_class: ClassVar[str] = "AsyncAnthropic"
    url_env: ClassVar[str] = "ANTHROPIC_BASE_URL"
    default_url: ClassVar[str] = "https://api.anthropic.com"

    async def _ask(
        self, client: Any, request: ConversationRequest, messages: Sequence[Message], spent: StreamUsage
    ) -> Message:
        answer = _Answer(request, spent)
        build = partial(self._request, request, messages)
        async with await self._begin(client.messages.create, build, request) as stream:
            await expect_events(stream.response, self._server)
            async for event in stream:
                answer.add(event)
        return answer.finish(self.max_tokens)

    def _request(self, request: ConversationRequest, messages: Sequence[Message], avoided: Set[str]) -> dict[str, Any]:
        systems = [self.system or "", *(message.content for message in messages if message.role == "system")]
        # Fields unknown to some versions of the SDK are put into the body directly.
        body: dict[str, Any] = dict(self.extra or {})
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if request.output_schema is not None:
            words = in_words(request.output_schema)
            wanted = None if words in avoided else _native_schema(request.output_schema)
            if wanted is None:
                systems.append(words)
            else:
                own: Any = body.get("output_config", {})
                body["output_config"] = {**own, "format": {"type": "json_schema", "schema": wanted}}
        arguments: dict[str, Any] = {
            "model": self.model or DEFAULT_MODEL,
            "max_tokens": self.max_tokens,
            # The API rejects empty messages.
            "messages": [{"role": m.role, "content": m.content} for m in messages if m.role != "system" and m.content],
            "stream": True,
            "extra_body": body,
        }
        system = "\n\n".join(clean_text(text) for text in systems if text)
        return {**arguments, "system": system} if system else arguments


class _Answer:
    """An answer assembled event by event."""

    def __init__(self, request: ConversationRequest, spent: StreamUsage) -> None:
        self._request = request
        self._spent = spent
        self._texts: list[str] = []
        self._reason: str | None = None
        self._why = ""
        self._events = 0

    def add(self, event: Any) -> None:
        self._events += 1
        kind = getattr(event, "type", None)
        if kind == "message_start":
            self._spent.note(getattr(event.message, "usage", None), read=_READ, written="output_tokens")
            self._spent.note_model(getattr(event.message, "model", None))
        elif kind == "content_block_delta" and getattr(event.delta, "type", None) == "text_delta":
            self._texts.append(event.delta.text)
            self._request.on_output(Output("text", clean_text(event.delta.text)))
        elif kind == "message_delta":
            self._reason = event.delta.stop_reason or self._reason
            self._why = getattr(getattr(event.delta, "stop_details", None), "explanation", None) or self._why
            self._spent.note(getattr(event, "usage", None), read=_READ, written="output_tokens")

    def finish(self, max_tokens: int) -> Message:
        """Return the whole message. Raises BackendError if the answer is not whole."""
        if self._reason in {"end_turn", "stop_sequence"}:
            return Message("assistant", clean_text("".join(self._texts)), self._spent.usage)
        if self._reason == "refusal":
            why = f": {one_line(self._why, 200)}" if self._why else ""
            raise BackendError(ErrorKind.REFUSED, f"the model declined to answer{why}")
        if self._reason == "max_tokens":
            raise BackendError(ErrorKind.CONTEXT_OVERFLOW, length_message(max_tokens, self._spent.usage.output_tokens))
        if self._reason == "model_context_window_exceeded":
            raise BackendError(ErrorKind.CONTEXT_OVERFLOW, "the answer was cut: the model's context is full")
        if self._reason is not None:
            raise BackendError(ErrorKind.UNEXPECTED, f"the answer ended with stop reason {self._reason!r}")
        if not self._events:
            text = "the server's answer held no events; is base_url the URL of a messages API?"
            raise BackendError(ErrorKind.TRANSIENT, text)
        raise BackendError(ErrorKind.TRANSIENT, f"the answer broke off after {self._events} events, no stop reason")


def _native_schema(schema: Mapping[str, object]) -> dict[str, Any] | None:
    """Return `schema` in the part of JSON Schema supported by the API; None if that part cannot express the schema."""
    from anthropic import transform_schema  # noqa: PLC0415 - the SDK is imported on first use

    try:
        return transform_schema(dict(schema)) if _Expressible(schema).holds() else None
    except (AssertionError, AttributeError, RecursionError, TypeError, ValueError):
        return None


# Keywords that the SDK moves into the description, where the rest then forbids values that the schema allows, or has a
# dangling reference.
_BEYOND = frozenset({"definitions", "$anchor", "patternProperties", "allOf", "if", "not"})
# The SDK closes each object, so at most one of these keywords may describe a value.
_SHAPES = frozenset({"properties", "anyOf", "oneOf", "$ref"})
_LOCAL = "#/$defs/"


class _Expressible:
    """Checks whether the API can be given a schema: the SDK must neither break nor narrow the schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._defs: Mapping[str, Any] = schema.get("$defs") or {}
        self._open: list[str] = []
        self._good: set[str] = set()

    def holds(self) -> bool:
        return self._fits(self._schema) and all(map(self._refers_well, (_LOCAL + name for name in self._defs)))

    def _fits(self, schema: Mapping[str, Any]) -> bool:
        if _BEYOND & schema.keys() or len(_SHAPES & schema.keys()) > 1:
            return False
        if schema.get("additionalProperties", False) is not False:
            return False
        if schema.get("type") == "object" and not schema.get("properties"):
            return False  # an object with any keys, which the SDK would turn into an empty object
        return all(map(self._fits, _parts(schema))) and ("$ref" not in schema or self._refers_well(schema["$ref"]))

    def _refers_well(self, reference: str) -> bool:
        name = reference.removeprefix(_LOCAL)
        if name in self._good:
            return True
        if name == reference or name not in self._defs or name in self._open:
            return False
        self._open.append(name)
        fits = self._fits(self._defs[name])
        self._open.pop()
        self._good |= {name} if fits else set()
        return fits


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the direct subschemas of `schema` that are passed to the API."""
    items = [schema["items"]] if "items" in schema else []
    return [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("oneOf", ()), *items]
