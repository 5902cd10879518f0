"""What the type checkers see of the documentation (`make lint`) is what its pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import blocks
from tests.docs.shown_code import PAGES, extract


def test_every_python_block_is_seen_at_the_lines_of_its_page(tmp_path: Path) -> None:
    extract(PAGES, tmp_path)
    seen = {file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    shown = [
        (block.line, block.text)
        for page in PAGES
        for block in blocks(page.name, page.read_text(encoding="utf-8"))
        if block.info == "python"
    ]
    assert len(shown) > 20
    assert seen == {"\n" * line + text for line, text in shown}


def test_two_blocks_cannot_be_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.md").write_text("```python\n# work.py\n```\n", encoding="utf-8")
    (tmp_path / "made").mkdir()
    with pytest.raises(ValueError, match=r"b\.md:1: another block is called work\.py already"):
        extract((tmp_path / "a.md", tmp_path / "b.md"), tmp_path / "made")
