"""Draw timeline.png and task.png: the web page on a run of examples/reviews on the small local model, which waits for
the answer of a person.

From the root of a checkout, after `make demo` and `make test`, with a Chromium: `.venv/bin/python -m docs.images.page`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.support.processes.browser import launch, ui

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def draw(folder: Path) -> None:
    """Run the example in `folder`, and write the two pictures."""
    shutil.copytree(ROOT / "examples" / "reviews", folder, dirs_exist_ok=True)
    command = [ROOT / ".venv/bin/plait", "run", "-q", "reviews.yaml", "--backend", "local"]
    # Unchecked: a run that waits has an exit code of its own.
    subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=False)  # noqa: S603
    with ui(folder) as server, sync_playwright() as driver:
        browser = launch(driver)
        page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
        page.goto(server.page)
        page.locator(".c-run a").click()
        page.get_by_role("tab", name="Timeline").click()
        page.locator(".timeline .attempt").first.wait_for()
        page.wait_for_timeout(1500)  # the bars arrive after the lines
        page.screenshot(path=HERE / "timeline.png")
        page.get_by_role("tab", name="Table").click()
        page.locator("[id='line-release']").click()
        page.locator(".part-ask form").wait_for()
        page.screenshot(path=HERE / "task.png")
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        draw(Path(name))
