from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.protocol.messages import TextDelta


def streaming(piece: Callable[[int], bytes], **more: float) -> tuple[TextStream, list[TextDelta]]:
    deltas: list[Any] = []
    return TextStream(1, deltas.append, piece, ReasoningSplitter(), (), 0.0, **more), deltas  # type: ignore[arg-type]


def decode(pieces: list[bytes]) -> list[str]:
    """Return the text emitted with each token, and at the end."""
    stream, events = streaming(pieces.__getitem__)
    texts: list[str] = []

    def take() -> None:
        texts.append("".join(event.text for event in events))
        events.clear()

    for token in range(len(pieces)):
        stream.feed(token, float(token))
        take()
    stream.finish(float(len(pieces)), stopped=False)
    take()
    return texts


@given(st.lists(st.binary(max_size=5)))
def test_any_pieces_decode_like_all_the_bytes_at_once(pieces: list[bytes]) -> None:
    # White space at the start could still belong to a marker: a letter decides that it does not.
    assert "".join(decode([b"x", *pieces])) == "x" + b"".join(pieces).decode("utf-8", errors="replace")


def test_a_character_appears_when_its_last_byte_comes() -> None:
    face = "🙂".encode()
    assert decode([face[:1], face[1:3], face[3:] + b"!"]) == ["", "", "🙂!", ""]


@given(st.lists(st.binary(max_size=4), max_size=20), st.integers(1, 5))
def test_deltas_say_how_much_of_their_text_each_token_gave(pieces: list[bytes], every: int) -> None:
    stream, events = streaming([b"x", *pieces].__getitem__)
    for token in range(len(pieces) + 1):
        stream.feed(token, 0.01 * (token // every))
    stream.finish(1.0, stopped=False)
    assert sum(delta.n_tokens for delta in events) == len(pieces) + 1
    for delta in events:
        assert len(delta.lengths) == delta.n_tokens
        assert not delta.n_tokens or sum(delta.lengths) == len(delta.text)


def test_the_first_text_comes_at_once_and_the_next_when_it_was_asked_for() -> None:
    stream, events = streaming(lambda token: b"x", frame_seconds=1.0)
    for tick in range(8):
        stream.feed(tick, 0.3 * tick)
    assert [event.predicted_n for event in events] == [1, 5]
