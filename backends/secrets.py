"""Keep the secrets of the environment out of what is stored and shown."""

from __future__ import annotations

import os
import re

from plait.backends.text import masked

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables whose values appear in no message."""


def without_secrets(text: str) -> str:
    """Return `text` with the values of environment variables that are named like secrets masked (see `masked`).

    A value of several lines is masked line by line, because errors indent and fold lines.
    """
    values = [value for name, value in os.environ.items() if _NAMES.search(name)]
    return masked(text, [line.strip() for value in values for line in value.splitlines()])
