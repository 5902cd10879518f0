"""Checksums cover what belongs to them, and are the same for a text in pieces. Large texts have a key."""

from __future__ import annotations

from hashlib import sha256
from zlib import crc32

import pytest

from plait.persistence.tables import SHORT, checksum, damaged, digest

LARGE_SIZES = [SHORT - 1, SHORT, SHORT + 1, 2 * SHORT, 2 * SHORT + 1, 5 * SHORT + 3]


@pytest.mark.parametrize("size", [0, 10, *LARGE_SIZES])
def test_a_checksum_is_that_of_the_owner_and_the_texts_whatever_their_size(size: int) -> None:
    text = "é" * size
    assert checksum("a", text) == crc32(f"a\0{text}".encode())
    assert checksum("a", text, "more") == crc32(f"a\0{text}\0004\0more".encode())
    assert checksum("a", "text", text) == crc32(f"a\0text\0{size}\0{text}".encode())
    assert checksum("a", None, text) == crc32(f"a\0None\0{size}\0{text}".encode())


def test_a_text_that_moves_from_one_part_into_the_next_has_another_checksum() -> None:
    assert len({checksum("a", "bc"), checksum("ab", "c"), checksum("a", "b", "c"), checksum("a", "", "bc")}) == 4


@pytest.mark.parametrize(("character", "limit"), [("x", 65_536), ("é", 32_768), ("\U0001f311", 16_384)])
def test_a_text_of_more_than_64_kib_has_a_key(character: str, limit: int) -> None:
    assert digest(character * limit) is None
    for size in (limit + 1, 3 * limit):
        assert digest(character * size) == sha256((character * size).encode()).digest()


def test_damage_is_told_with_what_to_do() -> None:
    assert str(damaged("run-1", "its row")) == (
        "run 'run-1' is damaged: its row does not fit its checksum; restore a copy of the store, or start a new run"
    )
