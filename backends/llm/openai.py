"""OpenAI, and every server with its chat completions API.

Requests are streamed: some servers detect a closed connection only while streaming, so streaming makes a cancellation
stop the server's work. A stream that merely ends is no answer: an answer is complete only with a finish reason known to
be good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast
from urllib.parse import quote, urlencode

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.json_fields import at, count, number, parse, tables
from plait.backends.llm.base import PartialAnswer, RemoteBackend, StreamUsage, in_words, json_or_text
from plait.backends.llm.client import Client
from plait.backends.llm.endpoint import Endpoint
from plait.backends.llm.server_errors import broken_off, no_answer, status_error
from plait.backends.llm.sse import ServerEvent
from plait.backends.prices import Billing
from plait.backends.protocol import Attachment, ConversationRequest, JsonValue, Message, ModelOptions, Output, Usage
from plait.backends.text import clean_text, one_line

DEFAULT_MODEL = "gpt-5.4-mini"
"""Model used if no model is named and the server is OpenAI's own."""
_OLD_LIMIT = "max_tokens"
# Parts of the names of listed models that do not answer prompts.
_NO_CHAT = ("embed", "whisper", "tts", "rerank")


@dataclass(eq=False)
class OpenAIBackend(RemoteBackend):
    """Chat completions of OpenAI, or of any server with the same API.

    To continue a conversation, earlier messages are sent again; the server keeps no history. An output schema is passed
    to the server, or described to the model if the server rejects schemas. The answer is checked, and requested once
    more if it does not fit. Cancelling a turn closes its connection, and the server then stops the work.

    `aclose` and `async with` close the connections kept for further requests; without them, the connections close with
    the event loop.
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
    max_tokens: int | None = None
    """Limit of one answer, in tokens; None for the server's default."""
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
        return Billing(self._url, self.model, terms=self._terms)

    async def _ask(
        self, client: Client, request: ConversationRequest, messages: Sequence[Message], spent: StreamUsage
    ) -> Message:
        own = ModelOptions(self.model, self.system, self.temperature)
        options = request.options.over(own)
        model = options.model or await self._choose_model(client)
        if options.model is None:
            options = replace(options, model=model)
        build = partial(self._request, options, request, messages)
        url = self._url_for(model)
        texts = [options.system or "", *(message.content for message in messages)]
        async with self._sharing(request, texts, repeats=len(messages) > len(request.history) + 1) as shared:
            answer = _Answer(request, spent, self._server, url, shared)
            async with client.limit():
                spent.is_open = True
                with await self._answered(client, url, build, request) as response:
                    await response.receive(answer.take, answer.take_whole)
                spent.is_open = not answer.reasons
        return answer.finish(self.max_tokens)

    def _headers(self, server: Endpoint) -> Mapping[str, str]:
        if not server.key:
            return {}
        return {"Authorization": f"Bearer {server.key}"} if self.api_version is None else {"api-key": server.key}

    def _url_for(self, model: str) -> str:
        if self.api_version is None:
            return self._server.url_of("/chat/completions")
        path = f"/openai/deployments/{quote(model, safe='')}/chat/completions"
        return self._server.url_of(path, urlencode({"api-version": self.api_version}))

    async def _choose_model(self, client: Client) -> str:
        if self._listed_model:
            return self._listed_model
        if self.api_version is not None:
            raise BackendError(ErrorKind.INVALID_REQUEST, "name the deployment with `model`")
        if not self._is_custom:
            return DEFAULT_MODEL
        self._listed_model = self._first(await self._list(client))
        return self._listed_model

    async def _list(self, client: Client) -> list[str]:
        url = self._server.url_of("/models")
        async with client.limit():
            with await client.get(url) as response:
                body = json_or_text(await response.read())
        if response.status >= 300:
            raise status_error(response.status, response.headers, body, url, self._server)
        listed = at(body, "data") or []
        names = [name for model in tables(body, "data") if isinstance(name := model.get("id"), str)]
        if isinstance(body, dict) and isinstance(listed, list) and len(names) == len(listed):
            return names
        text = f"{self._server.name} does not list its models in the form of this API; check base_url, or name a model"
        raise BackendError(ErrorKind.INVALID_REQUEST, text)

    def _first(self, names: Sequence[str]) -> str:
        found = next((name for name in names if not any(word in name.lower() for word in _NO_CHAT)), None)
        if found is None:
            others = f" that answers prompts ({one_line(', '.join(names), 80)})" if names else ""
            text = f"{self._server.name} lists no model{others}; name one with `model`"
            raise BackendError(ErrorKind.INVALID_REQUEST, text)
        return found

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
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if self.max_tokens is not None:
            body[limit] = self.max_tokens
        if schema is not None and words not in avoided:
            wanted = {"name": "answer", "schema": dict(schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return body

    def _to_avoid(self, complaint: str, request: ConversationRequest) -> set[str]:
        limit = {_OLD_LIMIT} if "max_completion_tokens" in complaint else set[str]()
        return limit | super()._to_avoid(complaint, request)


@dataclass(eq=False)
class _Answer(PartialAnswer):
    """An answer assembled chunk by chunk. Lenient servers omit fields, so every field is treated as optional."""

    api = "chat completions"

    def take(self, event: ServerEvent) -> bool:
        """Add the chunk in `event`. Returns whether the event ends the stream. Raises BackendError for an error."""
        if event.data.startswith(b"[DONE]"):
            return True
        chunk = parse(event.data.decode())
        if isinstance(chunk, dict):
            # An object "error": vLLM.
            if chunk.get("error") or chunk.get("object") == "error" or event.name == "error":
                self.spent.is_open = self.begun
                raise broken_off(chunk, self.server, begun=self.begun)
            self._add(chunk)
        return False

    def take_whole(self, answer: JsonValue) -> None:
        """Add the whole `answer`, sent in one piece. Raises BackendError if there is none in it."""
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise no_answer(answer, self.url, self.server)
        self._add(answer)

    def _add(self, chunk: Mapping[str, JsonValue]) -> None:
        self.pieces += 1
        if self.shared is not None:
            self.shared.begin()
        if chunk.get("usage"):
            self.spent.note(_usage(chunk["usage"]))
        if self.spent.model is None:
            self.spent.note_model(chunk.get("model"))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            # An answer in one piece holds a message.
            delta = choice.get("delta") or choice.get("message")
            if isinstance(delta, dict):
                # Thoughts are a part of the answer, too, under many names; the role alone is none.
                if not self.begun:
                    self.begun = any(value for name, value in delta.items() if name != "role")
                content = delta.get("content")
                text = content if isinstance(content, str) else _text(content)
                if text:
                    self.texts.append(text)
                    self.request.on_output(Output("text", clean_text(text)))
                if delta.get("refusal"):
                    self.refusals.append(_text(delta["refusal"]))
            if choice.get("finish_reason"):
                self.reasons.append(str(choice["finish_reason"]))


def _part(file: Attachment) -> dict[str, Any]:
    """Return the file as a part of a message."""
    url = f"data:{file.media_type};base64,{file.base64}"
    if file.media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"filename": file.name, "file_data": url}}


def _usage(told: JsonValue) -> Usage:
    """Return the counts of a server's `usage`. Values that are not counts, as sent by some gateways, are ignored.

    Some servers (xAI, Gemini) count reasoning beside `completion_tokens`: only the total then shows all output.
    """
    read, written = count(told, "prompt_tokens"), count(told, "completion_tokens")
    beside = max(0, count(told, "total_tokens") - read - written)
    # DeepSeek has a field of its own.
    cached = count(told, "prompt_tokens_details", "cached_tokens") or count(told, "prompt_cache_hit_tokens")
    cached = min(cached, read)
    return Usage(
        read,
        written + beside,
        number(told, "cost"),
        cache_read_tokens=cached,
        cache_write_tokens=min(count(told, "prompt_tokens_details", "cache_write_tokens"), read - cached),
        reasoning_tokens=min(
            max(beside, count(told, "completion_tokens_details", "reasoning_tokens")), written + beside
        ),
    )


def _text(content: Any) -> str:
    """Return the text of a delta's content. Mistral's thinking models send a list of parts, including thoughts."""
    if isinstance(content, str):
        return content
    parts = cast("list[object]", content) if isinstance(content, list) else [content]
    texts = [at(cast("JsonValue", part), "text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
