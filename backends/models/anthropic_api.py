"""Anthropic, and servers with its messages API. Streamed for the reason given in `openai_api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from typing import Any, ClassVar

from plait.backends.backend_protocol import Attachment, ConversationRequest, Output
from plait.backends.json_fields import at, is_impossible, tables, text, usage_beside_cache
from plait.backends.models.http_client import Endpoint
from plait.backends.models.model_api import BodyOf, PartialAnswer, RemoteBackend, is_error
from plait.backends.output_schema import in_words
from plait.backends.prices import Billing
from plait.dialogue import Message
from plait.json_form import JsonValue
from plait.safe_text import clean_text
from plait.task import ModelOptions

DEFAULT_MODEL = "claude-haiku-4-5"
"""Model used if no model is named."""
_WORD = 200
"""Most characters by which a mark of the cache moves to the end of a word."""
_VERSION = "2023-06-01"
"""Version of the API, sent as `anthropic-version`."""


@dataclass(eq=False)
class AnthropicBackend(RemoteBackend):
    """The messages API of Anthropic, or of any server with the same API.

    Works as `OpenAIBackend` does. An output schema is passed to the server as far as the API can express it, and
    described to the model otherwise.
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
    max_tokens: int = 16_384  # pyright: ignore[reportIncompatibleVariableOverride] - this API cannot do without
    """Limit of one answer, in tokens."""

    needs_cache_marks: ClassVar[bool] = True
    url_env: ClassVar[str] = "ANTHROPIC_BASE_URL"
    default_url: ClassVar[str] = "https://api.anthropic.com"
    headers_env: ClassVar[str] = "ANTHROPIC_CUSTOM_HEADERS"

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of calls without a reported cost."""
        model = self.model or DEFAULT_MODEL
        return Billing(self._url, model, terms=self._terms, max_output_tokens=self.max_tokens)

    async def _prepare(
        self, request: ConversationRequest, messages: Sequence[Message]
    ) -> tuple[str, Sequence[str], BodyOf]:
        texts = [_system(self._options(request), messages), *(turn.content for turn in _turns(messages))]
        return self._server.url_of("/v1/messages"), texts, partial(self._request, request, messages)

    @property
    def _answer_type(self) -> type[PartialAnswer]:
        return _Answer

    def _headers(self, server: Endpoint) -> Mapping[str, str]:
        key = {"x-api-key": server.key} if server.key else {}
        return {"anthropic-version": _VERSION, **key}

    def _options(self, request: ConversationRequest) -> ModelOptions:
        return request.options.over(ModelOptions(self.model or DEFAULT_MODEL, self.system, self.temperature))

    def _request(
        self, request: ConversationRequest, messages: Sequence[Message], shared: int, avoided: Set[str]
    ) -> dict[str, Any]:
        """Return the body of a request. `shared` is the length in characters of the beginning of the prompt, system
        prompt included, to be kept by the server; 0 for none.
        """
        options, turns = self._options(request), _turns(messages)
        system = _system(options, messages)
        texts: list[Any] = [turn.content for turn in turns]
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            **(self.extra or {}),
        }
        if options.temperature is not None:
            body["temperature"] = options.temperature
        words = ""
        if request.output_schema is not None:
            words = in_words(request.output_schema)
            wanted = None if words in avoided else native_schema(request.output_schema)
            if wanted is not None:
                own: Any = body.get("output_config", {})
                body["output_config"] = {**own, "format": {"type": "json_schema", "schema": wanted}}
                words = ""
        whole = "\n\n".join(text for text in (system, clean_text(words)) if text)
        if self._cache is not None and not request.attachments:
            ends = _ends_of_conversation(request, len(texts))
            start = len(system)
            for index, text in enumerate(texts):
                if index in ends:
                    texts[index] = _kept(text, len(text))
                elif start < shared <= start + len(text) and not any(index < end for end in ends):
                    texts[index] = _kept(text, shared - start)
                start += len(text)
        if request.attachments:
            index = len(_turns(request.history))
            texts[index] = [*map(_file_block, request.attachments), _block(texts[index])]
        body["messages"] = [{"role": turn.role, "content": text} for turn, text in zip(turns, texts, strict=True)]
        if whole:
            body["system"] = _kept(whole, shared) if 0 < shared <= len(system) else whole
        return body


def _system(options: ModelOptions, messages: Sequence[Message]) -> str:
    texts = [options.system or "", *(message.content for message in messages if message.role == "system")]
    return "\n\n".join(clean_text(text) for text in texts if text)


def _turns(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without those of the system. The API rejects empty messages."""
    return [message for message in messages if message.role != "system" and message.content]


