"""Answers that have to fit a JSON Schema: how they are read, checked, and asked for a second time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.protocol import JsonValue
from plait.backends.text import json_at, one_line, parse_json

# No JSON holds a line with nothing but the tag: its strings have no line breaks.
_THOUGHTS = re.compile(r"\s*<think>.*?</think>|.*?^[ \t]*</think>[ \t]*$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"(?:```|~~~)[^\s`~]*[ \t]*\r?\n\s*")
_FENCES_END = re.compile(r"\s*(?:```|~~~|\Z)")
_BRACKET = re.compile(r"[\[{]")
_LINES_END = re.compile(r"[ \t.`~]*(?:[\r\n]|\Z)")
_MOST_FENCES = 20
_MOST_PROBLEMS = 5


class Mismatch(Exception):  # noqa: N818 - never leaves this package
    """An answer is not JSON or does not fit the schema. The message says what is wrong with it, in one line."""


class Schema:
    """A JSON Schema, ready to check values. BackendError (invalid_request) when it is not a JSON Schema itself."""

    def __init__(self, schema: Mapping[str, object]) -> None:
        self.text = json.dumps(schema, ensure_ascii=False)
        self._validator = _validator(self.text)

    def read(self, text: str) -> JsonValue:
        """The value in an answer's `text`, which may have thoughts before it: all of it, else that of its first fenced
        block that fits, else the one at its first bracket, to the end of a line. Mismatch if nothing fits.
        """
        text = text.removeprefix("\ufeff")
        thoughts = _THOUGHTS.match(text)
        answer = text[thoughts.end() :] if thoughts else text
        problem: Mismatch | None = None
        for value in self._candidates(answer):
            try:
                return self.check(value)
            except Mismatch as mismatch:
                problem = problem or mismatch
        raise problem or _no_json(answer)

    def _candidates(self, answer: str) -> Iterator[JsonValue]:
        try:
            yield parse_json(answer)
        except ValueError:
            yield from _fenced(answer)
            # Where any words fit, brackets among them are none but words.
            if not self._fits(answer):
                yield from _at_bracket(answer)

    def _fits(self, value: JsonValue) -> bool:
        try:
            self.check(value)
        except Mismatch:
            return False
        return True

    def check(self, value: JsonValue) -> JsonValue:
        """`value` itself when it fits, else Mismatch with the first few places where it does not."""
        try:
            problems = sorted(self._validator.iter_errors(value), key=lambda problem: problem.json_path)
        except RecursionError:
            raise Mismatch("it is nested too deeply") from None
        except Exception as exc:  # an unresolvable $ref: jsonschema finds it only now
            raise BackendError(ErrorKind.INVALID_REQUEST, f"output_schema: {one_line(str(exc))}") from None
        if problems:
            raise Mismatch("; ".join(_describe(problem) for problem in problems[:_MOST_PROBLEMS]))
        return value


def repair_prompt(mismatch: Mismatch, schema: Schema) -> str:
    """What the model is told, in the same conversation, after an answer that does not fit."""
    # The schema is repeated because some servers accept one and never show it to the model.
    return (
        f"That answer cannot be used: {mismatch}. Answer again with nothing but JSON, no text and no code fence "
        f"around it, that fits this JSON Schema: {schema.text}"
    )


def invalid_output(mismatch: Mismatch) -> BackendError:
    """The error for an answer that still does not fit."""
    return BackendError(ErrorKind.INVALID_OUTPUT, f"the answer does not fit output_schema: {mismatch}")


def _fenced(answer: str) -> Iterator[JsonValue]:
    for fence in islice(_FENCE.finditer(answer), _MOST_FENCES):
        try:
            value, end = json_at(answer, fence.end())
        except ValueError:
            continue
        if _FENCES_END.match(answer, end):
            yield value


def _at_bracket(answer: str) -> Iterator[JsonValue]:
    bracket = _BRACKET.search(answer)
    if bracket is None:
        return
    try:
        value, end = json_at(answer, bracket.start())
    except ValueError:
        return
    if _LINES_END.match(answer, end):
        yield value


def _no_json(answer: str) -> Mismatch:
    fence = _FENCE.search(answer)
    what = "it is not JSON" if fence is None else "its fenced block is not JSON"
    try:
        parse_json(answer if fence is None else answer[fence.end() :].partition(fence[0][:3])[0])
    except ValueError as exc:
        what += f": {one_line(str(exc), 120)}"
    return Mismatch(what)


def _describe(problem: Any) -> str:
    return f"at {one_line(problem.json_path, 80)}: {one_line(problem.message, 160)}"


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    # Looking through a schema takes a millisecond or more, and many tasks share one: so each is looked through once.
    # Here, not above: importing them costs more than all the rest of this package.
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415
    from jsonschema.validators import Draft202012Validator, validator_for  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    plain = json.loads(schema)
    kind: Any = validator_for(plain, default=Draft202012Validator)
    try:
        kind.check_schema(plain)
    except SchemaError as exc:
        raise BackendError(ErrorKind.INVALID_REQUEST, f"output_schema is not a JSON Schema: {_describe(exc)}") from None
    # An empty registry: without one, a "$ref" to a URL would be fetched.
    nothing: Registry[Any] = Registry()
    return kind(plain, registry=nothing)
