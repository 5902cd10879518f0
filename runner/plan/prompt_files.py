"""Prompts that stand in files: read when the plan is read, with what they include, so that a run needs no file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from plait.runner.plan.plan_positions import Path as Where
from plait.runner.plan.plan_positions import Source

MAX_CHARACTERS = 1_000_000
"""The maximum number of characters of a prompt with what it includes."""
_PART = re.compile(
    r"""\{%(?P<trims>-?)\s*include\s+(["'])(?P<name>[^\n]*?)\2\s*(?:-%\}\s*|%\})"""
    r"""|\{%[-+]?\s*raw\s*-?%\}.*?(?:\{%[-+]?\s*endraw\s*[-+]?%\}|\Z)""",
    re.DOTALL,
)
"""An include with its name, or a raw block, in which nothing is included. As everywhere in a template, `-` takes the
white space beside it away.
"""


def read_prompt_files(source: Source, folder: Path | None) -> None:
    """Put the texts of files in the place of each `prompt: {file: NAME}` of the plan; names are relative to `folder`,
    and no file outside of it is read. With None, for a plan from elsewhere, none is. Problems are added to
    `source.problems`.
    """
    for path, part in _parts(source.value, ()):
        if not isinstance(prompt := part.get("prompt"), dict):
            continue
        named, at = cast("dict[str, Any]", prompt), (*path, "prompt")
        part["prompt"] = "?"
        name = named.get("file")
        if named.keys() != {"file"} or not isinstance(name, str):
            source.complain(at, "must be a text, or {file: NAME}, the name of a file relative to the plan")
        elif folder is None:
            source.complain(at, "a plan from elsewhere reads no files here; write the prompt into the plan")
        else:
            try:
                pieces = list(_pieces(folder.resolve(), name))
            except ValueError as error:
                source.complain((*at, "file"), str(error))
                continue
            part["prompt"] = "".join(text for _, _, text in pieces)
            source.file_lines[at] = list(_lines(pieces))


def _parts(value: Any, path: Where) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Yield each mapping that may have a prompt, with its path."""
    if not isinstance(value, dict):
        return
    plan = cast("dict[str, Any]", value)
    for key in ("tasks", "workflow", "steps", "follow_ups"):
        entries: Any = plan.get(key)
        if not isinstance(entries, list):
            continue
        for index, entry in enumerate(cast("Sequence[Any]", entries)):
            if key == "follow_ups":
                yield from _parts(entry, (*path, key, index))
            elif isinstance(entry, dict):
                part = cast("dict[str, Any]", entry)
                yield (*path, key, index), part
                yield from _parts(part.get("loop"), (*path, key, index, "loop"))


def _pieces(folder: Path, whole: str) -> Iterator[tuple[str, int, str]]:
    """Yield pieces of the text: the file, the line at which the piece begins there, and the piece. Raises ValueError
    for a file that cannot be used.
    """
    room = MAX_CHARACTERS

    def read(name: str, within: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
        nonlocal room
        file = (folder / name).resolve() if "\0" not in name else folder
        if not file.is_relative_to(folder):
            raise ValueError(f"the prompt file {name!r} is outside of the plan's folder; move it beside the plan")
        if str(file) in within:
            raise ValueError(f"the prompt file {name!r} includes itself; leave one include out")
        text = _text(file, name)
        room -= len(text)  # each time, also if it is only made of includes
        if room < 0:
            what = " with what it includes" if within else ""
            raise ValueError(f"the prompt file {whole!r}{what} has more than {MAX_CHARACTERS:,} characters; shorten it")
        start, shown = 0, str(file)
        for part in _PART.finditer(text):
            if part["name"] is not None:
                piece = text[start : part.start()]
                yield shown, text.count("\n", 0, start) + 1, piece.rstrip() if part["trims"] else piece
                yield from read(part["name"], (*within, str(file)))
                start = part.end()
        yield shown, text.count("\n", 0, start) + 1, text[start:]

    yield from read(whole, ())


def _text(file: Path, name: str) -> str:
    try:
        if not file.is_file():
            raise ValueError(f"there is no prompt file {file}; names are relative to the plan")
        with file.open(encoding="utf-8-sig") as opened:
            text = opened.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise ValueError(f"the prompt file {name!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {name!r} is not UTF-8; save it as UTF-8") from error
    if "\0" in text:
        raise ValueError(f"the prompt file {name!r} is no text: it has a NUL; write it anew")
    return text


def _lines(pieces: list[tuple[str, int, str]]) -> Iterator[tuple[str, int]]:
    """Yield the file and the line there of each line of the whole text: of its first piece with text."""
    is_new = True
    for file, line, text in pieces:
        for number, part in enumerate(text.splitlines(keepends=True)):
            if is_new:
                yield file, line + number
            is_new = part.endswith("\n")
