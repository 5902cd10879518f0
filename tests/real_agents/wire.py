"""The four protocols that the agents speak to a model: what a request says, and how an answer looks, whole or streamed.

Every answer counts 10 + the number of messages as input, 7 as output, 5 as cached (in OpenAI's and Gemini's protocols
the cached ones are part of the input, in Anthropic's beside it), in OpenAI's 2 of the output as reasoning.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from tests.real_agents.script import Answer, Asked, Json, Said

# What the agents add to a prompt by themselves.
_ADDED = re.compile(
    r"<(system-reminder|environment_context|session_context|turn-context|permissions instructions|"
    r"skills_instructions|apps_instructions|plugins_instructions)>.*?</\1>\s*",
    re.DOTALL,
)
PAUSE: Json = {"pause": True}
Events = Iterator[Json]


def counted(messages: int) -> dict[str, int]:
    return {"input": 10 + messages, "output": 7, "cached": 5}


def identity(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:20]}"


class Wire(Protocol):
    """One protocol. `events` yields PAUSE where a slow answer is slow. `usage_first`: what it says of an answer's usage
    before the answer, None where it says that at the end alone.
    """

    def read(self, path: str, body: Json) -> Asked: ...
    def whole(self, asked: Asked, answer: Answer) -> Json: ...
    def events(self, asked: Asked, answer: Answer) -> Events: ...
    def error(self, answer: Answer) -> Json: ...
    def usage_first(self, asked: Asked) -> dict[str, int] | None: ...


def _texts(content: Any) -> Iterator[str]:
    """The texts of a content that may be a string or a list of parts, without what agents add by themselves."""
    for part in [content] if isinstance(content, str) else content or ():
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str) and (bare := _ADDED.sub("", text).strip()):
            yield bare


def said_in(role: str, content: Any) -> Iterable[Said]:
    return [Said(role, text) for text in _texts(content)]


def flat(content: Any) -> str:
    return "\n".join(_texts(content)) if isinstance(content, str | list) else json.dumps(content)


def pieces(text: str) -> list[str]:
    """The text in two pieces at least, so that there are first words."""
    size = max(1, min(400, len(text) // 2))
    return [text[at : at + size] for at in range(0, len(text), size)] or [""]


class Anthropic:
    def read(self, path: str, body: Json) -> Asked:
        said: list[Said] = []
        for message in body["messages"]:
            content = message["content"]
            for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                said += self._block(message["role"], block)
        return Asked(
            body["model"],
            bool(body.get("stream")),
            len(body["messages"]),
            said,
            flat(body.get("system") or ""),
            {tool["name"]: tool.get("input_schema") or {} for tool in body.get("tools") or ()},
            (body.get("output_config") or {}).get("format"),
        )

    def _block(self, role: str, block: Json) -> Iterable[Said]:
        if block["type"] == "tool_use":
            return [Said(role, f"{block['name']} {json.dumps(block['input'])}", "tool")]
        if block["type"] == "tool_result":
            return [Said("tool", flat(block.get("content") or ""), "result")]
        return said_in(role, [block])

    def _usage(self, asked: Asked) -> Json:
        count = counted(asked.messages)
        return {
            "input_tokens": count["input"],
            "output_tokens": count["output"],
            "cache_read_input_tokens": count["cached"],
            "cache_creation_input_tokens": 0,
        }

    def _message(self, asked: Asked) -> Json:
        return {"id": identity("msg"), "type": "message", "role": "assistant", "model": asked.model, "content": [],
                "stop_reason": None, "stop_sequence": None, "usage": self._usage(asked)}  # fmt: skip

    def whole(self, asked: Asked, answer: Answer) -> Json:
        blocks = [
            {"type": "tool_use", "id": identity("toolu"), "name": one.tool, "input": one.input} for one in answer.calls
        ]
        reason = "tool_use" if blocks else "end_turn"
        content = blocks or [{"type": "text", "text": answer.text}]
        return {**self._message(asked), "content": content, "stop_reason": reason}

    def events(self, asked: Asked, answer: Answer) -> Events:
        usage = self._usage(asked)
        first = {**usage, "output_tokens": 1}
        yield {"type": "message_start", "message": {**self._message(asked), "usage": first}}
        for at, block in enumerate(self.whole(asked, answer)["content"]):
            yield from self._streamed(at, block)
        reason = "tool_use" if answer.calls else "end_turn"
        yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
        yield {"type": "message_stop"}

    def usage_first(self, asked: Asked) -> dict[str, int] | None:
        return counted(asked.messages) | {"output": 1}

    def _streamed(self, index: int, block: Json) -> Events:
        if block["type"] == "text":
            opened: Json = {**block, "text": ""}
            deltas: list[Json] = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            opened = {**block, "input": {}}
            given = pieces(json.dumps(block["input"]))
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in given]
        yield {"type": "content_block_start", "index": index, "content_block": opened}
        for at, delta in enumerate(deltas):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            if at == 0 and index == 0:
                yield PAUSE
        yield {"type": "content_block_stop", "index": index}

    def error(self, answer: Answer) -> Json:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
                 400: "invalid_request_error", 413: "request_too_large", 529: "overloaded_error"}  # fmt: skip
        kind = kinds.get(answer.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": answer.text}, "request_id": identity("req")}


class Responses:
    def read(self, path: str, body: Json) -> Asked:
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        said: list[Said] = []
        system = [body.get("instructions") or ""]
        for item in items:
            if item.get("role") in {"system", "developer"}:
                system.append(flat(item["content"]))
            else:
                said += self._item(item)
        tools = body.get("tools") or ()
        return Asked(
            body["model"],
            bool(body.get("stream")),
            len(items),
            said,
            "\n".join(system),
            {tool["name"]: tool.get("parameters") or {} for tool in tools if tool.get("name")},
            (body.get("text") or {}).get("format"),
        )

    def _item(self, item: Json) -> Iterable[Said]:
        if item.get("type", "message") == "message":
            return said_in(item["role"], item["content"])
        if item["type"] in {"function_call", "custom_tool_call"}:
            return [Said("assistant", f"{item['name']} {item.get('arguments') or item.get('input')}", "tool")]
        if item["type"] in {"function_call_output", "custom_tool_call_output"}:
            return [Said("tool", flat(item["output"]), "result")]
        return []

    def _output(self, answer: Answer) -> list[Json]:
        calls: list[Json] = [
            {"type": "function_call", "id": identity("fc"), "call_id": identity("call"), "name": one.tool,
             "arguments": json.dumps(one.input), "status": "completed"}
            for one in answer.calls
        ]  # fmt: skip
        message: Json = {"type": "message", "id": identity("msg"), "role": "assistant", "status": "completed",
                         "content": [{"type": "output_text", "text": answer.text, "annotations": []}]}  # fmt: skip
        return calls or [message]

    def _response(self, asked: Asked, output: list[Json]) -> Json:
        count = counted(asked.messages)
        usage = {
            "input_tokens": count["input"],
            "input_tokens_details": {"cached_tokens": count["cached"]},
            "output_tokens": count["output"],
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": count["input"] + count["output"],
        }
        return {"id": identity("resp"), "object": "response", "created_at": 0, "model": asked.model,
                "status": "completed", "output": output, "usage": usage, "error": None, "incomplete_details": None,
                "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
                "tool_choice": "auto", "tools": [], "top_p": 1.0}  # fmt: skip

    def whole(self, asked: Asked, answer: Answer) -> Json:
        return self._response(asked, self._output(answer))

    def usage_first(self, asked: Asked) -> dict[str, int] | None:
        return None

    def events(self, asked: Asked, answer: Answer) -> Events:
        output = self._output(answer)
        response = self._response(asked, output)
        started = {**response, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": started}
        for at, item in enumerate(output):
            yield from self._streamed(at, item)
        yield {"type": "response.completed", "response": response}

    def _streamed(self, index: int, item: Json) -> Events:
        is_call = item["type"] == "function_call"
        opened = {**item, "status": "in_progress"} | ({"arguments": ""} if is_call else {"content": []})
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        if is_call:
            if index == 0:
                yield PAUSE
        else:
            yield from self._streamed_text(item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _streamed_text(self, item: Json) -> Events:
        part: Json = item["content"][0]
        where: Json = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
        for at, piece in enumerate(pieces(part["text"])):
            yield {"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []}
            if at == 0:
                yield PAUSE
        yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **where, "part": part}

    def error(self, answer: Answer) -> Json:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 400: "invalid_request_error"}
        kind = kinds.get(answer.status, "server_error")
        return {"error": {"message": answer.text, "type": kind, "param": None, "code": kind}}
