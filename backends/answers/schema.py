"""JSON Schemas that answers have to fit: reading, checking, and requesting a repair."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from plait.backends.answers.candidates import Candidate, parts, whole, why_none
from plait.backends.answers.cost import Cost, measure
from plait.backends.answers.validator import SchemaProblem, list_problems, prepare
from plait.backends.errors import BackendError, ErrorKind
from plait.backends.protocol import JsonValue
from plait.backends.text import clean_text, one_line
from plait.backends.whole_answer import split_thoughts

if TYPE_CHECKING:
    from jsonschema_rs import Validator

MAX_COST = 100_000
"""Most visits (`Cost.of_check`) of a check in this process, which holds the interpreter for 15 ms at most."""
_MAX_LIST_COST = 10_000
"""Most visits of a check whose mismatches are listed in this process: a mismatch costs as much as a hundred visits."""
_MAX_NESTING = 200
"""Most levels of a value, as in stored results."""
_MAX_STACK = 4_000
"""Most levels of the value times levels of the schema: the validator calls itself, on the stack of the thread."""
_BACKTRACKING = 1_000
"""The factor for the cost of patterns with lookaround or backreferences, which are tried in more than one way."""


class Mismatch(Exception):  # noqa: N818 - never leaves this package
    """An answer is not JSON or does not fit the schema. The message describes the problem in one line."""


class TooCostly(Mismatch):
    """An answer cannot be checked, or its mismatches not be listed, without holding up this process."""


class Found(NamedTuple):
    """A value found in an answer."""

    value: JsonValue
    fits: bool


class Schema:
    """A JSON Schema, ready to check answers. Raises BackendError (invalid_request) if `schema` is not a valid JSON
    Schema, or is too costly to check.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self.text = _text(schema)
        try:
            self._validator, self._cost = _compiled(self.text)
        except SchemaProblem as problem:
            raise BackendError(ErrorKind.INVALID_REQUEST, one_line(problem.with_place)) from None

    def read(self, text: str) -> JsonValue:
        """Return the JSON value in an answer's `text`, as `find`.

        Raises Mismatch with the first few mismatching places if no value fits. Raises TooCostly, before anything is
        parsed, if the check may take long, and later if listing the places may take long.
        """
        cost, visits = self._cost, self._cost.of_check(text)
        levels = min(_brackets(text), _MAX_NESTING) if cost.loops else 1
        if visits > MAX_COST or levels * cost.depth > _MAX_STACK:
            raise TooCostly("checking it would take too long; make the answer or the schema smaller")
        found = self.find(text)
        if found.fits:
            return found.value
        if visits > _MAX_LIST_COST or cost.loops:  # alternatives of a recursive schema have mismatches in mismatches
            raise TooCostly("it is of another form than the schema, and listing the places would take too long")
        raise self.mismatch(found.value)

    def find(self, text: str) -> Found:
        """Return the only JSON value in an answer's `text` that fits, or else the first that does not.

        The candidates are the whole answer without the model's thoughts, or else each fenced block and each value that
        starts at a bracket, within a sentence only an object. A value that is repeated is one value. Raises Mismatch if
        there is none, if two different values fit, or if a value is nested too deeply. Takes as long as it takes.
        """
        answer = split_thoughts(clean_text(text))[0].removeprefix("\ufeff")
        may_be_deep = _brackets(answer) > _MAX_NESTING
        fitting: list[Candidate] = []
        other: Found | None = None
        for one in self._candidates(answer):
            if may_be_deep and _is_deeper(one.value, _MAX_NESTING):
                raise Mismatch("it is nested too deeply")
            if not self._validator.is_valid(one.value):
                other = other or (Found(one.value, fits=False) if one.ends_line else None)
                continue
            if fitting and _form(fitting[0].value) != _form(one.value):
                raise Mismatch("it holds two different values that fit; give only the one that is the answer")
            fitting.append(one)
        if any(one.ends_line or (one.value and isinstance(one.value, dict)) for one in fitting):
            return Found(fitting[0].value, fits=True)
        if other is None:
            raise Mismatch(why_none(answer))
        return other

    def mismatch(self, value: JsonValue) -> Mismatch:
        """Return the error that lists the first few places in which `value` does not fit. Takes as long as it takes."""
        return Mismatch("; ".join(one_line(problem) for problem in list_problems(self._validator, value)))

    def _candidates(self, answer: str) -> Iterable[Candidate]:
        try:
            return [Candidate(whole(answer), ends_line=True)]
        except ValueError:
            # If the schema accepts plain text, brackets in the text have no meaning.
            return parts(answer, brackets=not self._validator.is_valid(answer))


def _form(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True)


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether `value` has more than `levels` levels of nesting."""
    if isinstance(value, dict):
        value = [*cast("dict[str, object]", value).values()]
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in cast("list[object]", value))


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


def _text(schema: Mapping[str, object]) -> str:
    return json.dumps(schema, ensure_ascii=False)


class _Compiled(NamedTuple):
    validator: Validator
    cost: Cost


@lru_cache(maxsize=64)
def _compiled(schema: str) -> _Compiled:
    """Return the validator and the cost of a schema. Many tasks share a schema: each is compiled once."""
    cost = measure(json.loads(schema))
    prepared = prepare(schema)
    if prepared.backtracks:
        cost = cost._replace(patterns=cost.patterns * _BACKTRACKING)
    return _Compiled(prepared.validator, cost)
