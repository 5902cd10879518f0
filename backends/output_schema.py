"""JSON Schemas that answers have to fit: a value found in the text, checked within bounds, or a repair asked for.

The validator holds the interpreter for a whole check, so no other thread could end it: what a check may cost is known
before, from the schema and the length of the answer, and too high a cost is refused. Patterns take linear time: they
have no lookaround and no backreferences. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar, cast
from urllib.parse import unquote

from plait.backends.backend_protocol import Output
from plait.backends.whole_answer import split_thoughts
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import UnreadableNumber, clean_text, json_at, one_line, parse_json

if TYPE_CHECKING:
    from jsonschema_rs import Validator

MAX_COST = 30_000_000
"""Most visits (`_Cost.of_check`) of a check: at worst 5 s, in which no other thread runs, and usually milliseconds."""
_MAX_LIST_COST = 100_000
"""Most visits of a check whose mismatches are listed: a mismatch may cost as much as a hundred visits."""
_MAX_MISMATCHES = 5
_MAX_NESTING = 200
"""Most levels of a value, as in stored results."""
_MAX_STACK = 4_000
"""Most levels of the value times levels of the schema: the validator calls itself, on the stack of the thread."""

Path: TypeAlias = tuple[str | int, ...]
_Answer = TypeVar("_Answer")
_Data = TypeVar("_Data")


class Mismatch(Exception):  # noqa: N818 - never leaves this package
    """An answer is not JSON or does not fit the schema. The message describes the problem in one line."""


class SchemaProblem(Exception):  # noqa: N818 - becomes the error of the caller
    """A schema cannot be used. `path` is the place in the schema."""

    def __init__(self, message: str, path: Path = ()) -> None:
        super().__init__(message)
        self.path = path[:20]

    @property
    def with_place(self) -> str:
        """The problem after the name of the field and the place, in one line."""
        return f"output_schema{f' at {json_path(self.path)}' if self.path else ''}: {self}"


class Schema:
    """A JSON Schema, ready to check answers. Raises BackendError (invalid_request) if `schema` is not a valid JSON
    Schema, or is too costly to check.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self.text = json.dumps(schema, ensure_ascii=False)
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
        answer = split_thoughts(clean_text(text))[0].removeprefix("\ufeff")
        may_be_deep = answer.count("[") + answer.count("{") > self._deepest
        fitting: list[_Candidate] = []
        first_other: _Candidate | None = None
        for candidate in self._candidates(answer):
            if may_be_deep and _levels(candidate.value, self._deepest) > self._deepest:
                raise Mismatch("it is nested too deeply")
            if not self._validator.is_valid(candidate.value):
                first_other = first_other or (candidate if candidate.ends_line else None)
                continue
            if fitting and _form(fitting[0].value) != _form(candidate.value):
                raise Mismatch("it holds two different values that fit; give only the one that is the answer")
            fitting.append(candidate)
        if any(candidate.ends_line or (candidate.value and isinstance(candidate.value, dict)) for candidate in fitting):
            return fitting[0].value
        if first_other is None:
            raise Mismatch(_why_none(answer))
        # The alternatives of a recursive schema have mismatches in mismatches, at each level of the value.
        if visits * max(1, self._cost.loops) ** _levels(first_other.value, _MAX_NESTING) > _MAX_LIST_COST:
            raise Mismatch("it is of another form than the schema, and too large to list where")
        errors = self._validator.iter_errors(first_other.value)
        places = sorted((json_path(error.instance_path), error.message) for error in errors)[:_MAX_MISMATCHES]
        listed = (one_line(f"at {_cut(place, 80)}: {_cut(message, 160)}") for place, message in places)
        raise Mismatch("; ".join(listed))

    def _candidates(self, answer: str) -> Iterable[_Candidate]:
        try:
            return [_Candidate(_cleaned(parse_json(answer), answer), ends_line=True)]
        except ValueError:
            # If the schema accepts plain text, brackets in the text have no meaning.
            return _parts(answer, brackets=not self._validator.is_valid(answer))


