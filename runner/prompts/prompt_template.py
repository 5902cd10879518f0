"""A prompt rendered from upstream results, and a condition (`when`) read as true or false. Pure.

Both are rendered in one pass: an inserted value is never read as a template. A plain prompt holds names and fields and
nothing else, and is filled in by a substitution:

    {{ review }}  {{ review.label }}  {{ parts.0 }}  {{ item["first name"] }}  {{ results["my-task"] }}  {{ '{{' }}

Text that a model wrote gets no more. For the user's own prompts it is the short way: 20 µs, where jinja2 takes 600 µs
to read a prompt, and 0.1 s to import. All others go to `jinja_template`, which gives each of these constructs the same
meaning. So a prompt is plain or not by its text alone: one that was checked when a model added its task stays plain in
every store and after every resume.

A condition is an expression of the template language with the same names, filters, tests and limits. The braces around
a name are those of a prompt, and the expression reads them as parentheses:

    {{ review.data.ok }} == false        {{ score.value }} >= 3 and not {{ draft.final }}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from plait.errors import PromptError
from plait.json_form import JsonInput, JsonValue, json_of, parsed, text_of
from plait.runner.prompts.prompt_names import (
    CONSTANTS,
    DEFAULT_LIMIT,
    STEP,
    PromptNames,
    by_key,
    field_of,
    first_of,
    too_long,
    unknown_name,
)
from plait.safe_text import is_utf8
from plait.task import Call, Check

if TYPE_CHECKING:
    from plait.runner.prompts.jinja_template import Template

ANSWER = "answer"
"""The name of the checked answer in the texts of a check."""


_NOT_NAMES = frozenset({*CONSTANTS, "not", "self"})
"""Words with a meaning of their own in the template language, where they stand in place of a name."""
_PATH = rf"(?! (?:{'|'.join(sorted(_NOT_NAMES))}) \b) [A-Za-z_]\w* (?:{STEP})*"
_CONSTRUCT = re.compile(rf"\{{ (?: \{{ (?: \s* ( {_PATH} | '\{{[{{%]' ) \s* \}}\}} )? | % )", re.ASCII | re.VERBOSE)
"""A construct with its path or its literal braces in the group; the beginning of any other construct, without."""
_TOKEN = re.compile(r"""\.?\[?(?:"([^"]*)"|'([^']*)'|(-?\d+)|([A-Za-z_]\w*))\]?""", re.ASCII)
_ASKS_FIRST = re.compile(r"\bis\s+(?:not\s+)?(?:un)?defined\b|\|\s*default\b")
"""A condition that asks whether there is a field."""
_SHOWN = re.compile(r"\{[{%].{0,60}?[}%]\}|.{0,40}")
_DASHED = re.compile(r"\{\{\s*([\w-]+)[\s.\[}]", re.ASCII)
_MOST_SHOWN = 3
_NOTHING = PromptNames()


def names_used(prompt: str) -> PromptNames:
    """Return the names that `prompt` uses. Raise PromptError, with the line, if the prompt cannot be used."""
    names, mistakes = parse_names(prompt)
    if mistakes:
        raise first_of(mistakes)
    return names


def parse_names(prompt: str) -> tuple[PromptNames, Sequence[PromptError]]:
    """Return the names that `prompt` uses, as far as they can be read, and all mistakes of the prompt itself."""
    if "{" not in prompt:
        return _NOTHING, ()
    plain = _plain(prompt)
    if plain is not None:
        return plain[1], ()
    try:
        template = _compiled(prompt)
    except PromptError as error:
        return _NOTHING, (error,)
    return template.names, template.mistakes


def render(prompt: str, values: Mapping[str, JsonInput], *, limit: int = DEFAULT_LIMIT) -> str:
    """Return `prompt` with its constructs replaced by `values`, which are inserted unchanged.

    Text is inserted unchanged, None as nothing, everything else as JSON. A prompt without any construct is returned
    unchanged; in all other prompts line ends become `\\n`. Raise PromptError for an unknown name or field, for a
    template that cannot be used, and for a result of more than `limit` characters.
    """
    plain = _plain(prompt)
    if plain is None:
        return _compiled(prompt).render(values, limit)
    if plain[0]:
        return _fill_in(prompt, values, limit)
    if len(prompt) > limit:
        raise too_long(limit)
    return prompt


def evaluated(value: JsonInput, values: Mapping[str, JsonInput]) -> JsonValue:
    """Return `value` with its texts rendered, those in lists and mappings too. A text that is one name, such as
    `{{ item }}` or `{{ review.score }}`, becomes the value itself. Raise PromptError as `render`.
    """
    if isinstance(value, str):
        plain, text = _plain(value), value.strip()
        if plain is None or len(plain[0]) != 1 or not _CONSTRUCT.fullmatch(text) or plain[0][0][0] == "'":
            return render(value, values)
        inserted = _value_at(plain[0][0], values)
        return str(inserted) if isinstance(inserted, str) else parsed(json_of(inserted))
    if isinstance(value, Mapping):
        return {name: evaluated(inner, values) for name, inner in value.items()}
    return [evaluated(inner, values) for inner in value] if isinstance(value, Sequence) else value


