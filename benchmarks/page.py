"""The web page in a Chromium of this machine, beside a run of another process: `python -m benchmarks.page NAME
ARGUMENTS...` prints a JSON object.

The run has 10,000 tasks by default: a `for_each` of one half, and a task behind each part. Fifty attempts of 0.2 s at
once make 500 events a second.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import psutil
from playwright.async_api import Page, async_playwright

from plait import DAG, ParallelRunner, Retry, Task
from plait.errors import BackendError, ErrorKind
from plait.persistence import SQLiteStore
from tests.support.processes.browser import CHROMIUM, Ui, ui
from tests.support.processes.command import environment

AT_ONCE = 50
ATTEMPT_S = 0.2
WARM_S = 4.0
"""Seconds for which a page is open before it is measured."""
VIEWS = ("table", "timeline", "graph")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--js-flags=--expose-gc",
    "--enable-precise-memory-info",
]
_OBSERVE = """
window.blocks = [];
new PerformanceObserver((list) => window.blocks.push(...list.getEntries().map((one) => one.duration)))
  .observe({ entryTypes: ["longtask"] });
"""
_OPENED = """(tasks) => new Promise((done) => {
  let first = null;
  const look = () => {
    const facts = document.querySelector(".head .facts")?.innerText ?? "";
    if (document.querySelector(".line")) first ??= performance.now();
    const isRead = first && facts.includes(`of ${tasks} `) && !document.querySelector(".link.reading");
    isRead ? done([first, performance.now()]) : requestAnimationFrame(look);
  };
  look();
})"""
"""The milliseconds from the opening to the first line, and until all tasks are there. Each frame is looked at: the
waits of a locator grow to half a second.
"""


def graph(tasks: int, attempts: int) -> DAG:
    """Return a `for_each` of half of the tasks, and a task behind each part."""
    retry = Retry(attempts=attempts, base_delay=0, max_delay=0)
    parts = [Task(f"part.{n}", f"read {n}", item=f"row {n}", retry=retry) for n in range(tasks // 2)]
    checks = [Task(f"check{n}", f"check {n}", depends_on=(f"part.{n}",), retry=retry) for n in range(tasks // 2)]
    return DAG([*parts, *checks], name=f"page {tasks}")


async def run(folder: Path, tasks: int, attempts: int, seconds: float) -> None:
    """Run `tasks` tasks in the store of `folder`. Each attempt takes `seconds`, and the last of `attempts` succeeds."""
    tried: dict[str, int] = {}

    async def work(prompt: str) -> str:
        await anyio.sleep(seconds)
        tried[prompt] = tried.get(prompt, 0) + 1
        if tried[prompt] < attempts:
            raise BackendError(ErrorKind.TRANSIENT, "the server is busy")
        return prompt.upper()

    async with SQLiteStore(folder / ".plait" / "plait.db") as store:
        await ParallelRunner(work, store=store, concurrency=AT_ONCE).run(graph(tasks, attempts))


@contextmanager
def live_run(folder: Path, tasks: int, attempts: int) -> Generator[subprocess.Popen[bytes]]:
    """Run in a process of its own, which is killed at the end."""
    words = [sys.executable, "-m", "benchmarks.page", "run", str(folder), str(tasks), str(attempts), str(ATTEMPT_S)]
    with subprocess.Popen(words, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def opened(server: Ui) -> AsyncGenerator[Page]:
    """Open the newest run of the store in a new browser."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        await page.add_init_script(_OBSERVE)
        await page.goto(server.page)
        await page.locator(".c-run a").first.click()
        await page.locator(".line").first.wait_for()
        yield page
        await browser.close()