def schema_problem(schema: Mapping[str, object]) -> SchemaProblem | None:
    """Return the problem of a schema that is invalid or too costly to check; None if the schema can be used."""
    try:
        _compiled(json.dumps(schema, ensure_ascii=False))
    except SchemaProblem as problem:
        return problem
    return None


async def fitting_answer(
    schema: Schema,
    answer: _Answer,
    read: Callable[[Schema, _Answer], Awaitable[_Data]],
    ask_again: Callable[[str], Awaitable[_Answer]],
    on_output: Callable[[Output], None],
) -> tuple[_Answer, _Data]:
    """Return `answer` with its value as of `read`. After a Mismatch, a repair is asked for once, in the same
    conversation, and its answer is returned. Raises BackendError (invalid_output) if the second answer does not fit
    either.
    """
    try:
        return answer, await read(schema, answer)
    except Mismatch as mismatch:
        # The schema is repeated because some servers accept a schema without showing it to the model.
        prompt = (
            f"That answer cannot be used: {mismatch}. Answer again with nothing but JSON, no text and no code fence "
            f"around it, that fits this JSON Schema: {schema.text}"
        )
    on_output(Output("notice", "the answer does not fit its schema; asking once more"))
    answer = await ask_again(prompt)
    try:
        return answer, await read(schema, answer)
    except Mismatch as mismatch:
        raise invalid_output(mismatch) from None


def in_words(schema: Mapping[str, object]) -> str:
    """Return the instruction to a model whose server, or agent, cannot be given `schema`."""
    return f"Answer with nothing but JSON that fits this JSON Schema: {json.dumps(schema, ensure_ascii=False)}"


def invalid_output(mismatch: Mismatch) -> BackendError:
    """Return the error for an answer that still does not fit after the repair."""
    return BackendError(ErrorKind.INVALID_OUTPUT, f"the answer does not fit output_schema: {mismatch}")


def json_path(path: Sequence[str | int]) -> str:
    """Return a place in a value, such as `$.items[0].name`."""
    plain = (isinstance(step, str) and step.isidentifier() for step in path)
    return "$" + "".join(f".{step}" if name else f"[{step!r}]" for step, name in zip(path, plain, strict=True))


def _form(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True)


def _levels(value: object, limit: int) -> int:
    """Return the levels of nesting of `value`, counted up to `limit` + 1."""
    if isinstance(value, dict):
        value = [*cast("dict[str, object]", value).values()]
    elif not isinstance(value, list):
        return 0
    return 1 + max((_levels(part, limit - 1) for part in cast("list[object]", value)), default=0) if limit else 1


def _cut(text: str, limit: int) -> str:
    """Return `text`, shortened in the middle: a message begins with the value and ends with what is wrong with it."""
    return text if len(text) <= limit else f"{text[: limit // 3]}…{text[limit // 3 + 1 - limit :]}"


@lru_cache(maxsize=64)
def _compiled(schema: str) -> tuple[Validator, _Cost]:
    """Return the validator of a schema, which never fetches anything, and the cost of a check. Raises SchemaProblem.
    Many tasks share a schema: each is compiled once.
    """
    # Imported here: the library is as large as all the rest, and most runs have no schema.
    import jsonschema_rs  # noqa: PLC0415

    cost = _Survey(json.loads(schema)).cost()
    linear = jsonschema_rs.RegexOptions()
    try:
        validator = jsonschema_rs.validator_for(
            schema, validate_formats=False, pattern_options=linear, retriever=_refuse_to_fetch
        )
    except jsonschema_rs.ValidationError as error:
        hint = "; patterns have no lookaround and no backreferences" if error.message.endswith('"regex"') else ""
        raise _invalid(f"{error.message}{hint}", tuple(error.instance_path)) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise _invalid(str(error)) from None
    return validator, cost


def _invalid(message: str, path: Path = ()) -> SchemaProblem:
    return SchemaProblem(f"this is not a valid JSON Schema: {one_line(message, 200)}", path)


def _refuse_to_fetch(uri: str) -> NoReturn:
    raise ValueError(f"{uri!r} leaves the schema; only references like '#/$defs/name' work")


# The JSON values in the text of an answer, in the forms in which models give them.