def names_in(value: JsonInput) -> tuple[PromptNames, Sequence[PromptError]]:
    """Return the names in the texts of `value`, and the mistakes of these texts, as `parse_names`."""
    if isinstance(value, str):
        return parse_names(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    parts = [names_in(one) for one in inner]
    return joined(names for names, _ in parts), [mistake for _, mistakes in parts for mistake in mistakes]


def joined(parts: Iterable[PromptNames]) -> PromptNames:
    """Return the names of all `parts`."""
    fields = [(one.names, one.results, one.inputs, one.item) for one in parts]
    return PromptNames(*(frozenset(chain.from_iterable(sets)) for sets in zip(*fields, strict=True)))


def paths_used(text: str) -> list[tuple[str, list[str | int]]]:
    """Return the fields that a plain prompt or a condition reads for certain: each as it is written, and as the name of
    the task or the input with the keys behind it. A prompt that is not plain may read a field in one branch alone.
    """
    plain = _plain(text) if "{" in text else None
    read = [] if plain is None else [path for path in plain[0] if not path.isidentifier() and path[0] != "'"]
    if not read or _ASKS_FIRST.search(text):
        return []
    steps = ((path, [*_steps(path)]) for path in read)
    return [(path, keys[1:] if keys[0] == "results" else keys) for path, keys in steps]


def is_plain(prompt: str) -> bool:
    """Return whether a prompt holds names and fields and nothing else."""
    return "" not in _CONSTRUCT.findall(prompt)


def check_plain(prompt: str) -> PromptError | None:
    """Return the error for a model whose prompt is not plain; None for a plain prompt."""
    wrong = (construct.start() for construct in _CONSTRUCT.finditer(prompt) if not construct[1])
    starts = [*islice(wrong, _MOST_SHOWN + 1)]
    if not starts:
        return None
    excerpts = [*dict.fromkeys(match[0] for start in starts if (match := _SHOWN.match(prompt, start)))]
    examples = ", ".join(excerpts[:_MOST_SHOWN]) + (", ..." if len(excerpts) > _MOST_SHOWN else "")
    ids = [match[1] for text in excerpts if (match := _DASHED.match(text)) and match[1] not in CONSTANTS]
    hint = next((f"; {by_key(name)}" for name in ids if name in _NOT_NAMES or not name.isidentifier()), "")
    message = (
        f"the prompt of an added task may hold names and fields, as in {{{{ name }}}} and {{{{ name.field }}}}, and no "
        f"other template syntax, such as {examples}{hint}; two braces as they are: {{{{ '{{{{' }}}}"
    )
    return PromptError(message, _line(prompt, starts[0]))


@lru_cache(maxsize=128)
def _plain(prompt: str) -> tuple[list[str], PromptNames] | None:
    """Return the paths and the names of a plain prompt; None for any other prompt. The parts of a `for_each` have one
    prompt, which is read once.
    """
    paths: list[str] = _CONSTRUCT.findall(prompt)
    return None if "" in paths else (paths, _names_of(paths) if paths else _NOTHING)


def _names_of(paths: Collection[str]) -> PromptNames:
    if all(map(str.isidentifier, paths)):
        return PromptNames(frozenset(paths))
    names: set[str] = set()
    fields: dict[str, set[str]] = {"results": set(), "inputs": set(), "item": set()}
    for name, *keys in (_steps(path) for path in paths if path[0] != "'"):
        names.add(str(name))
        if name in fields and keys and isinstance(keys[0], str):
            fields[name].add(keys[0])
    return PromptNames(frozenset(names), **{name: frozenset(keys) for name, keys in fields.items()})


def _fill_in(prompt: str, values: Mapping[str, JsonInput], limit: int) -> str:
    size = 0

    def text_for(construct: re.Match[str]) -> str:
        nonlocal size
        try:
            text = _text_at(construct[1], values)
        except PromptError as error:
            error.line = _line(prompt, construct.start())
            raise
        size += len(text)
        if size > limit:  # not only at the end: a short prompt could fill the memory before
            raise too_long(limit)
        return text

    prompt = prompt.replace("\r\n", "\n").replace("\r", "\n")
    filled = _CONSTRUCT.sub(text_for, prompt)
    if len(filled) > limit:
        raise too_long(limit)
    return filled


def _text_at(path: str, values: Mapping[str, JsonInput]) -> str:
    if path[0] == "'":
        return path[1:-1]
    value = _value_at(path, values)
    try:
        return text_of(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"the value of {path!r} cannot be written as JSON: {error}") from error


def _value_at(path: str, values: Mapping[str, JsonInput]) -> JsonInput:
    name, *keys = (path,) if path.isidentifier() else _steps(path)
    if name not in values:
        raise PromptError(unknown_name(str(name), values))
    value = values[str(name)]
    for depth, key in enumerate(keys, 1):
        try:
            value = field_of(value, key)
        except LookupError as error:
            owner = "".join(token[0] for token, _ in zip(_TOKEN.finditer(path), range(depth), strict=False))
            raise PromptError(f"{owner} {error.args[0]}") from error
    return value


def _steps(path: str) -> Iterator[str | int]:
    for double, single, number, name in _TOKEN.findall(path):
        yield int(number) if number else double or single or name


def _line(prompt: str, position: int) -> int:
    return prompt.count("\n", 0, position) + 1


_TEXT = r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\""""
_PIECE = re.compile(rf"({_TEXT})|\{{\{{-?((?:{_TEXT}|[^'\"])*?)-?\}}\}}", re.DOTALL)
"""A quoted text, or a construct in braces with its expression in the second group."""
_OUTCOMES = {"true": True, "false": False, "": False}
_ORDER = re.compile(r"'(<=?|>=?)' not supported between instances of '\w+' and '\w+'")
_SHORT = 60


def condition_names(condition: str) -> tuple[PromptNames, Sequence[PromptError]]:
    """Return the names that `condition` uses, as far as they can be read, and all mistakes of the condition itself."""
    try:
        template = _compiled(condition, is_condition=True)
    except PromptError as error:
        return PromptNames(), (error,)
    return template.names, template.mistakes


def compared(condition: str) -> tuple[Sequence[Sequence[str | int]], Sequence[object]] | None:
    """Return what `condition` reads, each name with its keys, and its literals; None if it has mistakes, or does
    more than compare.
    """
    return None if condition_names(condition)[1] else _compiled(condition, is_condition=True).compared


def check_texts(check: Check) -> Iterator[tuple[str, PromptNames, Sequence[PromptError]]]:
    """Yield each template of a check with the names that it uses, as far as they can be read, and its mistakes. The
    name `answer`, of the checked answer, is left out.
    """
    for word in check.run:
        yield word, *parse_names(word)
    for text, read in ((check.judge, parse_names), (check.passes, condition_names)):
        if text:
            names, mistakes = read(text)
            yield text, replace(names, names=names.names - {ANSWER}), mistakes


TextField: TypeAlias = Literal["prompt", "run", "cwd", "env", "check", "with", "when", "backend"]
"""The field of a task with names: of a text, or `backend` for the parameters of its function."""


def named_texts(
    task: Any, check: Check | None, call: Call | None
) -> Iterator[tuple[TextField, str, PromptNames, Sequence[PromptError]]]:
    """Yield each template and condition of a task, a `Task` or one as written in a plan file, with its field, the names
    that it uses, as far as they can be read, and its mistakes. What is no text is left out.
    """
    texts: tuple[tuple[TextField, Iterable[object]], ...] = (
        ("prompt", (task.prompt,)),
        ("run", task.run),
        ("cwd", (task.cwd,)),
        ("env", task.env.values()),
    )
    for field, words in texts:
        for word in words:
            if isinstance(word, str) and "{" in word:
                yield field, word, *parse_names(word)
    for text, names, mistakes in () if check is None else check_texts(check):
        yield "check", text, names, mistakes
    for text in filter(is_utf8, () if call is None else call.texts):
        yield "with", text, *parse_names(text)
    if isinstance(task.when, str):
        yield "when", task.when, *condition_names(task.when)


def is_true(condition: str, values: Mapping[str, JsonInput]) -> bool:
    """Return whether `condition` is true of `values`. Raise PromptError if the condition cannot be evaluated, or has a
    value other than true, false, none and an empty text; none and an empty text are false.
    """
    try:
        text = _compiled(condition, is_condition=True).render(values, DEFAULT_LIMIT)
    except PromptError as error:
        order = _ORDER.fullmatch(str(error))
        if order is None:
            raise
        message = f"{order[1]!r} needs two numbers or two texts; fields that are numbers come with an output_schema"
        raise PromptError(message, error.line) from error
    if text not in _OUTCOMES:
        excerpt = text if len(text) <= _SHORT else f"{text[:_SHORT]}..."
        raise PromptError(
            f"its value is {excerpt!r}, neither true nor false; compare the value, as in == {excerpt[:20]!r}"
        )
    return _OUTCOMES[text]


@lru_cache(maxsize=256)
def _compiled(text: str, *, is_condition: bool = False) -> Template:
    """Return the parsed prompt, or the parsed condition."""
    from plait.runner.prompts.jinja_template import Template  # noqa: PLC0415 - jinja2 takes long to import

    if is_condition:
        return Template(_PIECE.sub(lambda piece: piece[1] or f" ({piece[2]}) ", text), is_condition=True)
    return Template(text)