async def blocks(view: str, seconds: str = "20", tasks: str = "10000") -> dict[str, float]:
    """Measure the blocks of the main thread of 50 ms and more while a view of a live run is watched. A group is open.
    With `view` as change, the views are changed every two seconds.
    """
    with tempfile.TemporaryDirectory() as name, ui(Path(name)) as server, live_run(Path(name), int(tasks), 1):
        async with opened(server) as page:
            await _show(page, "timeline")
            await page.locator(".line.group").first.click()
            await _show(page, VIEWS[0] if view == "change" else view)
            await anyio.sleep(WARM_S)
            await page.evaluate("window.blocks = []")
            for n in range(int(seconds) // 2):
                if view == "change":
                    await _show(page, VIEWS[n % len(VIEWS)])
                await anyio.sleep(2)
            found: list[float] = await page.evaluate("window.blocks")
            shown: str = await page.locator(".head .facts").inner_text()
    print(shown.replace("\n", " "), file=sys.stderr)
    return {"longest_ms": max(found, default=0.0), "blocks": len(found), "seconds": float(seconds)}


async def _show(page: Page, view: str) -> None:
    await page.get_by_role("tab", name=view.capitalize()).click()


async def memory(view: str, minutes: str = "10") -> dict[str, float]:
    """Measure the heap of a page after a collection, at the end of each minute at which a run of 10,000 tasks makes 500
    events a second. Each task has as many attempts as the minutes need.
    """
    attempts = 2 + round(int(minutes) * 60 * AT_ONCE / ATTEMPT_S / 10_000)
    with tempfile.TemporaryDirectory() as name, ui(Path(name)) as server, live_run(Path(name), 10_000, attempts):
        async with opened(server) as page:
            await _show(page, "timeline")
            await page.locator(".line.group").first.click()
            await _show(page, view)
            heaps: list[float] = []
            for _ in range(int(minutes)):
                await anyio.sleep(60)
                heaps.append(await page.evaluate("gc(), performance.memory.usedJSHeapSize / 1e6"))
                print(f"{heaps[-1]:.2f} MB", await page.locator(".head .facts").inner_text(), file=sys.stderr)
    return {"first_mb": heaps[0], "last_mb": heaps[-1], "growth": heaps[-1] / heaps[0] - 1}


async def paint(tasks: str = "20000", times: str = "5") -> dict[str, float]:
    """Measure the opening of a stored run, in milliseconds to its first line and to its last task, and the CPU of the
    server: the medians of `times` openings.
    """
    with tempfile.TemporaryDirectory() as name:
        await run(Path(name), int(tasks), 1, 0)
        with ui(Path(name)) as server:
            process = psutil.Process(server.process.pid)
            async with opened(server) as page:
                took: list[tuple[float, float, float]] = []
                for _ in range(int(times)):
                    before = process.cpu_times()
                    await page.reload(wait_until="commit")
                    first, last = await page.evaluate(_OPENED, f"{int(tasks):,}")
                    after = process.cpu_times()
                    took.append((first, last, 1000 * (after.user + after.system - before.user - before.system)))
    first, last, cpu = map(statistics.median, zip(*took, strict=True))
    return {"first_line_ms": first, "last_task_ms": last, "server_cpu_ms": cpu}


async def watch(tasks: str = "2000", times: str = "3") -> dict[str, float]:
    """Measure the CPU of a run's process with a page that watches it, against none: medians of `times` runs in
    turn.
    """
    spent: dict[bool, list[float]] = {False: [], True: []}
    for n in range(2 * int(times)):
        is_watched = n % 2 == 1
        with (
            tempfile.TemporaryDirectory() as name,
            ui(Path(name)) as server,
            live_run(Path(name), int(tasks), 1) as process,
        ):
            async with AsyncExitStack() as stack:
                if is_watched:
                    await stack.enter_async_context(opened(server))
                usage = (await anyio.to_thread.run_sync(os.wait4, process.pid, 0))[2]
            spent[is_watched].append(usage.ru_utime + usage.ru_stime)
    alone, watched = statistics.median(spent[False]), statistics.median(spent[True])
    return {"alone_s": alone, "watched_s": watched, "ratio": watched / alone}


MEASURES: dict[str, Callable[..., Awaitable[dict[str, float]]]] = {
    "blocks": blocks,
    "memory": memory,
    "paint": paint,
    "watch": watch,
}


async def main(*words: str) -> None:
    """Print a measurement as JSON, or run for one."""
    name, *arguments = words
    if name == "run":
        folder, tasks, attempts, seconds = arguments
        await run(Path(folder), int(tasks), int(attempts), float(seconds))
    else:
        print(json.dumps(await MEASURES[name](*arguments) | {"load": os.getloadavg()[0]}))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
