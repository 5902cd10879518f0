"""Validators of jsonschema-rs, and the places in which a value does not fit a schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from plait.safe_text import one_line

if TYPE_CHECKING:
    from jsonschema_rs import Validator

MOST_PROBLEMS = 5

Path: TypeAlias = tuple[str | int, ...]


class SchemaProblem(Exception):  # noqa: N818 - becomes the error of the caller
    """A schema cannot be used. `path` is the place in the schema."""

    def __init__(self, message: str, path: Path = ()) -> None:
        super().__init__(message)
        self.path = path[:20]

    @property
    def with_place(self) -> str:
        """The problem after the name of the field and the place, in one line."""
        return f"output_schema{f' at {json_path(self.path)}' if self.path else ''}: {self}"


def prepare(schema: str) -> Validator:
    """Return the validator for a schema given as JSON. Raises SchemaProblem. Never fetches anything.

    Patterns take a time that grows with the text's length alone, so lookaround and backreferences are refused.
    """
    # Imported here: the library is as large as all the rest, and most runs have no schema.
    import jsonschema_rs  # noqa: PLC0415

    linear = jsonschema_rs.RegexOptions()
    try:
        return jsonschema_rs.validator_for(
            schema, validate_formats=False, pattern_options=linear, retriever=_refuse_to_fetch
        )
    except jsonschema_rs.ValidationError as error:
        hint = "; patterns have no lookaround and no backreferences" if error.message.endswith('"regex"') else ""
        raise _invalid(f"{error.message}{hint}", tuple(error.instance_path)) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise _invalid(str(error)) from None


def _invalid(message: str, path: Path = ()) -> SchemaProblem:
    return SchemaProblem(f"this is not a valid JSON Schema: {one_line(message, 200)}", path)


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
