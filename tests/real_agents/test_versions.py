"""The versions that are tested are those that plait knows and its page on agents shows."""

from __future__ import annotations

import re
from pathlib import Path

from plait.backends.agents.agent_catalog import AGENTS
from tests.real_agents.install import known

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def shown(agents: list[str]) -> dict[str, str]:
    """What the row "tested with" says below each agent of that one, whichever the words are that name them."""
    table = rows()
    for begin, row in enumerate(table):
        cells = {name: at for at, cell in enumerate(row) for name in re.findall(r"[\w-]+", cell) if name in agents}
        if cells.keys() == set(agents):
            tested = next(row for row in table[begin:] if row[0] == "tested with")
            return {name: tested[at] for name, at in cells.items()}
    raise AssertionError(f"no row of {PAGE.name} names {', '.join(agents)}")


def test_what_is_tested_is_what_is_known() -> None:
    installed = {cli.command: cli.version for cli in known().values()}
    assert {one.name: one.tested[-1] for one in AGENTS} == {one.name: installed[one.program] for one in AGENTS}


def test_the_page_shows_the_versions_of_agents_with_a_backend_of_their_own() -> None:
    own = [one for one in AGENTS if one.backend]
    told = shown([one.name for one in own])
    assert {name: re.findall(r"[\d.]+", cell) for name, cell in told.items()} == {
        one.name: list(reversed(one.tested)) for one in own
    }


def test_the_page_shows_the_versions_of_agents_that_speak_acp() -> None:
    speaking = [one for one in AGENTS if not one.backend]
    told = shown([one.name for one in speaking])
    assert told == {one.name: one.tested[-1] for one in speaking}
