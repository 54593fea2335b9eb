from hypothesis import given
from hypothesis import strategies as st

from cpuchat.engine.text.detokenizer import Detokenizer


def decode(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(lambda token: pieces[token])
    return [detokenizer.feed(token) for token in range(len(pieces))] + [detokenizer.flush()]


@given(st.lists(st.binary(max_size=5)))
def test_any_pieces_decode_like_all_the_bytes_at_once(pieces):
    assert "".join(decode(pieces)) == b"".join(pieces).decode("utf-8", errors="replace")


@given(st.text())
def test_characters_never_split(text):
    assert "\ufffd" not in "".join(decode([bytes([b]) for b in text.encode("utf-8", "ignore")])) or "\ufffd" in text


def test_a_character_appears_when_its_last_byte_comes():
    face = "🙂".encode()
    assert decode([face[:1], face[1:3], face[3:] + b"!"]) == ["", "", "🙂!", ""]


def test_an_unfinished_character_is_not_lost_and_does_not_leak_into_the_next_text():
    pieces = [b"a\xf0\x9f", b"b"]
    detokenizer = Detokenizer(lambda token: pieces[token])
    assert detokenizer.feed(0) + detokenizer.flush() == "a\ufffd"
    assert detokenizer.feed(1) == "b"


def test_a_piece_is_asked_for_once():
    asked = []

    def piece_of(token: int) -> bytes:
        asked.append(token)
        return b"x"

    detokenizer = Detokenizer(piece_of)
    assert "".join(detokenizer.feed(7) for _ in range(3)) == "xxx"
    assert asked == [7]
