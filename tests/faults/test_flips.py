"""Bits flipped anywhere in a database and its log (tests/faults/campaigns/flips.py): some cases, and planted bugs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaigns import flips
from tests.faults.campaigns.flips import BUGS, Images

pytestmark = pytest.mark.slow

CASES = (*range(60), 2726, 5484, 6020, 6988, 9922)
"""The first cases, and cases that once were wrong."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images.made(tmp_path_factory.mktemp("images"))


def test_no_flipped_bit_changes_the_work_or_a_text_in_silence(images: Images) -> None:
    outcomes = set[str]()
    for case in CASES:
        wrong, outcome = flips.play_case(images, case)
        assert wrong == []
        outcomes.add(outcome)
    assert outcomes == {"reported", "without effect"}, "the cases show too little"


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, images: Images) -> None:
    assert flips.is_caught(bug, images)


def flipped(images: Images, tmp_path: Path, text: bytes) -> Path:
    """A copy of the closed file with a flipped bit in the first byte of `text`."""
    path = tmp_path / "runs.db"
    content = (images.folder / "closed" / flips.FILE).read_bytes()
    path.write_bytes(content)
    path.chmod(0o600)
    flips.flip(path, content.index(text), 8)
    return path
