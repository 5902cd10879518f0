"""Frames: the JSON objects, one a line, that a runner and a host process exchange. Values are written and read here.

    runner -> host    probe                          how many attempts are at work; the answer is `state`
                      hello                          the version, the run, the epoch, the attempts to keep
                      ask, go, cancel                an attempt asks for a slot, begins, is ended
                      wind_down                      the run is being cancelled
                      remove_files                   the run is over: its files are removed
    host -> runner    ready, refused                 the answers to hello
                      slot                           the answer to ask
                      session, output, allowance     reports of an attempt under way
                      reply, error, asked, ended     the end of an attempt

Every frame has its name as `op`, and a frame about an attempt has `attempt`. Fields with their default values are left
out. Nothing but JSON crosses: no code, and no values of the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from plait.backends.backend_protocol import ConversationRequest, Output, Reply
from plait.dialogue import Answer, Message, Question
from plait.errors import BackendError, ErrorKind
from plait.safe_text import one_line
from plait.task import OWN_OPTIONS, ModelOptions
from plait.usage import NO_USAGE, Usage

Frame: TypeAlias = dict[str, Any]
_SHOWN = 80
"""Characters of foreign output in a message."""
LONGEST = 2**30
"""Bytes of a frame. A longer one ends the connection."""
_FIELDS = (
    "session_id", "resume", "output_schema", "idempotency_key", "metadata", "resumes_interrupted", "fork_of",
    "attaches", "timeout", "goes_on", "traceparent",
)  # fmt: skip
"""The fields of a request that are JSON already."""
_PLAIN = ConversationRequest()
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def frame_line(frame: Mapping[str, Any]) -> bytes:
    """Return `frame` as a line. Raise TypeError or ValueError for values that JSON cannot hold."""
    return _ENCODER.encode(frame).encode() + b"\n"


def read_frame(line: bytes | bytearray) -> Frame:
    """Return the frame in `line`. Raise ValueError if the line is no frame."""
    frame = json.loads(line.decode())  # from bytes, json would guess the encoding
    if not isinstance(frame, dict) or not isinstance(frame.get("op"), str):  # pyright: ignore[reportUnknownMemberType]
        raise ValueError("a line is no frame of plait")
    return frame  # pyright: ignore[reportUnknownVariableType]


def foreign_output(line: bytes) -> str:
    """Return the reason why a host that printed `line`, which is no frame, cannot be used."""
    text = one_line(line.decode("utf-8", "replace"))
    return f"the output is not that of plait: {text[:_SHOWN]!r}; login scripts of the host must print nothing"


def request_json(request: ConversationRequest) -> Frame:
    """Return the parts of `request` that a host needs."""
    parts: Frame = {name: value for name in _FIELDS if (value := getattr(request, name)) != getattr(_PLAIN, name)}
    if request.history:
        parts["history"] = [_message_json(one) for one in request.history]
    if request.answer is not None:
        parts["answer"] = {"value": request.answer.value}
    if request.options != OWN_OPTIONS:
        parts["options"] = asdict(request.options)
    if request.on_allowance is not None:
        parts["wants_allowance"] = True
    return parts


def read_request(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the ConversationRequest, without the files and the callbacks."""
    arguments = {name: parts[name] for name in _FIELDS if name in parts}
    arguments["history"] = tuple(map(_read_message, parts.get("history", ())))
    if "options" in parts:
        arguments["options"] = ModelOptions(**parts["options"])
    if "answer" in parts:
        arguments["answer"] = Answer(parts["answer"]["value"])
    return arguments


def reply_json(reply: Reply) -> Frame:
    """Return the fields of a reply."""
    parts: Frame = {"text": reply.text}
    if reply.data is not None:
        parts["data"] = reply.data
    if reply.session_id is not None:
        parts["session_id"] = reply.session_id
    if reply.usage is not NO_USAGE:
        parts["usage"] = _usage_json(reply.usage)
    if reply.messages:
        parts["messages"] = [_message_json(one) for one in reply.messages]
    if reply.question is not None:
        parts["question"] = asdict(reply.question)
    if reply.tasks:
        parts["tasks"] = reply.tasks
    return parts


def read_reply(parts: Mapping[str, Any]) -> Reply:
    """Return the reply. Raise ValueError, KeyError or TypeError for anything else."""
    return Reply(
        parts["text"],
        parts.get("data"),
        parts.get("session_id"),
        _read_usage(parts),
        tuple(map(_read_message, parts.get("messages", ()))),
        read_question(parts["question"]) if "question" in parts else None,
        tuple(parts.get("tasks", ())),
    )


def error_json(error: BackendError) -> Frame:
    """Return the fields of an error."""
    parts: Frame = {"kind": ErrorKind(error.kind).value, "message": error.message}
    for name in ("retry_after", "continues_session", "traceback", "status"):
        if value := getattr(error, name):
            parts[name] = value
    if error.usage is not NO_USAGE:
        parts["usage"] = _usage_json(error.usage)
    if error.messages:
        parts["messages"] = [_message_json(one) for one in error.messages]
    return parts


def read_error(parts: Mapping[str, Any]) -> BackendError:
    """Return the error. Raise ValueError, KeyError or TypeError for anything else."""
    error = BackendError(
        ErrorKind(parts["kind"]),
        parts["message"],
        retry_after=parts.get("retry_after"),
        usage=_read_usage(parts),
        messages=tuple(map(_read_message, parts.get("messages", ()))),
        continues_session=parts.get("continues_session", False),
        traceback=parts.get("traceback"),
    )
    error.status = parts.get("status")
    return error


def output_json(output: Output) -> Frame:
    """Return the fields of an output."""
    parts: Frame = {"kind": output.kind, "text": output.text}
    if output.usage is not NO_USAGE:
        parts["usage"] = _usage_json(output.usage)
    return parts


def read_output(parts: Mapping[str, Any]) -> Output:
    """Return the output."""
    return Output(parts["kind"], parts["text"], _read_usage(parts))


def question_json(question: Question) -> Frame:
    """Return the fields of a question."""
    return asdict(question)


def read_question(parts: Mapping[str, Any]) -> Question:
    """Return the question."""
    return Question(parts["text"], parts.get("schema"), parts.get("default"), parts.get("deadline"))


def _message_json(message: Message) -> Sequence[Any]:
    parts: list[Any] = [message.role, message.content]
    if message.usage is not NO_USAGE or message.thoughts:
        parts.append(_usage_json(message.usage))
    return [*parts, message.thoughts] if message.thoughts else parts


def _read_message(parts: Sequence[Any]) -> Message:
    role, content, *more = parts
    usage = Usage(**more[0]) if more and more[0] else NO_USAGE
    return Message(role, content, usage, more[1] if len(more) > 1 else "")


def _usage_json(usage: Usage) -> Frame:
    return {name: value for name, value in asdict(usage).items() if value != getattr(NO_USAGE, name)}


def _read_usage(parts: Mapping[str, Any]) -> Usage:
    return Usage(**parts["usage"]) if "usage" in parts else NO_USAGE