def _ends_of_conversation(request: ConversationRequest, turns: int) -> list[int]:
    """Return the indices of the turns up to which another request has read or will read the conversation."""
    before = len(_turns(request.history))
    return [index for index, is_end in ((before - 1, before), (turns - 1, request.continued_later)) if is_end]


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _file_block(file: Attachment) -> dict[str, Any]:
    source = {"type": "base64", "media_type": file.media_type, "data": file.base64}
    if file.media_type.startswith("image/"):
        return {"type": "image", "source": source}
    return {"type": "document", "source": source, "title": file.name}


def _kept(text: str, length: int) -> str | list[dict[str, Any]]:
    """Return `text` as blocks, of which the server is to keep the first: about `length` characters, whole words where
    the language has spaces. The API rejects blank blocks, so a text without a part to keep is returned as it is.
    """
    end = len(text)
    if length < end:
        end = max(text.rfind(mark, max(0, length - _WORD), length) for mark in "\n ") + 1 or length
    if not text[end:].strip():
        end = len(text)
    if not text[:end].strip():
        return text
    block = {**_block(text[:end]), "cache_control": {"type": "ephemeral"}}
    return [block, _block(text[end:])] if text[end:] else [block]


@dataclass(eq=False)
class _Answer(PartialAnswer):
    """An answer assembled event by event."""

    blocks: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """The text of each block, in pieces, by the block's index."""
    block: int = 0
    """The index of the last block that began."""
    message: JsonValue = None
    """The id of the message."""
    api: ClassVar[str] = "messages"

    @property
    def text(self) -> str:
        return "".join(piece for index in sorted(self.blocks) for piece in self.blocks[index])

    def take_whole(self, answer: JsonValue) -> None:
        content = at(answer, "content")
        if content is None or is_error(answer):
            raise self.server.no_answer(answer, self.url)
        self.pieces += 1
        self._begin(answer)
        for index, block in enumerate([{"text": content}] if isinstance(content, str) else tables(answer, "content")):
            self._add_text(index, block)
        self._end(answer, None)

    def _add(self, event: Mapping[str, JsonValue], name: str) -> bool:
        kind = at(event, "type") or name
        if kind == "message_start":
            if self.shared is not None:
                self.shared.begin()
            self._begin(at(event, "message"))
            for number, block in enumerate(() if self.blocks else tables(event, "message", "content")):
                self._add_text(number, block)
        elif kind in {"content_block_start", "content_block_delta"}:
            index = at(event, "index")
            part = at(event, "content_block" if kind == "content_block_start" else "delta")
            if kind == "content_block_start":
                self.block = index if type(index) is int else self.block + bool(self.blocks)
                self.blocks[self.block] = []
            else:
                self.begun = True  # a thought is a part of the answer, too
            self._add_text(index if type(index) is int else self.block, part)
        elif kind == "message_delta":
            self._end(at(event, "delta"), at(event, "usage"))
        return kind == "message_stop"

    def _begin(self, message: JsonValue) -> None:
        """Begin a message. One with another id comes in place of the message before, such as after a second try."""
        name = at(message, "id")
        if name is None or name != self.message:
            self.blocks, self.block, self.message, self.calls_tool = {}, 0, name, False
        self._count(at(message, "usage"))
        self.note_model(at(message, "model"))

    def _add_text(self, index: int, part: JsonValue | Mapping[str, JsonValue]) -> None:
        piece = at(part, "text")
        if at(part, "type") == "tool_use":
            self.calls_tool = True
        if at(part, "type") in {None, "text", "text_delta"} and isinstance(piece, str) and piece:
            self.begun, self.calls_tool = True, False
            self.blocks.setdefault(index, []).append(piece)
            self.request.on_output(Output("text", clean_text(piece)))

    def _end(self, delta: JsonValue, usage: JsonValue) -> None:
        reason = text(delta, "stop_reason")
        if reason:
            self.reasons.append(reason)
        if reason == "refusal":
            self.refusals.append(text(delta, "stop_details", "explanation"))
        self._count(usage)

    def _count(self, usage: JsonValue) -> None:
        odd = is_impossible(usage, "input_tokens") or is_impossible(usage, "output_tokens")
        self.note_usage(usage_beside_cache(usage), is_impossible=odd)


