"""The sign-in of a browser: a code that can be used once becomes a cookie.

A browser cannot read the file of the token. So the command opens the page with a code behind `#`, which a browser sends
to no server and writes to no log; the page posts the code and receives the cookie. The cookie holds a key that is kept
beside the store, so a page stays signed in when the server is started anew.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie

from plait.runner.clock import Clock

CODE_SECONDS = 60.0
"""Seconds for which a code is good."""
_CODE_BYTES = 24
_MOST_CODES = 64


class SignIn:
    """The codes and the cookie of the server on `port`, whose signed-in browsers send `key`."""

    def __init__(self, key: str, port: int, clock: Clock) -> None:
        self._key = key
        self._name = f"plait-{port}"  # a browser sends a cookie to every port of the host
        self._clock = clock
        self._codes: dict[str, float] = {}

    def new_code(self) -> str:
        """Return a code that can be redeemed once, within `CODE_SECONDS`."""
        now = self._clock.monotonic()
        self._codes = {code: end for code, end in self._codes.items() if end > now}
        while len(self._codes) >= _MOST_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(_CODE_BYTES)
        self._codes[code] = now + CODE_SECONDS
        return code

    def redeem(self, code: str) -> str | None:
        """Return the header `Set-Cookie` for `code`; None if the code is unknown, used or too old."""
        end = self._codes.pop(code, 0.0)
        if end <= self._clock.monotonic():
            return None
        return f"{self._name}={self._key}; HttpOnly; SameSite=Strict; Path=/"

    def knows(self, cookies: str) -> bool:
        """Return whether the header `Cookie` holds the cookie of a signed-in browser."""
        try:
            found = SimpleCookie(cookies).get(self._name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._key.encode())
