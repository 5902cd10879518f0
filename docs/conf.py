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
    "sphinx.ext.autodoc",
    "sphinxcontrib.mermaid",
    "command_reference",
    "error_reference",
    "event_reference",
    "plan_reference",
    "python_reference",
    "repository_links",
]
exclude_patterns = ["_build"]
nitpicky = True
# A docstring names much that has no page of its own: parameters' types of other packages, internal classes.
nitpick_ignore_regex = [(r"py:.*", r".*")]

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
# A single backtick in a docstring is code, as in the pages.
default_role = "literal"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = f"plait {release}"
html_extra_path = ["plan.schema.json"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
