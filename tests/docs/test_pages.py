"""Every fenced block of README.md and docs/ does what it says.

Each page has a folder with the examples and the docs in it, in which its blocks run in order, so that a later block may
use what an earlier one left. A block whose first line is a comment with a file name (`# mine.py`) is that file. In
commands PLAN, RUN and TASK stand for an example plan, the last run and one of its tasks. A server on 127.0.0.1 answers
for every model, and stand-ins (tests/support/bin) for the commands of agents; what `plait serve` starts is there for
all of its page.

    python   runs as a script, or under pytest when it has a class Test...
    sh       every line runs                        console    every line after `$ ` runs, and prints what is shown
    yaml     is a plan (`yaml fragment`: a part)    json, toml parse, and are plans when they have tasks
    sql      every query runs on a small store      mermaid    names a kind of diagram
    ini      is a unit of systemd
    text     anything                               {toctree}  names pages that there are
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sqlite3
import sys
import tomllib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import yaml
from anyio import to_thread

from plait.backends import AnthropicBackend, OpenAIBackend
from plait.backends.agents.agent_catalog import AGENTS
from plait.backends.models.http_client import _HEADERS
from plait.persistence import SQLiteStore
from plait.runner.cli.command_line import _MODULES
from plait.runner.plan import parse_plan
from tests.docs.documents import (
    Block,
    Command,
    blocks,
    broken_links,
    commands,
    indented_blocks,
    pages,
    without_blocks,
    wrongly_installed,
)
from tests.faults.test_crashtest import KILLS
from tests.support.obliging import oblige
from tests.support.processes.page_server import PageServers
from tests.support.processes.warm import Warm
from tests.support.stores.sample_store import sample_store
from tests.support.wire import serve

ROOT = Path(__file__).parent.parent.parent
FAKES = ROOT / "tests" / "support" / "bin"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages(ROOT)}
BLOCKS = [block for file, text in PAGES.items() for block in blocks(file, text)]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"].keys()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

SCRIPT = """
import runpy, warnings
warnings.filterwarnings("ignore", category=DeprecationWarning, module="langsmith._internal._beta_decorator")
runpy.run_path({!r}, run_name="__main__")
"""
"""Warnings are errors, but for one that langgraph's own dependency gives from Python 3.14 on: see pyproject.toml."""
LIMIT_S = 120.0  # for one command
# Lines that make a checkout or its environment, or start a server of somebody else's: looked at, and never run.
SETUP = re.compile(r"(git clone|cd plait$|python3? -m venv|source |\. |ollama |vllm |llama-server )")
# Takes long: tests/faults/test_crashtest.py runs the same command.
ELSEWHERE = f"make crashtest KILLS={KILLS}"
# They show what the small model says: tests/docs/test_check_tutorial.py plays the second one with it.
OF_A_MODEL = {"README.md", "docs/tutorial-checks.md"}
A_URL = re.compile(r"""(base_url ?[=:] ?|--base-url[ =])(["']?)https?://[^\s"']+""")
# Run until a signal: their options are looked at.
ENDLESS = re.compile(r"(?:PLAIT_STORE=\S+ )?(?:dask (?:scheduler|worker)|plait worker)\b")
PROVIDED = re.compile(r"^(?:export )?((?:OPENAI|ANTHROPIC|OTEL)_[A-Z_]+)=\S*\s*")
LINES = [command.line for block in BLOCKS if block.info in {"sh", "console"} for command in commands(block)]
OF_PLAIT = {line: line.split()[1] for line in LINES if line.startswith("plait ")}
COLD = set({_MODULES.get(command, command): line for line, command in reversed(OF_PLAIT.items())}.values())
"""The first line with a command of each module runs in an interpreter of its own, as a person starts the command."""
PAUSE = re.compile(r"(?<=& )sleep \d+(?=;)")
SOME_DONE = "until plait show last --status completed 2>&1 | grep -q order; do sleep 0.1; done"
"""What a page's pause is for: a command under way has come this far. A slow machine may need longer than a reader's."""
SHELL = re.compile(r"[|&;<>$`*?()~\\]")
"""The shell does something with these."""
DIAGRAMS = {"graph", "flowchart", "stateDiagram-v2", "sequenceDiagram", "erDiagram", "classDiagram"}


