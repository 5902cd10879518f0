"""The browser that looks at the page."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.support.processes.browser import launch


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """One Chromium for a module. Its driver runs an event loop in this thread, which no other module could stand."""
    with sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()