_FENCE = re.compile(r"(?:```|~~~)[^\s`~]*[ \t]*\r?\n\s*")
_FENCES_END = re.compile(r"\s*(?:```|~~~|\Z)")
_BRACKET = re.compile(r"[\[{]")
_LINES_END = re.compile(r"[ \t.`~]*(?:</[\w|]+>[ \t]*)*(?:[\r\n]|\Z)")
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*+"|[\[\]{}]')
_JSON = re.compile(r'\{\s*["}/]|\[\s*["{\[\]\-0-9tfn/]|[\[{][ \t]*[\r\n]')
"""A bracket with which JSON may begin, and seldom a remark in prose."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Perhaps half a character, which the validator refuses and the store cannot hold."""
_MOST_PLACES = 200
"""Most places in an answer at which a value may begin."""


class _Candidate(NamedTuple):
    """A value found in an answer."""

    value: JsonValue
    ends_line: bool
    """Whether nothing follows in the line. Within a sentence only an object with fields is an answer: a list, such as
    [1], is a remark there. Either may be the rival of an answer.
    """


def _parts(answer: str, *, brackets: bool) -> Iterator[_Candidate]:
    """Yield the value of each fenced block that is JSON, and with `brackets` of each bracket at the top level, in their
    order: no part of another value, or of JSON that cannot be read. Within other code, a value begins its line.
    """
    here, in_code = 0, False
    fence, bracket = _FENCE.search(answer), _BRACKET.search(answer) if brackets else None
    for _ in range(_MOST_PLACES):
        if fence is not None and fence.start() < here:
            fence = _FENCE.search(answer, here)
        if bracket is not None and bracket.start() < here:
            bracket = _BRACKET.search(answer, here)
        if fence is not None and (bracket is None or fence.start() < bracket.start()):
            here = fence.end()
            match = None if in_code else _value_at(answer, here)
            end = None if match is None else _FENCES_END.match(answer, match[1])
            if match is not None and end is not None:
                here = end.end()
                yield _Candidate(_cleaned(match[0], answer), ends_line=True)
            else:
                in_code = not in_code
        elif bracket is not None:
            match = _value_at(answer, bracket.start()) if _JSON.match(answer, bracket.start()) else None
            here = _after(answer, bracket.start()) if match is None else match[1]
            line = answer[max(0, bracket.start() - 200) : bracket.start()].rpartition("\n")[2]
            if match is not None and (not in_code or not line.strip()):
                yield _Candidate(_cleaned(match[0], answer), ends_line=_LINES_END.match(answer, here) is not None)
        else:
            return


def _value_at(answer: str, start: int) -> tuple[JsonValue, int] | None:
    try:
        return json_at(answer, start)
    except ValueError:
        return None


def _after(answer: str, bracket: int) -> int:
    """Return the place from which the search goes on after a `bracket` that begins no value: behind its partner, the
    end without one. Brackets as they stand in prose have no partner to find.
    """
    if not _JSON.match(answer, bracket):
        return bracket + 1
    depth = 0
    for token in _TOKEN.finditer(answer, bracket):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(answer)


def _why_none(answer: str) -> str:
    """Return the reason why no JSON was found in `answer`."""
    fence = _FENCE.search(answer)
    what = "it is not JSON" if fence is None else "its fenced block is not JSON"
    try:
        parse_json(answer if fence is None else answer[fence.end() :].partition(fence[0][:3])[0])
    except UnreadableNumber as exc:
        return f"{'it' if fence is None else 'its fenced block'} cannot be read: {exc}"
    except ValueError as exc:
        what += f": {one_line(str(exc), 120)}"
    return what


def _cleaned(value: JsonValue, text: str) -> JsonValue:
    """Return a value that was read from `text`, without lone surrogates."""
    return parse_json(clean_text(json.dumps(value, ensure_ascii=False))) if _HALF.search(text) else value


# The cost of checking values against a schema, found from the schema alone.
#
# A schema of two kilobytes can stand for more than a million million parts: each definition refers to the next one
# twice. The validator visits each part of the schema, with its references replaced by their targets, at most once for
# each part of a value, and keeps the results of references that point back. The product of the two numbers of parts
# thus bounds the time of a check. Each target is counted once and its size used again, so counting takes linear time.
# Every JSON value in a schema counts as a part, so the time is usually far below the cost.