@dataclass
class Place:
    """Where a page's blocks run."""

    folder: Path
    url: str
    servers: PageServers = field(default_factory=PageServers)

    def environment(self, text: str) -> dict[str, str]:
        keys = dict.fromkeys(re.findall(r"\b[A-Z]+_API_KEY\b", text), "test")
        return {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(FAKES), os.environ["PATH"]]),
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": "test",
            "ANTHROPIC_BASE_URL": self.url,
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            **keys,
        }

    async def run(self, command: list[str], text: str, exit_code: int = 0) -> str:
        """Run `command` and return its output. Raise AssertionError with the output if it exits otherwise."""
        with anyio.fail_after(LIMIT_S):
            done = await anyio.run_process(
                command,
                cwd=self.folder,
                env=self.environment(text),
                stdin=DEVNULL,
                stderr=STDOUT,
                check=False,
            )
        output = done.stdout.decode(errors="replace")
        check_exit(command, done.returncode, exit_code, output)
        return output

    async def run_warm(self, words: Sequence[str], text: str, exit_code: int = 0) -> str:
        """Run `python WORDS`, with -m or -c, as `run` does, in a process that need not load plait first."""
        with Warm(
            [sys.executable, *words], cwd=self.folder, env=self.environment(text), stdout=PIPE, stderr=STDOUT
        ) as process:
            output: str = (await to_thread.run_sync(partial(process.communicate, timeout=LIMIT_S)))[0]
        check_exit(process.words, process.wait(), exit_code, output)
        return output


def check_exit(command: Sequence[str], code: int, expected: int, output: str) -> None:
    assert code == expected, f"{shlex.join(command)}\nexited with {code}:\n{output}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for file in PAGES:
        made[file] = folder = tmp_path_factory.mktemp(Path(file).stem)
        for name in ("examples", "docs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("_build"))
        # Authors of stores and backends copy the contracts to the same place.
        shutil.copytree(ROOT / "tests" / "contracts", folder / "tests" / "contracts")
        shutil.copy(ROOT / "README.md", folder)
        shutil.copy(ROOT / "CONTRIBUTING.md", folder)
        for block in BLOCKS:
            if block.file == file and block.name:
                (folder / block.name).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.name).write_text(block.text, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def servers() -> Generator[PageServers]:
    servers = PageServers()
    with servers.leaving:
        yield servers


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    """The port of each page's model server: a later block goes on with a run that names the server."""
    return {}


@pytest.fixture
async def place(
    request: pytest.FixtureRequest, folders: dict[str, Path], servers: PageServers, ports: dict[str, int]
) -> AsyncGenerator[Place]:
    block: Block = request.node.callspec.params["block"]
    async with serve(oblige, port=ports.get(block.file, 0)) as server:
        ports[block.file] = urlsplit(server.url).port or 0
        yield Place(folders[block.file], server.url, servers)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.id)
async def test_the_block_works(block: Block, place: Place, tmp_path: Path) -> None:
    await check_block(block, place, tmp_path)


async def check_block(block: Block, place: Place, tmp_path: Path) -> None:
    match block.info:
        case "python":
            await run_script(block, place)
        case "sh" if "curl " in block.text and shutil.which("curl") is None:
            pytest.skip("this machine has no curl")
        case "sh" | "console":
            await run_commands(block, place)
        case "yaml":
            check_plan(block.text, "yaml", place)
        case "yaml fragment":
            yaml.safe_load(block.text)
        case "json" | "toml":
            check_data(block, place)
        case "sql":
            await run_queries(block, tmp_path / "runs.db")
        case "ini":
            await check_unit(block, tmp_path)
        case "mermaid":
            assert block.text.split()[0] in DIAGRAMS
        case "text":
            pass
        case "{toctree}":
            check_toctree(block)
        case _:
            pytest.fail(f"{block.id}: {block.info!r} is no kind of block that is checked; see {__name__}")


