"""The Python that README.md, docs/ and examples/ show, under pyright's strict mode and mypy's: whoever copies it into a
project of theirs has it checked so. `python -m tests.docs.shown_code`, which `make lint` calls.

Each block stands in a file of its own, at the lines where its page has it: what is said of growing_103.py:125 is about
line 125 of docs/guides/growing.md. All of them are in one folder, so that blocks find the files that their page names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.documents import blocks, pages

ROOT = Path(__file__).parents[2]
PAGES = tuple(pages(ROOT))
USES = (*sorted((ROOT / "examples").glob("*.py")), Path(__file__).with_name("ordinary_use.py"))


def extract(pages: tuple[Path, ...], folder: Path) -> None:
    """Write the Python blocks of `pages` into `folder`. Raises ValueError where two would be the same file."""
    for page in pages:
        for block in blocks(page.name, page.read_text(encoding="utf-8")):
            if block.info != "python":
                continue
            file = folder / (block.name or f"{page.stem.lower().replace('-', '_')}_{block.line}.py")
            if file.exists():
                raise ValueError(f"{block.id}: another block is called {file.name} already; give this one another name")
            file.write_text("\n" * block.line + block.text, encoding="utf-8")


def check(folder: Path) -> int:
    """Have both look at all files of `folder`; 0 if neither complains."""
    settings = {
        "include": ["."],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        "extraPaths": [str(ROOT)],
        # LangGraph has no stubs, and its types are not whole.
        "reportMissingTypeStubs": False,
        "reportUnknownMemberType": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return max(
        subprocess.run(pyright, cwd=folder, check=False).returncode,
        subprocess.run([*mypy, *cache, "."], cwd=folder, env=environment, check=False).returncode,
    )


def main() -> int:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        extract(PAGES, folder)
        for file in USES:
            shutil.copy(file, folder)
        return check(folder)


if __name__ == "__main__":
    sys.exit(main())
