"""Frames: the JSON objects, one a line, that a runner and a host process exchange. Values are written and read here.

    runner -> host    probe                          how many attempts are at work; the answer is `state`
                      hello                          the version, the run, the epoch, the attempts to keep
                      ask, go, cancel                an attempt asks for a slot and its folder, begins, is ended
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
from collections.abc import Mapping
from typing import Any, TypeAlias

from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import as_json, from_json
from plait.safe_text import one_line
from plait.usage import Usage

Frame: TypeAlias = dict[str, Any]
_MAX_FOREIGN = 80
"""Characters of foreign output in a message."""
LONGEST = 2**30
"""Bytes of a frame. A longer one ends the connection."""
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


def error_json(error: BackendError) -> Frame:
    """Return the form of an error."""
    form: Frame = {"kind": ErrorKind(error.kind).value, "message": error.message}
    for name in ("retry_after", "continues_session", "traceback", "status"):
        if part := getattr(error, name):
            form[name] = part
    return {**form, "usage": as_json(error.usage), "messages": [as_json(message) for message in error.messages]}


def read_error(form: Mapping[str, Any]) -> BackendError:
    """Return the error. Raise ValueError, KeyError or TypeError for anything else."""
    parts = dict(form)
    status = parts.pop("status", None)
    parts["usage"] = from_json(Usage, parts["usage"])
    parts["messages"] = tuple(from_json(Message, one) for one in parts["messages"])
    error = BackendError(ErrorKind(parts.pop("kind")), parts.pop("message"), **parts)
    error.status = status
    return error
