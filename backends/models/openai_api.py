"""OpenAI, and every server with its chat completions API.

Requests are streamed: some servers detect a closed connection only while streaming, so streaming makes a cancellation
stop the server's work. A stream that merely ends is no answer: an answer is complete only with a finish reason known to
be good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from plait.backends.backend_protocol import Attachment, ConversationRequest, Output
from plait.backends.json_fields import at, count, counted, is_impossible, number, tables
from plait.backends.models.http_client import Client, Endpoint
from plait.backends.models.model_api import BodyOf, PartialAnswer, RemoteBackend, is_error, json_or_text
from plait.backends.output_schema import in_words
from plait.backends.prices import Billing
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, one_line
from plait.task import ModelOptions
from plait.usage import Usage

DEFAULT_MODEL = "gpt-5.4-mini"
"""Model used if no model is named and the server is OpenAI's own."""
_OLD_LIMIT = "max_tokens"
_USAGE = "stream_options"
"""The field that asks for the usage in the stream."""
# Parts of the names of listed models that do not answer prompts.
_NO_CHAT = ("embed", "whisper", "tts", "rerank")


@dataclass(eq=False)
class OpenAIBackend(RemoteBackend):
    """Chat completions of OpenAI, or of any server with the same API.

    Earlier messages are sent again; the server keeps no history. An output schema is passed to the server, or described
    to the model if the server rejects schemas; the answer is checked, and requested once more if it does not fit.
    Cancelling a turn closes its connection, and the server stops the work. `aclose`, or the end of the event loop,
    closes the connections that are kept for further requests.
    """

    model: str | None = None
    """Model. None for the first model listed by the server that answers prompts, or DEFAULT_MODEL at OpenAI itself."""
    _: KW_ONLY
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key, read at the first conversation. The key is required for OpenAI itself only."""
    system: str | None = field(default=None, repr=False)
    """System prompt."""
    temperature: float | None = None
    """Sampling temperature; None for the server's default."""
    api_version: str | None = None
    """Version of Azure's API, such as "2024-10-21", for Azure's form of addressing. `base_url` is then the URL of the
    resource (`https://NAME.openai.azure.com`), `model` is the deployment, and the key goes into the header `api-key`.
    None for every other server, and for the path `/openai/v1` of Azure.
    """
    _listed_model: str | None = field(default=None, init=False, repr=False)

    url_env: ClassVar[str] = "OPENAI_BASE_URL"
    default_url: ClassVar[str] = "https://api.openai.com/v1"
    headers_env: ClassVar[str] = "OPENAI_CUSTOM_HEADERS"
    named_headers: ClassVar[Mapping[str, str]] = {
        "OPENAI_ORG_ID": "OpenAI-Organization",
        "OPENAI_PROJECT_ID": "OpenAI-Project",
    }

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of calls without a reported cost."""
        return Billing(self._url, self.model, terms=self._terms, max_output_tokens=self.max_tokens)

    async def _prepare(
        self, request: ConversationRequest, messages: Sequence[Message]
    ) -> tuple[str, Sequence[str], BodyOf]:
        own = ModelOptions(self.model, self.system, self.temperature)
        options = request.options.over(own)
        model = options.model or await self._choose_model()
        if options.model is None:
            options = replace(options, model=model)
        texts = [options.system or "", *(message.content for message in messages)]
        url = self._server.url_of("/chat/completions")
        if self.api_version is not None:
            path = f"/openai/deployments/{quote(model, safe='')}/chat/completions"
            url = self._server.url_of(path, urlencode({"api-version": self.api_version}))
        return url, texts, lambda _kept, avoided: self._request(options, request, messages, avoided)

    @property
    def _answer_type(self) -> type[PartialAnswer]:
        return _Answer

    def _headers(self, server: Endpoint) -> Mapping[str, str]:
        if not server.key:
            return {}
        return {"Authorization": f"Bearer {server.key}"} if self.api_version is None else {"api-key": server.key}

    async def _choose_model(self) -> str:
        if self._listed_model:
            return self._listed_model
        if self.api_version is not None:
            raise BackendError(ErrorKind.INVALID_REQUEST, "name the deployment with `model`")
        if not self._is_custom:
            return DEFAULT_MODEL
        self._listed_model = self._first(await self._list(await self.connect()))
        return self._listed_model

    async def _list(self, client: Client) -> list[str]:
        url = self._server.url_of("/models")
        async with client.limit():
            with await client.get(url) as response:
                body = json_or_text(await response.read())
        if response.status >= 300:
            raise self._server.status_error(response.status, response.headers, body, url)
        listed = at(body, "data") or []
        names = [name for model in tables(body, "data") if isinstance(name := model.get("id"), str)]
        if isinstance(body, dict) and isinstance(listed, list) and len(names) == len(listed):
            return names
        text = f"{self._server.name} does not list its models in the form of this API; check base_url, or name a model"
        raise BackendError(ErrorKind.INVALID_REQUEST, text)

    def _first(self, names: Sequence[str]) -> str:
        model = next((name for name in names if not any(word in name.lower() for word in _NO_CHAT)), None)
        if model is None:
            others = f" that answers prompts ({one_line(', '.join(names), 80)})" if names else ""
            text = f"{self._server.name} lists no model{others}; name one with `model`"
            raise BackendError(ErrorKind.INVALID_REQUEST, text)
        return model

    def _request(
        self, options: ModelOptions, request: ConversationRequest, messages: Sequence[Message], avoided: Set[str]
    ) -> dict[str, Any]:
        schema = request.output_schema
        words = "" if schema is None else in_words(schema)
        system = "\n\n".join(clean_text(text) for text in (options.system, words if words in avoided else "") if text)
        sent: list[dict[str, Any]] = [{"role": message.role, "content": message.content} for message in messages]
        if request.attachments:
            prompt = sent[len(request.history)]
            files = map(_part, request.attachments)
            prompt["content"] = [*files, {"type": "text", "text": prompt["content"]}]
        if system:
            sent.insert(0, {"role": "system", "content": system})
        # OpenAI's newer models reject the limit's old name; many other servers support only the old name.
        limit = _OLD_LIMIT if self._is_custom and _OLD_LIMIT not in avoided else "max_completion_tokens"
        body: dict[str, Any] = {
            "model": options.model,
            "messages": sent,
            "stream": self.stream,
            **(self.extra or {}),
        }
        if self.stream and _USAGE not in avoided:
            body[_USAGE] = {"include_usage": True}
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if self.max_tokens is not None:
            body[limit] = self.max_tokens
        if schema is not None and words not in avoided:
            wanted = {"name": "answer", "schema": dict(schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return body

    def _to_avoid(self, complaint: str, request: ConversationRequest) -> set[str]:
        if _USAGE in complaint:
            return {_USAGE}
        limit = {_OLD_LIMIT} if "max_completion_tokens" in complaint else set[str]()
        return limit | super()._to_avoid(complaint, request)


@dataclass(eq=False)
class _Answer(PartialAnswer):
    """An answer assembled chunk by chunk. Lenient servers omit fields, so every field is treated as optional."""

    texts: list[str] = field(default_factory=list[str])
    choice: JsonValue = None
    """The index of the choice that is the answer: the first one to arrive."""
    has_deltas: bool = False
    """Whether a piece of text has arrived as `delta`."""
    api: ClassVar[str] = "chat completions"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take_whole(self, answer: JsonValue) -> None:
        if not isinstance(answer, dict) or not answer.get("choices") or is_error(answer):
            raise self.server.no_answer(answer, self.url)
        self.pieces += 1
        self._add(answer, "")

    def _add(self, event: Mapping[str, JsonValue], name: str) -> bool:  # noqa: ARG002 - a chunk has no name
        if self.shared is not None:
            self.shared.begin()
        if self.model is None:
            self.note_model(event.get("model"))
        choice = self._chosen(event.get("choices"))
        # Moonshot counts in the choice, and Groq in a field of its own.
        for usage in (event.get("usage"), at(choice, "usage"), at(event.get("x_groq"), "usage")):
            if usage:
                odd = is_impossible(usage, "prompt_tokens") or is_impossible(usage, "completion_tokens")
                self.note_usage(_usage(usage), is_impossible=odd)
        if choice is not None:
            self._choose(choice, is_whole=event.get("object") == "chat.completion")
        return False

    def _chosen(self, choices: JsonValue) -> Mapping[str, JsonValue] | None:
        """Return the choice that is the answer; None if it is not among `choices`."""
        for place, one in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(one, dict):
                index = one.get("index", place)
                if self.choice is None:
                    self.choice = index
                if index == self.choice:
                    return one
        return None

    def _choose(self, choice: Mapping[str, JsonValue], *, is_whole: bool) -> None:
        """Add a chunk of the choice. A `delta` holds a piece, a `message` the whole text, or all of it so far."""
        if choice.get("error"):
            self.is_open = self.begun
            raise self.server.broken_off(dict(choice), begun=self.begun)
        piece = whole = ""
        for name in ("delta", "message"):
            part = choice.get(name)
            if not isinstance(part, dict):
                continue
            # Thoughts are a part of the answer, too, under many names; the role alone is none.
            if not self.begun:
                self.begun = any(value for name, value in part.items() if name != "role")
            if part.get("content"):
                self.calls_tool = False
            if part.get("tool_calls") or part.get("function_call"):
                self.calls_tool = True
            if part.get("refusal"):
                self.refusals.append(_text(part["refusal"]))
            content = part.get("content")
            text = content if isinstance(content, str) else _text(content)
            if name == "delta":
                piece = text
            else:
                whole = text
        if piece and whole and whole == self.text and choice.get("finish_reason"):
            pass  # the last chunk repeats the whole text as a piece, too
        elif piece:
            self.has_deltas = True
            self._say(piece)
        elif whole:
            before = self.text
            if whole.startswith(before):
                self._say(whole[len(before) :])
            elif is_whole or self.has_deltas:
                self.texts = [whole]
            else:  # pieces that are called messages
                self._say(whole)
        if choice.get("finish_reason"):
            self.reasons.append(str(choice["finish_reason"]))

    def _say(self, piece: str) -> None:
        if piece:
            self.texts.append(piece)
            self.request.on_output(Output("text", clean_text(piece)))


def _part(file: Attachment) -> dict[str, Any]:
    """Return the file as a part of a message."""
    url = f"data:{file.media_type};base64,{file.base64}"
    if file.media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"filename": file.name, "file_data": url}}


def _cost(usage: JsonValue) -> float | None:
    """Return the cost in a server's `usage`; None if unknown. With a key of the user's own (`is_byok`), the cost of
    OpenRouter is its fee, beside the cost of the provider.
    """
    # Perplexity sends an object, and DeepInfra another name.
    costs = [number(usage, *path) for path in (("cost",), ("cost", "total_cost"), ("estimated_cost",))]
    cost = next((one for one in costs if one is not None), None)
    if at(usage, "is_byok") is not True:
        return cost
    upstream = number(usage, "cost_details", "upstream_inference_cost")
    return None if upstream is None else upstream + (cost or 0.0)


def _usage(usage: JsonValue) -> Usage:
    """Return the counts of a server's `usage`. Values that are not counts, as sent by some gateways, are ignored.

    Some servers (xAI, Gemini) count reasoning beside `completion_tokens`: only the total then shows all output.
    """
    read, written = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    beside = max(0, count(usage, "total_tokens") - read - written)
    # DeepSeek and Moonshot have fields of their own.
    cached = count(usage, "prompt_tokens_details", "cached_tokens")
    cached = cached or count(usage, "prompt_cache_hit_tokens") or count(usage, "cached_tokens")
    return counted(
        read,
        written + beside,
        _cost(usage),
        cache_read=cached,
        cache_write=count(usage, "prompt_tokens_details", "cache_write_tokens"),
        reasoning=max(beside, count(usage, "completion_tokens_details", "reasoning_tokens")),
    )


def _text(content: JsonValue) -> str:
    """Return the text of a delta's content. Mistral's thinking models send a list of parts, including thoughts."""
    if isinstance(content, str):
        return content
    texts: list[JsonValue] = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type", "text") in {"text", "output_text"}
        texts.append(at(part, "text") if is_text else part)
    return "".join(text for text in texts if isinstance(text, str))
