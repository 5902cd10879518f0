"""The sign-in of a browser: a code that can be used once becomes the token.

A browser cannot read the file of the token. So the command opens the page with a code behind `#`, which a browser sends
to no server and writes to no log. The page posts the code, receives the token, and sends it with each request as
programs do. It keeps the token in the storage of its origin: a browser gives that to no other port and no other host
name, and a new server has a new token.

With the file of the token, a program makes codes and recognizes the server, both by HMACs under the token. So a second
`plait ui` sends nothing secret to the port on which it expects the server: another program may listen there by now.
"""

from __future__ import annotations

import base64
import hmac
import secrets

from plait.clock_and_ids import Clock, iso

CODE_SECONDS = 60
"""Seconds for which a code is good."""
_NONCE_BYTES = 6  # an address of 66 characters stays in one line of a terminal
_MAC_BYTES = 12
_AGAIN = "; run `plait ui` again on the same store, and open the new address"


class CodeRefused(Exception):  # noqa: N818 - an answer
    """A code is refused, for the reason in the message."""


class SignIn:
    """The codes of the server at `address` (`127.0.0.1:8377`) with `token`."""

    def __init__(self, token: str, address: str, clock: Clock) -> None:
        self._token = token
        self._address = address
        self._clock = clock
        self._server = self._mac("server", "")[:6]
        self._used: set[str] = set()  # only codes that a holder of the token has made

    def new_code(self) -> str:
        """Return a code that can be redeemed once, within `CODE_SECONDS`."""
        end = int(self._clock.wall()) + CODE_SECONDS
        content = f"{self._server}.{end}.{secrets.token_urlsafe(_NONCE_BYTES)}"
        return f"{content}.{self._mac('code', content)}"

    def redeem(self, code: str) -> str:
        """Return the token for `code`. Raises CodeRefused."""
        content, _, mac = code.rpartition(".")
        server, _, rest = content.partition(".")
        if not rest or not code.isascii():
            raise CodeRefused(f"this is not the whole code of an address of `plait ui`{_AGAIN}")
        if server != self._server:
            raise CodeRefused(f"the code is of another server, or of one that has ended{_AGAIN}")
        if not hmac.compare_digest(mac, self._mac("code", content)):
            raise CodeRefused(f"the code is wrong: a part is missing or was changed{_AGAIN}")
        if code in self._used:
            raise CodeRefused(f"the code was used already, and is good for one sign-in{_AGAIN}")
        end = int(rest.partition(".")[0])
        if self._clock.wall() >= end:
            raise CodeRefused(f"the code expired at {iso(end)}, {CODE_SECONDS} s after it was made{_AGAIN}")
        self._used.add(code)
        return self._token

    def prove(self, challenge: str) -> str:
        """Return what only a holder of the token can make of `challenge`."""
        return self._mac("proof", challenge)

    def _mac(self, purpose: str, text: str) -> str:
        """The address is in it: a server cannot pass on what another one of the same store has made."""
        mac = hmac.digest(self._token.encode(), f"{purpose} {self._address} {text}".encode(), "sha256")
        return base64.urlsafe_b64encode(mac[:_MAC_BYTES]).decode()
