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

Every frame has its name as `op`, and a frame about an attempt has `attempt`. Values have the form of `as_json`. Nothing
but JSON crosses: no code, and no values of the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.dialogue import Answer, Message, Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import as_json, from_json
from plait.safe_text import one_line
from plait.task import ModelOptions, Workspace
from plait.usage import Usage

Frame: TypeAlias = dict[str, Any]
_MAX_FOREIGN = 80
"""Characters of foreign output in a message."""
LONGEST = 2**30
"""Bytes of a frame. A longer one ends the connection."""
_OF_THE_RUNNER = frozenset({"files", "on_output", "on_session", "on_allowance", "placement", "attachments"})
"""The fields of a request that stay with the runner."""
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
    return f"the output is not that of plait: {text[:_MAX_FOREIGN]!r}; login scripts of the host must print nothing"


def request_json(request: ConversationRequest) -> Frame:
    """Return the parts of `request` that a host needs."""
    parts: Frame = as_json(request, _OF_THE_RUNNER)
    if request.on_allowance is not None:
        parts["wants_allowance"] = True
    return parts


def read_request(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the ConversationRequest, without the files and the callbacks."""
    arguments = {name: part for name, part in parts.items() if name != "wants_allowance"}
    arguments["history"] = _read_messages(parts.get("history", ()))
    if "options" in parts:
        arguments["options"] = ModelOptions(**parts["options"])
    if "workspace" in parts:
        arguments["workspace"] = Workspace(**parts["workspace"])
    if "answer" in parts:
        arguments["answer"] = Answer(**parts["answer"])
    return arguments


def read_reply(form: Mapping[str, Any]) -> Reply:
    """Return the reply with this form, which `as_json` returns. Raise ValueError, KeyError or TypeError without one."""
    parts = dict(form)
    parts["usage"] = from_json(Usage, form.get("usage", {}))
    parts["messages"] = _read_messages(form.get("messages", ()))
    parts["question"] = Question(**form["question"]) if "question" in form else None
    parts["tasks"] = tuple(form.get("tasks", ()))
    return Reply(**parts)


def error_json(error: BackendError) -> Frame:
    """Return the form of an error."""
    form: Frame = {"kind": ErrorKind(error.kind).value, "message": error.message}
    for name in ("retry_after", "continues_session", "traceback", "status"):
        if part := getattr(error, name):
            form[name] = part
    return {**form, "usage": as_json(error.usage), "messages": [as_json(message) for message in error.messages]}


def read_error(form: Mapping[str, Any]) -> BackendError:
    """Return the error. Raise ValueError, KeyError or TypeError for anything else."""
    error = BackendError(
        ErrorKind(form["kind"]),
        form["message"],
        retry_after=form.get("retry_after"),
        usage=from_json(Usage, form["usage"]),
        messages=_read_messages(form["messages"]),
        continues_session=form.get("continues_session", False),
        traceback=form.get("traceback"),
    )
    error.status = form.get("status")
    return error


def _read_messages(forms: Sequence[object]) -> tuple[Message, ...]:
    return tuple(from_json(Message, form) for form in forms)