MAX_VALUES = 20_000
"""Most JSON values in a schema as written. Preparing such a schema takes about 50 ms."""
MAX_EXPANDED = 1_000_000
"""Most JSON values in a schema after references are replaced by their targets."""
MAX_DEPTH = 200
"""Most levels of JSON in a schema, with references followed."""
MAX_PATTERNS = 300_000
"""Most characters in the patterns of a schema as written, repetitions written out."""
_TOO_DEEP = f"the schema is nested more than {MAX_DEPTH} levels deep, references followed"
_TOO_COSTLY = (
    "the schema is too costly to check: with its references replaced by their targets it has more than "
    f"{MAX_EXPANDED:,} values; make it simpler"
)
_PATTERNS_TOO_LARGE = (
    "the patterns are too large, with their repetitions written out: more than "
    f"{MAX_PATTERNS:,} characters; make them simpler"
)

_Kind: TypeAlias = Literal["schema", "names", "data"]
"""The kind of a value in a schema: a schema, an object of schemas with names for keys, or data."""
_KINDS: dict[object, _Kind] = {
    **dict.fromkeys(
        ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"), "names"
    ),
    **dict.fromkeys(("const", "default", "enum", "examples"), "data"),
}
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
_UNEVALUATED = {"unevaluatedItems", "unevaluatedProperties"}
_UNEVALUATED_FACTOR = 3
"""The validator visits the parts of such a schema three times, to find the evaluated ones."""
_CLASS_SIZE = 2_000
"""A class such as \\p{L} stands for some hundreds of ranges: as much work as this many characters."""
_PATTERN_UNITS = 10
"""A character of a pattern costs for each character of a text less than a tenth of a visit, unless made to cost more:
then a third.
"""
_PATTERN_TOKEN = re.compile(
    r"\\[pP](?:\{[^}]*(?:\}|\Z)|.)|\\.|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL
)
"""A brace or bracket without an end runs to the end of the pattern, and is not looked at again."""


class _Cost(NamedTuple):
    """The size of a schema, with its references replaced by their targets."""

    parts: int
    """JSON values."""
    patterns: int = 0
    """Characters of patterns, repetitions written out."""
    depth: int = 0
    """Levels of JSON."""
    loops: int = 0
    """References that point back to a schema around them, in one recursive schema: 0 unless there is one."""

    def of_check(self, text: str) -> int:
        """Return the cost of checking JSON `text`, in visits of a part of a value by a part of the schema."""
        values = 1 + text.count(",") + text.count(":") + text.count("[") + text.count("{")
        return self.parts * values + self.patterns * len(text) // _PATTERN_UNITS


