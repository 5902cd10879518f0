"""JSON Schemas that answers have to fit: reading, checking, and requesting a repair."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from plait.backends.answer_candidates import Candidate, parts, whole, why_none
from plait.backends.schema_cost import Cost, measure
from plait.backends.schema_validator import SchemaProblem, list_problems, prepare
from plait.backends.whole_answer import split_thoughts
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, one_line

if TYPE_CHECKING:
    from jsonschema_rs import Validator

MAX_COST = 10_000_000
"""Most visits (`Cost.of_check`) of a check: at worst 5 s, in which no other thread runs, and usually milliseconds."""
_MAX_LIST_COST = 100_000
"""Most visits of a check whose mismatches are listed: a mismatch may cost as much as a hundred visits."""
_MAX_NESTING = 200
"""Most levels of a value, as in stored results."""
_MAX_STACK = 4_000
"""Most levels of the value times levels of the schema: the validator calls itself, on the stack of the thread."""


class Mismatch(Exception):  # noqa: N818 - never leaves this package
    """An answer is not JSON or does not fit the schema. The message describes the problem in one line."""


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
        self._deepest = _MAX_NESTING if not self._cost.loops else min(_MAX_NESTING, _MAX_STACK // self._cost.depth)

    def read(self, text: str) -> JsonValue:
        """Return the only JSON value in an answer's `text` that fits.

        The candidates are the whole answer without the model's thoughts, or else each fenced block and each value that
        starts at a bracket, within a sentence only an object. A value that is repeated is one value. Raises Mismatch if
        no value fits, with the first few places in which the first one does not, if two different values fit, if a
        value is nested too deeply, or, before anything is parsed, if the check may take long.
        """
        visits = self._cost.of_check(text)
        if visits > MAX_COST:
            raise Mismatch("checking it would take too long; make the answer or the schema smaller")
        found = self._find(text)
        if found.fits:
            return found.value
        # The alternatives of a recursive schema have mismatches in mismatches, at each level of the value.
        if visits * max(1, self._cost.loops) ** _levels(found.value, _MAX_NESTING) > _MAX_LIST_COST:
            raise Mismatch("it is of another form than the schema, and too large to list where")
        raise Mismatch("; ".join(one_line(problem) for problem in list_problems(self._validator, found.value)))

    def _find(self, text: str) -> Found:
        """Return the value in `text` that fits, or else the first that does not."""
        answer = split_thoughts(clean_text(text))[0].removeprefix("\ufeff")
        may_be_deep = answer.count("[") + answer.count("{") > self._deepest
        fitting: list[Candidate] = []
        other: Found | None = None
        for one in self._candidates(answer):
            if may_be_deep and _levels(one.value, self._deepest) > self._deepest:
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

    def _candidates(self, answer: str) -> Iterable[Candidate]:
        try:
            return [Candidate(whole(answer), ends_line=True)]
        except ValueError:
            # If the schema accepts plain text, brackets in the text have no meaning.
            return parts(answer, brackets=not self._validator.is_valid(answer))


def _form(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True)


def _levels(value: object, most: int) -> int:
    """Return the levels of nesting of `value`, counted up to `most` + 1."""
    if isinstance(value, dict):
        value = [*cast("dict[str, object]", value).values()]
    elif not isinstance(value, list):
        return 0
    return 1 + max((_levels(one, most - 1) for one in cast("list[object]", value)), default=0) if most else 1


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
    return _Compiled(prepare(schema), cost)
