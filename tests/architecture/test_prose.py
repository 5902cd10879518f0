"""Docstrings, comments and pages are plain: few pronouns, and hardly a who or what (CONTRIBUTING.md, "Prose").

The limits are close to well-kept code bases: h11, anyio, trio, procrastinate and pgqueuer have 2.5 to 6.1 % pronouns
and demonstratives, and at most 0.31 % of who, what and whose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.documents import pages

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
PAGES = {page.relative_to(ROOT).as_posix(): page for page in pages(ROOT)}
GROUPS = {
    "guides": [page for name, page in PAGES.items() if name.startswith("docs/guides/")],
    "explanation": [page for name, page in PAGES.items() if name.startswith("docs/explanation/")],
    "reference": [page for name, page in PAGES.items() if name.startswith("docs/reference/")],
    "root": [page for name, page in PAGES.items() if name.count("/") < 2],
}
WIDEST = 150
"""The longest line of a page's prose; a row of a table is one line, however long."""
RIDDLE = re.compile(r"(?:^|[.!?:]\s+)(What|Who|Whoever|Those|That of)\b(?![^.]*\?)")


@cache
def texts(path: Path) -> list[str]:
    """Return the docstrings and comments of a file, without the code in backticks."""
    return [re.sub(r"`[^`]*`", "", text) for text in _marked(path.read_text(encoding="utf-8"))]


def _marked(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def without_fences(page: str) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2 *$", "", page, flags=re.MULTILINE | re.DOTALL)


def prose(page: str) -> Iterator[str]:
    """Yield the headings, paragraphs, list items and cells of a page, without code and the targets of links."""
    page = re.sub(r"<!--.*?-->", "", without_fences(page), flags=re.DOTALL)
    page = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", page, flags=re.DOTALL)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.|#+|\|) ?)", page):
        for cell in re.split(r"(?<!\\)\|", paragraph):
            text = re.sub(r"^\s*(?:[-*+] |\d+\. |#+ )", "", cell).replace("*", "")
            yield " ".join(text.split())


def shares(all_texts: list[str]) -> tuple[int, float, float]:
    """Return the number of words, and the percentages of pronouns and of who/what among them."""
    words = [word.lower() for text in all_texts for word in re.findall(r"[A-Za-z']+", text)]
    pronouns, relatives = (
        100 * sum(word in kind for word in words) / max(len(words), 1) for kind in (PRONOUNS, RELATIVES)
    )
    return len(words), pronouns, relatives


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_the_prose_of_a_package_is_plain(folder: Path) -> None:
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    count, pronouns, relatives = shares([text for path in files for text in texts(path)])
    # In a small package a few words decide: each kind may occur a few times.
    assert pronouns <= 7 or pronouns * count <= 700, f"{pronouns:.1f} % of {count} words are pronouns; at most 7 %"
    assert relatives <= 0.4 or relatives * count <= 200, f"{relatives:.2f} % of {count} words are who or what; 0.4 %"


@pytest.mark.parametrize("group", GROUPS)
def test_the_prose_of_the_pages_is_plain(group: str) -> None:
    count, pronouns, relatives = shares([text for page in GROUPS[group] for text in prose(page.read_text("utf-8"))])
    assert count > 500
    assert pronouns <= 7, f"{pronouns:.1f} % of {count} words are pronouns; at most 7 %"
    assert relatives <= 0.4, f"{relatives:.2f} % of {count} words are who or what; at most 0.4 %"


@pytest.mark.parametrize("name", PAGES)
def test_no_sentence_of_a_page_begins_with_what_or_who(name: str) -> None:
    texts = prose(PAGES[name].read_text("utf-8"))
    assert [text[found.start() :][:100] for text in texts for found in RIDDLE.finditer(text)] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_lines_of_a_page_are_wrapped(name: str) -> None:
    text = without_fences(PAGES[name].read_text("utf-8"))
    assert [line[:60] for line in text.splitlines() if len(line) > WIDEST and not line.startswith("|")] == []


def test_no_sentence_begins_with_what_or_who() -> None:
    files = [
        path for package in ("runner", "backends", "persistence") for path in sorted((ROOT / package).rglob("*.py"))
    ]
    found = [
        f"{path.relative_to(ROOT)}: {' '.join(text.split())[:100]}"
        for path in files
        for text in texts(path)
        if RIDDLE.search(text)
    ]
    assert found == []


def test_the_gauge_can_fail() -> None:
    assert shares(["What it is that those who hear of it are told"])[1:] > (50, 15)
    assert shares(["Return the stored run."])[1:] == (0, 0)


PAGE = """# Who runs it

What is stored. A `What` in code, a [link](what.md) and **bold** text. Who
answers?

- Nobody. Those are
  refused.

| Whoever | a \\| b |
```text
What is code.
```
"""


def test_the_prose_of_a_page_has_no_code() -> None:
    texts = [text for text in prose(PAGE) if text]
    assert texts == [
        "Who runs it",
        "What is stored. A in code, a [link] and bold text. Who answers?",
        "Nobody. Those are refused.",
        "Whoever",
        "a \\| b",
    ]
    assert [text for text in texts if RIDDLE.search(text)] == [texts[0], texts[1], texts[2], texts[3]]
