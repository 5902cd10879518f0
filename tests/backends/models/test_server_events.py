"""The decoder of server-sent events: the format, and pieces cut anywhere."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.models.http_client import EventDecoder, ServerEvent


def decode(*pieces: bytes) -> list[ServerEvent]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)] + decoder.end()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [("", b"a"), ("", b"b")]),
        (b"event: ping\ndata: {}\n\ndata: x\n\n", [("ping", b"{}"), ("", b"x")]),
        (b"data: a\ndata: b\n\n", [("", b"a\nb")]),
        (b"data:a\n\ndata:  b\n\n", [("", b"a"), ("", b" b")]),
        (b"data: a: b\n\n", [("", b"a: b")]),
        (b": a comment\n\nid: 3\nretry: 9\ndata: a\n\n", [("", b"a")]),
        (b"event: lonely\n\ndata: a\n\n", [("", b"a")]),
        (b"data\n\n", [("", b"")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [("", b"a"), ("", b"b")]),
        (b"data: a\r\ndata: b\r\n\r\n", [("", b"a\nb")]),
        (b"data: a\r\rdata: b\r\r", [("", b"a"), ("", b"b")]),
        (b"data: a\n\n\n\ndata: b", [("", b"a"), ("", b"b")]),
        (b"data: \xe2\x80\xa8\x0b\x0c\x1c\xc2\x85\n\n", [("", b"\xe2\x80\xa8\x0b\x0c\x1c\xc2\x85")]),
        (b"", []),
        (b"<html>\n\n", []),
    ],
)
def test_events_of_a_stream(stream: bytes, events: list[tuple[str, bytes]]) -> None:
    assert decode(stream) == events
    assert decode(*(stream[i : i + 1] for i in range(len(stream)))) == events, "byte by byte"


LINE = st.sampled_from([b"data: x", b"data:", b"event: e", b": c", b"", b"", b"data: \xc3\xa9"])
END = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(LINE, END), max_size=20), st.lists(st.integers(0, 200), max_size=6))
def test_cuts_change_nothing(lines: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in lines)
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    assert decode(*(stream[a:b] for a, b in pairwise(places))) == decode(stream)


def test_an_event_is_there_as_soon_as_it_is_complete() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\ndata: b\r\n\r") == [("", b"a"), ("", b"b")]
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"data: c\n\n") == [("", b"c")]


def test_an_empty_piece_within_a_line_end_changes_nothing() -> None:
    assert decode(b"data: a\r", b"", b"\ndata: b\r\n\r\n") == [("", b"a\nb")]


def test_the_pieces_of_a_large_event_are_joined_once() -> None:
    """To join them with each new piece would copy all of the event each time."""
    decoder, piece, pieces = EventDecoder(), b"x" * 1000, 4000
    decoder.feed(b"data: ")
    tracemalloc.start()
    try:
        for _ in range(pieces):
            decoder.feed(piece)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(kept, most) < len(piece) * pieces / 10
    assert decoder.feed(b"\n\n")[0].data == piece * pieces
