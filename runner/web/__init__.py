"""Runs over HTTP, for programs on the same machine: what `plait serve` serves. Needs the extra `server`.

Every request passes `guard` first; `routes` says in HTTP what `RunService` says in Python.
"""

from __future__ import annotations
