"""Docstrings and comments are plain: few pronouns, and hardly a who or what (CONTRIBUTING.md, "Prose").

The limits are close to well-kept code bases: h11, anyio, trio, procrastinate and pgqueuer have 2.5 to 6.1 % pronouns
and demonstratives, and at most 0.31 % of who, what and whose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRONOUNS = {
    "that",
    "those",
    "who",
    "what",
    "it",
    "its",
    "whom",
    "which",
    "one",
    "ones",
    "them",
    "there",
    "so",
    "such",
    "theirs",
    "others",
    "whose",
    "whoever",
    "whatever",
    "this",
    "these",
}
RELATIVES = {"who", "whom", "whose", "whoever", "what", "whatever"}
PACKAGES = [
    folder
    for package in ("runner", "backends", "persistence")
    for folder in [ROOT / package, *sorted(path.parent for path in (ROOT / package).rglob("*/__init__.py"))]
]


def texts(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a file, without the code in backticks."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield re.sub(r"`[^`]*`", "", value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield re.sub(r"`[^`]*`", "", token.string)


def shares(all_texts: list[str]) -> tuple[int, float, float]:
    """Return the number of words, and the percentages of pronouns and of who/what among them."""
    words = [word.lower() for text in all_texts for word in re.findall(r"[A-Za-z']+", text)]
    count = max(len(words), 1)
    return len(words), *(100 * sum(word in kind for word in words) / count for kind in (PRONOUNS, RELATIVES))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_the_prose_of_a_package_is_plain(folder: Path) -> None:
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    count, pronouns, relatives = shares([text for path in files for text in texts(path)])
    # In a small package a few words decide: each kind may occur a few times.
    assert pronouns <= 7 or pronouns * count <= 700, f"{pronouns:.1f} % of {count} words are pronouns; at most 7 %"
    assert relatives <= 0.4 or relatives * count <= 200, f"{relatives:.2f} % of {count} words are who or what; 0.4 %"


def test_no_sentence_begins_with_what_or_who() -> None:
    files = [
        path for package in ("runner", "backends", "persistence") for path in sorted((ROOT / package).rglob("*.py"))
    ]
    riddle = re.compile(r"(?:^|[.!?]\s+)(What|Who|Whoever|Those|That of)\b(?![^.]*\?)")
    found = [
        f"{path.relative_to(ROOT)}: {' '.join(text.split())[:100]}"
        for path in files
        for text in texts(path)
        if riddle.search(text)
    ]
    assert found == []


def test_the_gauge_can_fail() -> None:
    assert shares(["What it is that those who hear of it are told"])[1:] > (50, 15)
    assert shares(["Return the stored run."])[1:] == (0, 0)
