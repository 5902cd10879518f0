"""The other two protocols: OpenAI's chat completions and Gemini's."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tests.real_agents.script import Answer, Asked, Json, Said
from tests.real_agents.wire import PAUSE, Anthropic, Events, Responses, Wire, counted, flat, identity, pieces, said_in


class Chat:
    def read(self, path: str, body: Json) -> Asked:
        said: list[Said] = []
        system: list[str] = []
        for message in body["messages"]:
            if message["role"] in {"system", "developer"}:
                system.append(flat(message["content"]))
            else:
                said += self._message(message)
        tools = [tool["function"] for tool in body.get("tools") or () if "function" in tool]
        return Asked(
            body["model"],
            bool(body.get("stream")),
            len(body["messages"]),
            said,
            "\n".join(system),
            {tool["name"]: tool.get("parameters") or {} for tool in tools},
            body.get("response_format"),
        )

    def _message(self, message: Json) -> Iterable[Said]:
        if message["role"] == "tool":
            return [Said("tool", flat(message.get("content") or ""), "result")]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said = [Said(message["role"], f"{call['name']} {call['arguments']}", "tool") for call in calls]
        return [*said_in(message["role"], message.get("content")), *said]

    def _usage(self, asked: Asked) -> Json:
        count = counted(asked.messages)
        return {
            "prompt_tokens": count["input"],
            "completion_tokens": count["output"],
            "total_tokens": count["input"] + count["output"],
            "prompt_tokens_details": {"cached_tokens": count["cached"]},
            "completion_tokens_details": {"reasoning_tokens": 2},
        }

    def _calls(self, answer: Answer) -> list[Json]:
        return [
            {
                "index": at,
                "id": identity("call"),
                "type": "function",
                "function": {"name": one.tool, "arguments": json.dumps(one.input)},
            }
            for at, one in enumerate(answer.calls)
        ]

    def whole(self, asked: Asked, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message = {"role": "assistant", "content": None, "tool_calls": self._calls(answer)}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if answer.calls else "stop"}
        return {"id": identity("chatcmpl"), "object": "chat.completion", "created": 0, "model": asked.model,
                "choices": [choice], "usage": self._usage(asked)}  # fmt: skip

    def usage_first(self, asked: Asked) -> dict[str, int] | None:
        return None

    def events(self, asked: Asked, answer: Answer) -> Events:
        frame = {"id": identity("chatcmpl"), "object": "chat.completion.chunk", "created": 0, "model": asked.model}
        deltas: list[Json] = [{"content": piece} for piece in pieces(answer.text)]
        if answer.calls:
            deltas = [{"tool_calls": self._calls(answer)}]
        deltas[0]["role"] = "assistant"
        for at, delta in enumerate(deltas):
            yield {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            if at == 0:
                yield PAUSE
        reason = "tool_calls" if answer.calls else "stop"
        yield {**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        yield {**frame, "choices": [], "usage": self._usage(asked)}

    def error(self, answer: Answer) -> Json:
        return Responses().error(answer)


class Gemini:
    def read(self, path: str, body: Json) -> Asked:
        model, _, method = path.rpartition("/")[2].partition(":")
        said: list[Said] = []
        for content in body["contents"]:
            for part in content["parts"]:
                said += self._part(content.get("role", "user"), part)
        declared = [
            one
            for tool in body.get("tools") or ()
            for one in tool.get("functionDeclarations") or tool.get("function_declarations") or ()
        ]
        wanted = body.get("generationConfig") or {}
        return Asked(
            model,
            method.startswith("stream"),
            len(body["contents"]),
            said,
            flat((body.get("systemInstruction") or {}).get("parts") or ""),
            {one["name"]: one.get("parametersJsonSchema") or one.get("parameters") or {} for one in declared},
            wanted.get("responseSchema") or wanted.get("responseJsonSchema"),
        )

    def _part(self, role: str, part: Json) -> Iterable[Said]:
        role = "assistant" if role == "model" else role
        if call := part.get("functionCall"):
            return [Said(role, f"{call['name']} {json.dumps(call.get('args') or {})}", "tool")]
        if result := part.get("functionResponse"):
            return [Said("tool", json.dumps(result.get("response")), "result")]
        return said_in(role, [part])

    def whole(self, asked: Asked, answer: Answer) -> Json:
        calls = [{"functionCall": {"name": one.tool, "args": one.input}} for one in answer.calls]
        return self._piece(asked, calls or [{"text": answer.text}], last=True)

    def _piece(self, asked: Asked, parts: list[Json], *, last: bool) -> Json:
        candidate: Json = {"content": {"role": "model", "parts": parts}, "index": 0}
        piece: Json = {"candidates": [candidate], "modelVersion": asked.model, "responseId": "stub"}
        if last:
            count = counted(asked.messages)
            candidate["finishReason"] = "STOP"
            piece["usageMetadata"] = {
                "promptTokenCount": count["input"],
                "candidatesTokenCount": count["output"],
                "cachedContentTokenCount": count["cached"],
                "totalTokenCount": count["input"] + count["output"],
            }
        return piece

    def usage_first(self, asked: Asked) -> dict[str, int] | None:
        return None

    def events(self, asked: Asked, answer: Answer) -> Events:
        if answer.calls:
            yield PAUSE
            yield self.whole(asked, answer)
            return
        texts = pieces(answer.text)
        for at, text in enumerate(texts):
            yield self._piece(asked, [{"text": text}], last=at == len(texts) - 1)
            if at == 0:
                yield PAUSE

    def error(self, answer: Answer) -> Json:
        names = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
                 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}  # fmt: skip
        return {"error": {"code": answer.status, "message": answer.text, "status": names.get(answer.status, "UNKNOWN")}}


def wire_of(path: str) -> Wire | None:
    """The protocol of a POST to that path."""
    if path.endswith(("/messages", "/messages/count_tokens")):
        return Anthropic()
    if path.endswith("/chat/completions"):
        return Chat()
    if path.endswith("/responses"):
        return Responses()
    return Gemini() if "/models/" in path and ":" in path else None