async def run_script(block: Block, place: Place) -> None:
    if "signal.pause()" in block.text:
        pytest.skip("runs until a signal: see tests/docs/test_several_machines.py")
    if "LocalBackend(" in block.text:
        pytest.importorskip("xllamacpp", reason="the extra `local` is not installed")
    script = place.folder / (block.name or f"block_{block.line}.py")
    script.write_text(A_URL.sub(rf"\1\2{place.url}/v1", block.text), encoding="utf-8")
    if re.search(r"^class Test", block.text, re.MULTILINE):
        command = [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", script.name]
        await place.run(command, block.text)
    else:
        await place.run_warm(["-c", SCRIPT.format(script.name)], block.text)


async def run_commands(block: Block, place: Place) -> None:
    assert commands(block), "a block of commands without a command: console blocks start them with `$ `"
    for command in commands(block):
        words = shlex.split(command.line)
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= TARGETS, command.line
        elif "pip" in words and "install" in words:
            assert wrongly_installed(words, EXTRAS) == []
        elif words[0].startswith(".venv/bin/"):
            assert not_there(words) == []
        elif not SETUP.match(command.line) and command.line != ELSEWHERE:
            await run_command(command, block, place)


def not_there(words: list[str]) -> list[str]:
    """Return the tests and the modules that a contributor's command line names and that the checkout does not have."""
    paths = [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
    modules = [word for flag, word in pairwise(words) if flag == "-m" and find_spec(word) is None]
    return paths + modules


async def run_command(command: Command, block: Block, place: Place) -> None:
    """Run one line, with the server in place of every model that it names."""
    line = place.servers.addressed(command.line, place.folder, place.environment(block.text))
    while provided := PROVIDED.match(line):
        line = line.removeprefix(provided[0])
    line = A_URL.sub(rf"\1\2{place.url}/v1", line).replace("--backend local", "--backend openai")
    if "RUN" in line or "TASK" in line:
        run_id, task_id = await last_run(place)
        line = re.sub(r"\bTASK\b", task_id, re.sub(r"\bRUN\b", run_id, line))
    line = re.sub(r"\bPLAN\b", "examples/hello.yaml", line)
    line = PAUSE.sub(SOME_DONE, line)
    if ENDLESS.match(line):
        line += " --help"
    if line.startswith("plait ") and command.line not in COLD and not SHELL.search(line):
        output = await place.run_warm(["-m", *shlex.split(line)], block.text, command.exit_code)
    elif line:
        output = await place.run(["sh", "-c", line], block.text, command.exit_code)
    else:
        return
    if command.shown and block.file not in OF_A_MODEL:
        assert command.is_shown(output, whole=False), f"{block.id}: {command.line}\n{output}"


async def last_run(place: Place) -> tuple[str, str]:
    """The last run in the page's default store and its first task, by way of a run where there is none."""
    async with SQLiteStore(place.folder / ".plait" / "plait.db") as store:
        if not await store.list_runs(1):
            await place.run_warm(["-m", "plait", "run", "examples/hello.yaml"], "")
        run = (await store.list_runs(1))[0]
        return run.run_id, (await store.list_tasks(run.run_id))[0].task_id


def check_data(block: Block, place: Place) -> None:
    data: Any = json.loads(block.text) if block.info == "json" else tomllib.loads(block.text)
    if isinstance(data, dict) and "tasks" in data:
        check_plan(block.text, block.info, place)


def check_toctree(block: Block) -> None:
    """Fail unless each entry is a page, seen from the folder of the page that lists the entries."""
    entries = [line for line in block.text.splitlines() if line and not line.startswith(":")]
    assert entries
    for entry in entries:
        assert ((ROOT / block.file).parent / f"{entry}.md").is_file(), entry


def check_plan(text: str, kind: str, place: Place) -> None:
    load: Callable[[str], Any] = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[kind]
    data = load(text)
    inputs: dict[str, Any] = data.get("inputs") or {}
    needed = {name: "value" for name, value in inputs.items() if value == {"required": True}}
    parse_plan(text, format=kind, folder=place.folder, overrides=needed)


async def check_unit(block: Block, folder: Path) -> None:
    """Fail if systemd finds a mistake, or the program of the service does not take its options."""
    commands = re.findall(r"^ExecStart=/opt/plait/bin/(.+)$", block.text, re.MULTILINE)
    assert len(commands) == 1, "a service of the pages starts one program of /opt/plait/bin"
    scripts = f"{Path(sys.executable).parent}/"
    await anyio.run_process(["sh", "-c", f"{scripts}{commands[0]} --help"])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    unit = folder / "shown.service"
    unit.write_text(block.text.replace("/opt/plait/bin/", scripts), encoding="utf-8")
    found = await anyio.run_process(["systemd-analyze", "verify", str(unit)], stderr=STDOUT, check=False)
    assert (found.returncode, found.stdout.decode()) == (0, "")


async def run_queries(block: Block, path: Path) -> None:
    run_id = await sample_store(path)
    shown = "\n".join(line for line in block.text.splitlines() if not line.startswith("."))
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        for query in filter(str.strip, shown.split(";")):
            connection.execute(query, dict.fromkeys(("run", "run_id"), run_id)).fetchall()


def test_links_lead_somewhere() -> None:
    assert [link for file, text in PAGES.items() for link in broken_links(ROOT, file, text)] == []


def test_every_block_has_a_fence() -> None:
    without = [block for file, text in PAGES.items() for block in indented_blocks(file, text)]
    assert without == [], "put these between fences with an info string, so that they run"


SEARCHED = [
    "durable execution",
    "human-in-the-loop",
    "structured output",
    "retries",
    "rate limits",
    "checkpointing",
    "fan-out",
    "coding agents",
]


def prominent(text: str) -> str:
    """The headings of a page and its first paragraph, in lower case."""
    parts = [part.strip() for part in without_blocks(text).split("\n\n") if part.strip()]
    first = next(part for part in parts if part[0] not in "#!|<`")
    return "\n".join([*(part for part in parts if part.startswith("#")), " ".join(first.split())]).lower()


@pytest.mark.parametrize("word", SEARCHED)
def test_words_that_users_search_for_are_prominent(word: str) -> None:
    """Search engines, and readers, look at headings and first paragraphs."""
    guides = {file: text for file, text in PAGES.items() if file.startswith("docs/")}
    assert [file for file, text in guides.items() if word in prominent(text)] != []
    assert word in PAGES["docs/concepts.md"].lower()


def test_a_word_in_the_middle_of_a_page_is_not_prominent() -> None:
    page = (
        "# A title\n\n![a picture](x.svg)\n\nThe first\nparagraph.\n\nLater.\n\n```sh\n\n# no heading\n```\n\n## End\n"
    )
    assert prominent(page) == "# a title\n## end\nthe first paragraph."


async def test_the_files_of_the_tutorial_are_the_example(tmp_path: Path) -> None:
    page = [block for block in BLOCKS if block.file == "docs/tutorial.md"]
    rows = next(block for block in page if "> reviews.csv" in block.text)
    await anyio.run_process(["sh", "-c", rows.text], cwd=tmp_path)
    shown = {block.name: block.text for block in page if block.name}
    shown["reviews.csv"] = (tmp_path / "reviews.csv").read_text(encoding="utf-8")
    for file in sorted((ROOT / "examples" / "reviews").iterdir()):
        if file.is_file():
            assert shown[file.name] == file.read_text(encoding="utf-8")


def test_every_page_is_on_the_site() -> None:
    listed = re.findall(r"^[\w/-]+$", "".join(b.text for b in BLOCKS if b.info == "{toctree}"), re.MULTILINE)
    assert {f"docs/{name}.md" for name in listed} == PAGES.keys() - {"README.md", "CONTRIBUTING.md", "docs/index.md"}


def test_the_variables_that_the_page_names_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`[A-Z_]+`[^|]*)\|", PAGES["docs/reference/configuration.md"], re.MULTILINE)
    named = set(re.findall(r"`([A-Z_]+)`", " ".join(rows)))
    folders = ("runner", "backends", "persistence")
    code = "".join(p.read_text(encoding="utf-8") for name in folders for p in (ROOT / name).rglob("*.py"))
    assert {name for name in named if f'"{name}"' not in code} == set()
    models = {name for kind in (AnthropicBackend, OpenAIBackend) for name in (kind.api_key_env, kind.url_env)}
    agents = {name for one in AGENTS if one.backend for name in (*one.login.keys, one.login.folder[0])}
    read = set(re.findall(r'environ\.get\("([A-Z_]+)"', code))
    assert read | models | agents | set(_HEADERS) | OpenAIBackend.named_headers.keys() <= named


PAGE = """# T
```sh
# a comment
make demo
plait run x \\
  -j 2  # exits with 1
```
- a list

  ~~~python
  # a.py
  1
  ~~~
"""


def test_blocks_are_found_where_they_are() -> None:
    shell, script = blocks("a.md", PAGE)
    assert commands(shell) == [Command("make demo", 0), Command("plait run x -j 2", 1)]
    assert (script.id, script.info, script.name, script.text) == ("a.md:10", "python", "a.py", "# a.py\n1\n")
    console = Block("a.md", 1, "console", "$ plait --version\nplait 0.1.0\n$ plait runs\n")
    assert commands(console) == [Command("plait --version", 0, "plait 0.1.0"), Command("plait runs", 0)]
    with pytest.raises(ValueError, match=r"a\.md:1: the block is not closed"):
        blocks("a.md", "```python\n1\n")
    assert broken_links(ROOT, "README.md", "[a](docs/nowhere.md) [b](#nothing) [c](https://example.org)") == [
        "README.md: docs/nowhere.md",
        "README.md: #nothing",
    ]
    assert indented_blocks("a.md", PAGE + "\n- b\n\n      more of b\n\nText.\n\n    code\n") == ["a.md:21"]


WRONG = {
    "python": "import plait\nplait.Nothing",
    "sh": "true\nfalse",
    "console": "plait --version",
    "yaml": "tasks: [{id: a, prompt: '{{ b }}'}]",
    "yaml fragment": "a: [",
    "json": '{"tasks": []}',
    "toml": "a = ",
    "sql": "SELECT nothing FROM runs",
    "ini": "[Service]\nExecStart=/opt/plait/bin/plait worker --slots 4\n",
    "mermaid": "picture\n",
    "{toctree}": ":hidden:\nnowhere",
    "python fragment": "1",
    "": "1",
}


@pytest.mark.parametrize("block", [Block("README.md", 0, "", "")])
async def test_a_wrong_block_fails(block: Block, place: Place, tmp_path: Path) -> None:
    passed: list[str] = []
    for info, text in WRONG.items():
        with suppress(Exception, pytest.fail.Exception):
            await check_block(Block(block.file, 0, info, text), place, tmp_path)
            passed.append(info)
    assert passed == []


@pytest.mark.parametrize(
    "line",
    [
        "make dinner",
        ".venv/bin/python -m pytest tests/attic",
        ".venv/bin/python -m attic",
        "pip install '.[cloud]'",
        "pip install flask",
        "pip install plait",
    ],
)
async def test_a_wrong_setup_line_fails(line: str) -> None:
    block = Block("README.md", 0, "sh", line + "\n")
    with pytest.raises(AssertionError):
        await run_commands(block, Place(Path(), ""))
