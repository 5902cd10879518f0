"""Let pages that link to files of the repository outside of docs/ build: on the site such a link is the file's name.

`tests/docs` checks that every linked file is there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s:]+)(?:#[^)\s]*)?\)")


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:
    folder = (Path(app.srcdir) / docname).parent

    def shown(found: re.Match[str]) -> str:
        target = (folder / found["target"]).resolve()
        inside = target.is_relative_to(app.srcdir)
        return found[0] if inside or not target.exists() else found["text"]

    source[0] = _LINK.sub(shown, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True}
