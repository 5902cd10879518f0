"""The built pages: diagrams are pictures, options keep their dashes, and nothing is loaded from another site.

`make docs` builds the site and runs these tests over it. The suite does not build the site a second time.
"""

from __future__ import annotations

import html
import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SITE = os.environ.get("PLAIT_SITE")
"""The folder of the built site, read at the import, because a test has no variables of plait."""

pytestmark = pytest.mark.skipif(SITE is None, reason="`make docs` builds the site and runs these tests")


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    """The HTML of every page of the site by its path."""
    folder = ROOT / (SITE or "")
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}


def test_every_diagram_is_a_picture(site: dict[str, str]) -> None:
    drawn = {page for page, text in site.items() if 'type="image/svg+xml"' in text}
    assert {page for page in site if "highlight-mermaid" in site[page] or "<pre>stateDiagram" in site[page]} == set()
    sources = [path for path in (ROOT / "docs").rglob("*.md") if "```mermaid" in path.read_text(encoding="utf-8")]
    assert drawn == {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in sources}


def test_options_keep_their_two_dashes(site: dict[str, str]) -> None:
    assert "--done" in site["reference/cli.html"]
    assert {page for page, text in site.items() if re.search(r"[–—“”‘’]\w", text)} == set()  # noqa: RUF001


def test_no_page_loads_anything_from_another_site(site: dict[str, str]) -> None:
    loaded = re.compile(r'<(?:script|img|iframe|object|link rel="stylesheet")[^>]*(?:src|href|data)="(https?:)?//')
    assert {page for page, text in site.items() if loaded.search(text)} == set()


def test_no_entry_has_the_text_of_a_builtin(site: dict[str, str]) -> None:
    reference = re.sub(r"<[^>]+>", "", site["reference/python-api.html"])
    texts = [line for kind in (str, int, dict, tuple, object) for line in (kind.__doc__ or "").splitlines()]
    assert [text for text in texts if len(text) > 30 and html.escape(text, quote=False) in reference] == []
    assert "The author of a message" in reference


def test_every_heading_is_followed_by_text(site: dict[str, str]) -> None:
    empty = re.compile(r"<section id=\"[^\"]*\">\s*<h\d>[^\n]*</h\d>\s*</section>")
    assert {page for page, text in site.items() if empty.search(text)} == set()


def test_search_engines_find_the_keywords(site: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, text in (("description", project["description"]), ("keywords", ", ".join(project["keywords"]))):
        assert f'<meta content="{text}" name="{name}" />' in site["index.html"]