# The part of JSON Schema that the API accepts as an output format: each object is closed, `anyOf` is the only combining
# keyword, and limits such as `minimum` are refused. A keyword that the API refuses moves into the description, as the
# vendor's own client does: the model may follow it, and the answer is checked against the whole schema anyway.

_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"})
# Keywords without which the rest forbids values that the schema allows, or has a dangling reference.
_BEYOND = frozenset({"$defs", "definitions", "$anchor", "patternProperties", "allOf", "if", "not"})
# Each object is closed, so at most one of these keywords may describe a value.
_SHAPES = frozenset({"properties", "anyOf", "oneOf", "$ref"})
_LOCAL = "#/$defs/"


def native_schema(schema: Mapping[str, object]) -> dict[str, Any] | None:
    """Return `schema` in the part of JSON Schema supported by the API; None if that part cannot express the schema, so
    that the translation would break or narrow it.
    """
    try:
        return _with_definitions(schema)
    except (AttributeError, RecursionError, TypeError, ValueError):  # a schema of another shape than JSON Schema's
        return None


def _with_definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(schema)
    definitions: Mapping[str, Any] = rest.pop("$defs", {})
    references: dict[str, set[str]] = {name: set() for name in ("", *definitions)}
    strict = _strict(rest, references[""])
    if "$defs" in schema:
        strict["$defs"] = {name: _strict(one, references[name]) for name, one in definitions.items()}
    if set().union(*references.values()) - set(definitions):
        raise ValueError("a reference points to no definition")
    TopologicalSorter(references).prepare()  # raises ValueError for a schema that refers to itself
    return strict


def _strict(schema: Mapping[str, Any], references: set[str]) -> dict[str, Any]:
    """Return `schema` in the supported part, and add the definitions that it refers to to `references`. Raises
    ValueError if the part cannot express the schema.
    """
    if _BEYOND & schema.keys() or len(_SHAPES & schema.keys()) > 1:
        raise ValueError("the schema combines what closed objects cannot")
    if schema.get("additionalProperties", False) is not False:
        raise ValueError("an object is open")
    if schema.get("type") == "object" and not schema.get("properties"):
        raise ValueError("an object with any keys would become an empty object")
    rest = dict(schema)
    if "$ref" in rest:
        name = rest["$ref"].removeprefix(_LOCAL)
        references.add("" if name == rest["$ref"] else name)
        return {"$ref": rest["$ref"]}
    strict: dict[str, Any] = {}
    kind, literals = rest.pop("type", None), _take_literals(rest)
    first, second = rest.pop("anyOf", None), rest.pop("oneOf", None)
    variants = second if first is None else first
    if variants is not None:
        strict["anyOf"] = [_strict(one, references) for one in variants]
    elif literals:
        kind = None
    elif kind not in _TYPES:
        raise ValueError("the schema says no type")
    else:
        strict["type"] = kind
    strict |= literals
    strict |= {name: rest.pop(name) for name in ("description", "title") if rest.get(name) is not None}
    if not literals:
        strict |= _take_members(kind, rest, references)
    if rest:
        limits = "{" + ", ".join(f"{name}: {value}" for name, value in rest.items()) + "}"
        strict["description"] = "\n\n".join(one for one in (strict.get("description"), limits) if one)
    return strict


def _take_literals(rest: dict[str, Any]) -> dict[str, Any]:
    """Return `enum` and `const` as far as they hold plain values, and remove them from `rest`."""
    literals: dict[str, Any] = {}
    if isinstance(rest.get("enum"), list) and rest["enum"] and all(map(_is_plain, rest["enum"])):
        literals["enum"] = rest.pop("enum")
    if "const" in rest and _is_plain(rest["const"]):
        literals["const"] = rest.pop("const")
    return literals


def _take_members(kind: object, rest: dict[str, Any], references: set[str]) -> dict[str, Any]:
    """Return the keywords for values of type `kind` that the API supports, and remove them from `rest`."""
    if kind == "object":
        rest.pop("additionalProperties", None)
        members: dict[str, Any] = {name: _strict(one, references) for name, one in rest.pop("properties", {}).items()}
        required = {"required": rest.pop("required")} if rest.get("required") is not None else {}
        return {"properties": members, "additionalProperties": False, **required}
    if kind == "string" and rest.get("format") in _FORMATS:
        return {"format": rest.pop("format")}
    if kind == "array":
        items = {"items": _strict(rest.pop("items"), references)} if "items" in rest else {}
        least = {"minItems": rest.pop("minItems")} if rest.get("minItems") in {0, 1} else {}
        return {**items, **least}
    return {}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)
