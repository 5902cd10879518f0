"""Runs as tools of an agent, over the Model Context Protocol, as served by `plait mcp`. Needs the extra `mcp`.

`tools` does the work on the runs; `server` publishes the tools.
"""

from __future__ import annotations
