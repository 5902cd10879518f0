"""The settings of the documentation's site: `make docs` builds `docs/_build/html` from the pages of this folder."""

from __future__ import annotations

import shlex
import sys
import tomllib
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "plait"
author = "The plait authors"
project_copyright = "The plait authors"
version = release = installed_version("plait")

extensions = [
    "myst_parser",
    "sphinxcontrib.mermaid",
    "repository_links",
]
exclude_patterns = ["_build"]
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
myst_html_meta = {"description": _PROJECT["description"], "keywords": ", ".join(_PROJECT["keywords"])}
myst_fence_as_directive = ["mermaid"]
# Drawn while the site is built: a page loads no script and needs no network.
mermaid_output_format = "svg"
mermaid_cmd = shlex.join([sys.executable, "-m", "mermaidx"])
mermaid_params = ["--quiet", "--background", "white"]
# Smart quotes would make one dash of the two before an option.
smartquotes = False

html_theme = "furo"
html_title = f"plait {release}"
html_extra_path = ["plan.schema.json"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
