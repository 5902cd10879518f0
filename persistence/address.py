"""Addresses of servers that keep runs. No message shows the password of an address."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

SCHEMES: Final = ("postgresql://", "postgres://")
MASK: Final = "***"
_IN_ADDRESS: Final = re.compile(r"(?<=://)([^/?#@:]*):([^/?#]*)@")
_IN_QUERY: Final = re.compile(r"([?&](?:password|sslpassword)=)([^&#]*)", re.IGNORECASE)


def masked(address: str) -> str:
    """Return the address with each password replaced by `***`."""
    return _IN_QUERY.sub(rf"\1{MASK}", _IN_ADDRESS.sub(rf"\1:{MASK}@", address))


def passwords(address: str) -> set[str]:
    """Return the passwords of the address, as written and decoded."""
    found = {match.group(2) for match in (*_IN_ADDRESS.finditer(address), *_IN_QUERY.finditer(address))}
    return {form for word in found if word for form in (word, unquote(word))}
