"""Answers that have to fit a JSON Schema: reading, checking, and requesting a repair."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias, cast

from plait.backends._schema_validator import InvalidSchema, Prepared, list_problems, prepare
from plait.backends.errors import BackendError, ErrorKind
from plait.backends.protocol import JsonValue
from plait.backends.schema_cost import Cost, SchemaProblem, measure
from plait.backends.text import clean_text, json_at, one_line, parse_json

# A line with only the tag is never JSON: strings in JSON have no line breaks.
_THOUGHTS = re.compile(r"\s*<think>.*?</think>|.*?^[ \t]*</think>[ \t]*$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"(?:```|~~~)[^\s`~]*[ \t]*\r?\n\s*")
_FENCES_END = re.compile(r"\s*(?:```|~~~|\Z)")
_BRACKET = re.compile(r"[\[{]")
_LINES_END = re.compile(r"[ \t.`~]*(?:[\r\n]|\Z)")
_MOST_FENCES = 20

MAX_COST = 300_000
"""Most visits (`Cost.of_check`) of a check in this process, which holds the interpreter for 50 ms at most."""
_MAX_LIST_COST = 10_000
"""Most visits of a check whose mismatches are listed in this process: a mismatch costs as much as a hundred visits."""
_MAX_NESTING = 200
"""Most levels of a value, as in stored results."""
_MAX_STACK = 1_000
"""Most levels of the value times levels of the schema: the validator calls itself, on the stack of the thread."""


class Mismatch(Exception):  # noqa: N818 - never leaves this package
    """An answer is not JSON or does not fit the schema. The message describes the problem in one line."""


class TooCostly(Mismatch):
    """An answer cannot be checked, or its mismatches not be listed, without holding up this process."""


Elsewhere: TypeAlias = Callable[[str, str], "list[str]"]
"""A check in another process: takes the schema and the value as JSON, and returns the first few mismatches."""


class Schema:
    """A JSON Schema, ready to check values. Raises BackendError (invalid_request) if `schema` is not a valid JSON
    Schema, or is too costly to check.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self.text = _text(schema)
        try:
            self._compiled = _compiled(self.text)
        except SchemaProblem as problem:
            raise BackendError(ErrorKind.INVALID_REQUEST, one_line(problem.with_place)) from None

    def read(self, text: str, elsewhere: Elsewhere | None = None) -> JsonValue:
        """Return the JSON value in an answer's `text`. Thoughts before the answer are skipped.

        The candidates are, in order: the whole answer, each fenced block, and the value that starts at the first
        bracket and runs to the end of a line. Raises Mismatch if none fits, and TooCostly as `check` does.
        """
        text = text.removeprefix("\ufeff")
        thoughts = _THOUGHTS.match(text)
        answer = text[thoughts.end() :] if thoughts else text
        problem: Mismatch | None = None
        for value in self._candidates(answer, elsewhere):
            try:
                return self.check(value, elsewhere)
            except TooCostly:
                raise
            except Mismatch as mismatch:
                problem = problem or mismatch
        raise problem or _no_json(answer)

    def _candidates(self, answer: str, elsewhere: Elsewhere | None) -> Iterator[JsonValue]:
        try:
            yield parse_json(answer)
        except ValueError:
            yield from _fenced(answer)
            # If the schema accepts plain text, brackets in the text have no meaning.
            if not self._fits(answer, elsewhere):
                yield from _at_bracket(answer)

    def _fits(self, value: JsonValue, elsewhere: Elsewhere | None) -> bool:
        try:
            self.check(value, elsewhere)
        except TooCostly:
            raise
        except Mismatch:
            return False
        return True

    def check(self, value: JsonValue, elsewhere: Elsewhere | None = None) -> JsonValue:
        """Return `value` if it fits the schema. Raises Mismatch with the first few mismatching places otherwise.

        A check that may take long is left to `elsewhere`. Without it such a check raises TooCostly.
        """
        levels = _levels(value, _MAX_NESTING)
        if levels > _MAX_NESTING:
            raise Mismatch("it is nested too deeply")
        validator, cost = self._compiled
        text = json.dumps(value)
        visits = cost.of_check(text, backtracks=validator.backtracks)
        problems: list[str] | None = None
        if visits <= MAX_COST and levels * cost.depth <= _MAX_STACK:
            if "\\ud" in text:  # perhaps half a character, which the validator refuses and the store cannot hold
                value = parse_json(clean_text(json.dumps(value, ensure_ascii=False)))
            if validator.validator.is_valid(value):
                return value
            # Alternatives of a recursive schema have mismatches in mismatches.
            if visits <= _MAX_LIST_COST and not cost.recursive:
                problems = list_problems(validator.validator, value)
            elif elsewhere is None:
                raise TooCostly("it is of another form than the schema, and listing the places would take too long")
        elif elsewhere is None:
            raise TooCostly("checking it would take too long; make the answer or the schema smaller")
        if problems is None and elsewhere is not None:
            problems = elsewhere(self.text, text)
        if problems:
            raise Mismatch("; ".join(one_line(problem) for problem in problems))
        return value


def _levels(value: object, most: int) -> int:
    """Return the levels of nesting in `value`; at more than `most`, any number above."""
    if isinstance(value, dict):
        inner = [*cast("dict[str, object]", value).values()]
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return 0
    deepest = 0
    for one in inner:
        if isinstance(one, dict | list):
            deepest = max(deepest, most if most <= 0 else _levels(cast("object", one), most - 1))
    return 1 + deepest


def schema_problem(schema: Mapping[str, object]) -> SchemaProblem | None:
    """Return the problem of a schema that is invalid or too costly to check; None if the schema can be used."""
    try:
        _compiled(_text(schema))
    except SchemaProblem as problem:
        return problem
    return None


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


def _text(schema: Mapping[str, object]) -> str:
    return json.dumps(schema, ensure_ascii=False)


class _Compiled(NamedTuple):
    validator: Prepared
    cost: Cost


@lru_cache(maxsize=64)
def _compiled(schema: str) -> _Compiled:
    """Return the validator and the cost of a schema. Many tasks share a schema: each is compiled once."""
    plain = json.loads(schema)
    cost = measure(plain)
    try:
        return _Compiled(prepare(schema), cost)
    except InvalidSchema as error:
        raise SchemaProblem(f"this is not a valid JSON Schema: {one_line(str(error), 200)}", error.path) from None
