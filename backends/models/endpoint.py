"""Destination of an adapter's requests: URL, key, headers of the environment, proxy; its error answers as ours."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from urllib.parse import urlsplit

from plait.backends.error_kinds import announced_wait, kind_of, read_error
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import check_base_url, header_values, masked, one_line, shown

_OWN_PATHS = ("/chat/completions", "/v1/messages")
_HEADERS = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")


@value
class Endpoint:
    """The destination of requests. Messages show the `name` only, and never the key."""

    url: str
    key: str = field(repr=False)
    """The key; empty for a server without keys."""

    def safe_text(self, text: str, doubt: str = "") -> str:
        """Return `text` as one line followed by the whole of `doubt`.

        The key and the values of headers added by the environment are masked.
        """
        headers = [value for name in _HEADERS for value in header_values(os.environ.get(name, ""))]
        return one_line(masked(text, [self.key, *headers]), 300 - len(doubt)) + doubt

    def status_error(self, status: int, headers: Mapping[str, str], body: JsonValue, url: str) -> BackendError:
        """Return the error for an answer with an error `status` to a request of `url`.

        `body` is the value of a JSON body, and the text of any other. Only its text for a person is shown: servers that
        validate fields return the request, including the prompt.
        """
        words, detail = read_error(body)
        if 300 <= status < 400:
            detail = "the server redirects; set base_url to the target of the redirect"
        hint = _retry_after(headers)
        doubt = _doubt(url) if status == 404 and "model" not in detail.lower() else ""
        text = self.safe_text(f"{self.name} answered {status}: {detail}", doubt)
        wait = announced_wait(body, time.time()) if hint is None else hint
        error = BackendError(kind_of(status, words, detail), text, retry_after=wait)
        error.status = status
        return error

    def broken_off(self, body: JsonValue, *, begun: bool) -> BackendError:
        """Return the error for the error `body` within a stream; `begun` if a part of the answer had arrived.

        A rate limit or an overload then refuses no call: the server had accepted the call, and bills the call. Such an
        error is transient, so that the attempt counts.
        """
        what = f"{self.name} broke off the answer"
        error = self._without_status(body, what)
        if begun and error.kind in {ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED}:
            error = self._without_status(body, f"{what} it had begun ({error.kind.value.replace('_', ' ')})")
            error.kind = ErrorKind.TRANSIENT
        return error

    def no_answer(self, body: JsonValue, url: str) -> BackendError:
        """Return the error for a JSON `body` with status 200 that holds no answer."""
        return self._without_status(body, f"{self.name} answered with JSON that holds no answer", _doubt(url))

    def _without_status(self, body: JsonValue, what: str, doubt: str = "") -> BackendError:
        words, detail = read_error(body)
        status = next((int(word) for word in words if word.isdigit() and 400 <= int(word) < 600), 0)
        text = self.safe_text(f"{what}: {detail}", doubt)
        return BackendError(kind_of(status, words, detail), text, retry_after=announced_wait(body, time.time()))

    @property
    def name(self) -> str:
        """Host and port."""
        parts = urlsplit(self.url)
        host = parts.hostname or self.url
        host = f"[{host}]" if ":" in host else host
        try:
            return f"{host}:{parts.port}" if parts.port else host
        except ValueError:
            return host

    def url_of(self, path: str, query: str = "") -> str:
        """Return the URL of `path` below the server's own; `query` joins the server's."""
        return _joined(self.url, path, query)

    def proxy(self) -> str | None:
        """Return the proxy that the environment or the system names for this server; None for a direct connection.

        Raises BackendUnavailable for a proxy that is no HTTP proxy.
        """
        from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415 - brings the whole of http and email

        parts = urlsplit(self.url)
        proxies = getproxies()
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(parts.netloc):
            return None
        proxy = proxy if "://" in proxy else f"http://{proxy}"
        try:
            named = urlsplit(proxy)
            is_http = named.scheme in {"http", "https"} and bool(named.hostname) and named.port != 0
        except ValueError:
            is_http = False
        if not is_http:
            name = f"{parts.scheme.upper()}_PROXY" if proxies.get(parts.scheme) else "ALL_PROXY"
            raise BackendUnavailable(
                f"the proxy in {name} has to be like http://host:3128; NO_PROXY names servers to reach without it"
            )
        return proxy


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from `retry-after-ms` or `Retry-After` (seconds or an HTTP date); None if unknown."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name) or "") * scale
        except ValueError:
            continue
        return seconds if seconds >= 0 and math.isfinite(seconds) else None
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - rarely needed

    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after") or "").timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _doubt(url: str) -> str:
    if "/v1/v1/" in url:
        return "; leave /v1 out of base_url"
    return "" if re.search(r"/v\d|/deployments/", url) else "; is /v1 missing at the end of base_url?"


@lru_cache(maxsize=256)
def _joined(url: str, path: str, query: str) -> str:
    parts = urlsplit(url)
    joined_query = "&".join(part for part in (parts.query, query) if part)
    return parts._replace(path=parts.path.rstrip("/") + path, query=joined_query, fragment="").geturl()


def read_key(variable: str, *, needed: bool) -> str:
    """Return the key in environment variable `variable`; empty if there is none and none is needed. Raises
    BackendUnavailable if a needed key is missing, or the key is malformed.
    """
    key = os.environ.get(variable, "").strip()
    if key.isascii() and key.isprintable() and key:
        return key
    if key:
        raise BackendUnavailable(
            f"the key in {variable} holds characters not allowed in a key; was the key copied completely?"
        )
    if needed:
        raise BackendUnavailable(f"no key: set {variable}, or name a server that needs none by base_url (--base-url)")
    return ""


def find_server(url: str, variable: str, *, key_needed: bool) -> Endpoint:
    """Return the server at `url`, with the key in environment variable `variable`. Raises BackendUnavailable if `url`
    cannot be called or holds a user or password, or a needed key is missing.
    """
    try:
        check_base_url(url, f"the environment variable {variable}")
    except ValueError as error:
        raise BackendUnavailable(str(error)) from None
    fault = url_fault(url)
    if fault is not None:
        raise BackendUnavailable(f"{fault}; a base_url is like http://host:8080/v1")
    return Endpoint(url, read_key(variable, needed=key_needed))


def url_fault(url: str) -> str | None:
    """Return the fault of a `base_url` that cannot be called, or None. Repeats the faulty part alone: a URL may hold a
    secret.
    """
    if any(char.isspace() or not char.isprintable() for char in url):
        return "base_url holds a space or a control character"
    scheme, colon, rest = url.partition(":")
    if not colon or "/" in scheme or "." in scheme or rest[:1].isdigit():  # example.com/v1, localhost:8080
        return "base_url has no scheme: write http:// or https:// in front"
    if scheme.lower() not in {"http", "https"}:
        return f"base_url begins with {shown(scheme, 20)}:, and only http:// and https:// can be called"
    if not rest.startswith("//"):
        return f"base_url has to begin with {scheme}://, with two slashes"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the brackets of the IPv6 address in base_url do not fit"
    end = next((end for end in _OWN_PATHS if parts.path.rstrip("/").endswith(end)), None)
    path_fault = None if end is None else f"base_url ends in {end}, which plait adds; leave it out"
    return _address_fault(parts.netloc) or path_fault


def _address_fault(netloc: str) -> str | None:
    host, bracket, port = netloc.rpartition("]")
    if bracket:
        host, port = host + bracket, port.removeprefix(":")
    else:
        host, _, port = netloc.partition(":")
    if not host:
        return "base_url names no host"
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        return f"the port {shown(port, 20)!r} in base_url is not a number from 1 to 65535"
    if bracket:
        return None
    wrong = next((char for char in host if not (char.isalnum() or char in "-._")), None)
    if wrong is not None:
        return f"the host in base_url holds {wrong!r}, which no host name has"
    if not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        return "a part of the host in base_url is empty, or longer than 63 characters"
    return None


def is_environments(url: str, variable: str, default: str) -> bool:
    """Return whether `url` is the URL in environment variable `variable`, or `default` if the variable is not set."""
    return url.rstrip("/") == (os.environ.get(variable) or default).strip().rstrip("/")


def environment_headers(lines: str, named: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that the environment adds to each request: variable `lines` holds them as `Name: value`, one
    per line, and `named` gives for a variable with a value the name of its header.
    """
    headers = {header: value for name, header in named.items() if (value := os.environ.get(name, "").strip())}
    for line in os.environ.get(lines, "").split("\n"):
        name, colon, value = line.partition(":")
        if colon and name.strip():
            headers[name.strip()] = value.strip()
    return headers