class _Survey:
    """One reading of a schema. Targets of references are known by the `id` of their objects, which the schema keeps
    alive.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._values = self._patterns = 0
        self._targets: dict[int, _Cost | None] = {}  # None: being counted
        self._recursive: set[int] = set()

    def cost(self) -> _Cost:
        """Return the cost of the schema. Raises SchemaProblem."""
        parts, patterns, depth, loops = self._target(self._root, (), 0)
        again = [cost for key in self._recursive if (cost := self._targets[key]) is not None]
        parts += loops * sum(cost.parts for cost in again)
        widest = max((cost.loops for cost in again), default=0)
        return _Cost(parts, patterns + loops * sum(cost.patterns for cost in again), depth, widest)

    def _target(self, schema: Any, path: Path, depth: int) -> _Cost:
        key = id(schema)
        if key not in self._targets:
            self._targets[key] = None
            self._targets[key] = self._expand(schema, path, "schema", depth)
        cost = self._targets[key]
        if cost is None:
            self._recursive.add(key)
        return cost or _Cost(1, loops=1)

    def _expand(self, value: Any, path: Path, kind: _Kind, depth: int) -> _Cost:
        """Return the cost of the value at `path`, `depth` levels below the root with references followed."""
        self._values += 1
        _require(self._values <= MAX_VALUES, f"the schema has more than {MAX_VALUES:,} values; make it smaller", ())
        _require(depth <= MAX_DEPTH, _TOO_DEEP, path)
        keywords = cast("dict[str, Any]", value) if kind == "schema" and isinstance(value, dict) else {}
        parts = patterns = deepest = loops = 0
        for key, one, inner in _in(value, kind):
            place = (*path, key)
            word = key if key in keywords else None
            patterns += self._pattern(word, one, place)
            if word in _REFERENCES and isinstance(one, str):
                cost = self._target(*_resolve(self._root, one, place), depth + 1)
            elif word in {"$defs", "definitions"} and isinstance(one, dict):
                for name, schema in cast("dict[str, Any]", one).items():  # they count where references point to them
                    self._target(schema, (*place, name), depth + 2)
                continue
            else:
                moved = word in {"$id", "id"} and bool(path) and isinstance(one, str)
                _require(not moved, f"an inner schema cannot have an {key}; refer to it as '#/$defs/name'", place)
                cost = self._expand(one, place, inner, depth + 1)
            parts, patterns, loops = parts + cost.parts, patterns + cost.patterns, loops + cost.loops
            deepest = max(deepest, 1 + cost.depth)
            _require(depth + deepest <= MAX_DEPTH, _TOO_DEEP, place)
            _require(parts + patterns // _PATTERN_UNITS <= MAX_EXPANDED, _TOO_COSTLY, place)
        times = _UNEVALUATED_FACTOR ** len(_UNEVALUATED & keywords.keys())
        return _Cost(1 + parts * times, patterns * times, deepest, loops * times)

    def _pattern(self, word: str | int | None, value: Any, place: Path) -> int:
        """Return the size of the patterns in the value of a keyword."""
        several = word == "patternProperties" and isinstance(value, dict)
        patterns: list[Any] = [*cast("dict[str, Any]", value)] if several else [value] if word == "pattern" else []
        size = sum(_pattern_size(one) for one in patterns if isinstance(one, str))
        self._patterns += size
        _require(self._patterns <= MAX_PATTERNS, _PATTERNS_TOO_LARGE, place)
        return size


def _require(condition: bool, message: str, path: Path) -> None:
    if not condition:
        raise SchemaProblem(message, path)


def _in(value: Any, kind: _Kind) -> Iterator[tuple[str | int, Any, _Kind]]:
    """Yield each value in a part of a schema, with its key and its kind."""
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        parts = cast("dict[str | int, Any]", value).items()
    elif isinstance(value, list):
        parts = enumerate(cast("list[Any]", value))  # type: ignore[redundant-cast]
    for key, one in parts:
        yield key, one, _KINDS.get(key, "schema") if kind == "schema" else "schema" if kind == "names" else "data"


def _pattern_size(pattern: str) -> int:
    """Return the length of `pattern` with its repetitions written out: 6 for `(a{2}b)` written as `(aab)`, and so on.

    The result is an estimate for patterns that are invalid.
    """
    groups, last = [0], 0
    for token in _PATTERN_TOKEN.finditer(pattern):
        word = token[0]
        if word == "(":
            groups.append(0)
            continue
        if word == ")" and len(groups) > 1:
            last = 1 + groups.pop()
        elif token[1] is not None:
            times = int(min(float(token[2] or token[1]), MAX_PATTERNS + 1))
            last, groups[-1] = last * times, groups[-1] - last
        else:
            last = 1 + _CLASS_SIZE * word.lower().count("\\p")
        groups[-1] = min(groups[-1] + last, MAX_PATTERNS + 1)
    return sum(groups)


def _resolve(root: Any, target: str, path: Path) -> tuple[Any, Path]:
    """Return the schema that the reference at `path` points to, and its place. Raises SchemaProblem without one."""
    quoted = repr(target if len(target) <= 80 else f"{target[:79]}…")
    message = f"{path[-1]} {quoted} leaves the schema; only references like '#/$defs/name' work"
    _require(target[:2] in {"#", "#/"}, message, path)
    place: Path = ()
    for step in unquote(target).removesuffix("/").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        key = int(name) if isinstance(root, list) and name.isdecimal() else name
        root, place = next((one for at, one, _ in _in(root, "data") if at == key), None), (*place, key)
    _require(isinstance(root, dict | bool), f"{path[-1]} {quoted} points to no schema", path)
    return root, place
