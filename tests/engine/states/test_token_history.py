"""Tests remembered tokens: exact where the text goes on, plain tokenisation where it does not."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.engine.states.prompt import TokenHistory

# A toy vocabulary: bytes, and pairs of equal bytes as one token (256 + byte), which the tokenizer prefers.


def piece(token: int) -> bytes:
    return bytes([token]) if token < 256 else bytes([token - 256]) * 2


def tokenize(text: bytes, at_start: bool) -> list[int]:
    tokens, i = [], 0
    while i < len(text):
        if text[i : i + 1] == text[i + 1 : i + 2]:
            tokens.append(256 + text[i])
            i += 2
        else:
            tokens.append(text[i])
            i += 1
    return tokens


def encode(memory: TokenHistory, text: bytes) -> list[int]:
    return memory.encode(text, tokenize, piece)


def test_nothing_known() -> None:
    assert encode(TokenHistory(), b"aab") == [256 + 97, 98]


def test_goes_on_from_what_the_model_wrote() -> None:
    memory = TokenHistory()
    prompt = encode(memory, b"xaa:")
    memory.record(b"xaa:", prompt, [98, 98, 99], piece)  # "bbc" in an unusual way
    assert encode(memory, b"xaa:bbc\nzz") == [*prompt, 98, 98, 99, 10, 256 + 122]
    # An answer that was cut short or trimmed keeps the tokens that are whole.
    assert encode(memory, b"xaa:bb!") == [*prompt, 98, 98, 33]
    # An edit before the answer takes nothing over.
    assert encode(memory, b"xab:bbc") == [120, 97, 98, 58, 256 + 98, 99]


def test_several_turns() -> None:
    memory = TokenHistory()
    text = b"q:"
    tokens = encode(memory, text)
    memory.record(text, tokens, [98, 98], piece)
    text2 = b"q:bb|q:"
    tokens2 = encode(memory, text2)
    assert tokens2 == [*tokens, 98, 98, *b"|q:"]
    memory.record(text2, tokens2, [99, 99], piece)
    assert encode(memory, b"q:bb|q:cc|") == [*tokens2, 99, 99, 124]
    # The second question edited: the first answer is still exact.
    assert encode(memory, b"q:bb|rr:") == [*tokens, 98, 98, 124, 256 + 114, 58]
    # The second answer regenerated.
    memory.record(text2, tokens2, [100], piece)
    assert encode(memory, b"q:bb|q:d|") == [*tokens2, 100, 124]


def test_a_tokenizer_that_adds_a_space_is_not_trusted_with_the_rest() -> None:
    def spacing(text: bytes, at_start: bool) -> list[int]:
        return [32, *tokenize(text, at_start)]

    memory = TokenHistory()
    memory.record(b"q", spacing(b"q", True), [98, 98], piece)
    assert memory.encode(b"qbbx", spacing, piece) == [32, 113, 256 + 98, 120]
    assert memory.encode(b"qbb", spacing, piece) == [32, 113, 98, 98]


texts = st.binary(max_size=12).map(lambda b: bytes(97 + x % 3 for x in b))
answers = st.lists(st.sampled_from([97, 98, 99, 256 + 97, 256 + 98]), max_size=8)


@given(st.lists(st.tuples(st.integers(0, 40), texts, answers), min_size=1, max_size=6))
def test_tokens_always_spell_the_text(turns: list[tuple[int, bytes, list[int]]]) -> None:
    memory = TokenHistory()
    for keep, added, answer in turns:
        text = memory.text[:keep] + b"?" + added
        tokens = encode(memory, text)
        assert b"".join(map(piece, tokens)) == text
        shared = memory.shared(text)
        assert text[:shared] == memory.text[:shared]
        memory.record(text, tokens, answer, piece)
        assert memory.cut_bytes == sorted(memory.cut_bytes) and memory.cut_tokens == sorted(memory.cut_tokens)
        assert memory.text == text + b"".join(map(piece, answer))
        assert encode(memory, memory.text) == [*tokens, *answer]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=TokenHistory) == memory
