"""Addresses of servers that keep runs. No message shows the password of an address."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

SCHEMES: Final = ("postgresql://", "postgres://")
MASK: Final = "***"
_IN_ADDRESS: Final = re.compile(r"(?<=://)([^@:]*:)(.*)(?=@)", re.DOTALL)
"""Up to the last `@`, because a password may have any character that its user forgot to escape."""
_IN_QUERY: Final = re.compile(r"([?&]([^=&]*)=)([^&]*)")
_KEYS: Final = frozenset({"password", "sslpassword"})


def masked(address: str) -> str:
    """Return the address with each password replaced by `***`."""
    return _IN_QUERY.sub(_masked_value, _IN_ADDRESS.sub(rf"\1{MASK}", address))


def passwords(address: str) -> set[str]:
    """Return the passwords of the address, as written and decoded."""
    found = {match[2] for match in _IN_ADDRESS.finditer(address)}
    found |= {match[3] for match in _IN_QUERY.finditer(address) if _is_password(match)}
    return {form for word in found if word for form in (word, unquote(word))}


def has_unescaped_password(address: str) -> bool:
    """Return whether a character of a password ends the part of the address in which the password stands."""
    found = _IN_ADDRESS.search(address)
    return found is not None and any(one in found[2] for one in "/?#")


def _masked_value(match: re.Match[str]) -> str:
    return f"{match[1]}{MASK}" if _is_password(match) else match[0]


def _is_password(match: re.Match[str]) -> bool:
    return unquote(match[2]).lower() in _KEYS
