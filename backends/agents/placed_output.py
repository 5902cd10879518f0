"""The output of a turn on another host, kept in a file here, so that every process of this machine can show the output.

    <turn>/placed.jsonl      one output a line, with its time

The host sends all output again when a turn is followed anew. The file is then written from its beginning; the lines
have the same lengths as before, so a reader in another process continues at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any, cast

from plait.backends.backend_protocol import Output
from plait.backends.json_fields import at, text
from plait.backends.process.private_files import private_folder
from plait.json_form import JsonValue
from plait.usage import NO_USAGE, Usage

NAME = "placed.jsonl"
_KINDS = frozenset({"text", "tool", "waiting", "notice"})


class PlacedOutput:
    """Writes the outputs of one turn. An output that cannot be written is left out: the attempt matters more.

    `turn` returns the folder of the turn; None if the store keeps no files.
    """

    def __init__(self, turn: Callable[[], Path | None]) -> None:
        self._turn = turn
        self._mode = "wb"

    def restart(self) -> None:
        """Begin the file anew with the next output."""
        self._mode = "wb"

    def write(self, output: Output) -> None:
        """Append an output."""
        if output.kind not in _KINDS or (turn := self._turn()) is None:
            return
        line: dict[str, Any] = {"timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z", **_fields(output)}
        with suppress(OSError):
            private_folder(turn)
            with (turn / NAME).open(self._mode) as file:
                file.write(dumps(line).encode() + b"\n")
            self._mode = "ab"


def _fields(output: Output) -> dict[str, Any]:
    usage = {} if output.usage is NO_USAGE else {"usage": {k: v for k, v in asdict(output.usage).items() if v}}
    return {"kind": output.kind, "text": output.text, **usage}


class PlacedOutputReader:
    """Reads the lines back. Never raises on any input."""

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Return the output in a line."""
        kind, used = text(event, "kind"), at(event, "usage")
        if kind not in _KINDS:
            return ()
        usage = NO_USAGE
        if isinstance(used, dict):
            with suppress(TypeError):
                usage = Usage(**cast("dict[str, Any]", used))
        return (Output(cast("Any", kind), text(event, "text"), usage),)
