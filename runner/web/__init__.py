"""Runs over HTTP for programs on the same machine, as served by `plait serve`. Needs the extra `server`.

Every request passes `security.Guard` first; `routes` offers `RunService` over HTTP.
"""

from __future__ import annotations
