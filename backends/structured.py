"""Answers that have to fit a JSON Schema: reading, checking, and requesting a repair."""

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

# A line with only the tag is never JSON: strings in JSON have no line breaks.
_THOUGHTS = re.compile(r"\s*<think>.*?</think>|.*?^[ \t]*</think>[ \t]*$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"(?:```|~~~)[^\s`~]*[ \t]*\r?\n\s*")
_FENCES_END = re.compile(r"\s*(?:```|~~~|\Z)")
_BRACKET = re.compile(r"[\[{]")
_LINES_END = re.compile(r"[ \t.`~]*(?:[\r\n]|\Z)")
_MOST_FENCES = 20
_MOST_PROBLEMS = 5


class Mismatch(Exception):  # noqa: N818 - never leaves this package
    """An answer is not JSON or does not fit the schema. The message describes the problem in one line."""


class Schema:
    """A JSON Schema, ready to check values. Raises BackendError (invalid_request) if `schema` is not a valid JSON
    Schema.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self.text = json.dumps(schema, ensure_ascii=False)
        self._validator = _validator(self.text)

    def read(self, text: str) -> JsonValue:
        """Return the JSON value in an answer's `text`. Thoughts before the answer are skipped.

        The candidates are, in order: the whole answer, each fenced block, and the value that starts at the first
        bracket and runs to the end of a line. Raises Mismatch if none fits.
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
            # If the schema accepts plain text, brackets in the text have no meaning.
            if not self._fits(answer):
                yield from _at_bracket(answer)

    def _fits(self, value: JsonValue) -> bool:
        try:
            self.check(value)
        except Mismatch:
            return False
        return True

    def check(self, value: JsonValue) -> JsonValue:
        """Return `value` if it fits the schema. Raises Mismatch with the first few mismatching places otherwise."""
        try:
            problems = sorted(self._validator.iter_errors(value), key=lambda problem: problem.json_path)
        except RecursionError:
            raise Mismatch("it is nested too deeply") from None
        except Exception as exc:  # an unresolvable $ref: jsonschema reports it only now
            raise BackendError(ErrorKind.INVALID_REQUEST, f"output_schema: {one_line(str(exc))}") from None
        if problems:
            raise Mismatch("; ".join(_describe(problem) for problem in problems[:_MOST_PROBLEMS]))
        return value


def repair_prompt(mismatch: Mismatch, schema: Schema) -> str:
    """Return the prompt that asks for a repair, in the same conversation, after a mismatching answer."""
    # The schema is repeated because some servers accept a schema without showing it to the model.
    return (
        f"That answer cannot be used: {mismatch}. Answer again with nothing but JSON, no text and no code fence "
        f"around it, that fits this JSON Schema: {schema.text}"
    )


def invalid_output(mismatch: Mismatch) -> BackendError:
    """Return the error for an answer that still does not fit after the repair."""
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
    # Building a validator takes a millisecond or more, and many tasks share a schema: build each validator once. Import
    # here because importing jsonschema costs more than all the rest of the package.
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415
    from jsonschema.validators import Draft202012Validator, validator_for  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    plain = json.loads(schema)
    kind: Any = validator_for(plain, default=Draft202012Validator)
    try:
        kind.check_schema(plain)
    except SchemaError as exc:
        raise BackendError(ErrorKind.INVALID_REQUEST, f"output_schema is not a JSON Schema: {_describe(exc)}") from None
    # An empty registry prevents fetching a "$ref" to a URL.
    nothing: Registry[Any] = Registry()
    return kind(plain, registry=nothing)
