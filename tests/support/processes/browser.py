"""`plait ui` in a process of its own, and a real Chromium that looks at its page."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, expect

from plait.clock_and_ids import Clock
from plait.runner.serving.http_guard import SignIn, page_address
from tests.support.processes.command import PLAIT, environment
from tests.support.processes.warm import Warm

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt install chromium")
LIMIT = 60.0
expect.set_options(LIMIT * 1000)
_WITHOUT = (
    # The menus of the address bar are pages, each of which takes a second of a processor in a window that nobody sees.
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup",
    # As Playwright has it: of two such options Chromium takes the last.
    "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning",
    "AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled",
    "PreconnectToSearch",
)  # fmt: skip


def launch(driver: Playwright) -> Browser:
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--disable-features={','.join(_WITHOUT)}"]
    return driver.chromium.launch(executable_path=CHROMIUM, args=arguments)


@dataclass
class Ui:
    """A page server under way."""

    process: Warm
    url: str
    page: str
    """The address with the code."""
    token_file: Path
    token: str

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=LIMIT, trust_env=False, verify=False)

    def new_address(self) -> str:
        """The address of the page with another code."""
        return address_of(self.url, self.token)

    def stop(self) -> tuple[int, str]:
        """As Ctrl-C does; the exit code and what it said."""
        self.process.send_signal(signal.SIGINT)
        said = self.process.communicate(timeout=LIMIT)[1]
        return self.process.returncode, said


def address_of(url: str, token: str) -> str:
    return page_address(url, SignIn(token, urlsplit(url).netloc, Clock()))


@contextmanager
def ui(folder: Path, *options: str, port: int = 0, link_key: str = "") -> Generator[Ui]:
    """`plait ui` in `folder`, on its default store, with a key of links if `link_key`."""
    words = [*PLAIT, "ui", "--port", str(port), "--json", "--no-browser", *options]
    process = Warm(
        words, cwd=folder, env=environment(PLAIT_LINK_KEY=link_key), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            told = json.loads(line)
            path = Path(told["token_file"])
            yield Ui(process, told["url"], told["page"], path, path.read_text().strip())
        finally:
            process.kill()


@dataclass
class Watched:
    """A page with everything that must not happen on it."""

    page: Page
    wrong: list[str] = field(default_factory=list[str])


def expect_value(page: Page, read: Callable[[], object], wanted: object) -> None:
    """Wait until `read()` is `wanted`, as `expect` does for what it knows.

    What belongs together `read` takes from the page in one `evaluate`: a moment later the page may have replaced an
    element, and one that is gone has no size and no text.
    """
    end = time.monotonic() + LIMIT
    while (value := read()) != wanted and time.monotonic() < end:
        page.wait_for_timeout(20)
    assert value == wanted


@contextmanager
def watched(browser: Browser, **options: Any) -> Generator[Watched]:
    """A page of a browser that has not signed in. Fails at the end for an error, a dialog of the browser, a request to
    another host, or a violation of the content security policy.
    """
    context: BrowserContext = browser.new_context(**options)
    context.set_default_timeout(LIMIT * 1000)
    page = context.new_page()
    seen = Watched(page)

    def on_console(message: ConsoleMessage) -> None:
        # A refused sign-in, a lost server and a page that is gone are part of the tests.
        if message.type == "error" and "Failed to load resource" not in message.text:
            seen.wrong.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: seen.wrong.append(str(error)))
    page.on("request", lambda asked: "//127.0.0.1:" in asked.url or seen.wrong.append(asked.url))
    page.add_init_script(
        "window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.violatedDirective))"
    )
    try:
        yield seen
        assert page.evaluate("window.violations") == []
        assert seen.wrong == []
    finally:
        context.close()
