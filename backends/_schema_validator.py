"""Validators of jsonschema-rs, and the program of the process that checks what would take long.

This file is imported, and is also run by its path: it imports nothing else of plait. The program reads a schema and a
value from standard input, and writes the mismatches as JSON to standard output. Its arguments are the folder of
jsonschema-rs and a number of seconds: after so much processor time the system ends it, also when the process that
started it is dead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from jsonschema_rs import Validator

MEMORY_LIMIT = 2 << 30
"""Bytes of memory for one check: a list of a million mismatches takes less."""
MOST_PROBLEMS = 5
_BACKTRACK_LIMIT = 10_000


class Prepared(NamedTuple):
    """A validator."""

    validator: Validator
    backtracks: bool
    """Whether a pattern has lookaround or backreferences, so that patterns are tried in more than one way."""


class InvalidSchema(Exception):  # noqa: N818 - becomes the error of the caller
    """A schema is no JSON Schema. `path` is the place in the schema."""

    def __init__(self, message: str, path: Sequence[str | int] = ()) -> None:
        super().__init__(message)
        self.path = tuple(path)


def prepare(schema: str) -> Prepared:
    """Return the validator for a schema given as JSON. Raises InvalidSchema. Never fetches anything."""
    # Imported here: the library is as large as all the rest, and most runs have no schema.
    import jsonschema_rs  # noqa: PLC0415

    def make(options: Any) -> Validator:
        return jsonschema_rs.validator_for(
            schema, validate_formats=False, pattern_options=options, retriever=_refuse_to_fetch
        )

    with suppress(ValueError):
        return Prepared(make(jsonschema_rs.RegexOptions()), backtracks=False)
    try:
        return Prepared(make(jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_LIMIT)), backtracks=True)
    except jsonschema_rs.ValidationError as error:
        raise InvalidSchema(error.message, error.instance_path) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise InvalidSchema(str(error)) from None


def list_problems(validator: Validator, value: Any) -> list[str]:
    """Return the first few mismatches, in the order of their places, as `at $.place: message`."""
    found = [(json_path(error.instance_path), error.message) for error in validator.iter_errors(value)]
    return [f"at {_cut(place, 80)}: {_cut(message, 160)}" for place, message in sorted(found)[:MOST_PROBLEMS]]


def _cut(text: str, limit: int) -> str:
    """Return `text`, shortened in the middle: a message begins with the value and ends with what is wrong with it."""
    return text if len(text) <= limit else f"{text[: limit // 3]}…{text[limit // 3 + 1 - limit :]}"


def json_path(path: Sequence[str | int]) -> str:
    """Return a place in a value, such as `$.items[0].name`."""
    plain = (isinstance(step, str) and step.isidentifier() for step in path)
    return "$" + "".join(f".{step}" if name else f"[{step!r}]" for step, name in zip(path, plain, strict=True))


def _refuse_to_fetch(uri: str) -> NoReturn:
    raise ValueError(f"{uri!r} leaves the schema; only references like '#/$defs/name' work")


def _limit_resources(seconds: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # Windows has no `resource`; the parent's limit remains
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def main() -> None:
    """Check the value on standard input: the length of the schema, a line end, the schema and the value, as JSON."""
    _limit_resources(int(sys.argv[2]))
    sys.path.append(sys.argv[1])
    size = int(sys.stdin.buffer.readline())
    schema = sys.stdin.buffer.read(size).decode()
    value = json.loads(sys.stdin.buffer.read())
    validator = prepare(schema).validator
    if validator.is_valid(value):
        sys.stdout.write("[]\n")
        return
    # The answer is known; listing the mismatches may take longer than all that was before.
    sys.stdout.write("mismatch\n")
    sys.stdout.flush()
    sys.stdout.write(json.dumps(list_problems(validator, value)))


if __name__ == "__main__":
    main()
